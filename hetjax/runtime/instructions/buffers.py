"""Buffers: the names of the arrays that a worker holds, one class for each kind.

Names are one stage's own: the next one has another name for a value that this one sends. A step
looks them up thousands of times, so they are tuples, which hash and compare in C; the `kind` of
each keeps names of two kinds with the same numbers apart.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Parameter(NamedTuple):
    """A parameter part that the stage holds.

    Args:
        place: which of the parts that it holds.
    """

    place: int
    kind: Literal["parameter"] = "parameter"


class Gradient(NamedTuple):
    """The sum of the gradients of a parameter part, to which microbatches add theirs.

    Along the data axis it may be a partial sum, until it is reduced.

    Args:
        place: which of the parts that the stage holds.
    """

    place: int
    kind: Literal["gradient"] = "gradient"


class ReducedGradient(NamedTuple):
    """The sum of all microbatches, reduced along the data axis; where it was partial before.

    Args:
        place: which of the parts that the stage holds.
    """

    place: int
    kind: Literal["reduced_gradient"] = "reduced_gradient"


class OptimizerState(NamedTuple):
    """A part of the optimizer's state.

    Args:
        place: which of the parts that the stage holds.
    """

    place: int
    kind: Literal["optimizer_state"] = "optimizer_state"


class Offloaded(NamedTuple):
    """A buffer in the memory of the devices' hosts, which has its name again on the devices.

    Args:
        buffer: what it is there.
    """

    buffer: Offloadable
    kind: Literal["offloaded"] = "offloaded"


class UpdatedParameter(NamedTuple):
    """Rows of a held parameter part, which the stage updates.

    Args:
        place: which of the parts that it updates.
    """

    place: int
    kind: Literal["updated_parameter"] = "updated_parameter"


class UpdatedGradient(NamedTuple):
    """The gradient of rows that the stage updates, summed over all who hold them.

    Args:
        place: which of the parts that it updates.
    """

    place: int
    kind: Literal["updated_gradient"] = "updated_gradient"


class ParameterRows(NamedTuple):
    """The finest rows of a parameter that several stages hold, as one of them has them.

    Args:
        leaf: which leaf of all parameters.
        start: the first row.
        holder: the stage that has them so.
    """

    leaf: int
    start: int
    holder: int
    kind: Literal["parameter_rows"] = "parameter_rows"


class GradientRows(NamedTuple):
    """What one stage adds to the gradient of the finest rows that several stages hold.

    Args:
        leaf: which leaf of all parameters.
        start: the first row.
        holder: the stage whose summand it is.
    """

    leaf: int
    start: int
    holder: int
    kind: Literal["gradient_rows"] = "gradient_rows"


class BatchLeaf(NamedTuple):
    """A leaf of a microbatch of the batch.

    Args:
        microbatch: which microbatch.
        leaf: which leaf of the batch.
    """

    microbatch: int
    leaf: int
    kind: Literal["batch_leaf"] = "batch_leaf"


class ReceivedValue(NamedTuple):
    """A value of the program that comes from the stage before.

    Args:
        microbatch: which microbatch.
        value: its number in the traced program.
    """

    microbatch: int
    value: int
    kind: Literal["received_value"] = "received_value"


class SentValue(NamedTuple):
    """A value of the program that goes to the stage after.

    Args:
        microbatch: which microbatch.
        value: its number in the traced program.
    """

    microbatch: int
    value: int
    kind: Literal["sent_value"] = "sent_value"


class Residual(NamedTuple):
    """What a forward pass makes for the backward pass.

    Args:
        microbatch: which microbatch.
        place: which of the stage's residuals.
    """

    microbatch: int
    place: int
    kind: Literal["residual"] = "residual"


class Deferred(NamedTuple):
    """What the first half of a backward pass makes for the gradients of the weights.

    Args:
        microbatch: which microbatch.
        place: which of these values.
    """

    microbatch: int
    place: int
    kind: Literal["deferred"] = "deferred"


class ReceivedCotangent(NamedTuple):
    """The cotangent of a value that the stage sent.

    Args:
        microbatch: which microbatch.
        place: which of the values sent.
    """

    microbatch: int
    place: int
    kind: Literal["received_cotangent"] = "received_cotangent"


class SentCotangent(NamedTuple):
    """The cotangent of a value that the stage received.

    Args:
        microbatch: which microbatch.
        place: which of the values received.
    """

    microbatch: int
    place: int
    kind: Literal["sent_cotangent"] = "sent_cotangent"


class LossSeed(NamedTuple):
    """The cotangent of the summed loss, as `hetjax.pipeline.program.loss_seed` has it."""

    kind: Literal["loss_seed"] = "loss_seed"


class LossSum(NamedTuple):
    """The loss of a microbatch, summed over what it is a mean of.

    Args:
        microbatch: which microbatch.
    """

    microbatch: int
    kind: Literal["loss_sum"] = "loss_sum"


class LossCount(NamedTuple):
    """How many summands the loss of a microbatch has.

    Args:
        microbatch: which microbatch.
    """

    microbatch: int
    kind: Literal["loss_count"] = "loss_count"


class AuxSum(NamedTuple):
    """What the loss function gives beside the loss.

    Args:
        microbatch: which microbatch.
        place: which of these figures; 0 is their count.
    """

    microbatch: int
    place: int
    kind: Literal["aux_sum"] = "aux_sum"


class PipelineLoss(NamedTuple):
    """The loss of all microbatches of a later pipeline, or the number of its summands.

    Args:
        figure: which of the two.
        stage: the pipeline's last stage.
    """

    figure: Literal["sum", "count"]
    stage: int
    kind: Literal["pipeline_loss"] = "pipeline_loss"


class UpdateMessage(NamedTuple):
    """What one stage's update tells the others.

    Args:
        phase: of which phase of the update.
        sender: the stage that tells it.
        place: which array of that message.
    """

    phase: int
    sender: int
    place: int
    kind: Literal["update_message"] = "update_message"


class StepMetric(NamedTuple):
    """What a step tells of itself.

    Args:
        name: the mean loss, the global norm of the mean gradient, or its squares leaf by leaf.
    """

    name: Literal["loss", "gradient_norm", "gradient_squares"]
    kind: Literal["step_metric"] = "step_metric"


class SegmentValue(NamedTuple):
    """What one segment of a program of several members makes for a move or for a later one.

    Args:
        microbatch: of which microbatch; -1 for the update.
        program: the program.
        value: its number there.
    """

    microbatch: int
    program: str
    value: int
    kind: Literal["segment_value"] = "segment_value"


class SubmeshValue(NamedTuple):
    """What a submesh has of a value of an annotated function, all of which one process runs.

    Args:
        submesh: which of the function's submeshes.
        value: the number of the value.
    """

    submesh: int
    value: int
    kind: Literal["submesh_value"] = "submesh_value"


Offloadable = OptimizerState | BatchLeaf | ReceivedValue | Residual
"""What may wait in the memory of the devices' hosts."""

Activation = BatchLeaf | ReceivedValue | SentValue | Residual | Deferred
"""What a microbatch keeps from its forward pass to the end of its backward pass."""

ACTIVATIONS = (BatchLeaf, ReceivedValue, SentValue, Residual, Deferred)
"""The same kinds, for `isinstance`, which takes longer for a union."""

Buffer = (
    Parameter
    | Gradient
    | ReducedGradient
    | OptimizerState
    | Offloaded
    | UpdatedParameter
    | UpdatedGradient
    | ParameterRows
    | GradientRows
    | Activation
    | ReceivedCotangent
    | SentCotangent
    | LossSeed
    | LossSum
    | LossCount
    | AuxSum
    | PipelineLoss
    | UpdateMessage
    | StepMetric
    | SegmentValue
    | SubmeshValue
)
"""The name of an array that a worker holds."""

Buffers = tuple[Buffer, ...]

STEP_METRICS = StepMetric("loss"), StepMetric("gradient_norm"), StepMetric("gradient_squares")
"""What a step tells of itself, in the order in which the update returns it."""
