"""Two ways for an outside wish to reach a running stream, measured under saturation.

    python -m benchmarks.control [--streams 16] [--wishes 12] [--model PATH] [--json OUT]

In-band: a one-token request whose `earlystop_control` key every rank sees at admission. RPC: the worker
extension by `collective_rpc`, which blocks the engine core and drains the steps in flight. Both stop running
streams of a saturated `AsyncLLM`, alternating within one run. Measured: from the call to its acknowledgement
(the control request's end, the RPC's return), from the call to the end of the stream, and tokens/s of the
other streams while wishes are under way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.measure import provenance, write_rows

TEXT = "Write a very long story about a lighthouse keeper, with every detail that comes to mind."


async def _stream(engine: Any, params: Any, name: str, ended: dict[str, float], tokens: list[int]) -> None:
    async for output in engine.generate(TEXT, params, name):
        tokens[0] += 1
        if output.finished:
            ended[name] = time.perf_counter()


async def _measure(model: str, streams: int, wishes: int) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import earlystop
    from earlystop.engine.commands import Command

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            max_model_len=2048,
            max_num_seqs=streams + 1,
            enforce_eager=True,
            async_scheduling=False,
            worker_extension_cls="earlystop.engine.worker.EarlyStopWorker",
        )
    )
    ended: dict[str, float] = {}
    tokens = [0]
    running: dict[str, asyncio.Task[None]] = {}

    def start() -> None:
        name = uuid.uuid4().hex
        plain = SamplingParams(temperature=1.0, max_tokens=1800, min_tokens=0, seed=len(running))
        params = earlystop.attach(plain, "classic", id=name, similarity=1.0, grace=0, hard_grace=0)
        running[name] = asyncio.create_task(_stream(engine, params, name, ended, tokens))

    for _ in range(streams):
        start()
    await asyncio.sleep(3.0)
    rows: list[dict[str, Any]] = []
    for number in range(2 * wishes):
        way = ("in_band", "rpc")[number % 2]
        name = next(n for n in running if n not in ended)
        command = Command.stop(name).encode()
        before, begun = tokens[0], time.perf_counter()
        if way == "in_band":
            params = SamplingParams(max_tokens=1, detokenize=False, extra_args={"earlystop_control": command})
            async for _ in engine.generate({"prompt_token_ids": [1]}, params, uuid.uuid4().hex):
                pass
        else:
            await engine.collective_rpc("earlystop_command", args=([command],))
        acknowledged = time.perf_counter()
        while name not in ended and time.perf_counter() - begun < 20.0:
            await asyncio.sleep(0.001)
        took = time.perf_counter() - begun
        rows.append(
            {
                "way": way,
                "ack_ms": 1e3 * (acknowledged - begun),
                "end_ms": 1e3 * (ended[name] - begun) if name in ended else None,
                "tokens_per_s": (tokens[0] - before) / took,
            }
        )
        start()
        await asyncio.sleep(0.5)
    for task in running.values():
        task.cancel()
    engine.shutdown()
    return rows


def main() -> None:
    """Measures, prints medians, keeps rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder; SmolLM2 by default")
    parser.add_argument("--streams", type=int, default=16, help="running streams")
    parser.add_argument("--wishes", type=int, default=12, help="wishes per way")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = options.model
    if model is None:
        from earlystop.demo.model import ensure_smollm2

        model = str(ensure_smollm2())
    rows = asyncio.run(_measure(model, options.streams, options.wishes))
    kept = []
    for way in ("in_band", "rpc"):
        mine = [row for row in rows if row["way"] == way]
        row = {"benchmark": "control", "way": way, "streams": options.streams, "n": len(mine)}
        for name in ("ack_ms", "end_ms", "tokens_per_s"):
            values = [r[name] for r in mine if r[name] is not None]
            row[name] = round(statistics.median(values), 1) if values else None
        kept.append(row)
        print(f"{way:8} ack {row['ack_ms']} ms, stream ended {row['end_ms']} ms, {row['tokens_per_s']} tokens/s")
    if options.json:
        source = provenance("cpu")
        write_rows(options.json, [{**row, **source} for row in kept])


if __name__ == "__main__":
    main()
