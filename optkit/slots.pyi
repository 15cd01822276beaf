# Made by tools/stubs.py from the modules: run that.

from .attention import Places
from .base import Choice
from .packing import Packing
from .store import TokenStore
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
import numpy as np, torch

__all__ = ['Shape', 'length_ladder', 'fill', 'Costs', 'cut', 'choose_shapes', 'PlacedPacking', 'StaticBatch', 'masked_loss']
@dataclass(frozen=True)
class Shape:
    """A micro-batch that is built once"""
    slots: tuple[tuple[int, int], ...]
    tokens: int | None = ...

    @property
    def rows(self): ...

    @property
    def padded(self): ...

    @property
    def outside(self): ...
def length_ladder(longest: int, least: int=32, octave: int=2) -> tuple[int, ...]:
    """Lengths of places, in multiples of 16 tokens"""
def fill(shape: Shape, lengths: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Put rows into places, the longest first, each into the shortest place that is left for it"""
@dataclass(frozen=True)
class Costs:
    """What parts of a step cost, roughly, in units of a token outside attention; only the choice of shapes hangs on it"""
    inside: float = ...
    pair: float = ...
    slot: float = ...
    micro: float = ...

    def of(self, shape: Shape) -> float: ...
def cut(shapes: tuple[Shape, ...], lengths: np.ndarray, costs: Costs=...) -> list[tuple[Shape, list[list[int]]]]:
    """The micro-batches of an optimizer step. Raises `ValueError` for a row that fits nowhere."""
def choose_shapes(lengths: np.ndarray, rows: int, most: int=4, costs: Costs=..., least: int=32, octave: int=2, places: bool=True, draws: int=96, seed: int=0) -> Choice:
    """Few shapes that hold nearly every step, with the reason"""
class PlacedPacking(Packing):
    """Calls a model on rows in places as if each came alone"""
    places: Places
    modules: list
    end_to_end: bool
    kinds: Any
    known: dict
    relative: Any
    own: bool
    near: bool
    stands: list

    def __init__(self, model, store_task: str, own: bool=False, near: bool=True): ...

    @contextmanager
    def switched(self):
        """The attention modules go by places inside"""

    def set_places(self, shape: Shape, inputs: dict):
        """Point the attention modules at a shape and its inputs"""

    def __call__(self, inputs: dict):
        """Logits [places, classes]"""
class StaticBatch:
    """The inputs of one shape, at fixed addresses on the device"""
    shape: Shape
    task: Any
    pad: Any
    types: Any
    width: Any
    per_token: Any
    sizes: Any
    ends: Any
    device: Any
    hosts: list
    events: Any
    turn: Any

    def __init__(self, shape: Shape, store: TokenStore, device, ring: int=3): ...

    def view(self, name, of=None): ...

    @property
    def floats(self): ...

    def put(self, store: TokenStore, placed: list[np.ndarray], weight: float):
        """Fill in the rows of a micro-batch and send them to the device"""

    def inputs(self) -> dict:
        """What the step reads, made on the device from the one array"""
def masked_loss(task: str, logits: torch.Tensor, labels: torch.Tensor, held: torch.Tensor, smoothing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The loss of `Engine` with values as tensors; cross-entropy as torch defines it with weights and smoothing"""
