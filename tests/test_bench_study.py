"The study of bench/study.py: resumed over calls, the same for each strategy, and studies from what it recorded"
import gzip, json, math, sys
from pathlib import Path

import numpy as np
import pytest

from optkit.base import InputError
from optkit.store import word_tokenizer
from optkit.models import example_model
from optkit.space import ended, spent
from optkit.base import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
import study

SMALL = '--documents 9 --train-documents 2 --fresh-documents 9 --hypotheses 0 --negatives 0 --length 24 --evaluation-rows 10 --evaluations 4 --trials 3 --study-seeds 1 --fresh 1'.split()


@pytest.fixture
def pack(tmp_path, monkeypatch):
    "A tiny model and made-up rows, where OPTKIT_BENCH points"
    folder, rng = tmp_path / 'pack', np.random.default_rng(0)
    folder.mkdir()
    example_model().save_pretrained(folder / 'model'); word_tokenizer().save_pretrained(folder / 'model')
    words = lambda *known: ' '.join(f'w{n}' for n in (*known, *rng.integers(20, 150, rng.integers(4, 16))))
    with gzip.open(folder / 'hoc_pairs.jsonl.gz', 'wt') as file:
        for document in range(18):
            for n in range(10): file.write(json.dumps(dict(premise=words(n % 3), hypothesis=words(n), label=int(n % 3 == 0), group=str(document))) + '\n')
    monkeypatch.setenv('OPTKIT_BENCH', str(folder))
    return tmp_path


def call(pack, *more, state='state'): return study.main([*SMALL, '--state', str(pack / state), '--out', str(pack / 'out'), *more])


@pytest.mark.slow
def test_a_study_over_many_calls_is_that_of_one_call(pack):
    whole = read_json(call(pack, '--strategies', 'none', 'racing'))
    calls, path = 0, None
    while path is None and calls < 40: calls, path = calls + 1, call(pack, '--strategies', 'none', 'racing', '--limit', '0', state='parts')
    parts = read_json(path)
    assert calls >= 7, 'a call without time does one trial, or one fresh run'
    assert [[r[k] for k in ('study', 'trials', 'complete', 'epochs', 'params', 'search', 'fresh')] for r in parts['studies']] == [[r[k] for k in ('study', 'trials', 'complete', 'epochs', 'params', 'search', 'fresh')] for r in whole['studies']]
    assert {f.name for f in (pack / 'parts').iterdir()} <= {'study.db', 'study.db-shm', 'study.db-wal', 'calls.json', 'fresh.json', 'where.json'} and sum(f.stat().st_size for f in (pack / 'parts').iterdir()) < 2 ** 20 and not (pack / 'parts' / 'study.db-wal').exists() or not (pack / 'parts' / 'study.db-wal').stat().st_size
    row = parts['studies'][0]
    assert row['calls'] > 1 and row['epochs'] == 3 * 3 * 4 and row['seconds'] > 0
    assert 0 < row['outside_share'] < 1 and row['wall'] > row['outside'] >= row['outside_first'] > 0 and row['fixed']['p50'] < row['wall']
    assert len(row['fresh_scores']) == 1 and row['fresh'] == pytest.approx(np.mean(row['fresh_scores']))
    assert {r['variant']: r['ratio']['p50'] for r in parts['rows']}['none'] == 1 and parts['rows'][1]['fresh']['by_seed'] == pytest.approx([parts['studies'][1]['fresh'] - row['fresh']])


