"""The optimizer's update, divided among stages: any Optax transformation.

The update is traced once, each of its steps is put where its operands are, and stages tell each
other scalars alone.
"""
