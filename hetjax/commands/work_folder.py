"""The work folder of a run: what is in it, and whether a command may write there."""

from __future__ import annotations

import os
from pathlib import Path

from hetjax.configuration import Configuration, changes, read_configuration, write_configuration
from hetjax.errors import InputError
from hetjax.files import replacing

CONFIGURATION_FILE = "config.gin"
PLAN_FILE = "plan.json"
PREDICTION_FILE = "prediction.json"
TIMELINE_FILE = "timeline.json"
PICTURE_FILE = "timeline.png"
PAGE_FILE = "timeline.html"
CHECKPOINTS_FOLDER = "checkpoints"

_RUN = (CONFIGURATION_FILE, PLAN_FILE, "metrics.jsonl", CHECKPOINTS_FOLDER)
_PLANNED_BY = ("train.batch_size", "train.microbatches", "cluster.", "model.", "planner.")


def check_work_folder(path: Path, *, resume: bool) -> None:
    """Check that a run can write its files, without writing anything.

    Args:
        path: the folder; it need not be there.
        resume: whether the run goes on with one that is in it.

    Raises:
        InputError: it is no folder, cannot be written, or holds a run that would be overwritten.
    """
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InputError(f"--workdir {path}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--workdir {path}: {there} cannot be written to")
    found = [name for name in _RUN if (path / name).exists()]
    if found and not resume:
        raise InputError(
            f"--workdir {path} holds a run already ({', '.join(found)}); add --resume to go on "
            f"with it, or name another folder"
        )


def earlier_configuration(path: Path) -> Configuration | None:
    """The configuration of the run that a work folder holds; None where there is none.

    Raises:
        InputError: it is there and cannot be read.
    """
    file = path / CONFIGURATION_FILE
    return read_configuration(file) if file.exists() else None


def reusable_plan(path: Path, configuration: Configuration) -> Path | None:
    """The plan of the run that a work folder holds, where it still is what would be planned for.

    Args:
        path: the folder.
        configuration: that of the run that goes on.

    Returns:
        The plan's file; None where there is none, or the cluster, the model, the batch or what the
        planner may do has changed since.
    """
    earlier = earlier_configuration(path)
    if earlier is None or not (path / PLAN_FILE).exists():
        return None
    changed = any(line.startswith(_PLANNED_BY) for line in changes(earlier, configuration))
    return None if changed else path / PLAN_FILE


def save_configuration(path: Path, configuration: Configuration) -> None:
    """Write the configuration into a work folder, whole or not at all."""
    with replacing(path / CONFIGURATION_FILE) as temporary:
        temporary.write_text(write_configuration(configuration), encoding="utf-8")
