"""A real study under four strategies: MiniLM on pairs of documents, grouped folds, one engine, equal seeds.

    python bench/minilm_folds.py --pack FOLDER                    # what a machine without packages and network needs
    OPTKIT_BENCH=FOLDER python bench/study.py --fast --state STATE --limit 500    # again and again, until it says that all is done
    python bench/study.py --dry --state /some/folder --out /some/folder           # tiny, on a CPU
    python bench/study.py --simulate bench/results/study-real-curves-h100.json    # studies of 200 trials from recorded curves

A call ends cleanly after `--limit` seconds, between two trials; STATE (a database and two small files) then holds everything,
and the same call with it goes on, on this machine or another one. Folds and seeds belong to the study seed, so they are the
same for each strategy. Every trial pays for what it does inside the runner and outside of it (sampling, storage, the
strategy); what the engine builds is paid before the first trial of a call and kept apart. The winner of each study is
trained again on other documents that no study saw, with other folds and seeds, several times: its fresh score.
"""
import argparse, json, math, os, sys, time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np
import optuna
from optuna.distributions import json_to_distribution

from minilm_folds import found, read_rows
from optkit.data import InputError, table_from, tokenise
from optkit.engine import load_model, load_tokenizer
from optkit.folds import stratified_folds
from optkit.hardware import detect
from optkit.hpo import TrainerRunner, as_space, best_complete, curves, ended, spent, tune
from optkit.simulator import simulate
from optkit.storage import silent, sqlite_storage
from optkit.timing import provenance, quantiles, read_json, write_json
from optkit.trainer import TrainConfig, Trainer, make_engine

STRATEGIES = ('none', 'hyperband', 'reports', 'racing')
BATCHES = (16, 32, 64)
SPACE = ('lr=1e-5..1e-3:log', 'weight_decay=1e-3..0.3:log', 'warmup=0.0..0.3', 'label_smoothing=0.0..0.1', f'effective_batch={",".join(map(str, BATCHES))}')
MARGIN = .01 # F1


class Enough(Exception): "The time of this call is over"


class Timed(TrainerRunner):
    "A runner that knows how long it was at work, and how long it took to begin"
    def __init__(self, trainer, folds):
        self.inside, self.begin, self.started = 0., 0., None
        trainer.on_step = self._on_step
        super().__init__(trainer, folds)

    def _on_step(self, *_): self.started = self.started or time.perf_counter()

    def __call__(self, params, fold):
        values, first = self.run(params, fold), True
        while True:
            start, self.started = time.perf_counter(), None
            try: value = next(values, None)
            finally:
                self.inside += time.perf_counter() - start
                if first and self.started: self.begin += self.started - start; first = False
            if value is None: return
            yield value


# --- what is trained

def documents_of(groups, counts, seed=0):
    "Row numbers of disjoint sets of that many documents each"
    order, ends = np.random.default_rng(seed).permutation(np.unique(groups)), np.cumsum((0, *counts))
    if ends[-1] > len(order): raise InputError(f'{ends[-1]} documents asked for, {len(order)} are there')
    return [np.flatnonzero(np.isin(groups, order[a:b])) for a, b in zip(ends[:-1], ends[1:])]


def small_folds(rows, labels, groups, k, train_documents, seed):
    "Grouped folds whose training parts hold so many documents, drawn with the seed; the validation parts stay whole"
    rng, out = np.random.default_rng(seed), []
    for train, valid in stratified_folds(rows, labels, k, seed, groups):
        kept = rng.permutation(np.unique(groups[train]))[:train_documents]
        out.append((train[np.isin(groups[train], kept)], valid))
    return out


