"""Ending gracefully: RUN, ENDING, CLOSING, ANSWERING, DONE (portable source).

ENDING waits for a safe place, CLOSING forces a sequence, each token once and checked at its commit. The
sequence that closes the thinking is the transition text followed by the model's own end tag; otherwise it is
one stop token.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import (
    ANSWER_ROOM,
    ARGMAX_INVALID,
    BUDGET,
    CLOSE_KIND,
    CLOSE_NONE,
    CLOSE_STOP,
    CLOSE_THINKING,
    CURSOR,
    DEFERRED,
    E_BUSY,
    E_FULL,
    E_LINE,
    E_SAFE,
    E_SENTENCE,
    FINISH,
    FINISH_CLOSE,
    FINISH_END,
    GRACE,
    HARD_GRACE,
    LIMIT,
    MIN_END,
    MODE,
    MODE_OBSERVE,
    O_CANCELLED,
    O_CLOSING,
    O_DEFERRED,
    OUR_CLOSE,
    P_INVALID,
    P_MASK_RESERVED,
    P_MOVE_EOS,
    PHASE,
    PHASE_ANSWERING,
    PHASE_CLOSING,
    PHASE_DONE,
    PHASE_ENDING,
    PHASE_RUN,
    RC_BUDGET,
    RC_INVALID_LOGITS,
    REASON,
    ROOM_UNTIL,
    STOP_IDS,
    T_EOS,
    T_SPACE_FIRST,
    THINKING,
    TOKENS,
    USED,
    WAITED,
)
from earlystop.control.portable import f64, load, store

WORD_WINDOW = 4  # in the last tokens of the grace, the end of a word will do


def next_forced(ints: Any, base: Any, sequence: Any, close_at: Any) -> Any:
    """The token that CLOSING forces next; `sequence[close_at:]` holds the thinking's closing sequence."""
    token = load(ints, base + STOP_IDS + load(ints, base + REASON))
    if load(ints, base + CLOSE_KIND) == CLOSE_THINKING:
        token = load(sequence, close_at + load(ints, base + CURSOR))
    return token


def check_forced(ints: Any, base: Any, token: Any, sequence: Any, close_at: Any, close_len: Any) -> Any:
    """Moves the cursor past a committed token of ours, or calls the close off; O_CANCELLED or 0.

    A mismatch means that something above us decided (a grammar, vLLM's own thinking budget, a rejected
    draft): the phase is read again from the tokens, and the ending waits for its next chance.
    """
    bits = 0
    if token == next_forced(ints, base, sequence, close_at):
        cursor = load(ints, base + CURSOR) + 1
        store(ints, base + CURSOR, cursor)
        if load(ints, base + CLOSE_KIND) == CLOSE_STOP:
            store(ints, base + PHASE, PHASE_DONE)
        elif cursor >= close_len:
            store(ints, base + PHASE, PHASE_ANSWERING)
            store(ints, base + OUR_CLOSE, 1)
            store(ints, base + REASON, 0)
            store(ints, base + CLOSE_KIND, CLOSE_NONE)
    else:
        bits = O_CANCELLED
        store(ints, base + PHASE, PHASE_ENDING)
        store(ints, base + CLOSE_KIND, CLOSE_NONE)
    return bits


def safe_place(ints: Any, base: Any, event: Any, lookahead: Any) -> Any:
    """1 where the text may end after this token.

    `lookahead` holds the token flags of the model's most likely next token: a full stop ends a sentence if
    white space or the end follows. A line end will do after half the grace, a word's end in its last tokens.
    """
    safe = 0
    waited = load(ints, base + WAITED)
    grace = load(ints, base + GRACE)
    follows = (lookahead & (T_SPACE_FIRST + T_EOS)) > 0
    if (event & (E_SAFE + E_FULL)) > 0:
        safe = 1
    if ((event & E_SENTENCE) > 0) & follows:
        safe = 1
    if ((event & E_LINE) > 0) & (2 * waited >= grace):
        safe = 1
    if follows & (waited + WORD_WINDOW >= grace):
        safe = 1
    if waited >= grace:
        safe = 1
    if ((event & E_BUSY) > 0) & (waited < load(ints, base + HARD_GRACE)):
        safe = 0
    return safe


def closes_thinking(ints: Any, base: Any) -> Any:
    """1 when ending now means closing the thinking, 0 when it means the stop token."""
    closes = load(ints, base + THINKING)
    if load(ints, base + FINISH) == FINISH_END:
        closes = 0
    return closes


