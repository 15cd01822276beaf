# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .models import CausalHead
from .precision import Precision
from .steps import Batch, MicroBatch
from .store import TokenStore
from collections.abc import Sequence
from typing import Any
import numpy as np, torch

__all__ = ['ATTENTIONS', 'Engine', 'step_weight', 'attention_of', 'attentions_had']
class Engine:
    """A model, its optimizer and a snapshot of its start; built once, reset for every fold and trial"""
    peak: float | None = ...
    head: Choice | None = ...
    layout: Any
    shapes: Any
    reason: str
    notes: tuple
    class_weights: Any
    host_weights: Any
    best: Any
    grad_norm: Any
    used: Any
    micro_batches: int
    body: Any
    skipped: bool
    updating: bool
    gradients_kept: bool
    model: Any
    precision: Precision
    device: Any
    kind: str
    ema: float | None
    zero_grad_none: bool
    max_grad_norm: Any
    label_smoothing: Any
    ranks: Any
    votes: Any
    checked: Any
    compile: Any
    forward: Any
    replays: Any
    optimizer: Any
    scaler: Any
    start: Any
    average: Any

    def __init__(self, model: torch.nn.Module, precision: Precision, fused: bool=True, compile: str | None=None, zero_grad_none: bool=True, max_grad_norm: float=1.0, label_smoothing: float=0.0, optimizer: str='adamw', checkpointing: str='off', ema: float | None=None, masters: str | None=None, ranks: Any=None, votes: Any=None): ...

    def set(self, lr: float | None=None, weight_decay: float | None=None, betas: tuple[float, float] | None=None, eps: float | None=None, max_grad_norm: float | None=None, label_smoothing: float | None=None, class_weights: Sequence[float] | None=None):
        """Values of the next steps"""

    def set_lr(self, lr: float):
        """Learning rate of the next step"""

    def discard_step(self):
        """After a failure inside a step: no gradients, no half-made optimizer state, no mark of an unscaled gradient"""

    def reset(self, lr: float=0.0001, weight_decay: float=0.01, label_smoothing: float | None=None, max_grad_norm: float | None=None, seed: int=0, weights: dict | None=None, rows: int=0, **values):
        """Back to the starting weights with an empty optimizer state, in place.
Raises `InputError` for weights that this model does not have."""

    def causal_head(self, store: TokenStore) -> CausalHead | None:
        """What makes logits of hidden states, tried at the first call"""

    def cut(self, store: TokenStore, step: np.ndarray | list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step, by the engine's `layout`"""

    def halve(self, store: TokenStore, rows: np.ndarray, why: str, longest: int) -> Choice:
        """Smaller micro-batches from now on. Raises `MemoryError` when there is nothing left to halve."""

    def check_store(self, store: TokenStore):
        """`check_tokens`, and the store's padding id into the model, once a store"""

    def step(self, store: TokenStore, step: np.ndarray | list[MicroBatch] | list[Batch]) -> torch.Tensor:
        """Forward, backward, clip and update. What a failure before the update leaves can be cleared with `undo`."""

    def undo(self):
        """After a failure inside a step: as before it. Raises `MemoryError` when weights may have changed already."""

    def averaged(self):
        """The moving average in the place of the weights inside; nothing without one"""

    def predict(self, store: TokenStore, rows: np.ndarray, batch: int=64, on_device: bool=True) -> torch.Tensor:
        """Outputs of rows, in their order, under the moving average of the weights where there is one"""

    def answers(self, store: TokenStore, rows: np.ndarray) -> torch.Tensor:
        """Labels of rows, or of their tokens that have a target"""

    def keep_best(self):
        """Remember the weights as they are"""

    def restore_best(self):
        """Back to the remembered weights"""

    def state(self, best: bool=True) -> dict[str, torch.Tensor]:
        """All tensors that training changes: weights, optimizer, average, best weights"""

    def load_state(self, state: dict[str, torch.Tensor]):
        """In place, as `state` was. Raises `InputError` where it is of another model or optimizer."""

    def preserved(self):
        """Everything is as before when the block ends, see `batch_finder.preserved`"""

    def eager_steps(self):
        """Steps inside are cut by `layout`, or are padded as a micro-batch says"""
def step_weight(store: TokenStore, step: np.ndarray | list[MicroBatch], class_weights: torch.Tensor | None=None) -> float:
    """What the loss of a step is divided by; more than 0"""
def attention_of(engine: Engine, store: TokenStore, rows: int=2) -> Choice:
    """Which attention really runs in a training step; afterwards everything is as before"""
ATTENTIONS: str
def attentions_had(engine: Engine) -> Choice:
    """Which attention can be asked for of the engine's model, for the record of a run"""
