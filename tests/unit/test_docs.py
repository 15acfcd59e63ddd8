"""The documentation's links, commands, options, variables, extras, names and code are true.

Code fences: ``python`` runs as one worker, what stands under the ``__main__`` guard excepted;
``py`` is compared with the object of that name; ``json`` and ``yaml`` can be read.
Indented calls of our command are checked for their options; with a prompt, ``$ gossipdp plan`` and
``$ gossipdp simulate`` are run, and print what follows them. A line of three dots stands for any
number of lines. Indented Python that wraps a model runs with a small one; in tests/integration
run that of shards.md (test_shards.py) and the changes (``diff``) of your_script.md
(test_your_script.py).
"""

import ast
import contextlib
import inspect
import io
import json
import math
import re
import runpy
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cli_page
import pytest
import torch
import yaml

import gossipdp
from gossipdp.cli.main import COMMANDS, main
from gossipdp_lab.simulate import study

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").glob("*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(kind: str) -> list[tuple[str, str]]:
    return [
        (name, block)
        for name, page in zip(NAMES, PAGES, strict=True)
        for block in re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.S | re.M)
    ]


@each_page
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:  # GitHub's: lower case, without punctuation, blanks as hyphens
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            plain = {re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings}
            assert anchor in {each.replace(" ", "-") for each in plain}, target


