# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The statistics on a GPU: one read of the logits, split over the vocabulary while the batch is small.

Reference loop (`earlystop.kernels.reference` has it in float64)::

    for row in logits:
        m = max(row)
        s = sum(exp(x - m) for x in row)
        w = sum((x - m) * exp(x - m) for x in row)
        top1, entropy = 1 / s, log(s) - w / s

1. **Online softmax.** ``m``, ``s``, ``w`` are kept while reading; when the maximum grows from m to m' the sums become
   s·e^(m-m') and (w + s·(m-m'))·e^(m-m') (https://arxiv.org/abs/1805.02867, extended to the weighted sum, which is
   what flashinfer and quack leave out). Keeping Σ (x-m)·e^(x-m) instead of Σ x·e^(x-m) avoids cancellation.
2. **One running triple per thread, not per row.** A tile is [CHUNKS, THREADS, VEC] with VEC × itemsize = 16 bytes, the
   widest load; reductions over CHUNKS and VEC stay in registers, so the loop has no shuffle, no shared memory and no
   barrier, and warps drift apart and keep loads in flight (Milakov & Gimelshein, section 3).
3. **The index for a compare per 16 bytes.** Only the 16-byte group of the running maximum is tracked; the row's winner
   group is read again at the end.
4. **Split rows.** Under `UNSPLIT_ROWS` rows a row is cut into parts, one program each, and a second launch folds the
   parts in their order. The cut depends on rows and vocabulary only: no autotuning, no atomics, no look at the device,
   so that all ranks compute the same bits. From `UNSPLIT_ROWS` on it is one launch.
5. **No evict-first hint.** The sampler reads the same logits next; at small batches they are still in the L2 cache.

NaN needs no test in the loop: it makes ``s`` NaN, and so does +inf (inf - inf).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from earlystop.kernels.buffers import MAX_SPLITS, PARTIAL, Stats, alloc_stats

#: From here on a row is one program of 16 warps: 192 of them give each SM of an H200 (132) one or two.
UNSPLIT_ROWS = 192

#: Programs of 8 warps aimed at under that: four on each of 132 SMs, 64 KiB of loads in flight on each.
SPLIT_PROGRAMS = 528

#: Tiles of CHUNKS × THREADS × 16 bytes.
CHUNKS = 4

#: Said aloud, because Triton's default changes with its version and the bits with it.
_FUSED = {"enable_fp_fusion": True}

#: Programmatic dependent launch of the combining kernel (sm_90 and up): it starts while the first one drains and waits
#: for it inside (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization).
#: Off until `benchmarks.gpu_checks` has measured it on a GPU.
CHAINED = False

