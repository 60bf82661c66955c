"""The law of three tokens, end to end, against exact enumeration: model, sampler, drafter, verification, cache, loop.

A chi-square test over all 64 sequences at level 0.001. Its power against a law at chi-square distance 0.05 from the
right one (sum (p' - p)^2 / p) is above 0.99 with 2,000 runs, which a test below computes. Loops with planted mistakes
go through the same test with half the runs and must fail it.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from specheads.inference import ModelDrafter, NoDrafter, SpeculativeDecoder, decoder
from specheads.inference.draft import Drafter
from specheads.inference.draws import draw_uniforms, pick
from specheads.inference.verify import Verdict, verify_chain

VOCAB, TOKENS, RUNS, LEVEL = 4, 3, 2000, 1e-3
PROMPT = torch.tensor([[1, 2]])
SIZES = {
    "vocab_size": VOCAB,
    "pad_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
SETTINGS: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def target(make_llama: Callable[..., Any]) -> Any:
    return make_llama(seed=0, **SIZES)


@pytest.fixture(scope="module")
def small(make_llama: Callable[..., Any]) -> Any:
    return make_llama(seed=1, **SIZES)


def next_probs(model: Any, temperature: float = 1.0) -> Callable[[list[int]], Tensor]:
    """The distribution behind a text, by a pass over all of it without a cache."""

    @cache
    def probs(text: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return (model(torch.tensor([text])).logits[0, -1] / temperature).softmax(-1)

    return lambda text: probs(tuple(text))


def exact_law(
    model: Any, adjust: Callable[[list[int], Tensor], Tensor] = lambda text, p: p
) -> dict[tuple[int, ...], float]:
    probs, law = next_probs(model), {}
    for sequence in itertools.product(range(VOCAB), repeat=TOKENS):
        chance, text = 1.0, PROMPT[0].tolist()
        for token in sequence:
            chance *= adjust(text, probs(text))[token].item()
            text = [*text, token]
        law[sequence] = chance
    return law


def p_value(law: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square against the law; 0 if anything impossible came out."""
    runs = sum(counts.values())
    possible = {sequence: chance for sequence, chance in law.items() if chance > 0}
    if any(sequence not in possible for sequence in counts):
        return 0.0
    # Cells expected fewer than five times are pooled, where the chi-square law would not hold.
    rare = [sequence for sequence, chance in possible.items() if chance * runs < 5]
    cells = [(counts[sequence], chance) for sequence, chance in possible.items() if sequence not in rare]
    if rare:
        cells.append((sum(counts[s] for s in rare), sum(possible[s] for s in rare)))
    statistic = sum((count - runs * chance) ** 2 / (runs * chance) for count, chance in cells if chance > 0)
    return float(scipy_stats.chi2.sf(statistic, len(cells) - 1))


def draw(
    model: Any, drafter: Drafter, runs: int = RUNS, draft_length: int = 2, **settings: Any
) -> Counter[tuple[int, ...]]:
    speculative = SpeculativeDecoder(model, drafter, draft_length=draft_length)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        result = speculative.generate(PROMPT, seed=seed, **{**SETTINGS, **settings})
        counts[tuple(result.sequences[0, 2:].tolist())] += 1
    return counts


def test_the_stated_power() -> None:
    cells = VOCAB**TOKENS
    critical = scipy_stats.chi2.isf(LEVEL, cells - 1)
    assert scipy_stats.ncx2.sf(critical, cells - 1, RUNS * 0.05) > 0.99


@pytest.mark.parametrize("kind", ["none", "model", "model with its own temperature", "drawing"])
def test_three_tokens_have_the_target_s_law(kind: str, target: Any, small: Any, drawing: Any) -> None:
    drafter = {
        "none": NoDrafter(),
        "model": ModelDrafter(small),
        "model with its own temperature": ModelDrafter(small, temperature=2.0),
        "drawing": drawing(next_probs(small)),
    }[kind]
    assert p_value(exact_law(target), draw(target, drafter)) > LEVEL


