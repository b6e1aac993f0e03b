"""`NativeCore`: a group of one of torch's backends, from connecting to closing."""

from __future__ import annotations

import weakref

from dist2.backends.base import Backend, GroupSpec
from dist2.backends.carriers import carrier_of
from dist2.backends.native.library import C10dBackend, Library
from dist2.backends.native.mailbox import Mailbox
from dist2.backends.native.translation import error_of, translate
from dist2.backends.native.turns import QueueState
from dist2.errors import Dist2Error, GroupAbortedError, InvalidUsageError, UnknownOptionError
from dist2.execution import Execute
from dist2.interrupts import aside
from dist2.operation import Signature
from dist2.worker import Worker

_DISPOSAL_S = 1.0
"""How long `shutdown` waits for the library to close its connections."""


class NativeCore(Backend):
    """What all operations of a native backend stand on.

    Attributes:
        library: Which of torch's backends.
        turns: Runs the operations.
        mailbox: Messages to oneself.
    """

    natively_async = True

    def __init__(self, library: Library, spec: GroupSpec) -> None:
        super().__init__(spec)
        self.library = library
        self.turns = QueueState(spec.info.name, translate)
        self.mailbox = Mailbox()
        self._closed = False
        # The library's destructor joins its threads, so it must not run on one of them: the only
        # lasting reference is in this box, which a thread of ours empties.
        self._box: list[C10dBackend] = [_connected(library, spec)]
        self._dispose = weakref.finalize(self, _empty_later, self._box, self.turns)
        self._dispose.atexit = False

    @property
    def native(self) -> C10dBackend:
        """torch's backend object. Do not keep it.

        Raises:
            GroupAbortedError: It is closed.
        """
        if not self._box:
            raise GroupAbortedError(f"group {self.spec.info.name!r} is closed in this process")
        return self._box[0]

    def plan(self, signature: Signature) -> Execute:
        """Return what runs operations of this signature.

        Raises:
            InvalidUsageError: The library cannot do this reduction of this dtype, or has no such tag.
        """
        name = self.library.name
        if signature.reduction is not None:
            for meta in signature.inputs:
                carrier_of(meta.dtype, signature.reduction, signature.kind.value, name)
        if signature.tag > self.library.max_tag:
            raise InvalidUsageError(
                f"tag must be at most {self.library.max_tag} with backend {name!r}, got {signature.tag}"
            )
        return super().plan(signature)

    def split(self, spec: GroupSpec) -> Backend:
        """Connect a subset anew, through the new group's store."""
        with spec.building() as heeding:
            return type(self)(self.library, heeding)

    def shutdown(self) -> None:
        """Wait for what was issued, then close the connections."""
        if self._closed:
            return
        self._closed = True
        self.turns.drain(self.spec.timeout_s)
        self._break_off("was shut down", _DISPOSAL_S)

    def abort(self) -> None:
        """Free blocked callers. The library goes on until its deadlines, then closes its connections."""
        if self._closed:
            return
        self._closed = True
        aside(f"dist2-abort-{self.spec.info.name}", lambda: self._break_off("was aborted", 0))

    def _break_off(self, how: str, patience_s: float) -> None:
        info = self.spec.info
        self.turns.break_off(
            GroupAbortedError(f"group {info.name!r} {how} in this process", group=info.name, rank=info.rank)
        )
        self.mailbox.close()
        disposal = self._dispose()
        if disposal is not None:
            disposal.join(patience_s)


def _connected(library: Library, spec: GroupSpec) -> C10dBackend:
    for option in spec.options:
        if option not in library.options:
            known = ", ".join(library.options) or "none"
            raise UnknownOptionError(f"backend {library.name!r} has no option {option!r}; it has {known}")
    try:
        return library.connect(spec)
    except RuntimeError as error:
        if isinstance(error, Dist2Error):
            raise
        raise error_of(error, f"connecting group {spec.info.name!r} over {library.name}") from error


def _empty_later(box: list[C10dBackend], turns: QueueState) -> Worker:
    """Drop the library's object on a thread of our own, once it has finished what it had started."""

    def empty() -> None:
        turns.wait_quiet()
        box.clear()

    worker = Worker("dist2-native-close", empty)
    worker.start()
    return worker
