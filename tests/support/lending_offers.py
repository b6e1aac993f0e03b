"""Exposed memory of ranks on several hosts, as a script sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dist2.backends.socket.borrowing import Borrowing
from dist2.operation.record import Operation


def note_offers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets how many addresses a rank lends, at each of its offers."""
    offers: list[int] = []
    offer = Borrowing.offer

    def offering(self: Borrowing, addresses: Sequence[int], operation: Operation) -> None:
        offers.append(len(addresses))
        offer(self, addresses, operation)

    monkeypatch.setattr(Borrowing, "offer", offering)
    return offers
