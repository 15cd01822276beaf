"Simulated studies: the curves, the loop against the real search, the table and its record, the replay"
import gzip, json, math, os, re, sys
from pathlib import Path

import numpy as np
import pytest

from optkit.base import InputError
from optkit.space import best_complete, ended, fold_scores, spent
from optkit.hpo import tune
from optkit.simulator import FAMILIES, NOISY, RecordedCurves, replay, simulate, SyntheticCurves, taskset_curves
from optkit.strategies import as_strategy, Course, Deferred, Racing, StudySize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
import simulated_studies
from simulated_studies import cells, equal_quality, interval, main, read_journal, STUDIES, summarise, TUNING, VARIANTS, VERDICT

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

@pytest.mark.parametrize('strategy', ['none', 'racing', 'deferred', Racing(checkpoints=(.3,), risk=.2)], ids=str)
def test_the_search_and_the_simulator_agree(strategy):
    curves = SyntheticCurves(folds=3, epochs=12)
    real = tune(curves.runner(4), curves.space, 40, folds=3, epochs=12, strategy=strategy, storage='memory', seed=4, progress=False)
    toy = simulate(curves, strategy, 40, seed=4, optimum=0.)
    epochs = np.cumsum([spent(t)['epochs'] for t in real.trials])
    assert epochs[-1] == toy.spent[-1] and (strategy == 'deferred' or epochs.tolist() == toy.spent.tolist())
    assert [t.value if t.state.name == 'COMPLETE' else None for t in real.trials] == list(toy.values)
    complete = np.cumsum([ended(t) == 'complete' for t in real.trials])
    assert complete[-1] == toy.complete[-1] and (strategy == 'deferred' or complete.tolist() == toy.complete.tolist())
    assert curves.truth(best_complete(real).params) == pytest.approx(toy.regret[-1]) and best_complete(real).params == toy.best


# --- families

def test_each_family_is_what_its_name_says():
    curves = {name: SyntheticCurves(**fields) for name, fields in FAMILIES.items()}
    assert [c.name for c in curves.values()] == list(FAMILIES) == ['base', 'noisy', 'crossing', 'heavy', 'plateau', 'small']
    assert curves['base'].clean(GOOD) == pytest.approx(SyntheticCurves().clean(GOOD))
    slow, fast = dict(GOOD, lr=1.2e-5), dict(GOOD, lr=4e-5)
    for name, late in (('crossing', True), ('base', False)):  # the better one is behind at first
        c = curves[name]
        assert (c.clean(slow).min() < c.clean(fast).min()) == late and c.clean(slow)[8] > c.clean(fast)[8]
    flat = curves['plateau'].clean(dict(GOOD, lr=3e-6))
    steps = -np.diff(flat)
    assert steps[:2].max() < .02 < steps.max() and 3 < steps.argmax() < 40
    heavy, rng = curves['heavy'], np.random.default_rng(0)
    draws = np.array([heavy.draw(rng) for _ in range(20000)])
    assert .02 < np.mean(draws > .05) < .06 and np.std(draws[draws < .05]) == pytest.approx(heavy.trial, rel=.25) and np.mean(np.abs(draws) > 4 * heavy.trial) > .005
    assert curves['small'].trial == pytest.approx(4 * curves['base'].trial) and curves['small'].epoch == pytest.approx(4 * curves['base'].epoch)


def test_a_diverged_configuration_costs_what_it_ran(tmp_path):
    task = taskset_curves(write_task(tmp_path / 'a.json.gz'))
    found = simulate(task, 'none', 40, seed=1, sampler='tpe')
    assert len(found.values) == 40 and found.spent[-1] == sum(60 if v is not None else 4 for v in found.values)


def test_a_budget_goes_on_behind_the_trials():
    curves = SyntheticCurves(folds=2, epochs=5)
    found = simulate(curves, 'racing', 20, seed=0, budget=400, optimum=0., sampler='tpe')
    assert len(found.spent) > 20 and found.spent[-2] < 400 <= found.spent[-1] and found.at_epochs(3) == math.inf and found.at_epochs(10**6) == found.regret[-1]
    assert found.at_epochs(int(found.spent[9])) == found.regret[9] and found.at_trials(10)['regret'] == found.regret[9]


