"""Tests that every backend must pass, for packages that bring one.

A test file names the backend and imports the tests; pytest collects them there::

    import pytest

    from dist2.testing import BackendCase
    from dist2.testing.collectives import *
    from dist2.testing.failures import *
    from dist2.testing.objects import *
    from dist2.testing.point_to_point import *

    pytestmark = pytest.mark.parametrize("tenant", [BackendCase("ring", "ring")], ids=str)

    @pytest.fixture(params=[1, 2, 3])
    def world_size(request: pytest.FixtureRequest) -> int:
        return request.param

Ranks are threads of one process, which meet in a `dist2.HashStore`. The dist2 repository runs the same tests
over its own backends. `examples/custom_backend` is a complete package that uses them.
"""

from dist2.runtime.signals import package_is_a_program

try:
    import pytest
except ImportError as error:
    raise ImportError("dist2.testing needs pytest: pip install 'dist2[testing]'") from error

package_is_a_program(__spec__)  # tests shut groups down
pytest.register_assert_rewrite(
    "dist2.testing.collectives",
    "dist2.testing.failures",
    "dist2.testing.objects",
    "dist2.testing.point_to_point",
)

from dist2.testing.ranks import BackendCase, RankFailed  # noqa: E402 - after the line that concerns it

__all__ = ["BackendCase", "RankFailed"]
