"""Following publishers: batches in order, each once, with the gaps asked for again."""

from __future__ import annotations

import logging
import math
import time
from typing import Self

import zmq

from earlystop.bus.ending import end_context
from earlystop.bus.endpoint import discover, is_dead, reachable, replay_of
from earlystop.bus.wire import END_SEQ, FLUSH, TOPIC, Batch, decode_batch, decode_end, decode_signals
from earlystop.errors import StreamError
from earlystop.signals import Signal

_log = logging.getLogger(__name__)

_FIRST_ASK_S = 0.01
_QUIET_ASK_S = 0.1
_MAX_ASK_S = 1.0
"""Pause until the question "what have I missed?": at first, after a signal, and at most; it doubles in between."""
_ANSWER_S = 2.0
"""How long to wait for an answer, and to hold later batches back for a replay that does not come."""
_RECONNECT_MS = (20, 500)
_PENDING = 100_000
"""Most batches in a socket's queue; more come by replay."""


class Follower:
    """One publisher's batches in order. Single-threaded; the owner polls `sockets` and calls `receive` and `tend`.

    Args:
        context: The owner's ZeroMQ context.
        endpoint: The publisher's endpoint.
        flush: Have the engine hand over what is still on its way before each answer.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        flush: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._wish = (FLUSH,) if flush else ()
        self.lost = 0
        """Batches that no buffer holds any more."""
        self.complete = False
        """Everything that the publisher had sent when it last answered has been seen."""
        self._epoch = 0
        self._next = 0
        self._pending: dict[int, Batch] = {}
        self._stale_ends = 0
        self._asked: float | None = None
        self._held_since = 0.0
        self._pause = _FIRST_ASK_S
        self._ask_at = 0.0
        self._sub = self._connect(context, zmq.SUB, endpoint)
        self._sub.subscribe(TOPIC)
        self._dealer = self._connect(context, zmq.DEALER, replay_of(endpoint))
        self.sockets = (self._sub, self._dealer)

    @staticmethod
    def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = _PENDING
        socket.ipv6 = "[" in endpoint
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS
        # Ask only who is there: questions queued for a dead publisher would all be answered by the next one.
        socket.immediate = kind == zmq.DEALER
        socket.connect(reachable(endpoint))
        return socket

    def close(self) -> None:
        """Close both sockets."""
        for socket in self.sockets:
            socket.close()

    def receive(self, limit: int = 1000) -> list[Signal]:
        """The signals that have arrived and are next in order.

        Raises:
            StreamError: What arrived is not ours, or of a schema that we do not know.
        """
        ready: list[Batch] = []
        for _ in range(limit):  # the replay first: it is older than what is live
            frames = _next_message(self._dealer)
            if frames is None:
                break
            if frames[-2] == END_SEQ:
                ready += self._finish_replay(frames[-1])
            else:
                ready += self._take(frames[-2], frames[-1])
        for _ in range(limit):
            frames = _next_message(self._sub)
            if frames is None:
                break
            ready += self._take(frames[-2], frames[-1])
        if ready:
            self._pause = _QUIET_ASK_S
            self._ask_at = time.monotonic() + self._pause
        return [signal for batch in ready for signal in decode_signals(batch.events)]

    def tend(self) -> list[Signal]:
        """Ask for what is missing; give up on what does not come. The signals held back for it."""
        now = time.monotonic()
        if self._pending and now >= self._held_since + _ANSWER_S:
            return [s for batch in self._skip_to(min(self._pending)) for s in decode_signals(batch.events)]
        if self._asked is not None and now >= self._asked + _ANSWER_S:
            self._asked = None
        if self._asked is None and now >= self._ask_at:
            self._ask()
        return []

    def next_tend(self) -> float:
        """When `tend` has something to do next, in `time.monotonic` seconds."""
        asking = self._ask_at if self._asked is None else self._asked + _ANSWER_S
        return min(asking, self._held_since + _ANSWER_S) if self._pending else asking

    def _ask(self) -> None:
        now = time.monotonic()
        self._ask_at = now + self._pause
        self._pause = min(2 * self._pause, _MAX_ASK_S)
        try:
            self._dealer.send_multipart((b"", self._next.to_bytes(8, "big"), *self._wish), zmq.DONTWAIT)
        except zmq.Again:
            return  # not connected (yet)
        self._asked = now

    def _take(self, seq_bytes: bytes, payload: bytes) -> list[Batch]:
        batch = decode_batch(payload)
        if batch.epoch < self._epoch:
            return []  # the last words of a publisher that has been replaced
        self._adopt(batch.epoch)
        seq = int.from_bytes(seq_bytes, "big")
        if seq >= self._next:
            if not self._pending:
                self._held_since = time.monotonic()
            self._pending[seq] = batch
        in_order = self._in_order()
        if self._pending and self._asked is None:
            self._ask()
        return in_order

    def _in_order(self) -> list[Batch]:
        ready = []
        if self._next in self._pending:
            self._held_since = time.monotonic()
        while (batch := self._pending.pop(self._next, None)) is not None:
            ready.append(batch)
            self._next += 1
        return ready

    def _finish_replay(self, payload: bytes) -> list[Batch]:
        end = decode_end(payload)
        self._asked = None
        if end.epoch < self._epoch:
            # Once, it is an answer that was on its way; twice, the wall clock was set back between two publishers.
            self._stale_ends += 1
            if self._stale_ends < 2:
                return []
            self._epoch = 0
        self._adopt(end.epoch)
        ready = self._skip_to(end.first) if self._next < end.first else []
        self.complete = self._next >= end.next
        if not self.complete:
            self._ask()
        return ready

    def _skip_to(self, seq: int) -> list[Batch]:
        """Give up on every batch before `seq` that is not here."""
        here = sorted(number for number in self._pending if number < seq)
        ready = [self._pending.pop(number) for number in here]
        gone = seq - self._next - len(here)
        self.lost += gone
        self._next = seq
        if gone:
            _log.warning("%d batches of signals from %s are lost: its buffer is too short", gone, self.endpoint)
        return ready + self._in_order()

    def _adopt(self, epoch: int) -> None:
        """Begin anew when the publisher is another one than before."""
        if epoch > self._epoch:
            self._epoch, self._next, self._asked, self.complete = epoch, 0, None, False
            self._stale_ends = 0
            self._pending.clear()


def _next_message(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


class Followers:
    """All publishers behind one endpoint, those that start later included. Single-threaded.

    Args:
        endpoint: As `discover`.
        recalling: Leave out endpoints that no living process holds now, and have the engines hand over everything.

    Raises:
        ConfigError: The endpoint is none.
    """

    RESCAN_S = 0.25
    """How often to look for new publishers."""

    def __init__(self, endpoint: str | None, *, recalling: bool = False) -> None:
        self._recalling = recalling
        self._endpoint = endpoint
        self._scan_at = 0.0
        self._followers: dict[str, Follower] = {}
        discover(endpoint)  # a bad endpoint fails here, before there is anything to free
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()

    @property
    def lost(self) -> int:
        """Batches that are lost for good."""
        return sum(f.lost for f in self._followers.values())

    @property
    def complete(self) -> bool:
        """Every publisher that was found has handed over all that it had sent."""
        return all(f.complete for f in self._followers.values())

    def wake_by(self, fd: int) -> None:
        """Let a readable file descriptor end `poll` early."""
        self._poller.register(fd, zmq.POLLIN)

    def poll(self, timeout_s: float) -> list[Signal]:
        """The next signals in order per publisher; empty if none come within `timeout_s` seconds, or earlier.

        Raises:
            StreamError: What arrived is not ours, or of a schema that we do not know.
        """
        now = time.monotonic()
        if now >= self._scan_at:
            self._scan_at = now + self.RESCAN_S
            self.scan()
        followers = self._followers.values()
        held = [signal for f in followers for signal in f.tend()]
        if held:
            return held
        until = min([now + timeout_s, self._scan_at, *(f.next_tend() for f in followers)])
        ready = dict(self._poller.poll(max(0, math.ceil(1000 * (until - now)))))
        return [s for f in followers if any(sock in ready for sock in f.sockets) for s in f.receive()]

    def scan(self) -> None:
        """Look for new publishers; `poll` does so from time to time."""
        for endpoint in discover(self._endpoint):
            if endpoint not in self._followers and not (self._recalling and is_dead(endpoint)):
                follower = Follower(self._context, endpoint, flush=self._recalling)
                self._followers[endpoint] = follower
                for socket in follower.sockets:
                    self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        """Free every socket."""
        for follower in self._followers.values():
            follower.close()
        end_context(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recall(endpoint: str | None = None, timeout: float = 5.0) -> list[Signal]:
    """What the publishers behind an endpoint still hold in their buffers, oldest first per publisher.

    Args:
        endpoint: None is $EARLYSTOP_BUS, then every engine of this user.
        timeout: Seconds to wait for their answers.

    Raises:
        ConfigError: The endpoint is none.
        StreamError: Not all answered in time, or what answers is not ours, or of a schema that we do not know.
    """
    signals: list[Signal] = []
    until = time.monotonic() + timeout
    with Followers(endpoint, recalling=True) as followers:
        followers.scan()
        while not followers.complete:
            left = until - time.monotonic()
            if left <= 0:
                raise StreamError(f"not every engine behind {endpoint or 'the bus'} has answered within {timeout:g} s")
            signals += followers.poll(left)
    return signals
