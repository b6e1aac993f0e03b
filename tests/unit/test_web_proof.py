"""The handshake of the control plane, without any HTTP."""

from __future__ import annotations

import pytest

from dist2.errors import AuthenticationError
from dist2.secret import Secret
from dist2.security import web
from dist2.security.web import Admission, Doorkeeper, Visitor, is_proof, refusal

SECRET = Secret(b"the secret of these tests")
OTHER = Secret(b"not the secret of these tests")
TARGET = "/works?limit=3"


@pytest.fixture
def door() -> Doorkeeper:
    return Doorkeeper(SECRET, "job")


def visitor(secret: Secret = SECRET, job_id: str = "job") -> Visitor:
    return Visitor(secret, job_id, "GET", TARGET)


def refused(door: Doorkeeper, authorization: str, method: str = "GET", target: str = TARGET) -> str:
    with pytest.raises(AuthenticationError) as caught:
        door.admit(authorization, method, target)
    return caught.value.reason


def admitted(door: Doorkeeper, authorization: str) -> Admission:
    admission = door.admit(authorization, "GET", TARGET)
    assert admission is not None
    return admission


def test_both_sides_prove_the_secret(door: Doorkeeper) -> None:
    caller = visitor()
    assert is_proof(caller.opener)
    assert door.admit(caller.opener, "GET", TARGET) is None, "it asks for a challenge"
    admission = admitted(door, caller.prove(door.challenge()))
    caller.check(admission.attest(200, b"body"), 200, b"body")


def test_a_challenge_among_other_schemes_is_found(door: Doorkeeper) -> None:
    assert admitted(door, visitor().prove(f"Bearer, {door.challenge()}"))
    assert admitted(door, visitor().prove(f'Basic realm="x", {door.challenge()}'))


@pytest.mark.parametrize(
    ("caller", "reason"),
    [(visitor(OTHER), "wrong_secret"), (visitor(job_id="another"), "other_job")],
    ids=["other secret", "other job"],
)
def test_who_differs_is_refused(door: Doorkeeper, caller: Visitor, reason: str) -> None:
    assert refused(door, caller.prove(door.challenge())) == reason


def test_a_proof_is_for_one_request_once(door: Doorkeeper) -> None:
    proof = visitor().prove(door.challenge())
    assert refused(door, proof, target="/metrics") == "wrong_secret"
    assert refused(door, proof, method="POST") == "wrong_secret"
    admitted(door, proof)
    assert refused(door, proof) == "replayed"
    assert refused(door, proof.replace("Dist2 ", "dist2 ")) == "replayed"


def test_a_proof_is_for_one_server(door: Doorkeeper) -> None:
    proof = visitor().prove(door.challenge())
    assert refused(Doorkeeper(SECRET, "job"), proof) == "stale_challenge"


def test_a_challenge_grows_old(door: Doorkeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CHALLENGE_S", 0.0)
    assert refused(door, visitor().prove(door.challenge())) == "stale_challenge"


def test_used_challenges_are_forgotten_when_they_are_of_no_use(
    door: Doorkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("dist2.security.web.time.monotonic", lambda: clock[0])
    for _ in range(5):
        admitted(door, visitor().prove(door.challenge()))
        assert len(door._used) == 1
        clock[0] += web.CHALLENGE_S + 1


@pytest.mark.parametrize("field", ["challenge", "nonce", "proof", "job", "version"])
def test_each_field_counts(door: Doorkeeper, field: str) -> None:
    proof = visitor().prove(door.challenge())
    before, _, rest = proof.partition(f'{field}="')
    value, _, after = rest.partition('"')
    for changed in ("", "\u0661" * len(value), value[:-1], ("1" if value[0] != "1" else "2") + value[1:]):
        assert refused(door, f'{before}{field}="{changed}"{after}')
    assert admitted(door, proof)


@pytest.mark.parametrize("header", ["Dist2", "Dist2 ", 'Dist2 version="0"', 'Dist2 version="2", proof=""'])
def test_other_versions_are_refused(door: Doorkeeper, header: str) -> None:
    assert is_proof(header)
    assert refused(door, header) == "other_version"


def test_an_impostor_cannot_answer(door: Doorkeeper) -> None:
    caller = visitor()
    admission = admitted(door, caller.prove(door.challenge()))
    fine = admission.attest(200, b"body")
    forged = Admission(admission.proof, OTHER).attest(200, b"body")
    for info, status, body in (
        (forged, 200, b"body"),
        (fine, 404, b"body"),
        (fine, 200, b"other"),
        ("", 200, b"body"),
    ):
        with pytest.raises(AuthenticationError):
            caller.check(info, status, body)
    caller.check(fine, 200, b"body")


@pytest.mark.parametrize(
    ("challenges", "words"),
    [
        ("", "does not authenticate itself"),
        ("Bearer", "does not authenticate itself"),
        ('Dist2 version="2", challenge="00"', "does not authenticate itself"),
        (refusal("wrong_secret"), "it has another secret"),
        (refusal("no_secret_here"), "it has no secret, and this process has"),
        (refusal("anything"), "no reason that is known here"),
    ],
)
def test_a_caller_says_what_is_wrong(challenges: str, words: str) -> None:
    with pytest.raises(AuthenticationError, match=words):
        visitor().prove(challenges)


def test_nothing_of_the_secret_is_told() -> None:
    door = Doorkeeper(SECRET, "job")
    caller = visitor()
    proof = caller.prove(door.challenge())
    said = (
        proof + admitted(door, proof).attest(200, b"") + repr(admitted(door, caller.prove(door.challenge())))
    )
    assert "secret of these tests" not in said
    assert SECRET._key.hex() not in said
