import pytest


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """A directory of the test's own for sockets, and no endpoints in its environment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("EARLYSTOP_BUS", raising=False)
    monkeypatch.delenv("EARLYSTOP_BUS_PINNED", raising=False)
    monkeypatch.delenv("EARLYSTOP_SINK", raising=False)
    return tmp_path
