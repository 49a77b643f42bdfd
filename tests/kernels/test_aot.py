from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every specialisation that serving uses, compiled for sm_90 in a process without the interpreter."""
    pytest.importorskip("triton")
    root = HERE.parent.parent
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(HERE / "aot.py")]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if any("stopped" in row for row in rows):
        pytest.skip(f"no ptxas here: {rows[0]}")
    return {row["kernel"]: row for row in rows}


def test_every_kernel_compiles_for_hopper_without_spilling(kernels: dict[str, dict[str, Any]]) -> None:
    """A cubin each, and no register spilled to local memory."""
    assert len(kernels) >= 20
    assert all(row["cubin_bytes"] > 0 for row in kernels.values())
    assert {name for name, row in kernels.items() if row.get("stack", 0)} == set()


def test_the_statistics_loop_is_as_narrated(kernels: dict[str, dict[str, Any]]) -> None:
    """16-byte loads, flushing exponentials, no layout change, registers that leave two CTAs of 16 warps an SM."""
    for dtype in ("bf16", "fp16", "fp32"):
        for split in (False, True):
            row = kernels[f"stats {dtype} split={split}"]
            assert row["wide_loads"] >= 8
            assert row["exp2"] > 0
            assert row["layout_changes"] == 0
            assert row.get("reg", 0) <= 64  # of 65,536 an SM: 32 warps resident
    assert kernels["stats odd vocab"]["wide_loads"] >= 4  # the whole tiles; only the last one is masked
