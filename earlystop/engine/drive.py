"""The offline driver: prompts in, finished responses with all of their signals out.

It steps vLLM's engine itself, so that results come one by one, and reads the signals from a lossless sink that is
opened before the engine, whose processes inherit its address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import msgspec

from earlystop.attach import attach
from earlystop.bus import SinkReader
from earlystop.config import Config
from earlystop.engine import launch
from earlystop.engine.launch import Runner, Surroundings
from earlystop.errors import ConfigError, StreamError
from earlystop.policy import Policy
from earlystop.profile import Profile
from earlystop.resolve import resolve
from earlystop.resolved import Resolved
from earlystop.signals import Signal, StopReason
from earlystop.summary import Summary, WouldStop, finish_signals, summarize

_BARRIER_S = 30.0
_AHEAD = 2  # times max_num_seqs: so many requests are in the engine at most, and the queue never runs dry


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: exactly one of `text`, `messages` and `token_ids`."""

    index: int
    """Its number, which its `Result` carries too."""
    text: str | None = None
    """A user message where the tokenizer has a chat template (unless `raw`), else the beginning of a text."""
    messages: list[dict[str, Any]] | None = None
    """A conversation for the chat template."""
    token_ids: list[int] | None = None
    raw: bool = False
    """Takes `text` as it is, without the chat template."""
    max_tokens: int | None = None
    """Over the run's."""
    id: str | None = None
    """Stream id; None makes one."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt (of one choice of it, with `n` > 1)."""

    index: int
    """The prompt's."""
    choice: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    """vLLM's."""
    stop_reason: int | str | None = None
    """vLLM's."""
    reason: StopReason | None = None
    """Ours, None for an end that is not ours."""
    tokens: int = 0
    """Generated tokens, forced ones and the stop token included."""
    reasoning_tokens: int | None = None
    used: float | None = None
    """Cost units, the last token included."""
    budget: float | None = None
    signals: list[Signal] = []
    """All of the stream's, in order; the last is its `summary`."""
    would_stop: WouldStop | None = None
    """In `observe`: where the policy would have stopped."""
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    """From when the prompt entered the engine."""
    prompt_tokens: int = 0
    error: str | None = None
    """Why the prompt could not be run; then nothing else holds."""


@dataclass
class _Running:
    """A request in the engine."""

    prompt: Prompt
    stream: str
    prompt_ids: list[int]
    began: float
    choices: dict[int, SimpleNamespace] = field(default_factory=dict)

    def take(self, output: Any) -> int:
        """Adds one delta; returns how many tokens it brought."""
        new = 0
        for part in output.outputs:
            have = self.choices.setdefault(
                part.index,
                SimpleNamespace(index=part.index, text=[], token_ids=[], finish_reason=None, stop_reason=None),
            )
            have.text.append(part.text)
            have.token_ids.extend(part.token_ids)
            new += len(part.token_ids)
            if part.finish_reason is not None:
                have.finish_reason, have.stop_reason = part.finish_reason, part.stop_reason
        return new


