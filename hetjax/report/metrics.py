"""The figures of every step, in a file of JSON lines and in TensorBoard's event files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hetjax.appended_file import AppendedFile
from hetjax.files import replacing
from hetjax.report.tensorboard_file import event_file_name, first_records, scalars_record

METRICS_FILE = "metrics.jsonl"
"""The name of the file of JSON lines in the work folder."""

TENSORBOARD_FOLDER = "tensorboard"
"""The name of the folder of TensorBoard's event files in the work folder."""


class MetricsWriter:
    """Writes one JSON object a step to ``metrics.jsonl``, and the same to TensorBoard.

    A run that resumes passes the first step that it will write: what an earlier run wrote of that
    step and of later ones, and a last line that was cut off, are taken out first, so that every
    step stands in the file once. TensorBoard is told to forget the same steps.

    Where the disk is full, figures wait in memory and are written when there is room again.

    Args:
        workdir: the work folder; it is made where it is not there.
        first_step: the first step that will be written. 0 starts afresh.

    Raises:
        OSError: the files cannot be begun.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as workdir:
        ...     with MetricsWriter(workdir) as metrics:
        ...         metrics.write(1, {"loss": 5.5, "grad_norm": 1.25})
        ...     read_metrics(workdir)
        [{'step': 1, 'loss': 5.5, 'grad_norm': 1.25}]
    """

    def __init__(self, workdir: str | os.PathLike[str], *, first_step: int = 0):
        path, folder = Path(workdir) / METRICS_FILE, Path(workdir) / TENSORBOARD_FOLDER
        kept = list(_lines_before(path, first_step)) if first_step > 0 else []
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        self._lines = AppendedFile(path)
        self._events = AppendedFile(folder / event_file_name())
        self._events.append(first_records(first_step))

    @property
    def failure(self) -> str | None:
        """Why figures wait to be written; None where all of them are in the files."""
        return self._lines.failure or self._events.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the figures of one step; unless there is a `failure`, they are in the files then.

        Args:
            step: the number of the step.
            metrics: scalars by name (Python, NumPy or JAX), e.g. ``loss``, ``grad_norm``,
                ``tokens_per_second``, ``step_time`` in seconds, ``evaluation_loss``. One that is
                not finite is null in the file, since JSON has no word for it, and a gap in
                TensorBoard.
        """
        values = {name: _scalar(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": int(step)} | finite, allow_nan=False) + "\n"
        self._lines.append(line.encode())
        shown = {name: value for name, value in values.items() if math.isfinite(value)}
        self._events.append(scalars_record(int(step), shown))

    def close(self) -> None:
        """Closes both files; closing twice is harmless."""
        self._lines.close()
        self._events.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the figures of every step back; a last line that was cut off is left out.

    Args:
        workdir: the work folder.

    Returns:
        One object a step, in the order of the file; none where there is no file.
    """
    return [record for _, record in _records(Path(workdir) / METRICS_FILE)]


def _lines_before(path: Path, first_step: int) -> Iterator[str]:
    return (line for line, record in _records(path) if record["step"] < first_step)


def _records(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Every whole line of a metrics file, as text and as the object that it holds."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _scalar(value: Any) -> int | float:
    """A Python number of a Python, NumPy or JAX scalar."""
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) else float(number)
