"""Compile every Triton kernel for an H100/H200 without one. Run as a script, without ``TRITON_INTERPRET``.

Prints one JSON line a kernel: registers, spills (``stack`` bytes), widest loads, shuffles in the main loop. Where the
machine has no ptxas the kernels are compiled down to PTX.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from earlystop.kernels import triton_mask, triton_similarity, triton_stats

TARGET = GPUTarget("cuda", 90, 32)
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def build(name: str, kernel: Any, types: dict[str, Any], *, warps: int, aligned: tuple[str, ...]) -> dict[str, Any]:
    """One specialisation: a type string makes an argument, anything else a compile-time constant."""
    names = kernel.arg_names
    missing = set(names) ^ set(types)
    if missing:
        raise SystemExit(f"{name}: signature and types differ in {sorted(missing)}")
    signature = {n: types[n] if isinstance(types[n], str) else "constexpr" for n in names}
    constants = {(names.index(n),): v for n, v in types.items() if not isinstance(v, str)}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n in aligned or signature[n][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "enable_fp_fusion": True, "launch_pdl": bool(types.get("CHAINED"))}
    try:
        compiled = triton.compile(source, target=TARGET, options=options)
    except RuntimeError as error:
        if "ptxas" not in str(error):
            raise
        return {"kernel": name, "stopped": str(error), "backend": str(make_backend(TARGET))}
    ptx = compiled.asm["ptx"]
    row: dict[str, Any] = {"kernel": name, "cubin_bytes": len(compiled.asm.get("cubin", b"")), "target": "sm_90a"}
    row["wide_loads"] = len(re.findall(r"ld\.global[^;]*v4\.b32", ptx))
    row["wide_stores"] = len(re.findall(r"st\.global[^;]*v4\.b32", ptx))
    row["exp2"] = len(re.findall(r"ex2\.approx\.ftz", ptx))
    row["waits"] = ptx.count("griddepcontrol.wait")
    row["layout_changes"] = compiled.asm["ttgir"].count("ttg.convert_layout")
    row.update(usage(compiled.asm.get("cubin", b"")))
    return row


def usage(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes a thread, from cuobjdump."""
    tool = BIN / "cuobjdump"
    if not cubin or not tool.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {
        key: int(re.search(rf"{key.upper()}:(\d+)", text)[1])  # type: ignore[index]
        for key in ("reg", "stack")
    }


def stats_types(dtype: str, warps: int, *, split: bool, col_stride: Any = 1) -> dict[str, Any]:
    vec = 4 if dtype == "fp32" else 8
    return {
        "logits_ptr": f"*{dtype}", "row_stride": "i32", "col_stride": col_stride, "vocab": "i32", "part": "i32",
        "ending_ptr": "*i32", "width": "i32", "values_ptr": "*fp32", "argmax_ptr": "*i32", "scratch_ptr": "*fp32",
        "SPLIT": split, "VEC": vec, "THREADS": warps * 32, "CHUNKS": triton_stats.CHUNKS, "WIDTH": 4,
        "SLOTS": triton_stats.MAX_SPLITS, "FIELDS": triton_stats.PARTIAL,
    }  # fmt: skip


def main() -> None:
    """Build all specialisations that serving uses."""
    wide = ("row_stride", "vocab", "hidden")
    for dtype in ("bf16", "fp16", "fp32"):
        for split, warps in ((False, 16), (True, 8)):
            types = stats_types(dtype, warps, split=split)
            report(f"stats {dtype} split={split}", triton_stats._rows_kernel, types, warps, wide)
    report("stats odd vocab", triton_stats._rows_kernel, stats_types("bf16", 8, split=True), 8, ("row_stride",))
    report("stats odd", triton_stats._rows_kernel, stats_types("bf16", 8, split=True), 8, ())
    strided = stats_types("bf16", 8, split=True, col_stride="i32")
    report("stats strided", triton_stats._rows_kernel, strided, 8, wide)
    combine = {k: v for k, v in stats_types("bf16", 1, split=True).items() if k not in ("SPLIT", "THREADS", "CHUNKS")}
    combine["parts"] = combine.pop("part")
    for chained in (False, True):
        types = combine | {"CHAINED": chained}
        report(f"stats combine chained={chained}", triton_stats._combine_kernel, types, 1, wide)

    place = {"logits_ptr": "*fp32", "row_stride": "i32", "col_stride": 1, "vocab": "i32"}
    decide = dict.fromkeys(("force_ptr", "flags_ptr", "grammar_ptr", "ending_ptr", "reserved_ptr"), "*i32")
    decide |= {
        "width": "i32",
        "n_reserved": "i32",
        "verdict_ptr": "*i32",
        "WIDTH": 4,
        "RESERVED": 16,
        "SCAN": triton_mask._SCAN,
    }
    report("mask decide", triton_mask._decide_kernel, place | decide, 4, wide)
    report("mask fill", triton_mask._fill_kernel, place | {"verdict_ptr": "*i32", "FILL": triton_mask._FILL}, 8, wide)

    ints = ("n_commit_ptr", "unit_end_ptr", "slots_ptr", "count_ptr", "valid_ptr")
    floats = ("sum_ptr", "prev_ptr", "centre_ptr", "out_ptr")
    unit = {"pending_ptr": "*bf16", "hidden": "i32"} | dict.fromkeys(ints, "*i32") | dict.fromkeys(floats, "*fp32")
    for block, warps in ((1024, 2), (4096, 8), (8192, 16), (16384, 16)):
        for last in (False, True):
            shape = {"WIDTH": 4, "LAST": last, "CENTRED": True, "BLOCK": block}
            report(f"units {block} last={last}", triton_similarity._unit_kernel, unit | shape, warps, wide)
    stash = {"hidden_ptr": "*bf16", "row_stride": "i32", "row_slot_ptr": "*i32", "row_j_ptr": "*i32"}
    stash |= {"pending_ptr": "*bf16", "width": "i32", "hidden": "i32", "COPY": 2048}
    report("units stash", triton_similarity._stash_kernel, stash, 4, wide)
    reset = {"slots_ptr": "*i32", "sum_ptr": "*fp32", "count_ptr": "*i32", "valid_ptr": "*i32", "hidden": "i32"}
    report("units reset", triton_similarity._reset_kernel, reset | {"COPY": 2048}, 4, wide)


def report(name: str, kernel: Any, types: dict[str, Any], warps: int, aligned: tuple[str, ...]) -> None:
    sys.stdout.write(json.dumps(build(name, kernel, types, warps=warps, aligned=aligned)) + "\n")


if __name__ == "__main__":
    main()
