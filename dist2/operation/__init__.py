"""One operation from its call to its end; `runner` is the path, `signature` has the records."""

from dist2.operation.signature import GroupInfo, Operation, Signature, State, TensorMeta

__all__ = ["GroupInfo", "Operation", "Signature", "State", "TensorMeta"]
