"""Which memory gets huge pages, and when; and that the tensor's values do not change."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from dist2.backends.socket.transport import huge_pages
from dist2.backends.socket.transport.huge_pages import LEAST_BYTES, PAGE_BYTES, HugePages

MIB = 1 << 20
PATIENCE = 64


class Kernel:
    """Records the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_ns: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self._now_ns, self._takes_ns = 0, takes_ns
        monkeypatch.setattr(huge_pages, "_is_allowed", lambda: True)
        monkeypatch.setattr(huge_pages, "thread_time_ns", lambda: self._now_ns)

    def collapse(self, address: int, nbytes: int) -> None:
        self.asked.append((address, nbytes))
        self._now_ns += self._takes_ns


def use(pages: HugePages, tensor: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        pages.see_to([tensor])


def test_a_tensor_that_is_used_again_and_again_is_seen_to_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel(monkeypatch)
    pages = HugePages(True, kernel.collapse)
    tensor = torch.empty(40 * MIB, dtype=torch.uint8)
    use(pages, tensor, PATIENCE)
    assert not kernel.asked
    use(pages, tensor, 100)
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert len(kernel.asked) == 10
    first, last = kernel.asked[0], kernel.asked[-1]
    assert start <= first[0] < start + PAGE_BYTES
    assert end - PAGE_BYTES < sum(last) <= end
    for before, after in zip(kernel.asked, kernel.asked[1:], strict=False):
        assert sum(before) == after[0]
    assert all(address % PAGE_BYTES == nbytes % PAGE_BYTES == 0 for address, nbytes in kernel.asked)
    use(pages, tensor, 1000)
    assert len(kernel.asked) == 20, "the memory may be another by now"


def test_what_is_short_or_scattered_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    pages = HugePages(True, kernel.collapse)
    use(pages, torch.empty(LEAST_BYTES - 1, dtype=torch.uint8), 200)
    use(pages, torch.zeros(1, dtype=torch.uint8).expand(8 * MIB), 200)
    use(HugePages(False, kernel.collapse), torch.empty(8 * MIB, dtype=torch.uint8), 200)
    assert not kernel.asked


def test_a_kernel_that_is_slow_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, takes_ns=200_000_000)
    pages = HugePages(True, kernel.collapse)
    use(pages, torch.empty(64 * MIB, dtype=torch.uint8), 200)
    assert len(kernel.asked) == 1


@pytest.mark.parametrize("policy", ["always madvise [never]\n", None])
def test_a_system_without_them_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str | None
) -> None:
    file = tmp_path / "enabled"
    if policy is not None:
        file.write_text(policy)
    monkeypatch.setattr(huge_pages, "_POLICY", file)
    asked: list[int] = []
    use(HugePages(True, lambda address, nbytes: asked.append(address)), torch.empty(8 * MIB), 200)
    assert not asked


def huge_bytes(address: int) -> int:
    """Return how many bytes of the mapping at an address lie on huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_values_stay_where_they_are_and_huge_pages_come() -> None:
    tensor = torch.arange(8 * MIB)  # of 64 MiB: a mapping of its own
    address, before = tensor.data_ptr(), tensor.clone()
    use(HugePages(True), tensor, PATIENCE + 20)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, before)
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    come = huge_bytes(start)
    libc = ctypes.CDLL(None, use_errno=True)
    if not huge_pages._is_allowed() or libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(PAGE_BYTES), 25):
        pytest.skip("this kernel has no huge pages to give")
    assert come >= LEAST_BYTES, "as many as the kernel found room for"
