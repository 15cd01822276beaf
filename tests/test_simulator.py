"Simulated studies: the curves, the loop against the real search, the table and its record, the replay"
import gzip, json, math, os, sys
from pathlib import Path

import numpy as np
import pytest

from optkit.base import InputError
from optkit.space import ended, fold_scores, spent
from optkit.hpo import tune
from optkit.simulator import NOISY, RecordedCurves, replay, simulate, SyntheticCurves, taskset_curves
from optkit.strategies import Course, Racing, StudySize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
from simulated_studies import interval, main, run_table, summarise_table, taskset_table

TASKSET = Path(__file__).resolve().parents[1].parent / 'shared' / 'data' / 'taskset'
GOOD = dict(lr=4e-5, batch=64, weight_decay=.03, warmup=.1, dropout=.14, smoothing=.08)


# --- curves

def test_a_fold_is_the_clean_curve_and_the_stated_noise():
    curves = SyntheticCurves(epochs=100)
    quiet = SyntheticCurves(fold=0., trial=0., epoch=0.)
    assert [-v for v in quiet.runner(0)(GOOD, 0)] == pytest.approx(quiet.clean(GOOD)[:len(list(quiet.runner(0)(GOOD, 0)))])
    rest = []  # of many configurations: offsets of folds, of trials in folds, and of epochs
    for s in range(60):
        run = curves.runner(s)
        for f in range(5):
            found = np.array([-v for v in run(dict(GOOD, lr=3e-5 + s * 1e-8), f)])
            rest.append((s, f, found - curves.clean(dict(GOOD, lr=3e-5 + s * 1e-8))[:len(found)]))
    means = np.array([[r.mean() for s, f, r in rest if s == t] for t in range(60)])
    assert np.abs(means.mean(1)).max() < .015 and means.std() == pytest.approx(math.hypot(.02 * math.sqrt(4 / 5), .008), rel=.15)
    inner = np.concatenate([r - r.mean() for *_, r in rest])
    assert inner.std() == pytest.approx(.006, rel=.1)
    pairs = np.concatenate([np.stack([r[:-1] - r.mean(), r[1:] - r.mean()]) for *_, r in rest], 1)
    assert np.corrcoef(pairs)[0, 1] == pytest.approx(.3, abs=.08)


def test_the_start_of_a_curve_says_what_is_stated():
    from scipy.stats import spearmanr
    curves, rng = SyntheticCurves(), np.random.default_rng(0)
    draw = lambda d: math.exp(rng.uniform(math.log(d.low), math.log(d.high))) if d.log else rng.uniform(d.low, d.high)
    points = [{k: draw(d) for k, d in curves.space.items()} for _ in range(800)]
    truth, run = np.array([curves.truth(p) for p in points]), curves.runner(0)
    folds = [list(run(p, 0)) for p in points]
    found = [spearmanr([-max(c[:n]) for c in folds], truth)[0] for n in (3, 9, 27)]
    assert found == pytest.approx([.46, .68, .92], abs=.08) and found == sorted(found)


def test_the_optimum_is_below_everything_that_is_drawn():
    curves, rng = SyntheticCurves(), np.random.default_rng(1)
    best = curves.optimum()
    assert best <= curves.truth(GOOD) < best + 2e-3
    assert all(curves.truth({k: rng.uniform(d.low, d.high) for k, d in curves.space.items()}) > best for _ in range(500))


def test_a_fold_stops_by_itself_and_few_values_are_the_same_training():
    long, short = SyntheticCurves(fold=0., trial=0., epoch=0.), SyntheticCurves(fold=0., trial=0., epoch=0., epochs=10)
    hot = dict(GOOD, lr=8e-4)
    assert len(list(long.runner(0)(hot, 0))) < 100 and short.clean(GOOD)[-1] == long.clean(GOOD)[-1] and short.clean(GOOD)[0] == pytest.approx(long.clean(GOOD)[9])


