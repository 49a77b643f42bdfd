"""One source, three targets: binds the portable functions to numba, to Triton or to plain Python.

The functions of `text`, `scan`, `budget`, `rules`, `closing`, `decide` and of the programs only name each other,
the constants of `layout` and the primitives of `portable`. Rebinding those names in a fresh namespace and
compiling every function there gives the same decision on a CPU (numba, which vLLM brings) and on a GPU
(Triton), to the bit: int32 and float64 arithmetic, fused multiply-add off in both.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from earlystop.control import (
    budget,
    closing,
    commit,
    decide,
    drafts,
    layout,
    portable,
    replay,
    rules,
    scan,
    start,
    step,
    text,
    tokens,
)

REPLAY: tuple[Any, ...] = (replay.note_state, replay.replay_program)  # the rest of that module is host code
MODULES: tuple[ModuleType, ...] = (text, scan, closing, budget, rules, decide, tokens, start, commit, drafts, step)
PRIMITIVES = ("load", "store", "f64", "real", "i32", "i64", "nan", "cycle_step", "last_match")


def portable_functions() -> list[FunctionType]:
    """Every function of the portable modules, in an order in which callees come first."""
    whole = [
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]
    return [*whole, *REPLAY]


def constants() -> dict[str, int | float]:
    """The named numbers of the layout and of the portable modules."""
    return {
        name: value
        for module in (layout, *MODULES)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, (int, float))
    }


def source_hash() -> str:
    """SHA-256 of the decision's source: a certified profile names the code that it was certified with."""
    digest = hashlib.sha256()
    for module in (layout, portable, *MODULES):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def twin_of(function: Callable[..., Any], namespace: dict[str, Any]) -> FunctionType:
    """The same code with `namespace` as its globals."""
    twin = FunctionType(function.__code__, namespace, function.__name__)
    twin.__module__ = function.__module__
    twin.__qualname__ = function.__qualname__
    return twin


def rebind(compile_one: Callable[[FunctionType], Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Compiles every portable function with `namespace` as its globals; returns that namespace."""
    for function in portable_functions():
        namespace[function.__name__] = compile_one(twin_of(function, namespace))
    return namespace


@cache
def python_namespace() -> dict[str, Any]:
    """The plain functions, as the tests' oracle calls them."""
    return {function.__name__: function for function in portable_functions()}


@cache
def numba_namespace() -> dict[str, Any]:
    """The functions compiled by numba, with its on-disk cache keyed by the source of all of them.

    numba's own key knows only the file of the outermost function, and would run stale callees.
    """
    import numba

    from earlystop.control import primitives_numba

    root = Path(os.environ.get("EARLYSTOP_CACHE", Path.home() / ".cache" / "earlystop"))
    folder = root / "numba" / source_hash()[:16]
    before = numba.config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cached = os.access(folder, os.W_OK)
    except OSError:  # a read-only home: compile in memory, some seconds at every start
        cached = False
    namespace: dict[str, Any] = {**constants(), "range": range}
    namespace |= {name: getattr(primitives_numba, name) for name in PRIMITIVES}
    try:
        if cached:
            numba.config.CACHE_DIR = str(folder)
        compile_one: Callable[[FunctionType], Any] = numba.njit(cache=cached, nogil=True)
        rebind(compile_one, namespace)
        for loop in primitives_numba.LOOPS:
            namespace[loop.__name__] = compile_one(twin_of(loop, namespace))
    finally:
        numba.config.CACHE_DIR = before
    return namespace


@cache
def triton_namespace() -> dict[str, Any]:
    """The functions as Triton device functions; `triton_kernels.py` holds the kernels around them."""
    import triton
    import triton.language as tl

    from earlystop.control import primitives_triton, triton_kernels

    namespace: dict[str, Any] = {name: tl.constexpr(value) for name, value in constants().items()}
    namespace |= {name: getattr(primitives_triton, name) for name in PRIMITIVES}
    namespace |= {"tl": tl, "range": range, "Any": tl.tensor}
    rebind(triton.jit, namespace)
    for kernel in triton_kernels.KERNELS:
        # One compiled form, whatever the batch: Triton would make another for 1 row, for multiples of 16 and for
        # slices that do not begin at 16 bytes, in the middle of serving. Scalar code gains nothing from knowing.
        names = list(inspect.signature(kernel).parameters)
        namespace[kernel.__name__] = triton.jit(
            twin_of(kernel, namespace),
            do_not_specialize=[name for name in names if name in ("n_rows", "scratch")],
            do_not_specialize_on_alignment=names,
        )
    return namespace
