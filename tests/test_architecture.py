"""The arrows between modules, and other promises about the shape of the source, checked on its syntax.

Nothing is imported: every file is parsed. Each check is tried on a made-up source that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("dist2", "observability")
MAX_LINES = 600
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "tools"}

FOUNDATION = tuple(f"dist2.{each}" for each in ("call", "errors", "ops", "config", "clock", "secret"))
SOCKET = "dist2.backends.socket"


@attrs.frozen
class Import:
    """One import statement's target.

    Attributes:
        target: Dotted name; of a module where that could be told, else of a name in one.
        line: Where.
        for_types: Under ``if TYPE_CHECKING``, so that it never runs.
        lazy: Inside a function.
    """

    target: str
    line: int
    for_types: bool = False
    lazy: bool = False


@attrs.frozen
class Module:
    """A parsed file."""

    name: str
    source: str
    is_package: bool = False
    tree: ast.Module = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.source))

    def imports(self) -> Iterator[Import]:
        """Yield what is imported anywhere in the file."""
        yield from self._imports(self.tree, for_types=False, lazy=False)

    def _imports(self, node: ast.AST, *, for_types: bool, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, for_types, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child)
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", child.lineno, for_types, lazy)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                body = ast.Module(body=child.body, type_ignores=[])
                yield from self._imports(body, for_types=True, lazy=lazy)
                rest = ast.Module(body=child.orelse, type_ignores=[])
                yield from self._imports(rest, for_types=for_types, lazy=lazy)
            else:
                inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield from self._imports(child, for_types=for_types, lazy=inside)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        package = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*package, *([node.module] if node.module else [])])


@attrs.frozen
class Arrow:
    """What some modules may not import.

    Attributes:
        why: The promise, in words.
        sources: Patterns of module names it binds.
        forbidden: Patterns of what these may not import.
        allowed: Exceptions from ``forbidden``.
        exempt: Patterns of module names it does not bind after all.
        types_too: Whether imports that are only for type checkers count as well.
    """

    why: str
    sources: tuple[str, ...]
    forbidden: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    types_too: bool = True

    def breaches(self, module: Module) -> list[str]:
        """Return what a module does against it."""
        if not matches(module.name, self.sources) or matches(module.name, self.exempt):
            return []
        return [
            f"{module.name}:{each.line} imports {each.target}: {self.why}"
            for each in module.imports()
            if matches(each.target, self.forbidden) and not matches(each.target, self.allowed)
            if self.types_too or not each.for_types
        ]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted name, or a package that it is in, matches one of the patterns."""
    parts = name.split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(head, pattern) for head in heads for pattern in patterns)


