"Field reports of queued trials, predicted values, paths, full disks, read-only media and damaged files"
import errno
import io
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

from made_up import model_and_pairs
from optkit import cli, report
from optkit.checkpoint import save_model
from optkit.cli import main
from optkit.data import InputError, read_table, word_tokenizer
from optkit.engine import example_model
from optkit.hpo import ended, study_summary, tune, value_kind
from optkit.job import Job
from optkit.report import render, study_figure
from optkit.simulator import SyntheticCurves
from optkit.storage import open_storage, open_study, read_mode, sqlite_storage
from optkit.timing import read_json, write_json
from optkit.views import study_view, trial_rows

ROOT = Path(__file__).resolve().parent.parent
NAMES = ['a b', 'a#b', 'a?b', 'a%20c', 'a:b', 'file:x', 'a{b}']
ROOTLESS = pytest.mark.skipif(os.geteuid() == 0, reason='needs a user who is not root')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return model_and_pairs(tmp_path_factory.mktemp('field'), 60)


def job(folder, out, *more):
    data = ['--data', str(folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y']
    size = ['--trials', '2', '--epochs', '1', '--precision', 'fp32', '--space', 'lr=3e-4..1e-2:log', 'confirm=0']
    return ['tune', *data, '--model', str(folder / 'model'), '--out', str(out), *size, '--no-ladder', '--quiet', *more]


@pytest.fixture(scope='module')
def finished(folder, tmp_path_factory):
    "A finished run, to be read or copied"
    out = tmp_path_factory.mktemp('finished') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.05))
        assert main(job(folder, out)) == 0
    return out


def fails(words, capsys, code=2):
    "One line, and the exit status"
    capsys.readouterr()
    assert main([str(w) for w in words]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip() and 'it/s' not in line]
    assert len(lines) == 1 and lines[0].startswith(f'optkit {words[0]}: '), lines
    return lines[0]


# --- 8: trials of the queue, and values that nobody measured

BATCHES = ['lr=1e-4..1e-2:log', 'effective_batch=8,16']


def score(params, fold): return iter([-abs(params['lr'] - 1e-3)])


def from_function(trial): return dict(lr=trial.suggest_float('lr', 1e-4, 1e-2, log=True), effective_batch=trial.suggest_categorical('effective_batch', (8, 16)))


@pytest.mark.parametrize('space', [BATCHES, from_function], ids=['texts', 'function'])
@pytest.mark.parametrize('queued, said', [(dict(lr=1e-3, effective_batch=32), 'effective_batch=32 is not in the space'), (dict(lr=.5, effective_batch=8), 'lr=0.5 is not in the space'),
                                          (dict(lr='high', effective_batch=8), "lr='high' is not in the space")], ids=['choice', 'range', 'kind'])
def test_field_a_queued_trial_outside_of_the_space_fails_once_and_the_study_goes_on(tmp_path, space, queued, said):
    go = lambda n: tune(score, space, n, folds=2, storage=tmp_path / 'study.db', progress=False, say=words.append)
    words = []
    go(2)
    optuna.load_study(study_name='study', storage=sqlite_storage(tmp_path / 'study.db')).enqueue_trial(queued)
    study = go(4)
    assert [ended(t) for t in study.trials] == ['complete', 'complete', 'failed', 'complete']
    assert study.trials[2].state == TrialState.FAIL and said in study.trials[2].user_attrs['reason'] and any(said in w for w in words)
    assert [ended(t) for t in go(5).trials][4:] == ['complete'], 'nothing waits any more'


def test_field_a_queue_that_an_earlier_version_could_not_get_past_is_gone_on_with(tmp_path):
    tune(score, BATCHES, 1, folds=2, storage=tmp_path / 'study.db', progress=False)
    study = optuna.load_study(study_name='study', storage=sqlite_storage(tmp_path / 'study.db'))
    study.enqueue_trial(dict(lr=1e-3, effective_batch=32), user_attrs=dict(resumed_from=0))  # as it queued the trial anew
    assert [ended(t) for t in tune(score, BATCHES, 3, folds=2, storage=tmp_path / 'study.db', progress=False, say=lambda text: None).trials] == ['complete', 'failed', 'complete']


