"""What may help a run whose loss is no number any more; said at the start, too, where it can be seen coming."""

from typing import TYPE_CHECKING

from hpcdl.data.scales import unlike

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


def advice(run: "Run") -> str:
    """What may help: first what the data suggest, then what the options do."""
    return "; ".join(filter(None, (unlike(run.data.scales), run.options.advice)))
