# Made by tools/stubs.py from the modules: run that.

from .base import Choice
from .forecast import forecast
from .progress import Progress
from .space import ended
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import optuna

__all__ = ['watch', 'training_view', 'study_view', 'claims_view']
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
def trial_rows(study: optuna.Study) -> list[dict]:
    """What a view shows of trials"""
class StudyView(View):
    """A study, from its file"""
    every: float
    path: Path
    name: Any
    n_trials: Any
    upto: Any
    file: Any
    study: Any
    inode: Any
    ended: Any
    importance: Any
    forecast: Any
    sign: Any
    over: Any
    maximise: Any
    settings: Any
    plot: Any
    text: Any
    slider: Any

    def __init__(self, path, name, n_trials): ...

    def look(self): ...

    def plain(self, value: float) -> float:
        """A value as it is read"""

    def rows(self) -> list[dict]:
        """The trials up to the one that is looked back to"""

    def best(self) -> dict | None:
        """The best complete trial"""

    def words(self): ...

    def pause(self):
        """No new trial begins until `go_on`"""

    def go_on(self):
        """Trials begin again"""

    def stop(self):
        """Processes that work on the study end after the epoch that runs; the same call of `tune` goes on"""

    def draw(self): ...

    def widgets(self): ...

    def refresh(self, slide: bool=True):
        """Show the state in the widgets"""
SHOWN_CURVES: int
def study_view(path: str | Path, name: str | None=None, n_trials: int | None=None) -> StudyView:
    """A study while it runs, in whichever process, or after it"""
class ClaimsView(View):
    """Recorded factors beside the claims"""
    folder: Any
    picked: Any
    over: bool
    plot: Any
    text: Any

    def __init__(self, folder, label, card, verdict): ...

    def look(self): ...

    def values(self, what: str) -> list[str]:
        """What there is to pick"""

    def rows(self):
        """The records that are picked, by factor"""

    def words(self): ...

    def table(self) -> str:
        """The records as HTML, sixty at most"""

    def draw(self): ...

    def widgets(self): ...

    def refresh(self): ...
def claims_view(folder: str | Path | None=None, label: str | None=None, card: str | None=None, verdict: str | None=None) -> ClaimsView:
    """What was recorded beside what was claimed, to filter and to hover over"""
