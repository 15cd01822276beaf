"Searches that stop, fail, are killed and go on; every verdict against an independent computation"
import contextlib, itertools, math, multiprocessing, os, pickle, signal, sqlite3, subprocess, sys, textwrap, threading, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings, strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from optkit import storage as storage_module
from optkit import study as study_module
from optkit.base import InputError
from optkit.simulator import simulated_runner
from optkit.storage import sqlite_storage
from optkit.space import (
    as_space, best_complete, courses, curves, default_space, EFFECTIVE_BATCHES, ended, fold_scores, is_waiting,
    parse_space, spent, TrainerRunner, trials_that, what_if)
from optkit.study import HELD, Interrupts, next_with_key, requeue_interrupted
from optkit.hpo import tune
from optkit.confirm import study_summary
from optkit.storage import open_storage, repair_journal, StorageLost
from optkit.forecast import forecast
from optkit.strategies import as_strategy, PrunerStrategy, Racing, Reports, Strategy, Verdict, Wilcoxon

ROOT = Path(__file__).resolve().parent.parent
SPACE = dict(parse_space(t) for t in ('lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log'))
run = lambda runner, n, folds=3, storage='memory', **kwargs: tune(runner, SPACE, n, folds=folds, storage=storage, progress=False, say=lambda text: None, **kwargs)
states = lambda study: [ended(t) for t in study.trials]
load = lambda path, name='study': optuna.load_study(study_name=name, storage=sqlite_storage(path))


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
    table, best = np.array([fold_scores(t) for t in trials_that(study, 'complete')]), best_complete(study)
    assert len(study.trials) == 40 and set(states(study)) == {'complete', 'stopped'} and ended(best) == 'complete'
    assert study.best_value == max(t.value for t in study.trials if ended(t) == 'complete') == pytest.approx(table.mean(1).max()) and best.value > study.best_value - .01
    assert abs(math.log10(best.params['lr'] / 1e-3)) < .7
    for t in study.trials:
        scores, values = fold_scores(t), curves(t, 3)
        assert spent(t)['epochs'] == sum(map(len, values)) and [max(c) for c in values[:len(scores)]] == scores
        if ended(t) == 'complete': assert len(scores) == 3 and t.state == TrialState.COMPLETE and t.value == pytest.approx(np.mean(scores)) and not t.user_attrs.get('waits')
        else: assert len(scores) < 3 and t.state == TrialState.PRUNED and t.value == values[-1][-1] and (t.user_attrs.get('reason') or t.user_attrs['waits'])
    assert all(len(fold_scores(t)) >= 1 for t in study.trials[:8])  # the first ones finish their first fold


@pytest.mark.parametrize('strategy', ['racing', 'deferred'])
def test_no_value_of_a_study_is_a_prediction(strategy, storage):
    "What the sampler learns is not written: a stopped trial is PRUNED with what was measured"
    run(simulated_runner(seed=2, epochs=9), 40, strategy=strategy, seed=2, storage=storage)
    study = optuna.load_study(study_name='study', storage=storage)
    measured = [{v for c in curves(t, 9) for v in c} for t in study.trials]
    for t, values in zip(study.trials, measured):
        assert t.state == (TrialState.COMPLETE if ended(t) == 'complete' else TrialState.PRUNED) and 'predicted' not in t.user_attrs
        assert (t.value == pytest.approx(np.mean(fold_scores(t)))) if ended(t) == 'complete' else t.value in values


def test_a_study_of_the_version_before_goes_on(storage):
    "There a stopped trial was COMPLETE with a predicted mean; the sampler now makes its own estimate of it"
    run(simulated_runner(seed=1, epochs=9), 20, strategy='racing', storage=storage)
    study = optuna.load_study(study_name='study', storage=storage)
    trial = study.ask(SPACE)
    for e in range(1, 4): trial.report(.2 + e / 99, e)
    for name, value in dict(worker='x', spent=dict(seconds=1., training=1., epochs=3), ended='stopped', predicted=.21, reason='far behind', stopped_after=0).items(): trial.set_user_attr(name, value)
    study.tell(trial, .21)
    again = run(simulated_runner(seed=1, epochs=9), 30, strategy='racing', storage=storage)
    assert len(again.trials) == 30 and None not in states(again) and best_complete(again).number != trial.number and again.trials[trial.number].value == .21


def test_waiting_trials_outlive_their_process(storage):
    "A study under deferred folds is interrupted: trials that wait are not lost, not repeated, and end"
    first, second = Counting(11), Counting()
    with pytest.raises(KeyboardInterrupt): run(first, 14, storage=storage, epochs=3)
    study = optuna.load_study(study_name='study', storage=storage)
    waiting = [t for t in study.trials if is_waiting(t)]
    assert len(waiting) >= 3 and all(t.state == TrialState.RUNNING and len(fold_scores(t)) == 1 for t in waiting) and requeue_interrupted(study) == 0
    assert forecast(study, 14).done == len(waiting) + sum(s is not None for s in states(study))
    study = run(second, 14, storage=storage, epochs=3)
    everything = first.asked + second.asked
    assert len(everything) == len(set(everything)) and sum(s is not None for s in states(study)) == 14 and not any(map(is_waiting, study.trials))
    for t in waiting: assert ended(study.trials[t.number]) in ('complete', 'stopped')


def test_two_searches_continue_different_trials_or_none(storage):
    plan = [study_module.make_plan(simulated_runner(epochs=3), SPACE, 10, folds=3, name='shared') for _ in range(2)]
    location = open_storage(storage)
    searches = [study_module.Search(p, location, study_module.open_or_make_study(p, location), say=lambda text: None) for p in plan]
    run(simulated_runner(epochs=3), 6, storage=storage, name='shared', on_trial=lambda s, t: s.stop() if t.number == 5 else None)
    for search in searches: search.trials(); search.sync()
    number = next(n for n in searches[0].history.waiting)
    for search in searches: search.plan.strategy = type('Wants', (Strategy,), dict(next_waiting=lambda *a: __import__('optkit.base').base.Choice(number, 'wanted')))()
    taken = [search.take_waiting(False) for search in searches]
    assert taken[0][0].number == number and taken[0][1] == taken[0][0].params and taken[1] is None
    HELD.difference_update(searches[0].claimed)


def test_a_budget_leaves_time_for_the_winner(storage):
    def slow(params, fold):
        for v in simulated_runner(seed=1)(params, fold): time.sleep(.004); yield v
    study = run(slow, None, budget=6, storage=storage, epochs=3)
    assert best_complete(study) is not None and len(study.trials) > 20


def test_stopping_saves_epochs_and_loses_little():
    saved, lost = [], []
    for seed in range(3):
        full, stopped = (run(simulated_runner(seed=seed), 40, seed=seed, strategy=s) for s in ('none', 'racing'))
        cost = lambda study: sum(spent(t)['epochs'] for t in study.trials)
        assert set(states(full)) == {'complete'} and cost(full) == 40 * 9
        saved.append(1 - cost(stopped) / cost(full)); lost.append(best_complete(full).value - best_complete(stopped).value)
    assert np.mean(saved) > .2 and np.mean(lost) < .01


@pytest.mark.parametrize('strategy', ['none', 'hyperband', Reports(patience=3), 'asha', Wilcoxon(.3), 'racing', 'deferred', optuna.pruners.MedianPruner(n_startup_trials=3), optuna.pruners.WilcoxonPruner(p_threshold=.3), Racing(first=3, checkpoints=())], ids=lambda s: getattr(s, 'name', None) or str(s)[:12])
def test_every_strategy_runs_a_study_in_both_directions(strategy):
    "The study of the negative, minimised, is the same study"
    plain = simulated_runner(seed=1, epochs=9)
    up = run(plain, 25, strategy=strategy, name='same')
    down = run(lambda p, f: (-v for v in plain(p, f)), 25, strategy=strategy, direction='minimize', epochs=9, name='same')
    assert [t.params for t in up.trials] == [t.params for t in down.trials] and states(up) == states(down) and len(up.trials) == 25 and None not in states(up)
    assert [t.value for t in up.trials] == [None if t.value is None else pytest.approx(-t.value) for t in down.trials]
    assert best_complete(up).number == best_complete(down).number and up.best_trial.number == down.best_trial.number and [fold_scores(t) for t in up.trials] == [[-v for v in fold_scores(t)] for t in down.trials]
    if strategy == 'none': assert set(states(up)) == {'complete'}


def test_scores_that_are_losses_work_too():
    "Higher is better with the sign turned, far from 0"
    plain = simulated_runner(seed=1)
    study = run(lambda p, f: (v - 50 for v in plain(p, f)), 24, epochs=3)
    assert study.best_trial.number == best_complete(study).number and 'stopped' in states(study)


@pytest.mark.parametrize('exc', [MemoryError(), RuntimeError('CUDA error: out of memory'), FloatingPointError('the loss is not a number'), FloatingPointError()], ids=['memory', 'cuda', 'nan', 'nan without a word'])
def test_failed_trials_count_and_the_study_goes_on(exc):
    plain, calls = simulated_runner(), itertools.count()
    def runner(params, fold):
        if next(calls) % 4 == 1: raise exc
        yield from plain(params, fold)
    study = run(runner, 15, strategy='none')
    assert len(study.trials) == 15 and {'failed', 'complete'} == set(states(study)) and len([t for t in study.trials if t.state == TrialState.PRUNED and max(t.constraints.values()) > 0]) == states(study).count('failed') > 2
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
    summary = study_summary(study, 'macro_f1', 7, 9, as_strategy('racing'))
    assert summary['best'] is None and summary['epochs_spent'] == 0 and len(summary['trials']) == 7 and summary['epochs_full'] == 63


