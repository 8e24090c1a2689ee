"""The names of Numba that hpcdl uses and Numba's manual does not promise: this file tests a new version of Numba.

setup.cfg bounds Numba's version because of these names. Before the bound is raised, every test here must pass."""

import ast
import importlib
import inspect
import sys
from functools import reduce
from pathlib import Path

import llvmlite
import numba
import numpy as np
import pytest
from mpi4py import MPI
from numba.core.registry import CPUDispatcher, cpu_target

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="has nothing to do with the number of ranks")
ROOT = Path(__file__).parents[2]

# MODULE:NAME, and the file that needs it.
CPU = {
    "numba.core.registry:CPUDispatcher.enable_caching": "kernels/bind.py, Loop: sets _cache, as this does",
    "numba.core.registry:CPUDispatcher.compile": "kernels/bind.py, Loop.compile",
    "numba.core.registry:CPUDispatcher._compile_for_args": "kernels/bind.py, Kernel: what to call if no version fits",
    "numba.core.registry:CPUDispatcher.typeof_pyval": "kernels/bind.py, Kernel: arrays on a GPU fit none",
    "numba.core.registry:cpu_target.target_context.codegen": "kernels/convert.py, has_float16",
    "numba.core.caching:FunctionCache._index_key": "kernels/bind.py, Loop.compile",
    "numba.core.caching:FunctionCache._load_overload": "kernels/bind.py, LoopCache",
    "numba.core.caching:FunctionCache._guard_against_spurious_io_errors": "kernels/bind.py, LoopCache",
    "numba.core.runtime:rtsys.initialize": "kernels/bind.py, LoopCache",
    "numba.core.caching:FunctionCache.cache_path": "hpcdl/machine/facts.py, compile_cache",
    "numba.core.caching:IndexDataCacheFile._load_index": "kernels/bind.py, Loop.compile",
    "numba.core.cgutils:ir.HalfType": "kernels/convert.py, narrow and widen",
    "numba.core.cgutils:ir.IntType": "kernels/gather.py and convert.py",
    "numba.core.dispatcher:Dispatcher": "kernels/gpu.py, adapted: what is compiled for the CPU",
    "numba.core.types:Array.mutable": "kernels/bind.py, fitting",
    "numba.core.types:pyobject": "kernels/bind.py, Kernel.typeof_pyval",
    "numba.np.numpy_support:as_dtype": "kernels/bind.py and gpu.py, fitting",
    "numba:config.ENABLE_CUDASIM": "kernels/device.py and gpu.py",
    "numba:config.NUMBA_NUM_THREADS": "hpcdl/machine/facts.py",
    "llvmlite.ir:IRBuilder.load_atomic": "kernels/shared.py, load",
    "llvmlite.ir:IRBuilder.store_atomic": "kernels/shared.py, store",
    "llvmlite.ir:IRBuilder.cmpxchg": "kernels/atomics.py, compare_and_swap",
    "llvmlite.ir:IRBuilder.atomic_rmw": "kernels/atomics.py, exchange",
    "llvmlite.ir:IRBuilder.inttoptr": "kernels/shared.py, pointer",
    "numba.core.base:BaseContext.get_value_type": "kernels/shared.py, load",
    "numba.core.base:BaseContext.get_dummy_value": "kernels/shared.py, store",
}
CUDA = {
    "numba.cuda.dispatcher:get_current_device": "tests/kernels/test_cuda_compile.py",
    "numba.cuda.cudadrv.nvvm:NVVM": "tests/kernels/test_cuda_compile.py",
    "numba.cuda:device_array": "kernels/gpu.py, scratch",
}
SIMULATOR = {
    "numba.cuda.simulator.kernel:BlockManager.run": "tests/standin/quick_simulator.py",
    "numba.cuda.simulator.kernel:swapped_cuda_module": "tests/standin/quick_simulator.py",
    "numba.cuda.simulator.kernel:Dim3": "tests/standin/quick_simulator.py",
    "numba.cuda.simulator.kernel:_get_kernel_context": "tests/standin/cupy.py",
    "numba.cuda.simulator.kernelapi:FakeCUDAShared.array": "tests/standin/quick_simulator.py",
    "numba.cuda.simulator.cudadrv.devicearray:FakeCUDAArray": "tests/standin/cupy.py",
}
# ... and the parameters by name.
PARAMETERS = {
    "numba.core.registry:CPUDispatcher.__init__": (["targetoptions"], "kernels/bind.py, Loop"),
    "numba.extending:overload": (["jit_options"], "kernels/largest.py and elementary.py"),
    "numba.cuda:jit": (["device"], "kernels/gpu.py"),
    "numba.cuda:compile": (["cc", "device", "abi", "output"], "tests/kernels/test_cuda_compile.py"),
}
NEEDS = {name: user for name, user in (CPU | CUDA | SIMULATOR).items()} | {
    name: user[1] for name, user in PARAMETERS.items()
}
PUBLIC = {"numba", "numba.extending", "numba.types", "numba.cuda"}


