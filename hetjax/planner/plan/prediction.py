"""What is expected of a plan, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from hetjax.file_content import LEFT_OUT_EMPTY
from hetjax.pipeline.timeline.streamed_update import GroupTimes
from hetjax.pipeline.timeline.times import StepTimes


@dataclass(frozen=True)
class MemberPrediction:
    """What the cost model expects of one member of a stage; times in seconds, of one microbatch.

    Args:
        forward_seconds: the forward pass, without what it waits for others.
        backward_seconds: the backward pass and the recomputation, likewise.
        state_bytes: as of `StagePrediction`, and the following too, of the member's devices.
        working_bytes: as there.
        activation_bytes: as there.
        recomputed_bytes: as there.
        deferred_bytes: as there.
        memory_bytes: as there.
        memory_limit_bytes: as there.
        update_bytes: as there, of a member that offloads optimizer state.
        host_bytes: as there.
        host_limit_bytes: as there.
        offloaded_bytes: as there.
        host_activation_bytes: as there.
    """

    forward_seconds: float
    backward_seconds: float
    state_bytes: int
    working_bytes: int
    activation_bytes: int
    recomputed_bytes: int
    deferred_bytes: int
    memory_bytes: int
    memory_limit_bytes: int
    update_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    host_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    host_limit_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    offloaded_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    host_activation_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0

    @property
    def all_host_bytes(self) -> int:
        """All that one device has in its host's memory."""
        return self.host_bytes + self.host_activation_bytes


