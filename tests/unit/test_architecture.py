"""The public names and the import arrows of ``gossipdp/__init__.py`` are what it says."""

import ast
import sys
from pathlib import Path

import networkx as nx
import pytest

import gossipdp

SOURCE = Path(gossipdp.__file__).parent

LAYERS = {
    "errors": set(),
    "logs": set(),
    "progress": set(),
    "graph": set(),
    "dynamics": set(),
    "protocol": {"graph"},
    "links": {"protocol", "dynamics"},
    "gossip": {"graph", "dynamics", "protocol", "links", "launcher"},
    "launcher": {"links"},
    "simulate": {"graph", "dynamics", "protocol", "tasks"},
    "observe": {"graph", "dynamics", "protocol", "links", "gossip", "launcher"},
    "parallel": {"graph", "dynamics", "protocol", "links", "gossip", "launcher", "observe"},
    "integrations": {"launcher", "parallel"},
    "report": {
        "graph",
        "protocol",
        "simulate",
        "links",
        "gossip",
        "launcher",
        "observe",
        "parallel",
    },
    "tasks": {"parallel"},
}
EVERYONE_MAY = {"errors", "logs", "progress"}
# Top-level third-party imports of the pure layers.
LIBRARIES = {
    "graph": {"networkx", "numpy", "scipy"},
    "dynamics": {"torch", "numba", "numpy"},
    "protocol": {"msgspec"},
}
PURE_LAYERS = ("graph", "dynamics", "protocol")
IMPURE_MODULES = {
    "asyncio",
    "select",
    "selectors",
    "socket",
    "threading",
    "time",
    "multiprocessing",
}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
    return names


def files_of(layer: str) -> list[Path]:
    package = SOURCE / layer
    return sorted(package.rglob("*.py")) if package.is_dir() else [SOURCE / f"{layer}.py"]


@pytest.mark.parametrize("layer", LAYERS)
def test_import_arrows(layer):
    allowed = LAYERS[layer] | EVERYONE_MAY | {layer}
    for path in files_of(layer):
        for name in imports_of(path):
            if name.split(".")[0] == "gossipdp" and name != "gossipdp":
                assert name.split(".")[1] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("layer", LIBRARIES)
def test_libraries_of_the_pure_layers(layer):
    for path in files_of(layer):
        for name in imports_of(path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "gossipdp":
                assert top in LIBRARIES[layer], f"{path.name} imports {name}"


@pytest.mark.parametrize("layer", PURE_LAYERS)
def test_pure_layers_know_no_thread_socket_or_clock(layer):
    # Two threads meet in the chunks of dynamics, which own their locks.
    impure = IMPURE_MODULES - ({"threading"} if layer == "dynamics" else set())
    for path in files_of(layer):
        assert not imports_of(path) & impure, path


def test_every_public_name_exists():
    for name in gossipdp.__all__:
        assert getattr(gossipdp, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        gossipdp.nothing  # noqa: B018


def modules_imported_by(path: Path) -> set[str]:
    """Modules of this package that a file imports while it runs, also within functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_modules_import_each_other_in_a_circle():
    modules = {
        ".".join(("gossipdp", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    arrows = nx.DiGraph()
    for name, path in modules.items():
        arrows.add_edges_from((name, other) for other in modules_imported_by(path) & modules.keys())
    circles = [circle for circle in nx.strongly_connected_components(arrows) if len(circle) > 1]
    assert not circles
