"""Packing and the order of rows: nothing is lost, split or repeated, and any step can be looked up."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.errors import UserError
from specheads.train.data import Example
from specheads.train.packing import PackedRows, RowBatches, pack


def documents(lengths: list[int], prompt: int = 1) -> list[Example]:
    """Documents whose tokens are all different, the first `prompt` of each not counted."""
    starts = np.cumsum([0, *lengths])
    return [
        Example(np.arange(start, start + n, dtype=np.int32) + 1, np.arange(n) >= prompt, str(start), n)
        for start, n in zip(starts, lengths, strict=False)
    ]


def unpacked(rows: PackedRows) -> dict[int, tuple[list[int], list[bool], list[int]]]:
    """Example index -> its ids, mask and positions as they stand in its row."""
    found = {}
    for row, members in enumerate(rows.members):
        for document, index in enumerate(members):
            inside = rows.document_RL[row] == document
            places = np.flatnonzero(inside)
            assert (np.diff(places) == 1).all()
            assert index not in found
            found[index] = tuple(
                x[row][inside].tolist() for x in (rows.ids_RL, rows.loss_mask_RL, rows.position_ids_RL)
            )
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=40), st.integers(2, 12), st.integers(0, 5))
def test_every_document_stands_whole_in_one_row(lengths: list[int], length: int, seed: int) -> None:
    examples = documents(lengths, prompt=0)
    rows = pack(examples, length, seed=seed, pad_id=7777)
    assert rows.ids_RL.shape == (len(rows), length)
    found = unpacked(rows)
    assert sorted(found) == list(range(len(examples)))
    for index, (ids, mask, positions) in found.items():
        kept = min(lengths[index], length)
        assert ids == examples[index].ids[:kept].tolist()
        assert mask == examples[index].loss_mask[:kept].tolist()
        assert positions == list(range(kept))
    padding = rows.document_RL == -1
    assert (rows.ids_RL[padding] == 7777).all()
    assert not rows.loss_mask_RL[padding].any()
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # padding only at the end
    assert rows.truncated == sum(n > length for n in lengths)
    assert rows.dropped == 0
    assert rows.fill == pytest.approx(sum(min(n, length) for n in lengths) / rows.ids_RL.size)
    # Best fit: no two rows could share one.
    free = sorted(padding.sum(1))
    assert len(free) < 2 or (length - free[-1]) + (length - free[-2]) > length


def test_documents_whose_answer_is_cut_off_are_left_out() -> None:
    rows = pack(documents([3, 9, 12], prompt=8), 9, seed=0)
    assert sorted(rows.members) == [[1], [2]]
    assert (rows.dropped, rows.truncated) == (1, 1)
    with pytest.raises(UserError, match="none of 2 documents"):
        pack(documents([9, 12], prompt=8), 8, seed=0)
    with pytest.raises(UserError, match="row length is 1"):
        pack(documents([3]), 1, seed=0)


def test_packing_is_a_function_of_the_seed() -> None:
    examples = documents([3, 5, 4, 4, 4, 2, 6, 3, 3, 3])
    first, again, other = (pack(examples, 8, seed=seed) for seed in (0, 0, 1))
    assert first.members == again.members
    assert (first.ids_RL == again.ids_RL).all()
    assert first.members != other.members


def test_twenty_thousand_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 20_000).tolist()
    rows = pack(documents(lengths), 1024, seed=0)
    assert rows.fill > 0.99


def test_tensors_of_chosen_rows() -> None:
    rows = pack(documents([3, 5, 4]), 6, seed=0)
    batch = rows.tensors(np.array([1, 0]))
    assert {name: x.dtype for name, x in batch.items()} == {
        "ids_BL": torch.int64,
        "position_ids_BL": torch.int64,
        "document_BL": torch.int64,
        "loss_mask_BL": torch.bool,
    }
    assert batch["ids_BL"].tolist() == rows.ids_RL[[1, 0]].tolist()
    batch["loss_mask_BL"].zero_()
    assert rows.loss_mask_RL.any()  # a batch is a copy


@pytest.mark.parametrize(
    ("rows", "rows_per_step", "world_size"), [(10, 3, 1), (10, 3, 2), (7, 1, 4), (2, 5, 2), (1, 1, 1)]
)
def test_each_epoch_reads_every_row_once_across_ranks(rows: int, rows_per_step: int, world_size: int) -> None:
    ranks = [
        RowBatches(rows, rows_per_step=rows_per_step, seed=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    stream = []
    for step_of_ranks in itertools.islice(zip(*ranks, strict=True), 60):
        for batch in step_of_ranks:
            assert batch.shape == (rows_per_step,)
            stream += batch.tolist()
    whole = len(stream) // rows
    epochs = [stream[i * rows : (i + 1) * rows] for i in range(whole)]
    assert whole >= 10
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 3 or epochs[0] != epochs[1]


def test_any_step_can_be_resumed() -> None:
    batches = RowBatches(10, rows_per_step=3, seed=3, rank=1, world_size=2)
    straight = list(itertools.islice(batches, 40))
    resumed = RowBatches(10, rows_per_step=3, seed=3, rank=1, world_size=2).from_step(17)
    for expected, batch in zip(straight[17:], resumed, strict=False):
        assert (batch == expected).all()
    assert (batches.at(39) == straight[39]).all()
    assert batches.steps_per_epoch == pytest.approx(10 / 6)
    assert batches.rows_read(5) == 30
    assert batches.epoch(5) == 3.0
    other = RowBatches(10, rows_per_step=3, seed=4, rank=1, world_size=2)
    assert [x.tolist() for x in itertools.islice(other, 5)] != [x.tolist() for x in straight[:5]]


def test_another_world_size_goes_on_in_the_same_stream() -> None:
    alone = RowBatches(10, rows_per_step=1, seed=0)
    stream = [int(alone.at(step)[0]) for step in range(60)]
    pair = [RowBatches(10, rows_per_step=2, seed=0, rank=r, world_size=2, first_row=13) for r in (0, 1)]
    seen = [row for step in range(5) for rank in pair for row in rank.at(step).tolist()]
    assert seen == stream[13:33]


def test_bad_batches_are_refused() -> None:
    with pytest.raises(UserError, match="0 rows"):
        RowBatches(0, rows_per_step=1, seed=0)
    with pytest.raises(UserError, match="0 rows a step"):
        RowBatches(1, rows_per_step=0, seed=0)
    with pytest.raises(ValueError, match="rank 2"):
        RowBatches(1, rows_per_step=1, seed=0, rank=2, world_size=2)
