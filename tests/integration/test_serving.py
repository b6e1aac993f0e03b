"""The calls of communicators that serve language models on CPUs (vLLM, SGLang), on Gloo and on dist2.

A stand-in makes the calls of their communicators and group coordinators: tensor-parallel and
pipeline-parallel groups of one world, all_reduce of activations and integers, gathers of logits, dictionaries
of tensors by a broadcast of metadata, and messages between stages. `mixed` and `draft` make
the calls that went wrong in the shared memory of such servers: an operation while another rank is in the one
before, in groups that are not the world, and gathers of integers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import torchrun

PROGRAM = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

import dist2.torch_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)


class Coordinator:
    def __init__(self, groups):
        for ranks in groups:
            group = dist.new_group(ranks)  # all ranks call for each group
            if dist.get_rank() in ranks:
                self.group, self.ranks = group, ranks
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def all_reduce(self, x):
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x, dim):
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        dist.all_gather_into_tensor(out.view(-1, *x.shape[1:]), x, group=self.group)
        return torch.cat(tuple(out), dim)

    def gather(self, x, dst):
        parts = [torch.empty_like(x) for _ in self.ranks] if self.rank == dst else None
        dist.gather(x, parts, dst=self.ranks[dst], group=self.group)
        return None if parts is None else torch.cat(parts, -1)

    def broadcast_dict(self, tensors, src):
        described = [None]
        if self.rank == src:
            described = [{name: (tuple(each.shape), str(each.dtype)) for name, each in tensors.items()}]
        dist.broadcast_object_list(described, src=self.ranks[src], group=self.group)
        if self.rank != src:
            types = {str(each): each for each in DTYPES}
            tensors = {name: torch.empty(shape, dtype=types[t]) for name, (shape, t) in described[0].items()}
        root, all_of_them = self.ranks[src], tensors.values()
        for work in [dist.broadcast(each, root, self.group, async_op=True) for each in all_of_them]:
            work.wait()
        return tensors

    def exchange(self, x):
        \"\"\"Pass a tensor of any length to the next stage, its length first.\"\"\"
        if self.rank:
            length = torch.empty(1, dtype=torch.long)
            dist.recv(length, src=self.ranks[self.rank - 1], group=self.group)
            x = torch.empty(int(length), dtype=x.dtype)
            dist.recv(x, src=self.ranks[self.rank - 1], group=self.group)
        if self.rank + 1 < self.size:
            dist.send(torch.tensor([x.numel()]), dst=self.ranks[self.rank + 1], group=self.group)
            dist.send(x, dst=self.ranks[self.rank + 1], group=self.group)
        return x

    def mixed(self, x, turns):
        \"\"\"Call different operations without a pause, each time with another rank late.\"\"\"
        gathered, part = torch.empty(self.size * len(x), dtype=x.dtype), torch.empty_like(x)
        exchanged, results = torch.empty_like(gathered), []
        for turn in range(turns):
            if turn % self.size == self.rank:
                torch.ones(100_000).sin()
            dist.all_gather_into_tensor(gathered, x + turn, group=self.group)
            reduced = self.all_reduce(gathered)
            dist.reduce_scatter_tensor(part, reduced, group=self.group)
            dist.all_to_all_single(exchanged, reduced, group=self.group)
            results += [gathered.clone(), reduced, part.clone(), exchanged.clone()]
        return results

    def draft(self, logits):
        \"\"\"Choose the most probable token of a vocabulary that is cut by ranks.\"\"\"
        values, ids = logits.max(-1)
        everyone = [torch.empty((self.size, *each.shape), dtype=each.dtype) for each in (values, ids)]
        for out, each in zip(everyone, (values, ids + self.rank * logits.shape[-1]), strict=True):
            dist.all_gather_into_tensor(out.view(-1), each, group=self.group)
        token = everyone[1].gather(0, everyone[0].argmax(0, keepdim=True))[0]
        dist.all_reduce(token, dist.ReduceOp.MIN, group=self.group)
        return [*everyone, token]


def serve():
    rank = dist.get_rank()
    torch.set_num_threads(1 + rank % 2)
    tensor, stage = Coordinator([[0, 1], [2, 3]]), Coordinator([[0, 2], [1, 3]])
    results = []
    for dtype in DTYPES:
        for numel in (1, 7, 4096, 100_001):  # odd sizes, and more than a slot of shared memory
            x = (torch.arange(numel) % 13 + rank).to(dtype)
            for _ in range(1 + rank // 2):  # one group makes more calls than the other
                results.append(tensor.all_reduce(x))
            results.append(stage.all_reduce(x))
        logits = (torch.arange(12).view(3, 4) + rank).to(dtype)
        results += [tensor.all_gather(logits, 0), tensor.all_gather(logits, -1), tensor.gather(logits, 1)]
        batch = {"ids": logits, "positions": logits.flatten()[:5].clone()}
        results += tensor.broadcast_dict(batch, 0).values()
        results.append(stage.exchange(logits.flatten()[: 5 + rank].clone()))
        results += tensor.draft(logits)
        for numel in (20, 150_000):
            x = (torch.arange(numel) % 5 + rank).to(dtype)
            results += tensor.mixed(x, 3) + stage.mixed(x, 3)
    dist.barrier()
    return results


results = {}
for backend in ("gloo", "dist2"):
    # Not by a server in rank 0, which torch ends while others may already have connected for the next group.
    store = Path(__file__).with_name(backend).as_uri()
    dist.init_process_group(backend, store, rank=int(os.environ["RANK"]), world_size=4)
    results[backend] = serve()
    dist.destroy_process_group()
assert len(results["dist2"]) > 40
for ours, theirs in zip(results["dist2"], results["gloo"], strict=True):
    assert (ours is None) == (theirs is None)
    assert ours is None or torch.equal(ours, theirs)
print("the same")
"""


@pytest.mark.torchrun
@pytest.mark.timeout(120)
def test_communicators_of_model_servers_get_the_results_of_gloo(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = torchrun(program, 4, folder=tmp_path)
    assert ended.code == 0, ended
    assert ended.output.count("the same") == 4, ended
