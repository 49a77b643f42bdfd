"""What the plugin tells the outside: signals and the reasons for a stop."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

SIGNAL_VERSION = 1
"""Version of the `Signal` record, its field `v`."""


class StopReason(StrEnum):
    """Why we ended a response. An end that is not ours has no reason (``None``).

    On the device a reason is its `code`; 0 stands for none. Codes are part of the wire format of traces: new reasons
    go to the end.
    """

    BUDGET = "budget"
    LOW_CONFIDENCE = "low_confidence"
    CONVERGED = "converged"
    CONFIDENT = "confident"
    HOPELESS = "hopeless"
    ANSWERED = "answered"
    REPETITION = "repetition"
    REQUESTED = "requested"
    TIMEOUT = "timeout"
    DEADLINE = "deadline"
    RATE_LIMIT = "rate_limit"
    COST_LIMIT = "cost_limit"
    SESSION_BUDGET = "session_budget"
    LENGTH_RESERVE = "length_reserve"
    EOS_IN_REASONING = "eos_in_reasoning"
    INVALID_LOGITS = "invalid_logits"

    @property
    def code(self) -> int:
        """The reason's small integer for the device, from 1."""
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> StopReason | None:
        """The reason of a device code; 0 is none.

        Raises:
            ValueError: The code is not one of ours.
        """
        if code == 0:
            return None
        if not 1 <= code <= len(_REASONS):
            raise ValueError(f"no stop reason has code {code}; codes are 0 (none) to {len(_REASONS)}")
        return _REASONS[code - 1]


_REASONS = tuple(StopReason)
_CODES = {reason: code for code, reason in enumerate(_REASONS, start=1)}


class Kind(StrEnum):
    """The kinds of signal.

    The first eight come from the worker; `STOPPED` and `SUMMARY` are made where vLLM reports the finish.
    """

    BUDGET_ADJUSTED = "budget_adjusted"
    BUDGET_WARNING = "budget_warning"
    STOP_DECIDED = "stop_decided"
    STOP_DEFERRED = "stop_deferred"
    WOULD_STOP = "would_stop"
    PROGRESS = "progress"
    TRACE = "trace"
    ERROR = "error"
    STOPPED = "stopped"
    SUMMARY = "summary"


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to one stream. What is undefined is ``None``, never NaN."""

    _FLOATS: ClassVar[tuple[str, ...]] = (
        "used",
        "budget",
        "confidence",
        "entropy",
        "similarity",
        "end_margin",
    )

    v: int = SIGNAL_VERSION
    """Version of this record."""
    id: str
    """Stream id (the key `earlystop_id`); may repeat, see `index`."""
    index: int | None = None
    """Which choice of the request (``n > 1``), None where the publisher cannot tell."""
    seq: int = 0
    """Position in the stream, from 0 without gaps."""
    t: int = 0
    """Hybrid logical clock: 48 bits of milliseconds since the epoch, 16 bits of counter. Stamped by the publisher."""
    kind: Kind
    """What happened."""
    reason: StopReason | None = None
    """Why, where the kind has a reason."""
    tokens: int | None = None
    """Generated tokens so far, forced ones and the stop token included."""
    reasoning_tokens: int | None = None
    """Thinking tokens so far, without the tags."""
    used: float | None = None
    """Cost units used in the budget's scope."""
    budget: float | None = None
    """The budget in cost units, None without one."""
    confidence: float | None = None
    """Mean top-1 probability of the last full window, in (0, 1]."""
    entropy: float | None = None
    """Mean entropy of the last full window, in nats."""
    similarity: float | None = None
    """Cosine between the last two units, in [-1, 1]."""
    end_margin: float | None = None
    """Top-1 logit minus the ending token's logit, in nats; 0 means the model itself would end here."""
    data: dict[str, Any] | None = None
    """What only this kind has."""

    def __post_init__(self) -> None:
        for name in self._FLOATS:
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                msgspec.structs.force_setattr(self, name, None)

    @property
    def milliseconds(self) -> int:
        """The wall-clock part of `t`, in milliseconds since the epoch."""
        return self.t >> 16

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON types; a non-finite number inside `data` becomes None."""
        decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return decoded
