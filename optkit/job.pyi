# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .checkpoint import save_model
from .confirm import confirm
from collections.abc import Callable
from dataclasses import dataclass
from filelock import FileLock
from pathlib import Path
from typing import Any
import numpy as np, optuna, torch

__all__ = ['JobConfig', 'demo_config', 'size_job', 'Job', 'bootstrap_score']
JOB_DECIDES: dict
DEMO_SPACE: tuple
SPACE: tuple
@dataclass(frozen=True)
class JobConfig:
    """A job; what is None is sized to the budget, or to the data where there is no budget"""
    data: str
    text: str
    label: str
    pair: str | None = ...
    group: str | None = ...
    model: str = ...
    out: str = ...
    budget_s: float | None = ...
    trials: int | None = ...
    folds: int = ...
    epochs: int | None = ...
    max_length: int | None = ...
    rows: int | None = ...
    lr: float = ...
    effective_batch: int = ...
    space: tuple[str, ...] = ...
    metric: str = ...
    strategy: str = ...
    confirm: int = ...
    precision: str | None = ...
    layout: str = ...
    seed: int = ...
    drop_empty: bool = ...
    ladder: bool = ...
    save_model: bool = ...
    title: str = ...
    train: tuple[str, ...] = ...

    @property
    def settings(self) -> dict:
        """The fields of `train`"""
def demo_config(**changes) -> JobConfig:
    """The demo: mails as (subject, body) pairs with the label ham or spam, and the model that a package brings"""
EVALUATION: float
STUDY_SHARE: float
FEW: int
def held_out_size(rows: int, classes: int) -> int:
    """Rows that are set aside: a quarter, at most 400; the data alone decides"""
def study_seconds(rows: int, epochs: int, trials: int, folds: int, rows_per_s: float) -> float:
    """Seconds of a study in which no trial is stopped"""
@dataclass(frozen=True)
class JobPlan:
    """A job's size, and why"""
    max_length: int
    rows: int
    held_out: int
    epochs: int
    trials: int
    study_s: float
    ladder_s: float
    reason: str
def size_job(speeds: dict[int, float], rows: int, budget_s: float | None, folds: int=3, classes: int=2, trials: int | None=None, epochs: int | None=None, max_length: int | None=None, use_rows: int | None=None, again: int=0) -> JobPlan:
    """The largest job that fits into the budget"""
def sha256_of(path: str | Path) -> str: ...
def fingerprint(config: JobConfig, precision: str | None=None) -> dict:
    """What a study's results depend on"""
class FolderLock:
    """One process a run folder, which is made if it is missing; freed by the system when the process dies"""
    lock: FileLock
    folder: Path

    def __init__(self, folder: str | Path): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...
def begin_run(folder, hardware, **fields):
    """Write what a new run folder holds first"""
PLAIN_FIELDS: tuple
def choose_engine(device: str, named: dict, problem: str, began: Choice | None=None) -> Choice:
    """The engine of a job, with the reason"""
SEARCHED: tuple
class Job:
    """A job and its run folder; `run` does what is not done yet"""
    stepping: Any
    config: JobConfig
    progress: bool
    say: Callable[[str], None]
    folder: Path
    command: Any
    table: Any
    space: Any
    hardware: Any
    fingerprint: Any
    resumed: Any
    tokenizer: Any
    model: Any
    longest: Any
    decisions: Any
    engine: Any
    preset: Any
    precision: Any

    def __init__(self, config: JobConfig, progress: bool=True, say: Callable[[str], None]=..., command: str | None=None): ...

    def path(self, stage: str) -> Path:
        """Where a stage's result lies"""

    def decide(self, what: str, value: object, reason: str):
        """Note a decision and its reason in the run folder"""

    def run(self) -> Path:
        """Do every stage that is not done. Ctrl-C and a kill lose at most the running stage or fold."""

    def work(self) -> optuna.Study:
        """Run trials of a study that another process began. Writes nothing but the study, and what it compiles."""
STAGES: tuple
REPORTS_TRIALS: int
def forecast_totals(done: int) -> dict[int, str]:
    """The studies that a forecast is made for"""
def forecasts(study: optuna.Study) -> dict:
    """Forecasts of larger studies from the trials that ended. Raises `InputError` where none did."""
def bootstrap_score(logits: torch.Tensor, labels: torch.Tensor, metric: str, repeats: int=1000, confidence: float=0.95, seed: int=0, groups: np.ndarray | None=None) -> tuple[float, float]:
    """Percentile interval of a metric over resampled rows, or over resampled groups"""
