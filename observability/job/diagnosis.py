"""The rank that each operation waits for, and the reason: a pure function of the answers of the ranks.

Definitions. A collective with number n of a group is *entered* by the members that have issued at least n
operations; the others are *missing*. A message waits for its peer, unless the peer is in the matching call.
An edge of the wait-for graph leads from a rank inside an operation to each missing rank. A *culprit* is a
missing rank that waits for no rank, or does not answer; where all missing ranks wait, a cycle of the graph
is the reason, and where members of one group called different operations under one number, that divergence
is. Where no operation waits, but most ranks are in one other call of dist2, the others are culprits.

An asynchronous operation is *idle* if no thread of its rank waits for it, such as a receive that was posted
in advance. A rank does not wait because of it, so an idle operation makes an edge only if the others explain
nothing: a program may wait in a way that cannot be seen from here, such as a loop that polls. A cycle with
an idle operation is no deadlock. In a cycle with a message, the rank that made fewer calls is the culprit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import pairwise

import attrs

from observability.job.answer import ELSEWHERE, Answers, State
from observability.job.calls import fingerprints, text_of
from observability.job.graph import backwards, cycles, longest_path_to
from observability.job.messages import owed
from observability.job.rank_text import named, place_of, ranks_of
from observability.job.verdict import Diagnosis, Key, Missing, Waiting, key_of

DIST2S = "dist2's "
"""Beginning of the name of a function of dist2 that user code has called."""
MAX_TOLD = 3
"""Operations that are named in the sentence about one rank."""
MAX_WAITS = 256
"""Operations that are told, and sentences about culprits; all operations are judged."""
MAX_STEPS = 16
"""Ranks of a chain that are named."""
MAX_MISSING = 64
"""Missing ranks of one operation that are described one by one."""


def diagnose(answers: Answers, after_s: float) -> Diagnosis:
    """Say which operations wait, for which ranks, and why.

    Args:
        answers: By rank in the job: all of its ranks.
        after_s: Operations that are younger than this are held for in progress.
    """
    return _Diagnostician(answers, after_s).diagnosis()


class _Diagnostician:
    def __init__(self, answers: Answers, after_s: float) -> None:
        self._answers = answers
        self._after_s = after_s
        self._states = {rank: each.state for rank, each in answers.items() if each.state is not None}
        self._left = self._gone([rank for rank in answers if rank not in self._states])
        self._edges: dict[int, dict[int, Waiting]] = {}
        self._apart: list[int] = []
        self._described: dict[tuple[int, str], Missing] = {}
        self._meeting: dict[tuple[str, str, int, int | None], set[int]] = defaultdict(set)
        for rank, state in self._states.items():
            for each in state["in_flight"]:
                if each["p2p"]:
                    self._meeting[each["uid"], each["op"], each["tag"], each["peer"]].add(rank)
        self._idle = {
            (key_of(each, rank), rank)
            for rank, state in self._states.items()
            for each in state["in_flight"]
            if each["idle"]
        }

    def diagnosis(self) -> Diagnosis:
        inside = self._inside()
        awaited = [key for key, callers in inside.items() if not all(each["idle"] for _, each in callers)]
        waiting = self._waiting({key: inside.pop(key) for key in awaited})
        blamed, found = self._judged(waiting, with_idle=False)
        is_unexplained = not blamed and not found
        idle = sorted(inside, key=lambda key: -inside[key][0][1]["age_s"])
        if not is_unexplained:
            idle = idle[:MAX_WAITS]
        waiting = _by_age([*waiting, *self._waiting({key: inside[key] for key in idle})])
        if is_unexplained:
            blamed, found = self._judged(waiting, with_idle=True)
        odd = [] if blamed else self._odd_ones(waiting, found)
        divergences = tuple(self._divergences())
        silent = {rank: each for rank, each in self._answers.items() if each.state is None}
        present = {rank: each for rank, each in silent.items() if rank not in self._left}
        unwell = [
            rank
            for rank, each in present.items()
            if each.outside and (not each.runs or not (blamed or odd)) and rank not in blamed
        ]
        calls = [each for each in self._other_calls() if each.missing] if not waiting else []
        outside = {missing.rank for each in calls for missing in each.missing}
        verdict = self._blames(blamed, waiting)
        verdict += map(self._told_cycle, found[:MAX_WAITS])
        verdict += [self._told_odd(rank, waiting) for rank in odd]
        verdict += divergences
        verdict += list(self._stuck_inside(waiting, bool(divergences)))[:MAX_WAITS]
        verdict += map(self._told_call, calls)
        verdict += [
            f"rank {rank}: {each.why_silent}"
            for rank, each in present.items()
            if rank not in blamed and rank not in outside and not each.silence.startswith(ELSEWHERE)
        ]
        of_most = [each for each in calls if self._is_of_all(each)]
        self._apart += [missing.rank for each in of_most for missing in each.missing]
        culprits = sorted({*blamed, *odd, *unwell, *self._apart})
        verdict += self._unseen(culprits)
        told = self._told_of(waiting, {*culprits})
        return Diagnosis(
            verdict=tuple(verdict),
            culprits=tuple(culprits),
            waiting=tuple(told or of_most),
            chains=tuple(self._chains(blamed)),
            cycles=tuple(
                self._told([*cycle, cycle[0]]) for cycle in found[:MAX_WAITS] if not self._is_idle(cycle)
            ),
            divergences=divergences,
            silent={rank: each.why_silent for rank, each in silent.items()},
            left=self._left,
        )

    def _gone(self, silent: Collection[int]) -> tuple[int, ...]:
        """Return the silent ranks that share no open group with a rank that answers, if there is one.

        The others have closed the group that all ranks were in, and go on in one that `shrink` has made.
        """
        if not silent or any(state.get("job_is_open", True) for state in self._states.values()):
            return ()
        groups = [group for state in self._states.values() for group in state["groups"].values()]
        texts = {group["ranks"] for group in groups if group["state"] != "closed"}
        members = {rank for text in texts for rank in ranks_of(text)}
        return tuple(rank for rank in silent if rank not in members) if members else ()

    def _unseen(self, culprits: Iterable[int]) -> Iterator[str]:
        """Yield, once for all culprits, why it cannot be seen where they stand."""
        outside = {rank: self._answers[rank].outside or {} for rank in culprits if rank in self._answers}
        reasons = {rank: seen["unseen"] for rank, seen in outside.items() if seen.get("unseen")}
        if reasons:
            verb = "stands" if len(reasons) == 1 else "stand"
            yield f"it is not known where {named(list(reasons))} {verb}: {next(iter(reasons.values()))}"

    def _judged(self, waiting: list[Waiting], with_idle: bool) -> tuple[list[int], list[list[int]]]:
        """Make the edges of some operations; return the ranks to blame, and the cycles that remain."""
        edges: dict[int, dict[int, Waiting]] = defaultdict(dict)
        for each in waiting:
            for rank in each.ranks:
                if with_idle or (each.key, rank) not in self._idle:
                    for missing in each.missing:
                        edges[rank].setdefault(missing.rank, each)
        self._edges = edges
        missing_ranks = {missing.rank for each in waiting for missing in each.missing}
        blamed = {rank for rank in missing_ranks if not edges.get(rank)}
        found = cycles(edges)
        for cycle in found:
            owing = {other for rank, other in _steps(cycle) if self._owed(rank, edges[rank][other])}
            if len(owing) < len(cycle):
                blamed |= owing
        return sorted(blamed), found

    def _owed(self, rank: int, waiting: Waiting) -> str:
        """Say that the peer of a rank's message has made fewer calls; empty if not."""
        if not waiting.key[2] or rank not in self._states:
            return ""
        in_flight = self._states[rank]["in_flight"]
        mine = (each for each in in_flight if key_of(each, rank) == waiting.key)
        return next((owed(self._states, rank, each) for each in mine), "")

    # Which operation waits for which ranks

    def _inside(self) -> dict[Key, list[tuple[int, State]]]:
        """Return the ranks inside of each operation that waits, with what they say of it."""
        inside: dict[Key, list[tuple[int, State]]] = defaultdict(list)
        for rank, state in self._states.items():
            for operation in state["in_flight"]:
                if operation["age_s"] >= self._after_s:
                    inside[key_of(operation, rank)].append((rank, operation))
        return inside

    def _waiting(self, inside: Mapping[Key, list[tuple[int, State]]]) -> list[Waiting]:
        return [self._waiting_of(key, callers) for key, callers in inside.items()]

    @staticmethod
    def _told_of(waiting: list[Waiting], culprits: Set[int]) -> list[Waiting]:
        """Return the operations to tell, in their order: those for culprits and those of most ranks first."""

        def importance(each: Waiting) -> tuple[bool, int]:
            return any(missing.rank in culprits for missing in each.missing), len(each.ranks)

        return _by_age(sorted(waiting, key=importance, reverse=True)[:MAX_WAITS])

    def _waiting_of(self, key: Key, callers: list[tuple[int, State]]) -> Waiting:
        rank, operation = callers[0]
        met = self._met(rank, operation) if key[2] else None
        if key[2]:
            missing = [] if met is not None else self._peers(rank, operation)
        else:
            missing = self._missing_members(rank, operation)
        return Waiting(
            key=key,
            group=operation["group"],
            op=operation["op"],
            call=operation["call"],
            where=operation["where"],
            ranks=tuple(sorted(rank for rank, _ in callers)),
            age_s=max(each["age_s"] for _, each in callers),
            missing=tuple(self._describe(each, operation["uid"]) for each in missing[:MAX_MISSING]),
            more=max(0, len(missing) - MAX_MISSING),
            differs=len({each["fingerprint"] for _, each in callers}) > 1,
            met=met,
        )

    def _members(self, rank: int, uid: str) -> list[int]:
        group = self._states[rank]["groups"].get(uid)
        return [] if group is None else ranks_of(group["ranks"])

    def _missing_members(self, rank: int, operation: State) -> list[int]:
        """Return the members that have not issued a collective, and members of which that is not known.

        A member that was merely too slow to answer, or has too many groups to tell of all, may be inside: it
        counts only if no other one is missing.
        """
        uid = operation["uid"]
        members = self._members(rank, uid)
        known = {member for member in members if member in self._states and self._tells(member, uid)}
        late = [
            member for member in members if member in known and self._begun(member, uid) < operation["seq"]
        ]
        unknown = [
            member for member in members if member not in known and not self._seen_inside(member, operation)
        ]
        if late:
            unknown = [member for member in unknown if self._cannot_answer(member)]
        return sorted([*late, *unknown])

    def _tells(self, rank: int, uid: str) -> bool:
        """Whether what a rank has said of a group is all: of very many groups it has left some out."""
        state = self._states[rank]
        return uid in state["groups"] or not state.get("groups_left_out")

    def _seen_inside(self, rank: int, operation: State) -> bool:
        """Whether a silent rank was seen in a collective by another one."""
        answer = self._answers.get(rank)
        return answer is not None and answer.has_entered(operation["uid"], operation["seq"])

    def _cannot_answer(self, rank: int) -> bool:
        """Whether a rank is known to be unable to answer, rather than slow."""
        answer = self._answers.get(rank)
        return answer is None or (answer.state is None and answer.is_gone)

    def _begun(self, rank: int, uid: str) -> int:
        group = self._states[rank]["groups"].get(uid)
        return -1 if group is None else int(group["begun"])

    def _peers(self, rank: int, operation: State) -> list[int]:
        """Return the peer of a message; all other members if it is a receive from any."""
        if operation["peer"] is not None:
            return [operation["peer"]]
        return [member for member in self._members(rank, operation["uid"]) if member != rank]

    def _met(self, rank: int, operation: State) -> int | None:
        """Return the rank in the call that a message waits for; None if none is."""
        peer, wanted = operation["peer"], "recv" if operation["op"] == "send" else "send"
        call = operation["uid"], wanted, operation["tag"]
        for other in (rank, None):
            there = self._meeting.get((*call, other), set())
            if peer in there:
                return int(peer)
            if peer is None and there:
                return min(there)
        return None

    # Descriptions of a rank

    def _describe(self, rank: int, uid: str) -> Missing:
        known = self._described.get((rank, uid))
        if known is None:
            known = self._described[rank, uid] = self._description(rank, uid)
        return known

    def _description(self, rank: int, uid: str) -> Missing:
        state = self._states.get(rank)
        if state is None:
            answer = self._answers.get(rank)
            why = "it is unknown" if answer is None else answer.why_silent
            return Missing(rank, "" if answer is None else answer.seen.get(uid, ""), why, answers=False)
        last, place = self._last(state, uid) if self._tells(rank, uid) else "", place_of(rank, state, uid)
        return Missing(rank, last, self._stands(rank), answers=True, place=place)

    def _last(self, state: State, uid: str) -> str:
        group = state["groups"].get(uid)
        if group is None:
            return "never in this group"
        if not group["recent"]:
            return "no operation of this group yet" if group["state"] != "closed" else "it closed the group"
        last = group["recent"][0]
        where = f" at {last['where']}" if last["where"] else ""
        closed = ", then it closed the group" if group["state"] == "closed" else ""
        return f"{last['op']} #{last['seq']}{where}{closed}"

    def _stands(self, rank: int) -> str:
        """Describe the activity of a rank in words."""
        state = self._states[rank]
        main, parts = state["main"], []
        old = [each for each in state["in_flight"] if each["age_s"] >= self._after_s]
        awaited = [each for each in old if not each["idle"]]
        idle = [each for each in old if each["idle"]]
        if awaited:
            first = awaited[0]
            parts.append(f"it is in {first['op']} #{first['seq']} of group {first['group']}")
        elif main["inside"] and main["place"]:
            parts.append(f"its main thread is in {main['inside']}, called at {main['place']}")
        if main["place"] and not (main["inside"] and not awaited):
            parts.append(f"its main thread is at {main['place']}")
        if main.get("workers"):
            parts.append(main["workers"])
        if main["exception"]:
            parts.append(f"it is handling {main['exception']}")
        if state["failures"]:
            latest = state["failures"][0]
            parts.append(f"its last failure was {latest['error']} in {latest['call']}")
        for each in idle[:1]:
            what = f"{each['op']} #{each['seq']} of group {each['group']}"
            parts.append(f"no thread of it waits for {what}, which is in flight")
        return "; ".join(parts) or "it is outside of any operation"

    def _blames(self, ranks: list[int], waiting: list[Waiting]) -> list[str]:
        """Say of each rank which operations wait for it."""
        waits: dict[int, list[Waiting]] = defaultdict(list)
        for each in waiting:
            for missing in each.missing:
                waits[missing.rank].append(each)
        more = len(ranks) - MAX_WAITS
        told = [self._blame(rank, waits[rank]) for rank in ranks[:MAX_WAITS]]
        return told + ([f"{more} more ranks are waited for"] if more > 0 else [])

    def _blame(self, rank: int, waits: list[Waiting]) -> str:
        waits = sorted(waits, key=lambda each: -len(each.ranks))
        first = waits[0]
        (missing,) = (missing for missing in first.missing if missing.rank == rank)
        alone = f"{missing.name} is waited for by {named(first.ranks)} in {first.title}"
        others = "".join(f", by {named(each.ranks)} in {each.title}" for each in waits[1:MAX_TOLD])
        more = f" and in {len(waits) - MAX_TOLD} more operations" if len(waits) > MAX_TOLD else ""
        found = (self._owed(caller, each) for each in waits for caller in each.ranks)
        counts = next((f"; {text}" for text in found if text), "")
        return f"{alone}{others}{more} for {first.age_s:.1f} s: {missing.stands}{counts}"

    # Divergences, chains, cycles

    def _stuck_inside(self, waiting: list[Waiting], is_told: bool) -> Iterator[str]:
        """Say which operations all ranks have entered and none has left, a message once for both its ranks.

        Args:
            waiting: The operations that wait.
            is_told: Whether those that differ between ranks are told elsewhere.
        """
        pairs = set()
        for each in waiting:
            pair = each.key[0], frozenset((*each.ranks, each.met))
            if each.missing or (each.differs and is_told) or (each.met is not None and pair in pairs):
                continue
            pairs.add(pair)
            yield each.sentence()

    def _divergences(self) -> Iterator[str]:
        """Yield the first number of each group under which members called different things."""
        seen: dict[str, dict[int, str]] = defaultdict(dict)
        apart_at: dict[str, int] = {}
        for state in self._states.values():
            for uid, group in state["groups"].items():
                for seq, fingerprint in fingerprints(group).items():
                    if seen[uid].setdefault(seq, fingerprint) != fingerprint:
                        apart_at[uid] = min(seq, apart_at.get(uid, seq))
        for uid, seq in sorted(apart_at.items()):
            kinds: dict[str, list[int]] = defaultdict(list)
            for rank, state in self._states.items():
                if (group := state["groups"].get(uid)) and (text := text_of(group, seq)):
                    kinds[text].append(rank)
                    name = group["name"]
            ordered = _by_size(kinds)
            if len(ordered[0][1]) > len(ordered[1][1]):
                self._apart += [rank for _, ranks in ordered[1:] for rank in ranks]
            apart = "; ".join(f"{named(sorted(ranks))}: {call}" for call, ranks in ordered)
            yield f"group {name} diverges at operation #{seq}: {apart}"

    def _chains(self, culprits: list[int]) -> Iterator[str]:
        """Yield the path from a waiting rank to each culprit, where it is longer than one step."""
        before = backwards(self._edges)
        for culprit in culprits[:MAX_WAITS]:
            path = longest_path_to(culprit, before)
            if len(path) > 2:
                yield self._told(path)

    def _told(self, path: list[int]) -> str:
        steps = [
            f"rank {rank} waits for rank {other} in {self._edges[rank][other].title}"
            + (f" at {self._edges[rank][other].where}" if self._edges[rank][other].where else "")
            for rank, other in pairwise(path[: MAX_STEPS + 1])
        ]
        more = len(path) - 1 - MAX_STEPS
        return ", ".join([*steps, f"and so on, {more} more ranks"] if more > 0 else steps)

    def _odd_ones(self, waiting: list[Waiting], found: list[list[int]]) -> list[int]:
        """Return the ranks of cycles that are in an operation with fewer ranks than the others are in."""
        in_cycles = {rank for cycle in found if not self._is_idle(cycle) for rank in cycle}
        company = dict.fromkeys(sorted(in_cycles), 0)
        for each in waiting:
            for rank in in_cycles.intersection(each.ranks):
                company[rank] = max(company[rank], len(each.ranks))
        most = max(company.values(), default=0)
        fewest = [rank for rank, count in company.items() if count < most]
        return fewest if len(fewest) < most else []

    def _told_odd(self, rank: int, waiting: list[Waiting]) -> str:
        mine = next(each for each in waiting if rank in each.ranks)
        main = max(waiting, key=lambda each: len(each.ranks))
        where, there = (f" at {each.where}" if each.where else "" for each in (mine, main))
        return f"rank {rank} is in {mine.title}{where}, while {named(main.ranks)} are in {main.title}{there}"

    def _other_calls(self) -> list[Waiting]:
        """Return the calls of dist2 that ranks are in and that are no operation, such as `new_group`."""
        inside: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, state in self._states.items():
            main = state["main"]
            is_ours = str(main["inside"]).startswith(DIST2S)
            if is_ours and not state["in_flight"] and main["for_s"] >= self._after_s:
                inside[main["inside"], main["place"]].append(rank)
        return [self._call_of(*call, ranks) for call, ranks in inside.items()]

    def _call_of(self, function: str, place: str, ranks: list[int]) -> Waiting:
        """Return a call as an operation without a group, which waits for the ranks outside of it."""
        states = [self._states[rank] for rank in ranks]
        outside = sorted({*self._answers} - set(ranks) - set(self._left))
        return Waiting(
            key=(f"{function} at {place}", max(len(each["groups"]) for each in states), False, -1),
            group="",
            op=function,
            call=function,
            where=place,
            ranks=tuple(ranks),
            age_s=max(each["main"]["for_s"] for each in states),
            missing=tuple(
                attrs.evolve(self._describe(rank, ""), last="", place="") for rank in outside[:MAX_MISSING]
            ),
            more=max(0, len(outside) - MAX_MISSING),
        )

    def _is_of_all(self, call: Waiting) -> bool:
        """Whether a call is of all ranks: most are in it, or it makes their first group."""
        makes_first = not any(self._states[rank]["groups"] for rank in call.ranks)
        return makes_first or len(call.missing) + call.more < len(call.ranks)

    def _told_call(self, call: Waiting) -> str:
        others = "; ".join(f"rank {each.rank}: {each.stands}" for each in call.missing[:4])
        others += f"; and {len(call.missing) + call.more - 4} more ranks" if len(call.missing) > 4 else ""
        verb = "is" if len(call.ranks) == 1 else "are"
        return f"{named(call.ranks)} {verb} in {call.op}, called at {call.where}; {others}"

    def _told_cycle(self, cycle: list[int]) -> str:
        """Say which ranks of a cycle wait for which; where an operation is idle, where each rank is."""
        steps = self._told([*cycle, cycle[0]])
        if not self._is_idle(cycle):
            owing = [self._owed(rank, self._edges[rank][other]) for rank, other in _steps(cycle)]
            counts = "".join(f"; {text}" for text in owing) if all(owing) else ""  # else the culprit has them
            return f"deadlock: {steps}{counts}"
        places = "; ".join(f"rank {rank}: {self._stands(rank)}" for rank in cycle[:4])
        return f"{places}; so this is no deadlock: {steps}"

    def _is_idle(self, cycle: list[int]) -> bool:
        """Whether an operation of a cycle is idle."""
        return any((self._edges[rank][other].key, rank) in self._idle for rank, other in _steps(cycle))


def _steps(cycle: list[int]) -> Iterable[tuple[int, int]]:
    return pairwise([*cycle, cycle[0]])


def _by_age(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return operations, the oldest first."""
    return sorted(waiting, key=lambda each: -each.age_s)


def _by_size(kinds: dict[str, list[int]]) -> list[tuple[str, list[int]]]:
    """Return the calls, those of most ranks first."""
    return sorted(kinds.items(), key=lambda pair: (-len(pair[1]), pair[1][0]))
