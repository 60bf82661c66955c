"""The target's hidden states on disk, by document: written while it answers or before training, read by training.

A folder holds safetensors shards and a manifest. A shard holds tapped states, the final state and two numbers a
position (logsumexp and argmax of the target's logits, so that a small draft vocabulary needs only its own rows of the
projection), never logits; its header says which documents stand where. A shard appears whole or not at all, so an
interrupted build goes on with the documents that are missing, and any packing, split or head that needs no other taps
can use the folder.

Legend: N positions of all documents in a shard, L positions of one, T taps, D width.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specheads.errors import UserError
from specheads.target import TargetModel

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class DocumentFeatures:
    """Features at each position of a document: taps (L, T, D), final state (L, D), and logsumexp and argmax (L,) of the
    target's logits where a counted token is predicted (0 elsewhere)."""

    taps_LTD: Tensor
    last_LD: Tensor
    logsumexp_L: Tensor
    argmax_L: Tensor


def document_key(ids: npt.ArrayLike, loss_mask: npt.ArrayLike) -> str:
    """What a document is found by: 24 hex digits of its token ids and of which of them count."""
    hasher = hashlib.sha256(np.asarray(ids, "<i4").tobytes())
    hasher.update(np.packbits(np.asarray(loss_mask, bool)).tobytes())
    return hasher.hexdigest()[:24]


class FeatureStore:
    """A folder of features of one target.

    Args:
        folder: made when it is not there.
        taps: tapped layers wanted; a folder that holds more will do. The final state is always there.

    Raises:
        UserError: the folder holds features of another target or lacks a tap, or cannot be read or written.
    """

    def __init__(self, folder: Path, target: TargetModel, taps: Sequence[int]) -> None:
        self.folder, self._final = folder, target.num_layers
        needed = [tap for tap in taps if tap != self._final]
        manifest = {
            "target": target.fingerprint,
            "target_name": target.model.name_or_path,
            "dtype": str(target.dtype),
            "taps": needed,
        }
        found = self._open_manifest(manifest)
        for key in ("target", "target_name", "dtype"):
            if found.get(key) != manifest[key]:
                raise UserError(
                    f"feature cache {str(folder)!r} has {key} {found.get(key)!r}, this run needs {manifest[key]!r}; "
                    "delete it or choose another folder"
                )
        self.taps: tuple[int, ...] = tuple(found.get("taps", ()))
        if not set(needed) <= set(self.taps):
            raise UserError(
                f"feature cache {str(folder)!r} has taps {list(self.taps)}, this run needs {needed}; delete it or "
                "choose another folder"
            )
        self._shards: list[Any] = []
        self._places: dict[str, tuple[int, int, int]] = {}  # key: shard, first position, positions
        for path in sorted(folder.glob("shard-*.safetensors")):
            self._open_shard(path)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def bytes_for(self, positions: int, width: int, dtype: torch.dtype) -> int:
        """Estimate of the disk space that so many positions take."""
        return positions * ((len(self.taps) + 1) * width * dtype.itemsize + 12)

    def add(self, documents: dict[str, DocumentFeatures]) -> None:
        """Write documents as one shard.

        Raises:
            UserError: the disk is full, or the folder cannot be written.
        """
        lengths = [len(features.last_LD) for features in documents.values()]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        index = [[key, start, length] for key, start, length in zip(documents, starts, lengths, strict=True)]
        tensors = {
            "taps": torch.cat([features.taps_LTD for features in documents.values()]),
            "last": torch.cat([features.last_LD for features in documents.values()]),
            "logsumexp": torch.cat([features.logsumexp_L for features in documents.values()]),
            "argmax": torch.cat([features.argmax_L for features in documents.values()]),
        }
        path = self.folder / f"shard-{self._next_number():05d}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"index": json.dumps(index)}
            )
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise self._unusable(error) from error
        self._open_shard(path)

    def read(self, key: str, taps: Sequence[int]) -> DocumentFeatures:
        """Features of a document; `taps` in the order wanted."""
        shard, start, length = self._places[key]
        file, part = self._shards[shard], slice(start, start + length)
        last_LD, stored_LTD = file.get_slice("last")[part], file.get_slice("taps")[part]
        columns = [last_LD if tap == self._final else stored_LTD[:, self.taps.index(tap)] for tap in taps]
        taps_LTD = torch.stack(columns, dim=1) if columns else stored_LTD[:, :0]
        return DocumentFeatures(taps_LTD, last_LD, file.get_slice("logsumexp")[part], file.get_slice("argmax")[part])

    def _open_shard(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            index = json.loads((file.metadata() or {})["index"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it, and it will be made again") from error
        for key, start, length in index:
            self._places[key] = (len(self._shards), start, length)
        self._shards.append(file)

    def _next_number(self) -> int:
        numbers = [int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.safetensors")]
        return max(numbers, default=-1) + 1

    def _open_manifest(self, manifest: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            if path.exists():
                return dict(json.loads(path.read_text(encoding="utf-8")))
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, path)
            return manifest
        except (OSError, ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UserError:
        return UserError(f"feature cache {str(self.folder)!r} cannot be used ({error}); choose another folder")
