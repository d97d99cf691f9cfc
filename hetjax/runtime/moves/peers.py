"""The processes between which arrays move: who they are, and which devices each has."""

from __future__ import annotations

from collections.abc import Sequence

Peer = tuple[int, int]
"""A process: its stage, and its place among the stage's processes, counted through all members."""

Processes = Sequence[Sequence[tuple[int, ...]]]
"""For each stage, for each of its processes, the cluster's numbers of its devices.

No process has devices of two members. In the local runtime each member counts as one.
"""


def worker_name(peer: Peer) -> str:
    """What a worker is called in messages.

    Example:
        >>> worker_name((1, 0))
        'stage 1, host 0'
    """
    return f"stage {peer[0]}, host {peer[1]}"
