"""Resume state of a training run: folders that appear whole or not at all, named by the step they stand for."""

import os
import shutil
from pathlib import Path

from accelerate import Accelerator


class Checkpoints:
    """`folder/step-00000100/` holds what Accelerate saves after step 100: head, optimiser, schedule, random states."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-" + "[0-9]" * 8))

    def save(self, accelerator: Accelerator, step: int) -> None:
        """Save after `step`, then delete all but the newest `keep`."""
        if step in self.steps():
            return
        partial = self.folder / "partial"
        if accelerator.is_main_process and partial.exists():
            shutil.rmtree(partial)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.replace(partial, self._path(step))
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self._path(old))

    def load_latest(self, accelerator: Accelerator) -> int:
        """Load the newest checkpoint; returns its step, 0 when there is none."""
        steps = self.steps()
        if not steps:
            return 0
        accelerator.load_state(str(self._path(steps[-1])))
        return steps[-1]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"
