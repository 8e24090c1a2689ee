"""What runs have written to their folders, read back: curves, tables, comparisons, pages with pictures."""
