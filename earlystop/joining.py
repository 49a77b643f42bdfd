"""Which signals belong to which of vLLM's outputs, and how many of a response's tokens were thinking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from earlystop.bus.sequence import check_gapless
from earlystop.errors import StreamError
from earlystop.request_ids import match
from earlystop.signals import Signal

Tags = tuple[Sequence[int], Sequence[int]]
"""Token ids of the opening and of the closing thinking tag, each of one token or more."""
_Choice = tuple[str, int]
_Stream = tuple[str, int | None]


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one of vLLM's outputs with its signals."""

    request_id: str
    """vLLM's external id."""
    completion: Any
    """vLLM's ``CompletionOutput``."""
    first: bool
    """Whether it is the request's first choice."""
    prompt_token_ids: Sequence[int] | None
    cached_tokens: int
    signals: list[Signal]
    """In order of `seq`."""
    next_seq: int
    """One past the stream's last `seq`."""
    warnings: list[str]


def join(outputs: Iterable[Any], signals: Sequence[Signal]) -> list[Joined]:
    """Each finished choice of the outputs with its signals, in the order of the outputs.

    Args:
        outputs: vLLM's ``RequestOutput`` objects: ``request_id``, ``outputs`` and, where they have them,
            ``prompt_token_ids`` and ``num_cached_tokens``.
        signals: Signals of any streams.

    Raises:
        StreamError: Outputs are deltas, or one response came twice.
    """
    finals = _finals(outputs)
    choices: defaultdict[str, set[int]] = defaultdict(set)
    for request_id, index in finals:
        choices[request_id].add(index)
    by_choice, next_seq, broken = _sorted_out(signals, choices)
    joined = []
    for (request_id, index), (output, completion) in finals.items():
        mine, warnings = _pick(by_choice.get((request_id, index), {}), len(completion.token_ids))
        streams = {(s.id, s.index) for s in mine}
        joined.append(
            Joined(
                request_id=request_id,
                completion=completion,
                first=index == min(choices[request_id]),
                prompt_token_ids=getattr(output, "prompt_token_ids", None),
                cached_tokens=getattr(output, "num_cached_tokens", None) or 0,
                signals=mine,
                next_seq=max((next_seq[stream] for stream in streams), default=0),
                warnings=warnings + [broken[stream] for stream in streams if stream in broken],
            )
        )
    return joined


def _finals(outputs: Iterable[Any]) -> dict[_Choice, tuple[Any, Any]]:
    """The last output of each choice; earlier ones of a cumulative stream are its beginnings."""
    finals: dict[_Choice, tuple[Any, Any]] = {}
    for output in outputs:
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            _, former = finals.get(key, (None, None))
            if former is not None:
                _must_continue(key, former, completion)
            finals[key] = (output, completion)
    return finals


def _must_continue(key: _Choice, former: Any, later: Any) -> None:
    before, after = list(former.token_ids), list(later.token_ids)
    grows = len(after) > len(before) or later.finish_reason == "abort"
    if former.finish_reason is not None or not grows or after[: len(before)] != before:
        raise StreamError(
            f"request {key[0]!r}, choice {key[1]}: two outputs, and the later one does not continue the earlier one; "
            "pass final or cumulative outputs (output_kind FINAL_ONLY or CUMULATIVE, not DELTA), of one engine"
        )


def _sorted_out(
    signals: Sequence[Signal], choices: dict[str, set[int]]
) -> tuple[dict[_Choice, dict[str, list[Signal]]], dict[_Stream, int], dict[_Stream, str]]:
    """Signals by choice and internal id; each stream's next `seq`; what is wrong with streams that have gaps."""
    streams: defaultdict[_Stream, list[Signal]] = defaultdict(list)
    for signal in signals:
        streams[signal.id, signal.index].append(signal)
    by_choice: defaultdict[_Choice, dict[str, list[Signal]]] = defaultdict(dict)
    next_seq: dict[_Stream, int] = {}
    broken: dict[_Stream, str] = {}
    for stream, members in streams.items():
        next_seq[stream] = 1 + max(s.seq for s in members)
        try:
            check_gapless(members)
        except StreamError as error:
            broken[stream] = f"signals are not complete: {error}"
        internals = {_request_id(s) for s in members} - {None}
        alone = internals.pop() if len(internals) == 1 else None
        for signal in members:
            # A record that does not say whose it is belongs to the only request of its stream.
            internal = _request_id(signal) or alone
            choice = match(internal, choices) if internal else _by_stream(stream, choices)
            if choice is not None:
                by_choice[choice].setdefault(internal or stream[0], []).append(signal)
    return by_choice, next_seq, broken


def _request_id(signal: Signal) -> str | None:
    value = (signal.data or {}).get("request_id")
    return value if isinstance(value, str) else None


def _by_stream(stream: _Stream, choices: dict[str, set[int]]) -> _Choice | None:
    choice = (stream[0], stream[1] or 0)
    return choice if choice[1] in choices.get(choice[0], ()) else None


def _pick(candidates: dict[str, list[Signal]], tokens: int) -> tuple[list[Signal], list[str]]:
    """The signals of one choice. External ids repeat from one engine to the next (they count from 0), internal do not.

    Args:
        candidates: Signals by internal id.
        tokens: The response's length, which no signal of it can exceed.
    """
    fitting = {k: v for k, v in candidates.items() if all(s.tokens is None or s.tokens <= tokens for s in v)}
    if not fitting:
        return [], ["signals of this request id speak of another response"] if candidates else []
    latest = max(fitting.values(), key=lambda members: max(s.t for s in members))
    warnings = [f"{len(fitting)} requests had this id; the latest is taken"] if len(fitting) > 1 else []
    return sorted(latest, key=lambda s: s.seq), warnings


def reasoning_tokens(token_ids: Sequence[int], tags: Tags, prompt_token_ids: Sequence[int] = ()) -> int:
    """Thinking tokens of a response, in all its blocks, without the tags.

    Args:
        token_ids: The response.
        tags: Token ids of the opening and the closing tag.
        prompt_token_ids: The prompt; it may have opened the thinking already.

    Raises:
        StreamError: A tag is empty.
    """
    start, end = (tuple(tag) for tag in tags)
    if not start or not end:
        raise StreamError("a thinking tag needs at least one token")
    _, thinking = _scan(tuple(prompt_token_ids), start, end, thinking=False)
    count, _ = _scan(tuple(token_ids), start, end, thinking=thinking)
    return count


def _scan(ids: tuple[int, ...], start: tuple[int, ...], end: tuple[int, ...], *, thinking: bool) -> tuple[int, bool]:
    count = position = 0
    while position < len(ids):
        if ids[position : position + len(end)] == end:
            thinking, position = False, position + len(end)
        elif ids[position : position + len(start)] == start:
            thinking, position = True, position + len(start)
        else:
            count += thinking
            position += 1
    return count, thinking
