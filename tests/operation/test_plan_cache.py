"""Plans are found again for calls like the one they were made for, and for no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.torch_features import reason

from dist2.operation import plan_cache as plans_module
from dist2.operation.kinds import MAX, SUM, OpKind
from dist2.operation.plan_cache import AnyPlans, Plan, Plans
from dist2.operation.signature import GroupInfo, Signature
from dist2.runtime.torch_versions import TENSOR_EXCHANGE

SIGNATURE = Signature(OpKind.BARRIER, GroupInfo("uid", "group", "", "fake", 0, (0,)))

c_alone = pytest.mark.skipif(
    TENSOR_EXCHANGE is None,
    reason=reason("exchange"),
)
TYPES: list[Any] = [
    pytest.param(AnyPlans, id="any"),
    pytest.param(Plans, id="c", marks=c_alone),
]


def plan() -> Plan:
    """Return a plan like no other."""
    return Plan(SIGNATURE, lambda operation, inputs, outputs: None)


def negated() -> torch.Tensor:
    """Return a tensor whose memory holds the negatives of its values, one after the other."""
    return torch._neg_view(torch.ones(4))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.ones(4),
    "longer": lambda: torch.ones(5),
    "matrix": lambda: torch.ones(2, 2),
    "scalar": lambda: torch.ones(()),
    "one": lambda: torch.ones(1),
    "empty": lambda: torch.ones(0),
    "int": lambda: torch.ones(4, dtype=torch.int32),
    "uint": lambda: torch.ones(4, dtype=torch.uint8),
    "int8": lambda: torch.ones(4, dtype=torch.int8),
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "half": lambda: torch.ones(4, dtype=torch.float16),
    "bfloat": lambda: torch.ones(4, dtype=torch.bfloat16),
    "double": lambda: torch.ones(4, dtype=torch.float64),
    "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    "other float8": lambda: torch.ones(4).to(torch.float8_e5m2),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "strided": lambda: torch.ones(8)[::2],
    "transposed": lambda: torch.ones(3, 2).T,
    "expanded": lambda: torch.ones(1).expand(4),
    "elsewhere": lambda: torch.ones(4, device="meta"),
}


@pytest.mark.parametrize("plans", TYPES)
def test_every_layout_has_a_plan_of_its_own(plans: type[AnyPlans]) -> None:
    made = plans()
    kept: dict[str, Plan] = {}
    for name, layout in LAYOUTS.items():
        kept[name] = plan()
        tensors = [layout()]
        assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is None
        made.keep(OpKind.ALL_REDUCE, SUM, tensors, tensors, kept[name])
    assert len(made) == len(LAYOUTS)
    for name, layout in LAYOUTS.items():
        tensors = [layout()]
        assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is kept[name], name
    made.clear()
    assert len(made) == 0
    tensors = [torch.ones(4)]
    assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is None


@pytest.mark.parametrize("plans", TYPES)
def test_what_else_tells_calls_apart(plans: type[AnyPlans]) -> None:
    one, two = torch.ones(4), torch.ones(4)
    both = (one, two)
    calls: list[tuple[Any, Any, Any, Any]] = [
        (OpKind.ALL_REDUCE, SUM, (one,), (one,)),
        (OpKind.ALL_REDUCE, MAX, (one,), (one,)),
        (OpKind.BROADCAST, 0, (one,), (one,)),
        (OpKind.BROADCAST, 1000, (one,), (one,)),
        (OpKind.REDUCE, (SUM, 0), (one,), ()),
        (OpKind.REDUCE, (SUM, 1), (one,), ()),
        (OpKind.ALL_GATHER, None, both, ()),
        (OpKind.ALL_GATHER, None, (), both),
        (OpKind.ALL_REDUCE_COALESCED, SUM, both, both),
        (OpKind.BARRIER, None, (), ()),
    ]
    made = plans()
    kept = [plan() for _ in calls]
    for call, each in zip(calls, kept, strict=True):
        assert made.find(*call) is None
        made.keep(*call, each)
    for call, each in zip(calls, kept, strict=True):
        assert made.find(*call) is each
    assert made.find(OpKind.BROADCAST, int("1000"), (one,), (one,)) is made.find(*calls[3])
    assert (
        made.find(OpKind.ALL_REDUCE_COALESCED, SUM, list(both), list(both)) is None
    )  # two lists: not in place


@pytest.mark.parametrize("plans", TYPES)
def test_a_tensor_that_changes_is_another(plans: type[AnyPlans]) -> None:
    made, tensor, first = plans(), torch.ones(4), plan()
    tensors = (tensor,)
    made.keep(OpKind.ALL_REDUCE, SUM, tensors, tensors, first)
    assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is first
    tensor.resize_(6)
    assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is None
    tensor.resize_(4)
    assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is first
    tensor.data = torch.ones(8)[::2]
    assert made.find(OpKind.ALL_REDUCE, SUM, tensors, tensors) is None


@pytest.mark.parametrize("layout", ["vector", "matrix", "scalar", "bool", "empty"])
def test_plain_tensors_are_known_for_such(layout: str) -> None:
    tensors = [LAYOUTS[layout](), torch.nn.Parameter(torch.ones(2))]
    assert Plans().plain(tensors, tensors) == (TENSOR_EXCHANGE is not None)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(negated(), id="negated"),
        pytest.param(torch.ones(1, dtype=torch.complex64).conj().imag, id="negated and contiguous"),
        pytest.param(torch.ones(4, dtype=torch.complex64), id="complex"),
        pytest.param(torch.ones(4, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.ones(4)[::2], id="strided"),
        pytest.param(torch.ones(4, device="meta"), id="elsewhere"),
        pytest.param(torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})), id="subclass"),
        pytest.param(3, id="no tensor"),
    ],
)
def test_a_plan_of_plain_tensors_is_not_found_with_others(tensor: Any) -> None:
    made, plain = Plans(), plan()
    tensors = [torch.ones(4)]
    made.keep(OpKind.ALL_REDUCE, SUM, tensors, tensors, plain)
    others = [tensor]
    assert not made.plain(others, others)
    assert not made.plain(tensors, others)
    if TENSOR_EXCHANGE is not None:
        assert made.find(OpKind.ALL_REDUCE, SUM, others, others) is None


@pytest.mark.parametrize("plans", TYPES)
@pytest.mark.parametrize("wrong", [3, None, "x", [3], [None], (each for each in (1, 2)), torch.ones(2)])
def test_what_is_no_list_of_tensors_is_never_found(plans: type[AnyPlans], wrong: Any) -> None:
    made = plans()
    assert made.find(OpKind.ALL_REDUCE, SUM, wrong, wrong) is None
    made.keep(OpKind.ALL_REDUCE, SUM, wrong, wrong, plan())
    assert len(made) == 0
    assert made.find(OpKind.ALL_REDUCE, [], (torch.ones(1),), ()) is None


@pytest.mark.parametrize("plans", TYPES)
def test_plans_start_over_when_there_are_too_many(plans: type[AnyPlans]) -> None:
    made, last = plans(), plan()
    tensors = (torch.ones(4),)
    for number in range(plans_module.MAX_PLANS + 1):
        made.keep(OpKind.BROADCAST, number, tensors, tensors, last)
    assert len(made) == 1
    assert made.find(OpKind.BROADCAST, plans_module.MAX_PLANS, tensors, tensors) is last


@pytest.mark.parametrize("plans", TYPES)
def test_plans_are_let_go_though_they_know_who_keeps_them(plans: type[AnyPlans]) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.plans = plans()
            tensors = (torch.ones(4),)
            self.plans.keep(OpKind.ALL_REDUCE, SUM, tensors, tensors, Plan(SIGNATURE, self.run))

        def run(self, operation: Any, inputs: Any, outputs: Any) -> None:
            raise NotImplementedError

    gone = weakref.ref(Keeper())
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("plans", TYPES)
def test_calls_of_very_many_tensors_have_plans(plans: type[AnyPlans]) -> None:
    made, first = plans(), plan()
    tensors = [torch.ones(2, 3) for _ in range(100)]
    made.keep(OpKind.ALL_REDUCE_COALESCED, SUM, tensors, tensors, first)
    assert made.find(OpKind.ALL_REDUCE_COALESCED, SUM, tensors, tensors) is first


@pytest.mark.parametrize("plans", TYPES)
def test_where_outputs_lie_in_inputs_tells_calls_apart(plans: type[AnyPlans]) -> None:
    memory = torch.zeros(8)
    layouts = {
        "apart": ([torch.ones(2)], [torch.ones(4)]),
        "beside": ([memory[4:6]], [memory[:4]]),
        "own part of rank 0": ([memory[:2]], [memory[:4]]),
        "own part of rank 1": ([memory[2:4]], [memory[:4]]),
        "across": ([memory[3:5]], [memory[:4]]),
        "before": ([memory[:2]], [memory[1:5]]),
        "two apart": ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        "one twice": ([torch.ones(2)], [memory[:2], memory[:2]]),
        "crossing": ([torch.ones(2)], [memory[:2], memory[1:3]]),
    }
    made = plans()
    kept: dict[str, Plan] = {}
    for name, (inputs, outputs) in layouts.items():
        found = made.find(OpKind.ALL_GATHER_SINGLE, None, inputs, outputs)
        assert found is kept.get("apart" if name == "beside" else name), name
        if found is None:
            kept[name] = plan()
            made.keep(OpKind.ALL_GATHER_SINGLE, None, inputs, outputs, kept[name])
    for name, each in kept.items():
        assert made.find(OpKind.ALL_GATHER_SINGLE, None, *layouts[name]) is each, name


@pytest.mark.parametrize("plans", TYPES)
def test_which_of_many_lies_in_which_tells_calls_apart(plans: type[AnyPlans]) -> None:
    tensors = [torch.zeros(1) for _ in range(70)]  # more than the part in C has room for
    for count in (2, 70):
        made = plans()
        kept: dict[int, Plan] = {}
        for place in range(count):
            call = (OpKind.ALL_GATHER, None, [tensors[place]], tensors[:count])
            assert made.find(*call) is None
            kept[place] = plan()
            made.keep(*call, kept[place])
            assert made.find(*call) is kept[place]
        assert len(made) == count


@contextmanager
def counting_questions() -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets each tensor of which torch is asked whether it is lazily negated."""
    asked: list[torch.Tensor] = []
    is_neg = torch.Tensor.is_neg

    class Asking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is is_neg:
                asked.append(args[0])
            return function(*args, **(kwargs or {}))

    with Asking():
        yield asked


