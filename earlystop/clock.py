"""Hybrid logical clock: stamps that sort by cause and stay close to wall time.

Source: S. Kulkarni, M. Demirbas, D. Madappa, B. Avva, M. Leone, "Logical Physical Clocks and Consistent Snapshots in
Globally Distributed Databases", OPODIS 2014, section 4 (https://cse.buffalo.edu/tech-reports/2014-04.pdf). The 48 + 16
bit layout is that of the paper's section 6.2. Packed into one integer the algorithm's cases fold into a maximum:
"same millisecond: count up" is `last + 1`, and a counter overflow carries into the milliseconds by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

_log = logging.getLogger(__name__)

COUNTER_BITS = 16
MAX_COUNTER = (1 << COUNTER_BITS) - 1
MAX_STAMP = (1 << 64) - 1
MAX_DRIFT_MS = 500
"""A clock this far from another (milliseconds) is out of order; NTP keeps hosts within a few."""


def pack(milliseconds: int, counter: int = 0) -> int:
    """One 64-bit stamp of its two parts.

    Args:
        milliseconds: Since 1970-01-01 UTC, 0 to 2**48 - 1.
        counter: 0 to 65,535.

    Raises:
        ValueError: A part is out of range.
    """
    if not 0 <= milliseconds < 1 << 48:
        raise ValueError(f"milliseconds must lie in 0..2**48-1, got {milliseconds}")
    if not 0 <= counter <= MAX_COUNTER:
        raise ValueError(f"counter must lie in 0..{MAX_COUNTER}, got {counter}")
    return milliseconds << COUNTER_BITS | counter


def unpack(stamp: int) -> tuple[int, int]:
    """The milliseconds since 1970-01-01 UTC and the counter of a stamp.

    Raises:
        ValueError: `stamp` is no unsigned 64-bit integer.
    """
    if not 0 <= stamp <= MAX_STAMP:
        raise ValueError(f"a stamp is an unsigned 64-bit integer, got {stamp}")
    return stamp >> COUNTER_BITS, stamp & MAX_COUNTER


def to_datetime(stamp: int) -> datetime:
    """The wall-clock part of a stamp, in UTC.

    Raises:
        ValueError: `stamp` is no unsigned 64-bit integer, or lies beyond the year 9999.
    """
    milliseconds, _ = unpack(stamp)
    return datetime.fromtimestamp(milliseconds / 1000, tz=UTC)


def wall_milliseconds() -> int:
    """The wall clock in whole milliseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1_000_000


class HLC:
    """A thread-safe hybrid logical clock. Every stamp it hands out is greater than all before it.

    Args:
        physical: The wall clock, milliseconds since 1970-01-01 UTC.
        max_drift_ms: How far a remote stamp may be ahead of our wall clock. Beyond that it is not taken over, so that
            one broken clock cannot push all others into the future, and the alarm goes off.
        on_drift: The alarm, called with the drift in milliseconds, once per excursion, outside the lock. Default: a
            warning in the log.
    """

    def __init__(
        self,
        physical: Callable[[], int] = wall_milliseconds,
        *,
        max_drift_ms: int = MAX_DRIFT_MS,
        on_drift: Callable[[int], None] | None = None,
    ) -> None:
        self._physical = physical
        self._max_drift_ms = max_drift_ms
        self._on_drift = on_drift or _warn
        self._last = 0
        self._alarmed = False
        self._lock = threading.Lock()

    def now(self) -> int:
        """A stamp for a local event, or for a message about to be sent."""
        with self._lock:
            wall = self._physical()
            self._last = max(self._last + 1, wall << COUNTER_BITS)
            # Our own wall clock was set back: the stamps go on from where they were, ahead of it.
            alarm = self._excursion((self._last >> COUNTER_BITS) - wall)
            stamp = self._last
        if alarm is not None:
            self._on_drift(alarm)
        return stamp

    def merge(self, remote: int) -> int:
        """A stamp for the receipt of a message, later than the message's own stamp.

        Args:
            remote: The message's stamp.

        Raises:
            ValueError: `remote` is no unsigned 64-bit integer.
        """
        remote_ms, _ = unpack(remote)
        with self._lock:
            wall = self._physical()
            drift = remote_ms - wall
            heard = remote + 1 if drift <= self._max_drift_ms else 0
            self._last = max(self._last + 1, heard, wall << COUNTER_BITS)
            alarm = self._excursion(max(drift, (self._last >> COUNTER_BITS) - wall))
            stamp = self._last
        if alarm is not None:
            self._on_drift(alarm)
        return stamp

    def _excursion(self, drift_ms: int) -> int | None:
        """The drift if it has just left the bounds, else None."""
        beyond = drift_ms > self._max_drift_ms
        fresh = beyond and not self._alarmed
        self._alarmed = beyond
        return drift_ms if fresh else None


def _warn(drift_ms: int) -> None:
    _log.warning(
        "clocks differ by %d ms (more than %d ms): signals of different processes may sort wrongly; check NTP",
        drift_ms,
        MAX_DRIFT_MS,
    )
