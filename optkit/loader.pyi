# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .steps import Step
from .store import TokenStore
from collections.abc import Iterable, Iterator
from typing import Any
import torch

__all__ = ['choose_workers', 'gather_seconds', 'Loader', 'batches']
def choose_workers(seconds_a_batch: float, seconds_a_step: float, usable: int, share: float=0.05) -> Choice:
    """How many processes gather batches, with the reason. Raises `ValueError` for times that were not measured."""
def gather_seconds(store: TokenStore, plan: Iterable[Step]) -> float:
    """How long gathering the batches of a step takes in this process. Raises `ValueError` where there is no step."""
class _Gathered(torch.utils.data.Dataset):
    """Steps as items: item `step` is its gathered batches"""
    store: Any
    sent: Any

    def __init__(self, store): ...

    def __getstate__(self): ...

    def __setstate__(self, sent): ...

    def __getitem__(self, step): ...

    def __len__(self): ...
class _Plan:
    """A sampler whose items are the steps of the epoch at hand"""
    steps: list

    def __init__(self): ...

    def __iter__(self): ...

    def __len__(self): ...
class Loader:
    """Gathers the steps of a store that is not on the model's device, in this process or in workers.
Workers see the store as it was when they started."""
    prefetch: Any
    start: Any
    store: TokenStore
    device: Any
    plan: _Plan
    pin: Any
    stream: Any
    reason: str
    loader: Any
    epoch: Any

    def __init__(self, store: TokenStore, device: str='cpu', workers: int=0, start: str | None=None, persistent: bool=True, prefetch: int=2, pin: bool=True, patience: float=60.0): ...

    @property
    def workers(self): ...

    def __call__(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The steps with their batches gathered and copied, a few ahead"""

    def close(self):
        """End the workers"""
def batches(store: TokenStore, steps: Iterable[Step], device: str, workers: int=0, **settings) -> Iterator[Step]:
    """The steps of one epoch, gathered, pinned and copied ahead. For several epochs with workers keep a `Loader`."""
