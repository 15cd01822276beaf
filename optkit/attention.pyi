# Made by tools/stubs.py from the modules: run that.

from functools import lru_cache
from typing import Any, NamedTuple
import torch

__all__ = ['INTERFACE', 'RowEnds', 'Attention', 'parts', 'attend_tokens', 'attend_interface', 'attention_kind', 'by_rows']
class RowEnds:
    """Where the rows of a step end, read by attention; while it is not `on`, modules run as in transformers"""
    on: bool
    ends: Any
    longest: Any
    real: Any
    seed: Any
    far: Any
    kernels: Any

    def use(self):
        """Attention goes by these rows from now on. State of calls whose backward pass never came is dropped"""
def row_ends(lengths: list[int], spare: int=0, device: str | torch.device='cpu', **values) -> RowEnds:
    """`RowEnds` of rows of these lengths"""
class Attention(NamedTuple):
    """How a module attends"""
    heads: int
    key_heads: int
    scale: float
    dropout: float = ...
    causal: bool = ...
    window: int = ...
def parts(qkv: torch.Tensor, how: Attention) -> list[torch.Tensor]:
    """Queries, keys and values"""
class _Row(NamedTuple):
    """One row: its tokens, and the entry of the position table for each pair"""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    at: torch.Tensor | None
def row_of(tokens, begin, end, rows, how):
    """The row of tokens `begin` to `end`"""
def share_of(row, tables, how, seed, begin):
    """Softmax of a row [heads, size, size], and the factor of dropout for each pair"""
def plain_forward(rows, qkv, pos_key, pos_query, how, number):
    """Context [tokens, width], 0 for tokens of no row; and what `plain_backward` needs"""
def plain_backward(state, grad, qkv, out, pos_key, pos_query):
    """Gradients of qkv [tokens, width], and of pos_key and pos_query [entries, width] or None"""
def flash_forward(rows, qkv, pos_key, pos_query, how, number):
    """Context [tokens, width] of rows end to end, and what `flash_backward` needs"""
def flash_backward(state, grad, qkv, out, *positions):
    """Gradients of qkv; there are none of positions. The caller hands `qkv` and `out` in again:
the compiler would give memory that only `state` remembers to other tensors."""
def kernels_of(rows: RowEnds, cuda: bool) -> tuple:
    """Which attention runs"""
def attend_tokens(qkv: torch.Tensor, how: Attention, pos_key: torch.Tensor | None=None, pos_query: torch.Tensor | None=None) -> torch.Tensor:
    """Attention of tokens end to end, each row as if it came alone, in the rows in use"""
INTERFACE: str
def attend_interface(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float=0.0, scaling: float | None=None, sliding_window: int | None=None, **kwargs) -> tuple[torch.Tensor, None]:
    """Attention of rows end to end, as transformers calls it. Raises `InputError`."""
def position_names(module):
    """Modules that project DeBERTa's positions by kind of term"""
def mixed(x):
    """A hash of 32 bits (lowbias32)"""
def hashed_dropout(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Dropout whose mask follows from the seed and each number's index"""
class HashedDropout(torch.nn.Dropout):
    """Dropout of a layer by `hashed_dropout`; `rows` has the seed of the step, `own_seed` that of the module"""

    def forward(self, input): ...
def attention_kind(module: torch.nn.Module) -> str | None:
    """How an attention module can be given rows end to end"""
@lru_cache(maxsize=None)
def by_rows(cls: type, kind: str) -> type:
    """The class of an attention module with a forward that goes by the rows in use"""
