"""Helpers of the tests that send signals between processes."""

import subprocess
import sys
import time

from earlystop.signals import Kind, Signal


def progress(id, seq=0, **fields):
    return Signal(id=id, seq=seq, kind=Kind.PROGRESS, **fields)


def stream(id, n, start=0):
    return [progress(id, seq, tokens=seq) for seq in range(start, start + n)]


def child(code, *args):
    """A Python process that runs `code` and prints ``ready`` when it is."""
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"ready"
    return process


def kill(process):
    process.kill()
    end(process)


def end(process):
    process.communicate(timeout=10)


def until(condition, timeout=5.0):
    """Wait for something that happens in another thread or process."""
    give_up = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.002)
