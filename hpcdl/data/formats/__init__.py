"""Readers of source formats (idx, npz, tables, libsvm, text), and the writer of data files made of them."""
