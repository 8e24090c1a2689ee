"""What runs have written to their folders, read back: curves, tables, comparisons, pages with pictures."""

from hpcdl.reports.load import load, trials

__all__ = ["load", "trials"]
