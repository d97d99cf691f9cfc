"""Checkpoints as folders of files: begun aside, committed at once, verified before they are used.

A checkpoint is the folder ``<step>/`` with one Orbax item ``stage_<k>/`` for each stage that had
something to save, and a ``manifest.json`` that says which item holds which rows of which leaf, and
the size and checksum of every file. It is written under another name and renamed when the manifest
is there, so a folder with a step's name was once whole; whether it still is, the manifest tells.
Nothing here knows JAX or any plan.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hetjax.errors import CheckpointError, InputError

FORMAT = 1
MANIFEST = "manifest.json"

_STEP_NAME = re.compile(r"\d{8,}")
_UNFINISHED, _REPLACED = ".tmp-", ".old-"


@dataclass(frozen=True, order=True)
class SavedPart:
    """What an item holds of one leaf of the training state.

    Args:
        kind: ``parameters`` or ``optimizer``.
        path: the leaf's path in its pytree, e.g. ``"blocks/0/query"``.
        start: first row held; 0 where the leaf is whole.
        stop: the row after the last one held; None where the leaf is whole.
        shape: the whole leaf's shape.
        dtype: its dtype's name.
        item: the item's folder.
    """

    kind: str
    path: str
    start: int
    stop: int | None
    shape: tuple[int, ...]
    dtype: str
    item: str

    @property
    def leaf(self) -> tuple[str, str]:
        """What tells the leaf from others."""
        return self.kind, self.path

    @property
    def key(self) -> str:
        """Its name in the item: no plan changes that of a whole leaf.

        Example:
            >>> SavedPart("parameters", "blocks/query", 2, 5, (8, 4), "float32", "stage_1").key
            'parameters/blocks/query[2:5]'
        """
        rows = "" if self.stop is None else f"[{self.start}:{self.stop}]"
        return f"{self.kind}/{self.path}{rows}"

    @property
    def rows(self) -> tuple[int, int]:
        """The first row held, and the one after the last; a scalar counts as one row."""
        return row_span(self.start, self.stop, self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements, and so is in no file."""
        return 0 in self.shape


def row_span(start: int, stop: int | None, shape: Sequence[int]) -> tuple[int, int]:
    """The rows of a part of a leaf: ``(start, stop)``, or all of them where `stop` is None."""
    return (start, stop) if stop is not None else (0, shape[0] if shape else 1)


