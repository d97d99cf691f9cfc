"""The work of runs of layers that make their modules again in the backward pass, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetjax.pipeline.layers.structural_layers import LayeredSection
from hetjax.planner.work.alike_runs import sums_of_runs
from hetjax.planner.work.arrays import FloatArray, IntArray
from hetjax.planner.work.layer_runs import Runs

Repetition = Literal["nothing", "half", "layers", "stage"]
"""What a stage makes again: nothing; half of its repeatable layers, or all of them, each right
before its own backward pass; or all of it, before its backward pass begins."""

REPETITIONS: tuple[Repetition, ...] = ("nothing", "half", "layers", "stage")


def repetitions(*, allow_recompute: bool) -> tuple[Repetition, ...]:
    """What stages may make again.

    Args:
        allow_recompute: whether they may make anything again.
    """
    return REPETITIONS if allow_recompute else REPETITIONS[:1]


RepeatingRuns = Mapping[Repetition, Runs]
"""The work of runs of layers, by what they make again."""

LayerRun = tuple[int, int]
"""The first of some layers, and the one after the last."""


def repeatable_layers(
    layers: Sequence[int], sections: Sequence[LayeredSection]
) -> tuple[LayerRun, ...]:
    """The layers that are worth making again together: each occurrence of a repeated module.

    Args:
        layers: the positions where layers begin, and the end.
        sections: the structure that they follow. Where they do not, or it is empty, each layer is
            made again by itself.

    Returns:
        Runs of layers, in order.
    """
    count = len(layers) - 1
    place = {position: layer for layer, position in enumerate(layers)}
    if not sections or not all(each.starts[0] in place for each in sections if each.starts):
        return tuple((layer, layer + 1) for layer in range(count))
    begun = [(place[each.starts[0]], each.section.module) for each in sections if each.starts]
    ends = [*(layer for layer, _ in begun[1:]), count]
    return tuple(
        (layer, end) for (layer, module), end in zip(begun, ends, strict=True) if module is not None
    )


def repeated_by(
    repeats: Repetition, pieces: Sequence[LayerRun], layers: LayerRun
) -> tuple[LayerRun, ...]:
    """What a stage makes again layer by layer.

    Args:
        repeats: what it makes again.
        pieces: what is made again together where layers are.
        layers: the first of its layers, and the one after the last.

    Example:
        >>> repeated_by("half", [(1, 4), (4, 7), (7, 10)], (0, 10))
        ((4, 7), (7, 10))
    """
    if repeats not in ("half", "layers"):
        return ()
    found = repeated_in(pieces, layers)
    return found[len(found) // 2 :] if repeats == "half" else found


def repeated_in(pieces: Sequence[LayerRun], layers: LayerRun) -> tuple[LayerRun, ...]:
    """What of some runs of layers is among given layers.

    Args:
        pieces: the runs.
        layers: the first of the layers, and the one after the last.

    Example:
        >>> repeated_in([(1, 4), (4, 7), (7, 10)], (2, 8))
        ((2, 4), (4, 7), (7, 8))
    """
    first, end = layers
    cut = ((max(a, first), min(b, end)) for a, b in pieces)
    return tuple((a, b) for a, b in cut if a < b)


def runs_by_repetition(runs: Runs, pieces: Sequence[LayerRun]) -> RepeatingRuns:
    """Every run of layers, by what it makes again; found once for the same runs.

    Args:
        runs: every run of layers, as `all_runs` has them.
        pieces: what is made again together where layers are.

    Returns:
        The runs in each way.
    """

    def found() -> RepeatingRuns:
        layers = repeating_layers(runs, pieces)
        return {
            "nothing": runs,
            "half": _halfway(runs, layers, pieces),
            "layers": layers,
            "stage": runs.repeating_forward(),
        }

    return runs.once(("by repetition", tuple(pieces)), found)


def listed_by_repetition(
    runs: Runs, pieces: Sequence[LayerRun], kinds: IntArray | None = None
) -> RepeatingRuns:
    """The same in lists: see `Runs.by_length`.

    Args:
        runs: every run of layers, as `all_runs` has them.
        pieces: what is made again together where layers are.
        kinds: which layers are alike, in these pieces too; None where no two are.
    """

    def found() -> RepeatingRuns:
        listed = runs.by_length(kinds)
        every = runs_by_repetition(runs, pieces)
        # What does not depend on repetition is found once.
        half, layers = (
            replace(each.by_length(kinds), known=listed.known)
            for each in (every["half"], every["layers"])
        )
        return {
            "nothing": listed,
            "half": half,
            "layers": layers,
            "stage": listed.repeating_forward(),
        }

    return runs.once(("listed", tuple(pieces), None if kinds is None else tuple(kinds)), found)


def repeating_layers(runs: Runs, pieces: Sequence[LayerRun]) -> Runs:
    """The same runs, which keep what goes into some of their layers and make these again.

    Args:
        runs: every run of layers, as `all_runs` has them.
        pieces: the layers that are made again, each run of them by itself; what a run of layers has
            of one, it makes again.

    Returns:
        The runs: of them `residual_bytes` is what is kept.
    """
    assert runs.used is not None, "these are all runs"
    assert runs.listed is None, "they are on a square"
    size = runs.used.shape[1] + 1
    held = _PieceBytes(runs, pieces, size)
    layer = np.arange(size - 1)
    is_again = np.zeros(size - 1)
    for a, b in pieces:
        is_again[a:b] = 1.0
    alone = (layer, layer + 1)
    # What has no backward pass is not made again for one.
    is_again *= runs.has_backward[alone]

    def again(values: FloatArray) -> FloatArray:
        return sums_of_runs(values[alone] * is_again)

    flops, traffic = again(runs.forward_flops), again(runs.forward_traffic)
    return replace(
        runs,
        backward_flops=runs.backward_flops + flops,
        backward_traffic=runs.backward_traffic + traffic,
        backward_moves=runs.backward_moves + again(runs.forward_moves),
        backward_moved=runs.backward_moved + again(runs.forward_moved),
        residual_bytes=runs.residual_bytes - held.saved,
        again_bytes=held.at_once,
        again_share=_share_of_forward(runs, flops, traffic),
    )


def _halfway(runs: Runs, layers: Runs, pieces: Sequence[LayerRun]) -> Runs:
    """Runs that make the last half of their pieces again, rounded up, as `repeated_by` has them."""
    begins, ends = np.array([*pieces], int).reshape(-1, 2).T
    position = np.arange(runs.residual_bytes.shape[0])
    ended = (position[:, None] >= ends).sum(axis=1)[:, None]
    count = np.maximum((position[:, None] > begins).sum(axis=1)[None, :] - ended, 0)
    first, end = np.meshgrid(position, position, indexing="ij")
    middle = np.maximum(first, np.append(begins, 0)[np.minimum(ended + count // 2, len(pieces))])
    middle = np.where(count > 0, middle, end)

    def added(name: str) -> FloatArray:
        """By how much the last half of a run has more of something than where it keeps all."""
        more = getattr(layers, name) - getattr(runs, name)
        return np.where(count > 0, more[middle, end], 0.0)

    flops, traffic = added("backward_flops"), added("backward_traffic")
    kept = added("residual_bytes") + np.where(middle > first, _kept_by_both(runs)[middle], 0.0)
    names = ("backward_moves", "backward_moved")
    return replace(
        runs,
        residual_bytes=runs.residual_bytes + np.where(count > 0, kept, 0.0),
        backward_flops=runs.backward_flops + flops,
        backward_traffic=runs.backward_traffic + traffic,
        again_bytes=np.where(count > 0, layers.again_bytes[middle, end], 0.0),
        again_share=_share_of_forward(runs, flops, traffic),
        **{name: getattr(runs, name) + added(name) for name in names},
    )


def _kept_by_both(runs: Runs) -> FloatArray:
    """Of each boundary, what the layers before and after it would both keep.

    One of them does, and where it makes that again, the other one, as far as is known.
    """
    kept, layer = runs.residual_bytes, np.arange(1, len(runs.residual_bytes) - 1)
    both = np.zeros(len(kept))
    both[layer] = kept[layer - 1, layer] + kept[layer, layer + 1] - kept[layer - 1, layer + 1]
    return both


def _share_of_forward(runs: Runs, flops: FloatArray, traffic: FloatArray) -> FloatArray:
    """What share of their forward pass runs make again, of which so much is known."""
    whole = np.where(runs.forward_flops > 0, runs.forward_flops, runs.forward_traffic)
    part = np.where(runs.forward_flops > 0, flops, traffic)
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


@dataclass(frozen=True)
class _Pieces:
    """Of each run the layers of one piece that it has first or last, as arrays on the square."""

    first: IntArray
    end: IntArray


class _PieceBytes:
    """What runs of layers hold of pieces that they make again.

    A run has whole pieces, and maybe a part of one before them and of one after them.

    Attributes:
        saved: bytes that they keep less of a microbatch.
        at_once: the most bytes that one piece holds while it is made again.
    """

    def __init__(self, runs: Runs, pieces: Sequence[LayerRun], size: int):
        self._runs, self._size = runs, size
        begins = np.arange(size)
        ends = np.arange(size)
        for a, b in pieces:
            begins[a:b], ends[a:b] = a, b
        i, j = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
        is_run = j > i
        last = np.maximum(j - 1, 0)
        # Layers of no piece have an empty one, which ends where it begins.
        head = _Pieces(i, np.where(is_run, np.minimum(np.maximum(ends[i], i), j), i))
        tail_first = np.where(begins[last] < ends[last], begins[last], j)
        tail_first = np.where(is_run, np.maximum(tail_first, head.end), j)
        tail = _Pieces(tail_first, np.maximum(j, tail_first))
        middle = _Pieces(head.end, np.maximum(tail.first, head.end))
        whole = np.zeros(size), np.zeros(size)
        for a, b in pieces:
            whole[0][a], whole[1][a] = self._saved_by(a, b), runs.residual_bytes[a, b]
        before = np.concatenate([[0.0], np.cumsum(whole[0])])
        saved = before[middle.end] - before[middle.first] + self._saved(head) + self._saved(tail)
        self.saved = saved - self._apart(pieces)
        largest = np.maximum.accumulate(np.triu(np.tile(whole[1], (size, 1))), axis=1)
        among = np.where(
            middle.end > middle.first, largest[middle.first, np.maximum(middle.end - 1, 0)], 0.0
        )
        self.at_once = np.maximum(among, np.maximum(self._made(head), self._made(tail)))

    def _apart(self, pieces: Sequence[LayerRun]) -> FloatArray:
        """What neighbours would both keep, and only one of them does, at the edges of pieces."""
        edges = {edge for piece in pieces for edge in piece}
        both = np.where(np.isin(np.arange(self._size), list(edges)), _kept_by_both(self._runs), 0.0)
        before = np.concatenate([[0.0], np.cumsum(both)])
        inside = before[None, :-1] - before[1:, None]
        return np.triu(inside, k=1)

    def _saved_by(self, a: int, b: int) -> float:
        return float(self._runs.residual_bytes[a, b] - self._runs.input_bytes[a, b])

    def _saved(self, part: _Pieces) -> FloatArray:
        saved = self._runs.residual_bytes - self._runs.input_bytes
        return np.where(part.end > part.first, saved[part.first, part.end], 0.0)

    def _made(self, part: _Pieces) -> FloatArray:
        made = self._runs.residual_bytes[part.first, part.end]
        return np.where(part.end > part.first, made, 0.0)