@dataclass(frozen=True)
class StagePrediction:
    """What the cost model expects of a stage; times in seconds, of one microbatch.

    Args:
        forward_seconds: the forward pass.
        backward_seconds: the whole backward pass, without recomputation.
        recompute_seconds: the recomputation; 0 where nothing is recomputed.
        input_gradient_seconds: the first half of a split backward pass.
        weight_gradient_seconds: its second half.
        update_seconds: the optimizer's update, once a step.
        exchange_seconds: of that, what its devices exchange of their gradients and new parameters,
            for which they wait for no other stage.
        sharing_seconds: exchanging what other stages hold too, before it: gradients of parameters
            that are used in several stages or held by several pipelines, and their new values.
        communication_seconds: sending one microbatch's activations to the next stage (Harp's c_i).
        return_seconds: sending their gradients back.
        state_bytes: parameters, gradients and optimizer state on one device.
        working_bytes: what a task needs while it runs, on one device.
        activation_bytes: what one microbatch keeps for its backward pass, on one device.
        recomputed_bytes: what a recomputation adds to that until the backward pass.
        deferred_bytes: what one microbatch keeps between the halves of its backward pass.
        memory_bytes: all of that at the schedule's fullest moment, on one device; of stages that
            share devices, what all of them hold there.
        memory_limit_bytes: what one device has.
        bubble: share of the step in which the stage, or its devices, computes nothing.
        update_bytes: what the update needs beside the state, on one device: offloaded optimizer
            state that is on its way; on CPUs copies of what it makes.
        host_bytes: offloaded optimizer state of one device, in its host's memory.
        host_limit_bytes: a device's share of that memory; 0 where nothing is offloaded.
        update_groups: of an update whose state is offloaded, what each group takes.
        copies_overlap: whether copies to and from the hosts' memory run beside computation.
        offloaded_bytes: of `activation_bytes`, what waits in the hosts' memory.
        store_seconds: its way there.
        fetch_seconds: its way back.
        host_activation_bytes: what microbatches hold there at the schedule's fullest moment, beside
            `host_bytes`.
        members: where it has several, each by itself. The stage takes as long as the slowest of
            them and what they exchange; its bytes are those of the one that is the fullest.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    update_seconds: float
    communication_seconds: float
    return_seconds: float
    state_bytes: int
    working_bytes: int
    activation_bytes: int
    recomputed_bytes: int
    deferred_bytes: int
    memory_bytes: int
    memory_limit_bytes: int
    bubble: float
    sharing_seconds: float = 0.0
    exchange_seconds: Annotated[float, LEFT_OUT_EMPTY] = 0.0
    update_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    host_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    host_limit_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    update_groups: Annotated[tuple[GroupTimes, ...], LEFT_OUT_EMPTY] = ()
    copies_overlap: Annotated[bool, LEFT_OUT_EMPTY] = False
    offloaded_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    store_seconds: Annotated[float, LEFT_OUT_EMPTY] = 0.0
    fetch_seconds: Annotated[float, LEFT_OUT_EMPTY] = 0.0
    host_activation_bytes: Annotated[int, LEFT_OUT_EMPTY] = 0
    members: Annotated[tuple[MemberPrediction, ...], LEFT_OUT_EMPTY] = ()

    @classmethod
    def of_members(
        cls,
        members: tuple[MemberPrediction, ...],
        *,
        forward_seconds: float,
        backward_seconds: float,
        recompute_seconds: float,
        input_gradient_seconds: float,
        weight_gradient_seconds: float,
        update_seconds: float,
        exchange_seconds: float = 0.0,
    ) -> StagePrediction:
        """A stage of these members, before what it sends and what its devices hold are known.

        Args:
            members: what is predicted of each.
            forward_seconds: as of the stage, and the following too.
            backward_seconds: as there.
            recompute_seconds: as there.
            input_gradient_seconds: as there.
            weight_gradient_seconds: as there.
            update_seconds: as there.
            exchange_seconds: as there.

        Returns:
            The prediction; what is not yet known of it is 0.
        """
        return cls(
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            recompute_seconds=recompute_seconds,
            input_gradient_seconds=input_gradient_seconds,
            weight_gradient_seconds=weight_gradient_seconds,
            update_seconds=update_seconds,
            exchange_seconds=exchange_seconds,
            communication_seconds=0.0,
            return_seconds=0.0,
            state_bytes=0,
            working_bytes=0,
            activation_bytes=0,
            recomputed_bytes=0,
            deferred_bytes=0,
            memory_bytes=0,
            memory_limit_bytes=0,
            bubble=0.0,
            members=members,
        )

    @property
    def compute_seconds(self) -> float:
        """All that the stage computes for one microbatch (Harp's t_i)."""
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds

    @property
    def all_host_bytes(self) -> int:
        """All that one device has in its host's memory."""
        return self.host_bytes + self.host_activation_bytes

    @property
    def fits_host(self) -> bool:
        """Whether that is not more than its share."""
        return self.all_host_bytes <= self.host_limit_bytes

    @property
    def fits(self) -> bool:
        """Whether a device, and its host, has the memory that the stage needs."""
        return self.fits_host and self.memory_bytes <= self.memory_limit_bytes


Held = StagePrediction | MemberPrediction
"""Whatever says what its devices hold."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of a plan.

    Args:
        step_time: seconds a step.
        lower_bound: seconds that no schedule of these stages can go below.
        stages: each stage, those of one pipeline after those of the other.
    """

    step_time: float
    lower_bound: float
    stages: tuple[StagePrediction, ...]

    @property
    def sharing_seconds(self) -> float:
        """Seconds of the step in which stages exchange what several of them hold."""
        return max((stage.sharing_seconds for stage in self.stages), default=0.0)

    @property
    def fits(self) -> bool:
        """Whether every stage has the memory that it needs."""
        return all(stage.fits for stage in self.stages)

    @property
    def times(self) -> StepTimes:
        """The times of the step's tasks and transfers, of a plan of one pipeline."""
        return times_of(self.stages)


def times_of(stages: Sequence[StagePrediction]) -> StepTimes:
    """The times of one pipeline's tasks and transfers.

    Args:
        stages: what is predicted of its stages.

    Returns:
        The times.
    """
    # Of a stage of several members, members alone say how many bytes travel.
    offloads = any(stage.store_seconds > 0 for stage in stages)
    return StepTimes(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        sends=[stage.communication_seconds for stage in stages[:-1]],
        returns=[stage.return_seconds for stage in stages[1:]],
        update=[stage.update_seconds for stage in stages],
        input_gradient=[stage.input_gradient_seconds for stage in stages],
        weight_gradient=[stage.weight_gradient_seconds for stage in stages],
        recompute=[stage.recompute_seconds for stage in stages],
        stores=[stage.store_seconds for stage in stages] if offloads else (),
        fetches=[stage.fetch_seconds for stage in stages] if offloads else (),
        copies_overlap=[stage.copies_overlap for stage in stages] if offloads else (),
    )
