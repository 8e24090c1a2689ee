"""A module's own `time`: what a test puts in place of a clock holds for this module, not for a watchdog's thread."""

import time
from types import SimpleNamespace


def set_own_time(monkeypatch, module, **functions):
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
