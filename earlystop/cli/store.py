"""The output file of a run: one line a prompt, in order, written as results come, and resumable after a kill.

Beside OUT lie OUT.meta.json, what was run, and while it runs OUT.held.jsonl: results that wait for an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from earlystop.errors import ConfigError


def fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Store:
    """Where a run's lines go.

    Args:
        path: OUT.
        meta: what is run, JSON types; a resumed run must be the same.
        resume: go on where a run stopped.

    Raises:
        ConfigError: OUT holds something and `resume` is not set; a resumed run differs, or OUT is not its output.
    """

    def __init__(self, path: Path, meta: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self._meta_path = Path(f"{path}.meta.json")
        self._held_path = Path(f"{path}.held.jsonl")
        self._held: dict[int, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        """Lines that were there already, in order."""
        self._meta = {key: json.loads(json.dumps(value)) for key, value in meta.items()}
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is no folder, so {path.name} cannot be written there", field="out")
        if resume:
            self._check_meta()
            self._load()
        elif path.exists() and path.stat().st_size:
            raise ConfigError(
                f"{path} is not empty: --resume goes on with it, or give another --out or remove it", field="out"
            )
        else:
            self._held_path.unlink(missing_ok=True)
        self._next = len(self.rows)
        self._file: Any = None
        self._held_file: Any = None

    @property
    def done(self) -> set[int]:
        """Indexes that need not be run."""
        return {*range(len(self.rows)), *self._held}

    def _check_meta(self) -> None:
        started = self.path.exists() and self.path.stat().st_size
        if not self._meta_path.is_file():
            if started:
                raise ConfigError(f"{self.path} cannot be resumed: {self._meta_path.name} is missing", field="out")
            return
        try:
            before = json.loads(self._meta_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self._meta_path} is broken: {error}", field="out") from error
        changed = [key for key in self._meta if before.get(key) != self._meta[key]]
        if changed:
            told = "; ".join(f"{key} was {_brief(before.get(key))}, is {_brief(self._meta[key])}" for key in changed)
            raise ConfigError(f"{self.path} cannot be resumed, this run differs from it: {told}", field=changed[0])

    def _load(self) -> None:
        whole = self._whole_lines(self.path)
        for row in whole:
            if row.get("index") != len(self.rows):
                raise ConfigError(
                    f"{self.path} is not this run's output: line {len(self.rows) + 1} has index {row.get('index')!r}",
                    field="out",
                )
            self.rows.append(row)
        for row in self._whole_lines(self._held_path):
            if isinstance(row.get("index"), int) and row["index"] >= len(self.rows):
                self._held[row["index"]] = row

    @staticmethod
    def _whole_lines(path: Path) -> list[dict[str, Any]]:
        """The lines of a file; a last one that a kill has cut is taken off it."""
        if not path.exists():
            return []
        data = path.read_bytes()
        rows: list[dict[str, Any]] = []
        good = 0
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {len(rows) + 1} is broken: {error}", field="out") from error
            rows.append(row)
            good += len(line)
        if good < len(data):
            os.truncate(path, good)
        return rows

    def __enter__(self) -> Self:
        try:
            part = Path(f"{self._meta_path}.part")
            part.write_text(json.dumps(self._meta, indent=2) + "\n", encoding="utf-8")
            part.replace(self._meta_path)
            self._file = self.path.open("ab")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}", field="out") from error
        self._release()
        return self

    def add(self, row: dict[str, Any]) -> None:
        """Takes one line; it is in the file, or in the journal of those that wait, when this returns."""
        if row["index"] != self._next:
            if self._held_file is None:
                self._held_file = self._held_path.open("ab")
            self._write(self._held_file, row)
        self._held[row["index"]] = row
        self._release()

    def _release(self) -> None:
        while self._next in self._held:
            self._write(self._file, self._held.pop(self._next))
            self._next += 1

    @staticmethod
    def _write(file: Any, row: dict[str, Any]) -> None:
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        file.flush()

    def __exit__(self, *_: object) -> None:
        for file in (self._file, self._held_file):
            if file is not None:
                file.close()
        if not self._held:
            self._held_path.unlink(missing_ok=True)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
