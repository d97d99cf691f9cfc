"""The figures of every step: a file of JSON lines, TensorBoard's event files, optional writers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hetjax.appended_file import AppendedFile
from hetjax.checked_files import parse_json
from hetjax.errors import InputError
from hetjax.files import replacing
from hetjax.reading import opened
from hetjax.report.tensorboard_file import event_file_name, first_records, scalars_record
from hetjax.report.writers import Destination, FigureWriter, check_writers, open_writers

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

    W&B and MLflow get the same figures where they are asked for, each on a thread of its own; what
    they do not take is missing there, and `lost` tells why.

    Args:
        workdir: the work folder; it is made where it is not there.
        first_step: the first step that will be written. 0 starts afresh.
        writers: optional writers, names of `hetjax.report.WRITERS`. Each time a run resumes it
            begins a run of its own there.
        settings: the run's settings by name, for the optional writers.

    Raises:
        OSError: the files cannot be begun.
        InputError: an earlier run's metrics may not be read, or are no regular file; or a writer's
            name is not known, its package is not installed, or it has no key.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as workdir:
        ...     with MetricsWriter(workdir) as metrics:
        ...         metrics.write(1, {"loss": 5.5, "grad_norm": 1.25})
        ...     read_metrics(workdir)
        [{'step': 1, 'loss': 5.5, 'grad_norm': 1.25}]
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        first_step: int = 0,
        writers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ):
        check_writers(writers)
        folder = Path(workdir)
        self._files: tuple[FigureWriter, ...] = (
            _Lines(folder / METRICS_FILE, first_step),
            _Events(folder / TENSORBOARD_FOLDER, first_step),
        )
        self._others = open_writers(writers, Destination(folder, first_step, settings or {}))

    @property
    def failure(self) -> str | None:
        """Why figures wait to be written; None where all of them are in the files."""
        return next((file.failure for file in self._files if file.failure), None)

    @property
    def lost(self) -> dict[str, str]:
        """The optional writers that lack figures, and why."""
        failures = {name: writer.failure for name, writer in self._others.items()}
        return {name: why for name, why in failures.items() if why is not None}

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
        for writer in (*self._files, *self._others.values()):
            writer.write(int(step), values)

    def close(self) -> None:
        """Closes the files and ends the writers; closing twice is harmless."""
        for writer in (*self._files, *self._others.values()):
            writer.close()


class _Lines:
    """The file of JSON lines."""

    def __init__(self, path: Path, first_step: int):
        kept = list(_lines_before(path, first_step)) if first_step > 0 else []
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = AppendedFile(path, ending=b"\n")

    @property
    def failure(self) -> str | None:
        return self._file.failure

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._file.append((json.dumps({"step": step} | known, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class _Events:
    """TensorBoard's event file of this run."""

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(exist_ok=True)
        self._file = AppendedFile(folder / event_file_name())
        self._file.append(first_records(first_step))

    @property
    def failure(self) -> str | None:
        return self._file.failure

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.append(scalars_record(step, _finite(figures)))

    def close(self) -> None:
        self._file.close()


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the figures of every step back; lines that are none of a run's are left out.

    Args:
        workdir: the work folder.

    Returns:
        One object a step, in the order of the file; none where there is no file.

    Raises:
        InputError: the file may not be read, or is no regular file.
    """
    return [record for _, record in _records(Path(workdir) / METRICS_FILE)]


def _lines_before(path: Path, first_step: int) -> Iterator[str]:
    return (line for line, record in _records(path) if record["step"] < first_step)


def _records(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Every whole line of a metrics file, as text and as the object that it holds."""
    if not path.exists():
        return
    with opened(path, str(path)) as handle, os.fdopen(handle, "rb", closefd=False) as file:
        text = file.read().decode(errors="replace")
    for line in text.splitlines():
        try:
            record = parse_json(line, "a line")
        except InputError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            yield line, record


def _scalar(value: Any) -> int | float:
    """A Python number of a Python, NumPy or JAX scalar."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int) and abs(number) < 2**63:
        return number
    try:
        return float(number)
    except OverflowError:  # A whole number beyond what floats hold.
        return math.inf
