"""One source, three targets: plain Python, numba and Triton give the same bits; Triton compiles without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from earlystop.control import lower
from earlystop.control.state import Controller

from .harness import PlainController
from .histories import play_history

ROOT = Path(__file__).parent.parent.parent
STATE = ("ints", "floats", "grams", "drafts", "stored", "pending", "pending_argmax", "pending_plan")


def assert_same(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> None:
    """Two recordings of a history are equal to the bit (NaN equals NaN)."""
    assert len(ours) == len(theirs)
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], err_msg=f"{name} after step {step}")


@pytest.mark.parametrize("seed", range(12))
def test_numba_is_plain_python_to_the_bit(seed: int) -> None:
    """State, verdicts, reports and traces after every step of a random history."""
    assert_same(play_history(seed, Controller), play_history(seed, PlainController))


def test_triton_is_numba_to_the_bit() -> None:
    """The kernels, under Triton's interpreter, in a process of its own: it reads TRITON_INTERPRET on import."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-m", "control.interpreted"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.strip().endswith("histories equal")


def test_triton_compiles_for_hopper_without_a_gpu() -> None:
    """All kernels become cubins for sm_90, one warp, no fused multiply-add."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "control.aot"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ptxas" in done.stderr:
        pytest.skip("no ptxas here")
    assert done.returncode == 0, done.stderr[-6000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["start_kernel", "scan_kernel", "judge_kernel"]


def test_every_name_of_the_source_is_a_constant_a_function_or_a_primitive() -> None:
    """The portable subset: no builtin but range, no attribute, no early return, no conditional expression."""
    import ast
    import builtins
    import inspect
    import textwrap

    names = {*lower.constants(), *lower.python_namespace(), *lower.PRIMITIVES, "range", "Any"}
    for function in lower.portable_functions():
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        local = {a.arg for a in tree.args.args}
        local |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - local
        unknown = {name for name in used - names if name != "None"}
        assert not unknown, (function.__name__, unknown, unknown & set(dir(builtins)))
        forbidden = (ast.IfExp, ast.BoolOp, ast.Attribute, ast.Subscript, ast.Try, ast.Break, ast.Continue)
        found = [type(n).__name__ for n in ast.walk(tree) if isinstance(n, forbidden)]
        assert not found, (function.__name__, found)
        returns = [n for n in ast.walk(tree) if isinstance(n, ast.Return)]
        assert not returns or returns == [tree.body[-1]], function.__name__


def test_the_source_hash_follows_the_source() -> None:
    """A certified profile names the code that it was certified with: stable, and of every module."""
    assert lower.source_hash() == lower.source_hash()
    assert len(lower.source_hash()) == 64