def test_with_penalty_temperature_and_truncation(target: Any, small: Any) -> None:
    def adjust(text: list[int], p: Tensor) -> Tensor:
        logits = p.log()
        seen = torch.tensor(sorted(set(text)))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.5, logits[seen] / 1.5)
        logits = logits / 0.8
        logits[logits < logits.topk(3).values[-1]] = -torch.inf
        return logits.softmax(-1)

    # Raw logits are not log-probabilities, and the penalty looks at their sign: compare through normalised logits.
    class Normalise(torch.nn.Module):
        def forward(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores.log_softmax(-1)

    class Penalise(torch.nn.Module):
        def forward(self, ids: Tensor, scores: Tensor) -> Tensor:
            seen = scores.gather(1, ids)
            return scores.scatter(1, ids, torch.where(seen < 0, seen * 1.5, seen / 1.5))

    counts = draw(
        target,
        ModelDrafter(small),
        temperature=0.8,
        top_k=3,
        logits_processor=[Normalise(), Penalise()],
    )
    assert p_value(exact_law(target, adjust), counts) > LEVEL


# Planted mistakes.


def residual_is_p(ids: Tensor, q: Tensor, p: Tensor, *, generator: torch.Generator) -> Verdict:
    accepted = verify_chain(ids, q, p, generator=generator).accepted
    return Verdict(accepted, pick(p[torch.arange(1), accepted], draw_uniforms(1, 1, generator)[:, 0]))


def bonus_is_one_row_early(ids: Tensor, q: Tensor, p: Tensor, *, generator: torch.Generator) -> Verdict:
    early = torch.cat([p[:, :-1], p[:, -2:-1]], dim=1) if ids.shape[1] else p
    return verify_chain(ids, q, early, generator=generator)


@pytest.mark.parametrize("wrong", [residual_is_p, bonus_is_one_row_early])
def test_a_wrong_verification_is_seen(
    wrong: Callable[..., Verdict], target: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "verify_chain", wrong)
    assert p_value(exact_law(target), draw(target, ModelDrafter(small), RUNS // 2)) < LEVEL


def argmax_with_a_soft_q(self: Any, q_V: Tensor) -> tuple[int, Tensor]:
    return int(q_V.argmax()), q_V


def q_of_another_temperature(self: Any, q_V: Tensor) -> tuple[int, Tensor]:
    return self.draw((q_V.log() / 0.3).softmax(-1)), q_V


def drops_an_unlikely_token_after_the_draw(self: Any, q_V: Tensor) -> tuple[int, Tensor] | None:
    token = self.draw(q_V)
    return (token, q_V) if q_V[token] > 0.35 else None


def reports_the_q_of_the_step_before(self: Any, q_V: Tensor) -> tuple[int, Tensor]:
    previous, self.previous = getattr(self, "previous", q_V), q_V
    return self.draw(q_V), previous


@pytest.mark.parametrize(
    "wrong",
    [
        argmax_with_a_soft_q,
        q_of_another_temperature,
        drops_an_unlikely_token_after_the_draw,
        reports_the_q_of_the_step_before,
    ],
)
def test_a_wrong_draft_is_seen(wrong: Callable[..., Any], target: Any, small: Any, drawing: Any) -> None:
    class WrongDrafter(drawing):
        tamper = wrong

    assert p_value(exact_law(target), draw(target, WrongDrafter(next_probs(small)), RUNS // 2)) < LEVEL


def test_stopping_before_a_draw_is_no_mistake(target: Any, small: Any, drawing: Any) -> None:
    """The draft ends where q is too flat: known before the token is drawn, so the law stays."""

    class StopsEarly(drawing):
        def tamper(self, q_V: Tensor) -> tuple[int, Tensor] | None:
            return super().tamper(q_V) if q_V.max() > 0.5 else None

    assert p_value(exact_law(target), draw(target, StopsEarly(next_probs(small)))) > LEVEL
