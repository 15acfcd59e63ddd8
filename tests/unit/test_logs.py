import logging
from collections.abc import Iterator

import pytest

from gossipdp import logs


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("gossipdp")
    before = logger.level, logger.propagate, list(logger.handlers)
    # As in a new process, whatever ran in this one.
    logger.propagate, logger.handlers = True, []
    monkeypatch.setattr(logs, "_handler", None)
    monkeypatch.delenv("GOSSIPDP_LOG", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield
    logger.level, logger.propagate, logger.handlers = before


def test_by_default_nothing_is_attached() -> None:
    logs.configure()
    logger = logging.getLogger("gossipdp")
    assert logger.handlers == []
    assert logger.propagate


def test_the_variable_chooses_the_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOSSIPDP_LOG", "info")
    monkeypatch.setenv("RANK", "3")
    logs.configure()
    logging.getLogger("gossipdp").info("hello")
    logging.getLogger("gossipdp").debug("hidden")
    assert capsys.readouterr().err.endswith(" gossipdp worker 3 INFO: hello\n")


def test_configuring_twice_shows_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logs.configure("warning")
    logging.getLogger("gossipdp").info("hidden")
    logging.getLogger("gossipdp").warning("shown")
    assert capsys.readouterr().err.splitlines()[0].endswith("WARNING: shown")


def test_an_unknown_level_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIPDP_LOG", "loud")
    with pytest.raises(ValueError, match="GOSSIPDP_LOG is 'loud'; choose one of debug, info"):
        logs.configure()
