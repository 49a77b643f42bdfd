"""The bus's sending end: never blocks the caller, drops the oldest and says how many, replays what it still has."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Self

import msgspec
import zmq

from earlystop.bus.ending import end_context
from earlystop.bus.endpoint import claim_free, default_endpoint, for_rank, replay_of
from earlystop.bus.waker import Waker
from earlystop.bus.wire import END_SEQ, FLUSH, SCHEMA, TOPIC, Batch, ReplayEnd, encode_batch, encode_signals
from earlystop.errors import ConfigError
from earlystop.signals import Signal

_log = logging.getLogger(__name__)

_BATCH = 512
"""Most signals in one message."""
_REPLAY_CHUNK = 1000
"""Most batches in one answer; the reader asks again for the rest, so that no socket's queue overflows."""


class Publisher:
    """Publishes signals to whoever watches.

    Args:
        endpoint: ``ipc://`` or ``tcp://`` address to bind; None is `default_endpoint`. An ``ipc://`` path that a living
            publisher holds gets a suffix, see `endpoint`.
        replay_endpoint: Where the buffer is asked for; None is `replay_of` the endpoint.
        buffer_steps: Batches kept for watchers that come late or lost some.
        queue_size: Signals that may wait for the thread. Beyond it the OLDEST are dropped and counted.
        schema: Version of the batches.
        dp_rank: Data-parallel rank; adds a suffix to the endpoint.
        on_request: Called on the publisher's thread before it answers a reader that wants everything (`recall`; a
            watcher that only looks for gaps does not): publish here what is still on its way.

    Raises:
        ConfigError: The endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        queue_size: int = 100_000,
        schema: int = SCHEMA,
        dp_rank: int = 0,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        if buffer_steps < 0 or queue_size < 1:
            raise ConfigError(f"buffer_steps must be >= 0 and queue_size >= 1, got {buffer_steps} and {queue_size}")
        wanted = for_rank(endpoint, dp_rank) if endpoint else default_endpoint(dp_rank)
        self._queue_size = queue_size
        self._schema = schema
        self._dp_rank = dp_rank
        self._on_request = on_request
        self._epoch = time.time_ns()
        self._queue: deque[Signal] = deque()
        self._lock = threading.Lock()
        self._dropped = 0
        self._closing = False
        self._deadline = 0.0
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._claim = claim_free(wanted)
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._waker = Waker()
        try:
            self._pub = self._bind(zmq.PUB, self._claim.endpoint)
            self.endpoint: str = _bound(self._pub)
            """Where it is bound: what was asked for, or a free sibling."""
            self._router = self._bind(zmq.ROUTER, replay_endpoint or replay_of(self._claim.endpoint))
            self.replay_endpoint: str = _bound(self._router)
            """Where the buffer is asked for."""
        except BaseException:
            self._free(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._run, name="earlystop-bus", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        # Our queue and the buffer bound the memory; a watcher that lags loses batches and asks for them again.
        socket.sndhwm = self._queue_size if kind == zmq.PUB else 2 * _REPLAY_CHUNK
        socket.ipv6 = "[" in endpoint
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind the bus to {endpoint}: {error}; set EARLYSTOP_BUS") from error
        return socket

    @property
    def dropped(self) -> int:
        """Signals dropped so far: the queue was full, they could not be encoded, or `close` ran out of time."""
        return self._dropped

    @property
    def epoch(self) -> int:
        """This publisher's identity: its start in nanoseconds since the epoch."""
        return self._epoch

    def publish(self, signals: Sequence[Signal]) -> None:
        """Queue signals for sending. Never blocks; after `close` it does nothing.

        Args:
            signals: Already stamped (`Stamper`), so that what is dropped here shows as a gap in `seq`.
        """
        if not signals:
            return
        with self._lock:
            if self._closing:
                self._dropped += len(signals)
                return
            self._queue.extend(signals)
            for _ in range(len(self._queue) - self._queue_size):
                self._queue.popleft()
                self._dropped += 1
        self._waker.ring()

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most about `timeout` seconds, then free the sockets. May be called twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._deadline = time.monotonic() + timeout
        self._waker.ring()
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("the bus did not finish within %.1f s; signals may be lost", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while not self._finished():
                ready = dict(poller.poll())
                self._waker.clear()
                try:
                    self._drain()
                    if self._router in ready:
                        self._answer()
                except Exception:  # the bus must outlive any one bad message
                    _log.exception("the bus failed to send")
        finally:
            with self._lock:
                self._dropped += len(self._queue)
                self._queue.clear()
            self._free(linger_ms=max(0, int(1000 * (self._deadline - time.monotonic()))))

    def _finished(self) -> bool:
        with self._lock:
            return self._closing and (not self._queue or time.monotonic() > self._deadline)

    def _drain(self) -> None:
        while True:
            with self._lock:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), _BATCH))]
            if not batch or (self._closing and time.monotonic() > self._deadline):
                self._dropped += len(batch)
                return
            self._send(batch)

    def _send(self, signals: list[Signal]) -> None:
        events, bad = encode_signals(signals)
        if bad:
            self._dropped += bad
            _log.error("%d signals cannot be encoded and are dropped", bad)
        payload = encode_batch(
            Batch(time.time(), msgspec.Raw(events), self._dp_rank, self._schema, self._epoch, self._dropped)
        )
        seq, self._next = self._next, self._next + 1
        self._buffer.append((seq, payload))
        self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        """Answer every waiting request: the batches from a number on, then what the buffer holds."""
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            if len(frames) not in (3, 4) or len(frames[2]) != 8:
                _log.warning("not a replay request: %d frames", len(frames))
                continue
            reader, _, start_bytes, *wish = frames
            if wish == [FLUSH]:
                self._flush_engine()
            first = self._buffer[0][0] if self._buffer else self._next
            skip = max(int.from_bytes(start_bytes, "big") - first, 0)
            for seq, payload in islice(self._buffer, skip, skip + _REPLAY_CHUNK):
                self._router.send_multipart((reader, b"", TOPIC, seq.to_bytes(8, "big"), payload))
            end = encode_batch(ReplayEnd(self._schema, self._epoch, first, self._next))
            self._router.send_multipart((reader, b"", b"", END_SEQ, end))

    def _flush_engine(self) -> None:
        if self._on_request is not None:
            try:
                self._on_request()
            except Exception:  # the engine's fault must not keep readers from what is here
                _log.exception("the engine could not hand over its signals")
            self._drain()

    def _free(self, linger_ms: int) -> None:
        for socket in self._sockets:
            socket.close(linger=linger_ms)
        end_context(self._context)
        self._claim.release()
        self._waker.close()


def _bound(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
