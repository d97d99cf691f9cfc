"""The traced program: a loss function as a flat list of steps, and what they cost.

Everything else of the pipeline is made of it. It knows nothing of stages, devices or schedules.
"""
