"""Stages: a program cut at positions, and the forward and backward pass of each.

Here is decided what a stage keeps for its backward pass, how that is split in halves, and who holds
which parameters.
"""
