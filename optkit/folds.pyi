# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .config import TrainConfig
from .engine import Engine
from .metrics import score
from .store import TokenStore
from .table import Table
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
import numpy as np, pandas as pd

__all__ = ['hold_out', 'stratified_folds', 'strata_of', 'repeated_folds', 'hopeless', 'cross_validate']
def check_folds(labels: np.ndarray, classes: tuple[str, ...], k: int, source: str='the data', held_out: bool=True, groups: np.ndarray | None=None):
    """Raise `InputError` unless every label has a row, or a group, for each fold, and one to set aside"""
def split_rows(labels: np.ndarray, sizes: tuple[int, ...], seed: int=0, least: tuple[int, ...] | None=None, groups: np.ndarray | None=None) -> tuple[np.ndarray, ...]:
    """Disjoint stratified parts; a part may differ from its size by rounding, and has every label that has enough rows"""
def hold_out(labels: np.ndarray, size: int, search: int, folds: int, seed: int=0, groups: np.ndarray | None=None) -> tuple[np.ndarray, np.ndarray]:
    """Set rows aside, then draw the search's rows from the rest; the held-out rows depend on data, size and seed alone."""
def stratified_folds(rows: np.ndarray, labels: np.ndarray, k: int, seed: int=0, groups: np.ndarray | None=None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stratified folds over rows of a store, by scikit-learn. Raises `InputError` for what cannot be split so."""
def strata_of(store: TokenStore | Table, parts: int=4) -> np.ndarray:
    """What folds of a store's or a table's rows are stratified by"""
def table_strata(table: Table, least: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """What the rows of a table are split by: classes, or strata that are large enough"""
def repeated_folds(rows: np.ndarray, labels: np.ndarray, k: int, repeats: int=1, seed: int=0, groups: np.ndarray | None=None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stratified folds, several times over"""
def check_parts(table: Table, parts: list[tuple[np.ndarray, np.ndarray]], names: tuple[str, str]=..., columns: tuple[str, str | None]=...) -> dict[str, Choice]:
    """Labels that a part lacks, and rows to evaluate on whose texts are trained on as well, with what to do"""
def hopeless(scores: list[float], planned: int, target: float, risk: float=0.1) -> Choice:
    """Whether the mean over all folds will stay below a target"""
@dataclass(frozen=True)
class FoldScore:
    """What one fold gave, under the weights of its best epoch"""
    repeat: int
    fold: int
    score: float
    metrics: dict
    best_epoch: int
    epochs: int
    rows: int
    seconds: float
@dataclass(frozen=True)
class FoldsResult:
    """A cross-validation"""
    folds: tuple[FoldScore, ...]
    planned: int
    pooled: dict
    metric: str
    stopped: Choice | None
    outputs: tuple

    @property
    def scores(self): ...

    def spread(self) -> dict[str, tuple[float, float, float, float]]:
        """Of each metric over the folds"""

    def table(self) -> pd.DataFrame:
        """A row for each fold"""

    def to_json(self) -> dict: ...
def cross_validate(engine: Engine, store: TokenStore, folds: list[tuple[np.ndarray, np.ndarray]], config: TrainConfig, repeats: int=1, stop: Callable[[list[float]], Choice | bool] | None=None, folder: str | Path | None=None, resume: bool=False, on_fold: Callable[[FoldScore], None] | None=None, **kwargs) -> FoldsResult:
    """Train fold after fold and score them one by one and together. The engine holds the last fold's best weights."""
