"""The place of a record in its stream, and the proof that none is missing."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from itertools import islice

import msgspec

from earlystop.clock import HLC
from earlystop.errors import StreamError
from earlystop.signals import Signal

_MAX_STREAMS = 1 << 16
"""Streams whose counters are kept; far more than an engine has slots, so that only finished ones are forgotten."""


class Stamper:
    """Gives each signal its `seq`, from 0 without gaps per (id, index), and its `t`. Thread-safe.

    It must come before every queue that may drop, so that what was dropped shows as a gap.

    Args:
        clock: The clock of this process.
        max_streams: Counters kept. The stream that was silent longest is forgotten first and would start again at 0.
    """

    def __init__(self, clock: HLC | None = None, *, max_streams: int = _MAX_STREAMS) -> None:
        self.clock = clock or HLC()
        self._max_streams = max_streams
        self._next: OrderedDict[tuple[str, int | None], int] = OrderedDict()
        self._lock = threading.Lock()

    def stamp(self, signals: Iterable[Signal]) -> list[Signal]:
        """New records with `seq` and `t` set, in the order given."""
        stamped = []
        with self._lock:
            for signal in signals:
                key = (signal.id, signal.index)
                seq = self._next.pop(key, 0)
                self._next[key] = seq + 1
                if len(self._next) > self._max_streams:
                    self._next.popitem(last=False)
                stamped.append(msgspec.structs.replace(signal, seq=seq, t=self.clock.now()))
        return stamped


def check_gapless(signals: Iterable[Signal]) -> None:
    """Refuse signals of which one is missing: per (id, index) `seq` must be 0, 1, 2 and so on, in any order.

    A record lost at a stream's very end cannot show here: `SinkReader.barrier` sees to that.

    Raises:
        StreamError: Names the stream and the missing or repeated `seq`.
    """
    seen: defaultdict[tuple[str, int | None], Counter[int]] = defaultdict(Counter)
    for signal in signals:
        seen[signal.id, signal.index][signal.seq] += 1
    for (stream, index), counts in seen.items():
        where = f"stream {stream!r}" + ("" if index is None else f", choice {index}")
        length = max(counts) + 1
        if len(counts) != length:
            missing = islice((seq for seq in range(length) if seq not in counts), 11)
            shown = [str(seq) for seq in missing]
            raise StreamError(
                f"{where}: seq {', '.join(shown[:10])}{', ...' if len(shown) > 10 else ''} missing ("
                f"{length - len(counts)} of {length} records); such a trace cannot be replayed. Take traces from a "
                "SinkReader, not from the bus, or raise the publisher's queue_size."
            )
        twice = [seq for seq, count in counts.items() if count > 1]
        if twice:
            raise StreamError(
                f"{where}: seq {min(twice)} came twice; two requests share this id. Give each its own (attach_each)."
            )
