"""Saving and loading a stage's share of the training state, under names that no plan changes.

Every stage writes what it holds as an Orbax item of its own, in the background; rows that several
stages hold are written by one of them. Of a stage of several members each writes its own part, as
an item of its own, and of what several of them have one does: nothing is put together for it. A
stage, or a member, that loads looks up in the manifest which items hold what it needs, so the plan
that saved and the plan that loads may differ in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hetjax.errors import CheckpointError
from hetjax.mesh.hetero import JaxDevice
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.program.stacked_leaves import whole_leaves
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.runtime.checkpoints.checkpoint_files import (
    SaveFailure,
    StageRecord,
    read_manifest,
    record_files,
)
from hetjax.runtime.checkpoints.leaf_loads import LeafLoad, read_loads
from hetjax.runtime.checkpoints.manifest import Manifest, SavedPart
from hetjax.runtime.checkpoints.nonfinite import are_finite, were_finite
from hetjax.runtime.checkpoints.orbax_words import disk_reason, quieten
from hetjax.runtime.checkpoints.saved_leaves import (
    HeldPart,
    SavedLeaves,
    held_parts,
    saved_leaves,
)
from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement


def check_leaves(folder: Path, pipelines: PipelinePrograms) -> None:
    """Check that a checkpoint holds the state of a model and its optimizer, leaf by leaf.

    Args:
        folder: the checkpoint.
        pipelines: the pipelines' programs, under whatever plan.

    Raises:
        CheckpointError: naming a leaf that is missing, or not expected, or of another shape or
            dtype, with both sides.
    """
    _check_leaves(folder, _manifest_in(folder).parts, saved_leaves(pipelines))


def _manifest_in(folder: Path) -> Manifest:
    """The manifest of a checkpoint; a host that does not see the folder says which one."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from None


def check_optimizer_state(folder: Path, parts: Sequence[SavedPart], state: PyTree) -> None:
    """Check that a checkpoint holds an optimizer's state, before any program is there.

    Args:
        folder: the checkpoint.
        parts: what it holds.
        state: shapes of the state.

    Raises:
        CheckpointError: as `check_leaves`.
    """
    saved = [part for part in parts if part.kind == "optimizer"]
    shapes = tuple(jax.tree.leaves(state))
    leaves = SavedLeaves("optimizer", path_names(state), shapes, (), whole_leaves(len(shapes)))
    _check_leaves(folder, saved, [leaves])


def _check_leaves(folder: Path, parts: Sequence[SavedPart], kinds: Sequence[SavedLeaves]) -> None:
    saved = {part.leaf: (part.shape, part.dtype) for part in parts}
    wanted = {
        (leaves.kind, name): (tuple(shape.shape), str(shape.dtype))
        for leaves in kinds
        for name, shape in zip(leaves.names, leaves.shapes, strict=True)
    }
    for (kind, name), expected in wanted.items():
        if (kind, name) not in saved:
            raise CheckpointError(
                f"checkpoint {folder} has no {kind} leaf {name!r}; it was saved with "
                f"{_another(kind)}"
            )
        if saved[kind, name] != expected:
            shapes = [f"{list(shape)} {dtype}" for shape, dtype in (saved[kind, name], expected)]
            raise CheckpointError(
                f"checkpoint {folder}: {kind} leaf {name!r} is {shapes[0]}, {shapes[1]} expected"
            )
    for kind, name in saved:
        if (kind, name) not in wanted:
            raise CheckpointError(
                f"checkpoint {folder} holds {kind} leaf {name!r}, which this model and optimizer "
                f"do not have; it was saved with {_another(kind)}"
            )


def _another(kind: str) -> str:
    """What a checkpoint was saved with whose leaves of a kind are not those that are expected."""
    frozen = ", or where other parameters were frozen" if kind == "optimizer" else ""
    return f"another model or optimizer{frozen}"


def _by_leaf(parts: Iterable[SavedPart]) -> dict[tuple[str, str], list[SavedPart]]:
    leaves: dict[tuple[str, str], list[SavedPart]] = {}
    for part in parts:
        leaves.setdefault(part.leaf, []).append(part)
    return leaves


