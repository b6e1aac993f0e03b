"""The names that `import dist2` alone provides."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dist2

PROGRAM = """
import sys, dist2
assert "dist2.legacy" not in sys.modules and "dist2.torch_backend" not in sys.modules
print(dist2.legacy.__name__, dist2.torch_backend.default_group.__name__)
"""

FIRST_GROUP = """
import os, sys, dist2
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
before = set(sys.modules)
with dist2.new_group("socket", store=dist2.HashStore(), rank=0, world_size=1) as pg:
    pg.barrier()
print([name for name in set(sys.modules) - before if name.startswith(("dist2", "observability"))])
print("structlog" in sys.modules)
sys.stdout.flush()
"""


def test_the_first_group_of_a_forked_rank_imports_nothing_that_its_parent_could_have() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_GROUP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "False"]


def test_parts_are_imported_when_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dist2.legacy", "default_group"]


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="module 'dist2' has no attribute 'tensors'"):
        dist2.tensors  # noqa: B018 - looked up, not used
    assert all(hasattr(dist2, name) for name in dist2.__all__)
