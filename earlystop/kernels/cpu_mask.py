"""Forced and masked rows on a CPU: numba where it is installed, else the reference loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from earlystop.kernels.cpu import available


def write_rows(
    logits: torch.Tensor,
    force: torch.Tensor,
    flags: torch.Tensor,
    ending: torch.Tensor,
    reserved: torch.Tensor,
    grammar: torch.Tensor,
) -> None:
    """Same meaning as `earlystop.kernels.mask.write_rows`, for tensors in host memory."""
    rows, vocab = logits.shape
    if rows == 0 or vocab == 0:
        return
    kernel = _kernel()
    if kernel is None or (logits.stride(1) != 1 and vocab > 1):
        from earlystop.kernels import reference

        reference.write_rows(logits, force, flags, ending, reserved, grammar)
        return
    stride = logits.stride(0)
    flat = logits.detach().as_strided(((rows - 1) * stride + vocab,), (1,)).numpy()
    kernel(
        flat, stride, vocab, force.numpy(), flags.numpy(), ending.numpy(), reserved.numpy(), grammar.numpy()
    )  # fmt: skip


@functools.cache
def _kernel() -> Callable[..., None] | None:
    if not available():
        return None
    from earlystop.kernels import numba_mask

    return numba_mask.write_rows  # type: ignore[no-any-return]
