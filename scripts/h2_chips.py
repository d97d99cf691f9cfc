"""The chips of H2's evaluation, as far as they are published, and what is assumed of them.

Published are memory, chips a node, and for each kind the best plan of 256 chips with its throughput
(tables 5 and 6). Of each kind one figure is fitted to its own throughput: what a chip computes. All
else is assumed, and listed in `ASSUMPTIONS`; nothing is fitted to the results of mixed clusters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetjax.planner.h2.heteroauto import ChipKind, ChipStrategy, find_strategy
from hetjax.planner.h2.layer_division import GroupWay

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCABULARY, TOKENS = 96, 8192, 64, 8, 36864, 92544, 4096
LAYER_PARAMETERS = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH * KV_HEADS // HEADS + 3 * WIDTH * HIDDEN
LAYER_FLOPS = 2 * LAYER_PARAMETERS * TOKENS + 4 * TOKENS * TOKENS * WIDTH
ACTIVATION_BYTES = 2 * TOKENS * WIDTH

RESERVED_BYTES = 12e9
"""Of a chip's memory, for buffers of communication, workspaces and fragments."""

ASSUMPTIONS = (
    "a parameter takes 2 bytes, its gradient 4, Adam's state 12 divided by the width (ZeRO-1)",
    "a layer keeps 10 + 37 / TP bytes an element of a microbatch's activations (646 MB at TP 4), "
    "2 where it is made again, and none where activations are offloaded",
    "12 GB of a chip are not to be used; the embedding's memory is on every stage",
    "a layer has two all-reduces forward, two backward, two where it is made again, as rings",
    "chips share layers at 85 GB/s by up to 4, and at half of that by 8, across a NUMA boundary "
    "(table 6 has TP 8 for D alone, and section 6.2.1 says that it costs); chip D at 170 GB/s",
    "gradients are exchanged in bfloat16 over a network card a chip (table 3), under the backward "
    "pass of the last microbatch",
    "an activation goes to the next stage once in 1 / TP parts; only while the pipeline fills and "
    "drains nothing hides that",
    "offloaded activations go to the host and back under the computation, at 6 GB/s a chip where "
    "16 chips share a host (A, C), at 12 for B and 26 for D",
    "embedding and head take no time (as in the paper)",
)


@dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Args:
        name: as in the paper.
        memory_bytes: of a chip.
        near_bandwidth: among up to 4 chips that share layers, in bytes/s.
        wide_bandwidth: among 8.
        card_bandwidth: of the network card of a chip.
        host_bandwidth: to the host's memory, of each chip of a node at once.
        published: the best plan of 256 chips: stages, width, tensor parallelism, what it repeats
            or offloads, and tokens a second and chip.
    """

    name: str
    memory_bytes: float
    near_bandwidth: float
    wide_bandwidth: float
    card_bandwidth: float
    host_bandwidth: float
    published: tuple[int, int, int, str, float]


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("A", 96e9, 85e9, 42.5e9, 9.56e9, 6e9, (16, 4, 4, "", 136.9)),
        Chip("B", 64e9, 85e9, 42.5e9, 9.91e9, 12e9, (16, 4, 4, "recompute", 143.7)),
        Chip("C", 32e9, 85e9, 42.5e9, 9.91e9, 6e9, (32, 2, 4, "recompute", 46.2)),
        Chip("D", 32e9, 170e9, 170e9, 9.91e9, 26e9, (8, 4, 8, "offload", 99.5)),
    )
}
GROUP_CHIPS = 128
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
PUBLISHED_CHIPS, PUBLISHED_TOKENS = 256, 2**21


@dataclass(frozen=True)
class Without:
    """What an ablation leaves out.

    Args:
        overlap: whether transfers between stages are hidden by nothing.
        scattering: whether an activation crosses once for each chip of the next stage, over
            network cards that are not the nearest (5.51 in place of 9.56 GB/s, table 3).
        direct: whether transfers go through the hosts, 9.94 times as slow (section 3.2.1).
    """

    overlap: bool = False
    scattering: bool = False
    direct: bool = False


FULL = Without()


def ways(
    chip: Chip, flops: float, width: int, chips: int, without: Without = FULL
) -> Iterator[GroupWay]:
    """The ways in which so many chips can run.

    Args:
        chip: the kind.
        flops: what a chip computes, in FLOP/s.
        width: of data parallelism.
        chips: how many there are.
        without: what is left out.
    """
    for tensor in (1, 2, 4, 8):
        if chips % (tensor * width) or chips // (tensor * width) > LAYERS:
            continue
        bandwidth = chip.near_bandwidth if tensor <= 4 else chip.wide_bandwidth
        reduce = 2 * (tensor - 1) / tensor * ACTIVATION_BYTES / bandwidth
        forward = LAYER_FLOPS / (tensor * flops)
        parameters = LAYER_PARAMETERS / tensor
        exchange = 2 * (width - 1) / width * 2 * parameters / chip.card_bandwidth
        each = 6 + 12 / width
        kept = ACTIVATION_BYTES / 2 * (10 + 37 / tensor)
        fixed = VOCABULARY * WIDTH / tensor * each + kept
        handover = 2 * ACTIVATION_BYTES / tensor / chip.card_bandwidth
        handover *= (tensor * 9.56 / 5.51 if without.scattering else 1) * (
            9.94 if without.direct else 1
        )
        for extra in ("", "recompute", "offload"):
            repeats, offloads = extra == "recompute", extra == "offload"
            seconds = 3 * forward + 4 * reduce + repeats * (forward + 2 * reduce)
            if offloads:
                seconds = max(seconds, 2 * kept / chip.host_bandwidth)
            yield GroupWay(
                tensor=tensor,
                stages=chips // (tensor * width),
                repeats=repeats,
                offloads=offloads,
                layer_seconds=seconds,
                update_seconds=max(0.0, exchange - 2 * forward - 2 * reduce),
                handover_seconds=handover,
                state_bytes=parameters * each,
                kept_bytes={"": kept, "recompute": ACTIVATION_BYTES, "offload": 0.0}[extra],
                fixed_bytes=fixed + offloads * 2 * kept,
                exposed_seconds=handover if without.overlap else 0.0,
            )


def strategy(
    chips: Mapping[str, int],
    tokens: int,
    flops: Mapping[str, float],
    *,
    is_grouped: bool = True,
    without: Without = FULL,
) -> ChipStrategy:
    """HeteroAuto's strategy.

    Args:
        chips: how many there are of each kind.
        tokens: of a step.
        flops: what a chip of each kind computes, in FLOP/s.
        is_grouped: see `find_strategy`.
        without: what is left out.
    """
    examples = tokens // TOKENS

    def kind(name: str, count: int) -> ChipKind:
        chip, memory = CHIPS[name], CHIPS[name].memory_bytes - RESERVED_BYTES
        return ChipKind(
            name,
            count,
            memory,
            GROUP_CHIPS,
            lambda width, some: tuple(ways(chip, flops[name], width, some, without)),
        )

    found = find_strategy(
        [kind(name, count) for name, count in chips.items()],
        LAYERS,
        lambda width: examples // width,
        [width for width in WIDTHS if examples % width == 0],
        is_grouped=is_grouped,
    )
    assert found is not None, "the paper's clusters have room for it"
    return found


def calibrated(chip: Chip) -> float:
    """What a chip computes, in FLOP/s, so that its published plan has the published throughput."""
    stages, width, tensor, extra, throughput = chip.published
    microbatches = PUBLISHED_TOKENS // TOKENS // width
    wanted = PUBLISHED_TOKENS / PUBLISHED_CHIPS / throughput

    def seconds(flops: float) -> float:
        (way,) = (
            way
            for way in ways(chip, flops, width, PUBLISHED_CHIPS)
            if way.tensor == tensor
            and way.repeats == (extra == "recompute")
            and way.offloads == (extra == "offload")
        )
        layers = -(-LAYERS // stages)
        of_stage = way.stage_seconds(layers)
        passing = stages * (of_stage + way.handover_seconds)
        return passing + (microbatches - 1) * of_stage + layers * way.update_seconds

    low, high = 1e12, 1e15
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > wanted else (low, middle)
    return high


def uniform(chips: Mapping[str, int], tokens: int, flops: Mapping[str, float]) -> float:
    """Seconds of the best plan whose stages are all alike: layers, width, TP and extras.

    Args:
        chips: how many there are of each kind.
        tokens: of a step.
        flops: what a chip of each kind computes, in FLOP/s.
    """
    names = sorted(chips, key=lambda name: -CHIPS[name].memory_bytes)
    found = []
    for width in (width for width in WIDTHS if (tokens // TOKENS) % width == 0):
        of_kinds = [list(ways(CHIPS[name], flops[name], width, chips[name])) for name in names]
        for alike in itertools.product(*of_kinds):
            if len({(way.tensor, way.repeats, way.offloads) for way in alike}) == 1:
                seconds = _even_seconds(names, alike, tokens // TOKENS // width)
                found += [] if seconds is None else [seconds]
    return min(found)


def _even_seconds(
    names: Sequence[str], alike: Sequence[GroupWay], microbatches: int
) -> float | None:
    """Seconds of a step with as many layers on each stage; None where a chip has no room."""
    stages = sum(way.stages for way in alike)
    layers, after, sums, longest = -(-LAYERS // stages), stages, 0.0, 0.0
    for name, way in zip(names, alike, strict=True):
        held = layers * (way.state_bytes + way.kept_bytes * min(microbatches, after))
        if held + way.fixed_bytes > CHIPS[name].memory_bytes - RESERVED_BYTES:
            return None
        after -= way.stages
        of_stage = way.stage_seconds(layers)
        sums += way.stages * (of_stage + way.handover_seconds)
        longest = max(longest, (microbatches - 1) * of_stage + layers * way.update_seconds)
    return sums + longest
