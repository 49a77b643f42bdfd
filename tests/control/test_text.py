"""The text automaton on real strings, letter by letter and under any other tokenisation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from earlystop.control import layout, scan
from earlystop.control.layout import E_FULL, E_LINE, E_SAFE, E_SENTENCE, E_UNIT
from earlystop.units import piece_symbols, symbols_of

STATE = ("LINE", "MARKS", "INLINE", "FENCE", "JSON_DEPTH", "JSON_STRING", "JSON_ESCAPE", "SENTENCE", "WORD", "DIGITS")
STATE = (*STATE, "DANGLING", "TICKS")


def read(pieces: Iterable[str | bytes]) -> list[tuple[int, dict[str, int]]]:
    """Event bits and automaton state after each piece of a text."""
    ints = np.zeros(layout.N_INTS, np.int32)
    out = []
    for piece in pieces:
        symbols = symbols_of(piece) if isinstance(piece, str) else piece_symbols(piece)
        bits = scan.scan_text(ints, 0, 0, symbols, (0, len(symbols)))
        out.append((bits, {name: int(ints[getattr(layout, name)]) for name in STATE}))
    return out


def sentences(text: str) -> list[str]:
    """The text cut where a sentence ends as the decision sees it: confirmed by white space, the end, or itself."""
    found, start = [], 0
    steps = read(text)
    for i, (bits, _) in enumerate(steps):
        follows = i + 1 == len(text) or text[i + 1].isspace()
        if text[i] != "\n" and (bits & E_FULL or (bits & E_SENTENCE and follows)):
            found.append(text[start : i + 1].strip())
            start = i + 1
    return [*found, text[start:].strip()] if text[start:].strip() else found


def units(text: str) -> list[int]:
    """Positions after which a unit ends for what the text is, whatever its length in tokens."""
    return [i + 1 for i, (bits, _) in enumerate(read(text)) if bits & E_UNIT]


def column(text: str, name: str) -> list[int]:
    return [state[name] for _, state in read(text)]


# --- sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It works. Then it stops.", ["It works.", "Then it stops."]),
        ("Use e.g. this one. Done.", ["Use e.g. this one.", "Done."]),
        ("Pi is 3.14 or so. Yes.", ["Pi is 3.14 or so.", "Yes."]),
        ("It costs 5. That is much.", ["It costs 5.", "That is much."]),
        ("1. item one\n2. item two", ["1. item one\n2. item two"]),
        ("**1. Title** and text. More", ["**1. Title** and text.", "More"]),
        ("- 1. item", ["- 1. item"]),
        ("## 2. A heading\nText.", ["## 2. A heading\nText."]),
        ("J. Smith came. He left.", ["J. Smith came.", "He left."]),
        ("Call `a.b` or `c.d()`. Then go.", ["Call `a.b` or `c.d()`.", "Then go."]),
        ("See `x. y` here. Go", ["See `x. y` here.", "Go"]),
        ("So it is **bold.** Next", ["So it is **bold.**", "Next"]),
        ("So it is **bold**. Next", ["So it is **bold**.", "Next"]),
        ('He said "stop." Then', ['He said "stop."', "Then"]),
        ('He said "stop". Then', ['He said "stop".', "Then"]),
        ("As shown (see above). Then", ["As shown (see above).", "Then"]),
        ("As shown before [1]. Then", ["As shown before [1].", "Then"]),
        ("It rose by 5%. Then", ["It rose by 5%.", "Then"]),
        ("Really?! Yes!", ["Really?!", "Yes!"]),
        ("Wait... what? Go", ["Wait...", "what?", "Go"]),
        ("Let f(x) = $x^2$. Then", ["Let f(x) = $x^2$.", "Then"]),
        ("open a.txt and b.c. now", ["open a.txt and b.c. now"]),
        ("这是第一句。这是第二句！好", ["这是第一句。", "这是第二句！", "好"]),
        ("यह वाक्य है। दूसरा।", ["यह वाक्य है।", "दूसरा।"]),
        ("हाँ । नहीं", ["हाँ ।", "नहीं"]),
        ("هل هذا صحيح؟ نعم", ["هل هذا صحيح؟", "نعم"]),
        ("v1.2.3 is out. Go", ["v1.2.3 is out.", "Go"]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, expected: list[str]) -> None:
    """Abbreviations, numbers, list numbers and code hold no sentence end; quotes, bold and brackets hide none."""
    assert sentences(text) == expected


@pytest.mark.parametrize("opener", ['"', ")", "*", "-"])
def test_a_mark_that_opens_the_next_line_is_no_end(opener: str) -> None:
    """After a line break the sentence is over, and a quote or list mark belongs to the next one."""
    bits, _ = read(f"It ends.\n{opener}")[-1]
    assert not bits & (E_SENTENCE | E_FULL)


# --- units ----------------------------------------------------------------------------------------


def test_units_end_at_blank_lines_headings_and_rules() -> None:
    """The places of the design, and no others."""
    text = "One\n\n# Two\nthree\n---\nfour - five\n#six\n* seven\n"
    assert [text[:at].splitlines()[-1] for at in units(text)] == ["", "# Two", "---"]


def test_code_has_neither_headings_nor_rules() -> None:
    """Inside a fence a comment is no heading and a line of dashes no rule."""
    text = "```python\n# a comment\n---\nx = 1\n```"
    assert units(text) == [len(text)]


def test_a_blank_line_after_a_colon_or_heading_is_no_safe_place() -> None:
    """What announces something is not left hanging."""
    for announces in ("Here is why:\n\n", "# Heading\n\n", "**Steps:**\n\n"):
        bits, _ = read([announces])[0]
        assert bits & E_UNIT
        assert not bits & E_SAFE
    assert read(["Done.\n\n"])[0][0] & E_SAFE


@pytest.mark.parametrize("piece", ["\n\n", "\n\n  ", "\n \n"])
def test_white_space_in_the_same_token_does_not_hide_a_safe_place(piece: str) -> None:
    """A token that ends with more white space is still at the place."""
    assert read(["Done", piece])[-1][0] & E_SAFE
    assert read(["Done", "\n    "])[-1][0] & E_LINE
    assert read(["Done", piece + "Next"])[-1][0] & (E_SAFE | E_LINE) == 0


@pytest.mark.parametrize("tail", ["```", "```\n", "```\n\n"])
def test_a_closed_fence_is_a_safe_place_however_its_token_ends(tail: str) -> None:
    """The line break behind the closing fence may be part of the token."""
    bits, state = read(["```py\n", "x\n", tail])[-1]
    assert bits & E_SAFE
    assert bits & E_UNIT
    assert state["FENCE"] == 0


# --- fences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "open_"),
    [
        ("```\ncode", True),
        ("```python\ncode", True),
        ("```python title=x\ncode", True),
        ("   ```python\ncode", True),
        ("- ```python\n  code", True),
        ("1. ```python\n   code", True),
        ("1) ```python\n   code", True),
        ("- ```python\n  code\n  ```\n", False),
        ("1. ```python\n   code\n   ```\n", False),
        ("```\ncode\n```", False),
        ("````\ncode\n````", False),
        ("text ```inline``` text", False),
        ("`a` and ``b``", False),
        ("```\n`a\n", True),
    ],
)
def test_fences_open_and_close_at_the_start_of_a_line(text: str, open_: bool) -> None:
    """Info strings, indents and list marks included; inline code is none."""
    assert read(text)[-1][1]["FENCE"] == int(open_)


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{\n  "a": [1, {"b": "}"}]\n}',
        '{"a": "say \\"hi}\\" now"}',
        '{"a": "back\\\\"}',
        '[{"a": 1}, {"b": []}]',
        '["x", "y"]',
        "[\n1,\n2\n]",
        '{ "a": "[" }',
    ],
)
def test_a_json_value_ends_at_its_last_bracket(text: str) -> None:
    """Braces in strings, escapes and nesting: the value is complete at its end, and not before."""
    bits, states = zip(*read(text), strict=True)
    assert all(state["JSON_DEPTH"] > 0 for state in states[2:-1])
    assert states[-1]["JSON_DEPTH"] == 0
    assert bits[-1] & E_SAFE


@pytest.mark.parametrize(
    "text",
    [
        "[1] A citation. And more.",
        "[a link](http://x.y) here",
        "{\\frac{1}{2}} is LaTeX",
        "text {braces} in a line",
        "| a | b |\n|---|---|\n| [x] | {y} |\n",
        "- [ ] a task\n- [x] done\n",
        "\\begin{align}\nx &= {y}\n\\end{align}\n",
        "{x | x > 0} is a set",
    ],
)
def test_brackets_of_prose_are_no_json(text: str) -> None:
    """Citations, links, tasks, tables, sets and LaTeX open nothing."""
    assert set(column(text, "JSON_DEPTH")) == {0}


def test_an_unfinished_string_that_breaks_its_line_was_prose() -> None:
    """A raw line break in a string is no JSON."""
    assert read('["Hello, she said,\nand went.')[-1][1]["JSON_DEPTH"] == 0


# --- split invariance -----------------------------------------------------------------------------

PARTS = [
    "word", " other", "e.g.", "3.14", "1. ", "2) ", ". ", ".", "!", "? ", ":", "\n", "\n\n", "\n  ",
    "# ", "---", "**", "- ", "`", "``", "```", "```py\n", "{", "}", "[", "]", '"', "\\",
    '{"k": ', '["', "好", "。", "」", "…", ")", " ", "é", "5",
]  # fmt: skip


@st.composite
def text_and_cuts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = "".join(draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=25)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    edges = [0, *[cut for cut in cuts if cut < len(text)], len(text)]
    return text, [text[a:b] for a, b in pairwise(edges)]


@settings(deadline=None, max_examples=400)
@given(text_and_cuts())
@example(("a.\n\n", ["a.", "\n", "\n"]))
@example(('{"a": "\\\\"}', ['{"a": "\\', '\\"', "}"]))
def test_any_tokenisation_of_a_text_gives_the_same_state(case: tuple[str, list[str]]) -> None:
    """At the end of every piece, the automaton stands where it stands when it reads letter by letter."""
    text, pieces = case
    letters = read(text)
    at = 0
    for piece, (bits, state) in zip(pieces, read(pieces), strict=True):
        start, at = at, at + len(piece)
        assert state == letters[at - 1][1]
        inside = letters[start:at]
        assert bool(bits & E_UNIT) == any(b & E_UNIT for b, _ in inside)
        assert bits & (E_SENTENCE | E_FULL) == letters[at - 1][0] & (E_SENTENCE | E_FULL)
        trailing = len(piece) - len(piece.rstrip())
        for bit in (E_SAFE, E_LINE):
            reached = any(b & bit for b, _ in inside[len(piece) - trailing - 1 if trailing < len(piece) else 0 :])
            assert bool(bits & bit) == reached


def test_a_terminator_that_is_split_over_tokens_ends_a_sentence() -> None:
    """A byte-level vocabulary without CJK spells each mark in pieces; the mark counts once its last byte is there."""
    import numpy as np

    from earlystop.control import layout, lower
    from earlystop.units import piece_symbols

    python = lower.python_namespace()
    for text, ends in (("好。", True), ("好！", True), ("好好", False), ("नमस्ते।", True), ("注：", False)):
        ints = np.zeros(layout.N_INTS, np.int32)
        seen = []
        for byte in text.encode():  # one byte a token
            symbols = np.asarray(piece_symbols(bytes([byte])), np.int32)
            offsets = np.asarray([0, len(symbols)], np.int32)
            seen.append(python["scan_text"](ints, 0, 0, symbols, offsets) & layout.E_FULL)
        assert bool(seen[-1]) is ends, text
        assert not any(seen[:-1]), text


SCRIPTS = [
    "好的",
    "。",
    "」",
    "：",
    "？",
    "।",
    "؟",
    "”",
    " word",
    "\n",
    ". ",
    "```",
    '{"k": ',
    '"',
    "}",
    "naïve",
    "😀ok",
]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=15), st.data())
def test_bytes_of_a_code_point_in_several_tokens_read_as_the_code_point(parts: list[str], data: st.DataObject) -> None:
    """A split inside a character changes nothing at the ends of characters: a terminator in pieces ends a sentence."""
    text = "".join(parts)
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))
    edges = [0, *[cut for cut in cuts if cut < len(raw)], len(raw)]
    letters = read(text)
    whole = {len(text[:n].encode()): n for n in range(1, len(text) + 1)}
    steps = read([raw[a:b] for a, b in pairwise(edges)])
    for end, (bits, state) in zip(edges[1:], steps, strict=True):
        if end in whole:
            expected_bits, expected = letters[whole[end] - 1]
            assert {**state, "WORD": 0} == {**expected, "WORD": 0}
            assert bits & (E_SENTENCE | E_FULL) == expected_bits & (E_SENTENCE | E_FULL)
