"""One operation from its call to its end; `runner` is the path, `record` the record of a call."""

from dist2.operation.record import Operation, State
from dist2.operation.signature import GroupInfo, Signature, TensorMeta

__all__ = ["GroupInfo", "Operation", "Signature", "State", "TensorMeta"]
