"""The primitives of `portable.py` for numba, and the loops that run a program over all rows."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from earlystop.control.layout import CYCLE_PERIODS, E_CYCLE, E_LOOP, RING, RUNS

inline = numba.njit(inline="always")


@inline
def load(array: Any, index: Any) -> Any:
    return array[index]


@inline
def store(array: Any, index: Any, value: Any) -> None:
    array[index] = value


@inline
def f64(value: Any) -> Any:
    return np.float64(value)


@inline
def real(literal: Any) -> Any:
    return np.float64(literal)


@inline
def i32(value: Any) -> Any:
    return np.int32(value)


@inline
def i64(value: Any) -> Any:
    return np.int64(value)


@inline
def nan() -> Any:
    return np.float64(np.nan)


@numba.njit
def cycle_step(ints: Any, base: Any, token: Any, index: Any) -> Any:
    bits = 0
    for period in range(1, CYCLE_PERIODS + 1):
        run = 0
        if index >= period and ints[base + RING + (index - period) % CYCLE_PERIODS] == token:
            run = ints[base + RUNS + period - 1] + 1
        ints[base + RUNS + period - 1] = run
        if run > 0:
            if run + period >= max(4 * period, 64):
                bits |= E_CYCLE
            if run + period >= max(16 * period, 512):
                bits |= E_LOOP
    ints[base + RING + index % CYCLE_PERIODS] = token
    return bits


@numba.njit
def last_match(tokens: Any, first: Any, count: Any, sequence: Any, start: Any, length: Any) -> Any:
    found = -1
    position = count - length
    while position >= 0 and found < 0:
        same = True
        for i in range(length):
            if tokens[first + position + i] != sequence[start + i]:
                same = False
        if same:
            found = position
        position -= 1
    return found


def start_all(n: Any, *arguments: Any) -> None:
    for p in range(n):
        start_program(p, *arguments)  # type: ignore[name-defined]  # noqa: F821  (bound by lower.py)


def scan_all(n: Any, *arguments: Any) -> None:
    for r in range(n):
        scan_program(r, *arguments)  # type: ignore[name-defined]  # noqa: F821


def judge_all(n: Any, *arguments: Any) -> None:
    for r in range(n):
        judge_program(r, n, *arguments)  # type: ignore[name-defined]  # noqa: F821


LOOPS = (start_all, scan_all, judge_all)
