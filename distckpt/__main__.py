"""``python -m distckpt``: the same as the command ``distckpt``."""

from __future__ import annotations

import sys

from distckpt.cli.main import main

sys.exit(main())
