"""Checkpoints as folders of files: begun aside, committed at once, verified before they are used.

A checkpoint is the folder ``<step>/`` with one Orbax item ``stage_<k>/`` for each stage that had
something to save, and a ``manifest.json`` that says which item holds which rows of which leaf, and
the size and checksum of every file. It is written under another name and renamed when the manifest
is there, so a folder with a step's name was once whole; whether it still is, the manifest tells.
Nothing here knows JAX or any plan.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import CheckpointError, InputError
from hetjax.reading import MAX_MADE_BYTES, read_text
from hetjax.runtime.checkpoints.manifest import (
    MANIFEST,
    DataPosition,
    Manifest,
    SavedFile,
    SavedPart,
    uncovered,
)
from hetjax.runtime.checkpoints.traced_model import TracedModel

_STEP_NAME = re.compile(r"[0-9]{8,}")
_REMOVALS, _REMOVAL_SECONDS = 5, 0.1
_UNFINISHED, _REPLACED, _REMOVED = ".tmp-", ".old-", "removed"


@dataclass(frozen=True)
class StageRecord:
    """What a stage has written.

    Args:
        model: fingerprint of the loss whose state it is.
        model_examples: for how many examples that was traced.
        parts: what of the training state.
        files: into which files.
    """

    model: str
    model_examples: int
    parts: tuple[SavedPart, ...]
    files: tuple[SavedFile, ...]


@dataclass(frozen=True)
class SaveFailure:
    """A worker's word that it could not write what it was to save.

    Args:
        worker: the worker's name.
        reason: what went wrong.
    """

    worker: str
    reason: str


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Args:
        folder: the checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: it is not there or not whole.
    """
    if not os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{MANIFEST} is missing")
    try:
        return Manifest.from_json(read_text(folder / MANIFEST, MANIFEST, MAX_MADE_BYTES))
    except InputError as error:
        raise CheckpointError(str(error)) from None


def _read_manifest_of(folder: Path, step: int) -> Manifest:
    """Read the manifest of the folder with a step's name; the step in it must be the same."""
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise CheckpointError(
            f"{MANIFEST} is that of step {manifest.step}: the folder was renamed or replaced"
        )
    return manifest


def record_files(root: Path, item: str) -> tuple[SavedFile, ...]:
    """Sizes and checksums of an item's files, after they have reached the disk.

    Args:
        root: the checkpoint's folder.
        item: the item's folder in it.

    Returns:
        A record of every file, in the order of their paths.
    """
    files = []
    for path in sorted((root / item).rglob("*")):
        if path.is_file():
            num_bytes, crc32 = _measure(path)
            files.append(SavedFile(path.relative_to(root).as_posix(), num_bytes, crc32))
        _synchronize(path)
    _synchronize(root / item)
    return tuple(files)


def _measure(path: Path) -> tuple[int, int]:
    num_bytes, crc32 = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            num_bytes += len(block)
            crc32 = zlib.crc32(block, crc32)
    return num_bytes, crc32


