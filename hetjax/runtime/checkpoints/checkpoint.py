"""Saving and loading a stage's share of the training state, under names that no plan changes.

Every stage writes what it holds as an Orbax item of its own, in the background; rows that several
stages hold are written by one of them. A stage that loads looks up in the manifest which items
hold the rows that it needs, so the plan that saved and the plan that loads may differ in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hetjax.errors import CheckpointError, InputError, reason_of
from hetjax.mesh.hetero import JaxDevice
from hetjax.pipeline.build import PipelinePrograms, Shapes
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.stages.holders import covering_stages
from hetjax.runtime.checkpoints.checkpoint_files import (
    SaveFailure,
    StageRecord,
    read_manifest,
    record_files,
)
from hetjax.runtime.checkpoints.manifest import SavedPart, row_span
from hetjax.runtime.checkpoints.nonfinite import are_finite, were_finite
from hetjax.runtime.checkpoints.orbax_words import quieten, write_reason
from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.state import StageState, put_whole
from hetjax.runtime.instructions.placement import Placement


@dataclass(frozen=True, eq=False)
class _Leaves:
    """The leaves of one kind of state, and what each stage holds of them."""

    kind: str
    names: tuple[str, ...]
    shapes: Shapes
    held: tuple[tuple[ParameterPart, ...], ...]

    def writers(self, leaf: int) -> tuple[int, ...]:
        """The stages that write a leaf: together they hold each row of it once."""
        parts = {
            stage: part
            for stage, held in enumerate(self.held)
            for part in held
            if part.leaf == leaf
        }
        return covering_stages(parts, row_span(0, None, self.shapes[leaf].shape)[1])

    def part(self, part: ParameterPart, item: str) -> SavedPart:
        shape = self.shapes[part.leaf]
        return SavedPart(
            self.kind,
            self.names[part.leaf],
            part.start,
            part.stop,
            tuple(shape.shape),
            str(shape.dtype),
            item,
        )


def _leaves_of(pipelines: PipelinePrograms) -> tuple[_Leaves, _Leaves]:
    state = jax.tree.unflatten(pipelines.state_tree, pipelines.state_shapes)
    parameters = _Leaves(
        "parameters",
        pipelines.program.parameter_names,
        pipelines.parameter_shapes,
        tuple(stage.parameters for stage in pipelines.stages),
    )
    optimizer = _Leaves(
        "optimizer",
        path_names(state),
        pipelines.state_shapes,
        tuple(update.state for update in pipelines.updates),
    )
    for leaves in (parameters, optimizer):
        repeated = [name for name, count in Counter(leaves.names).items() if count > 1]
        if repeated:
            raise InputError(
                f"{leaves.kind}: the path {repeated[0]!r} is that of several leaves, so a "
                f"checkpoint could not tell them apart; rename one"
            )
    return parameters, optimizer


def check_leaves(folder: Path, pipelines: PipelinePrograms) -> None:
    """Check that a checkpoint holds the state of a model and its optimizer, leaf by leaf.

    Args:
        folder: the checkpoint.
        pipelines: the pipelines' programs, under whatever plan.

    Raises:
        CheckpointError: naming a leaf that is missing, or not expected, or of another shape or
            dtype, with both sides.
    """
    _check_leaves(folder, read_manifest(folder).parts, _leaves_of(pipelines))


def _check_leaves(folder: Path, parts: Sequence[SavedPart], kinds: Sequence[_Leaves]) -> None:
    saved = {part.leaf: (part.shape, part.dtype) for part in parts}
    wanted = {
        (leaves.kind, name): (tuple(shape.shape), str(shape.dtype))
        for leaves in kinds
        for name, shape in zip(leaves.names, leaves.shapes, strict=True)
    }
    for (kind, name), expected in wanted.items():
        if (kind, name) not in saved:
            raise CheckpointError(
                f"checkpoint {folder} has no {kind} leaf {name!r}; it was saved with another "
                f"model or optimizer"
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
                f"do not have; it was saved with another model or optimizer"
            )


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
    leaves = _Leaves("parameters", path_names(shapes), tuple(jax.tree.leaves(shapes)), ())
    parts = [part for part in read_manifest(folder).parts if part.kind == leaves.kind]
    _check_leaves(folder, parts, [leaves])
    saved = _by_leaf(parts)
    sharding = NamedSharding(jax.make_mesh((1,), ("device",), devices=[device]), PartitionSpec())
    loads = [
        _LeafLoad(leaves.part(ParameterPart(leaf), ""), shape.dtype, sharding, saved)
        for leaf, shape in enumerate(leaves.shapes)
    ]
    try:
        stored = _read(folder, loads)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {reason_of(error)}") from None
    return jax.tree.unflatten(jax.tree.structure(shapes), [load.assemble(stored) for load in loads])


class StageSaver:
    """Saves and loads the state of one stage; it lives where the stage's arrays do.

    Where a stage spans several processes, each has a saver, and all of them make the same calls.

    Args:
        placement: shardings of all buffers, with the programs.
        stage: which stage.
        initial: the parameters that training began with, or what makes them. A state with a
            parameter that is not finite, or with optimizer state of one, is then not saved, unless
            the parameter was so from the start. None: any state is saved.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        initial: PyTree | Callable[[], PyTree] | None = None,
    ):
        self.pipelines, self.stage, self._initial = placement.pipelines, stage, initial
        self.item = f"stage_{stage}"
        self._kinds = _leaves_of(placement.pipelines)
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
            What was written; None in all processes of the stage but the first.

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
            The state, on the stage's devices.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        manifest = read_manifest(folder)
        _check_leaves(folder, manifest.parts, self._kinds)
        saved = _by_leaf(manifest.parts)
        parameters, optimizer = (
            self._loads(leaves, shardings, saved)
            for leaves, shardings in zip(
                self._kinds, (compiled.parameters, compiled.state), strict=True
            )
        )
        stored = _read(folder, [*parameters, *optimizer])
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
        for leaves, arrays in zip(self._kinds, (state.parameters, state.optimizer), strict=True):
            for part, array in zip(leaves.held[self.stage], arrays, strict=True):
                if self.stage in leaves.writers(part.leaf):
                    yield leaves.part(part, self.item), array

    def _loads(
        self,
        leaves: _Leaves,
        shardings: Sequence[NamedSharding],
        saved: Mapping[tuple[str, str], Sequence[SavedPart]],
    ) -> list[_LeafLoad]:
        return [
            _LeafLoad(leaves.part(part, self.item), leaves.shapes[part.leaf].dtype, sharding, saved)
            for part, sharding in zip(leaves.held[self.stage], shardings, strict=True)
        ]

    def _judged(self, parts: Iterable[SavedPart]) -> Iterator[tuple[SavedPart, int]]:
        """The parts that are to be finite, each with the parameter leaf that it belongs to."""
        parameters, optimizer = self._kinds
        update = self.pipelines.updates[self.stage]
        owners = {("parameters", name): leaf for leaf, name in enumerate(parameters.names)}
        for part, leaf in zip(update.state, update.like, strict=True):
            if leaf is not None:
                owners["optimizer", optimizer.names[part.leaf]] = leaf
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
        for part, is_finite in finite.items():
            if not is_finite and were_finite(self._initial, judged[part]):
                raise CheckpointError(f"{part.kind} leaf {part.path!r} is not finite")
        if jax.process_index() != 0:
            return None
        files = record_files(folder, self.item) if wrote else ()
        return StageRecord(self.pipelines.program.fingerprint, parts, files)


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
        return SaveFailure(worker, write_reason(error))


