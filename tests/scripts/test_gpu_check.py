"""gpu-check compares what it says and tells right from wrong, on the stand-in for a GPU; how fast is never tested."""

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
KERNELS = ["scale", "sum_of_squares", "momentum", "gather float32"]
FEW = ["--kernels", ",".join(KERNELS), "--elements", "1,77", "--sizes", "256,1KiB", "--seconds", "0"]
TRAINING = ["--steps", "3", "--model", "softmax"]


@pytest.mark.long
def test_everything_is_right(simulate, tmp_path):
    done = simulate(1, SCRIPT, *FEW, *TRAINING, "--json", "g.json", check=0)
    found = json.loads((tmp_path / "g.json").read_text())
    assert found["schema_version"] == 1 and found["benchmark"] == "gpu-check" and found["options"]["steps"] == 3
    kernels = [row for row in found["rows"] if row["what"] == "kernel"]
    rows = [(row["kernel"], row["dtype"], row["size_bytes"]) for row in kernels]
    both = [(name, dtype) for name in KERNELS[:-1] for dtype in ("float32", "float64")] + [(KERNELS[-1], "float32")]
    assert rows == [(*each, size) for each in both for size in (256, 1024)]
    for row in kernels:
        assert not row["wrong"] and 0 <= row["error"] < 1e-5
        times = {key.partition("_")[0]: each for key, each in row.items() if key.endswith("_microseconds_per_turn")}
        assert all(len(each) >= 5 and min(each) > 0 for each in times.values())
        assert set(times) == {"kernel", "copy"} | ({"rival"} if row["rival"] else set())
    assert {row["kernel"] for row in kernels if row["rival"] == "CuPy"} == {"scale", "sum_of_squares"}
    moved = {(row["kernel"], row["dtype"], row["size_bytes"]): row["moved_bytes"] for row in kernels}
    assert moved["scale", "float32", 1024] == 2 * 1024 and moved["momentum", "float64", 256] == 5 * 256
    for dtype in ("float32", "float64"):
        cpu, cuda = (row for row in found["rows"] if row["what"] == "training" and row["dtype"] == dtype)
        assert not cuda["wrong"] and len(cpu["loss_of_steps"]) == len(cuda["loss_of_steps"]) == 3
        assert cuda["loss_of_steps"][0] > 2 and cuda["test_accuracy"] == cpu["test_accuracy"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(rows) + 1 + 4 and "WRONG" not in done.stdout
    assert found["environment"]["gpu"] == "cuda:0 (stand-in)"


@pytest.mark.long
def test_a_wrong_kernel_is_status_1(simulate, tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import sys\n"
        "from hpcdl.kernels import gpu, reduce\n"
        "from hpcdl.scripts import gpu_check\n"
        "launch = gpu.CudaKernel.__call__\n"
        "def wrong(self, dtype, blocks, *args):\n"
        "    launch(self, dtype, blocks, *args)\n"
        "    if self.name == 'scale' and args[0].size == 77 and args[0].dtype == 'float64':\n"
        "        args[0][76:] = 5.0\n"
        "gpu.CudaKernel.__call__ = wrong\n"
        "try: gpu_check.main(sys.argv[1:])\n"
        "finally: gpu.CudaKernel.__call__ = launch\n"
    )
    done = simulate(1, "wrong.py", *FEW, *TRAINING, "--json", "g.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "WRONG: scale (float64)"
    found = json.loads((tmp_path / "g.json").read_text())
    assert {(row["kernel"], row["dtype"]) for row in found["rows"] if row["wrong"]} == {("scale", "float64")}
