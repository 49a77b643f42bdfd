"""Fixtures shared by all tests: models on disk, and real engines that start when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.engines import Engine
    from support.scripted import ScriptedModel

_ENGINE_FIXTURES = {"v1_engine", "v2_engine", "engine", "v1_scripted", "v2_scripted", "scripted_engine", "make_engine"}
_RUNNERS = [pytest.param("v1", id="v1"), pytest.param("v2", id="v2", marks=pytest.mark.v2)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use an engine, so that `-m "not engine"` is complete without anyone's care."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & _ENGINE_FIXTURES:
            item.add_marker(pytest.mark.engine)
        if fixtures & {"v2_engine", "v2_scripted"} and not fixtures & {"engine", "scripted_engine"}:
            item.add_marker(pytest.mark.v2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct on disk; skips where it can be neither found nor fetched."""
    from earlystop.demo.model import DemoModelError, ensure_smollm2

    try:
        return ensure_smollm2(progress=False)
    except DemoModelError as error:
        pytest.skip(f"no SmolLM2: {error}")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> ScriptedModel:
    """The scripted model that knows every script of `support.catalogue`."""
    from support.catalogue import SCRIPTS
    from support.scripted import make_scripted

    return make_scripted(tmp_path_factory.mktemp("scripted"), SCRIPTS)


@pytest.fixture(scope="session")
def v1_engine(smollm2: Path) -> Iterator[Engine]:
    """SmolLM2 on the V1 runner."""
    yield from _running(smollm2, "v1")


@pytest.fixture(scope="session")
def v2_engine(smollm2: Path) -> Iterator[Engine]:
    """SmolLM2 on Model Runner V2: about ten greedy tokens a second on a CPU, sampled ones two. Ask for few."""
    yield from _running(smollm2, "v2")


@pytest.fixture(scope="session")
def v1_scripted(scripted: ScriptedModel) -> Iterator[Engine]:
    """The scripted model on the V1 runner."""
    yield from _running(scripted, "v1")


@pytest.fixture(scope="session")
def v2_scripted(scripted: ScriptedModel) -> Iterator[Engine]:
    """The scripted model on Model Runner V2."""
    yield from _running(scripted, "v2")


@pytest.fixture(params=_RUNNERS)
def engine(request: pytest.FixtureRequest) -> Engine:
    """SmolLM2 on each runner in turn."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(params=_RUNNERS)
def scripted_engine(request: pytest.FixtureRequest) -> Engine:
    """The scripted model on each runner in turn."""
    return request.getfixturevalue(f"{request.param}_scripted")


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Starts engines of special configurations: `make_engine(model, runner="v2", **engine_args)`.

    Equal calls share one engine. They live until the module's tests are over.
    """
    from support.engines import Engine

    running: dict[str, Engine] = {}

    def make(model: Path | str | ScriptedModel, **options: Any) -> Engine:
        key = repr((str(getattr(model, "path", model)), sorted(options.items())))
        if key not in running:
            running[key] = Engine(model, **options)
        return running[key]

    yield make
    for engine in running.values():
        engine.close()


def _running(model: Path | ScriptedModel, runner: Any) -> Iterator[Engine]:
    from support.catalogue import CLOSE_TEXT
    from support.engines import Engine
    from support.scripted import ScriptedModel

    options: dict[str, Any] = {}
    if isinstance(model, ScriptedModel):  # a transition text that its letters-only tokenizer has tokens for
        options["additional_config"] = {"earlystop": {"engine": {"close_text": CLOSE_TEXT}}}
    with Engine(model, runner=runner, **options) as engine:
        yield engine
