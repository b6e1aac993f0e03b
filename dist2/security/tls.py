"""TLS 1.3 between members: both sides present a certificate of the job's CA.

`TlsStream` is a non-blocking socket as links and stores know it: `sendmsg`, `recv_into`, and
`BlockingIOError` where either direction is not ready.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import attrs

from dist2 import errors  # its types of torch are loaded when they are used
from dist2.errors import InvalidUsageError
from dist2.runtime.secret import require_private

Buffer = bytes | bytearray | memoryview

Stream = TypeVar("Stream")

RECORD_BYTES = 1 << 14
"""The longest that TLS has."""
_WORTH_SENDING_ALONE = 1 << 12


@attrs.frozen
class TlsFiles:
    """Where the certificates are, as PEM.

    Attributes:
        cert: This process's certificate, and the chain from it to the CA.
        key: Its private key, without a passphrase; readable by its owner alone.
        ca: The CA that signed the certificates of all members; a process with such a certificate is a member.
    """

    cert: str
    key: str
    ca: str

    def check(self) -> None:
        """See that they can be used; they are read once.

        Raises:
            InvalidUsageError: See `context`.
        """
        for listens in (False, True):
            self.context(listens)

    def context(self, listens: bool) -> ssl.SSLContext:
        """Return how one side does TLS.

        Raises:
            InvalidUsageError: A file cannot be read or used, or others may read the key.
        """
        return _context(self, listens, listens)

    def web_context(self) -> ssl.SSLContext:
        """Return how a web server does TLS: its clients need no certificate, but a token.

        Raises:
            InvalidUsageError: As `context`.
        """
        return _context(self, True, False)


@cache
def _context(files: TlsFiles, listens: bool, among_members: bool) -> ssl.SSLContext:
    require_private(files.key, "DIST2_TLS_KEY")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Members are reached at changing addresses: the CA's signature proves membership, not the host name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if among_members or not listens else ssl.CERT_NONE
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise InvalidUsageError(
            f"DIST2_TLS_CERT {files.cert!r} and DIST2_TLS_KEY {files.key!r} cannot be used: {_words(error)}"
        ) from error
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidUsageError(f"DIST2_TLS_CA {files.ca!r} cannot be used: {_words(error)}") from error
    if listens:
        context.num_tickets = 0  # sessions are not resumed, and a listener must not write unasked
    return context


def _refuse_passphrase() -> str:
    """Be asked instead of the terminal."""
    raise ssl.SSLError("the key has a passphrase")


def _words(error: OSError) -> str:
    return error.strerror or getattr(error, "reason", None) or str(error)


class TlsStream:
    """An encrypted connection.

    Args:
        sock: A connected socket, non-blocking; taken over.
        context: How to do TLS.
        listens: Which side this is.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, listens: bool) -> None:
        self._tls = context.wrap_socket(sock, server_side=listens, do_handshake_on_connect=False)
        # A record that the kernel did not take: already encrypted, so the next write must begin with it.
        self._record = b""

    def fileno(self) -> int:
        return self._tls.fileno()

    @property
    def raw(self) -> socket.socket:
        """The socket under it, to be asked about and not to be used."""
        return self._tls

    def shake_hands(self) -> None:
        """Continue the handshake.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError: It has to wait.
            OSError: It failed; an `ssl.SSLError` says why.
        """
        self._tls.do_handshake()

    def pending(self) -> int:
        """Number of decrypted bytes that are not read: a poll does not report them."""
        return self._tls.pending()

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Write as much as the kernel takes. After a partial write, the next call must continue from there.

        Raises:
            BlockingIOError: It takes nothing now.
            OSError: The connection is gone.
        """
        rest = [memoryview(each) for each in buffers if len(each)]
        written = 0
        while rest:
            record = self._record or _first_record(rest)
            try:
                count = self._tls.send(record)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                # A copy: its memory may be taken back before it goes out.
                self._record = bytes(record)
                if not written:
                    raise BlockingIOError from None
                return written
            self._record = b""
            written += count
            _skip(rest, count)
        return written

    def send(self, data: Buffer) -> int:
        """Do that with one buffer."""
        return self.sendmsg([data])

    def recv_into(self, buffer: memoryview) -> int:
        """Read the bytes that have arrived, up to the length of ``buffer``; 0 at the end.

        Raises:
            BlockingIOError: None has arrived.
            OSError: The connection is gone.
            AuthenticationError: The other side refuses this one, or does not speak TLS.
        """
        filled = 0
        while filled < len(buffer):
            try:
                count = self._tls.recv_into(buffer[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not filled:
                    raise BlockingIOError from None
                break
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLError as error:
                raise _refused(error) from error
            if not count:
                break
            filled += count
        return filled

    def recv(self, most: int) -> bytes:
        """Do that with a new buffer."""
        buffer = bytearray(most)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def discard(self) -> None:
        """Discard received bytes that are not decrypted; the connection is unusable after that."""
        socket.socket.recv_into(self._tls, bytearray(1 << 16))

    def shutdown(self, how: int) -> None:
        """End one or both directions of the connection under the encryption, from any thread."""
        # Not the method of `SSLSocket`, which also forgets that the socket was encrypted.
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        self._tls.close()


def _refused(error: ssl.SSLError) -> errors.AuthenticationError | ssl.SSLError:
    """Return the meaning of an error: a caller learns at its first read that its certificate is refused."""
    if isinstance(error, ssl.SSLEOFError):
        return error
    words = (error.reason or str(error)).replace("_", " ").lower()
    return errors.AuthenticationError(f"TLS with the other side failed: {words}", reason="refused_there_tls")


def _first_record(rest: list[memoryview]) -> Buffer:
    """Return the next bytes to encrypt: the beginning of a long buffer as it is, or short ones joined."""
    if len(rest[0]) >= _WORTH_SENDING_ALONE or len(rest) == 1:
        return rest[0][:RECORD_BYTES]
    joined = bytearray()
    for buffer in rest:
        joined += buffer[: RECORD_BYTES - len(joined)]
        if len(joined) == RECORD_BYTES:
            break
    return joined


def _skip(rest: list[memoryview], count: int) -> None:
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if count:
        rest[0] = rest[0][count:]


def socket_below(stream: Stream | TlsStream) -> Stream | socket.socket:
    """Return the socket below a TLS stream, or the stream itself if it is a socket."""
    return stream.raw if isinstance(stream, TlsStream) else stream


def receive(stream: socket.socket | TlsStream, about: int) -> bytes:
    """Read about so many bytes of those that have arrived, and leave none that a poll would not report.

    Raises:
        BlockingIOError: Nothing is.
        OSError, AuthenticationError: The connection is gone.
    """
    data = stream.recv(about)
    if isinstance(stream, TlsStream) and stream.pending():
        data += stream.recv(stream.pending())
    return data
