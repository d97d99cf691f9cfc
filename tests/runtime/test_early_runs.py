"""Weight gradients in the place of waits: never out of the order of the sums."""

from hetjax.runtime.instructions.buffers import Deferred, Gradient, ReceivedValue
from hetjax.runtime.instructions.instruction import (
    Free,
    Instruction,
    Receive,
    Route,
    RouteKind,
    Run,
    Tag,
)
from hetjax.runtime.workers.early_runs import EarlyRuns

DEFERRED = [Deferred(m, 0) for m in range(3)]
WAIT = Receive(Tag(Route(RouteKind.VALUE, 0, 1), 9), (ReceivedValue(9, 0),))


def weight_gradient(microbatch: int) -> Run:
    return Run("weight_gradient", ((DEFERRED[microbatch],),), (Gradient(0),), microbatch)


def whole(microbatch: int) -> Run:
    return Run("backward", (), (Gradient(0),), microbatch)


def test_the_next_weight_gradient_runs_where_its_inputs_are_there():
    body: list[Instruction] = [WAIT, weight_gradient(0), Free((DEFERRED[0],)), weight_gradient(1)]
    early = EarlyRuns(body)
    assert early.next_after(0, set()) is None
    assert early.next_after(0, {DEFERRED[0]}) == body[1]
    early.mark()
    assert early.has_run(1)
    assert early.next_after(0, {DEFERRED[0]}) is None
    assert early.next_after(0, set(DEFERRED)) == body[3]
    early.mark()
    assert early.next_after(0, set(DEFERRED)) is None


def test_no_weight_gradient_passes_a_whole_backward_pass():
    early = EarlyRuns([WAIT, whole(0), weight_gradient(1)])
    assert early.next_after(0, set(DEFERRED)) is None
    assert early.next_after(2, set(DEFERRED)) == weight_gradient(1)


def test_what_stands_before_the_wait_is_not_run_again():
    early = EarlyRuns([weight_gradient(0), WAIT, weight_gradient(1)])
    assert early.next_after(1, set(DEFERRED)) == weight_gradient(1)
    assert not early.has_run(0)
