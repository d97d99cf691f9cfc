"""The HSPMD annotation: how one array lies on a union of unlike meshes.

Sharding rules, files, and the bounds and symbolic sizes that annotations are made of.
"""
