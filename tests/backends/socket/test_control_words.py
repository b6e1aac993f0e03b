"""The control words of a member: apart from each other, the same in Python and in C, and read as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dist2
from dist2.backends.socket.transport.boards.control_words import (
    ALL,
    NOBODY,
    PHASES,
    PRINT_BITS,
    PRINT_MASK,
    RING,
    TABLE_AT,
    TABLE_BYTES,
    WINDOW,
    arrival_word,
    read_sleeping_word,
    sleeping_word,
)
from dist2.backends.socket.transport.boards.pieces import CONTROL_BYTES
from dist2.operation.engine import WORDS_OF_CONTROL

CORE_SOURCES = Path(dist2.__file__).parent / "core"


def constants_in_c() -> dict[str, int]:
    """Return the constants of the core that its Python side has as well, from enums and definitions."""
    sources = "".join((CORE_SOURCES / each).read_text() for each in ("layout.h", "fences.c"))
    found = re.findall(r"\b(ALL|NOBODY|FOR_ALL|FOR_ONE) (?:= )?(-?\d+)\b", sources)
    return {name: int(number) for name, number in found}


def test_constants_are_the_same_in_c() -> None:
    assert constants_in_c() == {
        "ALL": ALL,
        "NOBODY": NOBODY,
        "FOR_ALL": read_code(sleeping_word(1, ALL, 0)),
        "FOR_ONE": read_code(sleeping_word(1, 0, 0)),
    }


def read_code(word: int) -> int:
    return word % (1 << WORDS_OF_CONTROL["WHOM_BITS"])


def test_control_words_do_not_overlap_each_other_or_the_tables_of_exposed_memory() -> None:
    table = WORDS_OF_CONTROL
    lengths = {"CALLED": RING, "NOTES": 2}
    others = {"RING", "WINDOW", "WORDS", "PHASE_BITS", "PRINT_BITS", "WHOM_BITS", "IS_MAPPED"}
    others |= {"TABLE_AT", "TABLE_BYTES", "HEADER_WORDS"}
    taken = [table[name] + each for name in table.keys() - others for each in range(lengths.get(name, 1))]
    assert len({*range(RING), *taken}) == RING + len(taken)
    assert max(taken) < table["WORDS"] <= TABLE_AT // 8
    assert 2 <= WINDOW <= RING // 2
    assert TABLE_AT + 2 * TABLE_BYTES <= CONTROL_BYTES
    assert not any(each // 8 == table["PROBE"] // 8 for each in taken if each != table["PROBE"])


def test_an_arrival_tells_the_fence_and_the_end_of_the_fingerprint() -> None:
    word = arrival_word(PHASES + 5, 1 << 63 | 7)
    assert (word >> PRINT_BITS, word & PRINT_MASK) == (5, 7)


@pytest.mark.parametrize("whom", [ALL, 0, 1, 1000])
def test_who_sleeps_tells_for_whom_and_until_when(whom: int) -> None:
    words = {sleeping_word(nap, whom, PHASES + 9) for nap in (1, 2, 1 << 30)}
    assert len(words) == 3
    assert {read_sleeping_word(word) for word in words} == {(whom, 9)}
