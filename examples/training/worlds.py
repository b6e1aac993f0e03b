"""Several worlds: actors play, a learner trains, and groups of different ranks carry the data between them.

Rank 0 learns; all others act. Actors sum up their rewards in a group of their own, the first of them sends
the sums to the learner in a group of two, and the learner gives its new policy to all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from job import job, report

ARMS, ROUNDS, PULLS = 5, 12, 20
BEST = 3


def pulled(policy: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return rewards and pulls by arm of one actor's round: ``[2, ARMS]``."""
    arms = torch.multinomial(policy, PULLS, replacement=True, generator=generator)
    means = torch.zeros(ARMS)
    means[BEST] = 1.0
    rewards = means[arms] + torch.randn(PULLS, generator=generator) / 4
    counts = torch.bincount(arms, minlength=ARMS).float()
    return torch.stack([torch.zeros(ARMS).index_add(0, arms, rewards), counts])


def main() -> None:
    """Find the best arm of a bandit."""
    with job() as (rank, size):
        actors = dist.new_group(list(range(1, size)))
        bridge = dist.new_group([0, 1])
        generator = torch.Generator().manual_seed(rank)
        policy = torch.full((ARMS,), 1 / ARMS)
        total = torch.zeros(2, ARMS)
        for _ in range(ROUNDS):
            seen = torch.zeros(2, ARMS)
            if rank:
                seen = pulled(policy, generator)
                dist.all_reduce(seen, group=actors)
            if rank == 1:
                dist.send(seen, 0, group=bridge)
            elif rank == 0:
                dist.recv(seen, 1, group=bridge)
                total += seen
                policy = torch.softmax(4 * total[0] / total[1].clamp(min=1), 0)
            dist.broadcast(policy, 0)
        assert policy.argmax() == BEST, policy
        assert policy[BEST] > 0.8, policy
        report(f"{size - 1} actors and a learner found arm {BEST} with probability {policy[BEST]:.2f}")


if __name__ == "__main__":
    main()
