"""The compiled loops behind `earlystop.kernels.cpu_similarity`. Importing this module imports numba."""

# mypy: allow-untyped-defs, allow-untyped-calls
# numba reads the types off the first call; annotations would only stand in its way.

from __future__ import annotations

import numpy as np

from earlystop.kernels.numba_stats import _float_of, compiled

_NAN = np.float32(np.nan)


@compiled(fastmath={"reassoc", "contract"})
def _moments(unit, last):
    """u·v, u·u and v·v in float64."""
    dot = 0.0
    a = 0.0
    b = 0.0
    for h in range(unit.size):
        u, v = np.float64(unit[h]), np.float64(last[h])
        dot += u * v
        a += u * u
        b += v * v
    return dot, a, b


@compiled()
def _add(total, bits):
    for h in range(total.size):
        total[h] += _float_of(bits[h])


@compiled()
def _form(total, count, bits, centre, last_only):
    """The unit's vector, written over its sum."""
    for h in range(total.size):
        total[h] = _float_of(bits[h]) if last_only else total[h] / np.float32(count)
    if centre.size:
        for h in range(total.size):
            total[h] -= centre[h]


@compiled()
def unit_similarity(
    pending, n_commit, unit_end, slots, unit_sum, unit_count, prev_mean, prev_valid, centre, out, last_only
):
    """See `earlystop.kernels.similarity.unit_similarity`; ``pending`` holds int16 bf16 bits or int32 fp32 bits."""
    out[:, :] = _NAN
    for r in range(slots.size):
        slot = slots[r]
        if slot < 0:
            continue
        total = unit_sum[slot]
        for i in range(min(n_commit[r], out.shape[1])):
            bits = pending[slot, i]
            _add(total, bits)
            unit_count[slot] += 1
            if unit_end[r, i] == 0:
                continue
            _form(total, unit_count[slot], bits, centre, last_only)
            if prev_valid[slot] != 0:
                dot, a, b = _moments(total, prev_mean[slot])
                norms = np.sqrt(a) * np.sqrt(b)
                if norms > 0 and norms < np.inf:
                    out[r, i] = dot / norms
            prev_mean[slot] = total
            prev_valid[slot] = 1
            total[:] = np.float32(0.0)
            unit_count[slot] = 0


@compiled()
def stash_hidden(flat, stride, row_slot, row_j, pending):
    """See `earlystop.kernels.similarity.stash_hidden`; rows lie ``stride`` apart in ``flat``."""
    width = pending.shape[2]
    for r in range(row_slot.size):
        if row_slot[r] >= 0 and 0 <= row_j[r] < pending.shape[1]:
            pending[row_slot[r], row_j[r]] = flat[r * stride : r * stride + width]
