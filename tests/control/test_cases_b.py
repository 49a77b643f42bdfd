"""Part B of the public bug reports: batches, chunks, preemption, drafts, unknown ids, broken rows, grammars."""

from __future__ import annotations

import time
from unittest import mock

import numpy as np
import pytest
import torch

from earlystop.control import layout
from earlystop.control.layout import (
    O_CANCELLED,
    O_CLOSING,
    O_DECIDED,
    O_DEFERRED,
    O_INVALID,
    O_REBUILT,
    O_WARNING,
    RC_BUDGET,
    RC_CONFIDENT,
)
from earlystop.control.state import Rows
from earlystop.profile import References, Score

from .harness import (
    DOT,
    E1,
    E2,
    E3,
    EOS,
    JSON,
    JSON_END,
    NEWLINE,
    SHUT,
    THINK,
    WAIT,
    Request,
    Sim,
    W,
    alone,
    play,
    resolved,
    toy_table,
)

LOOKS_RIGHT = {
    "score": Score(bias=1.0),
    "confident_threshold": 0.5,
    "references": References(top1_mean=0.5, entropy_mean=1.0),
}


# --- B1, B9: whose mask is it ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_b1_a_forced_token_follows_its_request_when_rows_trade_places(seed: int) -> None:
    """One request with budget 0 and plain neighbours, rows shuffled every step: only the one is forced."""
    sim = Sim(slots=3, seed=seed)
    closing = Request([11, 12, 13, EOS], policy=resolved(budget=0))
    plain = Request([*W, EOS], policy=None)
    other = Request([*W, SHUT, EOS], policy=resolved())
    sim.add(closing, plain, other)
    sim.run()
    assert closing.forced == [0]
    assert plain.output == [*W, EOS]
    assert other.output == [*W, SHUT, EOS]
    assert plain.flags == [0] * 10


@pytest.mark.parametrize("depth", [1, 3])
def test_b9_a_recycled_slot_owes_nothing_to_its_former_owner(depth: int) -> None:
    """A request in the middle of closing leaves; a plain one takes its slot and its rows, drafts included."""
    sim = Sim(slots=2, depth=depth)
    stays = Request(lambda position: W[position % 9], policy=resolved(), max_tokens=60)
    first = Request([11, 12, 13], policy=resolved(budget=2), prompt=(THINK, 11))
    sim.add(stays, first)
    while not first.forced:
        sim.step(drafts=lambda request: [W[(len(request.output) + i) % 9] for i in range(depth - 1)])
    slot = first.slot
    sim.remove(first)
    plain = Request([12, 13], policy=None, max_tokens=20)
    sim.add(plain)
    assert plain.slot == slot
    while sim.running:
        sim.step(drafts=lambda request: [request.wish(len(request.output) + i) for i in range(depth - 1)])
    assert plain.forced == []
    assert plain.flags == [0] * 20


def test_b9_draft_rows_of_a_plain_request_are_left_alone() -> None:
    """Rows that were forced in the last step carry nothing over into a plain request's draft rows."""
    sim = Sim(slots=2, depth=3)
    closing = Request([11, *[0] * 9], policy=resolved(budget=1), max_tokens=9)
    sim.add(closing)
    sim.step()
    sim.step(drafts=lambda request: (WAIT, SHUT))
    assert sim.verdict is not None
    assert sim.verdict.force.tolist() == [WAIT, SHUT, -1]
    plain = Request([12], policy=None, max_tokens=20)
    opted = Request([13], policy=resolved(), max_tokens=20)
    sim.running.clear()
    sim.free = [1, 0]
    sim.add(plain, opted)
    sim.step()
    for _ in range(3):
        sim.step(drafts=lambda request: (request.plan[0],) * 2)
        assert sim.verdict.force.tolist() == [-1] * 6
        rows = [sim.verdict.flags[r] for r, row in enumerate(sim.last_rows) if row[0] is plain]
        assert [int(flags) for flags in rows] == [0, 0, 0]


