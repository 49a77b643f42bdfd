# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Forced and masked rows on a GPU: one launch decides, one fills.

Reference loop: `earlystop.kernels.reference.write_rows`.

1. **Decide**, one program a row. It alone reads the row's logits, so no program looks at what another one is just
   overwriting. A row without a verdict costs two loads. The few single values of MOVE_EOS and MASK_RESERVED are
   written here, behind a barrier that all of the program's reads have passed.
2. **Fill**, a grid over (rows, vocabulary). It reads the verdict of step 1 and no logits, so its blocks cannot race:
   each value is written once, -inf or, at the forced id, 0.

The order of the two launches on the stream is the only synchronisation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from earlystop.kernels import mask

_MOVE_EOS = tl.constexpr(mask.MOVE_EOS)
_MASK_RESERVED = tl.constexpr(mask.MASK_RESERVED)
_INVALID = tl.constexpr(mask.INVALID)

#: Values looked at a time in search of a finite logit, and values filled by one program.
_SCAN, _FILL = 4096, 8192


@triton.jit
def _finite(x):
    """1 where x is neither NaN nor an infinity (as int32: the interpreter cannot broadcast a scalar bool)."""
    return (tl.abs(x) < float("inf")).to(tl.int32)


@triton.jit
def _more_finite_than(row_ptr, col_stride, vocab, count, SCAN: tl.constexpr):  # noqa: N803
    """1 if the row has more than ``count`` finite logits; stops looking as soon as it has, mostly after one block."""
    seen = 0
    start = 0
    while (start < vocab) & (seen <= count):
        at = start + tl.arange(0, SCAN)
        x = tl.load(row_ptr + at.to(tl.int64) * col_stride, mask=at < vocab, other=float("-inf"))
        seen += tl.sum(_finite(x), axis=0)
        start += SCAN
    return (seen > count).to(tl.int32)


@triton.jit
def _repeated(ids, LANES: tl.constexpr):  # noqa: N803
    """1 where an id stands further in front as well."""
    lane = tl.arange(0, LANES)
    return tl.max(((ids[:, None] == ids[None, :]) & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)


@triton.jit
def _decide_kernel(
    logits_ptr, row_stride, col_stride, vocab, force_ptr, flags_ptr, grammar_ptr,
    ending_ptr, width, reserved_ptr, n_reserved, verdict_ptr,
    WIDTH: tl.constexpr, RESERVED: tl.constexpr, SCAN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program (row): the id to force or -1; the single values of unforced rows."""
    row = tl.program_id(0)
    token = tl.load(force_ptr + row)
    bits = tl.load(flags_ptr + row)
    bound = tl.load(grammar_ptr + row) != 0
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    verdict = -1
    if token >= 0:
        x = tl.load(row_ptr + token.to(tl.int64) * col_stride, mask=token < vocab, other=float("nan"))
        free = ((bits & _INVALID) != 0) | (bound == 0)
        verdict = tl.where((token < vocab) & (free | (_finite(x) > 0)), token, -1)
    elif bits != 0:
        lane = tl.arange(0, WIDTH)
        eos = tl.load(ending_ptr + width + lane, mask=lane < width, other=-1)
        eos = tl.where(eos < vocab, eos, -1)
        end = tl.load(ending_ptr)
        has_end = (end >= 0) & (end < vocab)
        # An id that stands twice, or is the end tag itself, counts once.
        counted = (eos >= 0) & (eos != end) & (_repeated(eos, WIDTH) == 0)
        x_eos = tl.load(row_ptr + eos.to(tl.int64) * col_stride, mask=counted, other=float("-inf"))
        x_end = tl.load(row_ptr + end.to(tl.int64) * col_stride, mask=has_end, other=float("-inf"))
        top = tl.maximum(tl.max(x_eos, axis=0), x_end)
        ref = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.exp(x_eos - ref), axis=0) + tl.exp(x_end - ref)
        # NaN and +inf both make the mass NaN.
        meant = has_end & (mass == mass) & ((bound == 0) | (x_end > float("-inf")))
        moved = (((bits & _MOVE_EOS) != 0) & meant).to(tl.int32)
        new_end = tl.where(mass > 0, ref + tl.log(mass), float("-inf"))

        slot = tl.arange(0, RESERVED)
        reserved = tl.load(reserved_ptr + slot, mask=slot < n_reserved, other=-1)
        reserved = tl.where(reserved < vocab, reserved, -1)
        end_held = tl.max((reserved == end).to(tl.int32), axis=0)
        held = 0
        if (bits & _MASK_RESERVED) != 0:
            held = moved * (1 - end_held) * _finite(new_end)
            if held == 0:
                # Finite logits that will be gone: reserved ids and, where the mass moves, EOS and the end tag's own.
                x = tl.load(row_ptr + reserved.to(tl.int64) * col_stride, mask=reserved >= 0, other=float("-inf"))
                gone = tl.sum(_finite(x) * (1 - _repeated(reserved, RESERVED)), axis=0)
                eos_held = tl.max((eos[:, None] == reserved[None, :]).to(tl.int32), axis=1)
                gone += moved * tl.sum(_finite(x_eos) * (1 - eos_held), axis=0)
                gone += moved * (1 - end_held) * _finite(x_end)
                held = _more_finite_than(row_ptr, col_stride, vocab, gone, SCAN)

        tl.debug_barrier()
        here = tl.where(moved > 0, eos, -1)
        tl.store(row_ptr + here.to(tl.int64) * col_stride, float("-inf"), mask=(here >= 0) & (here != end))
        tl.store(row_ptr + end.to(tl.int64) * col_stride, new_end, mask=moved * (1 - held * end_held) > 0)
        hold = tl.where(held > 0, reserved, -1)
        tl.store(row_ptr + hold.to(tl.int64) * col_stride, float("-inf"), mask=hold >= 0)
    tl.store(verdict_ptr + row, verdict)


@triton.jit
def _fill_kernel(logits_ptr, row_stride, col_stride, vocab, verdict_ptr, FILL: tl.constexpr):  # noqa: N803
    """Program (row, block): -inf and one 0 where the row is forced."""
    row = tl.program_id(0)
    verdict = tl.load(verdict_ptr + row)
    if verdict >= 0:
        at = tl.program_id(1) * FILL + tl.arange(0, FILL)
        value = tl.where(at == verdict, 0.0, float("-inf"))
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        tl.store(row_ptr + at.to(tl.int64) * col_stride, value, mask=at < vocab)


def write_rows(
    logits: torch.Tensor,
    force: torch.Tensor,
    flags: torch.Tensor,
    ending: torch.Tensor,
    reserved: torch.Tensor,
    grammar: torch.Tensor,
    scratch: torch.Tensor | None = None,
) -> None:
    """Same meaning as `earlystop.kernels.mask.write_rows`; two launches."""
    rows, vocab = logits.shape
    if rows == 0 or vocab == 0:
        return
    if scratch is None:
        scratch = torch.empty(rows, dtype=torch.int32, device=logits.device)
    ending = ending.contiguous()
    width, held = ending.shape[1], reserved.shape[0]
    place = (logits, logits.stride(0), logits.stride(1), vocab)
    _decide_kernel[(rows,)](
        *place, force, flags, grammar, ending, width, reserved, held, scratch,
        WIDTH=triton.next_power_of_2(width), RESERVED=triton.next_power_of_2(max(held, 1)), SCAN=_SCAN,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _fill_kernel[(rows, triton.cdiv(vocab, _FILL))](*place, scratch, FILL=_FILL, num_warps=8)