@pytest.mark.slow
def test_seeds_beside_each_other_are_gathered(pack, monkeypatch):
    of = lambda seeds, state: call(pack, '--strategies', 'none', '--study-seeds', '2', *(('--seeds', *seeds) if seeds else ()), state=state)
    whole = read_json(of((), 'whole'))
    assert [r['study'] for r in read_json(of(('1',), 'one'))['studies']] == ['none-1']
    assert '1 of 2' in read_json(of(('0',), 'zero'))['provenance']['whole']
    monkeypatch.setattr(study, 'detect', lambda: pytest.fail('needs no device'))
    gathered = read_json(study.main(['--gather', str(pack / 'zero'), str(pack / 'one'), '--strategies', 'none', '--state', str(pack / 'all'), '--out', str(pack / 'out')]))
    same = lambda record: [[r[k] for k in ('study', 'trials', 'complete', 'epochs', 'params', 'search', 'fresh', 'calls', 'best')] for r in record['studies']]
    assert same(gathered) == same(whole) and gathered['rows'][0]['repeats'] == 2 and gathered['provenance']['calls_beside_each_other'] == 2 and gathered['provenance']['command'] == whole['provenance']['command']
    curves = read_json(pack / 'out' / f'study-real-curves-{gathered["provenance"]["card"] or "cpu"}.json')
    assert len(curves['rows']) == 6 and {r['seed'] for r in curves['rows']} == {0, 1}
    before = sorted((f.name, f.stat().st_size) for f in (pack / 'all').iterdir())
    for wrong, words in ((('--gather', str(pack / 'zero'), '--state', str(pack / 'all')), 'not empty'), (('--gather', str(pack / 'out'), '--state', str(pack / 'new')), 'no study.db'), (('--gather', str(pack / 'one'), str(pack / 'zero'), str(pack / 'out' / '..' / 'one'), '--state', str(pack / 'new')), 'named twice'), (('--gather', str(pack / 'other'), str(pack / 'one'), '--state', str(pack / 'new')), 'differ')):
        if words == 'differ':
            (pack / 'other').mkdir()
            for f in ('study.db', 'where.json'): (pack / 'other' / f).write_bytes((pack / 'zero' / f).read_bytes())
            study.write_json(pack / 'other' / 'where.json', (w := read_json(pack / 'other' / 'where.json')) | dict(provenance=w['provenance'] | dict(torch='0.1')))
        with pytest.raises(InputError, match=words): study.main([*wrong, '--strategies', 'none', '--out', str(pack / 'out')])
    assert sorted((f.name, f.stat().st_size) for f in (pack / 'all').iterdir()) == before and not (pack / 'new').exists()
    with pytest.raises(SystemExit): study.parse(['--seeds', '3'])


def test_what_the_engine_came_to_is_in_the_record(pack, monkeypatch):
    plain = study.run_study
    def noted(s, *args):
        monkeypatch.setattr(type(s.engine), '__repr__', lambda engine: 'no CUDA graphs')
        return plain(s, *args)
    monkeypatch.setattr(study, 'run_study', noted)
    assert read_json(call(pack, '--strategies', 'none'))['provenance']['engine'] == read_json(pack / 'state' / 'where.json')['provenance']['engine'] == 'no CUDA graphs'


def test_folds_and_seconds_are_those_of_the_study(pack):
    s = study.Setting(study.parse([*SMALL, '--fast', '--state', str(pack / 's')]))
    one, again, other, fresh = s.runner(0), s.runner(0), s.runner(1), s.runner(1000, fresh=True)
    same = lambda a, b: all(np.array_equal(x, y) for f, g in zip(a.folds, b.folds) for x, y in zip(f, g))
    assert same(one, again) and not same(one, other) and one.trainer.config.seed == 0 and other.trainer.config.seed == 1
    assert s.engine.built, 'steps come from shapes that were built before the first trial'
    for runner in (one, fresh):
        rows = np.concatenate([v for _, v in runner.folds])
        assert len(rows) == len(set(rows)) == 90
        for train, valid in runner.folds: assert len(train) == 20 and not set(s.groups[train]) & set(s.groups[valid])
    assert not set(np.concatenate([np.concatenate(f) for f in one.folds])) & set(np.concatenate([np.concatenate(f) for f in fresh.folds]))
    values = list(one(dict(lr=1e-4), 0))
    assert len(values) == 4 and 0 < one.begin < one.inside
    begun = one.begin
    next(one(dict(lr=1e-4), 1))
    assert one.begin > begun, 'each fold begins once'


def test_other_sizes_do_not_go_on_with_a_study(pack):
    assert call(pack, '--strategies', 'none', '--limit', '0') is None
    with pytest.raises(InputError, match='another one'): call(pack, '--strategies', 'none', '--evaluations', '3')
    with pytest.raises(InputError, match='documents asked for'): call(pack, '--documents', '30')


