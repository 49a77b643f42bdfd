"""Where the bus is: one socket per user and engine, found without being told, and never stolen from a living owner."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from earlystop.errors import ConfigError

BUS_ENV = "EARLYSTOP_BUS"
"""Endpoint of the bus; wins over the default."""
PINNED_ENV = "EARLYSTOP_BUS_PINNED"
"""The default endpoint of the process that starts engines, see `pin_endpoint`; a configured endpoint wins over it."""
SINK_ENV = "EARLYSTOP_SINK"
"""Endpoint of the driver's sink; set by `SinkReader`, inherited by the engine's processes."""

_IPC = "ipc://"
_MAX_PATH = 107
"""Bytes of a Unix socket's path: `sun_path` holds 108 with the closing zero (unix(7))."""
_REPLAY = ".replay"
_LOCK = ".lock"
_TCP_REPLAY_OFFSET = 1000
_MAX_ALTERNATIVES = 64


def runtime_dir() -> Path:
    """This user's directory for sockets, made if missing: mode 0700 under $XDG_RUNTIME_DIR, else under the temp dir.

    Raises:
        ConfigError: It exists and others could write to it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    directory = Path(base, "earlystop") if base else Path(tempfile.gettempdir(), f"earlystop-{os.getuid()}")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"no directory for sockets: {error}; make $XDG_RUNTIME_DIR writable or set {BUS_ENV}", field=BUS_ENV
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of this user with mode 0700, it has mode {stat.S_IMODE(found.st_mode):o} "
            f"and owner {found.st_uid}; remove it or set {BUS_ENV}",
            field=BUS_ENV,
        )
    return directory


def default_endpoint(dp_rank: int = 0) -> str:
    """The endpoint that an engine started from this process publishes on: $EARLYSTOP_BUS, else one of this process.

    Args:
        dp_rank: Data-parallel rank of the engine.

    Raises:
        ConfigError: $EARLYSTOP_BUS is no endpoint, or there is no safe directory for sockets.
    """
    named = os.environ.get(BUS_ENV) or os.environ.get(PINNED_ENV)
    return for_rank(checked(named) if named else f"{_IPC}{runtime_dir()}/bus-{os.getpid()}.ipc", dp_rank)


def pin_endpoint() -> str:
    """Fix this process's endpoint in its environment, so that engine processes started from it publish there.

    Raises:
        ConfigError: As `default_endpoint`.
    """
    return os.environ.setdefault(PINNED_ENV, default_endpoint())


def checked(endpoint: str) -> str:
    """`endpoint`, if it is one that we can use.

    Raises:
        ConfigError: Neither ``ipc://path`` nor ``tcp://host:port``, or the path is too long for a socket.
    """
    kind, mark, rest = endpoint.partition("://")
    if not mark or kind not in ("ipc", "tcp") or not rest or (kind == "tcp" and not _port(endpoint)):
        raise ConfigError(f"{BUS_ENV}: {endpoint!r} is no endpoint; use ipc://PATH or tcp://HOST:PORT", field=BUS_ENV)
    room = _MAX_PATH - len(_REPLAY)
    if kind == "ipc" and (length := len(os.fsencode(rest))) > room:
        raise ConfigError(
            f"{BUS_ENV}: the path of {endpoint!r} has {length} bytes, a socket's path has room for {room}; "
            f"set {BUS_ENV} (or $XDG_RUNTIME_DIR, $TMPDIR) to something shorter",
            field=BUS_ENV,
        )
    return endpoint


def for_rank(endpoint: str, dp_rank: int) -> str:
    """The endpoint of a data-parallel rank: a suffix to the path, an offset to the port, as vLLM's KV events do it.

    Raises:
        ConfigError: The result is no usable endpoint.
    """
    if dp_rank == 0:
        return checked(endpoint)
    if endpoint.startswith(_IPC):
        return checked(f"{endpoint}_dp{dp_rank}")
    return _shifted(endpoint, dp_rank)


def replay_of(endpoint: str) -> str:
    """Where the publisher at `endpoint` answers for its buffer: ``.replay`` beside the path, 1000 above the port.

    Raises:
        ConfigError: There is no such port.
    """
    return endpoint + _REPLAY if endpoint.startswith(_IPC) else _shifted(endpoint, _TCP_REPLAY_OFFSET)


def _port(endpoint: str) -> str | None:
    port = endpoint.rpartition(":")[2]
    return port if port.isdigit() and int(port) < 1 << 16 else None


def _shifted(endpoint: str, offset: int) -> str:
    address, _, port = endpoint.rpartition(":")
    # Port 0 is left to the operating system.
    return endpoint if port == "0" else checked(f"{address}:{int(port) + offset}")


def reachable(endpoint: str) -> str:
    """What to connect to in order to reach a publisher bound to `endpoint` (``*`` means every interface)."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:").replace("tcp://0.0.0.0:", "tcp://127.0.0.1:")


