# cython: language_level=3, binding=False, embedsignature=False
# distutils: sources = dist2/core/stream.c dist2/core/segments.c
# distutils: include_dirs = dist2/core
"""Payloads over sockets: the binding of dist2/core/stream.h."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

cdef extern from "stream.h" nogil:
    enum:
        FRAME_BYTES
    bint stream_read(int, char *, size_t *, bint)
    ctypedef struct Announced:
        int fd, back
        const char *announcement
        const char *consent
        const char *header
        char *payload
        char *staged
        size_t nbytes, longest, done, asked, filled
        uint64_t number
        bint agreed
    bint announced_move(Announced *, bint, bint)


def read_whole(int fd, size_t address, size_t nbytes, bint writes):
    """Read a known number of bytes from a socket, until about two milliseconds without data.

    Args:
        fd: A stream socket that does not block.
        address: Where the bytes belong.
        nbytes: How many.
        writes: Return as soon as there is room to write.

    Returns:
        How many came; ``~count`` where the stream has ended or failed behind them.
    """
    cdef size_t missing = nbytes
    cdef Py_ssize_t count
    cdef bint ended
    with nogil:
        ended = stream_read(fd, <char *>address, &missing, writes)
    count = nbytes - missing
    return ~count if ended else count


def move_message(
    bint sends, int fd, int back, bytes announcement not None, bytes consent not None, bytes header not None,
    size_t address, size_t nbytes, size_t longest, uint64_t number, size_t done, size_t asked, bint agreed,
    size_t staged, size_t filled, bint writes,
):
    """Announce a message, await its acceptance and write it; or await its announcement, accept and read it.

    Until nothing has moved for about two milliseconds, as many have passed, or something else can be done.

    Args:
        sends: Write it; else read it.
        fd: A non-blocking stream socket that carries it.
        back: Carries the receiver's answer.
        announcement: The frame that announces it, without its number.
        consent: The frame that accepts it, without its number.
        header: A segment's header, without its number, its beginning and its length.
        address: Where the payload lies.
        nbytes: Its length.
        longest: How long segments are.
        number: The message's number; its receiver knows it once it is announced.
        done: Moved bytes of its segments, headers included.
        asked: Sent bytes of the announcement, or of the acceptance.
        agreed: Whether it was accepted; on the receiver, whether it was announced.
        staged: Address of a place for headers that come.
        filled: How much of one is there.
        writes: Return as soon as there is room to write, while there is nothing to be written.

    Returns:
        Number, ``done``, ``asked``, ``agreed`` and ``filled``, as they are now (all of a header is there only
        if it is not the one that was expected); and whether a stream has ended or failed.
    """
    cdef Announced message
    cdef bint ended
    if not (len(announcement) == len(consent) == len(header) == FRAME_BYTES and nbytes and longest):
        raise ValueError("no such message")
    if asked > FRAME_BYTES or filled >= FRAME_BYTES:
        raise ValueError(f"asked: {asked}, filled: {filled}: a header has {FRAME_BYTES} bytes")
    memset(&message, 0, sizeof(message))
    message.fd, message.back, message.payload, message.staged = fd, back, <char *>address, <char *>staged
    message.announcement, message.consent, message.header = announcement, consent, header
    message.nbytes, message.longest, message.number, message.done = nbytes, longest, number, done
    message.asked, message.agreed, message.filled = asked, agreed, filled
    with nogil:
        ended = announced_move(&message, sends, writes)
    return message.number, message.done, message.asked, bool(message.agreed), message.filled, bool(ended)
