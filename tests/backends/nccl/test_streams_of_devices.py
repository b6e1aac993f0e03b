"""Order on streams, and how long tensors live: on host memory, with streams that run late.

The tests' own work is queued on streams, as kernels are; memory that is freed is overwritten and used again.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support import nccl_stubs
from support.host_device import HostDevice

import dist2
from dist2 import (
    GroupRevokedError,
    HashStore,
    InvalidUsageError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessGroup,
)
from dist2.backends.nccl.backend import NcclBackend
from dist2.backends.socket.transport.node import Node
from dist2.errors import BackendError
from dist2.operation.stream_work import StreamWork

pytestmark = pytest.mark.skipif(bool(nccl_stubs.missing()), reason=str(nccl_stubs.missing()))

DELAY_US = 3000
ROUNDS = 20


@contextmanager
def opened(
    rank: int, world_size: int, store: HashStore, **options: Any
) -> Iterator[tuple[ProcessGroup, HostDevice]]:
    owns = options.pop("owns", lambda tensor: True)
    device, node = HostDevice(max_delay_us=DELAY_US, blocks=False, owns=owns), Node()
    try:
        with dist2.new_group(
            options.pop("backend", "nccl"),
            20,
            store=store,
            rank=rank,
            world_size=world_size,
            platform=lambda: (device, nccl_stubs.library()),
            transport="inproc",
            node=node,
            **options,
        ) as pg:
            yield pg, device
    finally:
        device.close()
        node.close()


def run(world_size: int, body: Callable[[ProcessGroup, HostDevice], object], **options: Any) -> None:
    """Run a body as each rank, on threads."""
    store, errors = HashStore(), list[BaseException]()

    def rank_main(rank: int) -> None:
        try:
            with opened(rank, world_size, store, **options) as (pg, device):
                body(pg, device)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not [thread for thread in threads if thread.is_alive()]
    if errors:
        raise errors[0]


def finished(device: HostDevice) -> None:
    """Wait until the current stream has finished its queued work."""
    done = threading.Event()
    device.run(device.current(), done.set)
    assert done.wait(30)


def filled(device: HostDevice, value: float, numel: int = 1000) -> torch.Tensor:
    """Return memory that the current stream will fill some time from now."""
    tensor = device.empty(numel, torch.float32)
    device.run(device.current(), lambda: tensor.fill_(value))
    return tensor


def test_a_synchronous_call_is_in_the_order_of_its_stream() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for _ in range(ROUNDS):
            tensor, seen = filled(device, pg.rank() + 1.0), list[float]()
            assert pg.all_reduce(tensor).is_completed()
            device.run(device.current(), lambda tensor=tensor, seen=seen: seen.append(tensor.sum().item()))
            finished(device)
            assert seen == [3000.0]

    run(2, body)


def test_an_asynchronous_call_reads_after_what_came_before_and_wait_orders_what_comes_after() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for _ in range(ROUNDS):
            tensor, seen = filled(device, pg.rank() + 1.0), list[float]()
            work = pg.all_reduce(tensor, async_op=True)
            assert isinstance(work, StreamWork)
            work.wait()
            device.run(device.current(), lambda tensor=tensor, seen=seen: seen.append(tensor.sum().item()))
            finished(device)
            assert seen == [3000.0]
            assert work.is_completed() and work.is_success()

    run(2, body)


def test_the_work_of_a_coalescing_block_orders_the_stream_and_blocks_no_thread() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for _ in range(ROUNDS):
            gate, seen = threading.Event(), list[float]()
            device.run(device.current(), gate.wait)
            tensors = [filled(device, pg.rank() + 1.0), filled(device, 5.0)]
            pg._start_coalescing()
            for tensor in tensors:
                pg.all_reduce(tensor)
            work = pg._end_coalescing()
            work.wait()  # returns before the device has begun
            assert not work.is_completed()
            device.run(
                device.current(),
                lambda tensors=tensors, seen=seen: seen.extend(map(float, map(torch.sum, tensors))),
            )
            gate.set()
            finished(device)
            assert seen == [3000.0, 10_000.0]
            assert work.wait(10)

    run(2, body)


def test_what_the_caller_forgets_lives_until_the_device_is_done() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for _ in range(ROUNDS):
            whole = device.empty(2000, torch.float32)
            work = pg.all_gather_single(whole, filled(device, pg.rank() + 1.0), async_op=True)
            gc.collect()
            others = [filled(device, -1.0) for _ in range(4)]  # takes memory that was freed, if any was
            work.wait()
            finished(device)
            assert whole.view(2, 1000).sum(1).tolist() == [1000.0, 2000.0]
            assert len(others) == 4

    run(2, body)


def test_copies_of_tensors_with_gaps_live_as_long() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for async_op in (True, False) * (ROUNDS // 2):
            whole = filled(device, pg.rank() + 1.0, 2000)
            spread = whole[::2]
            pg.all_reduce(spread, async_op=async_op).wait()
            others = [filled(device, -1.0) for _ in range(4)]
            finished(device)
            assert spread.sum().item() == 3000.0
            assert len(others) == 4

    run(2, body)


def test_several_groups_on_one_device() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        with ExitStack() as closing:
            groups = [pg, *(closing.enter_context(pg.split([0, 1])) for _ in range(2))]
            tensors = [filled(device, 1.0 + n) for n in range(3)]
            works = [
                group.all_reduce(each, async_op=True) for group, each in zip(groups, tensors, strict=True)
            ]
            for work in works:
                work.wait()
            finished(device)
            assert [each[0].item() for each in tensors] == [2.0, 4.0, 6.0]

    run(2, body)


def test_durations_are_measured_on_the_device() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        work = pg.all_reduce(filled(device, 1.0), async_op=True)
        work.wait(10)
        assert 0 < work._get_duration() < 10_000

    run(1, body, timing=True)


def test_a_future_and_a_wait_with_a_limit() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        tensor = filled(device, 1.0)
        future = pg.all_reduce(tensor, async_op=True).get_future()
        assert future.wait()[0] is tensor
        assert tensor[0].item() == 2.0
        if pg.rank() == 0:
            work = pg.all_reduce(tensor, async_op=True)
            with pytest.raises(OperationTimeoutError, match="still running"):
                work.wait(0.05)
            dist2.PrefixStore("t", pg.spec.store).set("gave up", "")
            pg.barrier(async_op=True).wait(10)
        else:
            dist2.PrefixStore("t", pg.spec.store).wait(["gave up"])
            pg.all_reduce(tensor)
            pg.barrier(async_op=True).wait(10)

    run(2, body)


def test_a_call_that_returned_and_fails_later_breaks_the_group() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        if pg.rank() == 0:
            work = pg.all_reduce(filled(device, 1.0), async_op=True, timeout=0.2)
            pg.all_reduce(filled(device, 1.0), timeout=0.2)  # returns: it is only queued
            with pytest.raises(OperationTimeoutError, match=r"rank 1 did not arrive") as caught:
                work.wait(10)
            assert caught.value.missing == (1,)
            with pytest.raises(OperationTimeoutError, match="cannot be used any more"):
                pg.all_reduce(filled(device, 1.0))
            finished(device)  # the stream is free again
            dist2.PrefixStore("t", pg.spec.store).set("over", "")
        else:
            dist2.PrefixStore("t", pg.spec.store).wait(["over"])

    run(2, body)


def test_an_asynchronous_error_of_nccl_breaks_the_group() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        backend = pg.backend
        assert isinstance(backend, NcclBackend)
        if pg.rank() == 0:
            communicators = backend._launcher.communicators
            assert communicators is not None
            nccl_stubs.stub().stub_set_async_error(communicators.main.handle, 6)
            work = pg.all_reduce(filled(device, 1.0), async_op=True)
            with pytest.raises(BackendError, match="remote process exited"):
                work.wait(10)
            dist2.PrefixStore("t", pg.spec.store).set("over", "")
        else:
            dist2.PrefixStore("t", pg.spec.store).wait(["over"])

    run(2, body)


def test_a_failed_member_is_the_cause_of_an_error_of_nccl_that_was_seen_first() -> None:
    was_seen = threading.Event()

    def body(pg: ProcessGroup, device: HostDevice) -> None:
        if pg.rank() == 1:
            assert was_seen.wait(10)
            pg.abort()
            return
        backend = pg.backend
        assert isinstance(backend, NcclBackend)
        communicators = backend._launcher.communicators
        assert communicators is not None
        seen = communicators.main.async_error

        def see() -> BackendError | None:
            error = seen()
            if error is not None:
                was_seen.set()
            return error

        communicators.main.async_error = see  # type: ignore[method-assign]  # the moment is known so
        nccl_stubs.stub().stub_set_async_error(communicators.main.handle, 6)
        work = pg.all_reduce(filled(device, 1.0), async_op=True)
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            work.wait(10)
        assert caught.value.ranks == (1,)
        finished(device)  # the stream is free again

    run(2, body)


def test_ranks_that_both_send_first_are_connected() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        for _ in range(3):
            got, seen = device.empty(1000, torch.float32), list[float]()
            sending = pg.isend(filled(device, pg.rank() + 1.0), 1 - pg.rank())
            pg.recv(got, 1 - pg.rank())
            device.run(device.current(), lambda got=got, seen=seen: seen.append(got.sum().item()))
            sending.wait()
            finished(device)
            assert seen == [1000.0 * (2 - pg.rank())]

    run(2, body)


def test_messages_behind_a_first_one_keep_their_order() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        store = dist2.PrefixStore("t", pg.spec.store)
        if pg.rank() == 0:
            works = [pg.isend(filled(device, float(number)), 1) for number in range(5)]
            store.set("sent", "")  # all of them before the first receive
            for work in works:
                work.wait(10)
            return
        store.wait(["sent"])
        got = [device.empty(1000, torch.float32) for _ in range(5)]
        for each in got:
            pg.irecv(each, 0).wait()
        seen = list[float]()
        device.run(device.current(), lambda: seen.extend(each[-1].item() for each in got))
        finished(device)
        assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]

    run(2, body)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_first_message_that_no_rank_receives_has_a_deadline(is_async: bool) -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        store = dist2.PrefixStore("t", pg.spec.store)
        if pg.rank() == 1:
            return store.wait(["over"])
        tensor = filled(device, 1.0)
        with pytest.raises(OperationTimeoutError, match=r"rank 1 did not arrive") as caught:
            if is_async:
                pg.isend(tensor, 1, timeout=0.2).wait(10)
            else:
                pg.send(tensor, 1, timeout=0.2)
        assert caught.value.missing == (1,)
        finished(device)
        return store.set("over", "")

    run(2, body)


def test_each_tensor_goes_where_it_belongs() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        on_device, on_cpu = torch.full((5,), pg.rank() + 1.0, dtype=torch.float64), torch.full((5,), 1.0)
        works = [pg.all_reduce(each) for each in (on_device, on_cpu)]
        finished(device)
        assert [work.operation.seq for work in works] == [1, 2]
        assert on_device.tolist() == [3.0] * 5
        assert on_cpu.tolist() == [2.0] * 5
        assert pg.all_gather_object(pg.rank()) == [0, 1]
        if pg.rank() == 0:
            assert pg.recv_object() == ("from any rank", 1)
        else:
            pg.send_object("from any rank", 0)
        with pytest.raises(InvalidUsageError, match="all be on the group's device or all on the CPU"):
            pg.all_reduce_coalesced([on_device, on_cpu])
        pg.barrier()

    owns = lambda tensor: tensor.dtype is torch.float64  # noqa: E731 - which tensors play those of the device
    run(2, body, owns=owns, backend="cpu:socket,cuda:nccl")


def test_a_barrier_comes_after_what_was_queued() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        tensor = filled(device, 1.0)
        work = pg.all_reduce(tensor, async_op=True)
        pg.barrier()
        assert work.is_completed()
        assert tensor[0].item() == 2.0

    run(2, body)


def test_a_blocking_group_raises_at_the_call() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        if pg.rank() == 0:
            with pytest.raises(OperationTimeoutError, match=r"rank 1 did not arrive"):
                pg.all_reduce(filled(device, 1.0), timeout=0.2)
            dist2.PrefixStore("t", pg.spec.store).set("over", "")
        else:
            dist2.PrefixStore("t", pg.spec.store).wait(["over"])

    run(2, body, blocking=True)


def test_a_group_whose_communicators_are_made_with_its_first_operation() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        pg.barrier()
        for _ in range(2):
            tensor = filled(device, 1.0)
            pg.all_reduce(tensor, async_op=True).wait()
            finished(device)
            assert tensor[0].item() == 2.0

    run(2, body, eager=False)


def test_a_mismatch_is_told_on_all_ranks_without_waiting_for_each_call() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        with pytest.raises(MismatchError) as caught:
            pg.all_reduce(filled(device, 1.0, 30 + pg.rank()), async_op=True)
            pg.barrier()
        assert "float32[30]" in str(caught.value)
        assert "float32[31]" in str(caught.value)
        finished(device)  # the stream is free again

    run(2, body)


def test_a_strict_group_compares_before_anything_moves() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        tensor = torch.ones(30 + pg.rank())
        with pytest.raises(MismatchError, match=r"float32\[31\]"):
            pg.all_reduce(tensor)
        finished(device)
        assert tensor.tolist() == [1.0] * tensor.numel()

    run(2, body, strict=True)


def test_a_deadline_behind_a_later_one_counts() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        if pg.rank() == 0:
            first = pg.all_reduce(filled(device, 1.0), async_op=True, timeout=30)
            second = pg.all_reduce(filled(device, 1.0), async_op=True, timeout=0.2)
            for work in (second, first):
                with pytest.raises(OperationTimeoutError, match=r"rank 1 did not arrive"):
                    work.wait(10)
            dist2.PrefixStore("t", pg.spec.store).set("over", "")
        else:
            dist2.PrefixStore("t", pg.spec.store).wait(["over"])

    run(2, body)


def test_what_fails_before_the_launch_is_told_to_the_others() -> None:
    def body(pg: ProcessGroup, device: HostDevice) -> None:
        if pg.rank() == 0:

            def full(numel: int, dtype: torch.dtype) -> torch.Tensor:
                raise MemoryError("the device is full")

            tensor = filled(device, 1.0, 100)[::2]  # needs a copy
            device.empty = full  # type: ignore[method-assign]  # for the test
            with pytest.raises(MemoryError):
                pg.all_reduce(tensor)
        else:
            with pytest.raises(GroupRevokedError):
                pg.all_reduce(filled(device, 1.0, 50), async_op=True).wait(10)

    run(2, body)
