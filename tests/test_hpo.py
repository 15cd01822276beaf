"Searches that stop, fail, are killed and go on; every verdict against an independent computation"
import itertools, math, multiprocessing, os, signal, subprocess, sys, textwrap, time

import numpy as np
import optuna
import pytest
from hypothesis import given, settings, strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from optkit.data import InputError
from optkit.hpo import (FoldStopping, best_complete, complete_table, ended, fold_verdict, parse_space, requeue_interrupted, residual_sigma, simulated_runner, sqlite_storage,
                        study_summary, tune)

SPACE = dict(parse_space(t) for t in ('lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log'))
run = lambda runner, n, folds=3, **kwargs: tune(runner, SPACE, n, folds, progress=False, **kwargs)
states = lambda study: [ended(t) for t in study.trials]


# --- the rule

def plain_verdict(scores, table, rule):
    "The formula of hpo-pruning.md, in loops"
    from scipy.stats import t as student
    n, folds = len(table), len(table[0])
    order = sorted(range(n), key=lambda i: -sum(table[i]) / folds)[:rule.top]
    target = [sum(table[i][f] for i in order) / len(order) for f in range(folds)]
    behind = sum(target[f] - s for f, s in enumerate(scores)) / len(scores)
    grand, square = sum(map(sum, table)) / (n * folds), 0.
    for i in range(n):
        for f in range(folds): square += (table[i][f] - sum(table[i]) / folds - sum(table[j][f] for j in range(n)) / n + grand) ** 2
    free, k = (n - 1) * (folds - 1), len(scores)
    sigma = max(math.sqrt(square / free), rule.least_sigma)
    limit = student.ppf(1 - rule.risk, free) * sigma * math.sqrt(1 + 1 / len(order)) * math.sqrt((folds - k) / (k * folds))
    return behind > limit, sum(target) / folds - behind, behind - limit


@settings(deadline=None, max_examples=150)
@given(st.integers(3, 12), st.integers(2, 6), st.floats(.02, .45), st.integers(1, 6), st.integers(0, 10**6), st.floats(-.2, .1))
def test_a_verdict_is_the_formula(n, folds, risk, top, seed, shift):
    rng, rule = np.random.default_rng(seed), FoldStopping(risk=risk, top=top)
    table = .8 + rng.normal(0, .03, (n, 1)) + rng.normal(0, .02, (1, folds)) + rng.normal(0, .01, (n, folds))
    for k in range(1, folds):
        scores = (table.max(0)[:k] + shift + rng.normal(0, .01, k)).tolist()
        stop, predicted, margin = plain_verdict(scores, table.tolist(), rule)
        found = fold_verdict(scores, table, rule)
        assert found.predicted == pytest.approx(predicted) and (found.stop == stop or abs(margin) < 1e-9)
    assert not fold_verdict([0.] * folds, table, rule).stop and not fold_verdict([0.], table[:2], rule).stop


def test_the_noise_is_what_is_left_after_trials_and_folds():
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 1, (400, 1)) + rng.normal(0, 1, (1, 5))
    assert residual_sigma(effects)[0] == pytest.approx(0, abs=1e-12)
    sigma, free = residual_sigma(effects + rng.normal(0, .02, (400, 5)))
    assert sigma == pytest.approx(.02, rel=.06) and free == 399 * 4


def test_a_trial_as_good_as_the_target_is_stopped_as_often_as_the_risk_says():
    rng, folds, risk, stopped = np.random.default_rng(0), 4, .1, []
    for _ in range(600):
        easy = rng.normal(0, .02, folds)
        table, scores = .8 + easy + rng.normal(0, .01, (20, folds)), .8 + easy + rng.normal(0, .01, folds)  # all equally good
        order = FoldStopping(risk=risk, top=20)
        stopped.append(fold_verdict(scores[:1].tolist(), table, order).stop)
    # the future folds are as noisy as the past ones, so behind after one fold overstates: never above about twice the risk
    assert .02 < np.mean(stopped) < 2 * risk


def test_a_hopeless_trial_is_stopped_and_a_better_one_is_not():
    table = .8 + np.random.default_rng(1).normal(0, .005, (8, 3))
    assert fold_verdict([.6], table).stop and fold_verdict([.6, .6], table).stop and not fold_verdict([.82], table).stop and not fold_verdict([.6, .6, .6], table).stop


