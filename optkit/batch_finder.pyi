# Made by tools/stubs.py from the modules: run that.

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
import torch

__all__ = ['is_out_of_memory', 'Probe', 'Peak', 'BatchPlan', 'find_batch_size', 'find_max_tokens', 'find_batch_table', 'MemoryProbe', 'preserved']
def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` is a failed allocation: CUDA, driver, cuBLAS, cuDNN, NCCL, HIP, XPU, MPS or CPU"""
def accumulation_for(largest: int, effective: int) -> tuple[int, int]:
    """The fewest micro-batches that make `effective` rows, and the even physical batch for them"""
def planned_updates(rows: int, effective: int, epochs: int) -> int:
    """The optimizer steps of a whole training"""
@dataclass(frozen=True)
class Probe:
    """One tried size; bytes are None where they were not read"""
    batch: int
    peak_bytes: int | None
    fits: bool
    note: str = ...
    allocated_bytes: int | None = ...
    activation_bytes: int | None = ...
    resident_bytes: int | None = ...
class Peak(NamedTuple):
    """What a probe may return instead of its peak alone"""
    peak_bytes: int
    allocated_bytes: int
    activation_bytes: int | None = ...
    resident_bytes: int | None = ...
class _Line(NamedTuple):
    """Bytes over rows, through two measured points"""
    first: tuple[int, int]
    last: tuple[int, int]
    least_bytes: int
    split: bool
    overhead: int

    @property
    def slope(self): ...
def predict_limit(probes: list[Probe], budget: float) -> int | None:
    """Where a line of bytes over batch meets the budget"""
def predict_peak(probes: list[Probe], batch: int) -> int | None:
    """The peak of `batch` rows on the line of `predict_limit`, and not below what the update alone takes"""
def next_probe(probes: list[Probe], start: int, limit: int, budget: float | None=None, tolerance: float=0.01, least: int=1) -> int | None:
    """The next size to try, from the probes so far alone"""
@dataclass(frozen=True)
class BatchPlan:
    """A physical batch that ran, and how an optimizer step is made of it"""
    physical: int
    accumulation: int
    effective: int
    longest: int | None
    tried: tuple[Probe, ...]
    peak_bytes: int | None
    reason: str
    max_tokens: int | None = ...
    allocated_bytes: int | None = ...
@contextmanager
def exchange_nothing():
    """`DistributedDataParallel` models that are called inside compute alone"""
def merge_rank_probes(probes: list[Probe]) -> Probe:
    """One probe for all ranks: it fits where all fit, and has the most bytes"""
class _RankGroup:
    """The ranks of a process group, which search as one; `patience`: seconds that they wait for each other"""
    groups: dict
    key: tuple
    patience: Any

    def __init__(self, ranks, patience): ...

    def gather(self, answer, when):
        """The answers of all ranks, in their order. Raises `RuntimeError` where one does not answer."""

    def agree(self, capacity: int | None, **settings) -> int | None:
        """The smallest capacity. Raises `ValueError` where the ranks do not ask for the same."""

    def run_probe(self, probe: Callable, batch: int, budget: float | None) -> Probe:
        """`_run_probe` on every rank, with one answer"""
def find_batch_size(probe: Callable[[int], int | Peak | None], effective: int | None=None, start: int=8, limit: int=4096, headroom: float=0.02, capacity: int | None=None, longest: int | None=None, tolerance: float | None=None, ranks: object=None, patience: float=600.0, least: int=1) -> BatchPlan:
    """The largest physical batch that ran within the budget. Raises `MemoryError` when one row does not fit,
`RuntimeError` when another rank failed or does not answer. The search restores what the probe trains
if the probe has its `model` (and `optimizer`); else wrap the search in `preserved`."""
def find_max_tokens(probe: Callable[[int], int | Peak | None], longest: int, multiple: int=64, limit: int=..., **kwargs) -> BatchPlan:
    """The largest packed micro-batch that ran within the budget. Raises `MemoryError` when the longest row does not
fit, `ValueError` when the limit does not hold it."""
def find_batch_table(probe_at: Callable[[int], Callable[[int], int | Peak | None]], lengths: Iterable[int], effective: int | None=None, **kwargs) -> dict[int, BatchPlan]:
    """The largest physical batch for rows of each length"""
class MemoryProbe:
    """Calls that run a training step twice and return what the device held, or None where it cannot be read"""
    step: Callable[[int], object]
    device: Any
    clean: Callable[[], None] | None
    optimizer: torch.optim.Optimizer | None
    model: torch.nn.Module | None

    def __init__(self, step: Callable[[int], object], device: str | torch.device='cuda', optimizer: torch.optim.Optimizer | None=None, clean: Callable[[], None] | None=None, model: torch.nn.Module | None=None): ...

    def __call__(self, batch: int): ...
class _HostCopy(NamedTuple):
    """A tensor's value in host memory, and where it was"""
    tensor: torch.Tensor
    device: torch.device
@contextmanager
def preserved(model: torch.nn.Module, *others):
    """Everything is as before when the block ends, also after an exception"""