ARROWS = (
    Arrow("nothing in dist2 knows observability", ("dist2",), ("observability",)),
    Arrow("only legacy knows legacy", ("dist2",), ("dist2.legacy",), exempt=("dist2.legacy",)),
    Arrow(
        "backends are reached through the registry, by name",
        ("dist2",),
        ("dist2.backends",),
        allowed=("dist2.backends.base",),
        exempt=("dist2.backends", "dist2.cli"),
    ),
    Arrow(
        "the library knows neither its commands nor its benchmarks",
        ("dist2", "observability"),
        ("dist2.cli",),
        exempt=("dist2.cli",),
    ),
    Arrow(
        "benchmarks do not know the commands that run them",
        ("dist2.cli.bench",),
        ("dist2.cli",),
        allowed=("dist2.cli.bench",),
        exempt=("dist2.cli.bench.command",),
    ),
    Arrow(
        "one backend does not know another",
        (SOCKET,),
        ("dist2.backends.gloo", "dist2.backends.fake"),
    ),
    Arrow(
        "algorithms know ranks, chunks and segments, and nothing that runs them",
        (f"{SOCKET}.algorithms",),
        ("torch", "numpy", "socket", "os", "threading", "time", "dist2"),
        allowed=("dist2.errors", "dist2.ops", f"{SOCKET}.algorithms"),
    ),
    Arrow(
        "transports know bytes, and nothing of what they mean",
        (f"{SOCKET}.transport",),
        (SOCKET, "dist2.ops", "dist2.group", "dist2.collectives"),
        allowed=(f"{SOCKET}.transport", f"{SOCKET}.memory"),
    ),
    Arrow(
        "links carry messages, and know nothing of what becomes of them",
        (f"{SOCKET}.transport.links",),
        (f"{SOCKET}.transport",),
        allowed=(
            f"{SOCKET}.transport.links",
            f"{SOCKET}.transport.messages.transfer",
            f"{SOCKET}.transport.raw",
        ),
    ),
    Arrow(
        "the parts of a fabric do not know who puts them together",
        (f"{SOCKET}.transport.messages",),
        tuple(f"{SOCKET}.transport.{each}" for each in ("fabric", "poller", "rounds")),
        exempt=(
            *(f"{SOCKET}.transport.messages.{each}" for each in ("endpoint", "inquiry", "ballot")),
            *(f"{SOCKET}.transport.messages.{each}" for each in ("ways", "express*", "rails")),
        ),
    ),
    Arrow(
        "a store is no part of a group",
        ("dist2.store",),
        ("dist2",),
        allowed=(
            "dist2.store",
            "dist2.errors",
            "dist2.runtime",
            "dist2.config",
            "dist2.security",
            "dist2.halves",
            "dist2.heartbeat",
            "dist2.validation",
            "dist2.arguments",
        ),
    ),
    Arrow(
        "who may come in does not depend on what for",
        ("dist2.security",),
        ("dist2",),
        allowed=("dist2.security", *FOUNDATION),
    ),
    Arrow(
        "errors stand on what they carry",
        ("dist2.errors",),
        ("dist2", "observability"),
        allowed=("dist2.call",),
    ),
    Arrow("calls stand on nothing", ("dist2.call",), ("dist2", "observability")),
    Arrow("the foundation stands on errors", FOUNDATION, ("dist2",), allowed=FOUNDATION),
    Arrow(
        "the wire format is sans-IO",
        ("dist2.wire", "dist2.store.protocol", "dist2.security.handshake"),
        ("socket", "select", "selectors", "threading", "time", "os", "asyncio"),
    ),
    Arrow(
        "what describes operations does not run them",
        ("dist2.operation", "dist2.hooks", "dist2.validation", "dist2.work", "dist2.backends.base"),
        ("dist2.group", "dist2.runner", "dist2.collectives", "dist2.creation", "dist2.rendezvous"),
        types_too=False,
    ),
    Arrow(
        "groups do not know how ranks meet",
        (
            *("dist2.group", "dist2.torch_face", "dist2.subgroups", "dist2.open_groups", "dist2.runner"),
            *("dist2.collectives", "dist2.point_to_point", "dist2.c10d_methods"),
        ),
        ("dist2.creation", "dist2.rendezvous", "dist2.legacy"),
    ),
)


