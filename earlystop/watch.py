"""Watching signals as they are made."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Self

from earlystop.bus.follow import Followers
from earlystop.bus.waker import Waker
from earlystop.errors import ConfigError
from earlystop.signals import Signal

_FOREVER_S = 3600.0


class Watch:
    """An iterator over signals; see `watch`. `close` may be called from any thread."""

    def __init__(self, endpoint: str | None, id: str | None, timeout: float | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ConfigError(f"timeout must be >= 0 seconds or None, got {timeout}", field="timeout")
        self._id = id
        self._timeout = timeout
        self._ready: deque[Signal] = deque()
        self._closed = False
        self._owner: int | None = None
        self._busy = threading.Lock()
        self._waker = Waker()
        try:
            self._followers = Followers(endpoint)
        except BaseException:
            self._waker.close()
            raise
        self._followers.wake_by(self._waker.fd)
        self._freed = False

    @property
    def lost(self) -> int:
        """Batches of signals that came too late for any buffer; what they held shows as gaps in `seq`."""
        return self._followers.lost

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Signal:
        """The next signal.

        Raises:
            StopIteration: None came within the timeout, or `close` was called.
            StreamError: What arrived is not ours, or of a schema that we do not know.
        """
        with self._busy:
            self._owner = threading.get_ident()
            try:
                return self._wait()
            finally:
                self._owner = None
                if self._closed:
                    self._free()

    def _wait(self) -> Signal:
        began = time.monotonic()
        while not self._closed:
            if self._ready:
                return self._ready.popleft()
            left = _FOREVER_S if self._timeout is None else began + self._timeout - time.monotonic()
            arrived = self._followers.poll(max(0.0, left))
            self._ready.extend(s for s in arrived if self._id is None or s.id == self._id)
            if not arrived and left <= 0:
                break
        raise StopIteration

    def close(self) -> None:
        """End the iteration, also one that waits in another thread, and free the sockets. May be called twice."""
        self._closed = True
        self._waker.ring()
        if self._owner == threading.get_ident():
            return  # called from a signal handler inside `__next__`, which frees on its way out
        with self._busy:
            self._free()

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self._followers.close()
            self._waker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(endpoint: str | None = None, id: str | None = None, timeout: float | None = None) -> Watch:
    """Watch the signals of running engines.

    ::

        with earlystop.watch(timeout=30) as signals:
            for signal in signals:
                print(signal.id, signal.kind, signal.tokens)

    It may start before or after the engine and outlives its restart; it begins with what the engine's buffer still
    holds and asks for what it missed, so each signal comes once, in order per engine. Several may watch at once. It
    is an iterator, to be used by one thread; leave the ``with`` block (or call `close`) to free its sockets.

    Args:
        endpoint: ``ipc://`` or ``tcp://`` address. None is $EARLYSTOP_BUS, then every engine of this user, those that
            start later included.
        id: Only signals of this stream.
        timeout: Most seconds to wait for the next signal; then the iteration ends. Other streams' signals do not
            count, and neither does the time that you take between two signals. None waits for ever.

    Raises:
        ConfigError: The endpoint is none, or the timeout is negative.
    """
    return Watch(endpoint, id, timeout)
