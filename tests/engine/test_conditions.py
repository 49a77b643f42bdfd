"""What engines do to a request besides decoding it: chunks, preemption, drafts, grammars, caching, asynchrony."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.catalogue import CLOSE_TEXT
from support.opted_in import kinds, mixed, run

from engine.test_reasoning import closing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.engines import Engine
    from support.scripted import ScriptedModel

RUNNERS = [pytest.param("v1", id="v1"), pytest.param("v2", id="v2", marks=pytest.mark.v2)]
WHOLE = {"policy": "classic", "budget_scope": "response", "grace": 0}


def config(close_text: str = CLOSE_TEXT) -> dict[str, Any]:
    """`additional_config` with a transition text that the letters-only tokenizer can spell."""
    return {"earlystop": {"engine": {"close_text": close_text}}}


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_prompt_in_chunks_ends_where_it_ends_in_one_piece(
    make_engine: Callable[..., Engine], scripted: ScriptedModel, runner: str
) -> None:
    """B2: sampled tokens of unfinished chunks are thrown away, and move nothing; no statistics come from them."""
    engine = make_engine(
        scripted,
        runner=runner,
        additional_config=config(),
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    sampling = {"temperature": 0.0, "max_tokens": 60}
    outs = run(engine, [scripted.prompt("long_prompt")] * 3, sampling, budget=6, grace=0)
    close = closing(engine)
    for out in outs:
        assert out["token_ids"][: 6 + len(close)] == [*scripted.plan("long_prompt")[:6], *close]
        assert out["summary"]["reason"] == "budget"
        assert kinds(out).count("budget_warning") == 1


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_preempted_requests_keep_budget_and_close(
    make_engine: Callable[..., Engine], scripted: ScriptedModel, runner: str
) -> None:
    """B3: a pool too small for all; budgets stay exact, closing sequences go on where they were, once."""
    engine = make_engine(
        scripted,
        runner=runner,
        additional_config=config("Considering the time I answer now. That is all there is to say."),
        block_size=32,
        num_gpu_blocks_override=12,
        max_model_len=192,
        max_num_seqs=6,
        enable_prefix_caching=False,
    )
    sampling = {"temperature": 0.0, "max_tokens": 150}
    tokens = 40 if runner == "v2" else 60
    requests = [
        (
            scripted.prompt("reasons_long"),
            sampling,
            {"policy": "classic", "budget": tokens, "grace": 0, "answer_room": 0},
        )
    ] * 4
    requests += [(scripted.prompt("endless"), sampling, {**WHOLE, "budget": tokens})] * 2
    outs = mixed(engine, requests)
    close = closing(engine)
    for out in outs[:4]:
        expected = [*scripted.plan("reasons_long")[:tokens], *close]
        assert out["token_ids"][: len(expected)] == expected
        assert scripted.ids["end_think"] not in out["token_ids"][len(expected) :]
        assert kinds(out).count("budget_warning") == 1
    for out in outs[4:]:
        assert out["token_ids"] == [*scripted.plan("endless")[:tokens], scripted.ids["eos"]]
    assert any(out["summary"]["state_rebuilt"] for out in outs), "nothing was preempted: make the pool smaller"


@pytest.mark.v2
@pytest.mark.slow
@pytest.mark.parametrize("budget", [5, 6, 7, 8, 9])
def test_budgets_are_exact_under_drafts(
    make_engine: Callable[..., Engine], scripted: ScriptedModel, budget: int
) -> None:
    """B5, B6: V2 with n-gram drafts; whatever was accepted, the end comes at its token."""
    engine = drafting(make_engine, scripted)
    sampling = {"temperature": 0.0, "max_tokens": 40}
    outs = mixed(
        engine,
        [
            (scripted.prompt("drafted"), sampling, {**WHOLE, "budget": 15 + budget}),
            (scripted.prompt("drafted_thinking"), sampling, {"policy": "classic", "budget": 15 + budget, "grace": 0}),
            (scripted.prompt("drafted"), sampling, None),
        ],
    )
    count, close = 15 + budget, closing(engine)
    plan = scripted.plan("drafted")
    assert outs[0]["token_ids"] == [*plan[:count], scripted.ids["eos"]]
    assert outs[1]["token_ids"][: count + len(close)] == [*plan[:count], *close]
    assert outs[2]["token_ids"] == plan[:40]


@pytest.mark.v2
@pytest.mark.slow
def test_drafts_were_accepted(make_engine: Callable[..., Engine], scripted: ScriptedModel) -> None:
    """The exactness above is about drafts: fewer steps than tokens."""
    steps, tokens = drafting(make_engine, scripted).call(count_steps, scripted.prompt("drafted"))
    assert steps < tokens


def drafting(make_engine: Callable[..., Engine], scripted: ScriptedModel) -> Engine:
    """V2 with four n-gram drafts."""
    return make_engine(
        scripted,
        runner="v2",
        additional_config=config(),
        max_num_seqs=4,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    )


def count_steps(llm: Any, prompt: list[int]) -> tuple[int, int]:
    """Runs inside the engine's process: steps and tokens of one opted-in response."""
    from vllm import SamplingParams

    import earlystop

    params = earlystop.attach(SamplingParams(temperature=0.0, max_tokens=40), "classic")
    engine = llm.llm_engine
    engine.add_request("counted", {"prompt_token_ids": prompt}, params)
    steps, tokens = 0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = len(output.outputs[0].token_ids)
        steps += 1
    return steps, tokens


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_asynchronous_scheduling(make_engine: Callable[..., Engine], scripted: ScriptedModel, runner: str) -> None:
    """B4: on V2 budgets stay exact; V1 hides token ids (-1), is said to, and still binds a length budget."""
    engine = make_engine(
        scripted, runner=runner, additional_config=config(), env={"FORCE_ASYNC_SCHEDULING": "1"}, max_num_seqs=4
    )
    assert engine.facts["async_scheduling"] is True
    sampling = {"temperature": 0.0, "max_tokens": 40}
    outs = run(engine, [scripted.prompt("endless")] * 2, sampling, **WHOLE, budget=9)
    for out in outs:
        assert out["token_ids"][-1] == scripted.ids["eos"]
        assert out["token_ids"][:-1] == scripted.plan("endless")[: len(out["token_ids"]) - 1]
        assert len(out["token_ids"]) == 10
    if runner == "v1":
        assert "asynchronous scheduling" in engine.log()


