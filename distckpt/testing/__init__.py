"""Tools for tests of checkpointing: a file system with crash rules, faults at the n-th operation, a clock that jumps.

Public, and free of torch. ``crashfs.CrashFiles``, ``faults.FaultyFiles`` and ``clock.VirtualRuntime`` take the place of
the seams to files and machine that the library is handed from above. ``trace`` and ``replay`` put what a real program
did, under strace, on such a file system.
"""
