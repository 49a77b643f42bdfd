# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Units and cosines on a GPU: one program a request.

Reference loop: `earlystop.kernels.torch_similarity.unit_similarity`.

1. The slot's open sum and its last unit are read into registers once (H <= 16,384 floats over up to 16 warps).
2. The committed tokens of this step (one, or up to K with drafts) are added in their order: float addition is not
   associative, and every run must give the same bits.
3. Where a unit ends, three dot products are reduced in one fixed tree, and the unit takes the place of the last one.
4. The registers are written back. Requests own their slots, so programs share nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from earlystop.kernels.similarity import Mode, UnitState

_COPY = 2048


@triton.jit
def _unit_kernel(
    pending_ptr, n_commit_ptr, unit_end_ptr, slots_ptr, sum_ptr, count_ptr, prev_ptr, valid_ptr, centre_ptr, out_ptr,
    hidden, WIDTH: tl.constexpr, LAST: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program (request)."""
    r = tl.program_id(0)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    commits = tl.minimum(tl.load(n_commit_ptr + r), WIDTH)
    if slot < 0:
        commits = 0
    if commits > 0:
        h = tl.arange(0, BLOCK)
        inside = h < hidden
        total = tl.load(sum_ptr + slot * hidden + h, mask=inside, other=0.0)
        last = tl.load(prev_ptr + slot * hidden + h, mask=inside, other=0.0)
        count = tl.load(count_ptr + slot)
        valid = tl.load(valid_ptr + slot)
        for i in range(commits):
            x = tl.load(pending_ptr + (slot * WIDTH + i) * hidden + h, mask=inside, other=0.0).to(tl.float32)
            total += x
            count += 1
            cosine = float("nan")
            if tl.load(unit_end_ptr + r * WIDTH + i) != 0:
                unit = total / count.to(tl.float32)
                if LAST:
                    unit = x
                if CENTRED:
                    unit -= tl.load(centre_ptr + h, mask=inside, other=0.0)
                norms = tl.sqrt(tl.sum(unit * unit, axis=0)) * tl.sqrt(tl.sum(last * last, axis=0))
                meant = (valid != 0) & (norms > 0) & (norms < float("inf"))
                cosine = tl.where(meant, tl.sum(unit * last, axis=0) / norms, float("nan"))
                last = unit
                valid = 1
                total = tl.zeros([BLOCK], tl.float32)
                count = 0
            tl.store(out_ptr + r * WIDTH + i, cosine)
        tl.store(sum_ptr + slot * hidden + h, total, mask=inside)
        tl.store(prev_ptr + slot * hidden + h, last, mask=inside)
        tl.store(count_ptr + slot, count)
        tl.store(valid_ptr + slot, valid)
    for i in range(commits, WIDTH):
        tl.store(out_ptr + r * WIDTH + i, float("nan"))


@triton.jit
def _stash_kernel(
    hidden_ptr, row_stride, row_slot_ptr, row_j_ptr, pending_ptr, width, hidden, COPY: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Program (row, block)."""
    row = tl.program_id(0)
    slot = tl.load(row_slot_ptr + row).to(tl.int64)
    j = tl.load(row_j_ptr + row)
    if (slot >= 0) & (j >= 0) & (j < width):
        h = tl.program_id(1) * COPY + tl.arange(0, COPY)
        x = tl.load(hidden_ptr + row.to(tl.int64) * row_stride + h, mask=h < hidden)
        tl.store(pending_ptr + (slot * width + j) * hidden + h, x.to(pending_ptr.dtype.element_ty), mask=h < hidden)


@triton.jit
def _reset_kernel(slots_ptr, sum_ptr, count_ptr, valid_ptr, hidden, COPY: tl.constexpr):  # noqa: N803
    """Program (entry, block)."""
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        h = tl.program_id(1) * COPY + tl.arange(0, COPY)
        tl.store(sum_ptr + slot * hidden + h, tl.zeros([COPY], tl.float32), mask=h < hidden)
        if tl.program_id(1) == 0:
            tl.store(count_ptr + slot, 0)
            tl.store(valid_ptr + slot, 0)


def unit_similarity(
    hidden_pending: torch.Tensor,
    n_commit: torch.Tensor,
    unit_end: torch.Tensor,
    slots: torch.Tensor,
    state: UnitState,
    out: torch.Tensor,
    mode: Mode,
) -> None:
    """Same meaning as `earlystop.kernels.similarity.unit_similarity`; one launch."""
    requests, width = out.shape
    hidden = hidden_pending.shape[2]
    if requests == 0:
        return
    block = triton.next_power_of_2(hidden)
    _unit_kernel[(requests,)](
        hidden_pending, n_commit, unit_end, slots,
        state.unit_sum, state.unit_count, state.prev_mean, state.prev_valid,
        out if state.centre is None else state.centre, out, hidden,
        WIDTH=width, LAST=mode == "last", CENTRED=state.centre is not None, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), enable_fp_fusion=True,
    )  # fmt: skip


def stash_hidden(
    hidden: torch.Tensor, row_slot: torch.Tensor, row_j: torch.Tensor, hidden_pending: torch.Tensor
) -> None:
    """Same meaning as `earlystop.kernels.similarity.stash_hidden`; one launch."""
    rows, features = hidden.shape
    if rows == 0:
        return
    _stash_kernel[(rows, triton.cdiv(features, _COPY))](
        hidden, hidden.stride(0), row_slot, row_j, hidden_pending, hidden_pending.shape[1], features, COPY=_COPY
    )


def reset(slots: torch.Tensor, state: UnitState) -> None:
    """Same meaning as `earlystop.kernels.similarity.reset`; one launch."""
    features = state.unit_sum.shape[1]
    if slots.shape[0] == 0:
        return
    _reset_kernel[(slots.shape[0], triton.cdiv(features, _COPY))](
        slots, state.unit_sum, state.unit_count, state.prev_valid, features, COPY=_COPY
    )
