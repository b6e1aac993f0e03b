"""How ranks meet: from a URL to a store that they share, and to a group that all of them agree on.

`url` parses URLs and keeps the registry of handlers. `session` brings ranks together at an endpoint, through
the keys of `registration`. `joining` lets ranks that build a group compare what they ask for. `liveness` says
which process a rank is, and watches for those that end.
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
