"""The rows of draft tokens: planned on a copy of the slot, measured until accepted (portable source)."""

from __future__ import annotations

from typing import Any

from earlystop.control.budget import foresee_budget
from earlystop.control.closing import next_forced, plan_flags, plan_force
from earlystop.control.layout import (
    CAME_FROM,
    CLOSE_KIND,
    CLOSE_MAX,
    CURSOR,
    H_DEPTH,
    H_OPEN_LEN,
    H_SHUT_LEN,
    H_VOCAB,
    HAS_GRAMMAR,
    MODE,
    MODE_OBSERVE,
    N_FLOATS,
    N_INTS,
    N_REPORT,
    N_STATS,
    O_CLOSING,
    O_DECIDED,
    PHASE,
    PHASE_CLOSING,
    PHASE_DONE,
    PHASE_ENDING,
    R_SLOT,
    REASON,
    S_TOP1,
    UNIT_STATS,
    VERDICT,
)
from earlystop.control.portable import f64, load, nan, real, store
from earlystop.control.tokens import flags_of, fold_token


def plan_code(ints: Any, base: Any) -> Any:
    """What a row planned on this slot forces, as one number: where in which closing sequence, why; 0 = nothing."""
    code = 0
    if (load(ints, base + PHASE) == PHASE_CLOSING) & ((load(ints, base + MODE) & MODE_OBSERVE) == 0):
        place = load(ints, base + CURSOR) + CLOSE_MAX * load(ints, base + REASON)
        code = place * 4 + load(ints, base + CLOSE_KIND)
    return code


def adopt_plan(ints: Any, base: Any, code: Any, token: Any, sequence: Any, close_at: Any) -> Any:
    """A committed token that its row forced though the slot is not closing: the close has begun; O_* bits.

    A draft's row is planned before the statistics of the drafts are in. Where these change the verdict (the
    budget adapts, a rule fires first), what was forced stands in the text already: it is finished, not repeated.
    """
    bits = 0
    phase = load(ints, base + PHASE)
    if (code > 0) & (phase != PHASE_CLOSING) & (phase != PHASE_DONE):
        kind = load(ints, base + CLOSE_KIND)
        reason = load(ints, base + REASON)
        cursor = load(ints, base + CURSOR)
        place = code // 4
        store(ints, base + CLOSE_KIND, code % 4)
        store(ints, base + REASON, place // CLOSE_MAX)
        store(ints, base + CURSOR, place % CLOSE_MAX)
        if next_forced(ints, base, sequence, close_at) == token:
            bits = O_CLOSING
            if phase != PHASE_ENDING:
                store(ints, base + CAME_FROM, phase)
                store(ints, base + VERDICT, place // CLOSE_MAX)
                bits = O_CLOSING | O_DECIDED
            store(ints, base + PHASE, PHASE_CLOSING)
        else:
            store(ints, base + CLOSE_KIND, kind)
            store(ints, base + REASON, reason)
            store(ints, base + CURSOR, cursor)
    return bits


def keep_row(
    r: Any,
    slot: Any,
    j: Any,
    depth: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    ints: Any,
    drafts: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    plan: Any,
) -> None:
    """Stores row r's measurements until its token is committed, void where a grammar left no choice."""
    place = slot * depth + j
    store(drafts, place, load(row_token, r))
    forced_by_grammar = (load(ints, slot * N_INTS + HAS_GRAMMAR) == 1) & (load(masked, r * N_STATS + S_TOP1) >= 1.0)
    for k in range(N_STATS):
        value = f64(load(stats, r * N_STATS + k))
        if forced_by_grammar:
            value = nan()
        store(pending, place * N_STATS + k, value)
    store(pending_argmax, place, load(argmax, r))
    store(pending_plan, place, plan)


def plan_drafts(
    r: Any,
    n_rows: Any,
    slot: Any,
    row_slot: Any,
    row_local: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    ints: Any,
    floats: Any,
    scratch: Any,
    drafts: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    force: Any,
    flags: Any,
    grammar: Any,
    report: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> Any:
    """Plans the rows j >= 1 of the request whose first row is r; returns the number of its rows."""
    depth = load(header, H_DEPTH)
    base = (scratch + slot) * N_INTS
    fbase = (scratch + slot) * N_FLOATS
    for column in range(N_INTS):
        store(ints, base + column, load(ints, slot * N_INTS + column))
    for column in range(N_FLOATS):
        store(floats, fbase + column, load(floats, slot * N_FLOATS + column))
    store(ints, base + UNIT_STATS, 0)  # statistics of drafts are not in: no score on part of a unit
    foresee_budget(ints, base, floats, fbase, depth)
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    kept = 1
    alive = 1
    for j in range(1, depth):
        row = r + j
        here = 0
        if row < n_rows:
            if (load(row_slot, row) == slot) & (load(row_local, row) == j):
                here = 1
        if here == 1:
            store(force, row, -1)
            store(flags, row, 0)
            store(grammar, row, 0)
            store(report, row * N_REPORT + R_SLOT, real(-1.0))
            token = load(row_token, row)
            plan = 0
            if (token < 0) | (token >= load(header, H_VOCAB)):
                alive = 0  # void from here on
            if alive == 1:
                ahead = flags_of(load(argmax, row), token_flags, header)
                fold_token(
                    ints, base, floats, fbase, token, ahead, ints, 0, 0, token_flags, symbols, symbol_offsets, costs,
                    sequence, header,
                )  # fmt: skip
                store(force, row, plan_force(ints, base, sequence, close_at, load(argmax, row)))
                store(flags, row, plan_flags(ints, base, load(argmax, row)))
                store(grammar, row, load(ints, base + HAS_GRAMMAR))
                plan = plan_code(ints, base)
            keep_row(
                row, slot, j, depth, row_token, stats, argmax, masked, ints, drafts, pending, pending_argmax,
                pending_plan, plan,
            )  # fmt: skip
            kept = j + 1
    return kept
