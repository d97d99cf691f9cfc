"""The plan as data: its fields, file and text, what it implies and what it costs to rent.

Every planner makes it and both runtimes run it; this room knows no planner.
"""