def test_exactly_n_trials_when_all_are_stopped_and_the_report_still_renders():  # optuna/optuna#3518, #2743
    from optkit.page import study_figure
    from optkit.strategies import Verdict
    class Never(Strategy):
        def between(self, course, history, shape, asked=None): return Verdict(True, 'never good enough', course.scores[0] - 1)
    study = run(simulated_runner(), 7, strategy=Never())
    assert states(study) == ['stopped'] * 7 and best_complete(study) is None and len(study.trials) == 7
    summary = study_summary(study, 'macro_f1', 7, 9)
    assert summary['best'] is None and summary['epochs_spent'] == 21 and study_figure(summary) is not None


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
    with pytest.raises(KeyboardInterrupt): run(first, 10, storage=storage, strategy='none')
    study = run(second, 10, storage=storage, strategy='none')
    assert states(study).count('complete') == 10 and states(study).count(None) == 1 and len(study.trials) == 11  # the interrupted one is not counted
    everything = first.asked + second.asked
    assert len(everything) == len(set(everything)) == 30, 'a fold was trained twice'
    left = next(t for t in study.trials if ended(t) is None)
    again = next(t for t in study.trials if 'resumed_from' in t.user_attrs)
    assert again.user_attrs['resumed_from'] == left.number and again.params == left.params and left.user_attrs['interrupted'] and left.state == TrialState.FAIL
    assert fold_scores(again)[:at % 3] == fold_scores(left)
    assert {x['state'] for x in study_summary(study, 'f1', 10, 9)['trials']} == {'complete', 'interrupted'}


def test_interrupted_twice_and_a_study_that_is_done(storage):
    for at in (4, 1, 0):
        with pytest.raises(KeyboardInterrupt): run(Counting(at), 4, storage=storage, strategy='none')
    study = run(Counting(), 4, storage=storage, strategy='none')
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
    with pytest.raises(InputError, match="study 'study' is another one .folds was 3, now 4"): run(Counting(), 6, folds=4, storage=storage)
    assert len(run(Counting(), 6, storage=storage).trials) == 6


def test_what_is_tried_first_is_tried_once(storage):
    first = [dict(lr=1e-3, weight_decay=.1), dict(lr=2e-3, weight_decay=.2)]
    with pytest.raises(KeyboardInterrupt): run(Counting(1), 6, storage=storage, first=first)
    study = run(Counting(), 6, storage=storage, first=first)
    tried = [t.params for t in study.trials if ended(t)]
    assert all(tried.count(p) == 1 for p in first) and len(tried) == 6


def test_callbacks():
    epochs, trials = [], []
    study = run(simulated_runner(), 5, on_epoch=lambda *a: epochs.append(a), on_trial=lambda s, t: trials.append((t.number, ended(t), t.state)), strategy='none')
    assert [e[:2] for e in epochs[:9]] == [(f, e) for f in range(3) for e in (1, 2, 3)] and len(epochs) == 45
    assert trials == [(n, 'complete', TrialState.COMPLETE) for n in range(5)]
    with pytest.raises(InputError, match='folds is 0'): run(simulated_runner(), 2, folds=0)
    assert [len(fold_scores(t)) for t in run(simulated_runner(), 2, folds=1).trials] == [1, 1]


def test_the_best_epoch_of_a_fold_counts():
    study = run(lambda p, f: iter([.1, .9 + .01 * f, .3]), 2, strategy='none', epochs=3)
    assert fold_scores(study.trials[0]) == [.9, .91, .92] and study.trials[0].value == pytest.approx(.91)


def test_the_log_level_of_optuna_is_put_back():
    before = optuna.logging.get_verbosity()
    run(simulated_runner(), 2)
    with pytest.raises(KeyboardInterrupt): run(Counting(0), 2)
    assert optuna.logging.get_verbosity() == before


def test_the_summary_is_plain_and_counts():
    import json
    study = run(simulated_runner(), 20)
    summary = study_summary(study, 'macro_f1', 20, 9, as_strategy('racing'))
    assert json.loads(json.dumps(summary)) == summary and summary['best'] == best_complete(study).number and summary['epochs_full'] == 180
    assert summary['epochs_spent'] == sum(t['epochs'] for t in summary['trials']) < 180 and summary['controller']['strategy'] == 'racing'


@pytest.mark.parametrize('name', ['a b', 'a#b', 'ä', "a'b", 'a&b=c', 'a?b', 'a%20b'])
def test_a_run_folder_may_have_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    run(simulated_runner(), 2, storage=sqlite_storage(folder / 'study.db'))
    assert [p.name for p in folder.iterdir() if not p.name.startswith('study.db-')] == ['study.db'] and len(run(simulated_runner(), 2, storage=sqlite_storage(folder / 'study.db')).trials) == 2


# --- processes

PROGRAM = textwrap.dedent('''
    import sys, time
    from optkit.space import parse_space
    from optkit.simulator import simulated_runner
    from optkit.storage import sqlite_storage
    from optkit.hpo import tune
    path, name, trials, pause, log = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    plain = simulated_runner()
    def runner(params, fold):
        with open(log, 'a') as file: file.write(f"{sorted(params.items())} {fold}\\n")
        time.sleep(pause)
        yield from plain(params, fold)
    space = dict(parse_space(t) for t in ('lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log'))
    tune(runner, space, trials, folds=3, storage=path, name=name, strategy='none', progress=False)
''')


def start(tmp_path, name, trials, pause=0.):
    (tmp_path / 'program.py').write_text(PROGRAM)
    return subprocess.Popen([sys.executable, str(tmp_path / 'program.py'), str(tmp_path / 'study.db'), name, str(trials), str(pause), str(tmp_path / f'{name}.log')],
                            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), stderr=subprocess.PIPE, text=True,
                            env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), OMP_NUM_THREADS='1'))


@pytest.mark.slow # the default run has three processes in one study, one of them killed
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
    finished = {t.number: (t.value, t.params, fold_scores(t)) for t in before.trials if ended(t)}
    running = [t for t in before.trials if t.state == TrialState.RUNNING]
    assert len(finished) == 2 and len(running) == 1 and len(fold_scores(running[0])) == 1
    counting = Counting()
    study = run(counting, 5, storage=sqlite_storage(tmp_path / 'study.db'), name='killed', strategy='none')
    assert {t.number: (t.value, t.params, fold_scores(t)) for t in study.trials if t.number in finished} == finished
    assert states(study).count('complete') == 5 and [f for _, f in counting.asked[:2]] == [1, 2] and dict(counting.asked[0][0]) == running[0].params
    again = next(t for t in study.trials if 'resumed_from' in t.user_attrs)
    assert fold_scores(again)[0] == fold_scores(running[0])[0] and not [t for t in study.trials if t.state == TrialState.RUNNING]


def test_requeue_takes_only_what_was_left_running(storage):
    run(Counting(), 2, storage=storage)
    study = optuna.load_study(study_name='study', storage=storage)
    assert requeue_interrupted(study) == 0
    study.ask()  # killed before its parameters were drawn
    trial = study.ask(SPACE)
    trial.set_user_attr('folds', dict(scores=[.5]))
    assert requeue_interrupted(study) == 2 and requeue_interrupted(study) == 0
    waiting = [t for t in study.trials if t.state == TrialState.WAITING]
    assert len(waiting) == 1 and fold_scores(waiting[0]) == [.5] and waiting[0].user_attrs['resumed_from'] == trial.number


# --- the same study, however often it was interrupted

def test_a_resumed_study_is_the_one_that_was_not_interrupted(tmp_path):
    plain = simulated_runner()
    whole = run(plain, 25, seed=3)
    for n, at in enumerate((5, 33)):
        with pytest.raises(KeyboardInterrupt): run(Counting(at), 25, seed=3, storage=tmp_path / f'{n}.db', epochs=3)
        again = run(Counting(), 25, seed=n, storage=tmp_path / f'{n}.db', epochs=3)  # another seed is not listened to
        kept = [t for t in again.trials if ended(t)]
        assert len(kept) == 25 and sum(spent(t)['epochs'] for t in kept) >= sum(len(c) for t in kept for c in curves(t, 3))
        first = next(t.number for t in again.trials if ended(t) is None)
        assert [t.params for t in again.trials[:first + 1]] == [t.params for t in whole.trials[:first + 1]] and len({t.params['lr'] for t in kept}) == 25


def test_every_value_is_stored_once_and_comes_along_when_a_trial_is_resumed(storage):
    with pytest.raises(KeyboardInterrupt): run(Counting(8), 5, storage=storage, strategy='none', epochs=3)
    study = run(Counting(), 5, storage=storage, strategy='none', epochs=3)
    for t in study.trials:
        if ended(t): assert sorted(t.intermediate_values) == list(range(1, 10)) and [max(c) for c in curves(t, 3)] == fold_scores(t)
    again = next(t for t in study.trials if 'resumed_from' in t.user_attrs)
    old = study.trials[again.user_attrs['resumed_from']]
    assert old.intermediate_values.items() <= again.intermediate_values.items()


def test_killed_after_the_last_fold_and_before_it_was_told(storage):
    study = run(Counting(), 3, storage=storage, strategy='none')
    trial = study.ask(SPACE)
    for fold, score in enumerate((.5, .6, .7)): trial.report(score, fold * 10**6 + 1)
    for key, value in dict(worker='x', folds=dict(scores=[.5, .6, .7], seconds=3., training=2., epochs=9), ended='complete').items(): trial.set_user_attr(key, value)
    trial.storage.set_trial_user_attr(trial._trial_id, 'worker', f'{open_id()}|999999999|0.0')
    assert ended(study.trials[3]) is None
    nothing = Counting(0, AssertionError)
    study = run(nothing, 4, storage=storage, strategy='none')
    assert states(study) == ['complete'] * 3 + [None, 'complete'] and study.trials[4].value == pytest.approx(.6) and spent(study.trials[4])['epochs'] == 9


