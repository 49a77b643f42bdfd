"""What is refused before a request enters the engine (HTTP 400). Runs in the API process; imports no torch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from earlystop.config import Config, load_config
from earlystop.engine import compat
from earlystop.engine.commands import Command
from earlystop.engine.compat import V1_DROPS_PROCESSORS
from earlystop.engine.requests import in_call_stack
from earlystop.errors import ConfigError
from earlystop.policy import Policy
from earlystop.profile import Profile
from earlystop.resolve import resolve

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


@cache
def configuration() -> tuple[Config, dict[str, Profile]]:
    """The configuration that EARLYSTOP_CONFIG names, and its profiles, read once a process."""
    config = load_config()
    return config, config.load_profiles()


def served_config() -> Any | None:
    """The engine's `VllmConfig`: vLLM does not hand it to `validate_params`, but its caller holds it."""
    return in_call_stack(lambda names: getattr(names.get("self"), "vllm_config", None))


def profiles_elsewhere() -> bool:
    """Whether `--additional-config` names profiles, which this process has not read."""
    additional: Any = getattr(served_config(), "additional_config", None) or {}
    return isinstance(additional, dict) and bool((additional.get("earlystop") or {}).get("profiles"))


def refuse_what_vanishes() -> None:
    """V1 drops plugin processors under speculative decoding, without a word; a request that asks for one hears it.

    Raises:
        ConfigError: the engine runs V1 with speculative decoding.
    """
    config = served_config()
    if config is not None and config.speculative_config is not None and not config.use_v2_model_runner:
        raise ConfigError(V1_DROPS_PROCESSORS)


def validate(params: SamplingParams) -> None:
    """Checks the keys of ours in a request's sampling parameters.

    Raises:
        ConfigError: an unknown key, a wrong type or range, an unknown preset or profile, a serving-only key
            without our middleware, an end that could never take effect.
    """
    policy = Policy.from_extra_args(params.extra_args or {})
    if policy is None:
        return
    if reason := compat.unsupported_reason():
        raise ConfigError(f"early stopping is not available: {reason}")
    if Command.read(policy) is not None:
        return
    refuse_what_vanishes()
    policy.refuse_serving_fields()
    config, profiles = configuration()
    try:
        resolved = resolve(policy, config, profiles, None)
    except ConfigError as error:
        if error.field == "policy" and policy.policy is not None and profiles_elsewhere():
            return
        raise
    if resolved is not None and resolved.mode == "active" and params.ignore_eos and not params.stop_token_ids:
        raise ConfigError(
            "ignore_eos=True leaves no token that ends the request: early stopping needs an id in stop_token_ids "
            "(attach(..., tokenizer=tokenizer) adds reserved ones), or ignore_eos=False"
        )