# --- B2: chunked prefill --------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(10,), (4, 4, 2), (1,), (9, 1)])
def test_b2_chunks_of_a_prompt_change_nothing(chunks: tuple[int, ...]) -> None:
    """After any chunking the close begins at the same position, and no discarded row gives a statistic."""
    sizes = iter([*chunks, *[1] * 10])
    sim = Sim()
    request = Request([*W], prompt=[*W, THINK], policy=resolved(budget=1, window=2), max_tokens=8)
    sim.add(request)
    while sim.running:
        sim.step(chunk=lambda _: next(sizes))
    assert request.forced == [1, 2]
    assert request.last(layout.R_CONFIDENCE) == 0.5


# --- B3: preemption -------------------------------------------------------------------------------


def test_b3_a_budget_goes_on_after_a_preemption() -> None:
    """Preempted after 4 of 6 tokens: the cut comes at 6 in all, usage is not doubled, nothing is said twice."""
    sim = Sim(slots=2)
    request = Request(lambda position: W[position % 9], policy=resolved(budget=6, warn_at=0.5), max_tokens=20)
    sim.add(request)
    for _ in range(5):
        sim.step()
    sim.preempt(request)
    sim.add(Request([11, EOS]), request)
    sim.run()
    assert request.forced == [6, 7]
    assert request.at(O_WARNING) == [4]
    assert request.at(O_DECIDED) == [6]
    assert request.at(O_REBUILT) == [5]
    assert request.last(layout.R_REASONING) == 7


@pytest.mark.parametrize("after", [7, 8])
def test_b3_a_close_goes_on_where_it_was(after: int) -> None:
    """Preempted in the middle of a forced sequence: it continues at its next token."""
    sim = Sim(toy_table(pieces=True, transition=()), slots=1)
    request = Request([*W[:6], 0, 0, 0, 14, EOS], policy=resolved(budget=6))
    sim.add(request)
    for _ in range(after):
        sim.step()
    sim.preempt(request)
    sim.add(request)
    sim.run()
    assert request.output == [*W[:6], E1, E2, E3, 14, EOS]


def test_b3_a_close_for_a_signal_goes_on_by_its_longest_tail() -> None:
    """Statistics do not survive a preemption; the sequence that they began does."""
    sim = Sim(toy_table(transition=(WAIT, NEWLINE, 12)), slots=1)
    plan = [11, 12, 13, NEWLINE] * 8
    request = Request(plan, policy=resolved(patience=1, **LOOKS_RIGHT), max_tokens=40)
    sim.add(request)
    while len(request.forced) < 2:
        sim.step()
    assert request.reasons(O_DECIDED) == [RC_CONFIDENT]
    first = request.forced[0]
    sim.preempt(request)
    sim.add(request)
    sim.run()
    assert request.output[first : first + 4] == [WAIT, NEWLINE, 12, SHUT]
    assert request.forced == [first, first + 1, first + 2, first + 3]


def test_b3_a_preempted_prefill_starts_over() -> None:
    """A request that loses its slot inside its prompt comes back as new."""
    sim = Sim(slots=1)
    request = Request([*W], prompt=[*W, THINK], policy=resolved(budget=2), max_tokens=8)
    sim.add(request)
    sim.step(chunk=lambda _: 4)
    sim.preempt(request)
    sim.add(request)
    sim.run()
    assert request.forced == [2, 3]
    assert request.at(O_REBUILT) == []


# --- B4, B14: unknown ids -------------------------------------------------------------------------


def test_b4_unknown_ids_count_by_length_alone() -> None:
    """Ids that stay -1: the budget binds, the sequence is forced to its end, once, and nothing is hashed."""
    request = play([11], budget=5, hides=lambda position: True, repetition=True, max_tokens=200)
    assert request.forced == [5, 6]
    assert request.output[5:7] == [WAIT, SHUT]
    assert request.at(O_DECIDED) == [5]


def test_b4_one_unknown_id_is_no_word_of_any_gram_or_cycle() -> None:
    """An unknown id breaks cycles and grams that would run over it, and is counted once."""
    sim = Sim(gram_size=4096)
    request = Request(
        lambda position: W[position % 4],
        policy=resolved(repetition=True, mode="observe"),
        hides=lambda position: position % 50 == 49,
        max_tokens=300,
    )
    sim.add(request)
    sim.run()
    assert request.said == []  # never 64 tokens in a row that are known to repeat
    assert request.last(layout.R_TOKENS) == 299


