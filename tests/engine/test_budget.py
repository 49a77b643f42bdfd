"""Budgets on the real engine, both runners: exact, warned of, and ended gracefully. Every budget here binds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.opted_in import kinds, mixed, run

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

GREEDY = {"temperature": 0.0, "max_tokens": 60}
# The scripted tokenizer has thinking tags, where `auto` would count thinking tokens only.
WHOLE = {"policy": "classic", "budget_scope": "response"}


@pytest.mark.parametrize("budget", [1, 7, 20])
def test_a_budget_without_grace_is_exact(scripted_engine: Engine, scripted: ScriptedModel, budget: int) -> None:
    """With grace 0 the response holds `budget` tokens and the stop token."""
    (out,) = run(scripted_engine, [scripted.prompt("endless")], GREEDY, **WHOLE, budget=budget, grace=0)
    assert out["token_ids"] == [*scripted.plan("endless")[:budget], scripted.ids["eos"]]
    assert out["finish_reason"] == "stop"
    assert out["summary"]["reason"] == "budget"
    assert out["summary"]["tokens"] == budget + 1


def test_a_budget_of_zero_is_the_stop_token_and_none_is_no_budget(
    scripted_engine: Engine, scripted: ScriptedModel
) -> None:
    """0, 1 and absent are three different results."""
    prompt, sampling = scripted.prompt("endless"), {"temperature": 0.0, "max_tokens": 9}
    zero, one, none = mixed(
        scripted_engine,
        [
            (prompt, sampling, {**WHOLE, "budget": 0, "grace": 0}),
            (prompt, sampling, {**WHOLE, "budget": 1, "grace": 0}),
            (prompt, sampling, {"policy": "classic"}),
        ],
    )
    eos, plan = scripted.ids["eos"], scripted.plan("endless")
    assert zero["token_ids"] == [eos]
    assert one["token_ids"] == [plan[0], eos]
    assert none["token_ids"] == plan[:9]
    assert none["summary"]["reason"] is None


def test_the_warning_comes_at_eighty_per_cent_and_once(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """used + cost > 0.8 x budget: token 17 of 20."""
    (out,) = run(scripted_engine, [scripted.prompt("endless")], GREEDY, **WHOLE, budget=20, grace=0)
    assert kinds(out).count("budget_warning") == 1
    warning = next(s for s in out["signals"] if s["kind"] == "budget_warning")
    assert (warning["tokens"], warning["used"], warning["budget"]) == (17, 17.0, 20.0)
    assert kinds(out).index("budget_warning") < kinds(out).index("stop_decided")


def test_the_end_waits_for_a_safe_place_within_the_grace(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Paragraphs of 19 words: a budget of 25 ends after the blank line at token 40."""
    (out,) = run(scripted_engine, [scripted.prompt("fresh")], GREEDY, **WHOLE, budget=25, grace=30)
    assert out["token_ids"] == [*scripted.plan("fresh")[:40], scripted.ids["eos"]]
    assert out["text"].endswith("\n\n")


def test_a_text_without_any_safe_place_ends_with_the_grace(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Newline-free text: at most budget + grace tokens, then the stop token."""
    (out,) = run(scripted_engine, [scripted.prompt("endless")], GREEDY, **WHOLE, budget=10, grace=12)
    assert 10 < len(out["token_ids"]) <= 10 + 12 + 1
    assert out["summary"]["reason"] == "budget"


def test_neighbours_keep_their_own_budgets(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Forced tokens follow their request through a batch that shrinks; plain requests get their whole plan."""
    sampling = {"temperature": 0.0, "max_tokens": 30}
    plan, eos = scripted.plan("endless"), scripted.ids["eos"]
    budgets = [3, None, 9, 5, None, 12]
    outs = mixed(
        scripted_engine,
        [
            (
                scripted.prompt("endless"),
                sampling,
                None if b is None else {**WHOLE, "budget": b, "grace": 0},
            )
            for b in budgets
        ],
    )
    for budget, out in zip(budgets, outs, strict=True):
        expected = plan[:30] if budget is None else [*plan[:budget], eos]
        assert out["token_ids"] == expected, budget


def test_min_tokens_of_the_request_goes_before_our_end(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """vLLM does not hold a forced stop back; we do."""
    sampling = {**GREEDY, "min_tokens": 15}
    (out,) = run(scripted_engine, [scripted.prompt("endless")], sampling, **WHOLE, budget=4, grace=0)
    assert out["token_ids"] == [*scripted.plan("endless")[:15], scripted.ids["eos"]]
    assert "stop_deferred" in kinds(out)


def test_ignore_eos_ends_on_a_stop_id(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Under ignore_eos a forced EOS would leak: the end takes one of the request's stop_token_ids."""
    stop = scripted.ids["reserved_2"]
    sampling = {**GREEDY, "ignore_eos": True, "stop_token_ids": [stop]}
    (out,) = run(scripted_engine, [scripted.prompt("endless")], sampling, **WHOLE, budget=5, grace=0)
    assert out["token_ids"] == [*scripted.plan("endless")[:5], stop]
    assert (out["finish_reason"], out["stop_reason"]) == ("stop", stop)


def test_stop_reason_tells_why_where_reserved_ids_are_listed(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """`attach(tokenizer=)` lists reserved ids; vLLM's own stop_reason then names the one of `budget`."""
    out, codes = scripted_engine.call(with_reserved_ids, scripted.prompt("endless"))
    assert out["token_ids"][:-1] == scripted.plan("endless")[:6]
    assert codes["budget"] == out["stop_reason"] == out["token_ids"][-1]


def with_reserved_ids(llm: object, prompt: list[int]) -> tuple[dict[str, object], dict[str, int]]:
    """Runs inside the engine's process."""
    from vllm import LLM, SamplingParams

    import earlystop
    from earlystop.reserved import reserved_stop_ids

    assert isinstance(llm, LLM)
    tokenizer = llm.get_tokenizer()
    params = earlystop.attach(
        SamplingParams(temperature=0.0, max_tokens=30), **WHOLE, budget=6, grace=0, tokenizer=tokenizer
    )
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    choice = output.outputs[0]
    codes = {str(reason): token for reason, token in reserved_stop_ids(tokenizer).items()}
    return {"token_ids": list(choice.token_ids), "stop_reason": choice.stop_reason}, codes
