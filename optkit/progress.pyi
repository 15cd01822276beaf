# Made by tools/stubs.py from the modules: run that.

from .records import mfu
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import torch

__all__ = ['Progress', 'read_history', 'read_progress', 'BackgroundRun', 'card_line', 'live']
@dataclass(frozen=True)
class Progress:
    """Where a run stands; rates are those since the reading before"""
    state: str
    step: int
    total: int
    epoch: int
    epochs: int
    loss: float | None = ...
    metric: str | None = ...
    score: float | None = ...
    sequences_per_s: float | None = ...
    updates_per_s: float | None = ...
    micro_batches_per_s: float | None = ...
    tokens_per_s: float | None = ...
    mfu: float | None = ...
    memory_bytes: int | None = ...
    waiting: float | None = ...
    seconds: float = ...
    seconds_left: float | None = ...
    note: str = ...
    card: str | None = ...
class Meter:
    """Counts what steps did, and makes a `Progress` of it"""
    total: int
    epochs: int
    metric: str
    device: Any
    peak: float | None
    path: str | Path | None
    clock: Callable[[], float]
    card: Any
    begun: Any
    since: Any
    first: Any
    last: Any
    score: Any
    note: str
    rows: int
    micro: int
    tokens: int
    steps: int
    flops: float
    waited: float

    def __init__(self, total: int, epochs: int, metric: str, device: str | torch.device='cpu', peak: float | None=None, path: str | Path | None=None, clock: Callable[[], float]=...): ...

    def count(self, rows: int, micro: int, tokens: int, flops: float=0.0):
        """One more step"""

    def pause(self, seconds: float):
        """Leave this time out of the rates"""

    def wait(self, seconds: float):
        """Count this time as waiting for rows"""

    def read(self, step: int, epoch: int, loss: float | None=None, state: str='running') -> Progress:
        """The rates since the reading before; written to `path` if there is one"""
def write_progress(path: str | Path, progress: Progress):
    """Write a reading, whole or not at all, and add it to those before; a full disk must not end a training"""
def add_readings(readings: list[dict], lines: Iterable[str]) -> list[dict]:
    """Add readings; after a resume those of the last start count"""
def readings_folder(folder: Path) -> Path:
    """The folder with the readings of a run: its own or, for a run over folds, that of the fold that was begun last"""
def read_history(folder: str | Path) -> list[dict]:
    """All readings of a run; after a resume those of the last start count. Raises `InputError` without the folder."""
def read_progress(folder: str | Path) -> Progress | None:
    """The last reading of a run, from its file. Raises `InputError` for a folder that is not there."""
class BackgroundRun:
    """Work in a thread, that can be stopped, observed and waited for"""
    result: Any
    error: Any
    folder: str | Path | None
    thread: Any

    def __init__(self, work: Callable[[], object], stop: Callable[[], None], folder: str | Path | None=None): ...

    @property
    def running(self): ...

    def wait(self, timeout: float | None=None):
        """Its result; raises what it raised, and `TimeoutError` when it still runs"""

    def stop(self, timeout: float | None=None):
        """Ask it to end after its current step, and wait for that"""

    def progress(self) -> Progress | None: ...
def card_line(card: str='cuda') -> str:
    """Utilisation and memory of a card by NVIDIA's management library; CUDA is not touched"""
def live(folder: str | Path, every: float=1.0, card: str | None=None):
    """A view of a run that refreshes itself; reads the run's file and the management library only"""
