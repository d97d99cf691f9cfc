"""A stage's programs compiled for its mesh, before the first step.

Tasks, updates, what stages share, and the making of its training state.
"""
