"""The model's tables at work on one token: its cost and flags, and folding in what nobody measured."""

from __future__ import annotations

from typing import Any

from earlystop.control.budget import warn
from earlystop.control.closing import check_forced, next_forced
from earlystop.control.decide import is_forced, judge_token, move_phase
from earlystop.control.layout import (
    CLOSE_KIND,
    CLOSE_THINKING,
    CURSOR,
    EPOCH,
    H_CLOSE_LEN,
    H_COSTS,
    H_OPEN_LEN,
    H_SHUT_LEN,
    H_TAG_AT,
    H_VOCAB,
    PHASE,
    PHASE_ANSWERING,
    PHASE_CLOSING,
    REASONING,
    SCOPE,
    TAGGED,
    THINKING,
    TOKENS,
    USED,
)
from earlystop.control.portable import f64, i32, load, nan, real, store
from earlystop.control.rules import rest
from earlystop.control.scan import scan_token


def cost_of(token: Any, costs: Any, header: Any) -> Any:
    """Cost units of a token: its entry of the cost table, else 1."""
    cost = real(1.0)
    if load(header, H_COSTS) > 0:
        cost = f64(load(costs, token))
    return cost


def flags_of(token: Any, token_flags: Any, header: Any) -> Any:
    """Token flags, or 0 for what is no token (undefined argmax, an id beyond the tokenizer)."""
    flags = 0
    if (token >= 0) & (token < load(header, H_VOCAB)):
        flags = load(token_flags, token)
    return flags


def fold_token(
    ints: Any,
    base: Any,
    floats: Any,
    fbase: Any,
    token: Any,
    lookahead: Any,
    grams: Any,
    gram_base: Any,
    gram_size: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    costs: Any,
    sequence: Any,
    header: Any,
) -> Any:
    """Takes in one token that nobody measured: a rebuilt one, or a draft on a copy of the slot."""
    open_len = load(header, H_OPEN_LEN)
    shut_len = load(header, H_SHUT_LEN)
    close_at = open_len + shut_len
    index = load(ints, base + TOKENS)
    event = scan_token(
        ints, base, floats, fbase, token, index, load(ints, base + EPOCH), token_flags, symbols, symbol_offsets,
        sequence, open_len, shut_len, grams, gram_base, gram_size,
    )  # fmt: skip
    event = event | is_forced(ints, base, token, sequence, close_at)
    undefined = nan()
    return judge_token(
        ints, base, floats, fbase, token, event, undefined, undefined, undefined, undefined,
        cost_of(token, costs, header), lookahead, sequence, close_at, load(header, H_CLOSE_LEN),
        load(header, H_TAG_AT), shut_len,
    )  # fmt: skip


def count_unknown(ints: Any, base: Any, floats: Any, fbase: Any, thinking: Any, tokens: Any) -> None:
    """Counts tokens by length alone, one cost unit each, where they lie in the budget's scope."""
    store(ints, base + TOKENS, load(ints, base + TOKENS) + tokens)
    store(ints, base + REASONING, load(ints, base + REASONING) + thinking * tokens)
    if (load(ints, base + SCOPE) == 0) | (thinking == 1):
        store(floats, fbase + USED, load(floats, fbase + USED) + f64(tokens))


def unknown_token(ints: Any, base: Any, floats: Any, fbase: Any, sequence: Any, header: Any) -> Any:
    """Takes in a committed token whose id never reached us (V1 with asynchronous scheduling); O_* bits.

    It is not text and no evidence; only its length counts, so that a budget still binds. While we close, it
    is taken for the one that we forced: nothing else was left to sample.
    """
    bits = 0
    close_len = load(header, H_CLOSE_LEN)
    tag_at = load(header, H_TAG_AT)
    close_at = load(header, H_OPEN_LEN) + load(header, H_SHUT_LEN)
    thinking = load(ints, base + THINKING)
    if load(ints, base + PHASE) == PHASE_CLOSING:
        if (load(ints, base + CLOSE_KIND) == CLOSE_THINKING) & (load(ints, base + CURSOR) >= tag_at):
            thinking = 0
        presumed = next_forced(ints, base, sequence, close_at)
        bits = check_forced(ints, base, presumed, sequence, close_at, close_len)
        if load(ints, base + PHASE) == PHASE_ANSWERING:
            store(ints, base + THINKING, 0)
            store(ints, base + TAGGED, 0)
            rest(ints, base)
    count_unknown(ints, base, floats, fbase, thinking, i32(1))
    bits = bits | warn(ints, base, floats, fbase)
    nothing = i32(0)
    return bits | move_phase(ints, base, floats, fbase, nothing, nothing, nothing, close_len, tag_at)