def made(n=60, folds=3, evaluations=30):
    rng = np.random.default_rng(0)
    rows = []
    for k in range(n):
        lr = 10 ** rng.uniform(-5, -3)
        top = .8 - .05 * (math.log10(lr) + 4) ** 2
        rows.append(dict(params=dict(lr=lr), seconds=3., values=[[top + .02 * f - .3 * math.exp(-e / 5) + rng.normal(0, .003) for e in range(evaluations)] for f in range(folds)]))
    return dict(space=study.as_space('lr=1e-5..1e-3:log').known, folds=folds, evaluations=evaluations, rows=rows)


def test_studies_from_recorded_curves(tmp_path):
    table = made()
    curves = study.FoldCurves(table)
    params = table['rows'][7]['params']
    assert curves.nearest(params)[0] == 7 and len(curves.nearest(params)) == curves.near and curves.near in study.NEAR and curves.explained > .9
    assert curves.truth(params) == pytest.approx(curves.truths[curves.nearest(params)].mean()) and curves.optimum() <= curves.truth(params)
    got = [list(curves.runner(seed)(params, 2)) for seed in range(40)]
    assert all(got.count(table['rows'][n]['values'][2]) > 1 for n in curves.nearest(params)), 'each of the nearest is drawn'
    values = curves.runner(0)
    drawn = next(n for n in curves.nearest(params) if table['rows'][n]['values'][0] == list(values(params, 0)))
    assert list(values(params, 1)) == table['rows'][drawn]['values'][1] and curves.seconds == pytest.approx(2.), 'the folds of a trial belong together'
    found = {r['strategy']: r for r in study.simulate_all(table, 40, 2, ('none', 'deferred'))}
    assert found['none']['epochs'] == [40 * 90] * 2 and found['none']['seconds'] == pytest.approx([120.] * 2) and found['none']['epochs_ratio']['p50'] == 1
    assert found['deferred']['epochs_ratio']['p50'] > 1.5 and found['deferred']['lost'] < .02
    write = lambda name, data: study.write_json(tmp_path / name, data)
    study.main(['--simulate', str(write('c.json', table)), '--into', str(write('r.json', dict(rows=[1]))), '--simulated-trials', '10', '--simulated-seeds', '1', '--strategies', 'none'])
    both = read_json(tmp_path / 'r.json')
    assert both['rows'] == [1] and both['simulated'][0]['trials'] == 10 and '--simulated-seeds 1' in both['simulated'][0]['by']
    study.main(['--simulate', str(tmp_path / 'c.json'), '--into', str(tmp_path / 'r.json'), '--simulated-trials', '12', '--simulated-seeds', '1', '--strategies', 'none'])
    assert [r['trials'] for r in read_json(tmp_path / 'r.json')['simulated']] == [10, 12]  # studies of another size stay
    assert both['simulated'][0]['by'].endswith('--strategies none')
    before = study.with_simulated(dict(simulated=[dict(trials=5)], simulated_by='one command'), both['simulated'], 'another')
    assert [r['by'] for r in before['simulated']] == ['one command', 'another'] and 'simulated_by' not in before
    table['rows'] = table['rows'][:1]
    with pytest.raises(InputError, match='at least 2'): study.simulate_all(table, 5, 1, ('none',))


def test_parameters_that_say_nothing_do_not_count_for_what_is_near():
    rng = np.random.default_rng(0)
    places = rng.random((120, 3))
    truths = (places[:, 0] - .5) ** 2 + .3 * places[:, 2]
    weights, explained = study.fitted_weights(places, truths, 5)
    even = 1 - study.fitted_weights(places, truths, 5, steps=(1.,))[1]
    assert weights[1] < .2 * min(weights[0], weights[2]) and 1 - explained < .7 * even


def test_parts_of_a_pass_are_disjoint_and_cover_it():
    rows = np.arange(100, 123)
    first, second = ([study.part_of_pass(rows, 5, n, 3) for n in some] for some in (range(1, 5), range(5, 9)))
    assert len(np.unique(np.concatenate(first))) == len(np.unique(np.concatenate(second))) == 20 and not np.array_equal(first, second)
    assert np.array_equal(first, [study.part_of_pass(rows, 5, n, 3) for n in range(1, 5)]) and not np.array_equal(first, [study.part_of_pass(rows, 5, n, 4) for n in range(1, 5)])
    assert set(study.part_of_pass(rows, 23, 2, 0)) == set(rows) and len(study.part_of_pass(rows, 40, 1, 0)) == 23, 'fewer rows than asked for: a pass each'


