"""The worker: one stage's state and the loop over its instructions.

What feeds it, what it reports, and how it keeps to the times of a plan that is played.
"""
