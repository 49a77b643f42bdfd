"""Commands without an engine: bad arguments, reports, profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from earlystop.cli.app import app
from earlystop.demo.references import SHIPPED
from earlystop.engine import drive


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may start an engine."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(drive.Driver, "__init__", refuse)
    for name in ("EARLYSTOP_CONFIG", "EARLYSTOP_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def _call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def run_arguments(tmp_path: Path) -> list[object]:
    prompts = tmp_path / "p.txt"
    prompts.write_text("hello\n")
    return ["run", "--model", tmp_path, "--prompts", prompts, "--out", tmp_path / "o.jsonl"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--policy", "clasic"], "Did you mean 'classic'"),
        (["--policy", "classic", "--set", "gracee=3"], "gracee"),
        (["--policy", "classic", "--set", "grace=abc"], "earlystop_grace='abc'"),
        (["--policy", "classic", "--set", "grace=-1"], "earlystop_grace=-1"),
        (["--policy", "classic", "--set", "grace=1.5"], "earlystop_grace=1.5"),
        (["--policy", "classic", "--set", "similarity=nan"], "earlystop_similarity=nan"),
        (["--policy", "classic", "--set", "adapt=true"], "write 1 for true"),
        (["--policy", "classic", "--set", "grace"], "name=value"),
        (["--policy", "classic", "--set", "grace=1", "--set", "grace=2"], "twice"),
        (["--policy", "classic", "--set", "id=x"], "id"),
        (["--policy", "classic", "--set", "resume=1"], "earlystop serve"),
        (["--policy", "classic", "--budget", "-3"], "earlystop_budget=-3"),
        (["--policy", "classic", "--budget", "nan"], "earlystop_budget=nan"),
        (["--policy", "classic", "--budget", "1e300"], "earlystop_budget=1e+300"),
        (["--policy", "classic", "--max-tokens", "0"], "--max-tokens 0"),
        (["--policy", "classic", "--temperature", "-1"], "--temperature -1"),
        (["--policy", "classic", "--runner", "v3"], "v3"),
        (["--policy", "classic", "--sampling", "n=2"], "n is not allowed"),
        (["--policy", "classic", "--profile", "classic=x.json"], "preset"),
        (["--policy", "classic", "--profile", "mine=missing.json"], "missing.json"),
        (["--policy", "balanced", "--set", "max_loss=0.01"], "not certified"),
        (["--policy", "classic", "--engine-arg", "x"], "name=value"),
    ],
)
def test_bad_arguments_stop_before_the_engine(run_arguments: list[object], options: list[str], told: str) -> None:
    """A bad value names its field and ends with code 2; no engine starts and no output appears."""
    result = _call(*run_arguments, *options)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())
    assert not Path(str(run_arguments[-1])).exists()


def test_missing_and_empty_prompt_files(run_arguments: list[object], tmp_path: Path) -> None:
    """Both are said by name, before the engine."""
    missing = _call(*run_arguments[:3], "--prompts", tmp_path / "none.txt", *run_arguments[5:], "--policy", "off")
    assert missing.exit_code == 2
    assert "none.txt does not exist" in " ".join(missing.output.split())
    (tmp_path / "p.txt").write_text("\n")
    empty = _call(*run_arguments, "--policy", "off")
    assert empty.exit_code == 2
    assert "is empty" in empty.output


def test_only_broken_lines_need_no_engine(run_arguments: list[object], tmp_path: Path) -> None:
    """Every broken line is reported and has an error line in the output; the exit code says so."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text("{\n\n{}\n")
    result = _call("run", "--model", tmp_path, "--prompts", prompts, "--out", out, "--policy", "classic")
    assert result.exit_code == 3
    assert "line 1 is broken" in result.output
    assert "line 3 is broken" in result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["index"], row["line"]) for row in rows] == [(0, 1), (1, 3)]
    assert all("error" in row for row in rows)


