# Made by tools/stubs.py from the modules: run that.

from .simulator import Replay
from .strategies import Course, Strategy
from .trainer import Trainer
from collections.abc import Callable
from dataclasses import dataclass
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial
from typing import Any
import numpy as np, optuna

__all__ = ['TrainerRunner', 'parse_space', 'default_space', 'ended', 'value_kind', 'best_complete', 'curves', 'courses', 'what_if']
class TrainerRunner:
    """Trains folds on one engine, which is reset and never rebuilt"""
    trainer: Trainer
    folds: list[tuple[np.ndarray, np.ndarray]]
    groups: np.ndarray | None
    epochs: Any
    metric: Any
    run: Any
    memory: Callable[[dict], tuple[int, int]] | None

    def __init__(self, trainer: Trainer, folds: list[tuple[np.ndarray, np.ndarray]], memory: Callable[[dict], tuple[int, int]] | None=None, groups: np.ndarray | None=None): ...

    def __call__(self, params, fold): ...

    @property
    def build_seconds(self) -> float: ...

    def physical_batch(self, params: dict) -> int: ...

    def check(self, params: dict):
        """Raise `InputError` for values that no fold can be trained with"""

    @property
    def fingerprint(self) -> dict:
        """Rows of the folds, labels and tokens, and the configuration without what depends on the card"""

    def renewed(self, seed: int) -> TrainerRunner:
        """The same rows, split anew, and another seed"""
def parse_space(text: str) -> tuple[str, BaseDistribution]:
    """One parameter of a search space from its short form. Raises `InputError`."""
EFFECTIVE_BATCHES: tuple
def default_space(trial: optuna.Trial) -> dict:
    """For fine-tuning a transformer; the physical batch is no part of it"""
@dataclass(frozen=True)
class Space:
    """The parameters that a search varies"""
    suggest: Callable[[optuna.Trial], dict]
    known: dict[str, str]
    fixed: dict[str, BaseDistribution] | None = ...
    samples: tuple[dict, ...] = ...
def as_space(space) -> Space:
    """The space of any of its forms. Raises `InputError` for one that suggests nothing."""
def ended(trial: FrozenTrial) -> str | None:
    """How a trial ended"""
def is_waiting(trial: FrozenTrial) -> bool: ...
def value_kind(trial: FrozenTrial) -> str:
    """What a trial's value is: the mean over all folds, a prediction of it, or what its last epoch gave"""
FORMAT: int
def study_settings(study: optuna.Study) -> dict: ...
def fold_scores(trial: FrozenTrial) -> list:
    """Scores of the finished folds"""
def spent(trial: FrozenTrial) -> dict:
    """What a trial cost, its resumed parts included"""
def best_complete(study: optuna.Study) -> FrozenTrial | None:
    """The best trial that ran all folds, by the posterior of its mean, in which a lucky fold counts less"""
def best_of(trials, sign): ...
def best_first(trials, sign): ...
def trials_that(study: optuna.Study, end: str) -> list[FrozenTrial]: ...
def curves(trial: FrozenTrial, stride: int) -> list[list[float]]:
    """The values of a trial"""
def courses(study: optuna.Study) -> list[Course]:
    """Finished trials as a strategy sees them, also of studies that optkit did not make (one fold)"""
def course_of(trial, sign, stride):
    """The `Course` of a finished trial; None of one that failed or has no values"""
def what_if(study: optuna.Study, strategy: str | Strategy='deferred') -> Replay:
    """What would this strategy have cost me?"""
