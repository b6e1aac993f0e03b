"""The instruments as every process has them, on groups that move tensors: two ranks as threads."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest
import torch
from support.ranks import Tenant, run_ranks
from support.torch_analyser import analyse, complaints

import observability
from dist2 import OperationTimeoutError, ProcessGroup, add_instrument
from dist2.operation.signature import GroupInfo
from observability.entries import entries_of
from observability.flight_recorder import FlightRecorder, RecordedError
from observability.flight_recorder import instrument as recorder
from observability.metrics import instrument as metrics
from observability.scrape import Scrape

TENANTS = (Tenant("gloo", "gloo"), Tenant("inproc", "socket", {"transport": "inproc"}))

pytestmark = pytest.mark.parametrize("tenant", TENANTS, ids=str)


def scrape(server: observability.Server) -> Scrape:
    return observability.read_metrics(server.url, server.token)


def test_every_operation_of_a_group_is_counted(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> GroupInfo:
        tensor = torch.ones(2)
        for _ in range(5):
            pg.all_reduce(tensor)
        pg.all_reduce(tensor, async_op=True).wait()
        pg.broadcast(torch.ones(1000), root=1)
        if pg.rank() == 0:
            pg.send(tensor, 1)
        else:
            pg.recv(tensor, 0)
        return pg.info

    with observability.start() as server:
        names = {info.name for info in run_ranks(2, body, tenant)}
        seen = scrape(server)

    def total(name: str, **labels: str) -> float:
        """Sum over both ranks, whether or not their groups bear one name."""
        return sum(seen.value(name, group=group, **labels) for group in names)

    assert (
        total("dist2_operations_total", op="all_reduce", size_le_bytes="64", backend=tenant.backend) == 2 * 6
    )
    assert total("dist2_bytes_total", op="all_reduce") == 2 * 6 * 8
    assert total("dist2_bytes_total", op="broadcast", size_le_bytes=str(16 << 10)) == 2 * 4000
    assert total("dist2_operations_total", op="send") == total("dist2_operations_total", op="recv") == 1
    assert total("dist2_errors_total") == 0
    ranks: list[str] = []
    for name in names:
        assert 0 < seen.quantile(0.5, op="all_reduce", group=name) < 10
        last = list(
            seen.samples("dist2_last_sequence_number", group=name, numbering="collective", state="ended")
        )
        assert {each.value for each in last} == {7}
        ranks += [each.labels["rank"] for each in last]
    assert sorted(ranks) == ["0", "1"]


def test_the_call_in_user_code_is_recorded(tenant: Tenant) -> None:
    def body(pg: ProcessGroup) -> None:
        pg.barrier()

    run_ranks(2, body, tenant)
    latest = recorder.operations()[-1]
    assert latest.code is not None
    assert Path(latest.code.co_filename) == Path(__file__)
    assert latest.code.co_name == "body"
    assert Path(__file__).read_text().splitlines()[latest.line - 1].strip() == "pg.barrier()"


def test_the_dump_of_a_real_run_satisfies_the_analyser(tenant: Tenant, tmp_path: Path) -> None:
    def body(pg: ProcessGroup) -> str:
        mine, everyone = torch.ones(3), [torch.empty(3) for _ in range(2)]
        pg.all_reduce(mine)
        pg.reduce(mine, root=1)
        pg.all_gather(everyone, mine)
        pg.gather(everyone if pg.rank() == 0 else [], mine, root=0)
        pg.scatter(mine, everyone if pg.rank() == 0 else [], root=0)
        pg.reduce_scatter(mine, everyone)
        pg.all_to_all(everyone, [mine, mine])
        pg.all_reduce(mine, async_op=True).wait()
        pg.barrier()
        pairs = [pg.isend(mine, 1 - pg.rank()), pg.irecv(everyone[0], 1 - pg.rank())]
        for work in pairs:
            work.wait()
        pg.barrier()
        return pg.info.uid

    # A separate recorder: earlier operations of this process must not be in the ring.
    fresh = FlightRecorder()
    remove = add_instrument(fresh)
    try:
        uid, _ = run_ranks(2, body, tenant)
    finally:
        remove()
    for rank in range(2):
        path = fresh.dump(tmp_path / "flight_{rank}", rank=rank)
        dump = pickle.loads(path.read_bytes())
        dump["entries"] = [each for each in dump["entries"] if each["process_group"][0].startswith(uid)]
        dump["pg_config"] = {name: each for name, each in dump["pg_config"].items() if name.startswith(uid)}
        assert len(dump["entries"]) == 12
        path.write_bytes(pickle.dumps(dump))
    collectives, said = analyse(tmp_path)
    assert complaints(said) == []
    assert len(collectives) == 12
    assert all(each.pass_check for each in collectives)


def test_a_rank_that_does_not_come_is_seen_by_all_means(tenant: Tenant) -> None:
    given_up = threading.Event()

    def body(pg: ProcessGroup) -> GroupInfo:
        if pg.rank() == 1:
            assert given_up.wait(20)
            return pg.info
        with pytest.raises(OperationTimeoutError):
            pg.all_reduce(torch.ones(2), timeout=0.3)
        given_up.set()
        return pg.info

    with observability.start() as server:
        waited, _ = run_ranks(2, body, tenant)
        seen = scrape(server)
    assert seen.value("dist2_errors_total", group=waited.name, error="OperationTimeoutError") == 1
    assert waited not in {operation.signature.group for operation in metrics.in_flight()}
    failure = metrics.statuses.failures()[0]
    assert (failure.group, failure.op, failure.group_usable) == (waited, "all_reduce", False)
    (status,) = [status for status in metrics.statuses.groups() if status.info is waited]
    assert status.broken_by is failure
    (recorded,) = [each for each in recorder.operations() if each.signature.group is waited]
    assert isinstance(recorded.error, RecordedError)
    assert recorded.error.type_name == "OperationTimeoutError"


def test_a_group_that_is_renamed_is_still_one_group(tenant: Tenant) -> None:
    """torch names each group that it makes, after it is open."""

    def body(pg: ProcessGroup) -> None:
        pg.all_reduce(torch.ones(2))
        before, waited = pg.info, metrics.waited([pg])
        pg.setGroupName(f"renamed {pg.rank()}")
        pg.setGroupDesc("default_pg")
        pg.all_reduce(torch.ones(2))
        known = [each for each in metrics.statuses.groups() if each.info.uid == before.uid]
        mine = [(each.info, each.state) for each in known if each.info.rank == pg.rank()]
        assert mine == [(pg.info, "open")]
        told, _ = entries_of(recorder, pg.rank())
        assert [len(each.called_ns) for each in told if each.uid == pg.info.uid] == [1]
        key, later = metrics.group_key(before), metrics.waited([pg])
        assert later.get(key, 0) == 0
        assert later.get(metrics.group_key(pg.info), 0) >= waited.get(key, 0)

    run_ranks(2, body, tenant)
