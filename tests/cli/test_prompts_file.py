"""Reading prompt files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from earlystop.cli.prompts_file import read_prompts
from earlystop.errors import ConfigError


def _file(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_text_one_prompt_a_line(tmp_path: Path) -> None:
    """A text file holds one prompt a line; empty lines count for line numbers only, CRLF and a BOM are no content."""
    lines = read_prompts(_file(tmp_path, "p.txt", b"\xef\xbb\xbffirst\r\n\n  \nsecond"))
    assert [(line.index, line.number, line.prompt and line.prompt.text) for line in lines] == [
        (0, 1, "first"),
        (1, 4, "second"),
    ]


def test_jsonl_takes_texts_conversations_and_token_ids(tmp_path: Path) -> None:
    """JSON lines hold a prompt or messages, with an id and a limit of their own; other fields are ignored."""
    rows = [
        {"prompt": "hi", "id": "a", "max_tokens": 7, "answer": 4},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": [1, 2, 3], "id": 12},
    ]
    lines = read_prompts(_file(tmp_path, "p.jsonl", "\n".join(map(json.dumps, rows))))
    first, second, third = (line.prompt for line in lines)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.text, first.id, first.max_tokens) == ("hi", "a", 7)
    assert second.messages == rows[1]["messages"]
    assert (third.token_ids, third.id) == ([1, 2, 3], "12")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "JSON"),
        ("[1]", "list"),
        ('"text"', "str"),
        ("{}", "exactly one"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": " "}', "prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": []}', "prompt"),
        ('{"prompt": [true]}', "prompt"),
        ('{"prompt": [-1]}', "prompt"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user"}]}', "messages[0]"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens"),
        ('{"prompt": "a", "id": ""}', "earlystop_id"),
        ('{"prompt": "a", "id": [1]}', "earlystop_id"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_others_live(tmp_path: Path, line: str, told: str) -> None:
    """A broken line keeps its place with its fault, and the lines around it are read."""
    lines = read_prompts(_file(tmp_path, "p.jsonl", f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n'))
    assert [one.prompt is not None for one in lines] == [True, False, True]
    assert lines[1].number == 2
    assert told in (lines[1].fault or "")


def test_bytes_that_are_no_text_break_their_line_only(tmp_path: Path) -> None:
    """A line that is not UTF-8 is a broken line, not a broken file."""
    lines = read_prompts(_file(tmp_path, "p.txt", b"good\n\xff\xfe\ngood"))
    assert [one.fault is None for one in lines] == [True, False, True]
    assert "UTF-8" in (lines[1].fault or "")


def test_an_id_twice_breaks_the_second_line(tmp_path: Path) -> None:
    """Stream ids tell signals apart, so a second line with the same id is refused and names the first."""
    lines = read_prompts(_file(tmp_path, "p.jsonl", '{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}'))
    assert lines[0].fault is None
    assert "line 1" in (lines[1].fault or "")


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file without a prompt is an error that names the file."""
    with pytest.raises(ConfigError, match=r"p\.txt is empty"):
        read_prompts(_file(tmp_path, "p.txt", content))
