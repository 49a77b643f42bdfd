"""Part A of the public bug reports: the thinking budget and its forced end, one test a kind of fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlystop.control import layout
from earlystop.control.layout import O_CLOSING, O_DECIDED, O_DEFERRED, O_WARNING, RC_BUDGET, RC_LENGTH_RESERVE

from .harness import (
    BLANK,
    DOT,
    E1,
    E2,
    E3,
    EOS,
    GLUED,
    HAO,
    JSON,
    JSON_END,
    NEWLINE,
    SHUT,
    SMILE,
    THINK,
    TOOL,
    TOOL_END,
    WAIT,
    W,
    play,
    toy_table,
)

CLOSE = [WAIT, SHUT]


# --- A1: a tool call inside the thinking ----------------------------------------------------------


def test_a1_tool_call_closes_the_thinking_and_is_never_cut() -> None:
    """A tool call inside the thinking is an implicit end: the budget rests, nothing is forced into its arguments."""
    plan = [11, 12, TOOL, JSON, 13, 14, 15, JSON_END, TOOL_END, EOS]
    request = play(plan, budget=6)
    assert request.output == plan
    assert request.forced == []
    assert request.last(layout.R_REASONING) == 2


def test_a1_a_cut_due_inside_a_tool_call_waits_for_its_end_and_says_so() -> None:
    """A response budget that runs out in the arguments ends right after the call, with a deferral signal."""
    plan = [11, 12, TOOL, JSON, 13, 14, 15, JSON_END, TOOL_END, *W]
    request = play(plan, budget=6, budget_scope="response")
    assert request.output == [*plan[:9], EOS]
    assert request.at(O_DEFERRED) == [6]
    assert request.reasons(O_DECIDED) == [RC_BUDGET]


def test_a1_the_deferral_has_a_hard_limit() -> None:
    """A call that never ends is cut after hard_grace tokens, also with grace=0."""
    request = play([TOOL, JSON, 13], budget=4, budget_scope="response", hard_grace=20)
    assert request.forced == [24]
    assert request.at(O_DEFERRED) == [4]


# --- A3: the model's own bare end tag -------------------------------------------------------------


def test_a3_a_natural_end_is_the_models_own_tag_not_our_phrase() -> None:
    """The bare end tag ends the thinking: no token is forced into the answer that follows."""
    plan = [11, 12, 13, SHUT, 14, 15, 16, 17, EOS]
    request = play(plan, budget=6)
    assert (request.output, request.forced) == (plan, [])


def test_a3_a_natural_end_while_we_wait_for_a_safe_place_is_the_end() -> None:
    """An ending that waits in its grace is called off by the model's own tag."""
    plan = [11, 12, 13, GLUED, SHUT, *W, EOS]
    request = play(plan, budget=3, grace=30)
    assert (request.output, request.forced) == (plan, [])


def test_a3_the_phrase_is_forced_whole_and_belongs_to_the_reasoning() -> None:
    """Forcing uses transition text and tag, each token once; the text counts as thinking, the tag does not."""
    request = play([11, 12, 13, 0, 0, 14, EOS], budget=3)
    assert request.output == [11, 12, 13, *CLOSE, 14, EOS]
    assert request.last(layout.R_REASONING) == 4
    assert request.last(layout.R_USED) == 4


def test_a3_an_end_tag_of_several_tokens_is_seen_and_forced() -> None:
    """With a tag of three tokens a natural end counts none of them, and a forced one is exact."""
    table = toy_table(pieces=True)
    natural = play([11, E1, E2, E3, 14, EOS], table, budget=5)
    assert (natural.forced, natural.last(layout.R_REASONING)) == ([], 1)
    cut = play([11, 12, 13, 0, 0, 0, 0, 14, EOS], table, budget=3)
    assert cut.output == [11, 12, 13, WAIT, E1, E2, E3, 14, EOS]
    assert cut.last(layout.R_REASONING) == 4


# --- A4: a second block ---------------------------------------------------------------------------


def test_a4_a_second_block_after_a_forced_end_closes_at_once() -> None:
    """Re-entry above the budget is seen, and closed by the tag alone."""
    request = play([11, 12, 13, 0, 0, 14, THINK, 15], budget=3, ignore_eos=True, max_tokens=30)
    assert request.output[:9] == [11, 12, 13, *CLOSE, 14, THINK, SHUT, 15]
    assert request.forced == [3, 4, 7]
    assert request.reasons(O_DECIDED) == [RC_BUDGET, RC_BUDGET]


def test_a4_a_second_block_after_a_natural_end_shares_the_budget() -> None:
    """The tokens of both blocks count together."""
    request = play([11, SHUT, 14, THINK, 15], budget=5, ignore_eos=True, max_tokens=30)
    assert request.output[:10] == [11, SHUT, 14, THINK, 15, 15, 15, 15, *CLOSE]


