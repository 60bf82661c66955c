"""The sampler against transformers' own processors, called one token at a time on growing prefixes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

from specheads.errors import UserError
from specheads.inference import Sampler

VOCAB = 13


class ForbidsTheLastTokenInPlace(LogitsProcessor):
    """A user's own processor: depends on history, and writes into the scores it is given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = -torch.inf
        scores[:, input_ids.shape[1] % VOCAB] += 1.5
        return scores


PROCESSORS = {
    "repetition penalty": lambda: lp.RepetitionPenaltyLogitsProcessor(1.3),
    "no repeated pair": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "bad words": lambda: lp.NoBadWordsLogitsProcessor([[3, 4], [5]], torch.tensor([1])),
    "sequence bias": lambda: lp.SequenceBiasLogitsProcessor({(2,): 1.0, (6, 7): -2.0}),
    "min length": lambda: lp.MinLengthLogitsProcessor(8, torch.tensor([1])),
    "min new tokens": lambda: lp.MinNewTokensLengthLogitsProcessor(4, 3, torch.tensor([1])),
    "forced end": lambda: lp.ForcedEOSTokenLogitsProcessor(9, torch.tensor([1])),
    "length penalty": lambda: lp.ExponentialDecayLengthPenalty((2, 1.2), torch.tensor([1]), 4),
    "suppressed": lambda: lp.SuppressTokensLogitsProcessor([0, 2]),
    "suppressed first": lambda: lp.SuppressTokensAtBeginLogitsProcessor([4], 4),
    "allowed": lambda: lp.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [(int(ids[-1]) + i) % VOCAB for i in (0, 3, 5)], 1
    ),
    "watermark": lambda: lp.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "own": ForbidsTheLastTokenInPlace,
    "temperature": lambda: lp.TemperatureLogitsWarper(0.7),
    "top k": lambda: lp.TopKLogitsWarper(4),
    "top p": lambda: lp.TopPLogitsWarper(0.8),
    "min p": lambda: lp.MinPLogitsWarper(0.1),
    "typical": lambda: lp.TypicalLogitsWarper(0.8),
    "epsilon": lambda: lp.EpsilonLogitsWarper(0.05),
    "eta": lambda: lp.EtaLogitsWarper(0.1),
    "top h": lambda: lp.TopHLogitsWarper(0.6),
    "normalised": lambda: lp.LogitNormalization(),
}


def step_by_step(processors: LogitsProcessorList, prefix: Tensor, block: Tensor, logits: Tensor) -> Tensor:
    rows = []
    for j in range(logits.shape[1]):
        ids = torch.cat([prefix, block[:, :j]], dim=1)
        rows.append(processors(ids, logits[:, j].clone()))
    return torch.stack(rows, dim=1)


def example(seed: int, block_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """A prefix of 4 tokens, a block, and logits (1, block + 1, vocab); few distinct tokens, so that n-grams repeat."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(1, 7, (1, 4), generator=generator)
    block = torch.randint(1, 7, (1, block_length), generator=generator)
    return prefix, block, 2 * torch.randn(1, block_length + 1, VOCAB, generator=generator, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=4, unique=True),
    seed=st.integers(0, 10**6),
    block_length=st.integers(0, 5),
)
def test_every_position_has_its_exact_prefix(names: list[str], seed: int, block_length: int) -> None:
    names.sort(key=list(PROCESSORS).index)  # transformers' order: warpers last
    prefix, block, logits = example(seed, block_length)
    kept = logits.clone()
    processors = LogitsProcessorList([PROCESSORS[name]() for name in names])
    expected = step_by_step(processors, prefix, block, logits)
    sampled = Sampler(processors, do_sample=True).probs(prefix, block, logits)
    greedy = Sampler(processors, do_sample=False).probs(prefix, block, logits)
    assert torch.equal(logits, kept), "the caller's logits were written to"
    torch.testing.assert_close(sampled, expected.softmax(-1), atol=1e-12, rtol=0, equal_nan=True)
    assert torch.equal(greedy.argmax(-1), expected.argmax(-1))
    assert torch.equal(greedy.sum(-1), torch.ones_like(greedy[..., 0]))


@pytest.mark.parametrize("name", sorted(PROCESSORS))
def test_each_processor_alone(name: str) -> None:
    for seed in range(5):
        prefix, block, logits = example(seed, 5)
        processors = LogitsProcessorList([PROCESSORS[name]()])
        expected = step_by_step(processors, prefix, block, logits).softmax(-1)
        actual = Sampler(processors, do_sample=True).probs(prefix, block, logits)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def test_one_call_over_the_whole_block_would_be_seen() -> None:
    """What other loops do: penalties taken from the whole prefix once, for all rows."""
    prefix, block, logits = example(3, 5)
    processors = LogitsProcessorList([PROCESSORS["repetition penalty"]()])
    right = Sampler(processors, do_sample=True).probs(prefix, block, logits)
    once = torch.stack([processors(prefix, logits[:, j]) for j in range(6)], dim=1).softmax(-1)
    assert (right - once).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(PROCESSORS))
def test_a_drafter_s_next_token_sees_the_same(name: str) -> None:
    prefix, block, logits = example(1, 3)
    sampler = Sampler(LogitsProcessorList([PROCESSORS[name]()]), do_sample=True)
    last = sampler.next_probs(prefix, block, logits[:, -1])
    assert torch.allclose(last, sampler.probs(prefix, block, logits)[:, -1], atol=1e-12)


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_is_left_behind_at_once(given_dtype: torch.dtype, expected: torch.dtype) -> None:
    prefix, block, logits = example(0, 2)
    probs = Sampler(do_sample=True).probs(prefix, block, logits.to(given_dtype))
    assert probs.dtype == expected
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 3, dtype=expected))


def test_processors_that_keep_state_are_refused() -> None:
    with pytest.raises(UserError, match=r"UnbatchedClassifierFreeGuidanceLogitsProcessor .* guidance_scale"):
        Sampler(LogitsProcessorList([lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)]), do_sample=True)


def test_another_temperature_stands_where_the_first_stood() -> None:
    prefix, block, logits = example(5, 2)
    penalty, cold, top_k = (PROCESSORS[name]() for name in ("repetition penalty", "temperature", "top k"))
    hot = lp.TemperatureLogitsWarper(2.0)
    expected = Sampler(LogitsProcessorList([penalty, hot, top_k]), do_sample=True).probs(prefix, block, logits)
    for processors in ([penalty, cold, top_k], [penalty, top_k]):
        for do_sample in (True, False):
            sampler = Sampler(LogitsProcessorList(processors), do_sample=do_sample).with_temperature(2)
            torch.testing.assert_close(sampler.probs(prefix, block, logits), expected)
    greedy = Sampler(LogitsProcessorList([penalty, cold]), do_sample=True).with_temperature(0)
    assert torch.equal(greedy.probs(prefix, block, logits).amax(-1), torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(UserError, match="draft temperature is -1"):
        Sampler(do_sample=True).with_temperature(-1)
