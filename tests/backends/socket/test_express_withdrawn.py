"""Direct messages: a call that withdraws a message raises while another exception is raised already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.boards import operation
from support.endpoint_pairs import PRINT, Side, pattern, soon, two_sides
from support.exceptions import Raised
from support.torch_features import needs

from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.express import Carrier
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.transfer import next_number

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

LONG = 1 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides() as both:
        yield both


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fail: Callable[..., Any]) -> None:
    """Have reads of one attribute of an object fail."""
    failing = type("Failing", (type(owner),), {"__slots__": (), name: property(fail)})
    monkeypatch.setattr(owner, "__class__", failing)


def send(side: Side, text: bytearray, adopt: Callable[..., Any], cancel: Callable[..., Any]) -> None:
    """Send a long message as a group does, with the test's callables in place of its methods."""
    express = side.endpoint.ways.express(Lot(side.peer, 0, PRINT, len(text)))
    assert express is not None

    def otherwise(*_: object) -> None:
        raise AssertionError("the message was to be offered")

    carrier = Carrier(
        messenger=SimpleNamespace(last=None),
        express=express,
        sends=True,
        otherwise=otherwise,
        resume=otherwise,
        numbers=next_number,
        adopt=adopt,
        cancel=cancel,
    )
    carrier(operation(0, timeout_s=0.05), [torch.frombuffer(text, dtype=torch.uint8)], [])


@pytest.mark.parametrize("adopts", [True, False])
def test_what_withdrawing_a_message_raises_keeps_the_interruption_in_its_context(
    sides: tuple[Side, Side], adopts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = sides
    raised, text = Raised(), pattern(LONG)
    adopt: Callable[..., Any] = (lambda *_: "adopted") if adopts else raised.raising("second")
    crowd = one.endpoint._fabric.poller.crowd
    with monkeypatch.context() as patched:
        fail_at(patched, crowd, "_until", raised.raising("first"))
        assert raised.chain_of(send, one, text, adopt, raised.raising("second")) == ["second", "first"]
    assert raised.alive() == []


@needs("exchange")
def test_no_memory_can_be_read_of_a_message_that_nothing_stands_for(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    raised = Raised()
    # Where both sides connected at the same time, each has a link to write to and another to read from.
    (written,) = [link.tx for link in one.endpoint._fabric.linkage.rings.links if link.tx is not None]
    free = written.slots_left
    assert raised.chain_of(send, one, pattern(LONG), raised.raising("only"), raised.raising("never")) == [
        "only"
    ]
    assert written.slots_left == free
    assert raised.alive() == []


def test_what_adopting_an_offer_raises_keeps_the_interruption_in_its_context(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sides
    raised, text, buffer = Raised(), pattern(LONG), bytearray(LONG)
    posted = two.post(buffer)
    sending = one.endpoint.send_tagged(one.peer, 0, PRINT, memoryview(text))
    express = two.endpoint.ways.express(Lot(two.peer, 0, PRINT, LONG))
    assert express is not None
    with monkeypatch.context() as patched:
        fail_at(patched, two.endpoint._mailbox, "aborted", raised.raising("first"))
        chain = raised.chain_of(express.fetch_posted, posted, raised.raising("second"), soon())
    assert chain == ["second", "first"]
    assert not sending.done
    assert raised.alive() == []
