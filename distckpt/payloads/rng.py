"""Random states of this rank, as tensors and JSON values: python, numpy, torch, and CUDA when present.

numpy's own state tuple is refused by ``weights_only``, and python's is a tuple of 625 integers; both become tensors.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from typing import Any

import torch

log = logging.getLogger(__name__)


class Rng:
    """``state_dict`` / ``load_state_dict`` over the global generators of this process."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
            "seed": torch.initial_seed(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = {"kind": str(kind), "keys": torch.tensor(keys.astype("int64")), "position": int(position),
                              "has_gauss": int(has_gauss), "cached": float(cached)}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            saved = state["numpy"]
            numpy.random.set_state((saved["kind"], saved["keys"].numpy().astype("uint32"), saved["position"],
                                    saved["has_gauss"], saved["cached"]))
        if "cuda" in state and torch.cuda.is_available():
            count = torch.cuda.device_count()
            if len(state["cuda"]) == count:
                torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
            else:
                log.warning("RNG states of %d CUDA devices were saved and %d are here: the CUDA generators keep their seed",
                            len(state["cuda"]), count)

    def reseed(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Another number of ranks: new, reproducible streams from the first rank's seed. Says so."""
        seed = int(states[0]["seed"])
        text = hashlib.sha256(f"{seed}/{world}/{rank}".encode()).digest()
        fresh = int.from_bytes(text[:8], "little") >> 1
        random.seed(fresh)
        torch.manual_seed(fresh)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(fresh % (1 << 32))
        log.warning("RNG: saved by %d ranks, loaded by %d: rank %d's streams start anew, derived from seed %d", len(states),
                    world, rank, seed)