@cache
def help_of(*command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main([*command, "--help"])
    return shown.getvalue()


@each_page
def test_commands_and_their_options_exist(page):
    text = page.read_text()
    calls = re.findall(r"^    (?:\$ )?gossipdp (.*)$", text, re.M)
    calls += re.findall(r"`gossipdp ([^`]+)`", text)
    for words in (re.sub(r"  #.*", "", call).split() for call in calls):
        if words[0] in ("--version", "--help", "COMMAND"):
            continue
        assert words[0] in COMMANDS, words
        options = help_of(*words[: 2 if words[0] == "train" else 1])
        for word in words[1:]:
            if word.endswith(".py") or word == "-m":  # what follows belongs to the script
                break
            if word.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", options), words


def test_the_options_of_the_command_line_page_are_those_of_the_help():
    written = (ROOT / "docs" / "cli.md").read_text()
    assert cli_page.page() == written, "write it with: python tools/cli_page.py"
    assert "- `--faults-seed 0`: Seed of the workers" in written
    assert all(f"\n## `gossipdp {command}`\n" in written for command in COMMANDS)


def messages_in(path: Path) -> Iterator[str]:
    """Yield the texts of a module, with three dots in place of values."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [
            str(part.value) if isinstance(part, ast.Constant) else "..."
            for part in parts
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        ]
        yield re.sub(r"%[.\d]*[a-z]", "...", "".join(texts)).replace("%%", "%")


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    shown = re.findall(r"^\| `(.*?)` \|", page, re.M)
    assert len(shown) >= 12
    texts = {
        text for path in (ROOT / "src" / "gossipdp").rglob("*.py") for text in messages_in(path)
    }
    for message in shown:
        pattern = ".*".join(re.escape(part) for part in message.split("..."))
        assert any(re.search(pattern, text, re.S) for text in texts), message


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_extras_that_are_named_exist_and_are_installed_as_clones_and_pypi_serve_them():
    named: set[str] = set()
    for path in (*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")):
        text = path.read_text().replace("pip install '.[lab]'", "")  # of the clone, at first
        assert not re.search(r"install[^\n`]*\s'?\.\[", text), f"{path}: write 'gossipdp[NAME]'"
        named.update(*(names.split(",") for names in re.findall(r"gossipdp\[([\w,-]+)\]", text)))
    assert {"lightning", "ray"} <= named <= EXTRAS.keys()


def test_each_extra_is_explained_to_those_who_want_it():
    for_users = (ROOT / "docs" / "install.md").read_text()
    for_contributors = (ROOT / "CONTRIBUTING.md").read_text()
    for extra in EXTRAS:
        text = for_contributors if extra in ("dev", "docs", "fuzz") else for_users
        assert re.search(rf"^- `{extra}`: \S", text, re.M), extra


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for line in re.findall(r"(?:^    |`)make ([^`\n#]+)", page.read_text(), re.M):
            for word in re.sub(r'"[^"]*"', "", line).split():
                if "=" not in word:
                    assert re.search(rf"^{re.escape(word)}:", makefile, re.M), line


def test_variables_are_read_by_the_library():
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for page in PAGES:
        for name in re.findall(r"GOSSIPDP_\w+", page.read_text()):
            assert f'"{name}"' in source, name


def test_every_public_name_is_in_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in gossipdp.__all__:
        assert name in text, name
    for kind in (gossipdp.GossipDataParallel, gossipdp.Stats, gossipdp.Consolidated):
        section = text.split(f"## {kind.__name__}\n")[1].split("\n## ")[0]
        members = [name for name in vars(kind) if not name.startswith("_") and name != "forward"]
        for name in {*members, *getattr(kind, "__dataclass_fields__", ())}:
            assert f"`{name}" in section, f"{kind.__name__}.{name}"


def test_every_public_name_is_on_the_page_of_docstrings():
    page = (ROOT / "docs" / "docstrings.md").read_text()
    rendered = re.findall(r"^::: (\S+)$", page, re.M)
    for name in set(gossipdp.__all__) - {"__version__"}:
        home = getattr(gossipdp, name).__module__  # the errors come with their module
        assert f"gossipdp.{name}" in rendered or home in rendered, name


@pytest.mark.parametrize("block", [block for _, block in blocks("py")])
def test_signatures_are_the_code_s(block):
    name, _, arguments = block.strip().partition("(")
    function = ast.parse(f"def f({arguments}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    namespace: dict = {}
    exec(compile(ast.Module([function], []), "api.md", "exec"), namespace)
    shown = inspect.signature(namespace["f"]).parameters.values()
    real = inspect.signature(getattr(gossipdp, name)).parameters.values()
    # Any other keyword is taken only to be refused with a hint.
    taken = [p for p in real if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in shown] == [
        (p.name, p.kind, p.default) for p in taken
    ]


PROGRAMS = blocks("python")


@pytest.fixture
def run_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run a program as one worker; its names when it has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "WORTH_PROCESSES_S", math.inf)  # those would import torch anew

    def run(text: str) -> dict[str, Any]:
        script = tmp_path / "program.py"
        script.write_text(text)
        return runpy.run_path(str(script))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "block"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs_run(name, block, run_program):
    run_program(block)


FRAGMENTS = [
    (name, textwrap.dedent(block))
    for name, page in zip(NAMES, PAGES, strict=True)
    for outside in [re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)]
    for block in re.findall(r"(?<=\n\n)(?: {4}.*\n)+", outside)
    if "GossipDataParallel(" in block and page.name != "shards.md"
]


@pytest.mark.parametrize(("name", "block"), FRAGMENTS, ids=[name for name, _ in FRAGMENTS])
def test_fragments_run(name, block, run_program):
    net = torch.nn.Linear(8, 2)
    names: dict[str, Any] = {
        "gossipdp": gossipdp,
        "GossipDataParallel": gossipdp.GossipDataParallel,
        "ProgressLR": gossipdp.ProgressLR,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "net": net,
        "optimizer": torch.optim.AdamW(net.parameters()),
        "loader": [(torch.randn(10_000, 8), torch.randint(2, (10_000,)))],
    }
    exec(block, names)
    names["model"].close()


# Tested below, and in tests/integration/test_your_script.py.
WITH_CHANGES = {"from_ddp.md", "your_script.md"}


def test_no_block_is_of_a_kind_that_nobody_checks():
    kinds = {"python", "py", "diff", "json", "yaml", "text", ""}
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.M)
        assert set(fences) <= kinds, page
        assert "diff" not in fences or page.name in WITH_CHANGES, page
        assert len(fences) % 2 == 0, f"{page}: a block has no end"


def test_the_change_from_ddp_is_that_of_the_two_examples():
    ((_, change),) = [each for each in blocks("diff") if each[0] == "docs/from_ddp.md"]
    for sign, name in (("-", "plain_ddp"), ("+", "plain_gossipdp")):
        lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
        shown = [line[1:] for line in change.splitlines() if line.startswith(sign)]
        assert shown, sign
        assert set(shown) <= set(lines), set(shown) - set(lines)


def test_json_and_yaml_blocks_can_be_read():
    for _, block in blocks("json"):
        json.loads(block)
    for _, block in blocks("yaml"):
        assert yaml.safe_load(block)


TRANSCRIPTS = [
    (call.split(), re.sub(r"^    ", "", shown, flags=re.M))
    for page in PAGES
    for call, shown in re.findall(
        r"^    \$ gossipdp ((?:plan|simulate) .*)\n((?:    .*\n|\n)*)", page.read_text(), re.M
    )
]


@pytest.mark.parametrize(
    ("words", "shown"), TRANSCRIPTS, ids=[" ".join(words) for words, _ in TRANSCRIPTS]
)
def test_commands_print_what_the_page_shows(words, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(study, "WORTH_PROCESSES_S", math.inf)  # those would import torch anew
    assert main(words) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    progress = re.compile(r"\s*\d+ s  simulating:")  # only where the machine is slow
    lines = [line for line in printed if line and not progress.match(line)]
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line.rstrip()) + r"\n"
        for line in shown.splitlines()
        if line.strip()
    )
    assert re.fullmatch(pattern, "\n".join(lines) + "\n"), "\n".join(lines)
