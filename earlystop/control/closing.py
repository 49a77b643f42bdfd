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
    CAME_FROM,
    CLOSE_KIND,
    CLOSE_NONE,
    CLOSE_STOP,
    CLOSE_THINKING,
    COMMAND,
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
    HAS_GRAMMAR,
    LIMIT,
    MIN_END,
    MODE,
    MODE_OBSERVE,
    O_CANCELLED,
    O_CLOSING,
    O_DECIDED,
    O_DEFERRED,
    O_WOULD,
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
    SCOPE,
    STOP_IDS,
    T_EOS,
    T_SPACE_FIRST,
    THINKING,
    TOKENS,
    USED,
    VERDICT,
    WAITED,
    WOULD_REASON,
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
        if (load(ints, base + HAS_GRAMMAR) == 1) & (load(ints, base + DEFERRED) == 0):
            store(ints, base + DEFERRED, 1)
            bits = O_CANCELLED | O_DEFERRED
    return bits


def closes_thinking(ints: Any, base: Any) -> Any:
    """1 when ending now means closing the thinking, 0 when it means the stop token."""
    closes = load(ints, base + THINKING)
    if load(ints, base + FINISH) == FINISH_END:
        closes = 0
    return closes


def room_spent(ints: Any, base: Any, close_len: Any) -> Any:
    """1 when waiting longer would eat the answer's room: what is left just holds the close and the answer."""
    spent = 0
    room = load(ints, base + ANSWER_ROOM)
    if (room > 0) & (closes_thinking(ints, base) == 1):
        if load(ints, base + LIMIT) - load(ints, base + TOKENS) <= room + close_len:
            spent = 1
    return spent


def safe_place(ints: Any, base: Any, event: Any, lookahead: Any, close_len: Any) -> Any:
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
    if room_spent(ints, base, close_len) == 1:
        safe = 1
    if ((event & E_BUSY) > 0) & (waited < load(ints, base + HARD_GRACE)):
        safe = 0
    return safe


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
        if load(ints, base + STOP_IDS + load(ints, base + REASON)) < 0:
            bits = 0  # no token ends this request
    if bits > 0:
        store(ints, base + PHASE, PHASE_CLOSING)
        store(ints, base + CURSOR, cursor)
    else:
        store(ints, base + CLOSE_KIND, CLOSE_NONE)
    return bits


def wait_for_place(
    ints: Any, base: Any, floats: Any, fbase: Any, event: Any, lookahead: Any, close_len: Any, tag_at: Any
) -> Any:
    """One committed token of ENDING: closes where it is safe; O_CLOSING and O_DEFERRED bits.

    Where the whole closing sequence would not fit into the limit any more, the end tag alone closes.
    """
    bits = 0
    cursor = 0
    if load(ints, base + LIMIT) - load(ints, base + TOKENS) <= close_len:
        cursor = tag_at
    if safe_place(ints, base, event, lookahead, close_len) == 1:
        bits = begin_close(ints, base, floats, fbase, cursor)
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
    """RUN or ANSWERING becomes ENDING for `reason`; an outside wish is granted with that."""
    phase = load(ints, base + PHASE)
    if phase != PHASE_ENDING:
        store(ints, base + CAME_FROM, phase)
    if reason == load(ints, base + COMMAND):
        store(ints, base + COMMAND, 0)
    store(ints, base + PHASE, PHASE_ENDING)
    store(ints, base + REASON, reason)
    store(ints, base + WAITED, 0)
    store(ints, base + DEFERRED, 0)


def run_again(ints: Any, base: Any) -> None:
    """ENDING is called off: back to where it began."""
    store(ints, base + PHASE, load(ints, base + CAME_FROM))
    store(ints, base + REASON, 0)
    store(ints, base + CLOSE_KIND, CLOSE_NONE)


def only_observed(ints: Any, base: Any) -> None:
    """The ending would have begun to close here; it only observes, so the request runs on."""
    store(ints, base + WOULD_REASON, load(ints, base + REASON))
    run_again(ints, base)


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
    text: there is nothing to lead over from. Outside the thinking a response budget of zero is the stop
    token at once. O_DECIDED and O_CLOSING, O_WOULD where it only observes, or 0.
    """
    bits = 0
    observing = (load(ints, base + MODE) & MODE_OBSERVE) > 0
    muted = observing & (load(ints, base + WOULD_REASON) > 0)
    running = (load(ints, base + PHASE) == PHASE_RUN) & (may_end(ints, base) == 1) & (muted == 0)
    spent = load(floats, fbase + USED) >= load(floats, fbase + BUDGET)
    nothing = (load(ints, base + SCOPE) == 0) & (load(ints, base + TOKENS) == 0)
    if running & spent & ((load(ints, base + THINKING) == 1) | nothing):
        begin_ending(ints, base, RC_BUDGET)
        closes = begin_close(ints, base, floats, fbase, tag_at)
        if observing:
            if closes > 0:
                only_observed(ints, base)
                bits = O_WOULD
        else:
            store(ints, base + VERDICT, RC_BUDGET)
            bits = O_DECIDED | closes
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
