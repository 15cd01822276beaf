# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .progress import Progress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ['watch', 'training_view']
@dataclass(frozen=True)
class Card:
    """What one GPU is doing; None: not reported"""
    name: str
    busy: float | None = ...
    used: int | None = ...
    total: int | None = ...
    power_w: float | None = ...
    limit_w: float | None = ...
    clock_mhz: int | None = ...
    most_mhz: int | None = ...
    celsius: int | None = ...
    slowed: str = ...
@dataclass(frozen=True)
class MachineReading:
    """What a machine is doing"""
    at: float
    cards: tuple[Card, ...] = ...
    cpu: float = ...
    core: float = ...
    memory: float = ...
class MachineProbe:
    """Reads a machine; the management library is opened once"""
    tellers: Any
    names: Any

    def __init__(self): ...

    def number(self, card: str | None) -> int: ...

    def __call__(self) -> MachineReading: ...
def limit_of(readings: list[MachineReading], progress: Progress | None=None) -> Choice:
    """What limits a training now"""
BLUE: str
GREY: str
RED: str
GREEN: str
ORANGE: str
class View:
    """Something to look at: widgets where a notebook listens, words and a picture elsewhere"""
    every: float
    key: Any
    over: bool
    closed: Any
    problem: str
    box: Any
    state: Any

    def __init__(self, key): ...

    def look(self):
        """What there is to show"""

    def words(self) -> str:
        """In lines"""

    def draw(self):
        """A figure of matplotlib"""

    def widgets(self):
        """What is touched"""

    def refresh(self):
        """Show the state in the widgets"""

    def table(self) -> str:
        """The words as HTML"""

    def png(self) -> bytes:
        """The figure as a file"""

    def close(self):
        """No more looks"""
LOOKS: int
def listened_to() -> bool:
    """Whether a kernel serves a notebook, whose front end may show widgets"""
def stacked(parts):
    """Widgets one below the other, no wider than the notebook"""
def plot_layout(height, top, legend, **more): ...
def new_figure(width, height, *grid, **ratios):
    """A figure of matplotlib, and its axes"""
def whole_numbers(*all_axes): ...
def has_values(values): ...
def with_gaps(values): ...
def joined(*lines): ...
def ask_by_file(path, request, on=True):
    """Put a file where the process at work looks for it, or take it away"""
def press(view, act):
    """Do what a button asks for, and show why not"""
class MachineView(View):
    """GPU and host over the last minutes, and what limits now"""
    folder: Any
    gpu: Any
    probe: MachineProbe
    readings: Any
    progress: Any
    plot: Any
    text: Any

    def __init__(self, folder, gpu, keep): ...

    def look(self): ...

    def limit(self) -> Choice:
        """What limits now, from the last five readings"""

    def words(self): ...

    def series(self) -> tuple[list, dict]:
        """What the readings show over time"""

    def draw(self): ...

    def widgets(self): ...

    def refresh(self): ...
def watch(folder: str | Path | None=None, gpu: int | None=None, keep: int=300) -> MachineView:
    """GPU and host at work, and what limits now: loader, host, memory, heat or the GPU itself"""
class TrainingView(View):
    """A training, from its run folder"""
    folder: Path
    history: list
    inode: Any
    offset: int
    over: Any
    plot: Any
    text: Any
    bar: Any
    button: Any

    def __init__(self, folder: str | Path): ...

    def look(self): ...

    def stop(self):
        """Ask the training to end after its current step; it can be resumed"""

    def words(self): ...

    def series(self) -> tuple[list, dict]:
        """What the readings show over the steps; of many, all scores and the last reading stay"""

    def draw(self): ...

    def widgets(self): ...

    def refresh(self): ...
MOST_POINTS: int
def training_view(folder: str | Path) -> TrainingView:
    """A training while it runs, or after it"""