def _synchronize(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.

    Raises:
        CheckpointError: naming the first file that is missing or differs, and how.
    """
    _check_sizes(folder, manifest.files)
    for file in manifest.files:
        try:
            _, crc32 = _measure(folder / file.path)
        except OSError as error:
            raise CheckpointError(f"{file.path} cannot be read: {error}") from None
        if crc32 != file.crc32:
            raise CheckpointError(
                f"{file.path} has checksum {crc32:08x}, {file.crc32:08x} expected"
            )


def _check_sizes(folder: Path, files: Iterable[SavedFile]) -> None:
    for file in files:
        path = folder / file.path
        if not path.is_file():
            raise CheckpointError(f"{file.path} is missing")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{file.path} is a link out of the checkpoint")
        if (size := path.stat().st_size) != file.num_bytes:
            raise CheckpointError(f"{file.path} has {size} bytes, {file.num_bytes} expected")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole.

    Args:
        step: the number of steps done.
        path: its folder.
        data: the place in the data; None where it was saved by a version that did not tell.
        metadata: what was saved with it.
        messages: for each newer one that was passed over, a sentence that says why.
    """

    step: int
    path: Path
    data: DataPosition | None
    metadata: Mapping[str, Any]
    messages: tuple[str, ...] = ()


class CheckpointFolder:
    """The checkpoints of a run. One process, the driver, begins and commits them, one at a time.

    Args:
        path: the folder; it is made with the first checkpoint.
        keep_last: how many of the newest to keep.
        keep_every: keep also those whose step is a multiple of it; None for no more.
        read_only: leave all as it is found, since another process may be writing.

    Raises:
        InputError: one of these numbers is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     checkpoints = CheckpointFolder(path, keep_last=2)
        ...     for step in (10, 20, 30):
        ...         _ = checkpoints.begin(step)
        ...         record = StageRecord("model", 2, (), ())
        ...         _ = checkpoints.commit(step, [record], DataPosition(8 * step, 8), {})
        ...     checkpoints.steps(), checkpoints.newest_whole().data.examples
        ((20, 30), 240)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")
        self.path = Path(path)
        self.keep_last, self.keep_every, self.read_only = keep_last, keep_every, read_only
        self._begun: Path | None = None
        self._broken: set[int] = set()
        self._reading: set[int] = set()

    def steps(self) -> tuple[int, ...]:
        """The steps of all committed checkpoints, rising."""
        if not self.path.is_dir():
            return ()
        names = [entry.name for entry in self.path.iterdir()]
        steps = (int(name) for name in names if _STEP_NAME.fullmatch(name))
        return tuple(sorted(step for step in steps if _name(step) in names))

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint into; what was not committed is removed.

        Args:
            step: the number of steps done.

        Returns:
            The folder, which no attempt before this has had; no other than `commit` gives it the
            step's name.

        Raises:
            OSError: it cannot be made.
        """
        assert not self.read_only
        self.path.mkdir(parents=True, exist_ok=True)
        self._recover()
        self.give_up()
        # Under a new name: a worker of a lost run may still write into an old one.
        self._begun = self.path / f"{_UNFINISHED}{_name(step)}-{uuid.uuid4().hex[:8]}"
        self._begun.mkdir()
        return self._begun

    def give_up(self) -> None:
        """Remove what was begun and not committed, so that its room is free again.

        Writes that were under way when another one failed may end later, and make their folders
        anew; what is left of them is removed with the next one that is begun or given up.
        """
        self._begun = None
        for leftover in self.path.glob(f"{_UNFINISHED}*"):
            for _ in range(_REMOVALS):
                shutil.rmtree(leftover, ignore_errors=True)
                if not leftover.exists():
                    break
                time.sleep(_REMOVAL_SECONDS)

    def commit(
        self,
        step: int,
        records: Iterable[StageRecord | None],
        data: DataPosition,
        metadata: Mapping[str, Any],
    ) -> Path:
        """Give a checkpoint that all stages have written its manifest and its name.

        Then checkpoints that are no longer to be kept are removed.

        Args:
            step: the number of steps done, as `begin` was told.
            records: what each stage has written; None for processes that have nothing to tell.
            data: the place in the data.
            metadata: what else to find again, as JSON values.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the stages' files are not to be seen here.
            OSError: the manifest cannot be written.
        """
        found = [record for record in records if record is not None]
        models = {(record.model, record.model_examples) for record in found}
        assert len(models) == 1, models
        parts = tuple(sorted(part for record in found for part in record.parts))
        files = tuple(sorted(file for record in found for file in record.files))
        fault = uncovered(parts)
        assert fault is None, fault
        folder = self._begun
        assert folder is not None, "nothing was begun"
        try:
            _check_sizes(folder, files)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {step} cannot be committed: {error}; all hosts must see the same "
                f"files in {self.path}"
            ) from None
        (model, examples) = models.pop()
        manifest = Manifest(step, model, parts, files, data, metadata, examples)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        _synchronize(folder / MANIFEST)
        _synchronize(folder)
        self._put_in_place(folder, step)
        self._begun = None
        self._broken.discard(step)
        # What cannot be removed does not make what was saved undone.
        with suppress(OSError):
            self._prune(step)
        return self.path / _name(step)

    def newest_whole(self, model: TracedModel | None = None) -> Checkpoint | None:
        """Find the newest checkpoint whose every file is as it was written.

        Args:
            model: the loss that will use it; None for any.

        Returns:
            The checkpoint, with a message for each newer one that is not whole; None where there
            is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or the newest whole one is
                of another model.
        """
        if not self.read_only:
            self._recover()
        faults: list[str] = []
        for step in reversed(self.steps()):
            try:
                manifest = self._verified(step, model)
            except CheckpointError as fault:
                faults.append(str(fault))
                self._broken.add(step)
                continue
            messages = tuple(f"{fault}; using {step}" for fault in faults)
            return self._found(manifest, model, messages)
        if faults:
            raise CheckpointError(f"no checkpoint in {self.path} is whole: {'; '.join(faults)}")
        return None

    def whole(self, step: int, model: TracedModel | None = None) -> Checkpoint:
        """Find the checkpoint of a step, every file of which is as it was written.

        Args:
            step: the number of steps done.
            model: the loss that will use it; None for any.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: there is none of this step, or it is not whole, or of another model.
        """
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.path}; there are: {known}"
            )
        return self._found(self._verified(step, model), model)

    def _verified(self, step: int, model: TracedModel | None) -> Manifest:
        """A step's manifest; the files of another model are not looked at."""
        folder = self.folder_of(step)
        try:
            manifest = _read_manifest_of(folder, step)
            if model is None or model.is_of(manifest):
                verify_files(folder, manifest)
        except CheckpointError as fault:
            raise CheckpointError(f"checkpoint {step} is not whole: {fault}") from None
        return manifest

    def _found(
        self, manifest: Manifest, model: TracedModel | None, messages: tuple[str, ...] = ()
    ) -> Checkpoint:
        self._check_model(manifest, model)
        folder = self.folder_of(manifest.step)
        return Checkpoint(manifest.step, folder, manifest.data, manifest.metadata, messages)

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.path / _name(step)

    def newest_manifest(self, model: TracedModel | None = None) -> Manifest | None:
        """The manifest of the newest checkpoint that has one; its files are not looked at.

        Args:
            model: the loss that will use it; None for any.

        Returns:
            The manifest; None where there is none that can be read.

        Raises:
            CheckpointError: it is of another model.
        """
        for step in reversed(self.steps()):
            try:
                manifest = _read_manifest_of(self.path / _name(step), step)
            except CheckpointError:
                continue
            self._check_model(manifest, model)
            return manifest
        return None

    def _check_model(self, manifest: Manifest, model: TracedModel | None) -> None:
        if model is not None and not model.is_of(manifest):
            raise CheckpointError(
                f"checkpoint {manifest.step} in {self.path} is of another model: its fingerprint "
                f"is {manifest.model!r}, this model's is {model.fingerprint!r}"
            )

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Keep a checkpoint from being removed while the block reads it."""
        self._reading.add(step)
        try:
            yield
        finally:
            self._reading.discard(step)

    def _put_in_place(self, folder: Path, step: int) -> None:
        final, replaced = self.path / _name(step), self.path / f"{_REPLACED}{_name(step)}"
        if final.exists():
            final.rename(replaced)
        folder.rename(final)
        _synchronize(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _recover(self) -> None:
        """Finish an interrupted replacement: the old one stays where there is no new one."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            final = self.path / replaced.name.removeprefix(_REPLACED)
            if replaced.is_symlink() or not replaced.is_dir():
                replaced.unlink()  # It is no checkpoint, and stands in the way of one.
            elif final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)

    def _prune(self, committed: int) -> None:
        # Those that were found broken do not count: they must not push out whole ones.
        whole = [step for step in self.steps() if step not in self._broken]
        kept = {committed, *whole[-self.keep_last :], *self._reading}
        for step in whole:
            every = self.keep_every is not None and step % self.keep_every == 0
            if step not in kept and not every:
                removed = self.path / f"{_UNFINISHED}{_name(step)}-{_REMOVED}"
                (self.path / _name(step)).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)


def _name(step: int) -> str:
    return f"{step:08d}"
