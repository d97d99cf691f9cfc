"""A program as a chain of modules, each distinct one traced once: forward and backward pass."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from hetjax.pipeline.program.step_program import StepProgram
from hetjax.pipeline.program.temporaries import HeldLine, Temporaries
from hetjax.pipeline.program.traced_program import Operand, Program, num_bytes
from hetjax.pipeline.stages.cutting import ParameterPart, Stage
from hetjax.pipeline.stages.traced_modules import modules_of, trace_module
from hetjax.pipeline.stages.traced_stage import TracedPasses, TracedStage, halve
from hetjax.planner.work.run_structure import Inputs, inputs_of, structure_of


@dataclass(frozen=True, eq=False)
class PassHeld:
    """What a pass of a module holds beside parameters and what is kept.

    Args:
        crossing: the values that it gets from other modules and gives them.
        lines: what its lines hold.
        lines_on_cpu: the same of a program that is compiled for CPUs.
    """

    crossing: frozenset[int]
    lines: tuple[HeldLine, ...]
    lines_on_cpu: tuple[HeldLine, ...]


@dataclass(frozen=True, eq=False)
class ModuleTrace:
    """The trace of modules that are alike.

    Args:
        traced: forward and backward pass of one of them.
        forward: the numbers of its equations of the forward pass.
        returned: the cotangents that it gives back, by the place of the received value.
        residuals: the values that the forward pass keeps for the backward pass.
        kept_inputs: the values received that the backward pass reads.
        is_last: whether it computes the loss.
        passes: its forward and its backward pass.
    """

    traced: TracedStage
    forward: frozenset[int]
    returned: dict[int, Operand]
    residuals: frozenset[int]
    kept_inputs: frozenset[int]
    is_last: bool
    passes: TracedPasses

    @cached_property
    def passes_held(self) -> tuple[PassHeld, PassHeld]:
        """What the forward and the backward pass hold."""
        traced, passes = self.traced, self.passes
        inputs = (traced.parameters, traced.batch, traced.received)
        avals, kept = traced.flat.avals, {*self.residuals, *self.kept_inputs, *traced.parameters}
        forward = StepProgram(passes.forward, inputs, (traced.sent, passes.residuals), avals)
        backward = StepProgram(
            passes.backward,
            (*inputs, passes.residuals, traced.cotangents),
            (passes.returned,),
            avals,
            summands=traced.trained_gradients,
        )

        def held(program: StepProgram, values: Iterable[Operand]) -> PassHeld:
            crossing = frozenset(v for v in values if isinstance(v, int) and v not in kept)
            orders = (Temporaries(program, on_cpu=way).lines() for way in (False, True))
            return PassHeld(crossing, *orders)

        return (
            held(forward, (*traced.received, *traced.sent)),
            held(backward, (*traced.cotangents, *passes.returned)),
        )

    @cached_property
    def num_bytes(self) -> tuple[int, ...]:
        """The size of each value in bytes."""
        return tuple(map(num_bytes, self.traced.flat.avals))

    def has_anyway(self, place: int) -> bool:
        """Whether what it sends at a place is there for its backward pass, too.

        Args:
            place: the place.
        """
        traced = self.traced
        held = {*self.residuals, *self.kept_inputs, *traced.parameters, *traced.batch}
        operand = traced.sent[place]
        return not isinstance(operand, int) or operand in held


@dataclass(frozen=True)
class Module:
    """One module of a chain.

    Args:
        start: its first position in the program.
        stop: the one after its last.
        kind: the number of its trace.
        parameters: the parameter parts that it has.
        batch: the batch leaves that it reads.
        receives: the values that it gets from the module before.
        sends: the values that it gives to the module after.
    """

    start: int
    stop: int
    kind: int
    parameters: tuple[ParameterPart, ...]
    batch: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ModuleChain:
    """The modules of a program, or of a stage of it.

    Args:
        program: the traced loss function.
        modules: the modules, in order.
        kinds: the distinct traces.
    """

    program: Program
    modules: tuple[Module, ...]
    kinds: tuple[ModuleTrace, ...]

    @cached_property
    def shared_parts(self) -> frozenset[ParameterPart]:
        """Parameter parts that several modules have."""
        seen: set[ParameterPart] = set()
        twice: set[ParameterPart] = set()
        for module in self.modules:
            twice.update(part for part in module.parameters if part in seen)
            seen.update(module.parameters)
        return frozenset(twice)

    @cached_property
    def new_inputs(self) -> tuple[frozenset[int], ...]:
        """For each module the values received that are kept for its backward pass.

        But those that the module before has anyway; of the first module none.
        """
        found = [frozenset[int]()] * bool(self.modules)
        for before, module in itertools.pairwise(self.modules):
            trace, sender = self.kinds[module.kind], self.kinds[before.kind]
            pairs = zip(trace.traced.received, module.receives, strict=True)
            found.append(
                frozenset(
                    value
                    for value, received in pairs
                    if value in trace.kept_inputs
                    and not sender.has_anyway(before.sends.index(received))
                )
            )
        return tuple(found)

    @cached_property
    def held_inputs(self) -> tuple[frozenset[int], ...]:
        """For each trace the `new_inputs` of most of its modules."""
        found: list[Counter[frozenset[int]]] = [Counter() for _ in self.kinds]
        for module, inputs in zip(self.modules[1:], self.new_inputs[1:], strict=True):
            found[module.kind][inputs] += 1
        return tuple(each.most_common(1)[0][0] if each else frozenset[int]() for each in found)


MOST_CROSSING = 2
"""How many values may cross the edge between two modules; where more do, they are one."""


def narrow_edges(program: Program, edges: Sequence[int]) -> list[int]:
    """Those of some edges that few values cross.

    Args:
        program: the traced loss function.
        edges: positions where modules may begin, and the stage's end.
    """
    runs = modules_of(program, edges)
    pairs = zip(edges, runs, strict=False)
    narrow = [start for start, run in pairs if len(run.receives) <= MOST_CROSSING]
    return sorted({edges[0], *narrow, edges[-1]})


@dataclass(eq=False)
class ModuleTraces:
    """Traces of a program's modules, each made once; they do not keep the program."""

    _known: dict[Hashable, int] = field(default_factory=dict)
    _traces: list[ModuleTrace] = field(default_factory=list)

    def chain(self, program: Program, edges: Sequence[int], seeds: tuple[int, ...]) -> ModuleChain:
        """The modules of a stage.

        Args:
            program: the traced loss function, always the same.
            edges: the positions where the stage's modules begin, and its end.
            seeds: which of its outputs have a cotangent, by place.

        Returns:
            The chain.
        """
        runs = modules_of(program, edges)
        modules: list[Module] = []
        shapes = inputs_of(program, runs)
        for place in reversed(range(len(runs))):
            run = runs[place]
            alike = structure_of(program, run)
            kind = self._kind(run, alike, shapes[place], seeds)
            start, stop = edges[place], edges[place + 1]
            held = (run.parameters, run.batch, run.receives, run.sends)
            modules.append(Module(start, stop, kind, *held))
            seeds = tuple(self._traces[kind].returned)
        return _numbered(program, modules[::-1], self._traces)

    def _kind(self, run: Stage, alike: Hashable, inputs: Inputs, seeds: tuple[int, ...]) -> int:
        is_last = not run.sends
        shapes = tuple(tuple((s.shape, str(s.dtype)) for s in group) for group in inputs)
        key = alike, shapes, seeds, is_last
        if key not in self._known:
            traced = trace_module(run, inputs, seeds)
            passes = halve(traced, is_last=is_last)
            before = set(passes.before)
            forward = frozenset(i for i, step in enumerate(traced.flat.steps) if step in before)
            returned = dict(zip(passes.returned_places, passes.returned, strict=True))
            self._known[key] = len(self._traces)
            kept = frozenset(passes.residuals)
            read = {value for step in passes.backward for value in step.values()}
            taken = frozenset(read.intersection(traced.received))
            self._traces.append(
                ModuleTrace(traced, forward, returned, kept, taken, is_last, passes)
            )
        return self._known[key]


def _numbered(
    program: Program, modules: Sequence[Module], traces: Sequence[ModuleTrace]
) -> ModuleChain:
    """A chain with those traces alone that its modules have."""
    kinds = sorted({module.kind for module in modules})
    number = {kind: place for place, kind in enumerate(kinds)}
    renamed = tuple(replace(module, kind=number[module.kind]) for module in modules)
    return ModuleChain(program, renamed, tuple(traces[kind] for kind in kinds))


_known: WeakKeyDictionary[Program, ModuleTraces] = WeakKeyDictionary()
"""The traces of programs that were looked at before: a plan is found, predicted and shown."""


def chain_of(program: Program, edges: Sequence[int]) -> ModuleChain:
    """The modules of a stage that computes the loss, with the traces that are known.

    Args:
        program: the traced loss function.
        edges: the positions where its modules begin, and the program's end.
    """
    return _known.setdefault(program, ModuleTraces()).chain(program, edges, (0,))
