"""Ray actors as ranks."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.programs import run

from dist2 import BackendUnavailableError, InvalidUsageError
from dist2.launch.ray import ranks

HAS_RAY = find_spec("ray") is not None

PROGRAM = """
import os, sys
import ray
import dist2.launch.ray

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
         _temp_dir=sys.argv[1])

@ray.remote(num_cpus=1)
class Worker:
    def train(self):
        import torch, dist2, dist2.legacy as dist
        dist.init_process_group()
        dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0]))
        dist.destroy_process_group()
        pg = dist2.new_group("socket", 30)
        pg.all_reduce(total)
        pg.shutdown()
        return total.item(), os.environ["LOCAL_RANK"]

workers = [Worker.remote() for _ in range(2)]
with dist2.launch.ray.ranks(workers):
    print(ray.get([worker.train.remote() for worker in workers]))
ray.shutdown()
"""


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'dist2[ray]'")
@pytest.mark.timeout(120)
@pytest.mark.alone
def test_actors_are_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # a short path: Ray puts sockets below it
        ended = run([sys.executable, program, folder], timeout_s=100)
    assert ended.code == 0, ended
    assert "[(6.0, '0'), (6.0, '1')]" in ended.output


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(BackendUnavailableError, match=r"pip install 'dist2\[ray\]'"), ranks([object()]):
        pass


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'dist2[ray]'")
def test_actors_are_named_once() -> None:
    actor = object()
    for actors in ([], [actor, actor]):
        with pytest.raises(InvalidUsageError, match="actors must be"), ranks(actors):
            pass
