"""Units and cosines on a CPU: numba where it is installed, else plain torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from earlystop.kernels import torch_similarity
from earlystop.kernels.cpu import available, flat_bits

if TYPE_CHECKING:
    from earlystop.kernels.similarity import Mode, UnitState

_NO_CENTRE = torch.empty(0)


def unit_similarity(
    hidden_pending: torch.Tensor,
    n_commit: torch.Tensor,
    unit_end: torch.Tensor,
    slots: torch.Tensor,
    state: UnitState,
    out: torch.Tensor,
    mode: Mode,
) -> None:
    """Same meaning as `earlystop.kernels.similarity.unit_similarity`, for tensors in host memory."""
    loops = _loops()
    if loops is None or hidden_pending.dtype is torch.float16:
        torch_similarity.unit_similarity(hidden_pending, n_commit, unit_end, slots, state, out, mode)
        return
    bits = hidden_pending.view(torch.int16 if hidden_pending.dtype is torch.bfloat16 else torch.int32)
    centre = _NO_CENTRE if state.centre is None else state.centre
    tables = (n_commit.numpy(), unit_end.numpy(), slots.numpy())
    kept = (state.unit_sum.numpy(), state.unit_count.numpy(), state.prev_mean.numpy(), state.prev_valid.numpy())
    loops.unit_similarity(bits.numpy(), *tables, *kept, centre.numpy(), out.numpy(), mode == "last")


def stash_hidden(
    hidden: torch.Tensor, row_slot: torch.Tensor, row_j: torch.Tensor, hidden_pending: torch.Tensor
) -> None:
    """Same meaning as `earlystop.kernels.similarity.stash_hidden`, for tensors in host memory."""
    loops = _loops()
    if loops is None or hidden.dtype is not hidden_pending.dtype or hidden.dtype is torch.float16:
        torch_similarity.stash_hidden(hidden, row_slot, row_j, hidden_pending)
        return
    if hidden.shape[0] == 0:
        return
    flat, stride = flat_bits(hidden)
    pending = hidden_pending.view(torch.int16 if hidden.dtype is torch.bfloat16 else torch.int32)
    loops.stash_hidden(flat, stride, row_slot.numpy(), row_j.numpy(), pending.numpy())


def reset(slots: torch.Tensor, state: UnitState) -> None:
    """Same meaning as `earlystop.kernels.similarity.reset`."""
    torch_similarity.reset(slots, state)


@functools.cache
def _loops() -> Any:
    if not available():
        return None
    from earlystop.kernels import numba_similarity

    return numba_similarity