def open_id():
    from optkit.storage import worker_id
    return worker_id().rsplit('|', 2)[0]


def test_a_worker_that_slept_while_its_trial_was_given_to_another(storage):
    said, plain, hit = [], simulated_runner(), []
    def runner(params, fold):
        for n, v in enumerate(plain(params, fold)):
            if not hit and fold == 1:
                hit.append(1)
                study = optuna.load_study(study_name='study', storage=storage)
                storage.set_trial_state_values(study.trials[-1]._trial_id, state=TrialState.FAIL)
            yield v
    study = tune(runner, SPACE, 4, folds=3, storage=storage, progress=False, say=said.append, strategy='none')
    assert states(study).count('complete') == 4 and any('taken over by another process' in s for s in said)


# --- memory

class Card:
    "Runs out of memory above so many rows at once"
    epochs = 3
    def __init__(self, rows, physical=None, at_epoch=0): self.rows, self.physical, self.at, self.asked, self.plain = rows, physical, at_epoch, [], simulated_runner()
    @property
    def physical_batch(self): return self.physical or (lambda params: params['effective_batch'])
    def __call__(self, params, fold):
        self.asked.append((fold, params['physical_batch']))
        for n, v in enumerate(self.plain({k: params[k] for k in ('lr', 'weight_decay')}, fold)):
            if n == self.at and params['physical_batch'] > self.rows: raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')
            yield v


def with_batch(trial): return dict(lr=trial.suggest_float('lr', 1e-5, 1e-1, log=True), weight_decay=trial.suggest_float('weight_decay', 1e-3, 1, log=True), effective_batch=trial.suggest_categorical('effective_batch', EFFECTIVE_BATCHES))


@pytest.mark.parametrize('at', [0, 1, 2])
def test_out_of_memory_makes_the_batch_smaller_and_keeps_the_trial(at):
    card, said = Card(20, at_epoch=at), []
    study = tune(card, with_batch, 12, folds=3, storage='memory', progress=False, say=said.append, strategy='none')
    plain = simulated_runner()
    assert states(study) == ['complete'] * 12 and all(p <= 20 for _, p in card.asked[6:]), 'what did not fit is not tried again'
    for t in study.trials:
        expected = [list(plain({k: t.params[k] for k in ('lr', 'weight_decay')}, f)) for f in range(3)]
        assert curves(t, 3) == expected and t.params['effective_batch'] in EFFECTIVE_BATCHES  # the same values, once
    first = study.trials[0].user_attrs
    assert first['physical_batch'] == 16 and all('out of memory' in d['reason'] for d in first['decisions']) and said[0].count('\n') == 0 and 'the effective batch stays' in said[0]


def test_what_does_not_fit_with_one_row_is_infeasible_and_the_sampler_keeps_away():
    plain = simulated_runner()
    def runner(params, fold):
        if params['lr'] > 1e-2: raise RuntimeError('CUDA error: out of memory')  # whatever the batch
        yield from plain({k: params[k] for k in ('lr', 'weight_decay')}, fold)
    runner.physical_batch = 4
    study = run(runner, 60, strategy='none', epochs=3)
    failed = [t for t in study.trials if ended(t) == 'failed']
    assert failed and all(t.params['lr'] > 1e-2 and t.constraints == {'memory': 1.} and t.user_attrs['reason'] == 'out of memory' for t in failed)
    assert sum(t.number >= 20 for t in failed) <= 4 and len(study.trials) == 60


def test_memory_is_forecast_before_a_trial_starts():
    card = Card(10**9, physical=64)
    card.memory = lambda params: (params['physical_batch'] * 2**30 + (0 if params['lr'] < 1e-2 else 2**40), 24 * 2**30)
    study = tune(card, with_batch, 12, folds=2, storage='memory', progress=False, say=lambda t: None, strategy='none', epochs=3)
    assert all(p <= 24 for _, p in card.asked) and set(states(study)) == {'complete', 'failed'}
    for t in study.trials:
        assert (ended(t) == 'failed') == (t.params['lr'] >= 1e-2) and (ended(t) == 'complete' or (t.constraints['memory'] > 900 and not t.intermediate_values))


def test_hosts_with_other_cards_share_a_study(storage):  # optuna/optuna#2199
    small, large = Card(16, physical=512), Card(400, physical=512)
    for n, card in ((4, small), (8, large), (12, small)): study = tune(card, with_batch, n, folds=2, storage=storage, progress=False, say=lambda t: None, strategy='none', epochs=3)
    assert states(study) == ['complete'] * 12 and {len(t.distributions['effective_batch'].choices) for t in study.trials} == {5}


def test_the_default_space_searches_the_effective_batch_only():
    known = as_space(default_space).known
    assert set(known) == {'lr', 'weight_decay', 'warmup', 'label_smoothing', 'effective_batch'} and '[32, 64, 128, 256, 512]' in known['effective_batch']


# --- engines are reused

def test_trials_with_the_engine_that_is_built_come_first():
    def keyed(reuse):
        plain, order = simulated_runner(), []
        def runner(params, fold):
            if fold == 0: order.append(params['rank'])
            yield from plain({k: params[k] for k in ('lr', 'weight_decay')}, fold)
        if reuse: runner.key = lambda params: params['rank']
        space = SPACE | dict(rank=CategoricalDistribution([4, 8, 16, 32]))
        study = tune(runner, space, 40, folds=2, epochs=3, storage='memory', progress=False, strategy='none', sampler=optuna.samplers.RandomSampler(seed=0))
        assert states(study) == ['complete'] * 40
        return sum(a != b for a, b in zip(order, order[1:]))
    assert keyed(True) < .6 * keyed(False)
    assert next_with_key([1, 2, 2], 3) == 1 and next_with_key([1, 2, 2], 1) == 0


# --- several objectives

def test_several_objectives_are_not_stopped():
    plain = simulated_runner()
    runner = lambda p, f: ((v, f + n) for n, v in enumerate(plain(p, f)))
    study = run(runner, 12, direction=('maximize', 'minimize'), epochs=3)
    assert states(study) == ['complete'] * 12 and len(study.best_trials) >= 1
    t = study.trials[3]
    assert t.values == pytest.approx(np.mean(fold_scores(t), 0)) and fold_scores(t)[1][1] == 3 and len(t.user_attrs['values']) == 3 and t.user_attrs['values'][2][1] == [list(plain(t.params, 2))[1], 3]
    with pytest.raises(InputError, match="strategy 'asha' compares one objective"): run(runner, 2, direction=('maximize', 'minimize'), strategy='asha', epochs=3)
    with pytest.raises(InputError, match='expected 2 numbers'): run(plain, 2, direction=('maximize', 'minimize'), epochs=3)
    broken = run(lambda p, f: iter([(.5, math.nan)]), 3, direction=('maximize', 'minimize'))
    assert states(broken) == ['failed'] * 3


def test_what_looks_at_one_objective_says_so_of_several(tmp_path, capsys):
    from optkit.cli import main
    from optkit.forecast import parallel_figure
    from optkit.confirm import confirm
    from optkit.views import study_view
    runner = lambda p, f: iter([(p['lr'], 1.)])
    study = run(runner, 3, storage=tmp_path / 'study.db', direction=('maximize', 'minimize'))
    for look in (best_complete, courses, what_if, parallel_figure, lambda s: confirm(s, runner, progress=False), lambda _: study_view(tmp_path)):
        with pytest.raises(InputError, match="study 'study' has 2 objectives"): look(study)
    assert main(['forecast', str(tmp_path)]) == 0 and 'several objectives: no strategy stops a trial' in capsys.readouterr().out


def test_several_objectives_keep_every_value_when_they_are_resumed(storage):
    plain, count = simulated_runner(), itertools.count()
    def runner(p, f):
        for n, v in enumerate(plain(p, f)):
            if next(count) == 7: raise KeyboardInterrupt
            yield v, f + n
    with pytest.raises(KeyboardInterrupt): run(runner, 2, storage=storage, direction=('maximize', 'minimize'), epochs=3)
    study = run(runner, 2, storage=storage, direction=('maximize', 'minimize'), epochs=3)
    for t in study.trials[1:]: assert t.user_attrs['values'] == [[[v, f + n] for n, v in enumerate(plain(t.params, f))] for f in range(3)]


# --- samplers

@pytest.mark.parametrize('sampler', [optuna.samplers.GridSampler(dict(lr=[1e-4, 1e-3], weight_decay=[.01, .1])), optuna.samplers.BruteForceSampler()], ids=lambda s: type(s).__name__)
def test_a_sampler_that_has_tried_everything_ends_the_study(sampler):
    space = SPACE if isinstance(sampler, optuna.samplers.GridSampler) else ['lr=0.001,0.01', 'weight_decay=0.1,0.2']
    study = tune(simulated_runner(), space, 9, folds=3, storage='memory', strategy='none', progress=False, say=lambda text: None, sampler=sampler)
    assert states(study) == ['complete'] * 4 and len({tuple(t.params.items()) for t in study.trials}) == 4


# --- time