@c_alone
def test_torch_is_asked_once_for_each_tensor_and_place() -> None:
    made = Plans()
    with torch.inference_mode():
        inference = torch.ones(4)
    plain = [torch.ones(4), torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4)), inference]
    for tensor in (*plain, torch.ones(3, dtype=torch.bfloat16), torch.ones(8).view(2, 4)[1]):
        with counting_questions() as asked:
            assert made.plain([tensor], ()) and made.plain((), [tensor])
        assert len(asked) == 1
    lazy = negated()
    assert not made.plain([lazy], ())
    assert not made.plain([torch._neg_view(torch.ones(4, dtype=torch.int32))], ())
    tensor = torch.ones(4)
    assert made.plain([tensor], ())
    tensor.data = lazy
    assert tensor.is_neg() and not made.plain([tensor], ())
    tensor.data = plain[0]
    assert made.plain([tensor], ())


@c_alone
def test_another_object_at_the_address_of_one_that_is_gone_is_asked_anew() -> None:
    made, storage = Plans(), torch.ones(4)
    for _ in range(200):
        tensor = storage.view(4)
        assert made.plain([tensor], ())
        del tensor
        assert not made.plain([torch._neg_view(storage)], ())


CUT: dict[str, Callable[[], torch.Tensor]] = {
    "all": lambda: torch.ones(4),
    "behind another": lambda: torch.ones(8)[4:],
    "every other": lambda: torch.ones(8)[::2],
    "column": lambda: torch.ones(4, 2)[:, 1],
    "matrix": lambda: torch.ones(1, 1, 1, 1, 1, 2, 2),
}


