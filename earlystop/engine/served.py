"""What this engine serves: the compiled tokenizer, and fingerprints that a profile is compared with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earlystop.control import lower
from earlystop.errors import ConfigError
from earlystop.identity import Sampling, ServedIdentity
from earlystop.reserved import reserved_stop_ids
from earlystop.units import TOOL_TAGS, TokenTable, compile_tokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from earlystop.config import EngineConfig
    from earlystop.signals import StopReason

_SAMPLE = 1 << 20  # bytes hashed at either end of a weight file


@cache
def weights_fingerprint(model: str) -> str | None:
    """SHA-256 over a local checkpoint: config, and size, first and last MiB of every weight file.

    Whole files would take minutes at the start of a large model. None for a model that is not a local folder.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf", ".pt"))
    for path in [folder / "config.json", *files]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            if size > 2 * _SAMPLE:
                file.seek(-_SAMPLE, 2)
                digest.update(file.read())
    return digest.hexdigest()


def local_model(vllm_config: VllmConfig) -> str:
    """The model's folder: the path itself, or where the hub's cache holds it."""
    model = str(vllm_config.model_config.model)
    if Path(model).is_dir():
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=vllm_config.model_config.revision, local_files_only=True))
    except Exception:  # not cached here, or not a hub name: the fingerprint stays unknown
        return model


def eos_ids(vllm_config: VllmConfig, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's, the model's and the generation config's, without repeats."""
    found: list[int] = []
    config = vllm_config.model_config
    generation = config.try_get_generation_config() or {}
    for source in (
        getattr(tokenizer, "eos_token_id", None),
        getattr(config.hf_text_config, "eos_token_id", None),
        generation.get("eos_token_id"),
    ):
        for token in source if isinstance(source, list | tuple) else [source]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return tuple(found)


@dataclass(frozen=True)
class Served:
    """The served model as the decision needs it."""

    table: TokenTable
    reserved: dict[StopReason, int]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    identity: ServedIdentity

    def identity_of(self, params: SamplingParams, lora: str | None = None) -> ServedIdentity:
        """The identity with this request's sampling parameters."""
        import msgspec

        return msgspec.structs.replace(
            self.identity,
            lora=lora,
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            sampling=Sampling(
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                min_p=params.min_p,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            ),
        )


def examine(vllm_config: VllmConfig, runner: str, options: EngineConfig) -> Served:
    """Compiles the tokenizer of the served model and takes its fingerprints.

    Raises:
        ConfigError: the model has no tokenizer, or a configured tag is not in it.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    config = vllm_config.model_config
    if config.skip_tokenizer_init:
        raise ConfigError(
            "the engine was started with skip_tokenizer_init: earlystop reads unit boundaries and end tags from the "
            "tokenizer; start with one, or set EARLYSTOP_DISABLE=1"
        )
    tokenizer = cached_tokenizer_from_config(config)
    vocab_size = config.get_vocab_size()
    eos = eos_ids(vllm_config, tokenizer)
    table = compile_tokenizer(
        tokenizer,
        vocab_size=vocab_size,
        eos=eos,
        think_start=options.think_start,
        think_end=options.think_end,
        close_text=options.close_text,
        tool_tags=options.tool_markers if options.tool_markers is not None else TOOL_TAGS,
    )
    if options.reserved_ids is not None:
        from earlystop.signals import StopReason

        first, last = options.reserved_ids
        reserved = dict(zip(StopReason, range(first, last + 1), strict=False))
    else:
        reserved = reserved_stop_ids(tokenizer, vocab_size, exclude=(*eos, *table.opening, *table.closing))
    template = getattr(tokenizer, "chat_template", None)
    speculative = vllm_config.speculative_config
    return Served(
        table=table,
        reserved=reserved,
        vocab_size=vocab_size,
        hidden_size=config.get_hidden_size(),
        max_model_len=config.max_model_len,
        identity=ServedIdentity(
            model=str(config.model),
            weights_hash=weights_fingerprint(local_model(vllm_config)),
            tokenizer_fingerprint=table.fingerprint,
            runner=runner,
            dtype=str(config.dtype).removeprefix("torch."),
            chat_template_hash=_hash(template) if isinstance(template, str) else None,
            close_text_hash=_hash(repr(table.sequence)),
            quantisation=config.quantization,
            speculation=None if speculative is None else str(speculative.method),
            decision_code_hash=lower.source_hash(),
            has_thinking=table.thinks,
        ),
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