def load_parameters(folder: Path, shapes: PyTree, device: JaxDevice) -> PyTree:
    """Read all parameters of a checkpoint onto one device, whatever plan saved them.

    Args:
        folder: the checkpoint.
        shapes: of the model's parameters.
        device: where they shall be.

    Returns:
        The parameters.

    Raises:
        CheckpointError: it holds other parameters, or a file went away meanwhile.
    """
    leaves_shapes = tuple(jax.tree.leaves(shapes))
    leaves = SavedLeaves(
        "parameters", path_names(shapes), leaves_shapes, (), whole_leaves(len(leaves_shapes))
    )
    parts = [part for part in _manifest_in(folder).parts if part.kind == leaves.kind]
    _check_leaves(folder, parts, [leaves])
    saved = _by_leaf(parts)
    sharding = NamedSharding(jax.make_mesh((1,), ("device",), devices=[device]), PartitionSpec())
    loads = [
        LeafLoad(leaves.part(ParameterPart(leaf), ""), shape.dtype, sharding, saved)
        for leaf, shape in enumerate(leaves.shapes)
    ]
    stored = read_loads(folder, loads)
    return jax.tree.unflatten(jax.tree.structure(shapes), [load.assemble(stored) for load in loads])


class StageSaver:
    """Saves and loads the state of one stage, or of a member of it; it lives where the arrays do.

    Where that spans several processes, each has a saver, and all of them make the same calls.

    Args:
        placement: shardings of all buffers, with the programs.
        stage: which stage.
        initial: the parameters that training began with, or what makes them. A state with a
            parameter that is not finite, or with optimizer state of one, is then not saved, unless
            the parameter was so from the start. None: any state is saved.
        member: which member of the stage.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        initial: PyTree | Callable[[], PyTree] | None = None,
        member: int = 0,
    ):
        self.pipelines, self.stage, self._initial = placement.pipelines, stage, initial
        self.item = f"stage_{stage}_member_{member}" if member else f"stage_{stage}"
        self._kinds = saved_leaves(placement.pipelines)
        self._held = [
            held_parts(placement.leaves(stage, kind), member, by_turns=kind is Parameter)
            for kind in (Parameter, OptimizerState)
        ]
        self._background = ThreadPoolExecutor(1, thread_name_prefix=f"save {self.item}")
        self._pending: Future[StageRecord | None] | None = None
        self._checkpointer: Any = None

    def save(self, folder: Path, state: StageState) -> None:
        """Begin to write the stage's state.

        When it returns, the arrays may be overwritten or donated; the files come later, and `wait`
        waits for them and tells whether they could be written. What was saved before and never
        waited for is given up.

        Args:
            folder: what `CheckpointFolder.begin` returned.
            state: the state to write.
        """
        self._give_up()
        try:
            self._pending = self._begin(folder, state)
        except Exception as error:
            self._pending = Future()
            self._pending.set_exception(error)

    def _begin(self, folder: Path, state: StageState) -> Future[StageRecord | None]:
        import orbax.checkpoint as ocp

        arrays = dict(self._to_write(state))
        stored = {
            part.key: _without_keys(array) for part, array in arrays.items() if not part.is_empty
        }
        if stored:
            self._checkpointer = self._checkpointer or _asynchronous_checkpointer()
            # Orbax copies to the host before it returns. Where the host sees device memory (CPU),
            # it keeps a view instead, and while there is a view JAX does not donate the memory.
            self._checkpointer.save(folder / self.item, args=ocp.args.PyTreeSave(stored))
        judged = {} if self._initial is None else dict(self._judged(arrays))
        finite = dict(zip(judged, are_finite([arrays[part] for part in judged]), strict=True))
        return self._background.submit(self._finish, folder, tuple(arrays), judged, finite)

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending is None or self._pending.done()

    def wait(self) -> StageRecord | None:
        """Wait until the state that was last saved is on the disk.

        Returns:
            What was written; None in all processes of the stage, or its member, but the first.

        Raises:
            Exception: why the files could not be written.
        """
        assert self._pending is not None, "nothing was saved"
        pending, self._pending = self._pending, None
        try:
            return pending.result()
        except Exception:
            self._forget_checkpointer()
            raise

    def load(self, folder: Path, compiled: CompiledStage) -> StageState:
        """Read the stage's state, and of the checkpoint only the parts that make it up.

        Args:
            folder: the checkpoint, saved under any plan.
            compiled: the stage's shardings.

        Returns:
            The state, on the devices of the stage, or of its member.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or cannot be read.
        """
        manifest = _manifest_in(folder)
        _check_leaves(folder, manifest.parts, self._kinds)
        saved = _by_leaf(manifest.parts)
        parameters, optimizer = (
            self._loads(leaves, held, shardings, saved)
            for leaves, held, shardings in zip(
                self._kinds, self._held, (compiled.parameters, compiled.state), strict=True
            )
        )
        stored = read_loads(folder, [*parameters, *optimizer])
        return StageState(
            [load.assemble(stored) for load in parameters],
            [load.assemble(stored) for load in optimizer],
        )

    def close(self) -> None:
        """Finish what is being written and end the threads."""
        self._give_up()
        self._background.shutdown(wait=True)
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _give_up(self) -> None:
        """End what is being written, if anything is; whether it succeeded no longer matters."""
        if self._pending is not None:
            if self._pending.exception() is not None:
                self._forget_checkpointer()
            self._pending = None

    def _forget_checkpointer(self) -> None:
        """Save with another one from now on: this one may raise its failure again at the next."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            with suppress(Exception):
                checkpointer.close()

    def _to_write(self, state: StageState) -> Iterator[tuple[SavedPart, jax.Array]]:
        both = state.parameters, state.optimizer
        for leaves, held, arrays in zip(self._kinds, self._held, both, strict=True):
            for each, array in zip(held, arrays, strict=True):
                if each.is_written and self.stage in leaves.writers(each.part.leaf):
                    yield leaves.part(each.part, self.item, each.bounds), array

    def _loads(
        self,
        leaves: SavedLeaves,
        held: Sequence[HeldPart],
        shardings: Sequence[NamedSharding],
        saved: Mapping[tuple[str, str], Sequence[SavedPart]],
    ) -> list[LeafLoad]:
        return [
            LeafLoad(
                leaves.part(each.part, self.item, each.bounds),
                leaves.counted[each.part.leaf].dtype,
                sharding,
                saved,
            )
            for each, sharding in zip(held, shardings, strict=True)
        ]

    def _judged(self, parts: Iterable[SavedPart]) -> Iterator[tuple[SavedPart, int]]:
        """The parts that are to be finite, each with the parameter leaf that it belongs to."""
        parameters, optimizer = self._kinds
        update = self.pipelines.updates[self.stage]
        owners = {("parameters", name): leaf for leaf, name in enumerate(parameters.names)}
        for part, leaf in zip(update.state, update.like, strict=True):
            if leaf is not None:
                place = optimizer.leaves.places[part.leaf][0]
                owners["optimizer", optimizer.names[place]] = parameters.leaves.places[leaf][0]
        for part in parts:
            if part.leaf in owners and not part.is_empty:
                yield part, owners[part.leaf]

    def _finish(
        self,
        folder: Path,
        parts: tuple[SavedPart, ...],
        judged: Mapping[SavedPart, int],
        finite: Mapping[SavedPart, jax.Array],
    ) -> StageRecord | None:
        wrote = any(not part.is_empty for part in parts)
        if wrote:
            self._checkpointer.wait_until_finished()
            if not (folder / self.item / _INDEX).is_file():
                raise CheckpointError(f"{self.item} was not put together: it has no {_INDEX}")
        for part, is_finite in finite.items():
            if not is_finite and were_finite(self._initial, judged[part]):
                raise CheckpointError(f"{part.kind} leaf {part.path!r} is not finite")
        if jax.process_index() != 0:
            return None
        files = record_files(folder, self.item) if wrote else ()
        program = self.pipelines.program
        return StageRecord(program.model, program.num_examples, parts, files)


_INDEX = "manifest.ocdbt"
"""What Orbax finds an item's arrays by; it writes it last, of what all processes have written."""


def waited(saver: StageSaver, worker: str) -> StageRecord | SaveFailure | None:
    """What `StageSaver.wait` returns, and where it raises, that as a value.

    A worker that could not write trains on: nothing of its state is lost.

    Args:
        saver: the saver.
        worker: what to call its worker.

    Returns:
        What was written, or why it could not be.
    """
    try:
        return saver.wait()
    except Exception as error:
        return SaveFailure(worker, disk_reason(error))


def _asynchronous_checkpointer() -> Any:
    import orbax.checkpoint as ocp

    quieten()
    # Orbax numbers folders that it makes in the background for the whole process, and the stages
    # of one process save at the same time.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)


def _without_keys(array: jax.Array) -> jax.Array:
    """Random keys as the words that they are made of."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array
