"""Replaying recorded traces through the decision, without a model.

`replay_program` (portable source) feeds a trace to `judge_token`, the function that the engine calls; `replay`
runs it over one trace for one policy. Traces come from `observe` mode (`Trace.from_signals`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from earlystop.control.decide import judge_token
from earlystop.control.layout import (
    BUDGET,
    E_SHUT,
    E_THINK,
    LAST_NOVELTY,
    N_FLOATS,
    N_INTS,
    N_STATS,
    O_CLOSING,
    O_WOULD,
    PHASE,
    REASON,
    S_ENTROPY,
    S_MARGIN_EOS,
    S_MARGIN_THINK,
    S_TOP1,
    THINKING,
    USED,
    WOULD_REASON,
)
from earlystop.control.portable import f64, load, store
from earlystop.control.start import reset_slot
from earlystop.control.tokens import cost_of, flags_of
from earlystop.errors import StreamError

if TYPE_CHECKING:
    from earlystop.signals import Signal

STOP_AT_CLOSING = 1  # end the replay where the policy would begin to force tokens


def note_state(ints: Any, floats: Any, i: Any, state_out: Any) -> None:
    """Keeps the reason (of the ending, or of a verdict that only observed), used, budget and phase."""
    reason = load(ints, REASON)
    if reason == 0:
        reason = load(ints, WOULD_REASON)
    store(state_out, 4 * i, f64(reason))
    store(state_out, 4 * i + 1, load(floats, USED))
    store(state_out, 4 * i + 2, load(floats, BUDGET))
    store(state_out, 4 * i + 3, f64(load(ints, PHASE)))


def replay_program(
    count: Any,
    thinking: Any,
    stop: Any,
    ints: Any,
    floats: Any,
    tokens: Any,
    stats: Any,
    argmax: Any,
    events: Any,
    similarity: Any,
    novelty: Any,
    token_flags: Any,
    costs: Any,
    sequence: Any,
    header: Any,
    bits_out: Any,
    state_out: Any,
) -> Any:
    """Judges `count` recorded tokens in order on slot 0; returns how many were judged.

    argmax[i] is that of the row that sampled token i, so argmax[i + 1] is what followed it; it has count + 1
    entries. bits_out[i] takes the O_* bits, state_out[4 * i :] reason, used, budget and phase after token i.
    """
    reset_slot(ints, 0, floats, 0)
    store(ints, THINKING, thinking)
    open_len = load(header, 0)
    shut_len = load(header, 1)
    done = 0
    running = 1
    for i in range(count):
        if running == 1:
            token = load(tokens, i)
            event = load(events, i)
            store(floats, LAST_NOVELTY, load(novelty, i))
            margin = load(stats, i * N_STATS + S_MARGIN_EOS)
            if (event & (E_THINK | E_SHUT)) > 0:
                margin = load(stats, i * N_STATS + S_MARGIN_THINK)
            bits = judge_token(
                ints, 0, floats, 0, token, event,
                f64(load(stats, i * N_STATS + S_TOP1)), f64(load(stats, i * N_STATS + S_ENTROPY)), f64(margin),
                f64(load(similarity, i)), cost_of(token, costs, header),
                flags_of(load(argmax, i + 1), token_flags, header), sequence, open_len + shut_len,
                load(header, 2), load(header, 3), shut_len,
            )  # fmt: skip
            store(bits_out, i, bits)
            note_state(ints, floats, i, state_out)
            done = done + 1
            if (stop == 1) & ((bits & O_CLOSING) > 0):
                running = 0
    return done


@dataclass(frozen=True)
class Trace:
    """The statistics of one response, token by token.

    tokens [n] int32; stats [n, N_STATS] float32 (top1, entropy, margin to the end tag, margin to EOS; NaN =
    undefined), of the row that sampled the token; argmax [n + 1] int32, the last one of the row after the end
    (ARGMAX_MISSING where it was not seen); events [n] int32 (E_* bits), similarity [n] float32 and novelty [n]
    float64 at the ends of units.
    """

    id: str
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    stats: np.ndarray[Any, np.dtype[np.float32]]
    argmax: np.ndarray[Any, np.dtype[np.int32]]
    events: np.ndarray[Any, np.dtype[np.int32]]
    similarity: np.ndarray[Any, np.dtype[np.float32]]
    novelty: np.ndarray[Any, np.dtype[np.float64]]
    last: tuple[float, ...] = ()  # statistics of the row that sampled the last token, which the worker never sees

    @classmethod
    def from_signals(cls, signals: Iterable[Signal]) -> Trace:
        """Joins the `trace` signals of one stream.

        Raises:
            StreamError: a record is missing, or there is none.
        """
        parts = sorted((s for s in signals if s.kind == "trace" and s.data), key=lambda s: s.data["first"])  # type: ignore[index]
        if not parts:
            raise StreamError("no trace among the signals: run the request with the policy 'observe'")
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for part in parts:
            data = part.data or {}
            if data["first"] != len(columns["token"]):
                raise StreamError(
                    f"trace of stream {part.id!r}: tokens {len(columns['token'])} to {data['first'] - 1} are missing"
                )
            for name in _COLUMNS:
                columns[name].extend(data[name])
        following = [np.nan if x is None else float(x) for x in (parts[-1].data or {})["next"]]

        def floats(name: str) -> list[float]:
            return [np.nan if x is None else x for x in columns[name]]

        names = ("top1", "entropy", "margin_think", "margin_eos")
        return cls(
            id=parts[0].id,
            tokens=np.asarray(columns["token"], np.int32),
            stats=np.asarray([floats(name) for name in names], np.float32).T.copy(),
            argmax=np.asarray([*columns["argmax"], int(following[-1])], np.int32),
            events=np.asarray(columns["event"], np.int32),
            similarity=np.asarray(floats("similarity"), np.float32),
            novelty=np.asarray(floats("novelty"), np.float64),
            last=tuple(following),
        )

    def __len__(self) -> int:
        return len(self.tokens)


_COLUMNS = ("token", "top1", "entropy", "margin_think", "margin_eos", "argmax", "event", "similarity", "novelty")


@dataclass(frozen=True)
class Replayed:
    """What a policy decided on a trace, after each judged token.

    bits [n] int32 (O_*), reason [n] StopReason codes, used and budget [n] cost units, phase [n] (PHASE_*).
    """

    bits: np.ndarray[Any, np.dtype[np.int32]]
    reason: np.ndarray[Any, np.dtype[np.int32]]
    used: np.ndarray[Any, np.dtype[np.float64]]
    budget: np.ndarray[Any, np.dtype[np.float64]]
    phase: np.ndarray[Any, np.dtype[np.int32]]

    def first(self, bit: int) -> int | None:
        """Index of the first token after which `bit` was set, or None."""
        hits = np.nonzero(self.bits & bit)[0]
        return int(hits[0]) if hits.size else None

    @property
    def cut(self) -> int | None:
        """Tokens kept when the policy begins to close (or, observing, would have), or None."""
        index = self.first(O_CLOSING | O_WOULD)
        return None if index is None else index + 1


def replay(
    trace: Trace,
    columns: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    tables: Any,
    *,
    thinking: bool = False,
    to_the_end: bool = True,
) -> Replayed:
    """Runs one policy over one trace.

    Args:
        trace: from `Trace.from_signals` or a trace file.
        columns: the policy, from `params.policy_columns`.
        tables: `Tables` of the tokenizer, on the CPU.
        thinking: whether the prompt left the thinking open.
        to_the_end: judge every token; otherwise stop where an active policy begins to force tokens.
    """
    from earlystop.control import lower

    ints = np.zeros(N_INTS, np.int32)
    floats = np.zeros(N_FLOATS)
    ints[: len(columns[0])], floats[: len(columns[1])] = columns
    n = len(trace)
    bits = np.zeros(n, np.int32)
    state = np.zeros(4 * n)
    run = lower.numba_namespace()["replay_program"]
    judged = run(
        n, int(thinking), 0 if to_the_end else STOP_AT_CLOSING, ints, floats, trace.tokens, trace.stats.reshape(-1),
        trace.argmax, trace.events, trace.similarity, trace.novelty, tables.flags.numpy(), tables.costs.numpy(),
        tables.sequence.numpy(), np.asarray(tables.header(1, 1), np.int32), bits, state,
    )  # fmt: skip
    after = state.reshape(n, 4)[:judged]
    return Replayed(
        bits=bits[:judged],
        reason=after[:, 0].astype(np.int32),
        used=after[:, 1].copy(),
        budget=after[:, 2].copy(),
        phase=after[:, 3].astype(np.int32),
    )
