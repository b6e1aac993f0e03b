"""The control words of a member: apart from each other, the same in Python and in C, and read as written."""

from __future__ import annotations

import re
from pathlib import Path

import dist2
from dist2.backends.socket.transport.boards.control_words import (
    ALL,
    NOBODY,
    RING,
    TABLE_AT,
    TABLE_BYTES,
    WINDOW,
)
from dist2.backends.socket.transport.boards.pieces import CONTROL_BYTES
from dist2.operation.engine import WORDS_OF_CONTROL

CORE_SOURCES = Path(dist2.__file__).parent / "core"


def test_constants_are_the_same_in_c() -> None:
    source = (CORE_SOURCES / "layout.h").read_text()
    found = re.findall(r"\b(ALL|NOBODY) = (-?\d+)\b", source)
    assert {name: int(number) for name, number in found} == {"ALL": ALL, "NOBODY": NOBODY}


def test_control_words_do_not_overlap_each_other_or_the_tables_of_exposed_memory() -> None:
    table = WORDS_OF_CONTROL
    others = {"RING", "ENTRY", "WINDOW", "WORDS", "PHASE_BITS", "PRINT_BITS", "WHOM_BITS", "IS_MAPPED"}
    others |= {"TABLE_AT", "TABLE_BYTES", "HEADER_WORDS"}
    taken = [table[name] for name in table.keys() - others]
    entries = RING * table["ENTRY"]
    assert len({*range(entries), *taken}) == entries + len(taken)
    assert max(taken) < table["WORDS"] <= TABLE_AT // 8
    assert 2 <= WINDOW <= RING // 2
    assert TABLE_AT + 2 * TABLE_BYTES <= CONTROL_BYTES
    assert not any(each // 8 == table["PROBE"] // 8 for each in taken if each != table["PROBE"])
