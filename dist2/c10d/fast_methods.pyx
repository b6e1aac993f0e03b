# cython: language_level=3, boundscheck=False, wraparound=False
"""Methods of a group for calls as they are mostly spelled, and for names that c10d uses too.

`fast_method`: positional arguments only, except for ``async_op`` and the peer of a message, plain tensors, a
known plan. Such a call goes from here to the group's runner, with the addresses of its tensors. All other calls
go to the method in Python, which means the same. `overloaded`: a call in c10d's form is decoded first.
"""

from dist2.operation.places cimport Places
from dist2.operation.plan_cache cimport Plan
from dist2.operation.runner cimport OperationRunner
from dist2.operation.tensors cimport ALONE, Key, make_key, places_of

from dist2.runtime.built import check_built

check_built(__name__, __file__)


cdef enum:  # `Pattern` of dist2.c10d.methods
    NOTHING, IN_PLACE, FROM_ROOT, TO_ROOT, OUT_AND_IN, LIST_AT_ROOT, LIST_OF_ROOT, TO_PEER, FROM_PEER, PATTERNS


cdef int[PATTERNS] COUNTS = [0, 1, 2, 2, 2, 3, 3, 2, 2]  # of arguments; of a message without its tag


cdef class Usual:
    """The usual calls of one method.

    Args:
        pattern: What its arguments are.
        kind: Part of the keys of plans, with
        agreed: this, unless the pattern says otherwise.
        is_async: Whether calls are asynchronous that do not say it.
    """

    cdef int pattern
    cdef object kind, agreed
    cdef bint is_async, is_message

    def __init__(self, int pattern, kind, agreed, bint is_async):
        if not 0 <= pattern < PATTERNS:
            raise ValueError(f"there is no pattern {pattern}")
        self.pattern, self.kind, self.agreed, self.is_async = pattern, kind, agreed, is_async
        self.is_message = pattern == TO_PEER or pattern == FROM_PEER

    cdef object attempt(self, tuple args, dict keywords):
        """Run a call if it is usual; None, with nothing done, if not."""
        cdef Py_ssize_t count = len(args) - 1, named = len(keywords)
        cdef bint is_async = self.is_async
        if count < 0 or not self.is_message and count != COUNTS[self.pattern]:
            return None
        if named and not is_async:
            given = keywords.get("async_op")
            if given is not None:
                if type(given) is not bool:
                    return None
                is_async = given
                named -= 1
        if named > self.is_message:
            return None
        runner = getattr(args[0], "_direct_runner", None)
        if type(runner) is not OperationRunner:
            return None
        if self.is_message:
            return self.carry(<OperationRunner>runner, args, keywords if named else None, count, is_async)
        return self.collect(<OperationRunner>runner, args, is_async)

    cdef object carry(
        self, OperationRunner runner, tuple args, dict keywords, Py_ssize_t count, bint is_async
    ):
        """Send or receive a tensor: ``(tensor, peer)``, ``(tensor, peer=...)`` or ``(tensor, peer, tag)``."""
        tag = 0
        if keywords is not None:
            if count != 1:
                return None
            peer = keywords.get("dst" if self.pattern == TO_PEER else "src")
        elif count == 2 or count == 3:
            peer = args[2]
            if count == 3:
                tag = args[3]
        else:
            return None
        if type(peer) is not int or type(tag) is not int:  # True and 1.0 would find the plan of 1
            return None
        tensors = (args[1],)
        if self.pattern == TO_PEER:
            return self.run(runner, peer, tag, tensors, (), is_async)
        return self.run(runner, peer, tag, (), tensors, is_async)

    cdef object collect(self, OperationRunner runner, tuple args, bint is_async):
        """Run a collective."""
        cdef int pattern = self.pattern
        if pattern == NOTHING:
            return self.run(runner, self.agreed, ALONE, (), (), is_async)
        if pattern == OUT_AND_IN:
            return self.run(runner, self.agreed, ALONE, (args[2],), (args[1],), is_async)
        if pattern == IN_PLACE:
            tensors = (args[1],)
            return self.run(runner, self.agreed, ALONE, tensors, tensors, is_async)
        root = args[COUNTS[pattern]]
        if type(root) is not int:
            return None
        if pattern == FROM_ROOT:
            tensors = (args[1],)
            return self.run(runner, root, ALONE, tensors, tensors, is_async)
        if pattern == TO_ROOT:
            tensors = (args[1],)
            outputs = tensors[:] if root == runner.info.rank else ()
            return self.run(runner, self.agreed, root, tensors, outputs, is_async)
        several = type(args[1 if pattern == LIST_AT_ROOT else 2])
        if several is not list and several is not tuple:
            return None
        if pattern == LIST_AT_ROOT:
            return self.run(runner, root, ALONE, (args[2],), tuple(args[1]), is_async)
        return self.run(runner, root, ALONE, tuple(args[2]), (args[1],), is_async)

    cdef object run(
        self, OperationRunner runner, first, second, tuple inputs, tuple outputs, bint is_async
    ):
        """Run a call if its plan is known: ranks agree on ``first``, and on ``second`` unless that is ALONE."""
        cdef Key key
        cdef Places places
        if not make_key(&key, inputs, outputs):
            return None
        found = runner.plans.keyed.plan_of(&key, self.kind, first, second)
        if found is None:
            return None
        plan = <Plan>found
        places_of(&key, &places)
        if not self.is_message:
            return runner.run_at(plan, inputs, outputs, is_async, None, &places if key.on_host else NULL)
        if self.pattern == TO_PEER and key.on_host:
            work = runner.send_first(plan, inputs[0], key.spans[0].start, is_async)
            if work is not None:
                return work
        return runner.run_beside_at(plan, inputs, outputs, is_async, None, &places if key.on_host else NULL)


def fast_method(otherwise, int pattern, kind, agreed=None, bint async_op=False):
    """Return a method that runs usual calls here and passes the others to a method in Python.

    Args:
        otherwise: Takes every call.
        pattern: See `dist2.c10d.methods.Pattern`.
        kind: Which operation they are.
        agreed: Default of the arguments on which ranks must agree: the key by which plans are found.
        async_op: Whether calls are asynchronous.
    """
    cdef Usual usual = Usual(pattern, kind, agreed, async_op)

    def call(*args, **keywords):
        work = usual.attempt(args, keywords)
        return otherwise(*args, **keywords) if work is None else work

    return call


def overloaded(modern, decoded, frozenset options, frozenset keywords_of_c10d, Py_ssize_t list_at):
    """Return a method with a name that c10d uses too.

    Args:
        modern: Called with the same arguments, unless they have c10d's form.
        decoded: Called if they have.
        options: Types of c10d's options: one of these among the positional arguments makes it c10d's.
        keywords_of_c10d: So does one of these keywords,
        list_at: and a list or tuple as this positional argument; -1: none.
    """

    def call(*args, **keywords):
        if keywords and not keywords_of_c10d.isdisjoint(keywords):
            return decoded(*args, **keywords)
        if 0 <= list_at < len(args) - 1 and isinstance(args[list_at + 1], (list, tuple)):
            return decoded(*args, **keywords)
        for each in args:
            if type(each) in options:
                return decoded(*args, **keywords)
        return modern(*args, **keywords)

    return call
