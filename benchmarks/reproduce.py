"""The paper's figures and claims, measured by the simulator and written to one page.

    python benchmarks/reproduce.py                    measure everything, rewrite the page in docs
    python benchmarks/reproduce.py --only mixing,racks   measure these; the others stay as stored
    python benchmarks/reproduce.py --rewrite          measure nothing; draw and write the page again
    python benchmarks/reproduce.py --quick            tiny settings, into runs/reproduction

Source of the figures reproduced: Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289. Each section
is a module of the folder reproduction: ``measure`` gives a structure that is stored as JSON beside
the figure; ``draw``, ``claims`` and ``caption`` make figure and text from that structure alone. The
runs on images are those of benchmarks/paper_images.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from paper_images import Runs
from reproduction import images, invariant, mixing, racks, training
from reproduction.parts import table
from support.report import Provenance, commit_here, run_script

DOCS = Path(__file__).parents[1] / "docs"
QUICK_OUTPUT = Path("runs/reproduction")
"""Quick runs show nothing, so they never overwrite what is committed."""

SECTIONS: dict[str, ModuleType] = {
    "training": training,
    "racks": racks,
    "mixing": mixing,
    "invariant": invariant,
}
"""In the order of the page, after the images."""
PICTURES = {
    "images": "On images, more exchanges narrow the gap to all-reduce",
    "training": "On a large ring, the momentum is worth more than twice the exchanges",
    "racks": "Where the network is given, the momentum makes up for it",
    "mixing": "On a ring the momentum saves a factor n of communications",
    "invariant": "Our exchange keeps the mean; the released one lets it drift",
}
IMAGES = Path(__file__).parent / "results" / "paper_images.jsonl"

ELSEWHERE = [
    (
        "no locks: no worker waits for another",
        "**holds** with real processes, at step boundaries: "
        "[faults](faults.md#what-the-others-do-meanwhile)",
    ),
    (
        "up to 64 workers",
        "**holds** for 64 simulated ones; of processes 64 ran 16 steps, and 16 were trained",
    ),
    (
        "ResNet-18 on CIFAR-10, ResNet-50 on ImageNet, 64 A100s, 300 and 90 epochs",
        "**not tried**; the [recipes](recipes.md) are there",
    ),
]


class Stored(msgspec.Struct, frozen=True):
    """One section's result, to be decoded as that section's own type."""

    section: str
    quick: bool
    provenance: Provenance
    result: msgspec.Raw


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--rewrite", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny settings, about a minute")
    options = parser.parse_args(words)
    output = QUICK_OUTPUT if options.quick else DOCS
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    print(f"page: {reproduce([] if options.rewrite else names, output, options.quick)}")


def reproduce(names: Sequence[str], directory: Path, quick: bool = False) -> Path:
    """Measure the sections called ``names``, then draw and write the page from all that is stored.

    Args:
        names: keys of :data:`SECTIONS`; the others keep what was stored in ``directory`` before.
        directory: of the page; figures and results go to ``figures`` in it.
        quick: with tiny settings, to see that everything works; the page says so.

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
            "of these figures: commit them first"
        )
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    for name in names:
        started = time.perf_counter()
        result = SECTIONS[name].measure(quick)
        provenance = Provenance.here(time.perf_counter() - started)
        stored = Stored(name, quick, provenance, msgspec.Raw(msgspec.json.encode(result)))
        encoded = msgspec.json.format(msgspec.json.encode(stored), indent=1)
        _path(directory, name, "json").write_bytes(encoded + b"\n")
    page = directory / "reproduction.md"
    page.write_text("\n\n".join(_blocks(directory)) + "\n", "utf-8")
    return page


def read_stored(directory: Path, name: str) -> Stored | None:
    path = _path(directory, name, "json")
    return msgspec.json.decode(path.read_bytes(), type=Stored) if path.exists() else None


def _path(directory: Path, name: str, ending: str) -> Path:
    return directory / "figures" / f"reproduction-{name}.{ending}"


def _blocks(directory: Path) -> list[str]:
    runs = Runs(IMAGES)
    images.draw(runs, _path(directory, "images", "png"))
    claims, captions = images.claims(runs), {"images": images.caption(runs)}
    for name, section in SECTIONS.items():
        captions[name] = _section(directory, name, section, claims)
    pictures = [
        block
        for name, title in PICTURES.items()
        for block in (
            f"## {title}",
            f"![{name}](figures/reproduction-{name}.png)",
            *captions[name],
        )
    ]
    return [
        "# The paper's results, reproduced",
        "The paper is [A2CiD2](https://arxiv.org/abs/2306.08289) (Nabli, Belilovsky, Oyallon, "
        "NeurIPS 2023). Workers are simulated where no processes are named; no GPU and none of "
        "the paper's data was used. ± is the standard deviation over seeds. "
        "`benchmarks/reproduce.py` writes this page.",
        table(("what the paper claims", "here"), claims + ELSEWHERE, num_left=2),
        *pictures,
    ]


def _section(
    directory: Path, name: str, section: ModuleType, claims: list[tuple[str, str]]
) -> list[str]:
    stored = read_stored(directory, name)
    if stored is None:
        return [f"*Not run yet: `python benchmarks/reproduce.py --only {name}`.*"]
    result = msgspec.json.decode(stored.result, type=section.Result)
    section.draw(result, _path(directory, name, "png"))
    claims += section.claims(result)
    blocks: list[str] = section.caption(result)
    if stored.quick:
        blocks.insert(0, "> **Quick run.** Tiny settings: these numbers show nothing.")
    blocks.append(
        f"<sub>[Data, settings and hardware](figures/reproduction-{name}.json), "
        f"{stored.provenance.code}.</sub>"
    )
    return blocks


if __name__ == "__main__":
    run_script(main)
