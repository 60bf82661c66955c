"""The target's hidden states for packed rows: computed in process, or kept on disk.

On disk stand safetensors shards of `rows_per_shard` rows and a manifest. They hold tapped states, the final state and
two numbers a position (logsumexp and argmax of the target's logits, so that a small draft vocabulary needs only its own
rows of the projection), never logits. A build that was interrupted goes on with the first missing shard.

Legend: R rows, B rows of a batch, L row length, T taps, D width.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from specheads.errors import UserError
from specheads.head import HeadInputs
from specheads.target import TargetModel
from specheads.train.losses import teacher_summary
from specheads.train.packing import PackedRows

MANIFEST = "manifest.json"
RowIndices: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class FeatureBatch:
    """Inputs of a training forward and, when known, the target's logsumexp and argmax at each position (B, L)."""

    inputs: HeadInputs
    logsumexp_BL: Tensor | None = None
    argmax_BL: Tensor | None = None


class Features(Protocol):
    """Where a training step gets its features from."""

    rows: PackedRows

    def batch(self, rows: RowIndices) -> FeatureBatch: ...


class LiveFeatures:
    """Runs the target at every step; nothing is kept."""

    def __init__(self, target: TargetModel, rows: PackedRows, taps: Sequence[int]) -> None:
        self.target, self.rows, self.taps = target, rows, taps

    def batch(self, rows: RowIndices) -> FeatureBatch:
        tokens = {name: tensor.to(self.target.device) for name, tensor in self.rows.tensors(rows).items()}
        taps_BLTD, last_BLD = self.target.states(
            tokens["ids_BL"], position_ids=tokens["position_ids_BL"], taps=self.taps
        )
        return FeatureBatch(HeadInputs(taps_BLTD=taps_BLTD, last_hidden_BLD=last_BLD, **tokens))


