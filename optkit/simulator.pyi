# Made by tools/stubs.py from the modules: run that.

from .strategies import Course, History, Strategy, StudySize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from optuna.distributions import BaseDistribution
from pathlib import Path
from typing import Any
import numpy as np

__all__ = ['simulated_runner', 'SyntheticCurves', 'RecordedCurves', 'taskset_curves', 'Simulated', 'simulate', 'Replay', 'replay']
def simulated_runner(noise: float=0.01, fold_effect: float=0.02, epochs: int=3, seed: int=0) -> Callable[[dict, int], Iterator[float]]:
    """Made-up learning curves whose best score lies at lr 1e-3 and weight decay 0.1"""
@dataclass(frozen=True, kw_only=True)
class FoldNoise:
    """What makes the curve of a fold differ from the true one"""
    fold: float = ...
    trial: float = ...
    epoch: float = ...
    correlation: float = ...
    folds: int = ...
    tail: float | None = ...
    collapse: float = ...

    def draw(self, rng: np.random.Generator) -> float: ...

    @property
    def margin(self) -> float: ...

    def noisy_runner(self, clean: Callable[[dict], np.ndarray], seed: int, patience: int | None) -> Callable[[dict, int], Iterator[float]]:
        """Scores (losses with their sign turned) with this noise; the folds' effects add up to 0"""
@dataclass(frozen=True)
class SyntheticCurves(FoldNoise):
    """Made-up validation losses of a fine-tuning run; the noise as in `FoldNoise`, by keyword"""
    epochs: int = ...
    name: str = ...
    best_off: float = ...
    jump: float | None = ...

    @property
    def space(self) -> dict[str, BaseDistribution]: ...

    def truth(self, params: dict) -> float: ...

    def runner(self, seed: int): ...

    def clean(self, params: dict) -> np.ndarray:
        """The curve without noise"""

    def optimum(self) -> float:
        """The lowest true loss in the space: simplex searches from the best of 3000 random points"""
NOISY: Any
FAMILIES: Any
@dataclass(frozen=True)
class RecordedCurves(FoldNoise):
    """Recorded validation losses; folds are made of noise as in `FoldNoise`, by keyword"""
    points: np.ndarray
    losses: np.ndarray
    name: str = ...

    @property
    def epochs(self) -> int: ...

    @property
    def space(self) -> dict[str, BaseDistribution]: ...

    def truth(self, params: dict) -> float: ...

    def optimum(self) -> float: ...

    def runner(self, seed: int): ...

    def nearest(self, params: dict) -> int: ...

    def truths(self) -> np.ndarray:
        """The lowest recorded loss of each configuration"""

    def rank(self, params: dict) -> float:
        """Share of configurations that are better"""
def taskset_curves(path: str | Path) -> RecordedCurves:
    """A TaskSet task; its parameters are scaled by their logarithms (the betas by that of 1 - beta)"""
@dataclass(frozen=True)
class Simulated:
    """A simulated study, trial by trial"""
    spent: np.ndarray
    regret: np.ndarray
    complete: np.ndarray
    values: tuple
    best: dict | None = ...

    def at_trials(self, n: int) -> dict: ...

    def at_epochs(self, budget: int) -> float: ...
def simulate(curves: Any, strategy: str | Strategy='deferred', trials: int=400, seed: int=0, budget: int=0, optimum: float | None=None, sampler: str | None=None, other: int=0) -> Simulated:
    """A study of `curves` under a strategy, in memory"""
class SimulatedRun:
    """The state of a simulated study"""
    curves: Any
    strategy: Any
    size: StudySize
    history: History
    values: Any
    waiting: dict
    rows: list
    begun: int
    spent: int
    optimum: Any
    study: Any

    def __init__(self, curves, strategy, trials, seed, sampler, optimum, other=0): ...

    def winner(self) -> dict | None: ...

    def begin(self):
        """Run a new trial, and what waits and comes next"""

    def continue_waiting(self, last: bool): ...

    def note(self, regret=None): ...

    def follow(self, trial, course):
        """Run a trial until it ends or waits, and report it to Optuna"""
@dataclass(frozen=True)
class Replay:
    """A strategy run over finished trials"""
    strategy: str
    trials: int
    epochs: int
    epochs_then: int
    stopped: int
    winner: int | None
    winner_then: int | None
    lost: float
    reasons: dict = ...
def replay(courses: Sequence[Course], strategy: str | Strategy='deferred', size: StudySize | None=None) -> Replay:
    """What a strategy would have made of these trials. Raises `InputError` for a strategy that needs a living study."""
class _EndOfRecord(Exception):
    """The recorded trial has no further value"""
