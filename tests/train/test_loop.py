"""A run from configuration to head; killed, stopped and gone on with, it ends as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from specheads import TargetModel, UserError, load_head
from specheads.train import loop
from specheads.train.checkpoints import Checkpoints
from specheads.train.config import load_train_config
from specheads.train.loop import train
from specheads.train.metrics import MetricsFile

WORDS = ["the fox ran", "two and two is four", "a red bird sings", "we like tea", "no rain today", "it is late now"]


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps one state a process and refuses another precision in it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def config_file(tiny_target_folder: Path, tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    lines = []
    for number in range(60):
        answer = [int(token) for token in generator.integers(6, 61, 20)]
        record = {"id": f"a{number}", "turns": [WORDS[number % 6]], "response_ids": answer, "finished": False}
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    config = {
        "target": str(tiny_target_folder),
        "target_dtype": "float32",
        "head": {"type": "eagle3", "draft_vocab_size": 40},
        "data": {"train": str(tmp_path / "answers.jsonl"), "validation_share": 0.2, "row_length": 64},
        "output_dir": str(tmp_path / "run"),
        "loss": {"depth": 2, "feature_weight": 0.5},
        "steps": 12,
        "rows_per_step": 2,
        "log_every": 1,
        "evaluate_every": 6,
        "checkpoint_every": 3,
        "precision": "no",
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines


def test_a_run_writes_what_it_says(config_file: Path, tmp_path: Path) -> None:
    result = train(load_train_config(config_file))
    assert result is not None
    assert result.evaluation is not None
    run = tmp_path / "run"
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert len(losses) == 12
    evaluations = [line for line in metrics(run) if "alpha" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert len(evaluations[-1]["alpha"]) == 2
    assert evaluations[-1]["expected_tokens"] == pytest.approx(result.evaluation.expected_tokens)
    raw = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert set(raw) == {"step", "loss", "learning_rate", "tokens_per_second"}
    provenance = json.loads((run / "run.json").read_text())
    assert {"versions", "config", "data", "git_revision", "seed"} <= set(provenance)
    head = load_head(run / "head")
    assert head.dtype == torch.float32
    assert head.draft_vocab_ids is not None
    assert len(head.draft_vocab_ids.unique()) == 40
    assert Checkpoints(run / "checkpoints", 2).steps() == [9, 12]


def test_training_lowers_the_loss(config_file: Path, tmp_path: Path) -> None:
    train(load_train_config(config_file, ["--steps", "60", "--optimizer.learning_rate", "0.01"]))
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "no"), ("muon", "no"), ("adamw", "bf16")])
def test_a_stopped_run_goes_on_exactly(config_file: Path, tmp_path: Path, optimizer: str, precision: str) -> None:
    options = ["--optimizer.name", optimizer, "--precision", precision]
    train(load_train_config(config_file, [*options, "--output_dir", str(tmp_path / "whole")]))
    train(load_train_config(config_file, options))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    (tmp_path / "run" / "checkpoints" / "step-00000012").rename(tmp_path / "gone")
    assert checkpoints.steps() == [9]
    train(load_train_config(config_file, options))
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_signal_between_two_steps_saves_and_stops(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_train_config(config_file, ["--output_dir", str(tmp_path / "whole")]))
    write = MetricsFile.write

    def write_and_stop(self: MetricsFile, step: int, values: dict[str, Any]) -> None:
        write(self, step, values)
        if step == 7:
            signal.raise_signal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "write", write_and_stop)
        assert train(load_train_config(config_file)) is None
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "stopped after step 7" in capsys.readouterr().out
    run = tmp_path / "run"
    assert Checkpoints(run / "checkpoints", 2).steps() == [6, 7]
    assert not (run / "head").exists()
    assert train(load_train_config(config_file)) is not None
    assert metrics(run) == metrics(tmp_path / "whole")


def test_a_finished_run_writes_its_head_again(config_file: Path, tmp_path: Path) -> None:
    """As after a kill between the last checkpoint and the head."""
    first = train(load_train_config(config_file))
    head, lines = tmp_path / "run" / "head", metrics(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    shutil.rmtree(head)
    again = train(load_train_config(config_file, ["--log_every", "5"]))  # how often is written may change
    assert first is not None
    assert again is not None
    assert again.evaluation == first.evaluation
    assert (head / "model.safetensors").read_bytes() == before["model.safetensors"]
    provenance = json.loads((head / "provenance.json").read_text())
    assert provenance["expected_tokens"] == pytest.approx(lines[-1]["expected_tokens"])
    assert provenance["config"]["log_every"] == 5
    assert metrics(tmp_path / "run") == lines


def test_accumulation_reads_the_same_rows_and_gives_the_same_loss(config_file: Path, tmp_path: Path) -> None:
    train(load_train_config(config_file, ["--output_dir", str(tmp_path / "whole")]))
    train(load_train_config(config_file, ["--rows_per_step", "1", "--accumulation", "2"]))
    for one, other in zip(metrics(tmp_path / "run"), metrics(tmp_path / "whole"), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4), key


def test_cached_features_train_alike(config_file: Path, tmp_path: Path) -> None:
    train(load_train_config(config_file, ["--output_dir", str(tmp_path / "live")]))
    train(load_train_config(config_file, ["--features.cache", str(tmp_path / "cache")]))
    assert list((tmp_path / "cache").glob("*.safetensors"))
    for one, other in zip(metrics(tmp_path / "run"), metrics(tmp_path / "live"), strict=True):
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-3), key


def test_the_target_stays_as_it_was(config_file: Path, tiny_target_folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in tiny_target_folder.iterdir()}
    train(load_train_config(config_file, ["--head.projection", "own"]))
    assert {path.name: path.read_bytes() for path in tiny_target_folder.iterdir()} == before


def run_in_background(config_file: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specheads.train", "--config", str(config_file), *options]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint within two minutes"
        time.sleep(0.01)


def test_a_killed_run_ends_with_the_same_loss_to_the_last_digit(config_file: Path, tmp_path: Path) -> None:
    options = ("--steps", "150", "--checkpoint_every", "20", "--evaluate_every", "50")
    whole = load_train_config(config_file, [*options, "--output_dir", str(tmp_path / "whole")])
    train(whole)
    process = run_in_background(config_file, *options)
    wait_for_checkpoint(tmp_path / "run", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "head").exists(), "killed too late: the test shows nothing"
    again = run_in_background(config_file, *options)
    text, _ = again.communicate()
    assert again.returncode == 0, text
    assert "going on from step" in text
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_ctrl_c_saves_and_the_same_command_goes_on(config_file: Path, tmp_path: Path) -> None:
    options = ("--steps", "3000", "--log_every", "100", "--evaluate_every", "3000")
    process = run_in_background(config_file, *options)
    wait_for_checkpoint(tmp_path / "run", process)
    os.kill(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the same command goes on" in text
    assert "Traceback" not in text
    stopped_at = Checkpoints(tmp_path / "run" / "checkpoints", 2).steps()[-1]
    assert f"stopped after step {stopped_at}" in text


def test_going_on_otherwise_is_refused(config_file: Path) -> None:
    train(load_train_config(config_file, ["--steps", "3"]))
    with pytest.raises(UserError, match="holds a run with loss"):
        train(load_train_config(config_file, ["--steps", "3", "--loss.kind", "lk"]))


def test_a_half_written_checkpoint_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "step-00000007").mkdir()
    assert Checkpoints(tmp_path, 2).steps() == [7]


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    MetricsFile(path, up_to=2).write(3, {"loss": 1.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": 1.0},
    ]


def test_a_draft_model_is_a_plain_transformers_folder(config_file: Path, tiny_target_folder: Path) -> None:
    result = train(
        load_train_config(config_file, ["--head", "{type: draft_model, num_layers: 1}", "--loss.depth", "1"])
    )
    assert result is not None
    model = TargetModel.load(str(result.head_folder))
    assert model.num_layers == 1
    assert model.tokenizer is not None
    assert model.vocab_size == TargetModel.load(str(tiny_target_folder)).vocab_size


@pytest.mark.parametrize("depth", [1, 3])
def test_medusa_is_trained_at_all_its_depths_and_no_others(config_file: Path, depth: int) -> None:
    with pytest.raises(UserError, match=rf"loss\.depth is {depth}, head medusa drafts at most 2"):
        train(load_train_config(config_file, ["--head", "{type: medusa, num_heads: 2}", "--loss.depth", str(depth)]))


def test_without_a_depth_every_head_of_medusa_learns(config_file: Path, tmp_path: Path) -> None:
    result = train(load_train_config(config_file, ["--head", "{type: medusa, num_heads: 4}", "--loss", "{kind: kl}"]))
    assert result is not None
    assert result.evaluation is not None
    assert len(result.evaluation.alpha) == 4
    weights = load_head(tmp_path / "run" / "head").state_dict()
    blocks = [tensor for name, tensor in weights.items() if name.endswith("linear.weight")]
    assert len(blocks) == 4
    assert all(block.any() for block in blocks), "a head is still what it began as"


def test_an_evaluation_reads_any_rows_not_the_longest(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    original = loop.evaluate

    def spy(step: Any, features: Any, rows: Any) -> Any:
        read.append(list(rows))
        return original(step, features, rows)

    monkeypatch.setattr(loop, "evaluate", spy)
    train(load_train_config(config_file, ["--evaluation_rows", "2", "--data.validation_share", "0.4"]))
    assert read[0] == read[1]
    assert len(set(read[0])) == 2
    assert sorted(read[0]) != [0, 1]


@pytest.mark.parametrize(
    ("tracker", "message"), [("tensorbord", "did you mean 'tensorboard'"), ("aim", "not installed")]
)
def test_a_tracker_that_cannot_be_used_is_named(config_file: Path, tracker: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_train_config(config_file, ["--trackers", f"[{tracker}]"])


def test_several_processes_are_refused(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(UserError, match="2 processes were launched"):
        train(load_train_config(config_file))
