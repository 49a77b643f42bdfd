"""The checks of `earlystop doctor`, in the order in which they are shown."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import msgspec

from earlystop.engine import compat


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    state: Literal["ok", "note", "fault"]
    """``fault``: early stopping does not work here because of it."""
    text: str
    remedy: str = ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> list[Finding]:
    found = ", ".join(
        f"{name} {version}" for name in ("earlystop", "torch", "triton", "numba") if (version := _version(name))
    )
    return [Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}; {found}")]


def _vllm() -> list[Finding]:
    version = compat.vllm_version()
    reason = compat.unsupported_reason()
    if reason:
        return [Finding("vllm", "fault", reason, "pip install 'earlystop[gpu]', or 'earlystop[cpu]' without a GPU")]
    numbers = tuple(int(part) for part in (version or "0").split("+")[0].split(".")[:2] if part.isdigit())
    tested = compat.TESTED_FROM <= numbers < compat.TESTED_BELOW
    return [Finding("vllm", "ok" if tested else "note", f"{version}, {'tested' if tested else 'untested but allowed'}")]


def _disabled() -> list[Finding]:
    if compat.disabled():
        return [Finding("switch", "fault", "EARLYSTOP_DISABLE=1 makes the plugin inert", "unset EARLYSTOP_DISABLE")]
    return []


def _quietly() -> contextlib.ExitStack:
    """vLLM talks while it is imported."""
    stack = contextlib.ExitStack()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    return stack


def _loaders() -> list[Finding]:
    """Whether the entry points are there and both of vLLM's loaders take the class."""
    if compat.vllm_version() is None:
        return []
    found = []
    for group in ("vllm.logits_processors", "vllm.general_plugins"):
        names = [point.name for point in metadata.entry_points(group=group) if point.value.startswith("earlystop.")]
        if not names:
            remedy = "install the package (pip install -e . in a checkout); a bare source folder has no entry points"
            found.append(Finding("entry points", "fault", f"no entry point of ours in {group}", remedy))
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "earlystop" not in plugins.split(","):
        text = f"VLLM_PLUGINS={plugins!r} leaves out our general plugin: no unit similarity"
        found.append(Finding("VLLM_PLUGINS", "note", text, "add earlystop to VLLM_PLUGINS"))
    if found and found[0].state == "fault":
        return found
    with _quietly():
        from earlystop.engine.launch import plugin_classes

        classes = plugin_classes()
    for runner, ours in classes.items():
        state: Literal["ok", "fault"] = "ok" if len(ours) == 1 else "fault"
        text = f"vLLM's {runner} loader takes {ours[0]}" if ours else f"vLLM's {runner} loader does not take our class"
        found.append(Finding(f"plugin, {runner}", state, text if len(ours) < 2 else f"loaded {len(ours)} times"))
    return found


def _runner() -> list[Finding]:
    if compat.vllm_version() is None:
        return []
    with _quietly():
        from earlystop.engine.launch import machine

        seen = machine()
    device = Finding("device", "ok", seen["device"])
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if seen["has_triton"]:
        driver = Finding("triton", "ok", "has a working driver")
        text = "V2, vLLM's default where Triton works (V1 for models and features that V2 lacks)"
    else:
        driver = Finding("triton", "note", "no driver here (no GPU): the compiled CPU path measures the logits")
        text = "V1, since V2 needs Triton; `async_scheduling` is switched off by earlystop run and serve"
    if forced in ("0", "1"):
        text = f"V{2 if forced == '1' else 1}, forced by VLLM_USE_V2_MODEL_RUNNER={forced}"
        if forced == "1" and not seen["has_triton"]:
            return [device, driver, Finding("runner", "fault", text + ", which cannot work without Triton", "unset it")]
    return [device, driver, Finding("runner", "ok", text)]


def _compiled() -> list[Finding]:
    """numba, and whether it has compiled the decision already."""
    if util.find_spec("numba") is None:
        remedy = "pip install numba"
        return [Finding("cpu path", "note", "numba is missing: on a CPU the decision runs in slow Python", remedy)]
    from earlystop.control import lower

    root = Path(os.environ.get("EARLYSTOP_CACHE", Path.home() / ".cache" / "earlystop"))
    kept = root / "numba" / lower.source_hash()[:16]
    done = kept.is_dir() and any(kept.rglob("*.nbc"))
    text = f"numba {_version('numba')}; " + (
        "the decision is compiled and cached" if done else "the first request compiles the decision, once a machine"
    )
    return [Finding("cpu path", "ok", text)]


def _environment() -> list[Finding]:
    set_ = {k: v for k, v in sorted(os.environ.items()) if k.startswith("EARLYSTOP_") and not k.endswith("_KEY")}
    return [
        Finding("environment", "ok", ", ".join(f"{k}={v}" for k, v in set_.items()) or "no EARLYSTOP_ variable is set")
    ]


def _bus() -> list[Finding]:
    if util.find_spec("zmq") is None:
        return [Finding("bus", "fault", "pyzmq is missing: no signals", "pip install 'earlystop[bus]'")]
    from earlystop.bus import Publisher, SinkReader, default_endpoint
    from earlystop.errors import EarlyStopError

    try:
        with SinkReader(export=False):
            pass
        endpoint = default_endpoint()
        publisher = Publisher(None, buffer_steps=1)
        publisher.close()
    except EarlyStopError as error:
        return [Finding("bus", "fault", str(error), "check EARLYSTOP_BUS and the rights of its folder")]
    return [Finding("bus", "ok", f"can be opened: {endpoint}")]


def _configuration() -> list[Finding]:
    from earlystop.config import load_config
    from earlystop.errors import EarlyStopError
    from earlystop.profile import Profile

    try:
        config = load_config()
    except EarlyStopError as error:
        return [Finding("configuration", "fault", str(error), "mend the file, or unset EARLYSTOP_CONFIG")]
    found = [Finding("configuration", "ok", config.describe())]
    for name, path in config.profiles.items():
        try:
            tasks = Profile.load(path).tasks
        except EarlyStopError as error:
            found.append(Finding(f"profile {name}", "fault", str(error), "make the profile again, or take it out"))
        else:
            found.append(Finding(f"profile {name}", "ok", f"valid; tasks {', '.join(tasks)}"))
    return found


def _torchvision() -> list[Finding]:
    """A torchvision that cannot import stops transformers at the first model."""
    if util.find_spec("torchvision") is None or "torch" not in sys.modules:
        return []
    try:
        with _quietly():
            __import__("torchvision")
    except Exception as error:
        remedy = "pip uninstall torchvision torchaudio torchcodec"
        return [Finding("torchvision", "fault", f"cannot be imported, so no model loads: {error}", remedy)]
    return []


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _python,
    _vllm,
    _disabled,
    _loaders,
    _runner,
    _torchvision,
    _compiled,
    _environment,
    _bus,
    _configuration,
)
