"""Where PyTorch is missing, what needs it says so in a line; nothing else imports it."""

import subprocess
import sys

import pytest

WITHOUT = "import sys\nsys.modules['torch'] = None\nfrom hpcdl.cli import main\nmain({})"


@pytest.mark.parametrize(
    "told",
    [
        ["--model", "torch:nets:net"],
        pytest.param(["--optimizer", "torch:Adam"], marks=pytest.mark.long),
        pytest.param(["--initial", "a.pt"], marks=pytest.mark.long),
    ],
)
def test_without_pytorch_one_line_says_so(told, tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    command = [sys.executable, "-c", WITHOUT.format(["train-allreduce", *told, "--epochs", "1"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "this needs PyTorch" in done.stderr and "pip install 'hpcdl[torch]'" in done.stderr


def test_nothing_imports_pytorch_that_is_not_asked_to(tmp_path):
    program = (
        "import sys\nfrom hpcdl.cli import main\nmain(['--help'])\n"
        "try:\n    main(['train-allreduce', '--help'])\nexcept SystemExit:\n    pass\n"
        "main(['train-allreduce', '--steps', '1', '--progress', 'none', '--out', 'none'])\n"
        "found = [name for name in sys.modules if name.startswith(('torch', 'hpcdl.torch'))]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
