"""What came of an alignment: of each kind its verdict, and all that it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from hetjax.alignment.comparison import Comparison, mean_relative_error
from hetjax.alignment.devices import KindDevice, device_text
from hetjax.alignment.operators import OperatorProgram
from hetjax.alignment.training import CRITERION, KindTraining, Overflow
from hetjax.limits import Text


@dataclass(frozen=True)
class NamedKind:
    """A kind as a report names it.

    Args:
        name: the kind's name.
        device: the device that it had.
        products: what operands of its products are rounded to.
    """

    name: Text
    device: Text
    products: Text


def named_kind(kind: KindDevice) -> NamedKind:
    """How a report names a kind with its device."""
    return NamedKind(kind.kind.name, device_text(kind.device), kind.kind.products or "its own")


@dataclass(frozen=True)
class KindVerdict:
    """How one kind compares with the reference.

    Args:
        kind: the kind.
        named: how many operators are off by more than rounding.
        largest_error: the largest error of an operator; None where none was compared.
        overflows: how many operators give what is not finite where the reference's is.
        loss_error: the mean relative error of its losses; None where there was no training.
        steps: over how many steps.
        asked_steps: how many were asked for.
        overflow: the first step in which something was not finite.
        are_losses_aligned: whether they meet the paper's criterion and nothing overflowed; None
            where there was no training.
    """

    kind: NamedKind
    named: int
    largest_error: float | None
    overflows: int
    loss_error: float | None
    steps: int
    asked_steps: int
    overflow: Overflow | None
    are_losses_aligned: bool | None

    @property
    def are_operators_aligned(self) -> bool | None:
        """Whether no operator is named; None where none was compared."""
        return None if self.largest_error is None else not self.named


@dataclass(frozen=True)
class CaptureSize:
    """What a capture holds.

    Args:
        operators: how many operators.
        runs: how many runs of them; one in a loop has several.
        values: how many values, each counted once.
        num_bytes: their bytes.
    """

    operators: int
    runs: int
    values: int
    num_bytes: int


@dataclass(frozen=True)
class Alignment:
    """What came of an alignment.

    Args:
        title: of which model.
        program: its forward and backward pass.
        reference: the kind that the others are compared with, or the capture.
        kinds: the others.
        comparison: of their operators.
        trainings: one for each kind, the reference's first; empty where there was none.
        asked_steps: how many steps of them were asked for.
        capture: what was captured, or replayed.
    """

    title: str
    program: OperatorProgram
    reference: NamedKind
    kinds: tuple[NamedKind, ...]
    comparison: Comparison
    trainings: tuple[KindTraining, ...] = ()
    asked_steps: int = 0
    capture: CaptureSize | None = None

    @property
    def verdicts(self) -> list[KindVerdict]:
        """One for each kind but the reference."""
        return [self._verdict(each) for each in self.kinds]

    def training(self, kind: str) -> KindTraining | None:
        """The training of a kind that is compared; None where there was none."""
        return next((each for each in self.trainings[1:] if each.kind == kind), None)

    def _verdict(self, kind: NamedKind) -> KindVerdict:
        ranked = self.comparison.ranked(kind.name)
        named, overflows = self.comparison.named(kind.name), sum(d.is_overflow for d in ranked)
        training, error, steps = self.training(kind.name), None, 0
        overflow = None
        if training is not None:
            pairs = list(zip(training.losses, self.trainings[0].losses, strict=False))
            steps, overflow = len(pairs), training.overflow
            error = mean_relative_error(*zip(*pairs, strict=True)) if pairs else None
        fine = None
        if training is not None:
            # Beyond what is not finite there is nothing to compare with.
            fine = self.trainings[0].overflow is None and _is_fine(error, overflow)
        return KindVerdict(
            kind,
            len(named),
            ranked[0].error if ranked else None,
            overflows,
            error,
            steps,
            self.asked_steps,
            overflow,
            fine,
        )


def _is_fine(error: float | None, overflow: Overflow | None) -> bool:
    return overflow is None and error is not None and error < CRITERION
