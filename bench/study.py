"""A real study under four strategies: MiniLM on pairs of documents, grouped folds, one engine, equal seeds.

    python bench/minilm_folds.py --pack FOLDER                    # what a machine without packages and network needs
    OPTKIT_BENCH=FOLDER python bench/study.py --fast --state STATE --limit 500    # again and again, until it says that all is done
    OPTKIT_BENCH=FOLDER python bench/study.py --fast --pilot                      # a minute: whether and how fast it learns
    python bench/study.py --dry --state /some/folder --out /some/folder           # tiny, on a CPU
    CUDA_VISIBLE_DEVICES=1 python bench/study.py --fast --seeds 1 --state STATE1   # some of the study seeds, beside others on another GPU, each call with a folder of its own
    python bench/study.py --gather STATE0 STATE1 --state STATE                    # anywhere: one folder and one record of what such calls have done
    python bench/study.py --simulate bench/results/study-real-curves-CARD.json --into bench/results/study-real-CARD.json   # anywhere: studies of 200 trials from recorded curves

A call ends cleanly `--limit` seconds after its process began, between two trials; STATE (a database and three small files) then
holds everything, and the same call with it goes on, on this machine or another one. What is finished is written after each
trial, so a call that is killed loses one trial; records of the studies that are whole are written at the end of each call.
An evaluation follows each `--evaluation-rows` rows of training, several in each pass over the rows of a fold. Folds and seeds
belong to the study seed, so they are the same for each strategy; no strategy takes a value from another's trials. Every trial
pays for what it does inside the runner and outside of it (sampling, storage, the strategy); what the engine builds is paid
before the first trial of a call and kept apart. The winner of each study is trained again on other documents that no study
saw, with other folds and seeds, several times: its fresh score.
"""
import argparse, hashlib, json, math, os, sys, time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np
import optuna, psutil
from optuna.distributions import json_to_distribution

from minilm_folds import found, read_rows, thinned
from optkit.base import InputError
from optkit.frames import table_from
from optkit.store import tokenise
from optkit.models import load_model, load_tokenizer
from optkit.folds import stratified_folds
from optkit.hardware import detect
from optkit.space import as_space, best_complete, curves, ended, spent, TrainerRunner
from optkit.hpo import tune
from optkit.simulator import simulate
from optkit.storage import silent, sqlite_storage
from optkit.base import read_json, write_json
from optkit.records import provenance, quantiles
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer

STRATEGIES = ('none', 'hyperband', 'reports', 'racing', 'deferred')
BATCHES = (32, 64, 128)
SPACE = ('lr=2e-5..2e-3:log', 'weight_decay=1e-3..0.3:log', 'warmup=0.0..0.3', 'label_smoothing=0.0..0.1', f'effective_batch={",".join(map(str, BATCHES))}')
MARGIN = .01 # F1


NEAR = 2, 3, 5 # recorded configurations that a simulated suggestion may get: the number that predicts them best
AT_ONCE = 320 # rows of an evaluation that go through the model at once


class Enough(Exception): "The time of this call is over"


BEGAN = time.time() # of a call; of the process where this is the script, whose imports count too


def since_start(): return time.time() - BEGAN


def said(text): print(f'{since_start():5.0f} s  {text}', flush=True)


