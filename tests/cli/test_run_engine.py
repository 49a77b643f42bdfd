"""`earlystop run` through the real engine, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_PROMPTS = ("Write a poem about the sea.", "Explain how bread is made.")


def _command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--model", str(model), "--prompts", str(prompts), "--out", str(out), "--temperature", "0"]
    engine = ["--engine-arg", "max_model_len=512", "--runner", "v1"]
    return [sys.executable, "-m", "earlystop", "run", *fixed, *engine, *more]


def _environment() -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=_environment(), check=False)


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _kinds(row: dict[str, Any]) -> list[str]:
    return [signal["kind"] for signal in row["signals"]]


def test_broken_lines_budget_and_an_end_of_the_models_own(smollm2: Path, tmp_path: Path) -> None:
    """Valid lines run around a broken one; a binding budget warns once and sums up once.

    Each line's `used` counts every generated token, the last one that the worker never saw included.
    """
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    lines = [json.dumps({"prompt": _PROMPTS[0], "id": "sea"}), "{broken", json.dumps({"prompt": _PROMPTS[1]})]
    too_long = json.dumps({"prompt": [5] * 600})
    prompts.write_text("\n".join([*lines, too_long]) + "\n")
    options = ["--policy", "classic", "--budget", "12", "--set", "grace=24", "--max-tokens", "60"]
    done = _run(_command(smollm2, prompts, out, *options))
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert "line 2 is broken" in done.stderr
    assert "line 4 cannot be run" in done.stderr
    rows = _rows(out)
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[1].keys() == {"index", "line", "error"}
    assert "600 tokens" in rows[3]["error"]
    assert rows[0]["id"] == "sea"
    for row in (rows[0], rows[2]):
        assert row["reason"] == "budget"
        assert row["tokens"] == len(row["token_ids"]) <= 12 + 24 + 1
        assert row["used"] == row["tokens"]
        assert row["budget"] == 12
        assert [_kinds(row).count(kind) for kind in ("budget_warning", "stop_decided", "stopped", "summary")] == [1] * 4
        assert [signal["seq"] for signal in row["signals"]] == list(range(len(row["signals"])))


def test_a_killed_run_is_resumed_to_the_same_output(smollm2: Path, tmp_path: Path) -> None:
    """After SIGKILL in mid-run, --resume adds what is missing, and every line stands once, in order, with its text."""
    prompts, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text("\n".join(_PROMPTS * 4) + "\n")
    command = _command(
        smollm2, prompts, out, "--policy", "observe", "--max-tokens", "24", "--engine-arg", "max_num_seqs=1"
    )
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=_environment())
    until = time.monotonic() + 300
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with out.open("ab") as file:
        file.write(b'{"index": ')
    before = len(_rows(out)) if out.read_bytes().endswith(b"\n") else out.read_bytes().count(b"\n")
    assert 2 <= before < 8
    done = _run([*command, "--resume"])
    assert done.returncode == 0, done.stderr
    rows = _rows(out)
    assert [row["index"] for row in rows] == list(range(8))
    assert all("would_stop" in row and row["signals"][-1]["kind"] == "summary" for row in rows)
    assert [row["text"] for row in rows] == [rows[0]["text"], rows[1]["text"]] * 4
    again = _run([*command, "--resume"])
    assert again.returncode == 0
    assert "already" in again.stderr


def test_off_opts_nobody_in(smollm2: Path, tmp_path: Path) -> None:
    """`--policy off` is plain vLLM: no signals but the summary, no reason, the asked number of tokens."""
    prompts, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text(_PROMPTS[0] + "\n")
    done = _run(_command(smollm2, prompts, out, "--policy", "off", "--max-tokens", "16"))
    assert done.returncode == 0, done.stderr
    (row,) = _rows(out)
    assert (row["tokens"], row["reason"], row["finish_reason"], row["used"]) == (16, None, "length", None)
    assert _kinds(row) == ["summary"]
