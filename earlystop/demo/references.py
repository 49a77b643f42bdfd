"""Makes a small profile of a model's references from plain, unstopped traces of the demo's prompts.

``python -m earlystop.demo.references --out FILE`` remakes the one that is shipped for SmolLM2.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from earlystop.demo.prompts import DEMO_PROMPTS
from earlystop.engine.drive import Driver, Prompt, Result
from earlystop.errors import ConfigError, StreamError
from earlystop.identity import Provenance
from earlystop.policy import Policy
from earlystop.profile import Profile, References, TaskProfile
from earlystop.signals import Kind

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Levels of the quantiles that are kept."""
MAX_TOKENS = 512
ENGINE: dict[str, Any] = {"max_model_len": 2048, "enable_prefix_caching": False}
"""Without prefix caching: the demo's second arm must not profit from the first."""
CPU: dict[str, Any] = {"dtype": "float32"}
"""In bfloat16 a CPU rounds differently in batches of different sizes, so a text would depend on its neighbours."""
SHIPPED = Path(__file__).parent / "smollm2.json"
"""SmolLM2-135M-Instruct's references."""


def token_statistics(result: Result) -> tuple[list[float], list[float]]:
    """Top-1 and entropy (nats) of every generated token of one observed response, as far as they are defined.

    Raises:
        StreamError: the traces have a gap.
    """
    top1: list[float | None] = []
    entropy: list[float | None] = []
    following: Sequence[float | None] = ()
    for signal in result.signals:
        if signal.kind != Kind.TRACE or signal.data is None:
            continue
        if signal.data["first"] != len(top1):
            raise StreamError(f"the trace of prompt {result.index} has a gap after token {len(top1)}")
        top1 += signal.data["top1"]
        entropy += signal.data["entropy"]
        following = signal.data["next"]
    if len(top1) == result.tokens - 1 and len(following) > 1:  # the worker never learns of the last token
        top1.append(following[0])
        entropy.append(following[1])
    pairs = [(t, e) for t, e in zip(top1, entropy, strict=True) if _defined(t) and _defined(e)]
    return [float(t) for t, _ in pairs if t is not None], [float(e) for _, e in pairs if e is not None]


def _defined(value: float | None) -> bool:
    return value is not None and bool(np.isfinite(value))


def references_of(results: Iterable[Result]) -> References:
    """The references over every generated token of full traces.

    Raises:
        StreamError: there is not a single token, or a trace has a gap.
    """
    top1: list[float] = []
    entropy: list[float] = []
    for result in results:
        more_top1, more_entropy = token_statistics(result)
        top1 += more_top1
        entropy += more_entropy
    if not top1:
        raise StreamError("the traces hold no token: was the run observed?")
    return References(
        top1_mean=round(float(np.mean(top1)), 6),
        entropy_mean=round(float(np.mean(entropy)), 6),
        top1_quantiles=_quantiles(top1),
        entropy_quantiles=_quantiles(entropy),
        n_tokens=len(top1),
    )


def _quantiles(values: list[float]) -> tuple[tuple[float, float], ...]:
    return tuple((level, round(float(np.quantile(values, level)), 6)) for level in LEVELS)


def profile_of(driver: Driver, results: Sequence[Result], *, name: str, sampling: dict[str, Any]) -> Profile:
    """A profile with the task `default` and its references, nothing certified.

    Raises:
        ConfigError: the model's weights or tokenizer have no fingerprint (a checkpoint that is not on this machine).
        StreamError: as `references_of`.
    """
    served = driver.served.identity
    if served.weights_hash is None or served.tokenizer_fingerprint is None:
        raise ConfigError(f"the weights of {served.model!r} have no fingerprint: give a local checkpoint folder")
    prompts = msgspec.json.encode([prompt.text for prompt in DEMO_PROMPTS])
    shared = {
        field: getattr(served, field)
        for field in ("chat_template_hash", "close_text_hash", "quantisation", "speculation", "runner", "dtype")
    }
    return Profile(
        name=name,
        provenance=Provenance(
            model=Path(served.model).name if Path(served.model).is_dir() else served.model,
            weights_hash=served.weights_hash,
            tokenizer_fingerprint=served.tokenizer_fingerprint,
            temperature=float(sampling.get("temperature", 0.0)),
            max_tokens=sampling.get("max_tokens"),
            decision_code_hash=served.decision_code_hash,
            data_hash=hashlib.sha256(prompts).hexdigest(),
            created=dt.datetime.now(dt.UTC).date().isoformat(),
            notes="References only: full traces of the demo's prompts. Nothing is certified.",
            **shared,
        ),
        tasks={"default": TaskProfile(references=references_of(results))},
    )


def demo_prompts() -> list[Prompt]:
    """The built-in prompts, numbered."""
    return [Prompt(index=i, text=prompt.text) for i, prompt in enumerate(DEMO_PROMPTS)]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m earlystop.demo.references`."""
    parser = argparse.ArgumentParser(prog="python -m earlystop.demo.references", description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; SmolLM2-135M-Instruct without it")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="the profile to write")
    options = parser.parse_args(arguments)
    from earlystop.demo.model import ensure_smollm2

    model = options.model or str(ensure_smollm2())
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    with Driver(model, engine_args=ENGINE, cpu_args=CPU) as driver:
        results = list(driver.run(demo_prompts(), Policy(policy="observe"), sampling))
        name = "smollm2" if options.model is None else Path(options.model).name
        profile = profile_of(driver, results, name=name, sampling=sampling)
    profile.save(options.out)
    references = profile.tasks["default"].references
    if references is not None:
        sys.stderr.write(
            f"{options.out}: {references.n_tokens} tokens, mean top-1 {references.top1_mean:.3f}, "
            f"mean entropy {references.entropy_mean:.3f} nats\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
