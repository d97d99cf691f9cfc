"""The work folder of a run: what is in it, and whether a command may write there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetjax.configuration import Configuration, changes, read_configuration, write_configuration
from hetjax.errors import InputError, shown
from hetjax.files import check_folder, replacing
from hetjax.folder_lock import holder_of, in_use
from hetjax.reading import check_path, check_plain, opened

CONFIGURATION_FILE = "config.gin"
PLAN_FILE = "plan.json"
CARRIERS_FILE = "carriers.json"
PREDICTION_FILE = "prediction.json"
TIMELINE_FILE = "timeline.json"
PICTURE_FILE = "timeline.png"
PAGE_FILE = "timeline.html"
CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True)
class Resumption:
    """Whether and how a run goes on with one that is in its work folder.

    Args:
        wanted: whether it does.
        or_start: whether it begins at step 0 where there is no checkpoint.
        allow_changed_data: whether it goes on with other data.
    """

    wanted: bool = False
    or_start: bool = False
    allow_changed_data: bool = False


# Their own module imports more than is needed to look for them.
_METRICS_FILE = "metrics.jsonl"
_TENSORBOARD_FOLDER = "tensorboard"

_RUN = (CONFIGURATION_FILE, PLAN_FILE, _METRICS_FILE, CHECKPOINTS_FOLDER)
_PLANNED_BY = (
    "train.batch_size",
    "train.microbatches",
    "train.frozen",
    "cluster.",
    "model.",
    "data.kind",
    "data.tokenizer",
    "optimizer.name",
    "optimizer.options",
    "planner.",
)
"""The settings that a plan depends on; a model's vocabulary may be that of its data."""


def check_work_folder(path: Path, resumption: Resumption) -> None:
    """Check that a run can write its files, without writing anything.

    Args:
        path: the folder; it need not be there.
        resumption: whether the run goes on with one that is in it.

    Raises:
        InputError: it is no folder, cannot be written, holds a run that would be overwritten, or
            none to go on with.
    """
    check_folder(path, "--workdir")
    check_plain(path, "--workdir")
    check_folder(path / _TENSORBOARD_FOLDER, "--workdir")
    found = [name for name in _RUN if (path / name).exists()]
    if resumption.wanted:
        _check_checkpoints(path, resumption)
        if (path / _METRICS_FILE).exists():
            with opened(path / _METRICS_FILE, f"--workdir {path}: {_METRICS_FILE}"):
                pass
    elif found:
        raise InputError(
            f"--workdir {path} holds a run already ({', '.join(found)}); add --resume to go on "
            f"with it, or name another folder"
        )


def check_kept(configuration: Configuration) -> None:
    """Check that a run could be gone on with by the configuration that it leaves.

    Args:
        configuration: the run's.

    Raises:
        InputError: it would be too large to be read.
    """
    _ = write_configuration(configuration)


def check_unused(path: Path) -> None:
    """Check that no other run writes to a work folder.

    Args:
        path: the folder; it need not be there.

    Raises:
        InputError: one does, which is named.
    """
    holder = holder_of(path)
    if holder is not None:
        raise in_use(f"--workdir {path}", holder)


def _check_checkpoints(path: Path, resumption: Resumption) -> None:
    folder = path / CHECKPOINTS_FOLDER
    # What is in them is looked at later, when more has been imported.
    has_any = folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())
    if not has_any and not resumption.or_start:
        raise InputError(
            f"--resume: there is no checkpoint in {folder}; if it is on another disk, look whether "
            f"that is mounted; --resume-or-start begins at step 0 where there is none"
        )


def earlier_configuration(path: Path) -> Configuration | None:
    """The configuration of the run that a work folder holds; None where there is none.

    Raises:
        InputError: it is there and cannot be read.
    """
    file = path / CONFIGURATION_FILE
    return read_configuration(file) if file.exists() else None


def configuration_in(path: Path) -> Configuration:
    """The configuration of the run that a work folder must hold.

    Args:
        path: the folder.

    Returns:
        The configuration.

    Raises:
        InputError: there is no such folder or no run in it, or its configuration cannot be read.
    """
    subject = f"--workdir {shown(str(path), 200)}"
    check_path(path, subject)
    if not path.is_dir():
        raise InputError(f"{subject}: there is no such folder")
    found = earlier_configuration(path)
    if found is None:
        raise InputError(f"{subject} holds no run: {CONFIGURATION_FILE} is missing")
    return found


def reusable_plan(path: Path, configuration: Configuration) -> Path | None:
    """The plan of the run that a work folder holds, where it still is what would be planned for.

    Args:
        path: the folder.
        configuration: that of the run that goes on.

    Returns:
        The plan's file; None where there is none, or the settings of the cluster, the model, its
        vocabulary, the batch, the optimizer or what the planner may do have changed since.
    """
    earlier = earlier_configuration(path)
    if earlier is None or not (path / PLAN_FILE).exists():
        return None
    changed = any(line.startswith(_PLANNED_BY) for line in changes(earlier, configuration))
    return None if changed else path / PLAN_FILE


def save_configuration(path: Path, configuration: Configuration) -> None:
    """Write the configuration into a work folder, whole or not at all.

    Raises:
        InputError: it cannot be written, or would be too large to be read.
    """
    text = write_configuration(configuration)
    try:
        with replacing(path / CONFIGURATION_FILE) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--workdir {path}: {CONFIGURATION_FILE} cannot be written: {error.strerror}"
        ) from None
