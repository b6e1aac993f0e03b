"""Every test of torch's that passes on Gloo passes on dist2, except for differences with a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import ROOT, run

from torch_suite.differences import DIFFERENCES
from torch_suite.document import write_document

SUBSET = (
    *(
        "test_all_gather",
        "test_all_gather_coalesced_simple",
        "test_all_reduce_sum",
        "test_all_reduce_sum_async",
    ),
    *("test_all_reduce_coalesced_sum", "test_all_to_all", "test_all_to_all_single_unequal_split"),
    *("test_barrier", "test_batch_isend_irecv_gloo", "test_broadcast"),
    *("test_broadcast_object_list", "test_ddp_broadcast_buffer_via_hook", "test_ddp_create_graph"),
    *("test_DistributedDataParallelCPU", "test_gather", "test_get_backend", "test_isend", "test_reduce_sum"),
    *("test_scatter", "test_send_recv_any_source"),
)
"""An operation of each kind and the main path of DDP: for every run of the tests."""

Found = dict[str, dict[str, dict[str, Any]]]


def outcomes(*arguments: str, timeout_s: float) -> Any:
    """Run ``python -m torch_suite`` and return its output."""
    command = [sys.executable, "-m", "torch_suite", *arguments]
    ended = run(command, timeout_s=timeout_s, variables={"PYTHONPATH": f"{ROOT}/tests:{ROOT}"})
    assert ended.code == 0, ended
    return json.loads(ended.output)


def failures(found: Found) -> dict[str, str]:
    """Return the output of failed tests of torch that must pass on dist2."""
    required = [name for name, each in found["gloo"].items() if each["status"] == "passed"]
    # Of those that Gloo cannot run, torch skips some for the number of ranks; the document counts the others.
    ran = {name: each for name, each in found["beyond"].items() if each["status"] != "skipped"}
    ours = {name: found["dist2"][name] for name in required if name not in DIFFERENCES} | ran
    return {
        name: each["detail"] or each["reason"] for name, each in ours.items() if each["status"] != "passed"
    }


def check_differences(found: Found) -> None:
    """Check that every difference is one: a reason for a test that passes would hide a later failure."""
    for name in DIFFERENCES.keys() & found["gloo"].keys():
        ends = found["gloo"][name]["status"], found["dist2"][name]["status"]
        assert ends in (("passed", "failed"), ("skipped", "skipped")), f"{name} is no difference: {ends}"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_part_of_torchs_tests() -> None:
    (found,) = outcomes(*SUBSET, timeout_s=100).values()
    assert len(found["gloo"]) == len(SUBSET)
    assert sum(each["status"] == "passed" for each in found["gloo"].values()) >= len(SUBSET) - 4
    assert failures(found) == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_of_torchs_tests(tmp_path: Path) -> None:
    found = outcomes("--ranks", "2", "3", timeout_s=800)
    assert {size: failures(each) for size, each in found.items()} == {"2": {}, "3": {}}
    for each in found.values():
        check_differences(each)
    document = tmp_path / "compatibility.md"
    document.write_text((ROOT / "docs" / "compatibility.md").read_text())
    write_document(document, found)
    assert document.read_text() == (ROOT / "docs" / "compatibility.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_torchs_tests_for_four_ranks() -> None:
    names = ("test_gather_object*", "test_new_subgroups_with_group_param")
    (found,) = outcomes(*names, "--ranks", "4", timeout_s=100).values()
    assert {each["status"] for each in found["gloo"].values()} == {"passed"}
    assert failures(found) == {}
    check_differences(found)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_wrong_functions_are_noticed() -> None:
    killed = outcomes("--mutants", timeout_s=350)
    assert {name for name, status in killed.items() if status != "failed"} == set()
