"""What was committed since the last step, and what it is (portable source)."""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import (
    CYCLE_PERIODS,
    E_UNIT,
    EPOCH,
    H_DEPTH,
    H_GRAM_SIZE,
    H_OPEN_LEN,
    H_SHUT_LEN,
    H_VOCAB,
    LAST_NOVELTY,
    MODE,
    N_FLOATS,
    N_INTS,
    SEEN,
    THINKING,
    TOKENS,
)
from earlystop.control.portable import load, store
from earlystop.control.scan import scan_token, scan_unknown
from earlystop.control.tokens import count_unknown


def scan_program(
    r: Any,
    row_slot: Any,
    row_local: Any,
    row_pos: Any,
    row_token: Any,
    total_len: Any,
    ints: Any,
    floats: Any,
    grams: Any,
    drafts: Any,
    stored: Any,
    events: Any,
    novelty: Any,
    committed: Any,
    unit_slot: Any,
    unit_end: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    sequence: Any,
    header: Any,
) -> None:
    """Row r, if it is a request's first: which tokens were committed since the last step, and what they are.

    Writes events[r, i], novelty[r, i] and unit_end[r, i] for the committed[r] tokens; unit_slot[r] is the
    slot, or -1 for rows with nothing to do. State is committed before anything is decided: T - SEEN tokens
    are new, all but the last of them accepted drafts, the last one this row's input token.
    """
    depth = load(header, H_DEPTH)
    slot = load(row_slot, r)
    store(committed, r, 0)
    store(unit_slot, r, -1)
    mine = 0
    if slot >= 0:
        if (load(row_local, r) == 0) & (load(ints, slot * N_INTS + MODE) > 0):
            mine = 1
    if mine == 1:
        base = slot * N_INTS
        fbase = slot * N_FLOATS
        total = load(total_len, slot)
        if load(row_pos, r) + 1 < total:
            mine = 0  # a prompt chunk: its sampled token is thrown away
        if mine == 1:
            count = total - load(ints, base + SEEN)
            if (count < 0) | (count > load(stored, slot)):
                count = 0  # tokens that we never measured: lengths stay right, evidence is lost
                unseen = total - load(ints, base + SEEN)
                count_unknown(ints, base, floats, fbase, load(ints, base + THINKING), unseen)
                for back in range(CYCLE_PERIODS):
                    scan_unknown(ints, base, back)
            store(ints, base + SEEN, total)
            store(committed, r, count)
            store(unit_slot, r, slot)
            gram_size = load(header, H_GRAM_SIZE)
            index = load(ints, base + TOKENS)
            for i in range(count):
                token = load(row_token, r)
                if i + 1 < count:
                    token = load(drafts, slot * depth + i + 1)
                event = -1
                if (token < 0) | (token >= load(header, H_VOCAB)):
                    scan_unknown(ints, base, index + i)
                if (token >= 0) & (token < load(header, H_VOCAB)):
                    event = scan_token(
                        ints, base, floats, fbase, token, index + i, load(ints, base + EPOCH), token_flags, symbols,
                        symbol_offsets, sequence, load(header, H_OPEN_LEN), load(header, H_SHUT_LEN), grams,
                        slot * gram_size, gram_size,
                    )  # fmt: skip
                store(events, r * depth + i, event)
                store(novelty, r * depth + i, load(floats, fbase + LAST_NOVELTY))
                ends = 0
                if (event >= 0) & ((event & E_UNIT) > 0):
                    ends = 1
                store(unit_end, r * depth + i, ends)
