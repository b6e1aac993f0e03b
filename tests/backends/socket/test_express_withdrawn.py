"""Direct messages: a call that withdraws a message raises while another exception is raised already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.boards import operation
from support.endpoint_pairs import PRINT, Side, pattern, two_sides
from support.exceptions import Raised
from support.torch_features import needs

from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.messages.express import Carrier, Express
from dist2.backends.socket.transport.messages.lot import Lot
from dist2.backends.socket.transport.messages.transfer import next_number

pytestmark = pytest.mark.skipif(not shared_memory.available(), reason="needs shared memory")

LONG = 1 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with two_sides() as both:
        yield both


class Instead:
    """An object that reads other attributes from another one.

    Args:
        of: The other one.
        attributes: Values of attributes; a function is called when its attribute is read, and raises.
    """

    def __init__(self, of: object, **attributes: object) -> None:
        self._of = of
        self._attributes = attributes

    def __getattr__(self, name: str) -> Any:
        if name not in self._attributes:
            return getattr(self._of, name)
        value = self._attributes[name]
        return value(self) if callable(value) else value


def express_of(side: Side, fabric: object, mailbox: object) -> Express:
    """Return the direct path of long messages."""
    return Express(fabric, mailbox, Lot(side.peer, 0, PRINT, LONG), 0, 0)


def send(express: Express, text: bytearray, adopt: Callable[..., Any], cancel: Callable[..., Any]) -> None:
    """Send a long message as a group does, with the test's callables in place of its methods."""

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
    sides: tuple[Side, Side], adopts: bool
) -> None:
    one, _ = sides
    raised, text = Raised(), pattern(LONG)
    adopt: Callable[..., Any] = (lambda *_: "adopted") if adopts else raised.raising("second")
    fabric = one.endpoint._fabric
    crowd = Instead(fabric.poller.crowd, _until=raised.raising("first"))
    failing = Instead(fabric, poller=Instead(fabric.poller, crowd=crowd))
    express = express_of(one, failing, one.endpoint._mailbox)
    assert raised.chain_of(send, express, text, adopt, raised.raising("second")) == ["second", "first"]
    assert raised.alive() == []


@needs("exchange")
def test_no_memory_can_be_read_of_a_message_that_nothing_stands_for(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    raised = Raised()
    # Where both sides connected at the same time, each has a link to write to and another to read from.
    (written,) = [link.tx for link in one.endpoint._fabric.linkage.rings.links if link.tx is not None]
    free = written.slots_left
    express = express_of(one, one.endpoint._fabric, one.endpoint._mailbox)
    never = raised.raising("never")
    assert raised.chain_of(send, express, pattern(LONG), raised.raising("only"), never) == ["only"]
    assert written.slots_left == free
    assert raised.alive() == []
