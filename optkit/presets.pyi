# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .cards import Hardware
from .config import TrainConfig
from dataclasses import dataclass
from typing import Any
import pandas as pd

__all__ = ['Gain', 'gain_of', 'Preset', 'model_shape', 'memory_estimate', 'rows_that_fit', 'forecast_memory', 'preset_of', 'diff']
@dataclass(frozen=True)
class Gain:
    """What an optimization was measured to be worth: factors over the step without it, above 1 is faster"""
    p50: float
    low: float
    high: float
    where: str
    files: tuple[str, ...]

    @property
    def workloads(self) -> tuple[str, ...]: ...

    @property
    def sure(self) -> bool: ...

    @property
    def interval(self) -> str: ...
PARTS: tuple
OTHER_BASELINE: tuple
AGAINST_FP32: tuple
def gain_of(records: pd.DataFrame, claim: str, card: str) -> Gain | None:
    """The gain of one claim in a whole step: over the row before it in a ladder, else over its baseline"""
@dataclass(frozen=True)
class Reason:
    """Why a preset has a value"""
    reason: str
    source: str
def left_table(head, rows):
    """An HTML table whose cells are aligned to the left; all text is escaped"""
class Preset(TrainConfig):
    """A configuration with a reason for each value that was considered"""

    @property
    def reasons(self) -> dict[str, Reason]: ...

    @property
    def card(self) -> str: ...

    def replace(self, **changes) -> 'Preset':
        """The same with other values; those are `asked for`"""

    def to_dict(self) -> dict: ...
def as_preset(values: dict, reasons: dict[str, Reason], card: str) -> Preset:
    """A preset from values that were decided elsewhere"""
def model_shape(model: Any, config: TrainConfig | None=None) -> dict:
    """What the memory of a training depends on; a model from a configuration is in FP32, below an adapter in 16 bits"""
SPARE: float
def memory_estimate(shape: dict, rows: int, max_length: int=512, bytes_each: int=2, keeps_matrix: bool | None=None, checkpointing: str='off', config: TrainConfig | None=None) -> dict[str, float]:
    """What a training step takes, by count: an estimate. `optkit.sizes.plan_batch` measures."""
def rows_that_fit(total_bytes: int, shape: dict, max_length: int=512, bytes_each: int=2, keeps_matrix: bool | None=None, share: float=0.9, **options) -> int:
    """How many rows of full length fit beside weights, gradients and AdamW"""
OUTSIDE: float
GAPS: float
@dataclass(frozen=True)
class MemoryForecast:
    """What a training takes on a card at its peak, before anything is loaded"""
    what: str
    parts: dict
    layers: tuple[int, ...]
    card: str = ...
    total_bytes: int | None = ...

    @property
    def tensors(self): ...

    @property
    def peak(self): ...

    @property
    def fits(self) -> Choice: ...
def forecast_memory(model: Any, config: TrainConfig | None=None, rows: int=1, tokens: int=512, card: str | Hardware | None=None, task: str='classification', quantised: str | None=None, best: bool=True) -> MemoryForecast:
    """What a training step takes, by count, before a model is loaded. Steps of the fast engine are counted as plain
ones: its compiled layers, and its attention where the plain one keeps a matrix, may take less. Raises `InputError`
for what cannot be built."""
def preset_of(card: str | Hardware='auto', model: Any=None, max_length: int=512, records: pd.DataFrame | None=None, **changes) -> Preset:
    """A configuration for a card, each value with its reason. Raises `InputError` for an unknown card, and for what
does not fit by estimate."""
@dataclass(frozen=True)
class ConfigDiff:
    """What differs between two configurations"""
    rows: tuple[tuple, ...]

    def __bool__(self): ...

    def to_dict(self) -> dict: ...
def diff(a: TrainConfig, b: TrainConfig) -> ConfigDiff:
    """The fields in which two configurations differ"""
