"""Where a round's time goes, read without making the host wait for the device."""

import time
from typing import TypeAlias

import torch

from specheads.inference.stats import RoundTimes

Mark: TypeAlias = float | torch.cuda.Event


class RoundClock:
    """`mark` before drafting, between drafting and scoring, and after scoring; `read` once the host has the results.

    On CUDA work is queued and the host runs ahead, so marks are events in the stream, asked for their distance only
    after the read by the host that waited for them. Elsewhere a mark is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[Mark] = []
        self._last_read = time.perf_counter()

    def mark(self) -> None:
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._marks.append(event)

    def read(self) -> RoundTimes:
        """The round's times; those of draft and target are 0 for a prefill, which sets no marks."""
        before, self._last_read = self._last_read, time.perf_counter()
        draft, target = [_seconds(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)] or [0.0, 0.0]
        self._marks = []
        return RoundTimes(self._last_read - before, draft, target)


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start
