"""A toy world for the decision: a vocabulary, a scripted model, and a batch that does what vLLM's does.

`Sim` drives a `Controller` row by row as Model Runner V2 would: rows in any order, one row a draft token, prompt
chunks, preemption, slots recycled last-in-first-out. `alone` runs one request by itself, one row a step, on the plain
Python functions: the oracle.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from earlystop.control import layout, lower
from earlystop.control.params import policy_columns
from earlystop.control.state import Controller, Rows, Start, Verdict
from earlystop.control.tables import Tables
from earlystop.resolved import Resolved
from earlystop.units import TokenTable, piece_symbols, utf8_flags

THINK, SHUT, EOS, TOOL, TOOL_END, NEWLINE, BLANK, WAIT, JSON, JSON_END = range(1, 11)
W: Final = tuple(range(11, 20))  # ordinary words, each with a space in front
E1, E2, E3, DOT, FENCE, COMMA, HASH, BRACE, BRACE_END, RULE = range(20, 30)
SMILE, HAO, DCARON = (30, 31), (32, 33), (34, 35)
STOP_CJK, COLON, GLUED, DIGIT, QUOTE, RESERVED = 36, 37, 38, 39, 40, 41
NO_GLYPH = 42  # U+FFFD that the model made itself
MORE = tuple(range(50, 100))  # further words

TEXT: Final[dict[int, bytes]] = {
    0: b"!",
    NEWLINE: b"\n",
    BLANK: b"\n\n",
    WAIT: b"Wait",
    JSON: b'{"q":"',
    JSON_END: b'"}',
    **{
        i: f" {word}".encode()
        for i, word in zip(W, ["red", "fox", "runs", "over", "green", "hills", "under", "warm", "sun"], strict=True)
    },
    E1: b"</",
    E2: b"think",
    E3: b">",
    DOT: b".",
    FENCE: b"```",
    COMMA: b",",
    HASH: b"# ",
    BRACE: b"{",
    BRACE_END: b"}",
    RULE: b"---",
    30: b"\xf0\x9f",
    31: b"\x98\x80",
    32: b"\xe5\xa5",
    33: b"\xbd",
    34: b"\xc4",
    35: b"\x8f",
    STOP_CJK: "。".encode(),
    COLON: b":",
    GLUED: b"ing",
    DIGIT: b"3",
    QUOTE: b'"',
    NO_GLYPH: "\ufffd".encode(),
    **{i: f" {chr(97 + i % 26)}{chr(97 + i // 26)}x".encode() for i in MORE},
}
SPECIAL: Final = (THINK, SHUT, EOS, TOOL, TOOL_END, RESERVED)
VOCAB: Final = 104  # ids from 100 up are padding of the logits


def toy_table(
    *, pieces: bool = False, transition: Sequence[int] = (WAIT,), after: Sequence[int] = (), thinks: bool = True
) -> TokenTable:
    """The toy vocabulary, compiled by hand. With `pieces` the end tag is the three tokens E."""
    flags = np.zeros(VOCAB, np.int32)
    offsets = np.zeros(VOCAB + 1, np.int32)
    symbols: list[int] = []
    for token in range(VOCAB):
        piece = TEXT.get(token, b"")
        symbols.extend(piece_symbols(piece))
        offsets[token + 1] = len(symbols)
        flags[token] |= utf8_flags(piece)
        if piece[:1].isspace():
            flags[token] |= layout.T_SPACE_FIRST
        if token in SPECIAL:
            flags[token] |= layout.T_SPECIAL
    flags[EOS] |= layout.T_EOS
    flags[TOOL] |= layout.T_TOOL_OPEN
    flags[TOOL_END] |= layout.T_TOOL_CLOSE
    closing = (E1, E2, E3) if pieces else (SHUT,)
    return TokenTable(
        flags=flags,
        symbol_offsets=offsets,
        symbols=np.asarray(symbols, np.int32),
        opening=(THINK,) if thinks else (),
        closing=closing if thinks else (),
        sequence=(*transition, *closing, *after) if thinks else (),
        tag_at=len(transition) if thinks else 0,
        eos=(EOS,),
        fingerprint="toy",
    )


# --- backends -------------------------------------------------------------------------------------


def _flat(arguments: Sequence[Any]) -> list[Any]:
    return [a.reshape(-1).numpy() if isinstance(a, torch.Tensor) else a for a in arguments]


class PlainController(Controller):
    """The portable functions as ordinary Python: the oracle."""

    def _launch(self, stage: str, n: int, *arguments: Any) -> None:
        program = lower.python_namespace()[f"{stage}_program"]
        flat = _flat(arguments)
        for row in range(n):
            program(row, *((n,) if stage == "judge" else ()), *flat)


class TritonController(Controller):
    """The Triton kernels, on a CPU by Triton's interpreter (TRITON_INTERPRET=1)."""

    def _launch(self, stage: str, n: int, *arguments: Any) -> None:
        kernel = lower.triton_namespace()[f"{stage}_kernel"]
        kernel[(n,)](*((n,) if stage == "judge" else ()), *arguments)