def test_a_budget_ends_a_study_and_a_larger_one_goes_on(storage):
    plain, said = simulated_runner(), []
    def slow(params, fold):
        for v in plain(params, fold): time.sleep(.02); yield v
    go = lambda budget: tune(slow, SPACE, budget=budget, folds=3, epochs=3, storage=storage, progress=False, strategy='none', say=said.append)
    first = go('1s')
    n, used = states(first).count('complete'), sum(spent(t)['seconds'] for t in first.trials if t.state.is_finished())
    assert 1 <= n <= 6 and used < 1.5 and 'budget of 1 s is spent' in said[-1] and not [t for t in first.trials if t.state == TrialState.RUNNING]
    assert len(go(1.).trials) == len(first.trials), 'earlier calls count'
    second = go(2.5)
    assert n < states(second).count('complete') and [t.value for t in second.trials[:n]] == [t.value for t in first.trials[:n]]
    asked = [t for t in second.trials if 'resumed_from' in t.user_attrs]
    assert asked and asked[0].params == first.trials[asked[0].user_attrs['resumed_from']].params


# --- where it is kept

@pytest.mark.parametrize('name', ['mine', 'bert-1.5', 'my.log'])
def test_the_default_place_is_a_file_of_the_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    study = tune(simulated_runner(), SPACE, 3, folds=3, name=name, progress=False)
    assert (tmp_path / 'runs' / name / 'study.db').is_file() and len(tune(simulated_runner(), SPACE, 4, folds=3, name=name, progress=False).trials) == 4 and len(study.trials) == 4


@pytest.mark.parametrize('where', ['study.db', 'study.log', 'sqlite:///{}/a.db', 'new/folder'])
def test_any_storage_resumes(tmp_path, where):
    where = where.format(tmp_path) if '://' in where else tmp_path / where
    with pytest.raises(KeyboardInterrupt): run(Counting(7), 5, storage=where, strategy='none')
    study = run(Counting(), 5, storage=where, strategy='none')
    assert states(study).count('complete') == 5 and len(study.trials) == 6


def test_a_torn_journal_is_mended_with_a_note(tmp_path):
    said = []
    run(Counting(), 3, storage=tmp_path / 'study.log', strategy='none')
    with open(tmp_path / 'study.log', 'ab') as file: file.write(b'{"op_code": 8, "trial_id"')
    study = tune(Counting(), SPACE, 5, folds=3, storage=tmp_path / 'study.log', strategy='none', progress=False, say=said.append)
    assert states(study) == ['complete'] * 5 and 'torn lines were dropped' in said[0] and len(list(tmp_path.glob('study.log.torn-*'))) == 1


def test_fresh_moves_the_old_study_aside(tmp_path):
    old = [t.value for t in run(simulated_runner(), 4, storage=tmp_path / 'study.db').trials]
    new = run(simulated_runner(seed=1), 2, storage=tmp_path / 'study.db', fresh=True)
    kept, = tmp_path.glob('study.db.*.old')
    assert len(new.trials) == 2 and [t.value for t in load(kept).trials] == old
    assert len(run(simulated_runner(), 3, storage=tmp_path / 'study.db', name='other').trials) == 3
    run(simulated_runner(), 2, storage=tmp_path / 'study.db', fresh=True)  # beside another study only its name changes
    assert sorted(n.split('-')[0] for n in optuna.get_all_study_names(sqlite_storage(tmp_path / 'study.db'))) == ['other', 'study', 'study']


def contents_of(path):
    "What a database holds, wherever SQLite has put it: its log goes into the file whenever the last connection happens to be closed"
    with sqlite3.connect(path) as db: found = [*db.iterdump()]
    db.close()
    return found


@pytest.mark.parametrize('changes, said', [
    (dict(space=['lr=1e-5..1e-2:log', 'weight_decay=1e-3..1:log']), 'space: lr was'), (dict(space=['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log', 'extra=1..4']), 'space: extra was not there, now'),
    (dict(space=['lr=1e-5..1e-1:log']), 'weight_decay was'), (dict(identity=dict(rows='b')), 'rows was a, now b'), (dict(identity={}), 'rows was a, now not there'),
    (dict(folds=4), 'folds was 3, now 4'), (dict(epochs=4), 'epochs was 3, now 4'), (dict(direction='minimize'), 'directions was')], ids=str)
def test_another_study_under_the_same_name_is_refused_with_the_difference(tmp_path, changes, said):
    go = lambda **k: tune(**dict(dict(runner_or_trainer=simulated_runner(), space=SPACE, n_trials=4, folds=3, storage=tmp_path / 'study.db', progress=False, identity=dict(rows='a')), **k))
    go()
    before = contents_of(tmp_path / 'study.db')
    with pytest.raises(InputError, match=said) as caught: go(**changes)
    assert '\n' not in str(caught.value) and 'fresh=True' in str(caught.value) and contents_of(tmp_path / 'study.db') == before


def test_a_study_of_another_version(tmp_path):
    with_old = optuna.create_study(study_name='study', storage=sqlite_storage(tmp_path / 'study.db'), direction='maximize')
    with_old.tell(with_old.ask(SPACE), .5)
    with pytest.raises(InputError, match='made by another version of optkit'): run(simulated_runner(), 2, storage=tmp_path / 'study.db')
    with sqlite3.connect(tmp_path / 'study.db') as db: db.execute("update alembic_version set version_num = 'v999.0.0.a'")
    with pytest.raises(InputError, match='another version of Optuna'): run(simulated_runner(), 2, storage=tmp_path / 'study.db')


# --- bad input: one line, before anything runs, and nothing left on the disk

def never(params, fold): raise AssertionError('it ran')

