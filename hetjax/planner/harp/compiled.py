"""When the search runs compiled loops, and how they are compiled.

Numba, which compiles them, is an extra: `pip install 'hetjax[fast]'`. Without it, and for what is
small, NumPy finds the same to the last digit.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from hetjax.planner.harp.stage_table import StageTable
from hetjax.planner.harp.subcluster_sets import num_sets

WORTH = 10_000
"""With so many ways to put a stage before others, compiled loops save more than it takes to load
them, and seconds where they have to be compiled first: for each NumPy takes about a tenth of a
millisecond, and a search looks at several paces."""

_LOADED = 10
"""Loops that are loaded are worth it for so many times less."""

_ROOM = 64 << 20
"""Where a disk has less left, nothing is kept: a write that fails would end the search."""

_KERNELS = "hetjax.planner.harp.suffix_kernels"

_Function = TypeVar("_Function", bound=Callable[..., object])


def is_worth_compiling(table: StageTable) -> bool:
    """Whether a table is searched by compiled loops.

    Args:
        table: what stages and transfers cost.
    """
    count = sum(nodes > 0 for nodes, _ in table.nodes)
    of_one = num_sets(count, table.order) // max(count, 1)
    worth = WORTH // _LOADED if _KERNELS in sys.modules else WORTH
    return of_one * table.num_extensions >= worth and _has_numba()


@functools.cache
def _has_numba() -> bool:
    # Loading it takes a third of a second, which only large tables are worth.
    try:
        import numba  # noqa: F401
    except ImportError:
        # It is not there, or not for this NumPy.
        return False
    return True


def compiled(function: _Function) -> _Function:
    """A function that is compiled when it is first called, and kept where Python keeps bytecode.

    What is kept is known by the function's file, the processor and Numba's version. It is trusted
    as bytecode is.

    Args:
        function: loops over arrays. It calls none of another file, of whose changes what is kept
            would not know.
    """
    import numba

    compiling: Any = numba.njit
    try:
        kept = compiling(cache=True)(function)
        if shutil.disk_usage(kept.stats.cache_path).free >= _ROOM:
            return kept
    except (RuntimeError, OSError):
        # There is no folder that can be written.
        pass
    return compiling(function)
