"""The contents of wheel and sdist; ``.ci/run`` installs the wheel, and runs its command."""

import email
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from run_processes import run_python

import gossipdp

ROOT = Path(__file__).parents[2]
NAME = f"gossipdp-{gossipdp.__version__}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and the wheel that was built from it."""
    target = tmp_path_factory.mktemp("dist")
    words = ["-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    done = run_python(*words, environment=os.environ, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_the_wheel_holds_the_package_alone_and_names_the_command_and_the_extras(dist):
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as archive:
        wheel = {name: archive.read(name) for name in archive.namelist()}
    assert "gossipdp/py.typed" in wheel
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"gossipdp", "gossipdp_lab", f"{NAME}.dist-info"}
    assert not [name for name in wheel if "test" in Path(name).name or "__pycache__" in name]
    source = ROOT / "src"
    shipped = {name for name in wheel if name.endswith(".py")}
    assert shipped == {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert f"{NAME}.dist-info/licenses/LICENSE" in wheel
    metadata = email.message_from_bytes(wheel[f"{NAME}.dist-info/METADATA"])
    assert metadata["Version"] == gossipdp.__version__
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"lightning", "transformers", "ray", "lab", "dev"} <= extras
    assert b"gossipdp = gossipdp.cli.main:main" in wheel[f"{NAME}.dist-info/entry_points.txt"]


def test_the_sdist_holds_what_tests_and_docs_need(dist):
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "Makefile", "constraints.txt", "CONTRIBUTING.md"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {"src", "tests", "docs", "examples", "benchmarks"} <= tops
    assert not tops & {".venv", "runs", "dist", "build", ".git"}
