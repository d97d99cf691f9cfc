"""What a worker does in one step, written as a list before the first one.

Buffers and the instructions on them, where every buffer lies, and which rows of parameters several
stages hold.
"""
