# Made by tools/stubs.py from the modules: run that.

from .job_plan import JobConfig, demo_config, fingerprint, size_job
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np, optuna, torch

__all__ = ['Job', 'bootstrap_score', 'JobConfig', 'demo_config', 'size_job']
class Job:
    """A job and its run folder; `run` does what is not done yet"""
    stepping: Any
    config: JobConfig
    progress: bool
    say: Callable[[str], None]
    folder: Path
    command: Any
    table: Any
    strata: Any
    names: Any
    space: Any
    hardware: Any
    precision: Any
    fingerprint: Any
    resumed: Any
    tokenizer: Any
    model: Any
    longest: Any
    decisions: Any
    engine: Any
    preset: Any

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
def bootstrap_score(logits: torch.Tensor, labels: torch.Tensor, metric: str, repeats: int=1000, confidence: float=0.95, seed: int=0, groups: np.ndarray | None=None, task: str='classification') -> tuple[float, float]:
    """Percentile interval of a metric over resampled rows, or over resampled groups"""
