# Made by tools/stubs.py from the modules: run that.

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
import torch

__all__ = ['ENCODER_SHAPES', 'Measured', 'Roofline', 'model_shapes', 'roofline']
def si(value: float, unit: str) -> str:
    """`value` with the prefix that suits it: 7.91e14 FLOP/s is '791 TFLOP/s'"""
@dataclass(frozen=True, repr=False)
class Measured:
    """One product, copy or launch, timed several times"""
    name: str
    what: str
    seconds: tuple
    amount: float
    unit: str
    peak: float | None = ...

    @property
    def values(self):
        """A value per repeat, in `unit`"""

    @property
    def p50(self): ...

    @property
    def share(self):
        """Median as a share of the table's peak; None without one"""

    @property
    def words(self):
        """Median, fastest and slowest, and the share of the peak, in words"""

    @property
    def record(self):
        """The fields of a record of `save_records`; `samples_per_s` holds FLOP/s or bytes/s"""
@dataclass(frozen=True, repr=False)
class Roofline:
    """What a device reaches, measured"""
    card: str
    rows: tuple
    left_out: tuple = ...

    def ceiling(self, format: str) -> float | None:
        """The best of its medians over all shapes"""

    def records(self):
        """Rows for `save_records`"""
def product_formats(device: str, capability: tuple[int, int] | None=None) -> tuple[str, ...]:
    """The formats whose products are worth measuring on 'mps', 'cpu', or a 'cuda' device of that capability"""
def matrix_product(name: str, device: str, m: int, n: int, k: int) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    """A function that multiplies random numbers with FP32 accumulation, and the two operands, the second one transposed"""
def launches_for(once: float, target: float=0.05) -> int:
    """How many launches of `once` seconds fill a sample of `target` seconds; 1 to 2000, which a graph holds easily"""
ENCODER_SHAPES: tuple
def model_shapes(model: torch.nn.Module, tokens: int) -> dict[tuple, int]:
    """The products of a model's linear layers"""
def roofline(device: str='cpu', side: int | None=None, copied: int | None=None, repeats: int=10, shapes: Iterable[tuple] | None=None) -> Roofline:
    """What this device reaches in products, copies and launches, against the table where it has the card"""
class Product(NamedTuple):
    """A matrix product of the roofline record"""
    format: str
    m: int
    n: int
    k: int
    rate: float

    @property
    def intensity(self): ...
def recorded_roofline(card: str, folder: Path | None):
    """(products, largest copy rate in bytes a second or None) of the roofline record of a card in `folder`"""
