"""Compiles a tokenizer, once, into the small tables that the decision reads on the device.

For every token: flags (ends the response, opens a tool call, begins with white space, leaves a code point
open) and a short string of symbols (letters, line breaks, backticks, brackets, terminators...) over which
the text automaton of `control/text.py` runs. Tags of the thinking and of tool calls are resolved here, from
the tokenizer, never from literal ids.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from earlystop.control import layout
from earlystop.errors import ConfigError

# Pairs that chat templates of reasoning models use, most common first: DeepSeek-R1, Qwen3, QwQ, GLM, Phi-4
# and others; Magistral; Gemma 4 and gpt-oss-like channels are configured by hand.
THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"))
TOOL_TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("[TOOL_CALLS]", "[/TOOL_CALLS]"),
)
# A sentence that leads over from cut-off thinking to the answer, so that the answer does not begin in the
# middle of a thought. After Qwen3's documented early-stop prompt (qwen.readthedocs.io, "Thinking budget").
TRANSITION = "\n\nConsidering the limited time, I have to give the solution based on the thinking directly now.\n"

_FULL_STOPS = "。！？｡।॥؟۔።"
_CLOSERS = ")]’”»」』）"
_SYMBOL = {
    "\n": layout.Y_NEWLINE,
    "#": layout.Y_HASH,
    "`": layout.Y_TICK,
    "-": layout.Y_RULE,
    "*": layout.Y_RULE,
    "_": layout.Y_RULE,
    "{": layout.Y_BRACE,
    "[": layout.Y_BRACKET,
    "}": layout.Y_CLOSE,
    "]": layout.Y_CLOSE,
    '"': layout.Y_QUOTE,
    "\\": layout.Y_BACKSLASH,
    ".": layout.Y_STOP,
    "…": layout.Y_STOP,
    "!": layout.Y_EXCLAIM,
    "?": layout.Y_EXCLAIM,
    ":": layout.Y_COLON,
    "：": layout.Y_COLON,
    **dict.fromkeys(_FULL_STOPS, layout.Y_FULLSTOP),
    **dict.fromkeys(_CLOSERS.replace("]", ""), layout.Y_CLOSER),
}


@dataclass(frozen=True)
class TokenTable:
    """A compiled tokenizer; plain numpy, `control.state.Tables` puts it on the device.

    flags [V] int32 (T_* bits), symbol_offsets [V + 1] int32, symbols [n] int32; opening, closing: token ids
    of the thinking tags, empty where the tokenizer has none; eos: ids that end a response; sequence: what
    CLOSING forces (transition text, end tag), tag_at: where in it the end tag begins.
    """

    flags: np.ndarray[Any, np.dtype[np.int32]]
    symbol_offsets: np.ndarray[Any, np.dtype[np.int32]]
    symbols: np.ndarray[Any, np.dtype[np.int32]]
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    sequence: tuple[int, ...]
    tag_at: int
    eos: tuple[int, ...]
    fingerprint: str

    @property
    def thinks(self) -> bool:
        """Whether the tokenizer has thinking tags."""
        return bool(self.opening and self.closing)


@cache
def symbols_of(text: str) -> tuple[int, ...]:
    """The symbol string of a piece of text; runs of letters and of digits are one symbol each."""
    out: list[int] = []
    for char in text:
        symbol = _SYMBOL.get(char, -1)
        if symbol < 0:
            if char.isspace():
                symbol = layout.Y_SPACE
            elif char.isdigit():
                symbol = layout.Y_DIGIT
            elif char.isalpha() or unicodedata.category(char).startswith("M"):
                symbol = layout.Y_LETTER
            else:
                symbol = layout.Y_OTHER
        last = out[-1] if out else -1
        if symbol == layout.Y_LETTER and last in (layout.Y_LETTER, layout.Y_LETTERS):
            out[-1] = layout.Y_LETTERS
        elif symbol != last or symbol not in (layout.Y_DIGIT, layout.Y_SPACE, layout.Y_OTHER):
            out.append(symbol)
    return tuple(out)


def piece_symbols(piece: bytes) -> tuple[int, ...]:
    """The symbol string of a token's bytes; bytes of code points that begin or end elsewhere come as Y_BYTE + byte."""
    begin = 0
    while begin < len(piece) and piece[begin] & 0xC0 == 0x80:
        begin += 1
    end = len(piece)
    if utf8_flags(piece[begin:]) // layout.T_UTF8_NEED & 7:
        end = max(i for i in range(begin, len(piece)) if piece[i] >= 0xC0)
    raw = [layout.Y_BYTE + byte for byte in piece[:begin]]
    tail = [layout.Y_BYTE + byte for byte in piece[end:]]
    return (*raw, *symbols_of(piece[begin:end].decode("utf-8", errors="replace")), *tail)


