# Made by tools/stubs.py from the modules: run that.

from .strategies import Strategy
from collections.abc import Callable
from dataclasses import dataclass
import optuna

__all__ = ['Confirmed', 'Confirmation', 'confirm', 'study_summary']
@dataclass(frozen=True)
class Confirmed:
    """A trial of a search, run again"""
    number: int
    params: dict
    search: float
    fresh: float
    fresh_scores: tuple[float, ...]
@dataclass(frozen=True)
class Confirmation:
    """The best few of a search, best fresh score first"""
    rows: tuple[Confirmed, ...]
    first: int
    sign: int = ...

    @property
    def winner(self) -> Confirmed: ...

    @property
    def optimism(self) -> float: ...
def confirm(study: optuna.Study, runner: Callable, top: int=5, folds: int | None=None, space: Callable | None=None, seed: int=1, progress: bool=True) -> Confirmation:
    """Run the best few again. Raises `InputError` for a study in which no trial is complete."""
def study_summary(study: optuna.Study, metric: str, planned: int, full_epochs: int, strategy: Strategy | None=None) -> dict:
    """Everything that the report shows of a study"""