def _line(index: int, tokens: int, **more: Any) -> dict[str, Any]:
    plain = {"reason": None, "finish_reason": "stop", "reasoning_tokens": 0, "signals": []}
    return {"index": index, "text": "", "tokens": tokens, **plain, **more}


def _stopped(index: int, tokens: int, reason: str, saved: int) -> dict[str, Any]:
    summary = {"kind": "summary", "data": {"saved_estimate": {"tokens": saved, "basis": "max_tokens"}}}
    return _line(index, tokens, reason=reason, signals=[{"kind": "budget_warning"}, summary])


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_report_names_the_basis_of_what_was_saved(tmp_path: Path) -> None:
    """Without a plain run the saving is an estimate and says so; with one it is the difference, prompt by prompt."""
    early = _written(tmp_path / "e.jsonl", [_stopped(0, 40, "converged", 60), _line(1, 10), {"index": 2, "error": "x"}])
    plain = _written(tmp_path / "p.jsonl", [_line(0, 90), _line(1, 10), _line(2, 5)])
    estimated = json.loads(_call("report", early, "--json").output)
    assert (estimated["saved"], estimated["errors"], estimated["warnings"]) == (60, 1, 1)
    assert "at most" in estimated["saved_basis"]
    measured = json.loads(_call("report", early, "--plain", plain, "--json").output)
    assert (measured["saved"], measured["saved_share"]) == (50, 0.5)
    assert measured["reasons"] == {"converged": 1, "model: stop": 1}


def test_report_of_an_observed_run_says_what_would_have_been_saved(tmp_path: Path) -> None:
    """`would_stop` is totalled by reason, against the tokens that followed."""
    rows = [
        _line(0, 100, would_stop={"reason": "repetition", "tokens": 30}),
        _line(1, 100, would_stop=None),
    ]
    made = json.loads(_call("report", _written(tmp_path / "o.jsonl", rows), "--json").output)
    assert made["would_stop"] == {"repetition": 1}
    assert (made["would_save"], made["would_save_share"]) == (70, 0.35)


def test_report_draws_a_picture(tmp_path: Path) -> None:
    """--png writes a PNG file."""
    file = _written(tmp_path / "e.jsonl", [_stopped(0, 40, "converged", 60), _line(1, 10)])
    assert _call("report", file, "--png", tmp_path / "r.png").exit_code == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", ["", "{\n", '{"index": 0}\n', "[1]\n"])
def test_report_refuses_what_is_no_run(tmp_path: Path, content: str) -> None:
    """An empty, broken or foreign file is an error that names it."""
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    result = _call("report", file)
    assert result.exit_code == 2
    assert "x.jsonl" in result.output.replace("\n", "")


def test_profile_commands(tmp_path: Path) -> None:
    """The shipped profile is valid; a changed copy differs in the changed field only; a broken one is named."""
    assert _call("profile", "check", SHIPPED).exit_code == 0
    assert "default" in _call("profile", "show", SHIPPED).output
    raw = json.loads(SHIPPED.read_text())
    raw["tasks"]["default"]["references"]["top1_mean"] = 0.5
    other = tmp_path / "other.json"
    other.write_text(json.dumps(raw))
    differing = _call("profile", "diff", SHIPPED, other)
    assert differing.exit_code == 1
    assert "top1_mean" in differing.output
    assert "entropy_mean" not in differing.output
    assert _call("profile", "diff", SHIPPED, SHIPPED).exit_code == 0
    other.write_text("{")
    assert _call("profile", "check", other).exit_code == 2


def test_watch_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without signals `watch --timeout` ends by itself, without an error."""
    assert _call("watch", "--endpoint", f"ipc://{tmp_path}/none.ipc", "--timeout", "0.2").exit_code == 0


def test_help_and_version_exit_cleanly() -> None:
    """Every command explains itself."""
    for command in ("run", "report", "demo", "doctor", "watch", "profile"):
        assert _call(command, "--help").exit_code == 0
    assert "earlystop" in _call("--version").output
