# Made by tools/stubs.py from the modules: run that.

from .strategies import Strategy
from dataclasses import dataclass
from matplotlib.figure import Figure
import numpy as np, optuna

__all__ = ['past_errors', 'cost_interval', 'coverage', 'Forecast', 'forecast', 'forecast_before', 'build_bill', 'importance_figure', 'parallel_figure']
LEAST_POINTS: int
LEAST_TRIALS: int
def recent_mean(costs: np.ndarray) -> float:
    """What a trial costs at the end of `costs`"""
def past_points(first, last, points): ...
def past_errors(costs: np.ndarray, left: int, points: int=12) -> np.ndarray:
    """Errors of this forecast at earlier times, for a horizon as long in proportion"""
def cost_interval(costs: np.ndarray, left: int, confidence: float=0.8) -> tuple[float, float, float] | None:
    """Cost of what is left"""
def coverage(costs: np.ndarray, left: int, confidence: float=0.8, points: int=12) -> tuple[float | None, int]:
    """How often this interval held at earlier times of the same study"""
def time_words(seconds):
    """Seconds in the unit that a reader would choose"""
@dataclass(frozen=True)
class Forecast:
    """How long a study takes from a moment on"""
    done: int
    left: int
    spent_s: float
    bounds: tuple[float, float]
    mid: float | None
    low: float | None
    high: float | None
    confidence: float
    coverage: float | None
    backtests: int
    epochs: float
    workers: int
    reason: str
    profile: tuple[dict, ...] = ...

    @property
    def useful(self) -> bool: ...

    @property
    def gpu_hours(self) -> float | None: ...

    def wall(self) -> tuple[float, float]: ...
def forecast(study: optuna.Study, n_trials: int | None=None, confidence: float=0.8, workers: int=1) -> Forecast:
    """How long the rest of a study takes. Raises `InputError` for a study without a finished trial."""
def fold_profile(study: optuna.Study) -> list[dict]:
    """Trials and hours by the folds that they reached"""
def forecast_before(n_trials: int, folds: int, epochs: int, seconds_per_epoch: float, strategy: str | Strategy='deferred', build_s: float=0.0, workers: int=1) -> Forecast:
    """Bounds of a study that has not begun"""
def build_bill(training_s: float, trials: int, build_s: float, speedup: float, keys: int=1) -> dict[str, dict]:
    """The study's hours by how often its engine is built"""
def importance_figure(study: optuna.Study, where: str='') -> Figure:
    """How much each parameter mattered for being among the best tenth"""
def parallel_figure(study: optuna.Study, where: str='', most: int=300) -> Figure:
    """Parameters of each trial, coloured by value; those that ran fewer folds dashed and lighter"""
