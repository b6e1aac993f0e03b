"""The CPU data plane: shared memory inside a host, TCP between hosts."""

from dist2.backends.socket.create import create
from dist2.runtime.signals import OnCtrlC, package_on_ctrl_c

__all__ = ["create"]

package_on_ctrl_c(__spec__, OnCtrlC.DEFER)