@pytest.mark.parametrize('kind', [{}, NOISY], ids=['synthetic', 'noisy'])
def test_deferred_folds_spend_less_and_find_as_much(kind):
    curves = SyntheticCurves(**kind)
    best, rows = curves.optimum(), []
    for seed in range(3): rows.append([simulate(curves, s, 120, seed, optimum=best) for s in ('none', 'deferred')])
    assert np.mean([b.spent[-1] / a.spent[-1] for a, b in rows]) < .3
    assert np.mean([b.regret[-1] - a.regret[-1] for a, b in rows]) < 2 * curves.margin


def test_no_trial_runs_more_than_without_stopping():
    "Where nothing can be saved the study costs at most what it costs without stopping, and noise brings more folds"
    runs = {}
    for trial in (.008, .3):
        curves = SyntheticCurves(folds=3, epochs=12, trial=trial, epoch=.75 * trial)
        for seed in range(4):
            none, found = (simulate(curves, s, 25, seed=seed, optimum=0., sampler='tpe') for s in ('none', 'deferred'))
            assert found.spent[-1] <= 1.05 * none.spent[-1]
            runs.setdefault(trial, []).append(found.spent[-1] / none.spent[-1])
    assert np.mean(runs[.3]) > np.mean(runs[.008])


def test_folds_that_come_later_count_with_the_trial_before_them():
    curves = SyntheticCurves(folds=3, epochs=10)
    found = simulate(curves, Deferred(every=5), 23, seed=0, optimum=0., sampler='tpe')
    assert len(found.spent) == len(found.regret) == len(found.values) == 23 and (np.diff(found.spent) > 0).all()
    assert sum(v is not None for v in found.values) == found.complete[-1] and math.isfinite(found.regret[1])


# --- the protocol and its record

def test_the_program_does_what_the_protocol_says():
    text = (Path(simulated_studies.__file__).parent / 'protocol.md').read_text()
    assert VERDICT['first'] == 20_000 and 'from 20,000 on' in text and f"{STUDIES['3x60']} studies a cell at 3 x 60, {STUDIES['5x400']} at 5 x 400" in text
    assert re.search(r'verdict \| (.*) \(', text)[1].replace('`', '').split(', ') == list(VERDICT['families']) == list(FAMILIES)
    assert TUNING['families'] == ('base', 'noisy') and '`base` and `noisy`, seeds below 1,000' in text
    for variant in VARIANTS: assert f'`{variant}`' in text
    assert 'a quarter of the mean regret of `none` in that cell, and 0.002' in text and simulated_studies.MARGIN == .002 and simulated_studies.WORSE == .01
    wanted = cells(VERDICT, STUDIES, VARIANTS, None)
    assert len(wanted) == len(set(wanted)) == 6 * (240 * 5 + 100 + 200 * 5) and not [c for c in wanted if c[0] == '5x400' and c[2] == 'same'] and min(c[3] for c in wanted) == 20_000
    with pytest.raises(InputError, match='tuning makes no record'): main(['tuning', '--out', 'x.json'])


def test_the_command_goes_on_and_writes_one_record(tmp_path, monkeypatch):
    monkeypatch.setattr(simulated_studies, 'SIZES', {'3x60': dict(folds=2, trials=10)})
    monkeypatch.setattr(simulated_studies, 'ProcessPoolExecutor', lambda jobs, context: __import__('concurrent.futures').futures.ThreadPoolExecutor(1))
    journal, record = tmp_path / 'runs' / 'j.jsonl', tmp_path / 'record.json'
    words = ['verdict', '--sizes', '3x60', '--variants', 'hyperband', 'deferred', '--journal', str(journal), '--quiet']
    main([*words, '--seeds', '2', '--limit', '0'])  # two cells are begun before the limit is looked at
    assert 1 <= len(read_journal(journal)) <= 2
    main([*words, '--seeds', '1'])
    first = read_journal(journal)
    journal.write_text(journal.read_text() + '{"size": "3x60", "fam')  # torn by a kill
    rows = main([*words, '--seeds', '2', '--out', str(record)])
    after = read_journal(journal)
    assert len(first) == 18 and len(after) == 36 and all(after[c] == first[c] for c in first) and {c[3] for c in after} == {20_000, 20_001}
    stored = json.loads(record.read_text())
    assert stored['rows'] == json.loads(json.dumps(rows)) and {(r['variant'], r['family']) for r in rows} == {(v, f) for v in ('deferred', 'hyperband') for f in FAMILIES}
    assert stored['provenance']['studies'] == 36 and stored['provenance']['planned'] == 6 * (240 * 5 + 100) and str(tmp_path) not in stored['provenance']['command'] and stored['provenance']['protocol'] == 'bench/protocol.md' and 'verdict' in stored['provenance']['command']
    row = next(r for r in rows if (r['variant'], r['family']) == ('deferred', 'base'))
    own = [after['3x60', 'base', 'deferred', n] for n in (20_000, 20_001)]
    assert row['epochs'] == np.mean([r['epochs'] for r in own]) and row['regret'] == pytest.approx(np.mean([r['regret'] for r in own])) and row['studies'] == 2