_LOG2E = tl.constexpr(1.4426950408889634)
_FLOOR = tl.constexpr(-3.0e38)  # a finite stand-in for -inf, so that 0 × -inf never arises
_NO_GROUP = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _fold(x, m, s, w, group, first, THREADS: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: N803
    """Add a tile [CHUNKS, THREADS, VEC] to the threads' running (m, s, w, group of m)."""
    by_group = tl.max(x, axis=2)
    tile_max = tl.max(by_group, axis=0)
    chunk = tl.arange(0, CHUNKS)[:, None]
    at = tl.min(tl.where(by_group == tile_max[None, :], chunk, CHUNKS - 1), axis=0)
    group = tl.where(tile_max > m, first + at * THREADS + tl.arange(0, THREADS), group)
    new = tl.maximum(m, tile_max)
    # While only -inf has been seen, any finite reference will do.
    ref = tl.where(new == float("-inf"), 0.0, new)
    drop = m - ref
    decay = tl.exp2(drop * _LOG2E)
    d = x - ref[None, :, None]
    e = tl.exp2(d * _LOG2E)
    ed = e * tl.maximum(d, _FLOOR)
    w = decay * (w + s * tl.maximum(drop, _FLOOR)) + tl.sum(tl.sum(ed, axis=2), axis=0)
    s = decay * s + tl.sum(tl.sum(e, axis=2), axis=0)
    return new, s, w, group


@triton.jit
def _across(m, s, w, group):
    """Fold a vector of triples into one; groups are numbered in vocabulary order, so the lowest wins a tie."""
    top = tl.max(m, axis=0)
    ref = tl.where(top == float("-inf"), 0.0, top)
    drop = m - ref
    decay = tl.exp2(drop * _LOG2E)
    spread = tl.sum(decay * (w + s * tl.maximum(drop, _FLOOR)), axis=0)
    total = tl.sum(decay * s, axis=0)
    return top, total, spread, tl.min(tl.where(m == top, group, _NO_GROUP), axis=0)


@triton.jit
def _margin(row_ptr, col_stride, vocab, ids_ptr, width, top, WIDTH: tl.constexpr):  # noqa: N803
    """Largest logit minus the largest among the ids; NaN without ids."""
    lane = tl.arange(0, WIDTH)
    ids = tl.load(ids_ptr + lane, mask=lane < width, other=-1)
    known = (ids >= 0) & (ids < vocab)
    x = tl.load(row_ptr + ids.to(tl.int64) * col_stride, mask=known, other=float("-inf")).to(tl.float32)
    some = tl.max(known.to(tl.int32), axis=0) > 0
    return tl.where(some, top - tl.max(x, axis=0), float("nan"))


@triton.jit
def _finish(
    row_ptr, col_stride, vocab, ending_ptr, width, values_ptr, argmax_ptr, row, top, total, spread, group,
    VEC: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Steps 3 and the end of 1: from a row's triple to its statistics."""
    defined = (total == total) & (top > float("-inf"))
    at = tl.where(defined, group, 0) * VEC + tl.arange(0, VEC)
    x = tl.load(row_ptr + at.to(tl.int64) * col_stride, mask=at < vocab, other=float("-inf"))
    where = tl.min(tl.where(x.to(tl.float32) == top, at, _NO_GROUP), axis=0)
    nan = float("nan")
    entropy = tl.maximum(tl.log(total) - spread / total, 0.0)
    think = _margin(row_ptr, col_stride, vocab, ending_ptr, width, top, WIDTH)
    eos = _margin(row_ptr, col_stride, vocab, ending_ptr + width, width, top, WIDTH)
    tl.store(values_ptr + row * 4, tl.where(defined, 1.0 / total, nan))
    tl.store(values_ptr + row * 4 + 1, tl.where(defined, entropy, nan))
    tl.store(values_ptr + row * 4 + 2, tl.where(defined, think, nan))
    tl.store(values_ptr + row * 4 + 3, tl.where(defined, eos, nan))
    tl.store(argmax_ptr + row, tl.where(defined, where, -1))


@triton.jit(do_not_specialize=["part"])
def _rows_kernel(
    logits_ptr, row_stride, col_stride, vocab, part, ending_ptr, width, values_ptr, argmax_ptr, scratch_ptr,
    SPLIT: tl.constexpr, VEC: tl.constexpr, THREADS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    SLOTS: tl.constexpr, FIELDS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program (row, part): the triple of ``part`` consecutive tiles, written out or finished."""
    row = tl.program_id(0).to(tl.int64)  # int64: rows × stride passes 2^31 at 14,000 rows of 152k
    row_ptr = logits_ptr + row * row_stride
    TILE: tl.constexpr = CHUNKS * THREADS * VEC  # noqa: N806
    low = tl.program_id(1) * part * TILE
    high = tl.minimum(low + part * TILE, vocab)
    full = low + (high - low) // TILE * TILE
    chunk = tl.arange(0, CHUNKS)[:, None, None] * (THREADS * VEC)
    offsets = chunk + (tl.arange(0, THREADS) * VEC)[None, :, None] + tl.arange(0, VEC)[None, None, :]

    m = tl.full([THREADS], float("-inf"), tl.float32)
    s = tl.zeros([THREADS], tl.float32)
    w = tl.zeros([THREADS], tl.float32)
    group = tl.full([THREADS], _NO_GROUP, tl.int32)
    for start in range(low, full, TILE):
        x = tl.load(row_ptr + (start + offsets).to(tl.int64) * col_stride).to(tl.float32)
        m, s, w, group = _fold(x, m, s, w, group, start // VEC, THREADS, CHUNKS)
    if full < high:
        at = full + offsets
        x = tl.load(row_ptr + at.to(tl.int64) * col_stride, mask=at < high, other=float("-inf")).to(tl.float32)
        m, s, w, group = _fold(x, m, s, w, group, full // VEC, THREADS, CHUNKS)

    top, total, spread, winner = _across(m, s, w, group)
    if SPLIT:
        at_part = scratch_ptr + (row * SLOTS + tl.program_id(1)) * FIELDS
        tl.store(at_part, top)
        tl.store(at_part + 1, total)
        tl.store(at_part + 2, spread)
        tl.store(at_part + 3, winner.to(tl.float32, bitcast=True))
    else:
        _finish(
            row_ptr, col_stride, vocab, ending_ptr, width, values_ptr, argmax_ptr, row, top, total, spread, winner,
            VEC, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    logits_ptr, row_stride, col_stride, vocab, parts, ending_ptr, width, values_ptr, argmax_ptr, scratch_ptr,
    VEC: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, FIELDS: tl.constexpr, CHAINED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Program (row): fold the row's parts, in one fixed tree."""
    if CHAINED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    mine = slot < parts
    at = scratch_ptr + (row * SLOTS + slot) * FIELDS
    m = tl.load(at, mask=mine, other=float("-inf"))
    s = tl.load(at + 1, mask=mine, other=0.0)
    w = tl.load(at + 2, mask=mine, other=0.0)
    group = tl.load(at + 3, mask=mine, other=0.0).to(tl.int32, bitcast=True)
    top, total, spread, winner = _across(m, s, w, group)
    row_ptr = logits_ptr + row * row_stride
    _finish(
        row_ptr, col_stride, vocab, ending_ptr, width, values_ptr, argmax_ptr, row, top, total, spread, winner,
        VEC, WIDTH,
    )  # fmt: skip


def plan(rows: int, vocab: int, vec: int) -> tuple[int, int, int]:
    """How the work is cut: (warps, tiles a part, parts a row), from rows and vocabulary only."""
    warps = 16 if rows >= UNSPLIT_ROWS else 8
    tiles = triton.cdiv(vocab, CHUNKS * warps * 32 * vec)
    wanted = 1 if rows >= UNSPLIT_ROWS else triton.cdiv(SPLIT_PROGRAMS, max(rows, 1))
    part = triton.cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return warps, part, triton.cdiv(tiles, part)


def logit_stats(logits: torch.Tensor, ending: torch.Tensor, out: Stats | None = None) -> Stats:
    """Same meaning as `earlystop.kernels.stats.logit_stats`; one launch, or two where rows are split."""
    rows, vocab = logits.shape
    out = (alloc_stats(rows, logits.device) if out is None else out).first(rows)
    if rows == 0:
        return out
    vec = 16 // logits.element_size()
    warps, part, parts = plan(rows, vocab, vec)
    scratch = out.scratch
    if scratch is None:
        scratch = torch.empty(rows if parts > 1 else 1, MAX_SPLITS, PARTIAL, device=logits.device)
    ending = ending.contiguous()
    width = ending.shape[1]
    shape = {"VEC": vec, "WIDTH": triton.next_power_of_2(width), "SLOTS": MAX_SPLITS, "FIELDS": PARTIAL}
    source = (logits, logits.stride(0), logits.stride(1), vocab)
    sink = (ending, width, out.values, out.argmax, scratch)
    _rows_kernel[(rows, parts)](
        *source, part, *sink, SPLIT=parts > 1, THREADS=warps * 32, CHUNKS=CHUNKS, num_warps=warps, **shape, **_FUSED
    )
    if parts > 1:
        launch = {"launch_pdl": True} if CHAINED else {}
        _combine_kernel[(rows,)](*source, parts, *sink, CHAINED=CHAINED, num_warps=1, **shape, **_FUSED, **launch)
    return out
