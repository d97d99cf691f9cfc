"""Checkpoints, under names that no plan changes.

They are begun aside, committed at once and verified before they are used; a run's saver writes them
in the background.
"""