def made_up(shift, spread, n=50, faster=3, base=.008):
    rng, rows = np.random.default_rng(0), {}
    for seed in range(n):
        for v in ('none', 'deferred'):
            regret = base + (shift + rng.normal(0, spread) if v == 'deferred' else 0)
            rows['3x60', 'base', v, seed] = dict(epochs=100 if v == 'none' else 100 / faster, regret=regret, complete=9, seconds=1., course=[[25 * k, base * 4 / k] for k in (1, 2, 3, 4)])
    return summarise(rows)[0]


def test_non_inferior_means_the_upper_end_below_the_margin():
    good = made_up(0, .002)
    assert good['non_inferior'] and good['faster']['p50'] == pytest.approx(3) and good['margin'] == pytest.approx(.002)
    assert not made_up(.005, .002)['non_inferior'] and not made_up(0, .03)['non_inferior'] and made_up(0, .03)['worse'] > .2 and good['worse'] == 0
    assert made_up(.0025, .0001, base=.02)['non_inferior'] and made_up(.0025, .0001, base=.02)['margin'] == pytest.approx(.005)  # a quarter of the regret
    assert not summarise({k: v for k, v in {('3x60', 'base', 'deferred', 0): {}}.items()})  # nothing to compare with


def test_equal_quality_is_read_off_the_unpruned_study():
    none = [dict(course=[[25, .03], [50, .02], [75, .012], [100, .01]])] * 3
    assert equal_quality(none, .0125, 25.) == dict(trials=15, faster=3.) and equal_quality(none, .005, 25.) is None
    assert equal_quality(none, .01, 50.) == dict(trials=20, faster=2.)


def test_the_interval_covers():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval(rng.normal(1, 1, 50), repeats=400)
        inside += low < 1 < high
    assert .82 < inside / 200 < .96


def test_the_interval_is_of_the_level_that_it_says():
    "A share of 0.8 of 200: the ends are quantiles of a binomial distribution"
    from scipy.stats import binom
    assert interval(np.arange(200) < 160, repeats=20000) == pytest.approx(binom.ppf([.05, .95], 200, .8) / 200, abs=.0051)


# --- what would it have cost me?

def recorded(n=50, seed=0):
    curves, rng = SyntheticCurves(folds=3, epochs=20), np.random.default_rng(seed)
    run = curves.runner(seed)
    return [Course(i, [list(run(dict(GOOD, lr=10 ** rng.uniform(-6, -3)), f)) for f in range(3)]) for i in range(n)]


def test_a_replay_changes_nothing_and_counts_what_would_have_run():
    trials = recorded()
    before = [[list(c) for c in t.curves] for t in trials]
    none, raced = replay(trials, 'none'), replay(trials, 'racing')
    assert none.epochs_then == none.epochs == sum(len(c) for t in trials for c in t.curves) and none.winner == none.winner_then and none.lost == 0
    assert raced.epochs_then < raced.epochs and raced.stopped == len(raced.reasons) > 5 and before == [[list(c) for c in t.curves] for t in trials]
    assert raced.lost >= 0 and (raced.winner == raced.winner_then) == (raced.lost == 0)


def test_a_replay_takes_not_now_back():
    trials = recorded()
    found, size = replay(trials), StudySize(3, 20, 50)
    assert found.strategy == 'deferred' and found.epochs_then < .6 * found.epochs and found.lost >= 0 and found.winner_then is not None
    assert all(t.done == 3 for t in trials) and found.stopped == len(found.reasons) > 15
    rule, complete = as_strategy('deferred'), 50 - found.stopped
    assert rule.whole < complete < 35  # some that waited got all folds


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
    full, raced = (simulate(task, s, 100, seed=0, sampler='tpe') for s in ('none', 'racing'))
    assert raced.spent[-1] < .6 * full.spent[-1]
