"""The target's hidden states for packed rows: computed at every step, or read from a store on disk.

Legend: B rows of a batch, L row length, T taps, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from specheads.head import HeadInputs
from specheads.target import TargetModel
from specheads.train.data import Example
from specheads.train.losses import teacher_summary
from specheads.train.packing import PackedRows, pack
from specheads.train.store import DocumentFeatures, FeatureStore, document_key

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
    """Reads features from a store; `fill_store` comes first. `examples` are those that `rows` was packed from."""

    def __init__(
        self,
        target: TargetModel,
        examples: Sequence[Example],
        rows: PackedRows,
        taps: Sequence[int],
        store: FeatureStore,
    ) -> None:
        self.target, self.rows, self.taps, self.store = target, rows, tuple(taps), store
        length = rows.ids_RL.shape[1]
        self._keys = [document_key(example.ids[:length], example.loss_mask[:length]) for example in examples]

    def batch(self, rows: RowIndices) -> FeatureBatch:
        tokens = self.rows.tensors(rows)
        taps, last, logsumexp, argmax = zip(*(self._row(int(row)) for row in rows), strict=True)
        device = self.target.device
        inputs = HeadInputs(taps_BLTD=torch.stack(taps), last_hidden_BLD=torch.stack(last), **tokens).to(device)
        return FeatureBatch(inputs, torch.stack(logsumexp).to(device), torch.stack(argmax).to(device))

    def _row(self, row: int) -> tuple[Tensor, ...]:
        """Documents of a row one behind the other, zeros in the padding."""
        documents = [self.store.read(self._keys[member], self.taps) for member in self.rows.members[row]]
        length = self.rows.ids_RL.shape[1]
        joined = []
        for name in ("taps_LTD", "last_LD", "logsumexp_L", "argmax_L"):
            parts = [getattr(document, name) for document in documents]
            missing = length - sum(map(len, parts))
            joined.append(torch.cat([*parts, parts[0].new_zeros((missing, *parts[0].shape[1:]))]))
        return tuple(joined)


def fill_store(
    target: TargetModel, examples: Sequence[Example], store: FeatureStore, *, row_length: int, rows_per_shard: int
) -> None:
    """Compute what `store` lacks of these documents, cut to `row_length`, a shard of packed rows at a time."""
    missing: dict[str, Example] = {}
    for example in examples:
        key = document_key(example.ids[:row_length], example.loss_mask[:row_length])
        if key not in store:
            missing[key] = example
    missing = {key: example for key, example in missing.items() if example.loss_mask[:row_length].any()}
    if not missing:
        return
    keys = list(missing)
    rows = pack(list(missing.values()), row_length, seed=0)
    positions = int((rows.document_RL >= 0).sum())
    needed = store.bytes_for(positions, target.hidden_size, target.dtype)
    tqdm.write(f"features: {needed / 1e9:.2f} GB to write to {store.folder}, {positions:,} positions")
    with tqdm(total=len(rows), unit="row", desc="features") as progress:
        for start in range(0, len(rows), rows_per_shard):
            documents: dict[str, DocumentFeatures] = {}
            for row in range(start, min(start + rows_per_shard, len(rows))):
                parts = _compute_row(target, rows, row, store.taps)
                documents |= zip((keys[member] for member in rows.members[row]), parts, strict=True)
                progress.update()
            store.add(documents)


def _compute_row(target: TargetModel, rows: PackedRows, row: int, taps: Sequence[int]) -> list[DocumentFeatures]:
    tokens = {name: tensor.to(target.device) for name, tensor in rows.tensors([row]).items()}
    taps_1LTD, last_1LD = target.states(tokens["ids_BL"], position_ids=tokens["position_ids_BL"], taps=taps)
    logsumexp_L, argmax_L = summary_where_needed(target, last_1LD[0], tokens["loss_mask_BL"][0])
    lengths = np.bincount(rows.document_RL[row][rows.document_RL[row] >= 0]).tolist()
    kept = sum(lengths)
    columns = [x[:kept].cpu().split(lengths) for x in (taps_1LTD[0], last_1LD[0], logsumexp_L, argmax_L)]
    return [DocumentFeatures(*parts) for parts in zip(*columns, strict=True)]


def summary_where_needed(target: TargetModel, last_LD: Tensor, loss_mask_L: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp and argmax (L,) of the target's logits where a counted token is predicted, zero elsewhere."""
    predicts_L = torch.zeros_like(loss_mask_L)
    predicts_L[:-1] = loss_mask_L[1:]
    logsumexp_L = torch.zeros(len(last_LD), dtype=torch.float32, device=last_LD.device)
    argmax_L = torch.zeros(len(last_LD), dtype=torch.int64, device=last_LD.device)
    if predicts_L.any():
        logsumexp_N, argmax_N = teacher_summary(last_LD[predicts_L], target.logits)
        logsumexp_L[predicts_L], argmax_L[predicts_L] = logsumexp_N.float(), argmax_N
    return logsumexp_L, argmax_L
