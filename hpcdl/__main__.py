"""`python -m hpcdl NAME ...` is `hpcdl NAME ...`."""

from hpcdl.cli import main

main()
