"""Model Runner V2: a row is not a request. Rows are reordered every step, and drafts have rows of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from earlystop.control.state import Rows, Start
from earlystop.engine.processor import Processor
from earlystop.engine.requests import v2_request_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState


class V2Rows:
    """Ties V2's slots to ours: they are the same numbers.

    `req_states` owns the tokens and lengths, on the device; nothing of them is copied.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
        self.req_states = req_states
        self.processor = Processor(
            vllm_config,
            runner="v2",
            slots=req_states.max_num_reqs,
            depth=drafts + 1,
            device=req_states.device,
            request_id_of=v2_request_ids(),
        )
        self._started: list[int] = []

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """A request enters `slot`; True when opted in, so that vLLM calls `apply` for its batches."""
        opted_in = self.processor.admit(slot, params, int(self.req_states.prompt_len.np[slot]))
        if opted_in:
            self._started.append(slot)
        return opted_in

    def apply_staged_writes(self) -> None:
        """After vLLM has flushed the tokens: writes policies and starts the slots, rebuilding resumed ones."""
        start = None
        if self._started:
            tokens = self.req_states.all_token_ids.gpu
            slots = np.asarray(self._started, np.int32)
            device = tokens.device
            start = Start(
                slots=self._upload(slots, device),
                base=self._upload(slots.astype(np.int64) * tokens.stride(0), device),
                prompt_len=self._upload(self.req_states.prompt_len.np[slots], device),
                prefill_len=self._upload(self.req_states.prefill_len.np[slots], device),
                tokens=tokens,
            )
            self._started.clear()
        self.processor.flush(start)

    @staticmethod
    def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Judges and masks the batch's rows in place."""
        batch = ctx.idx_mapping_np
        if not self.processor.active[batch].any():
            return logits
        rows = Rows(
            slot=ctx.expanded_idx_mapping,
            local=ctx.expanded_local_pos,
            pos=ctx.pos,
            token=ctx.input_ids,
            total_len=self.req_states.total_len.gpu,
        )
        # A chunk of the rejection sampler is a slice of the step's tensors: its offset tells which rows these are.
        self.processor.step(logits, rows, batch, first_row=int(ctx.pos.storage_offset()))
        return logits
