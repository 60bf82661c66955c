"""`run.json`: what a run was made of, and the check that a run is gone on with as it was begun."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specheads.errors import UserError
from specheads.target import TargetModel
from specheads.train.config import TrainConfig

PACKAGES = ("specheads", "torch", "transformers", "accelerate", "datasets", "safetensors")
# What may differ between a run and its continuation: it changes how often something is written, not what is trained.
MAY_CHANGE = {"log_every", "evaluate_every", "evaluation_rows", "checkpoint_every", "keep_checkpoints", "trackers"}


def gather_provenance(config: TrainConfig, target: TargetModel, data_digest: str) -> dict[str, Any]:
    """Versions, configuration, target, digest of the training data and git revision (None outside a checkout)."""
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "config": config.model_dump(mode="json"),
        "target": target.fingerprint,
        "data": data_digest,
        "git_revision": _git_revision(),
        "seed": config.seed,
    }


def check_same_run(path: Path, provenance: dict[str, Any]) -> None:
    """Refuse to go on with a run that was begun otherwise.

    Raises:
        UserError: names the first setting that differs.
    """
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in provenance["config"].items():
        if name not in MAY_CHANGE and before["config"].get(name) != value:
            raise UserError(
                f"{path.parent} holds a run with {name} {before['config'].get(name)!r}, now it is {value!r}; go on "
                "with the same settings or choose another output_dir"
            )
    if before["data"] != provenance["data"]:
        raise UserError(f"{path.parent} holds a run on other training data; choose another output_dir")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
