"""Judging the committed tokens and planning the row that is sampled next (portable source)."""

from __future__ import annotations

from typing import Any

from earlystop.control.budget import take_extra
from earlystop.control.closing import plan_flags, plan_force
from earlystop.control.decide import is_forced, judge_token
from earlystop.control.drafts import adopt_plan, keep_row, plan_code, plan_drafts
from earlystop.control.layout import (
    ARGMAX_INVALID,
    BUDGET,
    CLOSE_KIND,
    E_SHUT,
    E_THINK,
    EPOCH,
    H_CLOSE_LEN,
    H_DEPTH,
    H_OPEN_LEN,
    H_SHUT_LEN,
    H_TAG_AT,
    HAS_GRAMMAR,
    LAST_CONFIDENCE,
    LAST_ENTROPY,
    LAST_MARGIN,
    LAST_NOVELTY,
    LAST_SCORE,
    LAST_SIMILARITY,
    N_FLOATS,
    N_INTS,
    N_REPORT,
    N_STATS,
    N_TRACE,
    O_ACTIVE,
    O_DECIDED,
    O_INVALID,
    O_REBUILT,
    O_WOULD,
    OWED,
    Q_ARGMAX,
    Q_ENTROPY,
    Q_EVENT,
    Q_MARGIN_EOS,
    Q_MARGIN_THINK,
    Q_NOVELTY,
    Q_SIMILARITY,
    Q_TOKEN,
    Q_TOP1,
    R_BITS,
    R_BUDGET,
    R_CLOSE_KIND,
    R_COMMITTED,
    R_CONFIDENCE,
    R_ENTROPY,
    R_EPOCH,
    R_MARGIN,
    R_NEXT,
    R_NOVELTY,
    R_REASON,
    R_REASONING,
    R_SCORE,
    R_SIMILARITY,
    R_SLOT,
    R_TOKENS,
    R_USED,
    REASON,
    REASONING,
    REBUILT,
    S_ENTROPY,
    S_MARGIN_EOS,
    S_MARGIN_THINK,
    S_TOP1,
    TOKENS,
    USED,
    VERDICT,
    WOULD_REASON,
)
from earlystop.control.portable import f64, load, real, store
from earlystop.control.tokens import cost_of, flags_of, unknown_token


def report_row(r: Any, slot: Any, bits: Any, count: Any, ints: Any, floats: Any, report: Any) -> None:
    """Writes what the host is told about this request's step; cumulative, so a lost report loses nothing."""
    base = slot * N_INTS
    fbase = slot * N_FLOATS
    out = r * N_REPORT
    reason = load(ints, base + REASON)
    if (bits & O_DECIDED) > 0:
        reason = load(ints, base + VERDICT)  # its close may be over already
    elif (bits & O_WOULD) > 0:
        reason = load(ints, base + WOULD_REASON)
    store(report, out + R_SLOT, f64(slot))
    store(report, out + R_EPOCH, f64(load(ints, base + EPOCH)))
    store(report, out + R_BITS, f64(bits | O_ACTIVE))
    store(report, out + R_REASON, f64(reason))
    store(report, out + R_TOKENS, f64(load(ints, base + TOKENS)))
    store(report, out + R_REASONING, f64(load(ints, base + REASONING)))
    store(report, out + R_USED, load(floats, fbase + USED))
    store(report, out + R_BUDGET, load(floats, fbase + BUDGET))
    store(report, out + R_CONFIDENCE, load(floats, fbase + LAST_CONFIDENCE))
    store(report, out + R_ENTROPY, load(floats, fbase + LAST_ENTROPY))
    store(report, out + R_SIMILARITY, load(floats, fbase + LAST_SIMILARITY))
    store(report, out + R_MARGIN, load(floats, fbase + LAST_MARGIN))
    store(report, out + R_NOVELTY, load(floats, fbase + LAST_NOVELTY))
    store(report, out + R_SCORE, load(floats, fbase + LAST_SCORE))
    store(report, out + R_CLOSE_KIND, f64(load(ints, base + CLOSE_KIND)))
    store(report, out + R_COMMITTED, f64(count))


