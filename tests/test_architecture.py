"""The arrows between modules, and other promises about the shape of the source, checked on its syntax.

Nothing is imported: every file is parsed. Each check is tried on a made-up source that breaks it.
"""

from __future__ import annotations

import ast
import functools
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

SOCKET = "dist2.backends.socket"


@attrs.frozen
class Package:
    """A row of the map.

    Attributes:
        name: Of a package or module of the library.
        holds: Its subject.
    """

    name: str
    holds: str


PACKAGES_BOTTOM_UP = (
    Package("dist2.errors", "the exceptions"),
    Package("dist2.runtime", "configuration, deadlines, threads, signals, fork and exit, shared memory"),
    Package("dist2.security", "handshake, seals, TLS"),
    Package("dist2.store", "key-value stores: TCP, file, hash, prefix"),
    Package("dist2.rendezvous", "how ranks meet"),
    Package("dist2.operation", "one operation from its call to its end"),
    Package("dist2.backends", "what a backend is, and the registry of backends"),
    Package("dist2.backends.fake", "no peers: for shapes, tests and dry runs"),
    Package("dist2.backends.socket", "the CPU data plane: shared memory and TCP"),
    Package("dist2.backends.nccl", "NCCL, with a socket group for control messages"),
    Package("dist2.backends.mpi", "MPI, with a socket group for control messages"),
    Package("dist2.backends.gloo", "torch's Gloo, with a socket group for control messages"),
    Package("dist2.backends.plugin", "backends of other packages, likewise"),
    Package("dist2.membership", "groups made from groups"),
    Package("dist2.c10d", "names and overloads by which torch's own code uses a group"),
    Package("dist2.group", "ProcessGroup, its operations, new_group, the current group"),
    Package("dist2.functional", "collectives with gradients, as custom operators of torch"),
    Package("dist2.torch_backend", "a dist2 group under torch's own global API"),
    Package("dist2", "the public names"),
    Package("dist2.launch", "functions on new ranks; the store of a launcher; ranks of other engines"),
    Package("dist2.run", "the command that starts ranks on one host"),
    Package("dist2.testing", "the tests that every backend must pass"),
    Package("dist2.legacy", "the global API of torch.distributed"),
    Package("dist2.cli", "the command dist2"),
    Package("dist2.__main__", "python -m dist2"),
    Package("observability", "metrics, flight recorder, traces, control plane"),
)
"""The map: a package imports itself and packages of earlier rows, for types as well."""


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
    """A file, parsed when a test first wants that: each worker of pytest imports this module."""

    name: str
    source: str
    is_package: bool = False

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def imports(self) -> Iterator[Import]:
        """Yield the imports of the file."""
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
    """Imports that some modules may not have.

    Attributes:
        why: The promise, in words.
        sources: Patterns of module names it binds.
        forbidden: Patterns of modules that these may not import.
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
        """Return the violations of a module."""
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
    Arrow(
        "backends are reached through the registry, by name",
        ("dist2",),
        ("dist2.backends",),
        allowed=(
            *("dist2.backends.base", "dist2.backends.registry"),
            *("dist2.backends.consensus", "dist2.backends.shared_tensors"),
        ),
        exempt=("dist2.backends", "dist2.cli"),
    ),
    Arrow(
        "one backend does not know another",
        (SOCKET,),
        ("dist2.backends.gloo", "dist2.backends.plugin", "dist2.backends.fake"),
    ),
    Arrow(
        "algorithms know ranks, chunks and segments, and nothing that runs them",
        (f"{SOCKET}.algorithms",),
        ("torch", "numpy", "socket", "os", "threading", "time", "dist2"),
        allowed=("dist2.errors", "dist2.operation.kinds", f"{SOCKET}.algorithms"),
    ),
    Arrow(
        "transports know bytes, and nothing of what they mean",
        (f"{SOCKET}.transport",),
        (SOCKET, "dist2.operation.kinds", "dist2.group.process_group", "dist2.group.collectives"),
        allowed=(f"{SOCKET}.transport", f"{SOCKET}.memory", f"{SOCKET}.wire"),
    ),
    Arrow(
        "links carry messages, and know nothing of what becomes of them",
        (f"{SOCKET}.transport.links",),
        (f"{SOCKET}.transport",),
        allowed=(f"{SOCKET}.transport.links", f"{SOCKET}.transport.messages.transfer"),
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
        "the wire format is sans-IO",
        ("dist2.backends.socket.wire", "dist2.store.protocol", "dist2.security.handshake"),
        ("socket", "select", "selectors", "threading", "time", "os", "asyncio"),
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


def row_of(name: str) -> int:
    """Return the row of the map that a module, or a name in one, belongs to: the longest that fits."""
    rows = {package.name: row for row, package in enumerate(PACKAGES_BOTTOM_UP)}
    head = name
    while head not in rows:
        head = head.rpartition(".")[0]
    return rows[head]


def upward_imports(module: Module, known: Iterable[str]) -> list[str]:
    """Return the imports of a module that lead to a later row of the map, imports for types included."""
    names, own = set(known), row_of(module.name)
    found = []
    for each in module.imports():
        target = each.target
        if target.partition(".")[0] not in PACKAGES:
            continue
        while target not in names and "." in target:  # a name in a module
            target = target.rpartition(".")[0]
        if row_of(target) > own:
            found.append(f"{module.name}:{each.line} imports {target}")
    return found


def test_packages_import_only_what_is_below_them() -> None:
    assert not [breach for module in SOURCE.values() for breach in upward_imports(module, SOURCE)]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("dist2.operation.runner", "from dist2.group.process_group import ProcessGroup"),
        ("dist2.operation.runner", "if TYPE_CHECKING:\n    from dist2.backends.base import Backend"),
        ("dist2.group.creation", "def f():\n    import dist2.legacy"),
        ("dist2.errors", "from dist2.runtime import config"),
        ("dist2.legacy.groups", "import observability"),
        ("dist2.c10d.backend", "from dist2 import new_group"),
    ],
)
def test_an_import_upwards_is_seen(name: str, source: str) -> None:
    assert upward_imports(Module(name, source), SOURCE)


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def directory_in(document: str) -> set[str]:
    """Return the modules, and folders for all their modules, that the directory of a document lists."""
    listed, folder = set(), ""
    text = document[document.index("## Directory") :]
    for line in text[text.index("```") : text.index("\n```", text.index("```") + 3)].splitlines()[1:]:
        path = line.split()[0]
        if line.startswith(" "):
            found = re.match(r"  ((?:[\w/]+, )*[\w/]+)(?: |$)", line)
            assert found, line
            listed |= {f"{folder}{name}".strip("/").replace("/", ".") for name in found[1].split(", ")}
        else:
            folder = path
            assert path.endswith("/"), line
    return listed


def not_in_the_directory(names: Iterable[str], listed: set[str]) -> list[str]:
    """Return the modules that a directory lacks; `docs/socket-backend.md` has those of the socket backend."""
    modules = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return sorted(
        name
        for name in modules
        if not name.startswith(f"{SOCKET}.")
        if not any(name == each or name.startswith(f"{each}.") for each in listed)
    )


def test_the_document_has_every_row_of_the_map() -> None:
    picture = ARCHITECTURE[ARCHITECTURE.index("## The map") : ARCHITECTURE.index("## Directory")]
    directory = ARCHITECTURE[ARCHITECTURE.index("## Directory") : ARCHITECTURE.index("## One object")]
    for package in PACKAGES_BOTTOM_UP:
        assert any(name == package.name or name.startswith(f"{package.name}.") for name in SOURCE)
        last = package.name.rpartition(".")[2]
        assert last in picture or last in directory, package


def test_the_directory_lists_every_module_and_no_other() -> None:
    listed = directory_in(ARCHITECTURE)
    assert not not_in_the_directory(SOURCE, listed)
    paths = [ROOT / name.replace(".", "/") for name in listed]
    suffixes = ".py", ".pyx"
    assert not [
        path
        for path in paths
        if not (path.is_dir() or any(path.with_suffix(each).exists() for each in suffixes))
    ]


def test_a_module_that_the_directory_lacks_is_seen() -> None:
    rows = "dist2/\n  errors   the errors\ndist2/store/\n  base, tcp  stores\n  kinds/  all"
    document = f"## Directory\n```\n{rows}\n```\n"
    names = [
        "dist2",
        "dist2.errors",
        "dist2.store",
        "dist2.store.tcp",
        "dist2.store.unheard_of",
        "dist2.store.kinds.a",
    ]
    assert directory_in(document) == {
        "dist2.errors",
        "dist2.store.base",
        "dist2.store.tcp",
        "dist2.store.kinds",
    }
    assert not_in_the_directory(names, directory_in(document)) == ["dist2.store.unheard_of"]


def test_the_top_of_the_library_is_small() -> None:
    top = {name.split(".")[1] for name in SOURCE if name.startswith("dist2.")}
    assert len(top) <= 19, sorted(top)  # with the names that users type: testing, launch, run


@pytest.mark.parametrize("arrow", ARROWS, ids=lambda arrow: arrow.why.replace(" ", "_"))
def test_arrows_point_one_way(arrow: Arrow) -> None:
    assert not [breach for module in SOURCE.values() for breach in arrow.breaches(module)]


@pytest.mark.parametrize(
    ("why", "name", "source"),
    [
        ("backends are reached", "dist2.group.creation", "from dist2.backends.socket import create"),
        ("backends are reached", "dist2.membership.merging", "from dist2.backends import fake"),
        ("one backend does not", "dist2.backends.socket.engine", "from dist2.backends.gloo import core"),
        ("algorithms know ranks", "dist2.backends.socket.algorithms.ring", "import torch"),
        ("algorithms know ranks", "dist2.backends.socket.algorithms.ring", "from ..transport import tcp"),
        ("transports know bytes", "dist2.backends.socket.transport.tcp", "from ..reduction import fold"),
        ("transports know bytes", "dist2.backends.socket.transport.tcp", "import dist2.operation.kinds"),
        ("links carry", "dist2.backends.socket.transport.links.link", "from ..messages import mailbox"),
        ("the parts of", "dist2.backends.socket.transport.messages.intake", "from .. import fabric"),
        ("the wire format is", "dist2.store.protocol", "import socket"),
    ],
)
def test_a_breach_of_an_arrow_is_seen(why: str, name: str, source: str) -> None:
    (arrow,) = (each for each in ARROWS if each.why.startswith(why))
    assert arrow.breaches(Module(name, source))


def test_every_arrow_binds_somebody() -> None:
    """A misspelt pattern would never match a module."""
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


INSIDE = (ROOT / "docs" / "socket-backend.md").read_text()
SOCKET_BACKEND = INSIDE[INSIDE.index("## The map") : INSIDE.index("### Fences in shared memory")]
PART_IN_C = INSIDE[INSIDE.index("## The part in C") : INSIDE.index("## Words of the data plane")]


def words_of(text: str) -> set[str]:
    """Return the words of a text; `AbsentGroups` and `absent_groups` are the same."""
    return {word.replace("_", "").lower() for word in re.findall(r"\w+", text)}


def off_the_map(names: Iterable[str]) -> list[str]:
    """Return the modules of the socket backend, but for its algorithms, that its document does not name."""
    in_backend = words_of(SOCKET_BACKEND)
    return [
        name
        for name in names
        if name.rpartition(".")[0] == SOCKET or name.startswith(f"{SOCKET}.transport.")
        if name.rpartition(".")[2].replace("_", "") not in in_backend
    ]


def test_the_map_names_every_module_of_the_socket_backend() -> None:
    assert not off_the_map(SOURCE)


def test_the_map_names_every_file_in_c_and_no_other() -> None:
    core = ROOT / "dist2" / "core"
    files = {path.stem for path in core.glob("*.c")}
    assert not files - set(re.findall(r"(\w+)(?:[:,]| {4})", PART_IN_C))
    headers = {path.name for path in core.glob("*.h")}
    assert not set(re.findall(r"\w+\.h", PART_IN_C)) - headers - {"Python.h"}


@pytest.mark.parametrize("name", [f"{SOCKET}.unheard_of", f"{SOCKET}.transport.links.unheard_of"])
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


SUPPRESSION = re.compile(r"# (?:noqa|type: ignore)\b.*")
SUPPRESSION_WITH_REASON = re.compile(r"# (?:noqa: [A-Z0-9, ]+ - |type: ignore\[[a-z, -]+\]  # )\S")


def unreasoned(module: Module) -> list[str]:
    """Return the suppressed warnings of a module that have no reason beside them."""
    found = SUPPRESSION.findall(module.source)
    return [f"{module.name}: {each}" for each in found if not SUPPRESSION_WITH_REASON.match(each)]


def test_suppressed_warnings_have_a_reason() -> None:
    assert not [each for module in SOURCE.values() for each in unreasoned(module)]


@pytest.mark.parametrize("comment", ["noqa", "noqa: E402", "type: ignore", "type: ignore[misc]"])
def test_a_suppression_without_a_reason_is_seen(comment: str) -> None:
    assert unreasoned(Module("dist2.errors", f"import a  # {comment}\n"))


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
    others = [module for name, module in SOURCE.items() if name != "dist2.runtime.config"]
    assert not [read for module in others for read in environment_reads(module)]
    assert environment_reads(SOURCE["dist2.runtime.config"])


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_a_read_of_the_environment_is_seen(source: str) -> None:
    assert environment_reads(Module("dist2.group.process_group", source))


MAKERS = {"arange", "as_tensor", "empty", "empty_strided", "full", "ones", "scalar_tensor", "tensor", "zeros"}
"""Functions of torch that make a tensor on the default device, unless the call names another one."""

AS_USERS_DO = ("dist2.testing", "dist2.cli.bench")
"""Packages that make tensors in the way of users."""


def on_default_device(module: Module) -> list[str]:
    """Return where a module makes a tensor on the device of ``torch.device`` or ``set_default_device``."""
    return [
        f"{module.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKERS
        and "device" not in {each.arg for each in node.keywords}
    ]


def test_tensors_are_made_on_a_named_device() -> None:
    assert not [
        made
        for name, module in SOURCE.items()
        if not name.startswith(AS_USERS_DO)
        for made in on_default_device(module)
    ]


def test_a_tensor_on_the_default_device_is_seen() -> None:
    assert on_default_device(Module("dist2.group.objects", "import torch\ntorch.empty(1)"))


PROCESS_HOOKS = {"atexit", "register_at_fork", "_register_atexit"}


def process_hooks(module: Module) -> list[str]:
    """Return where a module has Python call it at exit or around a fork."""
    found = []
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in PROCESS_HOOKS
            and not _is_switched_off(node, module)
        ):
            found.append(f"{module.name}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found += [f"{module.name}:{node.lineno} {name}" for name in names & PROCESS_HOOKS]
    return found


def _is_switched_off(node: ast.AST, module: Module) -> bool:
    """Whether this is ``finalizer.atexit = False``, which takes a `weakref.finalize` out of the exit."""
    return any(
        isinstance(each, ast.Assign) and node in each.targets and ast.unparse(each.value) == "False"
        for each in ast.walk(module.tree)
    )


def steps_taken(module: Module) -> list[str]:
    """Return the steps of exit and fork that a module registers a function for."""
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) in ("at_exit", "in_child")]


def declared_steps(module: Module) -> list[str]:
    """Return the steps of exit and fork that there are."""
    enums = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
    return [
        f"{enum.name}.{ast.unparse(step.targets[0])}"
        for enum in enums
        for step in enum.body
        if isinstance(step, ast.Assign)
    ]


NAMES_OF_TORCH = "dist2.runtime.torch_versions"
"""The only module that knows private names of torch: each version may rename them."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch(tree: ast.Module) -> list[str]:
    """Return the private names of torch that a module imports, or has by way of a module of torch."""
    found, modules = list[str](), {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                each.name for each in node.names if each.name.startswith("torch.") and "._" in each.name
            ]
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths = [f"{node.module}.{each.name}" for each in node.names]
            found += [path for path in paths if any(map(is_private, path.split(".")))]
            modules |= {each.asname or each.name for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                found.append(ast.unparse(node))
    return found


def test_private_names_of_torch_are_looked_up_in_one_module() -> None:
    used = {name: private_names_of_torch(module.tree) for name, module in SOURCE.items()}
    assert {name: found for name, found in used.items() if found and name != NAMES_OF_TORCH} == {}
    assert used[NAMES_OF_TORCH]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._dispatch_keys(x)",
        "import torch._library.opaque_object",
        "from torch._C import _distributed_c10d",
        "from torch.profiler import _ExperimentalConfig",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world.pg_map",
        "from torch.distributed import Backend\nBackend._plugins",
    ],
)
def test_a_private_name_of_torch_is_seen(source: str) -> None:
    assert private_names_of_torch(ast.parse(source))


def test_one_module_handles_exit_and_fork() -> None:
    others = [module for name, module in SOURCE.items() if name != "dist2.runtime.process"]
    assert not [hook for module in others for hook in process_hooks(module)]
    assert process_hooks(SOURCE["dist2.runtime.process"])


def test_each_step_of_exit_and_fork_has_one_function() -> None:
    steps = [step for module in SOURCE.values() for step in steps_taken(module)]
    assert sorted(steps) == sorted(declared_steps(SOURCE["dist2.runtime.process"]))


@pytest.mark.parametrize(
    "source",
    [
        "import atexit",
        "from atexit import register",
        "import os\nos.register_at_fork(before=print)",
        "import threading\nthreading._register_atexit(print)",
        "import weakref\nweakref.finalize(1, print).atexit = True",
    ],
)
def test_a_hook_of_exit_or_fork_elsewhere_is_seen(source: str) -> None:
    assert process_hooks(Module("dist2.group.process_group", source))


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
    """Return a module's names with mutable state: containers that are written to, and globals."""
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
    names = [name for name in SOURCE if name.startswith("dist2.legacy") and name != "dist2.legacy.world"]
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
