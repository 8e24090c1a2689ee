"""A model of tokens speaks text: it is scored, continues a prompt, predicts after a text; other tokens are refused."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from in_process import ends

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.data import open_data
from hpcdl.data.format import read_info
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_documents import prepare_documents
from hpcdl.inference.prediction_input import prediction_rows
from hpcdl.inference.trained_model import TrainedModel
from hpcdl.models import make_model
from hpcdl.random import Random

SPEC, LENGTH = "gpt:layers=1,width=16,heads=2,context=16", 16
TEXTS = [f"Note {k} says, süß and short, what the {k}th note says.\n" * 20 for k in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of two tokenizers and of bytes, with a folder of shards, and a run on the first of them."""
    path = tmp_path_factory.mktemp("tokens")
    (path / "in").mkdir()
    for k, each in enumerate(TEXTS):
        (path / "in" / f"{k:02}.txt").write_text(each)
    for name, spec in (("a.h5", "bpe:300"), ("s/", f"{path}/a.h5"), ("o.h5", "bpe:290"), ("b.h5", "bytes")):
        prepare_documents(path / "in", Output(f"{path}/{name}", shard_size=100), tokenizer=spec, length=LENGTH)
    training = ["--model", SPEC, "--steps", "4", "--batch-size", "8", "--evaluate-every", "2", "--progress", "none"]
    for name, out in (("a.h5", "r"), ("b.h5", "rb"), ("s/", "rs")):
        given = ["--data", f"{path}/{name}", *training, "--validation", "0.1", "--goal", "test_perplexity=1"]
        assert ends("train_allreduce", [*given, "--out", f"{path}/{out}"]) == (0, "")
    return path


def evaluated(folder, run, *options):
    assert ends("evaluate", [str(folder / run), "--json", str(folder / "e.json"), "--force", *options]) == (0, "")
    return json.loads((folder / "e.json").read_text())["scores"]


