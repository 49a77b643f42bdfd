"""What the plugin costs inside vLLM: ``python -m benchmarks.overhead``.

One run, rounds interleaved, on one model: plain vLLM (our entry points hidden from it), installed but not asked,
`observe`, active but never firing, and plain with logprobs=20, which is how others get their signals. Two engines live
in child processes; the one that is not measured is stopped (SIGSTOP), so that not even its idle threads run. The order
of the arms turns from round to round.

Every request generates exactly ``--tokens`` tokens (min_tokens = max_tokens, greedy, in all arms). Reported:

* tokens/s: tokens of all requests over the seconds from the first engine step to the last
* ratio: tokens/s over that of plain in the same round; median over rounds, 95 % interval bootstrapped over rounds
* of steps: the same of the tenth percentile of a round's decode steps. On a machine that others use this is nearest to
  what an idle one would show: nine steps in ten may be disturbed
* of CPU: the same of CPU seconds a token, over all threads of the process; only with ``--threads 1`` (threads that wait
  for each other burn time in doing so)
* TPOT: vLLM's, (E2EL - TTFT) / (n - 1)
* own time: a separate pass with timers around the tap and the processor's calls, set from outside, as a share of the
  engine's steps
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Row, provenance, show, write_rows

BARS = {"not asked": 0.99, "active": 0.98}
OWN_SHARE_BAR = 0.03
#: Computes everything and never fires: a budget that nobody reaches, a cosine that nothing exceeds.
NEVER = {
    "earlystop": "classic",
    "earlystop_budget": 1e9,
    "earlystop_min_tokens": 1_000_000,
    "earlystop_similarity": 1.0,
    "earlystop_confidence_floor": 0.0,
}
#: arm -> (whether its engine has the plugin, what it adds to the sampling parameters)
ARMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "not asked": (True, {}),
    "observe": (True, {"extra_args": {"earlystop": "observe"}}),
    "active": (True, {"extra_args": NEVER}),
    "logprobs=20": (False, {"logprobs": 20}),
}


class Child:
    """An engine in its own process, stopped while it is not asked for anything."""

    def __init__(self, plugin: bool, arguments: dict[str, Any]) -> None:
        from benchmarks.overhead_engine import serve

        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, plugin, arguments), daemon=True)
        self._process.start()
        there.close()
        self.facts: dict[str, Any] = self.ask("facts")

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Wakes the process, calls a method of its engine, and stops it again."""
        pid = self._process.pid
        if pid is None or not self._process.is_alive():
            raise RuntimeError("the engine's process ended; its log is above")
        os.kill(pid, signal.SIGCONT)
        self._here.send((method, *arguments))
        try:
            status, value = self._here.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended; its log is above") from None
        if status != "ok":
            raise RuntimeError(value)
        os.kill(pid, signal.SIGSTOP)
        return dict(value)

    def close(self) -> None:
        """Ends the process."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGCONT)
            self._process.terminate()
            self._process.join(10)


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine have used, 0 where that is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median of paired ratios and its 95 % percentile bootstrap interval (10,000 resamples, fixed seed)."""
    values = np.asarray(ratios)
    picks = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def measure(children: dict[bool, Child], batch: int, tokens: int, rounds: int, arms: Sequence[str]) -> list[Row]:
    """One row an arm at this batch size."""
    from earlystop.demo.prompts import DEMO_PROMPTS

    prompts = [DEMO_PROMPTS[i % len(DEMO_PROMPTS)].text for i in range(batch)]
    base = {"temperature": 0.0, "min_tokens": tokens, "max_tokens": tokens}

    def ask(arm: str, method: str = "run", **more: Any) -> dict[str, Any]:
        plugin, sampling = ARMS[arm]
        found = children[plugin].ask(method, prompts, base | sampling | more)
        expected = batch * more.get("max_tokens", tokens)
        if found["tokens"] != expected:
            raise RuntimeError(f"{arm} gave {found['tokens']} tokens instead of {expected}: the arms do not compare")
        return found

    busy: dict[str, list[float]] = {arm: [] for arm in arms}
    for arm in arms:  # fills the prefix cache and whatever is made at a first call
        ask(arm, min_tokens=8, max_tokens=8)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    loads = []
    for number in range(rounds):
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            before = machine_seconds()
            found = ask(arm)
            results[arm].append(found)
            busy[arm].append(max(0.0, machine_seconds() - before - found["cpu_seconds"]) / found["seconds"])
        loads.append(os.getloadavg()[0])
        print(f"batch {batch}: round {number + 1} of {rounds}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    rows = []
    for arm in arms:
        row: Row = {"benchmark": "overhead", "what": arm, "batch": batch, "tokens": tokens, "rounds": rounds}
        row |= {"load_1min": round(statistics.median(loads), 1)} | summary(results[arm], results[arms[0]])
        row["others_cpus"] = round(statistics.median(busy[arm]), 2)
        if arm in BARS:
            row |= {"bar": BARS[arm], "meets_bar": row["ratio_high"] >= BARS[arm]}
        if ARMS[arm][0]:
            row |= own_time(ask(arm, "run_timed"))
        rows.append(row)
    return rows


def summary(mine: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Row:
    """The fields of an arm, from its rounds and plain's."""
    speed = [r["tokens"] / r["seconds"] for r in mine]
    ratio = interval([s / (p["tokens"] / p["seconds"]) for s, p in zip(speed, plain, strict=True)])
    step = [tenth(r) for r in mine]
    step_ratio = interval([tenth(p) / s for p, s in zip(plain, step, strict=True)])
    cpu_ratio = interval([p["cpu_seconds"] / r["cpu_seconds"] for p, r in zip(plain, mine, strict=True)])
    row: Row = {"tokens_per_s": round(statistics.median(speed), 1)}
    row |= {"tokens_per_s_min": round(min(speed), 1), "tokens_per_s_max": round(max(speed), 1)}
    for name, values in (("ratio", ratio), ("step_ratio", step_ratio), ("cpu_ratio", cpu_ratio)):
        row |= {key: round(v, 4) for key, v in zip((name, f"{name}_low", f"{name}_high"), values, strict=True)}
    row |= {"step_ms": round(statistics.median(s for r in mine for s in r["decode_steps"]) * 1e3, 3)}
    row |= {"step_ms_p10": round(statistics.median(step) * 1e3, 3)}
    row |= {"tpot_ms": round(statistics.median(r["tpot"] for r in mine) * 1e3, 3)}
    row |= {"cpu_ms_per_token": round(statistics.median(r["cpu_seconds"] / r["tokens"] for r in mine) * 1e3, 3)}
    return row


def tenth(result: dict[str, Any]) -> float:
    """Tenth percentile of a run's decode steps (sorted by the child)."""
    steps: list[float] = result["decode_steps"]
    return steps[len(steps) // 10]


def own_time(timed: dict[str, Any]) -> Row:
    """Our share of the engine's steps, and microseconds a step of every stage."""
    stages = timed["stages"]
    own = sum(stage["seconds"] for name, stage in stages.items() if name[0] != " " and name != "publisher thread")
    row: Row = {"own_share": round(own / timed["seconds"], 5), "own_us_per_step": round(own / timed["steps"] * 1e6, 1)}
    row["stages_us_per_step"] = {
        name.strip(): round(stage["seconds"] / timed["steps"] * 1e6, 1) for name, stage in stages.items()
    }
    return row


def table(rows: Sequence[Row]) -> None:
    """Prints the rows, then where our time goes."""
    lines = []
    for r in rows:
        bar = "" if "bar" not in r else f"{'met' if r['meets_bar'] else 'MISSED'} (≥ {r['bar']})"
        share = f"{r['own_share']:.2%}" if "own_share" in r else ""
        ratios = [
            f"{r[n]:.3f} ({r[n + '_low']:.3f}-{r[n + '_high']:.3f})" for n in ("ratio", "step_ratio", "cpu_ratio")
        ]
        lines.append((r["batch"], r["what"], r["tokens_per_s"], *ratios, r["step_ms_p10"], r["tpot_ms"], share, bar))
    columns = ("batch", "arm", "tokens/s", "ratio (95 %)", "of steps", "of CPU", "step ms", "TPOT ms", "own", "bar")
    show("overhead", columns, lines)
    stages = [r for r in rows if "stages_us_per_step" in r]
    if stages:
        names = list(stages[0]["stages_us_per_step"])
        lines = [(r["batch"], r["what"], *(r["stages_us_per_step"][n] for n in names)) for r in stages]
        show("our time, µs a step", ("batch", "arm", *names), lines)


def first_use(children: dict[bool, Child]) -> Row:
    """What the plugin adds to the engine's start, and what the first opted-in request waits for."""
    sampling = {"temperature": 0.0, "min_tokens": 4, "max_tokens": 4}
    for child in children.values():  # the engine's own first call is not ours
        child.ask("run", ["Hello"], sampling)
    first = children[True].ask("run_timed", ["Hello there"], sampling | ARMS["active"][1])
    plain, ours = children[False].facts, children[True].facts
    row: Row = {"benchmark": "overhead", "what": "first use"}
    row |= {"engine_start_s": ours["start_s"], "engine_start_plain_s": plain["start_s"]}
    row |= {"our_start_s": ours["our_start_s"]}
    row |= {f"first_{name.strip().replace(' ', '_')}_ms": round(v * 1e3, 2) for name, v in first["worst"].items()}
    return row


def engine_arguments(model: str | None, device: str) -> dict[str, Any]:
    """vLLM's arguments, the same for both engines."""
    if model is None:
        from earlystop.demo.model import ensure_smollm2

        model = str(ensure_smollm2())
    arguments: dict[str, Any] = {"model": model, "max_model_len": 1024, "disable_log_stats": True}
    if device == "cuda":
        return arguments | {"gpu_memory_utilization": 0.4}  # two engines share the card
    return arguments | {"enforce_eager": True, "async_scheduling": False}


def main(arguments: list[str] | None = None) -> None:
    """Parses, measures, prints, and appends JSON rows where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a checkpoint's folder or a hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every request (default 128)")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS), help="plain always joins")
    parser.add_argument("--runner", choices=("v1", "v2"), help="vLLM's model runner (default: vLLM's choice)")
    parser.add_argument("--threads", type=int, help="CPU threads of an engine (default: vLLM's choice)")
    parser.add_argument("--json", metavar="OUT", help="append one JSON row a measurement to this file")
    args = parser.parse_args(arguments)
    import torch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a stopped child would outlive us
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(args.runner == "v2"))
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),  # the timers must be in the process that samples
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)
    if args.threads and device == "cpu":
        os.environ |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if args.model is None or Path(args.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arms = ["plain", *(arm for arm in ARMS if arm in args.arms and arm != "plain")]
    engine = engine_arguments(args.model, device)
    children: dict[bool, Child] = {}
    rows: list[Row] = []
    try:
        for plugin in (False, True):
            children[plugin] = Child(plugin, engine)
        ours = children[True].facts
        origin = {k: v for k, v in ours.items() if not k.endswith("_s")} | provenance(device)
        origin["model"] = Path(engine["model"]).name
        rows.append(first_use(children))
        print("first use: " + ", ".join(f"{k} {v}" for k, v in rows[0].items() if k not in ("benchmark", "what")))
        if args.json:
            write_rows(args.json, [rows[0] | origin])
        for batch in args.batch:
            found = measure(children, batch, args.tokens, args.rounds, arms)
            rows += found
            if args.json:  # at once: a run takes minutes
                write_rows(args.json, [row | origin for row in found])
    finally:
        for child in children.values():
            child.close()
    table(rows[1:])
    if args.json:
        print(f"{len(rows)} rows appended to {args.json}")


if __name__ == "__main__":
    main()
