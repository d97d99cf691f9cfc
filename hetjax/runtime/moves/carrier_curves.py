"""What was measured of the carriers on the links of a run, and the file that keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetjax.checked_files import read_json
from hetjax.errors import InputError
from hetjax.file_content import from_content, to_content
from hetjax.files import replacing
from hetjax.limits import Name
from hetjax.runtime.moves.carriers import CarrierLinks, CarrierName, Curve

VERSION = 2
"""Of the files: what is written, and read."""


@dataclass(frozen=True, order=True)
class LinkEnd:
    """One end of a link: the devices of a subcluster on a host.

    Args:
        subcluster: the subcluster's name.
        address: the host's address in the cluster.

    Example:
        >>> str(LinkEnd("fast", "10.0.0.1"))
        'fast at 10.0.0.1'
    """

    subcluster: Name
    address: Name

    def __str__(self) -> str:
        return f"{self.subcluster} at {self.address}"


@dataclass(frozen=True)
class MeasuredLink:
    """What the carriers take on one link.

    Args:
        between: its ends, which may be the same.
        carriers: for each carrier what it took, in the direction that took longer.
    """

    between: tuple[LinkEnd, LinkEnd]
    carriers: dict[CarrierName, Curve]


@dataclass(frozen=True)
class CarrierCurves:
    """What was measured of the carriers on the links of a run.

    Args:
        links: one entry a link.

    Example:
        >>> ends = LinkEnd("fast", "10.0.0.1"), LinkEnd("slow", "10.0.0.2")
        >>> wire = {CarrierName.WIRE: Curve((4096, 65536), (1e-4, 2e-4))}
        >>> CarrierCurves((MeasuredLink(ends, wire),)).of(ends[1], ends[0]) == wire
        True
    """

    links: tuple[MeasuredLink, ...] = ()

    def of(self, one: LinkEnd, other: LinkEnd) -> CarrierLinks:
        """What the carriers take between two ends; nothing where that was not measured."""
        ends = {one, other}
        return next((each.carriers for each in self.links if {*each.between} == ends), {})

    def with_links(self, links: Iterable[MeasuredLink]) -> CarrierCurves:
        """The same with further links, or newer ones."""
        newer = tuple(links)
        known = {frozenset(each.between) for each in newer}
        kept = (each for each in self.links if frozenset(each.between) not in known)
        return CarrierCurves((*kept, *newer))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, whole or not at all.

        Args:
            path: the JSON file.
        """
        content = {"version": VERSION, **to_content(self)}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CarrierCurves:
        """Read a file that `save` wrote.

        Args:
            path: the JSON file.

        Returns:
            The curves.

        Raises:
            InputError: the file cannot be read, or a field is wrong; the message names it.
        """
        subject = f"carriers file {path}"
        content = read_json(Path(path), subject)
        try:
            return from_content(cls, content, VERSION)
        except InputError as error:
            raise InputError(f"{subject}: {error}") from None
