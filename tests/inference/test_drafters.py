"""Each drafter by itself: what it proposes, and what it remembers from round to round."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from specheads.errors import UserError
from specheads.inference import CascadeDrafter, HeadDrafter, LookupDrafter, ModelDrafter, Sampler, SpeculativeDecoder
from specheads.inference.draft import Draft, Drafter
from specheads.registry import head_types
from specheads.target import TargetModel

GREEDY = Sampler(do_sample=False)


def start(drafter: Drafter, model: PreTrainedModel, sampler: Sampler = GREEDY, seed: int = 0) -> Drafter:
    drafter.start(TargetModel.wrap(model), sampler, torch.Generator().manual_seed(seed))
    return drafter


def observe(drafter: Drafter, ids: list[int], next_id: int, taps: Tensor | None = None) -> None:
    drafter.observe(torch.tensor([ids]), taps, torch.tensor([next_id]))


def ids_of(draft: Draft) -> list[int]:
    return draft.ids_BK[0].tolist()


# Lookup


def lookup_by_scanning(text: list[int], max_ngram: int, min_ngram: int, limit: int) -> list[int]:
    """The definition, without an index."""
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for place in range(len(text) - n - 1, -1, -1):
            if text[place : place + n] == text[-n:]:
                copied: list[int] = []
                while len(copied) < limit:
                    copied.append((text + copied)[place + n + len(copied)])
                return copied
    return []


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=30),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    limit=st.integers(0, 8),
)
def test_lookup_agrees_with_scanning_after_every_round(
    text: list[int], cuts: list[int], lengths: tuple[int, int], limit: int
) -> None:
    target = _FakeTarget(4)
    drafter = LookupDrafter(max(lengths), min(lengths))
    drafter.start(target, GREEDY, torch.Generator())
    read, known = 0, 1
    for cut in [*cuts, len(text)]:
        end = min(known + cut, len(text))
        if end - 1 > read:
            observe(drafter, text[read : end - 1], text[end - 1])
            read, known = end - 1, end
        draft = drafter.propose(limit)
        expected = lookup_by_scanning(text[:known], max(lengths), min(lengths), limit) if known > 1 else []
        assert ids_of(draft) == expected
        assert torch.equal(draft.probs_BKV.argmax(-1), draft.ids_BK)
        assert draft.probs_BKV.shape == (1, len(expected), 4)


class _FakeTarget:
    """All that a lookup needs to know."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def test_lookup_goes_on_with_what_it_copies() -> None:
    drafter = LookupDrafter(max_ngram=2)
    drafter.start(_FakeTarget(10), GREEDY, torch.Generator())
    observe(drafter, [1, 2, 3, 9, 1], 2)
    assert ids_of(drafter.propose(7)) == [3, 9, 1, 2, 3, 9, 1]
    assert ids_of(drafter.propose(2)) == [3, 9]


def test_lookup_forgets_the_generation_before() -> None:
    drafter = LookupDrafter(max_ngram=2)
    for _ in range(2):
        drafter.start(_FakeTarget(10), GREEDY, torch.Generator())
        observe(drafter, [1], 2)
        assert ids_of(drafter.propose(3)) == []
        observe(drafter, [2, 5, 1], 2)


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(2, 3), (2, 0)])
def test_lookup_s_lengths(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(UserError, match="expected 1 <= min_ngram <= max_ngram"):
        LookupDrafter(max_ngram, min_ngram)


# A model


def check_model_cache(drafter: Any, committed: list[int]) -> None:
    """What the drafter's cache still holds of the committed text equals a fresh pass over it."""
    length = drafter._cache.get_seq_length()
    assert length <= len(committed)
    if length == 0:
        return
    fresh = drafter.model.model(torch.tensor([committed[:length]]), use_cache=True).cache
    for layer, fresh_layer in zip(drafter._cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.key_buffer.view(), fresh_layer.keys, atol=1e-10, rtol=0)
        torch.testing.assert_close(layer.value_buffer.view(), fresh_layer.values, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8), seed=st.integers(0, 99))
