"""Milliseconds a trial that `tune` spends outside of its runner: sampling, pruning and storing in SQLite.

    python bench/trial_overhead.py                    a runner that takes no time
    python bench/trial_overhead.py --work             a runner that sorts 48 MB an epoch, so that caches are cold
    python bench/trial_overhead.py --strategies racing,median --trials 30

3 folds of 30 epochs a trial, the curves of learning made up. It prints and writes no record. To compare two
commits, run it in both, in turns.
"""
import argparse, math, tempfile, time
from pathlib import Path

import numpy as np
import optuna

from optkit.hpo import tune

SPACE = ('lr=2e-5..2e-3:log', 'weight_decay=1e-3..0.3:log', 'warmup=0.0..0.3', 'label_smoothing=0.0..0.1',
         'effective_batch=32,64,128')
PRUNERS = dict(median=optuna.pruners.MedianPruner,
               optuna_hyperband=lambda: optuna.pruners.HyperbandPruner(max_resource=30))


class Runner:
    "Made-up learning curves; `seconds` is what their epochs took"
    epochs = 30

    def __init__(self, work):
        self.seconds, self.numbers = 0., np.random.default_rng(0).random(6_000_000) if work else None

    def _epoch(self):
        start = time.perf_counter()
        if self.numbers is not None:
            self.numbers.sort()
            self.numbers[:] = self.numbers[::-1]
        self.seconds += time.perf_counter() - start

    def __call__(self, params, fold):
        rng = np.random.default_rng(int(1e9 * (params['lr'] + params['warmup'])) + fold)
        top = .9 - .06 * math.log10(params['lr'] / 2e-4)**2 + .02 * fold
        for epoch in range(1, self.epochs + 1):
            self._epoch()
            yield top - .3 * math.exp(-.15 * epoch) + .006 * rng.normal()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--work', action='store_true', help='epochs that work and leave caches cold')
    parser.add_argument('--strategies', default='none,racing,hyperband,reports,median,optuna_hyperband')
    parser.add_argument('--trials', type=int, default=60)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for name in args.strategies.split(','):
        runner, ends = Runner(args.work), []
        def on_trial(study, trial): ends.append((time.perf_counter(), runner.seconds))
        with tempfile.TemporaryDirectory() as folder:
            tune(runner, SPACE, args.trials, folds=3, strategy=PRUNERS.get(name, lambda: name)(), progress=False,
                 storage=Path(folder) / 'study.db', on_trial=on_trial, say=lambda text: None)
        whole, inside = np.subtract(ends[-1], ends[0]) / (len(ends) - 1)  # the first trial opens the database
        print(f'{name:18} {1e3 * (whole - inside):6.1f} ms a trial outside of the runner, {inside:.2f} s inside',
              flush=True)


if __name__ == '__main__': main()
