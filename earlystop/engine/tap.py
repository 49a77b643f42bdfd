"""The tap: measures the sampled rows where vLLM makes their logits.

vLLM hands hidden states to no processor, and writes the grammar's mask into the very tensor that its logits
layer returned. So the layer is replaced, officially (`PluggableLayer.register_oot`), by a subclass that
measures inside its forward. It runs outside the target's CUDA graphs; drafters capture it, and are left alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsLayer

from earlystop.engine.compat import V1_DROPS_PROCESSORS, logger
from earlystop.kernels.stats import Stats, alloc_stats, logit_stats

MISSES_UNTIL_OFF = 16  # forwards in a row without an opted-in row, after which nothing is measured


class Tapped(NamedTuple):
    """Measurements of consecutive rows, in the order in which `apply` sees them."""

    values: torch.Tensor  # float32 [rows, N_STATS]
    argmax: torch.Tensor  # int32 [rows]
    hidden: torch.Tensor  # [rows, hidden], the model's dtype


class Tap:
    """What the last call of the layer measured. One per process: a worker runs one target model.

    The last call before `apply` counts: prompt-logprob passes and drafters call the layer as well, after
    sampling. The rejection sampler calls `apply` for chunks of requests, which name their rows by place.
    """

    def __init__(self) -> None:
        self.ending: torch.Tensor | None = None
        self.vocab = 0
        self.max_rows = 0
        self.wanted = False
        self._buffers: Stats | None = None
        self._stats: Stats | None = None
        self._hidden: torch.Tensor | None = None
        self._misses = 0

    def install(self, ending: torch.Tensor, vocab: int, max_rows: int) -> None:
        """Prepares buffers for up to `max_rows` rows; until then the layer measures nothing."""
        self.ending, self.vocab, self.max_rows = ending, vocab, max_rows
        self._buffers = alloc_stats(max_rows, ending.device)
        self.drop()

    def want(self) -> None:
        """An opted-in request is running: measure from the next forward on."""
        self.wanted = True
        self._misses = 0

    def rest(self) -> None:
        """No opted-in request is left: measure nothing until one comes."""
        self.wanted = False
        self.drop()

    def drop(self) -> None:
        """Forgets the last measurement, and with it the reference to the hidden states."""
        self._stats = self._hidden = None

    def record(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Measures the rows that were just made, unless they are none of ours or a graph is being captured."""
        self.drop()
        # V2 tells nobody when a request ends: measuring stops once no opted-in row has turned up for a while.
        self._misses += 1
        if self._misses > MISSES_UNTIL_OFF:
            self.wanted = False
        if self.ending is None or self._buffers is None or logits is None:
            return
        if logits.dim() != 2 or logits.shape[1] != self.vocab or not 0 < logits.shape[0] <= self.max_rows:
            return
        if logits.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        try:
            self._stats = logit_stats(logits, self.ending, self._buffers.first(logits.shape[0]))
            self._hidden = hidden
        except Exception:  # this is the model's own forward: it must not fail for us
            self.ending = None
            logger.exception("earlystop could not measure the logits and measures no more")

    def take(self, rows: int, begin: int = 0) -> Tapped | None:
        """Rows begin to begin + rows of the last forward, or None where there was none that matches.

        By place, not in turn: of the chunks that the rejection sampler makes, vLLM skips those without an opted-in
        request, and nobody is told.
        """
        self.want()
        stats, hidden = self._stats, self._hidden
        end = begin + rows
        if stats is None or hidden is None or end > stats.argmax.shape[0]:
            self.drop()
            return None
        if end == stats.argmax.shape[0]:
            self.drop()
            if begin == 0:
                return Tapped(stats.values, stats.argmax, hidden[:end])
        return Tapped(stats.values[begin:end], stats.argmax[begin:end], hidden[begin:end])


TAP = Tap()


class TappedLogitsProcessor(LogitsLayer):
    """vLLM's layer with the tap behind it.

    vLLM's LoRA wrapper calls this class's forward with a self of its own: no `super()`, no own attributes there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The one place of ours that V1 constructs under speculative decoding: it drops plugin processors silently.
        config = get_current_vllm_config_or_none()
        if config is not None and config.speculative_config is not None and not config.use_v2_model_runner:
            logger.warning(V1_DROPS_PROCESSORS)

    def forward(
        self,
        lm_head: torch.nn.Module,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """vLLM's forward, then the measurement."""
        logits: torch.Tensor | None = LogitsLayer.forward(self, lm_head, hidden_states, embedding_bias, skip_gather)
        if skip_gather:  # batch-sharded sampling: an older measurement must not pass for this one's
            TAP.drop()
        elif TAP.wanted:
            TAP.record(hidden_states, logits)
        return logits


def register() -> None:
    """Replaces the layer in this process; may be called again. Another plugin's replacement is left in place."""
    present = op_registry_oot.get("LogitsProcessor")
    if present is None:
        LogitsLayer.register_oot(TappedLogitsProcessor, name="LogitsProcessor")
    elif present is not TappedLogitsProcessor:
        logger.warning(
            "vLLM's logits layer is already replaced by %s.%s: signals are measured on the processed logits, "
            "and unit similarity is off",
            present.__module__,
            present.__qualname__,
        )
