"""Starting a slot: reading the prompt, replaying the output of a resumed request (portable source)."""

from __future__ import annotations

from typing import Any

from earlystop.control.closing import start_phase
from earlystop.control.layout import (
    BUDGET,
    BUDGET0,
    CLOSE_KIND,
    CLOSE_THINKING,
    CURSOR,
    CYCLE_PERIODS,
    H_CLOSE_LEN,
    H_GRAM_SIZE,
    H_OPEN_LEN,
    H_SHUT_LEN,
    H_TAG_AT,
    H_VOCAB,
    LAST_CONFIDENCE,
    MODE,
    N_FLOATS,
    N_INTS,
    OWED,
    PHASE,
    PHASE_CLOSING,
    REBUILT,
    RING,
    SEEN,
    T_SPACE_FIRST,
    TAGGED,
    THINKING,
    TOKENS,
    UNIT_STATS,
    WINDOW_N,
)
from earlystop.control.portable import last_match, load, nan, real, store
from earlystop.control.rules import rest
from earlystop.control.scan import scan_unknown
from earlystop.control.tokens import flags_of, fold_token, unknown_token


def reset_slot(ints: Any, base: Any, floats: Any, fbase: Any) -> None:
    """Clears the state columns; the policy columns are the host's."""
    for column in range(PHASE, N_INTS):
        store(ints, base + column, 0)
    for place in range(RING, RING + CYCLE_PERIODS):
        store(ints, base + place, -1)
    for column in range(BUDGET, N_FLOATS):
        store(floats, fbase + column, real(0.0))
    for column in range(LAST_CONFIDENCE, N_FLOATS):
        store(floats, fbase + column, nan())
    store(floats, fbase + BUDGET, load(floats, fbase + BUDGET0))


def clear_evidence(ints: Any, base: Any) -> None:
    """Empties windows, streaks and the open unit's statistics: they do not survive a preemption."""
    rest(ints, base)
    store(ints, base + WINDOW_N, 0)
    store(ints, base + UNIT_STATS, 0)


def resume_close(ints: Any, base: Any, sequence: Any, header: Any, output: Any, first: Any, count: Any) -> None:
    """After a rebuild: goes on with a closing sequence whose beginning is the end of the output.

    The longest matching beginning counts. One token alone proves nothing, unless the rebuilt phase agrees.
    """
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    close_len = load(header, H_CLOSE_LEN)
    best = 0
    for length in range(1, close_len):
        if length <= count:
            same = 1
            for i in range(length):
                if load(output, first + count - length + i) != load(sequence, close_at + i):
                    same = 0
            if same == 1:
                best = length
    if (best >= 2) & (load(ints, base + THINKING) == 1) & (load(ints, base + PHASE) != PHASE_CLOSING):
        store(ints, base + PHASE, PHASE_CLOSING)
        store(ints, base + CLOSE_KIND, CLOSE_THINKING)
        store(ints, base + CURSOR, best)


def start_program(
    p: Any,
    slots: Any,
    token_base: Any,
    prompt_len: Any,
    prefill_len: Any,
    all_tokens: Any,
    ints: Any,
    floats: Any,
    grams: Any,
    stored: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> None:
    """Starts slot `slots[p]`: reads the prompt's last tag, replays the output of a resumed request.

    The tokens of entry p are all_tokens[token_base[p] : token_base[p] + prefill_len[p]]; those from
    prompt_len[p] on were generated before a preemption. The replayed text decides again with undefined
    statistics: budgets, phases and boundaries come out as they were, windows and streaks start empty. What the
    last token gives to say is said; what the others gave has been said.
    """
    slot = load(slots, p)
    base = slot * N_INTS
    fbase = slot * N_FLOATS
    first = load(token_base, p)
    prompt = load(prompt_len, p)
    count = load(prefill_len, p) - prompt
    reset_slot(ints, base, floats, fbase)
    store(stored, slot, 0)
    store(ints, base + SEEN, prompt + count)
    open_len = load(header, H_OPEN_LEN)
    shut_len = load(header, H_SHUT_LEN)
    close_len = load(header, H_CLOSE_LEN)
    if (open_len > 0) & (load(ints, base + MODE) > 0):
        opened = last_match(all_tokens, first, prompt, sequence, 0, open_len)
        shut = last_match(all_tokens, first, prompt, sequence, open_len, shut_len)
        if opened > shut:
            store(ints, base + THINKING, 1)
            store(ints, base + TAGGED, 1)
    if load(ints, base + MODE) > 0:
        bits = start_phase(ints, base, floats, fbase, load(header, H_TAG_AT))
        close_at = open_len + shut_len
        gram_size = load(header, H_GRAM_SIZE)
        for i in range(count):
            token = load(all_tokens, first + prompt + i)
            lookahead = 0
            if i + 1 < count:
                following = load(all_tokens, first + prompt + i + 1)
                lookahead = flags_of(following, token_flags, header)
                if close_len > 0:
                    begins = following == load(sequence, close_at)
                    if begins | (following == load(sequence, close_at + load(header, H_TAG_AT))):
                        lookahead = lookahead | T_SPACE_FIRST  # we closed here, or so it seems
            if (token >= 0) & (token < load(header, H_VOCAB)):
                bits = fold_token(
                    ints, base, floats, fbase, token, lookahead, grams, slot * gram_size, gram_size, token_flags,
                    symbols, symbol_offsets, costs, sequence, header,
                )  # fmt: skip
            else:
                scan_unknown(ints, base, load(ints, base + TOKENS))
                bits = unknown_token(ints, base, floats, fbase, sequence, header)
        store(ints, base + OWED, bits)  # the last token was not judged before
        if count > 0:
            clear_evidence(ints, base)
            resume_close(ints, base, sequence, header, all_tokens, first + prompt, count)
            store(ints, base + REBUILT, 1)
