"""Resolution: from two annotations of an array to the communication steps between them.

Steps are priced and carried out here; exchanges, stage crossings and switches of many arrays ask
the same question.
"""