def gone(name: str, user: str) -> str:
    versions = f"Numba {numba.__version__}, llvmlite {llvmlite.__version__}"
    return f"{versions}: there is no {name} any more, which {user} needs; mend that before setup.cfg's bound is raised"


def found(name: str):
    """Return the object of this name; fail if this version has none, and name the file that needs it."""
    if name.startswith("numba.cuda"):
        pytest.importorskip("hpcdl.kernels.gpu", reason="Numba has no CUDA target here")  # numba-cuda, if it is there
    module, _, path = name.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        pytest.fail(gone(name, NEEDS[name]), pytrace=False)


@pytest.mark.parametrize("name", [*CPU, *CUDA, *SIMULATOR])
def test_is_there(name):
    assert found(name) is not None


@pytest.mark.parametrize("name", PARAMETERS)
def test_takes(name):
    known = inspect.signature(found(name)).parameters
    for parameter in PARAMETERS[name][0]:
        assert parameter in known, gone(f"{name}({parameter}=)", PARAMETERS[name][1])


def test_a_subclass_is_asked_for_the_type_of_an_argument_and_for_what_fits_it():
    """So a kernel recognizes arrays on a GPU, at no cost for arrays on the host."""
    asked = []

    class Asked(CPUDispatcher):
        def typeof_pyval(self, value):
            asked.append("typeof_pyval")
            return numba.types.pyobject if isinstance(value, OnDevice) else super().typeof_pyval(value)

        def _compile_for_args(self, *args):
            asked.append("_compile_for_args")
            return (lambda *args: "elsewhere") if isinstance(args[0], OnDevice) else super()._compile_for_args(*args)

    class OnDevice(np.ndarray):
        __numba_array_subtype_dispatch__ = True

    dispatcher = Asked(lambda x: x.size, targetoptions={"nopython": True})
    array = np.ones(3)
    for _ in range(2):  # before and after there is a version for the CPU
        assert dispatcher(array.view(OnDevice)) == "elsewhere", gone("typeof_pyval, asked", "kernels/bind.py")
        assert dispatcher(array) == 3
    assert asked.count("_compile_for_args") == 3 and "typeof_pyval" in asked
    assert dispatcher(array) == 3 and asked.count("_compile_for_args") == 3  # a version that fits is called at once


def test_the_cache_says_what_it_holds(tmp_path, monkeypatch):
    """The cache's index shows if a version is there; its key contains types and values of a closure."""
    (tmp_path / "made_for_the_cache.py").write_text(
        "import numba\ndef make(k):\n def f(x):\n  return x + k\n return numba.njit(cache=True)(f)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    make = importlib.import_module("made_for_the_cache").make
    monkeypatch.delitem(sys.modules, "made_for_the_cache")

    def held(dispatcher, *types):
        return dispatcher._cache._index_key(types, dispatcher.targetctx.codegen()) in (
            dispatcher._cache._cache_file._load_index()
        )

    one, types = make(1), (numba.float64,)
    assert not held(one, *types)
    one.compile(types)
    assert held(one, *types), gone("an index that has what was compiled", "kernels/bind.py, Loop.compile")
    assert not held(one, numba.int64)
    assert held(make(1), *types) and not held(make(2), *types), gone("a closure in the key", "kernels/bind.py, STAMP")
    assert Path(one._cache.cache_path).is_relative_to(tmp_path)


def test_the_target_tells_processor_and_features():
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    assert "-" in triple and name and all(each[0] in "+-" for each in features.split(",") if each)


def test_the_flags_are_known():
    """An unknown flag is an error, and FASTMATH reaches LLVM: contraction makes these loops fast."""
    from hpcdl.kernels.bind import FASTMATH, OPTIONS, function

    options = function(lambda x: x).targetoptions
    assert options["fastmath"] == FASTMATH and options["forceinline"] and OPTIONS.items() <= options.items()
    with pytest.raises(KeyError, match="flag_of_ours"):
        numba.njit(flag_of_ours=True)(lambda x: x)(1)

    def multiplied(x, y, z):
        return x * y + z

    dispatcher = numba.njit(fastmath=FASTMATH, **OPTIONS)(multiplied)
    dispatcher.compile((numba.float64,) * 3)
    code = dispatcher.inspect_llvm(dispatcher.signatures[0])
    assert any("fmul" in line and "contract" in line and "nnan" not in line for line in code.splitlines())


def used(path: Path):
    """Yield (module of Numba, name) for each import of a file, and for each import_module of a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "numba":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "numba")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and name.partition(".")[0] == "numba":
                yield name, ""


def test_no_other_module_of_numba_is_imported():
    folders = [ROOT / name for name in ("hpcdl", "kernels", "scripts", "tests/standin")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 50
    named = {name.partition(":")[0] for name in NEEDS} | PUBLIC
    for path in paths:
        for module, name in used(path):
            known = module in named or f"{module}.{name}" in named or module in ("numba.core",)
            assert known, f"{path.relative_to(ROOT)} uses {module}: name it in {Path(__file__).name}"
