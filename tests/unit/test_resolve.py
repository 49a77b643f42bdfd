import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.config import Config
from earlystop.errors import ConfigError
from earlystop.policy import PRESETS, Policy
from earlystop.resolve import is_audited, resolve

from .profiles import REFERENCES, SCORE, SERVED, cell, certified, references_only

NONE = Config()
OTHER = msgspec.structs.replace(SERVED, weights_hash="another model")


def test_nothing_asked_is_off():
    """Without keys and server default a request is left alone; its own `off` beats the server's default."""
    assert resolve(None, NONE, {}, SERVED) is None
    assert resolve(Policy(id="a", task="math"), NONE, {}, SERVED) is None
    assert resolve(Policy(policy="off", budget=3), Config(server=Policy(policy="classic")), {}, SERVED) is None


def test_disabled_is_off_for_everybody():
    """EARLYSTOP_DISABLE=1 beats whatever a request asks for."""
    assert resolve(Policy(policy="classic"), Config(disabled=True), {}, SERVED) is None
    assert resolve(Policy(policy="nonsense"), Config(disabled=True), {}, SERVED) is None


def test_keys_that_would_do_nothing_are_refused():
    """A budget without any policy is never silently ignored."""
    with pytest.raises(ConfigError, match=r"earlystop_budget.*earlystop=classic"):
        resolve(Policy(budget=100), NONE, {}, SERVED)
    assert resolve(Policy(budget=100), Config(server=Policy(policy="classic")), {}, SERVED).budget == 100


def test_classic_is_the_published_rule_set_to_the_digit():
    """With references every published number is there."""
    r = resolve(Policy(policy="classic"), NONE, {"p": references_only()}, SERVED)
    assert (r.mode, r.confidence_floor, r.similarity, r.warn_at, r.adapt) == ("active", 0.5, 0.95, 0.8, True)
    assert (r.adapt_window, r.min_tokens, r.window, r.novelty, r.patience) == (100, 64, 32, 0.1, 2)
    assert (r.grace, r.hard_grace, r.answer_room, r.budget) == (64, 2048, 256, None)
    assert (r.references, r.profile, r.repetition, r.score) == (REFERENCES, "p", True, None)
    assert r.guarantee is None
    assert r.warnings == ()


def test_classic_without_references_keeps_its_cosine_only():
    """Confidence and adaptation need a reference; similarity does not."""
    r = resolve(Policy(policy="classic"), NONE, {}, SERVED)
    assert (r.confidence_floor, r.adapt, r.similarity, r.references, r.profile) == (None, False, 0.95, None, None)
    assert r.warnings == ()


def test_classic_says_when_a_configured_profile_does_not_fit():
    """A profile for another model is no error: its rules rest, with a warning."""
    r = resolve(Policy(policy="classic"), NONE, {"p": references_only()}, OTHER)
    assert (r.confidence_floor, r.similarity, r.profile) == (None, 0.95, None)
    assert "weights differ" in r.warnings[0]


@pytest.mark.parametrize("identity", [OTHER, None])
@pytest.mark.parametrize("name", ["balanced", "aggressive", "p"])
def test_an_uncalibrated_model_gets_its_budget_only(name, identity):
    """Thresholds made on another model stop nothing; the budget binds and the user is told."""
    r = resolve(Policy(policy=name, budget=50), NONE, {"p": certified()}, identity)
    assert (r.mode, r.budget, r.signal_rules, r.adapt, r.guarantee) == ("active", 50, False, False, None)
    assert "budget only" in r.warnings[0]
    assert "profile p" in r.no_guarantee


def test_balanced_without_any_profile_is_budget_only():
    """Nobody's taste stands in for a certificate."""
    r = resolve(Policy(policy="balanced"), NONE, {}, SERVED)
    assert (r.signal_rules, r.answer_room, r.audit) == (False, 0, 0)
    assert r.warnings == (
        "balanced has no certified profile that fits (no certified profile is configured): budget only",
    )


@pytest.mark.parametrize(("name", "loss"), [("balanced", 0.01), ("aggressive", 0.05), ("p", 0.01)])
def test_a_certified_profile_brings_its_cell(name, loss):
    """The preset's loss picks the cell, and everything in it counts."""
    profile = certified()
    wanted = profile.tasks["default"].cell(loss)
    r = resolve(Policy(policy=name), NONE, {"p": profile}, SERVED)
    assert (r.max_loss, r.patience, r.budget, r.score) == (loss, wanted.patience, wanted.budget, SCORE)
    assert (r.confident_threshold, r.hopeless_threshold, r.grace) == (0.9, 0.1, 32 if loss == 0.01 else 64)
    assert (r.confidence_floor, r.similarity, r.audit) == (None, None, 0.01)
    assert r.guarantee["max_loss"] == loss
    assert r.guarantee["profile"] == "p"
    assert (r.no_guarantee, r.warnings) == (None, ())


def test_a_certified_profile_is_preferred_over_one_with_references_only():
    """Where several fit, the one that can certify is used."""
    r = resolve(Policy(policy="balanced"), NONE, {"a": references_only(), "b": certified()}, SERVED)
    assert r.profile == "b"


