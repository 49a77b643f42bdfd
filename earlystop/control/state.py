"""The slots: tensors that hold every request's state, and the step that moves them.

`Controller` is what an engine adapter or a replay drives. It owns the device memory, picks the compiled form
of the programs, and launches a fixed number of kernels a step, whatever the batch holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from earlystop.control import layout, lower
from earlystop.control.tables import Tables
from earlystop.kernels import similarity as units


class Rows(NamedTuple):
    """This step's batch layout, as vLLM's V2 runner gives it; V1 is the case of one row per request.

    slot [rows] int32, -1 for rows to leave alone; local [rows] int32, offset among the rows of its request;
    pos [rows] integer, position of the row's input token; token [rows] int32, that token (row 0: the last
    committed one, others: drafts; negative: unknown); total_len [slots] int32, prompt and output.
    """

    slot: torch.Tensor
    local: torch.Tensor
    pos: torch.Tensor
    token: torch.Tensor
    total_len: torch.Tensor


class Verdict(NamedTuple):
    """What a step decided: inputs of `kernels.mask.write_rows`, and the host's report.

    force, flags, grammar [rows] int32; report [rows, N_REPORT] float64 (R_SLOT = -1: nothing to report);
    trace [rows, depth, N_TRACE] float64, of which the first R_COMMITTED entries of a row count.
    """

    force: torch.Tensor
    flags: torch.Tensor
    grammar: torch.Tensor
    report: torch.Tensor
    trace: torch.Tensor


class _Parts(NamedTuple):
    """Views of this step's arrays, for so many rows."""

    rows: int
    committed: torch.Tensor
    unit_end: torch.Tensor
    unit_slot: torch.Tensor
    similarity: torch.Tensor
    verdict: Verdict


@dataclass(frozen=True)
class Start:
    """Where the tokens of (re)admitted slots lie: entry p is tokens[base[p] : base[p] + prefill_len[p]].

    slots, base, prompt_len, prefill_len: int32 [n] on the device; tokens: flat int32.
    """

    slots: torch.Tensor
    base: torch.Tensor
    prompt_len: torch.Tensor
    prefill_len: torch.Tensor
    tokens: torch.Tensor


