"The command line: options and settings of every command, what goes where, and exit codes"
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import torch

from made_up import model_and_pairs
from optkit.cli import _print_result, app, main
from optkit.storage import StorageLost
from optkit.base import read_json
from optkit.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ('detect', 'status', 'memory', 'bench', 'train', 'tune', 'forecast', 'report', 'worker', 'demo')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A tiny model and a table of pairs in groups of four"
    return model_and_pairs(tmp_path_factory.mktemp('cli'), 160, g=[n // 4 for n in range(160)])


def on_data(command, folder, out, *more):
    return [command, '--data', str(folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y', '--model', str(folder / 'model'), '--out', str(out), '--quiet', *more]


def test_every_command_has_help_and_the_common_options(capsys):
    assert [c.name for c in app.registered_commands] == [*COMMANDS]
    for name in COMMANDS:
        assert main([name, '--help']) == 0
        said = capsys.readouterr().out
        assert all(option in said for option in ('--json', '--quiet', '--log-file', '--no-color')), name


@pytest.mark.parametrize('words', [['nonsense'], ['detect', '--nonsense'], ['tune', '--data', 'x.csv'], ['forecast'], ['demo', '--trials', 'many'], ['bench', '--rows', '0'], []], ids=str)
def test_bad_usage_ends_with_2_and_two_lines(words, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert 'Traceback' not in err and len(err.strip().splitlines()) <= 2


def test_help_does_not_load_torch():
    code = "import sys; from optkit.cli import main; main(['tune', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True).returncode == 0


def test_json_is_the_only_thing_on_standard_output(folder, tmp_path, capsys):
    assert main(on_data('train', folder, tmp_path / 'run', '--json', 'epochs=1', 'precision=fp32')) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found['epochs'] == 1 and Path(found['report']).is_file() and 'rows to train on' in err
    assert main(['detect', '--json']) == 0 and 'cpu' in json.loads(capsys.readouterr().out)
    assert main(['status', '--card', 'h100', '--json']) == 0 and json.loads(capsys.readouterr().out)['card'] == 'h100'
    assert main(['report', found['folder'], '--json']) == 0 and json.loads(capsys.readouterr().out)['report'].endswith('report.html')


def test_the_log_file_takes_the_words_and_the_errors(folder, tmp_path, capsys):
    log = tmp_path / 'words.log'
    assert main(on_data('train', folder, tmp_path / 'run', '--log-file', str(log), 'epochs=1', 'precision=fp32')) == 0
    assert 'rows to train on' in log.read_text() and 'report: ' in log.read_text()
    assert main(['report', str(tmp_path / 'none'), '--log-file', str(log)]) == 2 and 'holds no run.json' in log.read_text()
    capsys.readouterr()
    assert main(['detect', '--log-file', str(tmp_path / 'none' / 'x.log')]) == 2
    out, err = capsys.readouterr()
    assert not out and 'cannot be written to' in err and len(err.splitlines()) == 1


def test_any_field_by_name_and_a_preset(folder, tmp_path, capsys):
    out = tmp_path / 'run'
    words = on_data('train', folder, out, '--preset', 'auto', '--epochs', '2', 'precision=fp32', 'layout=padded', 'betas=0.8,0.99', 'effective_batch=8')
    assert main(words) == 0
    config = TrainConfig.from_json((out / 'train_config.json').read_text())
    assert (config.epochs, config.layout.name, config.betas, config.effective_batch, config.precision) == (2, 'padded', (.8, .99), 8, 'fp32')
    preset = read_json(out / 'preset.json')
    assert {d['what'] for d in read_json(out / 'decisions.json')} >= {'precision', 'TF32', 'attention', 'preset, layout'}
    assert preset['reasons']['layout']['source'] == 'asked for' and preset['reasons']['checkpointing']['source'] != 'asked for'
    assert main(words) == 0 and 'going on with the run' in capsys.readouterr().out
    before = (out / 'train.json').read_bytes()
    assert main([*words, 'lr=0.5']) == 2 and 'lr was 5e-05, now 0.5' in capsys.readouterr().err
    assert (out / 'train.json').read_bytes() == before


BAD = {'an unknown field': (['lrr=1'], "did you mean 'lr'?"), 'no value': (['lr'], 'expected name=value'), 'another kind': (['epochs=two'], 'epochs=two: expected int'), 'a value out of range': (['warmup=2'], 'warmup is 2'),
       'given twice': (['--epochs', '2', 'epochs=3'], 'given as an option too'), 'an unknown card': (['--preset', 'gtx1'], 'no such card'), 'too few groups': (['--folds', '99', '--group', 'g'], '99'),
       'given twice by name': (['lr=1e-4', 'lr=2e-4'], 'lr is given twice'), 'no mode of torch.compile': (['compile=bogus'], "compile is 'bogus'"), 'a seed below zero': (['--seed', '-1'], 'seed is -1'),
       'no fold at all': (['--folds', '0'], "Invalid value for '--folds'"), 'no token at all': (['--max-length', '0'], "Invalid value for '--max-length'"), 'a log file without a name': (['--log-file', ''], '--log-file is empty'), 'a folder without a name': (['--out', ''], '--out is empty'), 'a column without a name': (['--group', ''], '--group is empty'),
       'a share above one': (['--held-out', '1.5'], '--held-out is 1.5'), 'TF32 without a GPU': (['tf32=true', 'precision=fp32'], 'TF32'), 'rows longer than the model': (['--max-length', '9999'], 'takes at most')}

@pytest.mark.parametrize('name', BAD)
def test_bad_settings_of_a_training_write_nothing(folder, tmp_path, name, capsys):
    if name == 'TF32 without a GPU' and torch.cuda.is_available(): pytest.skip('there is a GPU')
    words, said = BAD[name]
    assert main(on_data('train', folder, tmp_path / 'run', *words)) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) <= 2 and not [*tmp_path.iterdir()], err


def test_folds_keep_groups_together(folder, tmp_path, capsys):
    assert main(on_data('train', folder, tmp_path / 'run', '--folds', '2', '--group', 'g', '--json', 'epochs=1', 'precision=fp32')) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found['folds']) == 2 and sum(f['rows'] for f in found['folds']) == 160 and all(f['rows'] % 4 == 0 for f in found['folds'])


def test_settings_reach_the_trials_of_a_job(folder, tmp_path, capsys):
    short = ['--trials', '1', '--epochs', '2', '--no-ladder', '--space', 'lr=1e-4..1e-3:log']
    assert main(on_data('tune', folder, tmp_path / 'run', *short, '--json', '--precision', 'fp32', 'layout=padded', 'betas=0.8,0.99', 'folds=2')) == 0
    assert json.loads(capsys.readouterr().out)['trials'] == 1
    config = read_json(tmp_path / 'run' / 'train.json')['config']
    assert config['layout'] == 'padded' and config['betas'] == [.8, .99] and read_json(tmp_path / 'run' / 'run.json')['settings']['train'] == ['betas=0.8,0.99']
    assert read_json(tmp_path / 'run' / 'study.json')['folds'] == 2
    assert main(on_data('tune', folder, tmp_path / 'run', *short, '--precision', 'fp32', 'layout=padded', 'folds=2')) == 2 and 'train was betas=0.8,0.99, now left to optkit' in capsys.readouterr().err
    for words, said in ((['physical_batch=4'], 'is found by the job'), (['warmup=0.1', '--space', 'warmup=0.0..0.2'], 'set and searched'), (['nonsense=4'], 'is no field')):
        assert main(on_data('tune', folder, tmp_path / 'other', *short, *words)) == 2 and said in capsys.readouterr().err and not (tmp_path / 'other').exists()


def test_a_study_that_another_process_holds_is_named(tmp_path, capsys):
    import sqlite3
    from optkit.storage import open_storage
    open_storage(tmp_path / 'study.db')
    with sqlite3.connect(tmp_path / 'study.db') as c: c.execute('pragma journal_mode=delete')
    holder = sqlite3.connect(tmp_path / 'study.db', isolation_level=None)
    holder.execute('begin exclusive')
    start = time.monotonic()
    assert main(['forecast', str(tmp_path)]) == 2 and time.monotonic() - start < 30
    err = capsys.readouterr().err
    assert 'held by another process' in err and len(err.splitlines()) == 1
    holder.execute('rollback'); holder.close()


@pytest.mark.parametrize('error, code', [(MemoryError('one row does not fit'), 1), (FloatingPointError('no epoch gave a number'), 1), (KeyboardInterrupt(), 130)], ids=['memory', 'no number', 'Ctrl-C'])
def test_a_failure_ends_with_1_and_a_line(folder, tmp_path, capsys, monkeypatch, error, code):
    import optkit.trainer
    def fails(*args, **kwargs): raise error
    monkeypatch.setattr(optkit.trainer.Trainer, 'fit', fails)
    assert main(on_data('train', folder, tmp_path / 'run', 'epochs=1', 'precision=fp32')) == code
    err = capsys.readouterr().err.strip()
    assert 'Traceback' not in err and len(err.splitlines()) == 1 and (code == 130 or str(error) in err)


def test_a_place_that_cannot_be_written_to_is_said_before_the_work(folder, tmp_path, capsys):
    (tmp_path / 'file').touch()
    for words, said in ((['bench', '--out', str(tmp_path)], 'is a folder'), (['bench', '--out', str(tmp_path / 'file' / 'x.json')], 'is a file'), (on_data('train', folder, tmp_path / 'file' / 'run'), 'is a file')):
        assert main(words) == 2, words
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1, err
    assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_a_run_folder_that_cannot_be_written_to_ends_with_2_and_a_line(folder, tmp_path, capsys, monkeypatch):
    import optkit.report
    (tmp_path / 'run.json').touch()
    def refuses(path): raise PermissionError(13, 'Permission denied', str(path))
    monkeypatch.setattr(optkit.report, 'render', refuses)
    assert main(['report', str(tmp_path)]) == 2 and capsys.readouterr().err == f'optkit report: {tmp_path}: Permission denied\n'


def test_quiet_shows_no_bars_while_the_ladder_is_measured(folder, tmp_path, capsys):
    words = ['bench', '--model', str(folder / 'model'), '--rows', '40', '--max-length', '8', '--effective-batch', '4', '--seconds', '1', '--rounds', '5', '--out', str(tmp_path / 'x.json'), '--quiet']
    assert main(words) == 0 and capsys.readouterr().err == ''


@pytest.mark.slow
def test_a_worker_takes_part_in_a_study(folder, tmp_path, capsys):
    "The job waits between its first trials until the worker has begun; both end with the same twelve"
    from optkit.job import Job, JobConfig
    from optkit.storage import sqlite_storage
    out = tmp_path / 'run'
    job = Job(JobConfig(str(folder / 'data.csv'), 'a', 'y', 'b', model=str(folder / 'model'), out=str(out), trials=12, epochs=2, folds=2, space=('lr=1e-4..1e-2:log',), precision='fp32', ladder=False,
                        save_model=False, strategy='none'), progress=False, say=lambda text: None, command='test')
    helpers, search = [], job._search
    def with_helper(on_trial):
        sqlite_storage(out / 'study.db')  # the worker looks for it
        helpers.append(subprocess.Popen([sys.executable, '-m', 'optkit.cli', 'worker', str(out), '--quiet', '--json'], cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        def slowly(study, trial):
            on_trial(study, trial)
            until = time.monotonic() + 60
            while len({t.user_attrs.get('worker') for t in study.trials}) < 2 and time.monotonic() < until: time.sleep(.2)
        return search(slowly)
    job._search = with_helper
    job.run()
    said, err = helpers[0].communicate(timeout=120)
    assert helpers[0].returncode == 0, err
    trials = optuna.load_study(study_name='optkit', storage=sqlite_storage(out / 'study.db')).trials
    assert len({t.user_attrs['worker'] for t in trials}) == 2 and sum(t.user_attrs.get('ended') is not None for t in trials) == 12
    assert json.loads(said)['trials'] == 12


@pytest.mark.parametrize('make, said', [(lambda p: None, 'holds no run.json'), (lambda p: (p / 'run.json').write_text('{"kind": "train", "settings": {}}'), 'has no study')], ids=['nothing', 'a training'])
def test_a_worker_without_a_study(tmp_path, capsys, make, said):
    make(tmp_path)
    assert main(['worker', str(tmp_path)]) == 2 and said in capsys.readouterr().err


def test_a_worker_never_goes_to_the_cpu_because_its_gpu_is_not_there(tmp_path):
    words = ['worker', str(tmp_path), '--gpu', '99']
    said = subprocess.run([sys.executable, '-m', 'optkit.cli', *words], cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert said.returncode == 2 and '--gpu 99: CUDA finds no such GPU' in said.stderr and not said.stdout


def test_a_score_below_zero_keeps_its_sign():
    from optkit.trainer import Epoch, FitResult
    for metric, score, said in (('matthews', -.25, 'matthews -0.2500'), ('loss', -.5, 'loss 0.5000')):
        result = FitResult(score, 1, [Epoch(1, .6, .5, score, {}, 1., 1., 1.)], False, 1, 1., TrainConfig(metric=metric))
        assert said in repr(result) and f'<td>{said.split()[1]}</td>' in result._repr_html_()


def test_an_empty_budget_is_none(tmp_path, capsys):
    assert main(['bench', '--workload', 'mine', '--budget', '', '--out', str(tmp_path / 'bench')]) == 2 and 'budget is' in capsys.readouterr().err
    assert main(['bench', '--seconds', '-1', '--out', str(tmp_path / 'bench.json')]) == 2 and '--seconds is -1' in capsys.readouterr().err
    for more in (['--only', 'bf16'], ['--text', 'a']): assert main(['bench', *more, '--out', str(tmp_path / 'bench.json')]) == 2 and f'{more[0]} is for a workload' in capsys.readouterr().err
    for words, said in ((['--workload', 'mine', '--text', 'a'], '--text names a column of --data'), (['--workload', 'w1', '--data', 'x.csv', '--text', 'a', '--label', 'y'], '--data is for the workload mine')):
        assert main(['bench', *words, '--out', str(tmp_path / 'bench')]) == 2 and said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_report_of_a_training_misses_nothing_that_a_training_does_not_write(folder, tmp_path, capsys):
    for words in ((), ('--folds', '2')):
        out = tmp_path / f'run{len(words)}'
        assert main(on_data('train', folder, out, 'epochs=1', 'precision=fp32', 'metric=loss', *words)) == 0
        page = (out / 'report.html').read_text('utf-8')
        assert read_json(out / 'run.json')['command'].startswith('optkit train --data '), 'whoever called main'
        assert 'not complete' not in page and 'study.json' not in page and 'There is no ladder yet' not in page
        assert ('2 of 2 folds' in page) == bool(words) and ('chose the epoch' in page) != bool(words) and 'loss -0' not in page and '>-0.' not in page
    capsys.readouterr()
    assert main(['status', str(out), '--follow']) == 0 and 'finished: step' in capsys.readouterr().out
    (out / 'folds.json').unlink()
    assert main(['report', str(out)]) == 0 and 'not complete: folds.json is missing' in (out / 'report.html').read_text('utf-8')


def test_follow_prints_where_a_run_stands(folder, tmp_path, capsys):
    assert main(on_data('train', folder, tmp_path / 'run', 'epochs=1', 'precision=fp32')) == 0
    capsys.readouterr()
    assert main(['status', str(tmp_path / 'run'), '--follow']) == 0 and 'finished: step' in capsys.readouterr().out
    assert main(['status', str(tmp_path / 'none'), '--follow']) == 2 and main(['status', '--follow']) == 2
    capsys.readouterr()
    assert main(['status', str(tmp_path / 'run'), '--follow', 'compile=default']) == 2 and 'shows a run alone' in capsys.readouterr().err


def test_colours_only_where_a_terminal_is(monkeypatch, capsys):
    monkeypatch.delenv('NO_COLOR', raising=False)
    main(['status', '--card', 'h100'])
    assert '\x1b[' not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    main(['status', '--card', 'h100'])
    assert '\x1b[32m' in capsys.readouterr().out
    main(['status', '--card', 'h100', '--no-color'])
    assert '\x1b[' not in capsys.readouterr().out


@pytest.mark.skipif(os.name == 'nt', reason='signals of another kind')
def test_control_c_ends_a_training_after_its_step_and_it_goes_on(folder, tmp_path):
    words = on_data('train', folder, tmp_path / 'run', 'epochs=400', 'precision=fp32', 'read_every=1')
    start = lambda words: subprocess.Popen([sys.executable, '-m', 'optkit.cli', *words], cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process, until = start(words), time.monotonic() + 60
    while not (tmp_path / 'run' / 'progress.json').is_file() and time.monotonic() < until: time.sleep(.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and 'stopping after this step' in err and 'Traceback' not in err, err
    now = read_json(tmp_path / 'run' / 'progress.json')
    assert now['state'] == 'stopped' and 0 < now['step'] < now['total']
    from optkit.checkpoint import latest_checkpoint, read_checkpoint
    assert read_checkpoint(latest_checkpoint(tmp_path / 'run'))[1]['position']['done'] == now['step']


# --- streams, disks and names as they come

@pytest.mark.parametrize('closed', ['stdout', 'stderr', 'both'])
def test_closed_standard_streams_end_no_command(tmp_path, closed):
    code = f"""
import sys
for name in ('stdout', 'stderr'):
    if {closed!r} in (name, 'both'): setattr(sys, name, None)  # what Python makes of a descriptor that the caller closed
from optkit.cli import main
open('code', 'w').write(str(main(['report', 'run'])))"""
    (tmp_path / 'run').mkdir(); (tmp_path / 'run' / 'run.json').write_text(json.dumps(dict(version=1, title='t', command='c', settings={}, fingerprint={}, started='')))
    subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True, check=True)
    assert (tmp_path / 'code').read_text() == '0' and (tmp_path / 'run' / 'report.html').is_file()


@pytest.mark.parametrize('encoding', ['ascii', 'utf-8', 'latin-1'])
def test_what_a_stream_does_not_know_leaves_json_whole(encoding):
    out, said = io.TextIOWrapper(io.BytesIO(), encoding, errors='backslashreplace'), dict(why='3 µs → ü \N{GRINNING FACE}')
    _print_result(SimpleNamespace(as_json=True, out=out), ('', said))
    out.flush()
    assert json.loads(out.buffer.getvalue()) == said


def test_a_folder_whose_name_is_no_utf8_is_refused_before_anything_is_written(folder, tmp_path, capsys):
    out = os.fsdecode(os.fsencode(tmp_path) + b'/r\xfcn')
    assert main(on_data('train', folder, out, 'epochs=1')) == main(on_data('tune', folder, out)) == main(['report', out]) == 2
    err = capsys.readouterr().err
    assert err.count('is no UTF-8') == 3 and 'RUN: the name' in err and not list(tmp_path.iterdir())
    code = f'import sys; from optkit.cli import main; sys.exit(main(["report", sys.argv[1]]))'
    said = subprocess.run([sys.executable, '-c', code, tmp_path / 'rün'], capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=str(ROOT), LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0'))
    assert said.returncode == 2 and 'set PYTHONUTF8=1' in said.stderr and 'Traceback' not in said.stderr


@pytest.mark.parametrize('exc, said', [(OSError(errno.ENOSPC, 'No space left on device', 'runs/a.json'), 'runs/a.json: No space left on device'), (OSError(errno.ENOSPC, 'No space left on device'), 'the disk: No space left on device'),
                                       (OSError(errno.EROFS, 'Read-only file system'), 'the disk: Read-only'), (StorageLost('the storage of study x cannot be written to any more'), 'study x cannot be written to')], ids=range(4))
def test_a_full_disk_ends_with_1_and_a_line(capsys, monkeypatch, exc, said):
    def full(*_): raise exc
    monkeypatch.setattr('optkit.hardware.detect', full)
    assert main(['detect']) == 1
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
    exc = FileNotFoundError(errno.ENOENT, 'a fault of the program')
    with pytest.raises(FileNotFoundError): main(['detect'])
