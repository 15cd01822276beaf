"""Simulated studies by the frozen protocol (bench/protocol.md), in parallel and resumable, and their record.

    python bench/simulated_studies.py tuning --jobs 2 --seeds 20           seeds and families for tuning; no record
    python bench/simulated_studies.py verdict --jobs 16 --out RECORD       what the protocol fixed
    python bench/simulated_studies.py verdict --limit 600                  goes on for ten minutes, then stops
"""
import argparse, json, math, os, shlex, sys, time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'): os.environ.setdefault(name, '1')
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import optuna
from tqdm.auto import tqdm

from optkit.base import InputError, write_json
from optkit.hardware import detect
from optkit.records import provenance
from optkit.simulator import FAMILIES, simulate, SyntheticCurves


# what the protocol fixed; `tests/test_simulator.py` compares it with the file
TUNING = dict(families=('base', 'noisy'), first=0)
VERDICT = dict(families=tuple(FAMILIES), first=20_000)
SIZES = {'3x60': dict(folds=3, trials=60), '5x400': dict(folds=5, trials=400)}
STUDIES = {'3x60': 240, '5x400': 200} # seeds of a cell, by the power calculation
FEWER = dict(same=100) # of a variant whose winner is not judged
WORSE, MARGIN = .01, .002 # a winner this much worse counts; the least margin
VARIANTS = dict( # the first is the baseline; 'again' has other suggestions
    none=dict(strategy='none', sampler='tpe'), again=dict(strategy='none', sampler='tpe', other=500_000),
    same=dict(strategy='none'), deferred=dict(strategy='deferred'), hyperband=dict(strategy='hyperband', sampler='tpe'),
    racing=dict(strategy='racing', sampler='tpe'))
EVERY = 5 # trials between the points of an unpruned study that are stored


def cells(part: dict, sizes: Iterable[str], variants: Iterable[str], seeds: int | None) -> list[tuple]:
    "(size, family, variant, seed), seeds in the outer loop; where the default is TPE, `same` is the baseline itself"
    most = {(size, v): min(seeds or STUDIES[size], FEWER.get(v, math.inf)) for size in sizes for v in variants}
    return [(size, family, variant, part['first'] + n) for n in range(max(most.values())) for size in sizes
            for family in part['families'] for variant in variants
            if n < most[size, variant] and not (variant == 'same' and size == '5x400')]


@lru_cache(maxsize=None)
def _curves(family, folds):
    curves = SyntheticCurves(**FAMILIES[family] | dict(folds=folds))
    return curves, curves.optimum()


def run_cell(cell: tuple) -> dict: # plain values
    "One study"
    size, family, variant, seed = cell
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shape, start = SIZES[size], time.process_time()
    curves, optimum = _curves(family, shape['folds'])
    study = simulate(curves, trials=shape['trials'], seed=seed, optimum=optimum, **VARIANTS[variant])
    row = dict(zip(('size', 'family', 'variant', 'seed'), cell)) | study.at_trials(shape['trials'])
    if variant == 'none': # its course, for the comparison at equal quality
        row['course'] = [[int(study.spent[n - 1]), float(study.regret[n - 1])]
                         for n in range(EVERY, shape['trials'] + 1, EVERY)]
    return row | dict(seconds=round(time.process_time() - start, 2))


def read_journal(path: str | Path) -> dict: # rows by cell
    "Studies that are done; a line torn by a kill is left out"
    rows = {}
    for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
        try: row = json.loads(line)
        except ValueError: continue
        rows[row['size'], row['family'], row['variant'], row['seed']] = row
    return rows


