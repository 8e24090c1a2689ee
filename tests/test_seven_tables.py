"""The seven tables of docs/own_data.md, by the commands as printed: from a made table of its kind to predictions."""

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from printed import shell
from tables import write_csv

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_data.md").read_text()
COMMANDS = {
    name: command
    for name, command in re.findall(r"^\| (\w+) \|.*\| `(hpcdl prepare-data [^`]*)` \|$", PAGE, re.MULTILINE)
}
SAID = {
    "cars": "times Year; left out Name with 200 different texts (--text Name keeps it); 4 rows without a label",
    "movies": "hashed Director (64); times Release Date; left out Title with 199 different texts",
    "weather": "3 classes; 7 features from 2 columns; times date; classes rain, snow, sun",
    "flights": "values to predict; 136 features from 4 columns; hashed origin (64), destination (64); times date",
    "cancer": "2 features from 2 columns; left out id with 200 different texts",
    "wine": "2 features from 2 columns; left out id with 200 different texts",
    "diabetes": "values to predict; 2 features from 2 columns; left out id with 200 different texts",
}


def rows_of(name):
    """200 rows with what the table is peculiar for, the label last."""
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2, 200)).round(3).tolist()
    day = [f"{1 + i % 28:02}" for i in range(200)]
    for i in range(200):
        gap, value = None if i % 50 == 3 else a[i], round(a[i] + b[i], 2)
        numbers = {"id": f"P{i:04}", "one": gap, "the other": b[i]}
        airports = {"origin": f"A{i % 70}", "destination": f"B{i % 90}"}
        yield {
            "cars": {"Name": f"car {i}", "Horsepower": gap, "Year": f"197{i % 9}-01-01", "Miles_per_Gallon": value},
            "movies": {
                "Title": 1776 if i == 5 else f"film {i // 199 * 198 or i}",
                "US Gross": gap,
                "Release Date": f"Jun {day[i]} 1998",
                "Director": f"D{i % 80}",
                "IMDB Rating": value,
            },
            "weather": {
                "date": f"2012-01-{day[i]}",
                "wind": b[i],
                "weather": ["rain", "sun", "snow"][(i > 100) + (i > 195)],
            },
            "flights": {
                "date": f"2001/01/{day[i]} {i % 24:02}:55",
                "distance": i,
                **airports,
                "delay": round(9 * value),
            },
            "cancer": numbers | {"label": "malignant" if value > 0 else "benign"},
            "wine": numbers | {"label": f"class_{i % 3}"},
            "diabetes": numbers | {"label": value},
        }[name]


def written(path, rows, delimiter):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return
    texts = [["" if value is None else str(value) for value in row.values()] for row in rows]
    texts = [[text.replace(".", ",") if delimiter == ";" else text for text in row] for row in texts]
    write_csv(path, [[*rows[0]], *texts], delimiter=delimiter)


def write_tables(folder, name):
    """Write the made table of this name to its file, and 7 rows without a label; return the new rows' file."""
    source, label = re.search(r"csv (\S+) .* --label (\w+|\"[^\"]*\")", COMMANDS[name]).groups()
    rows, delimiter = [*rows_of(name)], {"wine": ";", "diabetes": "\t"}.get(name, ",")
    new = [{key: row[key] for key in reversed(row) if key != label.strip('"')} for row in rows[:7]]
    if name == "cars":
        rows[:4] = [row | {"Miles_per_Gallon": None} for row in rows[:4]]
    written(folder / source, rows, delimiter)
    written(folder / f"new{Path(source).suffix}", new, delimiter)
    return f"new{Path(source).suffix}"


def run(command, folder, environment):
    done = shell(command, folder, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


FIRST, *OTHERS = SAID


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_from_a_table_to_predictions(environment, tmp_path, name):
    new = write_tables(tmp_path, name)
    assert SAID[name] in run(COMMANDS[name], tmp_path, environment)
    run(f"hpcdl train-allreduce --data {name}.h5 --model mlp:32 --out runs/{name}", tmp_path, environment)
    run(f"hpcdl predict runs/{name} {new} --out p.csv", tmp_path, environment)
    summary = json.loads((tmp_path / f"runs/{name}/summary.json").read_text())
    assert summary["test_loss"] < 3 and summary["stopped"] == "finished"
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert len(lines) == 8 and all(line.endswith(",") and line.count(",") == lines[0].count(",") for line in lines[1:])


def penguins(folder, environment):
    """Make penguins.h5 by the page's first command."""
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "penguins.csv", folder / "docs")
    run(re.search(r"\$ (hpcdl prepare-data csv docs/penguins.csv .*)", PAGE)[1], folder, environment)


def test_another_table_of_the_same_columns(environment, tmp_path):
    penguins(tmp_path, environment)
    lines = (tmp_path / "docs" / "penguins.csv").read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join(lines[:20]))
    run("hpcdl " + re.search(r"`(prepare-data csv other.csv [^`]*)`", PAGE)[1], tmp_path, environment)
    with h5py.File(tmp_path / "other.h5") as file:
        assert len(file["test/y"]) == 19


def test_beside_scikit_learn(environment, tmp_path):
    pytest.importorskip("sklearn")
    penguins(tmp_path, environment)
    for name in SAID:
        write_tables(tmp_path, name)
        run(COMMANDS[name], tmp_path, environment)
    said = run(re.search(r"^    (hpcdl bench-sklearn --data .*)$", PAGE, re.MULTILINE)[1], tmp_path, environment)
    tables = [name for name in ["penguins", *SAID] if re.search(rf"^\W*{name}\b", said, re.MULTILINE)]
    assert tables == ["penguins", *SAID]
