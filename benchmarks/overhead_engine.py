"""The child process of `benchmarks.overhead`: one engine, driven step by step, with timers put on on demand.

The timers wrap the product's functions from outside; the product itself holds none.
"""

from __future__ import annotations

import importlib.metadata
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

#: What is timed: name -> (module, object that holds the function, its name). Indented names lie within the one before.
STAGES = {
    "tap": ("earlystop.engine.tap", "Tap", "record"),
    "update_state": ("earlystop.engine.plugin", "EarlyStopLogitsProcessor", "update_state"),
    "staged_writes": ("earlystop.engine.plugin", "EarlyStopLogitsProcessor", "apply_staged_writes"),
    "apply": ("earlystop.engine.plugin", "EarlyStopLogitsProcessor", "apply"),
    "  decide": ("earlystop.control.state", "Controller", "step"),
    "  write": ("earlystop.engine.processor", "", "write_rows"),
    "  hand over": ("earlystop.engine.publish", "Reporter", "push"),
}
#: The publisher's thread: CPU time, beside the step and not in it.
THREAD_STAGES = {"publisher thread": ("earlystop.engine.publish", "Reporter", "_drain")}


class Engine:
    """A vLLM engine in this process.

    Args:
        plugin: False hides earlystop's entry points: vLLM as if the plugin were not installed.
        arguments: vLLM's engine arguments.
    """

    def __init__(self, plugin: bool, arguments: dict[str, Any]) -> None:
        if not plugin:
            hide_plugin()
        spent: dict[str, float] = {}
        begin = time.perf_counter()
        import vllm

        imported = time.perf_counter()
        with timed_start(spent) if plugin else _nothing():
            self.llm = vllm.LLM(**arguments)
        self.start = {
            "import_s": imported - begin,
            "start_s": time.perf_counter() - imported,
            "our_start_s": spent.get("start", 0.0),
        }
        self._requests = 0

    def facts(self) -> dict[str, Any]:
        """How the engine runs, and what its start took."""
        import torch

        config = self.llm.llm_engine.vllm_config
        return {
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_seqs": int(config.scheduler_config.max_num_seqs),
            "max_model_len": int(config.model_config.max_model_len),
            "torch_threads": torch.get_num_threads(),
            "vocab": int(config.model_config.get_vocab_size()),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "eager": bool(config.model_config.enforce_eager),
            **{key: round(value, 2) for key, value in self.start.items()},
        }

    def run(self, prompts: list[str], sampling: dict[str, Any]) -> dict[str, Any]:
        """Generates for all prompts at once; seconds of every engine step, tokens, and the process's CPU seconds.

        A decode step is one that gave every request one token.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for prompt in prompts:
            self._requests += 1
            engine.add_request(str(self._requests), prompt, SamplingParams(**sampling))
        counted: dict[str, int] = {}
        steps, decodes = [], []
        cpu = _cpu_seconds()
        begin = last = time.perf_counter()
        first = None
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            before = sum(counted.values())
            counted |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            gained = sum(counted.values()) - before
            steps.append(now - last)
            if gained == len(prompts):
                decodes.append(now - last)
            if first is None and len(counted) == len(prompts):
                first = now
            last = now
        tokens = sum(counted.values())
        return {
            "seconds": last - begin,
            "cpu_seconds": _cpu_seconds() - cpu,
            "tokens": tokens,
            "steps": len(steps),
            "decode_steps": sorted(decodes),
            "tpot": (last - (first or begin)) / max(1, tokens / len(prompts) - 1),
        }

    def run_timed(self, prompts: list[str], sampling: dict[str, Any]) -> dict[str, Any]:
        """`run` with timers around our functions: adds seconds and calls of each stage."""
        clock: dict[str, list[float]] = {}
        with timers(STAGES, clock, time.perf_counter), timers(THREAD_STAGES, clock, time.thread_time):
            result = self.run(prompts, sampling)
        result["stages"] = {name: {"seconds": sum(times), "calls": len(times)} for name, times in clock.items()}
        result["worst"] = {name: max(times, default=0.0) for name, times in clock.items()}
        return result


def hide_plugin() -> None:
    """Makes earlystop's entry points invisible in this process."""
    everything = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        found = everything(**selection)
        if not selection:
            return found
        return importlib.metadata.EntryPoints(one for one in found if not one.value.startswith("earlystop."))

    importlib.metadata.entry_points = entry_points


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def timers(
    stages: dict[str, tuple[str, str, str]], into: dict[str, list[float]], clock: Callable[[], float]
) -> Iterator[None]:
    """Wraps functions so that the duration of every call is kept, and puts them back."""
    import importlib

    kept = []
    for name, (module, holder, attribute) in stages.items():
        owner = importlib.import_module(module)
        owner = getattr(owner, holder) if holder else owner
        original = getattr(owner, attribute)
        times = into.setdefault(name, [])

        def timed(*args: Any, _f: Any = original, _times: list[float] = times, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return _f(*args, **kwargs)
            finally:
                _times.append(clock() - begin)

        setattr(owner, attribute, timed)
        kept.append((owner, attribute, original))
    try:
        yield
    finally:
        for owner, attribute, original in kept:
            setattr(owner, attribute, original)


@contextmanager
def timed_start(spent: dict[str, float]) -> Iterator[None]:
    """Adds up what our two entry points take while the engine starts."""
    begin = time.perf_counter()

    own_imports = time.perf_counter() - begin
    clock: dict[str, list[float]] = {}
    stages = {
        "constructor": ("earlystop.engine.plugin", "EarlyStopLogitsProcessor", "__init__"),
        "register": ("earlystop.engine.plugin", "", "register"),
    }
    with timers(stages, clock, time.perf_counter):
        yield
    spent["start"] = own_imports + sum(map(sum, clock.values()))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(connection: Connection, plugin: bool, arguments: dict[str, Any]) -> None:
    """The child's main: starts the engine, answers (method, arguments) with ("ok", value) or ("error", text)."""
    engine: Engine | None = None
    while True:
        try:
            method, *rest = connection.recv()
        except EOFError:
            return
        try:
            if engine is None:
                engine = Engine(plugin, arguments)
            connection.send(("ok", getattr(engine, method)(*rest)))
        except Exception as error:  # the parent decides; the child has no one to show it to
            connection.send(("error", f"{type(error).__name__}: {error}"))
