"""Requests without a model, for timing and checking the decision: random text, random logits, no vLLM, no msgspec.

`Decoding` drives `earlystop.control.state.Controller` as an engine adapter does, one decoding step a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from earlystop.control import layout as c
from earlystop.control import lower
from earlystop.control.state import Controller, Rows, Start, Verdict
from earlystop.control.tables import Tables
from earlystop.kernels.mask import write_rows
from earlystop.kernels.stats import alloc_stats, logit_stats
from earlystop.units import TokenTable

PROMPT = 16
EOS, THINK, END_THINK = 2, 3, 4
RESERVED = tuple(range(5, 20))
_SHAPES = (
    (c.Y_LETTERS,),
    (c.Y_SPACE, c.Y_LETTERS),
    (c.Y_SPACE, c.Y_LETTER),
    (c.Y_STOP,),
    (c.Y_DIGIT,),
    (c.Y_NEWLINE,),
    (c.Y_NEWLINE, c.Y_NEWLINE),
    (c.Y_COLON,),
    (c.Y_RULE, c.Y_SPACE),
)
"""What a token looks like; half of all tokens are words."""


def token_table(vocab: int, seed: int = 0) -> TokenTable:
    """A made-up tokenizer with thinking tags: words, full stops, line breaks and lists."""
    draw = np.random.default_rng(seed)
    kinds = np.where(draw.random(vocab) < 0.5, 1, draw.integers(0, len(_SHAPES), vocab))
    lengths = np.array([len(shape) for shape in _SHAPES])[kinds]
    flags = np.where(np.isin(kinds, (1, 2, 5, 6)), c.T_SPACE_FIRST, 0).astype(np.int32)
    flags[EOS] |= c.T_EOS
    flags[[THINK, END_THINK]] |= c.T_SPECIAL
    return TokenTable(
        flags=flags,
        symbol_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        symbols=np.array([symbol for kind in kinds for symbol in _SHAPES[kind]], np.int32),
        opening=(THINK,),
        closing=(END_THINK,),
        sequence=(30, 31, 32, END_THINK, 33),
        tag_at=3,
        eos=(EOS,),
        fingerprint="synthetic",
    )


def policy_columns(*, fires: bool, limit: int = 1 << 20) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Columns of `classic` with every rule computed; unless `fires`, with thresholds that nothing reaches."""
    ints, floats = np.zeros(c.PHASE, np.int32), np.full(c.BUDGET, np.nan)
    for column, value in (
        (c.MODE, c.MODE_ON),
        (c.SCOPE, 1),
        (c.MIN_TOKENS, 16 if fires else limit),
        (c.WINDOW, 32),
        (c.PATIENCE, 2),
        (c.GRACE, 64),
        (c.HARD_GRACE, 2048),
        (c.ADAPT, 1),
        (c.ADAPT_WINDOW, 100),
        (c.ANSWER_ROOM, 16),
        (c.LIMIT, limit),
        (c.NEEDS_SIMILARITY, 1),
        (c.REPETITION, 1),
        (c.EPOCH, 1),
        (c.PROMPT_LEN, PROMPT),
    ):
        ints[column] = value
    ints[c.STOP_IDS : c.STOP_IDS + c.N_REASONS] = EOS
    for column, number in (
        (c.BUDGET0, 300.0 if fires else np.inf),
        (c.WARN_AT, 0.8),
        (c.FLOOR, 0.5),
        (c.SIMILARITY, 0.95 if fires else 1.0),
        (c.NOVELTY, 0.1),
        (c.EXTRA, 0.0),
        (c.REF_TOP1, 0.6),
        (c.REF_ENTROPY, 1.5),
    ):
        floats[column] = number
    floats[c.W_CONFIDENCE : c.W_BIAS + 1] = 0.0
    return ints, floats


