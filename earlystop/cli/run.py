"""`earlystop run`: prompts from a file through real vLLM, one JSON line out for each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from earlystop.cli.console import (
    BROKEN_LINES,
    FAILED,
    INTERRUPTED,
    OK,
    errors_end,
    existing,
    literal,
    pairs,
    policy_value,
    say,
    stop,
)
from earlystop.cli.progress import RunProgress
from earlystop.cli.prompts_file import Line, read_prompts
from earlystop.cli.store import Store, fingerprint
from earlystop.engine import launch
from earlystop.engine.drive import Driver, Prompt, Result
from earlystop.errors import ConfigError
from earlystop.policy import Policy
from earlystop.resolve import resolve
from earlystop.signals import Kind

Runner = Literal["auto", "v1", "v2"]


def run(
    model: Annotated[str, typer.Option(help="Checkpoint folder or hub name.")],
    prompts: Annotated[Path, typer.Option(help="JSONL (`prompt` or `messages`) or text, one prompt a line.")],
    out: Annotated[Path, typer.Option(help="Output, one JSON line a prompt, in order.")],
    policy: Annotated[str, typer.Option(help="off, observe, classic, balanced, aggressive, or a profile's name.")],
    task: Annotated[str | None, typer.Option(help="Task of the profile.")] = None,
    budget: Annotated[float | None, typer.Option(help="Budget in cost units (tokens without a cost table).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens a response; default: the context's end.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Request i is seeded with seed + i.")] = None,
    runner: Annotated[Runner, typer.Option(help="vLLM's model runner.")] = "auto",
    set_: Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Any other policy field.")] = [],  # noqa: B006
    engine_arg: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Argument of vllm.LLM.")] = [],  # noqa: B006
    sampling: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Field of SamplingParams.")] = [],  # noqa: B006
    profile: Annotated[list[str], typer.Option(metavar="NAME=PATH", help="A profile to have.")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option(help="Go on with OUT where it ends.")] = False,
    raw: Annotated[bool, typer.Option(help="Texts as they are, without the chat template.")] = False,
    traces: Annotated[bool, typer.Option(help="Keep the per-token traces of observe in the signals.")] = False,
) -> None:
    """Run a file of prompts through vLLM with early stopping.

    Exit codes: 0 all lines were run; 1 the engine failed (--resume goes on); 2 bad arguments or input, nothing was
    started; 3 broken lines, each reported and with an `error` line in OUT, the others were run; 130 interrupted.
    """
    with errors_end():
        lines = read_prompts(existing(prompts, "prompts"), raw=raw)
        asked = _policy(policy, task, budget, set_)
        profiles = pairs(profile, "--profile")
        engine_args = {name: literal(value) for name, value in pairs(engine_arg, "--engine-arg").items()}
        config, loaded = launch.configuration(dict(profiles), engine_args.get("additional_config"))
        resolve(asked, config, loaded, None)
        fields = _sampling(pairs(sampling, "--sampling"), max_tokens, temperature, seed)
        meta = {
            "prompts": fingerprint(prompts),
            "model": launch.local_path(model),
            "policy": asked.given(),
            "sampling": fields,
            "runner": runner,
            "engine_args": engine_args,
            "profiles": {name: fingerprint(Path(path)) for name, path in config.profiles.items()},
            "raw": raw,
            "traces": traces,
        }
        store = Store(out, meta, resume=resume)
    code = _report_faults(lines)
    todo = [line for line in lines if line.index not in store.done]
    if not todo and code == OK:
        say(f"all {len(lines)} prompts are in {out} already")
        raise typer.Exit(OK)
    began = time.monotonic()
    settings = _Settings(asked, fields, traces)
    try:
        with errors_end(), store:
            for line in todo:
                if line.fault is not None:
                    store.add({"index": line.index, "line": line.number, "error": line.fault})
            valid = [line for line in todo if line.prompt is not None]
            if valid:
                engine = {"runner": runner, "engine_args": engine_args, "profiles": profiles, "early": policy != "off"}
                code = max(code, _drive(model, engine, valid, settings, store))
    except KeyboardInterrupt:
        say(f"interrupted; finished results are in {out}, go on with --resume")
        raise typer.Exit(INTERRUPTED) from None
    say(f"{out}: {len(lines)} lines, {time.monotonic() - began:.0f} s")
    raise typer.Exit(code)


class _Settings(msgspec.Struct, frozen=True):
    policy: Policy
    sampling: dict[str, Any]
    traces: bool


def _policy(name: str, task: str | None, budget: float | None, options: list[str]) -> Policy:
    """The policy that the options come to.

    Raises:
        ConfigError: names the field.
    """
    given = pairs(options, "--set")
    for field in ("policy", "id", "control"):
        if field in given:
            raise ConfigError(
                f"--set {field} is not allowed: --policy names the policy, ids are made here", field=field
            )
    fields = {field: policy_value(field, value) for field, value in given.items()}
    flags = {"policy": name, "task": task, "budget": budget}
    asked = Policy.from_fields(fields | {field: value for field, value in flags.items() if value is not None})
    asked.refuse_serving_fields()
    return asked


def _sampling(
    options: dict[str, str], max_tokens: int | None, temperature: float | None, seed: int | None
) -> dict[str, Any]:
    fields = {name: literal(value) for name, value in options.items()}
    for name in ("n", "output_kind", "extra_args"):
        if name in fields:
            raise ConfigError(
                f"--sampling {name} is not allowed: one response a line, policy fields by --set", field=name
            )
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens} is not allowed: give at least 1", field="max_tokens")
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature} is not allowed: give 0 or more", field="temperature")
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return fields | {name: value for name, value in given.items() if value is not None}


def _report_faults(lines: list[Line]) -> int:
    broken = [line for line in lines if line.fault is not None]
    for line in broken:
        say(f"line {line.number} is broken: {line.fault}")
    return BROKEN_LINES if broken else OK


def _drive(model: str, engine: dict[str, Any], lines: list[Line], settings: _Settings, store: Store) -> int:
    """Runs the valid lines; returns an exit code."""
    numbers = {line.index: line.number for line in lines}
    prompts: list[Prompt] = [line.prompt for line in lines if line.prompt is not None]
    say(f"starting vLLM for {len(prompts)} prompts ...")
    try:
        with Driver(model, **engine) as driver:
            say(f"vLLM is up: model runner {driver.runner.upper()}, at most {driver.max_num_seqs} prompts at a time")
            return _results(driver, prompts, numbers, settings, store)
    except (ConfigError, KeyboardInterrupt, typer.Exit):
        raise
    except Exception as error:
        if type(error).__module__.startswith("earlystop."):
            raise
        raise stop(
            f"vLLM failed: {type(error).__name__}: {error}; finished results are kept, --resume goes on", FAILED
        ) from error


def _results(driver: Driver, prompts: list[Prompt], numbers: dict[int, int], settings: _Settings, store: Store) -> int:
    code = OK
    warned: set[str] = set()
    with RunProgress(len(prompts)) as progress:
        results = driver.run(prompts, settings.policy, settings.sampling, ordered=False, on_step=progress.tokens)
        for result in results:
            if result.error is not None:
                code = BROKEN_LINES
                say(f"line {numbers[result.index]} cannot be run: {result.error}")
                store.add({"index": result.index, "line": numbers[result.index], "error": result.error})
            else:
                ids = next((p.id for p in prompts if p.index == result.index), None)
                store.add(as_row(result, settings, id=ids))
            for warning in _warnings(result):
                if warning not in warned:
                    warned.add(warning)
                    say(f"warning: {warning}")
            progress.finished(result)
    progress.totals()
    return code


def _warnings(result: Result) -> list[str]:
    found = [
        warning
        for signal in result.signals
        for warning in (signal.data or {}).get("warnings", ())
        if signal.kind != Kind.SUMMARY
    ]
    return [*found, *(w for w in result.warnings if w.startswith("signals"))]


def as_row(result: Result, settings: _Settings, *, id: str | None = None) -> dict[str, Any]:
    """The output line of a result."""
    row: dict[str, Any] = {"index": result.index}
    if id is not None:
        row["id"] = id
    for name in (
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "reason",
        "tokens",
        "reasoning_tokens",
        "used",
        "budget",
    ):
        row[name] = getattr(result, name)
    if settings.policy.policy == "observe":
        row["would_stop"] = msgspec.to_builtins(result.would_stop)
    row["signals"] = [s.to_dict() for s in result.signals if settings.traces or s.kind != Kind.TRACE]
    return row