def test_an_evaluation_follows_so_many_rows(pack):
    s = study.Setting(study.parse([*SMALL, '--state', str(pack / 's')]))
    runner, seen = s.runner(0), []
    step = s.engine.step
    s.engine.step = lambda store, rows: seen.append(np.asarray(rows)) or step(store, rows) # of the fast engine, which cuts itself
    for _ in runner(dict(lr=1e-4, effective_batch=32), 1): seen.append(None)
    assert [n is None for n in seen] == [False, True] * 4 and all(len(n) == 10 for n in seen[::2])
    assert set(np.concatenate(seen[0:4:2])) == set(np.concatenate(seen[4::2])) == set(runner.folds[1][0]), 'two parts are a pass'


def test_the_time_of_a_call_begins_with_it(pack, monkeypatch):
    monkeypatch.setattr(study, 'BEGAN', 0.) # of an older call in this process
    study.main(['--simulate', str(study.write_json(pack / 'c.json', made(4))), '--simulated-trials', '2', '--simulated-seeds', '1', '--strategies', 'none'])
    assert study.since_start() < 60


def test_pairs_are_thinned_by_document():
    rows = [dict(group=str(d), label=int(n < d), n=n) for d in range(4) for n in range(10)]
    found = study.thinned(rows, 1)
    count = lambda label: [sum(r['label'] == label for r in found if r['group'] == str(d)) for d in range(4)]
    assert count(1) == [0, 1, 2, 3] and count(0) == [1, 1, 2, 3] and study.thinned(rows, 0) == rows and study.thinned(rows, 1) == found
    named = [dict(r, hypothesis='ab'[r['n'] % 2], label=int(r['n'] in (1, 3, 4))) for r in rows]
    assert {r['hypothesis'] for r in study.thinned(named, 0, 1)} == {'b'} and study.thinned(named, 0, 2) == named


def test_a_score_that_is_no_number_goes_through_the_file(pack):
    a = study.parse([*SMALL, '--state', str(pack / 's'), '--strategies', 'none'])
    assert study.main([*SMALL, '--state', str(pack / 's'), '--out', str(pack / 'out'), '--strategies', 'none'])
    kept = read_json(pack / 's' / 'fresh.json')
    for scores in kept.values(): scores['0'][0] = float('nan')
    study.write_json(pack / 's' / 'fresh.json', kept)
    (key, found), = study.studies_of(a).items()
    row = study.row_of(a, found, *key, read_json(pack / 's' / 'calls.json'), read_json(pack / 's' / 'fresh.json'))
    assert math.isnan(row['fresh']) and len(row['fresh_scores'][0]) == 3


def test_the_pilot_writes_nothing(pack, capsys):
    assert len(study.main([*SMALL, '--pilot', '--fast', '--state', str(pack / 'none'), '--out', str(pack / 'none')])) == 9
    assert not (pack / 'none').exists() and 'min' in capsys.readouterr().out


@pytest.mark.slow
def test_a_call_that_is_killed_loses_a_trial_at_most(pack, tmp_path):
    import subprocess, time
    command = [sys.executable, study.__file__, *SMALL, '--trials', '12', '--strategies', 'none', '--state', str(tmp_path / 's'), '--out', str(tmp_path / 'o')]
    process, calls = subprocess.Popen(command, stdout=subprocess.DEVNULL), tmp_path / 's' / 'calls.json'
    while not calls.is_file() or len(read_json(calls)[0]['trials']) < 2:
        assert process.poll() is None
        time.sleep(.05)
    process.kill(); process.wait()
    before = len(read_json(calls)[0]['trials'])
    row = read_json(study.main(command[2:]))['studies'][0]
    timed = [t['number'] for c in read_json(calls) for t in c['trials']]
    assert row['trials'] == 12 and 2 <= before <= 12 and 11 <= len(set(timed)) == len(timed) <= 12


def test_non_inferior_is_an_interval_over_the_studies():
    from scipy.stats import ttest_1samp
    lost = np.array([.004, -.012, .003, .001, -.002, .006])
    assert study.lowest(lost) == pytest.approx(ttest_1samp(lost, 0, alternative='greater').confidence_interval(.95).low) and study.lowest(lost[:1]) is None
