"""Private names of torch under which a feature is found, in each version that has another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from dist2.runtime import torch_versions
from dist2.runtime.torch_versions import OpaqueTypes


class Meta(type):
    """The type of torch's types that Dynamo is told the attributes of."""


class Group(metaclass=Meta):
    pass


def module(told: list[Any], **names: Any) -> SimpleNamespace:
    members = SimpleNamespace(USE_REAL="constant", INLINED="inlined")

    def register(kind: type, **said: Any) -> None:
        told.append((kind, said))

    given = {name: register if value is None else value for name, value in names.items()}
    return SimpleNamespace(MemberType=members, **given)


NEW = {"CustomClassBaseMeta": Meta, "register_custom_class": None}
OLD = {"OpaqueBaseMeta": Meta, "register_opaque_type": None}


@pytest.mark.parametrize(
    ("names", "typ"),
    [(OLD, "reference"), (NEW, "symbolic"), ({**NEW, "register_opaque_type": None}, "symbolic")],
    ids=["2.12", "2.14", "2.14 with a deprecated name"],
)
def test_groups_are_described_by_the_names_of_each_version(
    names: dict[str, Any], typ: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch_versions, "_opaque", module(told, **names))
    monkeypatch.setattr(torch_versions, "_c10d", SimpleNamespace(ProcessGroup=Group))
    found = OpaqueTypes.found()
    assert found is not None
    assert (found.constant, found.inlined) == ("constant", "inlined")
    found.register(Group, members={"rank": found.constant})
    assert told == [(Group, {"typ": typ, "members": {"rank": "constant"}})]


@pytest.mark.parametrize("names", [{}, {"OpaqueBaseMeta": Meta}, {"CustomClassBaseMeta": Meta}])
def test_groups_that_are_ordinary_objects_are_not_described(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_versions, "_opaque", module([], **names))
    monkeypatch.setattr(torch_versions, "_c10d", SimpleNamespace(ProcessGroup=object))
    assert OpaqueTypes.found() is None


def test_a_torch_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "_opaque", None)
    assert OpaqueTypes.found() is None


# Private names that a later torch may lack


def test_code_is_compiled_where_dynamo_has_no_way_to_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import eval_frame

    monkeypatch.delattr(eval_frame, "_FrameExecStrategy")
    torch_versions._code_is_left_alone()(test_a_torch_without_the_module.__code__)


def test_without_tables_of_groups_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_world")
    with pytest.raises(NotImplementedError, match="register_with_torch=False"):
        torch_versions.default_tables()


def test_the_default_group_is_set_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_update_default_pg")
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(default_pg=None))
    torch_versions.set_default_group("a group")
    assert torch_versions.default_tables().default_pg == "a group"


def test_no_backends_are_registered_where_torch_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed.Backend, "_plugins")
    monkeypatch.delattr(distributed_c10d, "_DistributedBackendOptions")
    assert torch_versions.registered_backends() == {}
    torch_versions.backend_options().group_rank = 3


def test_times_are_not_estimated_by_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_time_estimator", raising=False)
    with pytest.raises(NotImplementedError, match="does not estimate times"):
        torch_versions.time_estimator(None, torch.device("cpu"))


def test_a_torch_with_a_flight_recorder_for_all_backends_leaves_that_of_dist2_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", known := {"gloo"}, raising=False)
    torch_versions.records_itself("dist2")
    assert known == {"gloo", "dist2"}
    monkeypatch.delattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS")
    torch_versions.records_itself("dist2")
