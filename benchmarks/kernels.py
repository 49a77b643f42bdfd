"""The statistics kernel against torch, torch.compile and a copy of the same bytes: ``python -m benchmarks.kernels``.

``share`` is the kernel's bandwidth over the copy's, paired by round: (B / t_kernel) / (2B / t_copy), since a copy
moves each of the B bytes of logits twice, in and out. On a CPU the whole runs on one thread.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable

import torch

from benchmarks.measure import Row, Timer, interval_fields, provenance, show, write_rows
from benchmarks.synthetic import Decoding
from earlystop.kernels import mask, similarity, stats

VOCABULARIES = (32_000, 49_152, 128_256, 151_936)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = ("vocab", "rows", "dtype", "kernel µs", "95 %", "GB/s", "share of copy", "× torch", "× compiled")


def torch_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-1 and entropy as one would write them in torch."""
    x = logits.float()
    shifted = x - x.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    return 1 / total, total.log() - (weights * shifted).sum(dim=-1) / total


def subjects(logits: torch.Tensor, compiled: Callable[..., object] | None) -> dict[str, Callable[[], object]]:
    """What is timed on these logits."""
    rows, vocab = logits.shape
    ending = torch.tensor([[vocab // 2, -1, -1, -1], [vocab - 1, 0, -1, -1]], dtype=torch.int32, device=logits.device)
    out = stats.alloc_stats(rows, logits.device)
    target = torch.empty_like(logits)
    what: dict[str, Callable[[], object]] = {
        "earlystop": lambda: stats.logit_stats(logits, ending, out),
        "copy": lambda: target.copy_(logits),
        "torch": lambda: torch_stats(logits),
    }
    if compiled is not None:
        what["compile"] = lambda: compiled(logits)
    return what


def compiled_stats(device: str) -> Callable[..., object] | None:
    """`torch_stats` under torch.compile, or None with a word of why."""
    compiled = torch.compile(torch_stats)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(torch.zeros(2, 64, dtype=torch.bfloat16, device=device))
    except Exception as error:  # a missing C++ compiler shows as one of many types
        print(f"torch.compile is left out: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        return None
    return compiled


def measure(
    timer: Timer, shapes: Iterable[tuple[int, int, str]], count: int, *, compile_rows: Iterable[int] = ()
) -> list[Row]:
    """One row a shape (rows, vocabulary, dtype). torch.compile joins at the batch sizes in ``compile_rows``."""
    generator = torch.Generator(device=timer.device).manual_seed(0)
    wanted = set(compile_rows)
    compiled = compiled_stats(timer.device) if wanted else None
    found = []
    for rows, vocab, name in shapes:
        logits = torch.randn(rows, vocab, device=timer.device, generator=generator).mul_(4).to(DTYPES[name])
        if rows in wanted:
            torch._dynamo.reset()  # one shape at a time: static code, no limit on how many
        times = timer.rounds(subjects(logits, compiled if rows in wanted else None), count)
        size = logits.numel() * logits.element_size()
        row: Row = {"benchmark": "kernels", "what": "logit_stats", "rows": rows, "vocab": vocab, "dtype": name}
        row |= {"rounds": count, "bytes": size, "launches": launches(rows, vocab, logits.element_size(), timer.device)}
        for subject, values in times.items():
            row |= interval_fields(f"{subject}_us", values)
        ours = times["earlystop"]
        row |= interval_fields("gbps", [size / t / 1e3 for t in ours])
        row |= interval_fields("copy_gbps", [2 * size / t / 1e3 for t in times["copy"]])
        row |= interval_fields("share_of_copy", [c / (2 * t) for c, t in zip(times["copy"], ours, strict=True)])
        for other in ("torch", "compile"):
            if other in times:
                row |= interval_fields(f"over_{other}", [o / t for o, t in zip(times[other], ours, strict=True)])
        found.append(row)
    return found


def launches(rows: int, vocab: int, itemsize: int, device: str) -> int | None:
    """Kernel launches a call takes on a GPU."""
    if device == "cpu":
        return None
    from earlystop.kernels import triton_stats

    return 1 if triton_stats.plan(rows, vocab, 16 // itemsize)[2] == 1 else 2


def step_calls(
    device: str, rows: int = 64, vocab: int = 151_936, hidden: int = 4096
) -> dict[str, Callable[[], object]]:
    """The kernels of one decoding step with their buffers allocated: for their own times and the zero-sync proof."""
    ints = {"dtype": torch.int32, "device": device}
    logits = torch.randn(rows, vocab, device=device)
    raw = logits.bfloat16()
    ending = torch.tensor([[vocab // 2, -1], [vocab - 1, 0]], **ints)
    out = stats.alloc_stats(rows, device)
    nothing, reserved = torch.full((rows,), -1, **ints), torch.arange(8, **ints)
    flags, zeros, slots = torch.full((rows,), 3, **ints), torch.zeros(rows, **ints), torch.arange(rows, **ints)
    scratch = torch.empty(rows, **ints)
    one = nothing.clone()
    one[-1] = 9
    state = similarity.alloc_units(rows, hidden, device)
    states = torch.randn(rows, hidden, device=device).bfloat16()
    pending = torch.zeros(rows, 1, hidden, dtype=torch.bfloat16, device=device)
    ends, cosine = torch.ones(rows, 1, **ints), torch.empty(rows, 1, device=device)
    ones = torch.ones(rows, **ints)
    fixed = (ending, reserved, zeros)
    return {
        "logit_stats": lambda: stats.logit_stats(raw, ending, out),
        "write_rows idle": lambda: mask.write_rows(logits, nothing, zeros, *fixed, scratch=scratch),
        "write_rows masks": lambda: mask.write_rows(logits, nothing, flags, *fixed, scratch=scratch),
        "write_rows one forced": lambda: mask.write_rows(logits, one, zeros, *fixed, scratch=scratch),
        "stash_hidden": lambda: similarity.stash_hidden(states, slots, zeros, pending),
        "unit_similarity": lambda: similarity.unit_similarity(pending, ones, ends, slots, state, cosine),
    }


def measure_step(timer: Timer, rows: int, vocab: int, hidden: int, count: int) -> list[Row]:
    """Microseconds of each kernel of a step."""
    times = timer.rounds(step_calls(timer.device, rows, vocab, hidden), count)
    shape = {"benchmark": "kernels", "rows": rows, "vocab": vocab, "hidden": hidden, "rounds": count}
    return [shape | {"what": name} | interval_fields("earlystop_us", values) for name, values in times.items()]


class Step:
    """A call of a decoding step that needs the engine's part before it (`Timer.rounds` calls ``prepare`` untimed)."""

    def __init__(self, decoding: Decoding, call: Callable[[], object]) -> None:
        self.prepare = decoding.advance
        self._call = call

    def __call__(self) -> object:
        """Runs it."""
        return self._call()


def apply_calls(device: str, rows: int, vocab: int, hidden: int) -> dict[str, Callable[[], object]]:
    """The plugin's part of a decoding step, whole and in pieces, and what it is compared with."""
    raw = torch.randn(rows, vocab, device=device).mul_(4).bfloat16()
    logits, target = raw.float(), torch.empty_like(raw)
    runs = [Decoding(device, rows, vocab, hidden) for _ in range(3)]
    for run in runs:
        run.tap(raw)

    def whole() -> None:
        runs[0].tap(raw)
        runs[0].apply(logits)

    return {
        "tap": lambda: runs[1].tap(raw),
        "decide": Step(runs[2], lambda: runs[2].decide(runs[2].out.values, runs[2].out.argmax)),
        "apply": Step(runs[1], lambda: runs[1].apply(logits)),
        "tap + apply": Step(runs[0], whole),
        "torch": lambda: torch_stats(raw),
        "copy": lambda: target.copy_(raw),
    }


def measure_apply(timer: Timer, batches: Iterable[int], vocab: int, hidden: int, count: int) -> list[Row]:
    """Microseconds of the plugin's part of a step: no engine, random text, every rule computed, none fires."""
    found = []
    for rows in batches:
        times = timer.rounds(apply_calls(timer.device, rows, vocab, hidden), count)
        row: Row = {"benchmark": "kernels", "what": "apply", "rows": rows, "vocab": vocab, "hidden": hidden}
        row |= {"dtype": "bf16", "rounds": count}
        for name, values in times.items():
            row |= interval_fields(f"{name.replace(' + ', '_')}_us", values)
        for other in ("torch", "copy"):
            pairs = zip(times[other], times["tap + apply"], strict=True)
            row |= interval_fields(f"over_{other}", [theirs / ours for theirs, ours in pairs])
        found.append(row)
    return found


def apply_table(rows: Iterable[Row]) -> None:
    """Print what `measure_apply` found."""
    names = ("tap", "decide", "apply", "tap_apply", "torch", "copy")
    lines = [(r["vocab"], r["rows"], *(f"{r[f'{name}_us']:.1f}" for name in names), r["over_torch"]) for r in rows]
    columns = ("vocab", "rows", "tap", "decide", "apply", "tap + apply", "torch statistics", "copy", "× torch")
    show("the plugin's part of a step, µs", columns, lines)


def zero_sync() -> Row:
    """Run a step's kernels while any synchronisation raises, and count what they allocate.

    Raises:
        RuntimeError: from torch, naming the synchronising call.
    """
    calls = step_calls("cuda", rows=64, vocab=151_936, hidden=4096)
    for call in calls.values():
        call()  # compile first
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for call in calls.values():
                call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    return {"benchmark": "kernels", "what": "zero_sync", "calls": list(calls), "syncs": 0, "allocations": allocated}


def table(rows: Iterable[Row]) -> None:
    """Print what `measure` found."""
    lines = []
    for r in rows:
        interval = f"{r['earlystop_us_low']:.1f}-{r['earlystop_us_high']:.1f}"
        share = f"{r['share_of_copy']:.0%} ({r['share_of_copy_low']:.0%}-{r['share_of_copy_high']:.0%})"
        ratios = [f"{r[key]:.1f}" if key in r else "" for key in ("over_torch", "over_compile")]
        size = (r["vocab"], r["rows"], r["dtype"])
        lines.append((*size, f"{r['earlystop_us']:.1f}", interval, f"{r['gbps']:.0f}", share, *ratios))
    show("logit_stats", COLUMNS, lines)


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print, and append JSON rows where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", help="batch sizes; default 1 to 512 on a GPU, 1, 8, 32 on a CPU")
    parser.add_argument("--vocab", type=int, nargs="+", help="vocabularies; default 32k to 152k on a GPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), nargs="+", default=["bf16"])
    parser.add_argument("--rounds", type=int, default=50, help="timed runs of each subject (default 50)")
    parser.add_argument("--hidden", type=int, default=4096, help="width of the hidden states (default 4096)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU (default 1)")
    parser.add_argument("--json", metavar="OUT", help="append one JSON row a measurement to this file")
    args = parser.parse_args(arguments)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    batches = args.rows or ([1, 8, 32, 64, 128, 256, 512] if args.device == "cuda" else [1, 8, 32])
    vocabularies = args.vocab or (VOCABULARIES if args.device == "cuda" else (49_152, 151_936))
    timer = Timer(args.device)
    shapes = [(rows, vocab, dtype) for dtype in args.dtype for vocab in vocabularies for rows in batches]
    found = measure(timer, shapes, args.rounds, compile_rows=() if args.no_compile else batches[-1:])
    table(found)
    step = measure_step(timer, batches[-1], vocabularies[-1], args.hidden, args.rounds)
    found += step
    fields = ("earlystop_us", "earlystop_us_low", "earlystop_us_high")
    lines = [(r["what"], *(f"{r[field]:.1f}" for field in fields)) for r in step]
    show(
        f"one step, {batches[-1]} rows × {vocabularies[-1]}, hidden {args.hidden}", ("call", "µs", "low", "high"), lines
    )
    applied = [row for vocab in vocabularies for row in measure_apply(timer, batches, vocab, args.hidden, args.rounds)]
    apply_table(applied)
    found += applied
    if args.device == "cuda":
        found.append(zero_sync())
        print(f"zero-sync proof: {found[-1]['syncs']} synchronisations, {found[-1]['allocations']} allocations")
    if args.json:
        origin = provenance(args.device)
        write_rows(args.json, [row | origin for row in found])
        print(f"{len(found)} rows appended to {args.json}")


if __name__ == "__main__":
    main()