def test_a_model_s_drafts_never_depend_on_how_it_got_there(
    rounds: list[tuple[int, int]], seed: int, make_llama: Any
) -> None:
    """Rounds of any draft length and acceptance, empty drafts included: cache and proposals equal a fresh start's."""
    small = _SMALL.setdefault("model", make_llama(seed=1, num_hidden_layers=1))
    rng = torch.Generator().manual_seed(seed)
    drafter = start(ModelDrafter(small), small)
    observe(drafter, [5, 6, 7], 8)
    committed = [5, 6, 7, 8]
    for limit, accepted in rounds:
        draft = ids_of(drafter.propose(limit))
        fresh = start(ModelDrafter(small), small)
        observe(fresh, committed[:-1], committed[-1])
        assert draft == ids_of(fresh.propose(limit))
        kept = draft[:accepted]
        next_id = int(torch.randint(0, 61, (1,), generator=rng))
        observe(drafter, [committed[-1], *kept], next_id)
        committed += [*kept, next_id]
        check_model_cache(drafter, committed)
        if limit and len(draft) == len(kept):
            assert drafter._cache.get_seq_length() == len(committed) - 2, "one short after full acceptance"


_SMALL: dict[str, PreTrainedModel] = {}


@pytest.mark.parametrize("vocab_size", [40, 61, 80])
def test_a_vocabulary_padded_to_another_size(vocab_size: int, tiny_llama: PreTrainedModel, make_llama: Any) -> None:
    small = make_llama(seed=1, vocab_size=vocab_size)
    sampler = Sampler(do_sample=True)
    drafter = start(ModelDrafter(small), tiny_llama, sampler)
    observe(drafter, [5, 6], 60)  # a token that the smaller vocabulary does not have
    draft = drafter.propose(5)
    assert draft.probs_BKV.shape == (1, 5, 61)
    assert draft.ids_BK.max() < 61
    torch.testing.assert_close(draft.probs_BKV.sum(-1), torch.ones(1, 5, dtype=torch.float64))
    assert draft.probs_BKV[..., vocab_size:].sum() == 0
    prompt = torch.tensor([[5, 6, 7, 60]])
    result = SpeculativeDecoder(tiny_llama, drafter, draft_length=4).generate(
        prompt, max_new_tokens=12, do_sample=False
    )
    assert torch.equal(result.sequences, tiny_llama.generate(prompt, max_new_tokens=12, do_sample=False))


def test_the_q_reported_is_the_one_drawn_from(tiny_llama: PreTrainedModel) -> None:
    """Many draws of the first token follow the reported q, also at a temperature of the drafter's own."""
    for temperature in (None, 2.0):
        drafter: Any = start(ModelDrafter(tiny_llama, temperature), tiny_llama, Sampler(do_sample=True))
        observe(drafter, [5, 6], 7)
        counts = torch.zeros(61, dtype=torch.float64)
        for _ in range(1500):
            draft = drafter.propose(1)
            counts[draft.ids_BK] += 1
            drafter._cache.rollback(2)
        q_V = draft.probs_BKV[0, 0]
        logits = tiny_llama(torch.tensor([[5, 6, 7]])).logits[0, -1]
        torch.testing.assert_close(q_V, (logits / (temperature or 1.0)).softmax(-1), atol=1e-10, rtol=0)
        assert (counts / 1500 - q_V).abs().max() < 0.05


def test_processors_see_the_drafted_tokens(tiny_llama: PreTrainedModel) -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    drafter = start(ModelDrafter(tiny_llama), tiny_llama, Sampler(LogitsProcessorList([penalty]), do_sample=True))
    observe(drafter, [5, 6], 7)
    draft = drafter.propose(4)
    text = torch.tensor([[5, 6, 7]])
    for k in range(4):
        logits = penalty(text, tiny_llama(text).logits[:, -1])
        torch.testing.assert_close(draft.probs_BKV[:, k], logits.softmax(-1), atol=1e-10, rtol=0)
        text = torch.cat([text, draft.ids_BK[:, k : k + 1]], dim=1)


