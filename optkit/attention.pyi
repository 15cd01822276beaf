# Made by tools/stubs.py from the modules: run that.

from typing import Any
import torch

__all__ = ['FARTHEST', 'Places', 'skew', 'pair_bias', 'pair_bias_back', 'attend_in_places', 'attention_kind', 'in_places']
class Places:
    """Where the rows of a step lie, read by attention modules; while it is not `on`, they run as in transformers"""
    on: bool
    slots: tuple
    index: Any
    inverse: Any
    held: Any
    real: Any
    beside: bool
    ends: Any
    longest: Any
    kernels: Any
    seed: Any
    masks: Any
    far: Any
    onehot: Any
    native: Any
    work: Any

    def use(self):
        """Attention goes by these places from now on. State of calls whose backward pass never came is dropped"""
def move(tokens: torch.Tensor, index: torch.Tensor, keep: torch.Tensor | None=None) -> torch.Tensor:
    """Rows of `tokens` in the order of `index`; 0 where `keep` is False"""
def position_rows(module, lengths, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the position table for the distances -l to l - 1 of each length, end to end"""
def skew(table: torch.Tensor, shift: int) -> torch.Tensor:
    """Columns of distances as columns of pairs"""
FARTHEST: Any
def pair_bias(c2p: torch.Tensor | None, p2c: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """Bias of the scores from tables of distances"""
def pair_bias_back(grad: torch.Tensor, c2p: bool, p2c: bool) -> list:
    """Gradients of both tables from that of the bias"""
class Lanes:
    """The slots of a call in parallel: short kernels of one fill what those of another leave free"""
    main: Any
    side: Any

    def __init__(self, places, device): ...

    def __enter__(self): ...

    def __exit__(self, *exc): ...
def placed_forward(places: Places, qkv: torch.Tensor, pos_key: torch.Tensor | None, pos_query: torch.Tensor | None, heads: int, factor: float, dropout: float, number: int=0):
    """Attention of tokens end to end, in their places"""
def placed_backward(state, grad: torch.Tensor, *inputs):
    """The backward pass of `placed_forward`"""
HALF: tuple
def whole_forward(places, qkv, pos_key, pos_query, heads, factor, dropout, number):
    """Context [tokens, width] of rows end to end, and what `whole_backward` needs"""
def whole_backward(state, grad, qkv, out, *positions):
    """Gradients of qkv; there are none of positions. The caller hands `qkv` and `out` in again:
the compiler would give memory that only `state` remembers to other tensors."""
def attend_in_places(qkv: torch.Tensor, heads: int, factor: float, dropout: float=0.0, pos_key: torch.Tensor | None=None, pos_query: torch.Tensor | None=None) -> torch.Tensor:
    """Attention of tokens end to end, each row as if it came alone, in the places in use"""
def attention_kind(module: torch.nn.Module) -> str | None:
    """Whether an attention module can be given places"""
def in_places(cls: type, kind: str, native: bool=False) -> type:
    """The class of an attention module with a forward that goes by `places`"""
class Taken(torch.autograd.Function):
    """What is in places, back at its tokens; 0 for tokens of no row. Each place goes to one token, so the backward pass
gathers too, where that of an `index_select` would add up in any order"""

    @staticmethod
    def forward(ctx, placed, index, inverse, held, real): ...

    @staticmethod
    def backward(ctx, grad): ...
class Part(torch.nn.Module):
    """In place of a projection: its slice of the last dimension of what was projected before"""
    start: Any
    stop: Any

    def __init__(self, number, width): ...

    def forward(self, projected): ...
def without_projections(module: torch.nn.Module) -> torch.nn.Module:
    """An attention module as it is, dropout and all, without weights. It takes queries, keys and values side by side
in place of hidden states, and projected positions, queries first, in place of embeddings"""
stand_in: Any
def renew(copy: torch.nn.Module, module: torch.nn.Module):
    """Give a copy the present state of its module; set only what differs, so that compiled code stays valid"""
class SlotwiseAttention(torch.autograd.Function):
    """Run `run` on the `tokens` of each slot, slots in parallel; the results lie end to end [places, width].
Each slot has its own inputs; shared ones lie on the memory of the real ones. So its backward pass stays on its
stream: autograd adds nothing up and waits for nothing across streams. What one stream makes, another touches
only behind the fork or the join of `Lanes`. All of it is held until the join, and what is freed is only used
again on its stream, behind the next fork."""

    @staticmethod
    def forward(ctx, run, places, back, tokens, shared): ...

    @staticmethod
    def backward(ctx, grad): ...