class Decoding:
    """`requests` requests that decode random tokens in one batch.

    Args:
        device: where everything lives.
        requests: how many; each has `depth` rows a step.
        vocab: width of the logits.
        hidden: width of the hidden states, 0 to go without similarity.
        depth: rows of a request, draft tokens + 1.
        fires: whether rules and budgets may fire.
        seed: of the random text.
        controller: the class that decides.
    """

    def __init__(
        self,
        device: str,
        requests: int,
        vocab: int,
        hidden: int = 0,
        *,
        depth: int = 1,
        fires: bool = False,
        seed: int = 0,
        controller: type[Controller] = Controller,
    ) -> None:
        target = torch.device(device)
        self.device, self.depth, self.vocab = target, depth, vocab
        self.requests = requests
        self.tables = Tables.build(token_table(vocab), target, reserved=RESERVED)
        self.controller = controller(
            self.tables, slots=requests, depth=depth, hidden=hidden, dtype=torch.bfloat16, gram_size=4096
        )
        ints, floats = policy_columns(fires=fires)
        for slot in range(requests):
            self.controller.stage(slot, ints, floats)
        self.draw = np.random.default_rng(seed)
        prompts = self.draw.integers(40, vocab, (requests, PROMPT))
        prompts[: requests // 2, -1] = THINK  # half of them think
        count = np.full(requests, PROMPT)
        self.controller.flush(
            Start(
                self._put(np.arange(requests)),
                self._put(np.arange(requests) * PROMPT, np.int64),
                self._put(count),
                self._put(count),
                self._put(prompts.ravel()),
            )
        )
        rows = requests * depth
        self.slot = self._put(np.repeat(np.arange(requests), depth))
        self.local = self._put(np.tile(np.arange(depth), requests))
        self.total_len = self._put(count)
        self.pos = self._put(np.repeat(count, depth) - 1 + np.tile(np.arange(depth), requests), np.int64)
        self.token = self._put(self.draw.integers(40, vocab, rows))
        self.out = alloc_stats(rows, target)
        self.verdicts = torch.empty(rows, dtype=torch.int32, device=target)
        self.hidden = torch.randn(rows, hidden, device=target).bfloat16() if hidden else None
        self.force: torch.Tensor | None = None

    def _put(self, values: np.ndarray, dtype: type = np.int32) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.as_tensor(values.astype(dtype), device=self.device)

    def advance(self, accepted: int = 1) -> None:
        """The engine's part between two steps: `accepted` tokens of every request are committed. Not timed.

        A request's next token is the one that was forced, where there is one, else a random one.
        """
        fresh = self._put(self.draw.integers(40, self.vocab, self.token.shape[0]))
        if self.force is not None:
            fresh = torch.where(self.force >= 0, self.force, fresh)
        self.token.copy_(fresh)
        self.total_len += accepted
        self.pos += accepted

    def decide(self, stats: torch.Tensor, argmax: torch.Tensor) -> Verdict:
        """`Controller.step` on given statistics."""
        rows = Rows(self.slot, self.local, self.pos, self.token, self.total_len)
        verdict = self.controller.step(rows, stats, argmax, hidden=self.hidden)
        self.force = verdict.force
        return verdict

    def apply(self, logits: torch.Tensor) -> Verdict:
        """What the engine's `apply` does: the decision on the tap's statistics, then the rows are written."""
        verdict = self.decide(self.out.values, self.out.argmax)
        write_rows(
            logits, verdict.force, verdict.flags, self.tables.ending, self.tables.reserved, verdict.grammar,
            scratch=self.verdicts,
        )  # fmt: skip
        return verdict

    def tap(self, raw: torch.Tensor) -> None:
        """What the tap does: statistics of the model's own logits."""
        logit_stats(raw, self.tables.ending, self.out)


class Oracle(Controller):
    """The controller on plain Python: slow, and needs neither numba nor a GPU."""

    def _launch(self, stage: str, n: int, *arguments: Any) -> None:
        program = lower.python_namespace()[f"{stage}_program"]
        flat = [a.reshape(-1).numpy() if isinstance(a, torch.Tensor) else a for a in arguments]
        for r in range(n):
            program(r, *((n,) if stage == "judge" else ()), *flat)


def difference(one: Controller, other: Controller) -> str | None:
    """The first array of state or verdict whose bits differ, or None."""
    for name in ("ints", "floats", "grams", "stored", "force", "flags", "grammar", "report"):
        a, b = (getattr(c, name).cpu() for c in (one, other))
        if a.is_floating_point():
            a, b = a.view(torch.int64), b.view(torch.int64)
        if not torch.equal(a, b):
            where = (a != b).nonzero()[0].tolist()
            return f"{name}{where}: {getattr(one, name)[tuple(where)]} and {getattr(other, name)[tuple(where)]}"
    return None
