"""Random moves of an array: from one union of submeshes to another one, or among the same."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from random_annotations import an_annotation, groups_of_devices

from hetjax.sharding import HSharding

FIRST = 100
"""The first device of a receiving stage that is another one."""


@dataclass(frozen=True)
class Move:
    """An array that comes to lie in another way.

    Args:
        shape: its shape.
        source: how it lies.
        target: how it shall lie; on the same submeshes, or on others.
        processes: for each device its stage, and the process of the stage.
    """

    shape: tuple[int, ...]
    source: HSharding
    target: HSharding
    processes: dict[int, tuple[int, int]]

    @property
    def stages(self) -> tuple[int, int]:
        """The sending and the receiving stage."""
        return 0, int(self.target.devices[0] >= FIRST)

    def peers(self, side: HSharding) -> list[tuple[int, int]]:
        """The processes of the source, or of the target."""
        return list(dict.fromkeys(self.processes[device] for device in side.devices))


@st.composite
def moves(draw: st.DrawFn, *, one_process: bool = False) -> Move:
    """A move of an array of up to two dimensions among up to eight devices, or to eight others.

    Args:
        one_process: whether each submesh has one process only, and one mesh.
    """
    shape = tuple(draw(st.sampled_from((1, 4, 6, 12))) for _ in range(draw(st.integers(1, 2))))
    groups = draw(groups_of_devices(max_groups=3, max_devices=8))
    source = draw(an_annotation(shape, groups, partial=draw(st.booleans())))
    sides = [groups]
    if draw(st.booleans()):
        others = draw(groups_of_devices(max_groups=3, max_devices=8))
        groups = [tuple(device + FIRST for device in group) for group in others]
        sides.append(groups)
    like = source if one_process and len(sides) == 1 else None
    target = draw(an_annotation(shape, groups, partial=False, like=like))
    processes: dict[int, tuple[int, int]] = {}
    for stage, members in enumerate(sides):
        count = 0
        for devices in members:
            allowed = [n for n in (1, 2, 4) if len(devices) % n == 0 and not one_process]
            size = draw(st.sampled_from([len(devices), *allowed]))
            processes |= {
                device: (stage, count + place // size) for place, device in enumerate(devices)
            }
            count += len(devices) // size
    return Move(shape, source, target, processes)