def test_field_a_name_that_is_no_parameter_is_no_reason_to_stop_either(tmp_path):
    study = optuna.create_study(study_name='study', direction='maximize', storage=sqlite_storage(tmp_path / 'study.db'))
    study.enqueue_trial(dict(learning_rate=1e-3))
    found = tune(score, BATCHES, 2, folds=2, storage=tmp_path / 'study.db', progress=False, say=lambda text: None)
    assert [ended(t) for t in found.trials] == ['failed', 'complete'] and "'learning_rate' is no parameter" in found.trials[0].user_attrs['reason']


def test_field_an_error_of_the_space_itself_still_ends_the_study():
    def broken(trial):
        if trial.number and trial.study.study_name == 'study': raise ValueError('a fault of mine')
        return dict(lr=trial.suggest_float('lr', 1e-4, 1e-2))
    with pytest.raises(ValueError, match='a fault of mine'): tune(score, broken, 3, folds=2, storage='memory', name='study', progress=False)


@pytest.fixture(scope='module')
def raced(tmp_path_factory):
    "A study by racing, and one by a strategy that predicts nothing"
    curve, place = SyntheticCurves(folds=3, epochs=10), tmp_path_factory.mktemp('raced')
    return {s: (place / s, tune(curve.runner(5), curve.space, 24, folds=3, epochs=10, strategy=s, storage=place / s / 'study.db', seed=5, progress=False)) for s in ('racing', 'asha')}


def test_field_a_value_that_was_predicted_says_so_on_its_trial(raced):
    stopped = [t for t in raced['racing'][1].trials if ended(t) == 'stopped']
    assert len(stopped) > 3 and all(t.user_attrs['predicted'] == t.value and value_kind(t) == 'predicted' for t in stopped)
    assert not any('predicted' in t.user_attrs for t in raced['racing'][1].trials if ended(t) == 'complete')
    assert {value_kind(t) for t in raced['asha'][1].trials if ended(t) == 'stopped'} == {'last value'}


def test_field_a_report_says_of_each_value_whether_it_was_predicted(raced, tmp_path):
    for strategy, words in (('racing', 'predicted mean'), ('asha', 'last value')):
        summary = study_summary(raced[strategy][1], 'macro_f1', 30, 30)
        assert {t['value_kind'] for t in summary['trials'] if t['state'] == 'complete'} == {'measured'}
        labels = study_figure(summary).axes[0].get_legend_handles_labels()[1]
        assert [label for label in labels if label.startswith('stopped')] == [f'stopped early ({words})'], labels
        write_json(tmp_path / strategy / 'run.json', dict(version=1)); write_json(tmp_path / strategy / 'study.json', summary)
        page = render(tmp_path / strategy).read_text('utf-8')
        count = sum(t['state'] == 'stopped' for t in summary['trials'])
        assert page.count(f'>{words}<') >= count and ('nobody measured' in page) == (strategy == 'racing')


def test_field_a_view_says_of_each_value_whether_it_was_predicted(raced):
    rows, view = trial_rows(open_study(raced['racing'][0])), study_view(raced['racing'][0])
    assert {(r['state'], r['value_kind']) for r in rows} == {('complete', 'measured'), ('stopped', 'predicted')}
    assert 'is a predicted mean, not measured' in view.words() and 'by predicted values too' in view.words()
    assert 'stopped (predicted mean)' in view.draw().axes[0].get_legend_handles_labels()[1]
    assert 'stopped (last value)' in study_view(raced['asha'][0]).draw().axes[0].get_legend_handles_labels()[1]


# --- 10: paths

@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('relative', [False, True])
def test_field_a_study_in_a_folder_of_any_name_opens_again(tmp_path, monkeypatch, name, relative):
    monkeypatch.chdir(tmp_path)
    file = (Path(name) if relative else tmp_path / name) / 'study.db'
    tune(score, BATCHES, 1, folds=2, storage=file, name='s', progress=False)
    assert len(open_study(file).trials) == len(open_study(file.parent, 's').trials) == 1 and len(study_view(file.parent).rows()) == 1
    assert os.listdir(tmp_path) == [name], 'nothing is written beside the folder'


