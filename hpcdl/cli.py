"""`hpcdl NAME ...` runs scripts/NAME.py, with dashes or underscores in the name."""

import ast
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hpcdl.errors import unknown


def scripts() -> dict[str, str]:
    """Names of all scripts, with the first line of their docstrings; read, not imported, for that would start MPI."""
    folder = Path(find_spec("hpcdl.scripts").origin).parent  # type: ignore[union-attr, arg-type]
    found = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem.replace("_", "-")] = text.split("\n")[0].split(": ")[0]
    return found


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    known = scripts()
    if not arguments or arguments[0] in ("-h", "--help"):
        if not first():
            return
        print("usage: hpcdl NAME [OPTIONS], under mpiexec or srun for more than one rank; hpcdl NAME --help\n")
        print("\n".join(f"  {name:18} {text}" for name, text in known.items()))
        return
    name = arguments[0].replace("_", "-")
    if name == "--version":
        from hpcdl import __version__

        print(f"hpcdl {__version__}")
        return
    if name not in known:
        if first():
            print(f"hpcdl: error: {unknown('script', arguments[0], known)}", file=sys.stderr)
        raise SystemExit(2)
    try:
        script = importlib.import_module(f"hpcdl.scripts.{name.replace('-', '_')}")
    except (ImportError, RuntimeError) as error:
        from hpcdl.machine.world import without_library

        without_library(error)
        raise
    script.main(arguments[1:])


def first() -> bool:
    """Whether this is the rank that prints; as MPI is not started, the launcher's variables tell."""
    ranks = [os.environ.get(key) for key in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")]
    return next((rank for rank in ranks if rank is not None), "0") == "0"


if __name__ == "__main__":
    main()
