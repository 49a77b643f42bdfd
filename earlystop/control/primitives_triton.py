"""The primitives of `portable.py` for Triton. Kernels run with one warp: one program is one request."""

from __future__ import annotations

# Triton evaluates annotations of device functions, so there are none but constexpr.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
import triton
import triton.language as tl

from earlystop.control import layout

_PERIODS = tl.constexpr(layout.CYCLE_PERIODS)
_RING = tl.constexpr(layout.RING)
_RUNS = tl.constexpr(layout.RUNS)
_E_CYCLE = tl.constexpr(layout.E_CYCLE)
_E_LOOP = tl.constexpr(layout.E_LOOP)
_BLOCK = tl.constexpr(1024)


@triton.jit
def load(array, index):
    return tl.load(array + index)


@triton.jit
def store(array, index, value):
    tl.store(array + index, value)


@triton.jit
def f64(value):
    return value.to(tl.float64)


@triton.jit
def real(literal: tl.constexpr):
    return tl.full((), literal, tl.float64)


@triton.jit
def i32(value):
    return tl.cast(value, tl.int32)


@triton.jit
def i64(value):
    return tl.cast(value, tl.int64)


@triton.jit
def nan():
    return tl.full((), float("nan"), tl.float64)


@triton.jit
def cycle_step(ints, base, token, index):
    """All periods at once: lane o holds period o + 1. See `portable.cycle_step` for the loop."""
    lane = tl.arange(0, _PERIODS)
    period = lane + 1
    before = tl.load(ints + base + _RING + (index - period + 2 * _PERIODS) % _PERIODS)
    runs = tl.load(ints + base + _RUNS + lane)
    runs = tl.where((before == token) & (index >= period), runs + 1, 0)
    total = runs + period
    short = tl.where((runs > 0) & (total >= tl.maximum(4 * period, 64)), _E_CYCLE, 0)
    long = tl.where((runs > 0) & (total >= tl.maximum(16 * period, 512)), _E_LOOP, 0)
    tl.debug_barrier()
    tl.store(ints + base + _RUNS + lane, runs)
    tl.store(ints + base + _RING + index % _PERIODS, token)
    tl.debug_barrier()
    return tl.max(short, axis=0) | tl.max(long, axis=0)


@triton.jit
def last_match(tokens, first, count, sequence, start, length):
    """Backwards in vectors of 1024 positions: prompts are long, and may lie in host memory."""
    found = -1
    high = count
    while (high > 0) & (found < 0):
        low = tl.maximum(high - _BLOCK, 0)
        position = low + tl.arange(0, _BLOCK)
        same = (position < high) & (position + length <= count)
        for i in range(length):
            wanted = tl.load(sequence + start + i)
            here = tl.load(tokens + first + position + i, mask=position + i < count, other=-1)
            same = same & (here == wanted)
        found = tl.max(tl.where(same, position, -1), axis=0)
        high = low
    return found
