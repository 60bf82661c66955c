"""A head on disk: `config.json`, `model.safetensors` and `provenance.json`. Loading is strict and reads no pickle."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specheads.config import FORMAT_VERSION, parse
from specheads.errors import UserError
from specheads.files import write_json, write_whole
from specheads.head import DraftHead
from specheads.registry import get_head_type

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"


def save_head(head: DraftHead, directory: Path, provenance: dict[str, Any] | None = None) -> None:
    """Write a head's checkpoint; each file appears whole or not at all. `provenance` is by default what it came with.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        write_json(directory / PROVENANCE, head.provenance if provenance is None else provenance)
        write_json(directory / CONFIG, head.config.model_dump(mode="json"))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"head cannot be written to {str(directory)!r} ({reason}); choose another place") from error


def load_head(
    path_or_repo: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> DraftHead:
    """Load a head from a local folder or a hub name, in eval mode; bind it to its target before use.

    Without `dtype` the head keeps the one that it was saved in.

    Raises:
        UserError: no such head, an unknown head type, a config that does not fit, a tensor that is missing, unknown or
            of the wrong shape.
    """
    folder = find_checkpoint(path_or_repo)
    config = read_config(folder)
    head_type = get_head_type(str(config["type"]))
    with torch.device("meta"):  # no random numbers are spent on tensors that the file replaces
        head = head_type(parse(head_type.Config, config, str(folder / CONFIG)))
    head.load_state_dict(_read_tensors(folder / WEIGHTS, head), strict=True, assign=True)
    head.provenance = read_provenance(folder)
    return head.to(device=device, dtype=dtype).eval()


def find_checkpoint(path_or_repo: str | Path) -> Path:
    """The folder of a head's checkpoint, downloaded from the hub when it is not a local one."""
    folder = Path(path_or_repo)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise UserError(f"folder {str(folder)!r} holds no {CONFIG}; expected a head written by specheads train")
        return folder
    try:
        return Path(snapshot_download(str(path_or_repo), allow_patterns=[CONFIG, WEIGHTS, PROVENANCE]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"head {str(path_or_repo)!r} is neither a local folder nor a reachable head on the hub; check the name"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's configuration as it stands in the file, its format version checked."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / CONFIG} cannot be read ({error}); expected a head's configuration in JSON"
        ) from error
    if isinstance(config, dict) and "model_type" in config and "format_version" not in config:
        raise UserError(f"{str(folder)!r} holds a whole model, not a head; draft with it by --draft-model")
    if not isinstance(config, dict) or "type" not in config or "format_version" not in config:
        raise UserError(f"{folder / CONFIG} is not a head's configuration; expected a head written by specheads train")
    if config["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{folder / CONFIG} has format version {config['format_version']}, this install reads {FORMAT_VERSION}; "
            "use the version of specheads that wrote it, or retrain"
        )
    return config


def read_provenance(folder: Path) -> dict[str, Any]:
    """Where a head came from, as `specheads train` noted it; empty when nothing was noted."""
    path = folder / PROVENANCE
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); mend it or delete it") from error


def push_head(head: DraftHead, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a head's checkpoint; creates the repository when it is missing. Returns the commit's address."""
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save_head(head, Path(folder))
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload draft head"))


def _read_tensors(path: Path, head: DraftHead) -> dict[str, torch.Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected the head's tensors in safetensors") from error
    expected = head.state_dict()
    for what, names in (("missing", expected.keys() - tensors.keys()), ("unknown", tensors.keys() - expected.keys())):
        if names:
            raise UserError(
                f"{path}: tensor {min(names)} is {what} ({len(names)} in all); the checkpoint is not this head's"
            )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}; the "
                "checkpoint does not fit its config"
            )
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise UserError(f"{path}: tensor {name} has dtype {tensor.dtype}; the checkpoint is not this head's")
    return tensors
