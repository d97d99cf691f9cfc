"""The local runtime: all stages in one process, each on its own devices and thread.

It can play a cluster, and measures runs of layers on this process's devices.
"""
