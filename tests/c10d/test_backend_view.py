"""The backend of a group as torch's binding describes backends: each method by each of its keywords."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import dist2
from dist2.c10d.backend import _OF_THE_GROUP, BackendView
from dist2.torch_backend import default_group

_c10d: Any = torch._C._distributed_c10d


def overloads(name: str) -> Iterator[dict[str, str]]:
    """Yield the type of each argument of each overload of a method, by its keyword."""
    for line in (getattr(_c10d.Backend, name).__doc__ or "").splitlines():
        if "->" in line:
            arguments = re.sub(r"<[^>]*>", "default", line.partition("->")[0])
            found = dict(re.findall(r"[(,] ?(\w+): ([^,=)]*)", arguments))
            found.pop("self")
            yield found


METHODS = {
    f"{name}({', '.join(types)})": (name, types)
    for name in sorted(_OF_THE_GROUP & set(dir(_c10d.Backend)))
    for types in overloads(name)
    if any("Tensor" in kind for kind in types.values()) and not any(each.startswith("arg") for each in types)
}


LISTS = re.compile(r"Sequence\[|List\[|list\[")
"""How versions of torch write the type of a list."""

TRIED_BELOW = ("send", "recv", "new_window")


def value(kind: str) -> Any:
    """Return an argument of a type, for a group of one rank; None where its default is meant."""
    if "torch.Tensor" in kind:
        made: Any = torch.ones(2)
        for _ in LISTS.findall(kind):
            made = [made]
        return made
    if LISTS.search(kind):  # of split sizes
        return [2]
    if "Options" in kind:
        return getattr(_c10d, kind.rpartition(".")[2].strip())()
    if "ReduceOp" in kind:
        return ReduceOp.SUM
    return 0 if "SupportsInt" in kind or kind.strip() == "int" else None


@pytest.fixture
def pg() -> Iterator[dist2.ProcessGroup]:
    with dist2.new_group("socket", 20, store=dist2.HashStore(), rank=0, world_size=1) as pg:
        yield pg


@pytest.fixture
def view(pg: dist2.ProcessGroup) -> BackendView:
    return pg.get_backend("cpu")


@pytest.mark.parametrize("call", [call for call, (name, _) in METHODS.items() if name not in TRIED_BELOW])
def test_a_method_takes_the_keywords_of_torchs(call: str, view: Any) -> None:
    name, types = METHODS[call]
    given = {key: value(kind) for key, kind in types.items() if value(kind) is not None}
    made = getattr(view, name)(**given)
    assert made.wait()


def test_messages_by_keyword(view: Any) -> None:
    sent = view.send(tensors=[torch.ones(2)], dstRank=0, tag=3)
    assert view.recv(tensors=[got := torch.zeros(2)], srcRank=0, tag=3).wait()
    assert sent.wait()
    assert got.tolist() == [1, 1]


def test_the_view_answers_for_the_names_of_torch_2_14(pg: dist2.ProcessGroup, view: Any) -> None:
    assert view.get_error() is None
    assert not (view.supports_window or view.supports_reconfigure)
    assert isinstance(view.options, view.Options)
    assert not view.supports_shrinking


@pytest.mark.skipif(not hasattr(torch.distributed, "shrink_group"), reason="torch has no shrink_group")
def test_torchs_shrink_group_is_refused_before_it_closes_the_group() -> None:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=2) as pg, default_group(pg):
        with pytest.raises(TypeError, match="does not support shrinking"):
            torch.distributed.shrink_group([1])
        assert torch.distributed.group.WORLD is pg
        assert not pg.is_closed


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("new_window", "nccl2"),
        ("register_post_hook", "register_completion_hook"),
        ("register_abort_hook", "get_error"),
    ],
)
def test_what_torchs_binding_would_take_without_effect_is_refused(
    name: str, remedy: str, pg: dist2.ProcessGroup
) -> None:
    with pytest.raises(dist2.InvalidUsageError, match=f"Backend socket does not support {name}: .*{remedy}"):
        getattr(pg, name)(1, print)


@pytest.mark.parametrize("size", [1, 2])
def test_one_tensor_of_all_at_the_root(size: int) -> None:
    with dist2.new_group("fake", store=dist2.HashStore(), rank=0, world_size=size) as pg:
        with pytest.raises(dist2.InvalidUsageError, match=f"have {2 * size} elements, got None"):
            pg.gather_single(None, torch.ones(2))
        with pytest.raises(dist2.InvalidUsageError, match=r"got 4, strides \(2,\)"):
            pg.gather_single(torch.ones(8)[::2], torch.ones(4 // size))
        assert pg.gather_single(torch.empty(size, 2), torch.ones(2), dst=0).wait()
