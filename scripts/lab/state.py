"""Which labs there are on this machine, and what each consists of."""

from __future__ import annotations

from typing import Any

from hetjax.checked_files import read_json
from hetjax.errors import InputError, unknown_name
from lab import names, network
from lab.cgroups import find_cpu_groups
from lab.specification import Specification, specification_from_content

_SPECIFICATION = "specification.json"


def present() -> list[str]:
    """The names of all labs of which anything is there, half built ones too."""
    groups = [*network.all_namespaces(), *find_cpu_groups().all_groups()]
    found = {names.lab_of_group(group) for group in groups}
    if names.STATE.is_dir():
        found |= {path.name for path in names.STATE.iterdir()}
    return sorted(name for name in found if name is not None)


def choose(name: str | None) -> str:
    """The name of a lab that is there.

    Args:
        name: what was asked for; None for the only one.

    Returns:
        The name.

    Raises:
        InputError: there is none of the name, none at all, or more than one.
    """
    found = present()
    if name is not None:
        if name not in found:
            raise InputError(unknown_name("lab", name, found))
        return name
    if len(found) != 1:
        names_of = f"more than one lab is up: {', '.join(found)}; say which" if found else ""
        raise InputError(names_of or "no lab is up; lab up SPEC makes one")
    return found[0]


def save(specification: Specification) -> None:
    """Write down what a lab consists of."""
    folder = names.state_folder(specification.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = folder / f"{_SPECIFICATION}.new"
    new.write_text(specification.model_dump_json(indent=2))
    new.rename(folder / _SPECIFICATION)


def saved(name: str) -> Specification | None:
    """What a lab consists of; None where that is not written down."""
    path = names.state_folder(name) / _SPECIFICATION
    if not path.exists():
        return None
    return specification_from_content(read_json(path, f"{path}: the lab's file"), str(path))


def check_same(specification: Specification) -> None:
    """Check that no other lab of a specification's name is up.

    Raises:
        InputError: one of other hosts or links is.
    """
    found, name = saved(specification.name), specification.name
    if found is not None and _shape(found) != _shape(specification):
        raise InputError(
            f"lab {name!r} is up with other hosts or links; take it down first: lab down {name}"
        )


def _shape(specification: Specification) -> Any:
    """What cannot be changed while a lab is up."""
    return (
        [(host.name, host.cores) for host in specification.hosts],
        specification.switches,
        [link.between for link in specification.links],
    )
