import pytest
from hypothesis import given
from hypothesis import strategies as st

from earlystop.config import Config, load_config
from earlystop.errors import ConfigError, ProfileError
from earlystop.policy import Policy

from .profiles import certified

TOML = """
[server]
policy = "classic"
budget = 4096
[profiles]
qwen = "deep/qwen.json"
[bus]
replay = 5
[engine]
close_text = "\\nSo "
tool_markers = [["<tool>", "</tool>"]]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "earlystop.toml"
    path.write_text(TOML)
    return path


def test_nothing_configured_is_a_configuration():
    """Without file and arguments nobody is opted in."""
    assert load_config(None, {}) == Config()
    assert load_config({"other_platform": {}}, {}).server == Policy()


def test_the_file_is_read_and_profile_paths_start_from_it(file, tmp_path):
    """A relative profile path is relative to the file that names it."""
    config = load_config(None, {"EARLYSTOP_CONFIG": str(file)})
    assert config.server == Policy(policy="classic", budget=4096)
    assert config.profiles == {"qwen": str(tmp_path / "deep" / "qwen.json")}
    assert config.engine.tool_markers == (("<tool>", "</tool>"),)


def test_arguments_win_key_by_key(file):
    """--additional-config replaces single keys, not tables."""
    config = load_config(
        {"earlystop": {"server": {"budget": 10}, "bus": {"queue": 7}}}, {"EARLYSTOP_CONFIG": str(file)}
    )
    assert config.server == Policy(policy="classic", budget=10)
    assert (config.bus.replay, config.bus.queue) == (5, 7)


def test_the_bus_endpoint_of_the_environment_wins():
    """EARLYSTOP_BUS is the last word on the endpoint."""
    tables = {"earlystop": {"bus": {"endpoint": "ipc:///a"}}}
    assert load_config(tables, {"EARLYSTOP_BUS": "ipc:///b"}).bus.endpoint == "ipc:///b"
    assert load_config(tables, {}).bus.endpoint == "ipc:///a"


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("yes", True), ("", False), ("0", False), (None, False)])
def test_disable_switch(value, disabled):
    """EARLYSTOP_DISABLE=1 switches off; 0 and empty do not."""
    assert load_config(None, {} if value is None else {"EARLYSTOP_DISABLE": value}).disabled is disabled


@pytest.mark.parametrize(
    ("tables", "word"),
    [
        ({"serve": {}}, "serve"),
        ({"server": {"budgte": 1}}, "did you mean 'server.budget'"),
        ({"server": {"budget": -1}}, "earlystop_budget"),
        ({"server": {"adapt": True}}, "write 1"),
        ({"server": {"id": "x"}}, "server.id"),
        ({"server": 3}, "not a table"),
        ({"profiles": {"a": 3}}, "profiles.a"),
        ({"profiles": {"classic": "x.json"}}, "preset"),
        ({"bus": {"replay": "many"}}, "bus.replay"),
        ({"bus": {"replay": -1}}, "bus.replay"),
        ({"bus": {"port": 1}}, "port"),
        ({"limits": {"idle_s": 0}}, "limits.idle_s"),
        ({"engine": {"think_end": ""}}, "engine.think_end"),
        ({"engine": {"reserved_ids": [1]}}, "engine.reserved_ids"),
        ([], "not tables"),
    ],
)
def test_a_broken_table_is_refused_by_name(tables, word):
    """The message names what is wrong, in which key."""
    with pytest.raises(ConfigError, match=word):
        load_config({"earlystop": tables}, {})


@pytest.mark.parametrize("text", ["[server", "server = 1", "\xff"])
def test_a_broken_file_is_refused_by_name(tmp_path, text):
    """A file that is no TOML, or not ours, is named."""
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"c\.toml"):
        load_config(None, {"EARLYSTOP_CONFIG": str(path)})


def test_a_missing_file_is_refused_by_name(tmp_path):
    """EARLYSTOP_CONFIG naming nothing is an error, not an empty configuration."""
    with pytest.raises(ConfigError, match=r"none\.toml.*No such file"):
        load_config(None, {"EARLYSTOP_CONFIG": str(tmp_path / "none.toml")})


@given(name=st.text(min_size=1).filter(str.isprintable), text=st.text())
def test_what_is_dumped_is_read_back(tmp_path_factory, name, text):
    """The dumped file gives other processes the same configuration, whatever the strings hold."""
    tables = {"profiles": {f"p{name}": "/x.json"}, "engine": {"close_text": text}, "server": {"warn_at": 1e-7}}
    config = load_config({"earlystop": tables}, {})
    path = tmp_path_factory.mktemp("c") / "c.toml"
    config.dump_toml(path)
    assert load_config(None, {"EARLYSTOP_CONFIG": str(path)}) == config


def test_describe_shows_every_value(file):
    """The resolved table is printable, a key a line."""
    text = load_config(None, {"EARLYSTOP_CONFIG": str(file), "EARLYSTOP_DISABLE": "1"}).describe()
    for key in ("disabled", "server.policy", "server.budget", "profiles.qwen", "bus.replay", "engine.close_text"):
        assert sum(line.split()[0] == key for line in text.splitlines()) == 1


def test_profiles_are_loaded_or_refused(tmp_path):
    """Every configured profile is read; a broken one names its file."""
    certified().save(tmp_path / "good.json")
    tables = {"profiles": {"good": str(tmp_path / "good.json")}}
    assert load_config({"earlystop": tables}, {}).load_profiles() == {"good": certified()}
    (tmp_path / "bad.json").write_text("{")
    tables["profiles"]["bad"] = str(tmp_path / "bad.json")
    with pytest.raises(ProfileError, match=r"bad\.json"):
        load_config({"earlystop": tables}, {}).load_profiles()
