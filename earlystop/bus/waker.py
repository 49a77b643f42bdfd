"""A doorbell for a thread that waits in a ZeroMQ poll."""

from __future__ import annotations

import contextlib
import socket
import threading


class Waker:
    """Rings from any thread; the waiting one registers `fd` with its poller and calls `clear` when it is readable."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._rung = False
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """The file descriptor that becomes readable."""
        return self._read.fileno()

    def ring(self) -> None:
        """Wake the waiting thread; never blocks, and does nothing once closed."""
        with self._lock:
            if self._rung:
                return
            self._rung = True
            try:
                self._write.send(b"!")
            except OSError:
                self._rung = False  # closed

    def clear(self) -> None:
        """Take note of the ringing."""
        with self._lock:
            self._rung = False
            with contextlib.suppress(OSError):  # nothing to read, or closed
                self._read.recv(16)

    def close(self) -> None:
        """Free both ends."""
        with self._lock:
            self._read.close()
            self._write.close()
