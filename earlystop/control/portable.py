"""The few primitives in which the decision is written, in plain Python.

Every function of `text`, `scan`, `budget`, `rules`, `closing` and `decide` uses only scalar arithmetic,
`if`, `while`, `for range()` and the names below. `lower.py` compiles the same source twice, binding these
names to numba's or Triton's version; run without it, the source is ordinary Python over numpy arrays, which
is the oracle of the tests. What a backend must keep: int32 state, float64 arithmetic, no fused
multiply-add, no reordering.
"""

from __future__ import annotations

from typing import Any

from earlystop.control.layout import CYCLE_PERIODS, E_CYCLE, E_LOOP, RING, RUNS


def load(array: Any, index: Any) -> Any:
    """`array[index]` of a flat array."""
    return array[index]


def store(array: Any, index: Any, value: Any) -> None:
    """`array[index] = value` of a flat array."""
    array[index] = value


def f64(value: Any) -> Any:
    """A loaded or computed `value` as float64."""
    return float(value)


def real(literal: Any) -> Any:
    """A literal as float64 (Triton would take it for float32)."""
    return float(literal)


def nan() -> Any:
    """The undefined float64."""
    return float("nan")


def i64(value: Any) -> Any:
    """`value` as int64, for hashes that must not wrap at 32 bits."""
    return int(value)


def i32(value: Any) -> Any:
    """`value` as int32."""
    return int(value)


def cycle_step(ints: Any, base: Any, token: Any, index: Any) -> Any:
    """Takes the response's token number `index` into the ring; returns E_CYCLE and E_LOOP bits.

    `ints[base + RUNS + p - 1]` counts the tokens in a row that equal the one p before, so the last
    run + p tokens are a cycle of period p. Rule 7: at least 4 times and 64 tokens in all; in fences, JSON
    and tool calls 16 times and 512.
    """
    bits = 0
    for period in range(1, CYCLE_PERIODS + 1):
        run = 0
        if ints[base + RING + (index - period) % CYCLE_PERIODS] == token and index >= period:
            run = ints[base + RUNS + period - 1] + 1
        ints[base + RUNS + period - 1] = run
        if run + period >= max(4 * period, 64):
            bits = bits | E_CYCLE
        if run + period >= max(16 * period, 512):
            bits = bits | E_LOOP
    ints[base + RING + index % CYCLE_PERIODS] = token
    return bits


def last_match(tokens: Any, first: Any, count: Any, sequence: Any, start: Any, length: Any) -> Any:
    """Last position in tokens[first : first + count] where sequence[start : start + length] begins, or -1."""
    for position in range(count - length, -1, -1):
        if all(tokens[first + position + i] == sequence[start + i] for i in range(length)):
            return position
    return -1
