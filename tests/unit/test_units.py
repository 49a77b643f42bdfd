from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlystop import units
from earlystop.control import layout, scan
from earlystop.errors import ConfigError

pytest.importorskip("xgrammar")
transformers = pytest.importorskip("transformers")

PROSE = 'Hello world. It isn\'t 3.14!\n\nCode: `a.b`\n```py\nx = 1\n```\n{"k": [1, 2]}\n好的。 naïve 😀 <think>'


def wrap(tokenizer: Any, eos: str, **marks: str) -> Any:
    marks["eos_token"] = eos
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **marks)


def byte_level(added: tuple[str, ...] = (), special: tuple[str, ...] = ("<|end|>",)) -> Any:
    """A small byte-level BPE, trained on a little text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROSE] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return wrap(tokenizer, special[0])


def metaspace() -> Any:
    """A small SentencePiece-like tokenizer: metaspace, with byte fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in (
        "▁",
        "▁Hello",
        "▁world",
        ".",
        "a",
        "b",
        "k",
        ":",
        "1",
        "\n",
        "`",
        "{",
        "}",
        '"',
        "[",
        "]",
        "▁it",
        "!",
    ):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106  (no password)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer, "</s>")


@pytest.fixture(scope="module")
def small() -> Any:
    return byte_level(added=("<think>", "</think>", "<tool_call>", "</tool_call>"))


@pytest.fixture(scope="module")
def table(small: Any) -> units.TokenTable:
    return units.compile_tokenizer(small, vocab_size=len(small) + 20, eos=(small.eos_token_id,))


def state_after(table: units.TokenTable, ids: list[int]) -> np.ndarray:
    """The text automaton after these tokens."""
    ints = np.zeros(layout.N_INTS, np.int32)
    for token in ids:
        scan.utf8_step(ints, 0, table.flags[token])
        if not table.flags[token] & layout.T_SPECIAL:
            scan.scan_text(ints, 0, token, table.symbols, table.symbol_offsets)
    return ints


# --- the table ------------------------------------------------------------------------------------


def test_the_table_covers_every_logit(table: units.TokenTable, small: Any) -> None:
    """One entry a logit, ids beyond the tokenizer are nothing, offsets never fall."""
    vocab = len(small) + 20
    assert table.flags.shape == (vocab,)
    assert table.symbol_offsets.shape == (vocab + 1,)
    assert (np.diff(table.symbol_offsets) >= 0).all()
    assert table.symbol_offsets[-1] == len(table.symbols)
    assert (table.flags[len(small) :] == 0).all()
    assert (np.diff(table.symbol_offsets)[len(small) :] == 0).all()


def test_the_fingerprint_tells_tokenizers_apart(small: Any) -> None:
    """The same tokenizer gives the same fingerprint, another id of EOS another."""
    vocab = len(small)
    prints = [units.compile_tokenizer(small, vocab_size=vocab, eos=(eos,)).fingerprint for eos in (5, 5, 6)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_white_space_first_and_line_breaks(make: Any) -> None:
    """What a token begins with is read off its bytes, whatever the tokenizer calls a space."""
    tokenizer = make()
    table = units.compile_tokenizer(tokenizer, vocab_size=len(tokenizer), eos=(tokenizer.eos_token_id,))
    ids = tokenizer.encode("it Hello world", add_special_tokens=False)
    spaced = [bool(table.flags[i] & layout.T_SPACE_FIRST) for i in ids]
    assert sum(spaced) >= 2
    ints = state_after(table, tokenizer.encode("Hello world.\n", add_special_tokens=False))
    assert ints[layout.LINE] == layout.LINE_FRESH
    assert ints[layout.SENTENCE] == 2


def test_eos_ends_and_is_no_text(table: units.TokenTable, small: Any) -> None:
    """EOS carries its flags."""
    flags = table.flags[small.eos_token_id]
    assert flags & layout.T_EOS
    assert flags & layout.T_SPECIAL
    assert table.eos == (small.eos_token_id,)


@pytest.mark.parametrize("eos", [191_222, -1])
def test_an_eos_beyond_the_vocabulary_is_refused_or_ignored(small: Any, eos: int) -> None:
    """A configured id that no logit has neither crashes nor marks another token."""
    table = units.compile_tokenizer(small, vocab_size=len(small), eos=(small.eos_token_id, eos))
    marked = np.nonzero(table.flags & layout.T_EOS)[0]
    assert marked.tolist() == [small.eos_token_id]
    assert table.eos == (small.eos_token_id,)


# --- UTF-8 ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.text(min_size=1, max_size=12), st.data())
def test_a_prefix_decodes_whole_exactly_when_no_byte_is_needed(text: str, data: st.DataObject) -> None:
    """Valid text in any pieces of bytes: UTF8_NEED is 0 exactly at the ends of characters."""
    raw = text.encode("utf-8", errors="ignore")
    if not raw:
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)))) | {len(raw)})
    ints = np.zeros(layout.N_INTS, np.int32)
    start = 0
    for cut in cuts:
        need = scan.utf8_step(ints, 0, units.utf8_flags(raw[start:cut]))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw[:cut])
        pending = decoder.getstate()[0]
        assert (need == 0) == (pending == b""), raw[:cut]
        start = cut


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=8))
def test_any_bytes_are_never_called_whole_while_a_character_is_open(pieces: list[bytes]) -> None:
    """Bytes that are no text at all: where a decoder still waits, so do we."""
    ints = np.zeros(layout.N_INTS, np.int32)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        need = scan.utf8_step(ints, 0, units.utf8_flags(piece))
        decoder.decode(piece)
        if decoder.getstate()[0]:
            assert need > 0


