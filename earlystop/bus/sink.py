"""The sink's receiving end, in the driver's process: every signal of every stream, and the proof that all are in.

Writers are DEALER sockets, the reader a ROUTER, both without a high-water mark. Messages are numbered per writer, and
the way back carries the question "is that all?", so that `SinkReader.barrier` need not guess from silence.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Self

import msgspec
import zmq

from earlystop.bus.ending import end_context
from earlystop.bus.endpoint import SINK_ENV, Claim, checked, runtime_dir, sweep
from earlystop.bus.sink_writer import DATA, FINAL, GOODBYE, SYNCED, SinkMessage
from earlystop.bus.waker import Waker
from earlystop.bus.wire import SCHEMA, decode_signals
from earlystop.errors import ConfigError, StreamError
from earlystop.signals import Signal

_ASK_AGAIN_S = 0.05


class _Writer:
    """What the reader knows of one writer."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.next = 0
        self.token = 0
        self.lost = 0
        self.final = False
        self.fresh = False
        """Has sent signals since its last answer."""


class SinkReader:
    """Collects signals from the engine's processes.

    Open it before the engine: its processes inherit $EARLYSTOP_SINK. The same process may hold both ends.

    Args:
        endpoint: ``ipc://`` address to bind; None makes one for this process.
        export: Set $EARLYSTOP_SINK until `close`.

    Raises:
        ConfigError: The endpoint cannot be bound.
    """

    def __init__(self, endpoint: str | None = None, *, export: bool = True) -> None:
        self.endpoint: str = checked(endpoint) if endpoint else f"ipc://{runtime_dir()}/sink-{_unique()}.ipc"
        """Where writers connect to."""
        sweep(self.endpoint)
        self._pid = os.getpid()
        self._streams: dict[str, list[Signal]] = {}
        self._writers: dict[bytes, _Writer] = {}
        self._faults: list[str] = []
        self._token = 0
        self._ask = False
        self._closed = False
        self._changed = threading.Condition()
        self._closing = threading.Lock()
        self._claim = Claim(self.endpoint)
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.rcvhwm = self._socket.sndhwm = 0
        self._socket.router_mandatory = True  # sending to a dead writer fails instead of vanishing
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._free()
            raise ConfigError(f"cannot bind the sink to {self.endpoint!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="earlystop-sink", daemon=True)
        self._thread.start()
        self._former = os.environ.get(SINK_ENV)
        self._exported = export
        if export:
            os.environ[SINK_ENV] = self.endpoint
        _open.append(self)

    @property
    def writers(self) -> int:
        """Engine processes that have connected so far."""
        with self._changed:
            return len(self._writers)

    def take(self, stream_id: str) -> list[Signal]:
        """The signals of one stream, in order of arrival; they are removed. Empty if there are none."""
        with self._changed:
            return self._streams.pop(stream_id, [])

    def drain(self) -> dict[str, list[Signal]]:
        """All signals by stream id; they are removed."""
        with self._changed:
            streams, self._streams = self._streams, {}
        return streams

    def __iter__(self) -> Iterator[Signal]:
        """Over all signals collected so far, stream by stream; they stay."""
        with self._changed:
            kept = [signal for signals in self._streams.values() for signal in signals]
        return iter(kept)

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._streams.values()))

    def barrier(self, timeout: float = 10.0, *, writers: int = 1) -> None:
        """Wait until everything is in that the engine has sent, or had on its way, when this was called.

        Args:
            timeout: Seconds.
            writers: How many writers there must be at least (data-parallel ranks of the engine).

        Raises:
            StreamError: Writers are missing, do not answer in time or died with signals unsent, or a message is lost.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self._token += 1
            token = self._token
            while True:
                if self._faults:
                    faults, self._faults = self._faults, []
                    raise StreamError("signals were lost: " + "; ".join(faults))
                waiting = [w for w in self._writers.values() if not w.final and w.token < token]
                if len(self._writers) >= writers and not waiting:
                    return
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    raise StreamError(_unanswered(len(self._writers), writers, waiting, timeout))
                self._ask = True
                self._waker.ring()
                self._changed.wait(min(left, _ASK_AGAIN_S))

    def close(self) -> None:
        """Stop collecting and free the socket; what was collected stays. May be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._waker.ring()
        self._thread.join()
        if self in _open:
            _open.remove(self)
        if self._exported and os.environ.get(SINK_ENV) == self.endpoint:
            if self._former is None:
                del os.environ[SINK_ENV]
            else:
                os.environ[SINK_ENV] = self._former

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while not self._closed:
                poller.poll()
                self._waker.clear()
                with self._changed:
                    try:
                        self._receive()
                    except StreamError as error:
                        self._faults.append(str(error))
                    self._question()
                    self._changed.notify_all()
        finally:
            for identity in self._writers:
                self._say_goodbye(identity)
            self._free()

    def _say_goodbye(self, identity: bytes) -> None:
        """Let a writer go: it waits at its end until it knows that everything has been taken."""
        with contextlib.suppress(zmq.ZMQError):  # it has gone already
            self._socket.send_multipart((identity, GOODBYE), zmq.DONTWAIT)

    def _receive(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self._socket.poll(0):
                return
            identity, payload = self._socket.recv_multipart()
            try:
                message = msgspec.msgpack.decode(payload, type=SinkMessage)
            except msgspec.MsgspecError as error:
                raise StreamError(f"not a message of a sink writer: {error}") from error
            if message.schema != SCHEMA:
                raise StreamError(f"a sink writer of schema {message.schema}, this earlystop reads {SCHEMA}")
            self._accept(self._writers.setdefault(identity, _Writer(message.pid)), message)
            if message.kind == FINAL:
                self._say_goodbye(identity)

    def _accept(self, writer: _Writer, message: SinkMessage) -> None:
        if message.n != writer.next:
            self._faults.append(f"process {message.pid}: messages {writer.next} to {message.n - 1}")
        writer.next = message.n + 1
        if message.kind == DATA:
            writer.fresh = True
            for signal in decode_signals(message.signals):
                self._streams.setdefault(signal.id, []).append(signal)
        elif message.kind == SYNCED:
            writer.token, writer.fresh = max(writer.token, message.token), False
        elif message.kind == FINAL:
            writer.final = True
        if message.lost > writer.lost:
            self._faults.append(f"process {message.pid}: {message.lost - writer.lost} signals could not be sent")
            writer.lost = message.lost

    def _question(self) -> None:
        """Ask those who have not answered; forget those who are no more."""
        if not self._ask:
            return
        self._ask = False
        for identity, writer in list(self._writers.items()):
            if writer.final or writer.token >= self._token:
                continue
            try:
                self._socket.send_multipart((identity, self._token.to_bytes(8, "big")), zmq.DONTWAIT)
            except zmq.ZMQError:
                writer.final = True
                if writer.fresh:
                    self._faults.append(f"process {writer.pid} ended without saying that it had sent everything")

    def _free(self) -> None:
        self._socket.close(linger=100)
        end_context(self._context)
        self._claim.release()
        self._waker.close()


_open: list[SinkReader] = []


def default_sink() -> SinkReader | None:
    """The sink opened first of those open in this process, None without one."""
    return next((sink for sink in _open if sink._pid == os.getpid()), None)  # a forked child inherits the list


def _unique() -> str:
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _unanswered(known: int, wanted: int, waiting: list[_Writer], timeout: float) -> str:
    if known < wanted:
        return (
            f"{known} of {wanted} engine processes have connected within {timeout:g} s; "
            "open the SinkReader before the engine, whose processes inherit EARLYSTOP_SINK"
        )
    pids = ", ".join(str(writer.pid) for writer in waiting)
    return f"engine processes {pids} did not hand over their signals within {timeout:g} s"
