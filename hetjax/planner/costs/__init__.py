"""The analytic cost model: what stages take and hold, by their work and their devices' figures.

What was measured has the last word where it is known; what follows for a whole plan, its schedules
and its step, is found in the room of predictions.
"""
