# Made by tools/stubs.py from the modules: run that.

from .base import Choice, InputError
from .hpo import Running
from .space import Space
from .storage import StudyLocation
from .strategies import Course, History, Strategy, StudySize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from optuna.trial import Trial, TrialState
from typing import Any
import optuna

__all__ = ['OtherStudy']
def check_whole(name, value, low, optional=False):
    """Raise `InputError` for what is no whole number of at least `low`"""
@dataclass
class Plan:
    """A search whose arguments are checked"""
    runner: Callable
    space: Space
    shape: StudySize
    strategy: Strategy
    directions: tuple[str, ...]
    n_trials: int | None
    budget: float | None
    identity: dict
    name: str
    sampler: optuna.samplers.BaseSampler | None = ...
    first: tuple[dict, ...] = ...
    workers: int = ...

    @property
    def several(self) -> bool: ...

    @property
    def sign(self) -> int: ...

    @property
    def stride(self) -> int: ...

    def plain(self, value) -> float: ...

    def settings(self) -> dict: ...
def make_plan(runner_or_trainer, space, n_trials=None, budget=None, folds=5, epochs=None, strategy='deferred', sampler=None, name=None, workers=1, seed=0, direction='maximize', first=..., identity=None):
    """The `Plan` of these arguments of `tune`. Raises `InputError`."""
class OtherStudy(InputError):
    """A study of this name that is not the one that is searched"""
    difference: str

    def __init__(self, difference: str): ...
def open_or_make_study(plan: Plan, location: StudyLocation) -> optuna.Study:
    """The study of this name, new or the same as before. Raises `InputError`."""
def choose_sampler(space: Space, trials: int | None, objectives: int=1) -> Choice:
    """The sampler for this space and number of trials"""
HELD: Any
def requeue_interrupted(study: optuna.Study, locked: bool=True, trials: Sequence | None=None) -> int:
    """Queue trials again whose process is gone; their finished folds go with them"""
def interrupt_trial(study, trial):
    """First queue again, then close: a kill between the two leaves one too many, which is swept, not one too few"""
class Interrupts:
    """Keeps a Ctrl-C that Python ignores inside a finalizer or a callback of the garbage collector; main thread only"""
    received: bool
    before: Any

    def __enter__(self): ...

    def check(self): ...

    def __exit__(self, kind, *_): ...
class Search:
    """The part of one process in a study"""
    plan: Plan
    location: StudyLocation
    study: optuna.Study
    on_epoch: Callable | None
    on_trial: Callable | None
    say: Callable[[str], None]
    shape: Any
    exclusive: Any
    worker: Any
    interrupts: Interrupts
    history: History
    in_history: Any
    claimed: Any
    pending: list
    current: Any
    limits: dict
    key: Any
    start: Any
    start_time: Any
    spent_before: Any
    n_ended: Any
    bar: Any
    latest: Any

    def __init__(self, plan: Plan, location: StudyLocation, study: optuna.Study, on_epoch: Callable | None=None, on_trial: Callable | None=None, say: Callable[[str], None]=..., progress: bool=False): ...

    def requested(self, what: str) -> bool:
        """Whether `study.db.stop` was put beside the study's file since this process began, or `study.db.pause` at any time"""

    def check_requests(self):
        """Wait while the study is paused. Raises `StopAsked`, or `KeyboardInterrupt` for a Ctrl-C that was lost."""

    def begin(self, trial: Trial) -> Running:
        """Start a trial or go on with one that waited, with the finished folds of the interrupted trials before it"""

    def fold_values(self, run: Running, params: dict, fold: int) -> Iterator[float]:
        """The runner's values, checked, signed and timed"""

    def report_value(self, run: Running, fold: int, epoch: int, value: float):
        """Store a value now where a strategy reads it, else within a second"""

    def store(self, run: Running, **attrs):
        """Store the values that wait, together, and attributes"""

    def fold_done(self, run: Running, course: Course):
        """Store what a finished fold gave"""

    def fit_batch(self, run: Running, params: dict) -> dict | None:
        """The parameters with a physical batch that fits, by earlier trials and by the forecast"""

    def halve_batch(self, run: Running, params: dict) -> dict | None:
        """The same trial with half the physical batch; its unfinished fold begins again"""

    def report_result(self, trial: Trial, values=None, state: TrialState | None=None):
        """`study.tell`, in which a sampler that has tried everything may end the study, as in `study.optimize`"""

    def finish(self, run: Running, verdict, build_seconds: float):
        """Report a complete trial with the mean over its folds, a stopped one as pruned; or let it wait"""

    def fail(self, run: Running, reason: str, constraint: str | None, amount: float=0.0, state: TrialState | None=None):
        """The trial has no value; its parameters are infeasible"""

    def refuse(self, run: Running, error: optuna.TrialPruned):
        """As in `study.optimize`: the space or the runner raised it for parameters that it does not want"""

    def run_trial(self, trial: Trial, params: dict | optuna.TrialPruned):
        """Run one trial to completion and report its result. Errors not caused by the trial itself propagate."""

    def run(self, wait: float=0.5):
        """Run trials until enough have ended or the time is spent"""

    def close(self):
        """Give back what was claimed, and queue lost trials again"""

    def trials(self) -> list: ...

    def count(self, trials=None) -> int: ...

    def left(self) -> float:
        """What is left of the budget"""

    def sync(self, trials=None):
        """Add trials that ended since to the history, and those that wait"""

    def claim(self) -> Trial | None:
        """The next trial, if one more is wanted"""

    def draw_params(self, trial: Trial) -> dict:
        """The parameters of a trial. Raises `TrialPruned` where the space refuses them or does not hold those of the queue."""

    def take_waiting(self, last: bool):
        """The waiting trial that gets its next fold now"""

    def close_waiting(self):
        """No waiting trial gets a further fold: they end, with the values that they have"""

    def time_is_short(self) -> bool:
        """Whether what is left of the budget is about what the folds of two waiting trials take"""

    def next_trial(self):
        """A trial to run: of those at hand, one whose engine is built already"""
class Misfit(optuna.TrialPruned):
    """Parameters from the queue that the space does not hold"""
def next_with_key(keys: Sequence, current) -> int:
    """The first with the current key, else the first of the commonest key"""
