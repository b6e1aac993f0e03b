"""The GPU data plane: NCCL (or RCCL) through cupy, watched over the socket backend's links."""

from dist2.backends.nccl.backend import create
from dist2.runtime.signals import OnCtrlC, package_on_ctrl_c

__all__ = ["create"]

package_on_ctrl_c(__spec__, OnCtrlC.DEFER)
