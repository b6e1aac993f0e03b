"""Bounded caches never exceed their limit, and keep the newest entry."""

from __future__ import annotations

from dist2.runtime.cache import keep


def test_a_full_memory_starts_over_with_what_comes_next() -> None:
    known: dict[str, int] = {}
    assert [keep(known, key, value, most=2) for key, value in (("a", 1), ("b", 2))] == [1, 2]
    assert known == {"a": 1, "b": 2}
    assert keep(known, "c", 3, most=2) == 3
    assert known == {"c": 3}


def test_what_is_known_is_replaced_in_a_full_memory() -> None:
    known = {"a": 1, "b": 2}
    assert keep(known, "a", 3, most=2) == 3
    assert known == {"a": 3, "b": 2}


def test_a_limit_of_one_keeps_the_last() -> None:
    known: dict[int, str] = {}
    for number in range(3):
        keep(known, number, str(number), most=1)
        assert known == {number: str(number)}
