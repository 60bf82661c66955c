"""Documents packed into rows of one length, and the order in which training reads the rows.

Legend: R rows, L row length, B rows of one batch. Within a row `document` tells the documents apart (0, 1, ...; -1 is
padding, which follows the last document) and positions restart at 0 in each: attention stays inside a document.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specheads.errors import UserError
from specheads.train.data import Example

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows as arrays. `members[r]` lists the examples in row r; the counts say what packing cut or left out."""

    ids_RL: npt.NDArray[np.int32]
    position_ids_RL: npt.NDArray[np.int32]
    document_RL: npt.NDArray[np.int32]
    loss_mask_RL: npt.NDArray[np.bool_]
    members: list[list[int]]
    truncated: int
    dropped: int

    def __len__(self) -> int:
        return len(self.members)

    @property
    def fill(self) -> float:
        """Share of the tokens that are not padding."""
        return float((self.document_RL >= 0).mean())

    def tensors(self, rows: Any) -> "dict[str, Tensor]":
        """The chosen rows on the CPU: ids_BL, position_ids_BL, document_BL (int64) and loss_mask_BL (bool)."""
        import torch

        return {
            "ids_BL": torch.from_numpy(self.ids_RL[rows].astype(np.int64)),
            "position_ids_BL": torch.from_numpy(self.position_ids_RL[rows].astype(np.int64)),
            "document_BL": torch.from_numpy(self.document_RL[rows].astype(np.int64)),
            "loss_mask_BL": torch.from_numpy(self.loss_mask_RL[rows]),
        }


def pack(examples: Sequence[Example], length: int, *, seed: int, pad_id: int = 0) -> PackedRows:
    """Pack documents into rows of `length` tokens: best fit, longest first, the order among equals drawn from `seed`.

    A document is never split. One longer than a row is cut (counted in `truncated`); where that leaves no counted token
    it is left out (counted in `dropped`).

    Raises:
        UserError: a length below 2, or nothing to pack.
    """
    if length < 2:
        raise UserError(f"the row length is {length}, expected at least 2 tokens")
    generator = np.random.default_rng(seed)
    order = [int(i) for i in generator.permutation(len(examples)) if examples[i].loss_mask[:length].any()]
    if not order:
        raise UserError(
            f"none of {len(examples)} documents has a counted token within {length} tokens; use longer rows"
        )
    members = _best_fit([(i, min(len(examples[i].ids), length)) for i in order], length)
    shape = (len(members), length)
    ids_RL, position_ids_RL = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32)
    document_RL, loss_mask_RL = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, inside in enumerate(members):
        start = 0
        for document, index in enumerate(inside):
            example = examples[index]
            end = min(start + len(example.ids), length)
            ids_RL[row, start:end] = example.ids[: end - start]
            loss_mask_RL[row, start:end] = example.loss_mask[: end - start]
            position_ids_RL[row, start:end] = np.arange(end - start)
            document_RL[row, start:end] = document
            start = end
    truncated = sum(len(examples[i].ids) > length for i in order)
    return PackedRows(
        ids_RL, position_ids_RL, document_RL, loss_mask_RL, members, truncated, dropped=len(examples) - len(order)
    )


def _best_fit(sized: list[tuple[int, int]], length: int) -> list[list[int]]:
    """Rows of indices from (index, size) pairs: each goes to the fullest row that has room for it."""
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index, size in sorted(sized, key=lambda pair: -pair[1]):  # stable: equals stay in drawn order
        at = bisect_left(room, (size, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = length, len(members)
            members.append([])
        members[row].append(index)
        if free > size:
            insort(room, (free - size, row))
    return members


class RowBatches:
    """An endless stream of batches of row indices: a fresh order in each epoch, no short batch.

    The order is a function of (seed, epoch) alone; a batch that an epoch's end would cut short goes on in the next
    epoch's order. One step takes `rows_per_step` rows on each rank: rank r of W takes rows [r, r + 1) * rows_per_step
    of the step's W * rows_per_step. So any step is looked up by its number, and that number is all one needs to resume:

        batches = RowBatches(len(rows), rows_per_step=4, seed=0)
        for step, index in enumerate(batches.from_step(120), start=120): ...

    To resume with another world size, pass as `first_row` how many rows were read in all, and count steps from there.

    Raises:
        UserError: nothing to read, or no rows in a step.
    """

    def __init__(
        self, rows: int, *, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1, first_row: int = 0
    ) -> None:
        if rows < 1 or rows_per_step < 1:
            raise UserError(f"{rows_per_step} rows a step from {rows} rows, expected at least 1 of each")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist in a world of {world_size}")
        self.rows, self.rows_per_step, self.seed = rows, rows_per_step, seed
        self.rank, self.world_size, self.first_row = rank, world_size, first_row
        self._order = lru_cache(maxsize=2)(self._draw_order)  # a step touches two epochs at most, save in tiny data

    def for_rank(self, rank: int) -> "RowBatches":
        """The same stream as another rank reads it."""
        if rank == self.rank:
            return self
        options = {"world_size": self.world_size, "first_row": self.first_row}
        return RowBatches(self.rows, rows_per_step=self.rows_per_step, seed=self.seed, rank=rank, **options)

    @property
    def steps_per_epoch(self) -> float:
        return self.rows / (self.rows_per_step * self.world_size)

    def rows_read(self, step: int) -> int:
        """Rows that all ranks together have read when `step` steps are done, `first_row` included."""
        return self.first_row + step * self.rows_per_step * self.world_size

    def epoch(self, step: int) -> float:
        """How often the data was read when `step` steps are done."""
        return self.rows_read(step) / self.rows

    def at(self, step: int) -> npt.NDArray[np.int64]:
        """Row indices of a step on this rank, shape (rows_per_step,)."""
        start = self.rows_read(step) + self.rank * self.rows_per_step
        places = np.arange(start, start + self.rows_per_step)
        return np.array([self._order(place // self.rows)[place % self.rows] for place in places.tolist()], np.int64)

    def from_step(self, step: int) -> Iterator[npt.NDArray[np.int64]]:
        while True:
            yield self.at(step)
            step += 1

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        return self.from_step(0)

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)
