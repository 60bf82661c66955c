"""Shared fixtures: random models small enough to enumerate, a tokenizer built in memory, and the real small target.

Every random model has vocabulary 61 (the tokenizer's size, so every id decodes), width 32 and float64, with weights
wide enough that its distributions are far from uniform. Seeds go through `fork_rng`: the global state is untouched.

    tiny_llama, tiny_gpt2   one fresh model for each test
    make_llama, make_gpt2   the functions behind them, for a second model: make_llama(seed=1, num_hidden_layers=1)
    tiny_tokenizer          61 characters and marks; pad 0, eos 1; a chat template without generation markers
    tiny_target_folder      a Llama with the tokenizer, saved once for the whole session (do not write into it)
    real_target_folder      the real small target, for tests marked `real`
"""

import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = string.ascii_lowercase + string.digits + " \n.,:;?!'\"-()+*/=_#"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SHARED_CONFIG = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3}

torch.set_num_threads(1)


def build(model_class: type[PreTrainedModel], config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(torch.float64).eval().requires_grad_(False)


def build_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    settings = {
        **SHARED_CONFIG,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return build(LlamaForCausalLM, LlamaConfig(**{**settings, **overrides}), seed)


def build_gpt2(seed: int = 0, **overrides: Any) -> GPT2LMHeadModel:
    settings = {**SHARED_CONFIG, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return build(GPT2LMHeadModel, GPT2Config(**{**settings, **overrides}), seed)


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return build_llama


@pytest.fixture(scope="session")
def make_gpt2() -> Callable[..., GPT2LMHeadModel]:
    return build_gpt2


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    return build_llama(num_hidden_layers=3)


@pytest.fixture
def tiny_gpt2() -> GPT2LMHeadModel:
    return build_gpt2()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-target")
    build_llama(num_hidden_layers=3).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def real_target_folder() -> Path:
    """The folder that scripts/fetch_small_target.py made: SPECHEADS_REAL_TARGET, or where the quickstart puts it."""
    default = Path(__file__).parent.parent / "work" / "quickstart" / "target"
    folder = Path(os.environ.get("SPECHEADS_REAL_TARGET", default))
    if not (folder / "config.json").exists():
        pytest.skip(f"no target in {folder}: run scripts/fetch_small_target.py, or set SPECHEADS_REAL_TARGET")
    return folder
