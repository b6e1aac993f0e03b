"""`Doorway`: connections that have not ended their TLS handshake; they are bounded in number and in time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from dist2.security.refusals import refusals
from observability.server.reach import peer_name


class Doorway:
    """Takes connections, and hands them on when they are encrypted.

    asyncio's own server bounds how long a handshake may take, and not how many there are at once.

    Args:
        tls: How to encrypt.
        inside: Makes the protocol of a connection whose handshake has ended.
        most: Handshakes at once; for one more, the oldest is ended.
        patience_s: What a handshake may take.
    """

    def __init__(
        self, tls: ssl.SSLContext, inside: Callable[[], asyncio.Protocol], most: int, patience_s: float
    ) -> None:
        self._tls = tls
        self._inside = inside
        self._most = most
        self._patience_s = patience_s
        # In the order they came; held here, as the loop holds tasks weakly.
        self._handshakes: dict[asyncio.Transport, asyncio.Task[None]] = {}

    def knock(self) -> asyncio.Protocol:
        """Return the protocol of a connection that has just been accepted."""
        return _Knock(self)

    def take(self, transport: asyncio.Transport) -> None:
        """Begin a handshake."""
        transport.pause_reading()  # `start_tls` resumes; what came before would be lost
        if len(self._handshakes) >= self._most:
            oldest = next(iter(self._handshakes))
            self._turn_away(oldest, "crowded", "too many others have not ended their handshake, either")
        task = asyncio.get_running_loop().create_task(self._let_in(transport))
        self._handshakes[transport] = task

    async def _let_in(self, transport: asyncio.Transport) -> None:
        protocol = self._inside()
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                transport,
                protocol,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._patience_s,
            )
        except asyncio.CancelledError:  # the server ends
            transport.abort()
            raise
        except ConnectionAbortedError:
            self._turn_away(transport, "silent", f"no end of its handshake within {self._patience_s} s")
        except ConnectionError:
            self._turn_away(transport, "ended", "it ended in its handshake")
        except (OSError, ssl.SSLError) as error:
            self._turn_away(transport, "tls", f"no handshake: {error}")
        else:
            self._handshakes.pop(transport, None)
            if encrypted is not None:
                protocol.connection_made(encrypted)

    def _turn_away(self, transport: asyncio.Transport, reason: str, why: str) -> None:
        if self._handshakes.pop(transport, None) is None:
            return  # it was before
        refusals.note("control", reason, peer_name(transport.get_extra_info("peername")), why)
        transport.abort()


class _Knock(asyncio.Protocol):
    """A connection until its handshake begins."""

    def __init__(self, doorway: Doorway) -> None:
        self._doorway = doorway

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # of a stream socket
        self._doorway.take(transport)
