# cython: annotation_typing=False
"""`NcclBackend`: a group whose tensors are on GPUs.

Its control group (see `Controlled`) also carries the operations that NCCL lacks: those on CPU tensors, and
messages with tags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import cast

import attrs
import torch

from dist2.backends.base import Execute, GroupSpec, Helped, Job, Tensors
from dist2.backends.nccl.device import CudaDevice, Device
from dist2.backends.nccl.launch import Planned
from dist2.backends.nccl.launcher import Launcher
from dist2.backends.nccl.library import Library, load
from dist2.backends.nccl.meeting import Communicators, Meeting
from dist2.backends.nccl.operations import Operations
from dist2.backends.nccl.options import NcclOptions
from dist2.backends.nccl.staging import is_staged, staged
from dist2.backends.socket import create as create_socket
from dist2.backends.socket.backend import SocketBackend
from dist2.backends.socket.controlled import Controlled, shut_down_on_failure
from dist2.errors import (
    GroupAbortedError,
    GroupRevokedError,
    InvalidUsageError,
    PeerLostError,
)
from dist2.operation.kinds import OpKind
from dist2.operation.record import Operation
from dist2.operation.signature import Signature
from dist2.runtime.built import check_built
from dist2.runtime.deadline import deadline_in

check_built(__name__, __file__)


class NcclBackend(Controlled):
    """Moves tensors on a device through NCCL.

    Args:
        spec: The group.
        options: Checked options of `new_group`.
        control: The control group.
        device: Where the tensors are.
        library: NCCL.
        meet: Makes the communicators; by default the members meet anew.
        parent: The backend of the group that this one is made from.

    Attributes:
        owns: Tells whether the device takes a tensor; the control group takes the others.
    """

    natively_async = True
    stream_ordered = True

    def __init__(
        self,
        spec: GroupSpec,
        options: NcclOptions,
        control: SocketBackend,
        device: Device,
        library: Library,
        meet: Callable[[Meeting], Communicators] = Meeting.connect,
        parent: NcclBackend | None = None,
    ) -> None:
        super().__init__(spec, control)
        self.device_types = ("cpu",) if device.type == "cpu" else (device.type, "cpu")
        self.frees_tensors = device.blocks
        self._options = options
        self._device = device
        self.owns = device.owns
        self._library = library
        self._operations = Operations(self.rank, self.world_size)
        self._launcher = Launcher(spec.info, options, control.outside, device, library, meet)
        self._closed = False
        self._aborted: GroupAbortedError | None = None
        if options.eager:
            # A member that was faster may have revoked the group, or another may die while a group shrinks:
            # then the group is made, and its operations raise that.
            with suppress(GroupRevokedError, *((PeerLostError,) if parent is not None else ())):
                self._launcher.connected(deadline_in(spec.timeout_s))

    # Planning

    def plan(self, signature: Signature) -> Execute:
        """Return a callable that runs operations of a signature, on the device of its tensors or the CPU."""
        return _Routed(self, signature, plain=False).execute

    def plan_plain(self, signature: Signature) -> Execute:
        """Do `plan` for plain tensors, without a look at each: torch gives the interpreter lock up for it."""
        return _Routed(self, signature, plain=True).execute

    def on_device(self, signature: Signature, plain: bool) -> Execute:
        """Return a callable that runs operations on the device.

        Args:
            signature: Of the operations.
            plain: Their tensors are known to be plain.

        Raises:
            InvalidUsageError: NCCL cannot.
        """
        if signature.kind.is_p2p and is_staged(signature):
            return staged(self._device, self.control.plan(signature), signature)
        planned = Planned.of(signature, self._operations.plan(signature, plain))
        launch = cast(Execute, partial(self._launcher.launch, planned))
        if signature.kind is not OpKind.BARRIER:
            return launch
        meet = self.control.plan(signature)

        def execute(operation: Operation, inputs: Tensors, outputs: Tensors) -> Future[None] | Helped | None:
            if operation.is_async:
                return launch(operation, inputs, outputs)
            self._launcher.finish(operation)
            meet(operation, (), ())
            return None

        return execute

    def bound(self, job: Job) -> Job:
        """Have a job run on the caller's current stream."""
        stream = self._device.current()

        def run() -> BaseException | None:
            with self._device.on(stream):
                return job()

        return run

    def together(self) -> AbstractContextManager[object]:
        """Launch the messages of a ``with`` block as one group of calls for each direction."""
        return self._launcher.together()

    # Operations that `Backend` requires by name; the group calls the result of `plan`

    def all_reduce(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> None:
        """See `Backend`."""
        self.plan(operation.signature)(operation, inputs, outputs)

    broadcast = all_gather = all_to_all = send = recv = all_reduce

    # Membership

    def reconfigure(self, spec: GroupSpec, handles: Sequence[str]) -> NcclBackend:
        """Meet over new control links, then make new communicators."""
        return self._with_control(spec, self.control.reconfigure(spec, handles), Meeting.connect)

    def split(self, spec: GroupSpec) -> NcclBackend:
        """Return a backend for some of the members.

        All ranks of a communicator have to call for it to be split; a group's members call alone. So
        communicators are made from this group's where all its ranks are members, and else anew. Where some
        have found this group broken or busy and others have not, the members agree not to need it.
        """
        own, control = self.spec.info.global_ranks, self.control_of(spec)

        def meet(meeting: Meeting) -> Communicators:
            parent = self._launcher.communicators
            _, agreed = control.agree(int(self._launcher.is_quiet()), meeting.deadline_ns)
            derives = agreed.flags & 1 and not agreed.failed
            return meeting.derive(parent.main) if derives and parent is not None else meeting.connect()

        whole = len(spec.info.global_ranks) == len(own)
        return self._with_control(spec, control, meet if whole else Meeting.connect)

    def _with_control(
        self, spec: GroupSpec, control: SocketBackend, meet: Callable[[Meeting], Communicators]
    ) -> NcclBackend:
        with shut_down_on_failure(control):
            return NcclBackend(spec, self._options, control, self._device, self._library, meet, self)

    # Life

    def abort(self) -> None:
        """Make blocked callers raise; `shutdown` then cleans up."""
        self._aborted = GroupAbortedError(f"group {self.spec.info.name!r} was aborted in this process")
        self.control.abort()

    def shutdown(self) -> None:
        """Wait for launched operations, free the communicators, and leave the control group."""
        if self._closed:
            return
        self._closed = True
        why = self._aborted or GroupAbortedError(f"group {self.spec.info.name!r} is closed in this process")
        in_order = self._aborted is None and not self.lost()
        self._launcher.close(why, deadline_in(self.spec.timeout_s), in_order)
        self.control.shutdown()


class _Routed:
    """Runs operations of one signature where their tensors are; each way is planned when it is first
    taken."""

    def __init__(self, backend: NcclBackend, signature: Signature, plain: bool) -> None:
        self._backend = backend
        self._signature = signature
        self._plain = plain
        self._on_device: Execute | None = None
        self._on_cpu: Execute | None = None

    def execute(
        self, operation: Operation, inputs: Tensors, outputs: Tensors
    ) -> Future[None] | Helped | None:
        """See `Execute`."""
        backend = self._backend
        tensors = inputs if outputs is inputs else (*inputs, *outputs)
        if all(map(backend.owns, tensors)):
            if self._on_device is None:
                self._on_device = backend.on_device(self._signature, self._plain)
            return self._on_device(operation, inputs, outputs)
        if any(map(backend.owns, tensors)) or not all(each.is_cpu for each in tensors):
            devices = ", ".join(sorted({str(each.device) for each in tensors}))
            raise InvalidUsageError(
                f"tensors of one operation must all be on the group's device or all on the CPU, got {devices}"
            )
        if self._on_cpu is None:
            self._on_cpu = backend.control.plan(self._signature)
        return self._on_cpu(operation, inputs, outputs)


def create(spec: GroupSpec) -> NcclBackend:
    """Return the backend of a new group.

    Raises:
        BackendUnavailableError: There is no GPU, or a package is missing; the message names it.
        UnknownOptionError, InvalidUsageError: An option or the device is wrong.
        OperationTimeoutError: Members did not arrive in time; names them.
        PeerLostError: A member failed or died while it built the group.
        BackendError: NCCL failed.
    """
    options = NcclOptions.parse(spec.options)
    device, library = _platform(spec.device, options) if options.platform is None else options.platform()
    library = library.configured(options.config)
    control: SocketBackend = create_socket(
        attrs.evolve(spec, device=torch.device("cpu"), options=dict(options.control))
    )
    with shut_down_on_failure(control):
        return NcclBackend(spec, options, control, device, library)


def check(device: torch.device, options: Mapping[str, object]) -> None:
    """Check options, and that NCCL is here; `new_group` calls this before it waits for other ranks.

    Raises:
        BackendUnavailableError: There is no GPU, or a package is missing.
        UnknownOptionError, InvalidUsageError: An option is wrong.
    """
    if NcclOptions.parse(options).platform is None:
        load()


create.check = check  # type: ignore[attr-defined]  # found by `new_group`
create.natively_async = NcclBackend.natively_async  # type: ignore[attr-defined]  # as above


def _platform(device: torch.device, options: NcclOptions) -> tuple[Device, Library]:
    """Return the GPU that a group was given, or the current one, and NCCL."""
    if device.type not in ("cpu", "cuda"):
        raise InvalidUsageError(f"device must be a GPU like 'cuda:0' for backend 'nccl', got {str(device)!r}")
    library = load()
    priority = -1 if options.is_high_priority_stream else 0
    return CudaDevice(device if device.type == "cuda" else torch.device("cuda"), priority), library
