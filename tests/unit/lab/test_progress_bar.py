"""A bar on a terminal, a line every few seconds elsewhere."""

import io

from rich.console import Console

from gossipdp_lab.progress_bar import ProgressView


def show(shares_by_second: dict[float, float], *, is_terminal: bool) -> str:
    now_s = [0.0]
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    with ProgressView("simulating", console=console, clock=lambda: now_s[0]) as view:
        for second, share in shares_by_second.items():
            now_s[0] = second
            view.advance(share)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_now_and_then() -> None:
    printed = show({1.0: 0.1, 5.0: 0.25, 6.0: 0.3, 12.5: 1.0}, is_terminal=False)
    assert printed == "   5 s  simulating:  25%\n  12 s  simulating: 100%\n"


def test_nothing_of_what_is_quick() -> None:
    assert show({1.0: 1.0}, is_terminal=False) == ""


def test_a_bar_on_a_terminal() -> None:
    printed = show({0.01: 0.1, 1.0: 0.5}, is_terminal=True)
    assert "simulating" in printed
    assert "50%" in printed
    assert "10%" not in printed  # too soon after the one before
