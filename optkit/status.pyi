# Made by tools/stubs.py from the modules: run that.

from .cards import Hardware
from .claims import claims
from .config import TrainConfig
from .progress import Progress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ['Gain', 'gain_of', 'Preset', 'model_shape', 'memory_estimate', 'rows_that_fit', 'preset_of', 'diff', 'gpu_busy', 'read_run', 'Status', 'status', 'standing']
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
def gain_of(records, claim: str, card: str) -> Gain | None:
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
def model_shape(model, config: TrainConfig | None=None) -> dict:
    """What the memory of a training depends on; a model from a configuration is in FP32, below an adapter in 16 bits"""
SPARE: float
def memory_estimate(shape: dict, rows: int, max_length: int=512, bytes_each: int=2, keeps_matrix: bool | None=None, checkpointing: str='off', config: TrainConfig | None=None) -> dict[str, float]:
    """What a training step takes, by count: an estimate. `optkit.sizes.plan_batch` measures."""
def rows_that_fit(total_bytes: int, shape: dict, max_length: int=512, bytes_each: int=2, keeps_matrix: bool | None=None, share: float=0.9, **options) -> int:
    """How many rows of full length fit beside weights, gradients and AdamW"""
def preset_of(card: str | Hardware='auto', model=None, max_length: int=512, records=None, **changes) -> Preset:
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
@dataclass(frozen=True)
class Facts:
    """What judges and checks look at"""
    config: TrainConfig
    hw: Hardware
    run: dict
    convolutions: int = ...
    loaded: str | None = ...
    attentions: tuple[str, ...] | None = ...
    packing: str = ...

    @property
    def cuda(self) -> bool: ...

    @property
    def precision(self): ...

    @property
    def progress(self) -> Progress | None: ...

    @property
    def study(self) -> dict: ...

    def part(self, name, *inner) -> dict:
        """A file of the run, or what lies in it; empty where it is missing"""

    def decided(self, what) -> dict | None: ...
@dataclass(frozen=True)
class Optimization:
    """One line of the status"""
    name: str
    category: str
    claims: tuple[str, ...]
    judge: Callable[[Facts], tuple[str, str]]
    fix: str = ...
    label: str = ...
    rung: str = ...
    gpu: bool = ...

    @property
    def ids(self) -> tuple[str, ...]: ...

    def state(self, facts: Facts) -> tuple[str, str]: ...
CATEGORIES: tuple
NEVER: str
OPTIMIZATIONS: Any
@dataclass(frozen=True)
class StatusRow:
    """One optimization here"""
    name: str
    category: str
    state: str
    why: str
    gain: Gain | None
    claimed: str
    fix: str
    label: str
@dataclass(frozen=True)
class Check:
    """One item of the checklist"""
    what: str
    ok: bool | None
    why: str
def gpu_busy(seconds: float=2.0, every: float=0.2, card: str='cuda') -> float | None:
    """How busy a card is, by the management library; CUDA is not touched"""
def read_run(folder: str | Path) -> dict:
    """What a run folder holds, as far as it can be read. Raises `InputError` for a folder that is none."""
@dataclass(frozen=True)
class Status:
    """Every optimization on one machine"""
    rows: tuple[StatusRow, ...]
    checks: tuple[Check, ...]
    card: str
    run: str | None = ...

    @property
    def scorecard(self) -> dict[str, tuple[int, int, int]]:
        """What is on among what applies"""

    @property
    def recommendations(self) -> tuple[StatusRow, ...]:
        """What is off and was measured to pay, the greatest gain first; what changes training is not among them"""

    @property
    def unmeasured(self) -> tuple[StatusRow, ...]:
        """What is off and was never measured"""

    def to_dict(self) -> dict:
        """The status for a program"""

    def text(self, color: bool=False) -> str:
        """The status in lines"""
def status(config: TrainConfig | None=None, run: str | Path | None=None, hardware: Hardware | None=None, model=None, records=None, seconds: float=2.0) -> Status:
    """What is on, off or not applicable, why, and what it is worth; with checks that run. Writes nothing."""
def standing(folder: str | Path) -> tuple[str, bool]:
    """Where a run or a study stands. Raises `InputError` for a folder that is none."""