@pytest.mark.parametrize("byte", [0xC0, 0xC1, 0xF5, 0xF8, 0xFE, 0xFF])
def test_a_byte_that_begins_nothing_leaves_nothing_open(byte: int) -> None:
    """Bytes that no UTF-8 text holds wait for no continuation."""
    assert units.utf8_flags(bytes([byte])) == 0


@pytest.mark.parametrize("make", [byte_level, metaspace])
@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet="aé好😀 .\n`", min_size=1, max_size=10))
def test_tokens_of_real_tokenizers_are_whole_where_their_text_is(make: Any, text: str) -> None:
    """Byte-level pieces and byte fallback: every prefix of the ids decodes without a broken end, or needs bytes."""
    tokenizer = _made(make)
    table = units.compile_tokenizer(tokenizer, vocab_size=len(tokenizer), eos=(tokenizer.eos_token_id,))
    pieces = units.token_bytes(tokenizer, len(tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ints = np.zeros(layout.N_INTS, np.int32)
    raw = b""
    for token in ids:
        raw += pieces[token]
        need = scan.utf8_step(ints, 0, table.flags[token])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw)
        assert (need == 0) == (decoder.getstate()[0] == b"")
    assert raw.decode().strip() == text.strip()


_CACHE: dict[Any, Any] = {}


def _made(make: Any) -> Any:
    if make not in _CACHE:
        _CACHE[make] = make()
    return _CACHE[make]


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize(
    "text", ['{"k": [1]}', "```\nx\n", "`a.b` it", "Hello world.", "Hello world.\n\n", "好。", '[{"k": 1}', "{\n"]
)
def test_the_automaton_reads_tokens_as_it_reads_letters(make: Any, text: str) -> None:
    """What a tokenizer makes of a text ends in the state that its letters end in."""
    tokenizer = _made(make)
    table = units.compile_tokenizer(tokenizer, vocab_size=len(tokenizer), eos=(tokenizer.eos_token_id,))
    ours = state_after(table, tokenizer.encode(text, add_special_tokens=False))
    letters = np.zeros(layout.N_INTS, np.int32)
    for char in text:
        symbols = units.symbols_of(char)
        scan.scan_text(letters, 0, 0, symbols, (0, len(symbols)))
    for name in ("FENCE", "JSON_DEPTH", "JSON_STRING", "LINE", "INLINE", "SENTENCE", "DANGLING"):
        assert ours[getattr(layout, name)] == letters[getattr(layout, name)], name


# --- tags -----------------------------------------------------------------------------------------


def test_a10_tags_are_found_in_the_tokenizer_not_by_literal_ids() -> None:
    """Two tokenizers with the same tags at different ids each give their own."""
    one = byte_level(added=("<think>", "</think>"))
    other = byte_level(added=("<pad1>", "<pad2>", "<think>", "</think>"))
    for tokenizer in (one, other):
        vocab = tokenizer.get_vocab()
        table = units.compile_tokenizer(tokenizer, vocab_size=len(tokenizer), eos=(tokenizer.eos_token_id,))
        assert (table.opening, table.closing) == ((vocab["<think>"],), (vocab["</think>"],))
        assert table.thinks
        assert table.sequence[table.tag_at : table.tag_at + 1] == table.closing
        assert table.flags[vocab["</think>"]] & layout.T_SPECIAL
    assert one.get_vocab()["<think>"] != other.get_vocab()["<think>"]


def test_a10_the_special_id_is_preferred_over_the_tags_pieces(small: Any) -> None:
    """Where the tag has an id of its own, spelling it in pieces would be another text."""
    assert units.tag_ids(small, "</think>") == (small.get_vocab()["</think>"],)


def test_a_tokenizer_without_tags_does_not_think() -> None:
    """Any tokenizer can spell "<think>"; that alone is no thinking tag."""
    tokenizer = byte_level()
    table = units.compile_tokenizer(tokenizer, vocab_size=len(tokenizer), eos=(tokenizer.eos_token_id,))
    assert (table.opening, table.closing, table.sequence) == ((), (), ())
    assert not table.thinks


def test_a_configured_tag_of_several_tokens() -> None:
    """Configured, a tag may be spelled in pieces that decode to it again."""
    tokenizer = byte_level()
    table = units.compile_tokenizer(
        tokenizer,
        vocab_size=len(tokenizer),
        eos=(tokenizer.eos_token_id,),
        think_start="<<",
        think_end=">>!",
        close_text=".",
    )
    assert tokenizer.decode(list(table.closing)) == ">>!"
    assert len(table.closing) > 1
    assert table.sequence[table.tag_at :][: len(table.closing)] == table.closing


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"think_start": "<think>"}, "think_end"),
        ({"think_end": "</think>"}, "think_start"),
        ({"think_start": "<think>", "think_end": ""}, "think_end"),
        ({"think_start": "<think>", "think_end": "x" * 300}, "think_end"),
        ({"close_text": "never ending " * 100}, "close_text"),
    ],
)
def test_what_cannot_be_resolved_is_a_config_error(small: Any, options: dict[str, str], names: str) -> None:
    """Named, at load: never a silent no-op."""
    with pytest.raises(ConfigError, match=names):
        units.compile_tokenizer(small, vocab_size=len(small), eos=(small.eos_token_id,), **options)