class Setting:
    "Data, engine and runners of this call"
    def __init__(self, a):
        self.a, self.hardware, (source, path) = a, detect(), found()
        tokenizer = load_tokenizer(source)
        self.table = table_from(read_rows(path, a.documents + a.fresh_documents), 'premise', 'label', 'hypothesis', group='group')
        self.groups, self.labels = np.asarray(self.table.groups), np.asarray(self.table.labels)
        self.search, self.fresh = documents_of(self.groups, (a.documents, a.fresh_documents))
        self.store = tokenise(self.table, tokenizer, a.length, progress=False)
        half = self.hardware.device == 'cuda' and self.hardware.gpu.capability >= (8, 0)
        self.config = TrainConfig(epochs=a.evaluations, effective_batch=32, layout='sorted', precision='bf16' if half else 'fp32', eval_batch=256, metric='macro_f1', fast=a.fast, recover=False, read_every=10_000)
        start = time.perf_counter()
        self.engine = make_engine(load_model(source, self.table.classes, tokenizer), self.config, self.hardware)
        for batch in BATCHES: next(self.runner(0)(dict(effective_batch=batch), 0)) # shapes are built, kernels chosen
        self.prepared = time.perf_counter() - start

    def runner(self, seed, fresh=False):
        rows = self.fresh if fresh else self.search
        folds = small_folds(rows, self.labels, self.groups, self.a.folds, self.a.train_documents, seed)
        config = TrainConfig(**json.loads(self.config.to_json()) | dict(seed=seed))
        return Timed(Trainer(self.engine, self.store, config), folds)


# --- a call

def run_study(s, strategy, seed, until, calls):
    "Trials until the study is whole or the time is over; whether it is whole"
    a, runner, trials = s.a, s.runner(seed), []
    mark = [time.perf_counter(), 0., 0., runner.build_seconds]
    def on_trial(study, trial):
        now = [time.perf_counter(), runner.inside, runner.begin, runner.build_seconds]
        wall, inside, begin, build = (n - m for n, m in zip(now, mark))
        trials.append(dict(number=trial.number, ended=ended(trial), wall=wall, inside=inside, begin=begin, build=build))
        mark[:] = [time.perf_counter(), *now[1:]]
        if now[0] > until: raise Enough
    try:
        study = tune(runner, list(SPACE), a.trials, folds=a.folds, epochs=a.evaluations, strategy=strategy, storage=Path(a.state) / 'study.db', name=f'{strategy}-{seed}', seed=seed, on_trial=on_trial, progress=False, say=print)
    except Enough: study = None
    finally:
        if trials: calls.append(dict(study=f'{strategy}-{seed}', card=s.hardware.card, fast=a.fast, trials=trials)); write_json(Path(a.state) / 'calls.json', calls)
    took = sum(t['wall'] for t in trials)
    print(f'{strategy}-{seed}: {len(trials)} trials in {took:.1f} s, of which {took - sum(t["inside"] for t in trials):.1f} s outside of the runner' + ('' if study else '; the time is over'), flush=True)
    return study is not None


def fresh_scores(s, params, kept, until):
    "Best score of each fold on documents that no study saw, by seed; raises `Enough`"
    name = json.dumps(params, sort_keys=True)
    for seed in range(s.a.fresh):
        if str(seed) in kept.setdefault(name, {}): continue
        runner = s.runner(1000 + seed, fresh=True)
        kept[name][str(seed)] = [max((v for v in runner(params, f) if math.isfinite(v)), default=math.nan) for f in range(s.a.folds)]
        write_json(Path(s.a.state) / 'fresh.json', kept)
        if time.perf_counter() > until: raise Enough
    return kept[name]


def studies_of(a):
    with silent():
        storage = sqlite_storage(Path(a.state) / 'study.db')
        there = set(optuna.get_all_study_names(storage))
        return {(s, n): optuna.load_study(study_name=f'{s}-{n}', storage=storage) for n in range(a.study_seeds) for s in a.strategies if f'{s}-{n}' in there}


def _read(a, name, empty): return read_json(path) if (path := Path(a.state) / name).is_file() else empty