def modules() -> dict[str, Module]:
    """Return every module of the source tree, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Module(name, path.read_text(), is_package)
    return found


SOURCE = modules()


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.why.replace(" ", "_"))
def test_arrows_point_one_way(arrow: Arrow) -> None:
    assert not [breach for module in SOURCE.values() for breach in arrow.breaches(module)]


@pytest.mark.parametrize(
    ("why", "name", "source"),
    [
        ("nothing in dist2 knows observability", "dist2.group", "import observability.metrics"),
        (
            "nothing in dist2 knows observability",
            "dist2.hooks",
            "def f():\n    from observability import start",
        ),
        ("only legacy knows legacy", "dist2.context", "if TYPE_CHECKING:\n    from dist2.legacy import x"),
        ("backends are reached", "dist2.creation", "from dist2.backends.socket import create"),
        ("backends are reached", "dist2.runner", "from dist2.backends import fake"),
        ("one backend does not", "dist2.backends.socket.engine", "from ..gloo import create"),
        ("algorithms know ranks", "dist2.backends.socket.algorithms.ring", "import torch"),
        ("algorithms know ranks", "dist2.backends.socket.algorithms.ring", "from ..transport import tcp"),
        ("transports know bytes", "dist2.backends.socket.transport.tcp", "from ..reduction import fold"),
        ("transports know bytes", "dist2.backends.socket.transport.tcp", "import dist2.ops"),
        ("links carry", "dist2.backends.socket.transport.links.link", "from ..messages import mailbox"),
        ("the parts of", "dist2.backends.socket.transport.messages.intake", "from .. import fabric"),
        ("a store is no part", "dist2.store.server", "from dist2 import group"),
        ("errors stand on", "dist2.errors", "from . import ops"),
        ("who may come in", "dist2.security.entrance", "from dist2.store import address"),
        ("the foundation stands", "dist2.runtime.deadline", "from dist2.operation import Operation"),
        ("the wire format is", "dist2.store.protocol", "import socket"),
        ("what describes operations", "dist2.work", "from dist2.group import ProcessGroup"),
        ("groups do not know", "dist2.group", "from dist2.rendezvous import rendezvous"),
        ("the library knows neither", "dist2.group", "from dist2.cli.bench.peers import present"),
        ("the library knows neither", "dist2.creation", "def f():\n    import dist2.cli"),
        ("benchmarks do not know", "dist2.cli.bench.crew", "from dist2.cli import main"),
    ],
)
def test_a_breach_of_an_arrow_is_seen(why: str, name: str, source: str) -> None:
    (arrow,) = (each for each in ARROWS if each.why.startswith(why))
    assert arrow.breaches(Module(name, source))


def test_every_arrow_binds_somebody() -> None:
    """A pattern with a spelling mistake would never find a thing."""
    idle = [arrow.why for arrow in ARROWS if not any(matches(name, arrow.sources) for name in SOURCE)]
    assert not idle


def runtime_imports(module: Module, names: Iterable[str]) -> set[str]:
    """Return the modules of the tree that must be complete before this one can be."""
    known = set(names)
    found = set()
    for each in module.imports():
        if each.for_types or each.lazy:
            continue
        target = each.target if each.target in known else each.target.rpartition(".")[0]
        if target in known and target != module.name:
            found.add(target)
    return found


def cycle_in(tree: dict[str, Module]) -> list[str]:
    """Return modules that import each other in a circle; empty if there is none."""
    graph = {name: runtime_imports(module, tree) for name, module in tree.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert not cycle_in(SOURCE)


def test_a_cycle_is_seen() -> None:
    sources = {
        "dist2.a": "from dist2 import b",
        "dist2.b": "from dist2.c import x",
        "dist2.c": "import dist2.a",
    }
    assert cycle_in({name: Module(name, source) for name, source in sources.items()})
    lazy = {**sources, "dist2.c": "def f():\n    import dist2.a"}
    assert not cycle_in({name: Module(name, source) for name, source in lazy.items()})


MAP = (ROOT / "docs" / "architecture.md").read_text()
HOUSE = MAP[MAP.index("## The house") : MAP.index("### The arrows")]
SOCKET_BACKEND = MAP[MAP.index("## Inside the socket backend") : MAP.index("### Fences in shared memory")]
PART_IN_C = MAP[MAP.index("## The part in C") : MAP.index("## Threads")]


def words_of(text: str) -> set[str]:
    """Return the words of a text; `AbsentGroups` and `absent_groups` are the same."""
    return {word.replace("_", "").lower() for word in re.findall(r"\w+", text)}


def off_the_map(names: Iterable[str]) -> list[str]:
    """Return the modules that a newcomer would not find in docs/architecture.md.

    Those of the library's top have to be there, and those of the socket backend but for its algorithms.
    """
    missing = []
    in_backend = words_of(SOCKET_BACKEND)
    for name in names:
        package, _, last = name.rpartition(".")
        if package == "dist2":
            found = f" {last}.py" in HOUSE or f" {last}/" in HOUSE
        elif package == SOCKET or package.startswith(f"{SOCKET}.transport"):
            found = last.replace("_", "") in in_backend
        else:
            continue
        missing += [] if found else [name]
    return missing


def test_the_map_names_every_module_and_no_other() -> None:
    assert not off_the_map(SOURCE)
    files = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not set(re.findall(r"\w+\.py", HOUSE)) - files


def test_the_map_names_every_file_in_c_and_no_other() -> None:
    source = ROOT / "dist2" / "compiled" / "source"
    files = {path.stem for path in source.glob("*/*.c")}
    assert not files - set(re.findall(r"(\w+)[:,]", PART_IN_C))
    assert not set(re.findall(r"\w+\.h", PART_IN_C)) - {path.name for path in source.rglob("*.h")}


@pytest.mark.parametrize(
    "name", ["dist2.unheard_of", f"{SOCKET}.unheard_of", f"{SOCKET}.transport.links.unheard_of"]
)
def test_a_module_off_the_map_is_seen(name: str) -> None:
    assert off_the_map([name]) == [name]


def length_breach(module: Module) -> str | None:
    """Say if a module is too long to be about one thing."""
    count = module.source.count("\n")
    return f"{module.name} has {count} lines, {MAX_LINES} at most" if count > MAX_LINES else None


def test_modules_are_short_and_named_for_one_thing() -> None:
    assert not [breach for module in SOURCE.values() if (breach := length_breach(module))]
    assert not [name for name in SOURCE if VAGUE_NAMES & set(name.split("."))]


def test_a_long_module_is_seen() -> None:
    assert length_breach(Module("dist2.long", "x = 1\n" * (MAX_LINES + 1)))


def environment_reads(module: Module) -> list[str]:
    """Return where a module reads environment variables."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            found.append(f"{module.name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
            found += [f"{module.name}:{node.lineno} {name}" for name in names]
    return found


def test_only_config_reads_the_environment() -> None:
    others = [module for name, module in SOURCE.items() if name != "dist2.config"]
    assert not [read for module in others for read in environment_reads(module)]
    assert environment_reads(SOURCE["dist2.config"])


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_a_read_of_the_environment_is_seen(source: str) -> None:
    assert environment_reads(Module("dist2.group", source))


MUTATORS = {
    "add",
    "append",
    "appendleft",
    "clear",
    "extend",
    "insert",
    "pop",
    "popleft",
    "remove",
    "setdefault",
}
MUTATORS |= {"update", "discard", "push", "acquire"}
STATEFUL_CALLS = {
    "dict",
    "list",
    "set",
    "deque",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "local",
    "Lock",
    "RLock",
}
STATEFUL_CALLS |= {"WeakSet", "WeakValueDictionary", "WeakKeyDictionary", "Event", "Condition", "count"}


def module_state(module: Module) -> list[str]:
    """Return the names of a module that hold what can change: containers that are written to, and globals."""
    bound = dict(_module_assignments(module.tree))
    found = {name for name, value in bound.items() if _is_stateful_call(value)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            found |= {_owner(target) for target in targets if not isinstance(target, ast.Name)} & set(bound)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS
        ):
            found |= {_owner(node.func.value)} & set(bound)
    return sorted(f"{module.name}.{name}" for name in found - {"__all__"})


def _module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _is_stateful_call(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call):
        return False
    function = value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in STATEFUL_CALLS


def _owner(node: ast.expr) -> str:
    """Return the name whose attribute or item this is, however deep; empty if it is something else's."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_legacy_keeps_its_state_in_one_module() -> None:
    names = [name for name in SOURCE if name.startswith("dist2.legacy") and name != "dist2.legacy._world"]
    assert not [state for name in names for state in module_state(SOURCE[name])]


@pytest.mark.parametrize(
    "source",
    [
        "default = None\ndef f():\n    global default\n    default = 1",
        "names = {}\ndef f():\n    names['a'] = 1",
        "names = []\ndef f():\n    names.append(1)",
        "import threading\nlock = threading.Lock()",
        "class World: ...\nworld = World()\ndef f():\n    world.groups['a'] = 1",
    ],
)
def test_state_of_a_module_is_seen(source: str) -> None:
    assert module_state(Module("dist2.legacy.groups", source))


def test_a_table_is_not_state() -> None:
    source = (
        "NAMES = {'a': 1}\n__all__ = ['NAMES']\ndef f(key):\n    found = []\n    found.append(NAMES[key])"
    )
    assert not module_state(Module("dist2.legacy.groups", source))