def test_an_end_tag_that_the_tokenizer_cannot_spell() -> None:
    """A tag that does not survive encoding and decoding."""
    with pytest.raises(ConfigError, match="think_start"):
        units.compile_tokenizer(
            metaspace_without_bytes(), vocab_size=8, eos=(0,), think_start="<reason>", think_end="</reason>"
        )


def metaspace_without_bytes() -> Any:
    """A vocabulary of a few words: nothing else can be spelled."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "Hello": 1, "world": 2}, unk_token="<unk>"))  # noqa: S106  (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(tokenizer, "<unk>")


def test_tool_markers_come_from_the_tokenizer(table: units.TokenTable, small: Any) -> None:
    """Pairs that the tokenizer has are marked, others are ignored."""
    vocab = small.get_vocab()
    assert table.flags[vocab["<tool_call>"]] & layout.T_TOOL_OPEN
    assert table.flags[vocab["</tool_call>"]] & layout.T_TOOL_CLOSE
    assert np.count_nonzero(table.flags & (layout.T_TOOL_OPEN | layout.T_TOOL_CLOSE)) == 2


def test_the_close_text_is_the_configured_one(small: Any) -> None:
    """Text, tag, and what the template puts behind it."""
    table = units.compile_tokenizer(
        small, vocab_size=len(small), eos=(small.eos_token_id,), close_text="\nOk.", after_close="\n\n"
    )
    assert small.decode(list(table.sequence)) == "\nOk.</think>\n\n"
    bare = units.compile_tokenizer(
        small, vocab_size=len(small), eos=(small.eos_token_id,), close_text="", after_close=""
    )
    assert (bare.sequence, bare.tag_at) == (bare.closing, 0)


def test_the_default_transition_leads_over_or_stays_out(small: Any) -> None:
    """Spelled by the letter it may be longer than the ring of the closing sequence allows: then the tag alone."""
    table = units.compile_tokenizer(small, vocab_size=len(small), eos=(small.eos_token_id,))
    text = small.decode(list(table.sequence))
    assert text in (units.TRANSITION + "</think>\n\n", "</think>\n\n")
    assert len(table.sequence) <= layout.CLOSE_MAX


# --- a real tokenizer -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Any:
    """SmolLM2's tokenizer, where it was fetched before."""
    root = Path.home() / ".cache" / "earlystop"
    folders = sorted(root.glob("smollm2-*")) if root.is_dir() else []
    if not folders:
        pytest.skip("SmolLM2 has not been fetched on this machine (make demo does)")
    return transformers.AutoTokenizer.from_pretrained(str(folders[0]))


def test_smollm2_reads_its_tokens_as_text(real: Any) -> None:
    """49,152 tokens compile, none of them thinks, and a text ends in the state of its letters."""
    table = units.compile_tokenizer(real, vocab_size=49_152, eos=(real.eos_token_id,))
    assert not table.thinks
    for text in ('Here:\n```py\nx = {"a": 1}\n', '{"a": ["b", 1', "It works. 1. Then", "- `a.b`: c\n\n", "好的。😀"):
        ours = state_after(table, real.encode(text, add_special_tokens=False))
        letters = np.zeros(layout.N_INTS, np.int32)
        for char in text:
            symbols = units.symbols_of(char)
            scan.scan_text(letters, 0, 0, symbols, (0, len(symbols)))
        for name in ("FENCE", "JSON_DEPTH", "JSON_STRING", "LINE", "INLINE", "DANGLING"):
            assert ours[getattr(layout, name)] == letters[getattr(layout, name)], (text, name)
        assert ours[layout.UTF8_NEED] == 0
