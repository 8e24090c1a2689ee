"""`hpcdl NAME ...` runs scripts/NAME.py, with dashes or underscores in the name."""

import shutil
import sys
import textwrap

from hpcdl.errors import unknown
from hpcdl.programs import files, first_process, programs, reader_may_leave, script

# Sections of the list, in the order of docs/files.md: names, or prefixes of names. Other names come last, as "more".
SECTIONS = {
    "train": """train-sequential train-allreduce train-svrg train-sgld train-parameter-server train-gossip
        train-local-sgd train-coordinate-descent train-hogwild train-federated train-model-parallel train-pipeline
        train-tensor-parallel train-context-parallel train-fully-sharded train-grid train-dqn train-gorila train-apex
        train-kmeans train- search""",
    "data and results": "prepare- data evaluate predict compare report runs watch export-metrics checkpoint",
    "benchmarks": "bench-",
    "the machine": "doctor hardware gpu-check plan supervise postmortem",
}
LEAST = 60  # fewest columns of the list
USAGE = "usage: hpcdl NAME [OPTIONS], under mpiexec or srun for more than one rank; hpcdl NAME --help"


def listed(names: list[str]) -> dict[str, list[str]]:
    """Return program names by section; names of one prefix are sorted. "more" has the names that fit no section."""
    sections: dict[str, list[str]] = {}
    left = sorted(names)
    for section, words in SECTIONS.items():
        for word in words.split():
            found = [name for name in left if name == word or (word.endswith("-") and name.startswith(word))]
            sections.setdefault(section, []).extend(found)
            left = [name for name in left if name not in found]
    return {section: found for section, found in (sections | {"more": left}).items() if found}


def overview(columns: int) -> str:
    """Return the text that `hpcdl` prints: programs and their first sentence, in lines of at most `columns` columns."""
    known, columns = programs(), max(LEAST, columns)
    indent = 4 + max(map(len, known))
    lines = textwrap.wrap(USAGE, columns)
    for section, names in listed([*known]).items():
        lines += ["", section]
        for name in names:
            text = textwrap.wrap(known[name].sentence, columns - indent, break_on_hyphens=False)
            lines += [f"  {name:{indent - 2}}{text[0]}" if text else f"  {name}"]
            lines += [" " * indent + more for more in text[1:]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        if first_process():
            with reader_may_leave():
                print(overview(shutil.get_terminal_size().columns))
        return
    name = arguments[0].replace("_", "-")
    if name == "--version":
        from hpcdl import __version__

        print(f"hpcdl {__version__}")
        return
    if name not in files():
        if first_process():
            print(f"hpcdl: error: {unknown('script', arguments[0], files())}", file=sys.stderr)
        raise SystemExit(2)
    try:
        program = script(name)
    except (ImportError, RuntimeError) as error:
        from hpcdl.machine.world import without_library

        without_library(error)
        raise
    program.main(arguments[1:])


if __name__ == "__main__":
    main()