def test_a_profile_whose_certificate_does_not_fit_lends_its_references():
    """Another max_tokens voids the certificate, not what is normal for the model."""
    r = resolve(
        Policy(policy="balanced", budget=9), NONE, {"p": certified()}, msgspec.structs.replace(SERVED, max_tokens=9)
    )
    assert (r.signal_rules, r.references, r.adapt) == (False, REFERENCES, True)
    assert "max_tokens differs" in r.warnings[0]


def test_a_loss_off_the_grid_takes_the_next_smaller_one():
    """max_loss is a dial over what is certified."""
    assert resolve(Policy(policy="balanced", max_loss=0.04), NONE, {"p": certified()}, SERVED).max_loss == 0.01
    assert resolve(Policy(policy="balanced", max_loss=0.07), NONE, {"p": certified()}, SERVED).max_loss == 0.05


@pytest.mark.parametrize("profiles", [{}, {"p": references_only()}, {"p": certified()}])
def test_a_loss_that_nobody_certified_is_refused(profiles):
    """Below the grid, or without any, the request is refused with what there is."""
    with pytest.raises(ConfigError, match="is not certified") as caught:
        resolve(Policy(policy="balanced", max_loss=0.005), NONE, profiles, SERVED)
    assert caught.value.field == "max_loss"


def test_a_preset_below_the_grid_is_budget_only():
    """Nobody asked for .01 in words, so its absence is a warning."""
    r = resolve(Policy(policy="balanced"), NONE, {"p": certified(cell(0.02))}, SERVED)
    assert (r.signal_rules, r.guarantee) == (False, None)
    assert "certified is 0.02" in r.warnings[0]
    assert resolve(Policy(policy="p"), NONE, {"p": certified(cell(0.02))}, SERVED).max_loss == 0.02


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grace": 0}, "grace"),
        ({"patience": 9}, "patience"),
        ({"similarity": 0.9}, "similarity"),
        ({"confidence_floor": 0.5}, "confidence_floor"),
        ({"budget": 1499}, "budget"),
        ({"answer_room": 1}, "answer_room"),
        ({"budget_scope": "response"}, "budget_scope"),
    ],
)
@pytest.mark.parametrize("where", ["request", "server"])
def test_an_override_voids_the_guarantee(change, named, where):
    """The certificate belongs to the whole policy: whoever changes it, the summary says what."""
    request = Policy(policy="balanced", **(change if where == "request" else {}))
    config = Config(server=Policy(**(change if where == "server" else {})))
    r = resolve(request, config, {"p": certified()}, SERVED)
    assert (r.guarantee, r.no_guarantee) == (None, f"overridden: {named}")


@pytest.mark.parametrize(
    "change",
    [
        {"max_loss": 0.01},
        {"task": "math"},
        {"warn_at": 0.5},
        {"id": "x"},
        {"audit": 0},
        {"budget": 1500},
        {"budget": 9000},
        {"grace": 32},
        {"patience": 3},
    ],
)
def test_what_the_certificate_does_not_depend_on_may_be_given(change):
    """Free keys, a budget no smaller than the certified one, and the certified value itself void nothing."""
    assert resolve(Policy(policy="balanced", **change), NONE, {"p": certified()}, SERVED).guarantee is not None


def test_without_a_certified_budget_any_budget_voids():
    """A cell certified without a budget is not certified with one."""
    r = resolve(Policy(policy="aggressive", budget=10**6), NONE, {"p": certified()}, SERVED)
    assert r.no_guarantee == "overridden: budget"


def test_observe_runs_the_whole_decision_and_touches_nothing():
    """Classic's rules, or the certified ones where a profile has them."""
    r = resolve(Policy(policy="observe"), NONE, {"p": references_only()}, SERVED)
    assert (r.mode, r.confidence_floor, r.similarity, r.repetition, r.answer_room) == ("observe", 0.5, 0.95, True, 0)
    r = resolve(Policy(policy="observe", answer_room=10), NONE, {"p": certified()}, SERVED)
    assert (r.mode, r.confident_threshold, r.similarity, r.answer_room) == ("observe", 0.9, None, 0)
    assert (r.guarantee, r.no_guarantee, r.audited) == (None, "observe stops nothing", False)


def test_precedence_is_request_server_profile_built_in():
    """Field by field, the nearest wins."""
    profiles = {"p": certified(cell(0.01, policy=Policy(grace=1, hard_grace=1, min_tokens=1)))}
    config = Config(server=Policy(policy="balanced", grace=2, hard_grace=2))
    r = resolve(Policy(grace=3), config, profiles, SERVED)
    assert (r.grace, r.hard_grace, r.min_tokens, r.window) == (3, 2, 1, 32)


def test_zero_is_a_budget_and_none_is_none():
    """A budget of 0 survives every layer."""
    assert resolve(Policy(policy="classic", budget=0), Config(server=Policy(budget=5)), {}, SERVED).budget == 0
    assert resolve(Policy(policy="classic"), NONE, {}, SERVED).budget is None


