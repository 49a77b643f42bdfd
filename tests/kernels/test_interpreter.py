from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import BACKENDS

HERE = Path(__file__).parent


@pytest.mark.skipif("triton" in BACKENDS, reason="this is the run that the test starts")
@pytest.mark.parametrize("module", ["test_stats.py", "test_mask.py", "test_similarity.py"])
def test_triton_kernels_under_the_interpreter(module: str) -> None:
    """The Triton kernels pass the very tests of the CPU path.

    In a process of their own: Triton reads TRITON_INTERPRET while it is imported, and vLLM may have imported it here.
    """
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", str(HERE / module), "-q", "-p", "no:cacheprovider"]
    # The interpreter is numpy: what a GPU does silently (NaN in a maximum, overflow to inf) warns there.
    command += ["-W", "ignore::RuntimeWarning"]
    env = os.environ | {"TRITON_INTERPRET": "1", "EARLYSTOP_TEST_KERNELS": "triton", "EARLYSTOP_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, env=env, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
