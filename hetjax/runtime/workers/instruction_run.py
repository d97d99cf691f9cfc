"""One pass over instructions: programs run on buffers, and what others need or give is moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hetjax.runtime.compilation.compiled_stage import Compiled
from hetjax.runtime.compilation.host_memory import to_devices, to_host
from hetjax.runtime.instructions.buffers import Buffer
from hetjax.runtime.instructions.instruction import (
    Await,
    Expect,
    Fetch,
    Free,
    Instruction,
    Receive,
    Run,
    Send,
    Store,
)
from hetjax.runtime.moves.transport import Carrier


class InstructionRun:
    """Carries out instructions; a worker's step is one, and so is a call of an annotated function.

    Args:
        programs: compiled programs by name.
        carrier: what moves arrays.
        buffers: the arrays by name; they come and go.
        step: the step's number, the same on all who exchange arrays.

    Attributes:
        buffers: the arrays by name.
        latest: what the program that ran last has made.
    """

    def __init__(
        self,
        programs: Mapping[str, Compiled],
        carrier: Carrier,
        buffers: dict[Buffer, Any],
        step: int = 0,
    ):
        self._programs, self._carrier, self.step = programs, carrier, step
        self.buffers = buffers
        self.latest: list[jax.Array] = []

    def do(self, instruction: Instruction) -> None:
        """Carry out one instruction."""
        match instruction:
            case Run():
                self.run(instruction)
            case Expect():
                self._carrier.expect(self.step, instruction.tag)
            case Receive():
                self.receive(instruction)
            case Send():
                self.send(instruction)
            case Fetch():
                self.fetch(instruction)
            case Store():
                self.store(instruction)
            case Await():
                jax.block_until_ready([self.buffers[buffer] for buffer in instruction.buffers])
            case Free():
                self.free(instruction)

    def run(self, instruction: Run) -> None:
        """Run a program."""
        self.compute(instruction)
        self.hold(instruction.outputs, self.latest)

    def compute(self, instruction: Run) -> None:
        """Run a program, and leave what it makes in `latest`."""
        arguments = [[self.buffers[b] for b in group] for group in instruction.inputs]
        self.latest = jax.tree.leaves(self._programs[instruction.program](*arguments))

    def receive(self, instruction: Receive) -> None:
        """Wait for a transfer."""
        self.hold(instruction.buffers, self._carrier.receive(self.step, instruction.tag))

    def send(self, instruction: Send) -> None:
        """Give arrays to a transfer."""
        arrays = [self.buffers[buffer] for buffer in instruction.buffers]
        self._carrier.send(self.step, instruction.tag, arrays)

    def fetch(self, instruction: Fetch) -> None:
        """Begin to bring arrays from the hosts' memory to the devices."""
        arrays = [self.buffers[buffer] for buffer in instruction.sources]
        self.hold(instruction.buffers, to_devices(arrays))

    def store(self, instruction: Store) -> None:
        """Begin to put arrays into the hosts' memory."""
        arrays = [self.buffers[buffer] for buffer in instruction.buffers]
        self.hold(instruction.targets, to_host(arrays))

    def hold(self, names: Sequence[Buffer], arrays: Sequence[Any]) -> None:
        """Name arrays."""
        self.buffers.update(zip(names, arrays, strict=True))

    def free(self, instruction: Free) -> None:
        """Forget arrays."""
        for name in instruction.buffers:
            del self.buffers[name]
