"Each decision of a strategy against an independent computation, and what no strategy may do"
import math

import numpy as np
import optuna
import pytest
from hypothesis import given, settings, strategies as st

from optkit.base import InputError
from optkit.strategies import (
    as_strategy, Asha, Course, default_sampler, Deferred, draw, epoch_verdict, estimates, fit_folds, fold_verdict,
    FoldModel, follow, halving_verdict, History, Hyperband, local_prediction, progress_features, PrunerStrategy,
    Racing, Reports, residual_sigma, sampler_choice, SeededTPE, StudySize, sigma_of_good, STRATEGIES, Strategy,
    Verdict, Wilcoxon)


@pytest.fixture(autouse=True)
def quiet():
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(level)


def plain_verdict(scores, table, risk, top, least=.001):
    "The formula of the racing between folds, in loops"
    from scipy.stats import t as student
    n, folds = len(table), len(table[0])
    order = sorted(range(n), key=lambda i: -sum(table[i]) / folds)[:top]
    target = [sum(table[i][f] for i in order) / len(order) for f in range(folds)]
    behind = sum(target[f] - s for f, s in enumerate(scores)) / len(scores)
    table = sorted(table, key=lambda row: -sum(row))[:max(5, (n + 1) // 2)]  # how good trials scatter
    n = len(table)
    grand, square = sum(map(sum, table)) / (n * folds), 0.
    for i in range(n):
        for f in range(folds): square += (table[i][f] - sum(table[i]) / folds - sum(table[j][f] for j in range(n)) / n + grand) ** 2
    free, k = (n - 1) * (folds - 1), len(scores)
    sigma = max(math.sqrt(square / free), least)
    limit = student.ppf(1 - risk, free) * sigma * math.sqrt(1 + 1 / len(order)) * math.sqrt((folds - k) / (k * folds))
    return behind > limit, sum(target) / folds - behind, behind - limit


@settings(deadline=None, max_examples=150)
@given(st.integers(3, 12), st.integers(2, 6), st.floats(.02, .45), st.integers(1, 8), st.integers(0, 10**6), st.floats(-.2, .1))
def test_a_fold_verdict_is_the_formula(n, folds, risk, top, seed, shift):
    rng = np.random.default_rng(seed)
    table = .8 + rng.normal(0, .03, (n, 1)) + rng.normal(0, .02, (1, folds)) + rng.normal(0, .01, (n, folds))
    for k in range(1, folds):
        scores = (table.max(0)[:k] + shift + rng.normal(0, .01, k)).tolist()
        stop, predicted, margin = plain_verdict(scores, table.tolist(), risk, top)
        found = fold_verdict(scores, table, risk, top)
        assert found.predicted == pytest.approx(predicted) and (found.stop == stop or abs(margin) < 1e-9)
    assert not fold_verdict([0.] * folds, table).stop


def test_the_noise_is_what_is_left_after_trials_and_folds():
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 1, (400, 1)) + rng.normal(0, 1, (1, 5))
    assert residual_sigma(effects)[0] == pytest.approx(0, abs=1e-12)
    sigma, free = residual_sigma(effects + rng.normal(0, .02, (400, 5)))
    assert sigma == pytest.approx(.02, rel=.06) and free == 399 * 4


def test_trials_that_collapse_on_a_fold_do_not_hide_how_good_ones_scatter():
    rng = np.random.default_rng(0)
    good = .65 + rng.normal(0, .02, (30, 3))
    bad = np.where(rng.random((20, 3)) < .5, .4, .6)  # on some folds they learn nothing
    table = np.vstack([bad, good])
    assert sigma_of_good(table)[0] == pytest.approx(.02, rel=.4) and residual_sigma(table)[0] > 2 * sigma_of_good(table)[0]
    target = np.sort(good.mean(1))[-7:].mean()
    assert fold_verdict([target - .05], table, .2).stop and not fold_verdict([target], table, .2).stop


def test_trials_that_learnt_nothing_so_far_predict_nothing_about_one_that_did():
    "Curves of a real study stood at one value for many epochs: the regression divided by rounding and ended the study with a singular matrix"
    finishers = [np.r_[np.full(10, 1 / 3), np.linspace(.4, .5 + .01 * i, 20)] for i in range(15)]
    table = np.random.default_rng(0).normal(.6, .02, (8, 3))
    for value in (1 / 3, 1 / 3 + 1e-16, .4, .62):
        found = epoch_verdict([value] * 10, finishers, table)
        assert math.isfinite(found.predicted)
    assert not epoch_verdict([.62] * 10, finishers, table).stop
    x, y = np.tile([1 / 3, 0.], (15, 1)), np.linspace(.4, .6, 15)
    assert local_prediction(x, y, x[0])[0] == pytest.approx(.5, abs=1e-3) and local_prediction(x, y, np.array([.62, 0.]))[1] > 1


def test_a_trial_as_good_as_the_target_is_stopped_about_as_often_as_the_risk_says():
    rng, folds, stopped = np.random.default_rng(0), 4, []
    for _ in range(600):
        easy = rng.normal(0, .02, folds)
        table, scores = .8 + easy + rng.normal(0, .01, (20, folds)), .8 + easy + rng.normal(0, .01, folds)  # all equally good
        stopped.append(fold_verdict(scores[:1].tolist(), table, .1, 20).stop)
    # the future folds are as noisy as the past ones, so behind after one fold overstates: never above about twice the risk
    assert .02 < np.mean(stopped) < .2


# --- within the first fold

def test_the_local_regression_is_least_squares_with_these_weights():
    rng = np.random.default_rng(0)
    x, own = rng.normal(0, 1, (40, 2)), np.array([.3, -.2])
    y = 1 + 2 * x[:, 0] - x[:, 1] + rng.normal(0, .1, 40)
    d = np.abs(x[:, 0] - own[0])
    w = 1 / (1 + (d / np.median(d)) ** 2)
    b, *_ = np.linalg.lstsq(np.column_stack([np.ones(40), x]) * np.sqrt(w)[:, None], y * np.sqrt(w), rcond=None)
    mean, sd, free = local_prediction(x, y, own)
    assert mean == pytest.approx(b[0] + own @ b[1:], abs=1e-4) and sd == pytest.approx(.1, rel=.5) and 10 < free < 40


@pytest.mark.parametrize('same', [True, False])
def test_features_that_all_agree_break_nothing(same):
    finishers = [np.full(10, .5)] * 20 if same else [np.linspace(.1, .5, 10)] * 20
    table = np.full((6, 3), .5) + np.random.default_rng(0).normal(0, .001, (6, 3))
    assert isinstance(epoch_verdict([.5] * 4, finishers, table).stop, bool) and math.isfinite(epoch_verdict([.5] * 4, finishers, table).predicted)


def test_a_hopeless_start_is_stopped_and_a_good_one_is_not():
    rng = np.random.default_rng(0)
    curve = lambda top: np.maximum.accumulate(top - .3 * np.exp(-np.arange(1, 31) / 5) + rng.normal(0, .004, 30))
    finishers, table = [curve(t) for t in rng.uniform(.6, .9, 60)], .88 + rng.normal(0, .008, (10, 5))
    assert epoch_verdict(curve(.65)[:8], finishers, table).stop and not epoch_verdict(curve(.9)[:8], finishers, table).stop
    found = epoch_verdict(curve(.75)[:8], finishers, table)
    assert found.predicted == pytest.approx(.75, abs=.03) and 'a chance of' in found.reason


def test_a_later_fold_is_judged_with_the_folds_before_it():
    rng, easy = np.random.default_rng(0), np.array([0., .1, -.1])  # the second fold is easier, the third harder
    curve = lambda top: np.maximum.accumulate(top - .3 * np.exp(-np.arange(1, 31) / 5) + rng.normal(0, .002, 30))
    finishers, table = [curve(t) for t in rng.uniform(.6, .9, 60)], .88 + easy + rng.normal(0, .008, (10, 3))
    verdict = lambda top, scores, n=8: epoch_verdict(curve(top + easy[len(scores)])[:n], finishers, table, .2, 5, .001, scores)
    assert not verdict(.88, [.88]).stop and not verdict(.89, [.89, .99]).stop  # as good as the target, and better, fold by fold
    assert verdict(.70, [.88]).stop and verdict(.70, [.88, .98]).stop
    assert verdict(.88, [.60]).stop and not verdict(.88, [1.2]).stop and not verdict(.80, [1.0]).stop  # what came before counts
    late, between = verdict(.80, [.80], 29), fold_verdict([.80, .90], table, .2, 5)  # near its end a fold says what it will say between folds
    assert late.predicted == pytest.approx(between.predicted, abs=.01) and 'fold 2 of 3' in late.reason


def test_no_size_of_a_study_has_parameters_of_its_own():
    rule, asked = Racing(), lambda rule, fold, *shape: [e for e in range(1, 31) if rule.asks(fold, e, StudySize(*shape))]
    assert not any(asked(rule, fold, folds, 30, n) for fold in (1, 2) for folds, n in ((3, 59), (3, 60), (3, 119), (5, 400)))
    assert asked(Racing(later=(.5,)), 1, 5, 30, 400) == [15] and not any(asked(Racing(checkpoints=()), fold, 3, 30, 60) for fold in range(3))
    for n in range(30, 300): assert 0 <= rule.sized(StudySize(3, 30, n + 1)).first - rule.sized(StudySize(3, 30, n)).first <= 1
    later = Racing(later=(.2,))
    exempt = Course(2, [[.5] * 30, [.1] * 6])
    exempt.done = 1
    assert later.within(exempt, history(folds=3), StudySize(3, 30, 60)).stop  # only the first fold is needed whole
    for wrong in (dict(checkpoints=None), dict(checkpoints=.5), dict(later=.5), dict(later=(1.,))):
        with pytest.raises(InputError, match='expected shares'): Racing(**wrong)


def test_the_recent_gain_counts():
    assert progress_features(np.array([.1, .2, .3, .4, .4, .5])) == (.5, pytest.approx(.1))
    assert progress_features(np.array([.4])) == (.4, 0.)


def history(n=30, folds=5, epochs=30, seed=0):
    rng, found = np.random.default_rng(seed), History()
    for i in range(n):
        top = rng.uniform(.6, .9)
        found.add(Course(i, [top - .3 * np.exp(-np.arange(1, epochs + 1) / 5) + rng.normal(0, .004, epochs) for _ in range(folds)]), True)
    return found


@given(st.integers(1, 500), st.integers(1, 200))
def test_checkpoints_lie_inside_the_fold(trials, epochs):
    shape, rule = StudySize(5, epochs, trials), Racing()
    asked = [e for e in range(1, epochs + 1) if rule.asks(0, e, shape)]
    assert len(asked) <= 3 and all(e < epochs for e in asked) and not any(rule.asks(1, e, shape) for e in range(1, epochs + 1)) and (epochs == 1 or asked)
    assert rule.limit(Course(0), shape) == epochs and 1 <= rule.limit(Course(0, [[.1] * epochs]), shape) <= epochs


def test_counts_shrink_for_small_studies():
    sizes = [Racing().sized(StudySize(5, 100, n)) for n in (3, 12, 40, 59, 60, 400, None)]
    assert [s.first for s in sizes] == [3, 4, 13, 19, 20, 20, 20] and [s.risk for s in sizes] == [.05] * 4 + [.1] * 3 and Racing().sized(StudySize(3, 30, 60)).risk == .2
    assert all(3 <= s.least_complete <= 5 and 8 <= s.comparators <= 15 for s in sizes)
    assert Racing(first=2, risk=.2).sized(StudySize(5, 100, 400)).first == 2


def test_who_finishes_the_first_fold():
    rule = Racing()
    for n, first in ((3, 3), (12, 4), (30, 10), (400, 20)): assert all(rule.exempt(i, StudySize(5, 100, n)) for i in range(first))
    later = [rule.exempt(i, StudySize(5, 100, 400, s)) for s in range(20) for i in range(20, 400)]
    assert .035 < np.mean(later) < .065


def test_the_searched_epochs_are_not_compared_within_a_fold():
    assert not Racing().within(Course(99, comparable=False), history(), StudySize(5, 30, 400)).stop
    found = History()
    found.add(Course(0, [[.1, .2]], comparable=False), True)
    assert not found.finishers and len(found.complete) == 1


@pytest.mark.parametrize('changes', [dict(risk=0), dict(risk=.5), dict(risk=-1), dict(risk=math.nan), dict(least_complete=1), dict(top=0), dict(cap=.5), dict(checkpoints=(0.,)), dict(checkpoints=(1.,))], ids=str)
def test_a_rule_that_cannot_be(changes):
    with pytest.raises(InputError, match='expected'): Racing(**changes)


# --- halving

def test_the_best_third_goes_on():
    for n in range(1, 20):
        others = list(np.random.default_rng(n).random(n - 1))
        passed = [v for v in [*np.add(others, 1e-9), *np.subtract(others, 1e-9), 0., 1.] if not halving_verdict(v, others, 3, 9).stop]
        assert (np.array(passed)[:, None] < others).sum(1).max(initial=0) == max(1, n // 3) - 1


@pytest.mark.parametrize('epochs, eta, count', [(243, 3, 6), (81, 3, 5), (100, 3, 5), (64, 4, 4), (1000, 10, 4), (2, 3, 1), (125, 5, 4)])
def test_brackets_are_counted_in_whole_numbers(epochs, eta, count):  # optuna/optuna#5678
    rule, shape = Hyperband(eta=eta), StudySize(5, epochs, 100)
    assert len(rule.brackets(shape)) == count == len({rule.bracket(n, shape) for n in range(20000)})


def test_brackets_do_not_depend_on_the_name_and_the_sampler_sees_them():
    rule, shape, seen = Hyperband(), StudySize(5, 100, 40, 3), []
    for name in ('one', 'another'):
        study = optuna.create_study(study_name=name, pruner=rule.pruner(shape), sampler=optuna.samplers.RandomSampler(seed=0))
        for _ in range(40): study.tell(study.ask(), 0.)
        groups = [[t.number for t in optuna.pruners._filter_study(study, study.trials[n]).get_trials()] for n in range(5)]
        assert all(rule.bracket(m, shape) == rule.bracket(n, shape) for n, g in enumerate(groups) for m in g) and all(n in g for n, g in enumerate(groups))
        seen.append(groups)
    assert seen[0] == seen[1] and len(seen[0][0]) < 40


def test_hyperband_lets_the_first_trials_run_and_waits_for_patience():
    shape, rule = StudySize(5, 100, 40), Hyperband(first=30)
    bracket = next(n for n in range(30, 999) if rule.bracket(n, shape) == 0)
    past = History()
    for n in range(9): past.add(Course(next(m for m in range(1000 * n, 10**6) if rule.bracket(m, shape) == 0), [[.9] * 9]), False)
    worse = Course(bracket); worse.curves = [[.1] * 9]
    early = Course(3); early.curves = [[.1] * 9]
    assert rule.within(worse, past, shape).stop and not rule.within(early, past, shape).stop
    rising = Course(bracket); rising.curves = [list(np.linspace(0, .1, 9))]
    assert Hyperband(patience=3).within(worse, past, shape).stop and not Hyperband(patience=3).within(rising, past, shape).stop and Hyperband().within(rising, past, shape).stop


@pytest.mark.parametrize('rule', [Asha(eta=3, low=1), Hyperband()], ids=['asha', 'hyperband'])
def test_a_rung_compares_with_what_others_had_there(rule):
    "Not with where they ended, nor with their last value before it, nor with those that never came so far"
    shape = StudySize(2, 30, 40)
    numbers = iter(n for n in range(999) if rule.name == 'asha' or rule.bracket(n, shape) == 0)
    past, course = History(), Course(next(numbers))
    for curve in ([.1, .3, .2, .4, .9, .9], [.1, .2, .2, .95], [.99], [.1, .1, .25, .3]):
        past.add(Course(next(numbers), [curve]), False)
    for own, stops in ((.26, True), (.31, False)): # the best of the three that came to epoch 3 had .3
        course.curves = [[.1, own, .1]]
        verdict = rule.within(course, past, shape)
        assert verdict.stop == stops and verdict.reason.startswith(f'rank {1 + stops} of 4 after 3 epochs'), verdict


def test_a_bracket_is_compared_with_itself():
    rule, shape = Hyperband(), StudySize(2, 30, 40)
    of = lambda bracket, start: next(n for n in range(start, 9999) if rule.bracket(n, shape) == bracket)
    past, course = History(), Course(of(0, 0), comparable=True)
    past.add(Course(of(1, 0), [[.9] * 9]), False)
    course.curves = [[.1] * 3]
    assert not rule.within(course, past, shape).stop
    past.add(Course(of(0, 50), [[.9] * 9]), False)
    assert rule.within(course, past, shape).stop


@pytest.mark.parametrize('best, epochs', [(1, 3), (3, 6), (4, 7), (20, 27), (30, 30)])
def test_later_folds_run_a_quarter_longer_than_the_first_needed(best, epochs):
    "1.25 times the best epoch and 5% of 30 epochs, rounded up; not more than a fold"
    course = Course(0, [np.where(np.arange(1, 31) == best, .9, .5)])
    assert Racing().limit(course, StudySize(5, 30, 100)) == epochs == min(30, math.ceil(1.25 * best + 1.5))


@pytest.mark.parametrize('patience, stops', [(None, True), (3, True), (4, True), (5, False)])
def test_patience_counts_the_epochs_after_the_best_one(patience, stops):
    "Nine epochs, the fifth is the best: four without a better value"
    shape, rule, past = StudySize(2, 30, 40), Hyperband(patience=patience), History()
    number, other = [n for n in range(200) if rule.bracket(n, shape) == 0][:2]
    past.add(Course(other, [[.9] * 9]), False)
    course = Course(number)
    course.curves = [[.1, .1, .1, .1, .5, .2, .2, .2, .2]]
    assert rule.within(course, past, shape).stop == stops


@pytest.mark.parametrize('name', ['asha', 'hyperband', 'reports'])
def test_halving_needs_the_epochs(name):
    with pytest.raises(InputError, match=f"strategy '{name}' needs epochs"): as_strategy(name).check(StudySize(5, None, 10))


# --- Wilcoxon

def test_wilcoxon_over_five_folds_cannot_act_before_the_fourth():
    from scipy.stats import wilcoxon
    past = History()
    past.add(Course(0, [[.9], [.91], [.92], [.93], [.94]]), True)
    worse = [[.5], [.52], [.49], [.47]]
    assert [Wilcoxon().between(Course(1, worse[:k]), past, StudySize(5, 1)).stop for k in (1, 2, 3, 4)] == [False, False, False, True]
    assert wilcoxon(np.array([.5, .52, .49]) - [.9, .91, .92], alternative='less').pvalue == pytest.approx(.125)
    assert not Wilcoxon().between(Course(1, [[.95], [.96], [.97], [.98]]), past, StudySize(5, 1)).stop


@pytest.mark.parametrize('folds, threshold, fine', [(1, .1, False), (2, .1, False), (3, .1, False), (4, .1, False), (5, .1, True), (3, .3, True)])
def test_wilcoxon_with_too_few_folds_is_refused(folds, threshold, fine):
    rule, size = Wilcoxon(threshold), StudySize(folds, 9)
    past = History()
    past.add(Course(0, [[.9 + .001 * f] for f in range(folds)]), True)
    assert fine == any(rule.between(Course(1, [[.1 - f / 99] for f in range(k)]), past, size).stop for k in range(1, folds))  # what it can do
    if fine: return rule.check(size)
    with pytest.raises(InputError, match=f'cannot stop a trial with {folds} folds'): rule.check(size)


@pytest.mark.parametrize('epochs', [10, 11, 12, 30])
def test_reports_with_too_few_values_are_refused(epochs):
    study = optuna.create_study(direction='maximize', pruner=Reports().pruner(StudySize(5, epochs)))
    stopped = False
    for n in range(40):
        trial = study.ask()
        for e in range(1, epochs + 1):
            trial.report(-n * e, e)  # worse and worse
            if trial.should_prune(): stopped = True; break
        study.tell(trial, -n * epochs)
    if epochs > 11: Reports().check(StudySize(5, epochs))
    else:
        assert not stopped
        with pytest.raises(InputError, match='its patience is 10'): Reports().check(StudySize(5, epochs))


# --- deferred folds

def gapped(seed=0, n=60, folds=4, sigma=.008, tail=None):
    rng = np.random.default_rng(seed)
    quality, effect = rng.normal(.8, .03, n), rng.normal(0, .02, folds)
    effect -= effect.mean()
    noise = rng.normal(0, sigma, (n, folds)) if tail is None else rng.standard_t(tail, (n, folds)) * sigma
    table = quality[:, None] + effect + noise
    whole = table.copy()
    for i in range(3, n): table[i, rng.integers(1, folds + 1):] = np.nan
    return quality, effect, table, whole


def test_the_model_of_the_folds_recovers_means_effects_and_noise():
    found = [(fit_folds(t), q, e) for q, e, t, _ in map(gapped, range(20))]
    assert np.mean([f[2] for f, *_ in found]) == pytest.approx(.008, rel=.15)
    assert np.sqrt(np.mean([(f[1] - e) ** 2 for f, _, e in found])) < .003 and all(abs(f[1].sum()) < 1e-9 for f, *_ in found)
    assert np.sqrt(np.mean([(f[0] - q) ** 2 for f, q, _ in found])) < .009  # the raw means of the first folds miss by the fold's effect


def test_a_full_table_without_outliers_is_the_plain_additive_model():
    *_, table = gapped(seed=3, n=12)
    means, effects, sigma, freedom, _ = fit_folds(table)
    assert means == pytest.approx(table.mean(1), abs=.008) and effects == pytest.approx(table.mean(0) - table.mean(), abs=.005)  # weights move them by less than the noise
    assert sigma == pytest.approx(sigma_of_good(table)[0], rel=.5)


def test_one_fold_only_needs_no_noise():
    model = FoldModel(range(3), np.array([[.5], [.7], [.6]]))
    assert model.winner == model.lead == 1 and model.effects.tolist() == [0.] and np.isfinite(model.chances()).all()


def test_the_posterior_picks_better_winners_than_the_mean_where_folds_have_tails():
    lost = dict(mean=[], posterior=[])
    for seed in range(150):
        quality, _, _, whole = gapped(seed, n=20, folds=3, sigma=.012, tail=2)
        lost['mean'].append(quality.max() - quality[whole.mean(1).argmax()])
        lost['posterior'].append(quality.max() - quality[FoldModel(range(20), whole).winner])
    assert np.mean(lost['posterior']) < np.mean(lost['mean']) * .95


def waiting(scores, folds=3):
    past = History()
    for n, row in enumerate(scores): past.add(Course(n, [[v] for v in row]), len(row) == folds, waits=len(row) < folds)
    return past


def test_the_leader_is_completed_and_then_those_that_may_be_better():
    rule, size = Deferred(), StudySize(3, 1, 30)
    past = waiting([[.80, .81, .79], [.80, .82, .78], [.79, .8, .78], [.86], [.70]])
    assert rule.next_waiting(past, size, 6, False).value is None and rule.next_waiting(past, size, 5, False).value == 3
    leader = past.waiting[3]
    for fold in (.87, .85): leader.curves.append([fold]); leader.done += 1
    past.add(leader, True)
    assert rule.next_waiting(past, size, 5, False).value is None and rule.next_waiting(past, size, 5, True).value is None  # trial 4 has no chance
    close = waiting([[.80, .81, .79], [.80, .82, .78], [.79, .8, .78], [.801], [.70]])
    assert close.waiting.keys() == {3, 4} and rule.next_waiting(close, size, 5, True).value == 3
    assert rule.next_waiting(History(), size, 5, True).value is None


def test_noise_decides_how_many_get_further_folds():
    def further(sigma, seed):
        quality, _, table, whole = gapped(seed, n=30, folds=3, sigma=sigma)
        table[3:, 1:] = np.nan
        past, rule, size = waiting([row[np.isfinite(row)] for row in table]), Deferred(), StudySize(3, 1, 30)
        folds = 0
        while (n := rule.next_waiting(past, size, 30, True).value) is not None:
            course = past.waiting[n]
            course.curves.append([whole[n, course.done]])
            course.done += 1
            folds += 1
            past.add(course, course.done == 3, waits=course.done < 3)
        return folds
    quiet, loud = (np.mean([further(s, seed) for seed in range(12)]) for s in (.002, .05))
    assert quiet < 8 and loud > 2 * quiet and loud <= 54


def test_a_trial_that_waits_counts_once():
    past = waiting([[.8, .8, .8], [.7]])
    course = past.waiting[1]
    course.curves.append([.75]); course.done = 2
    past.add(course, False, waits=True)
    assert len(past.finishers) == len(past.first) == 2 and past.model(3).means[1] == pytest.approx(.725, abs=.01)
    past.add(course, False)
    assert not past.waiting and past.stopped == [course] and len(past.finishers) == 2


@pytest.mark.parametrize('changes', [dict(risk=0), dict(risk=.5), dict(late=0.), dict(late=.7), dict(whole=1), dict(comparators=1), dict(cap=.5), dict(checkpoints=(0.,)), dict(checkpoints=(1.,))], ids=str)
def test_a_deferral_that_cannot_be(changes):
    with pytest.raises(InputError, match='expected'): Deferred(**changes)


def test_nothing_of_the_deferral_jumps_with_the_size():
    rule = Deferred()
    for n in range(5, 500): assert all(0 <= rule.sixth(StudySize(3, 9, n + 1), low) - rule.sixth(StudySize(3, 9, n), low) <= 1 for low in (5, 8))
    asked = {folds: [e for e in range(1, 101) if rule.asks(0, e, StudySize(folds, 100, 60))] for folds in (1, 3, 10)}
    assert len(set(map(tuple, asked.values()))) == 1


# --- what the sampler learns

def test_estimates_are_not_biased_for_trials_that_were_stopped_by_a_look():
    "Trials are drawn alike; those that look bad after 9 of 30 epochs stop, and their estimate is compared with their end"
    rng, misses = np.random.default_rng(0), []
    for _ in range(30):
        past, ends = History(), {}
        for n in range(60):
            end, speed = rng.uniform(.6, .9), rng.uniform(4, 8)
            curve = end - .3 * np.exp(-np.arange(1, 31) / speed) + rng.normal(0, .01, 30)
            course = Course(n, [curve])
            if n >= 15 and max(curve[:9]) < .75:
                course = Course(n)
                course.curves, ends[n] = [curve[:9].tolist()], curve.max()
            past.add(course, course.done == 1)
        values = estimates(past, StudySize(1, 30, 60))
        misses += [values[n] - end for n, end in ends.items()]
    assert len(misses) > 500 and abs(np.mean(misses)) < .004


def test_the_sampler_sees_estimates_and_the_study_keeps_none():
    study = optuna.create_study(direction='minimize', sampler=default_sampler(0, 40, kind='gp'))
    study.sampler.estimate = lambda: {t.number: (t.params['x'] - .7) ** 2 for t in study.trials if t.params}
    space = dict(x=optuna.distributions.FloatDistribution(0, 1))
    for n in range(30):
        trial = study.ask(space)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    drawn = [t.params['x'] for t in study.trials[15:]]
    assert abs(np.median(drawn) - .7) < .1 and all(t.value is None and t.state.name == 'PRUNED' and not t.system_attrs for t in study.trials)


@pytest.mark.parametrize('kind, most', [('gp', 5), ('tpe', 12)])
def test_parameters_that_fail_are_avoided(kind, most):
    "The optimum lies at the limit of memory; how many of the last 30 of 100 trials run out. 100 trials have a Gaussian process by default"
    study, values, failed = optuna.create_study(direction='maximize', sampler=default_sampler(1, 100, kind=kind)), {}, []
    space = dict(x=optuna.distributions.FloatDistribution(0, 1), y=optuna.distributions.FloatDistribution(0, 1))
    study.sampler.estimate = lambda: values
    for n in range(100):
        trial = study.ask(space)
        x, y = trial.params['x'], trial.params['y']
        failed.append(x > .6)
        if failed[-1]:
            trial.set_constraint('memory', 1.)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            values[n] = x - (y - .5) ** 2
            study.tell(trial, values[n])
    assert sum(failed[70:]) <= most and max(values.values()) > .56


def test_the_choice_of_a_sampler_has_its_reason():
    for args, kind, reason in (((['a'], 1, 100), 'gp', '100 trials'), ((['a'], 1, 101), 'tpe', 'at most 100'), (([], 0, 60), 'tpe', 'depend on the trial'),
                               ((['a'], 0, 60), 'tpe', 'no parameter is a number'), ((['a'], 1, None), 'tpe', 'not known'), ((['a'], 1, 60, 2), 'tpe', '2 objectives')):
        assert sampler_choice(*args).value == kind and reason in sampler_choice(*args).reason


def test_several_workers_of_a_gaussian_process_spread():
    study = optuna.create_study(direction='maximize', sampler=default_sampler(0, 60, several=True, kind='gp'))
    space = dict(x=optuna.distributions.FloatDistribution(0, 1))
    study.sampler.estimate = lambda: {t.number: -(t.params['x'] - .3) ** 2 for t in study.trials if t.state.is_finished()}
    for _ in range(12): study.tell(study.ask(space), 0.)
    drawn = sorted(study.ask(space).params['x'] for _ in range(4))  # none of them has ended
    assert min(np.diff(drawn)) > 1e-3


# --- pruners of Optuna

def test_optunas_wilcoxon_gets_folds_as_steps():
    study = optuna.create_study(direction='maximize', pruner=optuna.pruners.WilcoxonPruner(p_threshold=.2))
    past, rule, size = History(), as_strategy(study.pruner), StudySize(6, 4)
    stopped = []
    for n, top in enumerate((.9, .95, .5)):
        trial, course = study.ask(), Course(n)
        verdict = follow(rule, course, past, size, lambda fold: [top - .2, top + fold / 100, top - .1], trial, lambda f, e, v: trial.report(v, f * 4 + e))
        past.add(course, verdict is None)
        stopped.append(course.done if verdict else None)
        study.tell(trial, state=optuna.trial.TrialState.PRUNED) if verdict else study.tell(trial, float(np.mean(course.scores)))
    assert stopped[:2] == [None, None] and stopped[2] in (2, 3, 4) and set(study.best_trial.intermediate_values) > {1, 2, 3, 5}  # the study itself keeps epochs

def test_the_reports_lose_every_fold_but_the_first():
    course = Course(0, [[.1, .2, .3], [.5, .6]])
    course.curves.append([.9])
    shape = StudySize(5, 3)
    nop = optuna.pruners.NopPruner()
    assert PrunerStrategy(nop, 'epoch').seen(course, shape) == {1: .1, 2: .2, 3: .3}
    assert PrunerStrategy(nop, 'first').seen(course, shape) == {1: .1, 2: .2, 3: .3}
    assert PrunerStrategy(nop, 'all').seen(course, shape) == {1: .1, 2: .2, 3: .3, 4: .5, 5: .6, 7: .9}
    with pytest.raises(InputError, match='steps is'): PrunerStrategy(nop, 'fold')


def test_a_pruner_decides_as_it_would_in_optuna():
    "The same values given to Optuna's own should_prune"
    rng, shape = np.random.default_rng(0), StudySize(1, 20, 30)
    data = rng.random((30, 1)) + np.cumsum(rng.normal(0, .05, (30, 20)), 1)
    def stops(ours):
        study = optuna.create_study(direction='maximize', pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2))
        found = []
        for row in data:
            trial = study.ask()
            if ours:
                course = Course(trial.number)
                verdict = follow(PrunerStrategy(study.pruner), course, History(), shape, lambda f: row.tolist(), trial, lambda f, e, v: trial.report(v, e))
                n = len(course.curves[0]) if verdict else None
            else:
                n = None
                for e, v in enumerate(row, 1):
                    trial.report(v, e)
                    if trial.should_prune(): n = e; break
            study.tell(trial, state=optuna.trial.TrialState.PRUNED) if n else study.tell(trial, float(row.max()))
            found.append(n)
        return found
    assert stops(True) == stops(False) and any(stops(True))


# --- all of them

@pytest.mark.parametrize('given', ['greedy', '', None, 3, Racing, ['racing']], ids=repr)
def test_an_unknown_strategy_is_refused_in_a_line(given):
    with pytest.raises(InputError, match='expected one of none, hyperband, reports, asha, wilcoxon, racing') as caught: as_strategy(given)
    assert '\n' not in str(caught.value)


def test_the_names():
    for name, kind in STRATEGIES.items(): assert type(as_strategy(name)) is kind and as_strategy(name).name == name and name in repr(as_strategy(name))
    assert as_strategy(Racing(risk=.2)).risk == .2 and isinstance(as_strategy(optuna.pruners.MedianPruner()), PrunerStrategy)


@pytest.mark.parametrize('name', ['none', 'hyperband', 'asha', 'wilcoxon', 'racing', 'deferred'])
def test_a_verdict_is_repeatable_and_leaves_what_it_saw_alone(name):
    rule, past, shape = as_strategy(name), history(), StudySize(5, 30, 60)
    course = Course(77, [[.2] * 30])
    before = [list(c) for c in course.curves], past.table.tolist(), len(past.first)
    verdicts = [[rule.between(course, past, shape) for _ in range(2)]]
    course2 = Course(77); course2.curves = [[.1] * 3]
    for e in range(1, 30):
        if rule.asks(0, e, shape): course2.curves = [[.1] * e]; verdicts.append([rule.within(course2, past, shape) for _ in range(2)])
    assert all(a == b and isinstance(a, Verdict) and a.reason for a, b in verdicts)
    assert before == ([list(c) for c in course.curves], past.table.tolist(), len(past.first))
    if name in ('asha', 'racing', 'deferred'): assert any(a.stop for a, _ in verdicts)
    if name == 'none': assert not any(a.stop for a, _ in verdicts)


def test_follow_stops_where_it_is_told():
    class Third(Strategy):
        def asks(self, fold, epoch, shape): return epoch == 3
        def within(self, course, history, shape, asked=None): return Verdict(course.done == 1, 'third of the second fold')
    seen, course = [], Course(0)
    verdict = follow(Third(), course, History(), StudySize(3, 5), lambda f: [.1] * 5, on_value=lambda *a: seen.append(a[:2]), on_fold=lambda c: seen.append(c.done))
    assert verdict.reason.startswith('third') and (course.done, [len(c) for c in course.curves]) == (1, [5, 3]) and seen[5] == 1 and seen[-1] == (1, 3)
    with pytest.raises(InputError, match='gave no value in fold 0'): follow(Strategy(), Course(0), History(), StudySize(3), lambda f: [])


def test_the_same_seed_on_each_worker_draws_differently():  # optuna/optuna#4714
    study = optuna.create_study()
    space = dict(x=optuna.distributions.FloatDistribution(0, 1), y=optuna.distributions.FloatDistribution(0, 1))
    drawn = []
    for _ in range(4):  # four workers that were given one seed, each with its own sampler
        study.sampler = default_sampler(0)
        drawn.append(study.ask(space).params)
    assert len({tuple(d.values()) for d in drawn}) == 4 and len({d['x'] for d in drawn}) == 4


def test_draws_are_even():
    values = [draw(0, n) for n in range(4000)]
    assert abs(np.mean(values) - .5) < .02 and min(values) >= 0 and max(values) < 1 and draw(0, 1) == draw(0, 1) != draw(1, 1)


def test_a_fold_that_its_limit_ends_is_not_judged_by_epochs_that_will_not_run():
    class Asking(Strategy):
        def limit(self, course, shape): return 6 if course.done else shape.epochs
        def asks(self, fold, epoch, shape): return fold == 1 and epoch == 6
        def within(self, *_): return Verdict(True, 'asked')
    assert follow(Asking(), Course(0), History(), StudySize(3, 10), lambda fold: iter([.5] * 10)) is None


# --- names of the version before

def test_the_names_of_the_version_before_warn_and_work():
    from optkit import storage, strategies
    for module, old, new in ((strategies, 'Shape', 'StudySize'), (storage, 'Place', 'StudyLocation')):
        with pytest.warns(DeprecationWarning, match=new): assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError): strategies.Shapes
    with pytest.warns(DeprecationWarning, match='stopped_as'):
        class Mine(Strategy): told = 'predicted'
    with pytest.warns(DeprecationWarning, match='PRUNED'):
        class Other(Racing): stopped_as = 'predicted'
