"""What a committed token is: tags, text boundaries, units, cycles, novelty (portable source).

`scan_token` turns one token id into the event bits that the rules read and that traces record. It knows the
tokenizer's compiled table and the slot, no statistics and no policy.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import (
    CYCLE_PERIODS,
    E_BUSY,
    E_EOS,
    E_FULL,
    E_LINE,
    E_OPEN,
    E_SAFE,
    E_SENTENCE,
    E_SHUT,
    E_STRICT,
    E_TAG,
    E_THINK,
    E_UNIT,
    FENCE,
    JSON_DEPTH,
    LAST_NOVELTY,
    RING,
    RUNS,
    SENTENCE,
    T_EOS,
    T_SPECIAL,
    T_TOOL_CLOSE,
    T_TOOL_OPEN,
    T_UTF8_LEAD,
    T_UTF8_NEED,
    TAGGED,
    TOOL,
    UNIT_GRAMS,
    UNIT_NEW,
    UNIT_STRICT,
    UNIT_TOKENS,
    UTF8_NEED,
    Y_BYTE,
    Y_NEWLINE,
    Y_SPACE,
)
from earlystop.control.portable import cycle_step, f64, i32, i64, load, real, store
from earlystop.control.text import byte_symbol, fresh_text, text_symbol

UNIT_SHORTEST = 4  # shorter units join the next
UNIT_LINE = 16  # a line end closes a unit that holds this many tokens
UNIT_SENTENCE = 96  # a sentence end closes one that holds this many
UNIT_LONGEST = 128
GRAM = 4  # tokens in a gram of the novelty measure


def tail_matches(ints: Any, base: Any, token: Any, index: Any, sequence: Any, start: Any, length: Any) -> Any:
    """1 when the response's last tokens, `token` being number `index`, are sequence[start:start+length]."""
    match = 0
    if (length > 0) & (index + 1 >= length):
        match = 1
        if load(sequence, start + length - 1) != token:
            match = 0
        for back in range(1, length):
            ringed = load(ints, base + RING + (index - back + CYCLE_PERIODS) % CYCLE_PERIODS)
            if load(sequence, start + length - 1 - back) != ringed:
                match = 0
    return match


def gram_key(ints: Any, base: Any, token: Any, index: Any, salt: Any) -> Any:
    """32-bit key of the 4-gram that ends with `token`: FNV-1a over whole token ids, then two xor-shifts.

    `salt` is the slot's admission counter: keys of a former owner of the slot never match.
    http://www.isthe.com/chongo/tech/comp/fnv/
    """
    mask = i64(4294967295)
    key = (i64(2166136261) ^ (i64(salt) & mask)) & mask
    for back in range(1, GRAM):
        ringed = load(ints, base + RING + (index - back + CYCLE_PERIODS) % CYCLE_PERIODS)
        key = ((key ^ (i64(ringed) & mask)) * 16777619) & mask
    key = ((key ^ (i64(token) & mask)) * 16777619) & mask
    key = key ^ (key >> 15)
    key = (key * 739982445) & mask
    return key ^ (key >> 12)


def note_gram(
    ints: Any, base: Any, token: Any, index: Any, salt: Any, grams: Any, gram_base: Any, gram_size: Any
) -> None:
    """Counts the 4-gram that ends here, and whether the response held it before.

    `grams[gram_base : gram_base + gram_size]` is a direct-mapped table of keys; gram_size is a power of two.
    An overwritten key reads as new: the error makes novelty larger, which stops later, never earlier. Grams over
    a token that never reached us do not count.
    """
    known = 1
    for back in range(1, GRAM):
        if load(ints, base + RING + (index - back + CYCLE_PERIODS) % CYCLE_PERIODS) < 0:
            known = 0
    if (index + 1 >= GRAM) & (known == 1):
        key = gram_key(ints, base, token, index, salt)
        place = gram_base + i32(key & i64(gram_size - 1))
        mark = i32((key >> 1) | 1)  # fits int32; 0 marks an empty cell
        store(ints, base + UNIT_GRAMS, load(ints, base + UNIT_GRAMS) + 1)
        if load(grams, place) != mark:
            store(ints, base + UNIT_NEW, load(ints, base + UNIT_NEW) + 1)
            store(grams, place, mark)


def scan_unknown(ints: Any, base: Any, index: Any) -> None:
    """The response's token number `index` never reached us: no cycle and no tag runs over it."""
    store(ints, base + RING + index % CYCLE_PERIODS, -1)
    for period in range(CYCLE_PERIODS):
        store(ints, base + RUNS + period, 0)


