"""What launchers say, as their variables; who is refused, who is told, and who is left alone."""

import os
from types import SimpleNamespace

import pytest

from hpcdl.errors import AgreedError
from hpcdl.machine import world as launched
from hpcdl.machine.world import Launch, launch, split_world

JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
STEP = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
PMI2 = STEP | {"PMI_JOBID": "7.0", "PMI_SIZE": "4", "PMI_RANK": "2"}
PMIX = STEP | {"PMIX_RANK": "2"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1"}
PRTE = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}


@pytest.mark.parametrize(
    "environ, wanted",
    [
        ({}, None),
        (JOB, None),  # a batch script; a shell of salloc
        (JOB | {"SLURM_STEP_ID": "4294967291"}, None),
        (JOB | {"SLURM_STEP_ID": "4294967290"}, None),
        (STEP, Launch("srun", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (PMI2, Launch("srun", 4, 2, "PMI_SIZE")),
        (PMIX, Launch("srun", 4, 2, "SLURM_STEP_NUM_TASKS")),
        (JOB | HYDRA, Launch("mpiexec", 2, 1, "PMI_SIZE")),
        (STEP | HYDRA | {"SLURM_EXTERNAL_LAUNCHER": "1"}, Launch("mpiexec", 2, 1, "PMI_SIZE")),
        (STEP | {"SLURM_EXTERNAL_LAUNCHER": "1"}, None),  # mpiexec's step, which has a task for each host
        (JOB | PRTE, Launch("mpiexec", 3, 2, "OMPI_COMM_WORLD_SIZE")),
        ({"MPI_LOCALNRANKS": "3", "PMI_ID": "1", "PMI_PORT": "a:1"}, Launch("mpiexec", 3, 1, "MPI_LOCALNRANKS")),
        (JOB | {"SLURM_STEP_ID": "1"}, Launch("srun", 4, 0, "SLURM_NTASKS")),  # without the step's own number
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_what_the_launcher_says(environ, wanted):
    assert launch(environ, "MPICH") == launch(environ, "Open MPI") == wanted


@pytest.mark.parametrize(
    "more, cut",
    [
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({}, False),
        ({"SLURM_STEP_NUM_NODES": "2", "MPIR_CVAR_CH4_NETMOD": "ucx"}, False),  # the user has chosen
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_EXTERNAL_LAUNCHER": "1"}, False),  # mpiexec's own PMI
    ],
)
def test_where_slurm_may_cut_addresses(more, cut):
    assert launched.addresses_cut(PMI2 | more) is cut
    assert not launched.addresses_cut(PMIX | more) and not launched.addresses_cut(HYDRA | more)


def test_a_librarys_own_launcher_counts_first():
    both = PRTE | {"PMI_SIZE": "1", "PMI_RANK": "0"}
    assert launch(both, "MPICH").ranks == 1 and launch(both, "Open MPI").ranks == 3


@pytest.mark.parametrize("environ", [STEP, PMI2, PMIX, HYDRA, PRTE])
def test_a_world_of_one_of_several(environ, monkeypatch):
    monkeypatch.setattr(launched, "mpiexecs", lambda: [("/a/mpiexec", "MPICH"), ("/b/mpiexec", "Open MPI")])
    monkeypatch.setattr("shutil.which", lambda name: None)
    for library, flavour, path in (("MPICH", "pmi2", "/a/mpiexec"), ("Open MPI", "pmix", "/b/mpiexec")):
        assert split_world(2, environ, library) is None
        found, advice, number = split_world(1, environ, library)
        said = launch(environ, library)
        assert f"{said.by} has started {said.ranks} processes ({said.variable})" in found and number == said.number
        assert path in advice and ("SLURM_JOB_ID" not in environ or f"srun --mpi={flavour}" in advice)


@pytest.mark.parametrize(
    "environ",
    [{}, JOB, JOB | HYDRA | {"PMI_SIZE": "1"}, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, PRTE | {"PMI_SIZE": "1"}],
)
def test_a_world_of_one_that_is_meant(environ):
    assert split_world(1, environ, "MPICH") is None


def test_started_alone_in_an_allocation():
    for environ in (JOB, JOB | {"SLURM_STEP_ID": "4294967291"}):
        found, advice = launched.alone_in_allocation(1, environ, "MPICH")
        assert "allocation of 4 tasks" in found and "srun --mpi=pmi2" in advice
    for environ in ({}, STEP, JOB | HYDRA, JOB | {"SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "4"}):
        assert launched.alone_in_allocation(1, environ, "MPICH") is None
    assert launched.alone_in_allocation(4, JOB, "MPICH") is None


def test_number_0_has_the_word_and_the_others_are_patient(monkeypatch):
    naps = []
    monkeypatch.setattr(launched, "time", SimpleNamespace(sleep=naps.append))
    monkeypatch.setattr(os, "environ", STEP | {"PATH": ""})
    for number, speaker, patient in (("0", 0, []), ("3", None, [launched.PATIENCE])):
        os.environ["SLURM_PROCID"] = number
        with pytest.raises(AgreedError) as caught:
            launched.check_world(SimpleNamespace(size=1))
        assert caught.value.speaker == speaker and naps == patient
    launched.check_world(SimpleNamespace(size=4))


def test_leaving(monkeypatch, capsys):
    naps = []
    monkeypatch.setattr(launched, "time", SimpleNamespace(sleep=naps.append))
    for number, said in ((0, "hpcdl: error: what; do\n"), (2, "")):
        with pytest.raises(SystemExit) as caught:
            launched.exit_process("what; do", number, 5)
        assert caught.value.code == 5 and capsys.readouterr().err == said
    assert naps == [launched.PATIENCE]


@pytest.mark.parametrize(
    "text, library",
    [
        ("HYDRA build details:\n    Version: 5.0.2", "MPICH"),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (PRRTE) 3.0", "Open MPI"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 HYDRA", "Intel MPI"),
        ("something else", None),
    ],
)
def test_of_which_library_an_mpiexec_is(tmp_path, text, library):
    path = tmp_path / "mpiexec"
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && cat <<'E'\n{text}\nE\n")
    path.chmod(0o755)
    assert launched.library_of(str(path)) == library
    assert launched.library_of(str(tmp_path / "nothing")) is None


def test_the_mpiexec_that_a_shell_finds_comes_first(tmp_path, monkeypatch):
    for folder in ("shell", "python"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").write_text("#!/bin/sh\necho HYDRA\n")
        (tmp_path / folder / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shell'}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python" / "python"))
    paths = [path for path, library in launched.mpiexecs() if library == "MPICH"]
    assert paths == [str(tmp_path / folder / "mpiexec") for folder in ("shell", "python")]
    monkeypatch.setenv("PATH", f"{tmp_path / 'python'}:{os.environ['PATH']}")
    assert len(launched.mpiexecs()) == 1


def test_relations():
    assert launched.compatible("Intel MPI", "MPICH") and launched.compatible("Open MPI", "Open MPI")
    assert not launched.compatible("MPICH", "Open MPI") and not launched.compatible("Open MPI", "MPICH")
    assert launched.compatible("MPICH", None)


@pytest.mark.parametrize(
    "environ, here, number",
    [
        ({}, 1, 0),
        ({"MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "2"}, 3, 2),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_LOCALID": "1"}, 2, 1),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,12(x40)", "SLURM_LOCALID": "9"}, 12, 9),
        (JOB | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "1"}, 1, 0),
    ],
)
def test_ranks_of_this_host(environ, here, number):
    assert (launched.ranks_on_host(environ), launched.number_on_host(environ)) == (here, number)


def test_where_mpich_would_be_killed_in_its_start(monkeypatch):
    def shm(free, whole):
        about = SimpleNamespace(f_frsize=1 << 10, f_bavail=free << 10, f_blocks=whole << 10)
        monkeypatch.setattr(os, "statvfs", lambda folder: about)

    three = {"MPI_LOCALNRANKS": "3", "PMI_SIZE": "3"}
    shm(free=1, whole=64)
    assert "1.05 MB free" in launched.shm_shortage({}) and launched.shm_shortage(three) == ""
    shm(free=2, whole=3)
    assert launched.shm_shortage({}) == ""
    assert "3.15 MB in all" in launched.shm_shortage(three)
    assert launched.shm_shortage(three | {"PMI_SIZE": "6"}) == ""  # ranks of other hosts would wait for this one
    monkeypatch.undo()
    assert launched.shm_shortage({}, "/dev/shm/nowhere") == ""


def test_mpi_that_has_started_is_left_alone(monkeypatch):
    import mpi4py

    monkeypatch.setitem(os.environ, "PMIX_RANK", "0")
    monkeypatch.setattr(launched, "shm_shortage", lambda environ: "small")
    before = mpi4py.rc.initialize
    launched.start()
    assert mpi4py.rc.initialize == before
