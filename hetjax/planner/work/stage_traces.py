"""The traces of a program's runs: made, or derived from those of two other numbers of examples."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import Stage, cut
from hetjax.pipeline.stages.resized import Between, SizedStage
from hetjax.pipeline.stages.traced_stage import TracedStage, trace_stage
from hetjax.planner.work.run_structure import Inputs, inputs_of
from hetjax.planner.work.stage_work import Traces


@dataclass(frozen=True, eq=False)
class StageTraces:
    """Traces of a program's runs, each made once.

    Args:
        program: the traced loss function.
    """

    program: Program
    _cuts: dict[tuple[int, ...], list[tuple[Stage, Inputs]]] = field(default_factory=dict)
    _made: dict[Hashable, TracedStage] = field(default_factory=dict)

    def of(self, boundaries: tuple[int, ...], index: int, seeds: tuple[int, ...]) -> TracedStage:
        """The trace of a run; see `hetjax.planner.work.stage_work.Traces`."""
        key = boundaries, index, seeds
        if key not in self._made:
            if boundaries not in self._cuts:
                runs = cut(self.program, boundaries)
                inputs = inputs_of(self.program, runs)
                self._cuts[boundaries] = list(zip(runs, inputs, strict=True))
            run, inputs = self._cuts[boundaries][index]
            self._made[key] = trace_stage(run, *inputs, seeds)
        return self._made[key]


@dataclass(frozen=True, eq=False)
class TwoTraces:
    """Traces of a program's runs at two numbers of examples.

    Args:
        first: those of fewer examples.
        second: those of more.
    """

    first: Traces
    second: Traces
    _known: dict[Hashable, SizedStage] = field(default_factory=dict)

    def at(self, between: Between) -> ResizedTraces:
        """The traces at a number of examples between these."""
        return ResizedTraces(self, between)

    def of(self, boundaries: tuple[int, ...], index: int, seeds: tuple[int, ...]) -> SizedStage:
        """Both traces of a run.

        Raises:
            UnlikeError: they differ in more than sizes.
        """
        key = boundaries, index, seeds
        if key not in self._known:
            self._known[key] = SizedStage(self.first.of(*key), self.second.of(*key))
        return self._known[key]


@dataclass(frozen=True, eq=False)
class ResizedTraces:
    """Traces that are derived from those of two other numbers of examples.

    Args:
        known: those.
        between: which number these are of.
    """

    known: TwoTraces
    between: Between

    def of(self, boundaries: tuple[int, ...], index: int, seeds: tuple[int, ...]) -> TracedStage:
        """The trace of a run; see `hetjax.planner.work.stage_work.Traces`."""
        return self.known.of(boundaries, index, seeds).at(self.between)
