"""Reader of runs' summaries, for plans from measurements and for rooflines."""

from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json

NAME = "summary.json"


def summary_of(folder: str | Path, *entries: str) -> dict[str, Any]:
    """Return the summary of a run's folder. UsageError if it is missing or damaged, or lacks one of `entries`."""
    path = Path(folder, NAME)
    if not path.is_file():
        raise UsageError(f"{folder} is no folder of a run that has ended ({NAME} is missing)")
    with blamed_on(f"{path} cannot be read"):
        text = path.read_text()
    try:
        summary = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    known: dict[str, Any] = summary if isinstance(summary, dict) else {}
    if missing := [name for name in ("strategy", "ranks", *entries) if known.get(name) is None]:
        raise UsageError(f"{path} lacks {', '.join(missing)}; train again with this version")
    return known