@pytest.mark.parametrize('changes', [dict(risk=0), dict(risk=.5), dict(risk=-1), dict(risk=math.nan), dict(least_complete=1)], ids=str)
def test_a_rule_that_cannot_be(changes):
    with pytest.raises(ValueError): FoldStopping(**changes)


def test_who_runs_in_full():
    rule = FoldStopping()
    for n_trials, first in ((3, 3), (12, 4), (30, 10), (400, 20)): assert all(rule.runs_in_full(i, n_trials) for i in range(first))
    later = [rule.runs_in_full(i, 400, s) for s in range(20) for i in range(20, 400)]
    assert .035 < np.mean(later) < .065 and later == [rule.runs_in_full(i, 400, s) for s in range(20) for i in range(20, 400)]
    assert [FoldStopping(full_first=2, full_share=0).runs_in_full(i, 100) for i in range(4)] == [True, True, False, False]


# --- short forms of a space

@pytest.mark.parametrize('text, name, expected', [
    ('lr=1e-5..1e-3:log', 'lr', FloatDistribution(1e-5, 1e-3, log=True)), ('warmup=0.0..0.3', 'warmup', FloatDistribution(0, .3)), ('epochs=1..4', 'epochs', IntDistribution(1, 4)),
    ('n=1..64:log', 'n', IntDistribution(1, 64, log=True)), ('x=1..2.5', 'x', FloatDistribution(1, 2.5)), ('x=-1.5..-1', 'x', FloatDistribution(-1.5, -1)),
    ('effective_batch=8,16', 'effective_batch', CategoricalDistribution([8, 16])), ('schedule=linear, cosine', 'schedule', CategoricalDistribution(['linear', 'cosine'])),
    ('x=0.1', 'x', CategoricalDistribution([.1])), ('x=3..3', 'x', IntDistribution(3, 3)), ('x=8,linear,.5', 'x', CategoricalDistribution([8, 'linear', .5]))])
def test_short_forms(text, name, expected): assert parse_space(text) == (name, expected)


@pytest.mark.parametrize('text', ['lr', 'lr=', 'lr=,', 'lr=5..1', 'lr=0..1:log', 'lr=1..2:lin', 'lr=a..b', 'lr=1..', 'lr=..1', 'lr=1..2..3', '', '=1..2', 'lr=nan..1', 'lr=0.1..inf',
                                  'lr=1e-5...1e-3'])
def test_a_bad_short_form_is_refused_in_a_line(text):
    with pytest.raises(InputError, match='expected name=low..high') as caught: parse_space(text)
    assert repr(text) in str(caught.value) and str(caught.value).count('\n') <= 1


# --- a study

