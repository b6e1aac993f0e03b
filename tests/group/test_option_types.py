"""The types of arguments are those that the library takes: options of backends, and arrays."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from mypy import api

from dist2.backends.gloo import OPTIONS
from dist2.backends.nccl.options import NcclOptions
from dist2.backends.socket.agreed import AGREED_OPTIONS
from dist2.backends.socket.controlled import CONTROL_OPTIONS
from dist2.backends.socket.options import SocketOptions
from dist2.group import options

OF_NCCL = [field.name for field in attrs.fields(NcclOptions) if field.name != "control"]
SUPPORT = Path(__file__).parents[1] / "support"
SEEN = [str(SUPPORT / name) for name in ("typed_calls.py", "typed_arrays.py")]


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (options.SocketOptions, {field.name for field in attrs.fields(SocketOptions)}),
        (options.SocketOptions, {*CONTROL_OPTIONS}),  # of mpi
        (options.GlooOptions, {*OPTIONS, *AGREED_OPTIONS}),
        (options.NcclOptions, {*OF_NCCL, *CONTROL_OPTIONS}),
    ],
)
def test_each_option_of_a_backend_has_a_type(typed: type, taken: set[str]) -> None:
    common = options.FakeOptions.__annotations__
    assert {*typed.__annotations__} - {*common} == taken


@pytest.mark.exhaustive  # half a minute without a cache
@pytest.mark.timeout(300)
def test_a_type_checker_finds_wrong_arguments() -> None:
    """Each wrong call has a comment that ignores its error; mypy reports comments that ignore nothing."""
    report, errors, code = api.run(["--strict", *SEEN])
    assert not code, report + errors