def test_b4_a_gram_over_an_unknown_id_is_neither_new_nor_old() -> None:
    """Only grams of known tokens count."""
    sim = Sim()
    request = Request([*W], policy=resolved(mode="observe"), hides=lambda position: position == 4, max_tokens=9)
    sim.add(request)
    for _ in range(9):
        sim.step()
        if request.slot >= 0:
            ints, _ = sim.state(request)
    # 8 tokens were committed; of the five 4-grams, four run over the unknown one
    assert ints[layout.UNIT_GRAMS] == 1


@pytest.mark.parametrize("token", [191_222, 104, -7])
def test_b14_an_id_beyond_the_vocabulary_is_unknown_not_a_crash(token: int) -> None:
    """A token that no table knows counts by length; neighbours and the rest of the response are judged."""
    request = play([11, token, 12, 13, 14], budget=4, max_tokens=12)
    assert request.forced == [4, 5]


# --- B5, B6: drafts -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_b5_a_budget_binds_at_every_draft_position(budget: int, k: int) -> None:
    """Drafts that the model would all accept do not carry it over its budget."""
    sim = Sim(depth=k + 1)
    request = Request([11, 12, 13, 14, 15, 16, 17], policy=resolved(budget=budget), max_tokens=30)
    sim.add(request)
    sim.run(drafts=lambda r: [r.wish(len(r.output) + i) for i in range(k)])
    reference = alone(Request([11, 12, 13, 14, 15, 16, 17], policy=resolved(budget=budget), max_tokens=30))
    assert request.output == reference.output
    assert request.forced == reference.forced


def test_b5_a_close_that_the_drafter_guesses_is_forced_once() -> None:
    """A drafter that has learned the sequence gets it accepted whole; every token comes once."""
    sim = Sim(toy_table(transition=(WAIT, 12, 13)), depth=5)
    request = Request([*W], policy=resolved(budget=3), max_tokens=14)
    sim.add(request)
    guess = [*W[:3], WAIT, 12, 13, SHUT, *W]
    while len(request.output) < 7:
        sim.step(drafts=lambda r: guess[len(r.output) : len(r.output) + 4])
    assert request.output[:7] == [*W[:3], WAIT, 12, 13, SHUT]
    assert request.forced == [3, 4, 5, 6]
    assert sim.steps <= 3
    sim.run()
    assert request.forced == [3, 4, 5, 6]
    assert request.reasons(O_DECIDED) == [RC_BUDGET]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_b6_after_a_rejection_the_state_is_that_of_the_accepted_prefix(accepted: int) -> None:
    """Counters, windows, ring and grams equal a run without drafts, to the bit."""
    fields = {"budget": 50, "window": 3, "repetition": True}
    plan = [W[i % 5] for i in range(12)]
    sim = Sim(depth=5)
    request = Request(plan, policy=resolved(**fields), stats=lambda p: (0.1 + p / 50, p / 10, 1.0 + p, 2.0 + p))
    sim.add(request)
    sim.step()
    sim.step(drafts=lambda r: [*plan[1 : 1 + accepted], *[19] * (4 - accepted)])
    sim.step()
    plain = Sim()
    other = Request(plan, policy=resolved(**fields), stats=request.stats)
    plain.add(other)
    for _ in range(len(request.output)):
        plain.step()
    assert other.output == request.output
    np.testing.assert_array_equal(sim.state(request)[0], plain.state(other)[0])
    np.testing.assert_array_equal(sim.state(request)[1], plain.state(other)[1])
    np.testing.assert_array_equal(np.array(request.trace), np.array(other.trace))
    kept = np.sort(sim.controller.grams[0].numpy())
    np.testing.assert_array_equal(kept, np.sort(plain.controller.grams[0].numpy()))


