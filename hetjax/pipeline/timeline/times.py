"""What the tasks and transfers of one training step take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hetjax.errors import InputError


@dataclass(frozen=True)
class StepTimes:
    """The seconds of every task and transfer of one step, for one microbatch each.

    Args:
        forward: F on every stage; S long.
        backward: the whole backward pass on every stage, without recomputation; S long.
        sends: one activation from stage i to i + 1; S - 1 long.
        returns: one gradient from stage i + 1 to i; S - 1 long.
        update: the optimizer's update on every stage, once a step; S long, or empty for none.
        input_gradient: B on every stage where a W follows it; S long, or empty where backward
            passes cannot be split.
        weight_gradient: W on every stage; as long as `input_gradient`.
        recompute: R on every stage, 0 where nothing is recomputed; S long, or empty for none.
        stores: on every stage, the way of a microbatch's activations to the hosts' memory, 0 where
            they stay on the devices; S long, or empty for none.
        fetches: their way back; as long as `stores`.
        copies_overlap: whether these copies run beside the stage's tasks; as long as `stores`.

    Raises:
        InputError: a length does not fit the number of stages, or a time is negative or not
            finite.

    Example:
        >>> times = StepTimes([1.0, 1.0], [2.0, 2.0], [0.5], [0.5], recompute=[0.0, 1.0])
        >>> times.num_stages, times.backward_seconds(1, split=False, recomputed=False)
        (2, 3.0)
    """

    forward: Sequence[float]
    backward: Sequence[float]
    sends: Sequence[float]
    returns: Sequence[float]
    update: Sequence[float] = ()
    input_gradient: Sequence[float] = ()
    weight_gradient: Sequence[float] = ()
    recompute: Sequence[float] = ()
    stores: Sequence[float] = ()
    fetches: Sequence[float] = ()
    copies_overlap: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not len(self.forward):
            raise InputError("forward has no times; a pipeline has one stage or more")
        for field in fields(self):
            self._check(field.name, may_be_empty=field.default == ())
        if len(self.input_gradient) != len(self.weight_gradient):
            raise InputError(
                f"input_gradient has {len(self.input_gradient)} times and weight_gradient "
                f"{len(self.weight_gradient)}; give both or neither"
            )
        if not len(self.stores) == len(self.fetches) == len(self.copies_overlap):
            raise InputError(
                f"stores has {len(self.stores)} times, fetches {len(self.fetches)} and "
                f"copies_overlap {len(self.copies_overlap)} values; give all or none"
            )

    @property
    def num_stages(self) -> int:
        """The number of stages, S."""
        return len(self.forward)

    @property
    def can_split(self) -> bool:
        """Whether the times of split backward passes are known."""
        return len(self.input_gradient) > 0

    @property
    def compute(self) -> tuple[float, ...]:
        """Harp's t_i: forward and whole backward pass, with recomputation, on every stage."""
        stages = range(self.num_stages)
        return tuple(
            self.forward[s] + self.backward_seconds(s, split=False, recomputed=False)
            for s in stages
        )

    @property
    def communication(self) -> tuple[float, ...]:
        """Harp's c_i: half the way there and back over every boundary."""
        return tuple((a + b) / 2 for a, b in zip(self.sends, self.returns, strict=True))

    @property
    def has_copies(self) -> bool:
        """Whether activations of any stage are offloaded."""
        return any(self.stores)

    @property
    def with_copies_in_tasks(self) -> StepTimes:
        """The same without copies, as if each microbatch travelled.

        What overlaps nothing is told as time of F and B; the rest is left out.
        """
        if not self.stores:
            return self
        alone = [not overlaps for overlaps in self.copies_overlap]

        def with_(seconds: Sequence[float], copies: Sequence[float]) -> list[float]:
            return [a + b * c for a, b, c in zip(seconds, copies, alone, strict=bool(seconds))]

        return replace(
            self,
            forward=with_(self.forward, self.stores),
            backward=with_(self.backward, self.fetches),
            input_gradient=with_(self.input_gradient, self.fetches),
            stores=(),
            fetches=(),
            copies_overlap=(),
        )

    def with_copies_of(self, other: StepTimes) -> StepTimes:
        """The same with another one's copies.

        Args:
            other: times of as many stages.
        """
        return replace(
            self,
            stores=other.stores,
            fetches=other.fetches,
            copies_overlap=other.copies_overlap,
        )

    def recompute_seconds(self, stage: int) -> float:
        """R on a stage.

        Args:
            stage: index of the stage, from 0.

        Returns:
            Seconds; 0 where the stage recomputes nothing.
        """
        return self.recompute[stage] if len(self.recompute) else 0.0

    def backward_seconds(self, stage: int, *, split: bool, recomputed: bool) -> float:
        """B on a stage.

        Args:
            stage: index of the stage, from 0.
            split: whether a W follows, so that B is the input-gradient half alone.
            recomputed: whether an R has run, so that B need not recompute.

        Returns:
            Seconds.

        Raises:
            InputError: it is split, and the times of split backward passes are not known.
        """
        if split and not self.can_split:
            raise InputError(
                "input_gradient and weight_gradient are empty; a schedule with W tasks needs them"
            )
        halves = self.input_gradient if split else self.backward
        return halves[stage] + (0.0 if recomputed else self.recompute_seconds(stage))

    def _check(self, name: str, may_be_empty: bool) -> None:
        values: Sequence[float] = getattr(self, name)
        expected = self.num_stages - (name in ("sends", "returns"))
        if len(values) != expected and not (may_be_empty and len(values) == 0):
            raise InputError(
                f"{name} has {len(values)} times; {self.num_stages} stages need {expected}"
            )
        if not all(value >= 0 and math.isfinite(value) for value in values):
            raise InputError(f"{name} is {list(values)}; times must be finite and not negative")
