"""Defaults < YAML < dotted options; what is wrong is named in one line."""

from pathlib import Path

import accelerate.tracking
import pytest
from accelerate.utils import LoggerType

from specheads.errors import UserError
from specheads.train.config import load_train_config

SMALLEST = """
target: somewhere
head: {type: eagle3}
data: {train: answers.jsonl}
output_dir: run
steps: 10
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(SMALLEST)
    return path


def test_defaults_are_under_the_file_and_options_over_it(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    config_file.write_text(SMALLEST + "loss: {depth: 4}\nseed: 3\n")
    options = ["--loss.kind", "lk", "--seed=5", "--optimizer.learning_rate", "4e-3", "--trackers", "[tensorboard]"]
    config = load_train_config(config_file, options)
    assert (config.loss.depth, config.loss.depth_decay) == (4, 0.8)
    assert (config.loss.kind, config.seed, config.optimizer.learning_rate) == ("lk", 5, 0.004)
    assert config.trackers == ("tensorboard",)


def test_an_option_reaches_into_the_head(config_file: Path) -> None:
    assert load_train_config(config_file, ["--head.num_layers", "2"]).head == {"type": "eagle3", "num_layers": 2}


def test_a_bare_no_is_a_precision(config_file: Path) -> None:
    """YAML reads it as false."""
    assert load_train_config(config_file, ["--precision", "no"]).precision == "no"
    config_file.write_text(SMALLEST + "precision: no\n")
    assert load_train_config(config_file).precision == "no"
    assert load_train_config(config_file, ["--precision", "bf16"]).precision == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss.knd", "lk"], "unknown key 'loss.knd'; did you mean 'kind'"),
        (["--stpes", "9"], "unknown key 'stpes'; did you mean 'steps'"),
        (["--loss.kind", "huber"], "unknown loss 'huber'"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "many"], "steps is 'many'"),
        (["--optimizer.learning_rate", "-1"], "optimizer.learning_rate is -1"),
        (["--head", "{num_layers: 1}"], "expected a head with a type"),
        (["--precision", "yes"], "precision is True"),
        (["--seed"], "--seed has no value"),
        (["seed", "3"], "unexpected 'seed'"),
        (["--seed.deep", "3", "--seed", "1", "--steps.x", "1"], "steps is 10, which has no keys inside"),
        (["--loss", "[1"], "is not a YAML value"),
    ],
)
def test_a_wrong_option_is_named(config_file: Path, options: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_train_config(config_file, options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1", "is not YAML"), ("- a", "holds list"), ("steps: 3", "'target' is missing")]
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_train_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml.*cannot be read"):
        load_train_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_configurations_that_come_along_are_valid(path: Path) -> None:
    load_train_config(path)
