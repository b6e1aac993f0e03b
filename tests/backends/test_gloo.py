"""Gloo without a control group: dtypes, messages, failures, closing. Behaviour of all backends is in
conformance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import monotonic_ns
from typing import Any

import attrs
import pytest
import torch
from support.time_limits import in_time
from torch.distributed import HashStore, ReduceOp

import dist2
from dist2.backends.base import GroupSpec
from dist2.backends.carriers import CARRIERS, Landing, as_bytes, carrier_of
from dist2.backends.gloo import GlooBackend, create
from dist2.backends.gloo.core import Calls, error_of
from dist2.backends.gloo.messages import Mailbox, Waiters
from dist2.errors import (
    BackendError,
    Dist2Error,
    GroupAbortedError,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnknownOptionError,
)
from dist2.operation.kinds import OpKind, Reduction, premul_sum
from dist2.operation.record import Operation
from dist2.operation.signature import GroupInfo, Signature, TensorMeta
from dist2.runtime.deadline import Deadline

SUM = Reduction.of(ReduceOp.SUM)
ALONE = {"hostname": "127.0.0.1", "control": False}


def info_of(rank: int = 0, world_size: int = 1) -> GroupInfo:
    return GroupInfo("world", "part", "", "gloo", rank, tuple(range(world_size)))


def operation_of(kind: OpKind, info: GroupInfo, timeout_s: float = 20.0, **fields: Any) -> Operation:
    now = monotonic_ns()
    return Operation(Signature(kind, info, **fields), 1, now, now + int(timeout_s * 1e9), True)


@attrs.frozen
class Rank:
    """One rank of a Gloo group, driven without a process group."""

    backend: GlooBackend
    lane: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1))

    def start(
        self,
        kind: OpKind,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        timeout_s: float = 20.0,
        **fields: Any,
    ) -> Future[None]:
        fields["inputs"] = tuple(map(TensorMeta.of, inputs))
        fields["outputs"] = tuple(map(TensorMeta.of, outputs))
        operation = operation_of(kind, self.backend.spec.info, timeout_s, **fields)
        execute = self.backend.plan(operation.signature)
        if kind not in (OpKind.SEND, OpKind.RECV):  # those block: the group has a thread for them
            return self.lane.submit(execute, operation, inputs, outputs)
        pending = execute(operation, inputs, outputs)
        if pending is None:
            pending = Future()
            pending.set_result(None)
        assert isinstance(pending, Future)
        return pending

    def run(self, kind: OpKind, *tensors: Sequence[torch.Tensor], **fields: Any) -> None:
        self.start(kind, *tensors, **fields).result(20)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = SUM, **fields: Any) -> torch.Tensor:
        self.run(OpKind.ALL_REDUCE, [tensor], [tensor], reduction=reduction, **fields)
        return tensor


@pytest.fixture
def pair() -> Iterator[list[Rank]]:
    """Yield both ranks of a group; no thread outlives it."""
    before = set(threading.enumerate())
    store = HashStore()

    def connect(rank: int) -> Rank:
        spec = GroupSpec(info_of(rank, 2), store, 20.0, torch.device("cpu"), ALONE)
        return Rank(create(spec))

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(connect, range(2)))
    yield ranks
    on_both(ranks, lambda rank: rank.backend.shutdown())
    assert_threads_end(before)


def assert_threads_end(before: set[threading.Thread]) -> None:
    """Wait until no other thread of dist2 runs. One that another thread is starting cannot be joined yet."""
    for _ in Deadline.after(5.0).tries(0.001, 0.05):
        others = {each for each in threading.enumerate() if each.name.startswith("dist2-")} - before
        if not others:
            return
    raise AssertionError(f"still there: {others}")


def on_both(ranks: list[Rank], body: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(body, ranks))


# Dtypes


@pytest.mark.parametrize(("dtype", "kind"), CARRIERS, ids=str)
def test_every_carrier_computes_what_torch_would(dtype: torch.dtype, kind: Any) -> None:
    """Load two contributions, combine them as the library would, unload: equal to the operation in the dtype
    itself."""
    generator = torch.Generator().manual_seed(7)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (2, 32), generator=generator, dtype=torch.uint8)
    ours, theirs = (_values(row, dtype) for row in raw)
    carrier = CARRIERS[dtype, kind]
    combined = _combined(carrier.load(ours.clone()), carrier.load(theirs.clone()), carrier.kind.name)
    if carrier.unload is None:
        result = combined.view(dtype) if not dtype.is_complex else torch.view_as_complex(combined.view(-1, 2))
    else:
        result = torch.empty_like(ours)
        carrier.unload(combined, result)
    expected = _plainly_combined(ours, theirs, kind.name)
    assert torch.equal(as_bytes(result), as_bytes(expected)), f"{result} != {expected}"


def _values(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return row.to(dtype)
    return row.view(dtype)  # all bits in use


def _combined(left: torch.Tensor, right: torch.Tensor, name: str) -> torch.Tensor:
    combine: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    return combine[name](left, right)


_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PREMUL_SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def _plainly_combined(left: torch.Tensor, right: torch.Tensor, name: str) -> torch.Tensor:
    """Combine as Python numbers, cut back to the dtype's bits."""
    dtype = left.dtype
    numbers = [_PYTHON[name](a, b) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    if dtype is torch.bool:
        return torch.tensor([bool(number) for number in numbers])
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(numbers, dtype=dtype)
    bits, low = 8 * dtype.itemsize, torch.iinfo(dtype).min
    return torch.tensor([(number - low) % (1 << bits) + low for number in numbers], dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float8_e4m3fn, ReduceOp.SUM),
        (torch.complex64, ReduceOp.MAX),
        (torch.complex64, ReduceOp.PRODUCT),
        (torch.float32, ReduceOp.BAND),
        (torch.bool, ReduceOp.AVG),
    ],
)
def test_impossible_reductions_name_dtype_and_op(dtype: torch.dtype, op: ReduceOp) -> None:
    with pytest.raises(InvalidUsageError, match=f"all_reduce with op={Reduction.of(op)} .*{dtype}.*gloo"):
        carrier_of(dtype, Reduction.of(op), "all_reduce", "gloo")


