"""What plans hold on a card: predicted, and by XLA; without a card as well as on one.

    pip install "jax-cuda12-plugin==$JAX" "jax-cuda12-pjrt==$JAX" nvidia-cuda-nvcc-cu12 --no-deps
    python scripts/card_memory.py
    python scripts/card_memory.py layers --model half_precision

XLA also compiles for a card that is only described to it: what it says of a program's memory is
known before there is one. The plans are those of `h2_memory.py`, as one stage. Where there is no
card, there is no cuDNN, so that attention is computed by tiles, and kernels are chosen untimed.

Rows: `way`, `model`, `predicted_bytes`, `xla_bytes` and their `ratio`, `at` for what runs at the
peak; and of each program `temporary_bytes`, what it holds beside what goes in and out, and how many
`kernels` it calls, where memory that is saved may cost time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from h2_memory import EXAMPLES, MODELS, WAYS, model_of, peak_of, plan_of

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="way", help=f"of {', '.join(WAYS)}; all")
    parser.add_argument("--model", choices=MODELS, default="long")
    asked = parser.parse_args(arguments)
    # Before JAX starts. CUDA's libraries are asked for their versions, and may not be there.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    for way in asked.ways or WAYS:
        print(json.dumps(row(way, asked.model)), flush=True)


def row(way: str, model: str) -> dict[str, Any]:
    """What a plan's one stage holds.

    Args:
        way: one of `WAYS`.
        model: one of `MODELS`.
    """
    import jax
    import numpy as np

    from hetjax.mesh import kind
    from hetjax.mesh.jax_devices import kind_name
    from hetjax.runtime.workers.job import Job, build
    from hetjax.runtime.workers.worker import StageWorker
    from hetjax.sharding.annotation.rules import MESH_AXES

    config, language, optimizer = model_of(model)
    parameters = jax.eval_shape(language.init, jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((EXAMPLES, config.sequence + 1), np.int32)}
    card = card_or_described()
    chip: Any = kind(kind_name(card) or "")
    plan = plan_of(way, 1, language.loss, parameters, batch, optimizer, chip)
    mesh = jax.sharding.Mesh(np.reshape([card], (1,) * len(MESH_AXES)), MESH_AXES)
    no_transport: Any = None
    worker = StageWorker(
        build(Job(language.loss, parameters, batch, optimizer, plan)), 0, mesh, no_transport
    )
    sizes = dict(sizes_of(worker.training, worker.compiled.programs))
    by_xla, _, at = peak_of(worker, sizes, there_at_first(worker.training))
    predicted = plan.predicted.stages[0].memory_bytes
    return {
        "way": way,
        "model": model,
        "predicted_bytes": predicted,
        "xla_bytes": by_xla,
        "ratio": predicted / by_xla,
        "at": at,
        "temporary_bytes": {
            name: program.memory_analysis().temp_size_in_bytes
            for name, program in worker.compiled.programs.items()
        },
        "kernels": {
            name: kernels_in(program.as_text())
            for name, program in worker.compiled.programs.items()
        },
    }


def kernels_in(text: str) -> int:
    """How many kernels a compiled program calls, loops once."""
    _, entry = text.split("\nENTRY", 1)
    return len(re.findall(r" (?:fusion|custom-call|copy|while)\(", entry))


def card_or_described() -> Any:
    """The card of this machine, or one that is described."""
    import jax
    from jax.experimental import topologies

    if jax.default_backend() != "cpu":
        return jax.devices()[0]
    described = topologies.get_topology_desc("H100", "cuda", target_config=_H100, topology="1x1x1")
    return described.devices[0]


def sizes_of(instructions: Sequence[Any], programs: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """The bytes of all buffers that instructions name, by the programs that take or make them."""
    import jax

    from hetjax.runtime.instructions import instruction as kinds
    from hetjax.runtime.instructions.buffers import Offloadable, Offloaded

    for each in instructions:
        if isinstance(each, kinds.Run):
            program = programs[each.program]
            taken = jax.tree.leaves(program.in_avals)
            names = [name for group in each.inputs for name in group]
            pairs = [*zip(names, taken, strict=True)]
            pairs += zip(each.outputs, jax.tree.leaves(program.out_info), strict=True)
            for name, shape in pairs:
                size = shape.size * shape.dtype.itemsize
                yield name, size
                if isinstance(name, Offloadable):
                    yield Offloaded(name), size


def there_at_first(instructions: Sequence[Any]) -> set[Any]:
    """The buffers that instructions read and that none of them has made before."""
    from hetjax.runtime.instructions import instruction as kinds

    made, found = set[Any](), set[Any]()
    for each in instructions:
        match each:
            case kinds.Run():
                found |= {name for group in each.inputs for name in group} - made
                made |= {*each.outputs}
            case kinds.Load() | kinds.Receive():
                made |= {*each.buffers}
            case kinds.Fetch():
                found |= {*each.sources} - made
                made |= {*each.buffers}
            case kinds.Store():
                made |= {*each.targets}
            case kinds.Free():
                made -= {*each.buffers}
            case _:
                pass
    return found


if __name__ == "__main__":
    main()
