"""The profile database: a folder of JSON files, one measurement in each.

A measurement's file is named by what was measured, so that whoever measures the same writes the
same file, whole or not at all: any number of processes may write at once, and the databases of
several hosts become one by copying their files together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from hetjax.checked_files import read_json
from hetjax.errors import InputError
from hetjax.file_content import from_content, to_content
from hetjax.files import replacing
from hetjax.limits import Name
from hetjax.planner.profiler.measurement import Measurement
from hetjax.reading import MAX_WRITTEN_BYTES

VERSION = 1


@dataclass(frozen=True)
class Key:
    """What was measured, and with what.

    Args:
        structure: digest of the run's programs, whatever model they are of.
        kind: the kind of the devices; of host processors, which are seldom alike, with the name of
            their subcluster.
        dtype: the dtype that most of the matrix products' FLOPs run in.
        shape: nodes, and devices in each.
        mesh_shape: sizes of the data and the tensor axis.
        sharding: the sharding rule.
        update: digest of the optimizer's update, where it was measured, too; None where it was not,
            and times know no optimizer.
        jax: the version of JAX that compiled it.
    """

    structure: Name
    kind: Name
    dtype: Name
    shape: tuple[int, int]
    mesh_shape: tuple[int, int]
    sharding: Name
    update: Name | None = None
    jax: Name = jax.__version__

    @property
    def path(self) -> Path:
        """The file of this key, relative to the database."""
        told = {name: value for name, value in asdict(self).items() if value is not None}
        text = json.dumps(told, sort_keys=True)
        return Path(_folder(self.kind), f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json")


@dataclass(frozen=True)
class _DatabaseFile:
    key: Key
    measurement: Measurement
    note: str = ""


@dataclass(frozen=True)
class ProfileDatabase:
    """A folder of measurements.

    Args:
        folder: the folder; it is made with the first measurement.
    """

    folder: Path

    def get(self, key: Key) -> Measurement | None:
        """What was measured for a key.

        Args:
            key: what is asked for.

        Returns:
            The measurement; None where there is none.

        Raises:
            InputError: its file is not what this database writes.
        """
        path = self.folder / key.path
        if not os.path.lexists(path):
            return None
        found = _read(path)
        if found.key != key:
            raise InputError(
                f"{path}: key is of another measurement than the file's name; a file of a profile "
                f"database keeps the name that it was written with"
            )
        return found.measurement

    def put(self, key: Key, measurement: Measurement, note: str = "") -> None:
        """Keep a measurement.

        Args:
            key: what was measured.
            measurement: what it took.
            note: what a person may want to know of it.
        """
        content = {"version": VERSION, **to_content(_DatabaseFile(key, measurement, note))}
        with replacing(self.folder / key.path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def merge(self, other: ProfileDatabase) -> int:
        """Take over what another database has and this one has not.

        Args:
            other: the other database.

        Returns:
            How many measurements were taken over.

        Raises:
            InputError: a file of the other one is not what a database writes.
        """
        count = 0
        for key, measurement, note in other._all():
            if self.get(key) is None:
                self.put(key, measurement, note)
                count += 1
        return count

    def of_kind(self, kind: str) -> Iterator[tuple[Key, Measurement]]:
        """What was measured on devices of a kind, of any program.

        Args:
            kind: as keys name it.

        Raises:
            InputError: a file is not what a database writes.
        """
        for key, measurement, _ in self._all(_folder(kind)):
            if key.kind == kind:
                yield key, measurement

    def _all(self, folder: str = "*") -> Iterator[tuple[Key, Measurement, str]]:
        for path in sorted(self.folder.glob(f"{folder}/*.json")):
            found = _read(path)
            yield found.key, found.measurement, found.note


def _folder(kind: str) -> str:
    """The folder of what was measured on devices of a kind."""
    return re.sub(r"[^\w.-]+", "_", kind)[:60].strip("._") or "kind"


def _read(path: Path) -> _DatabaseFile:
    """What a file says, which is read again only where it has changed."""
    try:
        stat = path.stat()
    except OSError:
        return _read_file(path)
    return _read_once(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.cache
def _read_once(path: Path, version: tuple[int, int, int]) -> _DatabaseFile:
    return _read_file(path)


def _read_file(path: Path) -> _DatabaseFile:
    try:
        data = read_json(path, f"{path}: this is not a profile: the file", MAX_WRITTEN_BYTES)
    except InputError as error:
        raise _to_remove(str(error)) from None
    try:
        return from_content(_DatabaseFile, data, VERSION)
    except InputError as error:
        raise _to_remove(f"{path}: {error}") from None


def _to_remove(problem: str) -> InputError:
    return InputError(f"{problem}; remove the file to have it measured again")
