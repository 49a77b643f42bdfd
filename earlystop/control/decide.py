"""One step of the decision, for one request: the pure function that V1, V2 and replay call (portable source).

`judge_token` is the decision. It sees one committed token: what the text did (`scan.py`), what the row that
sampled it measured, and the slot. Nothing else: no clock, no random numbers, no rank, no neighbour.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.budget import adapt_budget, exhausted, spend, warn
from earlystop.control.closing import (
    begin_ending,
    check_forced,
    may_end,
    next_forced,
    only_observed,
    reserve_binds,
    start_phase,
    wait_for_place,
)
from earlystop.control.layout import (
    CAME_FROM,
    COMMAND,
    E_FORCED,
    E_OPEN,
    E_SHUT,
    E_THINK,
    E_UNIT,
    FINISH,
    FINISH_END,
    LAST_MARGIN,
    MIN_TOKENS,
    MODE,
    MODE_AUDIT,
    MODE_OBSERVE,
    O_CLOSING,
    O_DECIDED,
    O_PROGRESS,
    O_WOULD,
    OUR_CLOSE,
    PHASE,
    PHASE_ANSWERING,
    PHASE_CLOSING,
    PHASE_ENDING,
    PHASE_RUN,
    RC_BUDGET,
    RC_LENGTH_RESERVE,
    RC_LOW_CONFIDENCE,
    RC_REPETITION,
    REASON,
    SCOPE,
    THINKING,
    TOKENS,
    VERDICT,
    WOULD_REASON,
)
from earlystop.control.portable import i32, load, store
from earlystop.control.rules import at_unit_end, repetition, rest, take_statistics


def is_forced(ints: Any, base: Any, token: Any, sequence: Any, close_at: Any) -> Any:
    """E_FORCED when the slot is closing and `token` is the one it forced, else 0."""
    bit = 0
    if load(ints, base + PHASE) == PHASE_CLOSING:
        if token == next_forced(ints, base, sequence, close_at):
            bit = E_FORCED
    return bit


def follow_thinking(ints: Any, base: Any, floats: Any, fbase: Any, event: Any, tag_at: Any) -> Any:
    """The model opened or closed its thinking by itself; O_* bits where a spent budget closes it at once."""
    bits = 0
    phase = load(ints, base + PHASE)
    if (event & E_SHUT) > 0:
        ends_anyway = (phase == PHASE_ENDING) & (load(ints, base + FINISH) == FINISH_END)
        if (phase != PHASE_CLOSING) & (ends_anyway == 0):
            store(ints, base + PHASE, PHASE_ANSWERING)
            store(ints, base + REASON, 0)
        store(ints, base + CAME_FROM, PHASE_ANSWERING)
        rest(ints, base)
    if (event & E_OPEN) > 0:
        rest(ints, base)
        store(ints, base + OUR_CLOSE, 0)
        store(ints, base + CAME_FROM, PHASE_RUN)
        if phase == PHASE_ANSWERING:
            store(ints, base + PHASE, PHASE_RUN)
        bits = start_phase(ints, base, floats, fbase, tag_at)
    return bits


def choose_reason(ints: Any, base: Any, floats: Any, fbase: Any, by_signal: Any, close_len: Any) -> Any:
    """The reason to end now, or 0. Outside wishes go before the budget, the budget before the signals.

    Signal rules wait for min_tokens; after a first verdict that only observed they are done.
    """
    reason = 0
    muted = load(ints, base + WOULD_REASON) > 0
    if (load(ints, base + TOKENS) >= load(ints, base + MIN_TOKENS)) & (muted == 0):
        reason = by_signal
    if reserve_binds(ints, base, close_len) == 1:
        reason = RC_LENGTH_RESERVE
    if exhausted(ints, base, floats, fbase) == 1:
        reason = RC_BUDGET
    command = load(ints, base + COMMAND)
    if command > 0:
        reason = command
    if ((load(ints, base + MODE) & MODE_OBSERVE) > 0) & muted:
        reason = 0
    if may_end(ints, base) == 0:
        reason = 0
    return reason


def only_observes(ints: Any, base: Any) -> Any:
    """1 when the ending under way must not act: `observe`, or a signal rule of an audited request."""
    virtual = 0
    mode = load(ints, base + MODE)
    reason = load(ints, base + REASON)
    if (mode & MODE_OBSERVE) > 0:
        virtual = 1
    if ((mode & MODE_AUDIT) > 0) & (reason >= RC_LOW_CONFIDENCE) & (reason <= RC_REPETITION):
        virtual = 1
    return virtual


def move_phase(
    ints: Any,
    base: Any,
    floats: Any,
    fbase: Any,
    event: Any,
    lookahead: Any,
    by_signal: Any,
    close_len: Any,
    tag_at: Any,
) -> Any:
    """RUN/ANSWERING -> ENDING -> CLOSING after one committed token; O_* bits."""
    bits = 0
    phase = load(ints, base + PHASE)
    voiced = i32(by_signal)
    open_to_reasons = (phase == PHASE_RUN) | (phase == PHASE_ANSWERING)
    if (phase == PHASE_ENDING) & (only_observes(ints, base) == 1):
        open_to_reasons = ((load(ints, base + MODE) & MODE_OBSERVE) == 0) | (phase == PHASE_RUN)
        voiced = 0
    if open_to_reasons:
        reason = choose_reason(ints, base, floats, fbase, voiced, close_len)
        if reason > 0:
            begin_ending(ints, base, reason)
            if only_observes(ints, base) == 0:
                store(ints, base + VERDICT, reason)
                bits = O_DECIDED
    if load(ints, base + PHASE) == PHASE_ENDING:
        waited = wait_for_place(ints, base, floats, fbase, event, lookahead, close_len, tag_at)
        if only_observes(ints, base) == 1:
            if (waited & O_CLOSING) > 0:
                bits = O_WOULD
                only_observed(ints, base)
        else:
            bits = bits | waited
    return bits


def judge_token(
    ints: Any,
    base: Any,
    floats: Any,
    fbase: Any,
    token: Any,
    event: Any,
    top1: Any,
    entropy: Any,
    margin: Any,
    similarity: Any,
    cost: Any,
    lookahead: Any,
    sequence: Any,
    close_at: Any,
    close_len: Any,
    tag_at: Any,
    shut_len: Any,
) -> Any:
    """Folds one committed token into the slot and decides; returns O_* bits.

    `event` comes from `scan_token`, with E_FORCED from `is_forced`. top1, entropy (nats) and margin (nats)
    were measured on the row that sampled the token, similarity at the unit that ends with it; NaN =
    undefined. `lookahead` holds the token flags of the next row's most likely token. The phase machine is in
    `closing.py`, the rules in `rules.py` and `budget.py`.
    """
    bits = 0
    if (event & E_OPEN) > 0:
        store(ints, base + THINKING, 1)
    if (event & E_SHUT) > 0:
        store(ints, base + THINKING, 0)
    if load(ints, base + PHASE) == PHASE_CLOSING:
        bits = check_forced(ints, base, token, sequence, close_at, close_len)
    answering = load(ints, base + PHASE) == PHASE_ANSWERING
    spend(ints, base, floats, fbase, event, cost, shut_len)
    by_signal = 0
    if (margin == margin) & ((event & E_FORCED) == 0):
        store(floats, fbase + LAST_MARGIN, margin)
    if (top1 == top1) & ((event & E_FORCED) == 0):
        by_signal = take_statistics(ints, base, floats, fbase, top1, entropy)
        if (load(ints, base + SCOPE) == 0) | ((event & E_THINK) > 0):
            bits = bits | adapt_budget(ints, base, floats, fbase, entropy)
    if (event & E_UNIT) > 0:
        at_unit = at_unit_end(ints, base, floats, fbase, event, similarity)
        if at_unit > 0:
            by_signal = at_unit
        bits = bits | O_PROGRESS
    if answering:
        rest(ints, base)
        by_signal = 0
    repeats = repetition(ints, base, event)
    if repeats > 0:
        by_signal = repeats
    bits = bits | warn(ints, base, floats, fbase)
    bits = bits | follow_thinking(ints, base, floats, fbase, event, tag_at)
    return bits | move_phase(ints, base, floats, fbase, event, lookahead, by_signal, close_len, tag_at)
