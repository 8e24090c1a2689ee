"""Cores, caches and nodes, from a tree like /sys and from what lstopo writes, both made here."""

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpcdl.machine import topology
from hpcdl.machine.topology import Cache, Processor, bits_of, bytes_of, from_hwloc, from_sys, numbers_of

USABLE = sorted(os.sched_getaffinity(0))


def tree(root, nodes=2, cores=2, siblings=2):
    """A machine of nodes with cores with siblings: processor numbers go over all cores, then once more."""
    count = nodes * cores

    def write(path, text):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")

    write("cpu/online", f"0-{count * siblings - 1}")
    for node in range(nodes):
        own = [core + count * k for k in range(siblings) for core in range(node * cores, (node + 1) * cores)]
        write(f"node/node{node}/cpulist", ",".join(map(str, own)))
        write(f"node/node{node}/meminfo", f"Node {node} MemTotal:  {1000 + node} kB\nNode {node} MemFree: 5 kB")
        for number in own:
            core = number % count
            twins = ",".join(str(core + count * k) for k in range(siblings))
            write(f"cpu/cpu{number}/topology/thread_siblings_list", twins)
            write(f"cpu/cpu{number}/topology/physical_package_id", node)
            kinds = [(1, "Data", "32K", twins), (1, "Instruction", "64K", twins), (2, "Unified", "1M", twins)]
            kinds.append((3, "Unified", "12M", ",".join(map(str, own))))
            for index, (level, kind, size, shared) in enumerate(kinds):
                for name, value in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items():
                    write(f"cpu/cpu{number}/cache/index{index}/{name}", value)
    (root / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Made Here 9000\n")
    return from_sys(root, root / "cpuinfo")


def xml_of(nodes=2, cores=2, siblings=2):
    """The same machine as lstopo would write it."""
    count, made = nodes * cores, ElementTree.Element("topology", version="2.0")

    def inside(parent, kind, numbers, index=0, **more):
        mask = sum(1 << number for number in numbers)
        words = [f"0x{mask >> 32 * k & 0xFFFFFFFF:08x}" for k in reversed(range(mask.bit_length() // 32 + 1))]
        return ElementTree.SubElement(parent, "object", type=kind, os_index=str(index), cpuset=",".join(words), **more)

    def cache(parent, name, level, kind, size, numbers):
        return inside(parent, name, numbers, cache_size=str(size), depth=str(level), cache_type=str(kind))

    whole = inside(made, "Machine", range(count * siblings))
    for node in range(nodes):
        own = [core + count * k for k in range(siblings) for core in range(node * cores, (node + 1) * cores)]
        package = inside(whole, "Package", own, node)
        ElementTree.SubElement(package, "info", name="CPUModel", value="Made Here 9000")
        inside(package, "NUMANode", own, node, local_memory=str(1024 * (1000 + node)))
        third = cache(package, "L3Cache", 3, 0, 12 << 20, own)
        for core in range(node * cores, (node + 1) * cores):
            twins = [core + count * k for k in range(siblings)]
            second = cache(third, "L2Cache", 2, 0, 1 << 20, twins)
            first = cache(second, "L1Cache", 1, 1, 32 << 10, twins)
            kernel = inside(cache(first, "L1iCache", 1, 2, 64 << 10, twins), "Core", twins, core)
            for number in twins:
                inside(kernel, "PU", [number], number)
    return ElementTree.tostring(made, encoding="unicode")


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 1), (2, 2, 2), (2, 20, 1)])
def test_both_sources_tell_the_same(tmp_path, shape):
    files, tool = tree(tmp_path, *shape), from_hwloc(xml_of(*shape))
    assert (files.source, tool.source) == ("/sys", "hwloc")
    assert files.model == tool.model == "Made Here 9000"
    assert files.processors == tool.processors and len(files.processors) == shape[0] * shape[1] * shape[2]
    memory = {k: 1024 * (1000 + k) for k in range(shape[0])}
    assert files.caches == tool.caches and files.memory == tool.memory == memory


@pytest.fixture
def smt(tmp_path):
    """Two nodes with two cores each, of two siblings, all of which may be used."""
    found = tree(tmp_path)
    found.usable = list(range(8))
    return found


def test_a_machine_with_siblings_and_nodes(smt):
    assert smt.processors[5] == Processor(5, core=1, package=0, node=0) and smt.processors[6].node == 1
    assert smt.cores() == {0: [0, 4], 1: [1, 5], 2: [2, 6], 3: [3, 7]}
    assert smt.nodes() == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert smt.one_per_core() == [0, 1, 2, 3] and smt.siblings() == [0, 4]
    assert [(cache.level, cache.size) for cache in smt.caches_of(6)] == [(1, 32 << 10), (2, 1 << 20), (3, 12 << 20)]
    assert Cache(3, 12 << 20, frozenset({2, 3, 6, 7})) in smt.caches and len(smt.caches) == 4 + 4 + 2
    assert smt.relation(0, 4) == "SMT siblings of one core" and smt.relation(0, 1) == "cores with one L3 cache"
    assert smt.relation(0, 2) == "cores of two packages"
    smt.usable = [1, 2, 6]  # only these count
    assert smt.cores() == {1: [1], 2: [2, 6]} and smt.one_per_core() == [1, 2] and smt.siblings() == [2, 6]


def test_this_machine():
    found = from_sys()
    assert found.usable == USABLE and found.one_per_core()
    assert topology.topology().usable == USABLE


def test_a_tool_that_fails_is_not_needed(monkeypatch, tmp_path):
    for text in ("echo nonsense", "exit 1", "echo '<topology/>'"):
        for name in topology.LSTOPO:
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = topology.topology()
        assert found.source == "/sys" and found.usable == USABLE


def test_nothing_to_read(tmp_path):
    found = from_sys(tmp_path, Path(tmp_path, "none"))
    assert found.usable == USABLE and found.caches == [] and found.memory == {} and found.model == ""
    assert found.siblings() == [] and list(found.nodes()) == [-1]


def test_lists_masks_and_sizes():
    assert numbers_of("0-2,8,10-11") == [0, 1, 2, 8, 10, 11] and numbers_of("") == [] and numbers_of("x") == []
    assert bits_of("0x00000005") == [0, 2] and bits_of("0x00000001,0x80000000") == [31, 32] and bits_of("") == []
    assert (bytes_of("48K"), bytes_of("2M"), bytes_of("64")) == (48 << 10, 2 << 20, 64)
