"""What HSPMD moves and holds, each figure beside its bound: annotations, resolution, switches.

python scripts/bench_hspmd.py --json
python scripts/bench_hspmd.py switch switch_memory
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

PARTS: Mapping[str, tuple[str, str]] = {
    "cheap": ("hspmd_resolution", "cheap_rows"),
    "transformer": ("hspmd_programs", "transformer_rows"),
    "unify": ("hspmd_programs", "unify_rows"),
    "mend": ("hspmd_mending", "mend_rows"),
    "shapes": ("hspmd_programs", "shapes_rows"),
    "switch": ("hspmd_switch", "switch_rows"),
    "switch_memory": ("hspmd_switch", "memory_rows"),
}
"""For each part the module beside this one, and the function in it that makes its rows.

Rows have ``case``, ``bytes`` and ``bound``, or another figure in the place of bytes.
"""

FLAGS = "--xla_force_host_platform_device_count=8"


def measure(parts: Sequence[str]) -> list[dict[str, Any]]:
    """Measure some parts.

    Args:
        parts: keys of `PARTS`.

    Returns:
        The rows of all of them, each with its part.
    """
    rows = []
    for part in parts:
        module, function = PARTS[part]
        rows += [{"part": part, **row} for row in getattr(import_module(module), function)()]
    return rows


def text_of(row: Mapping[str, Any]) -> str:
    """A row for people."""
    others = {key: value for key, value in row.items() if key not in ("part", "case")}
    figures = ", ".join(f"{key} {_figure(value)}" for key, value in others.items())
    return f"{row['part']}: {row['case']}: {figures}"


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}; there are {', '.join(PARTS)}")
    # Before JAX is imported, by the first part.
    if "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = measure(options.parts or tuple(PARTS))
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(text_of(row))


if __name__ == "__main__":
    main()
