"""What may help a run whose loss is no number any more; said at the start, too, where it can be seen coming."""

from typing import Any

from hpcdl.data.scale_warning import scale_warning
from hpcdl.runs.options import Options


def advice(options: Options, data: Any) -> str:
    """What may help: first what the data suggest, then what the options do."""
    return "; ".join(filter(None, (scale_warning(data.scales), options.advice)))
