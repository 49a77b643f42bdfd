import copy
import json

import numpy as np
import pytest

import earlystop
from earlystop.errors import ConfigError
from earlystop.policy import Policy

from .test_reserved import llama

vllm_params = pytest.importorskip("vllm.sampling_params")
SamplingParams = vllm_params.SamplingParams


def everything():
    return SamplingParams(
        temperature=0.6, top_p=0.9, top_k=5, min_p=0.1, max_tokens=50, min_tokens=2, seed=3, n=2,
        stop=["abc", "de"], stop_token_ids=[5], bad_words=["q"], logit_bias={3: 1.0}, allowed_token_ids=[1, 2, 3],
        logprobs=2, prompt_logprobs=1, prompt_logprob_token_ids=np.array([[1, 2]]), skip_clone=True,
        structured_outputs=vllm_params.StructuredOutputsParams(json={"type": "object"}), thinking_token_budget=9,
        extra_args={"theirs": {"deep": [1]}}, presence_penalty=0.5,
        repetition_detection=vllm_params.RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    )  # fmt: skip


def shown(params, *but):
    return {name: repr(getattr(params, name)) for name in params.__struct_fields__ if name not in but}


def test_everything_but_our_keys_survives_and_nothing_is_changed():
    """Each field, derived ones too, is the same in the new object; the given one is as it was."""
    params = everything()
    before = shown(params)
    new = earlystop.attach(params, "classic", task="math", budget=4096, patience=3)
    assert type(new) is type(params)
    assert shown(params) == before
    assert shown(new, "extra_args") == shown(params, "extra_args")
    stream_id = new.extra_args.pop("earlystop_id")
    assert len(stream_id) == 32
    assert new.extra_args == {
        "theirs": {"deep": [1]},
        "earlystop": "classic",
        "earlystop_task": "math",
        "earlystop_budget": 4096,
        "earlystop_patience": 3,
    }
    json.dumps(new.extra_args)


def test_old_and_new_share_no_mutable_part():
    """Changing the copy's lists later leaves the original alone."""
    params = everything()
    before = shown(params)
    new = earlystop.attach(params, "classic")
    new.extra_args["theirs"]["deep"].append(2)
    new.stop_token_ids.append(6)
    new._all_stop_token_ids.add(6)
    new.structured_outputs.json["x"] = 1
    assert shown(params) == before


def test_an_engine_touched_object_keeps_its_end_tokens():
    """What the engine has derived (EOS) is carried over."""
    params = SamplingParams(stop_token_ids=[5])
    params.update_from_generation_config({"eos_token_id": [7, 8]}, 7)
    new = earlystop.attach(params, "classic")
    assert new._all_stop_token_ids == params._all_stop_token_ids
    assert new._eos_token_id == params._eos_token_id


def test_greedy_and_default_parameters_attach():
    """The plainest parameters work."""
    assert earlystop.attach(SamplingParams(temperature=0), "observe").temperature == 0
    assert earlystop.attach(SamplingParams()).extra_args.keys() == {"earlystop_id"}


def test_arguments_win_over_the_policy_over_existing_keys():
    """The nearest value counts, key by key."""
    params = SamplingParams(extra_args={"earlystop": "observe", "earlystop_budget": 1, "earlystop_grace": 1})
    new = earlystop.attach(params, Policy(policy="classic", budget=2, patience=2), budget=0, id="mine")
    assert new.extra_args == {
        "earlystop": "classic",
        "earlystop_budget": 0,
        "earlystop_grace": 1,
        "earlystop_patience": 2,
        "earlystop_id": "mine",
    }


def test_every_copy_has_a_stream_of_its_own():
    """Ids are fresh, or numbered after the given one."""
    copies = earlystop.attach_each(SamplingParams(), 5, "classic")
    assert len({new.extra_args["earlystop_id"] for new in copies}) == 5
    named = earlystop.attach_each(earlystop.attach(SamplingParams(), "classic", id="job"), 2)
    assert [new.extra_args["earlystop_id"] for new in named] == ["job-0", "job-1"]
    assert earlystop.attach_each(SamplingParams(), 0) == []


@pytest.mark.parametrize("n", [-1, 1.0, True, "2"])
def test_a_wrong_number_of_copies_is_refused(n):
    """`n` is a count."""
    with pytest.raises(ConfigError, match="n="):
        earlystop.attach_each(SamplingParams(), n)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"budget": True}, "earlystop_budget"),
        ({"budget": -1}, "earlystop_budget"),
        ({"adapt": True}, "write 1"),
        ({"budgte": 1}, "did you mean 'budget'"),
        ({"policy": 3}, "policy=3"),
        ({"policy": ""}, "earlystop=''"),
        ({"resume": 1}, "earlystop serve"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, word):
    """The caller hears of a mistake here, not from the engine."""
    with pytest.raises(ConfigError, match=word):
        earlystop.attach(SamplingParams(), **arguments)


def test_bad_existing_keys_are_refused_at_once():
    """A typo in extra_args is found when attaching."""
    with pytest.raises(ConfigError, match="earlystop_budgte"):
        earlystop.attach(SamplingParams(extra_args={"earlystop_budgte": 1}))


@pytest.mark.parametrize("params", [None, {}, vllm_params.BeamSearchParams(beam_width=2, max_tokens=3)])
def test_what_is_no_sampling_params_is_refused(params):
    """Beam search and plain dicts have no single stream to stop."""
    with pytest.raises(ConfigError, match="SamplingParams"):
        earlystop.attach(params, "classic")


def test_a_tokenizer_brings_reason_coded_stop_ids():
    """Unused ids are listed once after the user's own, and derived sets know them."""
    new = earlystop.attach(SamplingParams(stop_token_ids=[5, 139]), "classic", tokenizer=llama())
    assert new.stop_token_ids == [5, 139, *range(138, 123, -1)]
    assert new._all_stop_token_ids == set(new.stop_token_ids)


@pytest.mark.parametrize("policy", ["off", "observe"])
def test_a_policy_that_stops_nothing_reserves_nothing(policy):
    """`observe` and `off` leave the stop ids alone."""
    assert earlystop.attach(SamplingParams(), policy, tokenizer=llama()).stop_token_ids == []


def test_the_engines_own_copy_keeps_the_keys():
    """vLLM clones parameters for each request; our keys go along."""
    new = earlystop.attach(SamplingParams(), "classic")
    assert new.clone().extra_args == new.extra_args
    assert copy.deepcopy(new).extra_args == new.extra_args
