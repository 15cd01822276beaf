# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .cards import Hardware
from .config import TrainConfig
from .store import TokenStore
from .timing import Comparison
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
import numpy as np, torch

__all__ = ['WORKLOADS', 'Bench', 'bench_of', 'made_up_store', 'Workload', 'workload_problem', 'same_sides', 'Side', 'timed_sides', 'step_flops']
CYCLE: int
@dataclass
class Bench:
    """A model, its data and the machine"""
    name: str
    words: str
    model: torch.nn.Module
    store: TokenStore
    rows: np.ndarray
    base: TrainConfig
    hardware: Hardware
    step_s: float = ...
    on_s: float | None = ...
    loss_steps: int = ...
    sized: str = ...
    cache: dict = ...

    @property
    def cuda(self) -> bool: ...

    @property
    def cycle(self) -> int: ...

    @property
    def effective(self) -> int: ...

    @property
    def plain(self) -> TrainConfig: ...

    def all_on(self, **changes) -> TrainConfig:
        """Everything that keeps training the same, without torch.compile"""
def bench_of(model: torch.nn.Module, store: TokenStore, hw: Hardware, effective: int=16, **changes) -> Bench:
    """The bench of a model and a store that are in memory"""
def made_up_store(rows: int, vocabulary: int, median: int=110, sigma: float=0.7, shortest: int=16, longest: int=512, causal: bool=False, seed: int=0) -> TokenStore:
    """Rows of random tokens of two kinds: the label says which half of the vocabulary most of them come from"""
class Workload(NamedTuple):
    """A model's shape and the rows of its steps"""
    words: str
    make: Callable
    effective: int
    longest: int
    half: bool
    causal: bool
    least_bytes: float
WORKLOADS: Any
def workload_problem(name: str, hw: Hardware) -> str:
    """Why a workload cannot run on this machine"""
def shaped_bench(name: str, hw: Hardware, seed: int=0) -> Bench:
    """The bench of w1, w2 or w3"""
def size_step(fixed_s: float, token_s: float, budget_s: float, longest: int, most: int=32) -> Choice:
    """Rows and tokens of a step that let a budget reach every row: a step may take about 1/400 of it"""
def user_bench(model: str, data: tuple, hw: Hardware, budget_s: float, rows: int, max_length: int | None, effective: int | None) -> Bench:
    """The bench of one's own model and data"""
def same_sides(bench: Bench, a: TrainConfig, b: TrainConfig) -> str:
    """Why two configurations are one and the same on this workload"""
class Side:
    """One configuration: its engine, and how it makes a step"""
    bench: Bench
    config: TrainConfig
    copied: Any
    engine: Any
    attention: Any
    plan: Any

    def __init__(self, bench: Bench, config: TrainConfig, apart: bool=False, **built): ...

    def ready(self):
        """Attention and checkpointing as this side has them"""

    def step(self, number: int) -> torch.Tensor:
        """One optimizer step"""

    def of_round(self, number: int) -> list:
        """The optimizer steps of a round"""
def least_seconds(step_s: float, sides: int) -> float:
    """What the rounds that an interval needs at least take"""
def timed(bench: Bench, steps: dict, share_s: float, **kwargs) -> Comparison:
    """`compare` of functions with the settings of a pass"""
def timed_sides(bench: Bench, configs: dict, share_s: float, check_loss: bool=True, frozen_dropout: bool=False, steps: dict | None=None, built: dict | None=None) -> tuple:
    """Time configurations in turns, then compare their losses. Raises `InputError` where there is nothing to compare."""
def step_flops(model: torch.nn.Module, lengths: np.ndarray) -> float:
    """Model FLOPs of real tokens; weights that do not train have no product for their own gradient"""
def rates(bench: Bench, comparison: Comparison, side: Side, name: str) -> dict:
    """Samples, real and padded tokens a second, and MFU of one side"""
def outcome(comparison: Comparison, name: str, base: str, **more) -> dict:
    """Ratios round by round, and what belongs to them"""
def spread_between_seeds(bench: Bench, seeds: int=3) -> float:
    """How far the plain baseline's loss moves with the seed of the sample order"""
def loss_check(bench: Bench, losses: dict, name: str, base: str, label: str) -> dict | None:
    """The loss of one side beside that of the other"""
