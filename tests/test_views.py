"Views: what they read and say, that they write and break nothing, and how runs and studies heed them"
import base64
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

import optkit.training_views as training_views
import optkit.views as views
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.hardware import detect
from optkit.simulator import simulated_runner
from optkit.hpo import tune
from optkit.progress import card_line, Progress, read_history, write_progress
from optkit.status import gpu_busy
from optkit.storage import open_storage
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer
from optkit.storage import open_study
from optkit.training_views import Card, limit_of, MachineProbe, MachineReading, training_view, watch
from optkit.views import claims_view, study_view, trial_rows

SPACE = ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log']


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp('study')
    tune(simulated_runner(), SPACE, 24, folds=3, storage=folder, progress=False)
    return folder


def readings(n=5, at=0): return [Progress('running', s, 2 * n, 1 + s // n, 2, loss=1 / s, metric='macro_f1', score=.5 if s > n // 2 else None, tokens_per_s=100. * s, mfu=.01 * s, seconds=1. * s, seconds_left=9., waiting=.02) for s in range(1 + at, n + 1 + at)]


# --- the machine

class FakeNVML:
    "Two cards as the management library tells of them; the second tells nothing but its name"
    calls = []
    def __getattr__(self, name):
        self.calls.append(name)
        if name == 'nvmlInit' or name == 'nvmlShutdown': return lambda: None
        if name == 'nvmlDeviceGetCount': return lambda: 2
        if name == 'nvmlDeviceGetHandleByIndex': return lambda n: n
        if name == 'nvmlDeviceGetUUID': return lambda n: f'GPU-{n}'
        if name == 'nvmlDeviceGetHandleByUUID': return lambda name: ['GPU-0', 'GPU-1'].index(name)
        told = dict(nvmlDeviceGetName='GPU X', nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=93), nvmlDeviceGetMemoryInfo=SimpleNamespace(used=8 * 2**30, total=24 * 2**30), nvmlDeviceGetPowerUsage=250_000, nvmlDeviceGetEnforcedPowerLimit=350_000,
                    nvmlDeviceGetClockInfo=1700, nvmlDeviceGetMaxClockInfo=2100, nvmlDeviceGetTemperature=60, nvmlDeviceGetCurrentClocksEventReasons=0)
        def tell(handle, *args):
            if name not in told or handle == 1 and name != 'nvmlDeviceGetName': raise RuntimeError('not supported')
            return told[name]
        return tell


def test_a_card_is_read_and_one_that_tells_little_leaves_it_out(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNVML())
    one, two = MachineProbe()().cards
    assert one == Card('GPU X', .93, 8 * 2**30, 24 * 2**30, 250., 350., 1700, 2100, 60, '') and two == Card('GPU X')
    view = watch()
    assert 'busy 93%' in view.words() and '250 of 350 W' in view.words() and 'limited by: GPU' in view.words() and set(view.series()[1]) == {'GPU busy', 'GPU memory', 'power', 'clock', 'CPU', 'busiest core', 'host memory'}
    assert 'GPU X' in watch(gpu=1).words() and 'GPU busy' not in watch(gpu=1).series()[1]


@pytest.mark.parametrize('card, visible, tells', [('cuda', None, True), ('cuda:1', None, False), ('cuda', '1', False), ('cuda:1', '1,0', True), ('GPU-0', '1', True), ('GPU-gone', None, False), ('cuda', '', False)])
def test_a_card_is_asked_by_its_name_or_as_this_process_counts(monkeypatch, card, visible, tells):
    library = FakeNVML()
    monkeypatch.setitem(sys.modules, 'pynvml', library)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    library.calls.clear()
    assert card_line(card).startswith('GPU busy 93% of the time, ') if tells else card_line(card) == ''
    assert gpu_busy(0., card=card) == (.93 if tells else None)
    assert library.calls.count('nvmlInit') == library.calls.count('nvmlShutdown')


@pytest.mark.parametrize('card, busy', [('GPU-0', True), ('GPU-1', False), ('GPU-gone', True), (None, True)])
def test_the_card_of_a_run_is_looked_at(tmp_path, monkeypatch, card, busy):
    "Also where its process counted another card as the first"
    monkeypatch.setitem(sys.modules, 'pynvml', FakeNVML())
    write_progress(tmp_path / 'progress.json', Progress('running', 1, 2, 1, 1, card=card))
    view = watch(tmp_path)
    assert ('GPU busy' in view.series()[1]) is busy and ('busy 93%' in view.words()) is busy
    with pytest.raises(InputError, match='the driver reports 2'): watch(gpu=2)


def test_without_a_library_there_is_still_a_host(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    view = watch()
    assert 'no GPU that tells' in view.words() and view.png()[:4] == b'\x89PNG'


CARD = Card('GPU', busy=.97, used=10 * 2**30, total=80 * 2**30)
RUN = Progress('running', 5, 10, 1, 1, waiting=.01)

@pytest.mark.parametrize('card, core, run, said', [({}, .3, RUN, 'GPU'), ({}, .3, replace(RUN, waiting=.2), 'loader'), ({}, .3, replace(RUN, waiting=.9, state='finished'), 'GPU'), (dict(busy=.4), .99, RUN, 'host'), (dict(busy=.4), .2, RUN, 'host'),
                                                   (dict(used=79 * 2**30), .3, RUN, 'memory'), (dict(slowed='heat'), .3, RUN, 'heat or power'), (dict(busy=0.), .1, None, 'nothing')])
def test_what_limits(card, core, run, said):
    found = limit_of([MachineReading(0, (replace(CARD, **card),), core=core)] * 3, run)
    assert found.value == said and found.reason


def test_views_never_touch_cuda(tmp_path, study, monkeypatch):
    "In a process where each call into CUDA raises"
    import torch
    for name in ('is_available', 'init', '_lazy_init', 'device_count', 'get_device_properties', 'mem_get_info', 'synchronize'): monkeypatch.setattr(torch.cuda, name, lambda *a, name=name, **k: pytest.fail(f'torch.cuda.{name} was called'))
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    for view in (watch(tmp_path), training_view(tmp_path), study_view(study), claims_view()): view.state = view.look(); assert view.words() and view.png()


# --- a training

def test_a_run_keeps_its_readings_and_a_resume_takes_the_place_of_what_it_repeats(tmp_path):
    path = tmp_path / 'progress.json'
    for now in [*readings(5), *readings(3, at=3)]: write_progress(path, now)
    assert [h['step'] for h in read_history(tmp_path)] == [1, 2, 3, 4, 5, 6]
    with open(tmp_path / 'progress.jsonl', 'a') as file: file.write('{"step": 7, "lo')
    assert [h['step'] for h in read_history(tmp_path)][-1] == 6
    for empty in ('none',):
        with pytest.raises(InputError): read_history(tmp_path / empty)


def test_a_training_view_says_where_it_stands(tmp_path):
    view = training_view(tmp_path)
    assert 'no reading yet' in view.words() and view.png()
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    view.state = view.look()
    assert 'running: step 5 of 10, epoch 2 of 2' in view.words() and '500 real tokens/s, 5.0% of the card’s peak (10,000 tokens/s)' in view.words() and '0:09 left' in view.words() and not view.over
    steps, s = view.series()
    assert s['peak'] == pytest.approx([10_000.] * 5)  # the card's, in tokens a second
    assert steps == [1, 2, 3, 4, 5] and s['loss'][0] == 1. and [v for v in s['score'] if v] == [.5, .5] and s['score'][3] is None
    write_progress(tmp_path / 'progress.json', replace(readings()[-1], state='failed', note='RuntimeError: no'))
    view.state = view.look()
    assert view.over and 'RuntimeError: no' in view.words()


def test_a_training_view_of_a_study_says_where_to_look(study): assert 'study_view' in training_view(study).words()


def test_a_look_reads_what_was_appended_and_sees_what_reading_all_sees(tmp_path):
    path, view = tmp_path / 'progress.json', None
    for now in [*readings(5), *readings(3, at=3), *readings(4, at=1), *readings(900)]:
        write_progress(path, now)
        view = view or training_view(tmp_path)
        view.state = view.look()
        assert view.history[-1]['step'] == now.step
    assert view.history == read_history(tmp_path)
    steps, s = view.series()
    assert len(steps) < 600 and steps[-1] == 900 and len(s['loss']) == len(steps) and sum(v is not None for v in s['score']) == 2
    with open(tmp_path / 'progress.jsonl', 'a') as file: file.write('{"step": 901, "lo'); file.flush(); view.look(); file.write('ss": 1.5}\n')
    view.look()
    assert view.history[-1] == dict(step=901, loss=1.5)
    (tmp_path / 'progress.jsonl').unlink(); write_progress(path, readings()[0]); view.look()
    assert [h['step'] for h in view.history] == [1]


def test_the_same_is_seen_by_another_view_of_the_same_folder(tmp_path):
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    assert training_view(tmp_path).words() == training_view(tmp_path).words() and training_view(str(tmp_path)).key == training_view(tmp_path).key


def test_a_training_over_folds_is_seen_in_the_fold_that_runs(tmp_path):
    from optkit.run_folder import standing
    reading = Progress('finished', 10, 10, 2, 2, loss=.5, metric='macro_f1', score=.5)
    for n in (0, 1):
        (tmp_path / f'fold-0{n}').mkdir()
        write_progress(tmp_path / f'fold-0{n}' / 'progress.json', reading)
        (tmp_path / f'fold-0{n}' / 'progress.jsonl').write_text('')
        view = training_view(tmp_path)
        assert f'fold {n + 1}' in view.words() and not view.over and not standing(tmp_path)[1], 'another fold follows'
    view.stop()
    assert (tmp_path / 'fold-01' / 'stop').is_file() and not (tmp_path / 'stop').exists()
    (tmp_path / 'folds.json').write_text('{}')
    assert training_view(tmp_path).over and standing(tmp_path)[1]


def test_stop_ends_a_training_of_any_process_after_its_step(tmp_path):
    store = tokenise(example_table(60), word_tokenizer(), 32, progress=False)
    config = TrainConfig(epochs=2000, precision='fp32', read_every=1)
    make = lambda: Trainer(make_engine(example_model(), config, detect()), store, config, folder=tmp_path)
    (tmp_path / 'stop').touch()  # an old one does not count
    time.sleep(.05)
    work, until = make().start(np.arange(40), np.arange(40, 60)), time.monotonic() + 60
    while not (tmp_path / 'progress.json').exists() and time.monotonic() < until: time.sleep(.05)
    time.sleep(.7)
    assert work.running
    training_view(tmp_path).stop()
    result = work.wait(30)
    assert result.stopped and 0 < result.steps < 2000 * 3 and training_view(tmp_path).state[0].state == 'stopped'
    again = make().start(np.arange(40), np.arange(40, 60), resume=True)
    time.sleep(1)
    assert again.running, 'the old request does not stop the run that goes on'
    assert again.stop(30).steps > result.steps


# --- a study

def test_a_study_is_read_and_not_written_to(study):
    contents = lambda: {p.name: p.read_bytes() for p in study.iterdir() if not p.name.endswith('-shm')}  # where SQLite keeps who reads
    before = contents()
    view = study_view(study, n_trials=40)
    assert before == contents() and 'study.db' in before
    rows = view.rows()
    assert len(rows) == 24 and {r['state'] for r in rows} <= {'complete', 'stopped'} and '24 of 40 trials' in view.words() and 'forecast: 24 trials' in view.words()
    best = view.best()
    assert best['value'] == max(r['value'] for r in rows if r['state'] == 'complete') and f"trial {best['number']}" in view.words() and len(best['folds']) == 3
    assert set(view.importance) == {'lr', 'weight_decay'} and sum(view.importance.values()) == pytest.approx(1)


def test_nothing_mattered_where_all_values_are_alike(tmp_path, recwarn):
    made = optuna.create_study(storage=open_storage(tmp_path / 'study.db').storage, direction='maximize')
    space = dict(a=optuna.distributions.FloatDistribution(0, 1), b=optuna.distributions.FloatDistribution(0, 1))
    made.add_trials([optuna.trial.create_trial(params=dict(a=n / 12, b=1 - n / 12), distributions=space, value=.5) for n in range(12)])
    recwarn.clear()
    view = study_view(tmp_path)
    assert 'what mattered' not in view.words() and view.png() and not [w for w in recwarn if 'quantiles' in str(w.message)]


def test_looking_back_shows_the_trials_up_to_then(study):
    view = study_view(study)
    view.upto = 5
    assert [r['number'] for r in view.rows()] == [0, 1, 2, 3, 4] and 'forecast' not in view.words()
    assert view.best()['value'] == max(r['value'] for r in view.rows() if r['state'] == 'complete')
    view.upto = 0
    assert view.best() is None and view.png()


def test_values_by_epoch_are_lines_of_folds_and_the_best_trial_stands_out(study):
    view = study_view(study)
    others, best = views._curves(view)
    folds = [len(r['curves']) for r in view.rows()]
    assert best[0].count(None) == len(view.best()['curves']) == 3 and others[0].count(None) == sum(folds) - 3
    assert [v for v in best[1] if v is not None] == [abs(v) for c in view.best()['curves'] for v in c] and best[0][0] == 1
    view.upto = 0
    assert views._curves(view) == ([[], []], [[], []]) and view.png()


@pytest.mark.parametrize('values, shown, metric', [((-.5, -.25), -1, None), ((-.2, .1), 1, None), ((.2, .4), 1, None), ((-.5, -.25), 1, 'matthews'), ((-.5, -.25), -1, 'loss')], ids=['a loss', 'correlations', 'scores', 'bad correlations', 'a named loss'])
def test_values_keep_their_sign_unless_they_are_losses(tmp_path, values, shown, metric):
    study = optuna.create_study(direction='maximize', study_name='s', storage=f'sqlite:///{tmp_path}/study.db')
    if metric: study.set_user_attr('metric', metric); study.set_user_attr('optkit', dict(folds=1))
    for v in values: study.add_trial(optuna.trial.create_trial(value=v))
    view = study_view(tmp_path)
    assert view.sign == shown and f'with {shown * max(values):.4f}' in view.words() and views._best_line(view)[1] == [shown * max(values[:n + 1]) for n in range(len(values))]


def test_new_trials_are_seen(tmp_path):
    tune(simulated_runner(), SPACE, 3, folds=2, storage=tmp_path, progress=False)
    view = study_view(tmp_path, n_trials=5)
    assert len(view.rows()) == 3 and not view.over
    tune(simulated_runner(), SPACE, 5, folds=2, storage=tmp_path, progress=False)
    view.state = view.look()
    assert len(view.rows()) == 5 and view.over
    tune(simulated_runner(), SPACE, 1, folds=2, storage=tmp_path, progress=False, fresh=True, say=lambda text: None)
    view.state = view.look()
    assert len(view.rows()) == 1, 'a fresh study that took its place'


def test_pause_and_stop_reach_a_study_in_another_thread_or_process(tmp_path):
    def slow(params, fold):
        for n in range(3): time.sleep(.02); yield .5 + n / 10 + params['lr']
    seen = []
    work = threading.Thread(target=lambda: tune(slow, ['lr=0.0..0.1'], 200, folds=2, epochs=3, strategy='none', storage=tmp_path, progress=False, say=seen.append))
    work.start()
    def begun():
        try: return trial_rows(open_study(tmp_path))
        except InputError: return False
    while not begun(): time.sleep(.05)
    view = study_view(tmp_path, n_trials=200)
    view.pause(); time.sleep(1)
    count = len(trial_rows(open_study(tmp_path))); time.sleep(1)
    assert len(trial_rows(open_study(tmp_path))) == count and 'paused' in view.words() and work.is_alive()
    view.go_on(); time.sleep(1.5)
    assert len(trial_rows(open_study(tmp_path))) > count
    view.stop(); work.join(20)
    assert not work.is_alive() and any('stopped, as was asked for' in s for s in seen)
    done = len(trial_rows(open_study(tmp_path)))
    assert done < 200
    tune(slow, ['lr=0.0..0.1'], done + 1, folds=2, epochs=3, strategy='none', storage=tmp_path, progress=False, say=seen.append)
    assert len(trial_rows(open_study(tmp_path))) >= done


@pytest.mark.parametrize('make, said', [(lambda p: None, 'holds no study.db'), (lambda p: (p / 'study.db').write_bytes(b'no database' * 200), 'cannot be read as a study')], ids=['nothing', 'something else'])
def test_studies_that_are_none(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(InputError, match=said) as found: study_view(tmp_path)
    assert '\n' not in str(found.value)


def test_a_study_that_another_process_holds_is_named_and_the_view_goes_on(tmp_path):
    import sqlite3
    open_storage(tmp_path / 'study.db')
    with sqlite3.connect(tmp_path / 'study.db') as c: c.execute('pragma journal_mode=delete')
    holder = sqlite3.connect(tmp_path / 'study.db', isolation_level=None)
    holder.execute('begin exclusive')
    with pytest.raises(InputError, match='held by another process'): study_view(tmp_path)
    holder.execute('rollback'); holder.close()


def test_a_run_folder_without_write_access_is_said_in_a_line(study, tmp_path, monkeypatch):
    from pathlib import Path
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    training, view = training_view(tmp_path), study_view(study)
    def refuses(*args, **kwargs): raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(Path, 'touch', refuses)
    for act in (training.stop, view.pause, view.stop):
        with pytest.raises(InputError, match='cannot be written to .Permission denied.') as found: act()
        assert '\n' not in str(found.value)
    view.text = SimpleNamespace(value='')
    training_views.press(view, view.pause)
    assert 'Permission denied' in view.text.value  # the button says so, and the view goes on


# --- claims

def test_claims_are_filtered():
    every = claims_view()
    assert 0 < len(claims_view(label='exact').rows()) < len(every.rows()) and (claims_view(label='exact').rows().label == 'exact').all()
    assert all(r.low <= r.p50 <= r.high for _, r in every.rows().iterrows())
    for bad in (dict(card='abacus'), dict(label='nonsense'), dict(verdict='x')):
        with pytest.raises(InputError, match='no record has it'): claims_view(**bad)
    with pytest.raises(InputError): claims_view('no/such/folder')


def test_verdicts_of_ladders_and_ledgers_are_in_the_same_words():
    state = claims_view().state
    assert {*state.verdict} <= {'as claimed', 'less than claimed', 'more than claimed', 'no effect', 'slower', 'undecided', 'no claim', 'not applicable'}
    assert not (state.source == 'recorded').any() and state.file.str.contains('-claims-').any()
    flash = state[state.variant == 'flash, alone, 4096'].iloc[0]
    assert flash.p50 == flash.ratio_p50 > 2 * flash.ratio_before_p50  # of kernels beside each other, no ladder


def test_a_broken_record_is_named(tmp_path):
    (tmp_path / 'x.json').write_text('{"rows": ')
    with pytest.raises(InputError, match='x.json'): claims_view(tmp_path)


# --- where nothing listens, and where something does

def shown(view, monkeypatch):
    out = []
    monkeypatch.setattr('IPython.display.display', lambda data, **kwargs: out.append(data))
    view._ipython_display_()
    return out

def test_words_and_a_picture_where_nothing_listens(study, monkeypatch):
    words, picture = shown(study_view(study), monkeypatch)
    assert '24 trials' in words['text/plain'] and '<div' in words['text/html'] and base64.b64decode(picture['image/png'])[:4] == b'\x89PNG'


def test_widgets_with_words_and_picture_behind_them_where_a_notebook_listens(study, tmp_path, monkeypatch):
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    monkeypatch.setattr(training_views, 'listened_to', lambda: True)
    for make in (lambda: training_view(tmp_path), lambda: study_view(study, n_trials=40), watch, claims_view):
        view = make()
        bundle, = shown(view, monkeypatch)
        assert 'application/vnd.jupyter.widget-view+json' in bundle and 'data:image/png;base64' in bundle['text/html'] and view.text.value
        view.close()


def test_a_cell_that_is_run_again_takes_the_place_of_its_view(tmp_path, monkeypatch):
    for now in readings(): write_progress(tmp_path / 'progress.json', now)
    monkeypatch.setattr(training_views, 'listened_to', lambda: True)
    first, second = training_view(tmp_path), training_view(tmp_path)
    shown(first, monkeypatch); shown(second, monkeypatch)
    assert first.closed.is_set() and not second.closed.is_set()
    second.close()


def test_a_live_view_moves_survives_what_it_cannot_read_and_ends_with_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(training_views, 'listened_to', lambda: True)
    monkeypatch.setattr(training_views, 'LOOKS', 0)  # no pauses, which another test looks at
    write_progress(tmp_path / 'progress.json', readings()[0])
    view = training_view(tmp_path)
    view.every = .05
    def soon(done, end=time.monotonic() + 30):
        while not done() and time.monotonic() < end: time.sleep(.05)
        return done()
    shown(view, monkeypatch)
    write_progress(tmp_path / 'progress.json', readings()[4])
    assert soon(lambda: 'step 5 of 10' in view.text.value) and len(view.plot.data[0].x) == 2
    (tmp_path / 'progress.json').write_text('{"state": ')
    assert soon(lambda: 'progress.json' in view.text.value) and not view.closed.is_set()
    write_progress(tmp_path / 'progress.json', replace(readings()[4], state='finished'))
    assert soon(view.closed.is_set) and 'finished' in view.text.value and view.button.disabled


@pytest.mark.slow # by the clock; the next test has the rule by itself
def test_a_view_that_costs_much_looks_seldom_while_a_training_runs_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(training_views, 'listened_to', lambda: True)
    write_progress(tmp_path / 'progress.json', readings()[0])
    def count(busy, seconds=4): # seconds at work before it waits
        view, looks = training_view(tmp_path), []
        def dear():
            looks.append(time.monotonic())
            until = time.thread_time() + .02
            while time.thread_time() < until: pass
            return type(view).look(view)
        view.look, view.every = dear, .2
        shown(view, monkeypatch)
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds:
            if now > busy: time.sleep(.1)
        view.close()
        return len(looks)
    assert 1 <= count(4) <= 3 < count(0), 'a pause of two hundred times what a look cost, and of ten times'
    assert count(1) > 3, 'a pause ends with the work for which it was made'


def test_views_take_half_a_hundredth_of_a_core_together_beside_a_training(monkeypatch):
    monkeypatch.setattr(training_views, '_LIVE', {})
    pause = lambda share, cost=.02: training_views._until_next(SimpleNamespace(every=1.), cost, share)
    assert [pause(1), pause(.5), pause(.1), pause(1, .001), pause(.1, .2)] == pytest.approx([4, 4, 1, 1, 2])
    monkeypatch.setattr(training_views, '_LIVE', dict.fromkeys('abc'))
    assert [pause(1), pause(.1, .2), pause(1, .001)] == pytest.approx([12, 2, 1])


def test_what_views_cost_is_told_from_the_steps_beside_a_look():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
    from view_cost import beside_steps
    took = [1., 1., 1.5, 1., 1., 2., 1., 1.3]  # the first and the last step have no neighbour on one side
    ends = np.cumsum(took)
    turn = [*zip(ends - took, ends)]
    ratios, share = beside_steps([turn, turn], [(2.1, 2.2), (5.6, 7.4), (8.6, 8.9)])
    assert ratios == pytest.approx(2 * [1.5, 2.]) and share == 3 / 8
    assert beside_steps([turn], []) == ([], 0)


@pytest.mark.slow
def test_a_front_end_that_never_answers_holds_nothing_up(tmp_path):
    "A kernel whose client reads what is displayed and sends no message for a widget"
    manager_of = pytest.importorskip('jupyter_client.manager', reason='needs jupyter_client').KernelManager
    write_progress(tmp_path / 'progress.json', readings()[0])
    manager = manager_of(kernel_name='python3')
    manager.start_kernel()
    client, shown = manager.client(), []
    try:
        client.start_channels(); client.wait_for_ready(120)
        code = f"from optkit.views import *; display(training_view({str(tmp_path)!r}), watch()); import time; time.sleep(3); print('on')"
        reply = client.execute_interactive(code, timeout=120, allow_stdin=False, output_hook=lambda m: shown.append(m['content']))
    finally:
        client.stop_channels(); manager.shutdown_kernel(now=True)
    assert reply['content']['status'] == 'ok', reply['content']
    bundles = [c['data'] for c in shown if 'application/vnd.jupyter.widget-view+json' in c.get('data', {})]
    assert len(bundles) == 2 and all('data:image/png;base64' in b['text/html'] and b['text/plain'] for b in bundles) and any(c.get('text') == 'on\n' for c in shown)


def test_listened_to_is_false_here(monkeypatch):
    assert not training_views.listened_to()
    monkeypatch.setattr('IPython.get_ipython', lambda: SimpleNamespace(kernel=1))
    assert training_views.listened_to()
    monkeypatch.setenv('OPTKIT_STATIC', '1')
    assert not training_views.listened_to()


def test_live_plots_keep_their_margins_and_long_curves_are_lines_alone(tmp_path):
    "A browser drew a plot of four panels again and again, whose margins followed its labels"
    write_progress(tmp_path / 'progress.json', Progress('running', 5, 10, 1, 1, loss=.5))
    for n in (9, 2): tune(lambda params, fold: [.1 * e for e in range(n)], ['lr=1e-5..1e-1:log'], 3, folds=2, epochs=n, storage=tmp_path / f'{n}.db', progress=False, say=lambda text: None)
    for view in (views.training_view(tmp_path), views.watch(), views.study_view(tmp_path / '9.db'), views.study_view(tmp_path / '2.db')):
        view.widgets(); view.refresh()
        assert view.plot.layout.margin.autoexpand is False and view.plot.layout.margin.t >= 60, 'there is room for a legend of two lines'
        if view.__class__.__name__ == 'StudyView': assert {t.mode for t in view.plot.data[7:]} == {'lines' if view.settings['epochs'] == 9 else 'lines+markers'}
        view.close()
