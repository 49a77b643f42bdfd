import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.errors import ConfigError
from earlystop.policy import FIELDS, FieldSpec, Policy, key_of

NUMERIC = [name for name, spec in FIELDS.items() if spec.type in ("int", "number", "flag")]
HUGE = pytest.param(10**5000, id="more digits than Python prints")
TEXTUAL = [name for name in FIELDS if name not in NUMERIC]


def allowed(spec: FieldSpec) -> st.SearchStrategy:
    if spec.type == "flag":
        return st.sampled_from([0, 1])
    if spec.type == "choice":
        return st.sampled_from(spec.choices)
    if spec.type == "text":
        return st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=40)
    if spec.type == "int":
        return st.integers(int(spec.low), int(spec.high))
    return st.floats(spec.low, spec.high, exclude_min=spec.open_low)


policies = st.fixed_dictionaries({}, optional={name: allowed(spec) for name, spec in FIELDS.items()})


@given(policies)
def test_keys_and_policy_are_inverse_and_json_safe(fields):
    """What a policy becomes on the wire gives the same policy back, through JSON too."""
    policy = Policy(**fields)
    keys = policy.to_extra_args()
    assert set(keys) == {key_of(name) for name in fields}
    back = Policy.from_extra_args(json.loads(json.dumps(keys)))
    assert back == (policy if fields else None)
    assert hash(back or Policy()) == hash(policy)


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("value", ["abc", "1", -5, 1e30, math.nan, math.inf, -math.inf, [1], {}, True, False, HUGE])
def test_a_bad_number_is_refused_by_name(name, value):
    """Every numeric key refuses what is no number in its range, and the message names the key and what is allowed."""
    with pytest.raises(ConfigError, match="allowed") as caught:
        Policy.from_extra_args({key_of(name): value})
    assert caught.value.field == name
    assert key_of(name) + "=" in str(caught.value)


@pytest.mark.parametrize("name", TEXTUAL)
@pytest.mark.parametrize("value", ["", 1, 0.5, True, [], {}, "x" * 5000, "a\nb", b"off"])
def test_a_bad_text_is_refused_by_name(name, value):
    """Every textual key refuses what is no short printable string."""
    with pytest.raises(ConfigError, match="allowed") as caught:
        Policy.from_extra_args({key_of(name): value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", [name for name, spec in FIELDS.items() if spec.type == "int"])
def test_a_fraction_is_no_count(name):
    """A count is a whole number, and 2.0 is none."""
    with pytest.raises(ConfigError, match="whole number"):
        Policy(**{name: 2.0})


def test_a_flag_says_how_to_write_it():
    """`true` for a flag is refused with what to write instead."""
    with pytest.raises(ConfigError, match="write 1 for true"):
        Policy(adapt=True)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("earlystop_budgte", "earlystop_budget"), ("earlystop_policy", "earlystop"), ("earlystop-task", "earlystop_task")],
)
def test_an_unknown_key_is_refused_with_the_likely_one(key, meant):
    """A typo in one of our keys is never silently ignored."""
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        Policy.from_extra_args({key: 1})


@pytest.mark.parametrize("extra_args", [None, {}, {"kv_transfer_params": {}, "budget": -1, 5: 6, "x_earlystop": 1}])
def test_other_peoples_keys_are_ignored(extra_args):
    """Without a key of ours there is no policy."""
    assert Policy.from_extra_args(extra_args) is None


def test_zero_is_not_none():
    """A budget of zero is real, a budget of None was not given."""
    assert Policy(budget=0).to_extra_args() == {"earlystop_budget": 0}
    assert Policy(budget=None).to_extra_args() == {}
    assert Policy.from_extra_args({"earlystop_budget": None}) == Policy()


def test_numpy_scalars_become_plain_numbers():
    """Values computed with numpy travel as JSON numbers."""
    policy = Policy(budget=np.float32(4.5), patience=np.int64(3))
    assert policy.to_extra_args() == {"earlystop_budget": 4.5, "earlystop_patience": 3}
    assert type(policy.patience) is int


def test_a_policy_cannot_be_changed():
    """A policy is a value: frozen, usable as a key."""
    policy = Policy(policy="classic")
    with pytest.raises(AttributeError):
        policy.budget = 3
    assert len({policy, Policy(policy="classic")}) == 1


def test_the_request_goes_over_the_base():
    """`over` keeps what was given and takes the rest."""
    assert Policy(budget=0).over(Policy(budget=5, task="math")) == Policy(budget=0, task="math")


def test_serving_keys_are_refused_without_the_middleware():
    """A key that nobody acts on names the command that would."""
    with pytest.raises(ConfigError, match=r"earlystop_resume.*earlystop serve"):
        Policy(resume=1).refuse_serving_fields()
    Policy(budget=1).refuse_serving_fields()


def test_every_field_has_a_range():
    """The table of ranges and the record name the same fields."""
    assert set(FIELDS) == set(Policy.__struct_fields__)


def test_an_unknown_field_in_stored_json_is_refused():
    """A policy inside a profile file forbids fields that do not exist."""
    with pytest.raises(msgspec.ValidationError, match="budgte"):
        msgspec.json.decode('{"budgte": 1}', type=Policy)
