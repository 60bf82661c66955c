"""A head on disk: strict loading, one line for each kind of damage, nothing written half, nothing but safetensors."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads import checkpoint, load_head
from specheads.checkpoint import find_checkpoint, read_provenance, save_head
from specheads.errors import UserError
from specheads.head import DraftHead
from specheads.registry import get_head_type
from specheads.target import TargetModel


@pytest.fixture
def head(make_llama: Callable[..., Any]) -> DraftHead:
    target, head_type = TargetModel(make_llama()), get_head_type("eagle3")
    head = head_type(head_type.derive_config(target, {"draft_vocab_size": 5}))
    head.set_draft_vocabulary(torch.tensor([2, 3, 5, 7, 11]))
    return head


@pytest.fixture
def folder(head: DraftHead, tmp_path: Path) -> Path:
    head.save_pretrained(tmp_path / "head", {"data": "abc"})
    return tmp_path / "head"


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_head(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value) or "head type" in str(error.value)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8")) | changes
    kept = {key: value for key, value in config.items() if value != "DROP"}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_three_files_and_no_others(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "provenance.json"}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["type"] == "eagle3"
    assert config["format_version"] == 1
    assert config["target"]["vocab_size"] == 61
    assert read_provenance(folder) == {"data": "abc"}


def test_a_string_and_a_path_are_alike(folder: Path) -> None:
    assert torch.equal(load_head(str(folder)).fc.weight, load_head(folder).fc.weight)


# Tensors


def test_missing_tensors_are_named(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["norm.weight"], tensors["fc.weight"]

    change_tensors(folder, drop)
    refuse(folder, r"tensor fc.weight is missing \(2 in all\)")


def test_unknown_tensors_are_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(2)}))
    refuse(folder, r"tensor embed_tokens.weight is unknown \(1 in all\)")


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(16)}))
    refuse(folder, r"tensor norm.weight has shape \(16,\), expected \(32,\)")


def test_a_shape_that_would_broadcast_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.zeros(1)}))
    refuse(folder, r"tensor norm.weight has shape \(1,\)")


def test_fractions_as_ids_are_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"draft_vocab_ids": torch.zeros(5)}))
    refuse(folder, "tensor draft_vocab_ids has dtype torch.float32")


@pytest.mark.parametrize("content", [b"", b"no tensors at all", b"\xff" * 64])
def test_a_file_that_holds_no_tensors_is_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refuse(folder, "model.safetensors cannot be read .*safetensors")


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    refuse(folder, "model.safetensors cannot be read")


def test_pickle_is_never_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refuse(folder, "model.safetensors cannot be read")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    refuse(folder, "model.safetensors cannot be read")
    assert not (tmp_path / "sprung").exists()


# Configuration


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"type": "eagle3"}', '{"format_version": 1}'])
def test_a_config_that_is_none_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content, "utf-8")
    refuse(folder, "config.json (cannot be read|is not a head's configuration)")


def test_a_config_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    refuse(folder, "config.json cannot be read")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "has format version 2, this install reads 1"),
        ({"type": "eagle"}, "head type 'eagle' is unknown; did you mean 'eagle3'.* known: .*medusa"),
        ({"type": 3}, "head type '3' is unknown"),
        ({"norm_tap": True}, "unknown key 'norm_tap'; did you mean 'norm_taps'"),
        ({"num_layers": 0}, "num_layers is 0: .*greater than or equal to 1"),
        ({"num_layers": "many"}, "num_layers is 'many'"),
        ({"hidden_size": "DROP"}, "'hidden_size' is missing"),
        ({"target": {"architecture": "X"}}, "'target.hidden_size' is missing"),
        ({"hidden_size": 16}, "hidden_size is 16"),
        ({"num_layers": 2}, "tensor layers.1.* is missing"),
        ({"draft_vocab_size": 6}, r"draft_vocab_ids has shape \(5,\), expected \(6,\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message) as error:
        load_head(folder)
    assert "\n" not in str(error.value)


# Finding one


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config.json; expected a head written by specheads train"):
        load_head(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/no-such-head", "not a name", ""])
def test_a_head_that_is_nowhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise OSError("no network")

    if name == "nobody/no-such-head":
        monkeypatch.setattr(checkpoint, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"neither a local folder nor|holds no config.json"):
        load_head(name)


def test_a_file_is_no_head(folder: Path) -> None:
    with pytest.raises(UserError, match="neither a local folder nor"):
        load_head(folder / "model.safetensors")


def test_only_the_three_files_are_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        return str(folder)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    assert find_checkpoint("someone/head") == folder
    assert asked == {"repo": "someone/head", "allow_patterns": ["config.json", "model.safetensors", "provenance.json"]}


def test_push(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Api:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
            calls.append((repo_id, private, exist_ok))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
            loaded = load_head(folder_path)
            assert torch.equal(loaded.fc.weight, head.fc.weight)
            calls.append(repo_id)
            return "address"

    monkeypatch.setattr(checkpoint, "HfApi", Api)
    assert head.push_to_hub("me/head", private=True, token="t") == "address"
    assert calls == ["t", ("me/head", True, True), "me/head"]


# Writing one


def test_a_place_that_cannot_be_written_is_refused(head: DraftHead, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "head"):
        with pytest.raises(UserError, match=r"head cannot be written to .*choose another place"):
            save_head(head, place)


@pytest.mark.parametrize("stage", ["weights", "config"])
def test_a_write_that_fails_leaves_the_old_checkpoint_whole(
    stage: str, head: DraftHead, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail_half(tensors: Any, path: Path, **kwargs: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    def fail_config(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device")

    if stage == "weights":
        monkeypatch.setattr(checkpoint, "save_file", fail_half)
    else:
        monkeypatch.setattr(checkpoint, "write_json", fail_config)
    with pytest.raises(UserError, match="No space left on device"):
        save_head(head, folder, {"data": "new"})
    after = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".partial")}
    assert after == before
    load_head(folder)


def test_a_first_write_that_fails_leaves_no_checkpoint(
    head: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Any, path: Path, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(UserError):
        save_head(head, tmp_path / "new")
    with pytest.raises(UserError, match=r"holds no config.json"):
        load_head(tmp_path / "new")


def test_a_head_keeps_where_it_came_from(head: DraftHead, tmp_path: Path) -> None:
    head.save_pretrained(tmp_path / "one", {"data": "x"})
    load_head(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert read_provenance(tmp_path / "two") == {"data": "x"}


def test_a_whole_model_is_told_from_a_head(tiny_target_folder: Path) -> None:
    refuse(tiny_target_folder, "holds a whole model, not a head; draft with it by --draft-model")


def test_provenance(folder: Path) -> None:
    (folder / "provenance.json").unlink()
    assert read_provenance(folder) == {}
    load_head(folder)
    (folder / "provenance.json").write_text("{", "utf-8")
    with pytest.raises(UserError, match=r"provenance.json cannot be read"):
        read_provenance(folder)
