"""Deduction: from annotations of some values of a program to those of all.

Each primitive has a signature that says how its dimensions belong together; `reshard` asks for a
change, and specialization makes one program a submesh.
"""
