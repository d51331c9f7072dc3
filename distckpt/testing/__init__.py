"""Tools for tests of checkpointing: a file system with crash rules, faults at the n-th operation, a clock that jumps.

Public, and free of torch. ``crashfs.CrashFiles``, ``faults.FaultyFiles`` and ``clock.VirtualRuntime`` take the place of
the seams to files and machine that the library is handed from above. ``trace`` and ``replay`` put what a real program
did, under strace, on such a file system.

``simulation.Simulation`` puts them together: all ranks of a job in one process, every schedule from a seed, processes that are
killed, stopped and slowed, power cuts, a restart, and a judgement (``checker``). It needs torch and the greenlet package;
``explore`` walks every schedule within a bound. README, "Your own loop under it", has both ways in use.
"""