BAD = {
    'an unknown strategy': (dict(strategy='greedy'), "strategy is 'greedy', expected one of none"),
    'a space that returns nothing': (dict(space=lambda trial: trial.suggest_float('x', 0, 1) and None), 'the space returns None'),
    'a space that suggests nothing': (dict(space=lambda trial: dict(lr=1)), 'the space suggests nothing'),
    'an empty space': (dict(space={}), 'the space is empty'),
    'a space of numbers': (dict(space=dict(lr=1e-3)), "space: 'lr' is 0.001"),
    'a space that is a number': (dict(space=3), 'space is 3'),
    'folds 0': (dict(folds=0), 'folds is 0'), 'folds that are a truth value': (dict(folds=True), 'folds is True'), 'folds as text': (dict(folds='5'), 'row numbers go with a Trainer'),
    'epochs 0': (dict(epochs=0), 'epochs is 0'), 'half an epoch': (dict(epochs=.5), 'epochs is 0.5'),
    'n_trials 0': (dict(n_trials=0), 'n_trials is 0'), 'neither trials nor budget': (dict(n_trials=None), "neither n_trials nor budget"),
    'a budget that is no time': (dict(budget='soon'), "budget is 'soon'"), 'a negative budget': (dict(budget=-1), 'budget is -1'),
    'a study for a storage': (dict(storage=optuna.create_study()), 'of a study: its storage'), 'a number for a storage': (dict(storage=3), 'storage is 3, expected'),
    'a first trial with another name': (dict(first=[dict(learning_rate=1.)]), "first: 'learning_rate' is no parameter of the space, which has lr, weight_decay"),
    'a first trial outside of the space': (dict(first=[dict(lr=1e-3), dict(lr=1.)]), 'first: lr=1.0 is not in the space'), 'a first trial of another kind': (dict(first=[dict(lr='high')]), "first: lr='high' is not in the space"),
    'no runner': (dict(runner_or_trainer=None), 'runner is None'), 'workers 0': (dict(workers=0), 'workers is 0'),
    'a direction that is none': (dict(direction='up'), "direction is 'up'"), 'a negative seed': (dict(seed=-1), 'seed is -1'),
    'hyperband without epochs': (dict(strategy='hyperband', epochs=None), "strategy 'hyperband' needs epochs"),
    'workers and a runner that cannot travel': (dict(workers=2, space=lambda trial: dict(x=trial.suggest_float('x', 0, 1))), 'can be sent to another process'),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input(tmp_path, case):
    changes, said = BAD[case]
    with pytest.raises(InputError) as caught: tune(**dict(dict(runner_or_trainer=never, space=SPACE, n_trials=3, folds=3, epochs=3, storage=tmp_path / 'run' / 'study.db', progress=False), **changes))
    assert said in str(caught.value) and '\n' not in str(caught.value) and not (tmp_path / 'run').exists()


@pytest.mark.parametrize('runner, said', [(lambda p, f: iter(()), 'gave no value in fold 0'), (lambda p, f: iter(['good']), "gave 'good' in fold 0, epoch 1; expected a number"), (lambda p, f: iter([None]), 'gave None'),
                                          (lambda p, f: iter([True]), 'gave True'), (lambda p, f: iter([.1] * 4), 'more than 3 values in fold 0'), (lambda p, f: iter([(.1, .2)]), 'expected a number'),
                                          (lambda p, f: None, 'the runner gave None for fold 0'), (lambda p, f: .5, 'the runner gave 0.5 for fold 0')], ids=range(8))
def test_a_runner_that_gives_no_numbers(tmp_path, runner, said):
    with pytest.raises(InputError) as caught: run(runner, 3, storage=tmp_path / 'run' / 'study.db', epochs=3)
    assert said in str(caught.value) and not (tmp_path / 'run').exists()


def test_bad_input_leaves_folders_and_an_old_study_as_they_were(tmp_path, monkeypatch):
    bad = lambda p, f: iter(['good'])
    with pytest.raises(InputError, match="gave 'good'"): run(bad, 3, storage=f'sqlite:///{tmp_path}/a.db')
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for where in ('study.db', 'runs/new', f'sqlite:///{tmp_path}/a/b.log'):
        with pytest.raises(InputError, match="gave 'good'"): run(bad, 3, storage=where)
        assert tmp_path.is_dir() and not list(tmp_path.iterdir()), where
    for name in ('study.db', 'study.log'):
        old = [t.values for t in run(simulated_runner(), 3, storage=tmp_path / name).trials]
        with pytest.raises(InputError, match="gave 'good'"): run(bad, 3, storage=tmp_path / name, fresh=True)
        assert not list(tmp_path.glob('*.old*')) and [t.values for t in run(simulated_runner(), 3, storage=tmp_path / name).trials] == old


@pytest.mark.parametrize('text', ['epoch 1\nepoch 2\n', 'no end of line', '\n'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, text):
    (tmp_path / 'train.log').write_text(text)
    with pytest.raises(InputError, match='is no journal'): run(never, 3, storage=tmp_path / 'train.log')
    assert (tmp_path / 'train.log').read_text() == text and not list(tmp_path.glob('*torn*'))


def test_a_line_that_is_being_written_is_waited_for(tmp_path):
    import threading
    from optuna.storages.journal import JournalFileSymlinkLock
    run(Counting(), 3, storage=tmp_path / 'study.log', strategy='none')
    writer, line = JournalFileSymlinkLock(str(tmp_path / 'study.log')), (tmp_path / 'study.log').read_bytes().splitlines(keepends=True)[-1]
    writer.acquire()
    with open(tmp_path / 'study.log', 'ab') as file:
        file.write(line[:20]); file.flush()
        def finish(): time.sleep(.5); file.write(line[20:]); file.flush(); writer.release()
        thread = threading.Thread(target=finish)
        thread.start()
        assert open_storage(tmp_path / 'study.log').note == ''
        thread.join()
    assert (tmp_path / 'study.log').read_bytes().endswith(line) and not list(tmp_path.glob('*torn*'))


def test_storages_that_cannot_be_used(tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'text.db').write_text('this is no database, whatever its name says')
    (tmp_path / 'text.log').write_text('{"a": 1}\n')
    sqlite_storage(tmp_path / 'there.db')
    for where, said in ((tmp_path / 'file' / 'study.db', 'is a file, expected a folder'), (tmp_path / 'text.db', 'cannot be opened'), (tmp_path / 'text.log', 'is no journal'),
                        ('postgresql+nodriver://nobody@localhost:1/x', 'driver of this database is missing'), ('sqlite:////proc/nowhere/a.db', 'cannot be'),
                        (f'sqlite:///file:{tmp_path}/there.db?mode=ro&uri=true', 'cannot be'), ('://', 'expected a path or an address')):
        with pytest.raises(InputError, match=said) as caught: run(never, 3, storage=where)
        assert str(caught.value).count('\n') <= 1
    assert (tmp_path / 'text.db').read_text().startswith('this is') and (tmp_path / 'text.log').read_text() == '{"a": 1}\n'


def test_a_read_only_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'access', lambda path, mode: mode != os.W_OK)  # root may write anywhere
    with pytest.raises(InputError, match='read-only'): run(never, 3, storage=tmp_path / 'a' / 'study.db')
    assert not (tmp_path / 'a').exists()


# --- a study that somebody else made, and one that is done

def test_what_would_racing_have_cost_me():
    study = run(simulated_runner(seed=2), 40, strategy='none')
    found = what_if(study)
    assert found.epochs == 40 * 9 and found.epochs_then < 330 and found.stopped > 10 and found.lost < .02 and found.trials == 40 and 'saved' in repr(found)
    assert what_if(study, 'none').epochs_then == found.epochs and what_if(study, 'none').lost == 0
    with pytest.raises(InputError, match='cannot be replayed'): what_if(study, 'reports')
    theirs = optuna.create_study(direction='minimize')
    for n in range(60):
        trial = theirs.ask(SPACE)
        top = math.log10(trial.params['lr'] / 1e-3) ** 2
        for e in range(30): trial.report(top + 3 / (e + 1), e)
        theirs.tell(trial, top + .1)
    found = what_if(theirs)
    assert found.trials == 60 and found.epochs == 1800 and found.epochs_then < 1500 and found.lost <= 0 + 1e-9
    with pytest.raises(InputError, match='nothing to replay'): what_if(optuna.create_study())


# --- over a trainer

@pytest.fixture(scope='module')
def trainer():
    from optkit.store import example_table, tokenise, word_tokenizer
    from optkit.models import example_model
    from optkit.hardware import detect
    from optkit.config import TrainConfig
    from optkit.build import make_engine
    from optkit.trainer import Trainer
    config = TrainConfig(epochs=3, lr=3e-3, precision='fp32')
    return Trainer(make_engine(example_model(), config, detect()), tokenise(example_table(90), word_tokenizer(), max_length=48, progress=False), config)


def test_a_trainer_can_be_given_and_a_reused_engine_changes_nothing(trainer):
    space = ['lr=3e-4..1e-2:log', 'effective_batch=8,16', 'label_smoothing=0.0..0.1']
    study = tune(trainer, space, 5, folds=3, storage='memory', progress=False, strategy='none')
    assert states(study) == ['complete'] * 5 and all(len(c) == 3 for t in study.trials for c in curves(t, 3))
    from optkit.models import example_model
    from optkit.folds import stratified_folds
    from optkit.hardware import detect
    from optkit.build import make_engine
    from optkit.trainer import Trainer
    last = study.trials[-1]
    fresh = TrainerRunner(Trainer(make_engine(example_model(), trainer.config, detect()), trainer.store, trainer.config), stratified_folds(np.arange(90), trainer.store.labels.numpy(), 3, 0))
    assert [list(fresh(last.params, f)) for f in range(3)] == curves(last, 3)


def test_a_trainer_with_other_rows_is_another_study(trainer, tmp_path):
    go = lambda **k: tune(trainer, ['lr=3e-4..1e-2:log'], 1, storage=tmp_path / 'study.db', progress=False, **k)
    go(folds=2)
    rows = np.arange(90)
    with pytest.raises(InputError, match='fingerprint was'): go(folds=[(rows[30:], rows[:30]), (rows[:60], rows[60:])])
    with pytest.raises(InputError, match='91 folds|need at least|expected at least'): tune(trainer, ['lr=3e-4..1e-2:log'], 1, folds=91, storage=tmp_path / 'new.db', progress=False)
    with pytest.raises(InputError, match='an engine cannot be sent'): go(folds=2, workers=2)
    assert not (tmp_path / 'new.db').exists()


def test_other_tokens_under_the_same_labels_are_other_data(trainer):
    from dataclasses import replace
    from optkit.trainer import Trainer
    rows = np.arange(90)
    of = lambda store: TrainerRunner(Trainer(trainer.engine, store, trainer.config), [(rows[30:], rows[:30])]).fingerprint
    tokens = trainer.store.tokens.clone()
    tokens[5] += 1
    assert of(trainer.store) == of(replace(trainer.store)) and of(replace(trainer.store, tokens=tokens)) != of(trainer.store)


def test_new_folds_of_a_runner_keep_groups_whole(trainer):
    from optkit.folds import stratified_folds
    groups = np.arange(90) // 3
    runner = TrainerRunner(trainer, stratified_folds(np.arange(90), trainer.store.labels.numpy(), 3, 0, groups), groups=groups)
    for again in (runner.renewed(1), runner.renewed(1).renewed(2)):
        for train, valid in again.folds: assert not set(groups[train]) & set(groups[valid])


def test_the_metric_of_a_trainer_is_that_of_its_search(trainer):
    from dataclasses import replace
    from optkit.folds import stratified_folds
    from optkit.confirm import confirm
    from optkit.trainer import Trainer
    config, seen = replace(trainer.config, metric='custom', epochs=1), []
    own = Trainer(trainer.engine, trainer.store, config, custom=lambda logits, labels: seen.append(len(labels)) or .25, on_step=lambda *_: seen.append('step'))
    study = tune(own, ['lr=3e-4..1e-2:log'], 1, folds=3, storage='memory', progress=False)
    assert study.best_value == .25 and seen.count(30) == 3 and 'step' in seen
    runner, memory = TrainerRunner(own, stratified_folds(np.arange(90), trainer.store.labels.numpy(), 3), memory=lambda params: (1, 2)), seen.clear()
    assert runner.renewed(1).memory({}) == (1, 2)
    assert confirm(study, runner, top=1, progress=False).winner.fresh == .25 and seen.count(30) == 3 and 'step' in seen


@pytest.mark.parametrize('space, epochs, said', [(['lr=3e-4..1e-2:log'], 4, 'epochs is 4, but the Trainer is configured for 3'), (['epochs=1..5'], 4, 'epochs is 4, but the space goes up to 5'), (['epochs=1,5'], 3, 'goes up to 5'),
                                                 (['schedule=linear,polynomial'], None, "schedule is 'polynomial'"), (['effective_batch=0..8'], None, 'effective_batch is 0'), (['learning_rate=0.0..1.0'], None, r"no \['learning_rate'\]"),
                                                 (lambda trial: dict(lr=trial.suggest_float('lr', -1., 1.)), None, 'lr is -'), (['adapter_rank=2,4'], None, 'belong to the engine'), (['epochs=few,many'], None, "epochs is 'few'"), (['epochs=2,4.5'], None, 'epochs is 4.5')], ids=range(10))
def test_what_a_trainer_cannot_do_is_said_before_it_begins(trainer, tmp_path, space, epochs, said):
    steps = []
    trainer.on_step = lambda *step: steps.append(step)
    with pytest.raises(InputError, match=said): tune(trainer, space, 3, folds=2, epochs=epochs, storage=tmp_path / 'run' / 'study.db', progress=False)
    trainer.on_step = None
    assert not steps and not (tmp_path / 'run').exists()


def test_epochs_that_a_space_gives_may_be_more_than_those_of_the_trainer(trainer):
    words = lambda trial: dict(epochs=dict(few=4, many=5)[trial.suggest_categorical('epochs', ['few', 'many'])])
    assert tune(trainer, words, 1, folds=2, storage='memory', progress=False, strategy='none').user_attrs['optkit']['epochs'] == 5
    for space in (['epochs=5,5'], lambda trial: dict(epochs=trial.suggest_int('epochs', 5, 5)), lambda trial: dict(lr=trial.suggest_float('lr', 1e-4, 1e-3), epochs=5)):
        study = tune(trainer, space, 1, folds=2, storage='memory', progress=False, strategy='none')
        assert [len(c) for c in curves(study.trials[0], 5)] == [5, 5]


# --- habits from `study.optimize`

def test_a_callback_may_stop_the_study(storage):
    said = []
    go = lambda **k: tune(simulated_runner(), SPACE, 9, folds=2, storage=storage, progress=False, say=said.append, **k)
    assert len(go(on_trial=lambda study, trial: study.stop() if trial.number == 2 else None).trials) == 3 and said == ['stopped by on_trial; the same call goes on']
    assert len(go(on_trial=optuna.study.MaxTrialsCallback(5, states=None)).trials) == 5
    assert [ended(t) is not None for t in go().trials] == [True] * 9 and len(said) == 2


@pytest.mark.parametrize('where', ['space', 'runner', 'second fold'])
@pytest.mark.parametrize('direction', ['maximize', ('maximize', 'minimize')], ids=['one', 'two'])
def test_a_space_or_a_runner_may_refuse_parameters(where, direction, storage):
    plain, several = simulated_runner(), not isinstance(direction, str)
    bad = lambda params: params['lr'] > 1e-3
    def space(trial):
        params = {k: trial._suggest(k, d) for k, d in SPACE.items()}
        if where == 'space' and bad(params): raise optuna.TrialPruned('too fast')
        return params
    def runner(params, fold):
        for n, value in enumerate(plain(params, fold)):
            if where != 'space' and bad(params) and fold == (where != 'runner'): raise optuna.TrialPruned('too fast')
            yield (value, n) if several else value
    go = lambda n: tune(runner, space, n, folds=2, epochs=3, storage=storage, progress=False, strategy='none', direction=direction, sampler=optuna.samplers.RandomSampler(seed=0))
    go(6)
    study = go(12)
    assert states(study) == ['failed' if bad(t.params) else 'complete' for t in study.trials] and {'failed', 'complete'} == set(states(study))
    assert {t.user_attrs.get('reason') for t in study.trials} == {None, 'too fast'} and all(not t.system_attrs.get('constraints') for t in study.trials)
    assert {t.state for t in study.trials if ended(t) == 'failed'} == {TrialState.FAIL if several else TrialState.PRUNED}


def test_a_space_that_refuses_everything_ends():
    def space(trial): trial.suggest_float('lr', 0, 1); raise optuna.TrialPruned
    assert states(tune(never, space, 3, folds=2, storage='memory', progress=False)) == ['failed'] * 3
    assert set(states(tune(never, space, budget=.3, folds=2, storage='memory', progress=False, say=lambda text: None))) == {'failed'}


@pytest.mark.parametrize('where', ['study.db', 'study.log'])
def test_a_storage_that_gives_way_is_gone_on_with_by_the_same_process(tmp_path, monkeypatch, where):
    "As where a disk is full: nothing can be given back either, and a second call must not wait for the trial that this process held"
    import optkit.hpo
    full, count, plain = [], itertools.count(), simulated_runner()
    def runner(p, f):
        for v in plain(p, f):
            if next(count) == 4: full.append(True)
            yield v
    place = open_storage(tmp_path / where)
    def fails(target, name):
        kept = getattr(target, name)
        def write(*args, **kwargs):
            if full: raise optuna.exceptions.StorageInternalError('database or disk is full') if where == 'study.db' else OSError(28, 'No space left on device')
            return kept(*args, **kwargs)
        monkeypatch.setattr(target, name, write)
    for way in [(place.storage, 'set_trial_user_attr'), (optkit.hpo, 'write_values')] if where == 'study.db' else [(type(place.storage._backend), 'append_logs')]: fails(*way)
    go = lambda: run(runner, 3, storage=place.storage if where == 'study.db' else place.path, epochs=3, strategy='none')
    with pytest.raises(StorageLost if where == 'study.db' else OSError, match='cannot be written to any more .database or disk is full.; what ended is kept' if where == 'study.db' else 'No space'): go()
    assert not HELD
    full.clear()
    thread, found = None, []
    thread = threading.Thread(target=lambda: found.append(states(go())), daemon=True)
    thread.start(); thread.join(30)
    assert found == [[None] + ['complete'] * 3]


def test_a_worker_whose_storage_gives_way_says_so_in_a_line(tmp_path, monkeypatch):
    import optkit.hpo as module
    def lost(self): raise optuna.exceptions.StorageInternalError('database or disk is full')
    monkeypatch.setattr(study_module.Search, 'run', lost)
    monkeypatch.setattr(module, 'open_or_make_study', lambda plan, place: None)
    monkeypatch.setattr(study_module.Search, '__init__', lambda self, *a: None)
    with pytest.raises(SystemExit, match='worker [0-9]+: the storage of study .s. cannot be written to any more .database or disk is full'): module._run_worker(SimpleNamespace(name='s'), str(tmp_path / 's.db'), False)


def test_trials_that_wait_in_a_study_made_by_hand_come_first(storage):
    place = open_storage(storage)
    theirs = optuna.create_study(storage=place.storage, study_name='study', direction='maximize')
    theirs.enqueue_trial(dict(lr=1e-3, weight_decay=.5), user_attrs=dict(note='mine'))
    study = run(simulated_runner(), 3, storage=place.storage, first=[dict(lr=2e-3, weight_decay=.25)])
    assert [t.params['lr'] for t in study.trials[:2]] == [1e-3, 2e-3] and study.trials[0].user_attrs['note'] == 'mine'
    assert [t.params['lr'] for t in run(simulated_runner(), 4, storage=place.storage, first=[dict(lr=2e-3, weight_decay=.25)]).trials].count(2e-3) == 1


def test_a_trial_that_waited_is_not_lost_when_its_parameters_were_not_all_drawn(storage):
    draws = itertools.count()
    def space(trial):
        if (n := next(draws)) == 20: raise KeyboardInterrupt  # behind the draws that look at the space
        lr = trial.suggest_float('lr', 1e-5, 1e-1, log=True)
        if n == 41: raise KeyboardInterrupt
        return dict(lr=lr, weight_decay=trial.suggest_float('weight_decay', 1e-3, 1., log=True))
    place = open_storage(storage)
    optuna.create_study(storage=place.storage, study_name='study', direction='maximize').enqueue_trial(dict(lr=1e-3, weight_decay=.5), user_attrs=dict(note='mine'))
    go = lambda: tune(simulated_runner(), space, 1, folds=2, storage=place.storage, progress=False)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt): go()
    last = go().trials[-1]
    assert last.params == dict(lr=1e-3, weight_decay=.5) and last.user_attrs['note'] == 'mine' and ended(last) == 'complete'


