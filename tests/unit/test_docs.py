"""The documentation's links, commands, names and code blocks are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossipdp
from gossipdp.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path = target.split("#")[0]
        if path and "://" not in target:
            assert (page.parent / path).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_their_options_exist(page: Path):
    """In every indented line that begins with our command."""
    for command, rest in re.findall(r"^    gossipdp (\w+)(.*)$", page.read_text(), re.M):
        assert command in COMMANDS, command
        ours = rest.split("train.py")[0]
        for option in re.findall(r"--[a-z-]+", ours):
            assert option in help_of(command), f"{command} {option}"


_help: dict[str, str] = {}


def help_of(command: str) -> str:
    if command not in _help:
        done = subprocess.run(
            [sys.executable, "-m", "gossipdp.cli.main", command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        _help[command] = done.stdout
    return _help[command]


def test_every_public_name_is_in_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in gossipdp.__all__:
        assert name in text, name


BLOCKS = [
    (name, block)
    for name, page in zip(NAMES, PAGES, strict=True)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_code_blocks_run(name: str, block: str, tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
