# Made by tools/stubs.py from the modules: run that.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ['Ratio', 'median_ratio', 'Variant', 'Comparison', 'Usage', 'measure_usage', 'compare', 'SimulatedClock']
@dataclass(frozen=True, repr=False)
class Ratio:
    """How many times faster, as a median with an interval"""
    p50: float
    low: float
    high: float

    @property
    def width(self):
        """Half the interval, relative to the median"""

    def covers(self, value: float): ...
def sign_rank(n: int, alpha: float) -> int:
    """The rank k of the order statistics [k, n+1-k] of `n` values that hold the median but for `alpha`; 0: too few"""
def median_ratio(ratios: Sequence[float], confidence: float=0.99, seed: int=0, resamples: int=2000) -> Ratio:
    """The median of `ratios` with its interval; with fewer rounds than `confidence` needs, the interval is the extremes"""
def interim_looks(min_rounds: int, max_rounds: int, confidence: float) -> tuple[list[int], float, float]:
    """After which rounds to look, and the confidence of an early look and of the end, for that `confidence` of them all"""
@dataclass(frozen=True)
class Variant:
    """Something to time: `step(round)` does the work once"""
    name: str
    step: Callable[[int], None]
    setup: Callable[[], None] | None = ...
@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` measured; `names[0]` is the baseline"""
    names: tuple
    seconds: dict
    stopped: str
    rounds: int
    warm_up: int
    confidence: float
    each: float = ...
    seed: int = ...
    setup_seconds: dict = ...
    warm_up_seconds: dict = ...
    peak_bytes: dict = ...
    step_bytes: dict = ...
    numbers: tuple = ...
    disturbed: tuple = ...
    watched: dict = ...
    usage: dict = ...

    def ratio(self, name: str, against: str | None=None) -> Ratio:
        """How many times faster `name` is, from the rounds' own ratios"""

    def before(self, name: str) -> Ratio:
        """How many times faster `name` is than the variant before it: what one more step of a ladder gave"""

    def rows(self):
        """A row for each variant: name, median seconds, ratio to the baseline, ratio to the row before"""

    def plot(self, title: str, machine: str | None=None, by_time: bool=False) -> Any:
        """Draw how many times faster each variant is than the baseline, with its interval; machine and date in the title"""
def rounds_words(rounds: int):
    """How often something was measured"""
def interval_words(confidence: float):
    """What stands between the ends of an interval; a single round has none"""
def machine_and_date(machine: str | None=None) -> str:
    """What ran a measurement, and the day, for the title of a chart"""
def synchroniser(device: str) -> Callable:
    """A function that waits until the device ('cpu', 'cuda', 'cuda:1', 'mps') has done its work"""
def settled(times: Sequence[float]) -> bool:
    """Whether the last step was not much faster than the best before it: compilation and warm-up are over"""
def order(names: Iterable, number: int) -> list:
    """The order of a round: rotated by one each round, reversed after each full turn, so that everyone follows everyone"""
class Reading(NamedTuple):
    """One look at the machine; seconds are totals since it was started"""
    at: float
    busy: float = ...
    process: float = ...
    stolen: float = ...
    held_back: float = ...
    slowed: str = ...
    tenants: frozenset = ...
    clock_mhz: int | None = ...
    temperature_c: int | None = ...
def disturbance(before: Reading, after: Reading, cores: int) -> str:
    """What disturbed the time between two readings of a machine with so many processors, in words; empty if quiet"""
class Watch:
    """Reads the machine between rounds on a device"""
    process: Any
    cores: Any
    query: Any
    readings: list

    def __init__(self, device: str='cpu'): ...

    def read(self) -> Reading:
        """A `Reading` of this moment"""

    def judge(self, force: bool=False) -> str | None:
        """What disturbed the time since the last reading; empty if it was quiet, None where it is too short and not `force`"""

    def summary(self) -> dict:
        """Lowest and highest clock, temperature, and number of other processes on the GPU if there were any"""
@dataclass(frozen=True, repr=False)
class Usage:
    """What one step takes beside its time; None where it cannot be read"""
    kernels: int | None = ...
    busy: float | None = ...
    gpu_utilization: float | None = ...
    cpu_cores: float | None = ...
    joules: float | None = ...
def kernel_use(events: list[dict]) -> tuple[int, float]:
    """Number of kernels on the GPU in `traceEvents` of the profiler, and the seconds in which it computed or copied,
overlapping work counted once"""
def profiled(call: Callable, *activities: Any) -> Any:
    """The profiler of torch after running `call()` under it, without its messages on the terminal"""
def measure_usage(step: Callable[[int], Any], device: str, seconds: float=1.0, number: int=0) -> Usage:
    """The `Usage` of a step: runs it for `seconds` and, on a GPU, once under the profiler"""
@dataclass
class _Rounds:
    """The rounds of a comparison: those that count, and those that were disturbed"""
    variants: dict
    timed: Callable
    plan: tuple
    first: int
    watch: Any
    clock: Callable
    number: Any
    seconds: Any
    numbers: list
    disturbed: list
    pending: list
    spare: Any

    def one(self):
        """Run one more round; it is pending until it is certain whether it was disturbed"""

    def sort_out(self, due, last):
        """Count the pending rounds or drop those that were disturbed; False if that cannot be decided yet"""

    def run(self, budget_s, width, seed, progress):
        """Rounds until enough is known; returns why it stopped, and the confidence of the look at which it did"""
SHORTEST: float
def compare(baseline: Variant, *variants: Variant, burn_in: int=2, max_burn_in: int=10, min_rounds: int | None=None, max_rounds: int=120, budget_s: float=60.0, width: float=0.02, confidence: float=0.99, device: str='cpu', seed: int=0, progress: bool=True, clock: Callable[[], float]=..., watch: Any=True, usage_s: float=0.0) -> Comparison:
    """Time `variants` against `baseline` in interleaved rounds until the ratios are precise or the budget is spent"""
class SimulatedClock:
    """A clock for `compare` that runs only when a variant of it spends time, with noise of a given kind"""
    now: float
    noise: float
    drift: float
    spikes: float
    random: Any
    phase: Any

    def __init__(self, seed: int=0, noise: float=0.02, drift: float=0.2, spikes: float=0.03): ...

    def __call__(self): ...

    def spend(self, seconds: float):
        """Let a step of `seconds` pass"""

    def variant(self, name: str, seconds: float) -> Variant:
        """A variant that spends this time"""
