"""Ask all ranks of the job for their state, over a tree, with a limit for each that does not answer.

The rank that is asked divides the others into at most `FAN_OUT` parts and asks the first of each part to
answer for itself and to gather from the rest of its part: N ranks are N - 1 requests in about log(N) /
log(`FAN_OUT`) rounds, and no rank has more than `FAN_OUT` requests to other hosts open, and as many to its
own. A part has whole hosts: the lowest rank of each asks the others of its host. The request carries the
addresses, so that inner ranks need no store. A rank that does not answer is noted, and its part divided
again.

Ranks on the way pass answers on in bytes (`observability.job.lines`); only the first reads them.

Clocks. Each answer bears the times at which its rank had the request and sent the answer. Their middle is
taken for that of the request: the offset is wrong by at most half of the time that the request took beside
the time in between (RFC 5905, section 8). Along the tree offsets and errors add up.
Processes of one host have one clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import attrs

from dist2.errors import InvalidUsageError
from dist2.runtime.other_process import Process
from observability.access import is_loopback
from observability.client import Asker
from observability.job.answer import NO_ANSWER, RANK_S, Answer
from observability.job.directory import Entry
from observability.job.fan_out import ask_each
from observability.job.lines import Line, decoded
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
        here: This process.
    """

    asker: Asker
    token: str
    here: Process

    def gather(
        self, entries: Iterable[Entry], wanted: Mapping[str, Any], limit_s: float = RANK_S
    ) -> dict[int, Line]:
        """Return the answer of each rank, or the reason of its silence.

        Args:
            entries: The ranks to ask; not the caller.
            wanted: The parts of an answer: see `Member.own_answer`.
            limit_s: How long a rank may take to answer for itself.
        """
        parts = _parts(entries, self.here)
        found: dict[int, Line] = {}
        answers = ask_each(
            range(len(parts)), lambda index: self._ask_part(parts[index], wanted, limit_s), len(parts)
        )
        for of_part in answers.values():
            found |= of_part
        return found

    def each(
        self,
        entries: Iterable[Entry],
        path: str,
        body: Mapping[str, Any],
        limit_s: float,
        silent: Container[int] = (),
    ) -> dict[int, Any]:
        """Send one request to each rank, not over the tree; return its answer, or the error in words.

        Ranks that were silent a moment ago have `RANK_S` only: a slow one acts on the request later.
        """

        def ask(entry: Entry) -> Any:
            timeout_s = min(limit_s, RANK_S) if entry.rank in silent else limit_s
            try:
                text = self.asker.ask(entry.url + path, self.token, body=dict(body), timeout_s=timeout_s)
                return json.loads(text)
            except HTTPError as error:
                error.close()
                return {"error": f"{error.code} {error.reason}"}
            except (OSError, ValueError, InvalidUsageError) as error:
                return {"error": f"{type(error).__name__}: {error}"}

        by_rank = {each.rank: each for each in entries}
        return ask_each(by_rank, lambda rank: ask(by_rank[rank]), FAN_OUT)

    def _ask_part(self, part: list[Entry], wanted: Mapping[str, Any], limit_s: float) -> dict[int, Line]:
        """Ask the first of a part to gather from the rest; where it does not answer, ask the rest anew."""
        first, rest = part[0], part[1:]
        what = {**wanted, "after_ns": first.after_ns}
        body = {"protocol": PROTOCOL, "what": what, "limit_s": limit_s, "entries": _written(rest)}
        lines = self._ask_one(first, body, limit_s * (1 + _levels(rest)))
        left = [each for each in rest if each.rank not in lines]
        return lines | self.gather(left, wanted, limit_s) if left else lines

    def _ask_one(self, entry: Entry, body: Body, limit_s: float) -> dict[int, Line]:
        """Return the answers of a rank and of the ranks that it asked; of a silent rank, the reason."""
        silence = why_unreachable(entry, self.here)
        began_ns, began = time.time_ns(), time.monotonic()
        try:
            if not silence:
                text = self.asker.ask(f"{entry.url}/job/gather", self.token, body=body, timeout_s=limit_s)
                return _read(entry, text, began_ns, self.here)
        except HTTPError as error:
            error.close()
            silence = f"its control plane refused: {error.code} {error.reason}"[:300]
        except (URLError, OSError) as error:
            silence = _words(error, time.monotonic() - began)
        except InvalidUsageError as error:
            silence = f"its address cannot be used: {error}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            silence = misread(error)
        return {entry.rank: Line.of(Answer(silence=silence))}


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