@pytest.mark.parametrize('name', [*NAMES, 's3:x', '~x'])
@pytest.mark.parametrize('end', ['csv', 'tsv', 'jsonl', 'csv.gz', 'parquet'])
def test_field_a_table_under_any_path_is_read(tmp_path, monkeypatch, name, end):
    if end == 'parquet': pytest.importorskip('pyarrow', reason='needs pyarrow')
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    table, file = pd.DataFrame(dict(t=['x y', 'z'], y=['a', 'b'])), tmp_path / name / f'd:a#t.{end}'
    if end == 'parquet': file.write_bytes(table.to_parquet())
    elif end == 'jsonl': file.write_text(table.to_json(orient='records', lines=True))
    else: table.to_csv(file, index=False, sep='\t' if end == 'tsv' else ',')
    for path in (file, Path(name) / file.name): assert len(read_table(path, 't', 'y')) == 2


def test_field_every_file_of_a_job_may_lie_under_an_odd_path(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.05))
    monkeypatch.chdir(tmp_path)
    odd = Path('a#b?c%20d: e')
    shutil.copytree(folder, odd)
    assert main(job(odd, odd / 'r#u?n%20:', '--log-file', str(odd / 'l#o?g%20.log'))) == 0
    for words in ('forecast', 'status', 'report', 'worker'): assert main([words, str(odd / 'r#u?n%20:')]) == 0, capsys.readouterr().err
    assert main(['train', *job(odd, odd / 't#r?%20:')[1:13], 'epochs=1', 'precision=fp32', '--quiet']) == 0
    assert os.listdir(tmp_path) == [str(odd)] and {'l#o?g%20.log', 'r#u?n%20:', 't#r?%20:'} <= set(os.listdir(odd))
    assert read_json(odd / 'r#u?n%20:' / 'forecast.json')['done'] == 2


def test_field_compilers_get_no_folder_that_their_command_line_takes_apart(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from optkit.fast import keep_compiled
    for name in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'): monkeypatch.setenv(name, default_cache_dir())
    assert all(p.startswith(default_cache_dir()) for p in keep_compiled(tmp_path / 'a b').values()) and not (tmp_path / 'a b').exists()
    assert all(p.startswith(str(tmp_path / 'a-b')) for p in keep_compiled(tmp_path / 'a-b').values())
    assert all(p.startswith(default_cache_dir()) for p in keep_compiled(tmp_path / "a'b").values()), 'also after another run folder'


# --- 11: full disks, read-only media, damaged and newer files

def full_disk(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'No space left on device'), Exception('No space left on device (os error 28)')], ids=['system', 'tokenizers'])
def test_field_a_model_is_replaced_only_after_the_new_one_is_whole(tmp_path, error):
    model, tokenizer = example_model(), word_tokenizer()
    save_model(model, tmp_path / 'model', tokenizer)
    before = {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()}
    def refuse(folder): raise error
    tokenizer.save_pretrained = refuse
    with pytest.raises(InputError, match='the model could not be saved .*No space left on device.*; the one that is there stays'): save_model(model, tmp_path / 'model', tokenizer)
    assert {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()} == before and os.listdir(tmp_path) == ['model']


def test_field_a_model_that_cannot_be_moved_into_place_leaves_the_one_before(tmp_path, monkeypatch):
    save_model(example_model(), tmp_path / 'model')
    before, real = (tmp_path / 'model' / 'model.safetensors').read_bytes(), os.replace
    monkeypatch.setattr(os, 'replace', lambda old, new: full_disk() if Path(old).name == '.part-model' else real(old, new))
    with pytest.raises(InputError, match='could not be saved'): save_model(example_model(seed=3), tmp_path / 'model')
    assert (tmp_path / 'model' / 'model.safetensors').read_bytes() == before


