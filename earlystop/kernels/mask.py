"""Writing a verdict into rows of logits: forced tokens, EOS inside thinking, reserved ids. Picks the back end."""

from __future__ import annotations

import torch

__all__ = ["INVALID", "MASK_RESERVED", "MOVE_EOS", "write_rows"]

#: Bits of a row's flags.
MOVE_EOS = 1
MASK_RESERVED = 2
INVALID = 4


def write_rows(
    logits: torch.Tensor,
    force: torch.Tensor,
    flags: torch.Tensor,
    ending: torch.Tensor,
    reserved: torch.Tensor,
    grammar: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Force and mask rows in place, without a synchronisation. A row with force -1 and flags 0 keeps every bit.

    * ``force >= 0``: the row becomes -inf everywhere and 0.0 at that id. Under a grammar only if the id's logit is
      finite, else the row is left wholly alone; with ``INVALID`` in any case (the row holds NaN or +inf, and closing
      it is the one thing left to do). An id at or beyond the vocabulary leaves the row alone. Other flags rest.
    * ``MOVE_EOS``: the EOS ids become -inf and their probability mass moves to the end tag, ``ending[0, 0]``: its
      logit becomes log(exp(end) + Σ exp(eos)). Not done without an end tag, where one of these logits is NaN or +inf,
      or under a grammar that forbids the end tag.
    * ``MASK_RESERVED``: the reserved ids become -inf, unless that would leave the row without a finite logit.

    Args:
        logits: float32 [rows, vocab], any strides, changed in place.
        force: int32 [rows], token id or -1.
        flags: int32 [rows], sum of `MOVE_EOS`, `MASK_RESERVED`, `INVALID`.
        ending: int32 [2, M], padded with -1: row 0 the ids that end thinking, row 1 the EOS ids.
        reserved: int32 [N], padded with -1; N may be 0.
        grammar: int32 [rows], not 0 where a grammar has masked the row.
        scratch: int32 [>= rows], room for the GPU path's verdicts, so that a step allocates nothing.
        backend: ``reference``, ``cpu`` or ``triton``; by default by device.

    Raises:
        ValueError: for another shape, dtype or back end.
    """
    if logits.dim() != 2 or logits.dtype is not torch.float32:
        raise ValueError(f"logits must be float32 [rows, vocab], got {logits.dtype} {tuple(logits.shape)}")
    for name, tensor in (("force", force), ("flags", flags), ("grammar", grammar)):
        if tensor.shape != logits.shape[:1] or tensor.dtype is not torch.int32:
            raise ValueError(f"{name} must be int32 [{logits.shape[0]}], got {tensor.dtype} {tuple(tensor.shape)}")
    if backend is None:
        backend = "cpu" if logits.device.type == "cpu" else "triton"
    if backend == "cpu":
        from earlystop.kernels import cpu_mask

        cpu_mask.write_rows(logits, force, flags, ending, reserved, grammar)
    elif backend == "triton":
        from earlystop.kernels import triton_mask

        triton_mask.write_rows(logits, force, flags, ending, reserved, grammar, scratch)
    elif backend == "reference":
        from earlystop.kernels import reference

        reference.write_rows(logits, force, flags, ending, reserved, grammar)
    else:
        raise ValueError(f"backend must be reference, cpu or triton, got {backend!r}")
