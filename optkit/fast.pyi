# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .engine import Engine
from .precision import tf32_set
from .slots import PlacedPacking, Shape
from .store import TokenStore
from typing import Any
import numpy as np, torch

__all__ = ['WHOSE_ATTENTION', 'FlatAdamW', 'fast_problem', 'end_to_end_problem', 'padded_shapes', 'FastEngine', 'places_problem', 'keep_compiled']
class FlatAdamW(torch.optim.AdamW):
    """AdamW over arrays that hold all weights of a group; learning rate, clipping and the count of steps are on the device"""
    flat: list
    steps: list
    max_norm: Any
    norm: Any

    def __init__(self, groups): ...

    @property
    def numbers(self):
        """What a captured update holds as numbers"""

    def step(self, closure=None):
        """Clip to `max_norm`, update, clear the gradients"""

    def attach(self):
        """Point gradients at the long arrays again, should something have put others in their place"""

    def zero_grad(self, set_to_none: bool=True):
        """Clear the gradients, which stay where they are"""

    def load_state_dict(self, state_dict):
        """Take a state over in place"""
def fast_problem(kind: str, scaler: bool, ranks: bool, checkpointing: str, quantised: bool, formats: set) -> str:
    """Why an engine's steps stay plain"""
def end_to_end_problem(kinds: set, device: str, capability: tuple[int, int] | None, compute: str, depth: int) -> str:
    """Why rows need places inside attention, and cannot be taken end to end by flash attention"""
def padded_shapes(lengths: np.ndarray, rows: int, tokens: int=4096) -> Choice:
    """One shape for each length of the ladder, for models whose rows stay padded"""
WHOSE_ATTENTION: tuple
class FastEngine(Engine):
    """An engine whose steps are built once for a few shapes"""
    at_once: Any
    most: int
    ladder: Any
    dynamic: bool
    beside: bool
    end_to_end: bool
    attention: str
    graphs: Any
    layers: Any
    reason: Any
    compiled: dict
    positions: dict
    notes: list
    built: Any
    known: Any
    calls: dict
    built_s: float
    full: Any
    forward_in_places: Any
    optimizer: FlatAdamW
    total: Any
    smoothing: Any
    pool: Any
    weights: Any
    grad_norm: Any
    micro_batches: Any
    updating: bool

    def __init__(self, model, precision, at_once: int=64, most: int=4, least: int=32, octave: int=2, graphs: bool | None=None, layers: bool | None=None, beside: bool=True, end_to_end: bool=True, dynamic: bool=True, attention: str='optkit', **kwargs): ...

    def set(self, **values):
        """Values of the next steps, see `Engine.set`; they go into tensors that the graphs read"""

    def reset(self, *args, rows: int=0, **values):
        """As `Engine.reset`; `rows`: of a full step of what follows, so that its shapes do not hang on which step comes first"""

    def set_lr(self, lr: float):
        """Learning rate of the next step"""

    def call_for(self, store: TokenStore):
        """How the model is called on this store's rows: `PlacedPacking`, or the model itself on padded rows"""

    def shapes_for(self, store: TokenStore, rows: int) -> tuple[Shape, ...]:
        """The shapes for steps of that many rows, in equal parts of at most `at_once`, chosen once from the lengths of the store"""

    def halve(self, store: TokenStore, rows: np.ndarray, why: str, longest: int) -> Choice:
        """Fewer rows at once from now on. Raises `MemoryError` when it was one."""

    def own_cut(self) -> Choice | None:
        """Rows at once, where steps are not plain"""

    def step(self, store: TokenStore, step: np.ndarray | list) -> torch.Tensor:
        """Forward, backward, clip and update, from shapes that are built at their first use"""

    def own_attention(self, store: TokenStore) -> Choice | None:
        """Attention in places or end to end, where rows go that way"""

    def plainly(self):
        """Steps inside are those of the plain engine, on rows that are padded as a micro-batch says: what a measurement of padded rows needs"""

    def predict(self, store: TokenStore, rows: np.ndarray, batch: int=64, on_device: bool=True):
        """Outputs of rows, in their order, see `Engine.predict`"""
@torch.no_grad()
@tf32_set(False)
def places_problem(engine, call: PlacedPacking, store: TokenStore, exact: bool=True) -> str:
    """What is wrong when three rows go through the model in places"""
def keep_compiled(folder) -> dict:
    """Let the compilers of torch and Triton keep what they make in `folder`, unless the user's variables name one. What is compiled before the call stays where it is; a further call goes for what is compiled from then on. A folder that a compiler's command line would take apart, such as one with a blank, is not used; torch's own cache is."""
