"""The handshake without sockets: peers with the secret pass, others fail with any bytes."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist2.errors import AuthenticationError
from dist2.runtime.secret import Secret
from dist2.security.handshake import (
    MESSAGE_BYTES,
    OPENER_BYTES,
    Caller,
    Handshake,
    Listener,
    Plane,
    Reason,
    RefusalError,
    explanation,
    identity,
    refusal,
)

SECRET = Secret(b"a secret of the test, long enough")
OTHER = Secret(b"another secret of the test, as long")


def caller(
    secret: Secret = SECRET, plane: Plane = Plane.DATA, job: str = "job", me: str = "a", target: str = "b"
) -> Caller:
    return Caller(secret, plane, job, me, target)


def listener(secret: Secret = SECRET, plane: Plane = Plane.DATA, job: str = "job", me: str = "b") -> Listener:
    return Listener(secret, plane, job, me)


def feed(side: Handshake, data: bytes) -> bytes:
    """Hand bytes over as a connection does: never more than are wanted."""
    out = b""
    while data:
        part, data = data[: side.wanted], data[side.wanted :]
        out += side.feed(part)
    return out


@attrs.frozen
class Record:
    """The bytes of one handshake."""

    opener: bytes
    challenge: bytes
    proof: bytes
    welcome: bytes


def meet(calling: Caller, listening: Listener) -> Record:
    """Run a whole handshake."""
    challenge = feed(listening, calling.opener)
    proof = feed(calling, challenge)
    welcome = feed(listening, proof)
    assert feed(calling, welcome) == b""
    return Record(calling.opener, challenge, proof, welcome)


def test_who_shares_the_secret_gets_in() -> None:
    calling, listening = caller(), listener()
    record = meet(calling, listening)
    assert calling.done
    assert listening.done
    assert listening.caller == identity("a")
    assert [len(each) for each in attrs.astuple(record)] == [OPENER_BYTES, *[MESSAGE_BYTES] * 3]


def test_bytes_may_come_one_at_a_time() -> None:
    calling, listening = caller(), listener()
    challenge = b"".join(listening.feed(bytes([each])) for each in calling.opener)
    proof = b"".join(calling.feed(bytes([each])) for each in challenge)
    welcome = b"".join(listening.feed(bytes([each])) for each in proof)
    for each in welcome:
        calling.feed(bytes([each]))
    assert calling.done
    assert listening.done


@pytest.mark.parametrize(
    ("calling", "listening", "reason"),
    [
        (caller(OTHER), listener(), Reason.WRONG_SECRET),
        (caller(job="other"), listener(), Reason.OTHER_JOB),
        (caller(target="c"), listener(), Reason.OTHER_TARGET),
        (caller(plane=Plane.STORE), listener(), Reason.OTHER_PLANE),
    ],
    ids=lambda value: value.label if isinstance(value, Reason) else "",
)
def test_who_differs_is_refused_and_told_why(calling: Caller, listening: Listener, reason: Reason) -> None:
    with pytest.raises(RefusalError) as refused:
        meet(calling, listening)
    assert refused.value.reason == reason.label
    with pytest.raises(RefusalError) as told:
        feed(calling, refused.value.reply)
    assert told.value.reason == f"refused_there_{reason.label}"
    assert not calling.done
    assert not listening.done


def test_an_older_version_is_refused_whatever_its_length() -> None:
    for data in (b"dist2-hs" + bytes([0, 0, 1, 1]) + bytes(4), b"dist2-hs" + bytes([2, 0, 1, 1]) + bytes(4)):
        with pytest.raises(RefusalError) as refused:
            listener().feed(data)
        assert refused.value.reason == "other_version"


def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    calling = caller()
    impostor = listener(OTHER)
    challenge = feed(impostor, calling.opener)
    feed(calling, challenge)
    # It cannot check the proof; it answers as well as it can.
    forged = refusal(Reason.UNKNOWN, Plane.DATA)[:11] + bytes([4, 0, 0, 0, 0]) + bytes(32)
    with pytest.raises(RefusalError, match="its proof is wrong"):
        feed(calling, forged)


def test_recorded_bytes_open_nothing_a_second_time() -> None:
    record = meet(caller(), listener())
    again = listener()
    feed(again, record.opener)
    with pytest.raises(RefusalError) as refused:
        feed(again, record.proof)
    assert refused.value.reason == "wrong_secret"

    calling = caller()
    feed(calling, record.challenge)
    with pytest.raises(RefusalError) as refused:
        feed(calling, record.welcome)
    assert refused.value.reason == "wrong_secret"


def test_a_reflected_challenge_proves_nothing() -> None:
    """An attacker without the secret lets a caller answer the challenge that it got as a caller itself."""
    honest = listener()
    opener = caller().opener
    challenge = feed(honest, opener)
    victim = caller()
    proof = feed(victim, challenge)
    with pytest.raises(RefusalError):
        feed(honest, proof)  # it covers the victim's opener, not this one
    with pytest.raises(RefusalError):
        feed(caller(), opener)  # a caller's message is never valid as a listener's
    with pytest.raises(RefusalError):
        feed(victim, proof)


def test_a_stranger_gets_no_more_than_its_opener_answered() -> None:
    for data in (b"GET / HTTP/1.1\r\n", b"\xd2\x01" + bytes(54), b"\x00\xce\xf7\x85\x3c", b"d1"):
        with pytest.raises(RefusalError) as refused:
            feed(listener(), data)
        assert refused.value.reason == "no_secret_there"
        assert len(refused.value.reply) == MESSAGE_BYTES


def test_nothing_is_expected_beyond_fixed_lengths() -> None:
    listening = listener()
    assert listening.wanted == OPENER_BYTES
    feed(listening, caller().opener)
    assert listening.wanted == MESSAGE_BYTES


@given(step=st.integers(0, 3), place=st.integers(0, OPENER_BYTES - 1), mask=st.integers(1, 255))
def test_any_changed_byte_is_refused(step: int, place: int, mask: int) -> None:
    calling, listening = caller(), listener()

    def changed(number: int, message: bytes) -> bytes:
        if number != step:
            return message
        at = place % len(message)
        return message[:at] + bytes([message[at] ^ mask]) + message[at + 1 :]

    with pytest.raises(AuthenticationError):
        challenge = feed(listening, changed(0, calling.opener))
        proof = feed(calling, changed(1, challenge))
        welcome = feed(listening, changed(2, proof))
        feed(calling, changed(3, welcome))
    assert not (calling.done and listening.done)


@given(st.binary(max_size=400))
def test_no_bytes_get_a_stranger_in(data: bytes) -> None:
    for side in (listener(), caller()):
        try:
            while data and not side.done:
                part, data = data[: side.wanted], data[side.wanted :]
                side.feed(part)
        except AuthenticationError:
            continue
        assert not side.done


@given(st.binary(max_size=100))
def test_an_explanation_is_found_or_not(data: bytes) -> None:
    for prefix in (b"", b"dist2-hs", b"\x15\x03"):
        found = explanation(prefix + data)
        assert found is None or isinstance(found, AuthenticationError)


def test_who_has_no_secret_understands_the_refusal() -> None:
    with pytest.raises(RefusalError) as refused:
        feed(listener(), b"\xd2\x01" + bytes(54))
    told = explanation(refused.value.reply)
    assert told is not None
    assert "it asks for a secret: set the same DIST2_SECRET here" in str(told)
    assert explanation(b"\xd2\x01" + bytes(54)) is None


def test_nonces_are_fresh() -> None:
    assert caller().opener != caller().opener
    assert feed(listener(), caller().opener) != feed(listener(), caller().opener)