def utf8_step(ints: Any, base: Any, flags: Any) -> Any:
    """Continuation bytes that the open code point still needs after this token."""
    need = load(ints, base + UTF8_NEED)
    only = (flags // T_UTF8_LEAD) & 7
    if only > 0:
        need = need - only
        if need < 0:
            need = 0
    else:
        need = (flags // T_UTF8_NEED) & 7
    store(ints, base + UTF8_NEED, need)
    return need


def end_unit(ints: Any, base: Any, floats: Any, fbase: Any) -> Any:
    """Closes the open unit: stores its novelty, starts the next; returns E_STRICT where it held code."""
    bits = 0
    if load(ints, base + UNIT_STRICT) == 1:
        bits = E_STRICT
    grams = load(ints, base + UNIT_GRAMS)
    novelty = real(1.0)
    if grams > 0:
        novelty = f64(load(ints, base + UNIT_NEW)) / f64(grams)
    store(floats, fbase + LAST_NOVELTY, novelty)
    store(ints, base + UNIT_TOKENS, 0)
    store(ints, base + UNIT_STRICT, 0)
    store(ints, base + UNIT_GRAMS, 0)
    store(ints, base + UNIT_NEW, 0)
    return bits


def scan_text(ints: Any, base: Any, token: Any, symbols: Any, symbol_offsets: Any) -> Any:
    """Runs the token's symbols through the text automaton; returns boundary bits of the whole token.

    A place is safe only if the token ends there: ". The" is past it; white space behind it is not.
    """
    bits = 0
    begin = load(symbol_offsets, token)
    end = load(symbol_offsets, token + 1)
    for at in range(begin, end):
        symbol = load(symbols, at)
        if symbol >= Y_BYTE:
            symbol = byte_symbol(ints, base, symbol - Y_BYTE)
        if symbol >= 0:
            last = text_symbol(ints, base, symbol)
            if (symbol != Y_SPACE) & (symbol != Y_NEWLINE):
                bits = bits & E_UNIT
            bits = bits | last
        else:
            bits = bits & E_UNIT
    sentence = load(ints, base + SENTENCE)
    if sentence == 1:
        bits = bits | E_SENTENCE
    if sentence == 2:
        bits = bits | E_FULL
    return bits


def scan_tags(
    ints: Any, base: Any, token: Any, index: Any, flags: Any, sequence: Any, open_len: Any, shut_len: Any
) -> Any:
    """Opens and closes the thinking; `sequence` holds the opening tag, then the closing tag.

    A tool call inside the thinking is an implicit end: nothing may be forced into its arguments.
    """
    bits = 0
    if load(ints, base + TAGGED) == 1:
        bits = E_THINK
        if tail_matches(ints, base, token, index, sequence, open_len, shut_len) == 1:
            bits = E_SHUT | E_TAG
        elif (flags & T_TOOL_OPEN) > 0:
            bits = E_SHUT
        if bits != E_THINK:
            store(ints, base + TAGGED, 0)
    elif tail_matches(ints, base, token, index, sequence, 0, open_len) == 1:
        bits = E_OPEN
        store(ints, base + TAGGED, 1)
    if (flags & T_TOOL_OPEN) > 0:
        store(ints, base + TOOL, 1)
    if (flags & T_TOOL_CLOSE) > 0:
        store(ints, base + TOOL, 0)
    if (bits & (E_OPEN | E_SHUT)) > 0:
        fresh_text(ints, base)
    return bits


def scan_token(
    ints: Any,
    base: Any,
    floats: Any,
    fbase: Any,
    token: Any,
    index: Any,
    salt: Any,
    token_flags: Any,
    symbols: Any,
    symbol_offsets: Any,
    sequence: Any,
    open_len: Any,
    shut_len: Any,
    grams: Any,
    gram_base: Any,
    gram_size: Any,
) -> Any:
    """Folds the response's token number `index` into the slot's text state; returns its event bits.

    gram_size = 0 leaves the novelty table alone: the call is a what-if on a copy of the slot (drafts).
    """
    flags = load(token_flags, token)
    bits = scan_tags(ints, base, token, index, flags, sequence, open_len, shut_len)
    need = utf8_step(ints, base, flags)
    text = 0
    if (flags & T_SPECIAL) == 0:
        text = scan_text(ints, base, token, symbols, symbol_offsets)
    if (flags & T_EOS) > 0:
        bits = bits | E_EOS
    strict = (load(ints, base + FENCE) == 1) | (load(ints, base + JSON_DEPTH) > 0) | (load(ints, base + TOOL) == 1)
    if strict | (need > 0):
        bits = bits | E_BUSY
    if strict:
        store(ints, base + UNIT_STRICT, 1)
    if gram_size > 0:
        note_gram(ints, base, token, index, salt, grams, gram_base, gram_size)
    bits = bits | cycle_step(ints, base, token, index) | (text & (E_SAFE + E_SENTENCE + E_FULL + E_LINE))
    length = load(ints, base + UNIT_TOKENS) + 1
    store(ints, base + UNIT_TOKENS, length)
    ends = (text & E_UNIT) > 0
    ends = ends | (((text & E_LINE) > 0) & (length >= UNIT_LINE))
    ends = ends | (((text & (E_SENTENCE + E_FULL)) > 0) & (length >= UNIT_SENTENCE))
    ends = ends & (length >= UNIT_SHORTEST)
    ends = ends | (length >= UNIT_LONGEST) | ((bits & (E_OPEN + E_SHUT)) > 0)
    if ends:
        bits = bits | E_UNIT | end_unit(ints, base, floats, fbase)
    return bits
