"""The scripted models' vocabulary and tokenizer: small, real, and with every oddity the tests need.

Ids 0 to 35 are the toy vocabulary in which public bug reports were reduced to test inputs. Every byte has a token, so
any text can be encoded; the model's own vocabulary is padded beyond the tokenizer's, as real ones are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

Tags = Literal["added", "special", "pieces"]
"""How `<think>` and friends are tokens: single non-special ids (Qwen's way), single special ids, or several pieces."""

TOKENIZER_SIZE: Final = 912
VOCABULARY_SIZE: Final = 1024
"""Ids from `TOKENIZER_SIZE` up are padding of the model's output: no text, never planned."""

SCRIPT_SLOTS: Final = 512
RESERVED: Final = 8
FIRST_RESERVED: Final = 101
"""Ids `FIRST_RESERVED + n` are special tokens that no script uses, as real tokenizers hold them in reserve."""

FIRST_SCRIPT: Final = 400
"""Ids `FIRST_SCRIPT + n` are the marks `<|script_n|>` by which a prompt chooses its script."""

_TOKENS: Final[tuple[tuple[int, str, str | bytes], ...]] = (
    (0, "bang", b"!"),
    (1, "think", "<think>"),
    (2, "end_think", "</think>"),
    (3, "eos", "<|end|>"),
    (4, "tool_call", "<tool_call>"),
    (5, "end_tool_call", "</tool_call>"),
    (6, "newline", b"\n"),
    (7, "blank_line", b"\n\n"),
    (8, "wait", b"Wait"),
    (9, "json_open", b'{"q":"'),
    (10, "json_close", b'"}'),
    (20, "end_1", b"</"),
    (21, "end_2", b"think"),
    (22, "end_3", b">"),
    (23, "period", b"."),
    (24, "fence", b"```"),
    (25, "comma", b","),
    (26, "hash", b"# "),
    (27, "brace_open", b"{"),
    (28, "brace_close", b"}"),
    (29, "rule", b"---"),
    (30, "smile_1", b"\xf0\x9f"),
    (31, "smile_2", b"\x98\x80"),
    (32, "hao_1", b"\xe5\xa5"),
    (33, "hao_2", b"\xbd"),
    (34, "dcaron_1", b"\xc4"),
    (35, "dcaron_2", b"\x8f"),
    (100, "ref", "<|ref|>"),
)
"""Id, name, and what it stands for: bytes of text, or an added token's own spelling."""

_WORD_IDS: Final = (*range(11, 20), *range(36, 100))
"""Ids of `w1`, `w2`...: ordinary words, each with a space in front."""

_PROSE: Final = """
    red fox runs over green hills under warm sun near old stone bridge where quiet river bends and tall trees lean
    toward bright water while small birds sing about distant snow each morning before people wake to light fires then
    carry bread through narrow streets past open doors into busy market squares full of apples honey cloth lamps paper
    boots bells wool cups salt ropes maps nails clay drums masks kites tea rice
"""
_WORDS: Final = tuple(_PROSE.split())

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>{% endif %}"
    "{% endif %}"
)
"""Contents one after the other, then an opened thinking block. A script is chosen by a content like `<|script_3|>`."""


def token_ids() -> dict[str, int]:
    """Every named token's id: those of the table above, `w1`... `w73`, `reserved_0`... `reserved_7`."""
    named = {name: i for i, name, _ in _TOKENS}
    words = {f"w{n}": i for n, i in enumerate(_WORD_IDS, start=1)}
    return named | words | {f"reserved_{n}": FIRST_RESERVED + n for n in range(RESERVED)}


def save_tokenizer(folder: Path, tags: Tags) -> None:
    """Writes the tokenizer as a checkpoint folder holds it."""
    vocabulary = _byte_level_vocabulary()
    # With ignore_merges a whole pre-token that is in the vocabulary is taken as it is; anything else falls to bytes.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    for text, special in _added_tokens(tags):
        token = AddedToken(text, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    marks = {"bos_token": "<|ref|>", "eos_token": "<|end|>"}
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks, clean_up_tokenization_spaces=False)
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)


def _added_tokens(tags: Tags) -> list[tuple[str, bool]]:
    special = tags == "special"
    return [
        *(() if tags == "pieces" else (("<think>", special), ("</think>", special))),
        *(("<tool_call>", special), ("</tool_call>", special), ("<|end|>", True), ("<|ref|>", True)),
        *((f"<|reserved_{n}|>", True) for n in range(RESERVED)),
        *((f"<|script_{n}|>", True) for n in range(SCRIPT_SLOTS)),
    ]


def _byte_level_vocabulary() -> dict[str, int]:
    """Token text in the byte-level alphabet -> id, for all `TOKENIZER_SIZE` ids."""
    by_id = {i: _alphabet(text) if isinstance(text, bytes) else text for i, _, text in _TOKENS}
    by_id |= {i: _alphabet(f" {word}".encode()) for i, word in zip(_WORD_IDS, _WORDS, strict=True)}
    by_id |= {FIRST_RESERVED + n: f"<|reserved_{n}|>" for n in range(RESERVED)}
    by_id |= {FIRST_SCRIPT + n: f"<|script_{n}|>" for n in range(SCRIPT_SLOTS)}
    free = (i for i in range(TOKENIZER_SIZE) if i not in by_id)
    known = set(by_id.values())
    single_bytes = [_alphabet(bytes([value])) for value in range(256)]
    by_id |= {next(free): text for text in single_bytes if text not in known}
    by_id |= {i: f"<|unused_{i}|>" for i in list(free)}
    return {text: i for i, text in sorted(by_id.items())}


def _alphabet(raw: bytes) -> str:
    """Bytes in GPT-2's printable alphabet, one character a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    table = {value: chr(value) for value in printable} | {value: chr(256 + n) for n, value in enumerate(others)}
    return "".join(table[value] for value in raw)