def run(a):
    begun = time.perf_counter()
    Path(a.state).mkdir(parents=True, exist_ok=True)
    s, until = Setting(a), begun + a.limit
    calls, kept = _read(a, 'calls.json', []), _read(a, 'fresh.json', {})
    print(f'{s.hardware.card}: {len(s.search)} rows to search on, folds of {len(s.runner(0).folds[0][0])} and {len(s.runner(0).folds[0][1])} rows, {len(s.fresh)} fresh rows; prepared in {s.prepared:.1f} s; {s.engine}', flush=True)
    done = lambda name: sum(len(c['trials']) for c in calls if c['study'] == name) >= a.trials
    try:
        for seed in range(a.study_seeds):
            for strategy in a.strategies:
                if not done(f'{strategy}-{seed}') and not run_study(s, strategy, seed, until, calls): raise Enough
        for study in studies_of(a).values():
            if best := best_complete(study): fresh_scores(s, best.params, kept, until)
    except Enough: print(f'not done yet, {time.perf_counter() - begun:.0f} s; the same call goes on'); return None
    finally: _close(a)
    return save(a, s, calls, kept)


def _close(a):
    "One file holds the studies: nothing is left in a write-ahead log"
    import sqlite3
    if (path := Path(a.state) / 'study.db').is_file():
        with sqlite3.connect(path) as db: db.execute('pragma wal_checkpoint(truncate)')
        db.close()


# --- what came of it

def row_of(a, study, strategy, seed, calls, kept):
    "Time, epochs and scores of one study"
    trials, best = [t for t in study.get_trials(deepcopy=False) if ended(t)], best_complete(study)
    parts = [c for c in calls if c['study'] == f'{strategy}-{seed}']
    timed = [t for c in parts for t in c['trials']]
    late = [t for n, c in enumerate(parts) for t in c['trials'][0 if n or seed else 1:]] # all but the first trial of an engine
    fresh = kept.get(json.dumps(best.params, sort_keys=True), {}) if best else {}
    scores = np.array([fresh[k] for k in sorted(fresh, key=int)])
    outside = sum(t['wall'] - t['inside'] for t in timed)
    return dict(study=f'{strategy}-{seed}', strategy=strategy, seed=seed, trials=len(trials), complete=sum(ended(t) == 'complete' for t in trials), stopped=sum(ended(t) == 'stopped' for t in trials),
                seconds=sum(spent(t)['seconds'] - spent(t).get('build', 0.) for t in trials), epochs=sum(spent(t)['epochs'] for t in trials), calls=len(parts), cards=sorted({c['card'] for c in parts}),
                wall=sum(t['wall'] for t in timed), build=sum(t['build'] for t in timed), outside=outside, outside_share=outside / max(1e-9, sum(t['wall'] - t['build'] for t in timed)),
                fixed=quantiles([t['wall'] - t['inside'] + t['begin'] - t['build'] for t in late]) if late else None,
                best=best.number if best else None, params=best.params if best else None, search=best.value if best else None, fresh=float(scores.mean()) if len(scores) else None, fresh_scores=scores.tolist())


def compared(rows, strategy):
    "A strategy against none, seed by seed"
    pair = [(r, next(n for n in rows if n['strategy'] == 'none' and n['seed'] == r['seed'])) for r in rows if r['strategy'] == strategy]
    ratio = np.array([n['seconds'] / r['seconds'] for r, n in pair])
    epochs = np.array([n['epochs'] / r['epochs'] for r, n in pair])
    lost = np.array([r['fresh'] - n['fresh'] for r, n in pair if r['fresh'] is not None and n['fresh'] is not None])
    fold = np.array([np.array(r['fresh_scores']) - np.array(n['fresh_scores']) for r, n in pair if r['fresh'] is not None and n['fresh'] is not None])
    return dict(variant=strategy, baseline='none', claim={'hyperband': 'hyperband', 'reports': 'patience'}.get(strategy), ratio=dict(p50=float(np.median(ratio)), low=float(ratio.min()), high=float(ratio.max())),
                epochs_ratio=dict(p50=float(np.median(epochs)), low=float(epochs.min()), high=float(epochs.max())), seconds=quantiles([r['seconds'] for r, _ in pair]), epochs=quantiles([r['epochs'] for r, _ in pair]),
                fresh=dict(mean=float(np.mean([r['fresh'] for r, _ in pair if r['fresh'] is not None])) if len(lost) else None, difference=float(lost.mean()) if len(lost) else None, by_seed=lost.tolist(),
                           se_of_runs=float(fold.mean(-1).std(ddof=1) / math.sqrt(fold.shape[0] * fold.shape[1])) if fold.size and fold.shape[0] * fold.shape[1] > 1 else None, margin=MARGIN,
                           non_inferior=bool(len(lost) and lost.mean() >= -MARGIN)),
                outside_share=quantiles([r['outside_share'] for r, _ in pair]), fixed=quantiles([r['fixed']['p50'] for r, _ in pair if r['fixed']]) if any(r['fixed'] for r, _ in pair) else None, repeats=len(pair))


