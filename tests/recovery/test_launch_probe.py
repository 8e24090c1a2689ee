"""What a launcher can still start, as a stand-in for it says."""

import sys

import pytest

from hpcdl.recovery import launch_probe
from hpcdl.recovery.launch_command import JobLine

JOB = ["hpcdl", "train-svrg", "--out", "run"]


@pytest.fixture
def there(monkeypatch):
    """A function: the launcher starts what this function of its words says; it is asked in turn for these."""

    def told(able):
        asked = []

        def ended_well(lines):
            asked.extend(lines)
            return [able(words) for words in lines]

        monkeypatch.setattr(launch_probe, "ended_well", ended_well)
        return asked

    return told


@pytest.mark.parametrize(
    "able, least, got", [(8, 2, 8), (7, 2, 7), (5, 2, 5), (2, 2, 2), (1, 2, None), (5, 8, None), (0, 0, 8)]
)
def test_the_most_ranks_that_can_be_started(there, able, least, got):
    asked = there(lambda words: int(words[2]) <= able)
    job = JobLine.read(["mpiexec", "-n", "8", *JOB])
    if got is None:
        with pytest.raises(launch_probe.GivenUp, match=f"{least} ranks cannot be started any more"):
            launch_probe.startable(job, least, print)
    else:
        assert launch_probe.startable(job, least, print).ranks == got
    assert len(asked) <= 5 and all(words[-1] == "true" for words in asked)


def test_hosts_that_do_not_answer_are_left_out(there):
    said = []
    job = JobLine.read(["mpiexec", "-hosts", "a:4,b:2", "-n", "6", *JOB])
    there(lambda words: "a:4" not in words[2])
    found = launch_probe.startable(job, 1, said.append)
    assert found.words[:5] == ("mpiexec", "-hosts", "b:2", "-n", "2")
    assert said == ["hosts that do not answer: a"]
    with pytest.raises(launch_probe.GivenUp, match=r"3 ranks cannot be started"):
        launch_probe.startable(job, 3, said.append)
    there(lambda words: False)
    with pytest.raises(launch_probe.GivenUp, match=r"none of the hosts answers \(a, b\)"):
        launch_probe.startable(job, 1, said.append)


def test_commands_are_asked_side_by_side_and_not_for_ever(alone, monkeypatch):
    monkeypatch.setattr(launch_probe, "PROBE", 2.0)
    assert launch_probe.ended_well([["true"], ["sleep", "600"], ["false"], ["true"]]) == [True, False, False, True]
    assert launch_probe.ended_well([[sys.executable, "-c", ""]] * 2) == [True, True]
