"""Predicted beside measured as a file, for programs to read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from hetjax.files import replacing
from hetjax.report.tables import PredictionRow

_VERSION = 1


def write_prediction(
    rows: Sequence[PredictionRow],
    path: str | os.PathLike[str],
    *,
    schedule: str,
    scale: float | None = None,
) -> None:
    """Writes predicted beside measured as one JSON object, whole or not at all.

    Its fields: ``version`` (1); ``schedule``, the name of the plan's; ``scale``, how many seconds
    of this machine were one of the cluster, null where nothing was played; ``rows``, each with
    ``name``, ``predicted`` and ``measured`` in seconds and ``error``, measured / predicted - 1
    (null where nothing was predicted); ``largest_error``, the largest of these by its absolute
    value.

    Args:
        rows: the rows of the table.
        path: the file to write, usually ``prediction.json``.
        schedule: the name of the schedule that was run.
        scale: at what scale the cluster was played; None where it was not.

    Example:
        >>> from pathlib import Path; from tempfile import mkdtemp
        >>> path = Path(mkdtemp(), "prediction.json")
        >>> write_prediction([PredictionRow("step time", 0.5, 0.75)], path, schedule="1f1b")
        >>> json.loads(path.read_text())["largest_error"]
        0.5
    """
    errors = [row.measured / row.predicted - 1 if row.predicted else None for row in rows]
    content = {
        "version": _VERSION,
        "schedule": schedule,
        "scale": scale,
        "rows": [{**vars(row), "error": error} for row, error in zip(rows, errors, strict=True)],
        "largest_error": max((abs(error) for error in errors if error is not None), default=None),
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
