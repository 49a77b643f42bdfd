"""Part E of the public bug reports: the quality of the decision, its windows, streaks and counts."""

from __future__ import annotations

import numpy as np
import pytest

from earlystop.control import layout, lower
from earlystop.control.layout import (
    O_ADJUSTED,
    O_DECIDED,
    O_WARNING,
    O_WOULD,
    RC_BUDGET,
    RC_CONFIDENT,
    RC_CONVERGED,
    RC_HOPELESS,
    RC_LOW_CONFIDENCE,
    RC_REPETITION,
)
from earlystop.profile import References, Score

from .harness import (
    BLANK,
    BRACE,
    DIGIT,
    DOT,
    EOS,
    FENCE,
    GLUED,
    HAO,
    MORE,
    NEWLINE,
    SHUT,
    SMILE,
    THINK,
    TOOL,
    WAIT,
    Request,
    Sim,
    W,
    play,
    resolved,
    toy_table,
)

REFERENCES = References(top1_mean=0.8, entropy_mean=1.0)
PLAIN = toy_table(thinks=False)
ALIKE = {"hidden": 2, "states": lambda position: (1.0, 0.5)}
CONVERGED = {"similarity": 0.95, "novelty": 0.1, "patience": 2}


# --- E1: near-identical code ----------------------------------------------------------------------


def code_blocks(n: int) -> list[int]:
    """n code blocks of twelve lines that differ in one identifier."""
    lines = [[*MORE[4 * i : 4 * i + 4], NEWLINE] for i in range(12)]
    body = [token for line in lines for token in line]
    plan: list[int] = []
    for block in range(n):
        body[1] = W[block % 9]
        plan += [11, 12, NEWLINE, FENCE, NEWLINE, *body, FENCE, BLANK]
    return [*plan, EOS]


def test_e1_two_near_identical_code_blocks_do_not_stop() -> None:
    """Convergence and repetition leave code alone: states all alike, one identifier apart, and no stop."""
    plan = code_blocks(3)
    request = play(plan, PLAIN, repetition=True, max_tokens=400, **CONVERGED, **ALIKE)
    assert request.output == plan


def test_e1_the_same_in_prose_converges() -> None:
    """The control arm: the very text without its fences is stopped."""
    plan = [token for token in code_blocks(6) if token != FENCE]
    request = play(plan, PLAIN, max_tokens=400, **CONVERGED, **ALIKE)
    assert request.reasons(O_DECIDED) == [RC_CONVERGED]


@pytest.mark.parametrize("budget", range(1, 75, 5))
def test_e1_no_stop_falls_inside_a_fence(budget: int) -> None:
    """Wherever the budget runs out, the code block that is open is finished first."""
    plan = code_blocks(2)
    request = play(plan, PLAIN, budget=budget, budget_scope="response", max_tokens=400)
    cut = request.output[: request.forced[0]]
    assert cut.count(FENCE) % 2 == 0


# --- E3: uniform data -----------------------------------------------------------------------------


def test_e3_a_cycle_stops_at_64_tokens_in_prose() -> None:
    """At least 4 times and 64 tokens in all; the thinking is watched too."""
    for table in (PLAIN, toy_table()):
        request = play([11], table, repetition=True, max_tokens=200)
        assert request.at(O_DECIDED)[0] == 64
        assert request.reasons(O_DECIDED)[0] == RC_REPETITION


@pytest.mark.parametrize("period", [1, 2, 15, 16, 17, 63, 64])
def test_e3_the_longest_period_is_64(period: int) -> None:
    """An exact cycle of up to 64 tokens is found at its fourth time, and not before 64 tokens."""
    words = [*MORE, *W, 0, WAIT, GLUED, DIGIT, DOT][:period]
    request = play(lambda position: words[position % period], PLAIN, repetition=True, max_tokens=400)
    assert request.at(O_DECIDED) == [max(4 * period, 64)]


def test_e3_a_period_of_65_is_no_cycle() -> None:
    """Beyond the ring nothing is claimed."""
    words = [*MORE, *W, 0, WAIT, GLUED, DIGIT, *SMILE, *HAO]
    words = [*dict.fromkeys(words)][:65]
    assert len(words) == 65
    request = play(lambda position: words[position % 65], PLAIN, repetition=True, max_tokens=600)
    assert request.forced == []