@pytest.mark.parametrize('seed', range(4))
def test_a_study_finds_the_planted_optimum_and_a_stopped_trial_never_wins(seed):
    study = run(simulated_runner(seed=seed), 40, seed=seed)
    table, best = complete_table(study), best_complete(study)
    assert len(study.trials) == 40 and set(states(study)) == {'complete', 'stopped'} and ended(best) == 'complete'
    assert best.number == study.best_trial.number and study.best_value == max(t.value for t in study.trials if ended(t) == 'complete') == pytest.approx(table.mean(1).max())
    assert abs(math.log10(best.params['lr'] / 1e-3)) < .7
    for t in study.trials:
        scores = t.user_attrs['fold_scores']
        assert t.state == TrialState.COMPLETE and t.user_attrs['epochs'] == 3 * len(scores)
        if ended(t) == 'complete': assert len(scores) == 3 and t.value == pytest.approx(np.mean(scores))
        else:
            before = [u.value for u in study.trials[:t.number] if ended(u) == 'complete']
            assert len(scores) < 3 and t.user_attrs['stopped_after'] == len(scores) - 1 and t.value < max(before) and 'behind' in t.user_attrs['reason']
            rows = np.array([u.user_attrs['fold_scores'] for u in study.trials[:t.number] if ended(u) == 'complete'])
            stop, predicted, _ = plain_verdict(scores, rows.tolist(), FoldStopping())
            assert stop and t.value == pytest.approx(min(predicted, max(before) - 1e-6))
    first = max(3, min(20, 40 // 3))
    assert states(study)[:first] == ['complete'] * first


def test_stopping_saves_epochs_and_loses_little():
    saved, lost = [], []
    for seed in range(6):
        full, stopped = (run(simulated_runner(seed=seed), 40, seed=seed, stopping=s) for s in (None, FoldStopping()))
        spent = lambda study: sum(t.user_attrs['epochs'] for t in study.trials)
        assert set(states(full)) == {'complete'} and spent(full) == 40 * 9
        saved.append(1 - spent(stopped) / spent(full)); lost.append(best_complete(full).value - best_complete(stopped).value)
    assert np.mean(saved) > .2 and np.mean(lost) < .01


def test_scores_that_are_losses_work_too():
    "Higher is better with the sign turned, far from 0"
    plain = simulated_runner(seed=1)
    study = run(lambda p, f: (v - 50 for v in plain(p, f)), 24)
    assert study.best_trial.number == best_complete(study).number and 'stopped' in states(study)


@pytest.mark.parametrize('exc', [MemoryError(), RuntimeError('CUDA error: out of memory'), FloatingPointError('the loss is not a number'), FloatingPointError()], ids=['memory', 'cuda', 'nan', 'nan without a word'])
def test_failed_trials_count_and_the_study_goes_on(exc):
    plain, calls = simulated_runner(), itertools.count()
    def runner(params, fold):
        if next(calls) % 4 == 1: raise exc
        yield from plain(params, fold)
    study = run(runner, 15, stopping=None)
    assert len(study.trials) == 15 and {'failed', 'complete'} == set(states(study)) and len([t for t in study.trials if t.state == TrialState.FAIL]) == states(study).count('failed') > 2
    reasons = {t.user_attrs['reason'] for t in study.trials if ended(t) == 'failed'}
    assert len(reasons) == 1 and (reasons == {'out of memory'} or isinstance(exc, FloatingPointError))


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_ends_the_trial(value):
    study = run(lambda p, f: iter([.5, value] if p['lr'] > 1e-3 else [.5]), 12)
    assert all((t.params['lr'] > 1e-3) == (ended(t) == 'failed') for t in study.trials) and len(study.trials) == 12
    assert all('fold 0, epoch 2' in t.user_attrs['reason'] for t in study.trials if ended(t) == 'failed')


def test_exactly_n_trials_when_all_fail_and_the_summary_still_renders():  # optuna/optuna#3518, #2743
    def runner(params, fold): raise MemoryError
    study = run(runner, 7)
    assert states(study) == ['failed'] * 7 and best_complete(study) is None
    summary = study_summary(study, 'macro_f1', 7, 9, FoldStopping())
    assert summary['best'] is None and summary['epochs_spent'] == 0 and len(summary['trials']) == 7 and summary['epochs_full'] == 63
    assert len(run(lambda p, f: iter(()), 3).trials) == 3  # a runner without an epoch


def test_other_errors_end_the_study():
    for exc in (ValueError('shape'), RuntimeError('device-side assert'), InputError('no such field')):
        def runner(params, fold): raise exc
        with pytest.raises(type(exc)) as caught: run(runner, 3)
        assert caught.value is exc


# --- resume

class Counting:
    "A runner that remembers what it was asked, and can be interrupted"
    def __init__(self, interrupt_at=None, exc=KeyboardInterrupt): self.asked, self.at, self.exc, self.plain = [], interrupt_at, exc, simulated_runner()
    def __call__(self, params, fold):
        if len(self.asked) == self.at: raise self.exc
        self.asked.append((tuple(sorted(params.items())), fold))
        yield from self.plain(params, fold)


@pytest.fixture
def storage(tmp_path): return sqlite_storage(tmp_path / 'study.db')


@pytest.mark.parametrize('at', [0, 1, 2, 3, 7, 14])
def test_an_interrupted_study_goes_on_and_repeats_nothing(storage, at):
    first, second = Counting(at), Counting()
    with pytest.raises(KeyboardInterrupt): run(first, 10, storage=storage, stopping=None)
    study = run(second, 10, storage=storage, stopping=None)
    assert states(study).count('complete') == 10 and states(study).count(None) == 1 and len(study.trials) == 11  # the interrupted one is not counted
    everything = first.asked + second.asked
    assert len(everything) == len(set(everything)) == 30, 'a fold was trained twice'
    left = next(t for t in study.trials if ended(t) is None)
    again = next(t for t in study.trials if 'resumed_from' in t.user_attrs)
    assert again.user_attrs['resumed_from'] == left.number and again.params == left.params and left.user_attrs['interrupted'] and left.state == TrialState.FAIL
    assert again.user_attrs['fold_scores'][:at % 3] == left.user_attrs.get('fold_scores', [])
    assert {x['state'] for x in study_summary(study, 'f1', 10, 9)['trials']} == {'complete', 'interrupted'}


def test_interrupted_twice_and_a_study_that_is_done(storage):
    for at in (4, 1, 0):
        with pytest.raises(KeyboardInterrupt): run(Counting(at), 4, storage=storage, stopping=None)
    study = run(Counting(), 4, storage=storage, stopping=None)
    assert states(study).count('complete') == 4 and len({tuple(t.params.items()) for t in study.trials if ended(t)}) == 4
    nothing = Counting(0, AssertionError)
    assert len(run(nothing, 4, storage=storage).trials) == len(study.trials) and len(run(nothing, 2, storage=storage).trials) == len(study.trials)


def test_failures_before_and_after_a_resume_add_up_to_n(storage):
    plain, calls = simulated_runner(), itertools.count()
    def runner(params, fold):
        n = next(calls)
        if n in (2, 12): raise MemoryError
        if n == 9: raise KeyboardInterrupt
        yield from plain(params, fold)
    with pytest.raises(KeyboardInterrupt): run(runner, 12, storage=storage)
    study = run(runner, 12, storage=storage)
    assert sum(s is not None for s in states(study)) == 12 and states(study).count('failed') == 2


def test_suggestions_after_a_resume_are_new(storage):
    first = [t.params for t in run(Counting(), 4, storage=storage, seed=5).trials]
    second = [t.params for t in run(Counting(), 8, storage=storage, seed=5).trials][4:]
    values = [p['lr'] for p in first + second]
    assert len(set(values)) == 8 and [t.params for t in run(Counting(), 4, seed=5).trials] == first, 'a fresh study with this seed is repeatable'


def test_a_resume_with_more_trials_or_other_folds(storage):
    assert len(run(Counting(), 3, storage=storage).trials) == 3 and len(run(Counting(), 5, storage=storage).trials) == 5
    with pytest.raises(InputError, match="study 'optkit' has 3 folds, 4 were asked for"): run(Counting(), 6, folds=4, storage=storage)
    assert len(run(Counting(), 6, storage=storage).trials) == 6


def test_what_is_tried_first_is_tried_once(storage):
    first = [dict(lr=1e-3, weight_decay=.1), dict(lr=2e-3, weight_decay=.2)]
    with pytest.raises(KeyboardInterrupt): run(Counting(1), 6, storage=storage, first=first)
    study = run(Counting(), 6, storage=storage, first=first)
    tried = [t.params for t in study.trials if ended(t)]
    assert all(tried.count(p) == 1 for p in first) and len(tried) == 6


def test_callbacks():
    epochs, trials = [], []
    study = run(simulated_runner(), 5, on_epoch=lambda *a: epochs.append(a), on_trial=lambda s, t: trials.append((t.number, ended(t), t.state)), stopping=None)
    assert [e[:2] for e in epochs[:9]] == [(f, e) for f in range(3) for e in (1, 2, 3)] and len(epochs) == 45
    assert trials == [(n, 'complete', TrialState.COMPLETE) for n in range(5)]
    with pytest.raises(ValueError, match='n_folds is 1'): run(simulated_runner(), 2, folds=1)


def test_the_best_epoch_of_a_fold_counts():
    study = run(lambda p, f: iter([.1, .9 + .01 * f, .3]), 2, stopping=None)
    assert study.trials[0].user_attrs['fold_scores'] == [.9, .91, .92] and study.trials[0].value == pytest.approx(.91)


def test_the_log_level_of_optuna_is_put_back():
    before = optuna.logging.get_verbosity()
    run(simulated_runner(), 2)
    with pytest.raises(KeyboardInterrupt): run(Counting(0), 2)
    assert optuna.logging.get_verbosity() == before


def test_the_summary_is_plain_and_counts():
    import json
    study = run(simulated_runner(), 20)
    summary = study_summary(study, 'macro_f1', 20, 9, FoldStopping())
    assert json.loads(json.dumps(summary)) == summary and summary['best'] == best_complete(study).number and summary['epochs_full'] == 180
    assert summary['epochs_spent'] == sum(3 * len(t['fold_scores']) for t in summary['trials']) < 180 and summary['controller']['risk'] == .1


@pytest.mark.parametrize('name', ['a b', 'a#b', 'ä', "a'b", 'a&b=c', 'a?b', 'a%20b'])
def test_a_run_folder_may_have_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    run(simulated_runner(), 2, storage=sqlite_storage(folder / 'study.db'))
    assert [p.name for p in folder.iterdir() if not p.name.startswith('study.db-')] == ['study.db'] and len(run(simulated_runner(), 2, storage=sqlite_storage(folder / 'study.db')).trials) == 2


# --- processes

PROGRAM = textwrap.dedent('''
    import sys, time
    from optkit.hpo import parse_space, simulated_runner, sqlite_storage, tune
    path, name, trials, pause, log = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    plain = simulated_runner()
    def runner(params, fold):
        with open(log, 'a') as file: file.write(f"{sorted(params.items())} {fold}\\n")
        time.sleep(pause)
        yield from plain(params, fold)
    space = dict(parse_space(t) for t in ('lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log'))
    tune(runner, space, trials, 3, storage=sqlite_storage(path), name=name, stopping=None, progress=False)
''')


def start(tmp_path, name, trials, pause=0.):
    (tmp_path / 'program.py').write_text(PROGRAM)
    return subprocess.Popen([sys.executable, str(tmp_path / 'program.py'), str(tmp_path / 'study.db'), name, str(trials), str(pause), str(tmp_path / f'{name}.log')],
                            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), stderr=subprocess.PIPE, text=True,
                            env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), OMP_NUM_THREADS='1'))


