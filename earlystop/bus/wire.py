"""What travels: signals in msgpack, in the three frames of vLLM's KV events.

A message is (topic, sequence as 8 bytes big endian, batch). The batch begins like vLLM's ``EventBatch`` (``ts``,
``events``, ``data_parallel_rank``: vllm/distributed/kv_events.py) and goes on with what that lacks: the version of the
schema, which publisher this is, and how many records it had to drop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from earlystop.errors import StreamError
from earlystop.signals import Signal

SCHEMA = 1
"""Version of the batch. A reader refuses one that it does not know."""
TOPIC = b"earlystop"
END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""The sequence frame that ends a replay, as in vLLM."""

FLUSH = b"flush"
"""One more frame in a replay request, not in vLLM's: the engine is to hand over first what is still on its way."""


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """One message's third frame."""

    ts: float
    """Wall clock of the sender when it sent the batch, in seconds since the epoch."""
    events: msgspec.Raw
    """The signals; decoded only when the schema is known."""
    data_parallel_rank: int | None
    schema: int
    epoch: int
    """Which publisher: its start in nanoseconds since 1970. A restarted one has a greater number and counts from 0."""
    dropped: int
    """Signals that the sender's queue has dropped so far."""


class ReplayEnd(msgspec.Struct, array_like=True, frozen=True):
    """The last frame of a replay: what the buffer held when it was answered."""

    schema: int
    epoch: int
    first: int
    """The oldest batch still in the buffer."""
    next: int
    """The number that the next batch will get; equal to `first` when the buffer is empty."""


def finite(value: float | None) -> float | None:
    """`value` as a float, or None where it is undefined (None, NaN or infinite)."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def clean(value: Any) -> Any:
    """`value` in plain types: arrays become lists, a non-finite number becomes None, at any depth."""
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if hasattr(value, "tolist"):
        return clean(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(Batch)
_ends = msgspec.msgpack.Decoder(ReplayEnd)
_signals = msgspec.msgpack.Decoder(list[Signal])


def encode_signals(signals: Sequence[Signal]) -> tuple[bytes, int]:
    """The signals in msgpack, and how many had to be left out because they cannot be encoded."""
    tidy = [s if s.data is None else msgspec.structs.replace(s, data=clean(s.data)) for s in signals]
    try:
        return _encoder.encode(tidy), 0
    except (TypeError, ValueError, OverflowError):  # one bad record must not take its neighbours along
        good = [s for s in tidy if _encodable(s)]
        return _encoder.encode(good), len(tidy) - len(good)


def _encodable(signal: Signal) -> bool:
    try:
        _encoder.encode(signal)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def encode_batch(batch: Batch | ReplayEnd) -> bytes:
    """A batch, or the end of a replay, in msgpack."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> Batch:
    """The batch in a third frame; its signals stay encoded.

    Raises:
        StreamError: It is no batch, or of a schema that we do not know.
    """
    try:
        batch = _batches.decode(payload)
    except msgspec.MsgspecError as error:
        raise StreamError(f"not a batch of signals: {error}; is this endpoint earlystop's?") from error
    _known(batch.schema)
    return batch


def decode_end(payload: bytes) -> ReplayEnd:
    """The last frame of a replay.

    Raises:
        StreamError: It is none, or of a schema that we do not know.
    """
    try:
        end = _ends.decode(payload)
    except msgspec.MsgspecError as error:
        raise StreamError(f"not the end of a replay: {error}; is this endpoint earlystop's?") from error
    _known(end.schema)
    return end


def decode_signals(raw: msgspec.Raw | bytes) -> list[Signal]:
    """The signals of a batch.

    Raises:
        StreamError: They cannot be decoded.
    """
    try:
        return _signals.decode(raw)
    except msgspec.MsgspecError as error:
        raise StreamError(f"a record is no signal: {error}; do sender and reader run the same earlystop?") from error


def _known(schema: int) -> None:
    if schema != SCHEMA:
        raise StreamError(f"signals of schema {schema}, this earlystop reads {SCHEMA}; use the sender's version here")
