"""Ending a ZeroMQ context without hanging on it."""

from __future__ import annotations

import threading

import zmq


def end_context(context: zmq.Context[zmq.Socket[bytes]], limit_s: float = 2.0) -> None:
    """Ends a context whose sockets are closed; gives up after `limit_s`.

    libzmq's `zmq_ctx_term` has been seen to wait for ever for a peer that went away during its handshake, linger or
    not. The thread that waits then stays behind, as a daemon.
    """
    thread = threading.Thread(target=context.term, name="earlystop-zmq-term", daemon=True)
    thread.start()
    thread.join(limit_s)
