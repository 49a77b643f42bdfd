"""Everything that needs a GPU, in one call of under five minutes: ``python -m benchmarks.gpu_checks [--out FOLDER]``.

1. the kernels against the float64 reference, with the tests of tests/kernels
2. the same bits on every run and with any neighbours
3. the zero-sync proof
4. the bandwidth table against the bar (80 % of a copy's bandwidth at bf16, vocabulary 151,936, batch 64 and up)
5. the other kernels of a step, and the chained launch of the combining kernel against the plain one
6. the decision kernels against numba (or plain Python) on random histories, bit by bit, drafts included
7. the plugin's whole part of a step: launches, synchronisations, allocations, time

Needs torch and triton; pytest for the first. Writes ``gpu_checks.jsonl`` (one row a measurement, with provenance) and
exits with the number of failed checks. A check is a function that returns rows, listed in `CHECKS`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks import kernels
from benchmarks.measure import Row, Timer, provenance, show, write_rows
from benchmarks.synthetic import Decoding, Oracle, difference
from earlystop.control import layout
from earlystop.control.state import Controller
from earlystop.kernels import cpu, stats

ROOT = Path(__file__).resolve().parent.parent
MOST_LAUNCHES = 9  # statistics 1 or 2, scan, unit similarity, stash, judge, mask 2; one to spare
BAR, BAR_ROWS, BAR_VOCAB = 0.80, 64, 151_936


class CheckError(RuntimeError):
    """A check found something wrong; its message says what."""


def correctness() -> list[Row]:
    """The test suite of the kernels on the device."""
    env = os.environ | {"EARLYSTOP_TEST_KERNELS": "triton", "EARLYSTOP_TEST_DEVICE": "cuda", "PYTHONPATH": str(ROOT)}
    env.pop("TRITON_INTERPRET", None)
    # Without the project's pytest configuration: its plugins need not be here.
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests" / "kernels" / f"test_{name}.py") for name in ("stats", "mask", "similarity")]
    done = subprocess.run(  # noqa: S603  # our own interpreter
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150
    )
    print(done.stdout[-3000:])
    if done.returncode:
        raise CheckError(f"the kernel tests fail on the device:\n{done.stderr[-2000:]}")
    return [{"what": "kernel_tests", "closing_line": done.stdout.strip().splitlines()[-1]}]


def determinism() -> list[Row]:
    """A hundred runs give the same bits, split or not; a row's bits do not depend on the other rows' values."""
    for rows in (8, 256):
        logits = torch.randn(rows, BAR_VOCAB, device="cuda").mul_(4).bfloat16()
        ending = torch.tensor([[7, -1], [9, 11]], dtype=torch.int32, device="cuda")
        first = stats.logit_stats(logits, ending)
        for _ in range(100):
            again = stats.logit_stats(logits, ending)
            if not (torch.equal(first.values, again.values) and torch.equal(first.argmax, again.argmax)):
                raise CheckError(f"two runs over {rows} rows differ")
        flipped = stats.logit_stats(logits.flip(0), ending)
        if not torch.equal(first.values, flipped.values.flip(0)):
            raise CheckError(f"a row's statistics depend on its neighbours at {rows} rows")
    return [{"what": "determinism", "runs": 100, "equal": True}]


def zero_sync() -> list[Row]:
    """No synchronisation and no allocation in a step's kernels."""
    row = kernels.zero_sync()
    print(f"zero-sync: {row['syncs']} synchronisations, {row['allocations']} allocations")
    if row["allocations"]:
        raise CheckError(f"a step's kernels allocate {row['allocations']} times with all buffers given")
    return [row]


