"""The loop on tiny float64 models: token for token what transformers' own generate gives, whatever the drafter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from specheads.errors import UserError
from specheads.inference import (
    CascadeDrafter,
    HeadDrafter,
    LookupDrafter,
    ModelDrafter,
    NoDrafter,
    SpeculativeDecoder,
    decoder,
)
from specheads.inference.draft import Drafter
from specheads.inference.session import TargetSession
from specheads.registry import head_types
from specheads.target import TargetModel

LENGTHS = [0, 1, 2, 5, 9]
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])
NEW_TOKENS = 24

MakeDrafter = Callable[[PreTrainedModel, Tensor], Drafter]


@pytest.fixture(params=["llama", "gpt2", "tied llama"])
def model(request: pytest.FixtureRequest, make_llama: Any, make_gpt2: Any) -> PreTrainedModel:
    if request.param == "gpt2":
        return make_gpt2()
    return make_llama(num_hidden_layers=3, tie_word_embeddings=request.param == "tied llama")


@pytest.fixture
def drafters(make_llama: Any, scripted: Any) -> dict[str, MakeDrafter]:
    """By name: functions of the target and of the tokens that plain decoding gives."""
    other = make_llama(seed=1, num_hidden_layers=1)

    def script(wrong: Callable[[int], bool]) -> MakeDrafter:
        def make(model: PreTrainedModel, plain_1P: Tensor) -> Drafter:
            text = plain_1P[0].tolist()
            return scripted(lambda place: (text[min(place, len(text) - 1)] + wrong(place)) % 61)

        return make

    return {
        "none": lambda *_: NoDrafter(),
        "lookup": lambda *_: LookupDrafter(max_ngram=3, min_ngram=1),
        "another model": lambda *_: ModelDrafter(other),
        "another model, hot": lambda *_: ModelDrafter(other, temperature=2.0),
        "the target itself": lambda model, _: ModelDrafter(model),
        "cascade": lambda model, _: CascadeDrafter([LookupDrafter(min_ngram=1), ModelDrafter(model)]),
        "always right": script(lambda place: False),
        "never right": script(lambda place: True),
        "sometimes right": script(lambda place: place % 3 == 0),
    }


def plain(model: PreTrainedModel, prompt: Tensor = PROMPT, **settings: Any) -> Tensor:
    return model.generate(prompt, **{"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings})


NAMES = [
    "none",
    "lookup",
    "another model",
    "another model, hot",
    "the target itself",
    "cascade",
    "always right",
    "never right",
    "sometimes right",
]


@pytest.mark.parametrize("draft_length", [*LENGTHS, "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_gives_the_tokens_of_plain_decoding(
    name: str, draft_length: int | str, model: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    expected = plain(model)
    speculative = SpeculativeDecoder(model, drafters[name](model, expected), draft_length=draft_length)
    result = speculative.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(result.sequences, expected)
    assert result.stats.new_tokens == expected.shape[1] - PROMPT.shape[1]
    assert torch.equal(plain(model, custom_generate=speculative), expected)


@pytest.mark.parametrize("draft_length", [1, 3, "auto"])
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
@pytest.mark.parametrize("head_type", sorted(head_types()))
def test_a_head_with_random_weights_changes_nothing(
    head_type: str, draft_vocab_size: int | None, draft_length: int | str, tiny_llama: PreTrainedModel
) -> None:
    drafter = HeadDrafter(random_head(head_type, tiny_llama, draft_vocab_size))
    for settings in ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}):
        speculative = SpeculativeDecoder(tiny_llama, drafter, draft_length=draft_length)
        result = speculative.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
        assert torch.equal(result.sequences, plain(tiny_llama, **settings))
        assert result.stats.drafted > 0


def random_head(head_type: str, model: PreTrainedModel, draft_vocab_size: int | None) -> Any:
    target = TargetModel.wrap(model)
    kind = head_types()[head_type]
    options = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = kind(kind.derive_config(target, options)).double()
    except UserError as error:
        pytest.skip(str(error))
    if draft_vocab_size is not None:
        head.set_draft_vocabulary(torch.arange(draft_vocab_size) * 3)
    return head


@pytest.mark.parametrize("draft_length", [0, 1, 2, 5, 9])
def test_rounds_and_counts_of_a_perfect_drafter(
    draft_length: int, tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    drafter = drafters["always right"](tiny_llama, plain(tiny_llama))
    stats = (
        SpeculativeDecoder(tiny_llama, drafter, draft_length=draft_length)
        .generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
        .stats
    )
    assert stats.rounds == math.ceil((NEW_TOKENS - 1) / (draft_length + 1))
    assert stats.accepted == stats.drafted == NEW_TOKENS - 1 - stats.rounds
    assert stats.tau == pytest.approx((NEW_TOKENS - 1) / stats.rounds)
    assert stats.alpha == (1.0 if draft_length else None)
    assert stats.seconds >= stats.prefill_seconds + stats.draft_seconds + stats.target_seconds > 0


def test_a_drafter_that_is_never_right_costs_drafts_and_nothing_else(
    tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    drafter = drafters["never right"](tiny_llama, plain(tiny_llama))
    stats = (
        SpeculativeDecoder(tiny_llama, drafter, draft_length=4)
        .generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
        .stats
    )
    assert (stats.rounds, stats.accepted, stats.tau, stats.alpha) == (NEW_TOKENS - 1, 0, 1.0, 0.0)
    assert stats.acceptance_by_position == [0.0]


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[41], [13, 22]]},
    {"min_new_tokens": 10, "eos_token_id": list(range(10, 40))},
    {"suppress_tokens": [3, 9, 41]},
    {"forced_eos_token_id": 7},
    {"exponential_decay_length_penalty": (4, 1.3)},
    {"sequence_bias": [[[41], -5.0], [[22], 2.0]]},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "suppress_tokens": [4]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ", ".join(settings))
@pytest.mark.parametrize("name", ["another model", "sometimes right", "always right"])
def test_processors_inside_a_block_are_exact(
    name: str, settings: dict[str, Any], tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    expected = plain(tiny_llama, **settings)
    speculative = SpeculativeDecoder(tiny_llama, drafters[name](tiny_llama, expected), draft_length=5)
    result = speculative.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, **settings)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("prompt_length", [1, 2, 40])
def test_short_and_long_prompts(prompt_length: int, model: PreTrainedModel, drafters: dict[str, MakeDrafter]) -> None:
    prompt = torch.arange(prompt_length)[None] % 50 + 3
    expected = plain(model, prompt)
    for name in ("lookup", "another model", "the target itself", "cascade"):
        speculative = SpeculativeDecoder(model, drafters[name](model, expected), draft_length=3)
        assert torch.equal(speculative.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False).sequences, expected)


def test_the_target_s_last_position_is_not_drafted_past(make_gpt2: Any, drafters: dict[str, MakeDrafter]) -> None:
    """GPT-2 has a table of positions: its end can be reached, and a request past it is refused before it begins."""
    model = make_gpt2(n_positions=16, eos_token_id=None)
    length = PROMPT.shape[1]
    expected = plain(model, max_new_tokens=17 - length)
    decoder = SpeculativeDecoder(model, drafters["always right"](model, expected), draft_length=7)
    result = decoder.generate(PROMPT, do_sample=False, max_new_tokens=17 - length)
    assert torch.equal(result.sequences, expected)
    with pytest.raises(UserError, match=f"{length} tokens and {18 - length} new ones take 17 positions, .* has 16"):
        decoder.generate(PROMPT, do_sample=False, max_new_tokens=18 - length)


# What drafter and cache see.


@pytest.mark.parametrize("name", ["sometimes right", "always right", "never right"])
def test_the_drafter_observes_every_token_once_with_the_target_s_states(
    name: str, tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    taps = (0, 2, 3)
    expected = plain(tiny_llama)
    drafter: Any = drafters[name](tiny_llama, expected)
    drafter.tap_layers = taps
    SpeculativeDecoder(tiny_llama, drafter, draft_length=4).generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
    seen = [token for ids, _, _ in drafter.observed for token in ids]
    assert seen == expected[0, : len(seen)].tolist()
    assert drafter.text == expected[0, : len(seen) + 1].tolist()
    states = tiny_llama(expected, output_hidden_states=True).hidden_states
    observed = torch.cat([taps_1LTD for _, taps_1LTD, _ in drafter.observed], dim=1)
    for i, tap in enumerate(taps):
        torch.testing.assert_close(observed[:, :, i], states[tap][:, : len(seen)], atol=1e-10, rtol=0)


def test_limits_respect_the_length(tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]) -> None:
    drafter: Any = drafters["never right"](tiny_llama, plain(tiny_llama))
    SpeculativeDecoder(tiny_llama, drafter, draft_length=5).generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert drafter.limits == [5, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", ["sometimes right", "always right", "another model", "none"])
def test_the_cache_after_rollbacks_equals_a_fresh_one(
    name: str, model: PreTrainedModel, drafters: dict[str, MakeDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = []

    class Watched(TargetSession):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sessions.append(self)

        def commit(self, accepted: int) -> Any:
            read = super().commit(accepted)
            self.text = [*getattr(self, "text", []), *read.ids_1L[0].tolist()]
            assert self.cache.get_seq_length() == len(self.text), "every committed token but the newest"
            return read

    monkeypatch.setattr(decoder, "TargetSession", Watched)
    drafter = drafters[name](model, plain(model))
    result = SpeculativeDecoder(model, drafter, draft_length=5).generate(PROMPT, max_new_tokens=20, do_sample=False)
    committed = result.sequences[:, :-1]
    assert sessions[0].text == committed[0].tolist()
    fresh = TargetSession(TargetModel.wrap(model), ())
    fresh.start(committed)
    for layer, fresh_layer in zip(sessions[0].cache.layers, fresh.cache.layers, strict=True):
        for mine, its in [(layer.key_buffer, fresh_layer.key_buffer), (layer.value_buffer, fresh_layer.value_buffer)]:
            torch.testing.assert_close(mine.view(), its.view(), atol=1e-10, rtol=0)
    last = result.sequences[:, -1:]
    logits = model(input_ids=last, cache=sessions[0].cache).logits[:, -1]
    torch.testing.assert_close(logits, model(result.sequences).logits[:, -1], atol=1e-10, rtol=0)


# Sampling.


@pytest.mark.parametrize("name", ["none", "another model", "cascade", "sometimes right"])
def test_a_seed_repeats_its_tokens_and_the_global_state_is_left_alone(
    name: str, tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]
) -> None:
    speculative = SpeculativeDecoder(tiny_llama, drafters[name](tiny_llama, plain(tiny_llama)), draft_length=3)
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5, "eos_token_id": None}
    before = torch.random.get_rng_state()
    first, second, other = (speculative.generate(PROMPT, seed=seed, **settings).sequences for seed in (7, 7, 8))
    through_transformers = tiny_llama.generate(PROMPT, custom_generate=speculative, seed=7, **settings)
    unseeded = [speculative.generate(PROMPT, **settings).sequences for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, second)
    assert torch.equal(first, through_transformers)
    assert not torch.equal(first, other)
    assert not torch.equal(*unseeded)


def test_settings_do_not_leak_into_the_next_call(tiny_llama: PreTrainedModel, drafters: dict[str, MakeDrafter]) -> None:
    speculative = SpeculativeDecoder(tiny_llama, drafters["another model"](tiny_llama, PROMPT), draft_length=3)
    speculative.generate(PROMPT, seed=1, max_new_tokens=9, do_sample=True, temperature=3.0, repetition_penalty=2.0)
    speculative.generate(torch.tensor([[9]]), max_new_tokens=5, do_sample=False, eos_token_id=[10, 11, 12])
    result = speculative.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(result.sequences, plain(tiny_llama))


def test_the_model_s_own_generation_defaults_count(tiny_llama: PreTrainedModel) -> None:
    tiny_llama.generation_config.repetition_penalty = 1.5
    tiny_llama.generation_config.max_new_tokens = 11
    expected = tiny_llama.generate(PROMPT)
    assert expected.shape[1] == PROMPT.shape[1] + 11
    result = SpeculativeDecoder(tiny_llama, LookupDrafter(min_ngram=1), draft_length=4).generate(PROMPT)
    assert torch.equal(result.sequences, expected)


class RulesOut(LogitsProcessor):
    def __init__(self, kept: list[int]) -> None:
        self.kept = kept

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ruled_out = torch.ones_like(scores, dtype=torch.bool)
        ruled_out[:, self.kept] = False
        return scores.masked_fill(ruled_out, -torch.inf)


def test_processors_that_leave_no_token_are_an_error(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(UserError, match="rule out every token"):
        SpeculativeDecoder(tiny_llama).generate(
            PROMPT, max_new_tokens=4, do_sample=True, seed=0, logits_processor=[RulesOut([])]
        )


def test_processors_may_leave_none_of_the_drafter_s_tokens(tiny_llama: PreTrainedModel, make_llama: Any) -> None:
    drafter = ModelDrafter(make_llama(seed=1, vocab_size=40))
    result = SpeculativeDecoder(tiny_llama, drafter, draft_length=3).generate(
        PROMPT, max_new_tokens=12, do_sample=True, seed=0, logits_processor=[RulesOut([50, 51])]
    )
    assert set(result.sequences[0, PROMPT.shape[1] :].tolist()) == {50, 51}
