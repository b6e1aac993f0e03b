"""The hot path in C: one extension, built when dist2 is installed, with three parts.

`records` makes, tells and counts the records of operations (see `dist2.operation.signature`), `steps` runs
the steps of programs on shared memory (`dist2.backends.socket.flat`), `messages` carries messages inside a
host (`dist2.backends.socket.transport.messages.express`). They need no torch to be built.
"""

try:
    from dist2.compiled._native import messages, records, steps
except ModuleNotFoundError as error:
    raise ImportError(
        "the extension of dist2 was not built for this Python: run pip install in the folder of its sources, "
        "or python setup.py build_ext --inplace"
    ) from error

__all__ = ["messages", "records", "steps"]
