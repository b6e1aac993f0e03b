"""`check_built`: tells that the extensions of dist2 were not built for this Python."""


def check_built(name: str, file: str) -> None:
    """Raise if a module that Cython compiles is imported from its source, which does not run as Python.

    Raises:
        ImportError: It is.
    """
    if file.endswith(".py"):
        raise ImportError(
            f"{name} was not built for this Python: run pip install in the folder of its sources, "
            "or python setup.py build_ext --inplace"
        )
