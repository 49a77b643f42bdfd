"""From the device's reports to signals on the bus, off the sampler's path.

The sampler copies a step's reports to memory of ours (pinned where they come from a GPU) and goes on; a thread
waits for the copy, turns reports into records, and hands them to the outlet. It is woken for news only: it shares
the interpreter with the sampler. Reports are cumulative, and carry the slot's admission counter:
a recycled slot cannot speak for its former owner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from earlystop.bus import Outlet
from earlystop.config import BusConfig
from earlystop.control import layout
from earlystop.engine.compat import logger
from earlystop.request_ids import external_id
from earlystop.resolved import Resolved
from earlystop.signals import Kind, Signal, StopReason

_PAUSE_S = 0.05  # the thread looks after so long, also without news
_ROOMS, _ROOMS_KEPT = 4, 64  # steps whose memory is there from the start, and is kept for the next at most
_IDLE_S = 1.0  # after so long a silence the last word is sent; longer than a step, or each would be flushed
_NEWS = ~(layout.O_ACTIVE)
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Owner:
    """Who has a slot, as far as signals need to know."""

    stream: str
    request_id: str | None
    observe: bool
    base: dict[str, Any]
    warnings: tuple[str, ...]
    reason: StopReason | None = None
    closed: bool = False
    announced: bool = False
    invalid: bool = False
    told: float = -1.0
    slot: int = -1
    epoch: int = -1
    trace: list[Array] = field(default_factory=list)
    traced: int = 0

    @classmethod
    def of(
        cls, stream: str, request_id: str | None, policy: Resolved, warnings: tuple[str, ...], *, limit: int
    ) -> Owner:
        """The owner for a resolved request that may generate `limit` tokens."""
        base: dict[str, Any] = {"request_id": request_id, "max_tokens": limit}
        if policy.guarantee is not None:
            base["guarantee"] = str(policy.guarantee)
        return cls(
            stream=stream,
            request_id=request_id,
            observe=policy.mode == "observe",
            base={key: value for key, value in base.items() if value is not None},
            warnings=warnings,
        )

    @property
    def index(self) -> int | None:
        """Which choice of its request this is, where it is known."""
        return None if self.request_id is None else external_id(self.request_id)[1]


class _Room:
    """Memory for one step's reports; made at the start and used again, since pinning memory stops the device."""

    def __init__(self, rows: int, depth: int, on_gpu: bool) -> None:
        self.report = torch.empty(rows, layout.N_REPORT, dtype=torch.float64, pin_memory=on_gpu)
        self.trace = torch.empty(rows, depth, layout.N_TRACE, dtype=torch.float64, pin_memory=on_gpu)
        # A blocking event lets the waiting thread sleep instead of spinning on a core.
        self.done = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self.rows = 0
        self.traced = False


