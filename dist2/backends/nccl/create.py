"""Building an NCCL group: first its control group, over which its members then meet."""

from __future__ import annotations

import attrs
import torch

from dist2.backends.base import GroupSpec
from dist2.backends.nccl.backend import NcclBackend
from dist2.backends.nccl.device import CudaDevice, Device
from dist2.backends.nccl.library import Library, load
from dist2.backends.nccl.options import NcclOptions
from dist2.backends.socket import create as create_socket
from dist2.backends.socket.backend import SocketBackend
from dist2.errors import InvalidUsageError


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
    device, library = _platform(spec.device) if options.platform is None else options.platform()
    control: SocketBackend = create_socket(
        attrs.evolve(spec, device=torch.device("cpu"), options=dict(options.control))
    )
    try:
        return NcclBackend(spec, options, control, device, library)
    except BaseException:
        control.shutdown()
        raise


def _platform(device: torch.device) -> tuple[Device, Library]:
    """Return the GPU that a group was given, or the current one, and NCCL."""
    if device.type not in ("cpu", "cuda"):
        raise InvalidUsageError(f"device must be a GPU like 'cuda:0' for backend 'nccl', got {str(device)!r}")
    library = load()
    return CudaDevice(device if device.type == "cuda" else torch.device("cuda")), library
