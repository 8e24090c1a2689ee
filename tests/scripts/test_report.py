"""scripts/report.py: a page from the command line; what cannot be is one line and status 2."""

import subprocess
import sys

import pytest
from made_runs import write_run

from hpcdl.scripts import report


def test_a_page_beside_the_run_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", steps=5, evaluations=0, traced=False)
    report.main(["runs", "--pictures", "pictures", "--picture-format", "svg"])
    said = capsys.readouterr()
    assert said.out == "runs/report.html: 1 run, 9 pictures\n"
    missing = "no scores: there was no evaluation yet", "no timeline: there is no trace.json: --trace 0"
    assert said.err == "".join(f"report: runs/a: {each}\n" for each in missing)
    assert len(list((tmp_path / "pictures").glob("*.svg"))) == 9
    report.main(["runs/a", "runs", "--out", "b.html"])  # twice the same
    assert "b.html: 1 run, 9 pictures" in capsys.readouterr().out


@pytest.mark.long
def test_other_processes_draw_the_same_and_mpi_is_not_started(tmp_path):
    for number in range(5):
        write_run(tmp_path / "runs" / f"{number}", steps=5, evaluations=0, traced=False, seed=number)
    code = "import os, sys\nfrom hpcdl.scripts import report\nif __name__ == '__main__':\n"
    code += "    os.sched_getaffinity = lambda _: range({})\n    report.main(sys.argv[1:])\n"
    code += "    assert 'mpi4py.MPI' not in sys.modules\n"
    pages = []
    for cores in (1, 2):
        (tmp_path / "program.py").write_text(code.format(cores))
        command = [sys.executable, "program.py", "runs", "--out", f"{cores}.html"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        pages.append((tmp_path / f"{cores}.html").read_text())
    assert pages[0] == pages[1] and pages[0].count("<figure>") == 5 * 9


def test_without_the_library_it_is_said(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", steps=2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / "run")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "report: error: pictures need matplotlib: pip install 'hpcdl[report]'\n"
