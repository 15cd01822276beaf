"""Simulated studies of every strategy on every kind of curves, and their record.

    python bench/simulated_studies.py --seeds 50 --taskset FOLDER --taskset-seeds 1000

Needs no GPU, and hours of many cores. Each study's outcome is written to the journal when it is done, so a second start goes
on. Seeds 0 to 24 were used while the strategies were built, 25 to 49 were not; the first half of the TaskSet tasks were
used, the others were not.
"""
import argparse, json, math, os, shlex, sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm.auto import tqdm

from optkit.base import InputError, read_json, write_json
from optkit.hardware import detect
from optkit.records import provenance
from optkit.simulator import NOISY, simulate, SyntheticCurves, taskset_curves
from optkit.strategies import Reports, STRATEGIES


HELD_OUT = 25 # seeds from this one on were not used while the strategies were built
BUDGETS = (10_000, 20_000, 30_000) # epochs
VARIANTS = {name: kind() for name, kind in STRATEGIES.items()} | dict(
    reports_5=Reports(patience=5), reports_20=Reports(patience=20)) # the reports do not give their patience


def _kind(trials, **fields): return lambda seed: SyntheticCurves(**fields), trials

TABLE = dict( # kind: (curves by seed, trials)
    synthetic=_kind(400), noisy=_kind(400, **NOISY),
    **{f'small_{n}': _kind(n, name=f'small_{n}') for n in (12, 20, 40, 120, 200)},
    short_40=_kind(40, name='short_40', folds=3, epochs=10),
    **{f'three_{n}': _kind(n, name='three', folds=3) for n in (60, 100, 200)},
    **{f'three_noisy_{n}': _kind(n, **NOISY | dict(name='three_noisy', folds=3)) for n in (60, 100, 200)})


def taskset_table(
    folder: str | Path | None # with the .json.gz files; may be missing
) -> dict: # more kinds for the table
    "TaskSet tasks by seed: the first half of the tasks for building, the other half held out"
    paths = sorted(Path(folder).glob('*.json.gz')) if folder else []
    if not paths: return {}
    load, half = lru_cache(maxsize=None)(taskset_curves), len(paths) // 2
    def by_seed(part): return lambda seed: load(part[seed % len(part)])
    return dict(taskset=(by_seed(paths[:half]), 400), taskset_held_out=(by_seed(paths[half:]), 400))


def simulate_cell(
    curves, # see `SyntheticCurves`
    strategy: str, # of `VARIANTS`
    trials: int, # of the study
    seed: int, # of the study
    optima: dict[str, float] # by the name of the curves; a missing one is added
) -> dict: # plain values
    "One study of the table"
    if curves.name not in optima: optima[curves.name] = curves.optimum()
    compared = trials == 400 and strategy in ('none', 'racing') and isinstance(curves, SyntheticCurves)
    budgets = BUDGETS if compared else ()
    study = simulate(curves, VARIANTS[strategy], trials, seed, max(budgets, default=0), optima[curves.name])
    ranked = dict(rank=curves.rank(study.best)) if hasattr(curves, 'rank') and study.best else {}
    return study.at_trials(trials) | ranked | {f'regret_{b}': study.at_epochs(b) for b in budgets}


def run_table(
    kinds: dict, # see `TABLE`
    strategies: Sequence[str], # of `VARIANTS`
    seeds: int, # from 0
    journal: str | Path, # a line of JSON for each study that is done
    progress: bool = True # show a bar
) -> list[dict]: # a dict a study: kind, strategy, seed, and the outcome
    "Every study of the table that the journal lacks; seeds run in the outer loop, so that it can be stopped early"
    journal, optima = Path(journal), {}
    journal.parent.mkdir(parents=True, exist_ok=True)
    done = _read_journal(journal)
    todo = [cell for cell in _cells(kinds, strategies, seeds) if cell not in done]
    with open(journal, 'a') as file:
        for kind, strategy, seed in tqdm(todo, desc='studies', unit='study', disable=not progress):
            curves, trials = kinds[kind]
            outcome = simulate_cell(curves(seed), strategy, trials, seed, optima)
            row = dict(kind=kind, strategy=strategy, seed=seed, trials=trials, **outcome)
            file.write(json.dumps(row) + '\n')
            file.flush()
            done[kind, strategy, seed] = row
    return [r for (k, s, n), r in done.items() if k in kinds and s in strategies and n < seeds]


