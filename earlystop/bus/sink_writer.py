"""The sink's sending end, in the engine's process: loses nothing while the driver lives."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import zmq

from earlystop.bus.ending import end_context
from earlystop.bus.endpoint import SINK_ENV
from earlystop.bus.waker import Waker
from earlystop.bus.wire import SCHEMA, encode_signals
from earlystop.errors import ConfigError
from earlystop.signals import Signal

_log = logging.getLogger(__name__)

_BATCH = 512
HELLO, DATA, SYNCED, FINAL = "hello", "data", "synced", "final"
GOODBYE = bytes(8)
"""The question, a number from 1, that is none: the reader has taken the last message, or closes."""


class SinkMessage(msgspec.Struct, array_like=True, frozen=True):
    """What a writer sends."""

    schema: int
    pid: int
    """The writer's process, for messages to people."""
    n: int
    """Number of this message, from 0 without gaps."""
    kind: str
    """`HELLO`, `DATA`, `SYNCED` (everything before is in) or `FINAL` (nothing comes any more)."""
    token: int
    """Which question a `SYNCED` answers, else 0."""
    lost: int
    """Signals, so far, that could not be encoded or that the engine failed to hand over."""
    signals: msgspec.Raw


class SinkWriter:
    """Sends signals to the driver's `SinkReader`, which may start later.

    Nothing is dropped: what the driver has not read yet waits in memory.

    Args:
        endpoint: The reader's endpoint; None is $EARLYSTOP_SINK.
        on_sync: Called on the writer's thread when the driver wants everything: send here what is still on its way
            (`send` may be called). It may block.

    Raises:
        ConfigError: No endpoint.
    """

    def __init__(self, endpoint: str | None = None, *, on_sync: Callable[[], None] | None = None) -> None:
        endpoint = endpoint or os.environ.get(SINK_ENV)
        if not endpoint:
            raise ConfigError(f"no sink: open a SinkReader in the driver, which sets {SINK_ENV}", field=SINK_ENV)
        self._on_sync = on_sync
        self._queue: deque[Signal] = deque()
        self._closing = threading.Event()
        self._timeout = 0.0
        self._reader_gone = False
        self._n = 0
        self._lost = 0
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = uuid.uuid4().bytes
        self._socket.sndhwm = self._socket.rcvhwm = 0  # no limit: this is the lossless path
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 20, 500
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._free()
            raise ConfigError(f"cannot connect to the sink {endpoint!r}: {error}", field=SINK_ENV) from error
        self._thread = threading.Thread(target=self._run, name="earlystop-sink-writer", daemon=True)
        self._thread.start()

    def send(self, signals: Sequence[Signal]) -> None:
        """Queue signals, already stamped, for sending; never blocks. After `close` it does nothing."""
        if not self._closing.is_set():
            self._queue.extend(signals)  # one C call: atomic
            self._waker.ring()

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued, wait up to `timeout` seconds for the driver to take it. May be called twice."""
        if self._closing.is_set():
            return
        self._timeout = timeout
        self._closing.set()
        self._waker.ring()
        self._thread.join(timeout + 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            self._message(HELLO)
            while not self._closing.is_set():
                ready = dict(poller.poll())
                self._waker.clear()
                if self._socket in ready:
                    self._sync()
                self._drain()
            self._drain()
            self._message(FINAL)
            self._await_goodbye()
        finally:
            self._free()

    def _await_goodbye(self) -> None:
        until = time.monotonic() + self._timeout
        while not self._reader_gone:
            left = until - time.monotonic()
            if left <= 0 or not self._socket.poll(math.ceil(1000 * left)):
                _log.warning("the sink did not take its last signals within %g s", self._timeout)
                return
            self._sync()

    def _sync(self) -> None:
        token = 0
        while self._socket.poll(0):
            token = int.from_bytes(self._socket.recv(), "big")
        self._reader_gone = token == 0
        if self._reader_gone:
            return
        if self._on_sync is not None:
            try:
                self._on_sync()
            except Exception:  # the engine's fault must not end the sink
                _log.exception("the engine could not hand over its signals")
                self._lost += 1
        self._drain()
        self._message(SYNCED, token=token)

    def _drain(self) -> None:
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            encoded, bad = encode_signals(batch)
            self._lost += bad
            self._message(DATA, signals=encoded)

    def _message(self, kind: str, *, token: int = 0, signals: bytes = b"\x90") -> None:
        raw = msgspec.Raw(signals)
        message = SinkMessage(SCHEMA, os.getpid(), self._n, kind, token, self._lost, raw)
        self._n += 1
        self._socket.send(msgspec.msgpack.encode(message))

    def _free(self) -> None:
        self._socket.close(linger=0)
        end_context(self._context)
        self._waker.close()
