"""Every message, id, subject and limit of the mesh: the bottom of the import graph.

Pure: msgspec, numpy and hashlib only. Nothing here reads a clock, a socket or the environment.
"""
