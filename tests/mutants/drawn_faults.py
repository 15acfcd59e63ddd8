"""Faults drawn at random from the library's source, each an edit of one span of its text.

:func:`faults_of` finds every fault of a file, by its syntax tree; :func:`draw` takes some of them
by a seed. A fault never touches a docstring, an annotation, a decorator, an ``assert``, a block for
type checkers, a ``__repr__``, or a message: an f-string, arguments of a ``raise``, a logger's call.
"""

import ast
import difflib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import PurePosixPath
from random import Random

WEIGHTS = dict.fromkeys(("protocol", "gossip", "dynamics", "links", "parallel"), 3)
"""How often a line of these packages is drawn, where one of another package is drawn once."""

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not"}
COMPARISONS |= {"is not": "is", "in": "not in", "not in": "in"}
COMPARISON = re.compile(r"<=|>=|==|!=|<|>|\bnot\s+in\b|\bis\s+not\b|\bin\b|\bis\b")
SIGNS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "|": "&", "&": "|"}
SIGNS |= {"<<": ">>", ">>": "<<"}
SIGN = re.compile(r"//|<<|>>|[-+*/%|&]")
OPPOSITES = {"max": "min", "min": "max", "any": "all", "all": "any", "floor": "ceil"}
OPPOSITES |= {"ceil": "floor"}
OTHER_END = {"popleft": "pop", "partition": "rpartition", "rpartition": "partition"}
OTHER_END |= {"find": "rfind", "rfind": "find"}
WAITS = re.compile(r"wait|join$|result$|synchronize$|acquire$|flush$|sleep$|finish$")
COUNTED = re.compile(r"num_|count|size|rank|number|index|version|round|steps|length")
SHORT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)
UNSEEN = {"__repr__", "__str__"}
Translate = Callable[[str], str]
MESSAGES = re.compile(r"(\w*logger|logging|warnings)\.\w+|print|cast|TypeVar|NewType")


@dataclass(frozen=True)
class Fault:
    """One edit: the characters of ``span`` become ``new``.

    ``lines``: the statement's, or those of its head, which a test must run to reach the fault.
    ``is_in_function``: whether these lines run when a function is called, not at import.
    """

    file: str
    kind: str
    span: tuple[int, int]
    new: str
    lines: tuple[int, int]
    is_in_function: bool

    @property
    def package(self) -> str:
        parts = PurePosixPath(self.file).parts
        return parts[1] if len(parts) > 2 else PurePosixPath(self.file).stem

    def apply(self, text: str) -> str:
        return text[: self.span[0]] + self.new + text[self.span[1] :]

    def diff(self, text: str) -> str:
        """Return the edit as a diff that ``patch -p0`` takes in the folder ``src``."""
        before, after = text.splitlines(), self.apply(text).splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.file, self.file, "", "", 2, ""))

    def compiles(self, text: str) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.apply(text))
                compile(tree, self.file, "exec")
        except (SyntaxError, ValueError):
            return False
        return ast.dump(tree) != _dumped(text)


@cache
def _dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


def draw(number: int, seed: int | str, texts: Mapping[str, str]) -> list[Fault]:
    """Draw faults: the package by its weight and lines, then the kind, then the place.

    ``texts``: the files to draw from. The same three arguments give the same faults.

    Raises:
        ValueError: there are fewer faults.
    """
    faults: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    weights: dict[str, int] = defaultdict(int)
    for file, text in sorted(texts.items()):
        for fault in faults_of(file, text):
            faults[fault.package][fault.kind].append(fault)
        package = Fault(file, "", (0, 0), "", (0, 0), False).package
        weights[package] += WEIGHTS.get(package, 1) * len(text.splitlines())
    random = Random(f"{seed}")
    drawn: list[Fault] = []
    while len(drawn) < number:
        packages = [package for package in weights if faults.get(package)]
        if not packages:
            raise ValueError(f"there are {len(drawn)} faults, not {number}: draw fewer")
        (package,) = random.choices(packages, [weights[each] for each in packages])
        kinds = faults[package]
        kind = random.choice(sorted(kinds))
        fault = kinds[kind].pop(random.randrange(len(kinds[kind])))
        if not kinds[kind]:
            del kinds[kind]
        if fault.compiles(texts[fault.file]):
            drawn.append(fault)
    return drawn


def faults_of(file: str, text: str) -> list[Fault]:
    """Return every fault of one file, in the order of the tree; see :meth:`Fault.compiles`."""
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    return finder.faults


