"""Malformed files: good ones, damaged in ways that people, editors and disks know.

A case is drawn from one number, as in `cases.py`.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NASTY_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.0, -0.0, 0.5, 1e15, 1e308, -1e308),
    *(float("inf"), float("-inf"), float("nan"), 10**15, 2**31, 2**63, 2**64, 10**30, 10**400),
    *("", " ", "1", "x", "nan", "1e999 GB/s", "9" * 400 + " GB", "~", "../..", "/dev/zero"),
    *("a\0b", "\x1b[2J", "\u202eevil", "\u200b", "é" * 50, "x" * 5000, "\ud800", "%A", "4*batch"),
    *([], {}, [[]], [1], ["a"], {"a": 1}, {"": []}, [None] * 300, {"like": "T4"}),
)
"""What a value is replaced by."""

FRAGMENTS = (
    *("", "\0", "\ufeff", "\r\n", "\r", "\t", "\n", " ", "\u2028", "\x85", "\x1b", "\u202e", "'"),
    *('"', "\\", "#", ":", ",", "-", "=", "%", "@", "&", "*", "!", "|", ">", "<<: *a", "? ", "..."),
    *("{", "}", "[", "]", "(", ")", "---\n", "%YAML 9.9\n", "&a [*a]", "*a", "&a", "!!bool x"),
    *("!!int x", "!!float x", "!!timestamp x", "!!binary x", "!!python/object:os.system x"),
    *("{[]: 1}", "? [a]\n: b\n", "2024-99-99", "2024-01-01", "010", "0x1f", "1_000", "1:30"),
    *("1e999", "-.inf", ".nan", "NaN", "Infinity", "9" * 6000, "0x" + "f" * 6000, "1j", "b'a'"),
    *("[" * 5000, "{" * 5000, "(" * 300, '{"a":' * 2000, "- " * 2000, "'a' " * 2000),
    *("\\ud800", "'\\ud800'", "import os\n", "include 'x.gin'\n", "a = %b\nb = %a\n", "%a"),
    *("train.steps = %a\n", "optimizer.options = {[]: 1}\n", "optimizer.options = {'eps': '1'}\n"),
    *("optimizer.learning_rate = 1e999\n", "train.batch_size = 1000000000000\n", "x" * 20_000),
    '"a": 1, "a": 2,',
    "".join(f"a{n + 1} = [{', '.join([f'%a{n}'] * 10)}]\n" for n in range(20)),
    "".join(f"c{n} = %c{n + 1}\n" for n in range(500)),
    "".join(f"- &b{n + 1} [{', '.join([f'*b{n}'] * 9)}]\n" for n in range(20)),
)
"""What is put into a text."""


def damaged_bytes(good: bytes, random: Random) -> bytes:
    """A file with some of it cut out, doubled, flipped, or put in."""
    content = bytearray(good)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        start = random.randint(0, len(content))
        end = min(len(content), start + random.choice((0, 1, 1, 4, 30, 10**6)))
        match random.randrange(5):
            case 0:
                del content[start:end]
            case 1:
                content[start:start] = content[start:end]
            case 2 if content:
                content[start % len(content)] = random.randrange(256)
            case _:
                fragment = random.choice(FRAGMENTS).encode("utf-8", "surrogatepass")
                content[start:end] = fragment
    return bytes(content)


def damaged_values(good: Any, random: Random) -> Any:
    """Plain values with some replaced, left out, renamed or moved."""
    root = [copy.deepcopy(good)]
    for _ in range(random.choice((1, 1, 2, 3))):
        places = [*_places(root)]
        holder, key = random.choice(places)
        match random.randrange(5):
            case 0 if holder is not root:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[random.choice(("", "nam", "\0", "x" * 3000, "kinds"))] = holder.pop(key)
            case 2:
                other, place = random.choice(places)
                holder[key] = copy.deepcopy(other[place])
            case _:
                holder[key] = copy.deepcopy(random.choice(NASTY_VALUES))
    return root[0]


def _places(value: Any) -> Any:
    """Every list or mapping, with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in list(pairs):
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


def damaged_json(good: Any, random: Random) -> bytes:
    """A JSON file, damaged as values or as text."""
    if random.random() < 0.6:
        return json.dumps(damaged_values(good, random)).encode()
    return damaged_bytes(json.dumps(good, indent=random.choice((None, 1))).encode(), random)


def put(path: Path, content: bytes, random: Random) -> None:
    """Write a file, or now and then something else where it should be."""
    unusual: list[Callable[[], object]] = [
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: None,
    ]
    if random.random() < 0.02:
        random.choice(unusual)()
    else:
        path.write_bytes(content)
