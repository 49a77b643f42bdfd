"""A reasoning model end to end: close the thinking, then answer; both runners."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.opted_in import kinds, run

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

GREEDY = {"temperature": 0.0, "max_tokens": 200}


def closing(engine: Engine) -> list[int]:
    """What the engine forces to close the thinking."""
    return list(engine.call(closing_sequence))


def closing_sequence(_: object) -> list[int]:
    """Runs inside the engine's process."""
    from earlystop.engine.plugin import live_processors

    return list(live_processors()[0].served.table.sequence)


@pytest.mark.parametrize("budget", [5, 17])
def test_the_thinking_is_closed_once_and_the_answer_follows(
    scripted_engine: Engine, scripted: ScriptedModel, budget: int
) -> None:
    """Thinking tokens up to the budget, the closing sequence exactly once, the model's answer, its own EOS."""
    (out,) = run(scripted_engine, [scripted.prompt("reasons_long")], GREEDY, budget=budget, grace=0)
    thinking = scripted.plan("reasons_long")[:budget]
    tokens, close = out["token_ids"], closing(scripted_engine)
    assert tokens[: budget + len(close)] == [*thinking, *close]
    after = tokens[budget + len(close) :]
    assert after[-1] == scripted.ids["eos"]
    assert scripted.ids["end_think"] not in after
    assert out["summary"]["reason"] == "budget"
    assert kinds(out).count("stop_decided") == 1


def test_a_budget_of_zero_gives_the_end_tag_first(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """The end tag alone is the first token: there is nothing to lead over from."""
    (out,) = run(scripted_engine, [scripted.prompt("reasons_long")], GREEDY, budget=0)
    assert out["token_ids"][0] == scripted.ids["end_think"]
    assert out["summary"]["reasoning_tokens"] == 0


def test_a_natural_end_is_left_alone(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A3: the model closes with its own bare tag within the budget; nothing is ever forced."""
    (out,) = run(scripted_engine, [scripted.prompt("a3_natural_end")], GREEDY, budget=6, grace=0)
    assert out["token_ids"] == scripted.expected("a3_natural_end")
    assert out["summary"]["reason"] is None


def test_nothing_is_forced_into_a_tool_call(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A1: a tool call ends the thinking, its arguments come out whole."""
    (out,) = run(scripted_engine, [scripted.prompt("a1_tool_call")], GREEDY, budget=6, grace=0)
    assert out["token_ids"] == scripted.expected("a1_tool_call")


@pytest.mark.parametrize("key", ["a4_reentry_forced", "a4_reentry_natural"])
def test_a_second_block_counts_into_the_same_budget(scripted_engine: Engine, scripted: ScriptedModel, key: str) -> None:
    """A4: re-entry is seen; thinking stays within the response's budget, and the spent budget closes at once."""
    (out,) = run(scripted_engine, [scripted.prompt(key)], {**GREEDY, "max_tokens": 60}, budget=4, grace=0)
    thinking, inside = 0, True
    for token in out["token_ids"]:
        if token == scripted.ids["think"]:
            inside = True
        elif token == scripted.ids["end_think"]:
            inside = False
        elif inside:
            thinking += 1
    close = closing(scripted_engine)
    assert thinking <= 4 + len(close) - 1
    assert not inside


@pytest.mark.parametrize(("key", "open_"), [("a5_open_after_history", True), ("a5_open_after_end_marks", True)])
def test_the_last_delimiter_of_the_prompt_counts(
    scripted_engine: Engine, scripted: ScriptedModel, key: str, open_: bool
) -> None:
    """A5: history in the prompt does not switch the budget off."""
    (out,) = run(scripted_engine, [scripted.prompt(key)], GREEDY, budget=2, grace=0)
    assert out["token_ids"][:2] == scripted.plan(key)[:2]
    assert (scripted.ids["end_think"] in out["token_ids"]) is open_


def test_thinking_switched_off_by_the_template_is_never_forced(
    scripted_engine: Engine, scripted: ScriptedModel
) -> None:
    """A5, third prompt: closed already, so a thinking budget rests."""
    (out,) = run(scripted_engine, [scripted.prompt("a5_closed")], GREEDY, budget=2, grace=0)
    assert out["token_ids"] == scripted.expected("a5_closed")


def test_an_opener_that_the_model_writes_arms_the_budget(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A6: no tag in the prompt."""
    (out,) = run(scripted_engine, [scripted.prompt("a6_opens_itself")], GREEDY, budget=2, grace=0)
    close = closing(scripted_engine)
    assert out["token_ids"][: 3 + len(close)] == [*scripted.plan("a6_opens_itself")[:3], *close]


def test_eos_inside_the_thinking_becomes_the_end_tag(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A11: never a paid, empty answer."""
    (out,) = run(scripted_engine, [scripted.prompt("a11_eos_in_thinking")], GREEDY, budget=100)
    assert out["token_ids"][:4] == [11, 12, 13, scripted.ids["end_think"]]
    assert len(out["token_ids"]) > 5


def test_a_character_is_never_cut(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A15: budget 3 falls between the bytes of an emoji; the close waits for its end."""
    (out,) = run(scripted_engine, [scripted.prompt("a15_split_character")], GREEDY, budget=3, grace=0)
    assert out["token_ids"][:4] == [11, 12, 30, 31]
    assert out["token_ids"][4] == closing(scripted_engine)[0]
    assert "\ufffd" not in out["text"]


def test_six_blocks_stay_within_one_budget(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """A15: accounting is per response, not per block."""
    (out,) = run(scripted_engine, [scripted.prompt("a15_six_blocks")], GREEDY, budget=5, grace=0)
    assert out["summary"]["reasoning_tokens"] <= 5 + len(closing(scripted_engine))


def test_room_is_kept_for_the_answer(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """Thinking for ever under max_tokens 80: closed for `length_reserve`, with the answer's room left."""
    sampling = {"temperature": 0.0, "max_tokens": 80}
    (out,) = run(scripted_engine, [scripted.prompt("reasons_long")], sampling, budget=10_000, answer_room=20, grace=8)
    tag = out["token_ids"].index(scripted.ids["end_think"])
    assert 80 - tag - 1 >= 20
    assert out["token_ids"][-1] == scripted.ids["eos"]
    assert out["summary"]["reason"] == "length_reserve"


def test_finish_end_stops_inside_the_thinking(scripted_engine: Engine, scripted: ScriptedModel) -> None:
    """`finish=end`: the stop token, no answer, the reason said."""
    (out,) = run(scripted_engine, [scripted.prompt("reasons_long")], GREEDY, budget=5, grace=0, finish="end")
    assert out["token_ids"] == [*scripted.plan("reasons_long")[:5], scripted.ids["eos"]]
