"""PyTorch's own tests of a backend, on our ranks: the bodies of its tests, without the processes that it would start.

Its module asks for a backend's name: it is read once as for gloo, whose tests ask for what the CPU has, and once as for
mpi, for all-to-all; the process group is ours. docs/torch.md says which tests are left out, and why.
"""

import importlib.util
import os
import sys
import tempfile
import types
import unittest

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.four]
COMM = MPI.COMM_WORLD
BY_MPI = """
test_all_to_all test_all_to_all_complex test_all_to_all_full_group test_all_to_all_group
test_all_to_all_single_equal_split test_all_to_all_single_equal_split_complex
test_all_to_all_single_equal_split_full_group test_all_to_all_single_equal_split_group
test_all_to_all_single_unequal_split test_all_to_all_single_unequal_split_complex
test_all_to_all_single_unequal_split_full_group test_all_to_all_single_unequal_split_group
"""
BY_GLOO = """
test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
test_DistributedDataParallel_requires_grad test_accumulate_gradients_no_sync
test_accumulate_gradients_no_sync_allreduce_hook test_accumulate_gradients_no_sync_allreduce_with_then_hook
test_accumulate_gradients_no_sync_grad_is_view test_all_gather test_all_gather_coalesced_complex
test_all_gather_coalesced_full_group test_all_gather_coalesced_group test_all_gather_coalesced_simple
test_all_gather_coalesced_with_empty test_all_gather_complex test_all_gather_full_group test_all_gather_group
test_all_gather_object_default_pg test_all_gather_object_subgroup test_all_reduce_coalesced_full_group_max
test_all_reduce_coalesced_full_group_min test_all_reduce_coalesced_full_group_product
test_all_reduce_coalesced_full_group_sum test_all_reduce_coalesced_group_max test_all_reduce_coalesced_group_min
test_all_reduce_coalesced_group_product test_all_reduce_coalesced_group_sum test_all_reduce_coalesced_max
test_all_reduce_coalesced_max_complex_unsupported test_all_reduce_coalesced_min test_all_reduce_coalesced_product
test_all_reduce_coalesced_sum test_all_reduce_complex_unsupported_ops test_all_reduce_full_group_max
test_all_reduce_full_group_min test_all_reduce_full_group_product test_all_reduce_full_group_sum
test_all_reduce_group_max test_all_reduce_group_min test_all_reduce_group_product test_all_reduce_group_sum
test_all_reduce_max test_all_reduce_min test_all_reduce_product test_all_reduce_sum test_all_reduce_sum_async
test_all_reduce_sum_complex test_barrier test_barrier_full_group test_barrier_group test_batch_isend_irecv_gloo
test_batch_isend_irecv_gloo_tags test_broadcast test_broadcast_full_group test_broadcast_group test_ddp_create_graph
test_ddp_logging_data_cpu test_dump_DDP_relevant_env_vars test_gather test_gather_checks test_gather_full_group
test_gather_group test_gather_object test_gather_object_subgroup test_get_future test_get_rank
test_get_rank_size_full_group test_get_rank_size_group test_irecv test_isend test_monitored_barrier_gloo_subgroup
test_new_subgroups_with_group_param test_reduce_full_group_max test_reduce_full_group_min
test_reduce_full_group_product test_reduce_full_group_sum test_reduce_group_max test_reduce_group_min
test_reduce_group_product test_reduce_group_sum test_reduce_max test_reduce_min test_reduce_product test_reduce_sum
test_reduce_sum_twice test_scatter test_scatter_checks test_scatter_complex test_scatter_full_group test_scatter_group
test_scatter_object_list test_send_recv test_send_recv_any_source test_send_recv_with_tag test_static_graph_api_cpu
"""
AS_MPI, AS_GLOO = BY_MPI.split(), BY_GLOO.split()


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
