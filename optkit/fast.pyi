# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .engine import Engine
from .precision import Precision, tf32_set
from .slots import PaddedCall, PlacedPacking, Shape
from .store import TokenStore
from pathlib import Path
from typing import Any
import numpy as np, torch

__all__ = ['TOKENS', 'WHOSE_ATTENTION', 'fast_problem', 'end_to_end_problem', 'padded_shapes', 'keep_compiled', 'FastEngine', 'places_problem']
def fast_problem(kind: str, scaler: bool, ranks: bool, checkpointing: str, quantised: bool, formats: set) -> str:
    """Why an engine's steps stay plain"""
def end_to_end_problem(kinds: set, device: str, capability: tuple[int, int] | None, compute: str, depth: int) -> str:
    """Why rows need places inside attention, and cannot be taken end to end"""
def padded_shapes(lengths: np.ndarray, rows: int, tokens: int=4096) -> Choice:
    """One shape for each length of the ladder, for models whose rows stay padded"""
def keep_compiled(folder: str | Path) -> dict:
    """Let the compilers of torch and Triton keep what they make in `folder`, unless the user's variables name one.
torch's own cache takes the place of a folder that a command line would take apart, such as one with a blank."""
TOKENS: int
WHOSE_ATTENTION: tuple
class FastEngine(Engine):
    """An engine whose steps are built once for a few shapes"""
    gradients: tuple
    automatic: Any
    at_once: Any
    most: int
    ladder: Any
    beside: bool
    end_to_end: bool
    dynamic: bool
    attention: str
    graphs: Any
    layers: Any
    forward_in_places: Any
    reason: Any
    calls: dict
    known: Any
    built: Any
    compiled: dict
    notes: list
    built_s: float
    full: Any
    optimizer: Any
    total: Any
    smoothing: Any
    weights: Any
    pool: Any
    grad_norm: Any
    micro_batches: Any
    updating: bool

    def __init__(self, model: torch.nn.Module, precision: Precision, at_once: int | None=None, most: int=4, least: int=32, octave: int=2, graphs: bool | None=None, layers: bool | None=None, beside: bool=True, end_to_end: bool=True, dynamic: bool=True, attention: str='optkit', **kwargs): ...

    def set(self, **values):
        """Values of the next steps, see `Engine.set`; they go into tensors that the graphs read"""

    def set_lr(self, lr: float):
        """Learning rate of the next step"""

    def reset(self, *args, rows: int=0, **values):
        """As `Engine.reset`; `rows`: of a full step, so that its shapes do not hang on which step comes first"""

    def call_for(self, store: TokenStore) -> PlacedPacking | PaddedCall:
        """How the model is called on this store's rows"""

    def shapes_for(self, store: TokenStore, rows: int) -> tuple[Shape, ...]:
        """The shapes for steps of that many rows, in equal parts of at most `at_once`; chosen once"""

    def halve(self, store: TokenStore, rows: np.ndarray, why: str, longest: int) -> Choice:
        """Fewer rows at once from now on. Raises `MemoryError` when it was one."""

    def own_cut(self) -> Choice | None:
        """Rows at once, where steps are not plain"""

    def step(self, store: TokenStore, step: np.ndarray | list) -> torch.Tensor:
        """Forward, backward, clip and update, from shapes that are built at their first use"""

    def eager_steps(self):
        """Steps inside are those of the plain engine, on rows that are padded as a micro-batch says"""

    def attention_override(self, store: TokenStore) -> Choice | None:
        """Attention in places or end to end, where rows go that way"""

    def predict(self, store: TokenStore, rows: np.ndarray, batch: int=64, on_device: bool=True):
        """Outputs of rows, in their order, see `Engine.predict`"""
@torch.no_grad()
@tf32_set(False)
def places_problem(engine: Engine, call: PlacedPacking, store: TokenStore, exact: bool=True) -> str:
    """What is wrong when three rows go through the model in places; not `exact`: in the format of the steps"""