class Driver:
    """A real vLLM engine and the sink for its signals; a context manager.

    Args:
        model: a checkpoint folder or a hub name.
        runner: ``auto`` leaves the choice of the model runner to vLLM.
        engine_args: passed to ``vllm.LLM``.
        cpu_args: more of them, where vLLM runs on a CPU.
        profiles: name to path of profiles, over those of the configuration.
        early: False for a run that never opts in, under any vLLM.

    Raises:
        ConfigError: configuration, runner or model cannot be used.
        ProfileError: a profile is broken.
        IncompatibleEngineError: early stopping cannot work here.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: Runner = "auto",
        engine_args: Mapping[str, Any] | None = None,
        cpu_args: Mapping[str, Any] | None = None,
        profiles: Mapping[str, Any] | None = None,
        early: bool = True,
    ) -> None:
        if early:
            launch.refuse_untested()
        given = dict(engine_args or {})
        self._around = Surroundings()
        self._sink: SinkReader | None = None
        self._count = 0
        self._silent = False
        self.generated = 0
        """Tokens generated so far, of all runs."""
        try:
            self.config: Config
            self.profiles: dict[str, Profile]
            self.config, self.profiles = launch.configuration(profiles, given.get("additional_config"))
            launch.prepare(model, runner, self._around)
            if profiles:
                self._around.configure(self.config)
            self._sink = SinkReader()
            self._llm = self._build(launch.engine_arguments(model, given, self._around, cpu_args))
        except BaseException:
            self.close()
            raise

    def _build(self, arguments: dict[str, Any]) -> Any:
        from vllm import LLM

        from earlystop.engine import admission, served

        admission.configuration.cache_clear()
        llm = LLM(**arguments)
        config = llm.llm_engine.vllm_config
        self.runner = "v2" if config.use_v2_model_runner else "v1"
        """The model runner in use."""
        self.device = str(config.device_config.device_type)
        self.tokenizer = llm.get_tokenizer()
        self.served = served.examine(config, self.runner, self.config.engine)
        """The compiled tokenizer and the identity that profiles are compared with."""
        self.max_num_seqs = int(config.scheduler_config.max_num_seqs)
        return llm

    # --- requests ---------------------------------------------------------------------------------

    def run(
        self,
        prompts: Iterable[Prompt],
        policy: Policy | None = None,
        sampling: Mapping[str, Any] | None = None,
        *,
        ordered: bool = True,
        on_step: Callable[[int], None] | None = None,
    ) -> Iterator[Result]:
        """Runs prompts and yields each result once its response and all of its signals are in.

        Prompts are taken from the iterable as the engine has room, so it may be long.

        Args:
            prompts: with distinct indexes.
            policy: what every request asks for; None or ``off`` for none.
            sampling: fields of ``SamplingParams`` over the model's own defaults. A `seed` is each request's seed plus
                its index, so that a result does not depend on its neighbours. max_tokens None is the context's end.
            ordered: in the order of the prompts; False yields as they finish.
            on_step: called after every engine step with the number of tokens it brought.
        """
        finished = self._run(iter(prompts), policy, dict(sampling or {}), on_step)
        return _in_order(finished) if ordered else (result for results in finished for result in results[1])

    def _run(
        self,
        prompts: Iterator[Prompt],
        policy: Policy | None,
        sampling: dict[str, Any],
        on_step: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, list[Result]]]:
        """(position, results) of each prompt as it finishes."""
        engine = self._llm.llm_engine
        running: dict[str, tuple[int, _Running]] = {}
        position, more = 0, True
        try:
            while more or running:
                while more and len(running) < _AHEAD * self.max_num_seqs:
                    prompt = next(prompts, None)
                    if prompt is None:
                        more = False
                        break
                    try:
                        request_id, request = self._admit(prompt, policy, sampling)
                        running[request_id] = (position, request)
                    except (ValueError, ConfigError) as error:
                        yield position, [Result(index=prompt.index, error=str(error))]
                    position += 1
                if not running:
                    continue
                new, done = 0, []
                for output in engine.step():
                    place, request = running[output.request_id]
                    new += request.take(output)
                    if output.finished:
                        done.append(output.request_id)
                self.generated += new
                if on_step is not None:
                    on_step(new)
                lost = self._collect(policy) if done else None
                for request_id in done:
                    place, request = running.pop(request_id)
                    yield place, self._results(request_id, request, policy, lost)
        finally:
            if running:
                engine.abort_request(list(running))

    def _admit(self, prompt: Prompt, policy: Policy | None, sampling: dict[str, Any]) -> tuple[str, _Running]:
        ids = self._encode(prompt)
        room = self.served.max_model_len - len(ids)
        if not ids or room < 1:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens; 1 to {self.served.max_model_len - 1} fit into the context"
                " (engine argument max_model_len)"
            )
        params = self._params(prompt, sampling, room)
        stream = ""
        if policy is not None and policy.policy != "off":
            asked = Policy(id=prompt.id).over(policy) if prompt.id else policy
            params = attach(params, asked)
            stream = params.extra_args["earlystop_id"]
            if asked.policy != "observe" and self.served.reserved:
                listed = [*(params.stop_token_ids or ()), *self.served.reserved.values()]
                params.stop_token_ids = list(dict.fromkeys(listed))
                params = type(params)(**{name: getattr(params, name) for name in params.__struct_fields__})
        self._count += 1
        request_id = f"run-{self._count}"
        self._llm.llm_engine.add_request(request_id, {"type": "token", "prompt_token_ids": ids}, params)
        return request_id, _Running(prompt=prompt, stream=stream, prompt_ids=ids, began=time.monotonic())

    def _encode(self, prompt: Prompt) -> list[int]:
        given = [value for value in (prompt.text, prompt.messages, prompt.token_ids) if value is not None]
        if len(given) != 1:
            raise ConfigError("a prompt is exactly one of text, messages and token_ids")
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        messages = prompt.messages
        templated = bool(getattr(self.tokenizer, "chat_template", None))
        if messages is None and templated and not prompt.raw:
            messages = [{"role": "user", "content": prompt.text}]
        if messages is None:
            return list(self.tokenizer.encode(prompt.text))
        if not templated:
            raise ConfigError("the tokenizer has no chat template for `messages`: give a `prompt`")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"the chat template refuses these messages: {error}") from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _params(self, prompt: Prompt, sampling: dict[str, Any], room: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        defaults = self._llm.get_default_sampling_params()
        values = {
            name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        values.update(sampling)
        wanted = prompt.max_tokens if prompt.max_tokens is not None else values.get("max_tokens")
        values["max_tokens"] = room if wanted is None else min(wanted, room)
        if values.get("seed") is not None:
            values["seed"] = values["seed"] + prompt.index
        return SamplingParams(**{**values, "output_kind": RequestOutputKind.DELTA})

    # --- results ----------------------------------------------------------------------------------

    def _collect(self, policy: Policy | None) -> str | None:
        """Waits until all signals that were sent are in; says what is wrong if they are not."""
        if policy is None or policy.policy == "off" or self._sink is None:
            return None
        if self._silent:
            return "the engine has sent no signals: is the plugin installed where it runs? (earlystop doctor)"
        try:
            self._sink.barrier(_BARRIER_S)
        except StreamError as error:
            self._silent = self._sink.writers == 0
            return str(error)
        return None

    def _results(self, request_id: str, request: _Running, policy: Policy | None, lost: str | None) -> list[Result]:
        signals = self._sink.take(request.stream) if self._sink is not None and request.stream else []
        if len(request.choices) == 1:
            signals = [_named(signal, request_id) for signal in signals]
        table = self.served.table
        output = SimpleNamespace(
            request_id=request_id,
            outputs=[request.choices[index] for index in sorted(request.choices)],
            prompt_token_ids=request.prompt_ids,
            num_cached_tokens=0,
        )
        summaries = summarize(
            [output],
            signals,
            reserved={token: reason for reason, token in self.served.reserved.items()} if request.stream else None,
            tags=(table.opening, table.closing) if table.thinks else None,
        )
        resolved = resolve(policy, self.config, self.profiles, self.served.identity) if request.stream else None
        return [
            self._result(request, choice, self._exact(summary, choice, signals, resolved, lost), signals)
            for choice, summary in zip(output.outputs, summaries, strict=True)
        ]

    def _exact(
        self, summary: Summary, choice: Any, signals: Sequence[Signal], resolved: Resolved | None, lost: str | None
    ) -> Summary:
        """The summary up to the last token, which the worker never learns of."""
        warnings = (*summary.warnings, *([f"signals may be missing: {lost}"] if lost else []))
        thinking = summary.reasoning_tokens if self.served.table.thinks else 0
        used = summary.used
        mine = [s for s in signals if s.index in (None, choice.index) and s.tokens is not None and s.used is not None]
        if mine and resolved is not None and used is not None:
            last = mine[-1]
            rest = choice.token_ids[last.tokens :]
            if resolved.budget_scope == "thinking":
                rest = rest[: max(0, (thinking or 0) - (last.reasoning_tokens or 0))]
            used += self._cost(rest)
        return msgspec.structs.replace(summary, used=used, reasoning_tokens=thinking, warnings=warnings)

    def _cost(self, token_ids: Sequence[int]) -> float:
        """Cost units of tokens: one each, or what the first profile with a cost table says, as the engine does."""
        costs = next((profile.costs for profile in self.profiles.values() if profile.costs), None)
        if costs is None:
            return float(len(token_ids))
        return float(sum(costs[token] if token < len(costs) else 1.0 for token in token_ids))

    def _result(self, request: _Running, choice: Any, summary: Summary, signals: Sequence[Signal]) -> Result:
        mine = [s for s in signals if s.index in (None, choice.index)]
        return Result(
            index=request.prompt.index,
            choice=choice.index,
            text="".join(choice.text),
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            reason=summary.reason,
            tokens=summary.tokens,
            reasoning_tokens=summary.reasoning_tokens,
            used=summary.used,
            budget=summary.budget,
            signals=[*mine, *finish_signals(summary)] if request.stream else finish_signals(summary),
            would_stop=summary.would_stop,
            warnings=summary.warnings,
            seconds=time.monotonic() - request.began,
            prompt_tokens=len(request.prompt_ids),
        )

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shuts the engine down and puts the environment back. May be called twice."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        if self._sink is not None:
            self._sink.close()
            self._sink = None
        self._around.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(signal: Signal, request_id: str) -> Signal:
    """The signal with its request's id, which the worker cannot always find out; the stream is the request's own."""
    data = signal.data or {}
    if data.get("request_id") is not None:
        return signal
    return msgspec.structs.replace(signal, index=signal.index or 0, data={**data, "request_id": request_id})


def _in_order(finished: Iterable[tuple[int, list[Result]]]) -> Iterator[Result]:
    held: dict[int, list[Result]] = {}
    due = 0
    for place, results in finished:
        held[place] = results
        while due in held:
            yield from held.pop(due)
            due += 1
