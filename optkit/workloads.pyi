# Made by tools/stubs.py from the modules: run that.

from .cards import Hardware
from .config import TrainConfig
from .store import TokenStore
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
import numpy as np, torch

__all__ = ['WORKLOADS', 'Bench', 'bench_of', 'made_up_store', 'Workload', 'workload_problem', 'same_sides', 'Side', 'timed_sides', 'step_flops']
STEPS_A_ROUND: int
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
def bench_of(model: torch.nn.Module, store: TokenStore, hw: Hardware, effective: int=16, source: str='', **changes) -> Bench:
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
def shaped_bench(name, hw):
    """The bench of w1, w2 or w3"""
def size_step(fixed_s, token_s, budget_s, longest, most=32):
    """Rows and tokens of a step that let a budget reach every row, and why: a step may take about 1/400 of it.

`fixed_s`: seconds of every step; `token_s`: that a token adds, padding included; `longest`: tokens; `most`: rows"""
def user_bench(model, data, hw, budget_s, rows, max_length, effective):
    """The bench of one's own model and data.

`data`: file, text, label, pair; `rows`: at most; `max_length` and `effective`: None for what the budget allows"""
def same_sides(bench: Bench, a: TrainConfig, b: TrainConfig) -> str:
    """Why two configurations are one and the same on this workload"""
class Side:
    """One configuration: its engine, and how it makes a step; a context that puts the model back"""
    bench: Bench
    config: TrainConfig
    copied: Any
    engine: Any
    attention: Any
    plan: Any

    def __init__(self, bench: Bench, config: TrainConfig, apart: bool=False, **built): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...

    def ready(self):
        """Attention and checkpointing as this side has them"""

    def step(self, number: int) -> torch.Tensor:
        """One optimizer step"""

    def of_round(self, number: int) -> list:
        """The optimizer steps of a round"""
def least_seconds(step_s, sides):
    """Seconds of the rounds that an interval needs at least; `step_s`: of a step of each side"""
def timed(bench, steps, share_s, **options):
    """`compare` with the settings of a pass; `steps`: functions of the round's number by name; `share_s`: of rounds"""
def timed_sides(bench: Bench, configs: dict, share_s: float, check_loss: bool=True, frozen_dropout: bool=False, steps: dict | None=None, built: dict | None=None) -> tuple:
    """Time configurations in turns, then compare their losses. Raises `InputError` where there is nothing to compare."""
def step_flops(model: torch.nn.Module, lengths: np.ndarray) -> float:
    """Model FLOPs of real tokens; weights that do not train have no product for their own gradient"""
def side_rates(bench, comparison, side, name):
    """Seconds, samples, real and padded tokens a second, and MFU of one side of a comparison"""
def comparison_result(comparison, name, base, **more):
    """What an experiment returns: ratios of a variant to its baseline round by round, and what belongs to them"""
def spread_between_seeds(bench, seeds=3):
    """How far the plain baseline's loss moves with the seed of the sample order: standard deviation"""
def loss_check(bench, losses, name, base, label):
    """The loss of one side beside that of the other; None where no loss was compared. `losses`: of `timed_sides`"""
