"""A barrier in a traced function: what stands behind it is made no sooner than all come to it."""

from __future__ import annotations

from hetjax import _compat

REGION = "hetjax_region"
"""The name of a step behind which values are made again, and no sooner than all come to it."""

REGION_BARRIER = _compat.barrier_primitive(REGION)
"""The primitive: each result is the operand at its place."""
