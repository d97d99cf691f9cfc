"""The analytic cost model: what stages take, and what a whole plan's step takes.

A plan gets its annotations, its schedule and its prediction here.
"""
