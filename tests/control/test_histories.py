"""Random batches against an oracle: each request run alone, a row a step, on the plain Python functions."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from earlystop.control import layout
from earlystop.control.layout import O_DECIDED, O_REBUILT, O_WARNING
from earlystop.profile import References, Score

from .harness import (
    BLANK,
    BRACE,
    BRACE_END,
    COLON,
    COMMA,
    DCARON,
    DIGIT,
    DOT,
    EOS,
    FENCE,
    GLUED,
    HAO,
    HASH,
    JSON,
    JSON_END,
    NEWLINE,
    QUOTE,
    RULE,
    SHUT,
    SMILE,
    STOP_CJK,
    THINK,
    TOOL,
    TOOL_END,
    WAIT,
    Request,
    Sim,
    W,
    alone,
    resolved,
    toy_table,
)

PROSE = [*W, *W, DOT, COMMA, NEWLINE, BLANK, GLUED, COLON, STOP_CJK, DIGIT, WAIT, SHUT, THINK]
ANYTHING = [*PROSE, FENCE, NEWLINE, TOOL, TOOL_END, JSON, JSON_END, *SMILE, *HAO, *DCARON, HASH, BRACE, BRACE_END, RULE]
ANYTHING += [QUOTE, 0]
REFERENCES = References(top1_mean=0.6, entropy_mean=1.0)
COLUMNS = [
    layout.R_TOKENS, layout.R_REASONING, layout.R_USED, layout.R_BUDGET, layout.R_CONFIDENCE, layout.R_ENTROPY,
    layout.R_SIMILARITY, layout.R_MARGIN, layout.R_NOVELTY, layout.R_SCORE, layout.R_CLOSE_KIND,
]  # fmt: skip


def statistics(seed: int) -> Any:
    """Statistics by position, some undefined."""

    def at(position: int) -> tuple[float, float, float, float]:
        chance = random.Random(1_000_003 * seed + position)  # noqa: S311  (a script, no secret)
        if chance.random() < 0.1:
            return (float("nan"),) * 4
        return chance.random(), 2 * chance.random(), 5 * chance.random(), 5 * chance.random()

    return at


def random_request(chance: random.Random, *, signals: bool, grace: bool, hides: bool) -> Request:
    """A request of any policy; its token-derived rules alone unless `signals`."""
    words = ANYTHING if chance.random() < 0.5 else PROSE
    plan = [chance.choice(words) for _ in range(chance.randint(5, 90))]
    if chance.random() < 0.3:
        plan = plan[: chance.randint(1, 9)] * 60
    fields: dict[str, Any] = {
        "mode": chance.choice(["active", "active", "active", "observe"]),
        "audited": chance.random() < 0.2,
        "budget": chance.choice([None, 0, 1, 3, 8, 20, 33]),
        "budget_scope": chance.choice(["auto", "response"]),
        "warn_at": chance.choice([0.2, 0.8, 1.0]),
        "grace": chance.choice([0, 1, 5, 20]) if grace else 0,
        "hard_grace": chance.choice([0, 6, 30]),
        "answer_room": chance.choice([0, 0, 6]),
        "repetition": chance.random() < 0.5,
        "min_tokens": chance.choice([0, 10]),
        "finish": chance.choice(["auto", "auto", "close_thinking", "end"]),
        "patience": chance.choice([1, 2]),
        "window": chance.choice([1, 3, 8]),
    }
    if signals:
        fields |= {
            "references": REFERENCES,
            "confidence_floor": chance.choice([None, 0.6, 0.9]),
            "similarity": chance.choice([None, 0.5]),
            "novelty": chance.choice([0.1, 0.9]),
            "adapt": chance.random() < 0.5,
            "adapt_window": chance.choice([1, 4, 9]),
            "score": Score(bias=-0.3, relative_confidence=0.5, end_margin=-0.1, length=0.1),
            "confident_threshold": chance.choice([None, 0.5]),
            "hopeless_threshold": chance.choice([None, 0.3]),
        }
    seed = chance.randrange(10**6)
    angles = np.random.default_rng(seed).random(120)
    return Request(
        [*plan[:90], SHUT, *W, EOS],
        prompt=[chance.choice([*W, THINK, SHUT]) for _ in range(chance.randint(1, 12))],
        policy=resolved(**fields) if chance.random() < 0.9 else None,
        max_tokens=chance.choice([12, 40, 100]),
        min_end=chance.choice([0, 0, 15]),
        stats=statistics(seed),
        hides=(lambda position: position % 13 == 5) if hides and chance.random() < 0.2 else (lambda position: False),
        hidden=lambda position: (np.cos(angles[position % 120]), np.sin(angles[position % 120])),
    )


def guesses(request: Request, sim: Sim, k: int, luck: float) -> list[int]:
    """What a drafter proposes: the model's plan, or how our closing sequence goes on, with some mistakes."""
    position = len(request.output)
    sequence = sim.table.sequence
    last = request.output[-1] if request.output else -1
    out = [request.wish(position + i) for i in range(k)]
    if last in sequence and sim.random.random() < 0.7:
        at = sequence.index(last) + 1
        out = [*sequence[at:], *out][:k]
    elif sim.random.random() < 0.3:
        cut = sim.random.randint(0, k)
        out = [*out[:cut], *sequence][:k]
    return [token if sim.random.random() < luck else sim.random.choice(W) for token in out]


