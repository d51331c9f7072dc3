"""Storage domains: ranks that see one disk under the root, where the nodes' disks are their own.

One committer for each, one decision for all: see ``opening`` for the start, ``parts`` for a save.
"""
