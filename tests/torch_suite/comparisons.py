"""Comparisons of results in tests of torch that make none."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def with_comparisons(bases: tuple[type, ...], module: Any) -> type:
    """Return a test class of these classes with the comparisons added.

    Args:
        bases: torch's classes.
        module: torch's module, whose ``dist`` the tests use.
    """
    reduced = inspect.signature(bases[-1]._test_all_reduce_helper)  # type: ignore[attr-defined]  # torch's

    class Compared(*bases):  # type: ignore[misc]  # known at run time
        """Compares the outputs of `all_reduce` and `batch_isend_irecv`."""

        _expected: float | None = None

        def _test_all_reduce_helper(self, *arguments: Any, **options: Any) -> None:
            self._expected = reduced.bind(self, *arguments, **options).arguments["expected_value"]
            try:
                super()._test_all_reduce_helper(*arguments, **options)
            finally:
                self._expected = None

        def call_dist_op(self, title: str, is_async: bool, op: Any, *arguments: Any, **options: Any) -> None:
            super().call_dist_op(title, is_async, op, *arguments, **options)
            if self._expected is not None:
                self.assertEqual(arguments[0], torch.full_like(arguments[0], self._expected))

        def test_batch_isend_irecv_gloo(self) -> None:
            self._compare_messages(super().test_batch_isend_irecv_gloo)

        def test_batch_isend_irecv_gloo_tags(self) -> None:
            self._compare_messages(super().test_batch_isend_irecv_gloo_tags)

        def _compare_messages(self, test: Any) -> None:
            """Run a test in which rank r sends r + 1 to all others, and check their received tensors."""
            received: list[tuple[torch.Tensor, int]] = []
            start = module.dist.batch_isend_irecv

            def recording(operations: list[Any]) -> Any:
                receives = [each for each in operations if each.op is module.dist.irecv]
                received.extend((each.tensor, each.peer) for each in receives)
                return start(operations)

            module.dist.batch_isend_irecv = recording
            test()
            self.assertEqual(len(received), int(self.world_size) - 1)
            for tensor, peer in received:
                self.assertEqual(tensor, torch.full_like(tensor, peer + 1))

    for name in ("test_batch_isend_irecv_gloo", "test_batch_isend_irecv_gloo_tags"):
        original = getattr(bases[-1], name)
        method = vars(Compared)[name]
        for mark in ("__unittest_skip__", "__unittest_skip_why__"):
            if hasattr(original, mark):
                setattr(method, mark, getattr(original, mark))
    return Compared
