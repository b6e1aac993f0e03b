"""Ray actors as ranks: ``env://`` works in them as under torchrun.

::

    workers = [Worker.remote() for _ in range(4)]
    with dist2.launch.ray.ranks(workers):
        ray.get([worker.train.remote() for worker in workers])

`ranks` sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
``MASTER_PORT`` in the process of each actor. There `dist2.new_group`, `dist2.legacy.init_process_group` and
``torch.distributed.init_process_group`` meet the others. The calling process hosts the store where they meet,
so no port has to be known before, and a lost rank 0 does not take the store with it.

Ray restarts an actor as a new process: enter `ranks` again for the actors that are to go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dist2.errors import BackendUnavailableError, InvalidUsageError
from dist2.launch.meeting import serve_ranks
from dist2.runtime.config import set_environment


@contextmanager
def ranks(actors: Sequence[Any], host: str = "127.0.0.1") -> Iterator[None]:
    """Make actors the ranks of a job for the length of a ``with`` block: actor i is rank i.

    Args:
        actors: Handles of Ray actors, each in a process of its own, as Ray starts them.
        host: Address of the calling process's host where the store listens and actors connect. The default
            serves actors on this host; for a cluster pass ``ray.util.get_node_ip_address()``.

    Raises:
        InvalidUsageError: ``actors`` is empty or names an actor twice.
        BackendUnavailableError: Ray is not installed.
    """
    ray = _ray()
    if not actors or len(set(actors)) != len(actors):
        raise InvalidUsageError(f"actors must be a non-empty list without repetitions, got {actors!r}")
    lease = serve_ranks(host)
    try:
        nodes = ray.get([actor.__ray_call__.remote(_node) for actor in actors])
        seen: Counter[str] = Counter()
        settings = []
        for rank, node in enumerate(nodes):
            settings.append(
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(actors)),
                    "LOCAL_RANK": str(seen[node]),
                    "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": str(lease.server.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks join the store of this process
                }
            )
            seen[node] += 1
        told = zip(actors, settings, strict=True)
        ray.get([actor.__ray_call__.remote(_set, variables) for actor, variables in told])
        yield
    finally:
        lease.give_back()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise BackendUnavailableError("dist2.launch.ray needs Ray: pip install 'dist2[ray]'") from error
    return ray


# Run in the actors


def _node(actor: object) -> str:
    """Return the host of an actor."""
    return str(_ray().get_runtime_context().get_node_id())


def _set(actor: object, variables: dict[str, str]) -> None:
    set_environment(variables)