@pytest.mark.parametrize(("max_tokens", "room"), [(None, 256), (16, 4), (1023, 255), (8192, 256), (1, 0)])
def test_room_for_the_answer_follows_max_tokens(max_tokens, room):
    """min(256, max_tokens / 4)."""
    identity = msgspec.structs.replace(SERVED, max_tokens=max_tokens)
    assert resolve(Policy(policy="classic"), NONE, {}, identity).answer_room == room


@pytest.mark.parametrize(("thinks", "scope"), [(True, "thinking"), (False, "response"), (None, "auto")])
def test_auto_scope_follows_the_tokenizer(thinks, scope):
    """Thinking where the tokenizer has thinking tags."""
    identity = msgspec.structs.replace(SERVED, has_thinking=thinks)
    assert resolve(Policy(policy="classic"), NONE, {}, identity).budget_scope == scope
    given_scope = resolve(Policy(policy="classic", budget_scope="response"), NONE, {}, identity).budget_scope
    assert given_scope == "response"


def test_an_unknown_policy_is_refused_with_what_exists():
    """A typo in the preset's name is a 400 with the likely one and the list."""
    with pytest.raises(ConfigError) as caught:
        resolve(Policy(policy="ballanced"), NONE, {"qwen": certified()}, SERVED)
    assert all(word in str(caught.value) for word in ("Did you mean 'balanced'", "qwen", *PRESETS))


def test_an_unknown_policy_observes_where_profiles_cannot_be_verified():
    """A profile known only to the engine cannot be checked at admission."""
    r = resolve(Policy(policy="qwen"), NONE, {}, SERVED, profiles_unverifiable=True)
    assert (r.mode, r.policy) == ("observe", "qwen")
    assert "qwen" in r.warnings[0]


def test_keys_without_effect_are_told():
    """A rule that was asked for and rests is a warning."""
    r = resolve(Policy(policy="classic", confidence_floor=0.7, adapt=1, max_loss=0.5), NONE, {}, SERVED)
    assert [word in " ".join(r.warnings) for word in ("max_loss", "confidence_floor", "adapt")] == [True] * 3
    assert resolve(Policy(policy="classic", confidence_floor=0, adapt=0), NONE, {}, SERVED).warnings == ()


def test_an_unknown_task_does_not_fit():
    """A profile says nothing about a task it was not made for."""
    r = resolve(Policy(policy="classic", task="poetry"), NONE, {"p": references_only()}, SERVED)
    assert (r.references, r.task) == (None, "poetry")


@given(st.text(min_size=1), st.floats(0, 1))
def test_the_audited_share_is_stable_and_nested(stream_id, share):
    """The hash decides, the same each time; a larger share only adds ids; 0 is nobody, 1 is everybody."""
    assert is_audited(stream_id, share) == is_audited(stream_id, share)
    assert not is_audited(stream_id, share) or is_audited(stream_id, min(1, share + 0.1))
    assert not is_audited(stream_id, 0)
    assert is_audited(stream_id, 1)
    assert not is_audited("", 1)


def test_the_audited_share_is_the_share():
    """Of many ids about the asked share is audited."""
    assert 900 < sum(is_audited(f"id-{i}", 0.1) for i in range(10_000)) < 1100


def test_audited_requests_keep_their_rules_on_record():
    """An audited request is active: its budget binds, its signal rules only observe."""
    r = resolve(Policy(policy="balanced", id="a", audit=1), NONE, {"p": certified()}, SERVED)
    assert (r.mode, r.audited, r.confident_threshold) == ("active", True, 0.9)


fields = st.fixed_dictionaries(
    {"policy": st.sampled_from([*PRESETS, "p"])},
    optional={
        "budget": st.floats(0, 1e6),
        "similarity": st.floats(-1, 1),
        "confidence_floor": st.floats(0, 1),
        "adapt": st.sampled_from([0, 1]),
        "audit": st.floats(0, 1),
        "answer_room": st.integers(0, 1000),
        "id": st.just("x"),
    },
)


@given(
    fields,
    fields,
    st.sampled_from([{}, {"p": references_only()}, {"p": certified()}]),
    st.sampled_from([SERVED, OTHER, None]),
)
def test_every_resolution_is_consistent(request_, server, profiles, identity):
    """No combination gives a rule without what it needs, or a guarantee without a fitting cell."""
    profiles = profiles or {"p": references_only(weights_hash="else")}
    r = resolve(Policy(**request_), Config(server=Policy(**server)), profiles, identity)
    if r is None:
        assert request_["policy"] == "off"
        return
    assert r.references is not None or (not r.adapt and r.confidence_floor is None)
    assert (r.score is None) == ((r.confident_threshold, r.hopeless_threshold) == (None, None))
    assert (r.guarantee is None) == (r.no_guarantee is not None)
    assert r.guarantee is None or (r.mode == "active" and identity is SERVED and r.profile == "p")
    assert r.mode == "active" or (r.answer_room == 0 and not r.audited)
    msgspec.json.encode(r)
