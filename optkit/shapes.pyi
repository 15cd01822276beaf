# Made by tools/stubs.py from the modules: run that.

from .attention import RowEnds
from .base import Choice
from .packing import Packing
from .store import TokenStore
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
import numpy as np, threading, torch

__all__ = ['MICRO_BATCH', 'Shape', 'length_ladder', 'padded_shapes', 'fill', 'cut', 'choose_shapes', 'StaticBatch', 'EndToEnd', 'PaddedCall', 'masked_loss']
@dataclass(frozen=True)
class Shape:
    """A micro-batch that is built once"""
    rows: int
    tokens: int
    width: int = ...
    aims: int = ...
def length_ladder(longest: int, least: int=32) -> tuple[int, ...]:
    """Lengths of padded rows, in multiples of 16 tokens"""
def padded_shapes(lengths: np.ndarray, rows: int, tokens: int=4096) -> Choice:
    """One shape for each length of the ladder, for models whose rows stay padded"""
MICRO_BATCH: int
def fill(shape: Shape, lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Put rows into a shape, the longest first"""
def cut(shapes: tuple[Shape, ...], lengths: np.ndarray) -> list[tuple[Shape, list[int]]]:
    """The micro-batches of an optimizer step. Raises `ValueError` for a row that fits nowhere."""
def choose_shapes(lengths: np.ndarray, rows: int, most: int=4) -> Choice:
    """Few shapes that hold nearly every step, with the reason"""
@dataclass(frozen=True)
class ShapeLayout:
    """How steps are cut into a few shapes, in equal parts of at most `rows`"""
    rows: int
    most: int = ...
    automatic: bool = ...
    known: dict = ...
    name: ClassVar[str]
    reason: ClassVar[str]

    def part(self, rows): ...

    def chosen(self, store, rows, padded=False) -> tuple[Shape, ...]: ...

    def halved(self, why) -> Choice:
        """Half as many rows at once. Raises `MemoryError` when it was one."""
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

    def put(self, store: TokenStore, rows: np.ndarray, weight: float):
        """Fill in the rows of a micro-batch and send them to the device"""

    def inputs(self) -> dict:
        """What the step reads, made on the device from the one array"""
class EndToEnd(Packing):
    """Calls a model on rows end to end as if each came alone"""
    exact: bool
    whole_rows: bool
    rows: RowEnds
    known: dict
    seeds: Any
    modules: list
    kinds: Any
    relative: Any

    def __init__(self, model: torch.nn.Module, per_token: bool=False): ...

    @property
    def depth(self): ...

    def switched(self, layers: list=...):
        """The attention modules go by rows inside"""

    def set_rows(self, shape: Shape, inputs: dict, longest: int):
        """Point attention at the rows of a shape, for one call; a replay of a graph draws its seed anew"""

    @property
    def attention(self) -> str: ...

    def __call__(self, inputs: dict, body: torch.nn.Module | None=None):
        """Logits [rows, classes], or [1, tokens, classes] of tokens, after `set_rows`"""

    def compile_ahead(self, rows: int, longest: int, device: torch.device, dtype: torch.dtype) -> threading.Thread | None:
        """Compile the kernels of positions, by one call of each on a few tokens"""
class PaddedCall:
    """Calls a model on padded rows in the way of `EndToEnd`"""
    attention: str
    model: torch.nn.Module
    extra: Any
    encoders: list

    def __init__(self, model: torch.nn.Module): ...

    def set_rows(self, shape: object, inputs: object, longest: object):
        """Padded rows need none"""

    def __call__(self, inputs: dict, body: torch.nn.Module | None=None):
        """Logits, or hidden states"""

    @contextmanager
    def switched(self, layers: object=...): ...
def masked_loss(task: str, logits: torch.Tensor, labels: torch.Tensor, held: torch.Tensor, smoothing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The loss of `Engine` with its values as tensors"""
