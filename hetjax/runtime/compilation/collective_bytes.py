"""What the collectives of a compiled program move, read off its text."""

from __future__ import annotations

import math
import re

import numpy as np

_COLLECTIVE = re.compile(
    r"= (?P<shape>\(?[a-z].*?\)?) "
    r"(?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+|c\d+)\[([\d,]*)\]")


def collective_bytes(text: str) -> float:
    """Bytes that every device sends in the collectives of a compiled program, as rings.

    A collective inside a loop counts once.

    Args:
        text: the program's text, as the method ``as_text`` of what `jax.stages.Lowered.compile`
            returns gives it.

    Returns:
        Bytes of one device.

    Example:
        >>> collective_bytes("%sum = f32[4,2]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}")
        32.0
    """
    return sum(map(_bytes_of, _COLLECTIVE.finditer(text)))


def _bytes_of(match: re.Match[str]) -> float:
    sizes = [_array_bytes(*array) for array in _ARRAY.findall(match["shape"])]
    name, devices = match["name"], _group_size(match["rest"])
    if match["start"] and name != "all-reduce":
        # The first half of what an asynchronous one returns are its operands.
        sizes = sizes[len(sizes) // 2 :]
    size = float(sum(sizes))
    if name == "collective-permute":
        return size
    others = devices - 1
    if name == "reduce-scatter":
        return others * size
    return (2 if name == "all-reduce" else 1) * others * size / devices


def _array_bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype.removeprefix("bf")))
    return math.prod(int(size) for size in shape.split(",") if size) * max(1, bits // 8)


def _group_size(rest: str) -> int:
    """Devices in a group, in any of the forms in which XLA writes groups."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest)
    if counted:
        return int(counted[2])
    named = re.search(r"replica_groups=@?mesh\w*\[(.*?)\] \{(.*?)\}", rest)
    if named is None:
        return 1
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return int(np.prod([int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2])]))
