# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .config import TrainConfig
from .engine import Engine
from .metrics import score
from .progress import BackgroundRun, Meter
from .recovery import Epoch
from .steps import steps
from .store import TokenStore
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import numpy as np, torch

__all__ = ['log', 'ROUNDING_ONLY_FIELDS', 'ENGINE_FIELDS', 'FitResult', 'Trainer', 'with_rows', 'trial_config', 'fold_runner']
@dataclass(frozen=True)
class FitResult:
    """A finished run; the engine holds its best weights"""
    score: float
    best_epoch: int
    history: tuple[Epoch, ...]
    stopped_early: bool
    steps: int
    seconds: float
    config: TrainConfig
    decisions: tuple[dict, ...] = ...
    stopped: bool = ...
log: Any
class Trainer:
    """Trains an engine on rows of a store"""
    engine: Engine
    config: Any
    custom: Callable[[np.ndarray, np.ndarray], float] | None
    tokenizer: Any
    progress: bool
    peak: Any
    max_length: Any
    on_step: Callable[[int, int], None] | None
    on_epoch: Callable[[Epoch], None] | None
    on_end: Callable[[FitResult], None] | None
    folder: Any
    store: Any
    placed: Any
    loader: Any
    rates: dict
    total: Any
    stopping: Any
    pending: list
    planned: Any
    rank: Any
    ranks: Any
    train: Any
    per_epoch: Any
    position: Any
    flops: Any
    began: Any
    look_at: Any
    good: Any
    meter: Meter
    bar: Any
    made_of: Any

    def __init__(self, engine: Engine, store: TokenStore, config: TrainConfig, progress: bool=False, on_step: Callable[[int, int], None] | None=None, on_epoch: Callable[[Epoch], None] | None=None, on_end: Callable[[FitResult], None] | None=None, folder: str | Path | None=None, custom: Callable[[np.ndarray, np.ndarray], float] | None=None, peak: float | None=None, tokenizer: Any=None): ...

    def stop(self):
        """Ask a run to end after its current step; what it has is kept, and it can be resumed"""

    def plan(self, headroom: float=0.02, limit: int | None=None) -> TrainConfig:
        """Measure the sizes that the configuration leaves open, see `plan_sizes`; the next run keeps the decisions"""

    def decide(self, what: str, choice: Choice):
        """Log a decision and keep it"""

    def predict(self, rows: np.ndarray) -> torch.Tensor:
        """Outputs of rows, fewer at once where they do not fit"""

    def epochs(self, train: np.ndarray, valid: np.ndarray | None, resume: bool=False) -> Iterator[Epoch]:
        """Reset the engine, train, and give the result of each epoch; the best weights are kept, not put back.
Raises `InputError` for what does not fit together, before anything is written."""

    def fit(self, train: np.ndarray, valid: np.ndarray, on_epoch: Callable[[Epoch], None] | None=None, resume: bool=False) -> FitResult:
        """Train, and leave the engine with the weights of the best epoch.
Raises `FloatingPointError` when no epoch gave a number."""

    def start(self, train: np.ndarray, valid: np.ndarray, resume: bool=False) -> BackgroundRun:
        """`fit` in a thread, so that a notebook goes on: look with `progress()` or `progress.live`, end it with `stop()`"""

    def refit(self, rows: np.ndarray, resume: bool=False) -> list[float]:
        """Reset the engine and train all epochs, without evaluation and early stopping.
Raises `FloatingPointError` for a loss that is not a number."""
ROUNDING_ONLY_FIELDS: Any
def settings_that_count(config: TrainConfig) -> dict:
    """Those that a resumed run must have"""
ENGINE_FIELDS: set
def with_rows(config: TrainConfig, changes: dict) -> TrainConfig:
    """`dataclasses.replace`, which earlier versions did not use for sizes"""
def trial_config(config: TrainConfig, params: dict) -> TrainConfig:
    """The configuration with a trial's values. Raises `InputError` for those that it cannot have."""
def fold_runner(engine: Engine, store: TokenStore, folds: list[tuple[np.ndarray, np.ndarray]], config: TrainConfig, on_step: Callable[[int, int], None] | None=None, custom: Callable[[np.ndarray, np.ndarray], float] | None=None) -> Callable[[dict, int], Iterator[float]]:
    """`runner(params, fold)`: train the fold with these values over the configuration, one score an epoch.
A loss that breaks ends the fold: a search has to see what a learning rate does."""
