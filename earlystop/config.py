"""The server's configuration: one TOML file and vLLM's ``--additional-config``, merged key by key.

The file is named by ``EARLYSTOP_CONFIG``; ``--additional-config '{"earlystop": {...}}'`` holds the same tables and
wins. ``EARLYSTOP_DISABLE=1`` makes everything inert.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from earlystop.errors import ConfigError
from earlystop.policy import PRESETS, Policy
from earlystop.profile import Profile

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class BusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[bus]``: where signals go."""

    endpoint: str | None = None
    """ZeroMQ endpoint (``ipc://`` or ``tcp://``); None makes one per user and engine. ``EARLYSTOP_BUS`` wins."""
    replay: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 10_000
    """Batches kept for late joiners."""
    queue: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    """Signals that may wait for the publisher; beyond it the oldest are dropped and counted."""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[limits]``: all off by default; only the server's middleware acts on them."""

    idle_s: _Positive | None = None
    """Seconds without a token, after the first one, until the request is aborted."""
    request_s: _Positive | None = None
    """Seconds until a request is ended gracefully."""
    grace_s: _Positive | None = None
    """Seconds that a graceful end may take before the abort."""
    requests_per_min: _Positive | None = None
    """Requests per minute and API key."""
    tokens_per_min: _Positive | None = None
    """Tokens per minute and API key, prompt included."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[engine]``: what to use where the tokenizer does not say, or says it wrongly."""

    think_start: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Opening tag of a thinking block."""
    think_end: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Closing tag of a thinking block."""
    close_text: str | None = None
    """Transition text forced before the closing tag; an empty one forces the tag alone."""
    tool_markers: tuple[tuple[str, str], ...] | None = None
    """(start, end) markers of tool calls."""
    reserved_ids: tuple[int, int] | None = None
    """First and last id, both included, that may serve as reason-coded stop ids."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration; see `load_config`."""

    server: Policy = Policy()
    """``[server]``: defaults for every request that does not say otherwise."""
    profiles: dict[str, str] = {}
    """``[profiles]``: name to the absolute path of a profile file."""
    bus: BusConfig = BusConfig()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    disabled: bool = False
    """``EARLYSTOP_DISABLE=1``; no key of the file."""

    def load_profiles(self) -> dict[str, Profile]:
        """Read every configured profile.

        Raises:
            ProfileError: One of the files cannot be read or is broken.
        """
        return {name: Profile.load(path) for name, path in self.profiles.items()}

    def describe(self) -> str:
        """The resolved configuration as a table, one ``section.key = value`` a line."""
        rows = [(f"{section}.{key}", value) for section, table in self._tables() for key, value in table.items()]
        if self.disabled:
            rows.insert(0, ("disabled", True))
        if not rows:
            return "earlystop: no configuration; requests opt in one by one"
        width = max(len(key) for key, _ in rows)
        return "\n".join(["earlystop configuration:", *(f"  {key:<{width}} = {_toml(value)}" for key, value in rows)])

    def dump_toml(self, path: str | os.PathLike[str]) -> None:
        """Write the resolved tables, so that ``EARLYSTOP_CONFIG`` can name the file for other processes.

        Raises:
            ConfigError: The file cannot be written.
        """
        lines = []
        for section, table in self._tables():
            lines += [f"[{section}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items()), ""]
        part = Path(f"{path}.{os.getpid()}.part")
        try:
            part.write_text("\n".join(lines), encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise ConfigError(f"configuration {path} cannot be written: {error.strerror or error}") from error

    def _tables(self) -> list[tuple[str, dict[str, Any]]]:
        """The sections that hold something, as plain types without what was not given."""
        tables: list[tuple[str, dict[str, Any]]] = [
            ("server", self.server.given()),
            ("profiles", dict(self.profiles)),
            *((name, msgspec.to_builtins(getattr(self, name))) for name in ("bus", "limits", "engine")),
        ]
        full = [(name, {key: value for key, value in table.items() if value is not None}) for name, table in tables]
        return [(name, table) for name, table in full if table]


def load_config(additional: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Config:
    """The configuration of this process.

    Args:
        additional: vLLM's whole ``additional_config``; its key ``earlystop`` is ours and wins key by key.
        env: The environment; ``os.environ`` by default. Read are ``EARLYSTOP_CONFIG``, ``EARLYSTOP_BUS`` and
            ``EARLYSTOP_DISABLE``.

    Raises:
        ConfigError: A file that cannot be read, an unknown section or key, or a value that is not allowed; the
            message names the source and the key.
    """
    env = os.environ if env is None else env
    merged: dict[str, dict[str, Any]] = {}
    if path := env.get("EARLYSTOP_CONFIG"):
        _merge(merged, _read_toml(path), where=path, base=Path(path).absolute().parent)
    ours = (additional or {}).get("earlystop")
    if ours is not None:
        _merge(merged, ours, where="additional_config", base=Path.cwd())
    if endpoint := env.get("EARLYSTOP_BUS"):
        merged.setdefault("bus", {})["endpoint"] = endpoint
    disabled = env.get("EARLYSTOP_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")
    try:
        server = Policy.from_fields(merged.pop("server", {}), prefix="server.")
    except ConfigError as error:
        raise ConfigError(f"section server: {error}", field=f"server.{error.field}") from error
    if server.id is not None or server.control is not None:
        raise ConfigError("server.id and server.control belong to one request; leave them out", field="server")
    try:
        config = msgspec.convert({**merged, "disabled": disabled}, Config, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, field = str(error).partition(" - at ")
        field = field.strip("`").removeprefix("$.").removeprefix("$")
        raise ConfigError(f"configuration key {field or '(top level)'}: {reason}", field=field or None) from error
    return msgspec.structs.replace(config, server=server)


_SECTIONS = ("server", "profiles", "bus", "limits", "engine")


def _merge(into: dict[str, dict[str, Any]], tables: object, *, where: str, base: Path) -> None:
    """Lay one source's tables over what is there, key by key; profile paths become absolute."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where}: earlystop holds {type(tables).__name__}, not tables {', '.join(_SECTIONS)}")
    for section, table in tables.items():
        if section not in _SECTIONS:
            raise ConfigError(
                f"{where}: unknown section {section!r}; allowed are {', '.join(_SECTIONS)}", field=str(section)
            )
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: {section} holds {type(table).__name__}, not a table", field=section)
        if section == "profiles":
            table = {name: _profile_path(name, path, where, base) for name, path in table.items()}
        into.setdefault(section, {}).update(table)


def _profile_path(name: str, path: object, where: str, base: Path) -> str:
    if name in PRESETS:
        raise ConfigError(f"{where}: a profile cannot be called {name!r}, that is a preset", field=f"profiles.{name}")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where}: profiles.{name} is {path!r}, not a path", field=f"profiles.{name}")
    return str(base / Path(path).expanduser())


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"EARLYSTOP_CONFIG names {path}, which cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"EARLYSTOP_CONFIG names {path}, which is not valid TOML: {error}") from error


def _key(key: str) -> str:
    """A TOML key, quoted unless it is a bare one."""
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _toml(key)


def _toml(value: Any) -> str:
    """A TOML value; JSON's strings, numbers and lists are TOML's but for DEL, which JSON leaves bare."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