class CachedFeatures:
    """Features in a folder; built on the first use, read from then on. Heads that need no other taps can share it."""

    def __init__(
        self, target: TargetModel, rows: PackedRows, taps: Sequence[int], folder: Path, rows_per_shard: int, digest: str
    ) -> None:
        self.target, self.rows, self.folder, self.rows_per_shard = target, rows, folder, rows_per_shard
        self.taps = tuple(taps)
        self.stored_taps = self._find_stored_taps()
        self._manifest = {
            "target": target.fingerprint,
            "target_name": target.model.name_or_path,
            "dtype": str(target.dtype),
            "taps": list(self.stored_taps),
            "rows": len(rows),
            "row_length": rows.ids_RL.shape[1],
            "rows_per_shard": rows_per_shard,
            "data": digest,
            "packing": _packing_digest(rows),
        }
        self._open_shards: dict[int, Any] = {}

    @property
    def bytes_needed(self) -> int:
        """Estimate of the disk space that the features take."""
        position = (len(self.stored_taps) + 1) * self.target.hidden_size * self.target.dtype.itemsize + 12
        return self.rows.ids_RL.size * position

    def build(self) -> None:
        """Compute and write the shards that are not there yet.

        Raises:
            UserError: the folder holds features of another target, other taps or other data, or cannot be written.
        """
        shards = range(-(-len(self.rows) // self.rows_per_shard))
        missing = [shard for shard in shards if not self._path(shard).exists()]
        self._check_manifest()
        if not missing:
            return
        needed = self.bytes_needed * len(missing) / len(shards)
        tqdm.write(f"features: {needed / 1e9:.2f} GB to write to {self.folder}, {len(missing)} shards")
        for shard in tqdm(missing, unit="shard", desc="features"):
            self._write(shard)

    def batch(self, rows: RowIndices) -> FeatureBatch:
        stored = [self._row(int(row)) for row in rows]
        last_BLD = torch.stack([row["last"] for row in stored])
        by_tap = {tap: torch.stack([row["taps"][:, i] for row in stored]) for i, tap in enumerate(self.stored_taps)}
        by_tap[self.target.num_layers] = last_BLD
        empty = last_BLD[:, :, None, :][:, :, :0]
        taps_BLTD = torch.stack([by_tap[tap] for tap in self.taps], dim=2) if self.taps else empty
        tokens = self.rows.tensors(rows)
        device = self.target.device
        return FeatureBatch(
            HeadInputs(taps_BLTD=taps_BLTD, last_hidden_BLD=last_BLD, **tokens).to(device),
            torch.stack([row["logsumexp"] for row in stored]).to(device),
            torch.stack([row["argmax"] for row in stored]).to(device),
        )

    def _row(self, row: int) -> dict[str, Tensor]:
        shard, place = divmod(row, self.rows_per_shard)
        if shard not in self._open_shards:
            self._open_shards[shard] = safe_open(self._path(shard), framework="pt")
        file = self._open_shards[shard]
        return {name: file.get_slice(name)[place] for name in ("taps", "last", "logsumexp", "argmax")}

    def _write(self, shard: int) -> None:
        start = shard * self.rows_per_shard
        parts: dict[str, list[Tensor]] = {"taps": [], "last": [], "logsumexp": [], "argmax": []}
        for row in range(start, min(start + self.rows_per_shard, len(self.rows))):
            tokens = {name: tensor.to(self.target.device) for name, tensor in self.rows.tensors([row]).items()}
            taps_1LTD, last_1LD = self.target.states(
                tokens["ids_BL"], position_ids=tokens["position_ids_BL"], taps=self.stored_taps
            )
            logsumexp_L, argmax_L = _summary_where_needed(self.target, last_1LD[0], tokens["loss_mask_BL"][0])
            for name, tensor in zip(parts, (taps_1LTD[0], last_1LD[0], logsumexp_L, argmax_L), strict=True):
                parts[name].append(tensor.cpu())
        path = self._path(shard)
        partial = path.with_suffix(".partial")
        save_file({name: torch.stack(tensors).contiguous() for name, tensors in parts.items()}, partial)
        os.replace(partial, path)

    def _find_stored_taps(self) -> tuple[int, ...]:
        """Those that the folder already holds, when they are enough; else the head's. The final state is kept once."""
        needed = tuple(tap for tap in self.taps if tap != self.target.num_layers)
        found = self._read_manifest()
        stored = needed if found is None else tuple(found.get("taps", ()))
        return stored if set(needed) <= set(stored) else needed

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def _read_manifest(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
        except (OSError, ValueError, TypeError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> UserError:
        return UserError(f"feature cache {str(self.folder)!r} cannot be used ({error}); choose another folder")

    def _check_manifest(self) -> None:
        found = self._read_manifest()
        if found is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                partial = self.folder / (MANIFEST + ".partial")
                partial.write_text(json.dumps(self._manifest, indent=2) + "\n", encoding="utf-8")
                os.replace(partial, self.folder / MANIFEST)
            except OSError as error:
                raise self._unusable(error) from error
            return
        for key, value in self._manifest.items():
            if found.get(key) != value:
                raise UserError(
                    f"feature cache {str(self.folder)!r} has {key} {found.get(key)!r}, this run needs {value!r}; "
                    "delete it or choose another folder"
                )


def _packing_digest(rows: PackedRows) -> str:
    """SHA-256 (hexadecimal) of what stands where: the same data packed with another seed makes other rows."""
    hasher = hashlib.sha256()
    for array in (rows.ids_RL, rows.position_ids_RL, rows.loss_mask_RL):
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def _summary_where_needed(target: TargetModel, last_LD: Tensor, loss_mask_L: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp and argmax (L,) where a counted token is predicted, zero elsewhere."""
    predicts_L = torch.zeros_like(loss_mask_L)
    predicts_L[:-1] = loss_mask_L[1:]
    logsumexp_L = torch.zeros(len(last_LD), dtype=torch.float32, device=last_LD.device)
    argmax_L = torch.zeros(len(last_LD), dtype=torch.int64, device=last_LD.device)
    if predicts_L.any():
        logsumexp_N, argmax_N = teacher_summary(last_LD[predicts_L], target.logits)
        logsumexp_L[predicts_L], argmax_L[predicts_L] = logsumexp_N.float(), argmax_N
    return logsumexp_L, argmax_L