#: What the tests run on: numba as the engine does on a CPU, or one of the others by hand.
DEFAULT: Final[type[Controller]] = {"python": PlainController, "triton": TritonController}.get(
    os.environ.get("EARLYSTOP_TEST_DECISION", ""), Controller
)

# --- requests -------------------------------------------------------------------------------------


def resolved(**fields: Any) -> Resolved:
    """A policy of which only what is named is on."""
    base: dict[str, Any] = {"mode": "active", "policy": "test", "grace": 0, "min_tokens": 0, "answer_room": 0}
    return Resolved(**{**base, **fields})


Plan = Sequence[int] | Callable[[int], int]
Stats = tuple[float, float, float, float]


@dataclass(frozen=True)
class Said:
    """One thing the decision told the host: at how many committed tokens, which bit, for which reason."""

    tokens: int
    bit: int
    reason: int


@dataclass(eq=False)
class Request:
    """One request and its scripted model.

    plan: the model's wish at each output position (the last word repeats); stats: what the row that samples that
    position measures; argmax: the model's likeliest token there (the plan's by default); invalid: positions whose
    logits hold NaN; allowed, masked_top1: what a grammar permits, and the top-1 it leaves; hides: positions whose
    id stays -1 for the worker; hidden: hidden states of the row that samples the position.
    """

    plan: Plan
    prompt: Sequence[int] = (THINK,)
    policy: Resolved | None = field(default_factory=resolved)
    max_tokens: int = 400
    min_end: int = 0
    ignore_eos: bool = False
    stop_ids: dict[int, int] = field(default_factory=dict)
    stats: Callable[[int], Stats] = lambda position: (0.5, 1.0, 5.0, 5.0)
    argmax: Callable[[int], int] | None = None
    invalid: Sequence[int] = ()
    allowed: Callable[[int, int], bool] | None = None
    masked_top1: Callable[[int], float] | None = None
    hides: Callable[[int], bool] = lambda position: False
    hidden: Callable[[int], Sequence[float]] | None = None

    # what happened
    output: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    reports: list[np.ndarray] = field(default_factory=list)
    trace: list[np.ndarray] = field(default_factory=list)
    ended: str | None = None
    preemptions: int = 0

    # where it is
    slot: int = -1
    epoch: int = 0
    computed: int = 0

    def wish(self, position: int) -> int:
        if callable(self.plan):
            return self.plan(position)
        return self.plan[min(position, len(self.plan) - 1)]

    def clone(self) -> Request:
        """The same request and script, nothing of it run."""
        return Request(
            self.plan, self.prompt, self.policy, self.max_tokens, self.min_end, self.ignore_eos, self.stop_ids,
            self.stats, self.argmax, self.invalid, self.allowed, self.masked_top1, self.hides, self.hidden,
        )  # fmt: skip

    @property
    def total(self) -> int:
        return len(self.prompt) + len(self.output)

    def at(self, bit: int) -> list[int]:
        """At how many committed tokens this was said."""
        return [said.tokens for said in self.said if said.bit == bit]

    def reasons(self, bit: int) -> list[int]:
        return [said.reason for said in self.said if said.bit == bit]

    def last(self, column: int) -> float:
        """A column of the last report."""
        return float(self.reports[-1][column])

    @property
    def words(self) -> list[int]:
        """The tokens that were not forced."""
        return [token for position, token in enumerate(self.output) if position not in self.forced]


