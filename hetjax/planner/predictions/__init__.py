"""Predictions: what a whole plan's step takes, and what of a plan is chosen by that.

The cost model says what stages take; their schedules' timeline says the step. What is kept,
offloaded or made again, how a stage is divided inside, and in how many passes, is chosen so.
"""