def test_field_a_disk_that_fills_up_at_the_last_moment_leaves_a_line_and_the_model_before(folder, finished, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    before = (out / 'model' / 'model.safetensors').read_bytes()
    (out / 'final.json').unlink()
    with monkeypatch.context() as patch:
        patch.setattr('transformers.PreTrainedModel.save_pretrained', full_disk)
        assert 'model: the model could not be saved (' in fails(job(folder, out), capsys)
    assert (out / 'model' / 'model.safetensors').read_bytes() == before and not list(out.glob('.*part*'))
    assert main(job(folder, out)) == 0 and (out / 'final.json').is_file(), 'the same command with room goes on'


def limited(words, kilobytes):
    "The command in a process whose files cannot grow beyond that"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))
    return subprocess.run([sys.executable, '-c', 'import sys; from optkit.cli import main; sys.exit(main())', *words], preexec_fn=limit, capture_output=True, text=True, cwd=ROOT,
                          env=dict(os.environ, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)))


@pytest.mark.slow
@pytest.mark.parametrize('kilobytes', [1, 60, 130])
def test_field_files_that_cannot_grow_end_in_a_line(folder, tmp_path, kilobytes):
    done = limited(job(folder, tmp_path / 'run'), kilobytes)
    lines = [line for line in done.stderr.splitlines() if line.startswith('optkit ')]
    assert done.returncode in (1, 2) and len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
    assert 'another version of Optuna' not in lines[0]


def test_field_a_study_without_room_is_not_called_damaged(tmp_path, monkeypatch):
    from sqlalchemy.exc import OperationalError
    def full(*_, **__): raise OperationalError('', {}, Exception('database or disk is full'))
    monkeypatch.setattr('optkit.storage.RDBStorage', full)
    with pytest.raises(InputError, match='study.db: no room is left on the disk .*make room') as caught: open_storage(tmp_path / 'study.db')
    assert 'damaged' not in str(caught.value)


class Full(io.StringIO):
    def flush(self): full_disk()


def test_field_a_log_file_on_a_full_disk_is_reported_once(tmp_path, capsys):
    with cli.Terminal(log_file=str(tmp_path / 'x.log')) as terminal:
        terminal.handlers[0].setStream(Full())
        for n in range(3): terminal.log(f'line {n}')
    assert capsys.readouterr().err.splitlines() == [f'--log-file {tmp_path / "x.log"}: takes no more words (No space left on device)']


def close(file):
    "As when the process that wrote it has ended"
    connection = sqlite3.connect(file)
    connection.execute('pragma wal_checkpoint(truncate)')
    connection.close()
    for side in file.parent.glob(f'{file.name}-*'): side.unlink()


def test_field_how_a_study_is_opened_to_look_at():
    assert [read_mode(writable, log).value for writable, log in ((True, 0), (True, 9), (False, 0), (False, 9))] == ['ro', 'ro', 'immutable', 'ro']