def test_a_landing_hides_strides_and_conjugation() -> None:
    target = torch.zeros(2, 3).t()
    landing = Landing(target)
    landing.flat.copy_(torch.arange(6.0))
    assert target.eq(0).all()
    landing.land()
    assert target.tolist() == [[0, 1], [2, 3], [4, 5]]
    conjugated = torch.tensor([1 + 2j]).conj()
    assert Landing(conjugated, loaded=True).flat.tolist() == [1 - 2j]
    plain = torch.zeros(3)
    assert Landing(plain).flat.data_ptr() == plain.data_ptr()


def test_reductions_over_gloo(pair: list[Rank]) -> None:
    def body(rank: Rank) -> None:
        mine = rank.backend.rank
        bits = (
            torch.tensor([1 << 63, 3], dtype=torch.uint64)
            if mine
            else torch.tensor([5, 4], dtype=torch.uint64)
        )
        highest = Reduction.of(ReduceOp.MAX)
        assert rank.all_reduce(bits, highest).tolist() == [1 << 63, 4]
        shorts = torch.tensor([30_000, -4], dtype=torch.int16)
        assert rank.all_reduce(shorts).tolist() == [60_000 - 65_536, -8]
        average = torch.tensor([mine, 4.0 * mine, -5.0 * mine])
        assert rank.all_reduce(average, Reduction.of(ReduceOp.AVG)).tolist() == [0.5, 2, -2.5]
        whole = torch.tensor([3 * mine, -3 * mine])
        assert rank.all_reduce(whole, Reduction.of(ReduceOp.AVG)).tolist() == [1, -1]
        assert rank.all_reduce(torch.ones(2), premul_sum(0.25)).tolist() == [0.5, 0.5]
        half = torch.tensor([65_000.0], dtype=torch.float16)  # their sum has no place in half precision
        assert rank.all_reduce(half, Reduction.of(ReduceOp.AVG)).tolist() == [64_992.0]
        assert rank.all_reduce(torch.tensor([1 + 2j])).tolist() == [2 + 4j]
        assert rank.all_reduce(torch.tensor([mine == 0, False])).tolist() == [True, False]

    on_both(pair, body)


def test_reduce_leaves_the_other_rank_alone(pair: list[Rank]) -> None:
    def body(rank: Rank) -> list[float]:
        tensor = torch.full((3,), rank.backend.rank + 1.0)
        outputs = [tensor] if rank.backend.rank == 1 else []
        rank.run(OpKind.REDUCE, [tensor], outputs, reduction=SUM, root=1)
        return tensor.tolist()

    assert on_both(pair, body) == [[1, 1, 1], [3, 3, 3]]


# Messages


