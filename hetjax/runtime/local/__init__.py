"""The local runtime: all stages in one process, each on its own devices and thread.

It can play a cluster, measures runs of layers on this process's devices, and runs annotated
functions.
"""
