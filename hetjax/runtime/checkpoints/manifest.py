"""The manifest of a checkpoint: what is in it, as one checked schema, with its own checksum.

A manifest is believed only where it is whole: every field is there and of its type, every leaf is
held row for row, and no path leads out of the checkpoint's folder.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetjax.checked_files import first_problem, parse_json
from hetjax.errors import CheckpointError, InputError, shown
from hetjax.sharding.annotation.bounds import Bounds, overlap, volume

FORMAT = 5
MANIFEST = "manifest.json"

_FIRST_FORMAT = 1
_READABLE_FORMATS = (_FIRST_FORMAT, 2, 3, 4, FORMAT)
_LONGEST_NAME = 255
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
        across: of each dimension after the first, what is held of these rows; empty where that is
            all of each.
        is_row: whether it is one row, whose array has no dimension for it.
    """

    kind: str
    path: str
    start: int
    stop: int | None
    shape: tuple[int, ...]
    dtype: str
    item: str
    across: Bounds = ()
    is_row: bool = False

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
        held = () if self.stop is None and not self.across else (self.rows, *self.across)
        ranges = [f"{start}:{stop}" for start, stop in held]
        if self.is_row:
            ranges[0] = str(self.start)
        return f"{self.kind}/{self.path}" + (f"[{','.join(ranges)}]" if held else "")

    @property
    def rows(self) -> tuple[int, int]:
        """The first row held, and the one after the last; a scalar counts as one row."""
        return row_span(self.start, self.stop, self.shape)

    @property
    def bounds(self) -> Bounds:
        """What of the leaf is held; a scalar counts as one row.

        Example:
            >>> SavedPart("parameters", "w", 2, 5, (8, 4), "float32", "stage_1").bounds
            ((2, 5), (0, 4))
        """
        return (self.rows, *(self.across or ((0, size) for size in self.shape[1:])))

    def with_rows(self, array: Any) -> Any:
        """An array of it with a dimension for its rows."""
        return array[None] if self.is_row else array

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
class DataPosition:
    """How far a run has come in its data, and what data they are.

    Args:
        examples: how many training examples it has seen; the next is the one after these.
        batch_size: examples in a step.
        fingerprint: what tells the data from others, by name; None where the run's source of
            batches cannot tell, or it has none.
    """

    examples: int
    batch_size: int
    fingerprint: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: the number of steps done.
        model: fingerprint of the loss whose state it is.
        parts: every part of every leaf, and the item that holds it.
        files: every file but the manifest itself.
        data: the place in the data; None in a checkpoint of format 1, which did not say.
        metadata: what else the run wants to find again, as JSON values.
        model_examples: for how many examples the loss was traced for that fingerprint; None in
            checkpoints of formats 1 to 4, which did not say.
    """

    step: int
    model: str
    parts: tuple[SavedPart, ...]
    files: tuple[SavedFile, ...]
    data: DataPosition | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    model_examples: int | None = None

    def to_json(self) -> str:
        """The manifest as text, with its own checksum."""
        body = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**body, "crc32": _checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: the text is not a whole manifest of a format that can be read.
        """
        try:
            body: Any = parse_json(text, MANIFEST)
            version, crc32 = body["format"], body.pop("crc32")
        except (InputError, AttributeError, KeyError, TypeError):
            raise CheckpointError(f"{MANIFEST} is not a whole manifest") from None
        if version not in _READABLE_FORMATS:
            raise CheckpointError(f"{MANIFEST} has format {version!r}, {FORMAT} expected")
        if crc32 != _checksum(body):
            raise CheckpointError(f"{MANIFEST} does not match its checksum")
        try:
            found = (_FirstManifest if version == _FIRST_FORMAT else _Manifest).model_validate(body)
        except ValidationError as error:
            raise CheckpointError(f"{MANIFEST}: {first_problem(error, _Manifest)}") from None
        manifest = found.manifest()
        fault = uncovered(manifest.parts) or _outside(manifest)
        if fault is not None:
            raise CheckpointError(f"{MANIFEST}: {fault}")
        return manifest


Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _LeafPart(_Record):
    kind: Literal["parameters", "optimizer"]
    path: str
    start: Count
    stop: Count | None
    shape: list[Count]
    dtype: str
    item: str
    across: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(
        default_factory=list
    )
    is_row: bool = False

    def part(self) -> SavedPart:
        across = tuple((start, stop) for start, stop in self.across)
        return SavedPart(**{**dict(self), "shape": tuple(self.shape), "across": across})


class _FileRecord(_Record):
    path: str
    num_bytes: Count
    crc32: Count


