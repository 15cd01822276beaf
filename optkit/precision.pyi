# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .cards import Hardware
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
import torch

__all__ = ['attention_ran', 'Precision', 'choose_precision']
@contextmanager
def tf32_set(on: bool):
    """TF32 for products of FP32 numbers inside the block, for the whole process; restored after it, also after an error"""
FORMATS: dict
CPU_BF16: tuple
def choose_format(hw: Hardware, prefer: str | None=None) -> Choice:
    """The number format of matrix products: 'bf16', 'fp16' or 'fp32', one of which `prefer` may ask for.
`InputError` if the machine cannot do it."""
def choose_tf32(hw: Hardware, compute: str, tf32: bool | None=None) -> Choice:
    """Whether products of FP32 numbers may use TF32 where others are in the format `compute`; `tf32` asks for it or
against it. `InputError` where the device has none."""
def choose_scaler(compute: str) -> Choice:
    """Whether the loss has to be scaled in that format so that small gradients survive"""
def choose_weights(compute: str, weights: str | None=None, masters: str | None=None) -> Choice:
    """The number format of the weights, and so of gradients and optimizer state, where products are in the format
`compute`: 'fp32', or 'bf16' if `weights` asks for it"""
FP8_WIDTH: int
def fp8_fits(inputs: int, outputs: int, least: int=...) -> str:
    """Why a linear layer of that shape stays as it is; empty where fp8 is possible and pays"""
def choose_fp8(hw: Hardware, widths: list[tuple[int, int]]=..., fp8: bool=False, problem: str='', compiled: bool=False) -> Choice:
    """Whether wide linear layers multiply in fp8; `InputError` where it was asked for and cannot be"""
BACKENDS: dict
def sdpa_obstacles(hw: Hardware, compute: str, mask: bool=False, dropout: float=0.0, head_size: int=64) -> dict[str, str]:
    """For each backend of torch's attention, why it cannot take a training step's calls"""
def choose_sdpa(hw: Hardware, compute: str, fixed_shapes: bool=False, **calls) -> Choice:
    """The attention backends of torch in the order to try them"""
def attention_ran(call: Callable) -> dict[str, int]:
    """How often each of torch's attention backends ran in `call()`"""
def import_problem(package: str) -> str:
    """Why a package cannot be imported, in one line; empty if it can"""
def choose_attention(implementation: str | None=None, problem: str | None=None) -> Choice:
    """The `attn_implementation` to load a model with: what was asked for if its package works, else 'sdpa'.
`problem`: why the package cannot be imported; None: it is looked up"""
def model_attentions(model: torch.nn.Module) -> tuple[str, ...]:
    """Each `attn_implementation` that a model of transformers has; packages that it needs may be missing"""
def set_attention(model: torch.nn.Module, implementation: str):
    """Let a model of transformers take the `attn_implementation` that was asked for; `InputError` with what it has
where it would take another one"""
def text_config(model):
    """The configuration of the text part of a model of transformers, or of its configuration: a model of texts and
images keeps it in `text_config`; else the whole one"""
def model_facts(model: torch.nn.Module) -> dict:
    """Widths of a model's linear layers, convolutions, size of a head, dropout of attention: what choices depend on"""
def held_format(model: torch.nn.Module) -> str:
    """The format of most of a model's weights, as they are: what its products see where nothing is cast"""
CHANNELS_LAST: Any
def choose_cudnn_benchmark(convolutions: int=0, deterministic: bool=False) -> Choice:
    """Whether cuDNN tries its algorithms for a model's convolutions; not where the same bits each time are asked for"""
def choose_deterministic(deterministic: bool=False) -> Choice:
    """Whether torch has to use algorithms that give the same bits each time, as asked for"""
@contextmanager
def cudnn_set(benchmark: bool, deterministic: bool):
    """cuDNN's benchmark mode and deterministic algorithms inside the block, everything as before after it"""
@dataclass(frozen=True, repr=False)
class Precision:
    """How to compute on one machine, each choice with its reason"""
    compute: Choice
    tf32: Choice
    scaler: Choice
    sdpa: Choice
    device: str
    weights: Choice = ...
    fp8: Choice = ...
    cudnn_benchmark: Choice = ...
    deterministic: Choice = ...
    channels_last: Choice = ...
    held: str = ...

    @property
    def dtype(self): ...

    @property
    def seen(self):
        """The format that products and attention see"""

    def autocast(self):
        """A fresh context for a forward pass: autocast to `dtype`, or nothing for FP32"""

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """A new gradient scaler for fp16, else None"""

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with weights in the chosen format and wide layers in fp8"""

    def applied(self):
        """Set TF32, cuDNN, determinism and the attention backends inside the block, restore all after it.
May be nested and used again. The switches are the whole process's: not for two threads at once."""
def choose_precision(hw: Hardware, prefer: str | None=None, tf32: bool | None=None, fixed_shapes: bool=False, weights: str | None=None, fp8: bool=False, compiled: bool=False, deterministic: bool=False, model: torch.nn.Module | None=None, mask: bool=False, held: str | None=None, masters: str | None=None) -> Precision:
    """How to compute on `hw`; a pure function, `InputError` for what the machine cannot do"""
