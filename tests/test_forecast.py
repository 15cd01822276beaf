"Forecasts against what came, the bill of building, and the best few again"
import json, math

import numpy as np
import optuna
import pytest

from optkit.base import InputError
from optkit.forecast import (
    build_bill, cost_interval, coverage, fold_profile, forecast, forecast_before, importance_figure,
    parallel_figure, past_errors, recent_mean)
from optkit.simulator import simulated_runner
from optkit.space import ended, fold_scores, spent
from optkit.hpo import tune
from optkit.confirm import confirm
from optkit.simulator import simulate, SyntheticCurves

SPACE = ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log']
run = lambda runner, n, **k: tune(runner, SPACE, n, **dict(dict(folds=3, storage='memory', progress=False, say=lambda t: None), **k))


# --- the interval

def test_the_errors_are_those_of_the_same_forecast_made_earlier():
    costs = np.random.default_rng(0).lognormal(0, .5, 90)
    found = past_errors(costs, 30, points=12)
    last, plain = int(90 / (1 + 30 / 90)), []
    for p in sorted({round(p) for p in np.geomspace(max(10, last // 4), last, 12)}):
        h = max(1, min(round(30 * p / 90), 90 - p))
        plain.append(math.log(sum(costs[p:p + h]) / (h * np.mean(costs[:p][-max(10, p // 3):]))))
    assert found == pytest.approx(plain) and recent_mean(costs) == pytest.approx(costs[-30:].mean())


@pytest.mark.parametrize('drift', [0., -.002], ids=['steady', 'cheaper and cheaper'])
def test_an_interval_holds_about_as_often_as_it_promises(drift):
    rng, inside = np.random.default_rng(1), []
    for _ in range(150):
        costs = np.exp(rng.normal(0, .5, 200) + drift * np.arange(200))
        mid, low, high = cost_interval(costs[:120], 80)
        inside.append(low <= costs[120:].sum() <= high)
        assert low < mid < high
    assert .68 < np.mean(inside) <= 1


@pytest.mark.parametrize('done, left, there', [(5, 5, False), (12, 200, False), (40, 360, False), (60, 60, True), (100, 100, True), (100, 300, True)])
def test_too_little_data_gives_no_interval(done, left, there):
    costs = np.random.default_rng(0).lognormal(0, .5, done)
    assert (cost_interval(costs, left) is not None) == there and cost_interval(np.array([]), 10) is None


def test_coverage_is_counted_on_the_past():
    rng = np.random.default_rng(2)
    share, n = coverage(rng.lognormal(0, .3, 200), 50)
    assert n >= 5 and .5 <= share <= 1
    jumps = np.concatenate([np.ones(60), np.full(140, 20.)])  # a study that became twenty times slower: the past intervals did not hold
    assert coverage(jumps, 100)[0] < .8 and coverage(np.ones(5), 5) == (None, 0)


def test_on_simulated_studies_the_interval_holds():
    curves, inside = SyntheticCurves(folds=3, epochs=40), []
    for seed in range(12):
        costs = np.diff(simulate(curves, 'racing', 150, seed, optimum=0.).spent, prepend=0).astype(float)
        _, low, high = cost_interval(costs[:75], 75)
        inside.append(low <= costs[75:].sum() <= high)
    assert np.mean(inside) >= .6


# --- of a study

def test_a_forecast_of_a_study():
    study = run(simulated_runner(), 60, epochs=3)
    found = forecast(study, 100, workers=2)
    assert (found.done, found.left, found.workers) == (60, 40, 2) and found.spent_s == pytest.approx(sum(spent(t)['seconds'] for t in study.trials))
    assert 0 < found.low < found.mid < found.high and found.gpu_hours == found.mid / 3600 and found.wall() == (found.low / 2, found.high / 2) and found.useful == (found.high < 3 * found.low)
    assert 0 < found.bounds[0] < found.bounds[1] and 'in this study' in repr(found) and '<table' in found._repr_html_()
    assert sum(p['trials'] for p in found.profile) == 60 and sum(p['share'] for p in found.profile) == pytest.approx(1) and [p['folds'] for p in found.profile][-1] == '3 of 3'
    short = forecast(study, 4000)
    assert short.mid is None and not short.useful and 'too few trials' in repr(short) and short.wall() == short.bounds
    assert repr(forecast(study, 10)).endswith(', none to come')
    assert forecast(study, 60).mid == 0 and forecast(study, 10).left == 0 and forecast(study).left == 60


def test_a_study_that_is_done_needs_no_interval():
    study = tune(simulated_runner(), SPACE, 12, folds=3, epochs=3, storage='memory', progress=False)
    found = forecast(study, 12)
    assert found.left == 0 and found.useful and repr(found).endswith(', none to come') and found.wall() == (0, 0)
    for bad in (dict(workers=0), dict(n_trials=0), dict(n_trials=2.5)):
        with pytest.raises(InputError, match='expected a whole number of at least 1'): forecast(study, **bad)


def test_a_forecast_while_nothing_completes():
    def runner(params, fold): raise MemoryError
    failed = run(runner, 3, epochs=3)
    assert forecast(failed, 6).left == 3 and fold_profile(failed)[0]['folds'] == '0 of 3 (failed)'
    with pytest.raises(InputError, match='no finished trial'): forecast(optuna.create_study())


def test_before_the_start_there_are_bounds():
    none, racing, asha = (forecast_before(400, 5, 100, 2., s) for s in ('none', 'racing', 'asha'))
    assert 'between' not in repr(none) and 'about 4.6 days' in repr(none) and 'between' in repr(racing)
    assert none.bounds == (400_000., 400_000.) and racing.bounds == ((20 * 100 + 380 * 9) * 2., 400_000.) and asha.bounds[0] == 400 * 3 * 2. and racing.mid is None
    curves = SyntheticCurves()
    costs = simulate(curves, 'racing', 100, 0, optimum=0., sampler='tpe').spent[-1]
    bound = forecast_before(100, 5, 100, 1., 'racing').bounds
    assert bound[0] <= costs <= bound[1]
    for words in (dict(n_trials=0), dict(folds=0), dict(epochs=0), dict(seconds_per_epoch=0), dict(seconds_per_epoch=math.nan), dict(strategy='greedy')):
        with pytest.raises(InputError): forecast_before(**dict(dict(n_trials=9, folds=3, epochs=5, seconds_per_epoch=1.), **words))


# --- building

def test_the_reports_figures():
    assert build_bill((250 + 788) * 3600, 2000, 60, 1 / .85)['each trial']['saved'] == pytest.approx(122.2, abs=.3)  # as they say


def test_building_once_never_and_each_time():
    rows = build_bill(100 * 3600, 50, 120, 1.25, keys=3)
    assert rows['never'] == dict(build=0., training=100., hours=100., saved=0.)
    assert rows['each trial']['hours'] == pytest.approx(50 * 120 / 3600 + 80) and rows['once a study']['hours'] == pytest.approx(3 * 120 / 3600 + 80) and rows['once a study']['saved'] == pytest.approx(20 - .1)
    for words in ((0, 5, 1, 1.1), (1, 0, 1, 1.1), (1, 5, -1, 1.1), (1, 5, 1, 0), (1, 5, 1, 1.1, 0)):
        with pytest.raises(InputError): build_bill(*words)


def test_what_a_runner_says_of_building_is_counted():
    plain = simulated_runner()
    def runner(params, fold):
        if runner.build_seconds == 0: runner.build_seconds = 7.
        yield from plain(params, fold)
    runner.build_seconds = 0.
    assert [spent(t).get('build') for t in run(runner, 6).trials] == [7., *[None] * 5]


# --- the best few again

class Renewable:
    def __init__(self, seed=0, bad=()): self.seed, self.run, self.asked, self.bad = seed, simulated_runner(seed=seed, noise=.03), [], bad
    def __call__(self, params, fold):
        self.asked.append(fold)
        if fold in self.bad: yield math.nan
        yield from self.run(params, fold)
    def renewed(self, seed):
        self.again = Renewable(100 + seed, self.bad)
        return self.again


@pytest.mark.parametrize('direction', ['maximize', 'minimize'])
def test_the_best_few_run_again_on_new_folds(direction):
    sign, plain = 1 if direction == 'maximize' else -1, Renewable()
    signed = lambda p, f: (sign * v for v in plain(p, f))
    study = run(signed, 30, direction=direction, epochs=3)
    renewed = Renewable(101)
    fresh = lambda p, f: (sign * v for v in renewed(p, f))
    found = confirm(study, fresh, top=4, progress=False)
    best = sorted((t for t in study.trials if ended(t) == 'complete'), key=lambda t: -sign * t.value)[:4]
    assert {r.number for r in found.rows} == {t.number for t in best} and found.first == best[0].number and found.winner.fresh == (max if sign > 0 else min)(r.fresh for r in found.rows)
    for row in found.rows:
        assert row.search == study.trials[row.number].value and row.params == study.trials[row.number].params
        assert row.fresh_scores == tuple(sign * max(Renewable(101)(row.params, f)) for f in range(3)) and row.fresh == pytest.approx(np.mean(row.fresh_scores))
    assert '<table' in found._repr_html_() and 'looked' in repr(found)


def test_the_score_that_won_is_too_good():
    found = [confirm(run(r := Renewable(s), 40, strategy='none'), r, top=5, progress=False).optimism for s in range(6)]
    assert np.mean(found) > .002


def test_a_confirmation_goes_on_after_a_kill_and_keeps_what_is_done(tmp_path):
    study = run(Renewable(), 10, storage=tmp_path / 'study.db')
    calls = []
    def dies(params, fold):
        calls.append(fold)
        if len(calls) == 5: raise KeyboardInterrupt
        yield from Renewable(101)(params, fold)
    with pytest.raises(KeyboardInterrupt): confirm(study, dies, top=3, progress=False)
    counted = Renewable()
    assert len(confirm(study, counted, top=3, progress=False).rows) == 3 and len(counted.again.asked) == 6, 'the first trial is not run again'


def test_a_run_that_fails_again_comes_last():
    study = run(Renewable(), 10)
    assert all(math.isnan(r.fresh) for r in confirm(study, Renewable(bad=(1,)), top=2, progress=False).rows)
    with pytest.raises(InputError, match='nothing to confirm'): confirm(run(lambda p, f: iter([math.nan]), 3), Renewable(), progress=False)


# --- pictures

def test_pictures_mark_what_ran_fewer_folds():
    study = run(simulated_runner(), 40, epochs=3)
    stopped = sum(ended(t) == 'stopped' and bool(fold_scores(t)) for t in study.trials)
    shown = stopped + sum(ended(t) == 'complete' for t in study.trials)  # one that stopped within its first fold has no value
    lines = [l for l in parallel_figure(study, 'toy').axes[0].lines if len(l.get_xdata()) == 3]
    assert len(lines) == shown and sum(l.get_linestyle() == '--' for l in lines) == stopped > 5
    figure = importance_figure(study)
    assert f'{stopped} ran fewer folds' in figure.axes[0].get_title() and {t.get_text() for t in figure.axes[0].get_yticklabels()} == {'lr', 'weight_decay'}
    optuna.visualization.plot_optimization_history(study); optuna.visualization.plot_parallel_coordinate(study)  # Optuna's own plots work too
    for draw in (parallel_figure, importance_figure):
        with pytest.raises(InputError): draw(optuna.create_study())
