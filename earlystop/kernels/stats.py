"""One-pass statistics of logits rows: picks the back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earlystop.kernels.buffers import Stats, alloc_stats, check_rows

if TYPE_CHECKING:
    import torch

__all__ = ["BACKENDS", "Stats", "alloc_stats", "logit_stats", "warmup"]

#: ``cpu`` is numba, or eager torch where it is missing; ``triton`` runs on CPU tensors under TRITON_INTERPRET=1.
BACKENDS = ("reference", "torch", "cpu", "triton")


def logit_stats(
    logits: torch.Tensor, ending: torch.Tensor, out: Stats | None = None, *, backend: str | None = None
) -> Stats:
    """Measure every row of raw logits in one pass over the vocabulary, in float32, without a synchronisation.

    With p = softmax(row): ``top1`` = max p; ``entropy`` = -Σ p ln p in nats; ``margin_think`` and ``margin_eos`` =
    the largest logit minus the largest logit among the ending ids, 0 where the model itself would end here.

    * -inf entries are legal (a mask): probability 0, nothing for the entropy.
    * A margin is NaN where its set of ids is empty, +inf where all its logits are -inf.
    * A row with a NaN or +inf, or without any finite logit, is undefined: four NaN and argmax -1.

    Args:
        logits: bf16, fp16 or fp32 [rows, vocab], any strides (a unit vocabulary stride is the fast one). Not changed.
        ending: int32 [2, M] on the same device, padded with -1: row 0 the ids that end thinking (first token of the
            end tag), row 1 the EOS ids. Ids at or beyond the vocabulary are ignored.
        out: Buffers from `alloc_stats` with at least as many rows; the result shares their memory.
        backend: One of `BACKENDS`; by default ``triton`` for tensors on a GPU and ``cpu`` for others.

    Raises:
        ValueError: for another shape, dtype or back end.
    """
    check_rows(logits, ending, out)
    if backend is None:
        backend = "cpu" if logits.device.type == "cpu" else "triton"
    if backend == "cpu":
        from earlystop.kernels import cpu

        return cpu.logit_stats(logits, ending, out)
    if backend == "triton":
        from earlystop.kernels import triton_stats

        return triton_stats.logit_stats(logits, ending, out)
    if backend == "torch":
        from earlystop.kernels import torch_stats

        return torch_stats.logit_stats(logits, ending, out)
    if backend == "reference":
        from earlystop.kernels import reference

        return reference.logit_stats(logits, ending, out)
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def warmup(device: torch.device | str, dtype: torch.dtype, vocab: int, ending_width: int = 4) -> None:
    """Compile what a first call would compile, so that no request waits for it.

    Args:
        device: Where the logits will live.
        dtype: Their dtype.
        vocab: Vocabulary size; the Triton kernel is specialised on its divisibility.
        ending_width: M of the ``ending`` table that will be used.
    """
    import torch

    ending = torch.full((2, ending_width), -1, dtype=torch.int32, device=device)
    for rows in (1, 256) if torch.device(device).type != "cpu" else (1,):
        # Both launch shapes: split, and one program a row.
        logit_stats(torch.zeros(1, vocab, dtype=dtype, device=device).expand(rows, vocab), ending)
