"""The public names and the import arrows of ``gossipdp/__init__.py`` are what it says."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import networkx as nx
import pytest

import gossipdp

ROOT = Path(__file__).parents[2]
SOURCE = Path(gossipdp.__file__).parent
LAB = SOURCE.with_name("gossipdp_lab")

LAYERS = {
    "errors": set(),
    "logs": set(),
    "rules": set(),
    "graph": set(),
    "dynamics": set(),
    "protocol": {"graph"},
    "links": {"protocol", "dynamics"},
    "launcher": {"links"},
    "gossip": {"graph", "dynamics", "protocol", "links", "launcher"},
    "observe": {"graph", "dynamics", "protocol", "links", "gossip", "launcher"},
    "parallel": {"graph", "dynamics", "protocol", "links", "gossip", "launcher", "observe"},
    "integrations": {"launcher", "parallel"},
    "cli": {"graph", "protocol", "links", "launcher", "observe", "parallel"},
}
LAB_LAYERS = {
    "console": set(),
    "baselines": set(),
    "tasks": {"baselines"},
    "simulate": {"tasks"},
    "report": {"simulate"},
    "demo": {"baselines", "tasks", "simulate", "report"},
}
EVERYONE_MAY = {"errors", "logs", "rules"}
# Top-level third-party imports of the pure layers.
LIBRARIES = {
    "graph": {"networkx", "numpy"},
    "dynamics": {"torch", "numba", "llvmlite", "numpy"},
    "protocol": {"msgspec"},
}
IMPURE = {"asyncio", "select", "selectors", "socket", "threading", "time", "multiprocessing"}


@cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, also within functions and for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def files_of(layer: str, room: Path = SOURCE) -> list[Path]:
    package = room / layer
    return sorted(package.rglob("*.py")) if package.is_dir() else [room / f"{layer}.py"]


@pytest.mark.parametrize(("room", "layers"), [(SOURCE, LAYERS), (LAB, LAB_LAYERS)])
def test_import_arrows(room, layers):
    assert {path.parent.name for path in room.glob("*/__init__.py")} <= layers.keys()
    for layer in layers:
        allowed = layers[layer] | EVERYONE_MAY | {layer, "console"}
        for path in files_of(layer, room):
            names = [name.split(".") for name in imports_of(path)]
            own = {name[1] for name in names if name[0] == room.name and len(name) > 1}
            assert own & layers.keys() <= allowed, path


def test_the_library_imports_what_it_depends_on_and_no_more():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=\[]", each)[0].replace("-", "_") for each in project["dependencies"]}
    assert len(needed - {"llvmlite"}) <= 12  # numba brings llvmlite
    imported = {
        name.split(".")[0]
        for path in SOURCE.rglob("*.py")
        for name in imports_of(path)
        # each integration needs an extra
        if path.parent.name != "integrations" or name.startswith("gossipdp_lab")
    }
    assert imported - sys.stdlib_module_names - {"gossipdp"} == needed


@pytest.mark.parametrize("layer", LIBRARIES)
def test_pure_layers_know_few_libraries_and_no_thread_socket_or_clock(layer):
    # Two threads meet in the chunks of dynamics, which own their locks.
    impure = IMPURE - ({"threading"} if layer == "dynamics" else set())
    for path in files_of(layer):
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert not tops & impure, path
        assert tops - sys.stdlib_module_names - {"gossipdp"} <= LIBRARIES[layer], path


@pytest.mark.parametrize("layer", ["dynamics", "gossip", "parallel"])
def test_no_tensor_of_the_library_is_made_on_the_script_s_default_device(layer):
    made = re.compile(r"torch\.(empty|zeros|ones|full|tensor|arange|rand\w*)$")
    for path in files_of(layer):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and made.match(ast.unparse(node.func)):
                assert "device" in {each.arg for each in node.keywords}, ast.unparse(node)


def test_no_other_name_is_public():
    with pytest.raises(AttributeError, match="module 'gossipdp' has no attribute 'nothing'"):
        gossipdp.nothing  # noqa: B018


def test_no_modules_import_each_other_in_a_circle():
    modules = {
        ".".join((room.name, *path.relative_to(room).with_suffix("").parts)): path
        for room in (SOURCE, LAB)
        for path in room.rglob("*.py")
        if path.name != "__init__.py"
    }
    arrows = nx.DiGraph()
    for name, path in modules.items():
        arrows.add_edges_from((name, other) for other in imports_of(path) & modules.keys())
    circles = [circle for circle in nx.strongly_connected_components(arrows) if len(circle) > 1]
    assert not circles


def test_the_map_names_every_file_and_no_other():
    """The walks of ``gossipdp/__init__.py``, and the list in each room's."""
    walks = re.findall(r"\b([a-z]+)/([a-z_]+)", gossipdp.__doc__ or "")
    assert len(walks) > 30
    missing = [
        f"{room}/{name}" for room, name in walks if not (SOURCE / room / f"{name}.py").exists()
    ]
    for room in ("dynamics", "protocol", "links", "launcher", "gossip", "observe", "parallel"):
        listed = import_module(f"gossipdp.{room}").__doc__ or ""
        files = {path.stem for path in files_of(room)} - {"__init__"}
        missing += [f"{room}: {name}" for name in files if not re.search(rf"\b{name}\b", listed)]
        listed_first = re.findall(r"^([a-z_]+)  ", listed, re.MULTILINE)
        missing += [f"{room}: no {name}" for name in listed_first if name not in files]
    assert not missing


