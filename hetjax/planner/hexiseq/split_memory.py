"""What a device holds at most in a step: state, kept activations, and what attention needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetjax.mesh.quantities import format_bytes
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.costs_of_rows import Candidates
from hetjax.planner.hexiseq.group_layout import GroupLayout

RING_BUFFERS = 2
"""Blocks of other groups that a device has room for: one to compute on, one that arrives."""

GRADIENT_BYTES = 4
"""Bytes of a number of the gradients of keys and values that go round, and of sums of gradients."""

WHOLE_VALUES = 4
"""Of so many values as wide as a layer's input each device of a member keeps all: what comes in, in
the middle, and norms of both."""

LOGIT_BYTES = 8
"""Bytes of a logit and its gradient in float32."""


class ContextMemory(NamedTuple):
    """Bytes of each device, each field [rows, devices].

    Args:
        state: parameters, gradients and optimizer state, and layers that are gathered.
        kept: what layers keep for their backward pass, and what one of them needs.
        exchanged: queries, keys, values, outputs and their gradients by heads.
        ring: keys and values of other groups, and their gradients.
        logits: of one chunk of tokens.
    """

    state: NDArray
    kept: NDArray
    exchanged: NDArray
    ring: NDArray
    logits: NDArray

    @property
    def total(self) -> NDArray:
        """All of it."""
        return self.state + self.kept + self.exchanged + self.ring + self.logits

    def told(self, row: int, column: int) -> str:
        """What a device needs, in words.

        Args:
            row: the candidate.
            column: the device's column.
        """
        words = {
            "state": "of parameters, gradients and optimizer state",
            "kept": "of kept activations",
            "exchanged": "of queries, keys, values and outputs by heads",
            "ring": "of other groups' keys and values",
            "logits": "of logits",
        }
        parts = {name: getattr(self, name)[row, column] for name in self._fields}
        return ", ".join(f"{format_bytes(parts[name])} {said}" for name, said in words.items())


def context_memory(
    work: ContextWork,
    layout: GroupLayout,
    candidates: Candidates,
    copies: np.ndarray,
) -> ContextMemory:
    """What devices hold.

    Args:
        work: the model and its sequences.
        layout: the groups.
        candidates: tokens and heads of its devices.
        copies: heads of keys and values that each device has, once for each of its sub-rings that
            see them, [divisions of heads, devices].

    Returns:
        The bytes.
    """
    item, batch, size = work.item_bytes, work.batch, work.head_size
    tokens, heads, of = candidates.tokens, candidates.heads, candidates.division
    members = len(layout.order) if work.divides_state else 1
    gathered = 3 * work.layer_parameters * work.sent_weight_bytes if work.divides_state else 0
    updated = work.parameters * work.updated_bytes / len(layout.order)
    whole = work.parameters * work.state_bytes / members
    state = np.full(tokens.shape, whole + gathered + updated)
    lengths = layout.group_sum(tokens)
    own = lengths[:, layout.group]
    # Queries, outputs, gradients of outputs; keys, values; sums of gradients; two row statistics.
    by_heads = (3 * heads + 2 * copies) * item
    by_heads = size * (by_heads + (heads + 2 * copies) * GRADIENT_BYTES) + 8 * heads
    exchanged = batch * own * by_heads[of]
    # What goes from layer to layer, each device of a member has whole.
    others = layout.of(layout.devices.sizes) - 1
    working = work.working_bytes + others * min(
        work.working_bytes, WHOLE_VALUES * work.width * item
    )
    if work.is_recomputed:
        kept_of_layers = work.live * work.layers * work.width * item * (1 + others)
        kept = batch * tokens * (kept_of_layers + working)
    else:
        kept = work.live * batch * tokens * work.layers * working
        saved = size * (2 * heads + 2 * copies) * item + 4 * heads
        kept = kept + batch * (work.live * work.layers - 1) * own * saved[of]
    ring = np.zeros(tokens.shape)
    if layout.num_groups > 1:
        block = 2 * size * copies * (item + GRADIENT_BYTES)
        ring = RING_BUFFERS * batch * lengths.max(axis=1)[:, None] * block[of]
    chunk = np.minimum(work.logit_tokens, batch * tokens)
    return ContextMemory(state, kept, exchanged, ring, LOGIT_BYTES * work.vocabulary * chunk)