@pytest.mark.parametrize(("run", "data"), [("r", "a.h5"), ("rb", "b.h5"), ("rs", "s")])
def test_perplexity_and_bits_per_byte(folder, run, data):
    info = read_info(folder / data)
    ratio = 1.0 if data == "b.h5" else info.schema.token_bytes["test"]
    assert (data == "b.h5") == (ratio < 1.01)
    found = evaluated(folder, run)
    assert math.isclose(found["perplexity"], math.exp(found["loss"]))
    assert math.isclose(found["bits_per_byte"], found["loss"] / math.log(2) / ratio)
    summary = json.loads((folder / run / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    for each in (summary, *(line for line in lines if "test_loss" in line)):
        for part in ("test", "validation"):
            assert math.isclose(each[f"{part}_perplexity"], math.exp(each[f"{part}_loss"]), rel_tol=1e-6)
            of = info.schema.token_bytes["test" if part == "test" else "train"] if data != "b.h5" else 1.0
            bits = each[f"{part}_loss"] / math.log(2) / of
            assert math.isclose(each[f"{part}_bits_per_byte"], bits, rel_tol=1e-6)
    assert math.isclose(summary["test_loss"], found["loss"], rel_tol=1e-5)


def test_shards_are_trained_on_as_the_file(folder):
    losses = [json.loads((folder / run / "summary.json").read_text())["test_loss"] for run in ("r", "rs")]
    assert losses[0] == losses[1]


def test_sample_and_prompt(folder, capsys):
    """The text after a prompt is that of the model's own tokens; without a prompt a document begins."""
    trained = TrainedModel(str(folder / "r"))
    vocabulary, model = trained.schema.vocabulary, trained.model()
    for prompt in ("Note süß", ""):
        from hpcdl.scripts import evaluate

        evaluate.main([str(folder / "r"), "--sample", "20", "--seed", "3", *(["--prompt", prompt] if prompt else [])])
        tokens = vocabulary.encode(prompt or "<|end|>").tolist()
        made = model.generate(trained.parameters, tokens, 20, Random(3)("sample"), 0.8)
        assert capsys.readouterr().out == vocabulary.decode([*tokens, *made] if prompt else made) + "\n"


def test_predictions_after_a_text(folder):
    """A plain text is taken as its tokens in rows, the last one up to its end; predictions are the text of tokens."""
    (folder / "new.txt").write_text(TEXTS[3])
    run, trained = str(folder / "r"), TrainedModel(str(folder / "r"))
    assert ends("predict", [run, str(folder / "new.txt"), "--out", str(folder / "p.csv"), "--force"]) == (0, "")
    vocabulary = trained.schema.vocabulary
    tokens = vocabulary.encode(TEXTS[3])
    rows = tokens[len(tokens) % LENGTH :].reshape(-1, LENGTH)
    model = make_model(SPEC, (LENGTH,), len(vocabulary))
    likely = model.predict(trained.parameters, rows.astype(np.float32)).argmax(axis=1)
    with open(folder / "p.csv", newline="") as file:
        said = [row["class"] for row in csv.DictReader(file)]
    assert said == [vocabulary.decode([token]) for token in likely] and len(rows) > 10
    ((load, *_),) = [list(prediction_rows(str(folder / "new.txt"), trained).blocks())]
    np.testing.assert_array_equal(load().x, rows[: len(load().x)])
    (folder / "new.txt").write_text("short")
    status, said = ends("predict", [run, str(folder / "new.txt"), "--out", str(folder / "p.csv"), "--force"])
    assert status == 2 and "tokens; the model was trained on rows of 16: give more text" in said
    status, said = ends("predict", [run, __file__.replace("test_tokens.py", "x.csv"), "--out", str(folder / "p.csv")])
    assert status == 2


def test_other_tokens_are_refused(folder):
    for name, theirs in (("o.h5", "290 tokens"), ("b.h5", "256 tokens"), ("digits", "no vocabulary")):
        data = str(folder / name) if "." in name else name
        status, said = ends("evaluate", [str(folder / "r"), "--data", data])
        assert status == 2 and (theirs in said or "shape" in said), said
    status, said = ends(
        "train_allreduce", ["--data", str(folder / "o.h5"), "--resume", str(folder / "r"), "--out", "none"]
    )
    assert status == 2 and "that run's" in said
    found = Checkpoint.read(folder / "r")
    meaning = found.attributes["meaning"]
    for broken in ({"tokenizer": "{}"}, {"tokenizer": 3}, {}):
        Checkpoint(found.vectors, found.attributes | {"meaning": meaning | {"vocabulary": broken}}).write(
            folder / "x.h5"
        )
        status, said = ends("evaluate", [str(folder / "x.h5")])
        assert status == 2 and "a tokenizer is the JSON of the library tokenizers" in said


def test_documents_are_held_out_whole(folder):
    """By document, if the rows are cut at documents; packed rows are refused."""
    out = Output(folder / "d.h5", force=True)
    prepare_documents(folder / "in", out, tokenizer=str(folder / "a.h5"), length=LENGTH, rows="documents")
    data = open_data(str(out.path), validation=0.2, validation_by="document")
    with h5py.File(out.path) as file:
        numbers = file["train/document"][()]
    held = set(numbers[data.validation.numbers])
    assert held and not held & set(np.delete(numbers, data.validation.numbers)) and len(set(numbers)) == 18
    data.close()
    status, said = ends(
        "train_allreduce", ["--data", str(folder / "a.h5"), "--validation", "0.1", "--validation-by", "document"]
    )
    assert status == 2 and "a.h5 has packed rows, which may hold parts of several documents: make the file by" in said


@pytest.mark.long
def test_training_needs_no_library(folder):
    """A missing library is named when text is encoded or decoded, and only then."""
    program = "import sys; sys.modules['tokenizers'] = None; from hpcdl.scripts.{} import main; main(sys.argv[1:])"

    def run(name, *given):
        command = [sys.executable, "-c", program.format(name), *given]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)

    done = run("train_allreduce", "--data", "a.h5", "--model", SPEC, "--steps", "1", "--out", "none")
    assert done.returncode == 0, done.stderr
    done = run("evaluate", "r", "--sample", "3")
    assert done.returncode == 2 and "needs the package tokenizers: pip install 'hpcdl[text]'" in done.stderr
    done = run("prepare_data", "text", "in", "n.h5", "--tokenizer", "bpe:300")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install 'hpcdl[text]'" in done.stderr


def test_damaged_tokenizers_are_one_line(folder):
    for change, message in (
        (np.frombuffer(b"{}", np.uint8), "the data set tokenizer: a tokenizer is the JSON"),
        (np.arange(3.0), "the data set tokenizer: it is float64 of shape (3,)"),
        (np.frombuffer(b"\xff", np.uint8), "must be a text in UTF-8"),
    ):
        path = folder / "damaged.h5"
        path.write_bytes((folder / "a.h5").read_bytes())
        with h5py.File(path, "a") as file:
            del file["tokenizer"]
            file["tokenizer"] = change
        status, said = ends("evaluate", [str(folder / "r"), "--data", str(path)])
        assert status == 2 and message in said and said.count("\n") == 1, said
    with h5py.File(path, "a") as file:
        del file["tokenizer"]
        file["tokenizer"] = np.frombuffer((read_info(folder / "a.h5").vocabulary.text).encode(), np.uint8)
        file.attrs["bytes_per_token"] = '{"train": 0}'
    assert "the attribute bytes_per_token must be JSON" in ends("evaluate", [str(folder / "r"), "--data", str(path)])[1]
    assert open_data(str(folder / "a.h5")).schema.token_bytes and Path(folder / "s" / "index.json").exists()