def run_cells(wanted: list[tuple], journal: str | Path, jobs: int = 1, limit: float = math.inf, progress: bool = True):
    "Run what the journal lacks, a line each; no new study begins after `limit` seconds"
    journal, start = Path(journal), time.monotonic()
    journal.parent.mkdir(parents=True, exist_ok=True)
    done = read_journal(journal)
    todo = iter([cell for cell in wanted if cell not in done])
    bar = tqdm(total=len(wanted), initial=len([c for c in wanted if c in done]), unit='study', disable=not progress)
    with open(journal, 'a') as file, ProcessPoolExecutor(jobs, get_context('spawn')) as pool, bar:
        file.write('\n' if done else '') # behind a line that was torn
        running = {pool.submit(run_cell, cell) for cell in islice(todo, 2 * jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                file.write(json.dumps(future.result()) + '\n')
                file.flush()
                bar.update()
                if time.monotonic() - start < limit: running |= {pool.submit(run_cell, c) for c in islice(todo, 1)}


def interval(values: np.ndarray, statistic=np.mean, repeats: int = 4000) -> tuple[float, float]: # one-sided 95% each
    "5% and 95% quantiles of a bootstrap over studies, [studies] or [studies, columns]"
    rows = np.random.default_rng(0).integers(len(values), size=(repeats, len(values)))
    return tuple(np.quantile([statistic(values[r]) for r in rows], [.05, .95]).tolist())


def _factor(pairs): return float(pairs[:, 0].sum() / pairs[:, 1].sum()) # epochs of none over epochs of the variant


def summarise(rows: dict) -> list[dict]: # of the record
    "A row for each size, family and variant, over the seeds that both it and the baseline have"
    groups = sorted({cell[:3] for cell in rows if cell[2] != 'none'})
    return [row for group in groups if (row := _summary(rows, *group))]


def _summary(rows, size, family, variant):
    seeds = [n for s, f, v, n in rows if (s, f, v) == (size, family, variant) and (s, f, 'none', n) in rows]
    if len(seeds) < 2: return None
    of, none = ([rows[size, family, v, n] for n in sorted(seeds)] for v in (variant, 'none'))
    epochs = np.array([[b['epochs'], a['epochs']] for a, b in zip(of, none)], dtype=float)
    regret, base = (np.array([r['regret'] for r in part]) for part in (of, none))
    margin = max(float(base.mean()) / 4, MARGIN)
    low, high = interval(regret - base)
    return dict(
        variant=variant, baseline='none', size=size, family=family, studies=len(seeds), complete=_mean(of, 'complete'),
        epochs=epochs[:, 1].mean(), epochs_none=epochs[:, 0].mean(), regret=float(regret.mean()),
        regret_none=float(base.mean()), faster=dict(p50=_factor(epochs), **_ends(interval(epochs, _factor))),
        difference=dict(mean=float((regret - base).mean()), low=low, high=high), margin=margin,
        non_inferior=bool(high < margin), worse=float((regret - base > WORSE).mean()),
        equal_quality=equal_quality(none, float(regret.mean()), epochs[:, 1].mean()), seconds=_mean(of, 'seconds'))


def _mean(rows, key): return float(np.mean([r[key] for r in rows]))
def _ends(ends): return dict(zip(('low', 'high'), ends))


def equal_quality(none: list[dict], regret: float, epochs: float) -> dict | None: # None: not reached with all trials
    "Trials that the unpruned study needs for this mean regret, and its epochs over those of the variant"
    courses = np.array([r['course'] for r in none]) # [studies, points, (epochs, regret)]
    spent, reached = courses[:, :, 0].mean(0), courses[:, :, 1].mean(0) <= regret
    if not reached.any(): return None
    point = int(reached.argmax())
    return dict(trials=EVERY * (point + 1), faster=float(spent[point] / epochs))


def _parser():
    parser = argparse.ArgumentParser('python bench/simulated_studies.py', description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('part', choices=['tuning', 'verdict'])
    add('--jobs', type=int, default=1, help='processes')
    add('--limit', type=float, default=math.inf, metavar='SECONDS', help='begin no study after them; a second start goes on')
    add('--journal', help='what is done; runs/studies-PART.jsonl when left out')
    add('--seeds', type=int, help='of each cell; those of the protocol when left out')
    add('--sizes', nargs='+', default=list(SIZES), choices=list(SIZES))
    add('--variants', nargs='+', default=list(VARIANTS), choices=list(VARIANTS))
    add('--out', metavar='RECORD', help='where the record goes; none is written when left out')
    add('--quiet', action='store_true')
    return parser


def main(argv: list[str] | None = None) -> list[dict]: # rows of the record
    args = _parser().parse_args(argv)
    if args.part == 'tuning' and args.out: raise InputError('tuning makes no record; leave --out out')
    part = dict(tuning=TUNING, verdict=VERDICT)[args.part]
    journal = Path(args.journal or f'runs/studies-{args.part}.jsonl')
    wanted = cells(part, args.sizes, ['none', *(v for v in args.variants if v != 'none')], args.seeds)
    run_cells(wanted, journal, args.jobs, args.limit, not args.quiet)
    done = read_journal(journal)
    rows = summarise({cell: done[cell] for cell in wanted if cell in done})
    if args.out:
        settings = dict(provenance(detect(), _command(args)), protocol='bench/protocol.md', first_seed=part['first'],
                        studies=len([c for c in wanted if c in done]), planned=len(cells(part, SIZES, VARIANTS, None)))
        write_json(args.out, dict(provenance=settings, rows=rows))
    for r in rows: print(_line(r))
    return rows


def _command(args): # for the record: what was asked for, without the places of one machine
    words = ['python', 'bench/simulated_studies.py', args.part, '--sizes', *args.sizes, '--variants', *args.variants]
    return shlex.join([*words, *(['--seeds', str(args.seeds)] if args.seeds else [])])


def _line(r):
    d, f = r['difference'], r['faster']
    return (f"{r['size']:6} {r['family']:9} {r['variant']:10} {r['studies']:4} studies {f['p50']:5.2f}x ({f['low']:.2f} to "
            f"{f['high']:.2f}), regret {1e3 * r['regret']:5.1f} against {1e3 * r['regret_none']:5.1f}, difference "
            f"{1e3 * d['mean']:+5.1f} ({1e3 * d['low']:+.1f} to {1e3 * d['high']:+.1f}), margin {1e3 * r['margin']:.1f}: "
            f"{'non-inferior' if r['non_inferior'] else 'not shown'}; worse {r['worse']:.0%}; {r['seconds']:.1f} s")


if __name__ == '__main__': main()
