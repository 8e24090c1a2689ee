"""docs/verified.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_test_that_the_page_names_exists():
    names, file = [], None
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", (ROOT / "docs/verified.md").read_text()):
        file = path or file
        names.append((file, name))
    assert len(names) > 60
    missing = [(file, name) for file, name in names if f"\ndef {name}(" not in (ROOT / file).read_text()]
    assert not missing
