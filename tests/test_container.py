"""slurm/apptainer/bin with a stand-in for apptainer, which prints what it is asked for; and what the recipe copies."""

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
APPTAINER = '#!/bin/sh\n[ "$*" != "exec --help" ] || {{ echo "{help}"; exit; }}\nprintf "%s\\n" "$@"\n'


@pytest.fixture
def container(tmp_path):
    """A function: run a name of slurm/apptainer/bin in this environment, with an image and a host's MPI library."""
    bin, lib = tmp_path / "mpi" / "bin", tmp_path / "mpi" / "lib"
    for folder in (bin, lib, tmp_path / "tmp"):
        folder.mkdir(parents=True)
    (tmp_path / "image.sif").touch()
    shutil.copy(shutil.which("true"), lib / "libmpi.so.40")  # something that ldd can read
    for name in ("mpiexec", "apptainer"):
        (bin / name).write_text(APPTAINER.format(help="--bind\n  --sharens  share the namespace"))
        (bin / name).chmod(0o755)

    def run(*arguments, name="hpcdl", check=0, **environment):
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("PMI", "HPCDL", "NUMBA", "SLURM"))
        }
        clean |= {"PATH": f"{bin}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp")}
        clean |= {"HPCDL_IMAGE": str(tmp_path / "image.sif")}
        done = subprocess.run(
            [ROOT / "slurm" / "apptainer" / "bin" / name, *arguments],
            env=clean | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == check, done.stderr
        return done.stdout.splitlines() if check == 0 else done.stderr.splitlines()

    return run


def value(words, option):
    return words[words.index(option) + 1]


def test_the_library_of_the_host_is_lent(container, tmp_path):
    words = container("train-allreduce", "--data", "two words")
    assert words[-5:] == [str(tmp_path / "image.sif"), "hpcdl", "train-allreduce", "--data", "two words"]
    binds = value(words, "--bind").split(",")
    assert binds[0] == str(tmp_path / "mpi") and binds[-1] == str(tmp_path / "tmp" / f"hpcdl-cache-{os.getuid()}")
    assert Path(binds[-1]).stat().st_mode & 0o077 == 0
    assert not [bind for bind in binds if re.search(r"/(libc|libm|ld-linux)[-.]", bind)]  # those are the image's own
    assert value(words, "--env") == f"LD_LIBRARY_PATH={tmp_path}/mpi/lib:/host-mpi" and "--sharens" not in words


def test_what_the_library_needs_from_elsewhere(container, tmp_path):
    shutil.copy(shutil.which("bash"), tmp_path / "mpi" / "lib" / "libmpi.so.40")
    needed = re.findall(r"(libtinfo\S*) => (\S+)", subprocess.check_output(["ldd", shutil.which("bash")], text=True))
    if not needed:
        pytest.skip("this bash needs no library but the C library")
    ((name, path),) = needed
    assert f"{os.path.realpath(path)}:/host-mpi/{name}" in value(container("doctor"), "--bind").split(",")


def test_ranks_of_one_launcher_share_a_namespace(container, tmp_path):
    assert "--sharens" in container("doctor", PMI_RANK="0") and "--sharens" in container("doctor", PMIX_RANK="1")
    (tmp_path / "mpi" / "bin" / "apptainer").write_text(APPTAINER.format(help="--bind"))  # an older one
    assert "--sharens" not in container("doctor", PMI_RANK="0")


def test_folders_and_options(container, tmp_path):
    environment = {"PMIX_SERVER_TMPDIR": str(tmp_path / "tmp"), "HPCDL_APPTAINER": "--nv --bind /scratch"}
    words = container("-c", "pass", name="python", NUMBA_CACHE_DIR=str(tmp_path / "own"), **environment)
    assert words[-3:] == ["python", "-c", "pass"] and words[words.index("--nv") :][:3] == ["--nv", "--bind", "/scratch"]
    assert value(words, "--bind").split(",")[-2:] == [str(tmp_path / "tmp"), str(tmp_path / "own")]


def test_what_is_missing_is_said(container, tmp_path):
    (line,) = container(check=2, HPCDL_IMAGE="/nowhere.sif")
    assert "/nowhere.sif is missing: apptainer build it" in line
    (line,) = container(check=2, HPCDL_MPI="/nowhere")
    assert "no libmpi.so.12 or .40 in /nowhere/lib; load the MPI module" in line
    (tmp_path / "mpi" / "bin" / "apptainer").unlink()
    if not shutil.which("apptainer") and not shutil.which("singularity"):
        (line,) = container(check=2)
        assert "there is no apptainer on the PATH" in line


def test_the_recipe_copies_what_the_package_is_made_of():
    recipe = (ROOT / "slurm" / "apptainer" / "hpcdl.def").read_text()
    copied = re.findall(r"^    (\S+) /opt/hpcdl/(\S+)$", recipe, re.MULTILINE)
    assert all(source == target and (ROOT / source).exists() for source, target in copied)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = [line.split("=")[1].strip() for line in setup["options"]["package_dir"].split("\n") if line]
    assert {source for source, _ in copied} >= {*folders, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"}
    assert "[mpi" not in recipe  # a library in the image would be found before the host's
