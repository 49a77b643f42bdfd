"""Units and cosines in plain torch, one request and one token at a time: the meaning, and the path without numba."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from earlystop.kernels.similarity import Mode, UnitState


def unit_similarity(
    hidden_pending: torch.Tensor,
    n_commit: torch.Tensor,
    unit_end: torch.Tensor,
    slots: torch.Tensor,
    state: UnitState,
    out: torch.Tensor,
    mode: Mode,
) -> None:
    """Same meaning as `earlystop.kernels.similarity.unit_similarity`."""
    out.fill_(math.nan)
    for r, (slot, count) in enumerate(zip(slots.tolist(), n_commit.tolist(), strict=True)):
        if slot < 0:
            continue
        for i in range(min(count, out.shape[1])):
            x = hidden_pending[slot, i].float()
            state.unit_sum[slot] += x
            state.unit_count[slot] += 1
            if unit_end[r, i] != 0:
                out[r, i] = _close(slot, x, state, mode)


def _close(slot: int, x: torch.Tensor, state: UnitState, mode: Mode) -> float:
    """End the slot's unit; its cosine with the unit before, NaN where that is undefined."""
    unit = state.unit_sum[slot] / state.unit_count[slot] if mode == "mean" else x
    if state.centre is not None:
        unit = unit - state.centre
    last = state.prev_mean[slot].double() if state.prev_valid[slot] else torch.full_like(unit, math.nan)
    norms = float(unit.double().norm() * last.norm())
    cosine = float(unit.double() @ last.double()) / norms if math.isfinite(norms) and norms > 0 else math.nan
    state.prev_mean[slot] = unit
    state.prev_valid[slot] = 1
    state.unit_sum[slot] = 0
    state.unit_count[slot] = 0
    return cosine


def stash_hidden(
    hidden: torch.Tensor, row_slot: torch.Tensor, row_j: torch.Tensor, hidden_pending: torch.Tensor
) -> None:
    """Same meaning as `earlystop.kernels.similarity.stash_hidden`."""
    kept = ((row_slot >= 0) & (row_j >= 0) & (row_j < hidden_pending.shape[1])).nonzero().flatten()
    hidden_pending[row_slot[kept].long(), row_j[kept].long()] = hidden[kept].to(hidden_pending.dtype)


def reset(slots: torch.Tensor, state: UnitState) -> None:
    """Same meaning as `earlystop.kernels.similarity.reset`."""
    named = slots[slots >= 0].long()
    state.unit_sum[named] = 0
    state.unit_count[named] = 0
    state.prev_valid[named] = 0