def utf8_flags(piece: bytes) -> int:
    """How a token's bytes join code points: only continuation bytes, or bytes that still need some."""
    lead = 0
    while lead < len(piece) and piece[lead] & 0xC0 == 0x80:
        lead += 1
    if piece and lead == len(piece):
        return min(lead, 7) * layout.T_UTF8_LEAD
    need = 0
    for back in range(1, min(3, len(piece)) + 1):
        byte = piece[-back]
        if byte & 0xC0 == 0x80:
            continue
        # C0, C1 and F5 to FF begin no code point (RFC 3629, section 3).
        size = 4 if 0xF0 <= byte < 0xF5 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC2 <= byte < 0xE0 else 1
        need = max(0, size - back)
        break
    return need * layout.T_UTF8_NEED


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes that each id stands for; b"" for ids that decode to nothing.

    xgrammar (vLLM's own dependency) knows byte-level, byte-fallback and plain vocabularies.
    """
    import xgrammar

    decoded = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size).decoded_vocab
    return [piece if isinstance(piece, bytes) else str(piece).encode() for piece in decoded]


def tag_ids(tokenizer: Any, tag: str) -> tuple[int, ...]:
    """Token ids of a tag: its special id where it has one, else its text's ids; () if it does not round-trip."""
    vocab = tokenizer.get_vocab()
    if tag in vocab:
        return (int(vocab[tag]),)
    ids = tuple(int(i) for i in tokenizer.encode(tag, add_special_tokens=False))
    return ids if ids and tokenizer.decode(list(ids)).strip() == tag else ()


def thinking_tags(tokenizer: Any, start: str | None, end: str | None) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Ids of the opening and closing tag, and the closing tag's text; empty where the model does not reason.

    A configured tag must be in the tokenizer; without configuration only tags with an id of their own count,
    since any tokenizer can spell "<think>" in pieces.

    Raises:
        ConfigError: a configured tag does not survive encoding and decoding, or only one of the two is given.
    """
    if (start is None) != (end is None):
        raise ConfigError("engine.think_start and engine.think_end go together: got only one of them")
    if start is not None and end is not None:
        opening, closing = tag_ids(tokenizer, start), tag_ids(tokenizer, end)
        for name, tag, ids in (("think_start", start, opening), ("think_end", end, closing)):
            if not ids or len(ids) > 16:
                raise ConfigError(
                    f"engine.{name}={tag!r}: the tokenizer cannot spell it in 1 to 16 tokens that decode to it "
                    "again; name the tag exactly as the chat template writes it"
                )
        return opening, closing, end
    vocab = tokenizer.get_vocab()
    for open_tag, close_tag in THINKING_TAGS:
        if open_tag in vocab and close_tag in vocab:
            return (int(vocab[open_tag]),), (int(vocab[close_tag]),), close_tag
    return (), (), ""


def closing_sequence(
    tokenizer: Any, closing: Sequence[int], transition: str | None, after: str
) -> tuple[tuple[int, ...], int]:
    """What closes the thinking (transition text, end tag, what the template puts behind it) and the tag's place.

    Raises:
        ConfigError: the sequence is longer than CLOSE_MAX tokens.
    """
    if not closing:
        return (), 0
    lead = tokenizer.encode(TRANSITION if transition is None else transition, add_special_tokens=False)
    tail = tokenizer.encode(after, add_special_tokens=False) if after else []
    if transition is None and len(lead) + len(closing) + len(tail) > layout.CLOSE_MAX:
        lead = []  # our own sentence, in a tokenizer that spells it by the letter: better none than half of it
    sequence = (*map(int, lead), *closing, *map(int, tail))
    if len(sequence) > layout.CLOSE_MAX:
        raise ConfigError(
            f"engine.close_text: the closing sequence has {len(sequence)} tokens, at most {layout.CLOSE_MAX} are "
            "allowed; shorten the text"
        )
    return sequence, len(lead)


def compile_tokenizer(
    tokenizer: Any,
    *,
    vocab_size: int,
    eos: Sequence[int],
    think_start: str | None = None,
    think_end: str | None = None,
    close_text: str | None = None,
    after_close: str = "\n\n",
    tool_tags: Sequence[tuple[str, str]] = TOOL_TAGS,
) -> TokenTable:
    """Compiles a Hugging Face tokenizer for a model with `vocab_size` logits.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: width of the logits; ids beyond the tokenizer decode to nothing.
        eos: ids that end a response; ids that no logit has are left out.
        think_start: the tag that opens the thinking; None finds the well-known pairs.
        think_end: the tag that closes it, given with `think_start` or not at all.
        close_text: transition text before the end tag; None takes TRANSITION.
        after_close: what the chat template writes behind the end tag.
        tool_tags: pairs of markers around tool calls; those that the tokenizer lacks are ignored.

    Raises:
        ConfigError: a configured tag that the tokenizer does not have, or a closing sequence too long.
    """
    eos = tuple(token for token in eos if 0 <= token < vocab_size)
    pieces = token_bytes(tokenizer, vocab_size)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    flags = np.zeros(vocab_size, np.int32)
    offsets = np.zeros(vocab_size + 1, np.int32)
    symbols: list[int] = []
    for token, piece in enumerate(pieces[:vocab_size]):
        text = piece.decode("utf-8", errors="replace")
        if token not in special:
            symbols.extend(piece_symbols(piece))
            flags[token] |= utf8_flags(piece)
            if text[:1].isspace():
                flags[token] |= layout.T_SPACE_FIRST
        else:
            flags[token] |= layout.T_SPECIAL
        offsets[token + 1] = len(symbols)
    offsets[len(pieces) + 1 :] = len(symbols)
    opening, closing, end_tag = thinking_tags(tokenizer, think_start, think_end)
    sequence, tag_at = closing_sequence(tokenizer, closing, close_text, after_close)
    vocab = tokenizer.get_vocab()
    for open_tag, close_tag in tool_tags:
        if open_tag in vocab and close_tag in vocab:
            flags[vocab[open_tag]] |= layout.T_TOOL_OPEN | layout.T_SPECIAL
            flags[vocab[close_tag]] |= layout.T_TOOL_CLOSE | layout.T_SPECIAL
    for tag in (opening, closing):
        if len(tag) == 1:
            flags[tag[0]] |= layout.T_SPECIAL
    for token in eos:
        flags[token] |= layout.T_EOS | layout.T_SPECIAL
    digest = hashlib.sha256(repr((pieces, sorted(special), tuple(eos), opening, closing, end_tag)).encode())
    return TokenTable(
        flags=flags,
        symbol_offsets=offsets,
        symbols=np.asarray(symbols or [0], np.int32),
        opening=opening,
        closing=closing,
        sequence=sequence,
        tag_at=tag_at,
        eos=tuple(eos),
        fingerprint=digest.hexdigest(),
    )
