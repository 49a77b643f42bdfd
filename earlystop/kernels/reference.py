"""What the kernels mean: float64 loops, one row at a time, no tricks. Slow on purpose; tests compare against them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from earlystop.kernels.buffers import Stats

NAN, INF = math.nan, math.inf

#: Bits of a row's flags, see `write_rows`.
MOVE_EOS, MASK_RESERVED, INVALID = 1, 2, 4


def logit_stats(logits: torch.Tensor, ending: torch.Tensor, out: Stats | None = None) -> Stats:
    """Top-1 probability, entropy and end margins of every row; see `earlystop.kernels.stats.logit_stats`."""
    think_ids, eos_ids = (_ids(row) for row in ending.tolist())
    measured = [_row_stats(row, think_ids, eos_ids) for row in logits.double().tolist()]
    values = torch.tensor([m[:4] for m in measured], dtype=torch.float64).reshape(-1, 4)
    argmax = torch.tensor([m[4] for m in measured], dtype=torch.int32)
    if out is None:
        return Stats(values.float().to(logits.device), argmax.to(logits.device))
    out = out.first(logits.shape[0])
    out.values.copy_(values)
    out.argmax.copy_(argmax)
    return out


def _ids(padded: Sequence[int]) -> list[int]:
    return [token for token in padded if token >= 0]


def _row_stats(
    row: Sequence[float], think_ids: Sequence[int], eos_ids: Sequence[int]
) -> tuple[float, float, float, float, int]:
    """One row: softmax p, then max p, -Σ p ln p and two differences of logits; all NaN where the row is no evidence."""
    top = max(row) if not any(map(math.isnan, row)) else NAN
    if not math.isfinite(top):
        return NAN, NAN, NAN, NAN, -1
    weights = [math.exp(x - top) for x in row]
    total = math.fsum(weights)
    # -Σ p ln p with ln p = (x - top) - ln total; a weight of zero contributes nothing.
    spread = math.fsum(w * (x - top) for w, x in zip(weights, row, strict=True) if w > 0)
    entropy = max(0.0, math.log(total) - spread / total)
    return 1.0 / total, entropy, _margin(row, top, think_ids), _margin(row, top, eos_ids), row.index(top)


def _margin(row: Sequence[float], top: float, ids: Sequence[int]) -> float:
    known = [row[token] for token in ids if token < len(row)]
    return top - max(known) if known else NAN


def write_rows(
    logits: torch.Tensor,
    force: torch.Tensor,
    flags: torch.Tensor,
    ending: torch.Tensor,
    reserved: torch.Tensor,
    grammar: torch.Tensor,
) -> None:
    """Force and mask rows in place; see `earlystop.kernels.mask.write_rows`."""
    vocab = logits.shape[1]
    end = int(ending[0, 0])
    eos_ids = {t for t in ending[1].tolist() if 0 <= t < vocab}
    held = [t for t in reserved.tolist() if 0 <= t < vocab]
    for row, token, bits, bound in zip(logits, force.tolist(), flags.tolist(), grammar.tolist(), strict=True):
        if token >= 0:
            if token < vocab and (bits & INVALID or not bound or math.isfinite(row[token].item())):
                row.fill_(-INF)
                row[token] = 0.0
            continue
        if bits & MOVE_EOS and 0 <= end < vocab:
            _move_eos(row, end, eos_ids, bool(bound))
        if bits & MASK_RESERVED:
            masked = row.clone()
            masked[held] = -INF
            if bool(torch.isfinite(masked).any()):
                row.copy_(masked)


def _move_eos(row: torch.Tensor, end: int, eos_ids: set[int], bound: bool) -> None:
    """EOS becomes impossible and its probability mass goes to the end tag: exp(end') = exp(end) + Σ exp(eos)."""
    ids = sorted(eos_ids | {end})
    values = row[ids].tolist()
    if any(math.isnan(x) or x == INF for x in values) or (bound and row[end].item() == -INF):
        return
    top = max(values)
    mass = top + math.log(math.fsum(math.exp(x - top) for x in values)) if top > -INF else -INF
    row[ids] = -INF
    row[end] = mass


def unit_cosine(unit: Sequence[float], last: Sequence[float]) -> float:
    """Cosine of two unit vectors; NaN when a norm is 0 or anything is not finite."""
    norms = math.sqrt(math.fsum(a * a for a in unit)) * math.sqrt(math.fsum(b * b for b in last))
    if not math.isfinite(norms) or norms == 0:
        return NAN
    return math.fsum(a * b for a, b in zip(unit, last, strict=True)) / norms
