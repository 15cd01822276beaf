# Made by tools/stubs.py from the modules: run that.

from .forecast import forecast
from .space import ended
from .training_views import View, training_view, watch
from pathlib import Path
from typing import Any
import optuna

__all__ = ['study_view', 'claims_view', 'watch', 'training_view']
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