def judge_program(
    r: Any,
    n_rows: Any,
    row_slot: Any,
    row_local: Any,
    row_token: Any,
    stats: Any,
    argmax: Any,
    masked: Any,
    similarity: Any,
    events: Any,
    novelty: Any,
    committed: Any,
    unit_slot: Any,
    ints: Any,
    floats: Any,
    scratch: Any,
    drafts: Any,
    stored: Any,
    pending: Any,
    pending_argmax: Any,
    pending_plan: Any,
    force: Any,
    flags: Any,
    grammar: Any,
    report: Any,
    trace: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> None:
    """Row r, if it is a request's first: judges the committed tokens, then plans this row and its drafts' rows.

    Draft rows are planned on a copy of the slot (row `scratch + slot`) that takes the drafts in as if they
    were committed: budgets and forced sequences are exact in every row, the slot itself has not moved.
    """
    depth = load(header, H_DEPTH)
    slot = load(unit_slot, r)
    local = load(row_local, r)
    planned = 0  # by the first row of its request
    if (local > 0) & (local < depth) & (local <= r):
        owner = load(unit_slot, r - local)
        if (owner >= 0) & (owner == load(row_slot, r)):
            planned = 1
    if planned == 0:
        store(force, r, -1)
        store(flags, r, 0)
        store(grammar, r, 0)
        store(report, r * N_REPORT + R_SLOT, real(-1.0))
    if slot >= 0:
        base = slot * N_INTS
        fbase = slot * N_FLOATS
        open_len = load(header, H_OPEN_LEN)
        shut_len = load(header, H_SHUT_LEN)
        close_at = open_len + shut_len
        count = load(committed, r)
        bits = load(ints, base + OWED) | take_extra(ints, base, floats, fbase)
        store(ints, base + OWED, 0)
        for i in range(count):
            token = load(row_token, r)
            ahead = load(argmax, r)
            place = slot * depth + i
            if i + 1 < count:
                token = load(drafts, place + 1)
                ahead = load(pending_argmax, place + 1)
            event = load(events, r * depth + i)
            if event < 0:
                bits = bits | unknown_token(ints, base, floats, fbase, sequence, header)
            else:
                bits = bits | adopt_plan(ints, base, load(pending_plan, place), token, sequence, close_at)
                event = event | is_forced(ints, base, token, sequence, close_at)
                store(floats, fbase + LAST_NOVELTY, load(novelty, r * depth + i))
                margin = load(pending, place * N_STATS + S_MARGIN_EOS)
                if (event & (E_THINK | E_SHUT)) > 0:
                    margin = load(pending, place * N_STATS + S_MARGIN_THINK)
                bits = bits | judge_token(
                    ints, base, floats, fbase, token, event,
                    f64(load(pending, place * N_STATS + S_TOP1)), f64(load(pending, place * N_STATS + S_ENTROPY)),
                    f64(margin), f64(load(similarity, r * depth + i)), cost_of(token, costs, header),
                    flags_of(ahead, token_flags, header), sequence, close_at, load(header, H_CLOSE_LEN),
                    load(header, H_TAG_AT), shut_len,
                )  # fmt: skip
            out = (r * depth + i) * N_TRACE
            store(trace, out + Q_TOKEN, f64(token))
            store(trace, out + Q_TOP1, f64(load(pending, place * N_STATS + S_TOP1)))
            store(trace, out + Q_ENTROPY, f64(load(pending, place * N_STATS + S_ENTROPY)))
            store(trace, out + Q_MARGIN_THINK, f64(load(pending, place * N_STATS + S_MARGIN_THINK)))
            store(trace, out + Q_MARGIN_EOS, f64(load(pending, place * N_STATS + S_MARGIN_EOS)))
            store(trace, out + Q_ARGMAX, f64(load(pending_argmax, place)))
            store(trace, out + Q_EVENT, f64(event))
            store(trace, out + Q_SIMILARITY, f64(load(similarity, r * depth + i)))
            store(trace, out + Q_NOVELTY, load(novelty, r * depth + i))
        if load(ints, base + REBUILT) == 1:
            bits = bits | O_REBUILT
            store(ints, base + REBUILT, 2)
        if load(argmax, r) == ARGMAX_INVALID:
            bits = bits | O_INVALID
        report_row(r, slot, bits, count, ints, floats, report)
        for k in range(N_STATS):
            store(report, r * N_REPORT + R_NEXT + k, f64(load(stats, r * N_STATS + k)))
        store(report, r * N_REPORT + R_NEXT + N_STATS, f64(load(argmax, r)))
        store(force, r, plan_force(ints, base, sequence, close_at, load(argmax, r)))
        store(flags, r, plan_flags(ints, base, load(argmax, r)))
        store(grammar, r, load(ints, base + HAS_GRAMMAR))
        keep_row(
            r, slot, 0, depth, row_token, stats, argmax, masked, ints, drafts, pending, pending_argmax, pending_plan,
            plan_code(ints, base),
        )  # fmt: skip
        kept = 1
        if depth > 1:
            kept = plan_drafts(
                r, n_rows, slot, row_slot, row_local, row_token, stats, argmax, masked, ints, floats, scratch,
                drafts, pending, pending_argmax, pending_plan, force, flags, grammar, report, token_flags, symbols,
                symbol_offsets, costs, sequence, header,
            )  # fmt: skip
        store(stored, slot, kept)
