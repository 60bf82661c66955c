"""The target: taps, logits, packed rows, borrowed parts, and what is refused. On every kind of model that differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from specheads.cache import PreallocatedCache
from specheads.errors import UserError
from specheads.layers import FewRowsLinear
from specheads.target import TargetModel, tokenizer_digest

SHARED = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": 0.3}
LLAMA_LIKE = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,  # biases in its attention
    "gemma": {**LLAMA_LIKE, "head_dim": 8},  # its norms multiply by 1 + weight
    "gpt2": {**SHARED, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "mistral": {**LLAMA_LIKE, "sliding_window": 5},
    "gemma3_text": {**LLAMA_LIKE, **WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma2": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 3.0},
    "cohere": {**LLAMA_LIKE, "logit_scale": 0.25},
    "granite": {**LLAMA_LIKE, "logits_scaling": 3.0},
    "phi": LLAMA_LIKE,  # its output projection has a bias
}
IDS = torch.tensor([[5, 17, 33, 8, 21, 40, 9, 2, 58, 13, 30, 6], [44, 3, 3, 19, 7, 52, 28, 60, 11, 5, 36, 24]])


def build(kind: str, **overrides: Any) -> Any:
    config = CONFIG_MAPPING[kind](**{**KINDS.get(kind, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.float64)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    return model.eval().requires_grad_(False)


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> TargetModel:
    return TargetModel(build(request.param))


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def close(got: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


# Taps and logits


def test_taps_are_transformers_hidden_states(target: TargetModel) -> None:
    expected = target.model(IDS, output_hidden_states=True)
    assert len(expected.hidden_states) == target.num_layers + 1
    every, before = range(target.num_layers + 1), hooks(target.model)  # transformers keeps some of its own
    taps_BLTD, last_BLD = target.states(IDS, taps=every)
    output = target.forward(IDS, taps=every)
    close(output.logits_BLV, expected.logits)
    for tap, hidden_BLD in enumerate(expected.hidden_states):
        close(taps_BLTD[:, :, tap], hidden_BLD)
        close(output.taps_BLTD[:, :, tap], hidden_BLD)
    close(last_BLD, expected.hidden_states[-1])
    assert hooks(target.model) == before


def test_taps_come_in_the_order_asked(target: TargetModel) -> None:
    asked = (3, 0, 1, 0)
    hidden = target.model(IDS, output_hidden_states=True).hidden_states
    close(target.states(IDS, taps=asked)[0], torch.stack([hidden[tap] for tap in asked], dim=2))


def test_no_taps(tiny_llama: LlamaForCausalLM) -> None:
    target = TargetModel(tiny_llama)
    assert target.forward(IDS).taps_BLTD is None
    assert target.states(IDS)[0].shape == (2, 12, 0, 32)


def test_logits_of_the_last_hidden_state(target: TargetModel) -> None:
    expected = target.model(IDS).logits
    _, last_BLD = target.states(IDS)
    close(target.logits(last_BLD), expected)
    close(target.logits(last_BLD[1, 4:7]), expected[1, 4:7])
    row = int(expected[0, 3].argmax())
    close(target.shape_logits(target.projection(last_BLD)[0, 3, row]), expected[0, 3, row])


def test_soft_capping_is_in_force() -> None:
    target = TargetModel(build("gemma2"))
    _, last_BLD = target.states(IDS)
    assert target.projection(last_BLD).abs().max() > 3 > target.logits(last_BLD).abs().max()


def test_logits_made_otherwise_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    class Doubling(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    target = TargetModel(Doubling(tiny_llama.config).double())
    for _ in range(2):  # asking twice does not help
        with pytest.raises(UserError, match="Doubling does not compute its logits as projection"):
            target.logits(torch.zeros(1, 32, dtype=torch.float64))


def test_logits_to_keep(tiny_llama: LlamaForCausalLM) -> None:
    output = TargetModel(tiny_llama).forward(IDS, taps=(1,), logits_to_keep=2)
    close(output.logits_BLV, tiny_llama(IDS).logits[:, -2:])
    assert output.taps_BLTD is not None
    assert output.taps_BLTD.shape == (2, 12, 1, 32)


def test_left_padding_changes_nothing(target: TargetModel) -> None:
    target.model.float()  # Gemma 2 computes a padding token's softmax in float32, where float64's lowest is -inf
    ids_BL = torch.cat([torch.zeros(2, 4, dtype=torch.int64), IDS], dim=1)
    mask_BL = torch.tensor([[0] * 4 + [1] * 12] * 2)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    padded = target.forward(ids_BL, attention_mask=mask_BL, position_ids=positions_BL, taps=(2,))
    plain = target.forward(IDS, taps=(2,))
    _, last_BLD = target.states(ids_BL, attention_mask=mask_BL, position_ids=positions_BL)
    for got, expected in (
        (padded.logits_BLV, plain.logits_BLV),
        (padded.taps_BLTD, plain.taps_BLTD),
        (last_BLD, target.states(IDS)[1]),
    ):
        torch.testing.assert_close(got[:, 4:], expected, atol=1e-3, rtol=0)


def test_nothing_is_differentiated(tiny_llama: LlamaForCausalLM) -> None:
    target = TargetModel(tiny_llama.requires_grad_(True))
    output = target.forward(IDS, taps=(1,))
    taps_BLTD, last_BLD = target.states(IDS, taps=(1,))
    for tensor in (output.logits_BLV, output.taps_BLTD, taps_BLTD, last_BLD, target.logits(last_BLD)):
        assert tensor is not None
        assert not tensor.requires_grad


# Packed rows


def test_documents_of_a_packed_row_are_apart(target: TargetModel) -> None:
    positions_BL = torch.tensor([[*range(7), *range(3), 0, 0]]).expand_as(IDS)  # two documents and padding
    every = range(target.num_layers + 1)
    taps_BLTD, last_BLD = target.states(IDS, position_ids=positions_BL, taps=every)
    atol = 1e-5  # some kinds take their softmax in float32, whose rounding depends on the number of keys
    for document in (slice(0, 7), slice(7, 10)):
        alone_taps_BLTD, alone_last_BLD = target.states(IDS[:, document], taps=every)
        close(taps_BLTD[:, document], alone_taps_BLTD, atol)
        close(last_BLD[:, document], alone_last_BLD, atol)
    seen_all = target.states(IDS)[1]
    assert not torch.allclose(last_BLD[:, 7:10], seen_all[:, 7:10], atol=1e-3), "else the test shows nothing"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("opt", {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_a_model_that_mixes_packed_documents_is_refused(kind: str, options: dict[str, Any]) -> None:
    sizes = {**SHARED, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    target = TargetModel(build(kind, **(sizes if kind == "opt" else SHARED), **options))
    positions_BL = torch.tensor([[*range(7), *range(5)]]).expand_as(IDS)
    for _ in range(2):
        with pytest.raises(UserError, match="does not keep the documents of a packed row apart"):
            target.states(IDS, position_ids=positions_BL)
    target.states(IDS)  # one document a row is no trouble


# Hooks


def test_no_hook_stays_behind_after_an_error(target: TargetModel) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        target.forward(torch.tensor([[1, 1000]]), taps=(0, 1, target.num_layers))
    with pytest.raises((IndexError, RuntimeError)):
        target.states(torch.tensor([[1, 1000]]), taps=(0, 1, target.num_layers))
    assert hooks(target.model) == 0


@pytest.mark.parametrize("tap", [4, 99, -1])
def test_a_tap_that_does_not_exist_is_named(tap: int, tiny_llama: LlamaForCausalLM) -> None:
    target = TargetModel(tiny_llama)
    for taps in ((tap,), (0, 1, tap)):
        with pytest.raises(UserError, match=f"tap layer {tap} does not exist; expected 0 to 3"):
            target.states(IDS, taps=taps)
        with pytest.raises(UserError, match=f"tap layer {tap} does not exist"):
            target.forward(IDS, taps=taps)
    assert hooks(tiny_llama) == 0


def test_the_model_is_not_changed(tiny_llama: LlamaForCausalLM) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_llama.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in tiny_llama.named_modules()}
    forward = type(tiny_llama).forward
    target = TargetModel(tiny_llama)
    target.logits(target.states(IDS, position_ids=torch.arange(12).expand(2, -1), taps=(0, 3))[1])
    target.forward(IDS, cache=PreallocatedCache(tiny_llama.config), taps=(1,))
    assert {name: set(vars(module)) for name, module in tiny_llama.named_modules()} == attributes
    assert type(tiny_llama).forward is forward
    for name, tensor in tiny_llama.state_dict().items():
        assert torch.equal(tensor, before[name])


# Parts and facts


def test_parts_are_the_very_same_objects(target: TargetModel) -> None:
    assert target.embedding is target.model.get_input_embeddings()
    assert target.projection is target.model.get_output_embeddings()
    assert target.vocab_size == 61
    assert target.hidden_size == 32
    assert target.num_layers == 3
    assert target.dtype == torch.float64
    assert TargetModel.wrap(target) is target
    assert TargetModel.wrap(target.model).model is target.model


def test_a_model_in_training_mode_is_put_to_rest() -> None:
    model = build("gpt2").train()
    assert not any(module.training for module in TargetModel(model).model.modules())


def test_shared_weights_count_once(make_gpt2: Callable[..., Any]) -> None:
    model = make_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    unique = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert TargetModel(model).weight_bytes == sum(unique.values())


def test_rope_theta() -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "default"}
    assert TargetModel(build("llama", rope_parameters=parameters)).rope_theta == 5e5
    assert TargetModel(build("gpt2")).rope_theta == 1e4


def test_layer_weights_under_short_names(tiny_llama: LlamaForCausalLM, make_gpt2: Callable[..., Any]) -> None:
    weights, layer = TargetModel(tiny_llama).llama_layer(1), tiny_llama.model.layers[1]
    assert weights.keys() == {*"qkvo", "gate", "up", "down", "input_norm", "mlp_norm", "final_norm"}
    for name, module in {
        "q": layer.self_attn.q_proj,
        "o": layer.self_attn.o_proj,
        "down": layer.mlp.down_proj,
        "input_norm": layer.input_layernorm,
        "mlp_norm": layer.post_attention_layernorm,
        "final_norm": tiny_llama.model.norm,
    }.items():
        assert weights[name].data_ptr() == module.weight.data_ptr(), name
    with pytest.raises(UserError, match=r"GPT2LMHeadModel are not built like Llama's.*start_from auto or random"):
        TargetModel(make_gpt2()).llama_layer(0)


@pytest.mark.parametrize(("kind", "reason"), [("qwen2", "self_attn.q_proj.bias"), ("gemma", "norms")])
def test_layers_that_only_look_like_llama_s_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"not built like Llama's.*{reason}"):
        TargetModel(build(kind)).llama_layer(0)


def test_a_loaded_target_multiplies_few_rows_its_own_way_and_all_else_is_its_own(
    tiny_llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama.float().save_pretrained(tmp_path)
    monkeypatch.setattr("specheads.target.AutoTokenizer.from_pretrained", lambda *args, **kwargs: None)
    target = TargetModel.load(str(tmp_path))
    linears = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    assert linears
    assert all(type(module) is FewRowsLinear for module in linears)
    ids_1L = torch.tensor([[5, 9, 17, 3]])
    torch.testing.assert_close(target.forward(ids_1L).logits_BLV, tiny_llama(ids_1L).logits, atol=1e-5, rtol=1e-5)


def test_positions(make_llama: Callable[..., Any], make_gpt2: Callable[..., Any]) -> None:
    assert TargetModel(make_gpt2(n_positions=77)).max_positions == 77
    assert TargetModel(make_llama()).max_positions is None


def test_fingerprint(make_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    fingerprint = TargetModel(make_llama(), tiny_tokenizer).fingerprint
    digest = fingerprint.pop("tokenizer")
    assert fingerprint == {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 32,
        "num_layers": 2,
        "vocab_size": 61,
    }
    assert len(digest) == 16
    int(digest, 16)
    assert TargetModel(make_llama()).fingerprint["tokenizer"] is None
    tiny_tokenizer.chat_template = "other"  # means no other tokens
    assert tokenizer_digest(tiny_tokenizer) == digest
    tiny_tokenizer.add_tokens(["zz"])
    assert tokenizer_digest(tiny_tokenizer) != digest


# What is refused


def test_encoder_decoder_is_refused() -> None:
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UserError, match=r"t5 is an encoder-decoder model; expected a decoder-only"):
        TargetModel(T5ForConditionalGeneration(T5Config(**sizes)))


def test_no_output_projection_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(UserError, match="LlamaModel has no output projection"):
        TargetModel(tiny_llama.model)


def test_a_model_that_ignores_the_cache_is_refused() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    target = TargetModel(build("rwkv", **sizes, context_length=32))
    with pytest.raises(UserError, match="RwkvForCausalLM does not keep its state in the cache"):
        target.forward(IDS, cache=PreallocatedCache(target.config))


# Loading


def test_load(tiny_target_folder: Path) -> None:
    target = TargetModel.load(str(tiny_target_folder))
    assert target.dtype == torch.float64  # as it was saved
    assert target.tokenizer is not None
    assert target.fingerprint["tokenizer"] == tokenizer_digest(target.tokenizer)
    assert not target.model.training
    assert TargetModel.load(str(tiny_target_folder), dtype=torch.float32, device="cpu").dtype == torch.float32
    assert TargetModel.load(str(tiny_target_folder), dtype="bfloat16").dtype == torch.bfloat16


def test_load_with_shared_weights(
    make_gpt2: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_gpt2()
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    target = TargetModel.load(str(tmp_path))
    assert target.projection.weight is target.embedding.weight
    close(target.forward(IDS).logits_BLV, model(IDS).logits)


def copy_of(folder: Path, place: Path) -> Path:
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama", "architectures": ["Lama"]}), "utf-8")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", "utf-8")


def drop_everything(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]  # transformers would go on with a random one
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}), "utf-8")


@pytest.mark.parametrize(
    "damage",
    [
        break_weights,
        drop_weights,
        break_config,
        unknown_type,
        break_tokenizer,
        drop_everything,
        other_sizes,
        drop_a_tensor,
    ],
)
def test_a_folder_that_is_no_model_is_refused(
    damage: Callable[[Path], None], tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_target_folder, tmp_path / "target")
    damage(folder)
    with pytest.raises(UserError, match="cannot be loaded") as error:
        TargetModel.load(str(folder))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_target_is_named() -> None:
    with pytest.raises(UserError, match=r"target '/no/such/folder' cannot be loaded .*save_pretrained"):
        TargetModel.load("/no/such/folder")


def test_an_encoder_decoder_folder_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model: PreTrainedModel = T5ForConditionalGeneration(T5Config(**sizes))
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be loaded"):
        TargetModel.load(str(tmp_path))
