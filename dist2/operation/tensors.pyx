# cython: language_level=3, boundscheck=False, wraparound=False
"""Reading tensors by the ways that torch publishes, and keys of calls.

torch describes a tensor in one call of C: DLPack's exchange API, torch 2.10 and later. The description lacks
two properties, which torch tells in Python: whether the tensor is lazily negated, and whether its storage,
which may have been made smaller, still has all of its elements. That takes longer than all the rest, so the
answer is kept with the object and its address (`Asked`): a tensor whose values are put elsewhere is asked
again. For an older torch there are no keys here, and plans are found by attributes of the tensors
(`dist2.operation.plan_cache.AnyPlans`).
"""

from cpython.exc cimport PyErr_Clear
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from weakref import ref

import torch

from dist2.runtime.cache import keep as keep_in
from dist2.runtime.torch_versions import TENSOR_EXCHANGE


# The used part of DLPack 1.x, in the layout of its specification.
cdef struct View:
    char *data
    int32_t device_type, device_id
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t offset


cdef struct ExchangeApi:
    uint32_t major, minor
    void *older
    void *allocate
    void *owned_of
    void *tensor_of
    int (*read)(void *tensor, void *into) noexcept
    void *stream_of


cdef ExchangeApi *exchange_api(object capsule) except NULL:
    """Return the functions in a capsule that torch publishes."""
    cdef ExchangeApi *found = <ExchangeApi *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    if found.major != 1 or found.read == NULL:
        raise ValueError(f"cannot read tensors by DLPack {found.major}.{found.minor}")
    return found


cdef enum:
    CPU = 1, CUDA = 2, ROCM = 10
    COMPLEX = 5, FEWEST_OTHER = 7  # codes of element types: 7 and more are the small floating-point formats
    KEPT = 64


cdef ExchangeApi *api = NULL if TENSOR_EXCHANGE is None else exchange_api(TENSOR_EXCHANGE)
cdef object TENSOR = torch.Tensor, PARAMETER = torch.nn.Parameter


cdef struct Asked:
    void *tensor
    void *data
    int64_t nbytes


cdef Asked asked[KEPT]
cdef list asked_refs = [None] * KEPT  # a weak reference to each: another object may have the address later


cdef bint is_as_it_lies(object tensor, void *data, int64_t nbytes):
    """Whether a tensor's memory holds its values, and all of them."""
    cdef size_t at = (<size_t><void *>tensor >> 5 ^ <size_t><void *>tensor >> 11) % KEPT
    cdef Asked *known = &asked[at]
    if known.tensor == <void *>tensor and known.data == data and known.nbytes == nbytes:
        if asked_refs[at]() is tensor:
            return True
    if tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    if nbytes > 0 and <size_t>data + <size_t>nbytes > <size_t>storage.data_ptr() + <size_t>storage.nbytes():
        return False
    known.tensor, known.data, known.nbytes = <void *>tensor, data, nbytes
    asked_refs[at] = ref(tensor)
    return True


cdef char *address_of(object tensor) except? NULL:
    """Return where the values of a tensor lie."""
    cdef View view
    if api != NULL and type(tensor) is TENSOR and api.read(<void *>tensor, &view) == 0:
        return view.data + view.offset
    PyErr_Clear()
    return <char *><size_t>tensor.data_ptr()


cdef bint is_dense(const View *view) noexcept:
    """Whether elements are contiguous; as in torch, strides of extents of one do not matter."""
    cdef int64_t expected = 1, axis
    for axis in range(view.ndim):
        if view.shape[axis] == 0:
            return True
    for axis in range(view.ndim - 1, -1, -1):
        if view.shape[axis] != 1:
            if view.strides != NULL and view.strides[axis] != expected:
                return False
            expected *= view.shape[axis]
    return True


cdef int64_t device_word(const View *view) noexcept:
    """Return a number for the device of a tensor; -1 for one whose tensors have no keys here."""
    if view.device_type == CPU:
        return 0
    if view.device_type == CUDA or view.device_type == ROCM:
        return <int64_t>view.device_type << 56 | <int64_t>(view.device_id & 0xFF) << 48
    return -1


