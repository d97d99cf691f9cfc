"""The checkpoints of one run: saved in the background, and resumed from where the data agree.

A save that fails is no failure of a worker. What was begun is removed, training goes on, and the
next save tries again; whoever saves is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import PyTree

from hetjax.checked_files import MAX_DIGITS
from hetjax.errors import (
    CheckpointError,
    InputError,
    SaveError,
    check_count,
    reason_of,
    shown,
    together,
)
from hetjax.folder_lock import FolderLock
from hetjax.reading import check_plain
from hetjax.runtime.checkpoints.checkpoint import check_optimizer_state
from hetjax.runtime.checkpoints.checkpoint_files import (
    Checkpoint,
    CheckpointFolder,
    SaveFailure,
    StageRecord,
)
from hetjax.runtime.checkpoints.manifest import DataPosition
from hetjax.runtime.checkpoints.traced_model import TracedModel
from hetjax.runtime.workers.feed import BatchSource, FingerprintedSource

CHECKPOINTS_FOLDER = "checkpoints"
"""The name of the folder of checkpoints in a run's work folder."""

_SHOWN_CHANGES = 4


class Writer(Protocol):
    """Who writes the state: an executor."""

    def save(self, folder: str) -> None:
        """Start saving the state into a folder."""
        ...

    def wait_saved(self) -> Sequence[StageRecord | SaveFailure | None]:
        """Finish saving; what each worker wrote, None for nothing, or why it could not."""
        ...


@dataclass(frozen=True)
class CheckpointOptions:
    """Which checkpoints of a run are kept.

    Args:
        keep_last: how many of the newest.
        keep_every: also those of every so many steps; None for no more.

    Raises:
        InputError: one of these is no whole number of 1 or more.

    Example:
        >>> CheckpointOptions(keep_every=1000).keep_last
        3
    """

    keep_last: int = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        check_count("keep_last", self.keep_last)
        if self.keep_every is not None:
            check_count("keep_every", self.keep_every)


