"""Stored features are the live ones, an interrupted build goes on, and a store of something else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.head import HeadInputs
from specheads.target import TargetModel
from specheads.train.data import Example
from specheads.train.features import CachedFeatures, LiveFeatures, fill_store
from specheads.train.packing import PackedRows, pack
from specheads.train.store import MANIFEST, FeatureStore, document_key

TAPS = (0, 2)


def make_examples() -> list[Example]:
    generator = np.random.default_rng(0)
    examples = []
    for number, length in enumerate([16, 9, 7, 12, 3, 16, 11, 5, 8, 8, 15]):
        ids = generator.integers(2, 61, length).astype(np.int32)
        examples.append(Example(ids, np.arange(length) >= length // 3, str(number), length))
    return examples


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return make_examples()


@pytest.fixture(scope="module")
def rows(examples: list[Example]) -> PackedRows:
    packed = pack(examples, 16, seed=0)
    assert len(packed) == 7
    return packed


@pytest.fixture(scope="module")
def target(make_llama: Callable[..., Any]) -> TargetModel:
    return TargetModel(make_llama(num_hidden_layers=3))


class Calls:
    """Counts the passes of a target and can stop at one."""

    def __init__(self, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop_at = 0, -1
        original = target.states

        def states(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.stop_at:
                raise KeyboardInterrupt
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(target, "states", states)


def cache(
    target: TargetModel, examples: list[Example], rows: PackedRows, folder: Path, taps: tuple[int, ...] = TAPS
) -> CachedFeatures:
    store = FeatureStore(folder, target, taps)
    fill_store(target, examples, store, row_length=rows.ids_RL.shape[1], rows_per_shard=3)
    return CachedFeatures(target, examples, rows, taps, store)


def tensors(inputs: HeadInputs) -> dict[str, Tensor]:
    return {name: x for name, x in vars(inputs).items() if x is not None}


@pytest.mark.parametrize("taps", [TAPS, (2, 0), (1, 3), (3,), ()], ids=str)
def test_cached_equals_live(
    taps: tuple[int, ...], target: TargetModel, examples: list[Example], rows: PackedRows, tmp_path: Path
) -> None:
    cached, live = cache(target, examples, rows, tmp_path, taps), LiveFeatures(target, rows, taps)
    several = np.array([5, 0, 6])
    inside_BL = torch.from_numpy(rows.document_RL[several] >= 0)
    for name, tensor in tensors(live.batch(several).inputs).items():
        got = tensors(cached.batch(several).inputs)[name]
        assert got.dtype == tensor.dtype, name
        assert got.shape == tensor.shape, name
        torch.testing.assert_close(got[inside_BL], tensor[inside_BL], atol=1e-12, rtol=0)


def test_a_document_alone_in_its_row_is_kept_bit_for_bit(
    make_llama: Callable[..., Any], examples: list[Example], tmp_path: Path
) -> None:
    target = TargetModel(make_llama(num_hidden_layers=3).to(torch.bfloat16))
    alone = pack(examples[:1], 16, seed=0)
    got = cache(target, examples[:1], alone, tmp_path).batch([0]).inputs
    expected = LiveFeatures(target, alone, TAPS).batch([0]).inputs
    assert got.taps_BLTD.dtype == torch.bfloat16
    assert torch.equal(got.taps_BLTD, expected.taps_BLTD)
    assert torch.equal(got.last_hidden_BLD, expected.last_hidden_BLD)


def test_the_size_printed_before_a_build_is_right(
    target: TargetModel, examples: list[Example], rows: PackedRows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = cache(target, examples, rows, tmp_path)
    positions = sum(len(example.ids) for example in examples)
    estimate = cached.store.bytes_for(positions, target.hidden_size, target.dtype)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert estimate <= stored <= estimate + 3 * 1000
    assert f"{positions:,} positions" in "".join(capsys.readouterr())


def test_the_targets_summary_where_a_counted_token_is_predicted(
    target: TargetModel, examples: list[Example], rows: PackedRows, tmp_path: Path
) -> None:
    every = list(range(len(rows)))
    batch = cache(target, examples, rows, tmp_path).batch(every)
    live = LiveFeatures(target, rows, ()).batch(every)
    assert live.logsumexp_BL is None
    assert batch.logsumexp_BL is not None
    assert batch.argmax_BL is not None
    logits_BLV = target.logits(live.inputs.last_hidden_BLD)
    predicts_BL = torch.zeros_like(batch.inputs.loss_mask_BL)
    predicts_BL[:, :-1] = batch.inputs.loss_mask_BL[:, 1:]
    assert 0 < predicts_BL.sum() < predicts_BL.numel()
    expected = logits_BLV.logsumexp(-1)[predicts_BL].float()
    torch.testing.assert_close(batch.logsumexp_BL[predicts_BL], expected, atol=1e-6, rtol=0)
    assert torch.equal(batch.argmax_BL[predicts_BL], logits_BLV.argmax(-1)[predicts_BL])
    assert not batch.logsumexp_BL[~predicts_BL].any()


def test_an_interrupted_build_goes_on(
    target: TargetModel,
    examples: list[Example],
    rows: PackedRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(target, monkeypatch)
    calls.stop_at = 5  # in the second shard of three
    with pytest.raises(KeyboardInterrupt):
        cache(target, examples, rows, tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("shard*"))] == ["shard-00000.safetensors"]
    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    (tmp_path / "shard-00001.partial").write_bytes(b"half a shard")
    calls.stop_at, calls.count = -1, 0
    cached = cache(target, examples, rows, tmp_path)
    assert 0 < calls.count <= 5, "only rows of documents that were missing"
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == first
    calls.count = 0
    cache(target, examples, rows, tmp_path)
    assert calls.count == 0
    inside_BL = torch.from_numpy(rows.document_RL >= 0)
    got = cached.batch(range(len(rows))).inputs.last_hidden_BLD[inside_BL]
    expected = LiveFeatures(target, rows, TAPS).batch(range(len(rows))).inputs.last_hidden_BLD[inside_BL]
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_a_store_serves_other_packings_splits_and_heads_with_fewer_taps(
    target: TargetModel,
    examples: list[Example],
    rows: PackedRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache(target, examples, rows, tmp_path, (0, 1, 2))
    calls = Calls(target, monkeypatch)
    for taps, chosen, length, seed in [((2,), 11, 16, 0), ((1, 0), 5, 16, 3), ((3, 1), 11, 20, 1), ((), 8, 32, 2)]:
        others = pack(examples[:chosen], length, seed=seed)
        shared = cache(target, examples[:chosen], others, tmp_path, taps)
        assert calls.count == 0, "nothing is computed anew"
        inside_BL = torch.from_numpy(others.document_RL >= 0)
        got = shared.batch(range(len(others))).inputs.taps_BLTD[inside_BL]
        expected = LiveFeatures(target, others, taps).batch(range(len(others))).inputs.taps_BLTD[inside_BL]
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
        calls.count = 0


def test_the_same_tokens_with_another_mask_are_another_document() -> None:
    ids = np.arange(9)
    assert document_key(ids, ids > 3) == document_key(ids.astype(np.int64), ids > 3)
    assert document_key(ids, ids > 3) != document_key(ids, ids > 4)
    assert document_key(ids, ids > 3) != document_key(ids + 1, ids > 3)


def test_a_store_of_something_else_is_refused(
    target: TargetModel, examples: list[Example], rows: PackedRows, make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    cache(target, examples, rows, tmp_path)
    renamed = TargetModel(make_llama(num_hidden_layers=3))
    renamed.model.name_or_path = "elsewhere"
    half = TargetModel(make_llama(num_hidden_layers=3).to(torch.bfloat16))
    for other, taps, key in [
        (target, (0, 1), "taps"),
        (TargetModel(make_llama(num_hidden_layers=4)), TAPS, "target"),
        (renamed, TAPS, "target_name"),
        (half, TAPS, "dtype"),
    ]:
        with pytest.raises(UserError, match=f"has {key}.*delete it or choose another folder") as error:
            FeatureStore(tmp_path, other, taps)
        assert "\n" not in str(error.value)
    FeatureStore(tmp_path, target, TAPS)


def test_a_broken_shard_is_named(
    target: TargetModel, examples: list[Example], rows: PackedRows, tmp_path: Path
) -> None:
    cache(target, examples, rows, tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors cannot be read.*delete it"):
        FeatureStore(tmp_path, target, TAPS)
    shard.unlink()
    cache(target, examples, rows, tmp_path)
    assert shard.exists() or (tmp_path / "shard-00003.safetensors").exists()


def test_a_manifest_that_is_none_is_refused(target: TargetModel, tmp_path: Path) -> None:
    for content in ("{", "[1]", ""):
        (tmp_path / MANIFEST).write_text(content, "utf-8")
        with pytest.raises(UserError, match="cannot be used"):
            FeatureStore(tmp_path, target, TAPS)


def test_a_folder_that_cannot_be_written_is_refused(target: TargetModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be used"):
        FeatureStore(tmp_path / "file" / "cache", target, TAPS)


def test_the_manifest_says_what_is_inside(target: TargetModel, tmp_path: Path) -> None:
    FeatureStore(tmp_path, target, (0, 3))
    manifest = json.loads((tmp_path / MANIFEST).read_text("utf-8"))
    assert manifest["taps"] == [0], "the final state is kept once"
    assert manifest["dtype"] == "torch.float64"
    assert manifest["target"] == target.fingerprint
