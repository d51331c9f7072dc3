"""The command ``distckpt``: its arguments, and what its exit code says."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from distckpt import __version__
from distckpt.cli import exits
from distckpt.cli.exits import UsageError
from distckpt.cli.output import Logged, Output, complain, hush
from distckpt.errors import DistckptError, NoUsableCheckpoint, RootInUse, StepNotFound

_EPILOG = f"""\
ROOT@STEP names one checkpoint (or give --step N); a directory of exactly that name wins over an '@' in it.

{exits.TABLE}"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see '{self.prog} --help')")


def parser() -> argparse.ArgumentParser:
    """The command's arguments; each sub-command names the module that runs it."""
    top = _Parser(prog="distckpt", description="Look after the checkpoints of a training run.", epilog=_EPILOG,
                  formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"distckpt {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, module: str, summary: str, root: str = "ROOT", more: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False)
        made.add_argument("root", metavar=root, help=f"the directory of the run's checkpoints{more}")
        made.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document, for scripts")
        made.set_defaults(module=module)
        return made

    def series(made: argparse.ArgumentParser, default: str | None, text: str) -> None:
        made.add_argument("--series", metavar="S", default=default, help=text)

    def step(made: argparse.ArgumentParser) -> None:
        made.add_argument("--step", type=_number, metavar="N", help="the checkpoint's step, instead of ROOT@STEP")

    def dry(made: argparse.ArgumentParser) -> None:
        made.add_argument("--dry-run", action="store_true", help="say what would be done, and why; change nothing, claim nothing")

    ls = command("ls", "ls", "list the checkpoints of a root, newest commit first")
    series(ls, None, "only this series (default: all)")

    show = command("show", "show", "show everything about one checkpoint (default: the one to resume from)", "ROOT[@STEP]")
    series(show, None, "the checkpoint's series (default: main first)")
    step(show)
    show.add_argument("--all", action="store_true", help="all files, not only the first 20")

    latest = command("latest", "latest", "print the path of the checkpoint to resume from, and nothing else")
    series(latest, "main", "of this series (default: main)")

    verify = command("verify", "verify", "check checkpoints against their markers: every file and its size",
                     "ROOT[@STEP]|CHECKPOINT_DIR", ", or of one of them")
    series(verify, None, "only this series (default: all)")
    step(verify)
    verify.add_argument("--digest", action="store_true",
                        help="read every byte too; a checkpoint that passes is no longer rejected")

    prune = command("prune", "prune", "remove the checkpoints that retention lets go, and say why each stays or goes")
    series(prune, "main", "of this series (default: main)")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest (default: the policy the run recorded)")
    prune.add_argument("--keep-every", type=int, metavar="K", help="also keep steps that are a multiple of K")
    prune.add_argument("--keep-best", type=int, metavar="N", help="also keep the N best by --best-metric")
    prune.add_argument("--best-metric", metavar="M", help="the metric for --keep-best")
    prune.add_argument("--best-mode", choices=("min", "max"), help="whether small or large is best (default: min)")
    dry(prune)

    gc = command("gc", "gc", "settle what crashes left: publish committed attempts, remove dead ones, empty the trash")
    dry(gc)

    adopt = command("adopt", "adopt", "make checkpoints of directories without a marker, or of another run's")
    adopt.add_argument("names", nargs="*", metavar="NAME", help="directories in ROOT")
    adopt.add_argument("--all", action="store_true", help="every directory without a marker that is named like a checkpoint")
    adopt.add_argument("--metric", action="append", default=[], type=_metric, metavar="K=V",
                       help="a metric to record; repeatable")
    adopt.add_argument("--naming", metavar="TEMPLATE", help="how checkpoints of a new root are named, as in 'checkpoint-{step}'")
    dry(adopt)

    pin = command("pin", "pins", "keep a checkpoint from rotation until it is unpinned", "ROOT@STEP")
    series(pin, None, "the checkpoint's series (default: main first)")
    step(pin)
    pin.add_argument("--reason", default="pinned by hand", help="shown wherever the pin is")

    unpin = command("unpin", "pins", "remove the pins of a checkpoint; leases of live readers stay", "ROOT@STEP")
    series(unpin, None, "the checkpoint's series (default: main first)")
    step(unpin)

    request = command("request-save", "request", "ask the run that writes to a root for a checkpoint now")
    request.add_argument("--reason", default="", help="shown where the run says why it saves, as in todo.reason")

    doctor = command("doctor", "doctor", "look whether a job could keep its checkpoints in a root; run it as the job is run")
    doctor.add_argument("--strict", action="store_true", help="exit with 1 when there are warnings")
    doctor.add_argument("--storage", choices=("shared", "node-local"), default="shared",
                        help="as the manager's storage=: one root for all nodes, or each node's own disk")
    doctor.add_argument("--size", type=_count, metavar="MIB", default=16,
                        help="of each rank's part of the small save (default 16)")
    doctor.add_argument("--wait", type=_seconds, metavar="S", default=120.0,
                        help="seconds that a rank looks for another's file on a network file system (default: 120)")
    doctor.add_argument("--timeout", type=_seconds, metavar="S", default=120.0,
                        help="seconds until a rank that does not come is given up (default: 120)")

    export = command("export", "export", "write the weights of one checkpoint (default: the one to resume from) to a safetensors "
                     "file", "ROOT[@STEP]")
    export.add_argument("out", metavar="OUT.safetensors", help="the file to make; it appears whole or not at all")
    series(export, None, "the checkpoint's series (default: main first)")
    step(export)
    export.add_argument("--part", metavar="P", help="which of several parts, as in 'ema' (default: the only one, or the model)")
    export.add_argument("--rank", type=_number, metavar="N", help="what rank N wrote, where each rank has values of its own")
    export.add_argument("--force", action="store_true", help="replace OUT if it exists")

    return top


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"it must be a whole number, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return _number(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is needed, not {text!r}")
    return number


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not name or number is None:
        raise argparse.ArgumentTypeError(f"a metric is NAME=NUMBER, not {text!r}")
    return name, number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code and never raises for what a user or a disk can do."""
    log, handler = logging.getLogger("distckpt"), Logged()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return _run(argv)
    except BrokenPipeError:
        hush()
        return exits.BROKEN_PIPE
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parser().parse_args(argv)
        run = import_module(f"distckpt.cli.{args.module}").run
        code = int(run(args, Output(args.as_json)))
        sys.stdout.flush()
        return code
    except SystemExit as end:  # --help and --version
        sys.stdout.flush()
        return int(end.code or 0)
    except UsageError as error:
        complain(str(error))
        return exits.USAGE
    except DistckptError as error:
        complain(str(error))
        return _code(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}; check the path, its permissions and the file system, then run this again")
        return exits.FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return exits.INTERRUPTED


def _code(error: DistckptError) -> int:
    if isinstance(error, RootInUse):
        return exits.IN_USE
    if isinstance(error, NoUsableCheckpoint):
        return exits.NONE_USABLE
    return exits.NO_CHECKPOINT if isinstance(error, StepNotFound) else exits.FAILED
