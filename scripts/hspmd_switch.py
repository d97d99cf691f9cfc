"""What a switch sends, and what it holds: two parts of `bench_hspmd.py`."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import Plan, Trainer
from hetjax.commands.switch_report import arrays_between, switch_figures
from hetjax.configuration import read_configuration
from hetjax.configuration.make import Ingredients, make_ingredients
from hetjax.mesh import KINDS, Cluster, Link, Subcluster, SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import PipelinePlan, StagePlan
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.worker import StageWorker
from hetjax.sharding.annotation.bounds import contains, even_ends, volume
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_transfers import MovedArray, plan_switch

HETU = Path(__file__).resolve().parent.parent / "configs" / "papers" / "hetu"
BYTES_PER_PARAMETER = 6
PLAN_SECONDS = 0.1
FAR_SHARE = 0.40
LOWEST_HOLDERS = list(range(4, 16))
"""Those that the paper's rule names: what the stages of C2 lack, C1's first pipeline has, but for
its first stage, whose layers nobody else wants."""
STATES = 1.3

Row = dict[str, Any]


def switch_rows() -> list[Row]:
    """What Hetu's switch from C1 to C2 sends, by each policy.

    Returns:
        Rows with ``case``, ``bytes`` and ``bound``: at most the bound, or just that where the case
        says so. The time to plan has ``seconds`` in the place of bytes, the senders ``devices``.
    """
    ingredients = make_ingredients(read_configuration(HETU / "llama32b.gin", []))
    plans = Plan.load(HETU / "c1.json"), Plan.load(HETU / "c2.json")
    figures = switch_figures(ingredients, *plans, bytes_per_parameter=BYTES_PER_PARAMETER)
    sums = {
        policy: {
            key: sum(row[key] for row in rows.values()) for key in ("intra_node", "inter_node")
        }
        for policy, rows in figures["volumes"].items()
    }
    total = {policy: sum(each.values()) for policy, each in sums.items()}
    far = sums["min_rank"]["inter_node"]
    rows = [
        _row("min_rank, inside nodes (just)", sums["min_rank"]["intra_node"], 0),
        _row("min_rank, between nodes (just)", far, total["fused"]),
        _row("unfused, between nodes", sums["unfused"]["inter_node"], FAR_SHARE * far),
        _row("fused, between nodes", sums["fused"]["inter_node"], FAR_SHARE * far),
        _row("fused, all (just)", total["fused"], total["min_rank"]),
        _row(
            "fused, busiest sender between nodes",
            figures["busiest"]["fused"],
            _least_busiest(ingredients, *plans),
        ),
    ]
    senders = [int(device) for device in figures["volumes"]["min_rank"]]
    return [
        *rows,
        {"case": "min_rank, senders (just)", "devices": senders, "bound": LOWEST_HOLDERS},
        {"case": "time to plan", "seconds": figures["plan_seconds"], "bound": PLAN_SECONDS},
    ]


def _row(case: str, num_bytes: float, bound: float) -> Row:
    return {"case": case, "bytes": num_bytes, "bound": bound}


def _least_busiest(ingredients: Ingredients, source: Plan, destination: Plan) -> int:
    """What the busiest sender must send between nodes: what only it has left, wanted elsewhere."""
    network, lost = Network.of(source.cluster), set(destination.lost_devices)
    arrays = arrays_between(ingredients, source, destination, BYTES_PER_PARAMETER)
    must: dict[int, int] = {}
    for phase in plan_switch(arrays, network, policy="min_rank", lost=lost).phases:
        for i, bounds, sender, receiver in phase:
            owners = _owners(arrays[i], bounds) - lost
            if owners == {sender} and network.node(sender) != network.node(receiver):
                must[sender] = must.get(sender, 0) + volume(bounds) * arrays[i].itemsize
    return max(must.values())


def _owners(array: MovedArray, bounds: Any) -> set[int]:
    return {shard.device for shard in array.before if contains(shard.bounds, bounds)}


def live_bytes() -> Counter[Any]:
    """The bytes on each device of all buffers of all live arrays, each buffer counted once."""
    sizes: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            key = shard.device, shard.data.unsafe_buffer_pointer()
            sizes[key] = max(sizes.get(key, 0), shard.data.nbytes)
    found: Counter[Any] = Counter()
    for (device, _), size in sizes.items():
        found[device] += size
    return found


@contextmanager
def moments_of_a_switch() -> Iterator[list[Counter[Any]]]:
    """Note the live bytes whenever an array has been put on a device, or made of such.

    Until the state is there: then workers make the sums of gradients that they train with.
    """
    found: list[Counter[Any]] = []
    restore, is_moving = StageWorker.restore, True

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            array = make(*arguments, **options)
            if is_moving:
                found.append(live_bytes())
            return array

        return made

    def restored(worker: StageWorker, state: StageState) -> None:
        nonlocal is_moving
        if is_moving:
            found.append(live_bytes())
        is_moving = False
        restore(worker, state)

    put, make = jax.device_put, jax.make_array_from_single_device_arrays
    with (
        mock.patch.object(jax, "device_put", watched(put)),
        mock.patch.object(jax, "make_array_from_single_device_arrays", watched(make)),
        mock.patch.object(StageWorker, "restore", restored),
    ):
        yield found


class SwitchCase(NamedTuple):
    """Two plans for one model, between which a state is switched."""

    name: str
    source: Plan
    destination: Plan


WIDTH, DEPTH, BATCH = 256, 12, 24
_LINK = Link(1e10, 1e-6)
CLUSTER = Cluster(
    "two nodes of four", (Subcluster("cpu", KINDS["T4"], 2, 4, _LINK, Link(1e9, 1e-5)),), ()
)


def loss(weights: Any, batch: jax.Array) -> jax.Array:
    """A deep perceptron, half of whose blocks are stacked and scanned over."""
    x = batch
    for up, down in weights["blocks"]:
        x = x + jnp.tanh(x @ up) @ down
    x, _ = jax.lax.scan(
        lambda x, pair: (x + jnp.tanh(x @ pair["up"]) @ pair["down"], None), x, weights["stacked"]
    )
    return jnp.mean(x**2)


def initial_weights() -> Any:
    """Its parameters."""
    rng = np.random.default_rng(0)
    half = DEPTH // 2

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    return {
        "blocks": [(draw(WIDTH, 2 * WIDTH), draw(2 * WIDTH, WIDTH)) for _ in range(half)],
        "stacked": {"up": draw(half, WIDTH, 2 * WIDTH), "down": draw(half, 2 * WIDTH, WIDTH)},
    }


def switch_cases() -> list[SwitchCase]:
    """Switches to other cuts, other devices, another sharding, and from two pipelines to one."""
    program = trace(loss, initial_weights(), jax.ShapeDtypeStruct((1, WIDTH), np.float32))
    positions = tuple(range(program.num_positions + 1))

    def pipeline(
        first: int, widths: Sequence[int], size: int, *, of: int = 1, rule: str = "data"
    ) -> PipelinePlan:
        """Stages of so many devices each, one of so many pipelines that share the batch."""
        ends = even_ends(program.num_positions, len(widths))
        stages, start = [], first
        for layers, width in zip(itertools.pairwise(ends), widths, strict=True):
            stages.append(StagePlan.on(layers, SubMesh("cpu", start, (1, width)), (width, 1), rule))
            start += width
        microbatches = BATCH // size // of
        schedule = one_f_one_b(len(widths), microbatches)
        return PipelinePlan(tuple(stages), microbatches, size, schedule)

    def plan(*pipelines: PipelinePlan, **options: Any) -> Plan:
        return Plan(program.fingerprint, positions, CLUSTER, pipelines, **options)

    two, eight = plan(pipeline(0, [4, 4], 4)), plan(pipeline(0, [1] * 8, 4))
    back = replace(two.pipeline, stages=_swapped(two.pipeline.stages))
    sharded = plan(pipeline(0, [4, 4], 4, rule="fully_sharded"))
    both = plan(pipeline(0, [2, 2], 2, of=2), pipeline(4, [4], 4, of=2))
    alone = plan(pipeline(4, [4], 4), lost_devices=(0, 1, 2, 3))
    return [
        SwitchCase("two stages to eight", two, eight),
        SwitchCase("eight stages to two", eight, two),
        SwitchCase("two stages change places", two, plan(back)),
        SwitchCase("whole to fully sharded", two, sharded),
        SwitchCase("fully sharded to whole", sharded, two),
        SwitchCase("two pipelines to one, without the devices of the other", both, alone),
    ]


def _swapped(stages: Sequence[StagePlan]) -> tuple[StagePlan, ...]:
    pairs = zip(stages, reversed(stages), strict=True)
    return tuple(replace(stage, members=other.members) for stage, other in pairs)


def memory_rows() -> list[Row]:
    """What switches on this process's devices hold at their fullest moment.

    Returns:
        Rows with ``case``, ``bytes`` and ``bound``. A state is what devices hold of parameters and
        optimizer state under either plan, whichever is more; ``fullest_device`` is, of all devices,
        the most in states of its own.
    """
    return [memory_row(case) for case in switch_cases()]


def memory_row(case: SwitchCase) -> Row:
    """The row of one case; see `memory_rows`."""
    batch = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)
    weights = initial_weights()
    gc.collect()
    others = live_bytes()
    with Trainer(case.source, loss, weights, optax.adamw(1e-3), batch) as trainer:
        trainer.train_step(batch)
        before, held = _state_bytes(trainer), _leaves(trainer)
        with moments_of_a_switch() as moments:
            trainer.switch(case.destination)
        after = _state_bytes(trainer)
        equal = all(map(np.array_equal, held, _leaves(trainer)))
    assert equal, case.name
    own = before | after
    peaks = [moment - others for moment in moments]
    state = max(before.total(), after.total())
    peak = max(each.total() for each in peaks)
    return {
        "case": case.name,
        "bytes": peak,
        "bound": STATES * state,
        "states": peak / state,
        "fullest_device": max(each[device] / own[device] for each in peaks for device in each),
        "bits_equal": equal,
    }


def _states(trainer: Trainer) -> list[StageState]:
    executor = trainer._executor
    assert isinstance(executor, LocalExecutor)
    return [worker.state() for worker in executor.workers]


def _state_bytes(trainer: Trainer) -> Counter[Any]:
    """The bytes on each device of parameters and optimizer state."""
    found: Counter[Any] = Counter()
    for state in _states(trainer):
        for array in (*state.parameters, *state.optimizer):
            for shard in array.addressable_shards:
                found[shard.device] += shard.data.nbytes
    return found


def _leaves(trainer: Trainer) -> list[np.ndarray]:
    """The whole training state, of the first stages that hold it, in an order of no plan."""
    pipelines = trainer._placement.pipelines
    shapes = (*pipelines.parameter_shapes, *pipelines.state_shapes)
    first, found = len(pipelines.parameter_shapes), [np.zeros(s.shape, s.dtype) for s in shapes]
    states = zip(_states(trainer), pipelines.stages, pipelines.updates, strict=True)
    for state, stage, update in reversed(list(states)):
        parameters = ((part.leaf, part) for part in stage.parameters)
        optimizer = ((first + part.leaf, part) for part in update.state)
        arrays = (*state.parameters, *state.optimizer)
        for (leaf, part), array in zip((*parameters, *optimizer), arrays, strict=True):
            rows = ... if part.stop is None else slice(part.start, part.stop)
            found[leaf][rows] = np.asarray(array)
    return found
