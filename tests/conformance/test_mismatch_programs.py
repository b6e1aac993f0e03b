"""Random programs in which one rank makes another call: all others name that rank, and it names others.

Ranks are at different calls when the difference is found: some have not made the call that differs yet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

import attrs
import pytest
import torch
from support.ranks import SOCKETS, Tenant

from dist2 import MismatchError, ProcessGroup, ReduceOp

PROGRAMS = 30
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPS = (*ROOTED, "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "barrier")
REDUCTIONS: Mapping[str, ReduceOp.RedOpType] = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX}


@attrs.frozen
class Step:
    """A call."""

    op: str
    numel: int
    dtype: torch.dtype
    root: int
    reduction: str
    queued: bool

    @classmethod
    def of(cls, rng: random.Random, world_size: int) -> Step:
        return cls(
            op=rng.choice(OPS),
            numel=rng.choice([1, 100, 5_000, 100_000]),
            dtype=rng.choice([torch.float32, torch.float64, torch.int32, torch.int64]),
            root=rng.randrange(world_size),
            reduction=rng.choice(list(REDUCTIONS)),
            queued=rng.random() < 0.3,
        )

    def changed(self, rng: random.Random, world_size: int) -> tuple[Step, str]:
        """Return a call that differs in one attribute, and the words for it."""
        other = next(
            op for op in rng.sample(OPS, len(OPS)) if op != self.op and op[:10] != self.op[:10]
        )  # not all_gather for another
        options = [(attrs.evolve(self, op=other), "operation differs")]
        if self.op not in ("barrier", "all_to_all_single"):
            options.append((attrs.evolve(self, numel=self.numel + 1), "shape differs"))
        if self.op != "barrier":
            dtype = torch.float16 if self.dtype is not torch.int32 else torch.float32
            options.append((attrs.evolve(self, dtype=dtype), "dtype differs"))
        if self.op in ROOTED:
            options.append((attrs.evolve(self, root=(self.root + 1) % world_size), "root differs"))
        if "reduce" in self.op:
            reduction = "max" if self.reduction == "sum" else "sum"
            options.append((attrs.evolve(self, reduction=reduction), "reduction differs"))
        return rng.choice(options)

    def call(self, pg: ProcessGroup) -> None:
        size, is_root = pg.size(), pg.rank() == self.root

        def make(numel: int = self.numel) -> torch.Tensor:
            return torch.ones(numel, dtype=self.dtype)

        parts = [make() for _ in range(size)] if is_root else None
        op, queued = REDUCTIONS[self.reduction], self.queued
        work = {
            "broadcast": lambda: pg.broadcast(make(), self.root, async_op=queued),
            "reduce": lambda: pg.reduce(make(), self.root, op, async_op=queued),
            "gather": lambda: pg.gather(parts, make(), self.root, async_op=queued),
            "scatter": lambda: pg.scatter(make(), parts, self.root, async_op=queued),
            "all_reduce": lambda: pg.all_reduce(make(), op, async_op=queued),
            "all_gather_single": lambda: pg.all_gather_single(
                make(self.numel * size), make(), async_op=queued
            ),
            "reduce_scatter_single": lambda: pg.reduce_scatter_single(
                make(), make(self.numel * size), op, async_op=queued
            ),
            "all_to_all_single": lambda: pg.all_to_all_single(
                make(self.numel * size), make(self.numel * size), async_op=queued
            ),
            "barrier": lambda: pg.barrier(async_op=queued),
        }[self.op]()
        work.wait()


@pytest.mark.parametrize("tenant", SOCKETS, ids=str)
def test_the_rank_that_differs_is_named(tenant: Tenant) -> None:
    for seed in range(PROGRAMS):
        rng = random.Random(seed)
        world_size = rng.choice([2, 3, 4, 5])
        odd = rng.randrange(world_size)
        steps = [Step.of(rng, world_size) for _ in range(rng.randint(1, 5))]
        at = rng.randrange(len(steps))
        other, words = steps[at].changed(rng, world_size)
        delays_s = [rng.choice([0.0, 0.0, 0.0005, 0.003]) for _ in range(world_size)]

        def body(
            pg: ProcessGroup,
            steps: list[Step] = steps,
            mine: list[Step] = [*steps[:at], other, *steps[at + 1 :]],  # noqa: B006 - not changed
            odd: int = odd,
            delays_s: list[float] = delays_s,
        ) -> tuple[MismatchError, bool]:
            with pytest.raises(MismatchError) as caught:
                for step in mine if pg.rank() == odd else steps:
                    time.sleep(delays_s[pg.rank()])
                    step.call(pg)
                pg.all_gather_object("end")  # a rank that waited for no other is told here
            again = pg.split(range(pg.size()))
            assert again is not None
            total = torch.tensor(float(pg.rank()))
            again.all_reduce(total)
            return caught.value, total.item() == sum(range(pg.size()))

        for rank, (error, works) in enumerate(tenant.run(world_size, body)):
            assert works
            silent = {each for each, text in error.actual.items() if "did not describe" in text}
            named = set(error.actual) - silent
            if rank == odd:  # it need not have heard from all
                assert error.actual
                assert odd not in error.actual, (seed, rank, error, error.actual)
            elif error.calls[rank].seq < max(call.seq for call in error.calls.values()):
                assert odd in error.actual, (seed, rank, error)  # it may name others that have gone on
            else:
                assert named | silent == {odd} | silent, (seed, rank, error, error.actual)
            assert silent or str(error).partition(": ")[0].endswith(words), (seed, rank, words, error)


@pytest.mark.parametrize("tenant", SOCKETS, ids=str)
def test_a_rank_that_went_on_names_the_rank_that_differed_before(tenant: Tenant) -> None:
    """The root of a broadcast waits for no one, and may be hundreds of calls ahead when it is told."""

    def body(pg: ProcessGroup) -> MismatchError:
        with pytest.raises(MismatchError) as caught:
            for at in range(100_000):
                if at == 1 and pg.rank() == 1:
                    pg.all_reduce(torch.ones(3, dtype=torch.int16))
                pg.broadcast(torch.ones(16), 0)
        return caught.value

    for rank, error in enumerate(tenant.run(5, body)):
        if rank == 1:
            assert error.actual
            assert 1 not in error.actual, (rank, error.actual, error)
        else:
            assert set(error.actual) == {1}, (rank, error.actual, error)
