"""Bad arguments: each is refused by name and value before anything is sent, and the group still works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import TENANTS, run_ranks
from torch.distributed import ReduceOp

import dist2
from dist2 import Dist2Error, InvalidUsageError, ProcessGroup, UnknownBackendError, UnknownOptionError
from dist2.errors import ArgumentTypeError
from dist2.operation.validation import check_writable

WORLD = 2
Call = Callable[[ProcessGroup], object]
F32, F64 = torch.float32, torch.float64


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def pair(*shape: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [ones(*shape, dtype=dtype) for _ in range(WORLD)]


def expanded() -> torch.Tensor:
    return torch.ones(1).expand(3)


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)


# Wrong values in place of a tensor, for any operation: the value, and the message about it
NO_TENSOR: dict[str, tuple[Any, str]] = {
    "None": (lambda: None, "must be a torch.Tensor, got NoneType: None"),
    "a number": (lambda: 3.5, "must be a torch.Tensor, got float: 3.5"),
    "a string": (lambda: "x", "must be a torch.Tensor, got str: 'x'"),
    "on meta": (
        lambda: torch.ones(3, device="meta"),
        "is on device meta; this group's backend takes cpu, cuda: give it memory with Module.to_empty",
    ),
    "sparse": (sparse, "must be a dense (strided) tensor, got layout torch.sparse_coo"),
}
NO_LIST: dict[str, tuple[Any, str]] = {
    "None": (lambda: None, "must be a list of tensors, got NoneType: None"),
    "a tensor": (lambda: ones(WORLD, 3), "must be a list of tensors, got Tensor"),
    "a generator": (lambda: (ones(3) for _ in range(WORLD)), "must be a list of tensors, got generator"),
    "with a hole": (lambda: [ones(3), None], "[1] must be a torch.Tensor, got NoneType"),
    "half on meta": (lambda: [ones(3), torch.ones(3, device="meta")], "[1] is on device meta"),
}
NOT_ONE_EACH: dict[str, tuple[Any, str]] = {
    "too few": (lambda: pair(3)[:1], "must hold one tensor for each of the 2 ranks, got 1"),
    "too many": (lambda: pair(3) * 2, "must hold one tensor for each of the 2 ranks, got 4"),
    "empty": (list, "must hold one tensor for each of the 2 ranks, got 0"),
    "another dtype": (lambda: pair(3, dtype=F64), "[0] has dtype torch.float64, but "),
}
UNEVEN = {"another size": (lambda: [ones(3), ones(4)], "[1] has shape [4] (4 elements), but ")}
SHARED = {
    "shared memory": (expanded, "is written to, but its elements share memory (shape [3], strides [0])"),
}
SHARED_LIST = {
    "shared memory": (lambda: [ones(3), expanded()], "[1] is written to, but its elements share"),
    "the same twice": (lambda: [ones(3)] * 2, "[1] share memory, and each is written to"),
    "crossing": (lambda: list(ones(5).unfold(0, 3, 2)), "[1] share memory"),
}
LISTED = {**NO_LIST, **NOT_ONE_EACH}

ROOTS: dict[str, tuple[Any, str]] = {
    "negative": (lambda: -1, "must be a group rank between 0 and 1, got -1"),
    "too large": (lambda: WORLD, "must be a group rank between 0 and 1, got 2"),
    "a string": (lambda: "0", "must be a group rank (int), got '0' (str)"),
    "a float": (lambda: 0.5, "must be a group rank (int), got 0.5 (float)"),
    "None": (lambda: None, "must be a group rank (int), got None (NoneType)"),
}
REDUCTIONS: dict[str, tuple[Any, str]] = {
    "a string": (lambda: "sum", "must be a ReduceOp, got 'sum' (str)"),
    "None": (lambda: None, "must be a ReduceOp, got None (NoneType)"),
    "no factor": (lambda: ReduceOp.PREMUL_SUM, "must be a ReduceOp, got "),
    "bits of floats": (lambda: ReduceOp.BAND, "float32"),
}
TIMEOUTS: dict[str, tuple[Any, str]] = {
    "zero": (lambda: 0, "must be positive, got 0"),
    "negative": (lambda: timedelta(seconds=-1), "must be positive"),
    "a string": (lambda: "soon", "must be a timedelta or a number of seconds, got 'soon' (str)"),
    "not a number": (lambda: float("nan"), "must be positive, got nan"),
}
SPLITS: dict[str, tuple[Any, str]] = {
    "a number": (lambda: 3, "must be a list of ints, or None; got 3 (int)"),
    "a string": (lambda: "13", "must be a list of ints, or None; got '13' (str)"),
    "floats": (lambda: [2.0, 2.0], "[0] must be a count of rows, got 2.0"),
    "negative": (lambda: [5, -1], "[1] must be a count of rows, got -1"),
    "too few": (lambda: [4], "must be 2 counts, one a rank, got [4]"),
    "a wrong sum": (lambda: [3, 3], "must add up to the 4 rows of "),
    "a small sum": (lambda: [1, 2], "must add up to the 4 rows of "),
}
TAGS: dict[str, tuple[Any, str]] = {
    "negative": (lambda: -1, "tag must be an int between 0 and 2**62 - 1, got -1"),
    "a string": (lambda: "x", "got 'x'"),
    "huge": (lambda: 1 << 62, f"got {1 << 62}"),
}

# By operation: how to call it with keywords, valid arguments, and which arguments take which mistakes
GOOD: dict[str, dict[str, Any]] = {
    "all_reduce": {"tensor": lambda: ones(3)},
    "all_reduce_coalesced": {"tensors": lambda: pair(3)},
    "broadcast": {"tensor": lambda: ones(3)},
    "reduce": {"tensor": lambda: ones(3)},
    "all_gather": {"outputs": lambda: pair(3), "input": lambda: ones(3)},
    "all_gather_v": {"outputs": lambda: pair(3), "input": lambda: ones(3)},
    "all_gather_single": {"output": lambda: ones(6), "input": lambda: ones(3)},
    "all_gather_single_coalesced": {"outputs": lambda: pair(6), "inputs": lambda: pair(3)},
    "reduce_scatter": {"output": lambda: ones(3), "inputs": lambda: pair(3)},
    "reduce_scatter_v": {"output": lambda: ones(3), "inputs": lambda: pair(3)},
    "reduce_scatter_single": {"output": lambda: ones(3), "input": lambda: ones(6)},
    "reduce_scatter_single_coalesced": {"outputs": lambda: pair(3), "inputs": lambda: pair(6)},
    "all_to_all": {"outputs": lambda: pair(3), "inputs": lambda: pair(3)},
    "all_to_all_single": {"output": lambda: ones(4), "input": lambda: ones(4)},
    "barrier": {},
}
REDUCING = {name for name in GOOD if "reduce" in name}
WRONG: dict[tuple[str, str], dict[str, tuple[Any, str]]] = {
    ("all_reduce", "tensor"): {name: NO_TENSOR[name] for name in NO_TENSOR if name != "sparse"} | SHARED,
    ("all_reduce_coalesced", "tensors"): {**NO_LIST, **SHARED_LIST},
    ("broadcast", "tensor"): NO_TENSOR,  # one that shares memory: test_odd_tensors.py
    ("broadcast", "root"): ROOTS,
    ("reduce", "tensor"): NO_TENSOR,
    ("reduce", "root"): ROOTS,
    ("all_gather", "outputs"): {**LISTED, **UNEVEN, **SHARED_LIST},
    ("all_gather", "input"): NO_TENSOR,
    ("all_gather_v", "outputs"): {**LISTED, **SHARED_LIST},
    ("all_gather_v", "input"): NO_TENSOR,
    ("all_gather_single", "output"): {
        **NO_TENSOR,
        "another size": (
            lambda: ones(5),
            "must hold 2 times the 3 elements of input (shape [3]), got shape [5]",
        ),
        "another dtype": (lambda: ones(6, dtype=F64), "has dtype torch.float64, but input has torch.float32"),
        "shared memory": (lambda: torch.ones(1).expand(6), "is written to, but its elements share memory"),
    },
    ("all_gather_single", "input"): NO_TENSOR,
    ("all_gather_single_coalesced", "outputs"): {
        **NO_LIST,
        "too few": (lambda: pair(6)[:1], "must be as many as inputs, got 1 and 2"),
        "another size": (lambda: [ones(6), ones(7)], "[1] must hold 2 times the 3 elements of inputs[1]"),
        "shared memory": (
            lambda: [ones(6), torch.ones(1).expand(6)],
            "[1] is written to, but its elements share memory",
        ),
    },
    ("all_gather_single_coalesced", "inputs"): NO_LIST,
    ("reduce_scatter", "output"): {**NO_TENSOR, **SHARED},
    ("reduce_scatter", "inputs"): {**LISTED, **UNEVEN},
    ("reduce_scatter_v", "output"): {**NO_TENSOR, **SHARED},
    ("reduce_scatter_v", "inputs"): LISTED,
    ("reduce_scatter_single", "output"): {**NO_TENSOR, **SHARED},
    ("reduce_scatter_single", "input"): {
        **NO_TENSOR,
        "another size": (lambda: ones(7), "must hold 2 times the 3 elements of output"),
    },
    ("reduce_scatter_single_coalesced", "outputs"): {**NO_LIST, **SHARED_LIST},
    ("reduce_scatter_single_coalesced", "inputs"): {
        **NO_LIST,
        "too many": (lambda: pair(6) * 2, "must be as many as outputs, got 4 and 2"),
    },
    ("all_to_all", "outputs"): {**LISTED, **SHARED_LIST},
    ("all_to_all", "inputs"): {name: LISTED[name] for name in LISTED if name != "another dtype"},
    ("all_to_all_single", "output"): {
        **NO_TENSOR,
        "another dtype": (lambda: ones(4, dtype=F64), "has dtype torch.float64"),
        "odd rows": (lambda: ones(5), "has 5 rows (shape [5]), which 2 ranks cannot share equally"),
    },
    ("all_to_all_single", "input"): NO_TENSOR,
    ("all_to_all_single", "output_splits"): SPLITS,
    ("all_to_all_single", "input_splits"): SPLITS,
    **{(name, "op"): REDUCTIONS for name in GOOD if name in REDUCING},
    **{(name, "timeout"): TIMEOUTS for name in GOOD},
}


def at_root(pg: ProcessGroup, make: Callable[[], Any]) -> Any:
    return make() if pg.rank() == 0 else None


def rooted_cases() -> Iterator[tuple[str, Call, str]]:
    """Yield the mistakes in operations whose list only the root gives; rank 0 is it."""
    for name, (make, said) in {**LISTED, **UNEVEN, **SHARED_LIST}.items():
        if name in ("None", "empty"):
            continue  # fine elsewhere
        yield (
            f"gather-outputs-{name}",
            lambda pg, make=make: pg.gather(make(), ones(3)),
            f"outputs.*{re.escape(said)}",
        )
        if name not in SHARED_LIST:  # inputs may share memory
            yield (
                f"scatter-inputs-{name}",
                lambda pg, make=make: pg.scatter(ones(3), make()),
                f"inputs.*{re.escape(said)}",
            )
    for name, (make, said) in ROOTS.items():
        yield f"gather-root-{name}", lambda pg, make=make: pg.gather(None, ones(3), make()), re.escape(said)
        yield f"scatter-root-{name}", lambda pg, make=make: pg.scatter(ones(3), None, make()), re.escape(said)
    for name, (make, said) in NO_TENSOR.items():
        yield (
            f"gather-input-{name}",
            lambda pg, make=make: pg.gather(at_root(pg, lambda: pair(3)), make()),
            f"input {re.escape(said)}",
        )
        yield (
            f"scatter-output-{name}",
            lambda pg, make=make: pg.scatter(make(), at_root(pg, lambda: pair(3))),
            f"output {re.escape(said)}",
        )
    elsewhere = r"must be None or empty on ranks other than the root 0, got 2 tensors on rank 1"
    yield "gather-not the root", lambda pg: pg.gather(pair(3), ones(3)), f"outputs {elsewhere}"
    yield "scatter-not the root", lambda pg: pg.scatter(ones(3), pair(3)), f"inputs {elsewhere}"


def message_cases() -> Iterator[tuple[str, Call, str]]:
    """Yield the mistakes in point-to-point calls."""
    for method, peer in (("send", "dst"), ("recv", "src"), ("isend", "dst"), ("irecv", "src")):
        for name, (make, said) in NO_TENSOR.items():
            yield (
                f"{method}-tensor-{name}",
                lambda pg, method=method, make=make: getattr(pg, method)(make(), 0),
                f"tensor {re.escape(said)}",
            )
        for name, (make, said) in ROOTS.items():
            if name == "None" and peer == "src":
                continue  # receives from any
            yield (
                f"{method}-{peer}-{name}",
                lambda pg, method=method, make=make: getattr(pg, method)(ones(3), make()),
                f"{peer} {re.escape(said)}",
            )
        for name, (make, said) in TAGS.items():
            yield (
                f"{method}-tag-{name}",
                lambda pg, method=method, make=make: getattr(pg, method)(ones(3), 0, make()),
                re.escape(said),
            )
        for name, (make, said) in TIMEOUTS.items():
            yield (
                f"{method}-timeout-{name}",
                lambda pg, method=method, make=make: getattr(pg, method)(ones(3), 0, timeout=make()),
                f"timeout {re.escape(said)}",
            )
    yield "recv-shared", lambda pg: pg.recv(expanded(), 0), "tensor is written to"


def collective_cases() -> Iterator[tuple[str, Call, str]]:
    """Yield the mistakes in every collective, one argument at a time."""
    for (op, argument), mistakes in WRONG.items():
        for name, (make, said) in mistakes.items():

            def call(pg: ProcessGroup, op: str = op, argument: str = argument, make: Any = make) -> object:
                arguments = {key: good() for key, good in GOOD[op].items()}
                return getattr(pg, op)(**{**arguments, argument: make()})

            named = "" if name == "bits of floats" else f"{argument}.*"
            yield f"{op}-{argument}-{name}", call, f"{named}{re.escape(said)}"


KINDS = {"collectives": collective_cases, "rooted": rooted_cases, "messages": message_cases}


@pytest.mark.parametrize("known", [False, True], ids=["first call", "after a good call"])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments(kind: str, known: bool) -> None:
    """Every rank makes every mistake; nothing was sent or numbered, and the group works."""
    cases = list(KINDS[kind]())
    assert len({name for name, _, _ in cases}) == len(cases)

    def body(pg: ProcessGroup) -> list[str]:
        if known:  # signatures that are planned already are checked all the same
            for op, good in GOOD.items():
                getattr(pg, op)(**{key: make() for key, make in good.items()})
            pg.all_reduce(torch.ones(6)[::2])
        before = pg._get_sequence_number_for_group(), pg.p2p_seq
        unseen = []
        for name, call, message in cases:
            if "not the root" in name and pg.rank() == 0:
                continue
            if pg.rank() == 1 and name.startswith(("gather-outputs", "scatter-inputs")):
                continue  # refused there for another reason
            try:
                call(pg)
            except InvalidUsageError as error:
                if not re.search(message, str(error), re.DOTALL):
                    unseen.append(f"{name}: {message!r} is not in {str(error)!r}")
            except Exception as error:  # noqa: BLE001 - reported with its case
                unseen.append(f"{name}: {error!r}")
            else:
                unseen.append(f"{name}: nothing was raised")
        if not unseen:
            assert (pg._get_sequence_number_for_group(), pg.p2p_seq) == before
            assert pg.get_error() is None
        return unseen

    for unseen in run_ranks(WORLD, body, TENANTS[0]):
        assert not unseen, "\n".join(unseen)


def test_the_group_works_after_a_mistake_on_one_rank() -> None:
    def body(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            with pytest.raises(InvalidUsageError):
                pg.all_reduce(torch.ones(3), ReduceOp.BXOR)
        total = torch.ones(3)
        pg.all_reduce(total)
        assert torch.equal(total, torch.full((3,), 2.0))

    run_ranks(WORLD, body, TENANTS[0])


def test_an_endless_timeout_is_allowed() -> None:
    def body(pg: ProcessGroup) -> None:
        assert pg.barrier(timeout=float("inf")).is_completed()
        assert pg.barrier(timeout=timedelta.max).is_completed()

    run_ranks(WORLD, body, TENANTS[0])


NEW_GROUPS: dict[str, tuple[dict[str, Any], type[Dist2Error], str]] = {
    "backend": ({"backend": "smoke"}, UnknownBackendError, "backend must be one of .*socket.*; got 'smoke'"),
    "backend type": ({"backend": 3}, InvalidUsageError, r"backend must be a name, got 3 \(int\)"),
    "option": (
        {"colour": 1},
        UnknownOptionError,
        "backend 'socket' has no option 'colour'; it has transport",
    ),
    "transport": ({"transport": "pigeon"}, InvalidUsageError, "transport must be one of .*; got 'pigeon'"),
    "algorithm": ({"algorithm": 3}, InvalidUsageError, r"algorithm must be a str, got 3 \(int\)"),
    "deterministic": ({"deterministic": "yes"}, InvalidUsageError, "deterministic must be a bool, got 'yes'"),
    "device": ({"device": "abacus"}, InvalidUsageError, "device must name a torch device, got 'abacus'"),
    "other device": ({"device": "cuda"}, InvalidUsageError, "device must be 'cpu' .* got 'cuda'"),
    "timeout": ({"timeout": 0}, InvalidUsageError, "timeout must be positive, got 0"),
    "rank": ({"rank": 1}, InvalidUsageError, "rank must be a group rank between 0 and 0, got 1"),
    "no rank": ({"rank": None}, InvalidUsageError, "give rank and world_size too, got rank=None"),
    "world_size": ({"world_size": 0}, InvalidUsageError, "world_size must be a positive int, got 0"),
    "store": ({"store": {}}, ArgumentTypeError, r"store must be a torch or dist2 Store, got \{\}"),
    "both": ({"init_method": "env://"}, InvalidUsageError, "give store or init_method, not both"),
}


@pytest.mark.parametrize("name", NEW_GROUPS)
def test_bad_arguments_of_new_group(name: str) -> None:
    wrong, kind, message = NEW_GROUPS[name]
    good = {"backend": "socket", "timeout": 5, "store": dist2.HashStore(), "rank": 0, "world_size": 1}
    with pytest.raises(kind, match=message):
        dist2.new_group(**{**good, **wrong})


LIKE_ONE: dict[str, Call] = {
    "broadcast": lambda pg: pg.broadcast(ones(3), True),
    "broadcast-float": lambda pg: pg.broadcast(ones(3), 1.0),
    "reduce": lambda pg: pg.reduce(ones(3), True),
    "gather": lambda pg: pg.gather(at_root_one(pg), ones(3), True),
    "scatter": lambda pg: pg.scatter(ones(3), at_root_one(pg), True),
    "send": lambda pg: pg.send(ones(3), True),
    "isend": lambda pg: pg.isend(ones(3), 1.0),
    "send-tag": lambda pg: pg.send(ones(3), 1, True),
    "irecv": lambda pg: pg.irecv(ones(3), True),
    "irecv-tag": lambda pg: pg.irecv(ones(3), 1, 1.0),
}


def at_root_one(pg: ProcessGroup) -> list[torch.Tensor] | None:
    return pair(3) if pg.rank() == 1 else None


@pytest.mark.parametrize("name", LIKE_ONE)
def test_what_equals_a_rank_is_refused_also_where_the_plan_is_known(name: str) -> None:
    def body(pg: ProcessGroup) -> None:
        pg.broadcast(ones(3), 1)
        pg.reduce(ones(3), 1)
        pg.gather(at_root_one(pg), ones(3), 1)
        pg.scatter(ones(3), at_root_one(pg), 1)
        for tag in (0, 1):
            works = [pg.isend(ones(3), 1, tag), pg.isend(ones(3), 0, tag)]
            works += [pg.irecv(ones(3), 1, tag), pg.irecv(ones(3), 0, tag)]
            for work in works:
                work.wait()
        with pytest.raises(InvalidUsageError, match=r"(root|dst|src|tag) must be"):
            LIKE_ONE[name](pg)
        pg.barrier()

    run_ranks(WORLD, body, TENANTS[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # said once in a process
def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([ones(2), ones(3)])

    def body(pg: ProcessGroup) -> None:
        for call in (lambda: pg.all_reduce(nested), lambda: pg.reduce(nested), lambda: pg.send(nested, 0)):
            with pytest.raises(InvalidUsageError, match=r"tensor must be a dense .* got layout nested"):
                call()

    run_ranks(WORLD, body, TENANTS[0])


class Like:
    """An int as numpy has them: it says which one it is, and is none."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"int64({self.value})"


