"""The compiled loops behind `earlystop.kernels.cpu`. Importing this module imports numba."""

# mypy: allow-untyped-defs, allow-untyped-calls, no-warn-return-any
# numba reads the types off the first call; annotations would only stand in its way.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

BLOCK = 4096
_NAN = np.float32(np.nan)
_LOG2E = np.float32(1.4426950408889634)

# 2^f = 1 + f·P(f) for |f| <= 1/2: coefficients of Cephes exp2f.c (S. Moshier, single precision,
# https://www.netlib.org/cephes/), peak relative error 1.7e-7 there; test_stats measures ours.
_P = tuple(
    np.float32(c)
    for c in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
    )
)
_P0, _P1, _P2, _P3, _P4, _P5 = _P

#: Under -127·ln 2 below the maximum e^x is 0 in float32.
_LOWEST = np.float32(-88.02969)

#: Sums may be reordered and contracted; NaN and infinities keep their meaning (no `nnan`, no `ninf`).
_SUMS = {"reassoc", "contract", "nsz"}


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without the interpreter lock, cached on disk where some folder can be written."""

    def wrap(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # "cannot cache function": neither the package nor the user's cache can be written
            return njit(nogil=True, **options)(function)

    return wrap


def _float_of(bits):
    """The float32 behind int16 bf16 bits or int32 fp32 bits."""
    raise NotImplementedError


def _key(bits):
    """The bits as an integer in the order of the floats they stand for, of the same width."""
    raise NotImplementedError


# Chosen by width while compiling, and with constant shifts: numba widens integers to 64 bits, and LLVM narrows them
# again (32 bf16 keys a vector instead of 8) only where the shift is known.
@overload(_float_of, inline="always")
def _float_of_overload(bits):
    if bits.bitwidth == 16:
        return lambda bits: np.int32(np.int32(bits) << 16).view(np.float32)
    return lambda bits: np.int32(bits).view(np.float32)


@overload(_key, inline="always")
def _key_overload(bits):
    if bits.bitwidth == 16:
        return lambda bits: np.int16(bits ^ ((bits >> 15) & 0x7FFF))
    return lambda bits: np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@compiled(fastmath={"contract"})
def exp2(t):
    """2^t in float32 for -127 <= t <= 0; 0 from -126.5 down. Branch-free, so that the caller's loop vectorises."""
    whole = np.int32(t - np.float32(0.5))  # rounds to nearest: truncation goes up on the negative side
    f = t - np.float32(whole)
    p = ((((_P0 * f + _P1) * f + _P2) * f + _P3) * f + _P4) * f + _P5
    scale = np.int32((whole + 127) << 23).view(np.float32)  # exponent bits; whole = -127 makes it 0
    return (np.float32(1.0) + f * p) * scale


@compiled(fastmath=_SUMS)
def _sums(bits, top):
    """Σ e^(x-top) and Σ (x-top)·e^(x-top) over a block without NaN or +inf."""
    total = np.float32(0.0)
    spread = np.float32(0.0)
    for i in range(bits.size):
        d = max(_float_of(bits[i]) - top, _LOWEST)  # finite, so that 0 × -inf never arises
        weight = exp2(d * _LOG2E)
        total += weight
        spread += weight * d
    return total, spread


@compiled()
def _keys(bits):
    """Largest and smallest key of a block."""
    high = low = _key(bits[0])
    for i in range(bits.size):
        key = _key(bits[i])
        high = max(high, key)
        low = min(low, key)
    return high, low


@compiled()
def _row(bits, infinity):
    """(maximum, its lowest index, Σ e^(x-max), Σ (x-max)·e^(x-max)) of a row; index -1 where it is undefined."""
    best = -infinity - 1  # the key of -inf; anything beyond the keys of the infinities is a NaN
    home = -1  # start of the block that first held the maximum
    top = np.float32(-np.inf)
    total = 0.0
    spread = 0.0
    for low in range(0, bits.size, BLOCK):
        block = bits[low : low + BLOCK]
        high_key, low_key = _keys(block)
        if high_key >= infinity or low_key < -infinity - 1:
            return top, -1, total, spread
        if high_key == 0:
            high_key = -1  # +0.0 (key 0) equals -0.0 (key -1)
        if high_key > best:
            # Online softmax: what was summed relative to the old maximum, relative to the new one.
            # A key is its own inverse: the sign stays, so flipping the other bits twice gives them back.
            new = _float_of(_key(bits.dtype.type(high_key)))
            if home >= 0:
                drop = np.float64(top) - np.float64(new)
                scale = np.exp(drop)
                spread = scale * (spread + total * drop)
                total = scale * total
            best, top, home = high_key, new, low
        if home >= 0:
            block_total, block_spread = _sums(block, top)
            total += block_total
            spread += block_spread
    where = home
    if home >= 0:
        while _key(bits[where]) < best:
            where += 1
    return top, where, total, spread


@compiled()
def _margin(bits, top, ids):
    """Largest logit minus the largest among ``ids``; NaN without ids."""
    best = np.float32(-np.inf)
    known = False
    for token in ids:
        if 0 <= token < bits.size:
            known = True
            best = max(best, _float_of(bits[token]))
    return top - best if known else _NAN


@compiled()
def rows_stats(flat, rows, stride, vocab, ending, values, argmax):
    """Statistics of rows that lie ``stride`` apart in ``flat`` (int16 bf16 bits or int32 fp32 bits)."""
    infinity = 0x7F80 if flat.itemsize == 2 else 0x7F800000
    for r in range(rows):
        bits = flat[r * stride : r * stride + vocab]
        top, where, total, spread = _row(bits, infinity)
        argmax[r] = where
        if where < 0:
            values[r, :] = _NAN
            continue
        values[r, 0] = 1.0 / total
        values[r, 1] = max(0.0, np.log(total) - spread / total)
        values[r, 2] = _margin(bits, top, ending[0])
        values[r, 3] = _margin(bits, top, ending[1])