@pytest.mark.slow
def test_speculation_on_v1_is_refused_loudly(make_engine: Callable[..., Engine], scripted: ScriptedModel) -> None:
    """V1 drops plugins under speculation: a warning at start-up, a refusal for whoever opts in, service for others."""
    from support.engines import EngineCallError

    engine = make_engine(
        scripted,
        runner="v1",
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    )
    assert "drops every plugin" in engine.log()
    with pytest.raises(EngineCallError, match="V2 runner"):
        run(engine, [scripted.prompt("short")], {"temperature": 0.0, "max_tokens": 8}, budget=3)
    (out,) = engine.generate([scripted.prompt("short")], {"temperature": 0.0, "max_tokens": 20})
    assert out["token_ids"] == scripted.expected("short")


def test_a_cached_prefix_changes_nothing(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """The second request reads its prompt from the cache and ends at the same token."""
    sampling = {"temperature": 0.0, "max_tokens": 40}
    first = run(scripted_engine, [scripted.prompt("long_prompt")], sampling, budget=7, grace=0)
    second = run(scripted_engine, [scripted.prompt("long_prompt")], sampling, budget=7, grace=0)
    assert first[0]["token_ids"] == second[0]["token_ids"]
    assert second[0]["token_ids"][7] == closing(scripted_engine)[0]


def test_children_of_one_request_each_have_their_budget(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """n = 3: children share one params object and one stream id; each ends at its own token, and reports itself."""
    sampling = {"temperature": 1.0, "seed": 1, "n": 3, "max_tokens": 20}
    outs = run(scripted_engine, [scripted.prompt("endless")], sampling, **WHOLE, budget=6)
    assert [out["index"] for out in outs] == [0, 1, 2]
    for out in outs:
        assert out["token_ids"] == [*scripted.plan("endless")[:6], scripted.ids["eos"]]
        assert out["summary"]["reason"] == "budget"
        assert kinds(out).count("stop_decided") == 1


def test_a_stop_string_of_the_user_is_not_our_reason(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """vLLM's stop string ends the request; the summary has no reason of ours."""
    sampling = {"temperature": 0.0, "max_tokens": 40, "stop": [" quiet"]}
    (out,) = run(scripted_engine, [scripted.prompt("endless")], sampling, **WHOLE, budget=30)
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", " quiet")
    assert out["summary"]["reason"] is None


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}


def test_a_grammar_is_never_broken(engine: Engine) -> None:
    """B10, B15: a budget that ends inside a JSON object waits; the document parses and nobody gets an error."""
    sampling = {"temperature": 0.0, "max_tokens": 48, "structured_outputs": {"json": SCHEMA}}
    (out,) = run(engine, ["Give me a name as JSON: "], sampling, budget=3, grace=0)
    assert out["finish_reason"] == "stop"
    assert set(json.loads(out["text"])) == {"name"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"earlystop": "classic", "earlystop_budget": "abc"}, "earlystop_budget"),
    ({"earlystop": "classic", "earlystop_budget": -5}, "earlystop_budget"),
    ({"earlystop": "classic", "earlystop_budget": float("nan")}, "earlystop_budget"),
    ({"earlystop": "classic", "earlystop_budget": [1]}, "earlystop_budget"),
    ({"earlystop": "classic", "earlystop_budget": True}, "earlystop_budget"),
    ({"earlystop": "classic", "earlystop_budgt": 5}, "earlystop_budget"),
    ({"earlystop": "clasic"}, "classic"),
    ({"earlystop": "classic", "earlystop_grace": 1e30}, "earlystop_grace"),
    ({"earlystop": "classic", "earlystop_similarity": "high"}, "earlystop_similarity"),
    ({"earlystop": "classic", "earlystop_control": "stop"}, "earlystop_control"),
    ({"earlystop": "classic", "earlystop_resume": 1}, "earlystop serve"),
]