def write_task(path, rows=60, epochs=12, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in range(rows):
        top = rng.uniform(.3, .7)
        losses = [.7 - (.7 - top) * e / epochs for e in range(1, epochs + 1)]
        if n == 7: losses[3:] = ['NaN'] * 9
        made.append(dict(hp=dict(learning_rate=10 ** rng.uniform(-5, -1), beta1=rng.uniform(.5, .999)), train=dict(loss=losses), valid=dict(loss=losses)))
    with gzip.open(path, 'wt') as file: json.dump(made, file)
    return path


def test_recorded_curves(tmp_path):
    task = taskset_curves(write_task(tmp_path / 'a_task.json.gz'))
    assert (task.name, task.epochs, task.points.shape, list(task.space)) == ('a_task', 12, (60, 2), ['x0', 'x1']) and task.points.min() == 0 and task.points.max() == 1
    for n in (0, 7, 33): assert task.nearest(dict(x0=task.points[n, 0], x1=task.points[n, 1])) == n
    params = dict(x0=task.points[33, 0], x1=task.points[33, 1])
    assert task.truth(params) == task.losses[33].min() >= task.optimum() and task.rank(params) == np.mean(task.truths() < task.truth(params))
    found = np.mean([[-v for v in task.runner(s)(params, f)] for s in range(20) for f in range(5)], 0)
    assert found == pytest.approx(task.losses[33], abs=.004)
    assert math.isnan(list(task.runner(0)(dict(x0=task.points[7, 0], x1=task.points[7, 1]), 0))[5])


# --- the loop

@pytest.mark.parametrize('strategy', ['none', 'racing', 'wilcoxon', Racing(checkpoints=(.3,), risk=.2)], ids=str)
def test_the_search_and_the_simulator_agree(strategy):
    curves = SyntheticCurves(folds=3, epochs=12)
    real = tune(curves.runner(4), curves.space, 45, folds=3, epochs=12, strategy=strategy, storage='memory', seed=4, progress=False)
    toy = simulate(curves, strategy, 45, seed=4, optimum=0.)
    assert np.cumsum([spent(t)['epochs'] for t in real.trials]).tolist() == toy.spent.tolist()
    assert [t.value if t.state.name == 'COMPLETE' else None for t in real.trials] == list(toy.values)
    assert np.cumsum([ended(t) == 'complete' for t in real.trials]).tolist() == toy.complete.tolist()
    assert curves.truth(real.best_trial.params) == pytest.approx(toy.regret[-1])


def test_a_diverged_configuration_costs_what_it_ran(tmp_path):
    task = taskset_curves(write_task(tmp_path / 'a.json.gz'))
    found = simulate(task, 'none', 40, seed=1)
    assert len(found.values) == 40 and found.spent[-1] == sum(60 if v is not None else 4 for v in found.values)


def test_a_budget_goes_on_behind_the_trials():
    curves = SyntheticCurves(folds=2, epochs=5)
    found = simulate(curves, 'racing', 20, seed=0, budget=400, optimum=0.)
    assert len(found.spent) > 20 and found.spent[-2] < 400 <= found.spent[-1] and found.at_epochs(3) == math.inf and found.at_epochs(10**6) == found.regret[-1]
    assert found.at_epochs(int(found.spent[9])) == found.regret[9] and found.at_trials(10)['regret'] == found.regret[9]


@pytest.mark.parametrize('kind', [{}, NOISY], ids=['synthetic', 'noisy'])
def test_racing_spends_less_and_finds_as_much(kind):
    curves = SyntheticCurves(**kind)
    best, rows = curves.optimum(), []
    for seed in range(3): rows.append([simulate(curves, s, 100, seed, optimum=best) for s in ('none', 'racing')])
    assert np.mean([b.spent[-1] / a.spent[-1] for a, b in rows]) < .5
    assert np.mean([b.regret[-1] - a.regret[-1] for a, b in rows]) < 2 * curves.margin


@pytest.mark.slow
def test_racing_needs_a_third_of_the_epochs_on_held_out_seeds():
    curves = SyntheticCurves()
    best = curves.optimum()
    rows = [[simulate(curves, s, 400, seed, optimum=best) for s in ('none', 'racing')] for seed in range(60, 70)]
    assert np.mean([b.spent[-1] for _, b in rows]) < np.mean([a.spent[-1] for a, _ in rows]) / 3 * 1.05
    assert interval(np.array([b.regret[-1] - a.regret[-1] for a, b in rows]))[1] < curves.margin


# --- the table

def test_the_command_goes_on_and_writes_one_record(tmp_path, monkeypatch):
    for n in range(4): write_task(tmp_path / f'task{n}.json.gz', seed=n)
    words = ['--kinds', 'small_12', 'short_40', '--out', str(tmp_path / 'record.json'), '--journal', str(tmp_path / 'j.jsonl'), '--strategies', 'none', 'racing', '--quiet']
    main(['--seeds', '2', *words])
    first = (tmp_path / 'j.jsonl').read_text()
    (tmp_path / 'j.jsonl').write_text(first + '{"kind": "small_12", "strat')  # torn by a kill
    record = json.loads(main(['--seeds', '3', *words]).read_text())
    after = (tmp_path / 'j.jsonl').read_text()
    assert after.startswith(first) and after.count('\n') == 12 and len({(r['kind'], r['strategy'], r['seed']) for r in map(json.loads, after.splitlines())}) == 12
    assert {r['variant'] for r in record['rows']} == {'none', 'racing'} and record['provenance']['seeds'] == 3 and 'command' in record['provenance']
    for row in record['rows']:
        studies = [json.loads(l) for l in after.splitlines() if f'"{row["kind"]}", "strategy": "{row["variant"]}"' in l]
        assert row['epochs'] == pytest.approx(np.mean([s['epochs'] for s in studies])) and row['regret'] == pytest.approx(np.mean([s['regret'] for s in studies]))
    both = taskset_table(tmp_path)
    assert both['taskset'][0](0).name == 'task0' and both['taskset'][0](1).name == 'task1' and both['taskset_held_out'][0](0).name == 'task2' and taskset_table(tmp_path / 'missing') == {}
    assert sorted(p.name for p in tmp_path.glob('*.json*') if 'task' not in p.name) == ['j.jsonl', 'record.json'] and not list(tmp_path.glob('.*'))


def test_recorded_curves_may_have_more_seeds(tmp_path, monkeypatch):
    for n in range(2): write_task(tmp_path / f'task{n}.json.gz', seed=n)
    monkeypatch.setattr('simulated_studies.simulate_cell', lambda curves, strategy, trials, seed, optima: dict(epochs=1., complete=1, regret=.1 * seed, **(dict(rank=.1) if curves.name.startswith('task') else {})))
    record = json.loads(main(['--kinds', 'small_12', 'taskset', '--seeds', '3', '--taskset', str(tmp_path), '--taskset-seeds', '7', '--strategies', 'none', 'racing', '--quiet', '--out', str(tmp_path / 'record.json'), '--journal', str(tmp_path / 'j.jsonl')]).read_text())
    assert {(r['kind'], r['studies']) for r in record['rows'] if r['seeds_part'] == 'all'} == {('small_12', 3), ('taskset', 7)}
    assert record['provenance']['command'].endswith('--seeds 3 --taskset FOLDER --taskset-seeds 7 --strategies none racing --kinds small_12 taskset')


def test_an_earlier_record_gives_the_rows_that_are_not_made_again(tmp_path, monkeypatch):
    level = dict(none=.1, racing=.2, asha=.3)
    monkeypatch.setattr('simulated_studies.simulate_cell', lambda curves, strategy, trials, seed, optima: dict(epochs=1., complete=1, regret=level[strategy] + .01 * seed))
    def make(name, *words, kinds=('synthetic', 'small_12'), seeds='3'):
        words = ['--kinds', *kinds, '--seeds', seeds, '--quiet', '--out', str(tmp_path / f'{name}.json'), '--journal', str(tmp_path / f'{name}.jsonl'), *words]
        return json.loads(main(words).read_text())
    old = make('old', '--strategies', 'none', 'racing', 'asha')
    level['racing'] = .15
    keep = ('--keep', str(tmp_path / 'old.json'), '--strategies', 'none', 'racing')
    new = make('new', *keep, kinds=('synthetic',))
    found = {(r['kind'], r['variant'], r['seeds_part']): round(r['regret'] - r['regret_none'], 3) for r in new['rows']}
    assert found['synthetic', 'racing', 'all'] == .05 and found['synthetic', 'asha', 'all'] == .2 and found['small_12', 'racing', 'all'] == .1
    assert {k for k in found} == {(r['kind'], r['variant'], r['seeds_part']) for r in old['rows']}
    assert new['provenance']['kept']['rows'] == ['asha on synthetic', 'none on small_12', 'racing on small_12'] and new['provenance']['kept']['commit'] == old['provenance']['commit'] and '--keep' in new['provenance']['command']
    assert make('third', '--keep', str(tmp_path / 'new.json'), '--strategies', 'none')['provenance']['kept']['before'] == new['provenance']['kept']
    for words, said in (((*keep[:2], '--strategies', 'racing'), 'without none'), (keep, 'is of 3 seeds')):
        with pytest.raises(InputError, match=said): make('no', *words, seeds='3' if 'none' in said else '4')
    assert not (tmp_path / 'no.jsonl').exists()


def test_non_inferior_means_the_upper_end_below_the_margin():
    def rows(shift, spread, n=50):
        rng, made = np.random.default_rng(0), []
        for seed in range(n):
            for s, r in (('none', .01), ('racing', .01 + shift + rng.normal(0, spread))): made.append(dict(kind='k', strategy=s, seed=seed, trials=9, epochs=100 if s == 'none' else 30, regret=r, complete=9))
        return next(r for r in summarise_table(made, dict(k=.004)) if r['variant'] == 'racing' and r['seeds_part'] == 'all')
    assert rows(0, .002)['non_inferior'] and not rows(.005, .002)['non_inferior'] and not rows(0, .03)['non_inferior'] and rows(0, .002)['epochs_share'] == pytest.approx(.3)
    none = [dict(kind='k', strategy=s, seed=n, trials=9, epochs=10, regret=math.inf if s == 'racing' else .1, complete=0) for s in ('none', 'racing') for n in range(5)]
    assert next(r for r in summarise_table(none, dict(k=.004)) if r['variant'] == 'racing')['non_inferior'] is False


def test_the_interval_covers():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval(rng.normal(1, 1, 50), repeats=400)
        inside += low < 1 < high
    assert .82 < inside / 200 < .96


@pytest.mark.parametrize('confidence', [.9, .6])
def test_the_interval_is_of_the_level_that_it_says(confidence):
    "A share of 0.8 of 200: the ends are quantiles of a binomial distribution"
    from scipy.stats import binom
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    assert interval(np.arange(200) < 160, confidence, 20000) == pytest.approx(binom.ppf(ends, 200, .8) / 200, abs=.0051)


# --- what would it have cost me?

def recorded(n=50, seed=0):
    curves, rng = SyntheticCurves(folds=3, epochs=20), np.random.default_rng(seed)
    run = curves.runner(seed)
    return [Course(i, [list(run(dict(GOOD, lr=10 ** rng.uniform(-6, -3)), f)) for f in range(3)]) for i in range(n)]


def test_a_replay_changes_nothing_and_counts_what_would_have_run():
    trials = recorded()
    before = [[list(c) for c in t.curves] for t in trials]
    none, raced = replay(trials, 'none'), replay(trials)
    assert none.epochs_then == none.epochs == sum(len(c) for t in trials for c in t.curves) and none.winner == none.winner_then and none.lost == 0
    assert raced.epochs_then < raced.epochs and raced.stopped == len(raced.reasons) > 5 and before == [[list(c) for c in t.curves] for t in trials]
    assert raced.lost >= 0 and (raced.winner == raced.winner_then) == (raced.lost == 0)


def test_a_replay_of_a_raced_study_does_not_invent_folds():
    trials = recorded()
    cut = [t if t.number % 3 else Course(t.number, t.curves[:1]) for t in trials]
    found = replay(cut, 'none', StudySize(3, 20, 50))
    assert found.epochs_then == found.epochs and found.stopped == 0
    half = Course(99); half.curves = [[.1, .2]]  # cut short in its first fold
    assert replay([*trials, half], 'none', StudySize(3, 20, 51)).epochs_then == replay(trials, 'none', StudySize(3, 20, 51)).epochs_then + 2


def test_a_replay_needs_something():
    with pytest.raises(InputError, match='nothing to replay'): replay([])
    with pytest.raises(InputError, match='cannot be replayed'): replay(recorded(3), 'reports')
    with pytest.raises(InputError, match='expected one of'): replay(recorded(3), 'greedy')


# --- on real learning curves, where they are

@pytest.mark.skipif(not TASKSET.is_dir(), reason='needs the data folder shared/data (taskset)')
def test_racing_on_recorded_curves():
    task = taskset_curves(sorted(TASKSET.glob('*.json.gz'))[3])
    assert task.losses.shape == (1000, 51)
    full, raced = (simulate(task, s, 100, seed=0) for s in ('none', 'racing'))
    assert raced.spent[-1] < .6 * full.spent[-1]
