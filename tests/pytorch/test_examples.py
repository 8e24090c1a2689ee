"""Programs of docs/examples over the backend: what they print, and over gloo the same losses."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize(
    ("name", "last", "backends"),
    [
        ("ddp.py", "all-reduces", ["hpcdl"]),
        pytest.param("ddp.py", "all-reduces", ["hpcdl", "gloo"], marks=pytest.mark.long),
        pytest.param("fsdp.py", "parameters", ["hpcdl", "gloo"], marks=pytest.mark.long),
    ],
)
def test_the_example_of_the_page(name, last, backends, launch, tmp_path):
    text = (EXAMPLES / name).read_text()
    assert text.count('init_process_group("hpcdl")') == 1
    printed = []
    for backend in backends:
        path = tmp_path / f"over_{backend}.py"
        path.write_text(text.replace('init_process_group("hpcdl")', f'init_process_group("{backend}")'))
        # Gloo's threads may still hold tensors when Python ends, and then abort: what was printed counts there.
        done = launch(2, path, check=0 if backend == "hpcdl" else None, timeout=150)
        printed.append([line for line in done.stdout.splitlines() if "loss" in line])
        assert backend == "gloo" or last in done.stdout
    assert len(printed[0]) > 2 and all(each == printed[0] for each in printed)
