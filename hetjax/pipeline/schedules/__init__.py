"""Schedules as data: the order of tasks on every stage, and what is live over it.

Those that follow from one warm-up count a stage are made here; this room knows no times.
"""