def bandwidth() -> list[Row]:
    """The table, and the bar."""
    timer = Timer("cuda")
    batches = (1, 8, 32, 64, 128, 192, 256, 512)
    shapes = [(rows, vocab, "bf16") for vocab in (32_000, 49_152, 128_256, BAR_VOCAB) for rows in batches]
    shapes += [(rows, BAR_VOCAB, "fp32") for rows in (64, 256)]
    rows = kernels.measure(timer, shapes, 60, compile_rows=(64,))
    kernels.table(rows)
    peak = max(row["copy_gbps"] for row in rows)
    for row in rows:
        row["share_of_peak_copy"] = round(row["gbps"] / peak, 3)
    judged = [r for r in rows if r["dtype"] == "bf16" and r["vocab"] == BAR_VOCAB and r["rows"] >= BAR_ROWS]
    for row in judged:
        row["meets_bar"] = row["share_of_copy_high"] >= BAR
        verdict = "met" if row["meets_bar"] else "MISSED"
        print(
            f"bar {BAR:.0%} at {row['rows']} rows: {verdict}, {row['share_of_copy']:.1%} of the copy of the same bytes,"
        )
        print(f"  {row['share_of_peak_copy']:.1%} of the best copy in this run ({peak:.0f} GB/s)")
    return rows


def chained() -> list[Row]:
    """The combining kernel launched plainly and chained, interleaved; same bits expected."""
    from earlystop.kernels import triton_stats

    timer, rows = Timer("cuda"), []
    for batch in (1, 8, 64, 128):
        logits = torch.randn(batch, BAR_VOCAB, device="cuda").bfloat16()
        ending = torch.tensor([[7, -1], [9, 11]], dtype=torch.int32, device="cuda")
        outs = {name: stats.alloc_stats(batch, "cuda") for name in ("plain", "chained")}

        def call(name: str) -> None:
            triton_stats.CHAINED = name == "chained"
            stats.logit_stats(logits, ending, outs[name])  # noqa: B023  # called within the iteration

        times = timer.rounds({"plain": lambda: call("plain"), "chained": lambda: call("chained")}, 60)
        triton_stats.CHAINED = False
        if not torch.equal(outs["plain"].values, outs["chained"].values):
            raise CheckError(f"chained launch changes bits at batch {batch}")
        row: Row = {"what": "chained", "rows": batch, "vocab": BAR_VOCAB, "dtype": "bf16"}
        for name, values in times.items():
            row |= kernels.interval_fields(f"{name}_us", values)
        rows.append(row)
    show(
        "combining kernel",
        ("rows", "plain µs", "chained µs"),
        [(r["rows"], r["plain_us"], r["chained_us"]) for r in rows],
    )
    return rows


def step() -> list[Row]:
    """The other kernels of a decoding step."""
    rows = [row for batch in (8, 64, 256) for row in kernels.measure_step(Timer("cuda"), batch, BAR_VOCAB, 4096, 40)]
    show("kernels of a step", ("rows", "call", "µs"), [(r["rows"], r["what"], r["earlystop_us"]) for r in rows])
    return rows


def compare_decisions(device: str, requests: int, steps: int, depth: int, oracle: type[Controller]) -> Row:
    """Random histories on the device and on the oracle, compared bit by bit after every step.

    Half of the requests think; budgets run out, closing sequences are forced and followed, with ``depth`` > 1 drafts
    are accepted and rejected. Similarity is left out: it is a measurement, and its last bit may differ.

    Raises:
        CheckError: naming the first value that differs.
    """
    vocab = 4096
    here = Decoding(device, requests, vocab, depth=depth, fires=True)
    there = Decoding("cpu", requests, vocab, depth=depth, fires=True, controller=oracle)
    draw = np.random.default_rng(1)
    bits = forced = 0
    for number in range(steps):
        accepted = int(draw.integers(1, depth + 1))
        shape = (requests * depth, 4)
        stats = torch.from_numpy(draw.random(shape).astype(np.float32))
        stats[torch.from_numpy(draw.random(shape[0]) < 0.02)] = float("nan")
        argmax = torch.from_numpy(draw.integers(-1, vocab, shape[0]).clip(-1 if number % 97 == 96 else 0)).int()
        for run in (here, there):
            run.advance(accepted)
            verdict = run.decide(stats.to(run.device), argmax.to(run.device))
        if found := difference(here.controller, there.controller):
            raise CheckError(f"step {number}, depth {depth}: device and oracle differ in {found}")
        report = there.controller.report[:, layout.R_BITS][there.controller.report[:, layout.R_SLOT] >= 0]
        bits |= int(np.bitwise_or.reduce(report.numpy().astype(np.int64)))
        forced += int((verdict.force >= 0).sum())
    row: Row = {"what": "decision equals oracle", "oracle": oracle.__name__, "requests": requests, "depth": depth}
    return row | {"steps": steps, "outcome_bits": bits, "forced_rows": forced, "equal": True}