def test_a_short_table_of_positions_ends_the_drafts(tiny_llama: PreTrainedModel, make_gpt2: Any) -> None:
    drafter = start(ModelDrafter(make_gpt2(n_positions=8)), tiny_llama)
    observe(drafter, [5, 6, 7, 8], 9)
    assert drafter.propose(9).length == 4  # the last of them is drafted behind position 7 and never read
    observe(drafter, [9, 10, 11, 12, 13], 14)
    assert drafter.propose(9).length == 0


def test_tokenizers_that_differ_are_refused(tiny_llama: PreTrainedModel, tiny_tokenizer: Any, make_llama: Any) -> None:
    target = TargetModel(tiny_llama, tiny_tokenizer)
    small = make_llama(seed=1)
    drafter = ModelDrafter(TargetModel(small, tiny_tokenizer))
    drafter.start(target, GREEDY, torch.Generator())
    other = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    other.add_tokens(["<other>"])
    with pytest.raises(UserError, match="another tokenizer than the target"):
        ModelDrafter(TargetModel(small, other)).start(target, GREEDY, torch.Generator())
    with pytest.raises(UserError, match="draft temperature is -1"):
        ModelDrafter(small, temperature=-1)


def test_a_model_s_memory_is_weights_and_cache(tiny_llama: PreTrainedModel) -> None:
    drafter = ModelDrafter(tiny_llama)
    weights = sum(parameter.nbytes for parameter in tiny_llama.parameters())
    assert drafter.memory_bytes == weights
    start(drafter, tiny_llama)
    observe(drafter, [5, 6], 7)
    drafter.propose(2)
    assert drafter.memory_bytes > weights


# A head


@pytest.fixture(params=sorted(head_types()))
def head(request: pytest.FixtureRequest, tiny_llama: PreTrainedModel) -> Any:
    kind = head_types()[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(kind.derive_config(TargetModel.wrap(tiny_llama), {})).double()


def taps_of(drafter: Drafter, model: PreTrainedModel, ids: list[int]) -> Tensor | None:
    if not drafter.tap_layers:
        return None
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap] for tap in drafter.tap_layers], dim=2)