@pytest.mark.parametrize("opening", [[FENCE, NEWLINE], [TOOL], [BRACE, NEWLINE]])
def test_e3_code_json_and_tool_calls_may_repeat_for_512_tokens(opening: list[int]) -> None:
    """Uniform data is legitimate there: 16 times and 512 tokens."""
    request = play([*opening, DIGIT], PLAIN, repetition=True, hard_grace=0, max_tokens=700)
    assert request.at(O_DECIDED) == [len(opening) + 512]


def test_e3_a_cycle_that_breaks_starts_again() -> None:
    """One token that differs every 60 keeps the rule quiet."""
    request = play(lambda p: 12 if p % 60 == 59 else 11, PLAIN, repetition=True, max_tokens=230)
    assert request.forced == []


def test_e3_min_tokens_holds_the_rule_back() -> None:
    """No stop by a signal rule before `min_tokens`."""
    request = play([11], PLAIN, repetition=True, min_tokens=100, max_tokens=200)
    assert request.at(O_DECIDED) == [100]


# --- E5: agreement --------------------------------------------------------------------------------


def units_plan(n: int, words: int = 5) -> list[int]:
    return [*([*W[:words], BLANK] * n), EOS]


def states_of(alike: list[bool | None]) -> dict[str, object]:
    """Hidden states unit by unit: like the last one, unlike it, or undefined (a zero vector)."""
    angles, angle = [0.0], 0.0
    for same in alike:
        angle += 0.0 if same else np.pi / 2
        angles.append(angle)

    def at(position: int) -> tuple[float, float]:
        unit = min(position // 6, len(angles) - 1)
        if unit and alike[unit - 1] is None:
            return 0.0, 0.0
        return float(np.cos(angles[unit])), float(np.sin(angles[unit]))

    return {"hidden": 2, "states": at}


@pytest.mark.parametrize(
    ("alike", "decided"),
    [
        ([True, True, True], 18),
        ([True, False, True, False], None),
        ([False, True, True], 24),
        ([None, None, None, None], None),
        ([True, None, True, None], None),
    ],
)
def test_e5_units_must_agree_one_after_the_other(alike: list[bool | None], decided: int | None) -> None:
    """Similar units in a row stop; a disagreeing or undefined one in between is no agreement."""
    request = play(
        units_plan(len(alike) + 1), PLAIN, similarity=0.9, novelty=1.0, patience=2, max_tokens=60, **states_of(alike)
    )
    assert request.at(O_DECIDED) == ([] if decided is None else [decided])


def test_e5_similarity_at_its_threshold_is_not_over_it() -> None:
    """A threshold of 1 never stops: no cosine is over it."""
    request = play(units_plan(8), PLAIN, similarity=1.0, novelty=1.0, patience=1, max_tokens=60, hidden=2,
                   states=lambda p: (1.0, 0.0))  # fmt: skip
    assert request.forced == []
    assert 1.0 in [row[layout.Q_SIMILARITY] for row in request.trace]


def test_e5_similar_units_with_fresh_content_do_not_stop() -> None:
    """Novelty must be low too: an enumeration of new things goes on, however alike its states."""
    fresh = [token for i in range(8) for token in (*MORE[6 * i : 6 * i + 6], BLANK)]
    assert play([*fresh, EOS], PLAIN, max_tokens=80, **CONVERGED, **ALIKE).forced == []
    looping = play([*units_plan(12), EOS], PLAIN, max_tokens=80, **CONVERGED, **ALIKE)
    assert looping.reasons(O_DECIDED) == [RC_CONVERGED]


def test_e5_novelty_is_the_share_of_unseen_4_grams() -> None:
    """Exactly: grams of the unit not seen in the response before."""
    plan = [*W[:5], BLANK, *W[:5], BLANK, *W[:3], 18, 19, BLANK]
    request = play(plan, PLAIN, mode="observe", max_tokens=18 + 1)
    ends = [row for row in request.trace if int(row[layout.Q_EVENT]) & layout.E_UNIT]
    shares = [row[layout.Q_NOVELTY] for row in ends]
    # unit 1: 3 grams, all new; unit 2: 6 grams, of which the 3 across the border are new; unit 3: 3 border grams
    # known, then "red fox runs 18", "fox runs 18 19", "runs 18 19 blank" new
    assert shares == [1.0, 0.5, 0.5]


# --- E7: windows ----------------------------------------------------------------------------------


def test_e7_windows_are_disjoint_exact_and_undefined_until_full() -> None:
    """Window 4 over 1,1,1,1,5,5,5,5 fifths: nothing, then 0.2 from token 4 on, 1.0 from token 8 on."""
    values = [0.25] * 4 + [1.0] * 4
    request = play([11], window=4, max_tokens=9, stats=lambda p: (values[min(p, 7)], 8 * values[min(p, 7)], 1.0, 1.0))
    confidence = [report[layout.R_CONFIDENCE] for report in request.reports]
    assert np.isnan(confidence[:4]).all()
    assert confidence[4:] == [0.25] * 4 + [1.0]
    assert [report[layout.R_ENTROPY] for report in request.reports][4:] == [2.0] * 4 + [8.0]


def test_e7_fewer_tokens_than_a_window_never_stop() -> None:
    """No stop on first tokens."""
    request = play(
        [11], PLAIN, confidence_floor=0.9, references=REFERENCES, window=32, patience=1, max_tokens=31,
        stats=lambda p: (0.01, 9.0, 1.0, 1.0),
    )  # fmt: skip
    assert request.forced == []


def test_e7_low_confidence_needs_patience_windows_in_a_row() -> None:
    """Two low windows in a row stop, a good one in between starts the count again."""
    fields = {"confidence_floor": 0.5, "references": REFERENCES, "window": 4, "patience": 2, "max_tokens": 40}
    low = play([11], PLAIN, stats=lambda p: (0.39, 1.0, 1.0, 1.0), **fields)
    assert low.at(O_DECIDED) == [8]
    assert low.reasons(O_DECIDED) == [RC_LOW_CONFIDENCE]
    assert play([11], PLAIN, stats=lambda p: (0.41, 1.0, 1.0, 1.0), **fields).forced == []
    mixed = play([11], PLAIN, stats=lambda p: (0.9 if p // 4 % 2 else 0.1, 1.0, 1.0, 1.0), **fields)
    assert mixed.forced == []
    without = play([11], PLAIN, stats=lambda p: (0.1, 1.0, 1.0, 1.0), **{**fields, "references": None})
    assert without.forced == []


def test_e7_no_drift_after_a_million_statistics() -> None:
    """Sums start from zero in every window: the millionth mean is as exact as the first."""
    take = lower.numba_namespace()["take_statistics"]
    ints, floats = np.zeros(layout.N_INTS, np.int32), np.zeros(layout.N_FLOATS)
    ints[layout.WINDOW], ints[layout.PATIENCE] = 32, 2
    floats[layout.REF_TOP1], floats[layout.FLOOR] = np.nan, np.nan
    top1 = np.float64(np.float32(0.1))
    for _ in range(1_000_000):
        take(ints, 0, floats, 0, top1, top1)
    assert floats[layout.LAST_CONFIDENCE] == pytest.approx(top1, abs=1e-16)
    assert ints[layout.WINDOW_N] == 0


# --- E8: what is evidence -------------------------------------------------------------------------


def test_e8_long_runs_of_certainty_are_neither_success_nor_failure() -> None:
    """100 tokens with top-1 of 1.0 stop nothing in `classic`."""
    request = play(
        [*W, DOT, NEWLINE] * 20, PLAIN, confidence_floor=0.5, references=REFERENCES, similarity=0.95, repetition=False,
        stats=lambda p: (1.0, 0.0, 9.0, 9.0), max_tokens=150,
    )  # fmt: skip
    assert request.forced == []


def test_e8_forced_tokens_give_no_evidence() -> None:
    """Our own sequence fills no window, whatever its rows measure."""
    table = toy_table(transition=(WAIT, *W), after=(BLANK,))
    seen = []
    for top1 in (0.0, 1.0):
        request = play(
            [11, 12, 13], table, budget=3, window=4, max_tokens=30,
            stats=lambda p, top1=top1: (top1 if 3 <= p <= 14 else 0.5, 1.0, top1, top1),
        )  # fmt: skip
        seen.append([report[layout.R_CONFIDENCE] for report in request.reports])
        assert np.isnan(seen[-1][:16]).all()
        assert seen[-1][16] == 0.5
    np.testing.assert_array_equal(seen[0], seen[1])


def test_e8_the_margin_is_that_of_the_token_that_would_end_here() -> None:
    """While the model thinks the end tag's, else EOS's."""
    request = play([11, 12, SHUT, 13, 14], max_tokens=6, stats=lambda p: (0.5, 1.0, 10.0 + p, 20.0 + p))
    assert [report[layout.R_MARGIN] for report in request.reports[1:]] == [10.0, 11.0, 12.0, 23.0, 24.0]


# --- E9: scripts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [(11,), HAO, SMILE, (0,), (GLUED,)])
def test_e9_the_same_token_pattern_gives_the_same_decision_in_any_script(word: tuple[int, ...]) -> None:
    """Counts are of tokens: 64 tokens of one word repeated, whatever its bytes."""
    request = play(lambda p: word[p % len(word)], PLAIN, repetition=True, max_tokens=200)
    assert request.at(O_DECIDED) == [64]


def test_e9_budgets_are_tokens_whatever_their_text() -> None:
    """Five tokens of Chinese bytes and five of English cost the same, up to the open code point."""
    for word, spare in ((HAO, 1), (SMILE, 1), ((11,), 0)):
        request = play(lambda p, word=word: word[p % len(word)], budget=5, max_tokens=20)
        assert request.forced[0] == 5 + spare


# --- E11: counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4])
def test_e11_reasoning_tokens_without_tags(depth: int) -> None:
    """Prompt ends in the opener, output 11 12 </think> 14: 2 reasoning tokens, also under drafts."""
    sim = Sim(depth=depth)
    request = Request([11, 12, SHUT, 14, 15, EOS], policy=resolved())
    sim.add(request)
    sim.run(drafts=lambda r: [r.wish(len(r.output) + i) for i in range(3)])
    assert request.last(layout.R_REASONING) == 2


def test_e11_costs_are_the_cost_tables() -> None:
    """With a cost table `used` is in its units: two cheap tokens, one dear one, then the end."""
    costs = np.full(104, 0.5, np.float32)
    costs[12] = 4.0
    request = play([11, 11, 12, 13], budget=5, costs=costs, max_tokens=12)
    assert request.forced[0] == 3
    assert request.reports[3][layout.R_USED] == 5.0


# --- the budget adapts, grows, shrinks ------------------------------------------------------------


@pytest.mark.parametrize(("entropy", "cut"), [(1.21, 26), (1.19, 20), (0.71, 20), (0.69, 16)])
def test_the_budget_adapts_once_to_the_digit(entropy: float, cut: int) -> None:
    """+30 % over 1.2 times the reference, -20 % under 0.7, after the window, once."""
    request = play(
        [11], budget=20, adapt=True, adapt_window=10, references=REFERENCES, max_tokens=60,
        stats=lambda p: (0.5, entropy if p < 10 else 9.0, 1.0, 1.0),
    )  # fmt: skip
    assert request.forced[0] == cut
    assert request.at(O_ADJUSTED) == ([] if cut == 20 else [10])


def test_a_shrunken_budget_warns_before_it_ends() -> None:
    """A budget that shrinks under what is used already: warning and decision, the warning not later."""
    request = play(
        [11], budget=12, warn_at=0.99, adapt=True, adapt_window=10, references=REFERENCES, max_tokens=60,
        stats=lambda p: (0.5, 0.1, 1.0, 1.0),
    )  # fmt: skip
    assert request.at(O_ADJUSTED) == [10]
    assert request.at(O_WARNING) == [10]
    assert request.at(O_DECIDED) == [10]


def test_extend_rearms_the_warning_and_calls_off_an_ending() -> None:
    """Budget added from outside: the warning comes again, an ending that waits is called off."""
    sim = Sim()
    request = Request([GLUED], policy=resolved(budget=10, grace=30), max_tokens=80)
    sim.add(request)
    for _ in range(13):
        sim.step()
    assert request.at(O_WARNING) == [9]
    assert request.at(O_DECIDED) == [10]
    sim.controller.command([request.slot], extra=20.0)
    sim.run()
    assert request.at(O_WARNING) == [9, 25]
    assert request.at(O_DECIDED) == [10, 30]
    assert request.forced[0] == 60
    assert request.at(O_ADJUSTED) == [13]


def test_extend_in_the_answer_goes_back_to_the_answer() -> None:
    """An ending of the answer that is called off does not wake the rules that rest while answering."""
    sim = Sim(hidden=2)
    plan = [11, SHUT, *units_plan(20)]
    request = Request(
        plan, policy=resolved(budget=9, budget_scope="response", grace=30, **CONVERGED), max_tokens=80,
        hidden=lambda p: (1.0, 0.5),
    )  # fmt: skip
    sim.add(request)
    while not request.at(O_DECIDED):
        sim.step()
    sim.controller.command([request.slot], extra=1000.0)
    sim.run()
    assert request.reasons(O_DECIDED) == [RC_BUDGET]
    assert request.forced == []


@pytest.mark.parametrize("thinks", [True, False])
def test_a_wish_from_outside_ends_once(thinks: bool) -> None:
    """While the model thinks it closes the thinking and lets it answer, else it ends the response."""
    sim = Sim(toy_table(thinks=thinks))
    request = Request([11], policy=resolved(), max_tokens=30)
    sim.add(request)
    for _ in range(5):
        sim.step()
    sim.controller.command([request.slot], stop=8)
    sim.run()
    assert request.reasons(O_DECIDED) == [8]
    if thinks:
        assert request.output[4:8] == [11, WAIT, SHUT, 11]
        assert len(request.output) == 30
    else:
        assert request.output == [11] * 5 + [EOS]


# --- rule 4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "reason"), [(2.0, RC_CONFIDENT), (-2.0, RC_HOPELESS), (0.0, None)])
def test_the_score_stops_after_patience_units(bias: float, reason: int | None) -> None:
    """At or above its threshold the answer is in, at or below the lower one it is not coming."""
    request = play(
        units_plan(6), PLAIN, score=Score(bias=bias), confident_threshold=0.8, hopeless_threshold=0.2, patience=2,
        references=REFERENCES, max_tokens=60,
    )  # fmt: skip
    assert request.reasons(O_DECIDED) == ([] if reason is None else [reason])
    if reason is not None:
        assert request.at(O_DECIDED) == [12]


def test_rules_2_to_4_rest_in_the_answer_and_wake_with_the_thinking() -> None:
    """A score that always fires leaves the answer alone, and closes a second block."""
    plan = [11, SHUT, *units_plan(4)[:-1], THINK, *units_plan(4)]
    request = play(
        plan, score=Score(bias=9.0), confident_threshold=0.5, patience=2, references=REFERENCES, max_tokens=60
    )
    opened = plan.index(THINK)
    assert request.at(O_DECIDED) == [opened + 1 + 12]


# --- audit and observe ----------------------------------------------------------------------------


def test_audit_binds_budgets_only() -> None:
    """An audited request's signal rules only observe, once; its budget ends it."""
    request = play([11], PLAIN, audited=True, repetition=True, budget=100, budget_scope="response", max_tokens=200)
    assert request.at(O_WOULD) == [64]
    assert request.reasons(O_WOULD) == [RC_REPETITION]
    assert request.at(O_DECIDED) == [100]
    assert request.forced == [100]


@pytest.mark.parametrize("grace", [0, 12])
@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 0},
        {"budget": 1},
        {"budget": 7},
        {"budget": 30, "budget_scope": "response"},
        {"repetition": True},
        {"answer_room": 20},
        {"confidence_floor": 0.9, "references": REFERENCES, "window": 5},
        {"score": Score(bias=9.0), "confident_threshold": 0.5, "references": REFERENCES},
        {"budget": 2, "finish": "end"},
        {"budget": 3, "min_end": 50, "finish": "end"},
    ],
)
@pytest.mark.parametrize(
    "plan",
    [
        [11],
        [*W[:4], DOT, NEWLINE] * 30,
        [11, 12, SHUT, 13, 14, THINK, *W, *W, BLANK],
        [*W[:3], FENCE, 11, NEWLINE, FENCE],
    ],
)
def test_observe_says_would_stop_where_an_active_run_begins_to_close(
    fields: dict[str, object], plan: list[int], grace: int
) -> None:
    """The same place and the same reason, once, and nothing is forced."""
    options = {**fields, "grace": grace, "hard_grace": 9, "max_tokens": 90}
    active = play(plan, **options)
    observed = play(plan, mode="observe", **options)
    assert observed.forced == []
    assert len(observed.at(O_WOULD)) == (1 if active.at(layout.O_CLOSING) else 0)
    assert observed.at(O_WOULD) == active.at(layout.O_CLOSING)[:1]
    if observed.at(O_WOULD):
        decided = [s for s in active.said if s.bit == O_DECIDED and s.tokens <= active.at(layout.O_CLOSING)[0]]
        assert observed.reasons(O_WOULD) == [decided[-1].reason]


