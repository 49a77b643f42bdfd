"""The result of the statistics and the room the GPU kernel needs to make it."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Columns of ``Stats.values``.
TOP1, ENTROPY, MARGIN_THINK, MARGIN_EOS = range(4)

#: Most parts that the Triton kernel splits one row into; the combining kernel always reads this many.
MAX_SPLITS = 64

#: Floats a partial result takes: maximum, sum, weighted sum, group of the maximum (int32 bits).
PARTIAL = 4


class Stats(NamedTuple):
    """Statistics of a batch of rows, on the rows' own device."""

    values: torch.Tensor
    """float32 [rows, 4]: top1, entropy (nats), margin to the end of thinking, margin to EOS (nats). NaN = undefined."""

    argmax: torch.Tensor
    """int32 [rows]: the lowest index of the largest logit, -1 for an undefined row."""

    scratch: torch.Tensor | None = None
    """float32 [rows, MAX_SPLITS, PARTIAL]: partial results of the split kernel; None = allocate when needed."""

    def first(self, rows: int) -> Stats:
        """The leading ``rows`` rows, sharing memory."""
        if rows == self.values.shape[0]:
            return self
        return Stats(self.values[:rows], self.argmax[:rows], self.scratch)


def alloc_stats(rows: int, device: torch.device | str = "cpu") -> Stats:
    """Buffers for up to ``rows`` rows, so that a step allocates nothing.

    Args:
        rows: The most rows that one call will measure, at least 0.
        device: Where the logits live.
    """
    target = torch.device(device)
    scratch = None
    if target.type != "cpu":
        scratch = torch.empty(rows, MAX_SPLITS, PARTIAL, dtype=torch.float32, device=target)
    return Stats(
        torch.empty(rows, 4, dtype=torch.float32, device=target),
        torch.empty(rows, dtype=torch.int32, device=target),
        scratch,
    )


def check_rows(logits: torch.Tensor, ending: torch.Tensor, out: Stats | None) -> None:
    """Refuse shapes and types that no back end handles.

    Raises:
        ValueError: naming what was got and what is allowed.
    """
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [rows, vocab >= 1], got {tuple(logits.shape)}")
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}")
    if ending.dim() != 2 or ending.shape[0] != 2 or ending.dtype != torch.int32:
        raise ValueError(f"ending must be int32 [2, M] padded with -1, got {ending.dtype} {tuple(ending.shape)}")
    if out is not None and out.values.shape[0] < logits.shape[0]:
        raise ValueError(f"out holds {out.values.shape[0]} rows, logits have {logits.shape[0]}: allocate more")