def test_messages_do_not_wait_for_collectives(pair: list[Rank]) -> None:
    first, second = pair
    blocked = first.start(OpKind.ALL_REDUCE, [x := torch.ones(2)], [x], reduction=SUM)
    got = torch.zeros(2)
    receiving = second.start(OpKind.RECV, (), [got], peer=0, tag=4)
    first.run(OpKind.SEND, [torch.ones(2)], (), peer=1, tag=4)
    receiving.result(20)
    assert got.tolist() == [1, 1]
    assert not blocked.done()
    second.all_reduce(torch.ones(2))
    blocked.result(20)


def test_many_receives_wait_at_once(pair: list[Rank]) -> None:
    """No receive waits behind another: they complete in the order of the sends."""
    first, second = pair
    buffers = [torch.zeros(1) for _ in range(8)]
    waiting = [second.start(OpKind.RECV, (), [b], peer=0, tag=tag) for tag, b in enumerate(buffers)]
    for tag in reversed(range(8)):
        first.run(OpKind.SEND, [torch.tensor([float(tag)])], (), peer=1, tag=tag)
        waiting[tag].result(20)
    assert [buffer.item() for buffer in buffers] == list(range(8))


def test_messages_to_oneself_match_in_order(pair: list[Rank]) -> None:
    rank = pair[0]
    early = torch.zeros(2)
    receiving = rank.start(OpKind.RECV, (), [early], peer=0, tag=1)
    for value in (1.0, 2.0):
        rank.run(OpKind.SEND, [torch.full((2,), value)], (), peer=0, tag=1)
    receiving.result(20)
    late = torch.zeros(2)
    rank.run(OpKind.RECV, (), [late], peer=None, tag=1)
    assert (early.tolist(), late.tolist()) == ([1, 1], [2, 2])
    rank.run(OpKind.SEND, [torch.ones(3)], (), peer=0, tag=2)
    with pytest.raises(MismatchError, match=r"12 bytes .* receives 8"):
        rank.run(OpKind.RECV, (), [late], peer=0, tag=2)


# Failures


def test_a_timeout_keeps_its_limit_and_names_the_other(pair: list[Rank]) -> None:
    started = time.monotonic()
    with pytest.raises(
        OperationTimeoutError, match=r"all_reduce\(float32\[2\], op=sum\).*Timed out"
    ) as caught:
        pair[0].all_reduce(torch.ones(2), timeout_s=0.3)
    assert 0.25 < time.monotonic() - started < 3
    assert caught.value.missing == (1,)
    assert caught.value.timeout_s == pytest.approx(0.3)


def test_nothing_sent_to_oneself_times_out(pair: list[Rank]) -> None:
    with pytest.raises(OperationTimeoutError, match="tag 3"):
        pair[0].run(OpKind.RECV, (), [torch.ones(2)], peer=0, tag=3, timeout_s=0.1)


def test_a_lost_peer_is_named(pair: list[Rank]) -> None:
    first, second = pair
    waiting = first.start(OpKind.ALL_REDUCE, [x := torch.ones(2)], [x], reduction=SUM)
    second.backend.shutdown()
    with pytest.raises(PeerLostError) as caught:
        waiting.result(20)
    assert caught.value.ranks == (1,)


def test_abort_frees_waiters_at_once(pair: list[Rank]) -> None:
    first, second = pair
    pending = [
        first.start(OpKind.ALL_REDUCE, [x := torch.ones(2)], [x], reduction=SUM, timeout_s=1),
        first.start(OpKind.BARRIER, timeout_s=1),
        first.start(OpKind.RECV, (), [torch.ones(2)], peer=1, tag=0, timeout_s=1),
        first.start(OpKind.RECV, (), [torch.ones(2)], peer=0, tag=0, timeout_s=1),
    ]
    started = time.monotonic()
    threading.Timer(0.05, first.backend.abort).start()
    for future in pending:
        with pytest.raises(GroupAbortedError, match="was aborted"):
            future.result(20)
    took_s = time.monotonic() - started
    first.backend.abort()
    first.backend.shutdown()
    in_time(took_s, 0.5)
    with pytest.raises(GroupAbortedError):
        first.all_reduce(torch.ones(1))
    second.backend.abort()


def test_shutdown_finishes_what_was_issued(pair: list[Rank]) -> None:
    first, second = pair
    received = torch.zeros(100_000)
    pending = [
        first.start(OpKind.SEND, [torch.ones(100_000)], (), peer=1),
        second.start(OpKind.RECV, (), [received], peer=0),
    ]
    on_both(pair, lambda rank: rank.backend.shutdown())
    for future in pending:
        future.result(0)
    assert received.eq(1).all()