class RunCheckpoints:
    """The checkpoints of a run that is alone in its work folder.

    Args:
        workdir: the work folder; it is made where it is not there, and locked.
        options: which checkpoints to keep.
        source: where the run's batches come from.

    Attributes:
        path: the folder of the checkpoints.
        messages: what was found when the folder was locked, in sentences for people.

    Raises:
        InputError: another run has the folder, or it cannot be written to; its path is none that
            Orbax takes; what the source tells of its data cannot be written down.
    """

    def __init__(
        self,
        workdir: str | Path,
        options: CheckpointOptions,
        source: BatchSource | None = None,
    ):
        self.path = Path(workdir).resolve() / CHECKPOINTS_FOLDER
        check_plain(workdir, "workdir")
        self._told = fingerprint_of(source)
        self._workdir = workdir
        self._folder = CheckpointFolder(
            self.path, keep_last=options.keep_last, keep_every=options.keep_every
        )
        self._lock = FolderLock(workdir, "workdir")
        self.messages = [] if self._lock.taken_over is None else [self._lock.taken_over]
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._pending: Future[None] | None = None
        self._failed: SaveError | None = None
        self._is_raised = True
        self._goes_on = self._is_closed = False

    def check_ours(self) -> None:
        """Check that no checkpoint of another run would be replaced or removed.

        Raises:
            InputError: there are checkpoints, and they were not resumed from.
        """
        if self._goes_on:
            return
        if steps := self._folder.steps():
            raise InputError(
                f"workdir {self._workdir} holds checkpoints of an earlier run, up to step "
                f"{steps[-1]}; resume from them, or name another folder"
            )
        self._goes_on = True

    def save(
        self,
        step: int,
        writer: Writer,
        data: DataPosition,
        metadata: Mapping[str, Any],
    ) -> None:
        """Begin to save; `finish` waits for it. An earlier save is finished first.

        Args:
            step: the number of steps done.
            writer: who writes the state.
            data: the place in them, without a fingerprint.
            metadata: what else to find again, as JSON values.

        Raises:
            WorkerLostError: a worker died or stopped answering.
        """
        self.check_ours()
        self.settle()
        try:
            folder = self._folder.begin(step)
        except OSError as error:
            self._fail(SaveError(step, reason_of(error)))
            return
        writer.save(str(folder))
        self._pending = self._commits.submit(self._commit, step, writer, data, metadata)

    def _commit(
        self,
        step: int,
        writer: Writer,
        data: DataPosition,
        metadata: Mapping[str, Any],
    ) -> None:
        """Wait for the stages' files and give the checkpoint its name, in a thread of its own."""
        try:
            found = writer.wait_saved()
            failures = [each for each in found if isinstance(each, SaveFailure)]
            if failures:
                raise SaveError(step, f"{failures[0].worker}: {failures[0].reason}")
            records = [each for each in found if isinstance(each, StageRecord)]
            told = replace(data, fingerprint=self._told)
            self._folder.commit(step, records, told, metadata)
        except BaseException as error:
            self._folder.give_up()
            if isinstance(error, OSError | InputError):
                raise SaveError(step, reason_of(error)) from error
            raise

    @property
    def failed(self) -> SaveError | None:
        """Why the last save that has ended failed; None where it did not."""
        if self._pending is not None and self._pending.done():
            self.settle()
        return self._failed

    def finish(self) -> None:
        """Wait until what was last saved is on the disk.

        Raises:
            SaveError: it could not be written, which is raised once.
            WorkerLostError: a worker died or stopped answering.
        """
        self.settle()
        if self._failed is not None and not self._is_raised:
            self._is_raised = True
            raise self._failed

    def settle(self) -> None:
        """Wait until what was last saved is on the disk, or has failed, which `failed` tells.

        Raises:
            WorkerLostError: a worker died or stopped answering.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        except SaveError as error:
            self._fail(error)
        else:
            self._failed = None
        finally:
            # Who was interrupted while waiting has not ended what is being written.
            if self._pending.done():
                self._pending = None

    def _fail(self, error: SaveError) -> None:
        self._failed, self._is_raised = error, False

    def find(
        self,
        model: TracedModel,
        source: BatchSource | None,
        *,
        or_start: bool,
        allow_changed_data: bool,
    ) -> Checkpoint | None:
        """Find the checkpoint to go on from; `go_on` says that it was done.

        Args:
            model: the loss that goes on.
            source: where its batches come from.
            or_start: whether there may be none.
            allow_changed_data: whether other data than before will do.

        Returns:
            The checkpoint, and with it what there is to tell; None where there is none.

        Raises:
            CheckpointError: there is none, or none is whole, or it is of another model or data.
        """
        found = self._folder.newest_whole(model)
        if found is None:
            if not or_start:
                raise nothing_to_resume(self.path)
            return None
        messages = compared(found.step, found.data, source, allow_changed_data=allow_changed_data)
        return Checkpoint(
            found.step, found.path, found.data, found.metadata, (*found.messages, *messages)
        )

    def go_on(self) -> None:
        """From here on the checkpoints are those of this run, which may replace and remove them."""
        self._goes_on = True

    def reading(self, step: int) -> Any:
        """Keep a checkpoint from being removed while the block reads it."""
        return self._folder.reading(step)

    def close(self) -> None:
        """Finish saving, and let others have the folder. Closing twice does no harm.

        Raises:
            SaveError: the last save has failed, and it was not raised yet.
            WorkerLostError: a worker died or stopped answering.
        """
        if self._is_closed:
            # Another run may have the folder by now.
            return
        self._is_closed = True
        try:
            self.finish()
        finally:
            self._commits.shutdown()
            self._folder.give_up()
            self._lock.release()


def check_resumable(
    workdir: str | Path,
    model: TracedModel,
    source: BatchSource | None,
    state: PyTree,
    *,
    allow_changed_data: bool,
) -> None:
    """Check what can be known of a resumption before anything is compiled; only manifests are read.

    Args:
        workdir: the work folder.
        model: the loss that goes on.
        source: where its batches come from.
        state: shapes of the optimizer's state.
        allow_changed_data: whether other data than before will do.

    Raises:
        CheckpointError: the newest checkpoint is of another model or optimizer, or of other data.
    """
    folder = CheckpointFolder(Path(workdir) / CHECKPOINTS_FOLDER)
    manifest = folder.newest_manifest(model)
    if manifest is not None:
        check_optimizer_state(folder.folder_of(manifest.step), manifest.parts, state)
        compared(manifest.step, manifest.data, source, allow_changed_data=allow_changed_data)


def nothing_to_resume(path: Path) -> CheckpointError:
    """The error for a folder without checkpoints.

    Args:
        path: the folder of the checkpoints.

    Returns:
        The error.
    """
    return CheckpointError(
        f"there is no checkpoint to resume from in {path}; if it is on another disk, look whether "
        f"that is mounted; --resume-or-start (in Python resume(or_start=True)) begins at step 0"
    )


def fingerprint_of(source: BatchSource | None) -> Mapping[str, Any] | None:
    """What tells a source's data from others; None where it cannot say.

    Args:
        source: the source.

    Raises:
        InputError: it tells something that a checkpoint cannot give back as it was.
    """
    if not isinstance(source, FingerprintedSource):
        return None
    told = source.fingerprint()
    if not isinstance(told, Mapping):
        raise InputError(f"the source's fingerprint is {shown(told)}; a mapping is wanted")
    for name, value in told.items():
        if not isinstance(name, str) or not _is_written(value):
            raise InputError(
                f"the source's fingerprint has {shown(name)}: {shown(value)}; allowed are texts, "
                f"finite numbers of at most {MAX_DIGITS} digits, and True or False, by names"
            )
    return told


def _is_written(value: object) -> bool:
    """Whether JSON gives a value back as it was."""
    if type(value) is int:
        return abs(value) < 10**MAX_DIGITS
    if type(value) is float:
        return math.isfinite(value)
    return type(value) in (str, bool)


def compared(
    step: int,
    saved: DataPosition | None,
    source: BatchSource | None,
    *,
    allow_changed_data: bool = False,
) -> list[str]:
    """Compare the data of a checkpoint with those that its run would go on with.

    Args:
        step: the checkpoint's step.
        saved: what it says of its data.
        source: where batches come from now; None where the trainer is given them, and nothing can
            be compared.
        allow_changed_data: whether other data will do.

    Returns:
        What there is to tell.

    Raises:
        CheckpointError: the data are others, which the message names.
    """
    if saved is None:
        return [
            f"checkpoint {step} is of an earlier version, which did not write down the data: they, "
            f"their seed and the batch size are taken to be the same as then"
        ]
    if source is None:
        return []
    now = fingerprint_of(source)
    if now is None or saved.fingerprint is None:
        return [
            f"checkpoint {step}: whether the data are the same cannot be told, since the source "
            f"of batches has no fingerprint"
        ]
    changes = data_changes(saved.fingerprint, now)
    if not changes:
        return []
    shown = together(changes, _SHOWN_CHANGES)
    if not allow_changed_data:
        raise CheckpointError(
            f"the data are not those of checkpoint {step}: {shown}; --allow-changed-data "
            f"(in Python resume(allow_changed_data=True)) goes on with them at example "
            f"{saved.examples}"
        )
    return [f"the data have changed since checkpoint {step}: {shown}"]


def data_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints of data.

    Args:
        before: the earlier one.
        after: the later one.

    Returns:
        A phrase for each name.

    Example:
        >>> data_changes({"seed": 0, "sequence": 16}, {"seed": 1, "sequence": 16})
        ['seed is 1 (was 0)']
    """
    names = [*after, *(name for name in before if name not in after)]
    return [
        f"{name} is {after.get(name, 'not there')} (was {before.get(name, 'not there')})"
        for name in names
        if after.get(name) != before.get(name)
    ]
