"The study of bench/study.py: resumed over calls, the same for each strategy, and studies from what it recorded"
import gzip, json, math, sys
from pathlib import Path

import numpy as np
import pytest

from optkit.data import InputError, word_tokenizer
from optkit.engine import example_model
from optkit.hpo import ended, spent
from optkit.timing import read_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'bench'))
import study

SMALL = '--documents 9 --train-documents 2 --fresh-documents 9 --length 24 --evaluations 4 --trials 4 --study-seeds 1 --fresh 2 --simulated-trials 15 --simulated-seeds 2'.split()


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


def test_a_study_over_many_calls_is_that_of_one_call(pack):
    whole = read_json(call(pack, '--strategies', 'none', 'racing'))
    calls, path = 0, None
    while path is None and calls < 40: calls, path = calls + 1, call(pack, '--strategies', 'none', 'racing', '--limit', '0', state='parts')
    parts = read_json(path)
    assert calls >= 8, 'a call without time does one trial, or one fresh run'
    assert [[r[k] for k in ('study', 'trials', 'complete', 'epochs', 'params', 'search', 'fresh')] for r in parts['studies']] == [[r[k] for k in ('study', 'trials', 'complete', 'epochs', 'params', 'search', 'fresh')] for r in whole['studies']]
    assert sum(f.stat().st_size for f in (pack / 'parts').iterdir()) < 2 ** 20 and not (pack / 'parts' / 'study.db-wal').exists() or not (pack / 'parts' / 'study.db-wal').stat().st_size
    row = parts['studies'][0]
    assert row['calls'] > 1 and row['epochs'] == 4 * 3 * 4 and row['seconds'] > 0
    assert 0 < row['outside_share'] < 1 and row['wall'] > row['outside'] > 0 and row['fixed']['p50'] < row['wall']
    assert len(row['fresh_scores']) == 2 and row['fresh'] == pytest.approx(np.mean(row['fresh_scores']))
    assert {r['variant']: r['ratio']['p50'] for r in parts['rows']}['none'] == 1 and parts['rows'][1]['fresh']['by_seed'] == pytest.approx([parts['studies'][1]['fresh'] - row['fresh']])


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


def test_studies_from_recorded_curves():
    table = made()
    curves = study.FoldCurves(table)
    best = min(range(60), key=curves.truths.__getitem__)
    assert curves.nearest(table['rows'][7]['params']) == 7 and curves.optimum() == curves.truth(table['rows'][best]['params'])
    assert list(curves.runner(0)(table['rows'][7]['params'], 2)) == table['rows'][7]['values'][2] and curves.seconds == pytest.approx(1.)
    found = {r['strategy']: r for r in study.simulate_all(table, 40, 2, ('none', 'racing'))}
    assert found['none']['epochs'] == [40 * 90] * 2 and found['none']['seconds'] == pytest.approx([120.] * 2) and found['none']['epochs_ratio']['p50'] == 1
    assert found['racing']['epochs_ratio']['p50'] > 1.2 and found['racing']['lost'] < .02
    table['rows'] = table['rows'][:1]
    with pytest.raises(InputError, match='at least 2'): study.simulate_all(table, 5, 1, ('none',))