class Controller:
    """State of all slots of one engine, and its step.

    Args:
        tables: the model's compiled tables, on the device.
        slots: most requests at a time.
        depth: most logits rows of a request: draft tokens + 1.
        hidden: width of the hidden states, 0 to do without similarity.
        dtype: type of the hidden states.
        gram_size: cells of a slot's novelty table, a power of two.
        centre: float32 [hidden], subtracted from unit means, or None.
    """

    def __init__(
        self,
        tables: Tables,
        *,
        slots: int,
        depth: int = 1,
        hidden: int = 0,
        dtype: torch.dtype = torch.float32,
        gram_size: int = 16384,
        centre: torch.Tensor | None = None,
    ) -> None:
        device = tables.flags.device
        self.tables = tables
        self.device = device
        self.slots = slots
        self.depth = depth
        self.rows = rows = slots * depth
        self.on_gpu = device.type != "cpu"

        def ints(*shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        def floats(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        self.ints = ints(2 * slots, layout.N_INTS)
        self.floats = torch.zeros(2 * slots, layout.N_FLOATS, dtype=torch.float64, device=device)
        self.grams = ints(slots, gram_size)
        self.drafts = ints(slots, depth)
        self.stored = ints(slots)
        self.pending = floats(slots, depth, layout.N_STATS, dtype=torch.float32)
        self.pending_argmax = ints(slots, depth, fill=layout.ARGMAX_MISSING)
        self.pending_plan = ints(slots, depth)
        self.header = torch.tensor(tables.header(gram_size, depth), dtype=torch.int32, device=device)
        # this step
        self.events = ints(rows, depth)
        self.novelty = floats(rows, depth)
        self.committed = ints(rows)
        self.unit_slot = ints(rows, fill=-1)
        self.unit_end = ints(rows, depth)
        self.unit_similarity = floats(rows, depth, dtype=torch.float32)
        self.force = ints(rows, fill=-1)
        self.flags = ints(rows)
        self.grammar = ints(rows)
        self.report = floats(rows, layout.N_REPORT)
        self.trace = floats(rows, depth, layout.N_TRACE)
        self.no_stats = floats(rows, layout.N_STATS, dtype=torch.float32)
        self.no_argmax = ints(rows, fill=layout.ARGMAX_MISSING)
        self.units = units.alloc_units(slots, hidden, device, centre) if hidden else None
        self.hidden = torch.zeros(slots, depth, hidden, dtype=dtype, device=device) if hidden else None
        self._staged: dict[int, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._parts: _Parts | None = None
        # By id: these tensors live as long as we do, so no other one can have theirs.
        self._flat: dict[int, np.ndarray[Any, Any]] = {}
        for kept in (*vars(self).values(), *vars(tables).values()):
            if isinstance(kept, torch.Tensor) and kept is not self.hidden and not self.on_gpu:
                self._flat[id(kept)] = kept.reshape(-1).numpy()

    def warm_up(self, pos: torch.dtype = torch.int32) -> None:
        """Compiles, or loads, every program and kernel of a step, so that no request waits for it.

        Args:
            pos: type of the positions that `step` will be given.
        """
        nobody = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        zeros = torch.zeros(self.slots, dtype=torch.int32, device=self.device)
        first = Start(zero, zero.long(), zero, zero, zeros)
        self.stage(0, np.zeros(layout.PHASE, np.int32), np.zeros(layout.BUDGET, np.float64))  # MODE 0: nobody's
        self.flush(first)
        hidden = None if self.hidden is None else self.hidden[:1, 0]
        self.step(Rows(nobody, zero, zero.to(pos), zero, zeros), None, None, hidden=hidden)

    # --- admission --------------------------------------------------------------------------------

    def stage(self, slot: int, ints: np.ndarray[Any, Any], floats: np.ndarray[Any, Any]) -> None:
        """Stages the policy of a request for its slot: int32 [PHASE] and float64 [BUDGET] (`params.py`)."""
        self._staged[slot] = (ints, floats)

    def flush(self, start: Start | None) -> None:
        """Writes what was staged and starts the slots named in `start`, in one launch each."""
        if self._staged:
            where = self._to_device(np.fromiter(self._staged, np.int64))
            ints = np.stack([row[0] for row in self._staged.values()])
            floats = np.stack([row[1] for row in self._staged.values()])
            self.ints[:, : layout.PHASE].index_copy_(0, where, self._to_device(ints))
            self.floats[:, : layout.BUDGET].index_copy_(0, where, self._to_device(floats))
            self._staged.clear()
        if start is None or start.slots.numel() == 0:
            return
        t = self.tables
        self._launch(
            "start",
            start.slots.numel(),
            start.slots, start.base, start.prompt_len, start.prefill_len, start.tokens, self.ints, self.floats,
            self.grams, self.stored, t.flags, t.symbols, t.symbol_offsets, t.costs, t.sequence, self.header,
        )  # fmt: skip
        if self.units is not None:
            units.reset(start.slots, self.units)

    def command(self, slots: Sequence[int], *, stop: int = 0, extra: float = 0.0) -> None:
        """An outside wish: end for the reason code `stop`, or add `extra` cost units to the budget."""
        where = self._to_device(np.asarray(slots, np.int64))
        if stop:
            self.ints[:, layout.COMMAND].index_fill_(0, where, stop)
        if extra:
            amount = torch.full((len(slots),), extra, dtype=torch.float64, device=self.device)
            self.floats[:, layout.EXTRA].index_add_(0, where, amount)

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else tensor

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self,
        rows: Rows,
        stats: torch.Tensor | None,
        argmax: torch.Tensor | None,
        *,
        masked: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Verdict:
        """Commits what the last step sampled, judges it, and plans this step's rows.

        Args:
            rows: the batch layout.
            stats: float32 [rows, N_STATS] of this step's raw logits, None where nobody measured.
            argmax: int32 [rows], likewise.
            masked: the same statistics after the grammar's mask, where one is active.
            hidden: [rows, hidden] final hidden states that gave the logits, None to go without similarity.
        """
        n = rows.slot.shape[0]
        if n > self.rows:
            raise ValueError(f"{n} logits rows for {self.slots} slots of {self.depth} rows")
        t, parts = self.tables, self._first(n)
        if stats is None or argmax is None:
            stats, argmax = self.no_stats, self.no_argmax
        self._launch(
            "scan",
            n,
            rows.slot, rows.local, rows.pos, rows.token, rows.total_len, self.ints, self.floats, self.grams,
            self.drafts, self.stored, self.events, self.novelty, self.committed, self.unit_slot, self.unit_end,
            t.flags, t.symbols, t.symbol_offsets, t.sequence, self.header,
        )  # fmt: skip
        if self.units is not None and self.hidden is not None and hidden is not None:
            units.unit_similarity(
                self.hidden, parts.committed, parts.unit_end, parts.unit_slot, self.units, parts.similarity
            )
            units.stash_hidden(hidden, rows.slot, rows.local, self.hidden)
        else:
            parts.similarity.fill_(float("nan"))
        self._launch(
            "judge",
            n,
            rows.slot, rows.local, rows.token, stats, argmax, stats if masked is None else masked,
            self.unit_similarity, self.events, self.novelty, self.committed, self.unit_slot, self.ints, self.floats,
            self.slots, self.drafts, self.stored, self.pending, self.pending_argmax, self.pending_plan, self.force,
            self.flags, self.grammar, self.report, self.trace, t.flags, t.symbols, t.symbol_offsets, t.costs,
            t.sequence, self.header,
        )  # fmt: skip
        return parts.verdict

    def _first(self, n: int) -> _Parts:
        """The first n rows of this step's arrays: the same from step to step, while the batch is."""
        if self._parts is None or self._parts.rows != n:
            self._parts = _Parts(
                n,
                self.committed[:n],
                self.unit_end[:n],
                self.unit_slot[:n],
                self.unit_similarity[:n],
                Verdict(self.force[:n], self.flags[:n], self.grammar[:n], self.report[:n], self.trace[:n]),
            )
        return self._parts

    def _launch(self, stage: str, n: int, *arguments: Any) -> None:
        if self.on_gpu:
            kernel = lower.triton_namespace()[f"{stage}_kernel"]
            extra = (n,) if stage == "judge" else ()
            kernel[(n,)](*extra, *arguments, num_warps=1, enable_fp_fusion=False)
            return
        known = self._flat
        flat = [
            known[id(a)] if id(a) in known else a.reshape(-1).numpy() if isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        lower.numba_namespace()[f"{stage}_all"](n, *flat)
