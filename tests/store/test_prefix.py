"""`PrefixStore`, and stores that only C++ holds any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.stores import leaving_nothing, server
from support.threads import together
from support.torch_features import needs

import dist2
from dist2.runtime import cpp_ownership as halves
from dist2.store.base import pinned


@pytest.fixture(autouse=True)
def _leaving_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


@pytest.mark.parametrize("below", [dist2.HashStore, dist.HashStore])
def test_keys_begin_with_the_prefix(below: Any) -> None:
    store = below()
    dist2.PrefixStore("outer", dist2.PrefixStore("inner", store)).set("key", "value")
    assert store.get("inner/outer/key") == b"value"
    assert dist.PrefixStore("inner/outer", store).get("key") == b"value"


def test_prefixes_are_apart() -> None:
    store = dist2.HashStore()
    a, b = dist2.PrefixStore("a", store), dist2.PrefixStore("b", store)
    a.set("key", "1")
    assert not b.check(["key"])
    assert a.list_keys() == ["key"]
    assert b.list_keys() == []
    assert b.num_keys() == 1, "it counts the store below, as torch's"


def test_the_address_is_that_of_the_server_below() -> None:
    served = dist2.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = dist2.PrefixStore("b", dist2.PrefixStore("a", served))
    assert (inner.host, inner.port) == ("127.0.0.1", served.port)
    assert not hasattr(dist2.PrefixStore("a", dist2.HashStore()), "host")


def test_no_store() -> None:
    with pytest.raises(ValueError, match="store argument cannot be None"):
        dist2.PrefixStore("p", None)
    with pytest.raises(TypeError, match="store must be a torch or dist2 Store, got 'x'"):
        dist2.PrefixStore("p", "x")
    with pytest.raises(TypeError, match="key must be a str"):
        dist2.PrefixStore(None, dist2.HashStore())


def test_what_is_below() -> None:
    store = dist2.HashStore()
    middle = dist2.PrefixStore("a", store)
    for top in (dist2.PrefixStore("b", middle), dist.PrefixStore("b", middle)):
        assert top.underlying_store is middle
        if isinstance(top, dist2.PrefixStore):
            assert top._underlying_non_prefix_store is store
    assert dist2.PrefixStore("c", dist.PrefixStore("b", middle))._underlying_non_prefix_store is store


def test_the_timeout_is_that_of_the_store_below() -> None:
    store = dist2.HashStore()
    prefixed = dist2.PrefixStore("p", store)
    prefixed.set_timeout(3)
    assert store.timeout == prefixed.timeout == timedelta(seconds=3)
    store.set_timeout(4)
    assert prefixed.timeout == timedelta(seconds=4)


@needs("store_collectives")
@pytest.mark.parametrize("below", [dist2.HashStore, dist.HashStore])
def test_a_timeout_that_cpp_sets_for_a_while_holds(below: Any) -> None:
    store = dist2.PrefixStore("p", below())
    collectives = dist._StoreCollectives(store, 0, 2)
    store.set_timeout(30)
    with pytest.raises(RuntimeError, match="missing ranks: 1"):
        collectives.barrier("key", timedelta(seconds=0.1), True)
    assert store.timeout == timedelta(seconds=30)


def test_the_layout_is_known() -> None:
    assert halves.layout_is_known()


def test_whether_cpp_holds_a_store() -> None:
    store = dist2.HashStore()
    assert not halves.held_by_cpp(store)
    wrapped = dist.PrefixStore("p", store)
    assert halves.held_by_cpp(store)
    del wrapped
    assert not halves.held_by_cpp(store)


def test_a_store_that_only_cpp_holds_lives_on_and_ends_with_it() -> None:
    made = server()
    gone = ref(made)
    wrapped = dist.PrefixStore("p", made)
    del made
    gc.collect()
    wrapped.set("key", "value")
    assert wrapped.get("key") == b"value"
    clone = wrapped.clone()  # type: ignore[attr-defined]  # likewise
    assert clone.get("key") == b"value"
    del wrapped, clone
    dist2.HashStore()
    gc.collect()
    assert gone() is None


def test_closing_ends_a_store_that_cpp_holds() -> None:
    made = server()
    wrapped = dist.PrefixStore("p", made)
    made.close()
    with pytest.raises(dist2.StoreError, match="TCPStore is closed"):
        wrapped.set("key", "value")


def test_thousands_of_pinned_stores_cost_little() -> None:
    wrapped = [dist.PrefixStore("p", dist2.HashStore()) for _ in range(2000)]
    assert len(pinned) >= 2000
    assert all(each.add("count", 1) == 1 for each in wrapped)
    wrapped.clear()
    for _ in range(2000 // 8 + 50):
        dist2.HashStore()
    assert len(pinned) < 20


@pytest.mark.parametrize("kind", ["hash", "tcp", "prefix", "forgotten"])
def test_gloo_works_over_our_stores(kind: str) -> None:
    base: Any = dist2.HashStore() if kind in ("hash", "prefix") else server()

    def rank(number: int) -> float:
        own = base.clone()
        if kind == "prefix":
            own = dist2.PrefixStore("group", own)
        if kind == "forgotten":
            own = dist.PrefixStore("group", own)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(own, number, 2, options)
        tensor = torch.tensor([number + 1.0])
        group.allreduce([tensor]).wait()
        group.barrier().wait()
        return float(tensor)

    assert together(lambda: rank(0), lambda: rank(1)) == [3.0, 3.0]
    base.close()