def test_two_processes_share_a_file(tmp_path):  # optuna/optuna#820
    sqlite_storage(tmp_path / 'study.db')
    both = [start(tmp_path, n, 8) for n in ('one', 'two')]
    errors = [p.communicate(timeout=60)[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], errors
    for n in ('one', 'two'):
        study = optuna.load_study(study_name=n, storage=sqlite_storage(tmp_path / 'study.db'))
        assert states(study) == ['complete'] * 8


def _open(path, barrier, errors):
    barrier.wait()
    try: sqlite_storage(path)
    except Exception as exc: errors.put(f'{type(exc).__name__}: {exc}'.splitlines()[0])


def test_processes_that_open_a_new_file_at_once(tmp_path):
    context = multiprocessing.get_context('fork')
    found = []
    for n in range(6):
        barrier, errors = context.Barrier(4), context.Queue()
        workers = [context.Process(target=_open, args=(tmp_path / f'{n}.db', barrier, errors)) for _ in range(4)]
        for w in workers: w.start()
        for w in workers: w.join(30)
        while not errors.empty(): found.append(errors.get(timeout=5))
    assert found == []


def test_a_killed_study_keeps_its_trials_and_the_folds_of_the_one_that_was_running(tmp_path):
    process, log = start(tmp_path, 'killed', 50, pause=.15), tmp_path / 'killed.log'
    try:
        until = time.monotonic() + 60
        while (not log.exists() or log.read_text().count('\n') < 8) and time.monotonic() < until: time.sleep(.02)  # in the second fold of the third trial
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = optuna.load_study(study_name='killed', storage=sqlite_storage(tmp_path / 'study.db'))
    finished = {t.number: (t.value, t.params, t.user_attrs['fold_scores']) for t in before.trials if ended(t)}
    running = [t for t in before.trials if t.state == TrialState.RUNNING]
    assert len(finished) == 2 and len(running) == 1 and len(running[0].user_attrs['fold_scores']) == 1
    counting = Counting()
    study = run(counting, 5, storage=sqlite_storage(tmp_path / 'study.db'), name='killed', stopping=None)
    assert {t.number: (t.value, t.params, t.user_attrs['fold_scores']) for t in study.trials if t.number in finished} == finished
    assert states(study).count('complete') == 5 and [f for _, f in counting.asked[:2]] == [1, 2] and dict(counting.asked[0][0]) == running[0].params
    again = next(t for t in study.trials if 'resumed_from' in t.user_attrs)
    assert again.user_attrs['fold_scores'][0] == running[0].user_attrs['fold_scores'][0] and not [t for t in study.trials if t.state == TrialState.RUNNING]


def test_requeue_takes_only_what_was_left_running(storage):
    run(Counting(), 2, storage=storage)
    study = optuna.load_study(study_name='optkit', storage=storage)
    assert requeue_interrupted(study) == 0
    study.ask()  # killed before its parameters were drawn
    trial = study.ask(SPACE)
    trial.set_user_attr('fold_scores', [.5])
    assert requeue_interrupted(study) == 2 and requeue_interrupted(study) == 0
    waiting = [t for t in study.trials if t.state == TrialState.WAITING]
    assert len(waiting) == 1 and waiting[0].user_attrs['fold_scores'] == [.5] and waiting[0].user_attrs['resumed_from'] == trial.number
