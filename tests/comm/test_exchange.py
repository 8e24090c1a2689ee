"""Operations in one step: what each rank sends and takes, folds, and what travels for them."""

import numpy as np
import pytest

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.comm.exchange import BY_NAME, exchange, folded_all_reduce, folded_reduce, folded_reduce_scatter, folding
from hpcdl.errors import UsageError
from hpcdl.kernels import convert

pytestmark = pytest.mark.mpi


def rows(size, length, kind):
    return np.random.default_rng(length).integers(1, 4, (size, length)).astype(kind)


@pytest.mark.parametrize("length", [0, 1, 5, 64])
def test_folds_are_those_of_numpy(bare, length):
    comm, rank, size = Communicator(bare), bare.rank, bare.size
    for kind in (np.int32, np.float64, np.complex64):
        everyone = rows(size, length, kind)
        for name in ("sum", "product") if kind != np.int32 else BY_NAME:
            wanted, fold = BY_NAME[name].reduce(everyone, axis=0), folding(name)
            for wait in (False, True):
                mine = everyone[rank].copy()
                call = "all_reduce", mine.dtype, length, name, 0
                run = (lambda *which: comm.irun(*which).wait()) if wait else comm.run
                run(call, lambda lane, mine=mine, fold=fold: folded_all_reduce.steps(lane, mine, fold))
                assert np.array_equal(mine, wanted)
            mine = everyone[rank].copy()
            folded_reduce(bare, mine, fold, size - 1)
            assert np.array_equal(mine, wanted if rank == size - 1 else everyone[rank])


@pytest.mark.parametrize("sent, said", [(3, "has sent more bytes"), (1, "has sent 8 bytes")])
def test_what_is_longer_or_shorter_than_the_place_for_it_is_refused(bare, sent, said):
    if bare.size == 1:
        return  # a rank sends nothing to itself
    comm, left = Communicator(bare, "ring"), (bare.rank - 1) % bare.size
    sends, receives = [(np.ones(sent), (bare.rank + 1) % bare.size)], [(np.empty(2), left)]
    call = "all_to_all", np.dtype(float), 0, "", 0
    words = rf"rank {bare.rank} expects 2 float64 \(16 bytes\) from rank {left}, which {said}; receive as many"
    for run in (comm.run, lambda *which: comm.irun(*which).wait()):
        with pytest.raises(UsageError, match=words):
            run(call, lambda lane: exchange.steps(lane, sends, receives))
    comm.barrier()


def test_a_reduce_scatter_leaves_its_input(bare):
    everyone, cut = rows(bare.size, 10, np.float32), chunks(10, bare.size)
    into = np.empty(cut[bare.rank].stop - cut[bare.rank].start, np.float32)
    mine = everyone[bare.rank].copy()
    folded_reduce_scatter(bare, [mine[each] for each in cut], into, folding("sum"))
    assert np.array_equal(into, everyone.sum(0)[cut[bare.rank]]) and np.array_equal(mine, everyone[bare.rank])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_codes_are_added_in_float32_and_rounded_once(kind):
    encode, decode = getattr(convert, f"encode_{kind}"), getattr(convert, f"decode_{kind}")

    def codes(values):
        found = np.empty(len(values), np.uint16)
        encode(np.array(values, np.float32), np.zeros(len(values), np.float32), found)
        return found

    big = 2048.0 if kind == "float16" else 256.0  # the next one is 2 more
    table, into, out = np.stack([codes([big, 3.0]), codes([1.0, 5.0]), codes([1.0, -4.0])]), None, np.empty(2, "f4")
    into = np.empty(2, np.uint16)
    for name, wanted in (("sum", [big + 2, 4.0]), ("max", [big, 5.0]), ("product", [big, -60.0])):
        folding(name, kind)(table, into)
        decode(out, into)
        assert out.tolist() == wanted


def test_what_is_sent_is_counted(world):
    comm = Communicator(world)
    rank, size = comm.rank, comm.size
    others = [each for each in range(size) if each != rank]
    found = np.full((size, 3), -1.0)
    mine = np.full(3, float(rank))
    comm.run(
        ("all_to_all", mine.dtype, 0, "", 0),
        lambda lane: exchange.steps(lane, [(mine, each) for each in others], [(found[each], each) for each in others]),
    )
    assert all((found[each] == each).all() for each in others)
    assert (comm.traffic["all_to_all"].bytes, comm.traffic["all_to_all"].messages) == (24 * (size - 1), size - 1)
    fold, vector = folding("sum"), np.ones(4 * size)
    comm.run(("all_reduce", vector.dtype, 4 * size, "sum", 0), lambda lane: folded_all_reduce.steps(lane, vector, fold))
    counted = comm.traffic["all_reduce"]
    assert (counted.bytes, counted.messages) == (2 * 8 * 4 * (size - 1), 2 * (size - 1))
