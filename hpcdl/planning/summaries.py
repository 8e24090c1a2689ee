"""Reader of runs' summaries, for plans from measurements."""

from pathlib import Path
from typing import Any

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json

NAME = "summary.json"


def summary_of(folder: str | Path, *entries: str) -> dict[str, Any]:
    """Return the summary of the run in a folder. UsageError if it, or one of `entries`, is missing."""
    path = Path(folder, NAME)
    if not path.is_file():
        raise UsageError(f"{folder} is no folder of a run that has ended ({NAME} is missing)")
    with blamed_on(f"{path} cannot be read"):
        text = path.read_text()
    try:
        summary = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    needed = "strategy", "ranks", *entries
    if not isinstance(summary, dict) or any(summary.get(name) is None for name in needed):
        missing = [name for name in needed if not isinstance(summary, dict) or summary.get(name) is None]
        raise UsageError(f"{path} lacks what a plan needs: {', '.join(missing)}; train again with this version")
    return summary
