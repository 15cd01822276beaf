# Made by tools/stubs.py from the modules: run that.

from .store import TokenStore
from typing import Any
import torch

__all__ = ['Packing', 'packing_problem']
NOT_PACKED: str
class Packing:
    """Calls a model on packs as if each sequence came alone"""
    model: torch.nn.Module
    config: Any
    per_token: bool
    base: Any
    takes: set
    encoder: Any
    own_mask: Any
    types: Any
    causal: Any
    shift: Any

    def __init__(self, model: torch.nn.Module, per_token: bool): ...

    def __call__(self, inputs, body=None):
        """Logits of a pack, see `steps.packed_of`: [sequences, classes], or [1, tokens, classes]"""
def logits_of(output: object) -> torch.Tensor:
    """The logits of an output of a model that got no labels"""
def packing_trial_store(config, max_length, task):
    """A store of three rows: a short one, a longer one (longer than a sliding window), and one of the short one's length"""
@torch.no_grad()
def packing_problem(call: Packing, store: TokenStore, tokens: int=0) -> str:
    """What is wrong when two rows go through the model as a pack"""
