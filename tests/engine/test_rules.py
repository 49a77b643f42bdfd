"""Convergence, confidence, observation and inertness on the real engine, both runners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.opted_in import kinds, mixed, run

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

GREEDY = {"temperature": 0.0, "max_tokens": 400}


def test_a_looping_text_converges(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Paragraphs that repeat end at the end of one, long before the limit."""
    (out,) = run(scripted_engine, [scripted.prompt("loop")], GREEDY)
    assert out["summary"]["reason"] in ("converged", "repetition")
    assert len(out["token_ids"]) < 200
    assert out["text"].endswith("\n\n")


@pytest.mark.parametrize("key", ["fresh", "enumeration"])
def test_fresh_text_is_left_whole(scripted_engine: Engine, scripted: ScriptedModel, key: str) -> None:
    """New words in every paragraph, even where the hidden states look alike: nothing stops."""
    (out,) = run(scripted_engine, [scripted.prompt(key)], GREEDY)
    assert out["token_ids"] == scripted.expected(key)[:400]
    assert out["summary"]["reason"] is None


def test_observing_stops_nothing_and_says_where_it_would(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """`would_stop` stands where the active policy begins to close."""
    active, observed = mixed(
        scripted_engine,
        [
            (scripted.prompt("loop"), GREEDY, {"policy": "classic"}),
            (scripted.prompt("loop"), GREEDY, {"policy": "observe"}),
        ],
    )
    assert observed["token_ids"] == scripted.expected("loop")[:400]
    assert kinds(observed) == ["would_stop"]
    would = next(s for s in observed["signals"] if s["kind"] == "would_stop")
    assert would["tokens"] == len(active["token_ids"]) - 1
    assert would["reason"] == active["summary"]["reason"]


def test_traces_hold_every_token_and_its_statistics(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Off the bus without loss: every committed token, the scripted top-1, entropy and a defined margin."""
    (out,) = run(scripted_engine, [scripted.prompt("sure")], {"temperature": 0.0, "max_tokens": 50}, policy="observe")
    traces = [s["data"] for s in out["signals"] if s["kind"] == "trace"]
    tokens = [t for trace in traces for t in trace["token"]]
    top1 = [x for trace in traces for x in trace["top1"]]
    assert tokens == out["token_ids"][:-1]  # the worker never learns the last one
    assert traces[-1]["next"][0] == pytest.approx(0.97, abs=1e-3)
    assert top1 == pytest.approx([0.97] * len(top1), abs=1e-3)


@pytest.mark.parametrize("key", ["nan", "one_nan", "plus_inf", "all_minus_inf"])
def test_an_invalid_row_ends_its_request_as_an_error(
    scripted_engine: Engine, scripted: ScriptedModel, key: str
) -> None:
    """B12: not four thousand exclamation marks; the neighbour is untouched."""
    bad, good = mixed(
        scripted_engine,
        [
            (scripted.prompt(key), GREEDY, {"policy": "classic"}),
            (scripted.prompt("short"), GREEDY, {"policy": "classic"}),
        ],
    )
    assert bad["token_ids"] == [*scripted.plan(key)[:4], scripted.ids["eos"]]
    assert bad["summary"]["reason"] == "invalid_logits"
    assert "error" in kinds(bad)
    assert good["token_ids"] == scripted.expected("short")


def test_a_plain_request_beside_opted_in_ones_is_untouched(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Greedy and seeded neighbours of a stopping request give the tokens that they give alone."""
    seeded = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    greedy = {"temperature": 0.0, "max_tokens": 12}
    alone = mixed(scripted_engine, [(scripted.prompt("unsure"), seeded, None)])
    beside = mixed(
        scripted_engine,
        [
            (scripted.prompt("unsure"), seeded, None),
            (
                scripted.prompt("endless"),
                GREEDY,
                {"policy": "classic", "budget_scope": "response", "budget": 5, "grace": 0},
            ),
            (scripted.prompt("short"), greedy, None),
        ],
    )
    assert beside[0]["token_ids"] == alone[0]["token_ids"]
    assert beside[2]["token_ids"] == scripted.expected("short")


def test_an_active_policy_changes_nothing_before_its_stop(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """B17: the same seed gives the same tokens, with a policy that has not fired."""
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    plain, active = mixed(
        scripted_engine,
        [
            (scripted.prompt("unsure"), seeded, None),
            (scripted.prompt("unsure"), seeded, {"policy": "classic", "budget": 1000}),
        ],
    )
    assert active["token_ids"] == plain["token_ids"]