def test_a_forgotten_group_is_closed_by_a_thread_of_ours() -> None:
    """The last reference to torch's object must not be dropped on one of its own threads: the process would
    abort."""
    before = set(threading.enumerate())
    store = HashStore()

    def lone(rank: int) -> None:
        info = info_of(rank, 2)
        spec = GroupSpec(info, store, 5.0, torch.device("cpu"), ALONE)
        Rank(create(spec)).all_reduce(torch.ones(2))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lone, range(2)))
    assert_threads_end(before)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Connection closed by peer [127.0.0.1]:1", PeerLostError),
        ("Read error: Connection reset by peer", PeerLostError),
        ("Application timeout caused pair closure", PeerLostError),
        ("Timed out waiting 10ms for recv operation to complete", OperationTimeoutError),
        ("Invalid scalar type", BackendError),
    ],
)
def test_texts_become_types(text: str, kind: type[Dist2Error]) -> None:
    cause = RuntimeError(text)
    found = error_of(cause, "this")
    assert type(found) is kind
    assert str(found) == f"this failed: {text}"
    assert found.__cause__ is cause


def test_members_that_do_not_come_are_a_timeout() -> None:
    spec = GroupSpec(info_of(0, 2), HashStore(), 0.2, torch.device("cpu"), ALONE)
    with pytest.raises(OperationTimeoutError, match="connecting group 'part' over gloo"):
        create(spec)


# Arguments


def test_unknown_options_are_named() -> None:
    spec = GroupSpec(info_of(), HashStore(), 5.0, torch.device("cpu"), {"colour": "red"})
    with pytest.raises(UnknownOptionError, match="'colour'; it has hostname, interface, control"):
        create(spec)


def test_a_tag_that_gloo_lacks_is_refused(pair: list[Rank]) -> None:
    signature = Signature(OpKind.SEND, pair[0].backend.spec.info, peer=1, tag=1 << 31)
    with pytest.raises(InvalidUsageError, match="tag must be at most 2147483647"):
        pair[0].backend.plan(signature)


# Calls


def test_a_call_that_was_broken_off_may_still_end() -> None:
    calls = Calls()
    pending = calls.begin()
    calls.break_off(GroupAbortedError("over"))
    assert isinstance(pending.exception(0), GroupAbortedError)
    with pytest.raises(GroupAbortedError, match="over"):
        calls.begin()
    calls.end(pending, None)
    calls.wait_quiet(0)
    assert isinstance(pending.exception(0), GroupAbortedError)


def test_what_comes_after_an_abort_is_left_alone(pair: list[Rank]) -> None:
    """The tensor is strided, so that the data that Gloo received would have to be copied to it."""
    first, second = pair
    strided = torch.zeros(3, 4)[:, 1]
    pending = first.start(OpKind.RECV, (), [strided], peer=1, timeout_s=5)
    first.backend.abort()
    assert isinstance(pending.exception(0), GroupAbortedError)
    second.run(OpKind.SEND, [torch.ones(3)], (), peer=0)
    first.backend.calls.wait_quiet()
    assert strided.eq(0).all()


def test_waiters_use_idle_threads_again_and_stop() -> None:
    before = set(threading.enumerate())
    waiters, used = Waiters("dist2-test"), []
    for _ in range(3):
        waiters.put(lambda: used.append(threading.get_ident()))
        while not waiters._idle._value:
            time.sleep(0.001)
    assert len(used) == 3
    assert len(set(used)) == 1
    held = threading.Event()
    waiters.put(held.wait)
    waiters.put(held.wait)
    assert len(set(threading.enumerate()) - before) == 2
    waiters.stop()
    held.set()
    assert_threads_end(before)


def test_a_closed_mailbox_frees_its_reader() -> None:
    mailbox = Mailbox()
    letter = mailbox.take(1)
    threading.Timer(0.05, mailbox.close).start()
    with pytest.raises(GroupAbortedError):
        letter.wait(timedelta(seconds=20))


def alone_over_gloo(**options: Any) -> list[float]:
    with dist2.new_group("gloo", 20, store=HashStore(), rank=0, world_size=1, **options) as pg:
        pg.all_reduce(tensor := torch.ones(2))
        return tensor.tolist()


@pytest.mark.parametrize("named", ["lo", "lo,lo"])
def test_interfaces_are_those_that_torchs_variable_names(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIST2_HOST", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert alone_over_gloo() == [1, 1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{named},nosuch0")
    with pytest.raises(BackendError, match="nosuch0"):
        alone_over_gloo()
    assert alone_over_gloo(interface="lo") == alone_over_gloo(hostname="127.0.0.1") == [1, 1]
    monkeypatch.setenv("DIST2_HOST", "127.0.0.1")
    assert alone_over_gloo() == [1, 1]
