"""Key/value storage: growth, rollback and row selection against fresh passes, on full and on sliding attention."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, JambaConfig, LlamaConfig, MambaConfig, Qwen3NextConfig

from specheads.cache import GrowingBuffer, PreallocatedCache
from specheads.errors import UserError

SHARED = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3}
LLAMA_LIKE = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "gpt2": {**SHARED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "mistral": {**LLAMA_LIKE, "sliding_window": 7},
    "gemma3_text": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
WINDOWED = ["mistral", "gemma3_text"]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[request.param](**KINDS[request.param]))
    return made.to(torch.float64).eval().requires_grad_(False)


def draw(rows: int, length: int) -> Tensor:
    return torch.randint(2, 61, (rows, length), generator=torch.Generator().manual_seed(length))


class Reader:
    """Feeds tokens through a cache and compares every logit with a pass over the whole text without one."""

    def __init__(self, model: Any, rows: int = 1) -> None:
        self.model, self.cache = model, PreallocatedCache(model.config)
        self.text = torch.empty(rows, 0, dtype=torch.int64)

    def read(self, new: Tensor) -> None:
        self.text = torch.cat([self.text, new], dim=1)
        got = self.model(new, cache=self.cache, use_cache=True).logits
        expected = self.model(self.text, use_cache=False).logits[:, -new.shape[1] :]
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
        assert self.cache.get_seq_length() == self.text.shape[1]

    def rollback(self, length: int) -> None:
        self.cache.rollback(length)
        self.text = self.text[:, :length]
        assert self.cache.get_seq_length() == length


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_appends_and_rolls_back_over_the_doubling_boundary(model: Any) -> None:
    reader = Reader(model, rows=2)
    reader.read(draw(2, 250))
    small = reader.cache.nbytes
    reader.read(draw(2, 1))
    reader.rollback(249)
    reader.read(draw(2, 5))
    assert reader.cache.nbytes == small, "room for 256 was there from the start"
    reader.read(draw(2, 9))  # 263 entries: the storage doubles
    assert reader.cache.nbytes == 2 * small
    reader.rollback(255)
    reader.read(draw(2, 1))
    reader.read(draw(2, 1))
    reader.rollback(100)
    reader.read(draw(2, 30))
    assert reader.cache.nbytes == 2 * small


@pytest.mark.parametrize("model", WINDOWED, indirect=True)
def test_rolls_back_past_the_edge_of_a_window(model: Any) -> None:
    reader = Reader(model)
    reader.read(draw(1, 5))
    reader.read(draw(1, 6))  # the block crosses the window of 7
    reader.rollback(8)  # what left the window is in it again
    reader.read(draw(1, 3))
    for _ in range(3):
        reader.read(draw(1, 1))
    reader.rollback(3)
    reader.read(draw(1, 12))
    reader.rollback(0)
    reader.read(draw(1, 4))


@pytest.mark.parametrize("model", ["mistral"], indirect=True)
def test_the_window_is_in_force(model: Any) -> None:
    """Two layers of window 7 reach back 12 tokens, though the cache keeps all."""
    last = []
    for changed in (None, 2, 9):
        text = draw(1, 20)
        if changed is not None:
            text[0, changed] = (text[0, changed] + 1) % 61
        cache = PreallocatedCache(model.config)
        model(text[:, :15], cache=cache, use_cache=True)
        last.append(model(text[:, 15:], cache=cache, use_cache=True).logits[:, -1])
    torch.testing.assert_close(last[1], last[0], atol=1e-12, rtol=0)
    assert not torch.allclose(last[2], last[0], atol=1e-6)


@pytest.mark.parametrize("model", ["llama", "gemma3_text"], indirect=True)
def test_chosen_rows_go_on_alone(model: Any) -> None:
    reader = Reader(model, rows=4)
    reader.read(draw(4, 9))
    reader.cache.select_rows(torch.tensor([3, 1]))
    reader.text = reader.text[[3, 1]]
    reader.read(draw(2, 2))
    reader.rollback(6)
    reader.cache.select_rows(torch.tensor([1]))
    reader.text = reader.text[[1]]
    reader.read(draw(1, 4))


def test_rows_of_an_empty_cache() -> None:
    cache = PreallocatedCache(LlamaConfig(**LLAMA_LIKE))
    cache.select_rows(torch.tensor([0]))
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_forgetting_copies_nothing(model: Any) -> None:
    reader = Reader(model)
    reader.read(draw(1, 20))
    storages = [layer.key_buffer.storage for layer in reader.cache._layers]
    reader.rollback(11)
    reader.read(draw(1, 3))
    assert all(layer.key_buffer.storage is s for layer, s in zip(reader.cache._layers, storages, strict=True))
    assert storages[0] is not None
    layers, numbers = 2, 1 * 2 * 256 * 8  # rows x heads x room x width
    assert reader.cache.nbytes == layers * 2 * numbers * 8


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_rolling_back_to_more_than_there_is_keeps_all(model: Any) -> None:
    reader = Reader(model)
    reader.read(draw(1, 4))
    reader.cache.rollback(9)
    assert reader.cache.get_seq_length() == 4
    reader.read(draw(1, 2))


def test_buffer_grows_by_doubling() -> None:
    buffer, parts = GrowingBuffer(), []
    assert buffer.nbytes == 0
    for length in (3, 253, 1, 400, 40):
        parts.append(torch.randn(2, 3, length, 4))
        assert torch.equal(buffer.append(parts[-1]), torch.cat(parts, dim=2))
        assert torch.equal(buffer.view(), torch.cat(parts, dim=2))
        assert buffer.storage is not None
        capacity = buffer.storage.shape[2]
        assert buffer.length <= capacity
        assert (capacity & (capacity - 1)) == 0
    assert capacity == 1024
    assert buffer.nbytes == 2 * 3 * 1024 * 4 * 4


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2), "mamba"),
        (JambaConfig(**LLAMA_LIKE, attn_layer_period=2, attn_layer_offset=1), "jamba"),
        (Qwen3NextConfig(**LLAMA_LIKE), "qwen3_next"),
    ],
    ids=["mamba", "jamba", "qwen3_next"],
)
def test_recurrent_state_is_refused_by_name(config: Any, kind: str) -> None:
    with pytest.raises(UserError, match=rf"type {kind} has layers of type linear_attention") as error:
        PreallocatedCache(config)
    assert "choose another target" in str(error.value)
    assert "\n" not in str(error.value)
