"""The one wait for other ranks: its ends, and which of them are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dist2 import HashStore
from dist2.errors import PeerLostError, StoreConnectionError
from dist2.runtime.deadline import Deadline
from dist2.store.waiting import arrive


@pytest.mark.parametrize("sets_its_key", [True, False])
def test_a_rank_that_set_its_key_and_ended_has_arrived(sets_its_key: bool) -> None:
    store = HashStore()

    def look() -> None:
        if sets_its_key:
            store.set("key", "value")
        raise PeerLostError("rank 1 died", ranks=[1])

    if sets_its_key:
        assert arrive(store, ["key"], Deadline.after(20), look, look_s=0.01)
    else:
        with pytest.raises(PeerLostError):
            arrive(store, ["key"], Deadline.after(20), look, look_s=0.01)


class Gone(HashStore):
    """A store whose server is found to have gone when a deadline has passed."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def wait(self, *arguments: Any, **options: Any) -> None:
        self.deadline.pause(60.0)
        assert self.deadline.passed
        raise StoreConnectionError("the server is gone")


def test_a_store_that_is_gone_is_no_missing_rank() -> None:
    deadline = Deadline.after(0.01)
    with pytest.raises(StoreConnectionError):
        arrive(Gone(deadline), ["key"], deadline)


def test_torchs_store_gives_up_no_earlier_than_the_deadline() -> None:
    """It cuts a limit to milliseconds, and its error is no special one: it was raised as it is."""
    store = dist.HashStore()
    for _ in range(30):
        assert not arrive(store, ["key"], Deadline.after(0.0213))
