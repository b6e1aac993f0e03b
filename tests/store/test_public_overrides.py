"""Stores of users that override the public methods alone, as subclasses of torch's ``Store`` do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from support.threads import together

import dist2
from dist2 import legacy

WAIT_S = 10.0


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class Dictionary:
    """The methods that torch requires of a store in Python."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = _bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + value
            self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            limit_s = WAIT_S if timeout is None else timeout.total_seconds()
            if not self._changed.wait_for(lambda: self.check(keys), limit_s):
                raise legacy.DistStoreError("Wait timeout")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._changed:
            if self._values.get(key, _bytes(expected)) == _bytes(expected):
                self.set(key, desired)
            return self._values[key]

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


class OfDist2(Dictionary, legacy.Store):
    pass


class OfTorch(Dictionary, torch.distributed.Store):
    pass


KINDS = pytest.mark.parametrize("kind", [OfDist2, OfTorch])


@KINDS
@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_groups_meet_in_it(kind: type[Any], backend: str) -> None:
    store = kind()

    def rank_main(rank: int) -> None:
        with dist2.new_group(backend, 20, store=store, rank=rank, world_size=2) as pg:
            pg.all_reduce(x := torch.ones(1))
            assert x.item() == 2

    together(lambda: rank_main(0), lambda: rank_main(1))


@KINDS
def test_the_other_methods_are_built_from_these(kind: type[Any]) -> None:
    store = kind()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    store.append("a", "3")
    assert store.get("a") == b"13"
    prefixed = legacy.PrefixStore("below", store)
    prefixed.set("key", "value")
    assert store.get("below/key") == b"value"
    assert prefixed.add("count", 2) == 2


def test_a_method_that_is_missing_is_named() -> None:
    with pytest.raises(NotImplementedError, match="OfDist2 has no method list_keys"):
        OfDist2().list_keys()
