"""vLLM's request ids: the internal one that the worker sees, and the external one that outputs carry.

vLLM 0.32 appends ``-`` and 8 hexadecimal characters to the external id (`assign_request_id` in
vllm/v1/engine/input_processor.py) and puts ``<index>_`` before the result for each child of ``n > 1``
(`get_child_info` in vllm/v1/engine/parallel_sampling.py): ``2_chatcmpl-abc-1f2e3d4c``. With
``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1`` there is no suffix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHILD = re.compile(r"([0-9]+)_(.*)\Z", re.DOTALL)


def external_id(internal: str) -> tuple[str, int]:
    """The most likely external id and choice index behind an internal id.

    An external id that itself looks like vLLM's additions (``3_x``, or ``x-00000000`` without randomisation) cannot be
    told from them; `match` can, where the external ids are known.
    """
    return next(_candidates(internal))


def match(internal: str, choices: Mapping[str, Collection[int]]) -> tuple[str, int] | None:
    """Which of the known choices an internal id belongs to.

    Args:
        internal: vLLM's internal request id.
        choices: The choice indexes of each external id.

    Returns:
        External id and index; None if no known one fits, or more than one does.
    """
    fitting = {(external, index) for external, index in _candidates(internal) if index in choices.get(external, ())}
    return fitting.pop() if len(fitting) == 1 else None


def _candidates(internal: str) -> Iterator[tuple[str, int]]:
    """Every reading, the likeliest first."""
    stripped = _SUFFIX.sub("", internal)
    for name in dict.fromkeys((stripped, internal)):
        if child := _CHILD.match(name):
            yield child[2], int(child[1])
        yield name, 0
