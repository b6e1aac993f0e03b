"""Ranks that other engines start: `dist2.launch.ray`. ``python -m dist2.run`` starts ranks on one host."""

from datetime import timedelta

from dist2.runtime.deadline import Deadline
from dist2.security.authenticator import Credentials
from dist2.store.address import Address
from dist2.store.shared_server import Lease, share

_LIMIT = timedelta(seconds=30)


def serve_ranks(host: str) -> Lease:
    """Serve the store where the ranks of this process's job meet, at a port that the kernel chooses.

    As the store of torchrun's agent it asks for no secret, so that torch.distributed joins it too; with a
    secret, ranks publish sealed addresses in it and authenticate each other.
    """
    return share(Address(host, 0), Deadline.after(_LIMIT), Credentials())
