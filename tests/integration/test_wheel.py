"""The distribution: the contents of wheel and sdist, and the command once installed."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import gossipdp

ROOT = Path(__file__).parents[2]
NAME = f"gossipdp-{gossipdp.__version__}"


def run(*words: str, **variables: str) -> str:
    environment = os.environ | variables
    done = subprocess.run(  # in a directory without a source tree
        words, capture_output=True, text=True, check=False, env=environment, cwd=sys.prefix
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and the wheel that was built from it."""
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT))
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


def test_installed_it_runs(dist, tmp_path):
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path),
        str(dist / f"{NAME}-py3-none-any.whl"),
    )  # fmt: skip
    command = [sys.executable, "-P", str(tmp_path / "bin" / "gossipdp")]
    path = str(tmp_path)
    assert run(*command, "--version", PYTHONPATH=path) == f"gossipdp {gossipdp.__version__}\n"
    where = run(sys.executable, "-c", "import gossipdp; print(gossipdp.__file__)", PYTHONPATH=path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    assert "simulate" in run(*command, "--help", PYTHONPATH=path)
