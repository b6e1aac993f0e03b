"""The control words of a member lie apart from each other."""

from __future__ import annotations

from dist2.backends.socket.transport.boards.control_words import (
    RING,
    TABLE_AT,
    TABLE_BYTES,
    WINDOW,
)
from dist2.backends.socket.transport.boards.pieces import CONTROL_BYTES
from dist2.operation.engine import WORDS_OF_CONTROL


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