class _LeafLoad:
    """One part that a stage wants, and the saved parts that it is made of."""

    def __init__(
        self,
        part: SavedPart,
        dtype: Any,
        sharding: NamedSharding,
        saved: Mapping[tuple[str, str], Sequence[SavedPart]],
    ):
        self.part, self.dtype, self.sharding = part, dtype, sharding
        start, stop = part.rows
        self.sources = [
            source
            for source in saved[part.leaf]
            if not source.is_empty and source.rows[0] < stop and start < source.rows[1]
        ]
        found = sum(min(stop, s.rows[1]) - max(start, s.rows[0]) for s in self.sources)
        if not part.is_empty and found != stop - start:
            raise CheckpointError(
                f"the checkpoint has {found} of the rows {start} to {stop - 1} of {part.leaf[0]} "
                f"leaf {part.leaf[1]!r}; it is damaged"
            )
        self.is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        # Saved just as it is wanted: every process reads only what its own devices hold.
        self.is_direct = not self.is_key and [s.rows for s in self.sources] == [part.rows]

    def assemble(self, stored: dict[str, Any]) -> jax.Array:
        if self.is_direct:
            return stored[self.sources[0].key]
        array = self._rows(stored)
        if not self.is_key:
            return put_whole(array, self.sharding)
        implementation = jax.random.key_impl(jnp.empty((), self.dtype))
        wrap: Callable[[Any], Any] = jax.jit(
            lambda data: jax.random.wrap_key_data(data, impl=implementation),
            out_shardings=self.sharding,
        )
        return wrap(put_whole(array, self.sharding))

    def _rows(self, stored: dict[str, Any]) -> np.ndarray:
        if not self.sources:
            start, stop = self.part.rows
            return np.zeros((stop - start, *self.part.shape[1:]), self.dtype)
        if not self.part.shape:
            return stored[self.sources[0].key]
        start, stop = self.part.rows
        pieces = [
            stored[source.key][max(0, start - source.rows[0]) : stop - source.rows[0]]
            for source in self.sources
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _read(folder: Path, loads: Sequence[_LeafLoad]) -> dict[str, Any]:
    """Read what some loads need: whole saved parts, by their keys."""
    import orbax.checkpoint as ocp

    wanted: dict[str, dict[str, Any]] = {}
    for load in loads:
        for source in load.sources:
            wanted.setdefault(source.item, {})[source.key] = (
                ocp.ArrayRestoreArgs(sharding=load.sharding)
                if load.is_direct
                else ocp.RestoreArgs(restore_type=np.ndarray)
            )
    stored: dict[str, Any] = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for item, how in sorted(wanted.items()):
            tree = dict.fromkeys(how, 0)
            arguments = ocp.args.PyTreeRestore(tree, restore_args=how, partial_restore=True)
            # Orbax refuses a relative path.
            stored.update(checkpointer.restore(folder.absolute() / item, args=arguments))
    return stored


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
