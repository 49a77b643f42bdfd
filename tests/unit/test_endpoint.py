import os

import pytest

from earlystop.bus import (
    Publisher,
    default_endpoint,
    pin_endpoint,
)
from earlystop.bus.endpoint import checked, for_rank, replay_of, runtime_dir
from earlystop.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_directory")


def test_the_default_is_a_private_directory_of_the_user(own_directory):
    """Nobody else can listen in."""
    endpoint = default_endpoint()
    assert endpoint == f"ipc://{own_directory}/earlystop/bus-{os.getpid()}.ipc"
    assert (own_directory / "earlystop").stat().st_mode & 0o777 == 0o700


def test_without_a_runtime_directory_the_temp_directory_serves(tmp_path, monkeypatch):
    """The user's number keeps users apart in a shared directory."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_dir() == tmp_path / f"earlystop-{os.getuid()}"


def test_a_directory_that_others_can_write_is_refused(own_directory):
    """A prepared directory would let others put their socket there."""
    (own_directory / "earlystop").mkdir(mode=0o777)
    (own_directory / "earlystop").chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0700, it has mode 777"):
        default_endpoint()


def test_a_link_instead_of_the_directory_is_refused(own_directory):
    """A link would let others choose the place."""
    (own_directory / "elsewhere").mkdir(mode=0o700)
    (own_directory / "earlystop").symlink_to(own_directory / "elsewhere")
    with pytest.raises(ConfigError, match="mode 0700"):
        default_endpoint()


def test_the_environment_wins(monkeypatch):
    """EARLYSTOP_BUS names the endpoint; data-parallel ranks add their number."""
    monkeypatch.setenv("EARLYSTOP_BUS", "tcp://127.0.0.1:5600")
    assert default_endpoint() == "tcp://127.0.0.1:5600"
    assert default_endpoint(2) == "tcp://127.0.0.1:5602"
    monkeypatch.setenv("EARLYSTOP_BUS", "nonsense")
    with pytest.raises(ConfigError, match="ipc://PATH or tcp://HOST:PORT") as caught:
        default_endpoint()
    assert caught.value.field == "EARLYSTOP_BUS"


def test_pinning_hands_the_endpoint_to_child_processes(monkeypatch):
    """A driver and its engine agree on the endpoint through the environment."""
    monkeypatch.setenv("EARLYSTOP_BUS_PINNED", "")
    monkeypatch.delenv("EARLYSTOP_BUS_PINNED")
    assert pin_endpoint() == os.environ["EARLYSTOP_BUS_PINNED"] == default_endpoint()


def test_ranks_and_replay_have_places_of_their_own():
    """Suffixes on paths, offsets on ports, as in vLLM's KV events."""
    assert for_rank("ipc:///x/y", 0) == "ipc:///x/y"
    assert for_rank("ipc:///x/y", 3) == "ipc:///x/y_dp3"
    assert for_rank("tcp://*:0", 3) == "tcp://*:0"
    assert replay_of("ipc:///x/y_dp3") == "ipc:///x/y_dp3.replay"
    assert replay_of("tcp://*:5557") == "tcp://*:6557"
    with pytest.raises(ConfigError):
        replay_of("tcp://*:65000")


@pytest.mark.parametrize("endpoint", ["", "ipc://", "tcp://host", "tcp://host:99999", "inproc://x", "/var/x"])
def test_what_is_no_endpoint_is_refused(endpoint):
    """The message says what is allowed."""
    with pytest.raises(ConfigError, match="ipc://PATH or tcp://HOST:PORT"):
        checked(endpoint)


def test_a_path_too_long_for_a_socket_says_so(tmp_path):
    """A Unix socket's path is limited in bytes, not characters, and the replay socket's is the longer one."""
    fits = "ipc:///" + "x" * 99
    assert checked(fits) == fits
    with pytest.raises(ConfigError, match="has 101 bytes, a socket's path has room for 100"):
        checked(fits + "x")
    with pytest.raises(ConfigError, match="has 101 bytes"):
        Publisher("ipc:///" + "ä" * 50)


def test_a_directory_that_is_missing_says_so(tmp_path):
    """An endpoint chosen by the user is not made for him."""
    with pytest.raises(ConfigError, match="its directory must exist"):
        Publisher(f"ipc://{tmp_path}/no/bus")