def decision() -> list[Row]:
    """The decision kernels give the bits of numba, or of plain Python where numba is missing."""
    oracle: type[Controller] = Controller if cpu.available() else Oracle
    size = (64, 700) if oracle is Controller else (8, 350)
    rows = [compare_decisions("cuda", *size, depth, oracle) for depth in (1, 4)]
    for row in rows:
        print(f"depth {row['depth']}: {row['steps']} steps × {row['requests']} requests equal {row['oracle']}")
        if not row["outcome_bits"] & layout.O_CLOSING or not row["forced_rows"]:
            raise CheckError("the histories never came to a forced token: the comparison says nothing")
    return rows


def decision_step() -> list[Row]:
    """The plugin's part of a step: launches, synchronisations, allocations, microseconds."""
    rows = []
    for batch in (1, 64, 256):
        run = Decoding("cuda", batch, BAR_VOCAB, 4096)
        raw = torch.randn(batch, BAR_VOCAB, device="cuda").bfloat16()
        logits = raw.float()

        def once() -> None:
            run.tap(raw)  # noqa: B023  # called within the iteration
            run.apply(logits)  # noqa: B023

        for _ in range(3):
            run.advance()
            once()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                once()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        start = time.perf_counter()
        for _ in range(50):
            once()
        host = (time.perf_counter() - start) / 50 * 1e6
        torch.cuda.synchronize()
        row: Row = {"what": "decision_step", "rows": batch, "vocab": BAR_VOCAB, "syncs": 0, "allocations": allocated}
        rows.append(row | {"host_us": round(host, 1), "launches": launches_of(once)})
    counts = {row["launches"] for row in rows if row["launches"] is not None}
    for row in rows:
        print(f"{row['rows']} rows: {row['launches']} launches, host {row['host_us']} µs, no synchronisation")
    if counts and max(counts) > MOST_LAUNCHES:
        raise CheckError(f"a step takes {max(counts)} launches, {MOST_LAUNCHES} are expected at most")
    timed = kernels.measure_apply(Timer("cuda"), (1, 8, 32, 64, 128, 256, 512), BAR_VOCAB, 4096, 40)
    kernels.apply_table(timed)
    return [*rows, *timed]


def launches_of(call: Callable[[], object]) -> int | None:
    """Kernels that a call launches, None where the profiler does not work."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kinds = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    except Exception as error:  # CUPTI is missing or refused: the count is the only thing lost
        print(f"no profiler here: {type(error).__name__}: {error}")
        return None
    return len(kinds) or None


#: Run in this order: a function that raises `CheckError` or returns rows.
CHECKS: dict[str, Callable[[], list[Row]]] = {
    "correctness": correctness,
    "determinism": determinism,
    "zero_sync": zero_sync,
    "bandwidth": bandwidth,
    "chained": chained,
    "step": step,
    "decision": decision,
    "decision_step": decision_step,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, write their rows, return the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_checks", description=(__doc__ or "").split("\n")[0])
    default = os.environ.get("OUT") or str(ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--out", default=default, help="folder for gpu_checks.jsonl (default $OUT or benchmarks/results)"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), help="run these checks only")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 1
    origin, failed = provenance("cuda"), 0
    target = Path(args.out) / "gpu_checks.jsonl"
    for name in args.only or CHECKS:
        start = time.perf_counter()
        try:
            found = CHECKS[name]()
            status = "passed"
        except Exception as error:  # the other checks still run on a machine lent for minutes
            found, status = [{"what": name, "error": f"{type(error).__name__}: {error}"[:4000]}], "FAILED"
            failed += 1
            print(found[0]["error"])
        seconds = time.perf_counter() - start
        print(f"== {name}: {status} in {seconds:.0f} s", flush=True)
        write_rows(target, [{"check": name, "status": status, **row, **origin} for row in found])
    print(f"{len(args.only or CHECKS) - failed} checks passed, {failed} failed; rows in {target}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
