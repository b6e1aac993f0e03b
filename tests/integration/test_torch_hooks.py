"""torch's own communication hooks of `DistributedDataParallel` on a dist2 group, unmodified."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import Crew
from support.torch_features import needs
from support.training import WORLD, alone, batch, model, quiet, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from dist2 import ProcessGroup

Run = Callable[..., list[Any]]
c10d: Any = dist


@functools.cache
def quietly(module: str) -> Any:
    """Import a part of torch that uses deprecated parts of torch; it takes a second, so only in ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torch.distributed.{module}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a callable that calls ``body(pg, *arguments)`` on two ranks, in processes that are kept."""
    crew = Crew(WORLD, tmp_path_factory.mktemp("crew"))
    yield functools.partial(crew.run, timeout=15.0)
    crew.close()


def ddp(pg: ProcessGroup, **options: Any) -> Any:
    return DistributedDataParallel(model(), process_group=pg, **options)


def parameters(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in net.parameters()]


def alike(pg: ProcessGroup, net: nn.Module) -> None:
    """Check that all ranks have the same parameters, and that they are finite."""
    for parameter in parameters(net):
        theirs = [torch.empty_like(parameter) for _ in range(WORLD)]
        pg.all_gather(theirs, parameter)
        assert torch.equal(theirs[0], theirs[1])
        assert parameter.isfinite().all()


def near(net: nn.Module, tolerance: float) -> None:
    for mine, expected in zip(parameters(net), alone(), strict=True):
        torch.testing.assert_close(mine, expected, atol=tolerance, rtol=tolerance)


# The hooks in C++


def _builtin(pg: ProcessGroup, kind: str, tolerance: float) -> None:
    with quiet(pg):
        net = ddp(pg, bucket_cap_mb=0.0001)
        net._register_builtin_comm_hook(getattr(c10d.BuiltinCommHookType, kind))
        train(net, pg.rank())
    near(net, tolerance)
    alike(pg, net)


@pytest.mark.parametrize(("kind", "tolerance"), [("ALLREDUCE", 1e-6), ("FP16_COMPRESS", 1e-3)])
def test_a_hook_in_cpp(run: Run, kind: str, tolerance: float) -> None:
    run(_builtin, kind, tolerance)


def _builtin_fails(pg: ProcessGroup) -> str:
    with quiet(pg):
        net = ddp(pg)
        net._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
        if pg.rank() == 1:
            pg.abort()
            return "left"
        with pytest.raises(RuntimeError) as caught:
            nn.functional.mse_loss(net(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    return str(caught.value)


def test_a_hook_in_cpp_tells_why_it_failed(run: Run) -> None:
    said, left = run(_builtin_fails)
    assert left == "left"
    assert "rank 1" in said


def _half(pg: ProcessGroup, compressed: bool) -> None:
    with quiet(pg):
        net: Any = DistributedDataParallel(model().half(), process_group=pg)
        state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=1, start_powerSGD_iter=2)
        if compressed:
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            x, y = batch(pg.rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x.half()), y.half()).backward()
            optimizer.step()
    alike(pg, net)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_model_of_half_precision(run: Run, compressed: bool) -> None:
    run(_half, compressed)


# The hooks in Python

# Left out are those that fail on a CPU with torch's own backends too: `batched_powerSGD_hook` (an assertion),
# those that quantize (they call CUDA), and `powerSGD_hook` with several buckets: its callbacks call
# collectives when the first are done, in a different order on each rank.


def named_otherwise(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a hook that torch would refuse by its name: it says that hooks of bfloat16 take a GPU."""
    return lambda state, bucket: hook(state, bucket)


HOOKS: dict[str, tuple[Callable[[ProcessGroup], Any], Any, float]] = {
    "all_reduce": (lambda pg: pg, default_hooks.allreduce_hook, 1e-6),
    "fp16": (lambda pg: pg, default_hooks.fp16_compress_hook, 1e-3),
    "bf16": (lambda pg: pg, named_otherwise(default_hooks.bf16_compress_hook), 1e-2),
    "wrapped, fp16": (
        lambda pg: pg,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        1e-3,
    ),
    "wrapped, bf16": (
        lambda pg: pg,
        named_otherwise(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        1e-2,
    ),
    "power SGD": (
        lambda pg: powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=2, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
        0.5,
    ),
    "power SGD, orthogonal": (
        lambda pg: powerSGD_hook.PowerSGDState(
            pg, matrix_approximation_rank=1, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        ),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        0.5,
    ),
}


def _hook(pg: ProcessGroup, name: str, cap_mb: float) -> None:
    state, hook, tolerance = HOOKS[name]
    with quiet(pg):
        net = ddp(pg, bucket_cap_mb=cap_mb)
        net.register_comm_hook(state(pg), hook)
        train(net, pg.rank())
    near(net, tolerance)
    alike(pg, net)


@pytest.mark.parametrize(
    ("name", "cap_mb"),
    [(name, 25) for name in HOOKS] + [(name, 0.0001) for name in HOOKS if "SGD" not in name],
)
def test_a_hook_in_python(run: Run, name: str, cap_mb: float) -> None:
    run(_hook, name, cap_mb)


def _noop(pg: ProcessGroup) -> bool:
    with quiet(pg):
        net = ddp(pg)
        net.register_comm_hook(None, debugging_hooks.noop_hook)
        train(net, pg.rank())
    return bool(parameters(net)[0].isfinite().all())


def test_a_hook_that_sends_nothing(run: Run) -> None:
    assert run(_noop) == [True, True]


def _local_sgd(pg: ProcessGroup) -> None:
    with quiet(pg):
        mine = [pg.split([rank]) for rank in range(WORLD)][pg.rank()]
        assert mine is not None
        net = ddp(pg)
        state = post_localSGD_hook.PostLocalSGDState(pg, mine, start_localSGD_iter=1)
        net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=1, warmup_steps=1, process_group=pg)
        optimizer = quietly("optim").PostLocalSGDOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), averager
        )
        for step in range(3):
            x, y = batch(pg.rank(), step)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        mine.shutdown()
    near(net, 1e-2)
    alike(pg, net)


def test_local_steps_after_some_global_ones(run: Run) -> None:
    run(_local_sgd)


def _step_in_hook(pg: ProcessGroup) -> None:
    with quiet(pg):
        net = ddp(pg)
        state = optimizer_overlap_hooks._OptimizerHookState(
            quietly("optim.functional_sgd")._FunctionalSGD([], lr=0.1, _allow_empty_param_list=True)
        )
        state._set_params_to_optimize(net.parameters())
        hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
        net.register_comm_hook(pg, hook)
        for step in range(3):
            x, y = batch(pg.rank(), step)
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
    near(net, 1e-6)


def test_a_hook_that_takes_the_optimizers_step(run: Run) -> None:
    run(_step_in_hook)


def _zero(pg: ProcessGroup, interleaved: bool) -> None:
    hooks = quietly("algorithms.ddp_comm_hooks.ddp_zero_hook")
    overlap = hooks.hook_with_zero_step_interleaved if interleaved else hooks.hook_with_zero_step
    with quiet(pg):
        net = ddp(pg, static_graph=True)
        optimizer = quietly("optim").ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, process_group=pg, overlap_with_ddp=True, lr=0.1
        )
        net.register_comm_hook(
            None, overlap(default_hooks.allreduce_hook, net, optimizer, shard_buckets=False)
        )
        for step in range(5):
            x, y = batch(pg.rank(), step)
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    alike(pg, net)


@needs("zero_overlap")
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_hook_that_shards_the_optimizer(run: Run, interleaved: bool) -> None:
    run(_zero, interleaved)
