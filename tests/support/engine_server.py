"""The child process that holds one real vLLM engine; started by `support.engines`, which talks to it over a socket.

Messages are pickled tuples of plain data. From the parent: `("start", settings)`, then any number of
`("generate" | "chat" | "call", arguments...)`, then `("stop",)`. Answers: `("ok", value)`, or
`("error", type, text, trace)`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Serves one engine until the parent says stop or goes away."""
    connection = Connection(int(sys.argv[1]))
    engine: dict[str, Any] = {}

    def start(settings: dict[str, Any]) -> dict[str, Any]:
        if not settings["plugin"]:
            _hide_plugin()
        import vllm

        engine["llm"] = vllm.LLM(**settings["engine_args"])
        return _facts(engine["llm"])

    handlers: dict[str, Callable[..., Any]] = {
        "start": start,
        "generate": lambda *arguments: _generate(engine["llm"], *arguments),
        "chat": lambda *arguments: _chat(engine["llm"], *arguments),
        "call": lambda *arguments: _call(engine["llm"], *arguments),
    }
    while True:
        try:
            kind, *arguments = connection.recv()
        except EOFError:  # The parent is gone.
            kind = "stop"
        if kind == "stop":
            os._exit(0)  # Taking an engine down in good order takes seconds and frees nothing that this does not.
        try:
            answer: tuple[Any, ...] = ("ok", handlers[kind](*arguments))
        except Exception as error:
            answer = ("error", type(error).__name__, str(error), traceback.format_exc())
        connection.send(answer)


def _hide_plugin() -> None:
    """Makes the earlystop distribution's entry points invisible: plain vLLM, as if it were not installed."""
    everything = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        found = everything(**selection)
        if not selection:
            return found
        return importlib.metadata.EntryPoints(one for one in found if not one.value.startswith("earlystop."))

    importlib.metadata.entry_points = entry_points


def _facts(llm: Any) -> dict[str, Any]:
    config = llm.llm_engine.vllm_config
    return {
        "pid": os.getpid(),
        "v2": bool(config.use_v2_model_runner),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_model_len": config.model_config.max_model_len,
    }


def _generate(llm: Any, prompts: Sequence[Any], params: Any) -> list[dict[str, Any]]:
    inputs = [{"prompt_token_ids": list(one)} if not isinstance(one, str | dict) else one for one in prompts]
    return [_result(one) for one in llm.generate(inputs, _sampling(params), use_tqdm=False)]


def _chat(llm: Any, conversations: Sequence[Any], params: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [_result(one) for one in llm.chat(conversations, _sampling(params), use_tqdm=False, **options)]


def _call(llm: Any, folder: str, target: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, name = target.partition(":")
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return function(llm, *arguments, **options)


def _sampling(params: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if isinstance(params, list):
        return [_sampling(one) for one in params]
    if not isinstance(params, dict):
        return params
    fields = dict(params)
    if isinstance(fields.get("structured_outputs"), dict):
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)


def _result(output: Any) -> dict[str, Any]:
    """One request's result as plain data: the first choice's fields on top, all of them under `choices`."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": [{i: one.logprob for i, one in row.items()} for row in choice.logprobs or ()],
        }
        for choice in output.outputs
    ]
    return {
        **choices[0],
        "choices": choices,
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids or ()),
        "num_cached_tokens": output.num_cached_tokens,
    }


if __name__ == "__main__":
    main()