def part_of_pass(rows, count, number, seed):
    "The rows before evaluation `number`, from 1 on: disjoint parts of a pass in an order of its own, what is left over is skipped"
    parts = max(1, len(rows) // count)
    turn, part = divmod(number - 1, parts)
    return np.random.default_rng((seed, turn)).permutation(rows)[part * count:(part + 1) * count]


class PartTrainer(Trainer):
    "A trainer that evaluates several times in a pass over its rows"
    whole = ()
    def _train_epoch(self, rows): return super()._train_epoch(part_of_pass(self.whole, len(rows), self.position.epoch, self.config.seed))


class Timed(TrainerRunner):
    "A runner that knows how long it was at work, and how long it took to begin"
    def __init__(self, trainer, folds, rows):
        self.inside, self.begin, self.started, self.rows = 0., 0., None, rows
        trainer.on_step = self._on_step
        super().__init__(trainer, folds)
        self.run = self._values

    def _on_step(self, *_): self.started = self.started or time.perf_counter()

    def _values(self, params, fold):
        (train, valid), t = self.folds[fold], self.trainer
        trainer = PartTrainer(t.engine, t.store, replace(t.config, **params), on_step=t.on_step)
        trainer.whole = train
        for epoch in trainer.epochs(train[:self.rows], valid): yield epoch.score

    @property
    def fingerprint(self): return super().fingerprint | dict(evaluation_rows=self.rows)

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
        self.table = table_from(thinned(read_rows(path, a.documents + a.fresh_documents), a.negatives, a.hypotheses), 'premise', 'label', 'hypothesis', group='group')
        self.groups, self.labels = np.asarray(self.table.groups), np.asarray(self.table.labels)
        self.search, self.fresh = documents_of(self.groups, (a.documents, a.fresh_documents))
        self.store = tokenise(self.table, tokenizer, a.length, progress=False).to(self.hardware.device)
        said(f'{self.hardware.card}: {len(self.search)} rows to search on, {len(self.fresh)} fresh ones, tokenised')
        half = self.hardware.device == 'cuda' and self.hardware.gpu.capability >= (8, 0)
        self.config = TrainConfig(epochs=a.evaluations, effective_batch=32, physical_batch=AT_ONCE, layout='sorted', precision='bf16' if half else 'fp32', eval_batch=AT_ONCE, metric='macro_f1', fast=a.fast, recover=False, read_every=10_000)
        start = time.perf_counter()
        self.engine = make_engine(load_model(source, self.table.classes, tokenizer), self.config, self.hardware)
        said(f'engine made in {time.perf_counter() - start:.1f} s')
        self.evaluation = {b: self._prepare(b) for b in BATCHES}
        self.prepared = time.perf_counter() - start

    def _prepare(self, batch):
        "Build shapes and choose kernels for a batch; seconds of an evaluation, the training before it included"
        start, values, times = time.perf_counter(), self.runner(0)(dict(effective_batch=batch), 0), []
        for _ in range(min(4, self.a.evaluations)):
            begun = time.perf_counter()
            next(values)
            times.append(time.perf_counter() - begun)
        values.close()
        if self.a.fresh: next(self.runner(1000, fresh=True)(dict(effective_batch=batch), 0)) # their folds are larger
        said(f'batches of {batch}: {min(times):.4f} s an evaluation, built in {time.perf_counter() - start:.1f} s; {self.engine}')
        return min(times)

    def runner(self, seed, fresh=False):
        rows = self.fresh if fresh else self.search
        folds = small_folds(rows, self.labels, self.groups, self.a.folds, self.a.train_documents, seed)
        config = TrainConfig(**json.loads(self.config.to_json()) | dict(seed=seed))
        return Timed(Trainer(self.engine, self.store, config), folds, self.a.evaluation_rows)


# --- a call

def run_study(s, strategy, seed, calls):
    "Trials until the study is whole or the time is over; whether it is whole"
    a, runner, trials = s.a, s.runner(seed), []
    calls.append(dict(study=f'{strategy}-{seed}', card=s.hardware.card, fast=a.fast, trials=trials))
    mark = [time.perf_counter(), 0., 0., runner.build_seconds]
    def on_trial(study, trial):
        now = [time.perf_counter(), runner.inside, runner.begin, runner.build_seconds]
        wall, inside, begin, build = (n - m for n, m in zip(now, mark))
        trials.append(dict(number=trial.number, ended=ended(trial), wall=wall, inside=inside, begin=begin, build=build))
        write_json(Path(a.state) / 'calls.json', calls)
        if len(trials) in (1, 3) or not len(trials) % 10: said(_standing(s, f'{strategy}-{seed}', trials))
        mark[:] = [time.perf_counter(), *now[1:]]
        if since_start() > a.limit: raise Enough
    try: tune(runner, list(SPACE), a.trials, folds=a.folds, epochs=a.evaluations, strategy=strategy, storage=Path(a.state) / 'study.db', name=f'{strategy}-{seed}', seed=seed, on_trial=on_trial, progress=False, say=said)
    except Enough: return False
    finally:
        if not trials: calls.pop()
        else: said(_standing(s, f'{strategy}-{seed}', trials))
    return True


def _standing(s, name, trials):
    took, inside = (sum(t[k] for t in trials) for k in ('wall', 'inside'))
    return f'{name}: {len(trials)} trials in this call in {took:.1f} s, {took - inside:.2f} s of it outside of the runner'


def fresh_scores(s, params, kept):
    "Best score of each fold on documents that no study saw, by seed; raises `Enough`"
    name = json.dumps(params, sort_keys=True)
    for seed in range(s.a.fresh):
        if str(seed) in kept.setdefault(name, {}): continue
        runner = s.runner(1000 + seed, fresh=True)
        kept[name][str(seed)] = [max((v for v in runner(params, f) if math.isfinite(v)), default=math.nan) for f in range(s.a.folds)]
        write_json(Path(s.a.state) / 'fresh.json', kept)
        if since_start() > s.a.limit: raise Enough
    return kept.get(name, {})


def studies_of(a):
    with silent():
        storage = sqlite_storage(Path(a.state) / 'study.db')
        there = set(optuna.get_all_study_names(storage))
        found = {(s, n): optuna.load_study(study_name=f'{s}-{n}', storage=storage) for n in range(a.study_seeds) for s in a.strategies if f'{s}-{n}' in there}
    return {k: study for k, study in found.items() if _whole(a, study)}


def _whole(a, study): return sum(ended(t) is not None for t in study.get_trials(deepcopy=False)) >= a.trials


def _read_json(path, empty): return read_json(path) if path.is_file() else empty


def pilot(a):
    "Whether and how fast it learns: a few learning rates in full on one fold, and what a study would take"
    s, took = Setting(a), []
    for batch in BATCHES:
        for lr in (1e-4, 3e-4, 1e-3):
            start = time.perf_counter()
            values = list(s.runner(0)(dict(lr=lr, effective_batch=batch), 0))
            took.append(time.perf_counter() - start)
            said(f'batch {batch:3}, lr {lr:g}: {took[-1]:5.2f} s, F1 ' + ' '.join(f'{v:.3f}' for v in values[::max(1, len(values) // 6)]) + f', best {max(values):.3f}')
            if since_start() > a.limit: break
    trial = float(np.mean(took)) * a.folds
    said(f'a trial that is not stopped takes {trial:.2f} s, {a.study_seeds} studies of {a.trials} of them {a.study_seeds * a.trials * trial / 60:.1f} min')
    return took


def run(a):
    Path(a.state).mkdir(parents=True, exist_ok=True)
    s, calls, kept = Setting(a), _read_json(Path(a.state) / 'calls.json', []), _read_json(Path(a.state) / 'fresh.json', {})
    whole = studies_of(a) if (Path(a.state) / 'study.db').is_file() else {}
    said(f'prepared in {s.prepared:.1f} s; {len(whole)} of {len(a.strategies) * a.study_seeds} studies are whole; a study that stops nothing takes about {np.mean([*s.evaluation.values()]) * a.trials * a.folds * a.evaluations:.0f} s')
    done = False
    write_json(Path(a.state) / 'where.json', where_of(a, s)) # also for a call that is killed
    try:
        for seed in a.seeds:
            for strategy in a.strategies:
                if (strategy, seed) not in whole and not run_study(s, strategy, seed, calls): raise Enough
            for study in (v for (_, n), v in studies_of(a).items() if n == seed):
                if best := best_complete(study): fresh_scores(s, best.params, kept)
        done = True
    except Enough: pass
    finally: _close(a)
    write_json(Path(a.state) / 'where.json', where := where_of(a, s)) # again: the engine may have noted what did not work
    path = save(a, where, calls, kept)
    _close(a)
    said(f'all is done: {path}' if done else f'not done yet, the same call goes on with what is in {a.state}' + (f'; so far: {path}' if path else ''))
    return path if done else None


def _close(a):
    "One file holds the studies: nothing is left in a write-ahead log"
    import sqlite3
    if (path := Path(a.state) / 'study.db').is_file():
        with sqlite3.connect(path) as db: db.execute('pragma wal_checkpoint(truncate)')
        db.close()
    path.with_name(f'{path.name}-lock').unlink(missing_ok=True)


# --- what came of it

def row_of(a, study, strategy, seed, calls, kept):
    "Time, epochs and scores of one study"
    trials, best = [t for t in study.get_trials(deepcopy=False) if ended(t)], best_complete(study)
    parts = [c for c in calls if c['study'] == f'{strategy}-{seed}']
    timed = [t for c in parts for t in c['trials']]
    firsts = [c['trials'][0] for c in parts] # each follows the opening of a database, and the imports of a process
    late = [t for c in parts for t in c['trials'] if t['number'] or seed] # all but the first trial of all
    fresh = kept.get(json.dumps(best.params, sort_keys=True), {}) if best else {}
    scores = np.array([fresh[k] for k in sorted(fresh, key=int)], dtype=float) # None, as a file holds what is no number, is NaN
    outside, epochs = sum(t['wall'] - t['inside'] for t in timed), lambda some: sum(spent(t)['epochs'] for t in some)
    late_stops = [t for t in trials if ended(t) == 'stopped' and max(t.intermediate_values, default=0) > a.evaluations] # after their first fold
    return dict(study=f'{strategy}-{seed}', strategy=strategy, seed=seed, trials=len(trials), complete=sum(ended(t) == 'complete' for t in trials), stopped=sum(ended(t) == 'stopped' for t in trials),
                seconds=sum(spent(t)['seconds'] - spent(t).get('build', 0.) for t in trials), epochs=epochs(trials), epochs_first_third=epochs(trials[:a.trials // 3]) / max(1, epochs(trials)), epochs_late_stops=epochs(late_stops) / max(1, epochs(trials)), calls=len(parts), cards=sorted({c['card'] for c in parts}),
                wall=sum(t['wall'] for t in timed), build=sum(t['build'] for t in timed), outside=outside, first=sum(t['wall'] - t['build'] for t in firsts), outside_first=sum(t['wall'] - t['inside'] for t in firsts), outside_share=outside / max(1e-9, sum(t['wall'] - t['build'] for t in timed)),
                fixed=quantiles([t['wall'] - t['inside'] + t['begin'] - t['build'] for t in late]) if late else None,
                best=best.number if best else None, params=best.params if best else None, search=best.value if best else None, fresh=float(scores.mean()) if len(scores) else None, fresh_scores=scores.tolist())


def lowest(lost):
    "Lower end of a one-sided 95% interval of the mean over studies (Student); None for fewer than two"
    from scipy.stats import t as student
    if len(lost) < 2: return None
    return float(lost.mean() - student.ppf(.95, len(lost) - 1) * lost.std(ddof=1) / math.sqrt(len(lost)))


def compared(rows, strategy):
    "A strategy against none, seed by seed"
    pair = [(r, n) for r in rows for n in rows if r['strategy'] == strategy and n['strategy'] == 'none' and n['seed'] == r['seed']]
    ratio = np.array([n['seconds'] / r['seconds'] for r, n in pair])
    epochs = np.array([n['epochs'] / r['epochs'] for r, n in pair])
    lost = np.array([r['fresh'] - n['fresh'] for r, n in pair if r['fresh'] is not None and n['fresh'] is not None])
    fold = np.array([np.array(r['fresh_scores']) - np.array(n['fresh_scores']) for r, n in pair if r['fresh'] is not None and n['fresh'] is not None])
    return dict(variant=strategy, baseline='none', claim={'hyperband': 'hyperband', 'reports': 'patience'}.get(strategy), ratio=dict(p50=float(np.median(ratio)), low=float(ratio.min()), high=float(ratio.max())),
                epochs_ratio=dict(p50=float(np.median(epochs)), low=float(epochs.min()), high=float(epochs.max())), seconds=quantiles([r['seconds'] for r, _ in pair]), epochs=quantiles([r['epochs'] for r, _ in pair]),
                fresh=dict(mean=float(np.mean([r['fresh'] for r, _ in pair if r['fresh'] is not None])) if len(lost) else None, difference=float(lost.mean()) if len(lost) else None, by_seed=lost.tolist(),
                           se_of_runs=float(fold.mean(-1).std(ddof=1) / math.sqrt(fold.shape[0] * fold.shape[1])) if fold.size and fold.shape[0] * fold.shape[1] > 1 else None, margin=MARGIN,
                           low=lowest(lost), non_inferior=bool(len(lost) > 1 and lowest(lost) >= -MARGIN)),
                outside_share=quantiles([r['outside_share'] for r, _ in pair]), fixed=quantiles([r['fixed']['p50'] for r, _ in pair if r['fixed']]) if any(r['fixed'] for r, _ in pair) else None, repeats=len(pair))


def recorded(a, studies):
    "Values of every complete trial of the studies without stopping, by fold and evaluation"
    rows = []
    for (strategy, seed), study in studies.items():
        stride = study.user_attrs['optkit']['stride']
        if strategy == 'none': rows += [dict(seed=seed, number=t.number, params=t.params, seconds=round(spent(t)['seconds'], 3), values=[[round(v, 5) for v in c] for c in curves(t, stride)])
                                        for t in study.get_trials(deepcopy=False) if ended(t) == 'complete']
    return dict(space=as_space(list(SPACE)).known, folds=a.folds, evaluations=a.evaluations, metric='macro_f1', rows=rows)


def where_of(a, s):
    "Card, command and versions, as the record will hold them: kept with the state, so that it can be written elsewhere"
    card = f'{s.hardware.card}-dry' if a.dry else s.hardware.card
    return dict(card=card, provenance=provenance(s.hardware, command_of(a)) | dict(workload='MiniLM (22.7M) on hoc_pairs, grouped folds', sizes={k: getattr(a, k) for k in SIZES}, fast=a.fast, engine=repr(s.engine), seconds_an_evaluation=s.evaluation))


def gather(a):
    "What calls with folders of their own have done, in one folder and one record; a study that is in several is taken from where it has most trials"
    folders = [Path(f) for f in a.gather]
    if len({f.resolve() for f in folders}) < len(folders): raise InputError('a folder is named twice, expected one for each call')
    for f in folders:
        if missing := [n for n in ('study.db', 'where.json') if not (f / n).is_file()]: raise InputError(f'{f} has no {" and no ".join(missing)}, expected the folder of a call (--state)')
    if Path(a.state).exists() and any(Path(a.state).iterdir()): raise InputError(f'{a.state} is not empty, expected a new folder for what is gathered')
    wheres = [read_json(f / 'where.json') for f in folders]
    setting = lambda w: (w['card'], *(w['provenance'][k] for k in ('sizes', 'fast', 'torch', 'transformers')))
    for f, w in zip(folders, wheres):
        if setting(w) != setting(wheres[0]): raise InputError(f'{f} and {folders[0]} differ in card, sizes, engine or versions: {setting(w)} and {setting(wheres[0])}')
    vars(a).update(wheres[0]['provenance']['sizes'])
    Path(a.state).mkdir(parents=True, exist_ok=True)
    calls, kept, into = [], {}, f'sqlite:///{Path(a.state).resolve() / "study.db"}'
    with silent():
        taken = {}
        for f in folders:
            storage = sqlite_storage(f / 'study.db')
            for name in optuna.get_all_study_names(storage):
                found_ = optuna.load_study(study_name=name, storage=storage)
                if name not in taken or len(found_.trials) > len(taken[name][1].trials): taken[name] = f, found_, storage
        for name, (_, _, storage) in taken.items(): optuna.copy_study(from_study_name=name, from_storage=storage, to_storage=into)
    for f in folders:
        calls += [c for c in _read_json(f / 'calls.json', []) if taken.get(c['study'], (None,))[0] == f]
        for params, scores in _read_json(f / 'fresh.json', {}).items(): kept.setdefault(params, {}).update(scores)
    where = wheres[0] | dict(provenance=wheres[0]['provenance'] | dict(calls_beside_each_other=len(folders)))
    for name, value in dict(calls=calls, fresh=kept, where=where).items(): write_json(Path(a.state) / f'{name}.json', value)
    path = save(a, where, calls, kept)
    _close(a)
    return path


def save(a, where, calls, kept):
    "Records of the studies that are whole; None without any"
    studies = studies_of(a)
    if not studies: return None
    rows = [row_of(a, study, *key, calls, kept) for key, study in studies.items()]
    pairs = {n for _, n in studies if all((t, n) in studies for t in ('none', *a.strategies))}
    card, where = where['card'], where['provenance'] | dict(whole=f'{len(studies)} of {len(a.strategies) * a.study_seeds} studies')
    table, path = recorded(a, studies), Path(a.out) / f'study-real-{card}.json'
    write_json(path.with_name(f'study-real-curves-{card}.json'), dict(provenance=where, **table))
    write_json(path, dict(provenance=where, rows=[compared([r for r in rows if r['seed'] in pairs], name) for name in a.strategies] if pairs else [], studies=rows, simulated=[]))
    for r in rows: print(f'{r["study"]:12} {r["seconds"]:7.1f} s, {r["epochs"]:6,} evaluations, {r["complete"]:3} of {r["trials"]} complete, outside {r["outside_share"]:.1%}, fixed {r["fixed"]["p50"] if r["fixed"] else math.nan:.3f} s, search {number(r["search"])}, fresh {number(r["fresh"])}')
    return path


def number(value): return 'n/a' if value is None else f'{value:.4f}'


# --- studies from recorded curves

class FoldCurves:
    """Recorded scores by fold and evaluation. A suggestion gets those of one of the few nearest recorded configurations, drawn with the study's seed, since trainings of
    nearly the same configuration scatter; its truth is the mean of these. How many, and how much each parameter counts for what is near, is fitted: each trial predicted from the others."""
    def __init__(self, table):
        self.space, self.folds, self.epochs = {k: json_to_distribution(v) for k, v in table['space'].items()}, table['folds'], table['evaluations']
        self.rows = [r for r in table['rows'] if len(r['values']) == self.folds and all(len(c) == self.epochs for c in r['values'])]
        if len(self.rows) < 2: raise InputError(f'{len(self.rows)} whole trials are recorded, expected at least 2')
        places = np.array([self.place(r['params']) for r in self.rows])
        self.truths = np.array([-np.mean([max(c) for c in r['values']]) for r in self.rows])
        self.weights, self.explained, self.near = max(((*fitted_weights(places, self.truths, n), n) for n in {min(n, len(self.rows) - 1) for n in NEAR}), key=lambda f: f[1])
        self.places = places * self.weights
        self.seconds = 0. # of what was run, as recorded

    def place(self, params):
        unit = lambda v, d: d.choices.index(v) / max(1, len(d.choices) - 1) if hasattr(d, 'choices') else (math.log(v / d.low) / math.log(d.high / d.low) if d.log else (v - d.low) / (d.high - d.low))
        return [unit(params[k], d) for k, d in self.space.items()]

    def nearest(self, params): return self._nearest(np.array(self.place(params)) * self.weights) # rows
    def _nearest(self, place): return np.argsort(((self.places - place) ** 2).sum(1), kind='stable')[:self.near]
    def truth(self, params): return float(self.truths[self.nearest(params)].mean())
    def optimum(self): return min(float(self.truths[self._nearest(p)].mean()) for p in self.places) # at the best of the recorded places: between them a truth can be a little lower
    def runner(self, seed):
        self.seconds = 0.
        def values(params, fold):
            drawn = np.random.default_rng([seed, *hashlib.sha256(json.dumps(params, sort_keys=True).encode()).digest()[:8]]).integers(self.near) # the same for all folds
            row = self.rows[self.nearest(params)[drawn]]
            for value in row['values'][fold]:
                self.seconds += row.get('seconds', 0.) / (self.folds * self.epochs)
                yield value
        return values


def fitted_weights(places, truths, near, steps=(.01, .03, .1, .3, 1., 3.)):
    "Weights of the parameters with which the mean of the nearest other trials predicts a trial best, and the share of the variance that it explains"
    def missed(weights):
        away = (((places[:, None] - places[None]) * weights) ** 2).sum(-1)
        np.fill_diagonal(away, np.inf)
        return float(((truths[np.argsort(away, 1, kind='stable')[:, :near]].mean(1) - truths) ** 2).mean())
    weights = np.ones(places.shape[1])
    for _ in range(3):
        for k in range(len(weights)):
            tried = [np.where(np.arange(len(weights)) == k, step, weights / max(weights)) for step in steps] # of the largest
            weights = min(tried, key=missed)
    return weights, 1 - missed(weights) / max(float(truths.var()), 1e-12)


def simulate_all(table, trials, seeds, strategies):
    "Studies of that many trials under each strategy; epochs, recorded seconds and regret of the winner"
    curves_, out = FoldCurves(table), []
    for strategy in strategies:
        found_ = []
        for seed in range(seeds):
            with silent(): study = simulate(curves_, strategy, trials, seed)
            found_.append((int(study.spent[-1]), curves_.seconds, float(study.regret[-1]), int(study.complete[-1])))
        epochs, seconds, regret, complete = map(np.array, zip(*found_))
        out.append(dict(strategy=strategy, trials=trials, studies=seeds, configurations=len(curves_.rows), near=curves_.near, weights={k: float(w) for k, w in zip(curves_.space, curves_.weights)}, explained=curves_.explained, epochs=epochs.tolist(), seconds=seconds.tolist(), regret=[r if math.isfinite(r) else None for r in regret.tolist()], complete=complete.tolist()))
    base = next((r for r in out if r['strategy'] == 'none'), None)
    for r in out if base else []:
        r['epochs_ratio'] = quantiles(np.array(base['epochs']) / np.array(r['epochs']))
        r['seconds_ratio'] = quantiles(np.array(base['seconds']) / np.maximum(r['seconds'], 1e-9))
        known = [(x, y) for x, y in zip(r['regret'], base['regret']) if x is not None and y is not None]
        lost = np.array([x - y for x, y in known])
        r['lost'], r['lost_se'] = float(lost.mean()) if len(lost) else None, float(lost.std(ddof=1) / len(lost) ** .5) if len(lost) > 1 else None
        r['epochs_saved'], r['seconds_saved'] = (float(np.sum(base[k]) / np.sum(r[k])) if np.sum(r[k]) else None for k in ('epochs', 'seconds')) # all studies together; None: no times are recorded
    return out


def show(simulated):
    for r in simulated: print(f'simulated, {r["trials"]} trials x {r["studies"]}: {r["strategy"]:10} {np.mean(r["epochs"]):8,.0f} epochs' + (f', {r["epochs_saved"]:.2f} times fewer than none, {"no" if r["seconds_saved"] is None else format(r["seconds_saved"], ".2f")} times less time, {"no winner" if r["lost"] is None else f"""{r["lost"]:+.4f} (standard error {number(r["lost_se"])}) F1 lost"""}' if 'lost' in r else ''))


# --- the command

SIZES = dict(documents=400, train_documents=260, fresh_documents=600, hypotheses=2, negatives=1, length=128, evaluation_rows=128, evaluations=30, folds=3, trials=60, study_seeds=3, fresh=4)


def command_of(a): return 'python bench/study.py' + ''.join(f' --{k.replace("_", "-")} {getattr(a, k)}' for k in SIZES) + (' --fast' if a.fast else '') + (' --dry' if a.dry else '')


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items(): p.add_argument(f'--{name.replace("_", "-")}', type=int, default=value)
    p.add_argument('--strategies', nargs='+', default=list(STRATEGIES), choices=STRATEGIES)
    p.add_argument('--seeds', nargs='+', type=int, help='study seeds of this call, all without'); p.add_argument('--gather', nargs='+', metavar='STATE', help='only gather what calls with folders of their own have done into --state')
    p.add_argument('--state', default='runs/study-real', help='folder that holds what is done'); p.add_argument('--out', default='bench/results')
    p.add_argument('--limit', type=float, default=500., help='seconds after which no further trial begins, from the start of the process'); p.add_argument('--fast', action='store_true', help='on the fast engine')
    p.add_argument('--dry', action='store_true', help='tiny, whatever the sizes'); p.add_argument('--pilot', action='store_true', help='only whether and how fast it learns; writes nothing')
    p.add_argument('--simulate', metavar='FILE', help='only simulate from recorded curves'); p.add_argument('--into', metavar='FILE', help='record that gets what was simulated')
    p.add_argument('--simulated-trials', type=int, default=200); p.add_argument('--simulated-seeds', type=int, default=40)
    a = p.parse_args(argv)
    if a.dry: vars(a).update(documents=6, train_documents=1, fresh_documents=6, length=16, evaluation_rows=5, evaluations=3, trials=4, study_seeds=1, fresh=1, simulated_trials=12, simulated_seeds=2)
    if a.seeds is None: a.seeds = [*range(a.study_seeds)]
    if wrong := [n for n in a.seeds if not 0 <= n < a.study_seeds]: p.error(f'study seeds are 0 to {a.study_seeds - 1} (--study-seeds), not {", ".join(map(str, wrong))}')
    return a


def with_simulated(record_, found_, command):
    "The record with these rows; rows of studies of another size stay, each with its own command and commit"
    said, earlier = dict(by=command, commit=provenance(detect(), command)['commit']), dict(by=record_['simulated_by']) if 'simulated_by' in record_ else {} # where one command stood for all rows
    kept = [earlier | r for r in record_.get('simulated', []) if r['trials'] != found_[0]['trials']]
    return {k: v for k, v in record_.items() if k != 'simulated_by'} | dict(simulated=kept + [r | said for r in found_])


def main(argv=None):
    global BEGAN
    BEGAN = psutil.Process().create_time() if argv is None else time.time()
    a = parse(argv)
    if a.pilot: return pilot(a)
    if a.gather: return gather(a)
    if not a.simulate: return run(a)
    data = read_json(a.simulate)
    found_ = simulate_all(data, a.simulated_trials, a.simulated_seeds, a.strategies)
    show(found_)
    if a.into: write_json(a.into, with_simulated(read_json(a.into), found_, f'python bench/study.py --simulate {a.simulate} --simulated-trials {a.simulated_trials} --simulated-seeds {a.simulated_seeds}' + (f' --strategies {" ".join(a.strategies)}' if a.strategies != list(STRATEGIES) else '')))
    return found_


if __name__ == '__main__': main()
