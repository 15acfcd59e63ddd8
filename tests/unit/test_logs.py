import logging

import pytest

from gossipdp import logs
from gossipdp.logs import OF_RUN


def test_by_default_nothing_is_attached():
    logs.configure()
    logger = logging.getLogger("gossipdp")
    assert logger.handlers == []
    assert logger.propagate


def test_the_variable_chooses_the_level(monkeypatch, capsys):
    monkeypatch.setenv("GOSSIPDP_LOG", "info")
    monkeypatch.setenv("RANK", "3")
    logs.configure()
    logging.getLogger("gossipdp").info("hello")
    logging.getLogger("gossipdp").debug("hidden")
    assert capsys.readouterr().err.endswith(" gossipdp worker 3 INFO: hello\n")


def test_configuring_twice_shows_each_line_once(capsys):
    logs.configure("debug")
    logs.configure("warning")
    logging.getLogger("gossipdp").info("hidden")
    logging.getLogger("gossipdp").warning("shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING: shown")


def test_an_unknown_level_is_named(monkeypatch):
    monkeypatch.setenv("GOSSIPDP_LOG", "loud")
    with pytest.raises(ValueError, match="GOSSIPDP_LOG is 'loud'; choose one of debug, info"):
        logs.configure()


@pytest.mark.parametrize(
    "case",  # RANK, whether the worker leads, the level, whether it speaks
    [
        ("0", None, "warning", True),
        ("1", None, "warning", False),
        ("1", True, "warning", True),
        ("0", False, "warning", False),
        ("1", False, "info", True),
    ],
)
def test_one_worker_speaks_for_the_run(monkeypatch, caplog, case):
    rank, is_lead, level, is_said = case
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(logs, "_is_lead", None if is_lead is None else lambda: is_lead)
    with caplog.at_level(level.upper(), "gossipdp"):
        logging.getLogger("gossipdp").warning("of the run", extra=OF_RUN)
        logging.getLogger("gossipdp").warning("of a worker")
    assert caplog.messages == ["of the run", "of a worker"][0 if is_said else 1 :]