def test_what_counts_as_an_int_is_one() -> None:
    one, two, last = Like(1), Like(2), Like(1)

    def body(pg: ProcessGroup) -> None:
        rank = pg.rank()
        for _ in range(2):
            pg.broadcast(told := torch.full((2,), float(rank)), one)
            assert told.tolist() == [1.0] * 2
            pg.reduce(total := ones(2), last)
            assert total.tolist() == [1.0 + rank] * 2
            parts = [torch.zeros(2) for _ in range(2)] if rank else None
            pg.gather(parts, told, one)
            pg.scatter(told, parts, one)
            pg.all_to_all_single(torch.zeros(4), ones(4), [two, two], (two, two))
            pg.send(told, Like(rank), two)
            pg.recv(told, Like(rank), two)
        with pytest.raises(InvalidUsageError, match=r"root must be a group rank between 0 and 1, got 2 "):
            pg.broadcast(told, two)
        with pytest.raises(InvalidUsageError, match=r"input_splits\[1\] must be a count.*got int64\(-1\)"):
            pg.all_to_all_single(ones(4), ones(4), [2, 2], [5, Like(-1)])
        with pytest.raises(InvalidUsageError, match=r"root must be a group rank \(int\), got tensor\(1\)"):
            pg.broadcast(told, torch.tensor(1))
        assert pg.group_rank(one) == 1
        answer = pg.agree(Like(6 + rank))
        assert answer.flags == 6
        colored = pg.split_by(Like(3), Like(-rank), timeout=Fraction(9, 2))
        assert colored is not None
        assert (colored.rank(), colored.size(), colored.timeout_s) == (1 - rank, 2, 4.5)
        equal = pg.split_by(rank == 0)
        assert equal is not None
        assert equal.size() == 1
        pg.barrier(timeout=Fraction(50))
        both = pg.split([one, Like(0)])
        assert both is not None
        assert both.rank() == 1 - rank
        assert list(map(type, both.info.global_ranks)) == [int, int]
        both.shutdown()
        for group in (colored, equal):
            group.shutdown()

    run_ranks(2, body, TENANTS[0])


