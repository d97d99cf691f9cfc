"""Harp's planner: contiguous layers on slices of subclusters, searched exactly.

The stage table is what it searches; simulated steps, several pipelines, numbers of microbatches,
prices and alternatives build on it.
"""
