"""Upper limits of what people write: far above what anyone has, far below what would never end.

A size that is out of reach is refused where it is read. Later it would be a loop that does not end,
or memory that is not there.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated

import pydantic

from hetjax.errors import InputError, shown

MAX_COUNT = 2**31 - 1
"""The largest count of steps: what optimizers count in 32 bits."""

MAX_BATCH = 2**20
"""The most examples in one step."""

MAX_MICROBATCHES = 2**14
"""The most microbatches in one step of a pipeline."""

MAX_PASSES = 4
"""How often a planned pipeline passes its submeshes at most."""

MAX_TASKS = 2**17
"""The most forward and backward tasks in one step of a pipeline, over its stages."""

MAX_SUBCLUSTERS = 256
"""The most subclusters in a cluster."""

MAX_NODES = 10_000
"""The most nodes in a subcluster."""

MAX_DEVICES_PER_NODE = 1024
"""The most devices in a node."""

MIN_QUANTITY, MAX_QUANTITY = 1e-24, 1e24
"""The least and the most bytes, FLOP/s or bytes/s of anything; the most seconds, too."""

MAX_VOCABULARY = 2**24
"""The most tokens of a vocabulary; the largest in use have less than 2**20."""

MAX_BLOCKS = 4096
"""The most blocks of a model."""

MAX_WIDTH = 2**20
"""The most channels, heads, experts, pixels or classes along one dimension of a model."""

MAX_SEQUENCE = 2**24
"""The most tokens of an example."""

MAX_MADE_EXAMPLES = 10**8
"""The most tokens or images that are made from nothing."""

MAX_TEXT_BYTES = 2**33
"""The most bytes of one text file, which is held in memory."""

MAX_SECONDS = 1e7
"""The longest deadline: about four months."""

MAX_NAME = 1000
"""The most characters of a name."""


def check_name(name: str, field: str = "") -> str:
    r"""Checks that a name is what it looks like.

    What cannot be seen (control characters, zero-width ones, those that turn the direction of the
    text) makes two names look alike, and can write to a terminal what is not so.

    Args:
        name: the name.
        field: what an error begins with, such as ``"device kind: name: "``.

    Returns:
        The same.

    Raises:
        InputError: it has a character that cannot be seen; the message names the first.

    Example:
        >>> check_name("a\x1b[2J")
        Traceback (most recent call last):
        hetjax.errors.InputError: 'a\x1b[2J' is not allowed: it has the invisible character U+001B
    """
    for character in name:
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise InputError(
                f"{field}{shown(name)} is not allowed: it has the invisible character "
                f"U+{ord(character):04X}"
            )
    return name


Index = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
"""The place of something, counted from 0."""

Text = Annotated[str, pydantic.Field(max_length=MAX_NAME), pydantic.AfterValidator(check_name)]
"""A line of text that can be printed."""

Name = Annotated[
    str, pydantic.Field(min_length=1, max_length=MAX_NAME), pydantic.AfterValidator(check_name)
]
"""What something is called."""