def test_observe_and_active_see_the_same_up_to_the_stop() -> None:
    """Traces and counters are equal until an active run begins to force."""
    plan = [*W[:4], DOT, NEWLINE] * 10
    active = play(plan, budget=30, window=3)
    observed = play(plan, budget=30, window=3, mode="observe")
    n = active.forced[0]
    np.testing.assert_array_equal(np.array(active.trace)[:n], np.array(observed.trace)[:n])


# --- E13 and finish -------------------------------------------------------------------------------


def test_e13_the_default_close_leads_over_inside_the_reasoning() -> None:
    """Transition text, tag, and what the template puts behind it: the answer begins on a fresh line."""
    table = toy_table(transition=(BLANK, WAIT, DOT, NEWLINE), after=(BLANK,))
    request = play([11, 12, 13, 0, 0, 0, 0, 0, 0, 14, EOS], table, budget=3)
    assert request.output[3:] == [BLANK, WAIT, DOT, NEWLINE, SHUT, BLANK, 14, EOS]
    assert request.last(layout.R_REASONING) == 7


def test_finish_end_ends_the_response_inside_the_thinking() -> None:
    """`finish=end`: the stop token, not the tag."""
    assert play([11], budget=3, finish="end").output == [11, 11, 11, EOS]


def test_finish_close_thinking_never_ends_an_answer() -> None:
    """Outside the thinking there is nothing that `close_thinking` may end."""
    request = play([11, SHUT, 12], budget=3, budget_scope="response", finish="close_thinking", max_tokens=40)
    assert request.forced == []
    assert len(request.output) == 40


