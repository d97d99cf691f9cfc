"""The profile of another tool: what a model's layers take and hold, as a file that people write.

    {
     "version": 1,
     "model": "two blocks",
     "source": "measured by hand",
     "layers": [
      {"name": "block", "count": 2, "parameter_bytes": 1e8, "optimizer_bytes": 6e8,
       "sent_bytes": 4e6}
     ],
     "times": [
      {"layer": "block", "kind": "V100", "mesh": [1, 1], "microbatch_size": 1,
       "forward_seconds": 0.01, "backward_seconds": 0.02, "kept_bytes": 3e7}
     ]
    }

Nothing of it needs the model itself, nor JAX.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from hetjax.checked_files import Record, first_problem, read_json
from hetjax.errors import InputError, shown, unknown_name
from hetjax.file_content import without_version
from hetjax.limits import MAX_BATCH, MAX_DEVICES_PER_NODE, Name, Text
from hetjax.planner.work.arrays import FloatArray

VERSION = 1
"""Of the files."""

MAX_LAYERS = 256
"""The most layers of a model: a search keeps squares of them for each way to run a stage, 2 GB of
that many layers on 24 devices of two kinds."""

MeshShape = tuple[int, int]
"""Sizes of the data and the tensor axis."""

_Bytes = Annotated[float, pydantic.Field(ge=0, le=1e18)]
_Seconds = Annotated[float, pydantic.Field(ge=1e-9, le=1e6)]
_Axis = Annotated[int, pydantic.Field(ge=1, le=MAX_DEVICES_PER_NODE)]


class _LayerRecord(Record):
    name: Name
    count: Annotated[int, pydantic.Field(ge=1, le=MAX_LAYERS)] = 1
    like: Name | None = None
    parameter_bytes: _Bytes | None = None
    gradient_bytes: _Bytes | None = None
    optimizer_bytes: _Bytes | None = None
    sent_bytes: _Bytes | None = None
    returned_bytes: _Bytes | None = None
    tied_to: Name | None = None


class _TimesRecord(Record):
    layer: Name
    kind: Name
    mesh: Annotated[list[_Axis], pydantic.Field(min_length=2, max_length=2)]
    microbatch_size: Annotated[int, pydantic.Field(ge=1, le=MAX_BATCH)]
    forward_seconds: _Seconds
    backward_seconds: _Seconds
    kept_bytes: _Bytes
    working_bytes: _Bytes = 0.0


class _ProfileRecord(Record):
    model: Name
    source: Text
    layers: Annotated[list[_LayerRecord], pydantic.Field(min_length=1)]
    times: Annotated[list[_TimesRecord], pydantic.Field(min_length=1)]


@dataclass(frozen=True)
class ForeignLayer:
    """A layer of a model, in the order of the pipeline.

    Args:
        name: what people call it.
        figures: the name under which its times are given, which layers that are alike share.
        parameter_bytes: of its parameters, as they are computed with.
        gradient_bytes: of their gradients.
        optimizer_bytes: of the optimizer's state, master copies included.
        sent_bytes: what it sends to the next layer, for each example.
        returned_bytes: what it gets back of that, the gradient, for each example.
        tied_to: the place of an earlier layer whose parameters it uses; None for parameters of its
            own.
    """

    name: str
    figures: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    sent_bytes: float
    returned_bytes: float
    tied_to: int | None = None


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """What one or several layers take and hold, each field an array over them, or over sizes.

    Args:
        forward_seconds: the forward pass of a microbatch.
        backward_seconds: its whole backward pass, without recomputation.
        kept_bytes: what a device keeps of it from the one to the other.
        working_bytes: what a device needs beside that while it computes.
    """

    forward_seconds: FloatArray
    backward_seconds: FloatArray
    kept_bytes: FloatArray
    working_bytes: FloatArray

    @classmethod
    def of_all(cls, every: Sequence[LayerTimes]) -> LayerTimes:
        """Those of several, one after another."""
        names = [each.name for each in fields(cls)]
        return cls(*(np.array([getattr(each, name) for each in every]) for name in names))


@dataclass(frozen=True, eq=False)
class SizedTimes:
    """What a layer takes on one mesh of one kind of devices, by the size of a microbatch.

    Args:
        sizes: examples of a microbatch, rising.
        times: the figures, an entry a size.
    """

    sizes: tuple[int, ...]
    times: LayerTimes

    def at(self, size: int) -> LayerTimes | None:
        """The figures at a size, on a straight line between the two sizes around it.

        Args:
            size: examples of a microbatch.

        Returns:
            The figures; None below the least size and above the largest.
        """
        if not self.sizes[0] <= size <= self.sizes[-1]:
            return None
        return LayerTimes(
            *(np.interp(size, self.sizes, getattr(self.times, f.name)) for f in fields(self.times))
        )


@dataclass(frozen=True, eq=False)
class ForeignProfile:
    """What the layers of a model take, by another tool.

    Args:
        path: the file.
        model: the model's name.
        source: how the figures were made.
        fingerprint: tells this profile from others, whatever its name.
        layers: the layers.
        times: by the layers' `ForeignLayer.figures`, kind of devices and mesh.
    """

    path: str
    model: str
    source: str
    fingerprint: str
    layers: tuple[ForeignLayer, ...]
    times: Mapping[tuple[str, str, MeshShape], SizedTimes]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices that there are times of."""
        return tuple(dict.fromkeys(kind for _, kind, _ in self.times))

    def meshes(self, kind: str) -> tuple[MeshShape, ...]:
        """The meshes of a kind that there are times of, for every layer."""
        return tuple(sorted({mesh for _, of, mesh in self.times if of == kind}))

    def sizes(self, kind: str, mesh: MeshShape) -> tuple[int, int]:
        """The least and the largest size of microbatches of which all layers have times."""
        every = [each.sizes for (_, of, on), each in self.times.items() if (of, on) == (kind, mesh)]
        return max(sizes[0] for sizes in every), min(sizes[-1] for sizes in every)

    def times_on(self, kind: str, mesh: MeshShape, size: int) -> LayerTimes | None:
        """What the layers take on a mesh.

        Where there are times of the very mesh, these count. Else data parallelism is what it is:
        each of its parts computes its share of the examples as a mesh without it would.

        Args:
            kind: the kind of its devices.
            mesh: sizes of the data and the tensor axis.
            size: examples of a microbatch.

        Returns:
            The figures of each layer; None where times are missing.
        """
        data, tensor = mesh
        found = self._times_at(kind, mesh, size)
        if found is None and data > 1 and size % data == 0:
            return self._times_at(kind, (1, tensor), size // data)
        return found

    def _times_at(self, kind: str, mesh: MeshShape, size: int) -> LayerTimes | None:
        by_figures: dict[str, LayerTimes] = {}
        for figures in dict.fromkeys(layer.figures for layer in self.layers):
            sized = self.times.get((figures, kind, mesh))
            found = sized and sized.at(size)
            if found is None:
                return None
            by_figures[figures] = found
        return LayerTimes.of_all([by_figures[layer.figures] for layer in self.layers])


def read_foreign_profile(path: str | Path) -> ForeignProfile:
    """Read the profile of another tool.

    Args:
        path: a JSON file.

    Returns:
        The profile.

    Raises:
        InputError: a field is missing, unknown or wrong; or times are missing of a layer that
            others have: the message names the layer, the kind and the mesh.
    """
    content = read_json(path, f"planner.profile {str(path)!r}")
    try:
        return checked_foreign_profile(content, str(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def checked_foreign_profile(content: object, path: str) -> ForeignProfile:
    """Check the content of a file.

    Args:
        content: dicts, lists, texts and numbers, as JSON gives them.
        path: the file that has it.

    Returns:
        The profile.

    Raises:
        InputError: as for `read_foreign_profile`.
    """
    _, rest = without_version(content, (VERSION,))
    try:
        record = _ProfileRecord.model_validate(rest)
    except pydantic.ValidationError as error:
        raise InputError(first_problem(error, _ProfileRecord)) from None
    layers = tuple(_layers(record.layers))
    times = _times(record.times, {each.figures for each in layers})
    text = json.dumps([[asdict(each) for each in layers], rest["times"]], sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    return ForeignProfile(path, record.model, record.source, fingerprint, layers, times)


def _layers(records: Sequence[_LayerRecord]) -> Iterator[ForeignLayer]:
    total = sum(record.count for record in records)
    if total > MAX_LAYERS:
        raise InputError(f"layers: there are {total}; allowed: {MAX_LAYERS} at most")
    known: dict[str, tuple[ForeignLayer, int]] = {}
    place = 0
    for index, record in enumerate(records):
        where = f"layers[{index}]"
        if record.name in known:
            raise InputError(f"{where}.name: {shown(record.name)} is given twice")
        made = _layer(record, where, known)
        known[record.name] = made, place
        for number in range(record.count):
            name = record.name if record.count == 1 else f"{record.name} {number}"
            yield ForeignLayer(**{**vars(made), "name": name})
        place += record.count


_OWN = ("parameter_bytes", "optimizer_bytes", "sent_bytes")
_DEFAULTED = ("gradient_bytes", "returned_bytes", "tied_to")


def _layer(
    record: _LayerRecord, where: str, known: Mapping[str, tuple[ForeignLayer, int]]
) -> ForeignLayer:
    """The layer of a record, or the first of those that are alike."""
    every = {each: getattr(record, each) for each in (*_OWN, *_DEFAULTED)}
    given = {name: value for name, value in every.items() if value is not None}
    if record.like is not None:
        if record.like not in known:
            raise InputError(unknown_name(f"{where}.like", record.like, known))
        if given:
            raise InputError(
                f"{where}.{next(iter(given))}: it is not allowed beside 'like', which says all"
            )
        return known[record.like][0]
    missing = [each for each in _OWN if each not in given]
    if missing:
        raise InputError(f"{where}.{missing[0]}: the field is missing, and so is 'like'")
    tied_to = given.pop("tied_to", None)
    if tied_to is not None:
        given["tied_to"] = _tied(record, tied_to, where, known)
    whole: dict[str, Any] = {
        "gradient_bytes": given["parameter_bytes"],
        "returned_bytes": given["sent_bytes"],
        **given,
    }
    return ForeignLayer(record.name, record.name, **whole)


def _tied(
    record: _LayerRecord, tied_to: str, where: str, known: Mapping[str, tuple[ForeignLayer, int]]
) -> int:
    """The place of the layer whose parameters another one uses."""
    if tied_to not in known:
        raise InputError(unknown_name(f"{where}.tied_to", tied_to, known))
    other, place = known[tied_to]
    if record.count > 1 or other.tied_to is not None:
        raise InputError(
            f"{where}.tied_to: {shown(tied_to)} is not allowed: one layer is tied to one that has "
            f"parameters of its own"
        )
    if other.parameter_bytes != record.parameter_bytes:
        raise InputError(
            f"{where}.parameter_bytes: {record.parameter_bytes:g} is not allowed: layer "
            f"{shown(tied_to)}, whose parameters they are, has {other.parameter_bytes:g}"
        )
    return place


def _times(
    records: Sequence[_TimesRecord], figures: set[str]
) -> dict[tuple[str, str, MeshShape], SizedTimes]:
    """Times by layer, kind and mesh, of which each layer has all that another one has."""
    rows: dict[tuple[str, str, MeshShape], dict[int, _TimesRecord]] = {}
    for index, record in enumerate(records):
        where = f"times[{index}]"
        if record.layer not in figures:
            raise InputError(unknown_name(f"{where}.layer", record.layer, figures))
        key = record.layer, record.kind, (record.mesh[0], record.mesh[1])
        of_sizes = rows.setdefault(key, {})
        if record.microbatch_size in of_sizes:
            raise InputError(
                f"{where}: layer {shown(record.layer)} on {record.kind}, mesh {record.mesh}, has "
                f"times for microbatches of {record.microbatch_size} already"
            )
        of_sizes[record.microbatch_size] = record
    for kind, mesh in dict.fromkeys((kind, mesh) for _, kind, mesh in rows):
        for each in sorted(figures):
            if (each, kind, mesh) not in rows:
                raise InputError(
                    f"times: layer {shown(each)} has none on {kind}, mesh {list(mesh)}, which "
                    f"other layers have"
                )
    return {key: _sized(of_sizes) for key, of_sizes in rows.items()}


def _sized(of_sizes: Mapping[int, _TimesRecord]) -> SizedTimes:
    names = [each.name for each in fields(LayerTimes)]
    ordered = sorted(of_sizes)
    columns = (np.array([getattr(of_sizes[size], name) for size in ordered]) for name in names)
    return SizedTimes(tuple(ordered), LayerTimes(*columns))
