"""PyTorch's own tests of a backend, on our ranks: the bodies of its tests, without the processes that it would start.

Its module asks for a backend's name: it is read once as for gloo, whose tests ask for what the CPU has, and once as for
mpi, for all-to-all; the process group is ours. docs/torch.md says which tests are left out, and why."""

import importlib.util
import os
import sys
import tempfile
import types
import unittest

import pytest
from mpi4py import MPI

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.four]
COMM = MPI.COMM_WORLD
BY_MPI = """
all_to_all all_to_all_complex all_to_all_full_group all_to_all_group all_to_all_single_equal_split
all_to_all_single_equal_split_complex all_to_all_single_equal_split_full_group all_to_all_single_equal_split_group
all_to_all_single_unequal_split all_to_all_single_unequal_split_complex all_to_all_single_unequal_split_full_group
all_to_all_single_unequal_split_group
"""
BY_GLOO = """
DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view DistributedDataParallel_requires_grad
accumulate_gradients_no_sync accumulate_gradients_no_sync_allreduce_hook
accumulate_gradients_no_sync_allreduce_with_then_hook accumulate_gradients_no_sync_grad_is_view all_gather
all_gather_coalesced_complex all_gather_coalesced_full_group all_gather_coalesced_group all_gather_coalesced_simple
all_gather_coalesced_with_empty all_gather_complex all_gather_full_group all_gather_group all_gather_object_default_pg
all_gather_object_subgroup all_reduce_coalesced_full_group_max all_reduce_coalesced_full_group_min
all_reduce_coalesced_full_group_product all_reduce_coalesced_full_group_sum all_reduce_coalesced_group_max
all_reduce_coalesced_group_min all_reduce_coalesced_group_product all_reduce_coalesced_group_sum
all_reduce_coalesced_max all_reduce_coalesced_max_complex_unsupported all_reduce_coalesced_min
all_reduce_coalesced_product all_reduce_coalesced_sum all_reduce_complex_unsupported_ops all_reduce_full_group_max
all_reduce_full_group_min all_reduce_full_group_product all_reduce_full_group_sum all_reduce_group_max
all_reduce_group_min all_reduce_group_product all_reduce_group_sum all_reduce_max all_reduce_min all_reduce_product
all_reduce_sum all_reduce_sum_async all_reduce_sum_complex barrier barrier_full_group barrier_group
batch_isend_irecv_gloo batch_isend_irecv_gloo_tags broadcast broadcast_full_group broadcast_group ddp_create_graph
ddp_logging_data_cpu dump_DDP_relevant_env_vars gather gather_checks gather_full_group gather_group gather_object
gather_object_subgroup get_future get_rank get_rank_size_full_group get_rank_size_group irecv isend
monitored_barrier_gloo_subgroup new_subgroups_with_group_param reduce_full_group_max reduce_full_group_min
reduce_full_group_product reduce_full_group_sum reduce_group_max reduce_group_min reduce_group_product
reduce_group_sum reduce_max reduce_min reduce_product reduce_sum reduce_sum_twice scatter scatter_checks
scatter_complex scatter_full_group scatter_group scatter_object_list send_recv send_recv_any_source send_recv_with_tag
static_graph_api_cpu
"""
AS_MPI, AS_GLOO = ([f"test_{name}" for name in text.split()] for text in (BY_MPI, BY_GLOO))


@pytest.fixture(scope="module")
def places():
    """A folder that all ranks share, with what PyTorch's tests expect there."""
    with tempfile.TemporaryDirectory() as folder:
        shared = COMM.bcast(folder)
        if COMM.rank == 0:
            for name in ("barrier", "test_dir", "init_dir"):
                os.mkdir(f"{folder}/{name}")
        COMM.Barrier()
        yield shared
        COMM.Barrier()


@pytest.fixture(scope="module")
def their_tests(places):
    """A function: the case of PyTorch's tests, read as for this backend."""
    cases, before = {}, os.environ.copy()
    stub = types.ModuleType("expecttest")  # which its helpers import and these tests do not use
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    os.environ |= {"WORLD_SIZE": str(COMM.size), "TEMP_DIR": places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    def read(backend):
        if backend not in cases:
            os.environ["BACKEND"] = backend
            arguments, sys.argv = sys.argv, sys.argv[:1]
            try:
                where = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
                spec = importlib.util.spec_from_file_location(f"tests_as_for_{backend}", where.origin)
                module = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = module  # for what they pickle
                spec.loader.exec_module(module)
                from torch.testing._internal.common_distributed import DistTestCases
                from torch.testing._internal.common_utils import TestCase
            finally:
                sys.argv = arguments
            DistTestCases.backend_feature["subgroup"].add("hpcdl")

            class OnRanks(module.DistributedTest._DistTestBase, TestCase):
                rank, world_size, file_name = COMM.rank, COMM.size, f"{places}/store"

                def _barrier(self, *_, **__):
                    COMM.Barrier()

            cases[backend] = OnRanks
        os.environ["BACKEND"] = "mpi"  # at run time: for gloo some ask for 8 ranks
        return cases[backend]

    yield read
    os.environ.clear()
    os.environ |= before


@pytest.mark.parametrize("name", AS_MPI + AS_GLOO)
def test_as_pytorch_has_it(group, their_tests, name):
    case, result = their_tests("mpi" if name in AS_MPI else "gloo")(name), unittest.TestResult()
    case.run(result)
    for _, text in result.errors + result.failures:
        pytest.fail(text)
    assert result.testsRun == 1 and not result.skipped