class _Finder(ast.NodeVisitor):
    """Collects faults; what it does not visit stays as it is."""

    def __init__(self, file: str, text: str) -> None:
        self.faults: list[Fault] = []
        self._file, self._text = file, text
        self._rows = text.splitlines(keepends=True)
        self._starts = [0]
        for row in self._rows:
            self._starts.append(self._starts[-1] + len(row))
        self._lines = (1, 1)
        self._functions: list[ast.FunctionDef] = []
        self._known: set[str] = set()

    # Places.

    def _at(self, line: int, column: int) -> int:
        """Return the character at a line and a column, which Python counts in bytes."""
        row = self._rows[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(row)

    def _start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _source(self, node: ast.AST) -> str:
        return self._text[self._start(node) : self._end(node)]

    def _add(self, kind: str, start: int, end: int, new: str, line: int = 0) -> None:
        """Add a fault; ``line``: the one to be run if it is not this statement's."""
        lines = (line, line) if line else self._lines
        is_in_function = bool(self._functions)
        self.faults.append(Fault(self._file, kind, (start, end), new, lines, is_in_function))

    def _replace(self, kind: str, node: ast.AST, new: str) -> None:
        self._add(kind, self._start(node), self._end(node), new)

    def _between(
        self, kind: str, ends: tuple[ast.AST, ast.AST], find: re.Pattern[str], by: Translate
    ) -> None:
        """Replace the operator between two nodes."""
        start, end = self._end(ends[0]), self._start(ends[1])
        if found := find.search(self._text[start:end]):
            new = by(re.sub(r"\s+", " ", found[0]))
            self._add(kind, start + found.start(), start + found.end(), new)

    def _swap(self, nodes: Sequence[ast.expr]) -> None:
        """Swap each two neighbours that look alike."""
        for left, right in pairwise(nodes):
            texts = self._source(left), self._source(right)
            if type(left) is type(right) and texts[0] != texts[1]:
                gap = self._text[self._end(left) : self._start(right)]
                new = texts[1] + gap + texts[0]
                self._add("swapped", self._start(left), self._end(right), new)

    # Statements.

    def visit(self, node: ast.AST) -> None:
        """Visit a node; know the lines of the statement that it belongs to."""
        lines = self._lines
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            inner = node.cases[0].pattern if isinstance(node, ast.Match) else None
            inner = inner or next(iter(getattr(node, "body", [])), None)
            last = node.end_lineno if inner is None else inner.lineno - 1
            self._lines = node.lineno, max(node.lineno, last or node.lineno)
        super().visit(node)
        self._lines = lines

    def _visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        if node.name in UNSEEN:
            return
        known = self._known
        self._known = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        self._functions.append(node)
        for before, statement in pairwise([] if _has_result(node) else node.body):
            if not (isinstance(before, ast.Expr) and isinstance(before.value, ast.Constant)):
                start = self._start(statement)
                new = "return\n" + " " * statement.col_offset
                self._add("early return", start, start, new, statement.lineno)
        self._visit_all(node.body)
        self._functions.pop()
        self._known = known

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.body)

    def visit_Assert(self, node: ast.Assert | ast.JoinedStr) -> None: ...

    visit_JoinedStr = visit_Assert

    def visit_Raise(self, node: ast.Raise | ast.Continue | ast.Break | ast.Delete) -> None:
        self._replace("dropped statement", node, "pass")

    visit_Continue = visit_Break = visit_Delete = visit_Raise

    def visit_Return(self, node: ast.Return) -> None:
        if self._functions[-1].body[-1] is not node:
            self._replace("dropped statement", node, "pass")
        if isinstance(node.value, ast.Tuple):
            self._swap(node.value.elts)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Constant):
            return
        if isinstance(call, ast.Call) and not self._is_message(call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            kind = "removed wait" if WAITS.match(name) else "dropped call"
            self._replace(kind, node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [getattr(target, "elts", [target]) for target in node.targets]
        self._assigned(node, list(chain.from_iterable(targets)))
        if isinstance(node.value, ast.Tuple):
            self._swap(node.value.elts)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assigned(node, [node.target])
        self._visit_all([node.value])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned(node, [node.target])
        if not _is_text(node.value):
            self._between("sign", (node.target, node.value), SIGN, SIGNS.__getitem__)
        self.visit(node.value)

    def _assigned(self, node: ast.stmt, targets: Sequence[ast.expr]) -> None:
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        if not self._functions or getattr(node, "value", None) is None:
            return
        if not names and self._functions[-1].name != "__init__":
            self._replace("stale field", node, "pass")
        elif names and len(names) == len(targets) and names <= self._known:
            self._replace("dropped statement", node, "pass")
        self._known |= names

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._source(node.test):
            self._visit_all(node.orelse)
        else:
            self.visit_While(node)

    def visit_While(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for each in node.ifs:
            self._condition(each)
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        lines, self._lines = self._lines, (node.pattern.lineno, node.body[0].lineno - 1)
        if node.guard is not None:
            self._condition(node.guard)
            self.visit(node.guard)
        self._lines = lines
        self._visit_all(node.body)

    def _condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._replace("negated condition", test, self._source(test.operand))
        elif not (isinstance(test, ast.Constant) or _is_flipped(test)):
            source = self._source(test)
            new = f"not {source}" if isinstance(test, SHORT) else f"not ({source})"
            self._replace("negated condition", test, new)

    def visit_For(self, node: ast.For) -> None:
        first, last = node.body[0], node.body[-1]
        is_left = isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break)
        if not is_left and not node.orelse:
            new, end = "\n" + " " * first.col_offset + "break", self._end(last)
            self._add("loop that ends at once", end, end, new, first.lineno)
        self._known |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        sources = [self._source(each.context_expr) for each in node.items]
        if all(each.optional_vars is None for each in node.items):
            first, last = node.items[0].context_expr, node.items[-1].context_expr
            if len(sources) == 1:
                self._add("removed lock", self._start(node), self._end(last), "if True")
            else:
                for index in range(len(sources)):
                    new = ", ".join(sources[:index] + sources[index + 1 :])
                    self._add("removed lock", self._start(first), self._end(last), new)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        if node.finalbody:
            before = [*node.body, *node.handlers, *node.orelse][-1]
            start = self._text.index("finally", self._end(before))
            line = node.finalbody[0].lineno
            self._add("removed finally", start, start + len("finally"), "except ()", line)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            start, end = self._start(node.type), self._end(node.type)
            self._add("removed handler", start, end, "()", node.body[0].lineno)
        self._visit_all(node.body)

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for operator, ends in zip(node.ops, pairwise(sides), strict=True):
            self._between("comparison", ends, COMPARISON, COMPARISONS.__getitem__)
            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                name = self._source(ends[1])
                if name.startswith("len(") or COUNTED.search(name.rpartition(".")[2]):
                    self._bound(ends[1])
        self.generic_visit(node)

    def _bound(self, node: ast.expr | None) -> None:
        is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
        if node is not None and (is_sum or isinstance(node, SHORT)):
            for step in ("+ 1", "- 1"):
                self._replace("bound", node, f"{self._source(node)} {step}")

    def visit_Slice(self, node: ast.Slice) -> None:
        self._bound(node.lower)
        self._bound(node.upper)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        for before, after in (("0", "-1"), ("-1", "0")):
            if self._source(node.slice) == before:
                self._replace("first and last", node.slice, after)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(map(_is_text, (node.left, node.right))):
            self._between("sign", (node.left, node.right), SIGN, lambda old: SIGNS.get(old, old))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self._replace("sign", node, self._source(node.operand))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        sources = [self._source(each) for each in node.values]
        for index, value in enumerate(node.values):
            if isinstance(value, ast.BoolOp | ast.IfExp | ast.NamedExpr | ast.Lambda):
                sources[index] = f"({sources[index]})"
        for index in range(len(sources)):
            rest = sources[:index] + sources[index + 1 :]
            self._replace("dropped condition", node, f" {word} ".join(rest))
        if len(sources) == 2:
            ends = node.values[0], node.values[1]
            self._between("negated condition", ends, re.compile(rf"\b{word}\b"), lambda _: other)
        self.generic_visit(node)

    def _is_message(self, node: ast.Call) -> bool:
        return MESSAGES.fullmatch(ast.unparse(node.func)) is not None

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_message(node):
            return
        name = node.func.attr if isinstance(node.func, ast.Attribute) else self._source(node.func)
        word = self._end(node.func) - len(name)
        if name == "isinstance":
            self.visit(node.args[0])
            return
        are_plain = not any(isinstance(each, ast.Starred) for each in node.args)
        if name in OPPOSITES:
            self._add("max and min", word, word + len(name), OPPOSITES[name])
            if are_plain and len(node.args) == 2 and not node.keywords and "m" in name:
                for each in node.args:
                    self._replace("max and min", node, f"({self._source(each)})")
        elif are_plain:
            self._swap(node.args)
        if name == "median" and node.args:
            self._replace("max and min", node, f"list({self._source(node.args[0])})[-1]")
        if isinstance(node.func, ast.Attribute):
            self._other_end(node, name, word)
        if name == "range" and are_plain:
            for each in node.args[:2]:
                self._bound(each)
        self.visit(node.func)
        self._visit_all(node.args)
        self._visit_all([each.value for each in node.keywords if each.arg != "strict"])

    def _other_end(self, node: ast.Call, name: str, word: int) -> None:
        if name in OTHER_END:
            self._add("first and last", word, word + len(name), OTHER_END[name])
        elif name == "append":
            self._add("first and last", word, self._start(node.args[0]), "insert(0, ")
        elif name == "pop" and not node.args:
            self._add("first and last", word, self._end(node), "pop(0)")

    def visit_Constant(self, node: ast.Constant) -> None:
        for new in _other_values(node.value, self._source(node)):
            self._replace("constant", node, new)


def _other_values(value: object, source: str) -> Iterator[str]:
    """Yield what a changed constant could be."""
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        form = hex if source.startswith("0x") else "{:_}".format if "_" in source else str
        yield form(value + 1)
        if value > 0:
            yield form(value - 1)
    elif isinstance(value, float):
        yield repr(2 * value if value else 1.0)
        if value:
            yield repr(value / 2)


def _is_text(node: ast.expr) -> bool:
    """Return whether it is text, a list or a type: a sign there is no sum's."""
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _is_flipped(node: ast.expr) -> bool:
    """Return whether another kind of fault negates this condition already."""
    orders = ast.Lt | ast.LtE | ast.Gt | ast.GtE
    return isinstance(node, ast.Compare) and not isinstance(node.ops[0], orders)


def _has_result(function: ast.FunctionDef) -> bool:
    """Return whether a function, without those within it, gives a value."""
    nodes: list[ast.AST] = list(function.body)
    for node in nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    return False
