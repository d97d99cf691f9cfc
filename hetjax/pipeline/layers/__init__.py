"""Layers: the contiguous runs of a program that a planner puts on stages.

They are found by structure, as modules that a model repeats, or by cost alone.
"""