def test_the_threads_of_the_table_are_those_that_are_started():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^\| `(gossipdp-[a-z]*)", page, re.MULTILINE))
    rooms = ("dynamics", "gossip", "parallel", "observe")
    code = "\n".join(path.read_text() for room in rooms for path in files_of(room))
    assert set(re.findall(r'"(gossipdp-[a-z]*)', code)) == named


# Lines and files of each room: the room itself is ".", its top folders follow.
BUDGET: dict[str, dict[str, tuple[int, int]]] = {
    "src/gossipdp": {
        ".": (399, 5), "cli": (1034, 6), "dynamics": (2488, 10), "gossip": (2563, 11),
        "graph": (563, 3), "integrations": (573, 5), "launcher": (3334, 13), "links": (2843, 11),
        "observe": (1531, 7), "parallel": (7243, 23), "protocol": (5120, 17),
    },
    "src/gossipdp_lab": {
        ".": (355, 3), "demo": (1070, 5), "report": (1114, 5), "simulate": (3137, 13),
        "tasks": (1635, 7),
    },
    "tests": {
        ".": (238, 1), "benchmarks": (1366, 12), "browser": (95, 1), "chaos": (1122, 5),
        "clusters": (343, 2), "fuzz": (643, 3), "integration": (2671, 18), "mutants": (1546, 7),
        "property": (1302, 8), "simulation": (841, 6), "support": (5028, 36),
        "unit": (24413, 120),
    },
    "benchmarks": {
        ".": (5398, 18), "reproduction": (1055, 6), "support": (2891, 15),
    },
}  # fmt: skip


def sizes_of(top: str) -> dict[str, tuple[int, int]]:
    """Return the lines and files of each room under a folder of the repository."""
    lines: dict[str, list[int]] = {}
    for path in (ROOT / top).rglob("*.py"):
        inner = path.relative_to(ROOT / top).parts
        room = inner[0] if len(inner) > 1 else "."
        lines.setdefault(room, []).append(len(path.read_text().splitlines()))
    return {room: (sum(each), len(each)) for room, each in lines.items()}


def over_or_under(room: str, number: int, count: int, what: str) -> str | None:
    """Return what is wrong with a number, if anything is."""
    if count > number:
        return (
            f"{room}: {count} {what}, {number} allowed. A number may fall with any commit; to "
            "raise one, cut as much elsewhere in the same change"
        )
    if count < number - max(0.02 * number, 40 if what == "lines" else 0):
        return f"{room}: {count} {what}, far below {number}"
    return None


@pytest.mark.parametrize("top", BUDGET)
def test_no_room_grows(top):
    sizes, budget = sizes_of(top), BUDGET[top]
    wrong = [f"{top}/{room}: a new room without a number" for room in sizes.keys() - budget]
    wrong += [f"{top}/{room}: a number without a room" for room in budget.keys() - sizes]
    for room in sizes.keys() & budget:
        for what, number, count in zip(("lines", "files"), budget[room], sizes[room], strict=True):
            wrong.append(over_or_under(f"{top}/{room}", number, count, what) or "")
    shown = ", ".join(f'"{room}": {sizes[room]}' for room in sorted(sizes))
    assert not any(wrong), "\n".join([*filter(None, wrong), f"to put there: {shown}"])
