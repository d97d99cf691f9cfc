"""The planning problem: everything that a planner is given, in numbers.

It is stated of a program, a batch, an optimizer and a cluster, for one number of microbatches or
for many.
"""
