"The fine-tune beside Hugging Face Trainer: what it saves after each fold, and how it goes on"
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'bench'))
from minilm_folds import State, parse, part_of, save

from optkit.hardware import detect
from optkit.base import read_json


class Store(SimpleNamespace):
    def __len__(self): return len(self.labels)


@pytest.fixture
def setting(tmp_path):
    a = parse(['--folds', '3', '--seeds', '2', '--state', str(tmp_path/'state'), '--out', str(tmp_path)])
    rows, parts = np.arange(24), np.split(np.arange(24), 3)
    return a, detect(), Store(labels=torch.arange(24) % 2, lengths=np.full(24, 10)), [(np.setdiff1d(rows, p), p) for p in parts]


def fold(seconds, wrong=()):
    "Both with logits of the right class, but for some rows of ours"
    logits = lambda bad: [[-2. if (n % 2) != (n in bad) else 2., 2. if (n % 2) != (n in bad) else -2.] for n in range(8)]
    return {'hf': dict(seconds=seconds, begin=.5, logits=logits(())), 'optkit': dict(seconds=seconds / 2, begin=.5, logits=logits(wrong)), 'optkit fast': dict(seconds=seconds / 8, begin=.5, logits=logits(()))}


def test_a_record_after_each_fold(setting, tmp_path):
    a, hardware, store, folds = setting
    state = State(a, hardware, store, folds)
    for n in range(4):
        state.add(n // 3, n % 3, fold(4. + n, wrong=(1,) if n == 1 else ()))
        save(a, hardware, store, folds, state)
        found = read_json(tmp_path/f'minilm-folds-{hardware.card}.json')
        hf, ours, fast = found['rows']
        assert ours['repeats'] == n + 1 and ours['ratio']['p50'] == 2 and ours['seconds']['p50'] == np.median(np.arange(4., 5. + n)) / 2 and fast['ratio']['p50'] == 8
        assert len(found['provenance']['scores']['optkit']['pooled']) == (n >= 2)
    assert ours['samples_per_s']['p50'] == 2 * hf['samples_per_s']['p50'] and hf['loss']['pair_f1'] == 1 > ours['loss']['pair_f1'] and '1 seeds of 2 whole' in ours['stopped']
    assert ours['loss']['pair_f1_difference'] < 0 == fast['loss']['pair_f1_difference'] and len(ours['loss']['pair_f1_differences']) == 1 and '--lr 0.0001' in found['provenance']['command'] and found['provenance']['begin_s']['optkit']['p50'] == .5


def test_the_next_call_goes_on(setting):
    a, hardware, store, folds = setting
    State(a, hardware, store, folds).add(1, 2, fold(3.))
    assert State(a, hardware, store, folds).done == {(1, 2): fold(3.)}
    a.epochs += 1
    with pytest.raises(SystemExit, match='another epochs'): State(a, hardware, store, folds)


def test_what_is_known_of_the_calls_is_kept(setting):
    a, hardware, store, folds = setting
    state = State(a, hardware, store, folds)
    state.first_run_s, state.turn_s = dict(hf=2.), 30.
    state.add(0, 1, fold(3.))
    again = State(a, hardware, store, folds)
    assert again.first_run_s == dict(hf=2.) and again.turn_s == 30. and again.done.keys() == {(0, 1)}


def test_scores_of_parts_make_one_record_without_times(setting, tmp_path, monkeypatch):
    import minilm_folds
    a, hardware, store, folds = setting
    a.scores, a.processes, a.first_seed = True, 2, 3
    parts = []
    for n in range(2):
        a.part = f'{n}/2'
        parts += part_of(a)
        state = State(a, hardware, store, folds)
        for seed, k in part_of(a): state.add(seed, k, fold(2., wrong=(k,)))
    a.part = None
    assert sorted(parts) == part_of(a) == [(seed, k) for seed in (3, 4) for k in range(3)]
    monkeypatch.setattr(minilm_folds, 'prepared', lambda a: (hardware, None, None, None, store, folds))
    assert minilm_folds.gather(a) is True
    found = read_json(tmp_path/f'minilm-scores-{hardware.card}.json')
    hf, ours, fast = found['rows']
    assert ours['ratio'] is None and ours['seconds'] is None and ours['repeats'] == 6 and '2 seeds of 2 whole' in ours['stopped']
    assert len(ours['loss']['pair_f1_differences']) == 2 and ours['loss']['pair_f1_difference'] < 0 == fast['loss']['pair_f1_difference'] and ours['loss']['se_of_folds'] >= 0
    assert '--first-seed 3' in found['provenance']['command'] and '--scores --processes 2' in found['provenance']['command']