def test_what_counts_as_an_int_is_one_where_groups_are_made(tmp_path: Path) -> None:
    store = dist2.HashStore()
    sizes: dict[str, Any] = {"rank": Like(0), "world_size": Like(1)}
    with dist2.new_group("socket", store=store, timeout=Fraction(9), **sizes) as pg:  # type: ignore[call-overload]  # stubs have no real numbers
        assert (pg.size(), pg.timeout_s) == (1, 9.0)
        assert type(pg.size()) is int
        merged = pg.merge_remote_group(dist2.HashStore(), Like(1), timeout=5)
        assert merged.size() == 1
        merged.shutdown()
    assert store.add("count", Like(3)) == 3
    assert store.get("count") == b"3"
    store.barrier("all", Like(1), Fraction(1))
    assert dist2.shared_empty(Like(2), Like(3)).shape == (2, 3)
    with dist2.new_group("socket", init_method=f"file://{tmp_path}/meet", **sizes) as pg:
        assert (pg.rank(), pg.size()) == (0, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pg: pg.group_rank(True), "global_rank True is not in group"),
        (lambda pg: pg.group_rank(0.0), "global_rank 0.0 is not in group"),
        (lambda pg: pg.agree(1.0), "flags must be an int that fits 64 bits, signed, got 1.0"),
        (lambda pg: pg.split_by(0.5), "color must be an int that fits 62 bits, got 0.5"),
        (lambda pg: pg.split_by(0, torch.tensor(1)), r"key must be an int .*, got tensor\(1\)"),
        (lambda pg: pg.merge_remote_group(dist2.HashStore(), True), "size must be an int .*got True"),
        (lambda pg: pg.set_timeout(torch.tensor(1.0)), "timeout must be a timedelta or a number of seconds"),
        (lambda pg: dist2.premul_sum("2"), "factor must be a number or a tensor of one element, got '2'"),
        (lambda pg: dist2.shared_empty(2.0), r"shape must consist of numbers of at least 0, got \(2.0,\)"),
        (lambda pg: dist2.TCPStore("127.0.0.1", 0, "2", True), r"world_size must be an int or None, got '2'"),
    ],
)
def test_what_is_no_int_is_refused_by_name(call: Call, message: str) -> None:
    with (
        dist2.new_group("fake", rank=0, world_size=1) as pg,
        pytest.raises(InvalidUsageError, match=message),
    ):
        call(pg)


@pytest.mark.parametrize(("rows", "extent", "is_shared"), [(3, 1, False), (3, 2, True), (0, 2, False)])
def test_elements_share_memory_where_a_stride_of_zero_has_two_of_them(
    rows: int, extent: int, is_shared: bool
) -> None:
    tensor = torch.ones(3, 1).as_strided((rows, extent), (1, 0))
    with pytest.raises(InvalidUsageError, match="share memory") if is_shared else nullcontext():
        check_writable(tensor, "output")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda pg: pg.all_gather_v(pair(3), ones(4)), "outputs[1] has shape [3] (3 elements), but input"),
        (
            lambda pg: pg.reduce_scatter_v(ones(4), pair(3)),
            "inputs[1] has shape [3] (3 elements), but output",
        ),
        (
            lambda pg: pg.all_to_all(pair(3), [ones(3), ones(4)]),
            "outputs[1] has shape [3] (3 elements), but inputs[1]",
        ),
    ],
)
def test_a_ranks_own_part_of_another_size_is_named(wrong: Call, words: str) -> None:
    with (
        dist2.new_group("fake", rank=1, world_size=2) as pg,
        pytest.raises(InvalidUsageError, match=f"^{re.escape(words)}"),
    ):
        wrong(pg)
