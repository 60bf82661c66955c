"""What every registered head must keep: drafting equals training, packed rows, gradients, checkpoints, other targets.

All tests run over the registry, so that a new file in specheads/heads is tested the moment it exists. A head's further
option sets stand in OPTIONS.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specheads import load_head
from specheads.config import parse
from specheads.errors import UserError
from specheads.head import DraftHead, HeadInputs
from specheads.registry import get_head_type, head_types
from specheads.target import TargetModel
from specheads.train.config import LossConfig
from specheads.train.data import Example
from specheads.train.evaluate import evaluate
from specheads.train.features import LiveFeatures
from specheads.train.packing import pack
from specheads.train.step import TrainingStep
from specheads.vocab import choose_draft_vocabulary, coverage

VOCAB = 61
DRAFT_IDS = torch.arange(1, 60, 3)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "draft_model": [
        {"num_layers": 1, "start_from": "random"},
        {"start_from": "random", "overrides": {"hidden_size": 16, "intermediate_size": 24}},
    ],
    "eagle3": [
        {"draft_vocab_size": len(DRAFT_IDS)},
        {"norm_taps": True, "norm_feedback": True, "num_layers": 2},
        {"projection": "own"},
        {"projection": "own", "draft_vocab_size": len(DRAFT_IDS)},
        {"start_from": "target"},
        {"tap_layers": (4, 0), "num_heads": 3, "num_kv_heads": 1},
    ],
    "medusa": [
        {"draft_vocab_size": len(DRAFT_IDS)},
        {"projection": "low_rank", "rank": 3},
        {"projection": "own", "draft_vocab_size": len(DRAFT_IDS), "num_blocks": 2},
        {"projection": "own"},
        {"tap_layers": (2,), "num_heads": 2},
    ],
}
CASES = [
    pytest.param(name, options, id="-".join([name, *(f"{key}={value}" for key, value in options.items())]))
    for name in head_types()
    for options in [{}, *OPTIONS.get(name, [])]
]
each_case = pytest.mark.parametrize(("name", "options"), CASES)
each_head = pytest.mark.parametrize("name", list(head_types()))


@pytest.fixture(scope="module")
def target(make_llama: Callable[..., Any]) -> TargetModel:
    return TargetModel(make_llama(num_hidden_layers=4))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield


def make_head(name: str, options: dict[str, Any], target: TargetModel, *, noise: float = 0.1) -> DraftHead:
    """A head as training makes it; `noise` on its weights lets parts that start at zero take part."""
    head_type = get_head_type(name)
    head = head_type(head_type.derive_config(target, options)).to(torch.float64)
    if head.config.draft_vocab_size is not None:
        head.set_draft_vocabulary(DRAFT_IDS)
    head.bind(target).initialise(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn_like(parameter)
    return head.eval()


def inputs_of(target: TargetModel, head: DraftHead, ids_BL: Tensor, lengths: list[int] | None = None) -> HeadInputs:
    """What training sees: one document a row, or documents of these lengths in each row and padding behind them."""
    size = ids_BL.shape[1]
    documents, positions = torch.full((size,), -1), torch.zeros(size, dtype=torch.int64)
    start = 0
    for number, length in enumerate(lengths or [size]):
        documents[start : start + length] = number
        positions[start : start + length] = torch.arange(length)
        start += length
    position_ids_BL = positions.expand_as(ids_BL)
    taps_BLTD, last_BLD = target.states(ids_BL, position_ids=position_ids_BL, taps=head.tap_layers)
    document_BL = documents.expand_as(ids_BL)
    return HeadInputs(ids_BL, taps_BLTD, last_BLD, position_ids_BL, document_BL, document_BL >= 0)


def training_logits(head: DraftHead, inputs: HeadInputs, depth: int) -> list[Tensor]:
    with torch.no_grad():
        return [head.project(hidden, k) for k, hidden in enumerate(head(inputs, depth), start=1)]


def depth_of(head: DraftHead) -> int:
    return min(4, head.max_draft_length or 4)


# Both faces agree


@each_case
def test_unrolled_drafting_gives_the_training_logits(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head, length = make_head(name, options, target), 14
    ids_BL = torch.randint(2, VOCAB, (2, length))
    inputs, depth = inputs_of(target, head, ids_BL), depth_of(head)
    expected = training_logits(head, inputs, depth)
    state, read = head.start(), 0
    with torch.no_grad():
        for newest in (2, 3, 4, 8):  # chunks of several tokens and of one
            wrong = newest == 3
            chunk = slice(read, newest + 1)
            taps_BLTD, next_ids_B = inputs.taps_BLTD[:, chunk], ids_BL[:, newest + 1]
            logits_BV = head.absorb(state, ids_BL[:, chunk], taps_BLTD, next_ids_B)
            for k in range(1, depth + 1):
                if k == 1 or not wrong:
                    torch.testing.assert_close(logits_BV, expected[k - 1][:, newest], atol=1e-10, rtol=0)
                if k < depth:  # the true token, or one that the target will not have said
                    token_B = ids_BL[:, newest + 1 + k]
                    logits_BV = head.advance(state, (token_B + 7) % VOCAB if wrong else token_B)
            read = newest + 1


@each_case
def test_the_true_tokens_matter_where_a_head_reads_them(
    name: str, options: dict[str, Any], target: TargetModel
) -> None:
    """Else the test above would pass for a head that ignores what it is given."""
    head, ids_BL = make_head(name, options, target), torch.randint(2, VOCAB, (1, 8))
    inputs, depth = inputs_of(target, head, ids_BL), depth_of(head)
    logits = training_logits(head, inputs, depth)
    first = [float(logits[0][0, t].std()) for t in range(4)]
    assert min(first) > 1e-3
    for k in range(1, depth):
        assert not torch.allclose(logits[k], logits[k - 1], atol=1e-6), "each depth has logits of its own"
    assert not torch.allclose(logits[0][:, 3], logits[0][:, 4], atol=1e-6), "so has each position"


@each_case
def test_one_state_follows_a_whole_generation(name: str, options: dict[str, Any], target: TargetModel) -> None:
    """Absorbing token by token, with full drafts in between, ends where absorbing all at once does."""
    head, ids_BL = make_head(name, options, target), torch.randint(2, VOCAB, (1, 12))
    taps_BLTD = inputs_of(target, head, ids_BL).taps_BLTD
    slow, fast = head.start(), head.start()
    with torch.no_grad():
        for t in range(11):
            last = head.absorb(slow, ids_BL[:, t : t + 1], taps_BLTD[:, t : t + 1], ids_BL[:, t + 1])
            for _ in range(t % depth_of(head)):
                head.advance(slow, torch.randint(VOCAB, (1,)))
        at_once = head.absorb(fast, ids_BL[:, :11], taps_BLTD[:, :11], ids_BL[:, 11])
    torch.testing.assert_close(last, at_once, atol=1e-10, rtol=0)


@each_case
def test_documents_in_one_row_do_not_see_each_other(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head, lengths = make_head(name, options, target), [7, 5]
    depth, size = depth_of(head), 14
    ids_BL = torch.randint(2, VOCAB, (1, size))
    packed = training_logits(head, inputs_of(target, head, ids_BL, lengths), depth)
    start = 0
    for length in lengths:
        alone = training_logits(head, inputs_of(target, head, ids_BL[:, start : start + length]), depth)
        for k in range(1, depth + 1):
            count = length - k  # further rows read tokens that the document does not have
            got = packed[k - 1][:, start : start + count]
            torch.testing.assert_close(got, alone[k - 1][:, :count], atol=1e-10, rtol=0)
        start += length


def eagle3_by_hand(head: DraftHead, target: TargetModel, ids: list[int], taps_LTD: Tensor, t: int) -> list[Tensor]:
    """Logits of depths 1 and 2 at position t by the paper's figures, one key after another (one layer)."""
    config, w = head.config, head.state_dict()
    heads, groups, size = config.num_heads, config.num_heads // config.num_kv_heads, config.head_dim

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + config.norm_eps).sqrt() * w[name]

    def turned(x_HW: Tensor, position: int) -> Tensor:
        first, second = x_HW[:, : size // 2], x_HW[:, size // 2 :]
        angle = position / config.rope_theta ** (torch.arange(size // 2) * 2 / size)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)

    def fused(s: int) -> Tensor:
        taps = taps_LTD[s].unbind()
        if config.norm_taps:
            taps = [rms(tap, f"tap_norms.{i}.weight") for i, tap in enumerate(taps)]
        return w["fc.weight"] @ torch.cat(list(taps))

    chain = [(ids[s + 1], fused(s), s) for s in range(t + 1)]  # (token read, state read, rotary position)
    keys, values, logits = [], [], []
    layer = "layers.0."
    for step in (0, 1):
        for token, state, position in chain[len(keys) :]:
            embedded = rms(target.embedding.weight[token], "embedding_norm.weight")
            read = torch.cat([embedded, rms(state, layer + "hidden_norm.weight")])
            q, k, v = ((w[f"{layer}attention.{n}_proj.weight"] @ read).view(-1, size) for n in "qkv")
            query, key = turned(q, position), turned(k, position)
            keys.append(key)
            values.append(v)
        mixed = []
        for h in range(heads):
            scores = torch.stack([query[h] @ key[h // groups] for key in keys]) / size**0.5
            mixed.append(sum(share * v[h // groups] for share, v in zip(scores.softmax(0), values, strict=True)))
        hidden = state + w[layer + "attention.o_proj.weight"] @ torch.cat(mixed)
        normed = rms(hidden, layer + "mlp_norm.weight")
        gate, up, down = (w[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        output = hidden + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))
        logits.append(target.projection.weight @ rms(output, "norm.weight"))
        feedback = rms(output, "norm.weight") if config.norm_feedback else output
        chain.append((ids[t + 2 + step], feedback, t + 1 + step))
    return logits


@pytest.mark.parametrize("options", [{}, {"norm_taps": True}, {"norm_feedback": True}], ids=str)
def test_eagle3_is_what_its_paper_draws(options: dict[str, Any], target: TargetModel) -> None:
    head, ids_BL = make_head("eagle3", options, target), torch.randint(2, VOCAB, (1, 9))
    inputs = inputs_of(target, head, ids_BL)
    outputs = training_logits(head, inputs, 2)
    for t in (0, 4):
        by_hand = eagle3_by_hand(head, target, ids_BL[0].tolist(), inputs.taps_BLTD[0], t)
        for logits_BLV, expected in zip(outputs, by_hand, strict=True):
            torch.testing.assert_close(logits_BLV[0, t], expected, atol=1e-5, rtol=0)  # rotary tables are float32


def test_medusa_is_what_its_paper_says(target: TargetModel) -> None:
    head, ids_BL = make_head("medusa", {"projection": "own"}, target), torch.randint(2, VOCAB, (1, 6))
    inputs, w = inputs_of(target, head, ids_BL), head.state_dict()
    for k, logits_BLV in enumerate(training_logits(head, inputs, 3)):
        last_LD = inputs.last_hidden_BLD[0]
        inner = last_LD @ w[f"blocks.{k}.0.linear.weight"].T + w[f"blocks.{k}.0.linear.bias"]
        expected = (last_LD + inner * inner.sigmoid()) @ w[f"lm_heads.{k}.weight"].T
        torch.testing.assert_close(logits_BLV[0], expected, atol=1e-10, rtol=0)


@each_case
def test_shapes_and_draft_lengths(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head, ids_BL = make_head(name, options, target), torch.randint(2, VOCAB, (2, 6))
    width = len(DRAFT_IDS) if head.config.draft_vocab_size else VOCAB
    for k, logits in enumerate(training_logits(head, inputs_of(target, head, ids_BL), depth_of(head)), start=1):
        assert logits.shape == (2, 6, width), f"depth {k}"
    assert 1 <= head.default_draft_length <= (head.max_draft_length or 1000)
    assert all(0 <= tap <= target.num_layers for tap in head.tap_layers)


# Training


@each_case
def test_gradients_reach_the_whole_head_and_nothing_else(
    name: str, options: dict[str, Any], make_llama: Callable[..., Any]
) -> None:
    own_target = TargetModel(make_llama(num_hidden_layers=4))
    head = make_head(name, options, own_target)
    own_target.model.requires_grad_(True)  # even where nobody froze the target
    rows = pack([random_example(12) for _ in range(4)], 24, seed=0)
    step = TrainingStep(head, LossConfig(depth=depth_of(head)))
    step(LiveFeatures(own_target, rows, head.tap_layers).batch([0, 1]), step.counts(rows, [0, 1])).loss.backward()
    silent = [key for key, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert silent == []
    assert [key for key, p in own_target.model.named_parameters() if p.grad is not None] == []


@each_case
def test_no_module_is_used_twice(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head = make_head(name, options, target)
    named = list(head.named_parameters(remove_duplicate=False))
    assert len({id(p) for _, p in named}) == len(named)
    assert len({p.data_ptr() for _, p in named}) == len(named)
    for index, (key, one) in enumerate(named):  # the noise makes equal values impossible but for copies
        assert not any(one.shape == other.shape and torch.equal(one, other) for _, other in named[:index]), key


def random_example(length: int, number: int = 0) -> Example:
    ids = torch.randint(2, VOCAB, (length,)).numpy().astype(np.int32)
    return Example(ids, np.arange(length) >= 2, str(number), length)


def fit(head: DraftHead, target: TargetModel, depth: int, *, steps: int, rate: float) -> list[float]:
    """alpha by depth on eight short sequences after training on the very same."""
    rows = pack([random_example(12, number) for number in range(8)], 24, seed=0)
    features = LiveFeatures(target, rows, head.tap_layers)
    step = TrainingStep(head, LossConfig(depth=depth, depth_decay=1.0))
    every = list(range(len(rows)))
    batch, counts = features.batch(every), step.counts(rows, every)
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        step(batch, counts).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return evaluate(step, features, every).alpha


@pytest.mark.parametrize(
    ("name", "options", "depth", "floor"),
    [
        ("eagle3", {"norm_taps": True}, 2, 0.9),
        ("eagle3", {}, 1, 0.9),
        ("draft_model", {"start_from": "random", "num_layers": 2}, 1, 0.9),
        ("medusa", {"projection": "own", "num_blocks": 2, "num_heads": 2}, 2, 0.8),
    ],
)
def test_overfits_eight_short_sequences(
    name: str, options: dict[str, Any], depth: int, floor: float, make_llama: Callable[..., Any]
) -> None:
    single = TargetModel(make_llama(num_hidden_layers=4).float())
    head = make_head(name, options, single, noise=0.0).float().bind(single)
    before = fit(head, single, depth, steps=1, rate=1e-9)
    assert max(before) < floor - 0.1
    assert min(fit(head, single, depth, steps=300, rate=1e-2)) > floor


def test_a_draft_model_with_all_layers_is_the_target(target: TargetModel) -> None:
    head = make_head("draft_model", {"num_layers": target.num_layers}, target, noise=0.0)
    inputs = inputs_of(target, head, torch.randint(2, VOCAB, (1, 9)))
    (logits_BLV,) = training_logits(head, inputs, 1)
    torch.testing.assert_close(logits_BLV[:, :-1], target.forward(inputs.ids_BL).logits_BLV[:, 1:], atol=1e-10, rtol=0)


def test_a_fresh_medusa_head_repeats_the_targets_own_prediction(target: TargetModel) -> None:
    head = make_head("medusa", {}, target, noise=0.0)
    inputs = inputs_of(target, head, torch.randint(2, VOCAB, (1, 9)))
    expected = target.forward(inputs.ids_BL).logits_BLV
    for logits_BLV in training_logits(head, inputs, 4):
        torch.testing.assert_close(logits_BLV, expected, atol=1e-10, rtol=0)


# The target's parts


@each_case
def test_holds_no_tensor_of_the_target(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head = make_head(name, options, target)
    borrowed = {tensor.untyped_storage().data_ptr() for tensor in target.model.state_dict().values()}
    own = head.state_dict()
    assert [key for key, tensor in own.items() if tensor.untyped_storage().data_ptr() in borrowed] == []
    assert all(module is not target.model for module in head.modules())
    assert head.target.embedding is target.model.get_input_embeddings()
    if head.draft_vocab_ids is None:
        rows = head._bound.projection_rows
        assert rows.untyped_storage().data_ptr() == target.projection.weight.untyped_storage().data_ptr()


@each_case
def test_target_logits_are_the_targets(name: str, options: dict[str, Any], target: TargetModel) -> None:
    head, hidden = make_head(name, options, target), torch.randn(3, target.hidden_size, dtype=torch.float64)
    expected = target.logits(hidden)
    wanted = expected if head.draft_vocab_ids is None else expected[:, head.draft_vocab_ids]
    torch.testing.assert_close(head.target_logits(hidden), wanted, atol=1e-10, rtol=0)


def test_memory_counts_gathered_rows(target: TargetModel) -> None:
    whole, part = (make_head("eagle3", options, target) for options in ({}, {"draft_vocab_size": len(DRAFT_IDS)}))
    width, taps = 32, len(whole.tap_layers)
    kv = whole.config.num_kv_heads * whole.config.head_dim
    layer = 2 * width * (width + 2 * kv) + width * width + 3 * width * 48 + 2 * width
    numbers = taps * width * width + layer + 2 * width  # fc, layer, the norms of embedding and output
    assert whole.nbytes == whole.memory_bytes == 8 * numbers
    assert part.nbytes == whole.nbytes + 8 * len(DRAFT_IDS)
    assert part.memory_bytes == part.nbytes + 8 * len(DRAFT_IDS) * width


def test_shared_weights_count_once(make_gpt2: Callable[..., Any]) -> None:
    head = make_head("draft_model", {"num_layers": 1}, TargetModel(make_gpt2()))
    assert head.nbytes == head.memory_bytes == sum(parameter.nbytes for parameter in head.parameters())


@each_head
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 67}, "vocabulary 61, this one has 67"),
        ({"num_hidden_layers": 5}, "layers 4, this one has 5"),
        ({"hidden_size": 16}, "hidden size 32, this one has 16"),
    ],
)
def test_refuses_another_target(
    name: str, overrides: dict[str, Any], message: str, target: TargetModel, make_llama: Callable[..., Any]
) -> None:
    head = make_head(name, {}, target)
    with pytest.raises(UserError, match=message) as error:
        head.bind(TargetModel(make_llama(**{"num_hidden_layers": 4, **overrides})))
    assert "pass the matching target or retrain" in str(error.value)
    assert "\n" not in str(error.value)


@each_head
def test_refuses_another_architecture(name: str, target: TargetModel, make_gpt2: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="architecture LlamaForCausalLM, this one has GPT2LMHeadModel"):
        make_head(name, {}, target).bind(TargetModel(make_gpt2(n_layer=4)))


@each_head
def test_refuses_another_tokenizer(
    name: str, make_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_llama()
    head = make_head(name, {}, TargetModel(model, tiny_tokenizer))
    head.bind(TargetModel(model))  # a tokenizer that is not known is not compared
    tiny_tokenizer.add_tokens(["zz"])
    with pytest.raises(UserError, match=r"tokenizer \w+, this one has"):
        head.bind(TargetModel(model, tiny_tokenizer))


@each_head
def test_needs_a_target(name: str, target: TargetModel) -> None:
    head_type = get_head_type(name)
    head = head_type(head_type.derive_config(target, {})).double()
    with pytest.raises(UserError, match="not bound"):
        head.embed(torch.tensor([1]))


def test_a_draft_vocabulary_that_was_never_chosen_is_refused(target: TargetModel) -> None:
    head_type = get_head_type("eagle3")
    head = head_type(head_type.derive_config(target, {"draft_vocab_size": 4})).double()
    with pytest.raises(UserError, match="draft vocabulary"):
        head.bind(target)
    for ids in ([0, 2, 1, 3], [0, 1, 2, VOCAB], [0, 1, 1, 2]):
        head.set_draft_vocabulary(torch.tensor(ids))
        with pytest.raises(UserError, match="draft vocabulary"):
            head.bind(target)


# Options


@each_head
def test_unknown_option_names_the_nearest(name: str, target: TargetModel) -> None:
    with pytest.raises(UserError, match=rf"head {name}: unknown key 'tap_layer'; did you mean 'tap_layers'"):
        get_head_type(name).derive_config(target, {"tap_layer": [1]})


@each_head
@pytest.mark.parametrize("key", ["target", "target_name", "format_version"])
def test_options_that_are_not_the_users_are_refused(name: str, key: str, target: TargetModel) -> None:
    with pytest.raises(UserError, match=key):
        get_head_type(name).derive_config(target, {key: 1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle3", {"tap_layers": []}, "tap_layers is empty"),
        ("eagle3", {"hidden_size": 16}, "hidden_size is 16, .*32"),
        ("eagle3", {"num_heads": 4, "num_kv_heads": 3}, "num_heads is 4, .*num_kv_heads 3"),
        ("eagle3", {"head_dim": 5}, "head_dim is 5, .*even"),
        ("eagle3", {"start_from": "target", "intermediate_size": 50}, "start_from"),
        ("medusa", {"tap_layers": [1, 2]}, "exactly one"),
        ("medusa", {"hidden_size": 16}, "hidden_size is 16, .*32"),
        ("draft_model", {"draft_vocab_size": 20}, "draft_vocab_size"),
        ("draft_model", {"overrides": {"hidden_size": 16}}, "overrides"),
        (
            "draft_model",
            {"start_from": "random", "overrides": {"hiden_size": 16}},
            "'hiden_size'; did you mean 'hidden_size'",
        ),
        ("draft_model", {"num_layers": 9}, "num_layers is 9, .*4"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    name: str, options: dict[str, Any], message: str, target: TargetModel
) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_head(name, options, target)
    assert "\n" not in str(error.value)


def test_start_from_target_needs_a_llama_like_target(make_gpt2: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="start_from auto or random"):
        make_head("eagle3", {"start_from": "target"}, TargetModel(make_gpt2()))


@each_head
def test_fits_a_target_of_another_kind(name: str, make_gpt2: Callable[..., Any]) -> None:
    other = TargetModel(make_gpt2())
    head = make_head(name, {"num_layers": 1} if name == "draft_model" else {}, other)
    if name == "draft_model":
        assert TargetModel(head.model).num_layers == 1
    inputs = inputs_of(other, head, torch.randint(2, VOCAB, (1, 9)))
    expected = training_logits(head, inputs, 2)
    with torch.no_grad():
        state = head.start()
        first = head.absorb(state, inputs.ids_BL[:, :5], inputs.taps_BLTD[:, :5], inputs.ids_BL[:, 5])
        second = head.advance(state, inputs.ids_BL[:, 6])
    torch.testing.assert_close(first, expected[0][:, 4], atol=1e-10, rtol=0)
    torch.testing.assert_close(second, expected[1][:, 4], atol=1e-10, rtol=0)


# Checkpoints


def reload(head: DraftHead, folder: Path) -> DraftHead:
    """A head back from its folder; a draft model is a transformers folder, taken like any other model."""
    if head.type_name == "draft_model":
        loaded = type(head)(head.config)
        loaded.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        return loaded.eval()
    return load_head(folder)


@each_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_saved_head_comes_back_bit_for_bit(
    name: str, options: dict[str, Any], dtype: torch.dtype, target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(name, options, target).to(dtype)
    head.train()
    head.save_pretrained(tmp_path / "head")
    loaded = reload(head, tmp_path / "head")
    before, after = head.state_dict(), loaded.state_dict()
    assert list(before) == list(after)
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor), key
    assert not any(module.training for module in loaded.modules())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.config == head.config


@each_case
def test_checkpoint_holds_the_heads_tensors_and_no_more(
    name: str, options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(name, options, target)
    head.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + header + head.nbytes == 8 + header + sum(t.nbytes for t in stored.values())
    if name != "draft_model":
        assert stored.keys() == head.state_dict().keys()
        theirs = {"model.embed_tokens.weight", "lm_head.weight"} & target.model.state_dict().keys()
        assert len(theirs) == 2
        expected = {"lm_head.weight"} if options.get("projection") == "own" and name == "eagle3" else set()
        assert stored.keys() & theirs == expected
        for tensor in (target.embedding.weight, target.projection.weight):
            assert not any(t.shape == tensor.shape and torch.equal(t, tensor) for t in stored.values())


@each_head
def test_loads_in_the_dtype_asked_for(name: str, target: TargetModel, tmp_path: Path) -> None:
    if name == "draft_model":
        pytest.skip("a transformers folder; transformers loads it")
    make_head(name, {}, target).save_pretrained(tmp_path)
    assert load_head(tmp_path).dtype == torch.float64
    assert load_head(tmp_path, dtype=torch.float32).dtype == torch.float32


@each_head
def test_config_survives_json(name: str, target: TargetModel) -> None:
    config = get_head_type(name).derive_config(target, {})
    values = config.model_dump(mode="json")
    assert parse(type(config), json.loads(json.dumps(values)), "here").model_dump(mode="json") == values


def test_loading_spends_no_random_numbers(target: TargetModel, tmp_path: Path) -> None:
    make_head("eagle3", {}, target).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    load_head(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


# The draft vocabulary


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts_V = torch.tensor([5, 0, 9, 5, 1, 5])
    assert choose_draft_vocabulary(counts_V, 3).tolist() == [0, 2, 3]  # of equals the lower ids
    assert choose_draft_vocabulary(counts_V, 6).tolist() == list(range(6))
    assert coverage(counts_V, torch.tensor([0, 2, 3])) == pytest.approx(19 / 25)
    assert coverage(torch.zeros(3), torch.tensor([0])) == 0
    for size in (0, 7):
        with pytest.raises(UserError, match=f"draft_vocab_size is {size}, expected 1 to 6"):
            choose_draft_vocabulary(counts_V, size)
