"""What is compiled when dist2 is installed, and needs no torch to be built.

`_native` has two parts in C: `steps` moves payloads over sockets, also for plans, `messages` carries messages
inside a host (`dist2.backends.socket.transport.messages.express`). Modules beside a ``.pxd``, and ``.pyx``
files, are compiled by Cython where they are: the call path and the binding of dist2/core, in
`dist2.operation`, above all.
"""

_NOT_BUILT = (
    "{} was not built for this Python: run pip install in the folder of its sources, "
    "or python setup.py build_ext --inplace"
)


def check_built(name: str, file: str) -> None:
    """Raise if a module that Cython compiles is imported from its source, which does not run as Python.

    Raises:
        ImportError: It is.
    """
    if file.endswith(".py"):
        raise ImportError(_NOT_BUILT.format(name))


try:
    from dist2.compiled._native import messages, steps
except ModuleNotFoundError as error:
    raise ImportError(_NOT_BUILT.format("the extension of dist2")) from error

__all__ = ["check_built", "messages", "steps"]
