"""Tests that pass on Gloo and not on dist2, with the reason. docs/compatibility.md shows them."""

_UNPICKLABLE = (
    "an object that cannot be pickled raises `dist2.InvalidUsageError`; the exception of pickle is its cause "
    "(4 ranks)"
)
DIFFERENCES = {
    "test_all_reduce_complex_unsupported_ops": "complex numbers can be multiplied: `PRODUCT` is supported",
    "test_gather_object": _UNPICKLABLE,
    "test_gather_object_subgroup": _UNPICKLABLE,
    "test_monitored_barrier_gloo_rank_0_timeout": "a timeout of 0 is refused as an argument (`ValueError`)",
}

OWN_NAME = ("test_get_backend",)
"""Tests that compare the name of the backend with the one that they believe to run on."""