class Sim:
    """A batch of requests on one controller.

    Args:
        table: the vocabulary.
        slots, depth: see `Controller`.
        kind: which backend.
        seed: of the row order and of whatever else the batch does by chance.
        hidden: width of hidden states, 0 for none.
        costs: cost units per token.
    """

    def __init__(
        self,
        table: TokenTable | None = None,
        *,
        slots: int = 1,
        depth: int = 1,
        kind: type[Controller] = DEFAULT,
        seed: int = 0,
        hidden: int = 0,
        costs: np.ndarray | None = None,
        gram_size: int = 1024,
    ) -> None:
        self.table = toy_table() if table is None else table
        tables = Tables.build(self.table, torch.device("cpu"), costs=costs)
        self.controller = kind(tables, slots=slots, depth=depth, hidden=hidden, gram_size=gram_size)
        self.hidden = hidden
        self.depth = depth
        self.random = random.Random(seed)  # noqa: S311  (a schedule, no secret)
        self.free = list(range(slots))[::-1]
        self.running: list[Request] = []
        self.total_len = torch.zeros(slots, dtype=torch.int32)
        self.epochs = [0] * slots
        self.active = [False] * slots
        self.verdict: Verdict | None = None
        self.steps = 0
        self.last_rows: list[tuple[Request, int, int, int, bool]] = []

    # --- admission --------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Admits requests, new or preempted."""
        started = []
        for request in requests:
            slot = self.free.pop()
            request.slot, request.computed = slot, 0
            self.running.append(request)
            self.total_len[slot] = request.total
            if request.policy is None:
                if self.active[slot]:
                    self.controller.stage(slot, np.zeros(layout.PHASE, np.int32), np.zeros(layout.BUDGET, np.float64))
                self.active[slot] = False
                continue
            self.epochs[slot] += 1
            request.epoch = self.epochs[slot]
            self.active[slot] = True
            self.controller.stage(
                slot,
                *policy_columns(
                    request.policy,
                    thinks=self.table.thinks,
                    limit=request.max_tokens,
                    min_end=request.min_end,
                    grammar=request.allowed is not None or request.masked_top1 is not None,
                    similarity=bool(self.hidden),
                    stop_ids=request.stop_ids,
                    default_stop=-1 if request.ignore_eos else EOS,
                    prompt_len=len(request.prompt),
                    epoch=self.epochs[slot],
                ),
            )
            started.append(request)
        self._flush(started)

    def _flush(self, started: Sequence[Request]) -> None:
        if not started:
            self.controller.flush(None)
            return
        lengths = [request.total for request in started]
        tokens = [token for request in started for token in (*request.prompt, *request.output)]
        self.controller.flush(
            Start(
                slots=torch.tensor([r.slot for r in started], dtype=torch.int32),
                base=torch.tensor(np.cumsum([0, *lengths[:-1]]), dtype=torch.int64),
                prompt_len=torch.tensor([len(r.prompt) for r in started], dtype=torch.int32),
                prefill_len=torch.tensor(lengths, dtype=torch.int32),
                tokens=torch.tensor(tokens or [0], dtype=torch.int32),
            )
        )

    def remove(self, request: Request) -> None:
        """The request leaves; nobody tells the controller."""
        self.running.remove(request)
        self.free.append(request.slot)
        request.slot = -1

    def preempt(self, request: Request) -> None:
        """The request loses its slot; `add` brings it back."""
        request.preemptions += 1
        self.remove(request)

    # --- the step ---------------------------------------------------------------------------------

    def step(
        self,
        drafts: Callable[[Request], Sequence[int]] = lambda request: (),
        chunk: Callable[[Request], int] = lambda request: 10**9,
        only: Sequence[Request] | None = None,
    ) -> None:
        """One engine step.

        Args:
            drafts: draft tokens of a decoding request (cut to depth - 1).
            chunk: how many tokens of a prefill to compute in this step.
            only: the requests that are scheduled, all by default.
        """
        batch = [r for r in self.running if only is None or r in only]
        self.random.shuffle(batch)
        rows: list[tuple[Request, int, int, int, bool]] = []  # request, local, pos, token, samples
        for request in batch:
            tokens = (*request.prompt, *request.output)
            if request.computed + 1 < len(tokens):  # prefill
                size = max(1, min(chunk(request), len(tokens) - request.computed))
                request.computed += size
                done = request.computed == len(tokens)
                rows.append((request, 0, request.computed - 1, tokens[request.computed - 1], done))
                continue
            request.computed = len(tokens)
            last = -1 if request.output and request.hides(len(request.output) - 1) else tokens[-1]
            rows.append((request, 0, len(tokens) - 1, last, True))
            for j, draft in enumerate(tuple(drafts(request))[: self.depth - 1], start=1):
                rows.append((request, j, len(tokens) - 1 + j, draft, True))
        if not rows:
            return
        self.steps += 1
        self.last_rows = rows
        verdict = self._decide(rows)
        self.verdict = Verdict(*(tensor.clone() for tensor in verdict))
        at = 0
        while at < len(rows):
            end = at + 1
            while end < len(rows) and rows[end][1] > 0:
                end += 1
            self._sample(rows, at, end, self.verdict)
            at = end

    def _decide(self, rows: Sequence[tuple[Request, int, int, int, bool]]) -> Verdict:
        n = len(rows)
        stats = np.full((n, layout.N_STATS), np.nan, np.float32)
        argmax = np.zeros(n, np.int32)
        masked = np.full((n, layout.N_STATS), 0.5, np.float32)
        hidden = np.zeros((n, self.hidden), np.float32)
        for r, (request, local, _, _, samples) in enumerate(rows):
            position = len(request.output) + local
            if position in request.invalid:
                argmax[r] = layout.ARGMAX_INVALID
                continue
            if not samples:  # a chunk's row measures something else entirely
                stats[r] = 0.99, 0.01, 0.0, 0.0
                continue
            stats[r] = request.stats(position)
            argmax[r] = request.wish(position) if request.argmax is None else request.argmax(position)
            if request.masked_top1 is not None:
                masked[r, 0] = request.masked_top1(position)
            if self.hidden and request.hidden is not None:
                hidden[r] = request.hidden(position)
        return self.controller.step(
            Rows(
                slot=torch.tensor([row[0].slot for row in rows], dtype=torch.int32),
                local=torch.tensor([row[1] for row in rows], dtype=torch.int32),
                pos=torch.tensor([row[2] for row in rows], dtype=torch.int64),
                token=torch.tensor([row[3] for row in rows], dtype=torch.int32),
                total_len=self.total_len,
            ),
            torch.from_numpy(stats),
            torch.from_numpy(argmax),
            masked=torch.from_numpy(masked),
            hidden=torch.from_numpy(hidden) if self.hidden else None,
        )

    def _sample(
        self, rows: Sequence[tuple[Request, int, int, int, bool]], first: int, end: int, verdict: Verdict
    ) -> None:
        request = rows[first][0]
        self._listen(request, first, verdict)
        if not rows[first][4]:
            return
        for row in range(first, end):
            position = len(request.output)
            force, flags = int(verdict.force[row]), int(verdict.flags[row])
            token = request.wish(position)
            if flags & layout.P_MOVE_EOS and token == EOS and self.table.closing:
                token = self.table.closing[0]
            takes = force >= 0 and (
                request.allowed is None or request.allowed(position, force) or flags & layout.P_INVALID
            )
            if takes:
                token = force
                request.forced.append(position)
            request.output.append(token)
            request.flags.append(flags)
            self.total_len[request.slot] = request.total
            request.computed = request.total - 1
            ends = token == EOS and not request.ignore_eos and position >= request.min_end
            if ends or token in request.stop_ids.values() or len(request.output) >= request.max_tokens:
                request.ended = "stop" if ends or token in request.stop_ids.values() else "length"
                self.remove(request)
                return
            if row + 1 < end and rows[row + 1][3] != token:
                return  # the draft is rejected

    def _listen(self, request: Request, row: int, verdict: Verdict) -> None:
        report = verdict.report[row].numpy()
        if report[layout.R_SLOT] < 0:
            return
        assert report[layout.R_SLOT] == request.slot
        assert report[layout.R_EPOCH] == self.epochs[request.slot]
        request.reports.append(report.copy())
        bits = int(report[layout.R_BITS])
        for shift in range(12):
            if bits & (1 << shift) and (1 << shift) not in (layout.O_ACTIVE, layout.O_PROGRESS):
                request.said.append(Said(int(report[layout.R_TOKENS]), 1 << shift, int(report[layout.R_REASON])))
        request.trace.extend(verdict.trace[row, : int(report[layout.R_COMMITTED])].numpy().copy())

    def run(self, steps: int = 10_000, **options: Any) -> None:
        """Steps until every request has finished."""
        for _ in range(steps):
            if not self.running:
                return
            self.step(**options)
        raise AssertionError(f"not finished after {steps} steps")

    def state(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """The slot's columns."""
        return self.controller.ints[request.slot].numpy().copy(), self.controller.floats[request.slot].numpy().copy()


def alone(
    request: Request, table: TokenTable | None = None, *, kind: type[Controller] = PlainController, **options: Any
) -> Request:
    """Runs one request by itself, one row a step, no drafts; on plain Python unless told otherwise."""
    sim = Sim(table, kind=kind, **options)
    sim.epochs[0] = max(request.epoch - 1, 0)  # novelty's hashes are salted with the admission counter
    sim.add(request)
    sim.run()
    return request


def play(
    plan: Plan, table: TokenTable | None = None, *, kind: type[Controller] = DEFAULT, hidden: int = 0, **fields: Any
) -> Request:
    """Runs one request through the compiled decision; fields of `Request` or of its policy by name."""
    own = {name: fields.pop(name) for name in list(fields) if name in Request.__dataclass_fields__ and name != "hidden"}
    states = fields.pop("states", None)
    costs = fields.pop("costs", None)
    request = Request(plan, policy=resolved(**fields), hidden=states, **own)
    return alone(request, table, kind=kind, hidden=hidden, costs=costs)
