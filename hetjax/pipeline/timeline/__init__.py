"""Timelines: what runs where and when, by the times of tasks and transfers.

A discrete-event model predicts them, measured ones are read back, and bounds say what no schedule
beats.
"""