def test_b5_a_signal_rule_never_forces_on_guesses() -> None:
    """Statistics of drafts are not in yet: a score fires on committed tokens, and its close comes once."""
    plan = [11, 12, 13, NEWLINE, NEWLINE] * 20
    for k in (1, 2, 3, 4):
        sim = Sim(toy_table(transition=(WAIT, 12)), depth=k + 1)
        request = Request(plan, policy=resolved(patience=2, **LOOKS_RIGHT), max_tokens=60)
        sim.add(request)
        sim.run(drafts=lambda r, k=k: [r.wish(len(r.output) + i) for i in range(k)])
        first = request.forced[0]
        assert request.output[first : first + 3] == [WAIT, 12, SHUT]
        assert request.forced == [first, first + 1, first + 2]
        assert request.output.count(SHUT) == 1
        decided = [s.tokens for s in request.said if s.bit == O_DECIDED]
        assert len(decided) == 1
        assert decided[0] <= first


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("entropy", [2.0, 0.5])
def test_b5_what_was_forced_on_an_old_budget_is_finished_not_begun_again(k: int, entropy: float) -> None:
    """A budget that adapts between the forcing of a draft's row and its commit never repeats the sequence."""
    for window in range(1, 9):
        sim = Sim(toy_table(transition=(WAIT, 12)), depth=k + 1)
        policy = resolved(
            budget=8, adapt=True, adapt_window=window, references=References(top1_mean=0.5, entropy_mean=1.0)
        )
        request = Request(lambda p: W[p % 9], policy=policy, max_tokens=40, stats=lambda p: (0.5, entropy, 1.0, 1.0))
        sim.add(request)
        sim.run(drafts=lambda r, k=k: [r.wish(len(r.output) + i) for i in range(k)])
        first = request.forced[0]
        assert request.forced == [first, first + 1, first + 2]
        assert request.output[first : first + 3] == [WAIT, 12, SHUT]
        assert len(request.at(O_DECIDED)) == 1


def test_b5_a_budget_that_is_extended_after_a_drafts_row_was_forced() -> None:
    """What was forced before the wish arrived stands in the text: it is finished, once."""
    sim = Sim(toy_table(transition=(WAIT, 12, 13)), depth=5)
    request = Request([*W, *W], policy=resolved(budget=3), max_tokens=14)
    sim.add(request)
    sim.step()
    sim.step(drafts=lambda r: [*W[1:3], WAIT, 12])
    assert request.output == [*W[:3], WAIT, 12, 13]
    sim.controller.command([request.slot], extra=100.0)
    sim.run()
    assert request.output[3:7] == [WAIT, 12, 13, SHUT]
    assert request.forced == [3, 4, 5, 6]
    assert request.reasons(O_DECIDED) == [RC_BUDGET]


# --- B10: no combination leaves nothing to choose -------------------------------------------------


def test_b10_no_end_before_min_tokens() -> None:
    """The request's own min_tokens holds a forced end back, budget included; the thinking may close before."""
    ends = play([11], toy_table(thinks=False), budget=3, budget_scope="response", min_end=10, max_tokens=40)
    assert ends.output == [11] * 10 + [EOS]
    assert ends.at(O_DEFERRED) == [3]
    closes = play([11], budget=3, min_end=10, max_tokens=20)
    assert closes.forced == [3, 4]
    nothing = play([11], toy_table(thinks=False), budget=0, budget_scope="response", min_end=4, max_tokens=40)
    assert nothing.output == [11] * 4 + [EOS]


def test_b10_without_a_token_that_ends_nothing_is_forced() -> None:
    """ignore_eos and no stop id: the row stays as it is, id 0 is never forced."""
    request = play([11], toy_table(thinks=False), budget=3, budget_scope="response", ignore_eos=True, max_tokens=12)
    assert request.forced == []
    assert request.output == [11] * 12


def test_b10_a_reserved_id_ends_for_its_reason() -> None:
    """Reason-coded stop ids are forced for their reason only."""
    request = play([11], toy_table(thinks=False), budget=3, stop_ids={RC_BUDGET: 41}, budget_scope="response")
    assert request.output == [11, 11, 11, 41]


# --- B12: broken logits ---------------------------------------------------------------------------


