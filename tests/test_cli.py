"""The command line as users meet it: what the design fixes, and every mistake as one line with exit code 2."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from click.testing import CliRunner, Result
from transformers import PreTrainedModel

from specheads.checkpoint import load_head
from specheads.cli import main
from specheads.registry import get_head_type
from specheads.target import TargetModel

LINE_KEYS = {
    "id",
    "text",
    "token_ids",
    "new_tokens",
    "rounds",
    "drafted",
    "accepted",
    "seconds",
    "finish_reason",
}
RUN_KEYS = {
    "name",
    "drafter",
    "tokens",
    "seconds",
    "tokens_per_second",
    "decode_tokens_per_second",
    "speedup",
    "tau",
    "alpha",
    "acceptance_by_position",
    "draft_cost",
    "predicted_speedup",
    "extra_memory_bytes",
    "identical_to_plain",
    "categories",
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def check_refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().split("\n")
    message = lines[-1]
    assert message.startswith("specheads: error: ")
    assert not any("Traceback" in line for line in lines)
    for part in parts:
        assert part in message


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps one state a process and refuses another precision in it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def head_folders(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    target = TargetModel.load(str(tiny_target_folder))
    for name in ("eagle3", "medusa", "draft_model"):
        head_type = get_head_type(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = head_type(head_type.derive_config(target, {}))
        head.bind(target).initialise(target)
        head.to(torch.float64).save_pretrained(folder / name)
    return {name: folder / name for name in ("eagle3", "medusa", "draft_model")}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = {"a": "hi there", "b": "one two three", "c": "why is it late?"}
    lines = [{"id": key, "category": f"kind {key}", "turns": [text]} for key, text in texts.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# Good paths


def test_heads_are_listed() -> None:
    result = run("heads")
    assert result.exit_code == 0
    assert {"eagle3", "medusa", "draft_model"} <= {line.split()[0] for line in result.stdout.splitlines()}


def test_inspect_says_what_a_head_is(head_folders: dict[str, Path], tiny_target_folder: Path) -> None:
    result = run("inspect", head_folders["medusa"])
    assert result.exit_code == 0
    for part in ("medusa", str(tiny_target_folder), "vocabulary 61", "at most 4", "float64"):
        assert re.search(part, result.stdout.replace("drafts at most    4", "at most 4")), part


@pytest.mark.parametrize("kind", ["none", "lookup", "eagle3", "medusa", "draft_model", "cascade"])
def test_generate_prints_one_object_a_prompt(
    kind: str, head_folders: dict[str, Path], tiny_target_folder: Path, prompts_file: Path
) -> None:
    options: dict[str, list[str | Path]] = {"none": [], "lookup": ["--lookup"]}
    options |= {name: ["--head", head_folders[name]] for name in ("eagle3", "medusa")}
    options["draft_model"] = ["--draft-model", head_folders["draft_model"]]
    options["cascade"] = ["--cascade", *options["eagle3"]]
    common = ["generate", "--target", tiny_target_folder, "--prompts", prompts_file, "--json", "--max-new-tokens", "9"]
    plain = run(*common)
    drafted = run(*common, *options[kind], "--draft-length", "auto" if kind == "none" else "3")
    assert drafted.exit_code == 0, drafted.output
    lines = [json.loads(line) for line in drafted.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "c"]
    for line, other in zip(lines, map(json.loads, plain.stdout.splitlines()), strict=True):
        assert set(line) == LINE_KEYS
        assert line["token_ids"] == other["token_ids"]
        assert line["new_tokens"] == len(line["token_ids"])
    if kind in ("eagle3", "medusa", "draft_model", "cascade"):
        assert sum(line["drafted"] for line in lines) > 0


def test_generate_prints_the_text_of_one_prompt(tiny_target_folder: Path) -> None:
    result = run("generate", "--target", tiny_target_folder, "--prompt", "hi", "--temperature", "0.8", "--seed", "4")
    again = run("generate", "--target", tiny_target_folder, "--prompt", "hi", "--temperature", "0.8", "--seed", "4")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert result.stdout == again.stdout


def test_every_prompt_is_sampled_with_numbers_of_its_own(tiny_target_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "same.jsonl"
    prompts.write_text("".join(json.dumps({"id": name, "prompt": "hi"}) + "\n" for name in "abcd"))
    command = ["generate", "--target", tiny_target_folder, "--prompts", prompts, "--json", "--temperature", "1"]
    texts = [json.loads(line)["text"] for line in run(*command).stdout.splitlines()]
    assert len(set(texts)) == 4
    alone = run(*command, "--limit", "1")
    assert json.loads(alone.stdout)["text"] == texts[0]


def test_compare_writes_what_the_design_fixes(
    head_folders: dict[str, Path], tiny_target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    command = ["compare", "--target", tiny_target_folder, "--head", head_folders["eagle3"], "--lookup"]
    command += ["--draft-model", head_folders["draft_model"], "--cascade", "--prompts", prompts_file]
    command += ["--output", output, "--max-new-tokens", "8"]
    result = run(*command)
    assert result.exit_code == 0, result.output
    results = json.loads((output / "results.json").read_text())
    assert {"environment", "target", "settings", "runs"} <= set(results)
    assert [entry["drafter"] for entry in results["runs"]] == ["none", "lookup", "model", "head"] + 2 * ["cascade"]
    for entry in results["runs"]:
        assert set(entry) >= RUN_KEYS
        assert entry["identical_to_plain"] == 1
        assert set(entry["categories"]) == {"kind a", "kind b", "kind c"}
    plain, _, model, head, _, with_head = results["runs"]
    assert with_head["name"] == f"lookup+{head['name']}"
    assert plain["speedup"] == 1
    assert plain["extra_memory_bytes"] == 0
    assert model["extra_memory_bytes"] > head["extra_memory_bytes"] > 0
    page = (output / "report.html").read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(", page), "the report must need no other file"
    for entry in results["runs"]:
        assert entry["name"] in page

    assert run(*command).exit_code == 0
    assert json.loads((output / "results.json").read_text()) == results, "nothing was left to do"
    records = (output / "records.jsonl").read_text().splitlines(keepends=True)
    (output / "records.jsonl").write_text("".join(records[:6]) + records[6][:30])
    (output / "results.json").unlink()
    assert run(*command).exit_code == 0
    after = (output / "records.jsonl").read_text().splitlines(keepends=True)
    assert after[:6] == records[:6], "finished generations were done again"
    assert len(after) == len(records)
    check_refused(run(*command, "--temperature", "1"), "other settings")

    head = load_head(head_folders["eagle3"])
    with torch.no_grad():
        next(head.parameters()).add_(1)
    head.save_pretrained(tmp_path / "eagle3" / "head")
    command[4] = tmp_path / "eagle3" / "head"
    check_refused(run(*command), "other settings")  # the same name, another head
    prompts_file.write_text(prompts_file.read_text().replace("hi there", "ho there"))
    check_refused(run(*command), "other settings")


def test_the_thin_whole(tiny_target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    answers, out = tmp_path / "answers.jsonl", tmp_path / "run"
    common = ["--target", tiny_target_folder]
    assert run("regenerate", *common, "--prompts", prompts_file, "--output", answers).exit_code == 0
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "target": "given as an option",
                "head": {"type": "eagle3"},
                "data": {"train": str(answers), "row_length": 300, "validation_share": 0},
                "output_dir": str(out),
                "steps": 3,
                "rows_per_step": 1,
            }
        )
    )
    trained = run("train", "--config", config, *common, "--loss.kind", "lk")
    assert trained.exit_code == 0, trained.output
    assert "head written to" in trained.stdout
    options = ["--prompts", prompts_file, "--output", tmp_path / "out", "--max-new-tokens", "4"]
    compared = run("compare", *common, "--head", out / "head", *options)
    assert compared.exit_code == 0, compared.output


# Mistakes


def test_missing_files_are_named(tiny_target_folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    output = tmp_path / "out"
    check_refused(run("train", "--config", nowhere), str(nowhere))
    check_refused(run("inspect", nowhere), str(nowhere))
    base = ["generate", "--target", tiny_target_folder]
    check_refused(run(*base, "--prompts", nowhere), str(nowhere))
    check_refused(run(*base, "--prompt", "hi", "--head", nowhere), str(nowhere))
    check_refused(run(*base, "--prompt", "hi", "--draft-model", nowhere), str(nowhere))
    check_refused(run("generate", "--target", nowhere, "--prompt", "hi"), str(nowhere))
    check_refused(
        run("compare", "--target", tiny_target_folder, "--lookup", "--prompts", nowhere, "--output", output),
        str(nowhere),
    )
    check_refused(
        run("regenerate", "--target", tiny_target_folder, "--prompts", nowhere, "--output", output), str(nowhere)
    )


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["holds no prompt"]),
        ('{"prompt": "a"}\n{"prompt"\n', ["line 2", "not JSON"]),
        ('{"x": 1}\n', ["turns"]),
        ('{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": "1"}\n', ["line 3", "'1' is already that of line 1"]),
        ('{"prompt": "a"}\n{"prompt": "b", "id": 1}\n', ["line 2", "'1' is already that of line 1"]),
    ],
)
def test_bad_prompts_files_are_named(
    content: str, parts: list[str], tiny_target_folder: Path, prompts_file: Path
) -> None:
    prompts_file.write_text(content)
    check_refused(run("generate", "--target", tiny_target_folder, "--prompts", prompts_file), *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--loss.knid", "kl"], ["loss.knid", "'kind'"]),
        (["--head.type", "eagle"], ["'eagle'", "'eagle3'"]),
        (["--head.tap_layer", "[1]"], ["tap_layer", "'tap_layers'"]),
        (["--head.tap_layers", "[9]"], ["tap layer 9", "0 to 3"]),
        (["--head.draft_vocab_size", "100"], ["draft_vocab_size is 100", "61"]),
        (["--data.train", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--output_dir", "/dev/null/run"], ["/dev/null/run", "not writable"]),
    ],
)
def test_bad_training_settings_are_named(
    options: list[str], parts: list[str], tiny_target_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prompt": "hi", "response_ids": [9, 10, 11], "finished": true}\n')
    config = {
        "target": str(tiny_target_folder),
        "head": {"type": "eagle3"},
        "data": {"train": str(tmp_path / "answers.jsonl"), "validation_share": 0, "row_length": 64},
        "output_dir": str(tmp_path / "run"),
        "steps": 1,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    check_refused(run("train", "--config", tmp_path / "config.yaml", *options), *parts)


def test_a_head_for_another_target_is_refused(
    head_folders: dict[str, Path], make_llama: Callable[..., PreTrainedModel], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    make_llama(vocab_size=67).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    result = run("generate", "--target", tmp_path / "other", "--head", head_folders["eagle3"], "--prompt", "hi")
    check_refused(result, "head was trained for a target with", "retrain")


def test_a_target_without_chat_template_wants_raw(
    make_llama: Callable[..., PreTrainedModel], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tiny_tokenizer.chat_template = None
    make_llama().save_pretrained(tmp_path / "plain")
    tiny_tokenizer.save_pretrained(tmp_path / "plain")
    check_refused(run("generate", "--target", tmp_path / "plain", "--prompt", "hi"), "no chat template", "--raw")
    assert run("generate", "--target", tmp_path / "plain", "--prompt", "hi", "--raw").exit_code == 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--temperature", "-1"], ["temperature is -1.0", "0 (greedy)"]),
        (["--temperature", "warm"], ["warm", "valid float"]),
        (["--top-p", "0"], ["top-p is 0.0"]),
        (["--top-k", "-2"], ["top-k is -2"]),
        (["--min-p", "1.5"], ["min-p is 1.5"]),
        (["--repetition-penalty", "0"], ["repetition-penalty is 0.0"]),
        (["--max-new-tokens", "0"], ["max-new-tokens is 0"]),
        (["--draft-length", "-1"], ["draft-length is '-1'"]),
        (["--draft-length", "long"], ["draft-length is 'long'"]),
        (["--verification", "hope"], ["'hope'", "rejection"]),
        (["--dtype", "int3"], ["'int3'", "bfloat16"]),
        (["--device", "cuda:7"], ["cuda:7", "does not have"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--draft-model", "nowhere"], ["draft model 'nowhere' cannot be loaded"]),
        (["--lookup", "--draft-model", "x"], ["more than one drafter"]),
        (["--lookup", "--cascade"], ["--cascade has nothing", "--head or --draft-model"]),
        (["--prompts", "x"], ["either --prompt"]),
        (["--limit", "1"], ["--limit is for a file of prompts"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_bad_options_are_named(options: list[str], parts: list[str], tiny_target_folder: Path) -> None:
    check_refused(run("generate", "--target", tiny_target_folder, "--prompt", "hi", *options), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--loud"], ["--loud"]),
        (["generat"], ["'generat'", "'generate'"]),
        (["generate", "--prompt", "hi"], ["--target", "generate --help"]),
        (["heads", "more"], ["more"]),
        (["inspect"], ["HEAD"]),
    ],
)
def test_commands_that_are_none_are_one_line(arguments: list[str], parts: list[str]) -> None:
    result = run(*arguments)
    check_refused(result, *parts)
    assert result.stderr.count("\n") == 1


def test_a_mistake_is_one_line_for_the_shell_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specheads.train", "--config", str(tmp_path / "nowhere.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"specheads: error: config '.*nowhere.yaml' cannot be read .*\n", done.stderr)


def test_a_draft_longer_than_the_head_can_draft_is_refused(
    head_folders: dict[str, Path], tiny_target_folder: Path
) -> None:
    base = ["generate", "--target", tiny_target_folder, "--prompt", "hi", "--head", head_folders["medusa"]]
    check_refused(run(*base, "--draft-length", "5"), "draft_length is 5", "at most 4")


def test_compare_wants_a_drafter(tiny_target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    base = ["compare", "--target", tiny_target_folder, "--prompts", prompts_file]
    check_refused(run(*base, "--output", tmp_path / "out"), "no drafter")
    check_refused(run(*base, "--lookup", "--output", "/dev/null/out"), "/dev/null/out", "cannot be written")


def test_outputs_that_cannot_be_written_are_named(tiny_target_folder: Path, prompts_file: Path) -> None:
    base = ["regenerate", "--target", tiny_target_folder, "--prompts", prompts_file]
    check_refused(run(*base, "--output", "/dev/null/answers.jsonl"), "/dev/null/answers.jsonl")
