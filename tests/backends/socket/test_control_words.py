"""The control words of a member: the same in Python and in C, and read as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dist2.backends.socket.transport.boards import control_words
from dist2.backends.socket.transport.boards.control_words import (
    ALL,
    PHASES,
    PRINT_BITS,
    PRINT_MASK,
    arrival_word,
    read_sleeping_word,
    sleeping_word,
)

STEPS = Path(control_words.__file__).parents[4] / "compiled" / "source" / "steps"


def numbers_in_c(names: str) -> dict[str, int]:
    """Return the constants whose names match, from enums and definitions."""
    sources = "".join((STEPS / each).read_text() for each in ("steps.h", "fences.c"))
    found = re.findall(rf"\b({names}) (?:= )?(-?\d+)\b", sources)
    return {name: int(number) for name, number in found}


def test_words_stand_in_the_same_places_in_c() -> None:
    named = numbers_in_c("[A-Z_]+")
    here = {name: value for name, value in vars(control_words).items() if re.fullmatch("[A-Z_]+", name)}
    shared = here.keys() & named.keys()
    assert {name: named[name] for name in shared} == {name: here[name] for name in shared}
    assert {"RING", "WINDOW", "SLEEPING", "STATE", "DESCRIBED", "GAVE_UP", "NOTES"} <= shared
    assert {"CORE", "CROWDED", "CALLED", "SEQ", "RANG", "ALL", "NOBODY", "PRINT_BITS"} <= shared


def test_an_arrival_tells_the_fence_and_the_end_of_the_fingerprint() -> None:
    word = arrival_word(PHASES + 5, 1 << 63 | 7)
    assert (word >> PRINT_BITS, word & PRINT_MASK) == (5, 7)


@pytest.mark.parametrize("whom", [ALL, 0, 1, 1000])
def test_who_sleeps_tells_for_whom_and_until_when(whom: int) -> None:
    words = {sleeping_word(nap, whom, PHASES + 9) for nap in (1, 2, 1 << 30)}
    assert len(words) == 3
    assert {read_sleeping_word(word) for word in words} == {(whom, 9)}
