"""Names of ``torch.distributed`` that other libraries use: imports and attributes in their sources."""

USED: dict[str, str] = {
    "Accelerate 1.15": """
        FileStore ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce barrier
        broadcast broadcast_object_list destroy_process_group distributed_c10d get_rank get_world_size
        group init_process_group is_available is_initialized is_mpi_available is_xccl_available
        """,
    "DeepSpeed 0.19": """
        GradBucket GroupMember P2POp ProcessGroup ReduceOp _all_gather_base _coalescing_manager
        _get_global_rank _reduce_scatter_base all_gather all_gather_into_tensor all_gather_object
        all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv
        broadcast broadcast_object_list destroy_process_group device_mesh distributed_c10d gather
        get_backend get_global_rank get_rank get_world_size group init_process_group irecv
        is_initialized isend monitored_barrier new_group recv reduce reduce_scatter
        reduce_scatter_tensor scatter send
        """,
    "Lightning 2.6": """
        Backend GroupMember ProcessGroup ReduceOp _get_default_group _pg_map algorithms all_gather
        all_gather_object all_reduce all_to_all barrier broadcast broadcast_object_list
        destroy_process_group distributed_c10d gather gather_object get_backend get_rank get_world_size
        group init_process_group is_available is_initialized is_torchelastic_launched monitored_barrier
        new_group recv reduce reduce_scatter scatter scatter_object_list send
        """,
    "Megatron-Core 0.16": """
        DeviceMesh GroupMember P2POp ProcessGroup ReduceOp _all_gather_base _coalescing_manager
        _get_default_group _make_nccl_premul_sum _reduce_scatter_base _set_pg_timeout _world all_gather
        all_gather_into_tensor all_gather_object all_reduce all_to_all_single barrier batch_isend_irecv
        broadcast broadcast_object_list destroy_process_group distributed_c10d gather gather_object
        get_backend get_global_rank get_group_rank get_process_group_ranks get_rank get_world_size
        group irecv is_available is_initialized isend new_group new_subgroups_by_enumeration recv
        reduce_scatter reduce_scatter_tensor scatter send
        """,
}
