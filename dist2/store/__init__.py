"""Key-value stores that ranks share, interchangeable with torch's in both directions."""

from dist2.runtime.signals import OnCtrlC, package_on_ctrl_c
from dist2.store.base import Store
from dist2.store.collectives import StoreCollectives
from dist2.store.file import FileStore
from dist2.store.hash import HashStore
from dist2.store.prefix import PrefixStore
from dist2.store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "StoreCollectives", "TCPStore"]

package_on_ctrl_c(__spec__, OnCtrlC.RAISE)
