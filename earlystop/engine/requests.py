"""From a slot to vLLM's own request id: the one fact that neither processor interface hands over.

vLLM gives V2 processors views of the tensors of the runner's `RequestState`, which also knows the ids; V1's
`InputBatch` calls `update_state`. Both stand in the call stack when they are needed. (A search of the heap
would not find them: vLLM freezes it.) Where nothing is found, signals carry no request id, and everything
else works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

RequestIds = Callable[[int], str | None]


def in_call_stack(pick: Callable[[Mapping[str, Any]], Any | None]) -> Any | None:
    """The first thing that `pick` finds among the local variables of our callers, from the innermost on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = pick(frame.f_locals)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def v2_request_ids() -> RequestIds | None:
    """Ids of V2's slots; asked from within the constructor that vLLM's `build_custom_logits_processors` calls."""

    def pick(names: Mapping[str, Any]) -> Any | None:
        return getattr(names.get("req_states"), "index_to_req_id", None)

    ids = in_call_stack(pick)
    return None if ids is None else ids.get


def v1_request_ids() -> Callable[[list[int]], str | None]:
    """Ids of V1's requests by their output lists, from the `InputBatch` that called `update_state`.

    To be asked from within that call, once. By list and not by row: at that point the batch is already in its final
    order, while the update still speaks of rows before its moves.
    """

    def pick(names: Mapping[str, Any]) -> Any | None:
        owner = names.get("self")
        return owner if type(owner).__name__ == "InputBatch" else None

    batch = in_call_stack(pick)

    def request_id(output: list[int]) -> str | None:
        if batch is None:
            return None
        for row, known in enumerate(batch.req_output_token_ids):
            if known is output and row < len(batch.req_ids):
                return str(batch.req_ids[row])
        return None

    return request_id
