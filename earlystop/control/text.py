"""The text automaton: where lines, sentences, code fences and JSON values end (portable source).

Tokens arrive as strings of symbols (`units.py`), so boundaries that span tokens need no special case: the
state of the slot carries over. One call a symbol, a handful of symbols a token.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import (
    CODE,
    CODE_NEED,
    DANGLING,
    DIGITS,
    E_LINE,
    E_SAFE,
    E_UNIT,
    FENCE,
    INLINE,
    JSON_DEPTH,
    JSON_ESCAPE,
    JSON_STRING,
    JSON_TRY,
    LINE,
    LINE_DIGITS,
    LINE_FRESH,
    LINE_HASHES,
    LINE_HEADING,
    LINE_NUMBERED,
    LINE_RULE,
    LINE_TEXT,
    LINE_TICKS,
    MARKS,
    SENTENCE,
    TICKS,
    WORD,
    Y_BACKSLASH,
    Y_BRACE,
    Y_BRACKET,
    Y_CLOSE,
    Y_CLOSER,
    Y_COLON,
    Y_DIGIT,
    Y_EXCLAIM,
    Y_FULLSTOP,
    Y_HASH,
    Y_LETTER,
    Y_LETTERS,
    Y_NEWLINE,
    Y_QUOTE,
    Y_RULE,
    Y_SPACE,
    Y_STOP,
    Y_TICK,
)
from earlystop.control.portable import i32, load, store


def json_symbol(ints: Any, base: Any, symbol: Any) -> Any:
    """One symbol inside a top-level JSON value; returns E_UNIT | E_SAFE when the value is complete.

    A raw newline inside a string is not JSON (RFC 8259, section 7): then the text was prose after all.
    """
    bits = 0
    depth = load(ints, base + JSON_DEPTH)
    if load(ints, base + JSON_STRING) == 1:
        if symbol == Y_NEWLINE:
            depth = 0
            store(ints, base + JSON_STRING, 0)
        elif load(ints, base + JSON_ESCAPE) == 1:
            store(ints, base + JSON_ESCAPE, 0)
        elif symbol == Y_BACKSLASH:
            store(ints, base + JSON_ESCAPE, 1)
        elif symbol == Y_QUOTE:
            store(ints, base + JSON_STRING, 0)
    elif symbol == Y_QUOTE:
        store(ints, base + JSON_STRING, 1)
    elif (symbol == Y_BRACE) | (symbol == Y_BRACKET):
        depth = depth + 1
    elif symbol == Y_CLOSE:
        depth = depth - 1
        if depth == 0:
            bits = E_UNIT | E_SAFE
    store(ints, base + JSON_DEPTH, depth)
    return bits


def maybe_json(ints: Any, base: Any, symbol: Any) -> None:
    """Decides whether a `{` or `[` that opened a line begins a JSON value.

    `{` must be followed by a quote or a line break, `[` by a quote, a line break or another opening: a
    Markdown link, a citation `[1]` or a LaTeX brace does not pass.
    """
    trying = load(ints, base + JSON_TRY)
    if (trying > 0) & (symbol != Y_SPACE):
        store(ints, base + JSON_TRY, 0)
        opens = (symbol == Y_QUOTE) | (symbol == Y_NEWLINE)
        if trying == 2:
            opens = opens | (symbol == Y_BRACE) | (symbol == Y_BRACKET)
        if opens:
            store(ints, base + JSON_DEPTH, 1)
            store(ints, base + JSON_STRING, 0)
            store(ints, base + JSON_ESCAPE, 0)


def tick_symbol(ints: Any, base: Any) -> Any:
    """One backtick; three at the start of a line, or behind a list's mark, open or close a fence."""
    bits = 0
    ticks = load(ints, base + TICKS) + 1
    store(ints, base + TICKS, ticks)
    line = load(ints, base + LINE)
    if (line == LINE_FRESH) | (line == LINE_RULE) | (line == LINE_NUMBERED):
        store(ints, base + LINE, LINE_TICKS)
    if (ticks == 3) & (load(ints, base + LINE) == LINE_TICKS):
        store(ints, base + LINE, LINE_TEXT)
        if load(ints, base + FENCE) == 1:
            store(ints, base + FENCE, 0)
            bits = E_UNIT | E_SAFE
        else:
            store(ints, base + FENCE, 1)
    return bits


