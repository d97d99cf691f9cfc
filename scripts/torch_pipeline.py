"""The peer: the same GPT trained by `torch.distributed.pipelining` over gloo, one process a stage.

`bench_pipeline.py` starts two of these, gives both the initial parameters that JAX drew, and asks
for steps; a process answers with the seconds and the losses of its steps.
"""

# torch is an optional extra, which the types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarking import KEPT_MEMORY, Size, argument_parser, serve, size_of
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from hetjax.runtime.ray.ray_worker import pin_to_core

NUM_STAGES = 2


def _mkl(instructions: str) -> dict[str, str]:
    # The debug type is what makes older versions of MKL take their fast paths on AMD.
    return {"MKL_ENABLE_INSTRUCTIONS": instructions, "MKL_DEBUG_CPU_TYPE": "5"}


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "fused AdamW": {"fused": True},
    "fused AdamW, kept memory": {"fused": True, "variables": KEPT_MEMORY},
    "fused AdamW, oneDNN off": {"fused": True, "mkldnn": False},
    "fused AdamW, float32 matmul precision high": {"fused": True, "precision": "high"},
    "fused AdamW, float32 matmul precision medium": {"fused": True, "precision": "medium"},
    "fused AdamW, MKL for AVX2": {"fused": True, "variables": _mkl("AVX2")},
    "fused AdamW, MKL for AVX512": {"fused": True, "variables": _mkl("AVX512")},
}
"""What may make torch faster. A precision below "highest" lets it multiply in fewer bits."""


def environment(setting: str) -> Mapping[str, str]:
    """The variables that a setting needs before torch is imported."""
    return SETTINGS[setting].get("variables", {})


class Attention(nn.Module):
    """Causal multi-head attention, `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        """Mix the positions."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """The feed-forward layer, `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Transform each position."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Any) -> Any:
        """The stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class StageModule(nn.Module):
    """A run of the model's blocks, with the embedding in the first stage and the head in the last.

    Args:
        size: the model's size.
        stage: which stage.
    """

    def __init__(self, size: Size, stage: int):
        super().__init__()
        self.first, self.last = stage == 0, stage == NUM_STAGES - 1
        # The head's work is below half a block's: equal halves are the best cut between blocks.
        cuts = [round(i * size.blocks / NUM_STAGES) for i in range(NUM_STAGES + 1)]
        self.blocks = nn.ModuleDict(
            {str(i): Block(size.width, size.heads) for i in range(*cuts[stage : stage + 2])}
        )
        if self.first:
            self.token_embedding = nn.Embedding(size.vocabulary, size.width)
            self.position_embedding = nn.Parameter(torch.zeros(size.sequence, size.width))
        if self.last:
            self.final_norm = nn.LayerNorm(size.width)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Any) -> Any:
        """Tokens [B, T], or the stream [B, T, D], to the stream, or to logits [B, T, V]."""
        if self.first:
            x = self.token_embedding(x) + self.position_embedding
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.final_norm(x)) if self.last else x

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the parameters of hetjax's GPT.

        Args:
            arrays: its parameters by path, e.g. ``"blocks/0/mlp/up/kernel"``.
        """
        for name, parameter in self.named_parameters():
            path = _path(name)
            array = arrays[path]
            if path.endswith("kernel"):
                # From [inputs..., outputs...] to torch's [outputs, inputs].
                array = array.reshape(parameter.shape[::-1]).T
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(array.reshape(parameter.shape).copy()))


def _path(name: str) -> str:
    """Where hetjax's GPT has a parameter of `StageModule`."""
    path = name.replace(".", "/")
    for table in ("head", "token_embedding"):
        path = path.replace(f"{table}/weight", table)
    return path.replace("norm/weight", "norm/scale").replace("weight", "kernel")


class Stage:
    """One process of the pipeline.

    Args:
        size: sizes of model and batch.
        stage: which stage, and the process's rank.
        setting: one of `SETTINGS`.
        parameters: file of the initial parameters.
    """

    def __init__(self, size: Size, stage: int, setting: str, parameters: Path):
        chosen = SETTINGS[setting]
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision(chosen.get("precision", "highest"))
        torch.backends.mkldnn.enabled = chosen.get("mkldnn", True)
        self.is_last = stage == NUM_STAGES - 1
        module = StageModule(size, stage)
        with np.load(parameters) as arrays:
            module.load(arrays)
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=1e-3, weight_decay=1e-4, fused=chosen.get("fused")
        )
        self.schedule = Schedule1F1B(
            PipelineStage(module, stage, NUM_STAGES, torch.device("cpu")),
            n_microbatches=size.microbatches,
            loss_fn=lambda logits, targets: functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten()
            ),
        )
        tokens = torch.from_numpy(size.tokens()).long()
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self) -> tuple[float, float]:
        """Run a step; its seconds, until all stages are done, and its loss."""
        distributed.barrier()
        began = time.perf_counter()
        losses: list[Any] = []
        if self.is_last:
            self.schedule.step(target=self.targets, losses=losses)
        else:
            self.schedule.step(self.inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        distributed.barrier()
        seconds = time.perf_counter() - began
        return seconds, float(torch.stack(losses).detach().mean()) if self.is_last else 0.0

    def answer(self, steps: int) -> dict[str, Any]:
        """Run steps; what was seen of them."""
        results = [self.step() for _ in range(steps)]
        return {
            "seconds": [seconds for seconds, _ in results],
            "losses": [loss for _, loss in results],
            "parameters": self.num_parameters,
        }


def parser() -> argparse.ArgumentParser:
    """The command line of a stage's process."""
    made = argument_parser(__doc__, rounds=1, steps=1)
    made.add_argument("--stage", type=int, required=True, help="which stage this process is")
    made.add_argument("--core", type=int, required=True, help="the CPU core it stays on")
    made.add_argument("--address", default="127.0.0.1", help="the first process's address")
    made.add_argument("--interface", default="lo", help="the network interface to it")
    made.add_argument("--port", type=int, required=True, help="where the processes meet")
    made.add_argument("--setting", choices=SETTINGS, default="default", help="torch's settings")
    made.add_argument("--parameters", type=Path, required=True, help="initial parameters, .npz")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    pin_to_core(options.core)
    os.environ["GLOO_SOCKET_IFNAME"] = options.interface
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{options.address}:{options.port}",
        rank=options.stage,
        world_size=NUM_STAGES,
    )
    stage = Stage(size_of(options), options.stage, options.setting, options.parameters)
    serve(stage.answer)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
