"""File formats of data: what writes a data file from them, and what reads them."""