def newline_symbol(ints: Any, base: Any) -> Any:
    """A line break; returns E_LINE and, after a blank line, a heading or a rule, E_UNIT.

    A blank line is a safe place unless what came before it announces something (a colon, a heading). Code has
    comments, no headings.
    """
    bits = E_LINE
    line = load(ints, base + LINE)
    if (load(ints, base + FENCE) == 1) & (line != LINE_FRESH):
        line = i32(LINE_TEXT)
    if line == LINE_FRESH:
        bits = bits | E_UNIT
        if load(ints, base + DANGLING) == 0:
            bits = bits | E_SAFE
    if line == LINE_HEADING:
        bits = bits | E_UNIT
        store(ints, base + DANGLING, 1)
    if (line == LINE_RULE) & (load(ints, base + MARKS) >= 3):
        bits = bits | E_UNIT
    store(ints, base + LINE, LINE_FRESH)
    store(ints, base + MARKS, 0)
    store(ints, base + INLINE, 0)
    return bits


def line_symbol(ints: Any, base: Any, symbol: Any) -> None:
    """Moves the kind of the open line on by one symbol that is neither newline nor backtick."""
    line = load(ints, base + LINE)
    if line == LINE_FRESH:
        if symbol == Y_DIGIT:
            line = LINE_DIGITS
        elif symbol == Y_HASH:
            line = LINE_HASHES
        elif symbol == Y_RULE:
            line = LINE_RULE
            store(ints, base + MARKS, 1)
        elif symbol != Y_SPACE:
            line = LINE_TEXT
    elif line == LINE_HASHES:
        if symbol == Y_SPACE:
            line = LINE_HEADING
        elif symbol != Y_HASH:
            line = LINE_TEXT
    elif line == LINE_RULE:
        if symbol == Y_RULE:
            store(ints, base + MARKS, load(ints, base + MARKS) + 1)
        elif symbol == Y_DIGIT:
            line = LINE_DIGITS
        elif symbol != Y_SPACE:
            line = LINE_TEXT
    elif line == LINE_DIGITS:
        if (symbol == Y_STOP) | (symbol == Y_CLOSER):
            line = LINE_NUMBERED
        elif symbol != Y_DIGIT:
            line = LINE_TEXT
    elif line == LINE_NUMBERED:
        if symbol != Y_SPACE:
            line = LINE_TEXT
    elif line == LINE_TICKS:
        line = LINE_TEXT
    store(ints, base + LINE, line)


def sentence_symbol(ints: Any, base: Any, symbol: Any) -> None:
    """Moves the sentence state on by one symbol; must run before `line_symbol`.

    "3." at the start of a line or heading numbers it, a lone letter before a full stop abbreviates ("e.g.",
    "J. S."), `a.b` inside inline code is code: none of these ends a sentence. A quote, bracket or mark of bold
    text behind the terminator belongs to it, unless a line break lies between.
    """
    sentence = 0
    before = load(ints, base + SENTENCE)
    word = load(ints, base + WORD)
    if load(ints, base + INLINE) == 0:
        if symbol == Y_STOP:
            digits_before = load(ints, base + DIGITS) == 1
            line = load(ints, base + LINE)
            numbered = (line == LINE_DIGITS) | ((line == LINE_HEADING) & digits_before)
            ended = (word != 1) | digits_before | (before > 0)
            if ended & (numbered == 0):
                sentence = 1
        elif symbol == Y_EXCLAIM:
            sentence = 1
        elif symbol == Y_FULLSTOP:
            sentence = 2
        elif (symbol == Y_CLOSER) | (symbol == Y_QUOTE) | (symbol == Y_RULE):
            if load(ints, base + LINE) != LINE_FRESH:
                sentence = before
        elif (symbol == Y_NEWLINE) & (before > 0):
            sentence = 2  # the line break confirms it
    store(ints, base + SENTENCE, sentence)

    if symbol == Y_LETTER:
        word = word + 1
    elif symbol == Y_LETTERS:
        word = 2
    elif symbol != Y_CLOSER:
        word = 0
    if word > 2:
        word = 2
    store(ints, base + WORD, word)
    digits = 0
    if symbol == Y_DIGIT:
        digits = 1
    store(ints, base + DIGITS, digits)
    if symbol == Y_COLON:
        store(ints, base + DANGLING, 1)
    elif (symbol != Y_SPACE) & (symbol != Y_NEWLINE) & (symbol != Y_RULE):
        store(ints, base + DANGLING, 0)


