# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .engine import Engine
from .precision import Precision, tf32_set
from .shapes import EndToEnd, PaddedCall, Shape
from .store import TokenStore
from pathlib import Path
from typing import Any
import numpy as np, torch

__all__ = ['TOKENS', 'CAUSAL_TOKENS', 'fast_problem', 'end_to_end_problem', 'keep_compiled', 'FastEngine', 'rows_problem']
def fast_problem(kind: str, scaler: bool, ranks: bool, checkpointing: str, quantised: bool, formats: set) -> str:
    """Why an engine's steps stay plain"""
def end_to_end_problem(positions: bool, device: str, capability: tuple[int, int] | None, compute: str, depth: int) -> str:
    """Why rows have to be padded inside attention"""
def keep_compiled(folder: str | Path) -> dict:
    """Let the compilers of torch and Triton keep what they make in `folder`, unless the user's variables name one.
torch's own cache takes the place of a folder that a command line would take apart, such as one with a blank."""
TOKENS: int
CAUSAL_TOKENS: int
class FastEngine(Engine):
    """An engine whose steps are built once for a few shapes"""
    gradients: tuple
    dynamic: bool
    graphs: Any
    layers: Any
    captured_forward: Any
    reason: Any
    shapes: Any
    calls: dict
    built: Any
    compiled: Any
    notes: list
    built_s: float
    full: Any
    ahead: Any
    admitted: Any
    longest: Any
    padding_ends: Any
    may_checkpoint: list
    optimizer: Any
    embedding: Any
    total: Any
    smoothing: Any
    weights: Any
    pool: Any
    grad_norm: Any
    micro_batches: Any
    updating: bool

    def __init__(self, model: torch.nn.Module, precision: Precision, at_once: int | None=None, most: int=4, graphs: bool | None=None, layers: bool | None=None, dynamic: bool=True, **kwargs): ...

    def set(self, **values):
        """Values of the next steps, see `Engine.set`; they go into tensors that the graphs read"""

    def reset(self, *args, rows: int=0, **values):
        """As `Engine.reset`; `rows`: of a full step, so that its shapes do not hang on which step comes first"""

    def call_for(self, store: TokenStore) -> EndToEnd | PaddedCall:
        """How the model is called on this store's rows"""

    def shapes_for(self, store: TokenStore, rows: int) -> tuple[Shape, ...]:
        """The shapes for steps of that many rows, see `ShapeLayout`; chosen once"""

    def halve(self, store: TokenStore, rows: np.ndarray, why: str, longest: int) -> Choice:
        """Fewer rows at once from now on. Raises `MemoryError` when it was one."""

    def step(self, store: TokenStore, step: np.ndarray | list) -> torch.Tensor:
        """Forward, backward, clip and update, from shapes that are built at their first use"""

    def predict(self, store: TokenStore, rows: np.ndarray, batch: int=64, on_device: bool=True):
        """Outputs of rows, in their order, see `Engine.predict`"""
class _Rows(torch.autograd.Function):
    """Rows of a table; their gradient is added to `grad` in place, and the table gets none"""

    @staticmethod
    def forward(ctx, table, ids, grad, padding): ...

    @staticmethod
    def backward(ctx, out): ...
@torch.no_grad()
@tf32_set(False)
def rows_problem(engine: Engine, call: EndToEnd, store: TokenStore, exact: bool=True) -> str:
    """What is wrong when three rows go through the model end to end; `exact`: by the plain version of attention"""
