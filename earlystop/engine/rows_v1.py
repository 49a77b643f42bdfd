"""Model Runner V1: one row a request; rows move, and a table of row to slot moves with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from earlystop.control.state import Rows, Start
from earlystop.engine.compat import logger
from earlystop.engine.processor import Processor
from earlystop.engine.requests import v1_request_ids
from earlystop.engine.tap import TAP

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

Array = np.ndarray[Any, np.dtype[Any]]
PLACEHOLDER = -1  # vLLM's token id for "sampled, but not here yet" under asynchronous scheduling


class _Layout(NamedTuple):
    """Which rows of the batch are opted in; stays while vLLM reports no change of the batch."""

    rows: int
    opted_in: Array  # [n] rows
    slots: Array  # [n] their slots
    prompt_len: Array  # [n]
    outputs: list[list[int]]  # vLLM's own lists, which grow
    shared: Rows | None  # on a CPU: tensors over our own arrays


class V1Rows:
    """Ties V1's batch rows to slots of ours.

    A slot stays with its request while rows are removed, added, moved and swapped around it; only the table
    `slot_of_row` follows the batch. Output tokens are lists that vLLM keeps up to date.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        slots = vllm_config.scheduler_config.max_num_seqs
        self.device = device
        self._ids: Callable[[list[int]], str | None] | None = None
        self._output_being_added: list[int] = []
        self.processor = Processor(
            vllm_config, runner="v1", slots=slots, depth=1, device=device, request_id_of=self._request_id
        )
        self.slot_of_row = np.full(slots, -1, np.int32)
        self.free = list(range(slots))[::-1]
        self.outputs: list[list[int]] = [[] for _ in range(slots)]
        self.prompt_len = np.zeros(slots, np.int32)
        self.total_len = np.zeros(slots, np.int32)
        self._tokens = np.full(slots, PLACEHOLDER, np.int32)
        self._pos = np.zeros(slots, np.int32)
        self._zeros = torch.zeros(slots, dtype=torch.int32, device=device)
        self._layout: _Layout | None = None  # until the batch changes
        if vllm_config.scheduler_config.async_scheduling:
            logger.warning(
                "V1 with asynchronous scheduling never shows token ids to a plugin: only length budgets bind. Start "
                "with --no-async-scheduling, as `earlystop run` and `earlystop serve` do"
            )

    def _request_id(self, _slot: int) -> str | None:
        """Asked while `update_state` admits a request.

        The request is known by its list of output tokens: rows in the update are older than the batch's order.
        """
        if self._ids is None:
            self._ids = v1_request_ids()
        return self._ids(self._output_being_added)

    # --- the batch --------------------------------------------------------------------------------

    def update_state(self, update: BatchUpdate | None) -> None:
        """Follows the batch: removed, then added, then moved (vLLM's documented order)."""
        if update is None:
            return
        from vllm.v1.sample.logits_processor import MoveDirectionality

        for row in update.removed:
            self._release(row)
        started: list[tuple[int, list[int], list[int]]] = []
        for row, params, prompt, output in update.added:
            self._release(row)  # an added request may replace one that was never removed
            self._output_being_added = output
            slot = self.free.pop()
            if self.processor.admit(slot, params, len(prompt or ())):
                self.slot_of_row[row] = slot
                self.outputs[slot] = output
                self.prompt_len[slot] = len(prompt or ())
                started.append((slot, prompt or [], output))
            else:
                self.free.append(slot)
        for source, target, direction in update.moved:
            table = self.slot_of_row
            if direction == MoveDirectionality.SWAP:
                table[source], table[target] = table[target], table[source]
            else:
                self._release(target)
                table[target], table[source] = table[source], -1
        self._layout = None
        if not (self.slot_of_row >= 0).any():
            TAP.rest()
        self._begin(started)

    def _release(self, row: int) -> None:
        slot = int(self.slot_of_row[row])
        if slot >= 0:
            self.slot_of_row[row] = -1
            self.processor.release(slot)
            self.outputs[slot] = []
            self.free.append(slot)

    def _begin(self, started: list[tuple[int, list[int], list[int]]]) -> None:
        """Writes the policies of admitted requests and replays the output of those that come back."""
        if not started:
            self.processor.flush(None)
            return
        lengths = [len(prompt) + len(output) for _, prompt, output in started]
        base = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
        tokens = np.asarray([t for _, prompt, output in started for t in (*prompt, *output)] or [0], np.int32)

        def upload(values: object, dtype: type = np.int32) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype), device=self.device)

        self.processor.flush(
            Start(
                slots=upload([slot for slot, _, _ in started]),
                base=upload(base, np.int64),
                prompt_len=upload([len(prompt) for _, prompt, _ in started]),
                prefill_len=upload(lengths),
                tokens=upload(tokens),
            )
        )

    # --- the step ---------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Judges and masks the batch's rows in place."""
        n = logits.shape[0]
        layout = self._layout
        if layout is None or layout.rows != n:
            layout = self._layout = self._lay_out(n)
        if not layout.outputs or self.processor.broken:
            return logits
        outputs, slots, table = layout.outputs, layout.slots, self.slot_of_row[:n]
        self._tokens[layout.opted_in] = [output[-1] if output else PLACEHOLDER for output in outputs]
        self.total_len[slots] = layout.prompt_len + [len(output) for output in outputs]
        pos = self._pos[:n]
        np.subtract(self.total_len[table], 1, out=pos)
        rows = layout.shared or self._rows(n)
        self.processor.step(logits, rows, slots)
        return logits

    def _rows(self, n: int) -> Rows:
        return Rows(
            slot=self._upload(self.slot_of_row[:n]),
            local=self._zeros[:n],
            pos=self._upload(self._pos[:n]),
            token=self._upload(self._tokens[:n]),
            total_len=self._upload(self.total_len),
        )

    def _lay_out(self, n: int) -> _Layout:
        table = self.slot_of_row[:n]
        opted_in = np.nonzero(table >= 0)[0]
        slots = table[opted_in]
        self._tokens[:] = PLACEHOLDER
        shared = self._rows(n) if self.device.type == "cpu" else None
        return _Layout(n, opted_in, slots, self.prompt_len[slots], [self.outputs[slot] for slot in slots], shared)

    def _upload(self, array: Array) -> torch.Tensor:
        """The array as a tensor: shared on a CPU, where the step is done before it is written again."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
