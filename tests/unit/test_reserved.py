from earlystop.reserved import reserved_stop_ids
from earlystop.signals import StopReason


class Tokenizer:
    """As much of a transformers tokenizer as is asked of it."""

    def __init__(self, added, size, chat_template=None, **roles):
        self.added_tokens_decoder = added
        self.size = size
        self.chat_template = chat_template
        self.__dict__.update(roles)

    def get_vocab(self):
        return {f"w{i}": i for i in range(self.size)} | {text: i for i, text in self.added_tokens_decoder.items()}


def llama(**changes):
    added = {100: "<|begin_of_text|>", 101: "<|end_of_text|>", 109: "<|eot_id|>"}
    added |= {110 + i: f"<|reserved_special_token_{i}|>" for i in range(30)}
    return Tokenizer(added, 100, **{"bos_token_id": 100, "eos_token_id": 101, **changes})


def test_reserved_tokens_are_taken_from_the_top():
    """Every reason gets an id of its own, the highest ones first."""
    ids = reserved_stop_ids(llama())
    assert list(ids) == list(StopReason)
    assert list(ids.values()) == list(range(139, 123, -1))


def test_a_token_with_a_use_is_never_taken():
    """Not as padding, not as a list of ends, not inside the chat template, not where the caller says so."""
    tokenizer = llama(
        pad_token_id=139, eos_token_id=[101, 138], chat_template="{{ '<|reserved_special_token_27|>' }}"
    )  # fmt: skip
    ids = reserved_stop_ids(tokenizer, exclude=[136])
    assert not {139, 138, 137, 136} & set(ids.values())
    assert ids[StopReason.BUDGET] == 135


def test_markers_with_a_name_are_never_taken():
    """SmolLM2's and reasoning models' added tokens all have a meaning: plain EOS is used."""
    added = dict(enumerate(["<|endoftext|>", "<|im_start|>", "<repo_name>", "<think>", "</think>", "<tool_call>"]))
    assert reserved_stop_ids(Tokenizer(added, 127), vocab_size=127) == {}


def test_other_families_are_recognised():
    """Gemma's, BERT's and Mistral's unused tokens count."""
    added = {10: "<unused0>", 11: "[unused1]", 12: "<SPECIAL_20>", 13: "<|extra_5|>", 14: "<reserved_id_3>"}
    assert set(reserved_stop_ids(Tokenizer(added, 20)).values()) == set(added)


def test_rows_beyond_the_tokenizer_are_used_where_the_model_has_them():
    """Ids that decode to nothing serve when the vocabulary's size is known, and never ids beyond it."""
    tokenizer = Tokenizer({5: "<s>"}, 100)
    assert reserved_stop_ids(tokenizer) == {}
    assert list(reserved_stop_ids(tokenizer, vocab_size=103).values()) == [100, 101, 102]
    assert reserved_stop_ids(llama(), vocab_size=105) == {}


def test_knowing_less_gives_a_prefix():
    """A client without the vocabulary's size agrees with the engine on every id that it knows."""
    tokenizer = Tokenizer({100: "<unused0>", 101: "<unused1>"}, 100)
    short, long = reserved_stop_ids(tokenizer), reserved_stop_ids(tokenizer, vocab_size=110)
    assert list(long.items())[: len(short)] == list(short.items())
    assert len(long) == 10
