"""What `import dist2` alone brings within reach."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dist2

PROGRAM = """
import sys, dist2
assert "dist2.legacy" not in sys.modules and "dist2.torch_world" not in sys.modules
print(dist2.legacy.__name__, dist2.torch_world.default_group.__name__)
"""


def test_parts_are_imported_when_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["dist2.legacy", "default_group"]


def test_no_other_name_is() -> None:
    with pytest.raises(AttributeError, match="module 'dist2' has no attribute 'tensors'"):
        dist2.tensors  # noqa: B018 - looked up, not used
    assert all(hasattr(dist2, name) for name in dist2.__all__)
