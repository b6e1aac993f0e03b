"""How ranks meet: from a URL to a store that they share, and to a group that all of them agree on.

`url` parses URLs and keeps the registry of handlers. `session` brings ranks together at an endpoint.
`joining` compares the arguments of the ranks that build a group. In both, a rank joins by a `JoinRequest`
(`requests`) and waits by `dist2.store.waiting`. `liveness` finds ranks that have died meanwhile.
"""

from dist2.rendezvous.url import (
    Handler,
    Located,
    Meeting,
    call_handler,
    locate,
    register_rendezvous_handler,
    rendezvous,
)

__all__ = [
    "Handler",
    "Located",
    "Meeting",
    "call_handler",
    "locate",
    "register_rendezvous_handler",
    "rendezvous",
]