# --- A5: think blocks in the prompt ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ([THINK, 11, SHUT, 14, THINK], True),
        ([THINK, 11, SHUT, 12, SHUT, THINK], True),
        ([THINK, NEWLINE, SHUT], False),
        ([THINK, 11, SHUT, 12, SHUT, 13], False),
        ([11, 12], False),
        ([], False),
    ],
)
def test_a5_the_last_delimiter_of_the_prompt_decides(prompt: list[int], opened: bool) -> None:
    """History in the prompt neither switches the budget off nor counts into it."""
    request = play([*W, 11, EOS], prompt=prompt or [12], budget=2)
    assert request.forced == ([2, 3] if opened else [])


def test_a5_delimiters_of_several_tokens_are_found_in_the_prompt() -> None:
    """The same with an end tag of three tokens, and with half a tag at the very end."""
    table = toy_table(pieces=True)
    closed = play([*W, EOS], table, prompt=[THINK, 11, E1, E2, E3], budget=2)
    assert closed.forced == []
    half = play([*W, EOS], table, prompt=[THINK, 11, E1, E2], budget=2)
    assert half.forced == [2, 3, 4, 5]


# --- A6: the model opens its thinking itself ------------------------------------------------------


def test_a6_an_emitted_opener_arms_the_budget() -> None:
    """Without an opener in the prompt, the model's own starts the count."""
    request = play([THINK, 11, 12, 13], prompt=[11], budget=2, max_tokens=20)
    assert request.output[:5] == [THINK, 11, 12, *CLOSE]


def test_a6_text_after_the_close_is_reported_apart() -> None:
    """Reasoning that goes on without an opener is no thinking: tokens and reasoning tokens tell them apart."""
    request = play([THINK, 11, 12, 13], prompt=[11], budget=2, max_tokens=40)
    assert request.forced == [3, 4]
    assert request.last(layout.R_REASONING) == 3
    assert request.last(layout.R_TOKENS) == 39


# --- A7: budgets 0, 1 and none --------------------------------------------------------------------


def test_a7_budget_zero_one_and_none_are_three_things() -> None:
    """With 0 the end tag alone is the first token; the template's newline in the prompt advances nothing."""
    plan = [11, 12, 13, SHUT, 14, EOS]
    zero, one, none = (play(plan, prompt=[THINK, NEWLINE], budget=budget) for budget in (0, 1, None))
    assert zero.output[0] == SHUT
    assert zero.forced == [0]
    assert one.output[:3] == [11, *CLOSE]
    assert none.output == plan
    assert (zero.last(layout.R_REASONING), one.last(layout.R_REASONING), none.last(layout.R_REASONING)) == (0, 2, 3)


@pytest.mark.parametrize("thinks", [True, False])
def test_a7_a_response_budget_of_zero_generates_nothing(thinks: bool) -> None:
    """Where no thinking is open, 0 forces the stop token first, 1 lets one token through, none is no limit."""
    table = toy_table(thinks=thinks)
    plan = [11, 12, 13, EOS]
    outputs = [play(plan, table, prompt=[12], budget_scope="response", budget=budget).output for budget in (0, 1, None)]
    assert outputs == [[EOS], [11, EOS], plan]


def test_a7_a_budget_of_zero_is_told() -> None:
    """The stop before the first token is signalled like any other, once."""
    request = play([11, 12, 13, EOS], budget=0)
    assert request.reasons(O_DECIDED) == [RC_BUDGET]
    assert request.at(O_CLOSING) == [0]


# --- A11: EOS inside the thinking -----------------------------------------------------------------


def test_a11_eos_inside_the_thinking_becomes_the_end_tag() -> None:
    """Thinking rows move EOS's mass to the end tag, answer rows do not."""
    request = play([11, 12, 13, EOS, 14, EOS], budget=100)
    assert request.output == [11, 12, 13, SHUT, 14, EOS]
    moves = [bool(flags & layout.P_MOVE_EOS) for flags in request.flags]
    assert moves == [True] * 4 + [False] * 2


@pytest.mark.parametrize(("fields", "ends"), [({"mode": "observe"}, EOS), ({"finish": "end"}, EOS)])
def test_a11_observe_and_finish_end_leave_eos_alone(fields: dict[str, str], ends: int) -> None:
    """`observe` touches nothing; with `finish=end` the end of the response is what is wanted."""
    request = play([11, 12, EOS], **fields)
    assert request.output == [11, 12, ends]


# --- A15: where the cut lands, and blocks without end ---------------------------------------------


@pytest.mark.parametrize("parts", [SMILE, HAO])
def test_a15_never_between_the_bytes_of_a_character(parts: tuple[int, int]) -> None:
    """A budget that runs out inside a code point waits for its last byte."""
    request = play([11, 12, *parts, 13], budget=3, max_tokens=12)
    assert request.output[:6] == [11, 12, *parts, *CLOSE]


def test_a15_a_line_or_sentence_end_within_the_grace_is_preferred() -> None:
    """The cut comes after the full stop that white space follows, not at the budget."""
    request = play([11, 12, 13, 14, DOT, 15, 16, 17], budget=3, grace=40, max_tokens=60)
    assert request.output[3:7] == [14, DOT, *CLOSE]


