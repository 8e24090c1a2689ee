"""Options: one dataclass, from the command line and from YAML; what makes no sense is refused in one line."""

from dataclasses import dataclass

import pytest

from hpcdl.errors import UsageError
from hpcdl.runs.options import Options, option, parse


def read(*arguments):
    return parse(Options, "train-it", "about it", list(arguments))


def test_defaults_and_values():
    assert read("--lr", "0.5", "--batch-size", "32", "--model", "mlp:8").lr == 0.5
    assert read("--batch-size", "full").batch_size == "full"
    assert read("--batch-size=32").batch_size == 32
    assert read().out == "auto" and Options().out == "none"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--lr", "-1"], "--lr must be greater than 0, not -1"),
        (["--lr", "inf"], "--lr"),
        (["--lr", "fast"], "--lr: expected a number, not fast"),
        (["--batch-size", "0"], "--batch-size must be greater than 0, not 0"),
        (["--batch-size", "some"], "--batch-size: a number of examples, or full, not 'some'"),
        (["--batch-per-rank", "-2"], "--batch-per-rank must not be negative"),
        (["--epochs", "0"], "--epochs must be greater than 0"),
        (["--epochs", "1.5"], "--epochs: expected a whole number, not 1.5"),
        (["--dtype", "float16"], "--dtype: expected one of 'float32', 'float64', not float16"),
        (["--placement", "cloud"], "--placement: expected one of 'shared', 'partitioned', 'streamed', not cloud"),
        (["--validation", "1"], "--validation is a fraction"),
        (["--patience", "3"], "--patience looks at the validation loss; add --validation"),
        (["--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
        (["--config", "no.yaml"], "no.yaml"),
        (["--resume", "nowhere"], "--resume nowhere: there is no run in that folder"),
        (["--device", "tpu"], "--device: expected one of 'cpu', 'cuda', not tpu"),
    ],
)
def test_refusals_are_one_line(arguments, words):
    with pytest.raises(UsageError) as caught:
        read(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_gives_values_and_the_command_line_wins(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("lr: 0.5\nbatch_size: 8\n")
    found = read("--config", str(path), "--lr", "0.25")
    assert (found.lr, found.batch_size) == (0.25, 8)
    path.write_text("learning_rate: 0.5\n")
    with pytest.raises(UsageError, match="learning_rate"):
        read("--config", str(path))


def test_a_script_adds_its_own():
    @dataclass
    class More(Options):
        overlap: bool = option(False, "a switch")
        source: str = option(..., "where from") if False else option("x", "where from")

    found = parse(More, "p", "d", ["--overlap", "--source", "y", "--lr", "1"])
    assert (found.overlap, found.source, found.lr) == (True, "y", 1)


def test_one_of_two_ways_to_say_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("steps: 10\nbatch_per_rank: 8\nlr: 0.5\n")
    again = read("--resume", str(tmp_path), "--epochs", "4", "--batch-size=32")
    assert (again.steps, again.epochs, again.batch_per_rank, again.batch_size, again.lr) == (0, 4, 0, 32, 0.5)
    assert read("--resume", str(tmp_path)).steps == 10 and read("--resume", str(tmp_path)).out == str(tmp_path)
    for both in (["--epochs", "3", "--steps", "4"], ["--batch-size", "3", "--batch-per-rank", "4"]):
        with pytest.raises(UsageError, match="not both"):
            read(*both)


def test_batch_sizes():
    assert Options(batch_size=10).global_batch(4, 100) == 10
    assert Options(batch_per_rank=10).global_batch(4, 100) == 40
    assert Options(batch_size="full").global_batch(4, 100) == 100


def test_options_of_a_run_of_another_program(tmp_path):
    """What only the other has is left out; the learning rate's schedule is found where another one has its name."""

    @dataclass
    class Piped(Options):
        schedule: str = option("1f1b", "of the pipeline")
        lr_schedule: str = option("cosine", "of the learning rate")

    config = tmp_path / "config.yaml"
    config.write_text("lr: 0.25\nschedule: gpipe\nlr_schedule: 1/t\nmicrobatches: 7\n")
    found = parse(Options, "p", "d", ["--resume", str(tmp_path), "--steps", "9"])
    assert (found.lr, found.schedule, found.steps, found.out) == (0.25, "1/t", 9, str(tmp_path))
    config.write_text("lr: 0.25\nschedule: step\nrounds: 3\n")
    found = parse(Piped, "p", "d", ["--resume", str(tmp_path)])
    assert (found.lr, found.schedule, found.lr_schedule) == (0.25, "1f1b", "step")
    config.write_text("lr: 0.25\nschedule: gpipe\nlr_schedule: step\n")
    found = parse(Piped, "p", "d", ["--resume", str(tmp_path), "--schedule", "naive"])
    assert (found.schedule, found.lr_schedule) == ("naive", "step")
    config.write_text("lr: many\nschedule: gpipe\nlr_schedule: 1/t\nmicrobatches: 7\n")
    with pytest.raises(UsageError, match="lr"):
        parse(Options, "p", "d", ["--resume", str(tmp_path)])
