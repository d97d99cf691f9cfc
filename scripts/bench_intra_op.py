"""Measures intra-operator sharding: bytes of its compiled programs, and seconds of its solver.

For some sizes of GPT block, the forward and backward pass of one microbatch is compiled for four
CPU devices twice: as the integer program would have it, and as Megatron divides a block by hand
(queries, keys, values and the first half of the feed-forward by columns, the rest by rows). What
the collectives of either program move is read off its text; the ratio is ours over Megatron's. The
last figures are the solver's, for blocks of the size of Harp's GPT-2.6B, on eight devices.

python scripts/bench_intra_op.py
python scripts/bench_intra_op.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

DEVICES = 4


class Case(NamedTuple):
    """The size of some GPT blocks, and of a microbatch.

    Args:
        blocks: Transformer blocks.
        width: size of the residual stream.
        heads: attention heads.
        sequence: positions of an example.
        examples: examples in a microbatch.
    """

    blocks: int
    width: int
    heads: int
    sequence: int
    examples: int


CASES = (
    Case(1, 256, 4, 64, 1),
    Case(1, 256, 4, 64, 4),
    Case(2, 512, 8, 128, 1),
    Case(1, 512, 8, 512, 2),
)
QUICK = (Case(1, 256, 4, 64, 1),)
LARGE = Case(1, 2560, 32, 1024, 8)
"""GPT-2.6B's width and heads, one block."""


def blocks_program(case: Case) -> Any:
    """Blocks of a GPT as a program, from the residual stream to a scalar."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from hetjax.models.gpt import GPTBlock, GPTConfig
    from hetjax.pipeline.program.tracing import trace

    config = GPTConfig(
        vocabulary=2,
        blocks=case.blocks,
        width=case.width,
        heads=case.heads,
        sequence=case.sequence,
    )

    def make() -> nnx.List:
        rngs = nnx.Rngs(0)
        return nnx.List([GPTBlock(config, rngs=rngs) for _ in range(case.blocks)])

    graph, state = nnx.split(nnx.eval_shape(make))

    def loss(parameters: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        for block in nnx.merge(graph, parameters):
            x, _ = block(x, None, 0)
        return jnp.sum(x**2), jnp.float32(1)

    x = jax.ShapeDtypeStruct((case.examples, case.sequence, case.width), jnp.float32)
    return trace(loss, nnx.to_pure_dict(state), x)


def megatron(program: Any) -> dict[str, tuple[str | None, ...]]:
    """Megatron's division of the blocks' parameters (Shoeybi et al., 2019, section 3), by hand."""
    divided = {
        "attention/query/kernel": (None, "tensor", None),
        "attention/key/kernel": (None, "tensor", None),
        "attention/value/kernel": (None, "tensor", None),
        "attention/query/bias": ("tensor", None),
        "attention/value/bias": ("tensor", None),
        "attention/output/kernel": ("tensor", None, None),
        "mlp/up/kernel": (None, "tensor"),
        "mlp/up/bias": ("tensor",),
        "mlp/down/kernel": ("tensor", None),
    }
    names = program.parameter_names
    return {name: divided.get(name.split("/", 1)[1], ()) for name in names}


def compiled(
    program: Any,
    parameters: Mapping[str, tuple[str | None, ...]],
    values: Mapping[int, tuple[str | None, ...]],
    mesh_shape: tuple[int, int],
) -> Any:
    """The forward and backward pass, compiled for a mesh of this process's devices.

    Args:
        program: of `blocks_program`.
        parameters: the specification of each parameter, by its path.
        values: specifications of values that the program makes, by number.
        mesh_shape: sizes of the data and the tensor axis.

    Returns:
        The compiled program, as JAX has it.
    """
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from hetjax.pipeline.program.constraints import constrained
    from hetjax.pipeline.stages.cutting import cut
    from hetjax.sharding.annotation.rules import example_spec

    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    lying = {value: NamedSharding(mesh, PartitionSpec(*spec)) for value, spec in values.items()}
    (stage,) = cut(constrained(program, lying), (0, program.num_positions))
    names = [program.parameter_names[part.leaf] for part in stage.parameters]
    shapes = [program.avals[program.parameters[part.leaf]] for part in stage.parameters]
    held = [NamedSharding(mesh, PartitionSpec(*parameters[name])) for name in names]
    batch = program.avals[program.batch[0]]
    given = NamedSharding(mesh, example_spec(batch.shape, batch.shape[0], mesh_shape))

    def gradients(parameters: Any, batch: Any) -> Any:
        return jax.grad(lambda parameters: stage.function(parameters, [batch], [])[0])(parameters)

    jitted = jax.jit(gradients, in_shardings=(held, given), out_shardings=held)
    return jitted.lower(shapes, batch).compile()


def solved(case: Case, *, count: int, platform: str, mesh_shapes: Any = None) -> Any:
    """The program of some blocks, and how the integer program divides it."""
    from hetjax.mesh import DeviceKind, Link
    from hetjax.pipeline.stages.cutting import cut
    from hetjax.planner.intra_op import StageDevices, Training, shard_stage

    program = blocks_program(case)
    (stage,) = cut(program, (0, program.num_positions))
    kind = DeviceKind("example", {"float32": 1e12}, 10**12, 1e11, "made up", platform)
    devices = StageDevices(kind, count, Link(5e9, 1e-6), 1e12)
    training = Training(case.examples, 8, 1, "float32", 8.0)
    found = shard_stage(program, stage, devices, training, mesh_shapes=mesh_shapes)
    assert found is not None, "a terabyte of memory is enough"
    return program, found


def compare(case: Case) -> dict[str, Any]:
    """Bytes of both programs, on the logical mesh that Megatron takes."""
    from hetjax.runtime.compilation.collective_bytes import collective_bytes

    mesh_shape = (1, DEVICES)
    program, found = solved(case, count=DEVICES, platform="cpu", mesh_shapes=[mesh_shape])
    by_us = compiled(program, found.parameters, found.values, mesh_shape)
    by_hand = compiled(program, megatron(program), {}, mesh_shape)
    ours, theirs = (collective_bytes(each.as_text() or "") for each in (by_us, by_hand))
    return {
        **case._asdict(),
        "bytes": ours,
        "megatron_bytes": theirs,
        "ratio": ours / theirs,
        "solve_seconds": found.solve_seconds,
    }


def solver_row(blocks: int) -> dict[str, Any]:
    """Seconds of all logical meshes of eight devices."""
    _, found = solved(LARGE._replace(blocks=blocks), count=8, platform="gpu")
    return {
        "blocks": blocks,
        "solve_seconds": found.solve_seconds,
        "is_optimal": found.is_optimal,
        "mesh_shape": found.mesh_shape,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small size only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    rows = [compare(case) for case in (QUICK if arguments.quick else CASES)]
    solver = [solver_row(blocks) for blocks in ((1,) if arguments.quick else (1, 4, 32))]
    result = {"ratio": max(row["ratio"] for row in rows), "rows": rows, "solver": solver}
    if arguments.json:
        print(json.dumps(result))
        return
    for row in rows:
        size = Case(*(row[name] for name in Case._fields))
        print(f"{size}: {row['bytes']:,.0f} bytes, Megatron's {row['megatron_bytes']:,.0f}")
    for row in solver:
        print(f"GPT-2.6B, blocks: {row['blocks']}: {row['solve_seconds']:.2f} s")
    print(f"largest ratio: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