class _Data(_Record):
    examples: Count
    batch_size: Annotated[int, Field(ge=1)]
    fingerprint: dict[str, Any] | None


class _FirstManifest(_Record):
    """The schema of format 1, which did not tell the place in the data."""

    format: int
    step: Count
    model: str
    parts: list[_LeafPart]
    files: list[_FileRecord]
    metadata: dict[str, Any]

    def manifest(self, data: DataPosition | None = None) -> Manifest:
        """What is checked, as it is used."""
        parts = (part.part() for part in self.parts)
        files = (SavedFile(**dict(file)) for file in self.files)
        return Manifest(self.step, self.model, tuple(parts), tuple(files), data, self.metadata)


class _Manifest(_FirstManifest):
    data: _Data
    model_examples: Annotated[int, Field(ge=1)] | None = None

    def manifest(self, data: DataPosition | None = None) -> Manifest:
        """What is checked, as it is used."""
        found = super().manifest(DataPosition(**dict(self.data)))
        return replace(found, model_examples=self.model_examples)


def uncovered(parts: Iterable[SavedPart]) -> str | None:
    """What is wrong with the parts of leaves, which must hold every element of each leaf once.

    Args:
        parts: all parts.

    Returns:
        A phrase that names a part; None where nothing is wrong.

    Example:
        >>> part = SavedPart("parameters", "w", 0, 2, (4, 3), "float32", "stage_0")
        >>> uncovered([part])
        'parameters/w[0:2] is the last part of its leaf, of which rows 2 to 3 are missing'
    """
    leaves: dict[tuple[str, str], list[SavedPart]] = {}
    for part in sorted(parts, key=lambda part: (part.leaf, part.rows)):
        if part.is_row and not (part.shape and part.stop == part.start + 1):
            return f"{part.kind}/{part.path} is said to be one row, and holds another number"
        leaves.setdefault(part.leaf, []).append(part)
    for held in leaves.values():
        first = held[0]
        for part in held:
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                return f"{part.key} and {first.key} are not of one shape and dtype"
        only_rows = not any(part.across for part in held)
        fault = _uncovered_rows(held) if only_rows else _uncovered_elements(held)
        if fault is not None:
            return fault
    return None


def _uncovered_rows(held: Sequence[SavedPart]) -> str | None:
    """What is wrong with the parts of a leaf that hold rows of it, in their order."""
    end, (_, count) = 0, row_span(0, None, held[0].shape)
    for part in held:
        start, stop = part.rows
        if start != end or not start <= stop <= count:
            return f"{part.key} does not begin where the rows before it end, or ends too late"
        end = stop
    if end != count:
        return (
            f"{held[-1].key} is the last part of its leaf, of which rows {end} to {count - 1} "
            f"are missing"
        )
    return None


def _uncovered_elements(held: Sequence[SavedPart]) -> str | None:
    """What is wrong with the parts of a leaf, of which some do not hold whole rows."""
    shape = held[0].shape
    for part in held:
        fits = len(part.bounds) == len(shape)
        if not fits or not all(
            start <= stop <= size for (start, stop), size in zip(part.bounds, shape, strict=True)
        ):
            return f"{part.key} is no part of a leaf of shape {list(shape)}"
    for place, one in enumerate(held, 1):
        for other in held[place:]:
            if other.rows[0] >= one.rows[1]:
                break  # They are in the order of their first rows.
            if overlap(one.bounds, other.bounds):
                return f"{one.key} and {other.key} have elements in common"
    found, count = sum(volume(part.bounds) for part in held), math.prod(shape)
    if found != count:
        return f"{held[-1].key} is a part of a leaf of which {count - found} elements are missing"
    return None


def _outside(manifest: Manifest) -> str | None:
    """What in a manifest leads out of the checkpoint's folder, or to no file in it."""
    for part in manifest.parts:
        if not _PLAIN_NAME.fullmatch(part.item):
            return f"the item of {part.key} is {part.item!r}; it must be the name of a folder in it"
    items = {part.item for part in manifest.parts if not part.is_empty}
    for file in manifest.files:
        places = file.path.split("/")
        if places[0] not in items or len(places) < 2 or {"", ".", ".."} & set(places):
            return f"the file {shown(file.path)} is in none of the items' folders"
        if not file.path.isprintable() or max(map(len, places)) > _LONGEST_NAME:
            return f"the file {shown(file.path)} has a name that none of a checkpoint's files has"
    missing = items - {PurePosixPath(file.path).parts[0] for file in manifest.files}
    return f"there are no files of the item {min(missing)!r}" if missing else None


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