def recorded(a, studies):
    "Values of every complete trial of the studies without stopping, by fold and evaluation"
    rows = []
    for (strategy, seed), study in studies.items():
        stride = study.user_attrs['optkit']['stride']
        if strategy == 'none': rows += [dict(seed=seed, number=t.number, params=t.params, seconds=round(spent(t)['seconds'], 3), values=[[round(v, 5) for v in c] for c in curves(t, stride)])
                                        for t in study.get_trials(deepcopy=False) if ended(t) == 'complete']
    return dict(space=as_space(list(SPACE)).known, folds=a.folds, evaluations=a.evaluations, metric='macro_f1', rows=rows)


def save(a, s, calls, kept):
    studies = studies_of(a)
    rows = [row_of(a, study, *key, calls, kept) for key, study in studies.items()]
    card = f'{s.hardware.card}-dry' if a.dry else s.hardware.card
    where = provenance(s.hardware, command_of(a)) | dict(workload='MiniLM (22.7M) on hoc_pairs, grouped folds', sizes={k: getattr(a, k) for k in SIZES}, fast=a.fast, engine=repr(s.engine))
    table, path = recorded(a, studies), Path(a.out) / f'study-real-{card}.json'
    write_json(path.with_name(f'study-real-curves-{card}.json'), dict(provenance=where, **table))
    simulated = simulate_all(table, a.simulated_trials, a.simulated_seeds, a.strategies) if 'none' in a.strategies else []
    write_json(path, dict(provenance=where, rows=[compared(rows, name) for name in a.strategies] if 'none' in a.strategies else [], studies=rows, simulated=simulated))
    for r in rows: print(f'{r["study"]:12} {r["seconds"]:7.1f} s, {r["epochs"]:6,} epochs, {r["complete"]:3} of {r["trials"]} complete, outside {r["outside_share"]:.1%}, fixed {r["fixed"]["p50"] if r["fixed"] else math.nan:.3f} s, search {r["search"] or math.nan:.4f}, fresh {r["fresh"] or math.nan:.4f}')
    show(simulated)
    print(f'all is done: {path}')
    return path


# --- studies from recorded curves

class FoldCurves:
    "Recorded scores by fold and evaluation: a suggestion gets those of the nearest recorded configuration with the same choices"
    def __init__(self, table):
        self.space, self.folds, self.epochs = {k: json_to_distribution(v) for k, v in table['space'].items()}, table['folds'], table['evaluations']
        self.rows = [r for r in table['rows'] if len(r['values']) == self.folds and all(len(c) == self.epochs for c in r['values'])]
        if len(self.rows) < 2: raise InputError(f'{len(self.rows)} whole trials are recorded, expected at least 2')
        self.places = np.array([self.place(r['params']) for r in self.rows])
        self.truths = np.array([-np.mean([max(c) for c in r['values']]) for r in self.rows])
        self.seconds = 0. # of what was run, as recorded

    def place(self, params):
        unit = lambda v, d: 10. * d.choices.index(v) if hasattr(d, 'choices') else (math.log(v / d.low) / math.log(d.high / d.low) if d.log else (v - d.low) / (d.high - d.low))
        return [unit(params[k], d) for k, d in self.space.items()]

    def nearest(self, params): return int(np.argmin(((self.places - self.place(params)) ** 2).sum(1)))
    def truth(self, params): return float(self.truths[self.nearest(params)])
    def optimum(self): return float(self.truths.min())
    def runner(self, seed):
        self.seconds = 0.
        def values(params, fold):
            row = self.rows[self.nearest(params)]
            for value in row['values'][fold]:
                self.seconds += row.get('seconds', 0.) / (self.folds * self.epochs)
                yield value
        return values


