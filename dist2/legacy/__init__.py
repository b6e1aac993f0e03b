"""The global API of `torch.distributed`, on top of dist2's groups: ``import dist2.legacy as dist``.

Names, arguments and meanings are torch's; ``docs/legacy.md`` lists the differences. Importing it changes
nothing: the default group begins with `init_process_group`.
"""

from typing import Any

import torch.distributed
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GatherOptions,
    QueueEmptyError,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
    distributed_c10d,
)

from dist2.c10d.dynamo import keep_out
from dist2.group.process_group import ProcessGroup
from dist2.legacy.checks import premul_sum as _make_nccl_premul_sum
from dist2.legacy.collectives import (
    _all_gather_base,
    _reduce_scatter_base,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    gather_into_tensor,
    gather_single,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from dist2.legacy.debugging import (
    DebugLevel,
    get_debug_level,
    record_comm,
    set_debug_level,
    set_debug_level_from_env,
)
from dist2.legacy.groups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from dist2.legacy.lifecycle import (
    destroy_process_group,
    init_process_group,
    rendezvous,
)
from dist2.legacy.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from dist2.legacy.names import (
    Backend,
    BackendConfig,
    GroupMember,
    default_pg_timeout,
    get_default_backend_for_device,
    group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    reduce_op,
    supports_complex,
)
from dist2.legacy.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from dist2.legacy.p2p import (
    P2POp,
    _coalescing_manager,
    _CoalescingManager,
    _new_window,
    _supports_window,
    batch_isend_irecv,
    irecv,
    isend,
    new_window,
    recv,
    send,
)
from dist2.legacy.queries import (
    _get_default_group,
    _get_default_store,
    _get_default_timeout,
    _get_global_rank,
    _get_process_group_name,
    _rank_not_in_group,
    _set_pg_timeout,
    _time_estimator,
    get_backend,
    get_backend_config,
    get_backend_impl,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
    is_torchelastic_launched,
    set_timeout,
)
from dist2.rendezvous import register_rendezvous_handler
from dist2.runtime import torch_versions
from dist2.store import FileStore, HashStore, PrefixStore, Store, StoreCollectives, TCPStore

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "DebugLevel",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "GatherOptions",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "Work",
    "_CoalescingManager",
    "_all_gather_base",
    "_coalescing_manager",
    "_get_default_group",
    "_get_default_store",
    "_get_default_timeout",
    "_get_global_rank",
    "_get_process_group_name",
    "_make_nccl_premul_sum",
    "_new_window",
    "_rank_not_in_group",
    "_reduce_scatter_base",
    "_set_pg_timeout",
    "_supports_window",
    "_time_estimator",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_backend_impl",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "new_window",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "set_timeout",
    "shrink_group",
    "split_group",
    "supports_complex",
]


def __getattr__(name: str) -> Any:
    """Return a name of torch's: a type, a submodule, or a function that asks torch's tables.

    `init_process_group` enters its group there (`register_with_torch`). Names of torch's binding are here
    too, and those that only older versions of torch have.
    """
    for module in (torch.distributed, distributed_c10d, torch_versions.BINDING):
        if hasattr(module, name):
            return getattr(module, name)
    if name == "_DistributedPdb":  # since torch 2.13 its class is inside a function
        maker: Any = vars(torch.distributed).get("_make_distributed_pdb")
        if maker is not None:
            return type(maker())
    if name in _GONE:
        return _GONE[name]
    raise AttributeError(f"module 'dist2.legacy' has no attribute {name!r}")


_GONE = {"_StoreCollectives": StoreCollectives, "_ControlCollectives": StoreCollectives}
"""Names that torch 2.14 has no more, and the types of dist2 that do the same."""


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torch.distributed), *_GONE})


keep_out(__name__)
