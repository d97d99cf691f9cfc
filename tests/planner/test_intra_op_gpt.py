"""Intra-operator sharding of GPT blocks: what it finds, and what its programs communicate."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import bench_intra_op as bench
import pytest

from hetjax.mesh import DeviceKind, Link
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.backward import differentiate
from hetjax.pipeline.stages.cutting import cut
from hetjax.planner.intra_op import StageDevices, StageSharding, Training, shard_stage
from hetjax.planner.intra_op import alike_nodes as ties
from hetjax.planner.intra_op.alike_nodes import classes_of
from hetjax.planner.intra_op.alike_nodes import tied as tied_graph
from hetjax.planner.intra_op.stage_sharding import StageProblem
from hetjax.runtime.compilation.collective_bytes import collective_bytes

KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, "made up")
LINK = Link(5e9, 1e-6)
WIDE = bench.Case(blocks=2, width=256, heads=4, sequence=64, examples=1)
NARROW = bench.Case(blocks=1, width=32, heads=2, sequence=32, examples=8)


@functools.cache
def program_of(case: bench.Case) -> Program:
    return bench.blocks_program(case)


def shard(
    case: bench.Case, memory: float = 1e12, mesh_shapes: Sequence[tuple[int, int]] | None = None
) -> StageSharding:
    found = shard_if_fits(case, memory, mesh_shapes)
    assert found is not None
    return found


def shard_if_fits(
    case: bench.Case,
    memory: float,
    mesh_shapes: Sequence[tuple[int, int]] | None = None,
    *,
    divides_state: bool = True,
) -> StageSharding | None:
    program = program_of(case)
    (stage,) = cut(program, (0, program.num_positions))
    training = Training(case.examples, 8, 1, "float32", 8.0)
    devices = StageDevices(KIND, 4, LINK, memory)
    return shard_stage(
        program,
        stage,
        devices,
        training,
        mesh_shapes=mesh_shapes,
        divides_state=divides_state,
    )


def stream(case: bench.Case, found: StageSharding) -> set[tuple[str | None, ...]]:
    """How the activations between the halves of blocks lie."""
    shape = (case.examples, case.sequence, case.width)
    avals = program_of(case).avals
    return {spec for value, spec in found.values.items() if avals[value].shape == shape}


def test_many_examples_and_small_weights_are_data_parallel():
    found = shard(NARROW)
    assert found.mesh_shape == (4, 1)
    assert found.sharding == "data"
    assert not any(any(spec) for spec in found.parameters.values())
    assert stream(NARROW, found) == {("data", None, None)}


def test_optimizer_state_and_then_parameters_are_divided_where_memory_asks_for_it():
    """First ZeRO-1, which costs nothing; then parameters too, as few as needed."""
    free = shard(NARROW)
    first = shard(NARROW, free.memory_bytes * 0.9)
    assert (first.mesh_shape, first.sharding) == ((4, 1), "state_sharded")
    assert first.seconds == pytest.approx(free.seconds)
    assert not any(any(spec) for spec in first.parameters.values())
    third = shard(NARROW, free.memory_bytes * 0.6, [(4, 1)])
    divided = [name for name, spec in third.parameters.items() if "data" in spec]
    assert 0 < len(divided) < len(third.parameters)
    assert third.memory_bytes <= free.memory_bytes * 0.6
    assert third.seconds > free.seconds


def test_a_stage_whose_state_may_not_be_divided_divides_it_not():
    memory = shard(NARROW).memory_bytes * 0.9
    assert shard(NARROW, memory, [(2, 2)]).sharding == "state_sharded"
    found = shard_if_fits(NARROW, memory, [(2, 2)], divides_state=False)
    assert found is None or found.sharding == "data"
    assert shard_if_fits(NARROW, 1e12, [(2, 2)], divides_state=False) is not None


def test_large_weights_and_few_examples_are_divided_as_megatron_does():
    found = shard(WIDE)
    assert found.mesh_shape == (1, 4)
    by_hand = bench.megatron(program_of(WIDE))
    for name, spec in found.parameters.items():
        assert tuple(filter(None, spec)) == tuple(filter(None, by_hand[name])), name
        assert all(a == b for a, b in zip(spec, by_hand[name], strict=False)), name
    assert stream(WIDE, found) == {(None, None, None)}


def test_the_stream_is_divided_along_the_sequence_where_memory_asks_for_it():
    free = shard(WIDE)
    found = shard(WIDE, free.memory_bytes * 0.98)
    assert found.mesh_shape == (1, 4)
    assert (None, "tensor", None) in stream(WIDE, found)
    assert found.memory_bytes <= free.memory_bytes * 0.98
    assert found.seconds > free.seconds
    assert found.parameters["1/mlp/up/kernel"] == (None, "tensor")


def test_a_stream_along_the_sequence_is_compiled_so():
    """Gathers beside the same sums, and at least as much less memory as the choice is made for."""
    case = bench.Case(blocks=1, width=256, heads=4, sequence=256, examples=2)
    free = shard(case, mesh_shapes=[(1, 4)])
    small = shard(case, free.memory_bytes * 0.9, [(1, 4)])
    texts, held = [], []
    for found in (free, small):
        made = bench.compiled(program_of(case), found.parameters, found.values, (1, 4))
        texts.append(made.as_text())
        held.append(made.memory_analysis().temp_size_in_bytes)
    assert stream(case, free) == {(None, None, None)}
    assert (None, "tensor", None) in stream(case, small)
    gathers, sums = (
        [len(re.findall(rf" {name}(?:-start)?\(", text)) for text in texts]
        for name in ("all-gather", "all-reduce")
    )
    assert gathers[0] == 0 < gathers[1]
    assert sums[0] == sums[1]
    assert held[0] - held[1] >= free.memory_bytes - small.memory_bytes


def test_blocks_that_are_alike_are_decided_once(monkeypatch):
    """As well as if each decided for itself."""
    deep = NARROW._replace(blocks=5, examples=1, width=64)
    tied = shard(deep, mesh_shapes=[(1, 4)])
    monkeypatch.setattr(ties, "_MOST_NODES", 10**6)
    free = shard(deep, mesh_shapes=[(1, 4)])
    assert tied.seconds == pytest.approx(free.seconds, rel=1e-6)
    program = program_of(deep)
    (stage,) = cut(program, (0, program.num_positions))
    devices, training = StageDevices(KIND, 4, LINK, 1e12), Training(1, 8, 1, "float32", 8.0)
    graph = StageProblem(program, stage, devices, training, (1, 4)).graph("data")
    classes = classes_of(graph)
    assert max(classes) + 1 < 0.7 * len(classes)
    choice = [0] * (max(classes) + 1)
    assert tied_graph(graph, classes).cost(choice) == pytest.approx(
        graph.cost([choice[each] for each in classes])
    )


def test_nothing_is_found_where_nothing_fits():
    assert shard_if_fits(WIDE, 1e3) is None


@pytest.mark.parametrize("case", [WIDE, NARROW])
def test_what_is_kept_is_what_the_backward_pass_reads(case):
    """The bytes that a device keeps, against those of the differentiated program."""
    program = program_of(case)
    (stage,) = cut(program, (0, program.num_positions))
    devices, training = (
        StageDevices(KIND, 1, LINK, 1e12),
        Training(case.examples, 8, 1, "float32", 8.0),
    )
    problem = StageProblem(program, stage, devices, training, (1, 1))
    kept = sum(
        problem.operations.size(value) for value in problem.kept if value not in problem.parts
    )
    shapes = [program.avals[program.parameters[part.leaf]] for part in stage.parameters]
    batch = [program.avals[value] for value in program.batch]
    programs = differentiate(stage, shapes, batch, [], is_last=True, cotangents_in=())
    assert kept == pytest.approx(programs.residual_bytes, rel=0.02)


def test_compiled_programs_communicate_no_more_than_megatron():
    result = bench.compare(WIDE._replace(blocks=1))
    assert 0 < result["bytes"] <= result["megatron_bytes"]


def test_bytes_of_collectives_in_every_form_of_groups():
    lines = {
        "%a = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add": 2 * 3 / 4 * 32,
        "%a = bf16[4,2]{1,0} all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}": 8,
        "%a = f32[2]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4], dimensions={0}": 24,
        "%a = (f32[4]{0}, f32[]) all-reduce(%x, %y), channel_id=1, "
        "replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true": 2 * 3 / 4 * 20,
        "%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]": 24,
        "%a = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}": 32,
        "%a = f32[8]{0} add(%x, %y)": 0,
    }
    for line, expected in lines.items():
        assert collective_bytes(line) == expected, line
    assert collective_bytes("\n".join(lines)) == sum(lines.values())