def simulate_all(table, trials, seeds, strategies):
    "Studies of that many trials under each strategy; epochs, recorded seconds and regret of the winner"
    curves_, out = FoldCurves(table), []
    for strategy in strategies:
        found_ = []
        for seed in range(seeds):
            with silent(): study = simulate(curves_, strategy, trials, seed)
            found_.append((int(study.spent[-1]), curves_.seconds, float(study.regret[-1]), int(study.complete[-1])))
        epochs, seconds, regret, complete = map(np.array, zip(*found_))
        out.append(dict(strategy=strategy, trials=trials, studies=seeds, configurations=len(curves_.rows), epochs=epochs.tolist(), seconds=seconds.tolist(), regret=[r if math.isfinite(r) else None for r in regret.tolist()], complete=complete.tolist()))
    base = next((r for r in out if r['strategy'] == 'none'), None)
    for r in out if base else []:
        r['epochs_ratio'] = quantiles(np.array(base['epochs']) / np.array(r['epochs']))
        r['seconds_ratio'] = quantiles(np.array(base['seconds']) / np.maximum(r['seconds'], 1e-9))
        known = [(x, y) for x, y in zip(r['regret'], base['regret']) if x is not None and y is not None]
        r['lost'] = float(np.mean([x - y for x, y in known])) if known else None
    return out


def show(simulated):
    for r in simulated: print(f'simulated, {r["trials"]} trials x {r["studies"]}: {r["strategy"]:10} {np.mean(r["epochs"]):8,.0f} epochs' + (f', {r["seconds_ratio"]["p50"]:.2f} times less time than none, {"no winner" if r["lost"] is None else format(r["lost"], "+.4f") + " F1 lost"}' if 'lost' in r else ''))


# --- the command

SIZES = dict(documents=90, train_documents=24, fresh_documents=150, length=192, evaluations=30, folds=3, trials=60, study_seeds=3, fresh=6)


def command_of(a): return 'python bench/study.py' + ''.join(f' --{k.replace("_", "-")} {getattr(a, k)}' for k in SIZES) + (' --fast' if a.fast else '') + (' --dry' if a.dry else '')


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items(): p.add_argument(f'--{name.replace("_", "-")}', type=int, default=value)
    p.add_argument('--strategies', nargs='+', default=list(STRATEGIES), choices=STRATEGIES)
    p.add_argument('--state', default='runs/study-real', help='folder that holds what is done'); p.add_argument('--out', default='bench/results')
    p.add_argument('--limit', type=float, default=540., help='seconds of this call'); p.add_argument('--fast', action='store_true', help='on the fast engine')
    p.add_argument('--dry', action='store_true', help='tiny, whatever the sizes'); p.add_argument('--simulate', metavar='FILE', help='only simulate from recorded curves')
    p.add_argument('--simulated-trials', type=int, default=200); p.add_argument('--simulated-seeds', type=int, default=10)
    a = p.parse_args(argv)
    if a.dry: vars(a).update(documents=6, train_documents=1, fresh_documents=6, length=16, evaluations=3, trials=4, study_seeds=1, fresh=1, simulated_trials=12, simulated_seeds=2)
    return a


def main(argv=None):
    a = parse(argv)
    if not a.simulate: return run(a)
    data = read_json(a.simulate)
    found_ = simulate_all(data, a.simulated_trials, a.simulated_seeds, a.strategies)
    show(found_)
    return found_


if __name__ == '__main__': main()