def test_a15_a_full_stop_inside_a_number_is_no_sentence_end() -> None:
    """A full stop that no white space follows ends nothing."""
    request = play([11, 12, 13, DOT, GLUED, GLUED, 14, BLANK, 11], budget=3, grace=40, max_tokens=60)
    assert request.output[3:10] == [DOT, GLUED, GLUED, 14, BLANK, *CLOSE]


def test_a15_six_blocks_share_one_budget() -> None:
    """Blocks of budget - 1 tokens each do not re-arm the budget: thinking stays within it."""
    block = [11, 12, 13, 14, SHUT, 15, THINK]
    request = play([*block * 6, 16, EOS], budget=5, max_tokens=80)
    thinking = request.last(layout.R_REASONING)
    assert thinking <= 5 + 1  # the transition text
    assert request.last(layout.R_USED) == thinking


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 12),
    st.integers(0, 20),
    st.lists(st.sampled_from([*W, GLUED, DOT, NEWLINE, BLANK]), min_size=60, max_size=60),
)
def test_a15_the_overrun_is_at_most_grace(budget: int, grace: int, plan: list[int]) -> None:
    """Whatever the text, free of fences and unfinished characters: the close begins within budget + grace."""
    request = play(plan, budget=budget, grace=grace, max_tokens=60)
    first = request.forced[0]
    assert budget <= first <= budget + grace
    close = CLOSE if budget else [SHUT]
    assert request.output[first : first + len(close)] == close


def test_a15_glued_text_is_cut_at_the_end_of_the_grace() -> None:
    """Text without a single space or line break is cut hard at budget + grace."""
    request = play([GLUED], budget=5, grace=8, max_tokens=40)
    assert request.forced == [13, 14]


# --- the warning, and room for the answer ---------------------------------------------------------


def test_the_warning_comes_once_above_its_share_of_the_budget() -> None:
    """used > warn_at x budget, before the end, and not again."""
    request = play([11], budget=10, warn_at=0.8, max_tokens=30)
    assert request.at(O_WARNING) == [9]
    assert request.at(O_DECIDED) == [10]


def test_the_answer_keeps_its_room() -> None:
    """Without any budget the thinking ends early enough for the answer: reason length_reserve."""
    request = play([GLUED], answer_room=20, max_tokens=60, grace=4)
    assert request.reasons(O_DECIDED) == [RC_LENGTH_RESERVE]
    assert 60 - request.forced[-1] - 1 >= 20


@pytest.mark.parametrize("grace", [0, 3, 8, 64, 500])
@pytest.mark.parametrize("limit", [16, 40, 100])
def test_the_answer_room_holds_whatever_the_grace(grace: int, limit: int) -> None:
    """A wait for a safe place never eats the answer's room, not even in text without one."""
    request = play([GLUED], answer_room=limit // 4, max_tokens=limit, grace=grace)
    assert SHUT in request.output
    assert limit - request.forced[-1] - 1 >= limit // 4


def test_the_answer_room_holds_against_a_budget_that_ends_late() -> None:
    """An ending for the budget that waits in its grace closes when the answer's room is reached."""
    request = play([GLUED], answer_room=20, budget=50, max_tokens=80, grace=64)
    assert 80 - request.forced[-1] - 1 >= 20


def test_a_close_that_does_not_fit_any_more_is_the_tag_alone() -> None:
    """Half a transition text would be worse than none: near the limit the end tag closes by itself."""
    table = toy_table(transition=[WAIT] * 10)
    request = play([11], table, budget=4, max_tokens=10)
    assert request.output == [11, 11, 11, 11, SHUT, 11, 11, 11, 11, 11]
    fits = play([11], table, budget=4, max_tokens=16)
    assert fits.output == [11] * 4 + [WAIT] * 10 + [SHUT, 11]


@pytest.mark.parametrize(("line_at", "first"), [(8, 15), (9, 10), (10, 11)])
def test_a_line_end_will_do_after_half_the_grace(line_at: int, first: int) -> None:
    """Budget 5, grace 10: a line end counts from the fifth token of waiting on, else the wait goes to its end."""
    plan = [GLUED] * line_at + [NEWLINE] + [GLUED] * 20
    request = play(plan, budget=5, grace=10, max_tokens=60)
    assert request.forced[0] == first


def test_in_the_last_tokens_of_the_grace_the_end_of_a_word_will_do() -> None:
    """Budget 5, grace 10: not inside a word at token 15, but before the last word that begins from token 11 on."""
    inside = [*[GLUED] * 10, 11, *[GLUED] * 20]
    assert play(inside, budget=5, grace=10, max_tokens=60).forced[0] == 15
    before = [*[GLUED] * 12, 11, *[GLUED] * 20]
    assert play(before, budget=5, grace=10, max_tokens=60).forced[0] == 12
