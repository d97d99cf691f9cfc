"""Labs for tests, all of one name, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab import Specification, names, read_specification
from lab.network import all_namespaces
from lab.state import present
from lab.system import check_machine

from hetjax.errors import InputError

NAME = "test_lab"
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "lab"
NOTHING: dict[str, Any] = {
    "namespaces": [],
    "present": [],
    "folder": False,
    "cgroups": [],
    "processes": [],
    "interfaces": [],
}


def reason_against() -> str:
    """Why no lab can be made here; empty if one can."""
    try:
        check_machine()
    except InputError as error:
        return str(error)
    cores = len(os.sched_getaffinity(0))
    return "" if cores >= 2 else f"two hosts want two cores, and there is {cores}"


MARKS = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "it can be made here"),
]


def named_lab(name: str) -> Specification:
    """A lab of configs/lab, by the name of the tests' labs."""
    return read_specification(name).model_copy(update={"name": NAME})


def rays_processes() -> list[str]:
    """The processes of the lab's Ray nodes that live, wherever they have gone."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(names.state_folder(NAME)).encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


def traces() -> dict[str, Any]:
    """Everything of the lab that is on this machine."""
    here = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "namespaces": [name for name in all_namespaces() if NAME in name],
        "present": [name for name in present() if name == NAME],
        "folder": names.state_folder(NAME).exists(),
        "cgroups": [str(p) for p in Path("/sys/fs/cgroup").rglob(f"hetlab-{NAME}-*")],
        "processes": rays_processes(),
        "interfaces": re.findall(r"to-[a-z]\w*@", here),
    }


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the lab to its end."""
    words = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **options)
