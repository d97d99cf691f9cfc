"""Resolution: from two annotations of an array to the communication steps between them.

Steps are named and priced here; crossings, which the runtime carries out, and switches of many
arrays ask the same question.
"""