def thinking_tokens(prompt: list[int], output: list[int]) -> int:
    """Thinking tokens of a response, counted the plain way (end tag of one token)."""
    inside, n = False, 0
    for token in prompt:
        inside = token == THINK or (inside and token != SHUT)
    for token in output:
        if inside and token in (SHUT, TOOL):
            inside = False
        elif inside:
            n += 1
        elif token == THINK:
            inside = True
    return n


class Batch(RuleBasedStateMachine):
    """Requests come, decode with drafts, lose their slot, return, leave."""

    signals = False
    grace = True
    hides = False
    preempts = False
    depths = (1, 3, 5)

    @initialize(seed=st.integers(0, 10**6), depth=st.sampled_from((0, 1, 2)))
    def start(self, seed: int, depth: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  (a script, no secret)
        depth = self.depths[depth % len(self.depths)]
        hidden = 2 if self.signals and depth == 1 else 0
        self.table = toy_table(transition=(NEWLINE, WAIT, 12), after=(BLANK,))
        self.sim = Sim(self.table, slots=3, depth=depth, seed=seed, hidden=hidden, gram_size=16384)
        self.waiting: list[Request] = []
        self.all: list[Request] = []

    @precondition(lambda self: self.sim.free)
    @rule(n=st.integers(1, 3), back=st.booleans())
    def add(self, n: int, back: bool) -> None:
        new = []
        for _ in range(min(n, len(self.sim.free))):
            if back and self.waiting:
                new.append(self.waiting.pop(self.chance.randrange(len(self.waiting))))
            else:
                new.append(random_request(self.chance, signals=self.signals, grace=self.grace, hides=self.hides))
                self.all.append(new[-1])
        self.sim.add(*new)

    @precondition(lambda self: self.sim.running)
    @rule(
        steps=st.integers(1, 8),
        k=st.integers(0, 4),
        luck=st.sampled_from([0.0, 0.6, 1.0]),
        chunk=st.integers(1, 12),
        some=st.booleans(),
    )
    def step(self, steps: int, k: int, luck: float, chunk: int, some: bool) -> None:
        for _ in range(steps):
            only = [r for r in self.sim.running if self.chance.random() < 0.7] if some else None
            self.sim.step(lambda r: guesses(r, self.sim, k, luck), lambda _: chunk, only)

    @precondition(lambda self: self.preempts and self.sim.running)
    @rule(which=st.integers(0, 2))
    def preempt(self, which: int) -> None:
        request = self.sim.running[which % len(self.sim.running)]
        self.sim.preempt(request)
        self.waiting.append(request)

    @precondition(lambda self: self.sim.running)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        if which < len(self.sim.running):
            self.sim.remove(self.sim.running[which])

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        for request in self.all:
            if request.policy is None:
                assert request.forced == []
                assert set(request.flags) <= {0}
                assert request.reports == []
                continue
            oracle = request.clone()
            oracle.epoch = request.epoch
            oracle = alone(oracle, self.table, hidden=self.sim.hidden, gram_size=16384)
            self.compare(request, oracle)

    def compare(self, request: Request, oracle: Request) -> None:
        raise NotImplementedError

    def counters_equal(self, request: Request, oracle: Request, columns: list[int], upto: int = 10**9) -> None:
        """Every report equals the oracle's at the same number of tokens."""
        by_tokens = {int(report[layout.R_TOKENS]): report for report in oracle.reports}
        for report in request.reports:
            n = int(report[layout.R_TOKENS])
            if n <= upto:
                np.testing.assert_array_equal(report[columns], by_tokens[n][columns], err_msg=f"after {n} tokens")


class OneRowAStep(Batch):
    """Without drafts or preemption: chunks, orders and neighbours change nothing at all, every rule included."""

    signals = True
    hides = True
    depths = (1,)

    def compare(self, request: Request, oracle: Request) -> None:
        n = len(request.output)
        assert request.output == oracle.output[:n]
        assert request.flags == oracle.flags[:n]
        assert request.forced == [p for p in oracle.forced if p < n]
        for ours, theirs in zip(request.reports, oracle.reports, strict=False):
            np.testing.assert_array_equal(ours[layout.R_BITS :], theirs[layout.R_BITS :])
        for mine, other in zip(request.trace, oracle.trace, strict=False):
            np.testing.assert_array_equal(mine, other)


class TokenRules(Batch):
    """With drafts, and rules that only read tokens: positions, counters, reasons and the trace are exactly equal."""

    def compare(self, request: Request, oracle: Request) -> None:
        n = len(request.output)
        assert request.output == oracle.output[:n]
        assert request.flags == oracle.flags[:n]
        assert request.forced == [p for p in oracle.forced if p < n]
        self.counters_equal(request, oracle, COLUMNS)
        assert len(request.trace) <= len(oracle.trace)
        for mine, other in zip(request.trace, oracle.trace, strict=False):
            np.testing.assert_array_equal(mine, other)
        seen = int(request.reports[-1][layout.R_TOKENS]) if request.reports else -1
        theirs = [s for s in oracle.said if s.tokens <= seen]
        assert {s.bit for s in request.said} == {s.bit for s in theirs}
        assert request.reasons(O_DECIDED)[-1:] == [s.reason for s in theirs if s.bit == O_DECIDED][-1:]


class SignalRules(Batch):
    """With drafts, every rule, grace 0 and text that can end anywhere: equal up to the stop, which is <= k late."""

    signals = True
    grace = False

    def compare(self, request: Request, oracle: Request) -> None:
        first = oracle.forced[0] if oracle.forced else len(oracle.output)
        assert request.output[:first] == oracle.output[:first][: len(request.output)]
        upto = min(first, *(oracle.at(O_DECIDED) or [first]))
        self.counters_equal(request, oracle, [c for c in COLUMNS if c != layout.R_CLOSE_KIND], upto - 1)
        ends_anywhere = not set(request.plan) - {*PROSE, EOS} and request.min_end == 0
        late = request.output[first : first + self.sim.depth - 1]
        ended = {SHUT, EOS} & set(late)  # the model's own end came in between
        if oracle.forced and len(request.output) > first + self.sim.depth - 1 and ends_anywhere and not ended:
            assert request.forced
            assert first <= request.forced[0] < first + self.sim.depth
        for at in request.forced:  # whatever was begun came whole, and once
            assert at == request.forced[0] or request.output[at] != NEWLINE or at - 1 not in request.forced


class Preempted(Batch):
    """With preemption: what tokens say stays true, budgets hold, sequences come once, and the rebuild is told."""

    preempts = True

    def compare(self, request: Request, oracle: Request) -> None:
        policy = request.policy
        assert policy is not None
        if request.reports and request.preemptions and request.output:
            first_back = [r for r in request.reports if int(r[layout.R_BITS]) & O_REBUILT]
            assert len(first_back) <= request.preemptions
        for report in request.reports:
            n = int(report[layout.R_TOKENS])
            assert report[layout.R_REASONING] == thinking_tokens(list(request.prompt), request.output[:n])
        if policy.grace == 0 and policy.hard_grace == 0:
            n = len(request.output)
            assert request.output == oracle.output[:n]
            assert request.forced == [p for p in oracle.forced if p < n]
            self.counters_equal(request, oracle, [layout.R_TOKENS, layout.R_REASONING, layout.R_USED, layout.R_BUDGET])
            if self.sim.depth == 1 and request.reports:
                seen = int(request.reports[-1][layout.R_TOKENS])
                assert request.at(O_DECIDED) == [t for t in oracle.at(O_DECIDED) if t <= seen]
                assert request.at(O_WARNING) == [t for t in oracle.at(O_WARNING) if t <= seen]
        thinking_scope = policy.budget_scope == "auto"
        if policy.mode == "active" and policy.budget is not None and thinking_scope and policy.finish != "end":
            used = thinking_tokens(list(request.prompt), request.output)
            bound = policy.budget + policy.grace + policy.hard_grace + 4 + self.sim.depth
            assert used <= bound


_SETTINGS = settings(
    deadline=None,
    max_examples=40,
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # nearly all comes from a seed: no shrinking
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
for machine in (OneRowAStep, TokenRules, SignalRules, Preempted):
    machine.TestCase.settings = _SETTINGS

TestOneRowAStep = OneRowAStep.TestCase
TestTokenRules = TokenRules.TestCase
TestSignalRules = SignalRules.TestCase
TestPreempted = Preempted.TestCase
