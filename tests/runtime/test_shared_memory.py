"""Arenas: memory without a name, found by process and descriptor."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from dist2 import Dist2Error, PeerLostError
from dist2.backends.socket.transport import shared_memory
from dist2.backends.socket.transport.doorbell import Doorbell, DoorbellLocator, PeerDoorbell
from dist2.backends.socket.transport.shared_memory import DIRECTORY_ENTRIES, Directory, SharedHost
from dist2.runtime.shared_memory import PAGE_BYTES, Arena, ArenaLocator, attach

MIB = 1 << 20


def test_a_mapping_by_locator_is_the_same_memory() -> None:
    arena = Arena(MIB)
    offset = arena.allocate(100)
    assert offset is not None
    other = attach(ArenaLocator.parse(str(arena.locator)))
    arena.words(offset, 2)[1] = 42
    assert other.words(offset, 2)[1] == 42
    arena.close()


def test_ranks_of_one_process_map_each_arena_once() -> None:
    """A mapping for each pair of 64 ranks took 160 TiB of address space, which is more than there is."""
    hosts = [SharedHost() for _ in range(64)]
    pairs = [
        here.neighbour(str(number), os.getpid(), there.locators())
        for here in hosts
        for number, there in enumerate(hosts)
        if there is not here
    ]
    assert len({each._mapping.address for each in pairs}) == len(hosts)
    for host in hosts:
        host.close()


class RefusesAdvice:
    """A mapping on a kernel without ``MADV_REMOVE``."""

    def madvise(self, *arguments: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_allocations_do_not_overlap_and_come_back_zeroed() -> None:
    arena = Arena(MIB)
    first, second = arena.allocate(PAGE_BYTES + 1), arena.allocate(10)
    assert first is not None
    assert second is not None
    assert second >= first + 2 * PAGE_BYTES
    arena.view[first : first + 4] = b"dirt"
    arena.release(first, PAGE_BYTES + 1)
    again = arena.allocate(2 * PAGE_BYTES)
    assert again == first
    assert bytes(arena.view[first : first + 4]) == bytes(4)
    arena.close()


def test_memory_reads_as_zeros_where_the_kernel_does_not_take_it_back() -> None:
    arena = Arena(MIB)
    first, second = arena.allocate(PAGE_BYTES + 1), arena.allocate(10)
    assert first is not None
    assert second is not None
    arena.view[first : second + 4] = bytes([1]) * (second + 4 - first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "map", RefusesAdvice())
        arena.release(first, PAGE_BYTES + 1)
    assert arena.allocate(2 * PAGE_BYTES) == first
    assert bytes(arena.view[first:second]) == bytes(second - first)
    assert bytes(arena.view[second : second + 4]) == bytes([1]) * 4
    arena.close()


def test_everything_released_is_one_range_again() -> None:
    arena = Arena(MIB)
    offsets = [arena.allocate(PAGE_BYTES) for _ in range(10)]
    for offset in offsets[::2] + offsets[1::2]:
        assert offset is not None
        arena.release(offset, PAGE_BYTES)
    assert arena.allocate(MIB - PAGE_BYTES) == PAGE_BYTES
    assert arena.allocate(1) is None
    arena.close()


def test_attaching_to_what_is_gone_or_changed() -> None:
    arena = Arena(MIB)
    locator = arena.locator
    with pytest.raises(PeerLostError, match="has changed"):
        attach(attrs.evolve(locator, token="00" * 16))
    with pytest.raises(PeerLostError, match="has changed"):
        attach(attrs.evolve(locator, nbytes=2 * MIB))
    arena.close()
    with pytest.raises(PeerLostError, match="cannot be opened"):
        attach(attrs.evolve(locator, fd=10**6))


def test_a_doorbell_rings_across_descriptors() -> None:
    bell = Doorbell()
    peer = PeerDoorbell(DoorbellLocator.parse(str(bell.locator)))
    for _ in range(100_000):  # more than a pipe holds: a full one is rung enough
        peer.ring()
    os.set_blocking(bell.fileno(), False)
    assert os.read(bell.fileno(), 1) == b"!"
    peer.close()
    bell.close()


def test_no_descriptor_is_left_of_a_process_that_ended_while_it_was_met() -> None:
    """Its process id may belong to another process by then, and a file of that one would be written."""
    here = SharedHost()
    where = here.locators()

    def ends_first(locator: DoorbellLocator) -> PeerDoorbell:
        other.kill()
        other.wait()
        return PeerDoorbell(locator)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        before = set(Path("/proc/self/fd").iterdir())
        with pytest.raises(PeerLostError, match="shared memory of process"):
            here.neighbour("no memory", other.pid, {**where, "arena": where["arena"].replace(":", ":9", 1)})
        with pytest.raises(PeerLostError, match="doorbell of process"):
            here.neighbour("no bell", other.pid, {**where, "doorbell": f"{os.getpid()}:99999"})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shared_memory, "PeerDoorbell", ends_first)
            with pytest.raises(PeerLostError, match=f"process {other.pid} has ended"):
                here.neighbour("ends meanwhile", other.pid, where)
        with pytest.raises(PeerLostError, match=f"process {other.pid} has ended"):
            here.neighbour("ended", other.pid, where)
        assert set(Path("/proc/self/fd").iterdir()) == before
    here.close()


def test_a_thousand_groups_share_one_directory() -> None:
    here, there = SharedHost(), SharedHost()
    neighbour = there.neighbour("here", os.getpid(), here.locators())
    regions = {context: here.join(context, 3 * PAGE_BYTES, PAGE_BYTES) for context in range(1, 1001)}
    for context, region in regions.items():
        assert neighbour.find(context) == region.offset
    for context, region in regions.items():
        here.leave(context, region, lambda: True)
        assert neighbour.find(context) is None
    assert here.join(7, PAGE_BYTES, PAGE_BYTES).offset == regions[1].offset
    here.close()
    there.close()


def test_groups_closed_before_all_met_are_told_from_others_and_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "DIRECTORY_ENTRIES", 64)
    monkeypatch.setattr(shared_memory, "_MAX_CLOSED", 16)
    here, there = SharedHost(), SharedHost()
    neighbour = there.neighbour("here", os.getpid(), here.locators())
    for context in range(1, 21):
        region = here.join(context, PAGE_BYTES, PAGE_BYTES)
        assert not neighbour.has_closed(context)
        here.leave(context, region, lambda: True, met=False, aborted=context % 2 == 0)
        assert neighbour.has_closed(context)
        assert neighbour.has_aborted(context) is (context % 2 == 0)
        assert neighbour.find(context) is None
    assert not neighbour.has_closed(4), "the latest 16 are known"
    assert not neighbour.has_closed(999), "it was never there"
    for context in range(100, 164):
        here.join(context, 0, 0)
    assert not neighbour.has_closed(20), "open groups come first"
    with pytest.raises(Dist2Error, match="no room for another group"):
        here.join(1, 0, 0)
    here.close()
    there.close()


def test_a_region_that_all_have_left_is_used_again_and_its_beginning_is_zero() -> None:
    here = SharedHost()
    first = here.join(1, 3 * PAGE_BYTES, PAGE_BYTES)
    first.bytes[:] = b"x" * first.nbytes
    in_use = True
    here.leave(1, first, lambda: not in_use)
    second = here.join(2, 3 * PAGE_BYTES, PAGE_BYTES)
    assert second.offset != first.offset, "somebody may still read it"
    in_use = False
    third = here.join(3, 3 * PAGE_BYTES, PAGE_BYTES)
    assert third.offset == first.offset
    assert bytes(third.bytes[:PAGE_BYTES]) == bytes(PAGE_BYTES)
    here.close()


def test_who_sleeps_until_others_join_says_so() -> None:
    here, there = SharedHost(), SharedHost()
    neighbour = there.neighbour("here", os.getpid(), here.locators())
    assert not neighbour.awaits_regions()
    with here.awaiting_regions():
        with here.awaiting_regions():
            assert neighbour.awaits_regions()
        assert neighbour.awaits_regions()
    assert not neighbour.awaits_regions()
    here.close()
    there.close()


def test_groups_are_found_whatever_their_contexts_and_however_many_came_and_went() -> None:
    """Contexts with the same entry in the directory, in an order that leaves gaps."""
    arena = Arena(MIB)
    assert arena.allocate(16 * DIRECTORY_ENTRIES) == PAGE_BYTES
    here, there = Directory(arena), Directory(attach(arena.locator))
    clashing = [7 + count * DIRECTORY_ENTRIES for count in range(5)] + [8, 9, DIRECTORY_ENTRIES - 1]
    known: dict[int, int] = {}
    for turn in range(200):
        context = clashing[turn * 5 % 8 if turn % 3 else turn % 8]
        if context in known:
            del known[context]
            here.remove(context)
        else:
            known[context] = turn
            assert here.enter(context, turn)
        assert {each: there.find(each) for each in clashing} == {each: known.get(each) for each in clashing}
    for context in list(known):
        here.remove(context)
    here.remove(7)
    assert not any(arena.words(PAGE_BYTES, 2 * DIRECTORY_ENTRIES)[::2])  # nothing to look past is left
    arena.close()


def test_a_full_directory_refuses() -> None:
    arena = Arena(MIB)
    directory = Directory(arena)
    assert all(directory.enter(context, 1) for context in range(1, DIRECTORY_ENTRIES + 1))
    assert not directory.enter(DIRECTORY_ENTRIES + 1, 1)
    assert directory.find(DIRECTORY_ENTRIES + 1) is None
    arena.close()


def test_a_process_maps_an_arena_once() -> None:
    """Ranks that are threads share the process's mapping of an arena."""
    arena = Arena(1 << 20)
    assert attach(arena.locator) is arena
    other = Arena(1 << 20)
    assert attach(other.locator) is other
    arena.close()
    with pytest.raises(PeerLostError):
        attach(arena.locator)
    other.close()