def test_b12_a_broken_row_is_undefined_signalled_and_ended() -> None:
    """NaN logits give no statistic, an `invalid_logits` signal and the stop token; neighbours are untouched."""
    sim = Sim(slots=2)
    broken = Request([11], policy=resolved(window=2), invalid=[4], max_tokens=20)
    healthy = Request([12], policy=resolved(window=2), max_tokens=20)
    sim.add(broken, healthy)
    sim.run()
    assert broken.output == [11] * 4 + [EOS]
    assert broken.at(O_INVALID) == [4]
    assert broken.flags[4] == layout.P_INVALID
    assert healthy.output == [12] * 20
    assert all(np.isfinite(report[layout.R_CONFIDENCE]) for report in healthy.reports[3:])


def test_b12_an_undefined_statistic_is_neither_certainty_nor_doubt() -> None:
    """Rows without statistics fill no window and raise no streak: a rule decides as if they were not there."""
    gaps = {"stats": lambda p: (np.nan,) * 4 if p % 2 else (0.1, 1.0, 1.0, 1.0)}
    fields = {"confidence_floor": 0.5, "references": References(top1_mean=0.8, entropy_mean=1.0), "window": 4}
    with_gaps = play([11], patience=2, max_tokens=60, **gaps, **fields)
    without = play([11], patience=2, max_tokens=60, stats=lambda p: (0.1, 1.0, 1.0, 1.0), **fields)
    assert without.at(O_DECIDED) == [8]
    assert with_gaps.at(O_DECIDED) == [15]
    assert play([11], stats=lambda p: (np.nan,) * 4, max_tokens=60, **fields).forced == []


def test_b12_observe_only_reports_a_broken_row() -> None:
    """`observe` forces nothing even then."""
    request = play([11], mode="observe", invalid=[4], max_tokens=8)
    assert request.forced == []
    assert request.at(O_INVALID) == [4]


# --- B13: every rank decides the same -------------------------------------------------------------


def test_b13_no_clock_no_random_numbers() -> None:
    """Two controllers in lock step, one with clock and random numbers gone mad, decide the same to the bit."""
    plan = [W[i % 4] for i in range(120)]
    first = play(plan, budget=70, repetition=True, max_tokens=120)
    with (
        mock.patch.object(time, "time", iter(range(10**6)).__next__),
        mock.patch.object(time, "monotonic", side_effect=RuntimeError),
        mock.patch.object(torch, "rand", side_effect=RuntimeError),
    ):
        second = play(plan, budget=70, repetition=True, max_tokens=120)
    np.testing.assert_array_equal(np.array(first.reports), np.array(second.reports))
    assert first.output == second.output


# --- B15: grammars --------------------------------------------------------------------------------


def test_b15_nothing_is_forced_against_a_grammar() -> None:
    """A grammar that will not take the stop token goes on; the deferral is said once, the end comes when it may."""
    plan = [JSON, *[12] * 10, JSON_END, EOS]
    request = play(
        plan,
        toy_table(thinks=False),
        budget=3,
        budget_scope="response",
        hard_grace=0,
        allowed=lambda position, token: token == plan[min(position, 12)],
    )
    assert request.output == plan
    assert request.at(O_DEFERRED) == [4]
    assert set(request.forced) <= {12}
    assert request.at(O_CANCELLED)


def test_b15_a_token_that_the_grammar_determines_is_no_evidence() -> None:
    """Where the grammar left one token, the statistics are void."""
    request = play([11], window=2, masked_top1=lambda p: 1.0 if p < 10 else 0.4, max_tokens=14)
    confidences = [report[layout.R_CONFIDENCE] for report in request.reports]
    assert np.isnan(confidences[:12]).all()
    assert np.isfinite(confidences[-1])


# --- B16: hidden states ---------------------------------------------------------------------------


