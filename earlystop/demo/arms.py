"""The demo's two arms, plain and early, over the built-in prompts, and what the comparison says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from earlystop.demo.prompts import DEMO_PROMPTS
from earlystop.demo.references import CPU, ENGINE, MAX_TOKENS, SHIPPED, demo_prompts, profile_of
from earlystop.engine.drive import Driver, Prompt, Result
from earlystop.engine.launch import Runner
from earlystop.policy import Policy
from earlystop.signals import Kind, StopReason

SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
_SENTENCE_ENDS = ".!?:;。！？…"
_CLOSERS = "\"'`*_)]}”’」』）|"


class Arm(msgspec.Struct, frozen=True):
    """All results of one arm, and its wall-clock seconds."""

    results: list[Result]
    seconds: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in both arms."""

    kind: str
    prompt: str
    plain_tokens: int
    early_tokens: int
    reason: StopReason | None
    """Why we ended it; None where the model ended it, or max_tokens."""
    finish_reason: str | None
    why: str
    """The reason with what was measured."""
    ends_at: str
    """Where an early ending is: ``line``, ``sentence``, ``block``, ``word`` or ``cut``; empty for others."""
    is_prefix: bool
    first_divergence: int | None
    """The first token that differs from the plain arm's, None if none does."""
    plain_seconds: float
    early_seconds: float
    plain_text: str
    early_text: str

    @property
    def saved(self) -> int:
        """Tokens saved; negative where the early arm diverged into a longer text."""
        return self.plain_tokens - self.early_tokens


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the demo."""

    model: str
    runner: str
    device: str
    max_tokens: int
    policy: str
    profile: str
    vllm: str
    rows: list[Row]
    plain_seconds: float
    early_seconds: float

    @property
    def plain_tokens(self) -> int:
        """All tokens of the plain arm."""
        return sum(row.plain_tokens for row in self.rows)

    @property
    def early_tokens(self) -> int:
        """All tokens of the early arm."""
        return sum(row.early_tokens for row in self.rows)

    @property
    def saved_share(self) -> float:
        """Share of all plain tokens that the early arm did not generate."""
        return 1 - self.early_tokens / max(self.plain_tokens, 1)


def run_demo(
    model: str | None,
    *,
    runner: Runner = "auto",
    scratch: Path,
    note: Callable[[str], None],
    step: Callable[[str], Any],
) -> Demo:
    """Runs both arms.

    Args:
        model: a checkpoint folder; None is SmolLM2-135M-Instruct with its shipped references.
        runner: vLLM's model runner.
        scratch: where the references of another model are written.
        note: takes messages for people.
        step: called with an arm's name, gives a callback for tokens.
    """
    if model is None:
        from earlystop.demo.model import ensure_smollm2

        shipped = {"smollm2": SHIPPED}
        with Driver(str(ensure_smollm2()), runner=runner, engine_args=ENGINE, cpu_args=CPU, profiles=shipped) as driver:
            plain = _arm(driver, None, step("plain"))
            return _compare(driver, plain, _arm(driver, Policy(policy="classic"), step("classic")), "smollm2")
    with Driver(model, runner=runner, engine_args=ENGINE, cpu_args=CPU) as driver:
        note("another model: the plain arm is observed, to make references from it")
        plain = _arm(driver, Policy(policy="observe"), step("observe"))
        profile = profile_of(driver, plain.results, name=Path(model).name, sampling=SAMPLING)
    path = scratch / f"{Path(model).name}.references.json"
    profile.save(path)
    with Driver(model, runner=runner, engine_args=ENGINE, cpu_args=CPU, profiles={"references": path}) as driver:
        return _compare(driver, plain, _arm(driver, Policy(policy="classic"), step("classic")), str(path))


def _arm(driver: Driver, policy: Policy | None, on_step: Callable[[int], None]) -> Arm:
    """One arm, after a few tokens that warm the engine up (kernels compile on first use)."""
    for _ in driver.run([Prompt(index=0, text="Hello.")], policy, {**SAMPLING, "max_tokens": 8}):
        pass
    began = time.monotonic()
    results = list(driver.run(demo_prompts(), policy, SAMPLING, on_step=on_step))
    return Arm(results, time.monotonic() - began)


def _compare(driver: Driver, plain: Arm, early: Arm, profile: str) -> Demo:
    from earlystop.engine.compat import vllm_version

    rows = [
        compare(prompt.kind, prompt.text, before, after)
        for prompt, before, after in zip(DEMO_PROMPTS, plain.results, early.results, strict=True)
    ]
    return Demo(
        model=Path(driver.served.identity.model).name,
        runner=driver.runner,
        device=driver.device,
        max_tokens=MAX_TOKENS,
        policy="classic",
        profile=profile,
        vllm=vllm_version() or "",
        rows=rows,
        plain_seconds=plain.seconds,
        early_seconds=early.seconds,
    )


def compare(kind: str, prompt: str, plain: Result, early: Result) -> Row:
    """One prompt in both arms."""
    body = early.token_ids[:-1] if early.reason is not None else early.token_ids  # without our stop token
    divergence = next(
        (i for i, pair in enumerate(zip(body, plain.token_ids, strict=False)) if pair[0] != pair[1]), None
    )
    if divergence is None and len(body) > len(plain.token_ids):
        divergence = len(plain.token_ids)
    return Row(
        kind=kind,
        prompt=prompt,
        plain_tokens=plain.tokens,
        early_tokens=early.tokens,
        reason=early.reason,
        finish_reason=early.finish_reason,
        why=explain(early),
        ends_at=ending(early.text) if early.reason is not None else "",
        is_prefix=divergence is None,
        first_divergence=divergence,
        plain_seconds=plain.seconds,
        early_seconds=early.seconds,
        plain_text=plain.text,
        early_text=early.text,
    )


def explain(result: Result) -> str:
    """Why a response ended, with the figures of the decision."""
    if result.reason is None:
        return "the model's own end" if result.finish_reason == "stop" else f"max_tokens ({result.finish_reason})"
    decided = next((s for s in result.signals if s.kind == Kind.STOP_DECIDED), None)
    if decided is None:
        return str(result.reason)
    figures = {
        StopReason.CONVERGED: ("similarity", decided.similarity),
        StopReason.LOW_CONFIDENCE: ("confidence", decided.confidence),
        StopReason.REPETITION: ("entropy", decided.entropy),
        StopReason.BUDGET: ("used", decided.used),
    }
    name, value = figures.get(result.reason, ("", None))
    measured = f", {name} {value:.3g}" if value is not None else ""
    return f"{result.reason}: decided at token {decided.tokens}{measured}"


def ending(text: str) -> str:
    """What an ended text ends with: a ``block``, a ``line``, a ``sentence``, a ``word``; ``cut`` inside a fence."""
    if text.count("```") % 2 or "\ufffd" in text[-4:]:
        return "cut"
    if text.endswith(("```", "```\n", "\n\n")):
        return "block"
    if text.endswith("\n"):
        return "line"
    bare = text.rstrip().rstrip(_CLOSERS)
    if bare.endswith(tuple(_SENTENCE_ENDS)):
        return "sentence"
    return "word"


def verdict(demo: Demo) -> tuple[bool, list[str]]:
    """Whether what the demo claims holds, and the sentences that say so."""
    total = len(demo.rows)
    prefixes = sum(row.is_prefix for row in demo.rows)
    stopped = [row for row in demo.rows if row.reason is not None]
    lines = [f"{demo.saved_share:.1%} of all tokens saved ({demo.plain_tokens} plain, {demo.early_tokens} early)"]
    good = True
    if demo.device == "cpu":
        good = prefixes == total
        lines.append(f"greedy on a CPU: the early text is a prefix of the plain text in {prefixes} of {total} prompts")
    else:
        first = min((r.first_divergence for r in demo.rows if r.first_divergence is not None), default=None)
        lines.append(
            f"on a GPU: {prefixes} of {total} early texts are a prefix of the plain text"
            + ("" if first is None else f"; the first divergence is at token {first} (batches round differently)")
        )
    cut = _count(stopped, "cut")
    good = good and cut == 0
    places = ", ".join(f"{name} {n}" for name in ("block", "line", "sentence", "word") if (n := _count(stopped, name)))
    lines.append(f"{len(stopped)} stopped early, at the end of: {places or '-'}; cut inside a block: {cut}")
    if _count(stopped, "word"):
        lines.append("a stop at a word is one inside a cycle without sentence or line end, after the full grace")
    return good, lines


def _count(rows: Sequence[Row], place: str) -> int:
    return sum(row.ends_at == place for row in rows)
