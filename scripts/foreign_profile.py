"""Write a profile that `planner.profile` reads: from two tables, or OPT-350M by formulae.

    python scripts/foreign_profile.py csv LAYERS.csv TIMES.csv --model NAME --source TEXT --out FILE
    python scripts/foreign_profile.py opt-350m --out configs/foreign/opt_350m.json

Of the tables, each column has the name of its field (docs/profiles.md); an empty cell is a field
that is left out. Columns ``data`` and ``tensor`` of the second one are its mesh.

OPT-350M is what is published of the model (24 blocks of 1024 channels, 4096 inside, 16 heads,
tokens of 512 channels projected in and out, 50272 of them, 2048 positions) by a roofline of two
kinds of cards in one kind of node; nothing was measured. `ASSUMPTIONS` goes into the file.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetjax.errors import InputError, shown
from hetjax.files import replacing
from hetjax.mesh.kinds import DeviceKind
from hetjax.mesh.published_kinds import kind
from hetjax.planner.foreign.foreign_profile import VERSION, checked_foreign_profile
from hetjax.reading import read_text

BLOCKS, WIDTH, INSIDE, TOKEN_WIDTH, VOCABULARY, POSITIONS = 24, 1024, 4096, 512, 50272, 2048

NVLINKS = {"V100e": 150e9, "A100-40": 300e9}
"""Bytes/s between two cards of a node, each way, by kind."""

TENSOR_WIDTHS = (1, 2, 4, 8)

SIZES = (1, 2, 4, 8, 16, 32)

ASSUMPTIONS = (
    "a roofline of published figures, nothing measured: examples of 2048 tokens; float16 with "
    "float32 master copies and Adam (2 + 2 + 12 bytes a parameter); products at the rate of "
    "hetjax.mesh.kinds, backward twice forward; what is kept, (10 + 24 / tensor) x tokens x width "
    "bytes a block (Korthikanti et al. 2022, attention scores made again), is written and read "
    "once a pass at the memory's bandwidth; two all-reduces a block and pass as rings over NVLink; "
    "50 us a layer and pass to start it"
)

START = 50e-6


def opt_350m() -> dict[str, Any]:
    """The profile of OPT-350M, as its file has it."""
    block = 4 * WIDTH * WIDTH + 2 * WIDTH * INSIDE + 9 * WIDTH + INSIDE + 4 * WIDTH
    words, projection = VOCABULARY * TOKEN_WIDTH, TOKEN_WIDTH * WIDTH
    sent = 2 * POSITIONS * WIDTH
    parameters = {
        "words": words,
        "positions": projection + (POSITIONS + 2) * WIDTH,
        "block": block,
        "projection": projection,
        "head": words,
    }
    counts = {"block": {"count": BLOCKS}, "head": {"tied_to": "words"}}
    sends = {"words": 2 * POSITIONS * TOKEN_WIDTH, "projection": 2 * POSITIONS * TOKEN_WIDTH}
    layers = [
        {
            "name": name,
            **counts.get(name, {}),
            "parameter_bytes": 2 * count,
            "gradient_bytes": 2 * count,
            "optimizer_bytes": 12 * count,
            "sent_bytes": sends.get(name, 0 if name == "head" else sent),
        }
        for name, count in parameters.items()
    ]
    return {
        "version": VERSION,
        "model": "OPT-350M",
        "source": ASSUMPTIONS,
        "layers": layers,
        "times": list(_times(parameters)),
    }


def _times(parameters: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for device in map(kind, NVLINKS):
        for tensor in TENSOR_WIDTHS:
            for size in SIZES:
                for name, count in parameters.items():
                    yield {
                        "layer": name,
                        "kind": device.name,
                        "mesh": [1, tensor],
                        "microbatch_size": size,
                        **_figures(name, count, device, tensor, size),
                    }


def _figures(
    name: str, parameters: int, device: DeviceKind, tensor: int, size: int
) -> dict[str, float]:
    """What a layer takes of one microbatch."""
    tokens = size * POSITIONS
    # To look up words and positions is no product.
    products = {"words": 0, "positions": TOKEN_WIDTH * WIDTH}.get(name, parameters)
    flops = 2.0 * products * tokens
    kept, reductions = 2.0 * tokens * WIDTH, 1
    if name == "block":
        flops += 4.0 * POSITIONS * tokens * WIDTH
        kept, reductions = tokens * WIDTH * (10 + 24 / tensor), 2
    elif name == "head":
        kept += 6.0 * tokens * VOCABULARY / tensor
    around = 2 * (tensor - 1) / tensor * 2 * tokens * WIDTH / NVLINKS[device.name] * reductions
    computing = flops / tensor / device.product_flops("float16")
    moving = 2 * kept / device.memory_bandwidth
    return {
        "forward_seconds": _rounded(START + computing + moving + around),
        "backward_seconds": _rounded(START + 2 * computing + 2 * moving + around),
        "kept_bytes": round(kept),
    }


def _rounded(seconds: float) -> float:
    """To four digits: more would be pretended."""
    return float(f"{seconds:.4g}")


def from_tables(layers: Path, times: Path, model: str, source: str) -> dict[str, Any]:
    """The profile of two tables, as its file has it."""
    rows = list(_rows(times))
    for place, row in enumerate(rows):
        missing = [axis for axis in ("data", "tensor") if axis not in row]
        if missing:
            raise InputError(f"{times}: row {place + 1}: column {missing[0]!r} is missing or empty")
        row["mesh"] = [row.pop("data"), row.pop("tensor")]
    return {
        "version": VERSION,
        "model": model,
        "source": source,
        "layers": list(_rows(layers)),
        "times": rows,
    }


_TEXTS = frozenset({"name", "like", "tied_to", "layer", "kind"})


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table, what is no text as numbers, without what is empty."""
    lines = io.StringIO(read_text(path, str(path)), newline="")
    for place, cells in enumerate(csv.DictReader(lines, restkey="")):
        where = f"{path}: row {place + 1}"
        if "" in cells:
            raise InputError(f"{where}: it has more cells than there are columns")
        yield {
            name: cell if name in _TEXTS else _number(cell, f"{where}: {name}")
            for name, cell in cells.items()
            if cell
        }


def _number(cell: str, where: str) -> float:
    for kind_of_number in (int, float):
        try:
            return kind_of_number(cell)
        except ValueError:
            continue
    raise InputError(f"{where}: {shown(cell)} is not allowed: it must be a number")


def write(content: Mapping[str, Any], path: Path) -> None:
    """Check a profile and write it, a layer and a row of times a line."""
    checked_foreign_profile(content, str(path))
    lists = {name: content[name] for name in ("layers", "times")}
    head = {name: value for name, value in content.items() if name not in lists}
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, rows in lists.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    made = parts.add_parser("opt-350m")
    tables = parts.add_parser("csv")
    tables.add_argument("layers", type=Path)
    tables.add_argument("times", type=Path)
    tables.add_argument("--model", required=True)
    tables.add_argument("--source", required=True)
    for each in (made, tables):
        each.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.part == "opt-350m":
            content = opt_350m()
        else:
            content = from_tables(options.layers, options.times, options.model, options.source)
        write(content, options.out)
    except (InputError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