def test_a_response_budget_leaves_the_answer_its_room() -> None:
    """After a close of ours the answer may run for its room before the budget binds again."""
    request = play([GLUED], budget=10, budget_scope="response", answer_room=15, max_tokens=100)
    assert request.output[10:12] == [WAIT, SHUT]
    assert request.output[-1] == EOS
    assert request.forced[2] - 10 == 15


# --- units: how long they are ---------------------------------------------------------------------


def unit_ends(plan: list[int]) -> list[int]:
    """Tokens after which a unit ends."""
    request = play(plan, PLAIN, mode="observe", max_tokens=len(plan) + 1)
    return [i + 1 for i, row in enumerate(request.trace) if int(row[layout.Q_EVENT]) & layout.E_UNIT]


@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        ([*[11] * 14, NEWLINE, 12], []),
        ([*[11] * 15, NEWLINE, 12], [16]),
        ([11, 11, BLANK, 11, 11, BLANK, 12], [6]),
        ([11, 11, 11, BLANK, 12], [4]),
        ([*[11] * 94, DOT, 12], []),
        ([*[11] * 95, DOT, 12], [96]),
        ([*[11] * 130], [128]),
    ],
)
def test_units_end_by_line_sentence_and_length(plan: list[int], ends: list[int]) -> None:
    """A line end from 16 tokens on, a sentence end from 96, hard at 128; under 4 tokens a unit joins the next."""
    assert unit_ends(plan) == ends


def test_a_thinking_tag_ends_the_unit() -> None:
    """However short: the answer is another text."""
    request = play([11, SHUT, 12, 13], mode="observe", max_tokens=5)
    assert int(request.trace[1][layout.Q_EVENT]) & layout.E_UNIT
