"""The statistics in eager torch: the CPU path where numba is missing, and a GPU path without Triton."""

from __future__ import annotations

import torch

from earlystop.kernels.buffers import Stats, alloc_stats

#: Rows handled at a time: 4 rows × 152k float32 and their temporaries stay within a last-level cache.
_BLOCK_ROWS = 4


def logit_stats(logits: torch.Tensor, ending: torch.Tensor, out: Stats | None = None) -> Stats:
    """Same meaning as `earlystop.kernels.stats.logit_stats`, several passes a row, no synchronisation."""
    rows = logits.shape[0]
    out = (alloc_stats(rows, logits.device) if out is None else out).first(rows)
    step = _BLOCK_ROWS if logits.device.type == "cpu" else max(rows, 1)
    for low in range(0, rows, step):
        _measure(logits[low : low + step].float(), ending, out.values[low : low + step], out.argmax[low : low + step])
    return out


def _measure(x: torch.Tensor, ending: torch.Tensor, values: torch.Tensor, argmax: torch.Tensor) -> None:
    top, where = x.max(dim=1)
    shifted = x - top[:, None]
    weights = shifted.exp()
    total = weights.sum(dim=1)
    # A weight of 0 contributes nothing, also where its logit is -inf (0 × -inf would be NaN).
    spread = (weights * shifted.clamp_min(-3.0e38)).sum(dim=1)
    values[:, 0] = 1.0 / total
    values[:, 1] = (total.log() - spread / total).clamp_min(0.0)
    known = (ending >= 0) & (ending < x.shape[1])
    best = x[:, torch.where(known, ending, 0).long()].masked_fill(~known, -torch.inf).amax(dim=2)
    values[:, 2:] = torch.where(known.any(dim=1), top[:, None] - best, torch.nan)
    undefined = ~torch.isfinite(top) | torch.isnan(total)
    values.masked_fill_(undefined[:, None], torch.nan)
    # torch.max returns the first of several maxima.
    argmax.copy_(where)
    argmax.masked_fill_(undefined, -1)
