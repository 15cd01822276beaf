# Made by tools/stubs.py from the modules: run that.

from .base import Choice
import torch

__all__ = ['MASTERS', 'OPTIMIZERS', 'CHECKPOINTING', 'choose_8bit', 'make_optimizer', 'choose_checkpointing', 'set_checkpointing']
MASTERS: tuple
OPTIMIZERS: tuple
def choose_8bit(device: str, torchao: str, bitsandbytes: str) -> Choice:
    """The package of the 8-bit optimizer, with the reason. Raises `InputError` where there is none."""
def round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """Each value as one of its two neighbours in bf16, with odds by distance: noise below its last bit, then a cut"""
class MasterAdamW(torch.optim.AdamW):
    """AdamW whose small updates of weights in bf16 are not lost; other weights are updated as ever"""
    masters: str
    piece: int

    def __init__(self, params, masters: str='fp32', piece: int=..., **kwargs): ...

    def ready(self, p: torch.Tensor, group: dict) -> dict:
        """The state of a weight, made where there is none"""

    @torch.no_grad()
    def step(self, closure=None): ...

    def renew(self):
        """Masters from the weights, which somebody else has changed"""

    def load_state_dict(self, state_dict: dict):
        """As of torch, which would give moments and masters the format of the weights"""
def make_optimizer(model: torch.nn.Module, kind: str='adamw', fused: bool=True, device: str='cpu', masters: str | None=None):
    """AdamW over the weights of a model. Raises `InputError` for a kind that is unknown or cannot be had."""
CHECKPOINTING: tuple
def choose_checkpointing(fits: dict[str, int], effective: int, enough: int=8, seconds: dict[str, float] | None=None) -> Choice:
    """The mode that costs least and lets enough rows through; where steps were timed, the fastest, or one that computes
less and takes at most 2% longer. Raises `MemoryError` where not even one row fits."""
def set_checkpointing(model: torch.nn.Module, mode: str):
    """Switch gradient checkpointing of a model. Raises `InputError` for a model that has none."""
