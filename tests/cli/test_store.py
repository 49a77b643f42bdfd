"""The output file: in order, whole lines, resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.cli.store import Store
from earlystop.errors import ConfigError

META = {"policy": {"policy": "classic"}, "prompts": "abc"}


def _rows(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def _row(index: int) -> dict[str, Any]:
    return {"index": index, "text": f"é{index}"}


def test_lines_are_in_order_whatever_finishes_first(tmp_path: Path) -> None:
    """Results that finish early wait for those before them, and the journal is gone at the end."""
    out = tmp_path / "o.jsonl"
    with Store(out, META, resume=False) as store:
        for index in (2, 0, 3, 1):
            store.add(_row(index))
    assert _rows(out) == [0, 1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.jsonl", "o.jsonl.meta.json"]


@given(order=st.permutations(range(6)), cut=st.integers(0, 6), torn=st.integers(0, 12))
def test_a_kill_loses_nothing_that_was_finished(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cut: int, torn: int
) -> None:
    """After a kill at any point, even in the middle of a line, the resumed run misses what was never added, only."""
    out = tmp_path_factory.mktemp("store") / "o.jsonl"
    killed = Store(out, META, resume=False).__enter__()  # never closed: the process is gone
    for index in order[:cut]:
        killed.add(_row(index))
    with out.open("ab") as file:
        file.write(json.dumps(_row(99)).encode()[:torn])
    store = Store(out, META, resume=True)
    assert store.done == set(order[:cut])
    with store:
        for index in sorted(set(range(6)) - store.done):
            store.add(_row(index))
    assert _rows(out) == list(range(6))
    assert not Path(f"{out}.held.jsonl").exists()


def test_output_of_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    """A file that holds something is refused without --resume; an empty one is taken."""
    out = tmp_path / "o.jsonl"
    out.touch()
    Store(out, META, resume=False)
    out.write_text("precious\n")
    with pytest.raises(ConfigError, match="--resume"):
        Store(out, META, resume=False)
    assert out.read_text() == "precious\n"


def test_another_run_is_not_resumed(tmp_path: Path) -> None:
    """Other settings or prompts are refused, and the error says which."""
    out = tmp_path / "o.jsonl"
    with Store(out, META, resume=False) as store:
        store.add(_row(0))
    with pytest.raises(ConfigError, match=r"prompts was .abc., is .xyz.") as caught:
        Store(out, {**META, "prompts": "xyz"}, resume=True)
    assert caught.value.field == "prompts"


def test_without_its_meta_file_a_run_is_not_resumed(tmp_path: Path) -> None:
    """Nobody can tell then whether it is the same run."""
    out = tmp_path / "o.jsonl"
    out.write_text('{"index": 0}\n')
    with pytest.raises(ConfigError, match=r"meta\.json is missing"):
        Store(out, META, resume=True)


def test_foreign_lines_are_refused(tmp_path: Path) -> None:
    """A file whose indexes do not count from 0 is somebody else's."""
    out = tmp_path / "o.jsonl"
    with Store(out, META, resume=False) as store:
        store.add(_row(0))
    out.write_text('{"index": 5}\n')
    with pytest.raises(ConfigError, match="index 5"):
        Store(out, META, resume=True)


def test_resume_without_a_start_begins(tmp_path: Path) -> None:
    """A run that was killed before it began is simply begun."""
    with Store(tmp_path / "o.jsonl", META, resume=True) as store:
        assert store.done == set()
        store.add(_row(0))


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    """The output's folder must exist before an engine is started for it."""
    with pytest.raises(ConfigError, match="no folder"):
        Store(tmp_path / "none" / "o.jsonl", META, resume=False)
