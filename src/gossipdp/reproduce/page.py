"""``docs/reproduction.md``: all sections, each from its stored result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gossipdp.reproduce.invariant import Invariant
from gossipdp.reproduce.mixing import Mixing
from gossipdp.reproduce.pairing import PairingSection
from gossipdp.reproduce.section import FIGURE, Effort, Section
from gossipdp.reproduce.stored import Provenance, Stored
from gossipdp.reproduce.training import TrainingSection
from gossipdp.reproduce.training_time import TrainingTime

PAGE = "reproduction.md"

SECTIONS: Mapping[str, Section[Any]] = {
    section.name: section
    for section in (Mixing(), TrainingSection(), TrainingTime(), PairingSection(), Invariant())
}
"""In the order of the page."""


def reproduce(names: Sequence[str], directory: Path, effort: Effort, command: str) -> Path:
    """Measure the sections called ``names``, then draw and write the page from all that is stored.

    Args:
        names: keys of :data:`SECTIONS`; the others keep what was stored in ``directory`` before.
        directory: of the page; figures and results go to ``figures`` in it.
        effort: how much to measure.
        command: how it was called; stands in the page.

    Returns:
        The path of the page.

    Raises:
        ValueError: there is no such section.
    """
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"there is no section {name!r}; choose among {', '.join(SECTIONS)}")
    for name in names:
        section = SECTIONS[name]
        started = time.perf_counter()
        result = section.measure(effort)
        provenance = Provenance.here(command, time.perf_counter() - started)
        raw = msgspec.Raw(msgspec.json.encode(result))
        Stored(name, effort.quick, provenance, raw).write(_path(directory, name, "json"))
    page = directory / PAGE
    page.write_text("\n\n".join(_blocks(directory)) + "\n", "utf-8")
    return page


def _path(directory: Path, name: str, ending: str) -> Path:
    return directory / "figures" / f"reproduction-{name}.{ending}"


def _blocks(directory: Path) -> list[str]:
    blocks = [
        "# The paper's results, reproduced",
        "Written by `gossipdp reproduce`, every number in it: do not edit it by hand. The paper is "
        "Nabli, Belilovsky, Oyallon, *A2CiD2: Accelerating Asynchronous Communication in "
        "Decentralized Deep Learning*, NeurIPS 2023 (arXiv 2306.08289). Everything here is "
        "simulated, on a virtual clock; [concepts](concepts.md) has the words, and "
        "[cli](cli.md) the command."
        if (directory / "concepts.md").exists()
        else "Written by `gossipdp reproduce`, every number in it.",
    ]
    contents = []
    sections = []
    for number, (name, section) in enumerate(SECTIONS.items(), start=1):
        heading = f"{number}. {section.title}"
        anchor = heading.lower().replace(".", "").replace(" ", "-")
        contents.append(f"- [{heading}](#{anchor})")
        sections += [f"## {heading}", *_section(directory, name, section)]
    return [*blocks, "\n".join(contents), *sections]


def _section(directory: Path, name: str, section: Section[Any]) -> list[str]:
    stored = Stored.read(_path(directory, name, "json"))
    if stored is None:
        return [f"*Not run yet: `gossipdp reproduce --only {name}`.*"]
    result = msgspec.json.decode(stored.result, type=section.result_type)
    section.draw(result, _path(directory, name, "png"))
    figure = f"![{section.title}](figures/reproduction-{name}.png)"
    by = stored.provenance
    blocks = [figure if block == FIGURE else block for block in section.write(result)]
    if stored.quick:
        blocks.insert(
            0,
            "> **Quick run.** Tiny settings, to see that everything works: these numbers show "
            "nothing, and the verdict counts for nothing.",
        )
    blocks.append(
        f"<sub>`{by.command}`; gossipdp {by.version}, commit {by.commit}; {by.hardware}; "
        f"{by.seconds:.0f} s. Data: [JSON](figures/reproduction-{name}.json).</sub>"
    )
    return blocks
