"""What the command's exit code says: a script's only reliable answer."""

from __future__ import annotations

OK, FAILED, USAGE, NO_CHECKPOINT, NONE_USABLE, DAMAGED, IN_USE = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for a process that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """The command line does not make sense; exit code 2."""


TABLE = """\
exit codes:
  0  it is as asked
  1  an error; one line on stderr says what failed, where, what was seen and what to do
  2  the command line does not make sense
  3  no checkpoint: there is none at all, or none of that step
  4  checkpoints are there and none is usable; the reasons are on stderr
  5  verify found damage
  6  the root is in use by a live writer
doctor has its own, for job prologs: 0 nothing would fail, 1 warnings (with --strict), 2 something would fail
"""
