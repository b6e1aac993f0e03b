"""A copy of the library whose modules have other names and lie elsewhere, with all imports rewritten."""

from __future__ import annotations

import ast
import shutil
from importlib.metadata import distribution
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent.parent
STAYS = {
    *("__init__", "py", "functional", "launch", "legacy", "torch_backend", "errors"),
    *("backends", "c10d", "operation", "runtime", "security"),
}
"""Names that programs import, and packages of compiled modules and what these import: all other names are
free."""


@attrs.frozen
class Move:
    """New names of modules.

    Attributes:
        names: The new name of each module and package that moves, by the old one.
    """

    names: dict[str, str]

    def of(self, name: str) -> str:
        """Return the new name of a module, by its own or that of a package that it is in."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            head = ".".join(parts[:count])
            if head in self.names:
                return ".".join([self.names[head], *parts[count:]])
        return name

    def rewritten(self, source: str) -> str:
        """Return a module's source with the new names in its imports."""
        lines = source.splitlines(keepends=True)
        nodes = [
            each for each in ast.walk(ast.parse(source)) if isinstance(each, (ast.Import, ast.ImportFrom))
        ]
        for node in sorted(nodes, key=lambda each: -each.lineno):
            indent = " " * node.col_offset
            new = "".join(f"{indent}{each}\n" for each in self._statements(node))
            lines[node.lineno - 1 : node.end_lineno] = [new]
        return "".join(lines)

    def _statements(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [self._import(alias) for alias in node.names]
        return [self._import_from(node.module or "", alias) for alias in node.names]

    def _import(self, alias: ast.alias) -> str:
        new = self.of(alias.name)
        if new != alias.name and alias.asname is None:
            raise ValueError(f"import {alias.name}: give it a name with 'as', or use 'from'")
        return f"import {new}" if alias.asname is None else f"import {new} as {alias.asname}"

    def _import_from(self, module: str, alias: ast.alias) -> str:
        if alias.name == "*":
            return f"from {self.of(module)} import *"
        whole = f"{module}.{alias.name}"
        parent, _, name = self.of(whole).rpartition(".")
        return f"from {parent} import {name} as {alias.asname or alias.name}"


def planned(source: Path) -> Move:
    """Return a move of observability, and of dist2's top level except the names that programs import."""
    paths = [path for path in (source / "dist2").iterdir() if path.name[0].isalpha()]
    children = [path.name.partition(".")[0] for path in paths]
    names = {f"dist2.{name}": f"dist2.within.deeper.new_{name}" for name in children if name not in STAYS}
    return Move({**names, "observability": "watching"})


def moved_copy(folder: Path) -> Path:
    """Copy dist2 and observability to a folder, elsewhere and by other names, with metadata that fit."""
    move = planned(ROOT)
    for package in ("dist2", "observability"):
        target = folder / move.of(package)
        shutil.copytree(ROOT / package, target, ignore=shutil.ignore_patterns("__pycache__"))
    deeper = folder / "dist2" / "within" / "deeper"
    deeper.mkdir(parents=True)
    (deeper / "__init__.py").touch()
    (deeper.parent / "__init__.py").touch()
    for old, new in move.names.items():
        if old.startswith("dist2."):
            path = folder / "dist2" / old.removeprefix("dist2.")
            path = path if path.is_dir() else path.with_suffix(".py")
            path.rename(folder.joinpath(*new.split(".")).with_suffix(path.suffix))
    for path in folder.rglob("*.py"):
        path.write_text(move.rewritten(path.read_text()))
    _describe(folder, move)
    return folder


def _describe(folder: Path, move: Move) -> None:
    """Write the metadata by which backends and instruments are found."""
    info = folder / "dist2-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist2\nVersion: 0\n")
    by_group: dict[str, list[str]] = {}
    for point in distribution("dist2").entry_points:
        by_group.setdefault(point.group, []).append(f"{point.name} = {move.of(point.module)}:{point.attr}")
    text = "\n".join(f"[{group}]\n" + "\n".join(points) + "\n" for group, points in by_group.items())
    (info / "entry_points.txt").write_text(text)
