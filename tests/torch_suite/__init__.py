"""torch's own tests of `torch.distributed`, run on Gloo and on dist2.

The installed torch ships ``torch.testing._internal.distributed.distributed_test``: 285 tests, written for
ranks that are processes. torch starts new processes for each of them, which takes seconds. Here one process
imports torch once, forks a process that imports the tests, and that process forks the ranks of each test and
collects their exit codes (`ranks.py`). A process that forks must have a single thread, so the tests of this
folder start a program: ``python -m torch_suite``.

For dist2 the module's names ``dist``, ``_get_default_group``, ... are replaced by those of `dist2.legacy`
(`names.py`). The tests believe that the backend is Gloo, as decorators in torch decide by its name which
tests run; `new_group(backend="gloo")` is then the socket backend.

A test that torch skips for Gloo because Gloo lacks the operation says so by another backend's name: "Only MPI
supports all_to_all". Those run on dist2 with the name ``mpi``.
"""
