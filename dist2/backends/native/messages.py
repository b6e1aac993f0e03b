"""Point-to-point messages of a native backend."""

from __future__ import annotations

import functools
from typing import Any

from dist2.backends.base import Tensors
from dist2.backends.carriers import Landing, as_bytes
from dist2.backends.native.arguments import left
from dist2.backends.native.core import NativeCore
from dist2.backends.native.steps import Blocking, at_once
from dist2.backends.native.turns import Steps
from dist2.operation import Operation


class Messages(NativeCore):
    """Messages to oneself go through a mailbox: Gloo has no connection to its own rank."""

    @at_once
    def send(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        peer, tag = operation.signature.peer, operation.signature.tag
        content = as_bytes(inputs[0])
        if peer == self.rank:
            self.mailbox.put(tag, content)
            return
        yield _until_done(self.native.send([content], peer, tag), operation)

    @at_once
    def recv(self, operation: Operation, inputs: Tensors, outputs: Tensors) -> Steps:
        peer, tag = operation.signature.peer, operation.signature.tag
        landing = Landing(outputs[0])
        if peer is None and self.mailbox.has(tag):
            peer = self.rank
        if peer == self.rank:
            letter = self.mailbox.take(tag)
            yield Blocking(functools.partial(letter.read_into, landing.bytes, left(operation)))
            operation.source = peer
        elif peer is None:
            # A message to oneself sent after this call is not seen: Gloo watches other ranks only.
            work = self.native.recv_anysource([landing.bytes], tag)
            yield _until_done(work, operation)
            operation.source = work._source_rank()
        else:
            yield _until_done(self.native.recv([landing.bytes], peer, tag), operation)
            operation.source = peer
        landing.land()


def _until_done(work: Any, operation: Operation) -> Blocking:
    """Return the step of a native send or receive: they complete no future."""
    return Blocking(lambda: work.wait(left(operation)))
