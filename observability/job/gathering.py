"""Ask all ranks of the job for their state, over a tree, with a limit for each that does not answer.

The rank that is asked divides the others into at most `FAN_OUT` parts and asks the first of each part to
answer for itself and to gather from the rest of its part: N ranks are N - 1 requests in about log(N) /
log(`FAN_OUT`) rounds, and no rank has more than `FAN_OUT` requests open. The request carries the addresses,
so that inner ranks need no store. A rank that does not answer is noted, and its part divided again.

Clocks. Each answer bears the time at which it was made. The asking rank takes it for that of the middle of
the request: the offset is wrong by at most half of the time that the request took. Along the tree offsets
and errors add up. Processes of one host have one clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import attrs

from dist2.errors import InvalidUsageError
from dist2.runtime.other_process import Process
from observability.access import is_loopback
from observability.client import Asker
from observability.job.answer import NO_ANSWER, RANK_S, Answer, State
from observability.job.directory import Entry
from observability.job.fan_out import ask_each
from observability.job.stacks import look_at
from observability.job.state import PROTOCOL

FAN_OUT = 32
MAX_LEVELS = 6

Body = dict[str, Any]


@attrs.frozen
class Gatherer:
    """Gathers the answers of ranks.

    Attributes:
        asker: Sends the requests.
        token: The token of the job.
    """

    asker: Asker
    token: str

    def gather(
        self, entries: Iterable[Entry], wanted: Mapping[str, Any], limit_s: float = RANK_S
    ) -> dict[int, Answer]:
        """Return the answer of each rank, or the reason of its silence.

        Args:
            entries: The ranks to ask; not the caller.
            wanted: The parts of an answer: see `Member.own_answer`.
            limit_s: How long a rank may take to answer for itself.
        """
        parts = _parts(list(entries))
        if not parts:
            return {}
        found: dict[int, Answer] = {}
        answers = ask_each(
            range(len(parts)), lambda index: self._ask_part(parts[index], wanted, limit_s), FAN_OUT
        )
        for of_part in answers.values():
            found |= of_part
        return found

    def each(
        self, entries: Iterable[Entry], path: str, body: Mapping[str, Any], limit_s: float
    ) -> dict[int, Any]:
        """Send one request to each rank, not over the tree; return its answer, or the error in words."""

        def ask(entry: Entry) -> Any:
            try:
                text = self.asker.ask(entry.url + path, self.token, body=dict(body), timeout_s=limit_s)
                return json.loads(text)
            except HTTPError as error:
                error.close()
                return {"error": f"{error.code} {error.reason}"}
            except (OSError, ValueError, InvalidUsageError) as error:
                return {"error": f"{type(error).__name__}: {error}"}

        by_rank = {each.rank: each for each in entries}
        return ask_each(by_rank, lambda rank: ask(by_rank[rank]), FAN_OUT)

    def _ask_part(self, part: list[Entry], wanted: Mapping[str, Any], limit_s: float) -> dict[int, Answer]:
        """Ask the first of a part to gather from the rest; where it does not answer, ask the rest anew."""
        first, rest = part[0], part[1:]
        body = {"protocol": PROTOCOL, "what": dict(wanted), "limit_s": limit_s, "entries": _written(rest)}
        answers = self._ask_one(first, body, limit_s * (1 + _levels(len(rest))))
        return (
            answers
            if first.rank in answers and len(answers) > len(rest)
            else {
                **answers,
                **self.gather([each for each in rest if each.rank not in answers], wanted, limit_s),
            }
        )

    def _ask_one(self, entry: Entry, body: Body, limit_s: float) -> dict[int, Answer]:
        """Return the answers of a rank and of the ranks that it asked; of a silent rank, the reason."""
        unreachable = why_unreachable(entry)
        if unreachable:
            return {entry.rank: Answer(silence=unreachable, url=entry.url)}
        began_ns, began = time.time_ns(), time.monotonic()
        try:
            text = self.asker.ask(f"{entry.url}/job/gather", self.token, body=body, timeout_s=limit_s)
            took_s = time.monotonic() - began
            return _read(entry, text, began_ns, took_s)
        except HTTPError as error:
            error.close()
            silence = f"its control plane refused: {error.code} {error.reason}"[:300]
        except (URLError, OSError) as error:
            silence = _words(error, time.monotonic() - began)
        except InvalidUsageError as error:
            silence = f"its address cannot be used: {error}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            silence = f"it answered something else ({type(error).__name__}: {error})"[:300]
        return {entry.rank: Answer(silence=silence, url=entry.url)}


def read_request(body: Any) -> tuple[list[Entry], Body, float]:
    """Return the entries of a request, the wanted parts of an answer, and the limit for each rank.

    Raises:
        ValueError: It is no such request, or of another version.
    """
    if not isinstance(body, dict) or body.get("protocol") != PROTOCOL:
        raise ValueError(f"the request is not of version {PROTOCOL}")
    try:
        entries = [_entry(each) for each in body["entries"]]
        limit_s, wanted = float(body["limit_s"]), dict(body["what"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the request cannot be read: {type(error).__name__}: {error}") from error
    if not 0 < limit_s <= 60:
        raise ValueError(f"limit_s must be from 0 to 60, got {limit_s}")
    return entries, wanted, limit_s


def written(answers: Mapping[int, Answer]) -> dict[str, Any]:
    """Return answers as JSON has them."""
    return {str(rank): attrs.asdict(answer, recurse=False) for rank, answer in answers.items()}


def why_unreachable(entry: Entry) -> str:
    """Say why a control plane cannot be asked from here; empty if it can."""
    parts = urlsplit(entry.url)
    only_there = parts.scheme == "unix" or is_loopback(parts.hostname or "")
    if only_there and entry.process.host != Process.here().host:
        host = entry.process.host
        return f"its control plane listens only on its own host {host}: start it with host=, under TLS"
    return ""


def seen_from_outside(entry: Entry) -> dict[str, Any] | None:
    """Say how the process of a silent rank is, if it is one of this host."""
    return process_seen(entry.process)


def process_seen(process: Process) -> dict[str, Any] | None:
    """Say how a process is, if it is one of this host."""
    outside = look_at(process)
    return None if outside is None else attrs.asdict(outside)


def _parts(entries: list[Entry]) -> list[list[Entry]]:
    """Divide entries into at most `FAN_OUT` parts of neighbours, about equal."""
    count = min(FAN_OUT, len(entries))
    bounds = [index * len(entries) // count for index in range(count + 1)] if count else []
    return [entries[low:high] for low, high in pairwise(bounds)]


def _levels(count: int) -> int:
    """Return how many rounds it takes to ask so many."""
    levels = 0
    while count > 0 and levels < MAX_LEVELS:
        count //= FAN_OUT
        levels += 1
    return levels


def _written(entries: Iterable[Entry]) -> list[list[Any]]:
    return [[each.rank, each.url, each.process.text] for each in entries]


def _entry(fields: Any) -> Entry:
    rank, url, text = fields
    process = Process.read(text) if isinstance(text, str) else None
    if process is None or not isinstance(url, str):
        raise ValueError("an entry names no process")
    return Entry(int(rank), url, process)


def _read(entry: Entry, text: bytes, began_ns: int, took_s: float) -> dict[int, Answer]:
    document = json.loads(text)
    if document.get("protocol") != PROTOCOL:
        version = str(document.get("version", "unknown"))
        raise ValueError(f"it speaks another version: dist2 {version}")
    found = {int(rank): Answer(**fields) for rank, fields in document["answers"].items()}
    state: State = found[entry.rank].state or {}
    if state["process"] != entry.process.text:
        raise ValueError(f"{entry.url} belongs to another process by now: {state['process']}")
    here, there = Process.here(), entry.process
    is_one_clock = (here.host, here.space) == (there.host, there.space)
    offset_s = 0.0 if is_one_clock else (state["epoch_ns"] - began_ns) / 1e9 - took_s / 2
    error_s = 0.0 if is_one_clock else took_s / 2
    # The offset that a rank reports of another is relative to its own clock.
    return {
        rank: attrs.evolve(
            answer,
            url=answer.url or entry.url,
            offset_s=answer.offset_s + offset_s,
            error_s=answer.error_s + error_s,
        )
        for rank, answer in found.items()
    }


def _words(error: OSError, took_s: float) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"{NO_ANSWER} {took_s:.1f} s"
    if isinstance(reason, ConnectionRefusedError):
        return "its control plane is gone: connection refused"
    return f"it cannot be asked: {reason}"
