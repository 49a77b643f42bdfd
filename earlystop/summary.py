"""What became of each response: vLLM's finish joined with our last word on the stream.

The worker never sees a request's last token nor how it ended, so neither side alone knows the whole. Of a signal's
`data` this module reads

==================  ==============================================================================================
``request_id``      vLLM's internal request id: which output the signal belongs to
``closed``          whether we have forced a token since the stop was decided (thinking closed by us, or our stop
                    token written); the last value counts, false at the end means that the model ended itself
``stop_token_id``   where there is no ``closed``: the token that ends the response if the stop takes effect
``state_rebuilt``   the request was preempted and its state rebuilt
``guarantee``       the guarantee that the policy carries, as text; absent or null for none
``expected_tokens`` mean length of a full response in the profile's calibration, in tokens
``max_tokens``      the request's limit
==================  ==============================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from earlystop.clock import HLC
from earlystop.cost import CostModel
from earlystop.joining import Joined, Tags, join, reasoning_tokens
from earlystop.signals import Kind, Signal, StopReason

_clock = HLC()
_DECIDING = (Kind.STOP_DECIDED, Kind.ERROR)


class Completion(Protocol):
    """The part of vLLM's ``CompletionOutput`` that is read."""

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None


class SavedEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that an early stop has saved; an estimate, since the rest was never generated."""

    tokens: int
    basis: str
    """What it was compared with: ``profile`` (mean length in calibration) or ``max_tokens`` (an upper bound)."""


class WouldStop(msgspec.Struct, frozen=True, kw_only=True):
    """Where a policy that only observed would have stopped first."""

    reason: StopReason | None
    tokens: int | None
    """Generated tokens at that point."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one response (one choice of one request)."""

    id: str
    """Stream id; the request id where no signal came."""
    request_id: str
    """vLLM's external request id."""
    index: int
    """Which choice of the request."""
    reason: StopReason | None
    """Why we ended it; None for an end that is not ours."""
    finish_reason: str | None
    """vLLM's: ``stop``, ``length``, ``abort``, ``repetition``, ``error``; None if it has not finished."""
    stop_reason: int | str | None
    """vLLM's: the stop token id or stop string, None for EOS."""
    tokens: int
    """Generated tokens, forced ones and the stop token included."""
    reasoning_tokens: int | None
    """Thinking tokens without tags and without the stop token; None where it is not known."""
    used: float | None = None
    """Cost units used in the budget's scope, at the last signal."""
    budget: float | None = None
    """Budget in cost units at the last signal."""
    saved_estimate: SavedEstimate | None = None
    would_stop: WouldStop | None = None
    state_rebuilt: bool = False
    """The request was preempted; windows and patience started anew."""
    guarantee: str | None = None
    signals: dict[str, int] = {}
    """How many signals of each kind."""
    warnings: tuple[str, ...] = ()
    cost: str | None = None
    """Price of this choice, a decimal; a request's prompt is billed with its first choice."""
    saved_cost: str | None = None
    """Price of `saved_estimate`, a decimal."""
    currency: str | None = None
    next_seq: int = 0
    """`Signal.seq` of the next record of this stream."""
    t: int = 0
    """Stamp of the last signal."""


def summarize(
    outputs: Iterable[Any],
    signals: Iterable[Signal] | Mapping[str, Iterable[Signal]] | None = None,
    model: CostModel | None = None,
    *,
    reserved: Mapping[int, StopReason] | None = None,
    tags: Tags | None = None,
) -> list[Summary]:
    """One summary for each response, in the order of the outputs.

    Args:
        outputs: Finished outputs of ``LLM.generate``. Streamed outputs will do if they are cumulative.
        signals: Their signals, a list or what `SinkReader.drain` returns. None takes those of this process's open sink,
            else what the buses of engines started from this process still hold.
        model: Prices; fills `cost` and `saved_cost`.
        reserved: Reason-coded stop ids and their reasons, for responses without signals.
        tags: Token ids of the opening and of the closing thinking tag. With them `reasoning_tokens` is counted from
            the response; otherwise it is as of the last signal.

    Raises:
        StreamError: Outputs are deltas, or one response came twice.
    """
    warnings: list[str] = []
    if signals is None:
        signals = _at_hand(warnings)
    elif isinstance(signals, Mapping):
        signals = [signal for stream in signals.values() for signal in stream]
    next_seq: dict[tuple[str, int | None], int] = {}
    summaries = []
    for joined in join(outputs, list(signals)):
        summary = _summary(joined, reserved or {}, tags, model, warnings)
        # Streams may share an id; their finishing records follow one another.
        key = (summary.id, summary.index)
        seq = max(summary.next_seq, next_seq.get(key, 0))
        next_seq[key] = seq + len(_kinds(summary))
        summaries.append(msgspec.structs.replace(summary, next_seq=seq))
    return summaries


def finish_signals(summary: Summary) -> list[Signal]:
    """The records that end a stream: `stopped` if we ended it, then `summary`, which holds the summary as `data`."""
    data = msgspec.to_builtins(summary)
    return [
        Signal(
            id=summary.id,
            index=summary.index,
            seq=summary.next_seq + offset,
            t=_clock.merge(summary.t),
            kind=kind,
            reason=summary.reason,
            tokens=summary.tokens,
            reasoning_tokens=summary.reasoning_tokens,
            used=summary.used,
            budget=summary.budget,
            data=data if kind is Kind.SUMMARY else {"request_id": summary.request_id},
        )
        for offset, kind in enumerate(_kinds(summary))
    ]


