"""Sealed values in a store that others can write: only values that a member sealed for this use count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import pytest
from support.threads import ends_of

import dist2
from dist2 import HashStore, ProcessGroup
from dist2.backends.socket.transport.node import Node
from dist2.errors import AuthenticationError, InvalidUsageError
from dist2.runtime.config import Config
from dist2.runtime.deadline import Deadline
from dist2.runtime.secret import Secret
from dist2.security.authenticator import Credentials
from dist2.security.refusals import refusals
from dist2.security.sealing import seal, unseal

SECRET = Secret(b"the secret of these tests")
OTHER = Secret(b"not the secret of these tests")
KNOWS = Credentials(SECRET, "job")
NONE = Credentials(None, "job")
TEXT = 'a text: with colons, "quotes" and \u00fcmlauts'


def refused(credentials: Credentials, sealed: str, *about: str) -> str:
    with pytest.raises(AuthenticationError) as caught:
        unseal(credentials, sealed, *about)
    return caught.value.reason


@pytest.mark.parametrize("text", ["", TEXT, ":" * 9, "\ud800", "x" * 100_000])
@pytest.mark.parametrize("credentials", [KNOWS, NONE, Credentials(SECRET)], ids=["secret", "none", "no job"])
def test_a_member_reads_what_a_member_sealed(credentials: Credentials, text: str) -> None:
    assert unseal(credentials, seal(credentials, text, "card", "3"), "card", "3") == text


def test_without_a_secret_a_text_stays_as_it_is() -> None:
    assert seal(NONE, TEXT, "card") == TEXT


def test_a_seal_is_for_one_use() -> None:
    sealed = seal(KNOWS, TEXT, "card", "group", "3")
    for about in (
        ("card", "group", "4"),
        ("card", "other", "3"),
        ("tuning", "group", "3"),
        ("card", "group3"),
    ):
        assert refused(KNOWS, sealed, *about) == "wrong_secret"


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (Credentials(OTHER, "job"), "wrong_secret"),
        (Credentials(SECRET, "another"), "other_job"),
        (NONE, "no_secret_here"),
    ],
    ids=["other secret", "other job", "none"],
)
def test_who_differs_does_not_take_it(reader: Credentials, reason: str) -> None:
    assert refused(reader, seal(KNOWS, TEXT)) == reason


@pytest.mark.parametrize("forged", [TEXT, "", "dist2-seal-1:", "dist2-seal-1:::", "dist2-seal-1:a:b:c:d"])
def test_what_nobody_sealed_is_refused(forged: str) -> None:
    assert refused(KNOWS, forged) in ("no_secret_there", "other_job")


@pytest.mark.parametrize("mac", ["", "00", "zz", "00" * 32, "\u0661" * 64])
def test_a_wrong_seal_is_refused(mac: str) -> None:
    begins, job, _, text = seal(KNOWS, TEXT).split(":", 3)
    assert refused(KNOWS, f"{begins}:{job}:{mac}:{text}") == "wrong_secret"


def test_each_byte_counts() -> None:
    sealed = seal(KNOWS, "ab")
    for at in range(len(sealed)):
        changed = sealed[:at] + ("0" if sealed[at] != "0" else "1") + sealed[at + 1 :]
        refused(KNOWS, changed)


# In groups


@pytest.fixture
def node_of() -> Iterator[Callable[..., Node]]:
    with ExitStack() as stack:

        def make(secret: Secret | None = SECRET, job_id: str = "job") -> Node:
            node = Node(config=Config(secret=secret, job_id=job_id))
            stack.callback(node.close)
            return node

        yield make


def open_ranks(nodes: list[Node], store: HashStore | None = None, timeout: float = 5.0) -> list[Any]:
    """Return the group of each rank, or its exception."""
    met = store or HashStore()

    def open_one(rank: int) -> ProcessGroup:
        size, node = len(nodes), nodes[rank]
        return dist2.new_group("socket", timeout, store=met, rank=rank, world_size=size, node=node)

    return ends_of(*(partial(open_one, rank) for rank in range(len(nodes))))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"secret": OTHER}, ("another secret", "another secret")),
        ({"secret": None}, ("not sealed", "no secret is set here")),
        ({"job_id": "another"}, ("another job", "another job")),
    ],
    ids=["other secret", "none", "other job"],
)
def test_all_ranks_learn_at_once_who_differs(
    node_of: Callable[..., Node], theirs: dict[str, Any], words: tuple[str, str]
) -> None:
    before = sum(count for (plane, _), count in refusals.counts().items() if plane == "card")
    errors = open_ranks([node_of(), node_of(), node_of(**theirs)])
    for rank, error in enumerate(errors):
        assert isinstance(error, AuthenticationError), error
        assert words[rank == 2] in str(error)
        assert ("rank 2" if rank < 2 else "rank 0") in str(error)
    assert sum(count for (plane, _), count in refusals.counts().items() if plane == "card") == before + 3


class Meddler(HashStore):
    """A store that an attacker can write to: it changes cards on the way."""

    def __init__(self, meddle: Callable[[list[bytes]], list[bytes]]) -> None:
        super().__init__()
        self._meddle = meddle

    def _fetch(self, keys: tuple[bytes, ...], deadline: Deadline) -> list[bytes]:
        values = dict(zip(keys, super()._fetch(keys, deadline), strict=True))
        cards = [key for key in keys if b"card" in key]
        if cards:
            values.update(zip(cards, self._meddle([values[key] for key in cards]), strict=True))
        return list(values.values())


def test_a_strangers_card_is_not_met(node_of: Callable[..., Node]) -> None:
    """The card names its own process, on this host, with memory that could be mapped."""
    stranger = Node(config=Config())
    try:
        card = stranger.card.to_json().encode()
        errors = open_ranks([node_of(), node_of()], Meddler(lambda values: [values[0], card]))
    finally:
        stranger.close()
    assert all(isinstance(error, AuthenticationError) for error in errors), errors
    assert "rank 1 has published: it is not sealed" in str(errors[0])


def test_the_card_of_another_rank_or_group_is_not_met(node_of: Callable[..., Node]) -> None:
    nodes = [node_of(), node_of()]
    seen: list[list[bytes]] = []

    def note(values: list[bytes]) -> list[bytes]:
        seen.append(values)
        return values

    for made in open_ranks(nodes, Meddler(note)):
        assert isinstance(made, ProcessGroup)
        made.shutdown()
    for meddle in (lambda values: values[::-1], lambda values: seen[0]):
        errors = open_ranks(nodes, Meddler(meddle))
        assert all(isinstance(error, AuthenticationError) for error in errors), errors
        assert "its seal is wrong" in str(errors[0])


def test_a_handle_that_no_member_made_is_not_met(node_of: Callable[..., Node]) -> None:
    (alone,) = open_ranks([node_of()])
    stranger = attrs.evolve(KNOWS, secret=OTHER)
    with alone:
        mine = alone.handle()
        text = unseal(KNOWS, mine, "handle")
        assert json.loads(text)["card"]
        for forged, words in ((text, "not sealed"), (seal(stranger, text, "handle"), "seal is wrong")):
            with pytest.raises(AuthenticationError, match=words):
                alone.reconfigure("next", [mine, forged], timeout=5)
        for malformed in ("", "{}", "[]", "{"):
            with pytest.raises(InvalidUsageError, match="not the handle"):
                alone.reconfigure("next", [mine, seal(KNOWS, malformed, "handle")], timeout=5)
        again = alone.reconfigure("next", [mine], timeout=5)
        again.shutdown()
