"""The store server without sockets: stages, waits, barriers, queues, and bad clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2.errors import WireError
from dist2.store.protocol import MAGIC, Limits, Query, Reply, ReplyDecoder, Request, encode_request
from dist2.store.server_core import ALLOWED, Session, Stage, StoreCore

Q = Query


class Client:
    """A client of a core."""

    def __init__(self, core: StoreCore, *, greets: bool = True) -> None:
        self.core = core
        self.session: Session = core.join("test")
        self.decoder = ReplyDecoder()
        if greets:
            self.send(Q.VALIDATE, number=MAGIC)

    def send(self, query: Query, *keys: bytes, values: tuple[bytes, ...] = (), number: int = 0) -> None:
        request = Request(query, keys, values, number)
        self.decoder.expect(request)
        self.core.receive(self.session, encode_request(request))

    def answers(self) -> list[Reply]:
        data = bytes(self.session.outgoing)
        self.session.outgoing.clear()
        return list(self.decoder.feed(data))

    def ask(self, query: Query, *keys: bytes, values: tuple[bytes, ...] = (), number: int = 0) -> Reply:
        self.send(query, *keys, values=values, number=number)
        (answer,) = self.answers()
        return answer

    def cancel(self) -> list[int]:
        """Return the answers that follow a cancellation."""
        self.send(Q.CANCEL_WAIT)
        data = bytes(self.session.outgoing)
        self.session.outgoing.clear()
        return list(data)


@pytest.fixture
def core() -> StoreCore:
    return StoreCore()


def test_every_query_is_allowed_somewhere() -> None:
    assert frozenset().union(*ALLOWED.values()) == frozenset(Query)
    assert set(ALLOWED) == set(Stage)


@pytest.mark.parametrize(
    ("stage", "query"),
    [(stage, query) for stage in Stage for query in Query if query not in ALLOWED[stage]],
)
def test_what_is_not_allowed_is_refused(core: StoreCore, stage: Stage, query: Query) -> None:
    client = Client(core, greets=stage is not Stage.HELLO)
    if stage is Stage.WAITING:
        client.send(Q.WAIT, b"/k")
    assert client.session.stage is stage
    keys = (b"/k",)
    values = (b"v",) * (2 if query is Q.COMPARE_SET else 1)
    with pytest.raises(WireError, match=f"{query.name} from a client that"):
        core.receive(client.session, encode_request(Request(query, keys, values, 1)))


def test_a_wrong_magic_is_refused(core: StoreCore) -> None:
    with pytest.raises(WireError, match=r"magic 0x01020304, expected 0x3c85f7ce"):
        Client(core, greets=False).send(Q.VALIDATE, number=0x01020304)


def test_a_wait_ends_with_its_last_key(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    writer.send(Q.SET, b"/a", values=(b"",))
    waiter.send(Q.WAIT, b"/a", b"/b", b"/c", b"/c")
    writer.send(Q.ADD, b"/b", number=1)
    assert waiter.answers() == []
    request = Request(Q.APPEND, (b"/c",), (b"x",))
    assert core.receive(writer.session, encode_request(request)) == [waiter.session]
    assert waiter.answers() == [Reply(0)]
    assert waiter.session.stage is Stage.OPEN


def test_a_failed_compare_set_ends_no_wait(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/k")
    assert writer.ask(Q.COMPARE_SET, b"/k", values=(b"expected", b"new")).values == (b"expected",)
    assert waiter.answers() == []
    writer.ask(Q.COMPARE_SET, b"/k", values=(b"", b"new"))
    assert waiter.answers() == [Reply(0)]


def test_multi_set_sets_all_before_it_wakes(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/a")
    writer.send(Q.MULTI_SET, b"/a", b"/b", values=(b"1", b"2"))
    assert waiter.answers() == [Reply(0)]
    assert waiter.ask(Q.MULTI_GET, b"/a", b"/b").values == (b"1", b"2")


def test_cancelling(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/k")
    assert waiter.cancel() == [1]
    writer.send(Q.SET, b"/k", values=(b"",))
    assert waiter.session.outgoing == b""
    waiter.decoder.unexpect()
    assert waiter.cancel() == [1], "also without a wait"


def test_cancelling_what_has_just_ended(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/k")
    writer.send(Q.SET, b"/k", values=(b"",))
    assert waiter.cancel() == [0, 1]


def test_who_left_is_not_woken(core: StoreCore) -> None:
    waiter, writer = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/a", b"/b")
    core.leave(waiter.session)
    writer.send(Q.MULTI_SET, b"/a", b"/b", values=(b"", b""))
    assert core.answered() == []
    assert core._waiters == {}


def test_barrier(core: StoreCore) -> None:
    first, second, third = Client(core), Client(core), Client(core)
    first.send(Q.BARRIER, b"/b", number=3)
    second.send(Q.BARRIER, b"/b", number=3)
    assert first.answers() + second.answers() == []
    assert third.ask(Q.BARRIER, b"/b", number=3) == Reply(0)
    assert first.answers() + second.answers() == [Reply(0), Reply(0)]
    assert first.ask(Q.GET, b"/b").values == (b"3",)
    assert first.ask(Q.BARRIER, b"/b", number=3) == Reply(0), "who arrives late goes through"
    assert core._barriers == {}


def test_cancelled_barriers_keep_their_count(core: StoreCore) -> None:
    first, second = Client(core), Client(core)
    first.send(Q.BARRIER, b"/b", number=2)
    assert first.cancel() == [1]
    assert second.ask(Q.BARRIER, b"/b", number=2) == Reply(0)


def test_an_item_wakes_one_popper_in_order(core: StoreCore) -> None:
    first, second, pusher = Client(core), Client(core), Client(core)
    first.send(Q.WAIT, b"/q")
    second.send(Q.WAIT, b"/q")
    pusher.send(Q.QUEUE_PUSH, b"/q", values=(b"1",))
    assert (first.answers(), second.answers()) == ([Reply(0)], [])
    assert first.ask(Q.QUEUE_POP, b"/q") == Reply(1, (b"1",))
    pusher.send(Q.QUEUE_PUSH, b"/q", values=(b"2",))
    assert second.answers() == [Reply(0)]


@pytest.mark.parametrize("then", ["leaves", "cancels", "asks something else"])
def test_an_item_that_is_not_taken_wakes_the_next(core: StoreCore, then: str) -> None:
    first, second, pusher = Client(core), Client(core), Client(core)
    first.send(Q.WAIT, b"/q")
    second.send(Q.WAIT, b"/q")
    pusher.send(Q.QUEUE_PUSH, b"/q", values=(b"1",))
    assert second.answers() == []
    if then == "leaves":
        core.leave(first.session)
        assert core.answered() == [second.session]
    elif then == "cancels":
        assert first.cancel() == [0, 1]
    else:
        first.send(Q.QUEUE_LEN, b"/q")
    assert second.answers() == [Reply(0)]


def test_a_taken_item_wakes_nobody_else(core: StoreCore) -> None:
    first, second, pusher = Client(core), Client(core), Client(core)
    first.send(Q.WAIT, b"/q")
    second.send(Q.WAIT, b"/q")
    pusher.send(Q.QUEUE_PUSH, b"/q", values=(b"1",))
    first.answers()
    first.ask(Q.QUEUE_POP, b"/q")
    core.leave(first.session)
    assert second.answers() == []


def test_counting_on_text_is_refused(core: StoreCore) -> None:
    client = Client(core)
    client.send(Q.SET, b"/k", values=(b"text",))
    with pytest.raises(WireError, match="'/k' holds b'text', not an integer"):
        client.send(Q.ADD, b"/k", number=1)


def test_what_was_asked_before_garbage_still_counts(core: StoreCore) -> None:
    waiter, bad = Client(core), Client(core)
    waiter.send(Q.WAIT, b"/k")
    with pytest.raises(WireError):
        core.receive(bad.session, encode_request(Request(Q.SET, (b"/k",), (b"v",))) + b"\xff")
    core.leave(bad.session)
    assert core.answered() == [waiter.session]


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=60)), max_size=10))
def test_garbage_of_some_disturbs_no_other(noise: list[tuple[int, bytes]]) -> None:
    core = StoreCore()
    good = Client(core)
    strangers: list[Session | None] = [core.join(f"stranger {index}") for index in range(3)]
    good.send(Q.SET, b"/k", values=(b"v",))
    for index, data in noise:
        session = strangers[index]
        if session is None:
            continue
        try:
            core.receive(session, data)
        except WireError:
            core.leave(session)
            strangers[index] = None
        assert good.ask(Q.GET, b"/k") == Reply(values=(b"v",))


def test_a_value_grows_no_longer_than_its_readers_take() -> None:
    client, reader = map(Client, [core := StoreCore(Limits(value_bytes=10))] * 2)
    client.send(Q.APPEND, b"key", values=(b"x" * 6,))
    client.send(Q.APPEND, b"key", values=(b"y" * 4,))
    with pytest.raises(WireError, match="exceeds 10 bytes"):
        client.send(Q.APPEND, b"key", values=(b"z",))
    core.leave(client.session)
    assert reader.ask(Q.GET, b"key").values == (b"x" * 6 + b"y" * 4,)
