"""What must be settled before vLLM starts: environment, model runner, scheduling, configuration.

vLLM reads its environment when it is imported or built, and the engine's processes inherit ours, so all of this
happens first. Everything set here is put back by `Surroundings.restore`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from earlystop.config import Config, load_config
from earlystop.engine import compat
from earlystop.errors import ConfigError, IncompatibleEngineError
from earlystop.policy import PRESETS
from earlystop.profile import Profile

Runner = Literal["auto", "v1", "v2"]
_RUNNER_ENV = {"auto": None, "v1": "0", "v2": "1"}


class Surroundings:
    """Environment variables set for the engine, with what they were before."""

    def __init__(self) -> None:
        self._former: dict[str, str | None] = {}
        self._files: list[Path] = []

    def set(self, name: str, value: str | None) -> None:
        """Sets or (None) removes a variable."""
        self._former.setdefault(name, os.environ.get(name))
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def default(self, name: str, value: str) -> None:
        """Sets a variable that nobody has set."""
        if name not in os.environ:
            self.set(name, value)

    def configure(self, config: Config) -> None:
        """Writes `config` where the engine's processes read it."""
        handle, name = tempfile.mkstemp(prefix="earlystop-", suffix=".toml")
        os.close(handle)
        self._files.append(Path(name))
        config.dump_toml(name)
        self.set("EARLYSTOP_CONFIG", name)

    def restore(self) -> None:
        """Puts everything back."""
        for name, value in self._former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._former.clear()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()


def configuration(
    profiles: Mapping[str, str | Path] | None = None, additional: Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Profile]]:
    """The resolved configuration with more profiles laid over it, all of them loaded.

    Args:
        profiles: name to path, over those that the configuration names.
        additional: vLLM's additional_config.

    Raises:
        ConfigError: the configuration is broken, or a profile has a preset's name.
        ProfileError: a profile file is broken.
    """
    config = load_config(additional)
    given = {name: str(Path(path).expanduser().absolute()) for name, path in (profiles or {}).items()}
    for name in given:
        if name in PRESETS:
            raise ConfigError(f"a profile cannot be called {name!r}, that is a preset", field="profile")
    config = msgspec.structs.replace(
        config, profiles={**given, **{k: v for k, v in config.profiles.items() if k not in given}}
    )
    return config, config.load_profiles()


def prepare(model: str, runner: Runner, around: Surroundings) -> None:
    """Sets vLLM's environment; before vLLM is imported.

    Raises:
        ConfigError: a runner that is none, or a model path that is no folder.
    """
    if runner not in _RUNNER_ENV:
        raise ConfigError(f"runner={runner!r} is not allowed: give auto, v1 or v2", field="runner")
    around.default("VLLM_LOGGING_LEVEL", "WARNING")
    around.default("VLLM_NO_USAGE_STATS", "1")
    around.default("TOKENIZERS_PARALLELISM", "false")
    around.default("TORCH_CPP_LOG_LEVEL", "ERROR")
    if runner != "auto":
        around.set("VLLM_USE_V2_MODEL_RUNNER", _RUNNER_ENV[runner])
    looks_local = model.startswith((".", "/", "~"))
    if looks_local and not Path(model).expanduser().is_dir():
        raise ConfigError(f"model={model!r} is no folder: give a checkpoint's folder or a hub name", field="model")
    if Path(model).expanduser().is_dir():
        around.default("HF_HUB_OFFLINE", "1")


def local_path(model: str) -> str:
    """A folder as an absolute path (vLLM takes a bare relative one for a hub name), anything else as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model


def engine_arguments(
    model: str, given: Mapping[str, Any], around: Surroundings, on_cpu: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The arguments for vLLM's engine; imports vLLM.

    On a CPU the engine runs in this process, which saves a start of seconds. On V1 asynchronous scheduling is off:
    there it hides the token ids from every processor.

    Raises:
        IncompatibleEngineError: V2 where Triton cannot work, or V1 with speculative decoding, which drops
            processors without a word.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    quiet = {"disable_log_stats": True, "use_tqdm_on_load": False}
    arguments: dict[str, Any] = {"model": local_path(model), **quiet, **given}
    if current_platform.is_cpu():
        arguments |= on_cpu or {}
        around.default("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        around.default("VLLM_CPU_KVCACHE_SPACE", "2")
        if arguments.get("enforce_eager") is None:
            arguments["enforce_eager"] = True  # compiling takes a minute that a batch on a CPU does not win back
    forced = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower()
    if forced in ("1", "true") and not HAS_TRITON:
        raise IncompatibleEngineError(
            "Model Runner V2 needs Triton with a working driver (a GPU), which is not here: use --runner v1 or auto"
        )
    is_v2 = forced in ("1", "true")
    if not forced and HAS_TRITON:
        from vllm.engine.arg_utils import EngineArgs

        is_v2 = bool(EngineArgs(**arguments).create_engine_config().use_v2_model_runner)
    if not is_v2:
        if arguments.get("speculative_config"):
            raise IncompatibleEngineError(
                "V1 with speculative decoding drops logits processors without a word, so nothing would stop early: "
                "use Model Runner V2 (--runner v2, on a GPU), or leave speculative_config out"
            )
        if arguments.get("async_scheduling"):
            raise IncompatibleEngineError(
                "V1 with asynchronous scheduling never shows token ids to a processor: leave async_scheduling out"
            )
        arguments["async_scheduling"] = False
    return arguments


def refuse_untested() -> None:
    """Refuses what `compat` refuses, and an inert plugin.

    Raises:
        IncompatibleEngineError: no vLLM, an untested one, or EARLYSTOP_DISABLE=1.
    """
    if reason := compat.unsupported_reason():
        raise IncompatibleEngineError(reason)
    if compat.disabled():
        raise IncompatibleEngineError("EARLYSTOP_DISABLE=1 makes earlystop inert: unset it, or use --policy off")


def machine() -> dict[str, Any]:
    """What vLLM sees here: the device in words, and whether Triton has a working driver."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    device = str(current_platform.device_type) or "none that vLLM knows"
    if current_platform.is_cuda_alike():
        device = f"{current_platform.get_device_name(0)}, {device}"
    elif device == "cpu":
        device = f"CPU, {os.cpu_count()} cores, no GPU"
    return {"device": device, "has_triton": bool(HAS_TRITON)}


def plugin_classes() -> dict[str, list[str]]:
    """Our classes that each of vLLM's two loaders takes, by model runner."""
    from vllm.v1.sample import logits_processor as v1
    from vllm.v1.worker.gpu.sample.logits_processor import loader as v2

    loaders = {"V1": v1._load_logitsprocs_plugins, "V2": v2._load_v2_logitsprocs_plugins}
    found: dict[str, list[str]] = {}
    for runner, load in loaders.items():
        try:
            classes = load()
        except Exception:  # the loader refuses somebody's class, perhaps ours
            classes = []
        found[runner] = [c.__qualname__ for c in classes if c.__module__.startswith("earlystop.")]
    return found
