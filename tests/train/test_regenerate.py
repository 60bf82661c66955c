"""Answers in batches are the answers that each prompt would get alone, and an interrupted file is gone on with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specheads.errors import UserError
from specheads.prompts import read_prompts, render_prompt
from specheads.target import TargetModel
from specheads.train.answer import AnswerSettings, Question, _pick, answer_batch
from specheads.train.data import load_examples
from specheads.train.features import CachedFeatures, LiveFeatures, fill_store
from specheads.train.packing import pack
from specheads.train.regenerate import regenerate
from specheads.train.store import FeatureStore

TEXTS = ["hi", "what is one and one?", "tell me a long story of a fox", "b", "name 3 fish", "why?"]


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> TargetModel:
    return TargetModel.load(str(tiny_target_folder), dtype=torch.float64)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "turns": [text]}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def answers(path: Path) -> dict[str, dict[str, object]]:
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_greedy_answers_are_those_of_generate(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    settings = AnswerSettings(max_new_tokens=12, temperature=0)
    assert regenerate(target, prompts_file, tmp_path / "a.jsonl", settings, batch_size=4) == len(TEXTS)
    found = answers(tmp_path / "a.jsonl")
    for prompt in read_prompts(prompts_file):
        ids = torch.tensor([render_prompt(target.tokenizer, prompt)])
        whole = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert found[prompt.id]["response_ids"] == whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_sampled_answers_do_not_depend_on_the_batch(
    target: TargetModel, prompts_file: Path, tmp_path: Path, truncation: dict[str, float]
) -> None:
    settings = AnswerSettings(max_new_tokens=60, temperature=0.9, seed=3, **truncation)  # type: ignore[arg-type]
    regenerate(target, prompts_file, tmp_path / "one.jsonl", settings, batch_size=1)
    regenerate(target, prompts_file, tmp_path / "all.jsonl", settings, batch_size=6)
    one, together = answers(tmp_path / "one.jsonl"), answers(tmp_path / "all.jsonl")
    assert one == together
    lengths = {len(record["response_ids"]) for record in one.values()}  # type: ignore[arg-type]
    assert len(lengths) > 1, "no row left its batch early: the test shows nothing"


def test_a_file_that_was_cut_short_is_gone_on_with(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    settings, output = AnswerSettings(max_new_tokens=8), tmp_path / "a.jsonl"
    regenerate(target, prompts_file, output, settings, batch_size=2)
    whole = answers(output)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:3]) + lines[3][:25])
    assert regenerate(target, prompts_file, output, settings, batch_size=2) == len(TEXTS) - 3
    assert answers(output) == whole
    assert regenerate(target, prompts_file, output, settings, batch_size=2) == 0


def test_several_answers_to_a_prompt_differ_and_share_its_id(
    target: TargetModel, prompts_file: Path, tmp_path: Path
) -> None:
    settings, output = AnswerSettings(max_new_tokens=8), tmp_path / "a.jsonl"
    assert regenerate(target, prompts_file, output, settings) == len(TEXTS)
    first = answers(output)
    assert regenerate(target, prompts_file, output, settings, samples=3) == 2 * len(TEXTS), "the first stay as they are"
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert {(record["id"], record["sample"]) for record in records} == {(key, n) for key in first for n in range(3)}
    by_prompt = [{tuple(r["response_ids"]) for r in records if r["id"] == key} for key in first]
    assert max(map(len, by_prompt)) == 3
    with pytest.raises(UserError, match="samples is 2"):
        regenerate(target, prompts_file, tmp_path / "b.jsonl", AnswerSettings(temperature=0), samples=2)


def test_answers_can_be_trained_on(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    regenerate(target, prompts_file, tmp_path / "a.jsonl", AnswerSettings(max_new_tokens=8), batch_size=6)
    examples = load_examples(tmp_path / "a.jsonl", target.tokenizer, max_length=128).examples
    found = answers(tmp_path / "a.jsonl")
    for example in examples:
        assert example.ids[example.loss_mask].tolist() == found[example.id]["response_ids"]


def test_other_settings_are_refused(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    regenerate(target, prompts_file, output, AnswerSettings(max_new_tokens=4), batch_size=6)
    with pytest.raises(UserError, match="other settings"):
        regenerate(target, prompts_file, output, AnswerSettings(max_new_tokens=5), batch_size=6)


def test_other_prompts_under_the_same_ids_are_refused(target: TargetModel, tmp_path: Path) -> None:
    settings, prompts_file, output = AnswerSettings(max_new_tokens=4), tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts_file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')  # numbered by line
    regenerate(target, prompts_file, output, settings)
    before = output.read_text()
    prompts_file.write_text('{"prompt": "new"}\n{"prompt": "one"}\n{"prompt": "two"}\n')
    with pytest.raises(UserError, match=r"line \d answers another prompt with id '[12]'"):
        regenerate(target, prompts_file, output, settings)
    assert output.read_text() == before


def test_another_dtype_or_name_is_another_target(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    settings, output = AnswerSettings(max_new_tokens=4), tmp_path / "a.jsonl"
    regenerate(target, prompts_file, output, settings)
    for key in ("dtype", "target_name"):
        manifest = json.loads((tmp_path / "a.jsonl.manifest.json").read_text())
        (tmp_path / "a.jsonl.manifest.json").write_text(json.dumps(manifest | {key: "another"}))
        with pytest.raises(UserError, match="another target"):
            regenerate(target, prompts_file, output, settings)
    (tmp_path / "a.jsonl.manifest.json").write_text("")
    with pytest.raises(UserError, match=r"manifest.json is not JSON"):
        regenerate(target, prompts_file, output, settings)


def test_raw_answers_are_trained_on_as_raw(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    for raw in (True, False):
        output = tmp_path / f"{raw}.jsonl"
        regenerate(target, prompts_file, output, AnswerSettings(max_new_tokens=4, raw=raw))
        load_examples(output, target.tokenizer, max_length=64, raw=raw)
        how = "plain text" if raw else "a chat"
        with pytest.raises(UserError, match=f"answered this prompt as {how}; set data.raw to {str(raw).lower()}"):
            load_examples(output, target.tokenizer, max_length=64, raw=not raw)


def test_more_tokens_than_positions_are_refused(
    make_gpt2: Callable[..., Any], tiny_tokenizer: Any, prompts_file: Path, tmp_path: Path
) -> None:
    target = TargetModel(make_gpt2(n_positions=40), tiny_tokenizer)
    with pytest.raises(UserError, match=r"take 5\d positions, the target has 40; lower --max-prompt-tokens"):
        regenerate(target, prompts_file, tmp_path / "a.jsonl", AnswerSettings(max_new_tokens=25))
    settings = AnswerSettings(max_new_tokens=25, max_prompt_tokens=15)
    assert 0 < regenerate(target, prompts_file, tmp_path / "a.jsonl", settings) < len(TEXTS)


def test_a_file_that_is_not_ours_is_left_alone(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "notes.txt"
    output.write_text("keep me")
    with pytest.raises(UserError, match="has no manifest"):
        regenerate(target, prompts_file, output, AnswerSettings(), batch_size=6)
    assert output.read_text() == "keep me"


def test_long_prompts_are_left_out(target: TargetModel, prompts_file: Path, tmp_path: Path) -> None:
    longest = max(len(render_prompt(target.tokenizer, prompt)) for prompt in read_prompts(prompts_file))
    settings = AnswerSettings(max_new_tokens=2, max_prompt_tokens=longest - 1)
    assert regenerate(target, prompts_file, tmp_path / "a.jsonl", settings) == len(TEXTS) - 1


def test_answers_that_never_end_are_marked(target: TargetModel, prompts_file: Path) -> None:
    batch = [Question(prompt, render_prompt(target.tokenizer, prompt)) for prompt in read_prompts(prompts_file)]
    for answer in answer_batch(target, batch, AnswerSettings(max_new_tokens=16)):
        assert answer.finished == (answer.response_ids[-1] == 1)
        assert 1 not in answer.response_ids[:-1]
        assert answer.features is None


def test_states_kept_while_answering_are_those_of_a_pass_of_its_own(
    target: TargetModel, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = (0, 2, 3)
    settings = AnswerSettings(max_new_tokens=16, temperature=0.9)
    regenerate(
        target,
        prompts_file,
        tmp_path / "a.jsonl",
        settings,
        batch_size=4,
        store=FeatureStore(tmp_path / "features", target, taps),
    )
    examples = load_examples(tmp_path / "a.jsonl", target.tokenizer, max_length=128).examples
    rows = pack(examples, 128, seed=0)
    every = range(len(rows))
    live = LiveFeatures(target, rows, taps).batch(every)
    expected_BL = target.logits(live.inputs.last_hidden_BLD)

    monkeypatch.setattr(target, "states", None)  # nothing is computed anew
    store = FeatureStore(tmp_path / "features", target, taps)
    fill_store(target, examples, store, row_length=128, rows_per_shard=8)
    got = CachedFeatures(target, examples, rows, taps, store).batch(every)
    assert got.logsumexp_BL is not None
    assert got.argmax_BL is not None
    predicts_BL = torch.zeros_like(got.inputs.loss_mask_BL)
    predicts_BL[:, :-1] = got.inputs.loss_mask_BL[:, 1:]
    document_BL = got.inputs.document_BL
    ends_BL = torch.cat([document_BL[:, 1:] != document_BL[:, :-1], torch.ones(len(rows), 1, dtype=torch.bool)], dim=1)
    read_BL = (document_BL >= 0) & ~ends_BL  # no pass has read a document's last token, and nothing needs its state
    close = {"atol": 1e-10, "rtol": 0}
    torch.testing.assert_close(got.inputs.taps_BLTD[read_BL], live.inputs.taps_BLTD[read_BL], **close)
    torch.testing.assert_close(got.inputs.last_hidden_BLD[read_BL], live.inputs.last_hidden_BLD[read_BL], **close)
    logsumexps = expected_BL.logsumexp(-1)[predicts_BL].float()
    torch.testing.assert_close(got.logsumexp_BL[predicts_BL], logsumexps, atol=1e-5, rtol=0)
    assert torch.equal(got.argmax_BL[predicts_BL], expected_BL.argmax(-1)[predicts_BL])


def test_pick_draws_each_token_on_its_share_of_the_line() -> None:
    logits_BV = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).log().expand(400, 4)
    grid_B = torch.from_numpy((np.arange(400) + 0.5) / 400)
    picked_B = _pick(logits_BV, [], grid_B)  # type: ignore[arg-type]
    assert torch.bincount(picked_B, minlength=4).tolist() == [200, 100, 0, 100]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
        {"max_new_tokens": 0},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    name = next(iter(wrong)).replace("_", "-")
    with pytest.raises(UserError, match=name):
        AnswerSettings(**wrong)  # type: ignore[arg-type]
