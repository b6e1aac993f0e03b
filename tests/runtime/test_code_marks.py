"""Marks on code: found by the frame that runs it, independent of the module's name and place."""

from __future__ import annotations

import enum
import importlib.util
import sys
from functools import cached_property, wraps
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from dist2.runtime.code_marks import CodeMarks, codes_of, folders_of, library


class Kind(enum.Enum):
    """Values of marks."""

    WARM = enum.auto()
    COLD = enum.auto()


def running() -> CodeType:
    """Return the code of the caller's frame, as a signal handler sees it."""
    return sys._getframe(1).f_code


def package(folder: Path, name: str) -> ModuleType:
    """Make and import a package with one function, ``running``, in its module ``inner``."""
    place = folder.joinpath(*name.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "inner.py").write_text("import sys\ndef running(): return sys._getframe().f_code\n")
    spec = importlib.util.spec_from_file_location(
        name, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inner_spec = importlib.util.spec_from_file_location(f"{name}.inner", place / "inner.py")
    assert inner_spec is not None and inner_spec.loader is not None
    module.inner = importlib.util.module_from_spec(inner_spec)  # type: ignore[attr-defined]  # as an import does
    inner_spec.loader.exec_module(module.inner)
    return module


def test_every_kind_of_method_is_marked_with_its_class() -> None:
    marks: CodeMarks[Kind] = CodeMarks()

    def through(function: object) -> object:
        @wraps(function)
        def wrapper(self: object) -> object:
            return function(self)  # type: ignore[operator]  # a function

        return wrapper

    @marks.add(Kind.WARM)
    class Marked:
        def plain(self) -> CodeType:
            return running()

        def nested(self) -> CodeType:
            return (lambda: running())()

        @property
        def asked(self) -> CodeType:
            return running()

        @cached_property
        def kept(self) -> CodeType:
            return running()

        @staticmethod
        def static() -> CodeType:
            return running()

        @classmethod
        def of_class(cls) -> CodeType:
            return running()

        @through
        def decorated(self) -> CodeType:
            return running()

        @marks.add(Kind.COLD)
        def other(self) -> CodeType:
            return running()

    made = Marked()
    codes = [made.plain(), made.nested(), made.asked, made.kept, made.static(), made.of_class()]
    codes.append(made.decorated())  # type: ignore[operator]  # a method
    assert [marks.of(code) for code in codes] == [Kind.WARM] * len(codes)

    def plain(self: object) -> CodeType:
        return running()

    assert marks.of(plain(made)) is None


def test_a_mark_is_of_one_code_object_and_none_that_is_equal() -> None:
    source = "def function(): pass"
    functions = []
    for _ in range(2):
        names: dict[str, object] = {}
        exec(compile(source, "<same>", "exec"), names)
        functions.append(names["function"])
    (one,), (other,) = map(list, map(codes_of, functions))
    assert one == other and one is not other
    marks: CodeMarks[Kind] = CodeMarks()
    marks.add(Kind.WARM)(functions[0])  # type: ignore[type-var]  # a function
    assert marks.of(one) is Kind.WARM
    assert marks.of(other) is None


@pytest.mark.parametrize("name", ["somewhere", "elsewhere_else"])
def test_a_package_is_marked_where_it_is(tmp_path: Path, name: str) -> None:
    marks: CodeMarks[Kind] = CodeMarks()
    outer, inner = package(tmp_path, name), package(tmp_path, f"{name}.within")
    neighbour = package(tmp_path, f"{name}s")
    assert inner.__spec__ is not None and outer.__spec__ is not None
    marks.add_package(outer.__spec__, Kind.WARM)
    marks.add_package(inner.__spec__, Kind.COLD)
    assert marks.of(outer.inner.running()) is Kind.WARM
    assert marks.of(inner.inner.running()) is Kind.COLD
    assert marks.of(neighbour.inner.running()) is None
    marks.add(Kind.COLD)(outer.inner.running)
    assert marks.of(outer.inner.running()) is Kind.COLD


def test_a_module_is_no_package() -> None:
    with pytest.raises(ValueError, match=r"must be that of a package, got that of the module 'enum'"):
        folders_of(enum.__spec__)


def test_the_library_is_found_from_within() -> None:
    assert folders_of(library()) == (f"{Path(sys.modules['dist2'].__file__ or '').parent}/",)
