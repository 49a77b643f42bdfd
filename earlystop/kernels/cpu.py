"""The statistics on a CPU: numba over the raw bits, block by block; eager torch where numba is missing.

Why not torch: eager torch makes five passes over float32 copies, and its compiled form needs a C++ compiler at run
time. numba comes with vLLM, compiles once and keeps the result beside this file.

A block of 4,096 values (8 KiB of bf16) is read three times in the first-level cache, the row once from memory:

1. its largest and smallest *integer key*: the bits of a float, the negative ones flipped, order like the floats, NaN
   and infinities included, and integer maxima vectorise without fast-math. NaN and +inf show as keys out of bounds.
2. if the maximum grew: rescale the running sums (online softmax, https://arxiv.org/abs/1805.02867), note where.
3. add e^(x-m) and (x-m)·e^(x-m), with `exp2` written so that LLVM vectorises it.

Single-threaded: vLLM's OpenMP threads own the other cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from earlystop.kernels.buffers import Stats, alloc_stats


def available() -> bool:
    """Whether numba can be imported."""
    try:
        import numba  # noqa: F401  # only asked for
    except ImportError:
        return False
    return True


def logit_stats(logits: torch.Tensor, ending: torch.Tensor, out: Stats | None = None) -> Stats:
    """Same meaning as `earlystop.kernels.stats.logit_stats`, for tensors in host memory."""
    kernel = _kernel()
    if kernel is None:
        from earlystop.kernels import torch_stats

        return torch_stats.logit_stats(logits, ending, out)
    rows, vocab = logits.shape
    out = (alloc_stats(rows) if out is None else out).first(rows)
    if rows == 0:
        return out
    bits, stride = flat_bits(logits)
    kernel(bits, rows, stride, vocab, ending.numpy(), out.values.numpy(), out.argmax.numpy())
    return out


def flat_bits(logits: torch.Tensor) -> tuple[Any, int]:
    """The rows' memory as one contiguous integer array, and the distance of two rows in it.

    A contiguous array is what numba vectorises over; rows of a wider buffer (vLLM slices off a padded vocabulary)
    share its memory. fp16 becomes fp32, strided columns become contiguous.

    Returns:
        int16 (bf16) or int32 (fp32) numpy array, and the row stride in elements.
    """
    if logits.dtype is torch.float16:
        logits = logits.float()
    rows, vocab = logits.shape
    if logits.stride(1) != 1 and vocab > 1:
        logits = logits.contiguous()
    stride = logits.stride(0)
    flat = logits.detach().as_strided(((rows - 1) * stride + vocab,), (1,))
    return flat.view(torch.int16 if logits.dtype is torch.bfloat16 else torch.int32).numpy(), stride


@functools.cache
def _kernel() -> Callable[..., None] | None:
    if not available():
        return None
    from earlystop.kernels import numba_stats

    return numba_stats.rows_stats  # type: ignore[no-any-return]
