# Made by tools/stubs.py from the modules: run that.

from .cards import Hardware
from .claims import claims
from .config import TrainConfig
from .presets import Gain
from .progress import Progress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import pandas as pd, torch

__all__ = ['gpu_busy', 'Status', 'status']
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
def status(config: TrainConfig | None=None, run: str | Path | None=None, hardware: Hardware | None=None, model: torch.nn.Module | None=None, records: pd.DataFrame | None=None, seconds: float=2.0) -> Status:
    """What is on, off or not applicable, why, and what it is worth; with checks that run. Writes nothing."""
