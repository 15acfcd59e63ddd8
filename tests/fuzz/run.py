"""``make fuzz``: coverage-guided fuzzing of every target, by atheris (libFuzzer for Python).

    make fuzz                               every target for 60 s
    make fuzz SECONDS=10                    ... for 10 s
    make fuzz ARGS="--target link_stream"   one target
    .venv/bin/python tests/fuzz/run.py --replay runs/fuzz/failures/TARGET-...

The corpus grows from run to run under ``runs/fuzz``. An input that fails is kept there, and the
command that replays it is printed; replaying needs no atheris.
"""

import argparse
import hashlib
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "fuzz"
MAX_INPUT_BYTES = 8192
# One input may take this long at most; an endless loop is a failure too.
INPUT_TIMEOUT_S = 10
FUZZED = ["gossipdp.protocol", "gossipdp"]
sys.path.insert(0, str(ROOT / "tests" / "support"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--replay", type=Path, help="run one kept input and show what it does")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.inside:
        _fuzz_here(arguments.inside, rest)  # does not return
    if arguments.replay:
        return _replay(arguments.replay)
    from targets import TARGETS

    names = arguments.target or list(TARGETS)
    failed = [name for name in names if not _fuzz(name, arguments.seconds)]
    print(f"fuzzed {len(names)} targets; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own; return whether nothing was found."""
    from targets import SEEDS

    corpus, failures = WORK / "corpus" / name, WORK / "failures"
    for directory in (corpus, failures):
        directory.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS[name]():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    before = set(failures.iterdir())
    limits = [f"-max_total_time={seconds}", f"-max_len={MAX_INPUT_BYTES}"]
    limits += [f"-timeout={INPUT_TIMEOUT_S}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    where = [f"-artifact_prefix={failures}/{name}-", str(corpus)]
    command = [sys.executable, __file__, "--inside", name, *limits, *where]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    executed, *_ = [*re.findall(r"number_of_executed_units: *(\d+)", done.stderr), "?"]
    print(f"{name}: {executed} inputs, corpus of {len(list(corpus.iterdir()))}", flush=True)
    if done.returncode == 0:
        return True
    print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    for path in sorted(set(failures.iterdir()) - before):
        print(f"replay: {sys.executable} {__file__} --replay {path}", flush=True)
    return False


def _fuzz_here(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=FUZZED):
        from targets import TARGETS
    from mutation import MUTATIONS

    known = MUTATIONS.get(name)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if known is not None and chance.random() < 0.7:
            try:
                return known(bytes(data), chance)[:most]
            except RecursionError:
                pass  # nested too deeply to be taken apart
        return bytes(atheris.Mutate(data, most))

    atheris.Setup([sys.argv[0], *arguments], TARGETS[name], custom_mutator=mutate)
    atheris.Fuzz()


def _replay(path: Path) -> int:
    from targets import TARGETS

    name = max((name for name in TARGETS if path.name.startswith(name)), key=len)
    TARGETS[name](path.read_bytes())
    print(f"{name}: {path} passes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
