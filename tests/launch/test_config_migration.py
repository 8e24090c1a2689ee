"""Options of one strategy feed another; a run of another strategy is named before anything else is said of it."""

import json
import shutil
from dataclasses import fields

import h5py
import pytest
import yaml
from few import write_few
from in_process import ends, freed

from hpcdl.errors import UsageError
from hpcdl.launch.config_migration import predecessor
from hpcdl.launch.option_parser import parse
from hpcdl.runs.options import Options
from hpcdl.scripts import train_allreduce
from hpcdl.strategies.all_reduce import AllReduceOptions
from hpcdl.strategies.gossip import GossipOptions
from hpcdl.strategies.pipeline_options import PipelineOptions


@pytest.fixture
def config(tmp_path):
    """A function: write the options of this class, with these values, as a run does; the arguments to read it."""

    def write(options_class, **values):
        made = options_class(**values)
        values = {each.name: getattr(made, each.name) for each in fields(made) if each.name not in ("out", "resume")}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return ["--config", str(tmp_path / "config.yaml")]

    return write


def warned(capsys):
    return capsys.readouterr().err.splitlines()


def test_what_only_another_strategy_has_is_left_out_in_one_line(config, capsys):
    given = config(AllReduceOptions, lr=0.25, compress="bfloat16")
    found = parse(GossipOptions, "train-gossip", "", [*given, "--seed", "3"])
    assert (found.lr, found.seed, found.topology) == (0.25, 3, "ring")
    (line,) = warned(capsys)
    assert line.startswith(
        f"train-gossip: warning: --config {given[1]}: options of another strategy are left out: compress_from, overlap"
    )
    assert parse(AllReduceOptions, "train-allreduce", "", given).compress == "bfloat16" and not warned(capsys)
    assert parse(GossipOptions, "train-gossip", "", config(Options, lr=0.5)).lr == 0.5 and not warned(capsys)


def test_what_no_program_has_is_still_refused(tmp_path):
    path = tmp_path / "c.yaml"
    for text, words in [
        ("compress: none\nlearning_rat: 3", "there is no option 'learning_rat'"),
        ("epoch: 3", "'epoch' (did you mean 'epochs'?)"),
        ("before: train-grid", "there is no option 'before'"),  # what options hold beside their fields
        ("json: a.json", "there is no option 'json'"),  # of programs that do not train
    ]:
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            parse(GossipOptions, "train-gossip", "", ["--config", str(path)])
        assert words in str(caught.value)


def test_the_schedule_of_the_learning_rate_has_two_names(config, capsys, tmp_path):
    given = config(PipelineOptions, schedule="gpipe", lr_schedule="1/t:decay=0.1", microbatches=7)
    assert parse(Options, "train-sequential", "", given).schedule == "1/t:decay=0.1"
    assert "are left out: schedule gpipe, fit, microbatches, chunks" in warned(capsys)[0]
    found = parse(PipelineOptions, "train-pipeline", "", config(AllReduceOptions, schedule="step:every=3"))
    assert (found.schedule, found.lr_schedule) == ("1f1b", "step:every=3")
    (tmp_path / "c.yaml").write_text("schedule: naive\n")  # by hand, for a pipeline
    found = parse(PipelineOptions, "train-pipeline", "", ["--config", str(tmp_path / "c.yaml")])
    assert (found.schedule, found.lr_schedule) == ("naive", "cosine")


def test_one_name_for_two_things_is_not_taken_from_another_strategy(config, capsys, tmp_path):
    assert parse(GossipOptions, "train-gossip", "", config(PipelineOptions, draw=True)).draw == ""
    assert warned(capsys)[0].endswith(", draw")
    assert parse(PipelineOptions, "train-pipeline", "", config(GossipOptions, draw="graph.png")).draw is False
    (tmp_path / "c.yaml").write_text("draw: graph.png\nlr: 0.5\n")
    assert parse(GossipOptions, "train-gossip", "", ["--config", str(tmp_path / "c.yaml")]).draw == "graph.png"


def test_a_run_of_another_strategy_is_named_at_the_start_and_in_a_refusal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_few(tmp_path)
    small = ["--data", "few.h5", "--model", "softmax", "--steps", "2", "--progress", "none"]
    assert ends("train_allreduce", [*small, "--out", "a"]) == (0, "")
    begins = "goes on from a run of train-allreduce (step 2)"
    ended = f"--resume names a run of {begins.partition('of ')[2]}"
    for program, more, refusal in [
        ("train_gossip", ["--lr", "-1"], "--lr must be greater than 0, not -1.0"),
        ("train_local_sgd", ["--batch-size", "7"], "--resume a: that run's batch is 32, not 7"),
        ("train_sequential", ["--model", "gpt"], ""),
    ]:
        status, said = ends(program, ["--resume", "a", *more])
        name = program.replace("_", "-")
        first, second = said.splitlines()
        assert status == 2 and first == f"{name}: {begins}", said
        assert second.startswith(f"{name}: error: {refusal}") and second.endswith(f"; {ended}"), said
    status, said = ends("train_allreduce", ["--resume", "a", "--lr", "-1"])
    assert status == 2 and said == "train-allreduce: error: --lr must be greater than 0, not -1.0\n"
    shutil.copy("a/checkpoint.h5", "b.h5")
    assert predecessor("b.h5", "train-grid") == "train-allreduce (step 2)"
    assert predecessor("b.h5", "train-allreduce") == predecessor("b.h5", "mine") == predecessor("c.h5", "mine") == ""
    for attributes in ({"strategy": 3, "step": 2}, ["strategy"], {"strategy": "all_reduce"}):
        with h5py.File("b.h5", "r+") as file:
            file.attrs["attributes"] = json.dumps(attributes)
        assert predecessor("b.h5", "train-grid") == ""


def test_a_run_that_another_strategy_may_go_on_with_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_few(tmp_path)
    small = ["--data", "few.h5", "--model", "softmax", "--progress", "none"]
    assert ends("train_sequential", [*small, "--steps", "2", "--out", "a"]) == (0, "")
    with freed():
        train_allreduce.main(["--resume", "a", "--steps", "3"])
        train_allreduce.main(["--resume", "a", "--steps", "4"])  # now it is of this strategy
    assert warned(capsys) == ["train-allreduce: goes on from a run of train-sequential (step 2)"]


def test_a_run_from_before_windows_goes_on_in_its_order(config):
    path = config(AllReduceOptions, placement="streamed")[1]
    run = path.removesuffix("/config.yaml")
    assert parse(AllReduceOptions, "train-allreduce", "", ["--resume", run]).shuffle_window == 8
    with open(path) as file:
        lines = [line for line in file if not line.startswith(("shuffle_window", "validation_by"))]
    with open(path, "w") as file:
        file.writelines(lines)
    assert parse(AllReduceOptions, "train-allreduce", "", ["--resume", run]).shuffle_window == 1
    assert (
        parse(AllReduceOptions, "train-allreduce", "", ["--resume", run, "--shuffle-window", "2"]).shuffle_window == 2
    )
    assert parse(AllReduceOptions, "train-allreduce", "", ["--config", path]).shuffle_window == 8
