"""Reading what DCP wrote, without DCP's trust in it.

DCP unpickles ``.metadata`` and every value that is no tensor without restriction, and opens whatever path ``.metadata``
names. Here the metadata must have the digest of the marker, and even then may name only the classes that DCP's metadata is
made of; values are loaded with ``weights_only=True``; and only files of the manifest are opened, through no link.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint._nested_dict import set_element  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from distckpt.checkpoint import Checkpoint
from distckpt.errors import IntegrityError

METADATA = ".metadata"
_FORMATS = _metadata._MEM_FORMAT_ENCODING


def _format_by_name(owner: Any, name: Any) -> Any:
    """``getattr``, as Python 3.11 pickles a member of an enumeration by it, and for that one only."""
    if owner is not _FORMATS or name not in _FORMATS.__members__:
        raise pickle.UnpicklingError(f"it asks for an attribute {name!r} of {owner!r}")
    return _FORMATS.__members__[name]


_PATH: Any = pathlib.PurePosixPath  # where it was saved, which nobody reads; the real class asks what system this is
_NAMES: dict[tuple[str, str], Any] = {
    **{(_metadata.__name__, name): getattr(_metadata, name) for name in (
        "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta", "Metadata",
        "MetadataIndex", "_MEM_FORMAT_ENCODING")},
    (_filesystem.__name__, "_StorageInfo"): _filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _format_by_name,
    **{(module, name): _PATH for module in ("pathlib", "pathlib._local")
       for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP's metadata is not made of")
        return found


def unpickled(file: IO[bytes]) -> Metadata:
    """DCP's metadata from an open file; an exception of any kind when it is short, or more than metadata."""
    found = _Unpickler(file).load()
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return found


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """DCP's metadata of ``checkpoint``; IntegrityError when it is not what was committed, or is more than metadata. Local."""
    with checkpoint.open(METADATA) as file:
        try:
            found = unpickled(file)
        except Exception as error:  # a pickle that is not of DCP's making can raise anything
            raise IntegrityError(f"{checkpoint.name}: {METADATA} is not loaded ({type(error).__name__}: {error}): it was not "
                                 "written by torch.distributed.checkpoint, or by a newer one than this distckpt knows",
                                 files={METADATA: str(error)}) from error
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


class _Manifest(_filesystem.FileSystem):
    """DCP's way to files: those of the manifest, for reading. Their digests are resume's business: no code stands in them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "rb", mode
        with self._checkpoint.open(os.path.relpath(path, self._checkpoint.directory), digest=False) as file:
            yield file


class Reader(FileSystemReader):
    """DCP's own file reader over ``found``.

    ``held``: an error from before DCP's collectives, raised inside the first of them, where DCP brings it to every rank.
    """

    def __init__(self, checkpoint: Checkpoint, found: Metadata, held: Exception | None) -> None:
        super().__init__(checkpoint.directory)
        self.fs = _Manifest(checkpoint)
        self._found, self._held = found, held

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._found  # with an error held it is empty: what is raised here, DCP swallows

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        if self._held is not None:
            raise self._held
        super().set_up_storage_reader(*args, **kwargs)


class Planner(DefaultLoadPlanner):
    """DCP's own planner, which executes nothing: a value that needs more is refused when it is saved."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], torch.load(value, weights_only=True))
