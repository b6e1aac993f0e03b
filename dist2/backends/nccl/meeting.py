"""Making communicators: the ranks of a group meet over its control links, with a deadline.

NCCL's own calls wait for ever for a missing rank. So they run on a thread of their own, while the
caller watches the control links; when a rank dies, or the deadline passes, it aborts the communicator under
way, which ends the call. The communicator exists as an object before the call that blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import attrs

from dist2.backends.nccl.communicator import Communicator, failure
from dist2.backends.nccl.device import Device
from dist2.backends.nccl.functions import UNIQUE_ID_BYTES
from dist2.backends.nccl.library import Library
from dist2.backends.socket.outside import Outside
from dist2.errors import Dist2Error, OperationTimeoutError
from dist2.runtime.deadline import deadline_in, remaining_s
from dist2.runtime.threads import Worker

_ENDS_S = 2.0
"""How long a call that was aborted may take to return."""
_AGAIN_S = 0.01
"""How soon a call is aborted again that has not returned: it may have begun since."""


@attrs.frozen(eq=False)
class Communicators:
    """The communicators of a group.

    Messages have separate communicators, so that a late receive holds up no collective.
    There are two of them, as two ranks may each send to the other before they receive.

    Attributes:
        main: For collectives.
        up: For messages to higher ranks.
        down: For messages to lower ranks.
    """

    main: Communicator
    up: Communicator
    down: Communicator

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Each of them."""
        return (self.main, self.up, self.down)


@attrs.frozen(eq=False)
class Meeting:
    """The means by which the ranks of a group make communicators.

    Attributes:
        rank: The caller's group rank.
        world_size: How many ranks there are.
        library: NCCL.
        device: Where the group's tensors are.
        outside: The control links.
        deadline_ns: When to give up.
        name: The group's.
    """

    rank: int
    world_size: int
    library: Library
    device: Device
    outside: Outside
    deadline_ns: int
    name: str

    def connect(self) -> Communicators:
        """Return new communicators of the group. All ranks call.

        Raises:
            OperationTimeoutError, PeerLostError, GroupAbortedError: Ranks are missing.
            BackendError: NCCL failed.
        """
        own = self.library.unique_id() if self.rank == 0 else None
        unique_id = self.outside.share(own, UNIQUE_ID_BYTES, 0, 0, self.deadline_ns)
        main = Communicator.unconnected(self.library)
        self._watched(main, lambda: main.connect(self.world_size, unique_id, self.rank))
        return self.complete(main)

    def complete(self, main: Communicator) -> Communicators:
        """Return all communicators of a group, given the first. All ranks call."""
        made: list[Communicator] = []

        def split() -> None:
            for _ in ("up", "down"):
                part = main.split(0, self.rank)
                assert part is not None
                made.append(part)

        try:
            self._watched(main, split)
        except BaseException:
            for each in made:
                each.abort()
            raise
        return Communicators(main, made[0], made[1])

    def derive(self, parent: Communicator) -> Communicators:
        """Return communicators made from a parent's, with nothing outstanding on it. All its ranks call."""
        made: list[Communicator | None] = []
        self._watched(parent, lambda: made.append(parent.split(0, self.rank)))
        (main,) = made
        assert main is not None  # no rank gave a negative color
        return self.complete(main)

    def _watched(self, aborted: Communicator, call: Callable[[], object]) -> None:
        """Make a call that may block; if it is given up, abort a communicator, so that it ends."""
        ended, errors = Event(), list[Exception]()

        def run() -> None:
            try:
                with self.device.active():
                    call()
            except Exception as error:  # noqa: BLE001 - raised by the caller, below
                errors.append(error)
            ended.set()
            self.outside.wake()

        worker = Worker(f"dist2-nccl-connect-{self.name}", run)
        worker.start()
        try:
            self.outside.wait(ended.is_set, self.deadline_ns)
        except BaseException as error:
            _break_off(aborted, worker)
            if isinstance(error, OperationTimeoutError):
                error.prefix("the communicators were not made")
            raise
        worker.join()
        if errors:
            aborted.abort()
            (failed,) = errors
            raise failed if isinstance(failed, Dist2Error) else failure(self.library, failed) from failed


def _break_off(communicator: Communicator, worker: Worker) -> None:
    """Abort a communicator that another thread makes a call with, until that thread has returned.

    The thread may not have come as far as the call, or the call not as far as a handle, when this is first
    tried: then there is nothing yet to abort, and the call would block for ever.
    """
    deadline_ns = deadline_in(_ENDS_S)
    while worker.is_alive() and remaining_s(deadline_ns):
        communicator.abort()
        worker.join(_AGAIN_S)
    communicator.abort()