@pytest.mark.parametrize(("extra", "named"), BAD, ids=[str(extra)[:60] for extra, _ in BAD])
def test_a_bad_key_is_refused_by_name_and_the_engine_serves_on(
    scripted_engine: Engine, scripted: ScriptedModel, extra: dict[str, Any], named: str
) -> None:
    """B14: a ValueError at admission (HTTP 400) that names the field; the next request is served."""
    from support.engines import EngineCallError

    with pytest.raises(EngineCallError, match=named) as caught:
        scripted_engine.generate([scripted.prompt("short")], {"max_tokens": 4, "extra_args": extra})
    assert caught.value.kind == "VLLMValidationError"
    (out,) = scripted_engine.generate([scripted.prompt("short")], {"temperature": 0.0, "max_tokens": 20})
    assert out["token_ids"] == scripted.expected("short")


@pytest.mark.slow
def test_tensor_parallel_ranks_decide_alike(make_engine: Callable[..., Engine], smollm2: Path) -> None:
    """B13: every rank samples for itself; one that decided otherwise would hang or fork the first step.

    Three ranks, because SmolLM2 has nine attention heads.
    """
    engine = make_engine(
        smollm2,
        runner="v1",
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1|0"},
        tensor_parallel_size=3,
        distributed_executor_backend="mp",
    )
    prompts = ["Tell me a long story.", "Explain how rain forms."]
    outs = run(engine, prompts, {"temperature": 0.0, "max_tokens": 40, "ignore_eos": False}, budget=12, grace=8)
    for out in outs:
        assert len(out["token_ids"]) <= 12 + 8 + 1


def test_the_tap_works_under_a_foreign_self(scripted_engine: Engine) -> None:
    """vLLM's LoRA wrapper calls the layer class's forward with a self of its own."""
    assert scripted_engine.call(forward_with_foreign_self) == "forwarded"


def forward_with_foreign_self(_: object) -> str:
    """Runs inside the engine's process: the wrapper's own call, on a stand-in for the wrapper."""
    import torch

    from earlystop.engine.tap import TappedLogitsProcessor

    class Wrapper:
        logits_as_input = False
        soft_cap = None
        scale = 1.0

        def _get_logits(self, hidden: torch.Tensor, *_: object) -> torch.Tensor:
            return hidden * 2

    logits = TappedLogitsProcessor.forward(Wrapper(), None, torch.ones(1, 4))  # type: ignore[arg-type]
    return "forwarded" if logits is not None and bool((logits == 2).all()) else repr(logits)
