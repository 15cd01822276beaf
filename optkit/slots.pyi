# Made by tools/stubs.py from the modules: run that.

from .attention import Places
from .base import Choice
from .packing import Packing
from .store import TokenStore
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
import numpy as np, torch

__all__ = ['Shape', 'length_ladder', 'fill', 'Costs', 'cut', 'choose_shapes', 'StaticBatch', 'PlacedPacking', 'PaddedCall', 'masked_loss']
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

    def seats(self, placed: list) -> np.ndarray:
        """Where the rows of a micro-batch sit"""
def length_ladder(longest: int, least: int=32, octave: int=2) -> tuple[int, ...]:
    """Lengths of places, in multiples of 16 tokens"""
def fill(shape: Shape, lengths: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Put rows into places, the longest first, each into the shortest place that is left for it"""
@dataclass(frozen=True)
class Costs:
    """What parts of a step cost, roughly, in units of a token outside attention; only the choice of shapes uses it"""
    inside: float = ...
    pair: float = ...
    slot: float = ...
    micro: float = ...

    def of(self, shape: Shape) -> float: ...
def cut(shapes: tuple[Shape, ...], lengths: np.ndarray, costs: Costs=...) -> list[tuple[Shape, list[list[int]]]]:
    """The micro-batches of an optimizer step. Raises `ValueError` for a row that fits nowhere."""
def choose_shapes(lengths: np.ndarray, rows: int, most: int=4, least: int=32, octave: int=2, places: bool=True) -> Choice:
    """Few shapes that hold nearly every step, with the reason"""
class StaticBatch:
    """The inputs of one shape, at fixed addresses on the device"""
    shape: Shape
    task: Any
    pad: Any
    types: Any
    per_token: Any
    floats: Any
    width: Any
    sizes: Any
    device: Any
    turn: Any
    hosts: list
    events: Any

    def __init__(self, shape: Shape, store: TokenStore, device: str | torch.device): ...

    def parts(self, array: torch.Tensor): ...

    def put(self, store: TokenStore, placed: list[np.ndarray], weight: float):
        """Fill in the rows of a micro-batch and send them to the device"""

    def inputs(self) -> dict:
        """What the step reads, made on the device from the one array"""
class PlacedPacking(Packing):
    """Calls a model on rows in places as if each came alone"""
    end_to_end: bool
    native: bool
    known: dict
    places: Places
    modules: list
    kinds: Any
    relative: Any
    stands: list

    def __init__(self, model: torch.nn.Module, native: bool=False): ...

    def switched(self, work: object=None):
        """The attention modules go by places inside; `work`: as of `Places`"""

    def set_places(self, shape: Shape, inputs: dict):
        """Point the attention modules at a shape and its inputs, for one call"""

    def __call__(self, inputs: dict):
        """Logits [places, classes], after `set_places`"""
class PaddedCall:
    """Calls a model on padded rows in the way of `PlacedPacking`"""
    native: bool
    end_to_end: bool
    model: torch.nn.Module
    extra: Any
    encoders: list

    def __init__(self, model: torch.nn.Module): ...

    def set_places(self, shape: object, inputs: object):
        """Padded rows have none"""

    def __call__(self, inputs: dict): ...

    @contextmanager
    def switched(self, work: object=None): ...
def masked_loss(task: str, logits: torch.Tensor, labels: torch.Tensor, held: torch.Tensor, smoothing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The loss of `Engine` with its values as tensors"""