def begin_close(ints: Any, base: Any, floats: Any, fbase: Any, cursor: Any) -> Any:
    """ENDING becomes CLOSING, from position `cursor` of the closing sequence; O_CLOSING, or 0 if held back.

    The stop token is held back until the request's own min_tokens are there.
    """
    bits = O_CLOSING
    if closes_thinking(ints, base) == 1:
        store(ints, base + CLOSE_KIND, CLOSE_THINKING)
        room = f64(load(ints, base + ANSWER_ROOM))
        store(floats, fbase + ROOM_UNTIL, load(floats, fbase + USED) + room)
    else:
        store(ints, base + CLOSE_KIND, CLOSE_STOP)
        if load(ints, base + TOKENS) < load(ints, base + MIN_END):
            bits = 0
    if bits > 0:
        store(ints, base + PHASE, PHASE_CLOSING)
        store(ints, base + CURSOR, cursor)
    else:
        store(ints, base + CLOSE_KIND, CLOSE_NONE)
    return bits


def wait_for_place(ints: Any, base: Any, floats: Any, fbase: Any, event: Any, lookahead: Any) -> Any:
    """One committed token of ENDING: closes where it is safe; O_CLOSING and O_DEFERRED bits."""
    bits = 0
    if safe_place(ints, base, event, lookahead) == 1:
        bits = begin_close(ints, base, floats, fbase, 0)
    if (bits == 0) & (load(ints, base + WAITED) >= load(ints, base + GRACE)):
        if load(ints, base + DEFERRED) == 0:
            store(ints, base + DEFERRED, 1)
            bits = O_DEFERRED
    store(ints, base + WAITED, load(ints, base + WAITED) + 1)
    return bits


def may_end(ints: Any, base: Any) -> Any:
    """0 for `finish=close_thinking` outside the thinking: there is nothing that it may end."""
    may = 1
    if (load(ints, base + FINISH) == FINISH_CLOSE) & (load(ints, base + THINKING) == 0):
        may = 0
    return may


def begin_ending(ints: Any, base: Any, reason: Any) -> None:
    """RUN or ANSWERING becomes ENDING for `reason`."""
    store(ints, base + PHASE, PHASE_ENDING)
    store(ints, base + REASON, reason)
    store(ints, base + WAITED, 0)
    store(ints, base + DEFERRED, 0)


def reserve_binds(ints: Any, base: Any, close_len: Any) -> Any:
    """1 when the thinking must end now so that the answer still fits into max_tokens and the context.

    The wait for a safe place counts into the reserve, but never for more than a quarter of the limit:
    otherwise a short limit would leave no thinking at all.
    """
    binds = 0
    room = load(ints, base + ANSWER_ROOM)
    limit = load(ints, base + LIMIT)
    grace = load(ints, base + GRACE)
    if grace > limit // 4:
        grace = limit // 4
    if (room > 0) & (load(ints, base + THINKING) == 1) & (load(ints, base + FINISH) != FINISH_END):
        if limit - load(ints, base + TOKENS) <= room + close_len + grace:
            binds = 1
    return binds


def start_phase(ints: Any, base: Any, floats: Any, fbase: Any, tag_at: Any) -> Any:
    """Before the first token, and where the thinking opens again: a budget with nothing left closes at once.

    Then the end tag alone is forced (position `tag_at` of the closing sequence), without the transition
    text: there is nothing to lead over from. O_CLOSING or 0.
    """
    bits = 0
    running = load(ints, base + PHASE) == PHASE_RUN
    observing = (load(ints, base + MODE) & MODE_OBSERVE) > 0
    spent = load(floats, fbase + USED) >= load(floats, fbase + BUDGET)
    if running & spent & (observing == 0) & (load(ints, base + THINKING) == 1):
        begin_ending(ints, base, RC_BUDGET)
        bits = begin_close(ints, base, floats, fbase, tag_at)
    return bits


def plan_force(ints: Any, base: Any, sequence: Any, close_at: Any, argmax: Any) -> Any:
    """Token that the row must give, or -1."""
    force = -1
    if (load(ints, base + MODE) & MODE_OBSERVE) == 0:
        if load(ints, base + PHASE) == PHASE_CLOSING:
            force = next_forced(ints, base, sequence, close_at)
        if argmax == ARGMAX_INVALID:
            force = load(ints, base + STOP_IDS + RC_INVALID_LOGITS)
    return force


def plan_flags(ints: Any, base: Any, argmax: Any) -> Any:
    """P_* bits of the row: EOS moves into the end tag while the model thinks, reserved ids are masked."""
    flags = 0
    if (load(ints, base + MODE) & MODE_OBSERVE) == 0:
        flags = P_MASK_RESERVED
        if (load(ints, base + THINKING) == 1) & (load(ints, base + FINISH) != FINISH_END):
            flags = flags | P_MOVE_EOS
        if argmax == ARGMAX_INVALID:
            flags = P_INVALID
    return flags
