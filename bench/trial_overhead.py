"""How long a device waits for `tune` in each trial: for sampling, pruning, and storing in SQLite.

    python bench/trial_overhead.py                         trials of 2 s where nothing is stopped; epochs sleep
    python bench/trial_overhead.py --work                  epochs sort 48 MB, so that caches are cold
    python bench/trial_overhead.py --strategies racing,median --trials 30 --seconds 1

3 folds of 30 epochs a trial, the curves of learning made up, one worker. The device waits from the end of an epoch
to the start of the next, of the same trial or another. On a shared machine that time hangs on what others do, so the
CPU time of the process while the device waits stands beside it. It prints and writes no record. To compare two commits, run
it in both, in turns.
"""
import argparse, math, tempfile, time
from pathlib import Path

import numpy as np
import optuna

from optkit.hpo import tune
from optkit.strategies import default_sampler

SPACE = ('lr=2e-5..2e-3:log', 'weight_decay=1e-3..0.3:log', 'warmup=0.0..0.3', 'label_smoothing=0.0..0.1',
         'effective_batch=32,64,128')
PRUNERS = dict(median=optuna.pruners.MedianPruner,
               optuna_hyperband=lambda: optuna.pruners.HyperbandPruner(max_resource=30))


class Runner:
    "Made-up learning curves; notes what waits and what its epochs took"
    epochs = 30

    def __init__(self, seconds=0., work=False): # seconds of a trial of three folds
        self.pause = seconds / 3 / self.epochs
        self.numbers = np.random.default_rng(0).random(6_000_000) if work else None
        self.end, self.end_cpu = None, 0.
        self.waited, self.waited_cpu, self.inside, self.inside_cpu, self.calls, self.count = 0., 0., 0., 0., 0, 0

    def _epoch(self):
        start, cpu = time.perf_counter(), time.thread_time()
        if self.end is not None:
            self.waited += start - self.end
            self.waited_cpu += time.process_time() - self.end_cpu
        if self.numbers is not None:
            self.numbers.sort()
            self.numbers[:] = self.numbers[::-1]
        elif self.pause: time.sleep(self.pause)
        self.end = time.perf_counter()
        self.inside += self.end - start
        self.inside_cpu += time.thread_time() - cpu
        self.count += 1
        self.end_cpu = time.process_time()

    def __call__(self, params, fold):
        self.calls += 1
        rng = np.random.default_rng(int(1e9 * (params['lr'] + params['warmup'])) + fold)
        top = .9 - .06 * math.log10(params['lr'] / 2e-4)**2 + .02 * fold
        for epoch in range(1, self.epochs + 1):
            self._epoch()
            yield top - .3 * math.exp(-.15 * epoch) + .006 * rng.normal()

    def notes(self): # running totals
        cpu = time.process_time() - self.inside_cpu
        return self.waited, self.waited_cpu, cpu, self.inside, self.calls, self.count


def measure(name, args):
    "Milliseconds a trial: the median, without the first one, which opens the database"
    runner, ends = Runner(args.seconds, args.work), []
    with tempfile.TemporaryDirectory() as folder:
        tune(runner, SPACE, args.trials, folds=3, strategy=PRUNERS.get(name, lambda: name)(), progress=False,
             sampler=default_sampler(0, args.trials) if args.tpe else None, storage=Path(folder) / 'study.db',
             on_trial=lambda study, trial: ends.append(runner.notes()), say=lambda text: None)
    steps, after = np.diff(ends, axis=0), (len(ends) - 1) / (args.trials - 1) # of a trial that ends or waits; in a trial
    waited, waited_cpu = 1e3 * after * np.median(steps[:, :2], axis=0)
    cpu, inside, folds, epochs = steps[:, 2:].sum(0) / (args.trials - 1)
    late = '' if args.work else f', {1e3 * (inside - epochs * runner.pause):.0f} ms more than asked'
    print(f'{name:17} {waited:6.1f} ms a trial waited, {waited_cpu:6.1f} ms of CPU time in it ({1e3 * cpu:.1f} over all); '
          f'{folds:.2f} folds, {inside:.2f} s{late}', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--work', action='store_true', help='epochs that work and leave caches cold')
    parser.add_argument('--strategies', default='none,racing,deferred,hyperband,reports,median,optuna_hyperband')
    parser.add_argument('--trials', type=int, default=60)
    parser.add_argument('--tpe', action='store_true', help='TPE instead of the Gaussian process')
    parser.add_argument('--seconds', type=float, default=2., help='of a trial that is not stopped')
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for name in args.strategies.split(','): measure(name, args)


if __name__ == '__main__': main()
