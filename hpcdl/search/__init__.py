"""Many trainings in one job: hyper-parameter search, and ensembles.

from hpcdl.search import search        as a library: hpcdl/search/library.py"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdl.search.library import SearchResult, Trial, search

__all__ = ["SearchResult", "Trial", "search"]


def __getattr__(name: str) -> Any:
    """Import `library` on first use: its import starts MPI, and programs must set their signal handlers before MPI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpcdl.search import library

    return getattr(library, name)
