# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .batch_finder import BatchPlan
from .engine import Engine
from .store import TokenStore
from .table import ByValue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
import numpy as np, torch

__all__ = ['LAYOUT_LABELS', 'LAYOUTS', 'batch_of', 'MicroBatch', 'Step', 'pack', 'pack_budget', 'Layout', 'micro_batches', 'sample_order', 'grouped_order', 'rank_share', 'steps', 'padded_tokens', 'real_tokens', 'packed_of', 'Batch', 'gather']
def batch_of(store: TokenStore, rows: np.ndarray, pad_to: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gather rows of a store into padded model inputs; labels are [batch], or [batch, pad_to] of tokens"""
LAYOUT_LABELS: Any
LAYOUTS: Any
@dataclass(frozen=True, eq=False)
class MicroBatch(ByValue):
    """Rows that go through the model together: [rows, width] with padding, or [1, width] where they lie end to end"""
    rows: np.ndarray
    width: int
    offsets: np.ndarray | None = ...

    @property
    def tokens(self): ...

    @property
    def pad_to(self): ...
class Step(list):
    """The micro-batches of one optimizer step; `rows` are those of the whole step, on all ranks"""
    rows: np.ndarray

    def __init__(self, micro: Iterable[MicroBatch], rows: np.ndarray): ...
def pack(lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Few even packs: each row goes to the emptiest, the longest first; where that overflows, to the first with room"""
def pack_budget(physical: int, max_length: int) -> int:
    """A budget whose tokens, and whose square table of attention scores, are no more than those of a padded micro-batch"""
SIZES: Any
@dataclass(frozen=True)
class Layout:
    """How rows are cut into micro-batches"""
    name: str = ...
    rows: int | None = ...
    tokens: int | None = ...
    table: tuple[tuple[int, int], ...] | None = ...
    eval_rows: int = ...

    def call(self, engine: Engine, store: TokenStore, tokens: int=0):
        """How the engine's model is called. Packs are tried out at the first call and whenever one is longer than before.
Raises `InputError` for a model that is not packed rightly."""

    def fitted(self, engine: Engine, store: TokenStore, effective: int, headroom: float=0.02, limit: int | None=None) -> tuple[Layout, list[tuple[str, Choice]], BatchPlan | None]:
        """Measure the sizes that this layout leaves open, and those of evaluation; the engine stays as it was"""

    def named(self, name: str) -> Layout:
        """The layout of that name, with the sizes that it reads"""

    def resized(self, **sizes) -> Layout:
        """With other sizes; a table goes where rows become fewer"""

    def cut(self, rows: np.ndarray, lengths: np.ndarray, max_length: int) -> list[MicroBatch]:
        """Even micro-batches, or by the table as many rows as each length lets through"""

    def halved(self, why: str, longest: int, whole: int=1) -> Choice:
        """The same optimizer step in more micro-batches. Raises `MemoryError` when there is nothing left to halve."""

    def halved_evaluation(self, why: str) -> Choice:
        """Fewer rows at once in evaluation. Raises `MemoryError` when there is nothing left to halve."""

    def within(self, fitted: 'Layout | None') -> Layout:
        """This layout, no larger than one that fitted"""

    def sized(self, rows: int, max_length: int) -> Layout:
        """With the tokens of a pack filled in, so that a short last step of an epoch is packed like the others"""
def layout_of(name: str, physical: int | None=None, max_tokens: int | None=None, table: tuple | None=None) -> Layout:
    """The layout of separate values, as earlier versions had them; those that it does not read are dropped"""
def micro_batches(rows: np.ndarray, lengths: np.ndarray, physical: int, layout: str, max_length: int, *sizes) -> list[MicroBatch]:
    """`Layout.cut` with separate values, as earlier versions had it"""
def sample_order(rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The order of a plain seeded random sampler"""
def grouped_order(rows: np.ndarray, lengths: np.ndarray, effective: int, seed: int, epoch: int) -> np.ndarray:
    """The order of Hugging Face's `group_by_length`: stretches of up to 50 steps, each sorted from long to short"""
def rank_share(rows: np.ndarray, lengths: np.ndarray, layout: str, rank: int, ranks: int) -> np.ndarray:
    """Rows that one of several processes computes: a row more or less; where order is free, long and short ones alike"""
def row_numbers(store: TokenStore | None, rows: Any, what: str='rows') -> np.ndarray:
    """Row numbers as an array. Raises `InputError`."""
def is_cut(step: Any) -> bool:
    """Whether a step is given as micro-batches, and not as row numbers"""
def step_of(store: TokenStore, rows: np.ndarray, layout: Layout, rank: int=0, ranks: int=1) -> Step:
    """One optimizer step, cut into micro-batches"""
def step_rows(store: TokenStore, rows: np.ndarray, effective: int, *, seed: int=0, epoch: int=0, first_step: int=0, grouped: bool=False) -> Iterator[np.ndarray]:
    """The rows of each optimizer step of one epoch. Raises `ValueError` at once for settings that cannot be."""
def steps(store: TokenStore, rows: np.ndarray, effective: int, *, layout: Layout | str=..., seed: int=0, epoch: int=0, rank: int=0, ranks: int=1, first_step: int=0, **earlier) -> Iterator[Step]:
    """The optimizer steps of one epoch, with the samples of a plain loop. Wrong settings raise `ValueError` at once."""
def padded_tokens(step: list[MicroBatch]) -> int:
    """Tokens that go through the model, padding included"""
def real_tokens(store: TokenStore, step: list[MicroBatch]) -> int:
    """Tokens without padding"""
def packed_of(store: TokenStore, micro: MicroBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows of a store end to end in one row of tokens; labels are [batch], or [1, tokens] of tokens.
Inputs also hold `segments` and `position_ids` of each token, `offsets` [batch + 1] and the number `longest`."""
@dataclass(frozen=True, eq=False)
class Batch(ByValue):
    """A micro-batch whose inputs are gathered"""
    inputs: dict
    labels: torch.Tensor
    rows: np.ndarray
    width: int
    offsets: np.ndarray | None = ...
    tokens: ClassVar[Any]
    pad_to: ClassVar[Any]

    def pin_memory(self, device: str | None=None) -> 'Batch': ...

    def to(self, device: torch.device | str, non_blocking: bool=False) -> 'Batch': ...
def gather(store: TokenStore, micro: MicroBatch) -> Batch:
    """The inputs and labels of a micro-batch"""