def code_point_symbol(code: Any) -> Any:
    """The symbol of a reassembled code point: the marks that end or announce something, else a letter.

    U+3002, U+FF01, U+FF1F, U+FF61 (CJK), U+0964 (danda), U+061F, U+06D4 (Arabic), U+17D4 (Khmer) end a
    sentence; U+FF1A is a colon; U+201D, U+2019, U+00BB, U+300D, U+300F, U+FF09 close a quotation or bracket.
    """
    symbol = Y_LETTERS
    if (code == 0x3002) | (code == 0xFF01) | (code == 0xFF1F) | (code == 0xFF61):
        symbol = Y_FULLSTOP
    if (code == 0x0964) | (code == 0x061F) | (code == 0x06D4) | (code == 0x17D4):
        symbol = Y_FULLSTOP
    if code == 0xFF1A:
        symbol = Y_COLON
    if (code == 0x201D) | (code == 0x2019) | (code == 0x00BB) | (code == 0x300D) | (code == 0x300F) | (code == 0xFF09):
        symbol = Y_CLOSER
    return symbol


def byte_symbol(ints: Any, base: Any, byte: Any) -> Any:
    """Takes one raw byte of a code point that is split over tokens; its symbol with the last byte, else -1."""
    symbol = -1
    code = load(ints, base + CODE)
    need = load(ints, base + CODE_NEED)
    if byte < 0xC0:
        if need > 0:
            code = code * 64 + (byte & 63)
            need = need - 1
            if need == 0:
                symbol = code_point_symbol(code)
    elif byte >= 0xF0:
        code = byte & 7
        need = 3
    elif byte >= 0xE0:
        code = byte & 15
        need = 2
    else:
        code = byte & 31
        need = 1
    store(ints, base + CODE, code)
    store(ints, base + CODE_NEED, need)
    return symbol


def text_symbol(ints: Any, base: Any, symbol: Any) -> Any:
    """Moves the whole automaton on by one symbol; returns E_UNIT, E_SAFE and E_LINE bits."""
    bits = 0
    if load(ints, base + FENCE) == 0:
        if load(ints, base + JSON_DEPTH) == 0:
            maybe_json(ints, base, symbol)
        if load(ints, base + JSON_DEPTH) > 0:
            bits = bits | json_symbol(ints, base, symbol)
        elif (load(ints, base + LINE) == LINE_FRESH) & ((symbol == Y_BRACE) | (symbol == Y_BRACKET)):
            kind = 1
            if symbol == Y_BRACKET:
                kind = 2
            store(ints, base + JSON_TRY, kind)
    if symbol != Y_TICK:
        ticks = load(ints, base + TICKS)
        if (ticks > 0) & (ticks < 3) & (load(ints, base + FENCE) == 0):
            store(ints, base + INLINE, 1 - load(ints, base + INLINE))
        store(ints, base + TICKS, 0)
    sentence_symbol(ints, base, symbol)
    if symbol == Y_TICK:
        bits = bits | tick_symbol(ints, base)
    elif symbol == Y_NEWLINE:
        bits = bits | newline_symbol(ints, base)
    else:
        line_symbol(ints, base, symbol)
    return bits


def fresh_text(ints: Any, base: Any) -> None:
    """Puts the automaton at the start of a new text: a response, or the answer after a thinking tag."""
    store(ints, base + CODE_NEED, 0)
    store(ints, base + LINE, LINE_FRESH)
    store(ints, base + MARKS, 0)
    store(ints, base + TICKS, 0)
    store(ints, base + INLINE, 0)
    store(ints, base + FENCE, 0)
    store(ints, base + JSON_TRY, 0)
    store(ints, base + JSON_DEPTH, 0)
    store(ints, base + JSON_STRING, 0)
    store(ints, base + JSON_ESCAPE, 0)
    store(ints, base + SENTENCE, 0)
    store(ints, base + WORD, 0)
    store(ints, base + DIGITS, 0)
    store(ints, base + DANGLING, 0)
