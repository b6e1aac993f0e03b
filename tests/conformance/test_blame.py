"""Whoever leaves a random program at a random call is named by all others, however they leave after that.

The others' collectives fail, and they leave as well, within microseconds of each other: their departures are
consequences, and may be heard of before the first one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

import attrs
import pytest
import torch
from support.ranks import SOCKETS, Tenant

from dist2 import PeerLostError, ProcessGroup
from dist2.testing.ranks import RankFailed

EPISODES = 40
Call = Callable[[ProcessGroup, int], object]


def _queued(pg: ProcessGroup, numel: int) -> None:
    works = [pg.all_reduce(torch.ones(numel), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


CALLS: Mapping[str, Call] = {
    "all_reduce": lambda pg, numel: pg.all_reduce(torch.ones(numel)),
    "all_gather": lambda pg, numel: pg.all_gather_single(torch.ones(numel * pg.size()), torch.ones(numel)),
    "reduce_scatter": lambda pg, numel: pg.reduce_scatter_single(
        torch.ones(numel), torch.ones(numel * pg.size())
    ),
    "all_to_all": lambda pg, numel: pg.all_to_all_single(
        torch.ones(numel * pg.size()), torch.ones(numel * pg.size())
    ),
    "barrier": lambda pg, _: pg.barrier(),
    "queued": _queued,
}


@attrs.frozen
class Episode:
    """A program, and who leaves it.

    Attributes:
        world_size: Number of ranks.
        culprit: The rank that leaves,
        how: by which method of its group, or by an exception,
        at: before which call.
        calls: Names of the calls, and their elements.
        delays_s: What each rank sleeps before each call.
    """

    world_size: int
    culprit: int
    how: str
    at: int
    calls: list[tuple[str, int]]
    delays_s: list[float]

    @classmethod
    def of(cls, seed: int) -> Episode:
        rng = random.Random(seed)
        world_size = rng.choice([3, 4, 5])
        calls = [
            (rng.choice(list(CALLS)), rng.choice([1, 100, 5_000, 100_000])) for _ in range(rng.randint(1, 4))
        ]
        return cls(
            world_size=world_size,
            culprit=rng.randrange(world_size),
            how=rng.choice(["shutdown", "abort", "raise"]),
            at=rng.randrange(len(calls)),
            calls=calls,
            delays_s=[rng.choice([0.0, 0.0, 0.0005, 0.003]) for _ in range(world_size)],
        )

    def run(self, pg: ProcessGroup) -> None:
        """Make one rank's calls, up to the one that fails or before which it leaves."""
        pg.barrier()
        for number, (name, numel) in enumerate(self.calls):
            time.sleep(self.delays_s[pg.rank()])
            if pg.rank() == self.culprit and number == self.at:
                if self.how == "raise":
                    raise ZeroDivisionError
                getattr(pg, self.how)()
                return
            CALLS[name](pg, numel)


@pytest.mark.parametrize("tenant", SOCKETS, ids=str)
def test_all_name_who_left_first(tenant: Tenant) -> None:
    for seed in range(EPISODES):
        episode = Episode.of(seed)
        errors: dict[int, BaseException] = {}

        over = threading.Barrier(episode.world_size, timeout=20)

        def body(
            pg: ProcessGroup,
            episode: Episode = episode,
            errors: dict[int, BaseException] = errors,
            over: threading.Barrier = over,
        ) -> None:
            try:
                with pg:
                    episode.run(pg)
            except BaseException as failure:
                errors[pg.rank()] = failure
                raise
            finally:
                over.wait()  # a process lives on for a while as well

        with pytest.raises(RankFailed):
            tenant.run(episode.world_size, body)
        named = {
            rank: getattr(error, "ranks", None) for rank, error in errors.items() if rank != episode.culprit
        }
        expected = {rank: (episode.culprit,) for rank in range(episode.world_size) if rank != episode.culprit}
        assert named == expected, (seed, episode, errors)
        assert all(isinstance(errors[rank], PeerLostError) for rank in expected), (seed, episode, errors)
