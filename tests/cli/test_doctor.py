"""`earlystop doctor` as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # each imports vLLM


def _doctor(**env: str) -> tuple[int, dict[str, Any]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EARLYSTOP_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "earlystop", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean, **env},
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def _faults(report: dict[str, Any]) -> dict[str, str]:
    return {f["name"]: f["text"] for f in report["findings"] if f["state"] == "fault"}


def test_a_working_installation() -> None:
    """Here everything is installed: exit 0, and both of vLLM's loaders take the plugin."""
    code, report = _doctor()
    assert code == 0, report
    assert report["works"] is True
    names = {finding["name"]: finding["text"] for finding in report["findings"]}
    assert "EarlyStopLogitsProcessor" in names["plugin, V1"]
    assert "EarlyStopLogitsProcessor" in names["plugin, V2"]


def test_what_does_not_work_is_named_with_a_remedy(tmp_path: Path) -> None:
    """A switch that is off, and a configuration with a broken profile: exit 1, each by name."""
    (tmp_path / "bad.json").write_text("{")
    config = tmp_path / "c.toml"
    config.write_text('[profiles]\nmine = "bad.json"\n')
    code, report = _doctor(EARLYSTOP_DISABLE="1", EARLYSTOP_CONFIG=str(config))
    assert code == 1
    faults = _faults(report)
    assert set(faults) == {"switch", "profile mine"}
    assert "bad.json" in faults["profile mine"]
    assert all(finding["remedy"] for finding in report["findings"] if finding["state"] == "fault")
