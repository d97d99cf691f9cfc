"""Schedules made for given times: list scheduling, split backward passes, a search.

The names of schedules, as settings have them, are looked up here.
"""