def test_b16_similarity_uses_only_its_own_requests_rows() -> None:
    """Two requests of constant, orthogonal states, prompts in chunks 3 + 2 and 1: each is like itself, 1.0."""
    plan = [*W[:5], NEWLINE, NEWLINE] * 6
    sim = Sim(slots=3, depth=2, hidden=4, seed=5)
    a = Request(plan, prompt=[*W[:4], THINK], hidden=lambda p: (1.0, 0, 0, 0), max_tokens=40, policy=resolved())
    b = Request(plan, prompt=[THINK], hidden=lambda p: (0, 2.0, 0, 0), max_tokens=40, policy=resolved())
    plain = Request(plan, prompt=[THINK], hidden=lambda p: (0, 0, 3.0, 0), max_tokens=40, policy=None)
    sim.add(a, b, plain)
    sizes = {a: [3, 2], b: [1], plain: [1]}
    while sim.running:
        sim.step(chunk=lambda r: sizes[r].pop(0) if sizes[r] else 1, drafts=lambda r: [19 if sim.steps % 2 else 11])
    for request in (a, b):
        seen = [row[layout.Q_SIMILARITY] for row in request.trace if not np.isnan(row[layout.Q_SIMILARITY])]
        assert len(seen) >= 4
        np.testing.assert_allclose(seen, 1.0, atol=1e-6)


# --- B17 and inertness ----------------------------------------------------------------------------


def test_b17_an_active_policy_changes_nothing_before_its_stop() -> None:
    """Before the stop no row is forced, and only EOS while thinking and the reserved ids are touched."""
    request = play([11], budget=30, max_tokens=40)
    assert request.forced == [30, 31]
    allowed = layout.P_MASK_RESERVED | layout.P_MOVE_EOS
    assert all(flags in (layout.P_MASK_RESERVED, allowed) for flags in request.flags)


def test_observe_touches_no_row_at_all() -> None:
    """`observe` decides everything: no forced token, no flag."""
    request = play([11, 12, EOS], mode="observe", budget=1)
    assert request.forced == []
    assert request.flags == [0, 0, 0]


def test_a_step_without_measurements_is_survived() -> None:
    """No tap, no statistics: budgets still bind."""
    sim = Sim()
    controller = sim.controller
    sim.add(Request([11], policy=resolved(budget=2)))
    rows = [0]
    for step in range(4):
        sim.total_len[0] = 1 + step
        verdict = controller.step(
            Rows(
                slot=torch.zeros(1, dtype=torch.int32),
                local=torch.zeros(1, dtype=torch.int32),
                pos=torch.tensor([step]),
                token=torch.tensor([11 if step < 3 else WAIT], dtype=torch.int32),
                total_len=sim.total_len,
            ),
            None,
            None,
        )
        rows.append(int(verdict.force[0]))
    assert rows[1:] == [-1, -1, WAIT, SHUT]


def test_tokens_that_were_never_measured_still_count() -> None:
    """Steps that the controller did not see: lengths stay right, and the budget binds."""
    sim = Sim()
    request = Request([11], policy=resolved(budget=6), max_tokens=20)
    sim.add(request)
    sim.step()
    for _ in range(3):  # three tokens while we were not asked
        request.output.append(11)
    sim.total_len[0] = request.total
    request.computed = request.total
    sim.run()
    assert request.forced[:2] == [6, 7]
    assert request.at(O_CLOSING) == [6]


@pytest.mark.parametrize("grace", [0, 30])
def test_b3_wherever_the_preemption_falls_the_response_is_the_same(grace: int) -> None:
    """Preempted after any token, a close comes at the same place, once, and its reason is told once.

    But for one token: a full stop that was the last one before the preemption has nothing that confirms it.
    """
    plan = [*W[:7], DOT, *W[:4], SHUT, 14, EOS]
    table = toy_table(transition=(WAIT, 12), after=(NEWLINE,))
    fields = {"budget": 6, "warn_at": 0.6, "grace": grace}
    undisturbed = play(plan, table, **fields)
    for after in range(1, len(undisturbed.output)):
        sim = Sim(table)
        request = Request(plan, policy=resolved(**fields))
        sim.add(request)
        for _ in range(after):
            sim.step()
        sim.preempt(request)
        sim.add(request)
        sim.run()
        if grace and request.output[after - 1] == DOT:
            assert request.forced != undisturbed.forced
            continue
        assert request.output == undisturbed.output, after
        assert request.forced == undisturbed.forced, after
        for bit in (O_DECIDED, O_WARNING, O_CLOSING):
            assert request.at(bit) == undisturbed.at(bit), (after, bit)
