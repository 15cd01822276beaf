# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .table import Table
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
import numpy as np, torch

__all__ = ['word_tokenizer', 'example_table', 'TokenStore', 'tokenise', 'save_store', 'load_store', 'with_labels']
def word_tokenizer(size: int=200):
    """One token a word: w0, w1, ... up to `size` words"""
def example_table(rows: int=200, classes: int=2, seed: int=0, median: int=14) -> Table:
    """Pairs of made-up texts whose label can be learnt; lengths are lognormal around `median` words"""
class _Encoded(NamedTuple):
    """Some rows in flat arrays"""
    tokens: np.ndarray
    types: np.ndarray | None
    targets: np.ndarray | None
    lengths: np.ndarray
    full_lengths: np.ndarray
    lost: int
@dataclass(frozen=True, eq=False)
class TokenStore:
    """Rows of token ids in one flat array, with labels; everything on one device"""
    tokens: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor
    type_ids: torch.Tensor | None
    lengths: np.ndarray
    classes: tuple[str, ...]
    max_length: int
    pad_id: int
    full_lengths: np.ndarray
    task: str = ...
    targets: np.ndarray | None = ...
    path: str | None = ...
    numbers: np.ndarray | None = ...
    lost_labels: int = ...

    def __len__(self): ...

    @property
    def truncated(self): ...

    @property
    def longest(self): ...

    @property
    def longest_row(self): ...

    @property
    def nbytes(self): ...

    def weight(self, rows: np.ndarray) -> int:
        """What the loss of these rows is divided by"""

    def to(self, device: str | torch.device) -> TokenStore:
        """The same store on another device"""
def checked_whole(name: str, value: object, least: int) -> int:
    """A setting as an int. Raises `ValueError`."""
def tokenise(table: Table, tokenizer: object, max_length: int, progress: bool=True, cache: str | Path | None=None) -> TokenStore:
    """Tokenise every row once. Raises `InputError` for a tokenizer, a length or a text that cannot be used,
before anything is written."""
def store_key(table: Table, tokenizer: object, max_length: int) -> str:
    """A hash of everything that decides the content of a store"""
def save_store(store: TokenStore, path: str | Path, key: str):
    """Write a store in one step: there is the whole file or none. Who may read it is what the process grants to any
file of its own."""
def map_store(path: str | Path, key: str | None=None, check: bool=True) -> tuple[TokenStore, int]:
    """A store from one open file, so that what replaces the file meanwhile does not mix with it"""
def load_store(path: str | Path, key: str | None=None, check: bool=True) -> TokenStore:
    """A store from its file. Raises `InputError` for a file that is missing, cut, damaged or of other content."""
def choose_device(store_bytes: int, free_bytes: int | None, share: float=0.1) -> Choice:
    """Where the tokens lie, with the reason"""
def to_device(store: TokenStore, device: str='cuda') -> tuple[TokenStore, Choice]:
    """The store where it belongs, with the reason"""
def with_labels(store: TokenStore, labels: np.ndarray, task: str, classes: tuple[str, ...]=...) -> TokenStore:
    """The same texts with other labels. Raises `InputError` for labels that do not fit the task."""