@pytest.mark.parametrize("plans", TYPES)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("left", [0, 1, 15])
def test_a_tensor_beyond_its_storage_is_never_found(plans: type[AnyPlans], name: str, left: int) -> None:
    made, tensor = plans(), CUT[name]()
    storage = tensor.untyped_storage()
    enough = storage.nbytes()
    pair = (torch.ones(1), tensor)
    for _ in range(2):  # the second time with a cached description
        for inputs, outputs in ((tensor,), ()), ((), (tensor,)), (pair, pair):
            made.keep(OpKind.SEND, 1, inputs, outputs, plan())
            assert made.find(OpKind.SEND, 1, inputs, outputs) is not None
        storage.resize_(left)
        for inputs, outputs in ((tensor,), ()), ((), (tensor,)), (pair, pair):
            assert made.find(OpKind.SEND, 1, inputs, outputs) is None
            assert not made.plain(inputs, outputs)
        storage.resize_(enough)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "longer": lambda tensor: tensor.resize_(8),
    "shorter": lambda tensor: tensor.resize_(2),
    "another shape": lambda tensor: tensor.resize_(2, 2),
    "strides": lambda tensor: tensor.as_strided_((2,), (2,)),
    "offset": lambda tensor: tensor.as_strided_((2,), (1,), 2),
    "type": lambda tensor: tensor.set_(torch.ones(4, dtype=torch.int32).untyped_storage()),
    "data": lambda tensor: setattr(tensor, "data", torch.ones(2, 2)),
    "negated": lambda tensor: setattr(tensor, "data", negated()),
    "storage": lambda tensor: tensor.set_(torch.ones(4).untyped_storage(), 0, (4,), (1,)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "cut": lambda tensor: tensor.untyped_storage().resize_(12),
    "moved": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "shared": lambda tensor: tensor.share_memory_(),
    "none": lambda tensor: None,
}


