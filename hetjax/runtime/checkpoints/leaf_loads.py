"""Reading a member's part of the training state out of the saved parts that it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hetjax.errors import CheckpointError
from hetjax.pipeline.program.loss import host_shape
from hetjax.runtime.checkpoints.manifest import SavedPart
from hetjax.runtime.checkpoints.orbax_words import disk_reason, quieten
from hetjax.runtime.compilation.compiling import put_from_host
from hetjax.sharding.annotation.bounds import extent, overlap, volume, within


class LeafLoad:
    """One part that a stage or a member of it wants, and the saved parts that it is made of.

    Args:
        part: what is wanted.
        dtype: its dtype.
        sharding: how it shall lie.
        saved: all saved parts of each leaf.

    Raises:
        CheckpointError: some of it was not saved.
    """

    def __init__(
        self,
        part: SavedPart,
        dtype: Any,
        sharding: NamedSharding,
        saved: Mapping[tuple[str, str], Sequence[SavedPart]],
    ):
        self.part, self.dtype, self.sharding = part, dtype, sharding
        wanted = part.bounds
        self.sources = [
            (source, common)
            for source in saved[part.leaf]
            if not source.is_empty and (common := overlap(source.bounds, wanted))
        ]
        found, count = sum(volume(common) for _, common in self.sources), volume(wanted)
        if not part.is_empty and found != count:
            raise CheckpointError(
                f"the checkpoint has {found} of the {count} elements of {part.key}; it is damaged"
            )
        # Saved just as it is wanted: every process reads only what its own devices hold.
        alike = [(s.bounds, s.is_row) for s, _ in self.sources] == [(wanted, part.is_row)]
        self.is_direct = alike and not jnp.issubdtype(dtype, jax.dtypes.prng_key)

    def assemble(self, stored: Mapping[str, Any]) -> jax.Array:
        """Make the part of what `read_loads` has read for it."""
        if self.is_direct:
            return stored[self.sources[0][0].key]
        array = self._joined(stored)
        if self.part.is_row:
            (array,) = array
        return put_from_host(array, self.dtype, self.sharding)

    def _joined(self, stored: Mapping[str, Any]) -> np.ndarray:
        wanted = self.part.bounds
        if not self.sources:
            like = host_shape(jax.ShapeDtypeStruct(extent(wanted), self.dtype))
            return np.zeros(like.shape, like.dtype)
        if not self.part.shape:
            return stored[self.sources[0][0].key]
        pieces = [
            (common, source.with_rows(stored[source.key])[within(common, source.bounds)])
            for source, common in self.sources
        ]
        if len(pieces) == 1:
            return pieces[0][1]
        # Random keys are saved as words, along one more dimension.
        like = pieces[0][1]
        joined = np.empty((*extent(wanted), *like.shape[len(wanted) :]), like.dtype)
        for common, piece in pieces:
            joined[within(common, wanted)] = piece
        return joined


def read_loads(folder: Path, loads: Sequence[LeafLoad]) -> dict[str, Any]:
    """Read what some loads need: whole saved parts, by their keys.

    A part that is wanted as it was saved goes to its devices at once; of others the saved parts
    are in this host's memory until they are put together.

    Args:
        folder: the checkpoint.
        loads: what is wanted.

    Returns:
        The saved parts.

    Raises:
        CheckpointError: a file is not there any more, or cannot be read.
    """
    try:
        return _stored(folder, loads)
    except (OSError, ValueError) as error:  # Orbax's, and TensorStore's.
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {disk_reason(error)}"
        ) from error


def _stored(folder: Path, loads: Sequence[LeafLoad]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    quieten()
    wanted: dict[str, dict[str, Any]] = {}
    for load in loads:
        for source, _ in load.sources:
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
