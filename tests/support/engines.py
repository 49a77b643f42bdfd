"""Real vLLM engines for tests, each in a child process with the environment that its model runner needs."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from support.scripted import ScriptedModel

Runner = Literal["v1", "v2"]
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Any

_TESTS = Path(__file__).resolve().parent.parent
_SHIM = _TESTS / "support" / "v2_on_cpu"
_DEFAULT_ARGS: Mapping[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "disable_log_stats": True}


class EngineCallError(Exception):
    """Something raised inside the engine's process.

    Attributes:
        kind: The exception's class name there, "ValueError" for what a server answers with HTTP 400.
        trace: The traceback there.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.trace = trace


class EngineDiedError(Exception):
    """The engine's process ended, or did not answer in time and was killed; the message ends with its log."""


class Engine:
    """One real engine in a child process.

    Args:
        model: A checkpoint folder, or a scripted model, which is run in its own dtype.
        runner: "v1" or "v2"; without a GPU, V2 runs through Triton's interpreter.
        plugin: False hides the earlystop distribution from vLLM: the plain engine to compare with.
        env: More environment variables for the process.
        start_timeout: Seconds to wait for the engine to come up.
        call_timeout: Seconds to wait for an answer, unless the call says otherwise.
        engine_args: Passed to `vllm.LLM`, over eager mode, 1,024 positions and no statistics log.

    Attributes:
        facts: pid, v2, async_scheduling and max_model_len as the engine reports them.
    """

    def __init__(
        self,
        model: Path | str | ScriptedModel,
        *,
        runner: Runner = "v1",
        plugin: bool = True,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
        call_timeout: float = 300.0,
        **engine_args: Any,
    ) -> None:
        self._timeout = call_timeout
        # The log must outlive this scope and be readable by name in a debugger.
        self._log = tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log")  # noqa: SIM115
        parent, child = socket.socketpair()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.engine_server", str(child.fileno())],
                pass_fds=(child.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(runner, env or {}),
                start_new_session=True,  # One process group: tensor-parallel workers end with it.
            )
        self._connection: Connection = Connection(parent.detach())
        known = {"model": str(model)}
        if isinstance(model, ScriptedModel):
            known = {"model": str(model.path), "dtype": model.dtype}
        settings = {"plugin": plugin, "engine_args": {**_DEFAULT_ARGS, **known, **engine_args}}
        try:
            self.facts: dict[str, Any] = self._ask("start", settings, timeout=start_timeout)
        except BaseException as error:
            error.add_note(f"--- the engine's log ends:\n{self.log()[-6000:]}")
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], params: Params, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Runs `LLM.generate`.

        Args:
            prompts: Texts, lists of token ids, or vLLM's own prompt dictionaries.
            params: Fields of `SamplingParams` (`structured_outputs` as a dictionary too), one for all or one each.
            timeout: Seconds; the engine is killed when they are over.

        Returns:
            For each prompt a dictionary: `text, token_ids, finish_reason, stop_reason, logprobs` of the first choice,
            all `choices`, `prompt_token_ids`, `num_cached_tokens`, `request_id`.

        Raises:
            EngineCallError: vLLM refused the request, or failed.
            EngineDiedError: The process is gone.
        """
        return self._ask("generate", [*prompts], params, timeout=timeout)

    def chat(
        self, conversations: Sequence[Any], params: Params, *, timeout: float | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Runs `LLM.chat`; `options` are its own, `chat_template_kwargs` for one. Returns what `generate` returns."""
        return self._ask("chat", [*conversations], params, options, timeout=timeout)

    def call(
        self, function: Callable[..., Any] | str, *arguments: Any, timeout: float | None = None, **options: Any
    ) -> Any:
        """Runs `function(llm, *arguments, **options)` inside the engine's process.

        Args:
            function: A module-level function, or "module:function". Its module is imported there, so keep test modules
                free of side effects.
            *arguments: Picklable plain data, as the result must be.
            timeout: Seconds; the engine is killed when they are over.
            **options: More of the same, by name.
        """
        folder, target = "", function
        if not isinstance(function, str):
            source = inspect.getsourcefile(function)
            folder = str(Path(source).resolve().parent) if source and "." not in function.__module__ else ""
            target = f"{function.__module__}:{function.__qualname__}"
        return self._ask("call", folder, target, arguments, options, timeout=timeout)

    def log(self) -> str:
        """What the process wrote to standard output and standard error so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """Ends the process: asks first, then kills what is left of its group."""
        if self._process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send(("stop",))
                self._process.wait(5)
        self._kill()
        self._connection.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, *message: Any, timeout: float | None = None) -> Any:
        limit = self._timeout if timeout is None else timeout
        try:
            self._connection.send(message)
            if not self._connection.poll(limit):
                self._kill()
                raise EngineDiedError(f"no answer to {message[0]!r} in {limit:g} s; killed. Log:\n{self.log()[-6000:]}")
            answer, *content = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self._process.wait(10)
            raise EngineDiedError(f"exit code {code} on {message[0]!r}. Log:\n{self.log()[-6000:]}") from error
        if answer == "error":
            failure = EngineCallError(*content)
            failure.add_note(failure.trace)
            raise failure
        return content[0]

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def _environment(runner: Runner, extra: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: nothing of vLLM's or ours is inherited, so that a developer's shell changes no test."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "EARLYSTOP_", "TRITON_"))}
    path = [str(_TESTS)]
    if not has_gpu():
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if runner == "v2" or extra.get("FORCE_ASYNC_SCHEDULING") == "1":
            path.append(str(_SHIM))
            env["TRITON_INTERPRET"] = "1"
    env |= {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine core lives in the child, within reach of `call`.
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        **extra,
    }
    return env


@cache
def has_gpu() -> bool:
    """Whether torch sees a GPU: then V2 needs no interpreter."""
    import torch

    return torch.cuda.is_available()
