"""Long sums over more than two hosts: a rank that waits for one of them holds up none of the others.

Between two hosts messages are answered in the order in which they are sent. With more, a message that one
rank waits for may depend, through others, on a message that it has not received yet.
"""

from __future__ import annotations

import pytest
from support.oracle import check_sum
from support.ranks import Tenant, run_ranks

from dist2 import ProcessGroup
from dist2.backends.socket.transport.messages import dispatch

UNEVEN = Tenant("2+2+1", "socket", layout=(0, 0, 1, 1, 2))
FOUR = Tenant("2+2+2+2", "socket", layout=(0, 0, 1, 1, 2, 2, 3, 3))


def sums(pg: ProcessGroup) -> None:
    for turn, numel in enumerate((1_500_001, 300_000)):
        check_sum(pg, numel, turn)


@pytest.mark.parametrize("tenant", [UNEVEN, FOUR], ids=str)
def test_sums_of_long_vectors(tenant: Tenant) -> None:
    run_ranks(len(tenant.layout), sums, tenant)


def test_sums_end_where_all_messages_need_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if received but unwanted messages had used up the credit: later ones are announced."""
    monkeypatch.setattr(dispatch, "_may_be_prompt", lambda account, sending: False)
    run_ranks(5, sums, UNEVEN)
