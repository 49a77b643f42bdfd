"""The compiled loops behind `earlystop.kernels.cpu_mask`. Importing this module imports numba."""

# mypy: allow-untyped-defs, allow-untyped-calls
# numba reads the types off the first call; annotations would only stand in its way.

from __future__ import annotations

import numpy as np

from earlystop.kernels.mask import INVALID, MASK_RESERVED, MOVE_EOS
from earlystop.kernels.numba_stats import compiled

_MINUS_INF = np.float32(-np.inf)


@compiled()
def _among(token, ids):
    for i in range(ids.size):  # noqa: SIM110  # numba has no any() over a generator
        if ids[i] == token:
            return True
    return False


@compiled()
def _move_eos(row, end, eos, bound):
    """log(exp(end) + Σ exp(eos)) at the end tag, -inf at the EOS ids; nothing where that has no meaning."""
    top = row[end]
    if bound and top == _MINUS_INF:
        return
    for i in range(eos.size):
        if 0 <= eos[i] < row.size:
            x = row[eos[i]]
            if np.isnan(x) or x == np.inf:
                return
            top = max(top, x)
    if np.isnan(top) or top == np.inf:
        return
    mass = np.float64(0.0)
    if top > _MINUS_INF:
        mass = np.exp(np.float64(row[end]) - np.float64(top))
        for i in range(eos.size):
            token = eos[i]
            if 0 <= token < row.size and token != end and not _among(token, eos[:i]):
                mass += np.exp(np.float64(row[token]) - np.float64(top))
    for i in range(eos.size):
        if 0 <= eos[i] < row.size:
            row[eos[i]] = _MINUS_INF
    row[end] = np.float64(top) + np.log(mass) if mass > 0 else _MINUS_INF


@compiled()
def _hold(row, reserved):
    """Mask the reserved ids if a finite logit remains elsewhere; usually the first one looked at."""
    for i in range(row.size):
        if np.isfinite(row[i]) and not _among(i, reserved):
            for token in reserved:
                if 0 <= token < row.size:
                    row[token] = _MINUS_INF
            return


@compiled()
def write_rows(flat, stride, vocab, force, flags, ending, reserved, grammar):
    """See `earlystop.kernels.mask.write_rows`; rows lie ``stride`` apart in ``flat``."""
    end = ending[0, 0]
    for r in range(force.size):
        token, bits = force[r], flags[r]
        if token < 0 and bits == 0:
            continue
        row = flat[r * stride : r * stride + vocab]
        if token >= 0:
            if token < vocab and ((bits & INVALID) != 0 or grammar[r] == 0 or np.isfinite(row[token])):
                row[:] = _MINUS_INF
                row[token] = np.float32(0.0)
            continue
        if (bits & MOVE_EOS) != 0 and 0 <= end < vocab:
            _move_eos(row, end, ending[1], grammar[r] != 0)
        if (bits & MASK_RESERVED) != 0:
            _hold(row, reserved)