def test_an_empty_study_of_another_direction_is_refused(storage):
    place = open_storage(storage)
    optuna.create_study(storage=place.storage, study_name='study')  # to minimise, which nobody said
    with pytest.raises(InputError, match="study 'study' was made to minimize, the search is to maximize"): run(simulated_runner(), 3, storage=place.storage)
    assert states(run(simulated_runner(), 3, storage=place.storage, direction=optuna.study.StudyDirection.MINIMIZE, folds=np.int64(2), strategy='none')) == ['complete'] * 3


def test_what_others_noted_on_a_trial_comes_along_when_it_is_resumed(storage):
    count, plain = itertools.count(), simulated_runner()
    def runner(p, f):
        for v in plain(p, f):
            if next(count) == 3: raise KeyboardInterrupt
            yield v
    place = open_storage(storage)
    optuna.create_study(storage=place.storage, study_name='study', direction='maximize').enqueue_trial(dict(lr=1e-3, weight_decay=.5), user_attrs=dict(note='mine'))
    with pytest.raises(KeyboardInterrupt): run(runner, 1, storage=place.storage)
    last = run(runner, 1, storage=place.storage).trials[-1]
    assert last.user_attrs['note'] == 'mine' and ended(last) == 'complete' and last.user_attrs['resumed_from'] == 0 and 'interrupted' not in last.user_attrs


class Loses:
    "Its finaliser runs while the signal comes, so that Python prints the KeyboardInterrupt and goes on"
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass


@pytest.fixture
def heard():
    "Ctrl-C as in a terminal: a shell starts what it puts into the background with the signal ignored"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_control_c_that_python_loses_ends_the_study(heard):
    values, plain = [], simulated_runner()
    def runner(params, fold):
        for v in plain(params, fold):
            values.append(v)
            if len(values) == 4: Loses()
            yield v
    runner.epochs = plain.epochs
    storage, before = open_storage('memory').storage, signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): run(runner, 5, storage=storage)
    assert len(values) == 4 and signal.getsignal(signal.SIGINT) is before
    left = [t.state for t in optuna.load_study(study_name='study', storage=storage).trials]
    assert TrialState.RUNNING not in left and TrialState.WAITING in left
    assert len(run(plain, 5, storage=storage).trials) >= 5 # and goes on


def test_a_handler_of_somebody_else_stays():
    rung, before = [], signal.signal(signal.SIGINT, lambda *_: rung.append(1))
    try:
        with Interrupts() as interrupts: os.kill(os.getpid(), signal.SIGINT); interrupts.check()
        assert rung == [1]
    finally: signal.signal(signal.SIGINT, before)


# --- many processes