def misread(error: Exception) -> str:
    """Return the reason of a silence: the answer of a rank cannot be read."""
    return f"it answered something else ({type(error).__name__}: {error})"[:300]


def why_unreachable(entry: Entry, here: Process) -> str:
    """Say why a control plane cannot be asked from here; empty if it can."""
    if entry.process.host == here.host:
        return ""
    parts = urlsplit(entry.url)
    if parts.scheme == "unix" or is_loopback(parts.hostname or ""):
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


def _parts(entries: Iterable[Entry], here: Process) -> list[list[Entry]]:
    """Divide entries into at most `FAN_OUT` parts of whole other hosts, and as many of this one."""
    hosts: dict[tuple[str, str], list[Entry]] = {}
    for each in entries:
        hosts.setdefault((each.process.host, each.process.space), []).append(each)
    mine = hosts.pop((here.host, here.space), [])
    return [*_joined([[each] for each in mine]), *_joined(list(hosts.values()))]


def _joined(lists: Sequence[list[Entry]]) -> list[list[Entry]]:
    """Join neighbours, so that at most `FAN_OUT` lists are left, each of about as many.

    Of fewer lists where that takes no more rounds: then fewer ranks ask others.
    """
    count = _branches(len(lists))
    bounds = [index * len(lists) // count for index in range(count + 1)] if count else []
    return [[each for one in lists[low:high] for each in one] for low, high in pairwise(bounds)]


def _branches(count: int) -> int:
    """Return the least number of parts of so many ranks with which the tree has no more levels."""
    levels = 1
    while FAN_OUT**levels < count:
        levels += 1
    return next(each for each in range(FAN_OUT + 1) if each**levels >= count)


def _levels(entries: Sequence[Entry]) -> int:
    """Return how many rounds it takes at most to ask so many; one more where they are of several hosts."""
    count = len(entries)
    levels = int(count > 0 and entries[0].process.host != entries[-1].process.host)
    while count > 0 and levels < MAX_LEVELS:
        count //= FAN_OUT
        levels += 1
    return levels


def _written(entries: Iterable[Entry]) -> list[list[Any]]:
    return [[each.rank, each.url, each.process.text, each.after_ns] for each in entries]


def _entry(fields: Any) -> Entry:
    rank, url, text, after_ns = fields
    process = Process.read(text) if isinstance(text, str) else None
    if process is None or not isinstance(url, str):
        raise ValueError("an entry names no process")
    return Entry(int(rank), url, process, int(after_ns))


def _read(entry: Entry, text: bytes, began_ns: int, here: Process) -> dict[int, Line]:
    took_ns = time.time_ns() - began_ns
    head, lines = decoded(text)
    if head.get("protocol") != PROTOCOL:
        raise ValueError(f"it speaks another version: dist2 {head.get('version', 'unknown')}")
    there = entry.process
    if head["process"] != there.text or entry.rank not in lines:
        raise ValueError(f"{entry.url} belongs to another process by now: {head['process']}")
    if (here.host, here.space) == (there.host, there.space):
        return lines  # one clock
    inside_ns = head["answered_ns"] - head["received_ns"]
    offset_s = (head["received_ns"] + inside_ns / 2 - began_ns - took_ns / 2) / 1e9
    error_s = max(0, took_ns - inside_ns) / 2e9
    return {rank: line.moved(offset_s, error_s) for rank, line in lines.items()}


def _words(error: OSError, took_s: float) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"{NO_ANSWER} {took_s:.1f} s"
    if isinstance(reason, ConnectionRefusedError):
        return "its control plane is gone: connection refused"
    return f"it cannot be asked: {reason}"
