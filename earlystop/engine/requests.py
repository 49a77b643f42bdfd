"""From a slot to vLLM's own request id: the one fact that neither processor interface hands over.

vLLM gives V2 processors views of the runner's tensors; the runner's `RequestState`, which owns the same
tensors and knows the ids, is found once, at construction, among the objects that refer to them. V1's
`InputBatch` does not exist yet when its processors are built; it is found at the first request. Where nothing
is found, signals carry no request id, and everything else works.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

RequestIds = Callable[[int], str | None]


def owner_of(part: object, class_name: str) -> Any | None:
    """The live object of the named class that holds `part` in an attribute, or None."""
    for referrer in gc.get_referrers(part):
        if type(referrer).__name__ == class_name:
            return referrer
        if isinstance(referrer, dict):
            for owner in gc.get_referrers(referrer):
                if type(owner).__name__ == class_name and getattr(owner, "__dict__", None) is referrer:
                    return owner
    return None


def v2_request_ids(req_states: Any) -> RequestIds | None:
    """Ids of V2's slots, from the runner's `RequestState`."""
    owner = owner_of(req_states.all_token_ids, "RequestState")
    ids = getattr(owner, "index_to_req_id", None)
    return None if ids is None else ids.get


def v1_request_ids(processors: object) -> RequestIds | None:
    """Ids of V1's batch rows, from the runner's `InputBatch`, which holds the `LogitsProcessors` object."""
    owner = owner_of(processors, "InputBatch")
    if owner is None:
        return None

    def request_id(row: int) -> str | None:
        ids = owner.req_ids
        return ids[row] if row < len(ids) else None

    return request_id
