"""Stop ids that say why: unused ids of a tokenizer, one for each `StopReason`.

Forcing an id listed in ``stop_token_ids`` ends a request with ``stop_reason`` set to that id, so that a client that has
none of our channels still learns the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from earlystop.signals import StopReason

_UNUSED = re.compile(
    r"<\|?(reserved|unused|extra|dummy|SPECIAL)[_-]?(special[_-]?)?(token|id)?[_-]?\d+\|?>"  # Llama 3, Gemma, Mistral
    r"|\[unused\d+\]",  # BERT's form
    re.IGNORECASE,
)
_OWN_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")


def reserved_stop_ids(
    tokenizer: Any, vocab_size: int | None = None, *, exclude: Iterable[int] = ()
) -> dict[StopReason, int]:
    """One unused id for each reason, as far as they go.

    First come added tokens whose text says that they are reserved (``<|reserved_special_token_7|>``, ``<unused7>``),
    highest id first, since fine-tunes take the low ones; then ids beyond the tokenizer but inside the model's
    vocabulary, which decode to nothing. An id with a role (EOS, BOS, padding, ...) or whose text stands in the chat
    template is never taken. A caller that does not know `vocab_size` gets a prefix of what one who does gets.

    Args:
        tokenizer: A transformers tokenizer, or anything with its ``added_tokens_decoder``.
        vocab_size: Rows of the model's output layer, None if unknown.
        exclude: Ids that have a use (further end tokens, thinking and tool markers).

    Returns:
        Reason to id, in the order of `StopReason`; a reason without an id is missing, and plain EOS is used for it.
        Empty where the tokenizer has no unused id.
    """
    taken = {*exclude, *_role_ids(tokenizer)}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    named = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    reserved = sorted(
        (i for i, text in named.items() if _UNUSED.fullmatch(text) and text not in template), reverse=True
    )
    beyond = range(_end_of_tokenizer(tokenizer, named), vocab_size or 0)
    ids = [i for i in (*reserved, *beyond) if i not in taken and (vocab_size is None or i < vocab_size)]
    return dict(zip(StopReason, ids, strict=False))


def _role_ids(tokenizer: Any) -> set[int]:
    """Ids with a role of their own; some tokenizers give a list for EOS."""
    roles: set[int] = set()
    for role in _OWN_ROLES:
        value = getattr(tokenizer, f"{role}_token_id", None)
        roles.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return roles


def _end_of_tokenizer(tokenizer: Any, named: dict[int, str]) -> int:
    """The first id past everything that the tokenizer knows; ids may have gaps below it."""
    try:
        highest = max(tokenizer.get_vocab().values(), default=-1)
    except AttributeError:
        highest = len(tokenizer) - 1
    return max([highest, *named]) + 1
