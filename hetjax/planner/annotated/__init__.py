"""Plans that annotations say: stages, members and shares read off a user's own program.

From annotations of parameters, of the batch and of values, to the plan in which they hold.
"""
