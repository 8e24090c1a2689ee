"""Reports: curves, tables, comparisons and pages with pictures, from the folders of runs."""

from hpcdl.reports.load import load, trials

__all__ = ["load", "trials"]
