"""torch's own global API on dist2: ``init_process_group("dist2")`` under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import torchrun

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dist2.torch_backend

dist.init_process_group("dist2")
rank = dist.get_rank()
assert dist.get_backend() == "dist2"

total = torch.full((3,), float(rank + 1))
dist.all_reduce(total)
assert total.tolist() == [3.0] * 3

model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
model(torch.full((3, 4), float(rank))).sum().backward()
assert torch.equal(model.module.weight.grad, torch.full((2, 4), 1.5))

pair = dist.new_group([0, 1])
dist.all_reduce(total, group=pair)
assert total.tolist() == [6.0] * 3

said = [None, None]
dist.all_gather_object(said, {"rank": rank})
assert said == [{"rank": 0}, {"rank": 1}]
dist.destroy_process_group()
print("rank", rank, "is done")
"""


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_torchs_global_api_runs_on_dist2(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = torchrun(program, 2, folder=tmp_path)
    assert ended.code == 0, ended
    assert ended.output.count("is done") == 2, ended
