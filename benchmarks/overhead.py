"""What the plugin costs inside vLLM: ``python -m benchmarks.overhead``.

One run, rounds interleaved, on one model: plain vLLM (our entry points hidden from it), installed but not asked,
`observe`, active but never firing, and plain with logprobs=20, which is how others get their signals. Two engines live
in child processes; the one that is not measured is stopped (SIGSTOP), so that not even its idle threads run. The order
of the arms turns from round to round.

The engine that starts second is the faster one, whichever it is, by some 5 % for as long as both live (seen on a CPU).
So everything is done twice, with the plain engine started first and with the plain engine started second, and every
ratio is the geometric mean of the two.

Every request generates exactly ``--tokens`` tokens (min_tokens = max_tokens, greedy, in all arms). Reported:

* tokens/s: tokens of all requests over the seconds from the first engine step to the last
* ratio: tokens/s over that of plain in the same rounds; median over rounds, 95 % interval bootstrapped over rounds
* same: the ratio to "not asked", which runs in the same process
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
import math
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
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


Half = dict[str, list[dict[str, Any]]]  # results by arm, one a round, of one order of starting


def collect(children: dict[bool, Child], batch: int, tokens: int, rounds: int, arms: Sequence[str]) -> Half:
    """Runs all rounds at this batch size, and one more of every arm with the plugin, with timers on."""
    from earlystop.demo.prompts import DEMO_PROMPTS

    prompts = [DEMO_PROMPTS[i % len(DEMO_PROMPTS)].text for i in range(batch)]
    base = {"temperature": 0.0, "min_tokens": tokens, "max_tokens": tokens}

    def ask(arm: str, method: str = "run", **more: Any) -> dict[str, Any]:
        plugin, sampling = ARMS[arm]
        before = machine_seconds()
        found = children[plugin].ask(method, prompts, base | sampling | more)
        expected = batch * more.get("max_tokens", tokens)
        if found["tokens"] != expected:
            raise RuntimeError(f"{arm} gave {found['tokens']} tokens instead of {expected}: the arms do not compare")
        others = max(0.0, machine_seconds() - before - found["cpu_seconds"]) / found["seconds"]
        return found | {"others": others, "load": os.getloadavg()[0]}

    for arm in arms:  # fills the prefix cache and whatever is made at a first call
        ask(arm, min_tokens=8, max_tokens=8)
    half: Half = {arm: [] for arm in arms}
    for number in range(rounds):
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            half[arm].append(ask(arm))
        load = half[arms[0]][-1]["load"]
        print(f"batch {batch}: round {number + 1} of {rounds}, load {load:.1f}", file=sys.stderr, flush=True)
    for arm in arms:
        if ARMS[arm][0]:
            half[arm][-1]["timed"] = ask(arm, "run_timed")
    return half


def paired(halves: Sequence[Half], arm: str, base: str, value: Callable[[dict[str, Any]], float]) -> list[float]:
    """`value` of an arm over that of another, round by round, as the geometric mean over the halves."""
    logs = [
        [math.log(value(mine) / value(other)) for mine, other in zip(half[arm], half[base], strict=True)]
        for half in halves
    ]
    return [math.exp(statistics.fmean(of_round)) for of_round in zip(*logs, strict=True)]


def summarise(batch: int, tokens: int, halves: Sequence[Half]) -> list[Row]:
    """One row an arm."""
    rows = []
    for arm in halves[0]:
        mine = [result for half in halves for result in half[arm]]
        row: Row = {"benchmark": "overhead", "what": arm, "batch": batch, "tokens": tokens}
        row |= {"rounds": len(halves[0][arm]), "orders": len(halves)}
        for name, digits, scale, value in (
            ("load_1min", 1, 1.0, lambda r: r["load"]),
            ("others_cpus", 2, 1.0, lambda r: r["others"]),
            ("tokens_per_s", 1, 1.0, speed),
            ("step_ms", 3, 1e3, lambda r: statistics.median(r["decode_steps"])),
            ("step_ms_p10", 3, 1e3, tenth),
            ("tpot_ms", 3, 1e3, lambda r: r["tpot"]),
            ("cpu_ms_per_token", 3, 1e3, lambda r: r["cpu_seconds"] / r["tokens"]),
        ):
            row[name] = round(statistics.median(map(value, mine)) * scale, digits)
        for name, base, value in (
            ("ratio", "plain", speed),
            ("step_ratio", "plain", lambda r: 1 / tenth(r)),
            ("cpu_ratio", "plain", lambda r: 1 / r["cpu_seconds"]),
            ("same_ratio", "not asked", speed),
        ):
            if name != "same_ratio" or (ARMS[arm][0] and base in halves[0]):
                values = interval(paired(halves, arm, base, value))
                row |= {key: round(v, 4) for key, v in zip((name, f"{name}_low", f"{name}_high"), values, strict=True)}
        if ARMS[arm][0]:
            row |= own_time([half[arm][-1]["timed"] for half in halves])
        if arm in BARS:
            row |= {"bar": BARS[arm], "meets_bar": row["ratio_high"] >= BARS[arm]}
            row |= {"own_share_bar": OWN_SHARE_BAR, "meets_own_share": row["own_share"] <= OWN_SHARE_BAR}
        rows.append(row)
    return rows


def speed(result: dict[str, Any]) -> float:
    """Tokens per second of a run."""
    return float(result["tokens"] / result["seconds"])


def tenth(result: dict[str, Any]) -> float:
    """Tenth percentile of a run's decode steps (sorted by the child)."""
    steps: list[float] = result["decode_steps"]
    return steps[len(steps) // 10]


def own_time(timed: Sequence[dict[str, Any]]) -> Row:
    """Our share of the engine's steps, and microseconds a step of every stage."""
    steps, seconds = sum(run["steps"] for run in timed), sum(run["seconds"] for run in timed)
    stages = {name: sum(run["stages"][name]["seconds"] for run in timed) for name in timed[0]["stages"]}
    own = sum(spent for name, spent in stages.items() if name[0] != " " and name != "publisher thread")
    row: Row = {"own_share": round(own / seconds, 5), "own_us_per_step": round(own / steps * 1e6, 1)}
    row["stages_us_per_step"] = {name.strip(): round(spent / steps * 1e6, 1) for name, spent in stages.items()}
    return row


def spread(row: Row, name: str) -> str:
    """A ratio with its interval, empty where the row has none."""
    return f"{row[name]:.3f} ({row[name + '_low']:.3f}-{row[name + '_high']:.3f})" if name in row else ""


def table(rows: Sequence[Row]) -> None:
    """Prints the rows, then where our time goes."""
    lines = []
    for r in rows:
        bar = "" if "bar" not in r else f"{'met' if r['meets_bar'] else 'MISSED'} (≥ {r['bar']})"
        share = f"{r['own_share']:.2%}" if "own_share" in r else ""
        ratios = [spread(r, name) for name in ("ratio", "step_ratio", "cpu_ratio", "same_ratio")]
        lines.append((r["batch"], r["what"], r["tokens_per_s"], *ratios, r["step_ms_p10"], r["tpot_ms"], share, bar))
    columns = (
        "batch",
        "arm",
        "tokens/s",
        "ratio (95 %)",
        "of steps",
        "of CPU",
        "same",
        "step ms",
        "TPOT ms",
        "own",
        "bar",
    )
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
    parser.add_argument("--rounds", type=int, default=5, help="rounds for each order of starting (default 5)")
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
    halves: dict[int, list[Half]] = {batch: [] for batch in args.batch}
    rows: list[Row] = []
    for order in ((False, True), (True, False)):
        children: dict[bool, Child] = {}
        try:
            for plugin in order:
                children[plugin] = Child(plugin, engine)
            rows.append(first_use(children))
            for batch in args.batch:
                halves[batch].append(collect(children, batch, args.tokens, args.rounds, arms))
            ours = children[True].facts
        finally:
            for child in children.values():
                child.close()
    origin = {k: v for k, v in ours.items() if not k.endswith("_s")} | provenance(device)
    origin["model"] = Path(engine["model"]).name
    for row in rows:
        print("first use: " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("benchmark", "what")))
    rows += [row for batch, both in halves.items() for row in summarise(batch, args.tokens, both)]
    if args.json:
        write_rows(args.json, [row | origin for row in rows])
    table([row for row in rows if row["what"] in ARMS])
    if args.json:
        print(f"{len(rows)} rows appended to {args.json}")


if __name__ == "__main__":
    main()
