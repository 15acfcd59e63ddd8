"""The lists of tests that may be skipped, and of long ones, name tests that are there."""

from pathlib import Path

from listed_skips import read_list

TESTS = Path(__file__).parents[1]


def test_every_line_of_the_list_names_a_test_and_a_reason_that_are_there():
    entries = read_list((TESTS / "skips.txt").read_text())
    assert entries
    for name, reason in entries:
        assert reason
        path, _, test = name.partition("::")
        text = (TESTS.parent / path).read_text()
        assert f"def {test}" in text, name
        assert "skip" in text, name


def test_each_test_that_is_listed_as_long_is_there():
    for name, _ in read_list((TESTS / "long.txt").read_text()):
        path, _, test = name.partition("[")[0].partition("::")
        text = (TESTS.parent / path).read_text()
        assert not test or f"def {test}(" in text, name
