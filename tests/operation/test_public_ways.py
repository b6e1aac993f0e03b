"""The call path reads and makes torch's objects by public ways alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dist2

LIBRARY = Path(dist2.__file__).parent
PRIVATE = re.compile(
    r"_cdata|_dispatch_keys|d_member|PyMemberDescr|tp_basicsize|tp_dealloc|from_address|/proc/self/mem|"
    r"find_marks|ob_refcnt|Py_SET_REFCNT|Py_INCREF|Py_DECREF"
)
"""Words of code that searches objects for values, writes to them or counts their references by hand."""


def private_in(text: str) -> list[str]:
    return PRIVATE.findall(text)


@pytest.mark.parametrize("package", ["operation", "c10d", "group"])
def test_nothing_private_is_used(package: str) -> None:
    files = [
        path for path in (LIBRARY / package).rglob("*") if path.suffix in (".py", ".pyx", ".pxd", ".h", ".c")
    ]
    assert len(files) > 4
    assert {path.name: found for path in files if (found := private_in(path.read_text()))} == {}


def test_what_is_private_is_seen() -> None:
    assert private_in("word = *(uint64_t *)tensor._cdata") == ["_cdata"]
    assert private_in("type->tp_dealloc = ours") == ["tp_dealloc"]