MODULE = textwrap.dedent('''
    import hashlib, math, os, time
    from optkit.simulator import simulated_runner
    class Runner:
        epochs = 3
        def __init__(self, log, pause): self.log, self.pause = log, pause
        def __call__(self, params, fold):
            with open(self.log, 'a') as file: file.write(f"{os.getpid()} {sorted(params.items())} {fold}\\n")
            for value in simulated_runner()(params, fold):
                time.sleep(self.pause)
                yield value
    def space(trial): return dict(lr=trial.suggest_float('lr', 1e-5, 1e-1, log=True), weight_decay=trial.suggest_float('weight_decay', 1e-3, 1, log=True))
''')
MANY = textwrap.dedent('''
    import sys
    from shared import Runner, space
    from optkit.hpo import tune
    if __name__ == '__main__':
        storage, trials, pause, log, workers = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
        tune(Runner(log, pause), space, trials, folds=3, storage=storage, strategy='none', progress=False, workers=workers)
''')


def start_many(tmp_path, storage, trials, pause, workers=1, space='space'):
    for name, text in (('shared.py', MODULE), ('many.py', MANY.replace(' space, trials', f' {space}, trials'))):
        if not (tmp_path / name).exists() or (tmp_path / name).read_text() != text: (tmp_path / name).write_text(text) # an earlier process may be reading it
    env = dict(os.environ, PYTHONPATH=f'{ROOT}{os.pathsep}{tmp_path}', OMP_NUM_THREADS='1')
    return subprocess.Popen([sys.executable, str(tmp_path / 'many.py'), str(storage), str(trials), str(pause), str(tmp_path / 'log'), str(workers)], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def check_shared(study, n):
    finished = [t for t in study.trials if ended(t)]
    assert len(finished) == n and not [t for t in study.trials if t.state == TrialState.RUNNING] and len({t.params['lr'] for t in finished}) == n
    plain = simulated_runner()
    for t in finished: assert fold_scores(t) == [max(plain(t.params, f)) for f in range(3)] and t.value == pytest.approx(np.mean(fold_scores(t)))
    for t in study.trials:
        if ended(t) is None and t.params and t.user_attrs['interrupted'] is True: assert any(u.user_attrs.get('resumed_from') == t.number for u in study.trials)


def kill_one_of(tmp_path, storage, count, trials, pause):
    processes = [start_many(tmp_path, storage, trials, pause) for _ in range(count)]
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            log = (tmp_path / 'log').read_text().splitlines() if (tmp_path / 'log').exists() else []
            if sum(line.startswith(f'{processes[0].pid} ') for line in log) >= 2: break
            time.sleep(.02)
        processes[0].send_signal(signal.SIGKILL)
        said = [p.communicate(timeout=500)[1] for p in processes]
    finally:
        for p in processes: p.poll() is None and p.kill()
    assert [p.returncode for p in processes] == [-signal.SIGKILL] + [0] * (count - 1), said


def test_three_processes_share_a_study_and_one_is_killed(tmp_path):
    kill_one_of(tmp_path, tmp_path / 'study.db', 3, 12, .1)
    check_shared(load(tmp_path / 'study.db'), 12)


MID_WRITE = textwrap.dedent("""
    import os, signal, sys
    from sqlalchemy.orm import Session
    import shared
    from optkit.hpo import tune
    plain, calls = Session.commit, []
    def commit(self):
        self.flush()  # what is written is in the open transaction
        calls.append(1)
        if len(calls) == last: os.kill(os.getpid(), signal.SIGKILL)
        plain(self)
    Session.commit = commit
    for last in map(int, sys.argv[1:]):
        process = os.fork()
        if not process:
            tune(shared.Runner('log', 0.), shared.space, 6, folds=3, storage=f'{last}.db', strategy='none', progress=False)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
""")


def test_killed_in_the_middle_of_a_write(tmp_path):
    (tmp_path / 'shared.py').write_text(MODULE); (tmp_path / 'dies.py').write_text(MID_WRITE)
    env, commits = dict(os.environ, PYTHONPATH=f'{ROOT}{os.pathsep}{tmp_path}', OMP_NUM_THREADS='1'), (12, 33, 40)
    process = subprocess.run([sys.executable, str(tmp_path / 'dies.py'), *map(str, commits)], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    plain = simulated_runner()
    for commit in commits:
        study = tune(lambda p, f: plain(p, f), lambda trial: dict(lr=trial.suggest_float('lr', 1e-5, 1e-1, log=True), weight_decay=trial.suggest_float('weight_decay', 1e-3, 1, log=True)), 6, folds=3, epochs=3,
                     storage=tmp_path / f'{commit}.db', strategy='none', progress=False)
        check_shared(study, 6)


@pytest.mark.slow
def test_sixteen_processes_share_a_file_and_one_is_killed(tmp_path):  # optuna/optuna#820, #5921
    kill_one_of(tmp_path, tmp_path / 'study.db', 16, 64, .05)
    check_shared(load(tmp_path / 'study.db'), 64)


def test_without_a_lock_the_numbers_decide(tmp_path):
    "A database to which no file's lock belongs: what comes too late steps back"
    sqlite_storage(tmp_path / 'study.db')
    url = f'sqlite:///{tmp_path}/study.db?timeout=60'
    assert open_storage(url).path is None
    processes = [start_many(tmp_path, url, 6, .05) for _ in range(2)]
    said = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * 2, said
    check_shared(load(tmp_path / 'study.db'), 6)


@pytest.mark.parametrize('where, space', [pytest.param('{}/study.db', 'space', marks=pytest.mark.slow), ('sqlite:///{}/study', "['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log']")], ids=['path', 'address and texts'])
def test_workers_are_processes(tmp_path, where, space):
    where = where.format(tmp_path)
    process = start_many(tmp_path, where, 8, .1, workers=2, space=space)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 0, said
    check_shared(load(where.split(':///')[-1]), 8)
    assert len({line.split()[0] for line in (tmp_path / 'log').read_text().splitlines()}) == 2


@pytest.mark.parametrize('workers', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_control_c_of_a_process_leaves_nothing_running(tmp_path, workers):
    process, until = start_many(tmp_path, tmp_path / 'study.db', 150, .1, workers), time.monotonic() + 60
    while (not (tmp_path / 'log').exists() or (tmp_path / 'log').read_text().count('\n') < 5) and time.monotonic() < until: time.sleep(.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    study = load(tmp_path / 'study.db')
    left = [t.state for t in study.trials if t.state in (TrialState.RUNNING, TrialState.WAITING)]
    assert process.returncode != 0 and set(left) == {TrialState.WAITING} and len(left) <= workers
    if workers == 1: assert len(fold_scores(next(t for t in study.trials if t.state == TrialState.WAITING))) >= 1


def test_a_running_trial_beats(storage):
    beats, plain = [], simulated_runner()
    def runner(params, fold):
        if fold == 1: time.sleep(.1); beats.append(storage._get_stale_trial_ids(1)); beats.append(sqlite3.connect(storage.engine.url.database).execute('select count(*) from trial_heartbeats').fetchone()[0])
        yield from plain(params, fold)
    run(runner, 1, storage=storage)
    assert beats == [[], 1]


def test_building_is_billed_to_the_trial_that_built(tmp_path):
    "On the fast engine the first trial builds the shapes, later ones of the same batch build nothing"
    from optkit.store import example_table, tokenise, word_tokenizer
    from optkit.models import example_model
    from optkit.hardware import hardware_with
    from optkit.config import TrainConfig
    from optkit.build import make_engine
    from optkit.trainer import Trainer
    store = tokenise(example_table(60, median=9), word_tokenizer(), 24, progress=False)
    config = TrainConfig(epochs=1, effective_batch=8, fast=True, precision='fp32')
    engine = make_engine(example_model(), config, hardware_with(None))
    study = tune(Trainer(engine, store, config), lambda t: dict(lr=t.suggest_float('lr', 1e-4, 1e-2, log=True), weight_decay=t.suggest_float('weight_decay', 0., .3)), n_trials=3, folds=2, strategy='none', storage='memory')
    built = [t.user_attrs['spent'].get('build', 0.) for t in study.trials]
    assert engine.built and built[0] > 0 and sum(built[1:]) <= built[0], built
    assert sum(built) == pytest.approx(engine.built_s, rel=.01)


# --- values, many at once

@pytest.mark.parametrize('where', ['memory', 'sqlite', 'journal'])
def test_values_written_together_are_those_reported_one_by_one(tmp_path, where):
    from optkit.storage import write_values
    from optuna.exceptions import UpdateFinishedTrialError
    storage = open_storage('memory' if where == 'memory' else tmp_path / dict(sqlite='s.db', journal='s.log')[where]).storage
    study = optuna.create_study(storage=storage)
    one, many = study.ask(), study.ask()
    pairs = [(step, v) for step, v in enumerate([.5, math.inf, -math.inf, math.nan, 1e-30, 2.], 1)]
    for step, value in pairs: one.report(value, step)
    write_values(many, pairs[:4]); write_values(many, pairs[4:5]); write_values(many, pairs[5:]); write_values(many, [])
    plain, together = (storage.get_trial(t._trial_id).intermediate_values for t in (one, many))
    assert [*map(repr, plain.items())] == [*map(repr, together.items())] and len(together) == 6
    write_values(many, pairs[:2]); write_values(many, [(np.int64(1), 9.), (np.int64(2), 9.)])  # a step that is there keeps its value
    many.set_user_attr('more', 1)
    assert storage.get_trial(many._trial_id).intermediate_values[1] == .5 and 'more' in storage.get_trial(many._trial_id).user_attrs
    write_values(many, [(7, .1)], dict(folds=dict(scores=[.1, math.inf]), more=2)); write_values(many, [], dict(ended='complete'))
    there = storage.get_trial(many._trial_id)
    assert there.user_attrs == many.user_attrs == dict(folds=dict(scores=[.1, math.inf]), more=2, ended='complete') and there.intermediate_values[7] == .1
    study.tell(many, 1.)
    for pairs, attrs in (([(8, 1.), (9, 1.)], {}), ([], dict(late=1)), ([(8, 1.)], dict(late=1, later=1))):
        with pytest.raises(UpdateFinishedTrialError): write_values(many, pairs, attrs)
    assert 'late' not in storage.get_trial(many._trial_id).user_attrs
    assert len(storage.get_trial(many._trial_id).intermediate_values) == 7


def test_a_fold_is_one_append_to_a_journal(tmp_path):
    from optkit.storage import write_values
    study = optuna.create_study(storage=open_storage(tmp_path / 's.log').storage)
    trial, appends, backend = study.ask(), [], study._storage._backend
    real = optuna.storages.journal.JournalFileBackend.append_logs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.storages.journal.JournalFileBackend, 'append_logs', lambda self, logs: (appends.append(len(logs)), real(self, logs)))
        write_values(trial, [(n, .1 * n) for n in range(1, 9)])
    assert appends == [1, 7] and study.trials[0].intermediate_values == trial._cached_frozen_trial.intermediate_values and len(study.trials[0].intermediate_values) == 8
    other = optuna.load_study(study_name=study.study_name, storage=open_storage(tmp_path / 's.log').storage)
    assert other.trials[0].intermediate_values == study.trials[0].intermediate_values


def test_a_fold_is_one_write_where_no_pruner_reads_along(tmp_path, monkeypatch):
    import optkit.hpo
    writes, real = [], storage_module.write_values
    monkeypatch.setattr(optkit.hpo, 'write_values', lambda trial, pairs, *more: (writes.append(len(pairs)), real(trial, pairs, *more))[1])
    runner = simulated_runner(epochs=8)
    study = tune(runner, ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 3, folds=2, strategy='none', storage=tmp_path, progress=False, say=lambda text: None)
    assert [n for n in writes if n] == [8] * 6 and all(len(t.intermediate_values) == 16 for t in study.trials)
    writes.clear()
    tune(runner, ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 2, folds=2, strategy=Reports(patience=3), storage=tmp_path, name='other', progress=False, say=lambda text: None)
    assert [n for n in writes if n] == [8] * 4, 'pruners of Optuna do not look at values of trials that run'
    writes.clear()
    class Own(optuna.pruners.BasePruner):
        def prune(self, study, trial): return trial.intermediate_values != study.trials[trial.number].intermediate_values
    for pruner in (Own(), optuna.pruners.PatientPruner(Own(), 2)):
        study = tune(runner, ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 2, folds=2, strategy=PrunerStrategy(pruner, 'all'), storage=tmp_path, name=type(pruner).__name__, progress=False, say=lambda text: None)
        assert {n for n in writes if n} == {1} and states(study) == ['complete'] * 2, 'one of a user may'
        writes.clear()


def test_a_strategy_of_a_user_that_watches_the_study_finds_each_value_in_it(tmp_path):
    class Mine(Strategy):
        watches_study = True
        def pruner(self, shape): return optuna.pruners.MedianPruner(2, 1)
        def asks(self, fold, epoch, shape): return not fold
        def within(self, course, history, shape, asked=None): return Verdict(asked.should_prune(), 'below the median')
    def runner(params, fold):
        for n in range(6): yield params['x'] * (n + 1)
    study = tune(runner, ['x=0.0..1.0'], 12, folds=2, epochs=6, strategy=Mine(), storage=tmp_path, progress=False, say=lambda text: None)
    assert 'stopped' in states(study) and states(study)[:2] == ['complete'] * 2


@pytest.mark.parametrize('line', ['5', '[1]', 'null', '"op_code"'])
def test_json_that_is_no_entry_of_a_journal_counts_as_torn(tmp_path, line):
    path = tmp_path / 'study.log'
    path.write_text('{"op_code": 0}\n' + line + '\n')
    assert '1 torn lines were dropped, 1 kept' in repair_journal(path) and path.read_text() == '{"op_code": 0}\n'


# --- what the bar says

@pytest.mark.parametrize('metric, direction, value, said', [(None, 'maximize', -.25, '-0.2500'), (None, 'maximize', .25, '0.2500'), ('matthews', 'maximize', -.25, '-0.2500'), ('loss', 'maximize', -.5, '0.5000'), ('loss', 'maximize', .5, '-0.5000'),
                                                            ('perplexity', 'maximize', -3.5, '3.5000'), ('custom', 'maximize', -.5, '-0.5000'), (None, 'minimize', .5, '0.5000'), (None, 'minimize', -.5, '-0.5000'), ('loss', 'minimize', .5, '0.5000')])
def test_the_bar_shows_the_score_with_its_sign(metric, direction, value, said, capsys):
    def runner(params, fold): yield value
    if metric: runner.metric = metric
    tune(runner, SPACE, 2, folds=2, epochs=1, storage='memory', strategy='none', direction=direction, say=lambda text: None)
    shown = capsys.readouterr().err
    assert f'best={said},' in shown.replace('\r', '\n') and shown.count('best=') == shown.count(f'best={said},')


def test_the_runners_of_trainings_name_their_metric():
    from optkit.store import example_table, tokenise, word_tokenizer
    from optkit.models import example_model
    from optkit.hardware import detect
    from optkit.config import TrainConfig
    from optkit.build import make_engine
    from optkit.trainer import fold_runner, Trainer
    config = TrainConfig(metric='loss', precision='fp32', epochs=1)
    store, folds = tokenise(example_table(32), word_tokenizer(), 16, progress=False), [(np.arange(16), np.arange(16, 32))]
    engine = make_engine(example_model(), config, detect())
    assert fold_runner(engine, store, folds, config).metric == 'loss' and TrainerRunner(Trainer(engine, store, config), folds).metric == 'loss'


def test_an_exhaustive_sampler_completes_what_waits_in_the_queue(tmp_path):
    for where in ('memory', tmp_path / 's.db', tmp_path / 's.log'):
        study = tune(lambda params, fold: [params['k']], ['k=1..3', 'c=a,b'], n_trials=6, folds=1, storage=where, progress=False, say=lambda text: None,
                     sampler=optuna.samplers.BruteForceSampler(seed=0), first=[dict(k=2), dict(c='b')])
        assert len({(t.params['k'], t.params['c']) for t in study.trials}) == 6 and study.trials[0].params['k'] == 2


@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_a_distribution_of_an_older_optuna_is_kept_as_the_present_one():
    old = optuna.distributions.LogUniformDistribution(.1, 1.)
    study = tune(lambda params, fold: [params['x']], dict(x=old), n_trials=1, folds=1, storage='memory', progress=False)
    assert study.trials[0].distributions == dict(x=optuna.distributions.FloatDistribution(.1, 1., log=True))


def test_an_interrupted_trial_keeps_the_values_of_its_unfinished_fold(tmp_path):
    def runner(params, fold):
        for epoch in range(4):
            if fold == 1 and epoch == 3: raise KeyboardInterrupt
            yield .1 * epoch
    with pytest.raises(KeyboardInterrupt): tune(runner, SPACE, 2, folds=2, epochs=4, storage=tmp_path, name='s', strategy='none', progress=False, say=lambda text: None)
    left = optuna.load_study(study_name='s', storage=open_storage(tmp_path).storage).trials[0]
    assert curves(left, 4) == [[0., .1, .2, pytest.approx(.3)], [0., .1, .2]] and spent(left)['epochs'] == 7 and left.user_attrs['interrupted']


def _opens(address, gate, found):
    gate.wait()
    try: open_storage(address); found.put('open')
    except InputError as exc: found.put(str(exc))


def test_processes_that_make_the_tables_of_a_database_at_the_same_moment_all_get_it(tmp_path):
    fork = multiprocessing.get_context('fork')
    for n in range(4):
        gate, found = fork.Barrier(4), fork.Queue()
        workers = [fork.Process(target=_opens, args=(f'sqlite:///{tmp_path}/{n}.db?timeout=60', gate, found)) for _ in range(4)]
        for w in workers: w.start()
        assert [found.get(timeout=60) for _ in workers] == ['open'] * 4
        for w in workers: w.join()


def test_what_runs_again_is_ordered_as_the_winner_is_by_the_posterior():
    from optkit.confirm import confirm
    from optkit.space import best_first
    rng = np.random.default_rng(3)
    for _ in range(200): # studies, until one whose best mean is lucky in a fold
        table = rng.normal(.6, .02, (12, 1)) + rng.normal(0, .01, (12, 3))
        table[rng.integers(12), rng.integers(3)] += .25
        study = optuna.create_study(direction='maximize')
        study.set_user_attr('optkit', dict(folds=3))
        for scores in table: study.add_trial(optuna.trial.create_trial(value=float(scores.mean()), user_attrs=dict(ended='complete', folds=dict(scores=scores.tolist()))))
        winner = best_complete(study).number
        if winner != int(table.mean(1).argmax()): break
    assert winner != int(table.mean(1).argmax())
    assert [t.number for t in best_first(study.trials, 1)][0] == winner
    again = confirm(study, lambda params, fold: [.5], top=3, progress=False)
    assert again.first == winner and winner in [r.number for r in again.rows]


def test_a_trial_that_waited_to_the_end_is_not_said_to_wait():
    study = optuna.create_study(direction='maximize')
    study.set_user_attr('optkit', dict(folds=3))
    attrs = dict(waits='waits after fold 1 of 3', folds=dict(scores=[.5]))
    study.add_trial(optuna.trial.create_trial(state=TrialState.PRUNED, value=.5, user_attrs=attrs))
    row, = study_summary(study, 'macro_f1', 1, 3)['trials']
    assert (row['state'], row['reason'], row['value']) == ('stopped', 'waited after fold 1 of 3 until the search ended', .5)