def _cells(kinds, strategies, seeds): # kinds beside the first two have only the two strategies that matter most
    wanted = lambda kind, strategy: kind in ('synthetic', 'noisy') or strategy in ('none', 'racing')
    return [(k, s, n) for n in range(seeds) for k in kinds for s in strategies if wanted(k, s)]


def _read_journal(path):
    "Studies by (kind, strategy, seed); a line torn by a kill is dropped from the file"
    if not path.exists(): return {}
    rows = []
    for line in path.read_text().splitlines():
        try: rows.append(json.loads(line))
        except ValueError: continue
    part = path.with_name(f'.{path.name}.part')
    part.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    os.replace(part, path)
    return {(r['kind'], r['strategy'], r['seed']): r for r in rows}


def interval(
    values: np.ndarray, # [studies]
    confidence: float = .9, # two-sided; the ends are one-sided 95% bounds at 0.9
    repeats: int = 4000, # bootstrap samples
    seed: int = 0 # of the bootstrap
) -> tuple[float, float]:
    "Percentile bootstrap of the mean"
    means = np.random.default_rng(seed).choice(values, (repeats, len(values))).mean(1)
    return tuple(np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist())


def summarise_table(
    studies: list[dict], # of `run_table`
    margins: dict[str, float], # by kind
) -> list[dict]: # a row for each kind, strategy and part of the seeds
    "Means, and paired differences with no stopping"
    rows, parts = [], dict(all=lambda n: True, tuning=lambda n: n < HELD_OUT, held_out=lambda n: n >= HELD_OUT)
    by = {(r['kind'], r['strategy'], r['seed']): r for r in studies}
    for kind, strategy, part in sorted({(r['kind'], r['strategy'], p) for r in studies for p in parts}):
        if kind.startswith('taskset') and part != 'all': continue
        pairs = [(by[kind, strategy, n], by[kind, 'none', n]) for k, s, n in by
                 if (k, s) == (kind, strategy) and parts[part](n) and (kind, 'none', n) in by]
        if len(pairs) >= 2: rows.append(_table_row(kind, strategy, part, pairs, margins[kind]))
    return rows


def _table_row(kind, strategy, part, pairs, margin): # (study, the same without stopping)
    measure = 'rank' if 'rank' in pairs[0][1] else 'regret'
    epochs, complete, epochs_none = _columns(pairs, 'epochs', 'complete', none=['epochs']).mean(1).tolist()
    ended = [(a, b) for a, b in pairs if math.isfinite(a['regret'])] # studies in which a trial is complete
    row = dict(variant=strategy, baseline='none', kind=kind, seeds_part=part, studies=len(pairs),
               without_result=len(pairs) - len(ended), trials=pairs[0][0]['trials'], epochs=epochs,
               epochs_share=epochs / epochs_none, complete=complete, measure=measure, margin=margin)
    if len(ended) < 2: return dict(row, regret=None, non_inferior=False)
    row |= _compared(ended, measure) | dict(equal_budget=_equal_budget(ended))
    row['non_inferior'] = bool(row['difference']['high'] < margin and len(ended) == len(pairs))
    return row


def _compared(ended, measure):
    "Regret, and the paired difference with no stopping with its interval"
    regrets, values, regrets_none, values_none = _columns(ended, 'regret', measure, none=['regret', measure])
    differences = values - values_none
    low, high = interval(differences)
    return dict(regret=float(regrets.mean()), regret_none=float(regrets_none.mean()),
                regret_se=float(np.std(regrets, ddof=1) / len(ended) ** .5), value=float(values.mean()),
                difference=dict(mean=float(differences.mean()), low=low, high=high))


def _columns(pairs, *keys, none): # [keys, studies]
    return np.array([[a[k] for a, _ in pairs] for k in keys] + [[b[k] for _, b in pairs] for k in none])


