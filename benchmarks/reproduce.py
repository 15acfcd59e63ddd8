"""The paper's figures and claims, measured by the simulator and written to one page.

    python benchmarks/reproduce.py                    measure everything, rewrite the page in docs
    python benchmarks/reproduce.py --only mixing,pairing measure these; the others stay as stored
    python benchmarks/reproduce.py --rewrite          measure nothing; draw and write the page again
    python benchmarks/reproduce.py --quick            tiny settings, into runs/reproduction

Source of the figures reproduced: Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289. Each section
is a module of the folder reproduction: ``measure`` gives a structure that is stored as JSON beside
the figure, ``draw`` and ``write`` make figure and text from that structure alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from reproduction import invariant, mixing, pairing, training
from reproduction.parts import FIGURE, TAIL, Effort, table
from support.provenance import Provenance, commit_here

DOCS = Path(__file__).parents[1] / "docs"
QUICK_OUTPUT = Path("runs/reproduction")
"""Quick runs show nothing, so they never overwrite what is committed."""

SECTIONS: dict[str, ModuleType] = {
    "mixing": mixing,
    "training": training,
    "pairing": pairing,
    "invariant": invariant,
}
"""In the order of the page."""


_SUMMARY = table(
    ("what the paper shows", "here"),
    [
        (
            "how communications grow with n, on the star, the ring and the complete graph",
            "consistent with it ([1](#1-communications-to-agree))",
        ),
        (
            "on a ring of 64, A2CiD2 acts like doubling the comm rate",
            "reproduced with a small network; on smaller rings it mostly does not hold "
            "([2](#2-training-on-rings))",
        ),
        (
            "ResNet-18 on CIFAR-10 and ResNet-50 on ImageNet: accuracies",
            "not tried: neither the data nor GPUs were at hand; [recipes](recipes.md) has the "
            "settings",
        ),
        ("training times on up to 64 GPUs, and the steps of fast and slow ones", "not tried"),
    ],
    num_left=2,
)
"""Claim by claim; sections 3 and 4 are about claims of ours."""

ON_IMAGES = (
    "## On real images",
    "The sections above train on digits, or on nothing. `python "
    "benchmarks/paper_images.py` repeats the paper's experiment on Fashion-MNIST, a "
    "Debian package (`apt-get install dataset-fashion-mnist`): all-reduce, plain gossip "
    "at one and at two exchanges a step, and A2CiD2 at one, on a ring and on a complete "
    "graph of 16 simulated workers, with a ResNet-8 and the paper's settings; `--workers "
    "64` for more workers, `--real` for four real processes too. It writes its tables and"
    " its figure to `benchmarks/results/paper_images.md` and `.png`.",
)
"""Ends the page."""


class Stored(msgspec.Struct, frozen=True):
    """One section's result, to be decoded as that section's own type."""

    section: str
    quick: bool
    provenance: Provenance
    result: msgspec.Raw


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--rewrite", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny settings, about a minute")
    parser.add_argument("--output", type=Path, help="directory of the page; figures go to figures/")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(words)
    output = options.output or (QUICK_OUTPUT if options.quick else DOCS)
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        effort = Effort(options.quick, options.processes)
        page = reproduce([] if options.rewrite else names, output, effort)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"reproduce: {error}\n")
        return 2
    sys.stdout.write(f"page: {page}\n")
    return 0


def reproduce(names: Sequence[str], directory: Path, effort: Effort) -> Path:
    """Measure the sections called ``names``, then draw and write the page from all that is stored.

    Args:
        names: keys of :data:`SECTIONS`; the others keep what was stored in ``directory`` before.
        directory: of the page; figures and results go to ``figures`` in it.
        effort: how much to measure.

    Raises:
        ValueError: there is no such section, or its figures would stand in docs without a commit
            that has the code they were measured by.
    """
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"there is no section {name!r}; choose among {', '.join(SECTIONS)}")
    if names and directory == DOCS and commit_here().endswith("+"):
        raise ValueError(
            "src or benchmarks have changes that are not committed, so that no commit has the code "
            "of these figures: commit them first, or measure into another directory with --output"
        )
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for name in names:
        started = time.perf_counter()
        result = SECTIONS[name].measure(effort)
        provenance = Provenance.here(time.perf_counter() - started)
        stored = Stored(name, effort.quick, provenance, msgspec.Raw(msgspec.json.encode(result)))
        encoded = msgspec.json.format(msgspec.json.encode(stored), indent=1)
        _path(directory, name, "json").write_bytes(encoded + b"\n")
    page = directory / "reproduction.md"
    page.write_text("\n\n".join(_blocks(directory)) + "\n", "utf-8")
    return page


def read_stored(directory: Path, name: str) -> Stored | None:
    """Return the stored result of a section; None where there is none."""
    path = _path(directory, name, "json")
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stored)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"{path} is not a stored result ({error}): delete it, or measure it again"
        ) from error


def _path(directory: Path, name: str, ending: str) -> Path:
    return directory / "figures" / f"reproduction-{name}.{ending}"


def _blocks(directory: Path) -> list[str]:
    blocks = [
        "# The paper's results, reproduced",
        "The paper is Nabli, Belilovsky, Oyallon, *A2CiD2: Accelerating Asynchronous Communication "
        "in Decentralized Deep Learning*, NeurIPS 2023 (arXiv 2306.08289). The script "
        "`benchmarks/reproduce.py` writes this page: do not edit it by hand. All runs are "
        "simulated, on a virtual clock.",
        _SUMMARY,
        "A *decay* is always the slope of −log(consensus distance), by least squares while the "
        f"distance falls from {TAIL[0]:g} to {TAIL[1]:g} of its first value. In a run that ends "
        "before, it is the slope over the second half of the decades that it fell, which is on the "
        "high side.",
    ]
    contents = []
    sections = []
    for number, (name, section) in enumerate(SECTIONS.items(), start=1):
        heading = f"{number}. {section.TITLE}"
        anchor = heading.lower().replace(".", "").replace(" ", "-")
        contents.append(f"- [{heading}](#{anchor})")
        sections += [f"## {heading}", *_section(directory, name, section)]
    return [*blocks, "\n".join(contents), *sections, *ON_IMAGES]


def _section(directory: Path, name: str, section: ModuleType) -> list[str]:
    stored = read_stored(directory, name)
    if stored is None:
        return [f"*Not run yet: `python benchmarks/reproduce.py --only {name}`.*"]
    result = msgspec.json.decode(stored.result, type=section.Result)
    section.draw(result, _path(directory, name, "png"))
    figure = f"![{section.TITLE}](figures/reproduction-{name}.png)"
    by = stored.provenance
    blocks = [figure if block == FIGURE else block for block in section.write(result)]
    if stored.quick:
        blocks.insert(
            0,
            "> **Quick run.** Tiny settings, to see that everything works: these numbers show "
            "nothing, and the verdict counts for nothing.",
        )
    blocks.append(
        f"<sub>gossipdp {by.version}, {by.code}; {by.hardware}; "
        f"{by.seconds:.0f} s. Data: [JSON](figures/reproduction-{name}.json).</sub>"
    )
    return blocks


if __name__ == "__main__":
    sys.exit(main())
