"""Cached features are the live ones, an interrupted build goes on, and a cache of something else is refused."""

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
from specheads.train.data import Example, digest
from specheads.train.features import MANIFEST, CachedFeatures, LiveFeatures
from specheads.train.packing import PackedRows, pack

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


def cache(target: TargetModel, rows: PackedRows, folder: Path, taps: Any = TAPS, **changes: Any) -> CachedFeatures:
    return CachedFeatures(target, rows, taps, folder, **{"rows_per_shard": 3, "digest": "d", **changes})


def tensors(inputs: HeadInputs) -> dict[str, Tensor]:
    return dict(vars(inputs))


@pytest.mark.parametrize("taps", [TAPS, (2, 0), (1, 3), (3,), ()], ids=str)
def test_cached_equals_live_bit_for_bit(
    taps: tuple[int, ...], target: TargetModel, rows: PackedRows, tmp_path: Path
) -> None:
    cached, live = cache(target, rows, tmp_path, taps), LiveFeatures(target, rows, taps)
    cached.build()
    for row in range(len(rows)):
        for name, tensor in tensors(live.batch([row]).inputs).items():
            got = tensors(cached.batch([row]).inputs)[name]
            assert got.dtype == tensor.dtype, name
            assert torch.equal(got, tensor), name
    several = np.array([5, 0, 6])  # a larger pass may round otherwise
    for name, tensor in tensors(live.batch(several).inputs).items():
        torch.testing.assert_close(tensors(cached.batch(several).inputs)[name], tensor, atol=1e-12, rtol=0)


def test_half_precision_is_kept_as_it_is(make_llama: Callable[..., Any], rows: PackedRows, tmp_path: Path) -> None:
    target = TargetModel(make_llama(num_hidden_layers=3).to(torch.bfloat16))
    cached, live = cache(target, rows, tmp_path), LiveFeatures(target, rows, TAPS)
    cached.build()
    got, expected = cached.batch([2]).inputs, live.batch([2]).inputs
    assert got.taps_BLTD.dtype == torch.bfloat16
    assert torch.equal(got.taps_BLTD, expected.taps_BLTD)
    assert torch.equal(got.last_hidden_BLD, expected.last_hidden_BLD)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert cached.bytes_needed <= stored <= cached.bytes_needed + 3 * 1000, "the estimate printed before a build"


def test_the_targets_summary_where_a_counted_token_is_predicted(
    target: TargetModel, rows: PackedRows, tmp_path: Path
) -> None:
    cached = cache(target, rows, tmp_path)
    cached.build()
    every = list(range(len(rows)))
    batch, live = cached.batch(every), LiveFeatures(target, rows, ()).batch(every)
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
    target: TargetModel, rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(target, monkeypatch)
    calls.stop_at = 5  # in the second shard of three
    with pytest.raises(KeyboardInterrupt):
        cache(target, rows, tmp_path).build()
    assert [path.name for path in sorted(tmp_path.glob("shard*"))] == ["shard-00000.safetensors"]
    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    (tmp_path / "shard-00001.partial").write_bytes(b"half a shard")
    calls.stop_at, calls.count = -1, 0
    cached = cache(target, rows, tmp_path)
    cached.build()
    assert calls.count == 4, "rows 3 to 6 only"
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == first
    calls.count = 0
    cache(target, rows, tmp_path).build()
    assert calls.count == 0
    for row in range(len(rows)):
        got, expected = cached.batch([row]).inputs, LiveFeatures(target, rows, TAPS).batch([row]).inputs
        assert torch.equal(got.last_hidden_BLD, expected.last_hidden_BLD)


def test_a_head_with_fewer_taps_shares_a_cache(
    target: TargetModel, rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(target, rows, tmp_path, (0, 1, 2)).build()
    calls = Calls(target, monkeypatch)
    for taps in ((2,), (1, 0), (3, 1), ()):
        shared = cache(target, rows, tmp_path, taps)
        shared.build()
        assert calls.count == 0, "nothing is computed anew"
        got = shared.batch([1, 4]).inputs.taps_BLTD
        expected = LiveFeatures(target, rows, taps).batch([1, 4]).inputs.taps_BLTD
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
        calls.count = 0


def test_a_cache_of_something_else_is_refused(
    target: TargetModel, rows: PackedRows, examples: list[Example], make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    cache(target, rows, tmp_path).build()
    other_target = TargetModel(make_llama(num_hidden_layers=4))
    half = TargetModel(make_llama(num_hidden_layers=3).to(torch.bfloat16))
    renamed = TargetModel(make_llama(num_hidden_layers=3))
    renamed.model.name_or_path = "elsewhere"
    repacked = pack(examples, 16, seed=1)
    assert len(repacked) == len(rows)
    for changed, key in [
        (cache(target, rows, tmp_path, digest="other"), "data"),
        (cache(target, rows, tmp_path, rows_per_shard=4), "rows_per_shard"),
        (cache(target, rows, tmp_path, (0, 1)), "taps"),
        (cache(target, pack(examples, 18, seed=0), tmp_path), "row"),
        (cache(target, repacked, tmp_path), "packing"),
        (cache(other_target, rows, tmp_path), "target"),
        (cache(renamed, rows, tmp_path), "target_name"),
        (cache(half, rows, tmp_path), "dtype"),
    ]:
        with pytest.raises(UserError, match=f"has {key}.*delete it or choose another folder") as error:
            changed.build()
        assert "\n" not in str(error.value)
    cache(target, rows, tmp_path).build()


def test_a_manifest_that_is_none_is_refused(target: TargetModel, rows: PackedRows, tmp_path: Path) -> None:
    for content in ("{", "[1]", ""):
        (tmp_path / MANIFEST).write_text(content, "utf-8")
        with pytest.raises(UserError, match="cannot be used"):
            cache(target, rows, tmp_path).build()


def test_a_folder_that_cannot_be_written_is_refused(target: TargetModel, rows: PackedRows, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be used"):
        cache(target, rows, tmp_path / "file" / "cache").build()


def test_the_manifest_says_what_is_inside(
    target: TargetModel, rows: PackedRows, examples: list[Example], tmp_path: Path
) -> None:
    cache(target, rows, tmp_path, (0, 3), digest=digest(examples)).build()
    manifest = json.loads((tmp_path / MANIFEST).read_text("utf-8"))
    assert manifest["taps"] == [0], "the final state is kept once"
    assert (manifest["rows"], manifest["row_length"], manifest["dtype"]) == (7, 16, "torch.float64")
    assert manifest["target"] == target.fingerprint
    assert manifest["data"] == digest(examples)
