"""The names of ranks in texts: the only place that renders them.

Errors, log lines and the control plane name the job's rank first: the rank in the job's first group, which a
launcher and the logs of processes use too. Where the rank in the group at hand is another one, it follows,
with the rank's process if that is known: ``rank 2 (rank 1 of tp, host a, pid 4711)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

_MOST_ENDS = 4
"""How many ends a message tells one by one."""


def rank_names(ranks: Iterable[int]) -> str:
    """Return ranks for a message: ``rank 3``, ``ranks 0, 2``, ``ranks 0-6, 9``."""
    return _named(sorted(set(ranks)))


def _named(ranks: Sequence[int]) -> str:
    """Return different ranks for a message, in their order."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown: list[str] = []
    for first, last in spans:
        shown += [f"{first}-{last}"] if last > first + 1 else [str(rank) for rank in range(first, last + 1)]
    return ("rank " if len(shown) == 1 and spans[0][0] == spans[0][1] else "ranks ") + ", ".join(shown)


def _of_several(words: str, count: int) -> str:
    """Return words that follow the name of one rank so that they follow that of several."""
    return f"were{words[3:]}" if count > 1 and words.startswith("was ") else words


def _not_known(rank: int) -> str:
    """Return the process of a rank, where processes are not known."""
    return ""


@attrs.frozen(eq=False)
class RankNames:
    """Names the ranks of one group in texts; called with group ranks.

    Attributes:
        group: The group's name.
        global_ranks: For each group rank, its rank in the job's first group; empty where they are the same.
        process_of: Returns the host and pid of a group rank as text; empty where that is not known.
    """

    group: str = ""
    global_ranks: Sequence[int] = ()
    process_of: Callable[[int], str] = _not_known

    def __call__(self, ranks: Iterable[int], processes: bool = True) -> str:
        """Return group ranks for a message.

        Args:
            ranks: The group ranks.
            processes: Whether to add the process of a single rank that has another rank in the job.
        """
        numbers = sorted(set(ranks), key=self._of_job)
        named = rank_names(map(self._of_job, numbers))
        if all(self._of_job(rank) == rank for rank in numbers):
            return named
        beside = f"{_named(numbers)} of {self.group}"
        process = self.process_of(numbers[0]) if processes and len(numbers) == 1 else ""
        return f"{named} ({beside}{', ' if process else ''}{process})"

    def with_process(self, rank: int) -> str:
        """Return a group rank for a message, always with its process if that is known."""
        named, process = self([rank]), self.process_of(rank)
        return f"{named} ({process})" if process and not named.endswith(")") else named

    def argument(self, rank: int) -> str:
        """Return a group rank as an argument of a call: as it was given, and then the job's rank."""
        return str(rank) if self._of_job(rank) == rank else f"{rank} (rank {self._of_job(rank)})"

    def ended(self, ends: Mapping[int, str]) -> str:
        """Return how ranks ended: ``ranks 0, 2 died``, ``rank 1 (host a, pid 12) exited with code 3``.

        Args:
            ends: How each ended, in words that follow its name.
        """
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, words in ends.items():
            alike.setdefault((words, self.process_of(rank)), []).append(rank)
        if len(alike) > _MOST_ENDS:
            cut_off = any("lost the connection" in words for words in ends.values())
            return f"{self(ends)} {'died, or are cut off' if cut_off else 'died'}"
        return "; ".join(
            f"{self.with_process(ranks[0]) if process else self(ranks)} {_of_several(words, len(ranks))}"
            for (words, process), ranks in alike.items()
        )

    def departed(self, ends: Mapping[int, str]) -> str:
        """Return how ranks that live left: ``ranks 0, 2 left the group``."""
        return attrs.evolve(self, process_of=_not_known).ended(ends)

    def last_seen(self, seen: Mapping[int, str]) -> str:
        """Return the last known operation of each rank as the end of a message; empty if none is known."""
        return f" (last seen at: {self.alike(seen)})" if seen else ""

    def alike(self, words: Mapping[int, str]) -> str:
        """Return words about each rank, for a message; ranks with the same words are listed together."""
        groups: dict[str, list[int]] = {}
        for rank, text in words.items():
            groups.setdefault(text, []).append(rank)
        return "; ".join(f"{self(ranks, processes=False)}: {text}" for text, ranks in groups.items())

    def _of_job(self, rank: int) -> int:
        return self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank


RANKS = RankNames()
"""Names the ranks of a group whose ranks are those of the job."""


def host_and_pid(host: str, pid: int) -> str:
    """Return a process for the name of its rank."""
    return f"host {host[:80]}, pid {pid}"
