"""Reading a file of prompts: JSON lines or plain text, with every broken line named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from earlystop.engine.drive import Prompt
from earlystop.errors import ConfigError
from earlystop.policy import MAX_TOKENS, Policy

JSON_SUFFIXES = (".jsonl", ".ndjson")


class Line(msgspec.Struct, frozen=True):
    """One prompt line: a prompt, or what is wrong with it."""

    index: int
    """Its place among the file's non-empty lines, from 0."""
    number: int
    """Its line number in the file, from 1."""
    prompt: Prompt | None
    fault: str | None = None


def read_prompts(path: Path, *, raw: bool = False) -> list[Line]:
    """The non-empty lines of a prompt file.

    A file called ``*.jsonl`` or ``*.ndjson`` holds JSON objects with `prompt` (a text, or a list of token ids) or
    `messages`, optionally `id` and `max_tokens`; other fields are ignored. Any other file holds one prompt a line.

    Args:
        path: the file.
        raw: takes texts as they are, without the chat template.

    Raises:
        ConfigError: the file cannot be read, or holds no prompt.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"prompts {path} cannot be read: {error.strerror or error}", field="prompts") from error
    as_json = path.suffix.lower() in JSON_SUFFIXES
    lines: list[Line] = []
    ids: dict[str, int] = {}
    for number, bytes_ in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not bytes_.strip():
            continue
        index = len(lines)
        try:
            text = bytes_.decode("utf-8").strip()
            prompt = _from_json(index, text, raw) if as_json else Prompt(index=index, text=text, raw=raw)
            if prompt.id is not None and ids.setdefault(prompt.id, number) != number:
                raise ValueError(f"id {prompt.id!r} was used in line {ids[prompt.id]} already")
            lines.append(Line(index, number, prompt))
        except UnicodeDecodeError as error:
            lines.append(Line(index, number, None, f"not UTF-8: {error.reason} at byte {error.start}"))
        except ValueError as error:
            lines.append(Line(index, number, None, str(error)))
    if not lines:
        raise ConfigError(f"prompts {path} is empty: give one prompt a line", field="prompts")
    return lines


def _from_json(index: int, text: str, raw: bool) -> Prompt:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"holds {type(fields).__name__}, not an object with `prompt` or `messages`")
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("needs exactly one of `prompt` and `messages`")
    stream, limit = fields.get("id"), fields.get("max_tokens")
    if stream is not None:
        stream = str(stream) if isinstance(stream, int) and not isinstance(stream, bool) else stream
        Policy(id=stream)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_TOKENS):
        raise ValueError(f"max_tokens={limit!r} is not allowed: give a whole number of at least 1")
    common: dict[str, Any] = {"index": index, "id": stream, "max_tokens": limit, "raw": raw}
    if "messages" in fields:
        return Prompt(**common, messages=_messages(fields["messages"]))
    prompt = fields["prompt"]
    if isinstance(prompt, str) and prompt.strip():
        return Prompt(**common, text=prompt)
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in prompt)
    ):
        return Prompt(**common, token_ids=prompt)
    raise ValueError("`prompt` must be a text that is not empty, or a list of token ids")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` must be a list that is not empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"messages[{i}] must be an object with `role` and `content`")
    return messages