cdef bint add(Key *key, object tensor):
    """Add a tensor to a key. Return whether it is plain.

    Plain are those on the CPU or a GPU, dense, real, as they lie, and of no unknown subclass.
    """
    cdef View view
    cdef int64_t device, bits
    cdef int axis
    if type(tensor) is not TENSOR and type(tensor) is not PARAMETER:
        return False
    if api.read(<void *>tensor, &view):
        PyErr_Clear()  # the plan is found in another way
        return False
    device = device_word(&view)
    if device < 0 or key.count + 1 + view.ndim > MOST_WORDS or not is_dense(&view):
        return False
    if view.code == COMPLEX or view.code >= FEWEST_OTHER or view.code == 3:
        return False
    key.words[key.count] = (
        device | <int64_t>view.ndim << 32 | <int64_t>view.lanes << 16 | <int64_t>view.bits << 8 | view.code
    )
    key.count += 1
    bits = <int64_t>view.lanes * view.bits
    for axis in range(view.ndim):
        key.words[key.count] = view.shape[axis]
        key.count += 1
        bits *= view.shape[axis]
    if view.data == NULL and bits != 0:  # its storage was freed, or it wraps another tensor
        return False
    if not is_as_it_lies(tensor, view.data + view.offset, (bits + 7) // 8):
        return False
    key.on_host = key.on_host and view.device_type == CPU
    key.spans[key.tensors].start = <size_t>view.data + view.offset
    key.spans[key.tensors].end = key.spans[key.tensors].start + <size_t>((bits + 7) // 8)
    key.each[key.tensors] = <PyObject *>tensor
    key.tensors += 1
    return True


cdef bint add_all(Key *key, object tensors):
    """Add a list or tuple of tensors; whether all are plain."""
    if type(tensors) is tuple:
        for tensor in <tuple>tensors:
            if not add(key, tensor):
                return False
        return True
    if type(tensors) is list:
        for tensor in <list>tensors:
            if not add(key, tensor):
                return False
        return True
    return False


cdef bint add_overlaps(Key *key, int written) noexcept:
    """Add which tensors share memory with a written one, and at which offsets: those from `written` on.

    Return whether the key has room. No layout has words of -1 or less, so no other call has these words.
    """
    cdef int first, second
    cdef Span *one
    cdef Span *other
    for first in range(key.tensors):
        for second in range(max(written, first + 1), key.tensors):
            one, other = &key.spans[first], &key.spans[second]
            if one.start >= other.end or other.start >= one.end:
                continue
            if key.count + 2 > MOST_WORDS:
                return False
            key.words[key.count] = -1 - (first * MOST_WORDS + second)
            key.words[key.count + 1] = <int64_t>(one.start - other.start)
            key.count += 2
    return True


cdef bint make_key(Key *key, object inputs, object outputs):
    """Make the key of a call. Return whether all tensors are plain, and there are not too many."""
    cdef int written = 0
    cdef bint in_place = inputs is outputs
    key.count = key.on_host = 1
    key.tensors = 0
    if api == NULL:
        return False
    if not add_all(key, inputs):
        return False
    key.words[0] = -1 if in_place else key.count
    if not in_place:
        written = key.tensors
        if not add_all(key, outputs):
            return False
    return add_overlaps(key, written)


cdef void places_of(Key *key, Places *places) noexcept:
    """Fill in where the tensors of a call lie."""
    places.count = key.tensors
    places.tensors = <void **>key.each
    places.spans = key.spans


# Plans by keys

cdef enum:
    RECENT = 16  # plans that are found by the identity of the arguments on which ranks agree
    FEW_WORDS = 8

ALONE = object()  # stands for no second argument on which ranks agree


cdef bytes words_of(Key *key):
    return PyBytes_FromStringAndSize(<char *>key.words, key.count * <Py_ssize_t>sizeof(int64_t))


cdef inline size_t address(object thing) noexcept:
    return <size_t><void *>thing


cdef class Recent:
    """A plan that was found lately, for calls with the very same arguments on which ranks agree."""


cdef class KeyedPlans:
    """Plans of calls with plain tensors; emptied when there are too many."""

    def __init__(self, int most):
        self.plans = {}
        self.recent = [None] * RECENT
        self.most = most

    cdef object plan_of(self, Key *key, object kind, object first, object second):
        """Return the plan of a call, or None: ranks agree on `first`, or if `second` is not ALONE, on both."""
        cdef size_t at = (address(kind) ^ address(first) ^ address(second) >> 1) >> 4
        cdef Recent recent
        at = (at ^ at >> 4 ^ <size_t>key.words[key.count - 1]) % RECENT
        known = self.recent[at]
        if known is not None:
            recent = <Recent>known
            if (
                recent.kind is kind and recent.first is first and recent.second is second
                and recent.count == key.count
                and memcmp(recent.words, key.words, key.count * sizeof(int64_t)) == 0
            ):
                return recent.plan
        try:
            plan = self.plans.get((kind, first if second is ALONE else (first, second), words_of(key)))
        except TypeError:  # it has no hash
            return None
        if plan is not None and key.count <= FEW_WORDS:
            recent = Recent()
            recent.kind, recent.first, recent.second, recent.plan = kind, first, second, plan
            recent.count = key.count
            memcpy(recent.words, key.words, key.count * sizeof(int64_t))
            self.recent[at] = recent
        return plan

    cpdef find(self, kind, agreed, inputs, outputs):
        """Return the plan of a call like one that was kept; None where there is none."""
        cdef Key key
        return self.plan_of(&key, kind, agreed, ALONE) if make_key(&key, inputs, outputs) else None

    cpdef bint keep(self, kind, agreed, inputs, outputs, plan):
        """Keep a plan; return whether the call has a key."""
        cdef Key key
        if not make_key(&key, inputs, outputs):
            return False
        keep_in(self.plans, (kind, agreed, words_of(&key)), plan, self.most)
        return True

    cpdef bint takes(self, inputs, outputs):
        """Whether a call has a key."""
        cdef Key key
        return make_key(&key, inputs, outputs)

    cpdef void clear(self):
        """Let go of all."""
        self.plans.clear()
        self.recent = [None] * RECENT
