"""Fabrics of this process, one a rank, and the groups opened on them."""

from __future__ import annotations

from collections.abc import Sequence

from dist2.backends.socket.transport.fabric import Fabric
from dist2.backends.socket.transport.messages.calls import Called
from dist2.backends.socket.transport.messages.endpoint import FabricEndpoint
from support.threads import together

CONTEXT = 1


class World:
    """Some fabrics and their groups.

    Args:
        fabrics: One a rank.
        inside: Their links are no connections.
    """

    def __init__(self, fabrics: Sequence[Fabric], inside: bool = False) -> None:
        self.fabrics = fabrics
        self.cards = [fabric.card for fabric in fabrics]
        self.inside = inside
        self.endpoints: list[FabricEndpoint] = []

    def open(self, rank: int, context: int = CONTEXT) -> FabricEndpoint:
        """Open a rank's end of a group."""
        endpoint = FabricEndpoint(self.fabrics[rank], context, rank, self.cards, self.inside, describe)
        self.endpoints.append(endpoint)
        return endpoint

    def group(self, context: int = CONTEXT) -> list[FabricEndpoint]:
        """Open all ranks' ends of a group."""
        return [self.open(rank, context) for rank in range(len(self.fabrics))]

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        # All at once: each sends its last frames, which the others read only while they are open.
        together(*(fabric.close for fabric in self.fabrics))


def describe(seq: int | None, number: int) -> Called:
    return Called(1, 11, "the test's operation")