def test_field_a_finished_run_on_read_only_media_opens(finished, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    (out / '.lock').unlink(missing_ok=True)
    close(out / 'study.db')
    real, before = os.access, sorted(os.listdir(out))
    monkeypatch.setattr(os, 'access', lambda path, mode, **kw: False if mode & os.W_OK and Path(path).is_relative_to(out) else real(path, mode, **kw))
    monkeypatch.setattr(report, '_write', lambda target, page: (_ for _ in ()).throw(OSError(errno.EROFS, 'Read-only file system', str(target))))
    for words in ('forecast', 'status', 'report'): assert main([words, str(out)]) == 0, capsys.readouterr().err
    assert 'it is the page of before' in capsys.readouterr().out
    assert sorted(os.listdir(out)) == before, 'no log was made beside the study'
    (out / 'report.html').unlink()
    fails(['report', out], capsys, 1)


@ROOTLESS
def test_field_a_folder_without_the_right_to_write_opens(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    close(out / 'study.db')
    out.chmod(0o555)
    try:
        for words in ('forecast', 'status', 'report'): assert main([words, str(out)]) == 0
    finally: out.chmod(0o755)


def test_field_a_plan_with_further_keys_is_used_and_one_that_lacks_some_is_named(folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    plan = read_json(out / 'plan.json')
    write_json(out / 'plan.json', plan | dict(new_field=1))
    assert main(job(folder, out)) == 0
    write_json(out / 'plan.json', {k: v for k, v in plan.items() if k != 'epochs'})
    assert 'plan.json: holds no epochs that can be used' in fails(job(folder, out), capsys)
    write_json(out / 'plan.json', plan | dict(epochs='three'))
    assert 'plan.json: holds no epochs that can be used' in fails(job(folder, out), capsys)


BOMB = '[' * 100_000


@pytest.mark.parametrize('name, text', [(n, t) for n in ('run', 'plan', 'data', 'batch', 'study', 'timings', 'decisions') for t in (BOMB, '{}')] + [('plan', 'null'), ('study', '{"trials": [3]}'), ('decisions', '[3]')],
                         ids=lambda v: 'bomb' if v == BOMB else v)
def test_field_a_damaged_file_of_a_run_ends_in_a_line(folder, finished, tmp_path, monkeypatch, capsys, name, text):
    out = shutil.copytree(finished, tmp_path / 'run', ignore=shutil.ignore_patterns('final.json'))
    (out / f'{name}.json').write_text(text)
    monkeypatch.setattr(Job, '_do_final', lambda self: self._read(self.path('timings')) and dict(score=None))
    assert f'{name}.json' in fails(job(folder, out), capsys)


@pytest.mark.parametrize('text', [BOMB, '[]', '[3]', '{}', 'null', '"a"', '{"a": '], ids=['bomb', 'list', 'number', 'object', 'null', 'text', 'torn'])
def test_field_what_is_damaged_of_a_run_is_left_out_by_those_who_look_at_it(finished, tmp_path, capsys, text):
    out = shutil.copytree(finished, tmp_path / 'run')
    for name in ('run', 'plan', 'data', 'batch', 'study', 'timings', 'decisions', 'train', 'forecast', 'confirm', 'final', 'progress'):
        (out / f'{name}.json').write_text(text)
    for words in ('status', 'report'): assert main([words, str(out)]) == 0
    if text == '{}': assert 'has no study' in fails(['worker', out], capsys)
    else: assert 'run.json' in fails(['worker', out], capsys)


def test_field_a_run_folder_of_a_newer_version_is_named(folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    write_json(out / 'run.json', read_json(out / 'run.json') | dict(version=2))
    assert 'made by another version of optkit (its version is 2, expected 1); use --out' in fails(job(folder, out), capsys)


def test_field_a_study_of_another_format_advises_what_the_command_line_has(folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run', ignore=shutil.ignore_patterns('study.json'))
    study = optuna.load_study(study_name='optkit', storage=sqlite_storage(out / 'study.db'))
    study.set_user_attr('optkit', study.user_attrs['optkit'] | dict(format=99))
    said = fails(job(folder, out), capsys)
    assert 'its format is 99' in said and 'use --out with another folder' in said and 'fresh' not in said
    with pytest.raises(InputError, match='fresh=True'): tune(score, BATCHES, 1, folds=2, storage=out / 'study.db', name='optkit', progress=False)


def test_field_readings_of_a_training_that_are_damaged_are_passed_over(tmp_path):
    from optkit.progress import add_readings
    assert add_readings([], [BOMB, '3', '[]', 'null', '{"step": "a"}', '{"step": 1}']) == [dict(step=1)]


def test_field_a_checkpoint_of_another_version_ends_in_a_line(folder, tmp_path, capsys):
    words = ['train', *job(folder, tmp_path / 'run')[1:13], 'epochs=2', 'precision=fp32', '--quiet']
    assert main(words) == 0
    record = next((tmp_path / 'run' / 'checkpoints').glob('step-*')) / 'run.json'
    saved = read_json(record)
    for damaged in (saved | dict(position=saved['position'] | dict(new_field=1)), {k: v for k, v in saved.items() if k != 'made_of'}, saved | dict(in_model=3), [saved]):
        for path in (tmp_path / 'run' / 'checkpoints').glob('step-*/run.json'): write_json(path, damaged)
        assert 'step-' in fails(words, capsys)
