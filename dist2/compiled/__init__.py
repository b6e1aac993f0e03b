"""The hot path, built when dist2 is installed: `engine` binds dist2/core, `_native` has three parts.

`records` makes, tells and counts the records of operations (see `dist2.operation.signature`), `steps` moves
payloads over sockets, also for plans, `messages` carries messages inside a host
(`dist2.backends.socket.transport.messages.express`). They need no torch to be built.
"""

try:
    from dist2.compiled._native import messages, records, steps
except ModuleNotFoundError as error:
    raise ImportError(
        "the extension of dist2 was not built for this Python: run pip install in the folder of its sources, "
        "or python setup.py build_ext --inplace"
    ) from error

__all__ = ["messages", "records", "steps"]