class Reporter:
    """Takes the reports of every step; the thread publishes them.

    Args:
        bus: where to.
        slots: most requests at a time.
        depth: most logits rows of a request.
        device: where the reports come from.
        dp_rank: data-parallel rank, part of the endpoint.
    """

    def __init__(self, bus: BusConfig, *, slots: int, depth: int, device: torch.device, dp_rank: int = 0) -> None:
        self._bus = bus
        self._dp_rank = dp_rank
        self._on_gpu = device.type != "cpu"
        self._queue: deque[tuple[Any, ...]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._owners: dict[int, Owner] = {}  # by slot
        self._observing: set[int] = set()
        self._latest = np.full((slots, layout.N_REPORT), np.nan)
        self._unfinished = False
        self._last_step = 0.0
        self._outlet: Outlet | None = None
        self._thread: threading.Thread | None = None
        self._muted = False
        self._closed = False
        self._size = (slots * depth, depth)
        self._free = deque(_Room(*self._size, self._on_gpu) for _ in range(_ROOMS))

    def mute(self) -> None:
        """This rank decides but does not publish."""
        self._muted = True

    # --- the sampler's side -----------------------------------------------------------------------

    def own(self, slot: int, epoch: int, owner: Owner) -> None:
        """A request takes a slot."""
        if self._muted:
            return
        owner.slot, owner.epoch = slot, epoch
        (self._observing.add if owner.observe else self._observing.discard)(slot)
        self._queue.append(("own", owner))
        if self._thread is None:
            self._start()

    def push(self, report: torch.Tensor, trace: torch.Tensor) -> None:
        """A step's reports [rows, N_REPORT] and traces [rows, depth, N_TRACE]; returns at once."""
        if self._muted:
            return
        self._last_step = time.monotonic()
        room = self._free.pop() if self._free else _Room(*self._size, self._on_gpu)
        room.rows = rows = report.shape[0]
        room.traced = bool(self._observing)
        room.report[:rows].copy_(report, non_blocking=True)
        if room.traced:
            room.trace[:rows].copy_(trace, non_blocking=True)
        if room.done is not None:
            room.done.record()
        self._queue.append(("step", room))
        # On a GPU nobody knows here what the reports say.
        if room.done is not None or _tells(room.report[:rows].numpy()):
            self._wake.set()

    def error(self, stage: str, error: Exception, slot: int | None) -> None:
        """A fault of ours."""
        if not self._muted:
            self._queue.append(("error", stage, f"{type(error).__name__}: {error}", slot))
            if self._thread is None:
                self._start()
            self._wake.set()

    # --- the thread's side ------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="earlystop-publisher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outlet = Outlet(self._bus, dp_rank=self._dp_rank, flush=self.flush)
        except Exception:
            logger.exception("earlystop cannot publish: no signals from this engine")
            self._muted = True
            return
        while not self._closed:
            self._wake.wait(_PAUSE_S)
            self._wake.clear()
            try:
                self._drain()
                if self._unfinished and time.monotonic() - self._last_step > _IDLE_S:
                    self._flush_idle()
            except Exception:
                logger.exception("earlystop could not publish its signals")

    def flush(self) -> None:
        """Publishes what is still on its way, unfinished traces and last progress included."""
        self._drain()
        self._flush_idle()

    def close(self) -> None:
        """Publishes the rest and ends the thread."""
        self.flush()
        self._closed = True
        self._wake.set()

    def _drain(self) -> None:
        with self._lock:
            out: list[Signal] = []
            while self._queue:
                item = self._queue.popleft()
                if item[0] == "own":
                    self._take_over(item[1], out)
                elif item[0] == "error":
                    out.extend(self._error_signals(*item[1:]))
                else:
                    self._step(item[1], out)
            self._send(out)

    def _send(self, signals: list[Signal]) -> None:
        if signals and self._outlet is not None:
            self._outlet.publish(signals)

    def _flush_idle(self) -> None:
        with self._lock:
            out: list[Signal] = []
            self._unfinished = False
            for owner in self._owners.values():
                self._finish(owner, out)
            self._send(out)

    def _take_over(self, owner: Owner, out: list[Signal]) -> None:
        for slot, known in list(self._owners.items()):
            same = owner.request_id is not None and known.request_id == owner.request_id
            if same and known.stream == owner.stream:  # preempted and resumed, here or in another slot
                owner.reason, owner.closed, owner.invalid = known.reason, known.closed, known.invalid
                owner.announced, owner.told = known.announced, known.told
                owner.traced, owner.trace = known.traced, known.trace
                del self._owners[slot]
            elif slot == owner.slot:
                self._finish(known, out)
                del self._owners[slot]
        self._owners[owner.slot] = owner

    def _latest_of(self, owner: Owner) -> Array | None:
        row: Array = self._latest[owner.slot]
        return row if row[layout.R_EPOCH] == owner.epoch else None

    def _finish(self, owner: Owner, out: list[Signal]) -> None:
        """The last word, as far as the worker can have one: the rest of the trace, and progress if it moved."""
        latest = self._latest_of(owner)
        if latest is None:
            return
        if owner.trace:
            out.append(self._trace_signal(owner))
        if latest[layout.R_TOKENS] != owner.told:
            out.append(self._record(owner, Kind.PROGRESS, latest, None))

    def _step(self, room: _Room, out: list[Signal]) -> None:
        if room.done is not None:
            room.done.synchronize()
        self._unfinished = True
        whole: Array = room.report[: room.rows].numpy()
        rows = np.nonzero(whole[:, layout.R_SLOT] >= 0)[0]
        reports = whole[rows]
        self._latest[reports[:, layout.R_SLOT].astype(np.int64)] = reports
        bits = reports[:, layout.R_BITS].astype(np.int64)
        telling = (bits & _NEWS) != 0
        for k in range(len(rows)) if room.traced else np.nonzero(telling)[0]:
            row = reports[k]
            owner = self._owners.get(int(row[layout.R_SLOT]))
            if owner is None or row[layout.R_EPOCH] != owner.epoch:
                continue
            if owner.observe:
                owner.trace.extend(room.trace[rows[k], : int(row[layout.R_COMMITTED])].numpy().copy())
            if telling[k]:
                self._news(owner, row, int(bits[k]), out)
        if len(self._free) < _ROOMS_KEPT:
            self._free.append(room)

    def _news(self, owner: Owner, row: Array, bits: int, out: list[Signal]) -> None:
        reason = StopReason.from_code(int(row[layout.R_REASON]))
        data: dict[str, Any] = {}
        if bits & layout.O_REBUILT:
            data["state_rebuilt"] = True
        if bits & layout.O_DECIDED:
            owner.closed = False  # whatever closed before, this ending has not yet
        if bits & layout.O_CLOSING:
            owner.closed = True
        if bits & layout.O_CANCELLED:
            owner.closed = False
        if bits & layout.O_DECIDED:
            owner.reason = reason
        if bits & (layout.O_CLOSING | layout.O_CANCELLED | layout.O_DECIDED):
            data["closed"] = owner.closed
        for bit, kind in (
            (layout.O_ADJUSTED, Kind.BUDGET_ADJUSTED),
            (layout.O_WARNING, Kind.BUDGET_WARNING),
            (layout.O_WOULD, Kind.WOULD_STOP),
            (layout.O_DECIDED, Kind.STOP_DECIDED),
            (layout.O_DEFERRED, Kind.STOP_DEFERRED),
        ):
            if bits & bit:
                with_reason = reason if bit >= layout.O_DECIDED else None
                out.append(self._record(owner, kind, row, with_reason, data))
        if bits & layout.O_INVALID and not owner.invalid:
            owner.invalid = True
            out.append(self._record(owner, Kind.ERROR, row, StopReason.INVALID_LOGITS, {**data, "closed": True}))
        if bits & layout.O_PROGRESS and owner.trace:
            out.append(self._trace_signal(owner))
        if bits & (layout.O_PROGRESS | layout.O_CLOSING | layout.O_CANCELLED | layout.O_REBUILT):
            out.append(self._record(owner, Kind.PROGRESS, row, owner.reason if owner.closed else None, data))

    def _record(
        self, owner: Owner, kind: Kind, row: Array, reason: StopReason | None, data: dict[str, Any] | None = None
    ) -> Signal:
        if kind is Kind.PROGRESS:
            owner.told = float(row[layout.R_TOKENS])
        extra = dict(owner.base)
        if not owner.announced:
            owner.announced = True
            if owner.warnings:
                extra["warnings"] = list(owner.warnings)
        extra |= data or {}
        return Signal(
            id=owner.stream,
            index=owner.index,
            kind=kind,
            reason=reason,
            tokens=int(row[layout.R_TOKENS]),
            reasoning_tokens=int(row[layout.R_REASONING]),
            used=float(row[layout.R_USED]),
            budget=float(row[layout.R_BUDGET]),
            confidence=float(row[layout.R_CONFIDENCE]),
            entropy=float(row[layout.R_ENTROPY]),
            similarity=float(row[layout.R_SIMILARITY]),
            end_margin=float(row[layout.R_MARGIN]),
            data=extra,
        )

    def _trace_signal(self, owner: Owner) -> Signal:
        """The per-token arrays since the last one, and the row that is being sampled now (`next`).

        The worker never learns the request's last token; its statistics are the `next` of the last trace.
        """
        columns = np.stack(owner.trace).T
        begin, owner.traced = owner.traced, owner.traced + len(owner.trace)
        owner.trace = []
        latest = self._latest_of(owner)
        assert_latest = [] if latest is None else latest[layout.R_NEXT :].tolist()
        names = ("token", "top1", "entropy", "margin_think", "margin_eos", "argmax", "event", "similarity", "novelty")
        whole = {"token", "argmax", "event"}
        data: dict[str, Any] = dict(owner.base)
        data["first"] = begin
        for name, column in zip(names, columns, strict=True):
            data[name] = column.astype(np.int64).tolist() if name in whole else column.tolist()
        data["next"] = assert_latest
        return Signal(id=owner.stream, index=owner.index, kind=Kind.TRACE, data=data)

    def _error_signals(self, stage: str, text: str, slot: int | None) -> list[Signal]:
        keys = [key for key in self._owners if slot is None or key == slot]
        data = {"stage": stage, "error": text}
        named = [
            Signal(id=o.stream, index=o.index, kind=Kind.ERROR, data={**o.base, **data})
            for o in (self._owners[key] for key in keys)
        ]
        return named or [Signal(id="", kind=Kind.ERROR, data=data)]


def _tells(report: Array) -> bool:
    """Whether a report holds anything but cumulative counters."""
    bits = report[report[:, layout.R_SLOT] >= 0, layout.R_BITS].astype(np.int64)
    return bool((bits & _NEWS).any())