def _kinds(summary: Summary) -> tuple[Kind, ...]:
    return (Kind.SUMMARY,) if summary.reason is None else (Kind.STOPPED, Kind.SUMMARY)


def _at_hand(warnings: list[str]) -> list[Signal]:
    # Only here is ZeroMQ needed.
    from earlystop.bus import default_endpoint, default_sink, recall
    from earlystop.errors import EarlyStopError

    try:
        sink = default_sink()
        if sink is None:
            return recall(default_endpoint())
        # An engine that has generated has connected long ago; without one there is little to wait for.
        sink.barrier(timeout=10.0 if sink.writers else 1.0)
    except EarlyStopError as error:
        warnings.append(f"signals may be missing: {error}")
    return list(sink) if sink is not None else []


def _summary(
    joined: Joined, reserved: Mapping[int, StopReason], tags: Tags | None, model: CostModel | None, common: list[str]
) -> Summary:
    completion, signals = joined.completion, joined.signals
    tokens = len(completion.token_ids)
    reason, doubts = _reason(completion, signals, reserved)
    data = _merged_data(signals)
    would = next((s for s in signals if s.kind is Kind.WOULD_STOP), None)
    thinking = _last(signals, "reasoning_tokens")
    if tags is not None:
        thinking = reasoning_tokens(_without_stop_token(completion), tags, joined.prompt_token_ids or ())
    summary = Summary(
        id=signals[-1].id if signals else joined.request_id,
        request_id=joined.request_id,
        index=completion.index,
        reason=reason,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        tokens=tokens,
        reasoning_tokens=thinking,
        used=_last(signals, "used"),
        budget=_last(signals, "budget"),
        saved_estimate=_saved(data, tokens) if reason is not None else None,
        would_stop=WouldStop(reason=would.reason, tokens=would.tokens) if would else None,
        state_rebuilt=any(s.data is not None and bool(s.data.get("state_rebuilt")) for s in signals),
        guarantee=data.get("guarantee"),
        signals=dict(Counter(s.kind.value for s in signals)),
        warnings=(*common, *joined.warnings, *doubts),
        next_seq=joined.next_seq,
        t=max((s.t for s in signals), default=0),
    )
    return summary if model is None else _priced(summary, joined, model)


def _reason(
    completion: Completion, signals: Sequence[Signal], reserved: Mapping[int, StopReason]
) -> tuple[StopReason | None, list[str]]:
    """Why we ended the response, and what is doubtful about it.

    A decision is not an end: ours is one that took effect, by thinking that we closed or by a stop token.
    """
    finish, stop = completion.finish_reason, completion.stop_reason
    if finish == "stop" and isinstance(stop, int) and stop in reserved:
        return reserved[stop], []
    decided = next((s for s in reversed(signals) if s.kind in _DECIDING and s.reason is not None), None)
    if decided is None:
        return None, [] if finish else ["the response has not finished"]
    reason = decided.reason
    since = [s for s in signals if s.seq >= decided.seq]
    marks = _merged_data(since)
    if marks.get("closed"):
        return reason, [f"the answer after the stop was cut: finish_reason {finish}"] if finish == "length" else []
    # A sender that does not mark what it forces leaves only the last token to go by.
    fits = bool(completion.token_ids) and marks.get("stop_token_id") in (None, completion.token_ids[-1])
    if "closed" not in marks and finish == "stop" and not isinstance(stop, str) and fits:
        return reason, []
    end = f"finish_reason {finish}" + ("" if stop is None else f", stop_reason {stop!r}")
    return None, [f"a stop ({reason}) was decided but did not take effect: {end}"]


def _without_stop_token(completion: Completion) -> Sequence[int]:
    ends = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return completion.token_ids[:-1] if ends else completion.token_ids


def _merged_data(signals: Iterable[Signal]) -> dict[str, Any]:
    """Of every key the last value."""
    merged: dict[str, Any] = {}
    for signal in signals:
        merged.update(signal.data or {})
    return merged


def _last(signals: Sequence[Signal], field: str) -> Any:
    return next((value for s in reversed(signals) if (value := getattr(s, field)) is not None), None)


def _saved(data: Mapping[str, Any], tokens: int) -> SavedEstimate | None:
    for key, basis in (("expected_tokens", "profile"), ("max_tokens", "max_tokens")):
        if data.get(key) is not None:
            return SavedEstimate(tokens=max(0, round(data[key]) - tokens), basis=basis)
    return None


def _priced(summary: Summary, joined: Joined, model: CostModel) -> Summary:
    prompt = joined.prompt_token_ids if joined.first else ()
    if prompt is None:
        warnings = (*summary.warnings, "no cost: the output carries no prompt tokens")
        return msgspec.structs.replace(summary, warnings=warnings, currency=model.currency)
    cached = joined.cached_tokens if joined.first else 0
    saved = summary.saved_estimate
    return msgspec.structs.replace(
        summary,
        cost=f"{model.cost(len(prompt), cached, summary.tokens):f}",
        saved_cost=None if saved is None else f"{model.cost(0, 0, saved.tokens):f}",
        currency=model.currency,
    )