@dataclass(frozen=True, order=True)
class SavedFile:
    """A file of a checkpoint.

    Args:
        path: its path in the checkpoint's folder.
        num_bytes: its size.
        crc32: its checksum.
    """

    path: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class StageRecord:
    """What a stage has written.

    Args:
        model: fingerprint of the program whose state it is.
        parts: what of the training state.
        files: into which files.
    """

    model: str
    parts: tuple[SavedPart, ...]
    files: tuple[SavedFile, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: the number of steps done.
        model: fingerprint of the program whose state it is.
        parts: every part of every leaf, and the item that holds it.
        files: every file but the manifest itself.
        metadata: what else the run wants to find again, as JSON values.
    """

    step: int
    model: str
    parts: tuple[SavedPart, ...]
    files: tuple[SavedFile, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest as text, with its own checksum."""
        body = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: the text is not a whole manifest of this format.
        """
        try:
            body = json.loads(text)
            version, crc32 = body.pop("format"), body.pop("crc32")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise CheckpointError(f"{MANIFEST} is not a whole manifest") from None
        if version != FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {version!r}, {FORMAT} expected")
        if crc32 != _checksum({"format": version, **body}):
            raise CheckpointError(f"{MANIFEST} does not match its checksum")
        parts = (SavedPart(**{**part, "shape": tuple(part["shape"])}) for part in body["parts"])
        files = (SavedFile(**file) for file in body["files"])
        return cls(body["step"], body["model"], tuple(parts), tuple(files), body["metadata"])


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Args:
        folder: the checkpoint.

    Returns:
        The manifest.

    Raises:
        CheckpointError: it is not there or not whole.
    """
    try:
        return Manifest.from_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None


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
        if (size := path.stat().st_size) != file.num_bytes:
            raise CheckpointError(f"{file.path} has {size} bytes, {file.num_bytes} expected")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole.

    Args:
        step: the number of steps done.
        path: its folder.
        metadata: what was saved with it.
        messages: for each newer one that was passed over, a sentence that says why.
    """

    step: int
    path: Path
    metadata: Mapping[str, Any]
    messages: tuple[str, ...] = ()


class CheckpointFolder:
    """The checkpoints of a run. One process, the driver, begins and commits them, one at a time.

    Args:
        path: the folder; it is made with the first checkpoint.
        keep_last: how many of the newest to keep.
        keep_every: keep also those whose step is a multiple of it; None for no more.

    Raises:
        InputError: one of these numbers is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     checkpoints = CheckpointFolder(path, keep_last=2)
        ...     for step in (10, 20, 30):
        ...         _ = checkpoints.begin(step)
        ...         record = StageRecord("model", (), ())
        ...         _ = checkpoints.commit(step, [record], {"data": step})
        ...     checkpoints.steps(), checkpoints.newest_whole().metadata
        ((20, 30), {'data': 30})
    """

    def __init__(self, path: str | Path, *, keep_last: int = 3, keep_every: int | None = None):
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 or more")
        self.path = Path(path)
        self.keep_last, self.keep_every = keep_last, keep_every
        self._broken: set[int] = set()
        self._reading: set[int] = set()

    def steps(self) -> tuple[int, ...]:
        """The steps of all committed checkpoints, rising."""
        if not self.path.is_dir():
            return ()
        names = (entry.name for entry in self.path.iterdir())
        return tuple(sorted(int(name) for name in names if _STEP_NAME.fullmatch(name)))

    def begin(self, step: int) -> Path:
        """Make an empty folder to write a checkpoint into; what was not committed is removed.

        Args:
            step: the number of steps done.

        Returns:
            The folder; no other than `commit` gives it the step's name.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._recover()
        for leftover in self.path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # it may lose a race with its writer
        folder = self.path / f"{_UNFINISHED}{_name(step)}"
        folder.mkdir()
        return folder

    def commit(
        self, step: int, records: Iterable[StageRecord | None], metadata: Mapping[str, Any]
    ) -> Path:
        """Give a checkpoint that all stages have written its manifest and its name.

        Then checkpoints that are no longer to be kept are removed.

        Args:
            step: the number of steps done, as `begin` was told.
            records: what each stage has written; None for processes that have nothing to tell.
            metadata: what else to find again, as JSON values.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the stages' files are not to be seen here.
        """
        found = [record for record in records if record is not None]
        models = {record.model for record in found}
        assert len(models) == 1, models
        parts = tuple(sorted(part for record in found for part in record.parts))
        files = tuple(sorted(file for record in found for file in record.files))
        _assert_covered(parts)
        folder = self.path / f"{_UNFINISHED}{_name(step)}"
        try:
            _check_sizes(folder, files)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {step} cannot be committed: {error}; all hosts must see the same "
                f"files in {self.path}"
            ) from None
        manifest = Manifest(step, models.pop(), parts, files, metadata)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        _synchronize(folder / MANIFEST)
        _synchronize(folder)
        self._put_in_place(folder, step)
        self._broken.discard(step)
        self._prune(step)
        return self.path / _name(step)

    def newest_whole(self, model: str | None = None) -> Checkpoint | None:
        """Find the newest checkpoint whose every file is as it was written.

        Args:
            model: fingerprint of the program that will use it; None for any.

        Returns:
            The checkpoint, with a message for each newer one that is not whole; None where there
            is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or the newest whole one is
                of another model.
        """
        self._recover()
        faults: list[str] = []
        for step in reversed(self.steps()):
            folder = self.path / _name(step)
            try:
                manifest = read_manifest(folder)
                is_foreign = model is not None and manifest.model != model
                if not is_foreign:
                    verify_files(folder, manifest)
            except CheckpointError as fault:
                faults.append(f"checkpoint {step} is not whole: {fault}")
                self._broken.add(step)
                continue
            if is_foreign:
                raise CheckpointError(
                    f"checkpoint {step} in {self.path} is of another model: its fingerprint is "
                    f"{manifest.model!r}, this model's is {model!r}"
                )
            messages = tuple(f"{fault}; using {step}" for fault in faults)
            return Checkpoint(step, folder, manifest.metadata, messages)
        if faults:
            raise CheckpointError(f"no checkpoint in {self.path} is whole: {'; '.join(faults)}")
        return None

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
        if replaced.exists():
            shutil.rmtree(replaced)

    def _recover(self) -> None:
        """Finish an interrupted replacement: the old one stays where there is no new one."""
        for replaced in self.path.glob(f"{_REPLACED}*"):
            final = self.path / replaced.name.removeprefix(_REPLACED)
            if final.exists():
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
                removed = self.path / f"{_UNFINISHED}{_name(step)}"
                (self.path / _name(step)).rename(removed)
                shutil.rmtree(removed)


def _name(step: int) -> str:
    return f"{step:08d}"


def _assert_covered(parts: Sequence[SavedPart]) -> None:
    """Every leaf is held whole or in rows that neither overlap nor leave a gap."""
    reached: dict[tuple[str, str], int] = {}
    for part in parts:
        start, stop = part.rows
        assert reached.get(part.leaf, 0) == start, f"{part.key} does not begin where rows ended"
        reached[part.leaf] = stop
    for part in parts:
        assert reached[part.leaf] == row_span(0, None, part.shape)[1], f"{part.key} lacks rows"
