"""The Ray runtime: one actor a host of a submesh, and a driver that starts and listens.

Clusters are measured and profiled here, and the state waits in Ray's memory while workers change.
"""