@c_alone
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_has_changed_is_read_anew(change: str) -> None:
    """Its cached description must not serve the changed tensor."""
    keeping, tensor, out = Plans(), torch.ones(4), torch.zeros(4)
    first, before = plan(), out.data_ptr()
    keeping.keep(OpKind.SEND, 1, (tensor,), (), first)
    for _ in range(3):
        assert keeping.find(OpKind.SEND, 1, (tensor,), ()) is first
    CHANGES[change](tensor)
    other = tensor.view_as(tensor)  # an object of which nothing is known
    for _ in range(3):
        assert keeping.find(OpKind.SEND, 1, (tensor,), ()) is keeping.find(OpKind.SEND, 1, (other,), ())
        assert keeping.plain((tensor,), ()) == keeping.plain((other,), ())
    assert out.data_ptr() == before


@c_alone
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 2), (1, 1, 1, 1, 4), (1, 1, 1, 1, 1, 1, 4)])
def test_what_is_kept_of_a_tensor_is_what_torch_says(shape: tuple[int, ...]) -> None:
    """Also for tensors with many dimensions, with a shape outside of the C++ half."""
    made = Plans()
    kept: dict[tuple[torch.dtype, int], Plan] = {}
    tensors = [torch.ones(shape, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.float16)] * 2
    for times in range(3):
        for number, tensor in enumerate(tensors[:3]):
            for tag in (0, 1):
                key = tensor.dtype, tag
                if times == 0:
                    kept[key] = plan()
                    made.keep(OpKind.SEND, tag, (tensor,), (), kept[key])
                assert made.find(OpKind.SEND, tag, (tensor,), ()) is kept[key], number
                assert made.find(OpKind.SEND, tag, (torch.ones(shape, dtype=tensor.dtype),), ()) is kept[key]
        for _ in range(50):  # where another was, and looks otherwise
            assert made.find(OpKind.SEND, 0, (torch.ones(3, 3),), ()) is None