def test_a_head_s_drafts_never_depend_on_how_it_got_there(head: Any, tiny_llama: PreTrainedModel) -> None:
    """Rounds that drafted nothing, rejected or accepted: the next proposal is that of a fresh start."""
    sampler = Sampler(do_sample=True)
    text = torch.randint(2, 61, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    drafter, fresh = HeadDrafter(head), HeadDrafter(head)
    taps = taps_of(drafter, tiny_llama, text)
    start(drafter, tiny_llama, sampler)
    read = 0
    for end, limit in [(4, 2), (5, 0), (6, 0), (9, 3), (10, 1), (13, 0), (17, 2)]:
        part = None if taps is None else taps[:, read:end]
        observe(drafter, text[read:end], text[end], part)
        draft = drafter.propose(limit)
        start(fresh, tiny_llama, sampler)
        observe(fresh, text[:end], text[end], None if taps is None else taps[:, :end])
        expected = fresh.propose(limit)
        if limit:
            torch.testing.assert_close(draft.probs_BKV[:, 0], expected.probs_BKV[:, 0], atol=1e-9, rtol=0)
        else:
            assert draft.length == 0
        read = end


def test_a_head_is_bound_once_and_again_after_another_target(
    head: Any, tiny_llama: PreTrainedModel, make_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    bind = type(head).bind
    monkeypatch.setattr(type(head), "bind", lambda self, target: calls.append(target) or bind(self, target))
    drafter = HeadDrafter(head)
    targets = [TargetModel(tiny_llama), TargetModel(make_llama(seed=5, num_hidden_layers=3))]
    for i in (0, 0, 1, 1, 0):
        drafter.start(targets[i], GREEDY, torch.Generator())
        assert not head.training
    assert calls == [targets[0], targets[1], targets[0]]


def test_a_head_for_another_target_is_refused(head: Any, make_llama: Any) -> None:
    with pytest.raises(UserError, match="head was trained for a target with"):
        start(HeadDrafter(head), make_llama(num_hidden_layers=2))


def test_a_head_s_limit_is_the_decoder_s(tiny_llama: PreTrainedModel) -> None:
    medusa = head_types()["medusa"]
    drafter = HeadDrafter(medusa(medusa.derive_config(TargetModel.wrap(tiny_llama), {"num_heads": 3})).double())
    with pytest.raises(UserError, match="head medusa drafts at most 3 tokens"):
        SpeculativeDecoder(tiny_llama, drafter, draft_length=4)
    prompt = torch.tensor([[5, 6, 7]])
    result = SpeculativeDecoder(tiny_llama, drafter).generate(prompt, max_new_tokens=20, do_sample=False)
    assert len(result.stats.drafted_by_position) <= 3


def test_nothing_outside_the_draft_vocabulary_is_drafted(tiny_llama: PreTrainedModel) -> None:
    medusa = head_types()["medusa"]
    config = medusa.derive_config(TargetModel.wrap(tiny_llama), {"draft_vocab_size": 5})
    head = medusa(config).double()
    ids = torch.tensor([3, 9, 17, 30, 58])
    head.set_draft_vocabulary(ids)
    drafter = start(HeadDrafter(head), tiny_llama, Sampler(do_sample=True).with_temperature(100.0))
    observe(drafter, [5, 6], 7, taps_of(drafter, tiny_llama, [5, 6]))
    probs_BKV = drafter.propose(4).probs_BKV
    torch.testing.assert_close(probs_BKV[..., ids].sum(-1), torch.ones(1, 4, dtype=torch.float64))


# A cascade


def test_the_first_that_offers_drafts_and_all_observe(tiny_llama: PreTrainedModel, scripted: Any) -> None:
    def script(token: int, taps: tuple[int, ...]) -> Any:
        return scripted(lambda place: token, taps)

    first, second, third = LookupDrafter(max_ngram=2), script(50, (2,)), script(51, (0, 3))
    second.max_draft_length = 2
    cascade = CascadeDrafter([first, second, third])
    assert (cascade.name, cascade.kind, cascade.tap_layers) == ("lookup+stub+stub", "cascade", (0, 2, 3))
    assert cascade.max_draft_length is None
    start(cascade, tiny_llama)
    taps = torch.arange(3.0)[None, None, :, None].expand(1, 2, 3, 4)
    observe(cascade, [1, 2], 3, taps)
    assert ids_of(cascade.propose(4)) == [50, 50], "lookup finds nothing, the second drafts as far as it can"
    observe(cascade, [3, 1], 2, taps)
    assert ids_of(cascade.propose(4)) == [3, 1, 2, 3]
    assert second.text == third.text == [1, 2, 3, 1, 2]
    assert second.observed[0][1].unique().tolist() == [1.0]
    assert third.observed[0][1].unique().tolist() == [0.0, 2.0]
    assert ids_of(cascade.propose(0)) == []


def test_a_cascade_s_reach_and_memory(tiny_llama: PreTrainedModel, scripted: Any) -> None:
    short, longer = scripted(lambda place: 1), scripted(lambda place: 1)
    short.max_draft_length, longer.max_draft_length = 2, 5
    assert CascadeDrafter([short, longer]).max_draft_length == 5
    model = ModelDrafter(tiny_llama)
    assert CascadeDrafter([LookupDrafter(), model]).memory_bytes == model.memory_bytes
    with pytest.raises(UserError, match="no drafters"):
        CascadeDrafter([])