def discover(endpoint: str | None) -> list[str]:
    """The endpoints to follow now: the one named and its data-parallel and other siblings, or all of this user's.

    Args:
        endpoint: None looks at $EARLYSTOP_BUS, then at every engine of this user.

    Raises:
        ConfigError: The endpoint is none.
    """
    named = endpoint or os.environ.get(BUS_ENV)
    if not named:
        return [_IPC + path for path in _sockets(runtime_dir(), "bus-")]
    checked(named)
    if not named.startswith(_IPC) or named.startswith(_IPC + "@"):
        return [named]
    path = Path(named.removeprefix(_IPC))
    return [named, *(_IPC + found for found in _sockets(path.parent, path.name + "_"))]


def _sockets(directory: Path, prefix: str) -> list[str]:
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return []
    return [str(directory / n) for n in names if n.startswith(prefix) and not n.endswith((_REPLAY, _LOCK))]


def is_dead(endpoint: str) -> bool:
    """Whether no living process holds this ``ipc://`` endpoint; of a ``tcp://`` one that cannot be said (False)."""
    if not endpoint.startswith(_IPC) or endpoint.startswith(_IPC + "@"):
        return False
    path = Path(endpoint.removeprefix(_IPC))
    if not path.with_name(path.name + _LOCK).exists():
        return True
    try:
        fd = _try_lock(path, tries=1)
    except OSError:
        return True
    if fd is not None:
        os.close(fd)
    return fd is not None


class Claim:
    """The right to bind an ``ipc://`` endpoint, held for as long as this process lives or until `release`.

    ZeroMQ removes whatever is at the path before it binds, also the socket of a living publisher. So a lock beside it
    says who lives: the kernel drops it with the process, however that ends, and in every container.

    Args:
        endpoint: What to claim. ``tcp://`` needs no claim, the port is one already.

    Raises:
        ConfigError: Another living publisher has it, or the directory cannot be written.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._fd: int | None = None
        self._path: Path | None = None
        if endpoint.startswith(_IPC) and not endpoint.startswith(_IPC + "@"):
            self._path = Path(endpoint.removeprefix(_IPC))
            self._fd = self._lock(self._path)

    def release(self) -> None:
        """Remove the socket's files and give the endpoint up."""
        fd, self._fd = self._fd, None
        if fd is not None and self._path is not None:
            _remove(self._path)
            os.close(fd)

    @staticmethod
    def _lock(path: Path) -> int:
        try:
            fd = _try_lock(path)
        except OSError as error:
            raise ConfigError(f"cannot bind ipc://{path}: {error}; its directory must exist and be ours") from error
        if fd is None:
            raise ConfigError(
                f"ipc://{path} belongs to another living publisher; set {BUS_ENV} to another endpoint", field=BUS_ENV
            )
        return fd


def claim_free(endpoint: str) -> Claim:
    """Claim `endpoint`, or the next free sibling of it (``_e1``, ``_e2``...), which `discover` finds as well.

    Raises:
        ConfigError: None is free, or the directory cannot be written.
    """
    sweep(endpoint)
    for candidate in _alternatives(endpoint):
        try:
            return Claim(candidate)
        except ConfigError as error:
            if error.field != BUS_ENV:
                raise
            refusal = error
    raise refusal


def _alternatives(endpoint: str) -> Iterator[str]:
    yield endpoint
    if endpoint.startswith(_IPC):
        yield from (checked(f"{endpoint}_e{n}") for n in range(1, _MAX_ALTERNATIVES))


def sweep(endpoint: str) -> None:
    """Remove what dead processes left beside the default endpoint; nothing where the user chose the path."""
    try:
        ours = f"{_IPC}{runtime_dir()}/"
    except ConfigError:
        return
    if not endpoint.startswith(ours):
        return
    for lock in Path(endpoint.removeprefix(_IPC)).parent.glob("*.ipc*" + _LOCK):
        path = lock.with_name(lock.name.removesuffix(_LOCK))
        fd = _try_lock(path, tries=1)
        if fd is not None:
            _remove(path)
            os.close(fd)


def _try_lock(path: Path, tries: int = 10) -> int | None:
    """The descriptor of the lock beside `path`, or None if a living process has it."""
    lock = path.with_name(path.name + _LOCK)
    for _ in range(tries):
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former owner may have removed the file between our open and our lock.
            if lock.exists() and os.fstat(fd).st_ino == lock.stat().st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass  # taken, perhaps only by someone who sweeps: that passes in microseconds
        os.close(fd)
        time.sleep(0.001)
    return None


def _remove(path: Path) -> None:
    """Remove a socket, its replay socket and, last, its lock."""
    for suffix in ("", _REPLAY, _LOCK):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
