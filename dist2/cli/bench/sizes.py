"""Sizes, times and rates as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"(\d+) *([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes that ``8``, ``64KiB`` or ``16 MiB`` says.

    Raises:
        ValueError: It says no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write 8, 64KiB or 16MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def size_text(nbytes: int) -> str:
    """Return ``8 B``, ``64 KiB``, ``16 MiB``; exact, in the largest unit that divides it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float | None) -> str:
    """Return a time in microseconds, milliseconds or seconds; a dash for None."""
    if seconds is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.{1 if unit == 'us' else 2}f} {unit}"
    return f"{seconds:.2f} s"


def rate_text(bytes_a_second: float | None) -> str:
    """Return a rate in GB/s, MB/s, kB/s or B/s, powers of ten; a dash for None."""
    if bytes_a_second is None:
        return "-"
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_a_second >= 0.9995 * factor:  # three digits
            return f"{bytes_a_second / factor:.3g} {unit}"
    return f"{bytes_a_second:.3g} B/s"


def ratio_text(ratio: float) -> str:
    """Return ``12x``, ``1.4x``, ``0.62x``."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"
