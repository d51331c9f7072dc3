"""``distckpt export``: the weights of one checkpoint in one safetensors file, whole or not at all."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from distckpt import human
from distckpt.checkpoint import Checkpoint
from distckpt.cli import exits, latest, output, target
from distckpt.cli.output import Output
from distckpt.durable import Files
from distckpt.errors import ConfigError, ExportError, StepNotFound
from distckpt.layout import MAIN
from distckpt.ordered import unlink_if_there
from distckpt.reader import Root

if TYPE_CHECKING:
    import torch

_TTL = 600.0
_SUFFIX = ".safetensors"
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_SHOWN = 5


def run(args: argparse.Namespace, out: Output) -> int:
    wanted = target.of(args)
    path = os.path.abspath(args.out)
    if not path.endswith(_SUFFIX):
        raise target.UsageError(f"{args.out}: the weights are written as {_SUFFIX}; name a file that ends so")
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"{os.path.dirname(path)} is not there, or is no directory: make it first")
    if os.path.lexists(path) and not args.force:
        raise ConfigError(f"{path} exists; --force replaces it")
    root = target.open_root(wanted.path, args.series)
    if wanted.step is not None:
        checkpoint = root.read(target.entry_at(root, wanted.step, args.series))
    else:
        newest = latest.choose(root, args.series or MAIN)
        if newest is None:
            raise StepNotFound(f"{root.layout.root} has no checkpoint of series {args.series or MAIN!r} yet")
        checkpoint = newest
    try:
        from distckpt.payloads import weights

        import_module("safetensors.torch")
    except ImportError as error:
        raise ExportError(f"export needs torch and safetensors (pip install 'distckpt[safetensors]'): {error}") from error
    with _leased(root, checkpoint, path, out):
        part = weights.choose(checkpoint, args.part)
        found = weights.read(checkpoint, part, args.rank)
    if not found.tensors:
        raise ExportError(f"{checkpoint.name}: {part.name!r} holds no tensor, so there is nothing to export")
    source = {"format": "pt", "distckpt": f"{checkpoint.name} {part.name} attempt {checkpoint.attempt}"}
    size = write(root.files, path, found.tensors, source, root.runtime.token(8), args.force)
    if found.left_out:
        more = f" and {len(found.left_out) - _SHOWN} more" if len(found.left_out) > _SHOWN else ""
        out.note(f"left out, since safetensors holds tensors only: {', '.join(found.left_out[:_SHOWN])}{more}")
    out.document({"name": checkpoint.name, "step": checkpoint.step, "attempt": checkpoint.attempt, "part": part.name,
                  "kind": part.kind, "tensors": len(found.tensors), "bytes": size, "path": path, "left_out": found.left_out})
    out.line(f"{checkpoint.name}: {part.name} ({part.kind}), {output.plural(len(found.tensors), 'tensor')}, {human.size(size)}, "
             f"written to {path}")
    return exits.OK


@contextmanager
def _leased(root: Root, checkpoint: Checkpoint, path: str, out: Output) -> Iterator[None]:
    """Rotation leaves it alone meanwhile. An archive that cannot be written to has no rotation here either."""
    try:
        lease = root.lease(checkpoint, f"export to {path}", _TTL)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        out.note(f"no lease could be taken ({error.strerror}); if a run rotates {checkpoint.name} away meanwhile, this fails")
        yield
        return
    with lease:
        yield


def write(files: Files, path: str, tensors: dict[str, torch.Tensor], source: dict[str, str], token: str, force: bool) -> int:
    """``tensors`` under ``path`` in one step, durably; its size. What fails leaves nothing, and an older file as it is."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{token}.partial")
    try:
        files.open(temporary).close()
        mode = os.stat(temporary).st_mode
        try:
            save_file(_apart(tensors), temporary, metadata=source)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise ExportError(f"{path} was not written: {error}") from error
        os.chmod(temporary, mode & 0o7777)  # safetensors renames one of mode 0600 over it; umask and ACL must hold
        files.fsync(temporary)
        size = files.stat(temporary).size
        if force or not files.link(temporary, path):  # without hard links another's file of this very moment is replaced
            files.rename(temporary, path)
        files.fsync_dir(folder)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; --force replaces it") from error
    finally:
        with suppress(OSError):  # what made this fail is told, and not that the rest of it stays
            unlink_if_there(files, temporary)
    return size


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each with memory of its own: tied weights are stored under every name they have."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        pointer = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if pointer in seen else whole
        seen.add(pointer)
    return found