def _equal_budget(pairs):
    "Regret when so many epochs were spent, with and without stopping"
    budgets = {}
    for key in pairs[0][0]:
        if not key.startswith('regret_') or key not in pairs[0][1]: continue
        regret = np.array([(a[key], b[key]) for a, b in pairs if math.isfinite(a[key] + b[key])])
        if len(regret) < 2: continue
        ends = dict(zip(('low', 'high'), interval(regret[:, 0] - regret[:, 1])))
        budgets[key.removeprefix('regret_')] = dict(
            regret=float(regret[:, 0].mean()), none=float(regret[:, 1].mean()), difference=ends)
    return budgets


def _earlier_record(args):
    "The record of --keep, whose rows stay where this start makes no new ones; read before hours of studies"
    if not args.keep: return None
    before = read_json(args.keep)
    seeds = before['provenance']['seeds']
    if seeds != args.seeds: raise InputError(f'{args.keep} is of {seeds} seeds, expected {args.seeds}')
    if 'none' not in args.strategies:
        raise InputError('--keep without none among --strategies: the others are compared with it, study by study')
    return before


def _merge_rows(rows, before): # rows, and what the provenance holds about them
    "These rows, and those of the earlier record for other strategies and kinds"
    if not before: return rows, {}
    new, where = {(r['kind'], r['variant']) for r in rows}, before['provenance']
    old = [r for r in before['rows'] if (r['kind'], r['variant']) not in new]
    names = sorted({f"{r['variant']} on {r['kind']}" for r in old})
    source = dict(rows=names, commit=where['commit'], date=where['date'])
    if where.get('kept'): source['before'] = where['kept']
    return sorted(rows + old, key=lambda r: (r['kind'], r['variant'], r['seeds_part'])), dict(kept=source)


def _parser():
    parser = argparse.ArgumentParser(
        'python bench/simulated_studies.py', description='Simulated studies of every strategy, and their record.')
    add = parser.add_argument
    add('--seeds', type=int, default=50)
    add('--out', default='bench/results/study-simulator.json')
    add('--journal', default='runs/simulator.jsonl', help='what is done; a second start goes on')
    add('--taskset', help='folder of TaskSet curves; left out where it is missing')
    add('--taskset-seeds', type=int, help='of those; as many as --seeds when left out')
    add('--strategies', nargs='+', default=list(VARIANTS), choices=list(VARIANTS))
    add('--kinds', nargs='+', help='all when left out')
    add('--quiet', action='store_true')
    add('--keep', metavar='RECORD', help='an earlier record, of as many studies: its rows of strategies and kinds '
                                         'that this start leaves out go into the new one')
    return parser


def _command(args): # for the record
    words = ['python', 'bench/simulated_studies.py', '--seeds', str(args.seeds)]
    if args.taskset: words += ['--taskset', 'FOLDER']
    if args.taskset_seeds: words += ['--taskset-seeds', str(args.taskset_seeds)]
    if args.strategies != list(VARIANTS): words += ['--strategies', *args.strategies]
    if args.kinds: words += ['--kinds', *args.kinds]
    if args.keep: words += ['--keep', 'RECORD']
    return shlex.join(words)


def main(argv: list[str] | None = None) -> Path: # the record
    "The command that makes the table"
    args = _parser().parse_args(argv)
    before = _earlier_record(args)
    kinds = TABLE | taskset_table(args.taskset)
    if args.kinds: kinds = {k: kinds[k] for k in args.kinds}
    studies = []
    for recorded, seeds in ((False, args.seeds), (True, args.taskset_seeds or args.seeds)):
        part = {k: v for k, v in kinds.items() if k.startswith('taskset') == recorded}
        studies += run_table(part, args.strategies, seeds, args.journal, not args.quiet)
    margins = {k: .01 if k.startswith('taskset') else make(0).margin for k, (make, _) in kinds.items()}
    rows, source = _merge_rows(summarise_table(studies, margins), before)
    note = ('regret: true loss of the winner above the optimum; taskset rows are judged by the share of '
            'configurations better than the winner')
    settings = dict(provenance(detect(), _command(args)), seeds=args.seeds, held_out_from=HELD_OUT, note=note)
    return write_json(args.out, dict(provenance=settings | source, rows=rows))


if __name__ == '__main__': print(f'record: {main()}')
