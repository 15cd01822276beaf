"Held-out rows and folds: disjoint, complete, stratified, repeatable"
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from optkit.base import InputError
from optkit.folds import check_folds, split_rows, stratified_folds


@pytest.mark.parametrize('counts, k, held_out, said', [
    ((10, 10), 1, True, '1 folds asked for'), ((1, 1), 3, True, '2 rows for 3 folds'), ((20, 3), 3, True, "label 'b' has 3 rows; 3 folds and the held-out rows need at least 4 of each label"),
    ((20, 2), 3, False, "label 'b' has 2 rows; 3 folds need at least 3"), ((1, 20), 5, False, "label 'a' has 1 row;"), ((20, 0), 3, False, "label 'b' has 0 rows"), ((5, 5, 2), 4, True, "label 'c'")])
def test_too_few_rows_of_a_label(counts, k, held_out, said):
    labels = np.repeat(np.arange(len(counts)), counts)
    with pytest.raises(InputError, match=said) as caught: check_folds(labels, tuple('abc'[:len(counts)]), k, 'my.csv', held_out)
    assert '\n' not in str(caught.value) and (k < 2 or 'my.csv' in str(caught.value))


def test_enough_rows_pass():
    check_folds(np.repeat([0, 1], [4, 40]), ('a', 'b'), 3)
    check_folds(np.repeat([0, 1], [3, 40]), ('a', 'b'), 3, held_out=False)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.lists(st.floats(.05, .5), min_size=1, max_size=3), st.integers(0, 9))
def test_parts_are_disjoint_stratified_and_of_about_their_size(counts, shares, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    sizes = tuple(max(1, int(s * len(labels) / max(1, sum(shares)))) for s in shares)
    assume(sum(sizes) <= len(labels))
    parts = split_rows(labels, sizes, seed)
    together = np.concatenate(parts)
    assert len(set(together.tolist())) == len(together) and set(together.tolist()) <= set(range(len(labels))) and all((np.diff(p) > 0).all() for p in parts)
    for part, size in zip(parts, sizes): assert abs(len(part) - size) <= len(counts)
    for c, n in enumerate(counts):
        assert (labels[parts[0]] == c).sum() == max(1, round(sizes[0] * n / len(labels)))
    assert all(np.array_equal(a, b) for a, b in zip(parts, split_rows(labels, sizes, seed)))


def test_other_seeds_take_other_rows_and_too_many_are_refused():
    labels = np.arange(100) % 2
    assert not np.array_equal(split_rows(labels, (30,), 0)[0], split_rows(labels, (30,), 1)[0])
    with pytest.raises(InputError, match='101 rows asked for, 100 are there'): split_rows(labels, (60, 41))


def test_each_part_has_each_label_that_has_a_row_for_each():
    "As the job asks: the rows of the search, then the held-out ones; `check_folds` promised one row of each label for them"
    labels = np.repeat([0, 1], [9996, 4])
    check_folds(labels, ('a', 'b'), 3)
    for sizes in ((7500, 2500), (9600, 400)):
        search, held = split_rows(labels, sizes)
        assert set(labels[held]) == {0, 1} and (labels[search] == 1).sum() >= 3, sizes


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(5, 40), min_size=2, max_size=4), st.integers(2, 5), st.integers(0, 5))
def test_folds_hold_out_each_row_once_and_keep_the_labels(counts, k, seed):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    rows = np.sort(rng.permutation(len(labels))[:max(len(labels) - 7, 10)])
    assume(all((labels[rows] == c).sum() >= k for c in range(len(counts))))
    folds = stratified_folds(rows, labels, k, seed)
    assert len(folds) == k and sorted(np.concatenate([v for _, v in folds]).tolist()) == rows.tolist()
    for train, valid in folds:
        assert sorted([*train, *valid]) == rows.tolist()
        for c in range(len(counts)): assert abs((labels[valid] == c).sum() - (labels[rows] == c).sum() / k) < 1
    again = stratified_folds(rows, labels, k, seed)
    assert all(np.array_equal(a, b) for f, g in zip(folds, again) for a, b in zip(f, g))


def test_a_group_is_never_split():
    rng = np.random.default_rng(0)
    groups, labels = np.repeat(np.arange(60), 5), rng.integers(0, 2, 300)
    rows = np.arange(20, 300)
    folds = stratified_folds(rows, labels, 4, groups=groups)
    for train, valid in folds: assert not set(groups[train]) & set(groups[valid])
    assert sorted(np.concatenate([v for _, v in folds]).tolist()) == rows.tolist()
    assert any(set(groups[t]) & set(groups[v]) for t, v in stratified_folds(rows, labels, 4)), 'without groups they are split'
    with pytest.raises(InputError, match='4 groups for 5 folds; expected at least 5'): stratified_folds(np.arange(20), labels, 5, groups=groups)


# --- repeated folds, cross-validation, stopping between folds

from dataclasses import replace

import torch

from optkit.store import example_table, tokenise, word_tokenizer
from optkit.store import with_labels
from optkit.models import example_model
from optkit.folds import cross_validate, hopeless, repeated_folds, strata_of
from optkit.base import Choice
from optkit.hardware import hardware_with
from optkit.metrics import score
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer

torch.set_num_threads(1)
HERE, CONFIG = hardware_with(None), TrainConfig(epochs=4, lr=3e-3, precision='fp32', effective_batch=8)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(90, classes=3), word_tokenizer(), 48, progress=False)


def engine_of(config=CONFIG): return make_engine(example_model(3), config, HERE)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.integers(1, 4), st.booleans(), st.integers(0, 5))
def test_repeated_folds_hold_out_each_row_once_a_repeat(k, repeats, grouped, seed):
    rng = np.random.default_rng(seed)
    labels, rows, groups = rng.integers(0, 3, 120), np.arange(10, 110), np.arange(120) // 3 if grouped else None
    folds = repeated_folds(rows, labels, k, repeats, seed, groups)
    assert len(folds) == k * repeats
    for r in range(repeats):
        part = folds[r * k:(r + 1) * k]
        assert sorted(np.concatenate([v for _, v in part]).tolist()) == rows.tolist()
        for train, valid in part:
            assert sorted([*train, *valid]) == rows.tolist() and (not grouped or not set(groups[train]) & set(groups[valid]))
        assert all(np.array_equal(a, b) for f, g in zip(part, stratified_folds(rows, labels, k, seed + r, groups)) for a, b in zip(f, g))


def test_strata_of_each_task(store):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=90)
    strata = strata_of(with_labels(store, numbers, 'regression'))
    assert np.bincount(strata).tolist() in ([23, 22, 22, 23], [22, 23, 23, 22], [23, 22, 23, 22], [22, 23, 22, 23]) and all(numbers[strata == 0].max() <= numbers[strata == k].min() for k in (1, 2, 3))
    sets = (rng.random((90, 3)) < .5).astype(int)
    strata = strata_of(with_labels(store, sets, 'multilabel'))
    assert len(set(strata)) == len({tuple(s) for s in sets}) and all((strata[a] == strata[b]) == (tuple(sets[a]) == tuple(sets[b])) for a in range(90) for b in range(0, 90, 7))
    assert np.array_equal(strata_of(store), store.labels.numpy())


def test_a_fold_is_a_run_of_its_own_and_pooled_scores_are_those_of_all_rows(store):
    folds, seen = repeated_folds(np.arange(90), strata_of(store), 3, 2, groups=np.arange(90) // 3), []
    result = cross_validate(engine_of(), store, folds, CONFIG, repeats=2, on_fold=seen.append)
    assert list(result.folds) == seen and [(f.repeat, f.fold) for f in seen] == [(r, f) for r in range(2) for f in range(3)] and result.stopped is None
    pooled = []
    for r in range(2):
        logits, labels = [], []
        for n in range(3):
            config = replace(CONFIG, seed=r)
            trainer = Trainer(engine_of(config), store, config)
            fit = trainer.fit(*folds[3 * r + n])
            fold = result.folds[3 * r + n]
            assert fold.score == fit.score and fold.best_epoch == fit.best_epoch and fold.metrics['macro_f1'] == fit.score
            logits.append(trainer.engine.predict(store, folds[3 * r + n][1])); labels.append(store.labels[folds[3 * r + n][1]])
        pooled.append(score(torch.cat(logits), torch.cat(labels)))
    assert result.pooled == pytest.approx({k: np.mean([p[k] for p in pooled]) for k in pooled[0]}, abs=1e-6)
    mean, sd, least, most = result.spread()['macro_f1']
    assert mean == pytest.approx(np.mean(result.scores)) and sd == pytest.approx(np.std(result.scores, ddof=1)) and (least, most) == (min(result.scores), max(result.scores))
    assert len(result.table()) == 6 and f'6 of 6 folds: macro_f1 {mean:.4f}' in repr(result) and result._repr_html_().count('<tr') == 7


def test_it_stops_between_folds_and_resumes(store, tmp_path):
    folds = repeated_folds(np.arange(90), strata_of(store), 5)
    stopped = cross_validate(engine_of(), store, folds, CONFIG, stop=lambda scores: Choice(len(scores) == 2, 'enough'), folder=tmp_path)
    assert len(stopped.folds) == 2 and stopped.planned == 5 and stopped.stopped.reason == 'enough' and stopped.pooled == {} and 'stopped: enough' in repr(stopped)
    with pytest.raises(InputError, match='holds checkpoints of a run'): cross_validate(engine_of(), store, folds, CONFIG, folder=tmp_path)
    trained = []
    whole = cross_validate(engine_of(), store, folds, CONFIG, folder=tmp_path, resume=True, on_step=lambda done, total: trained.append(done))
    assert whole.scores[:2] == stopped.scores and len(whole.folds) == 5 and len(trained) == 3 * 4 * 9, 'the first two are not trained again'
    assert whole.scores == cross_validate(engine_of(), store, folds, CONFIG).scores and (tmp_path / 'folds.json').is_file()


@pytest.mark.parametrize('scores, target, stops', [([.8], .99, False), ([.8, .8], .81, True), ([.8, .8, .8, .8, .8], .99, False), ([.7, .9], .85, False), ([.80, .81, .79], .9, True), ([.8, math.nan], .1, True)])
def test_a_hopeless_target_is_given_up(scores, target, stops): assert hopeless(scores, 5, target).value is stops or hopeless(scores, 5, target).value == stops


def test_the_risk_of_giving_up_is_what_it_says():
    rng = np.random.default_rng(0)
    reached, given_up = 0, 0
    for _ in range(3000):
        scores = .8 + rng.normal(0, .02) + rng.normal(0, .02, 5)
        target = scores.mean() - 1e-9 # just reached
        reached += 1
        given_up += bool(hopeless(scores[:3].tolist(), 5, target).value)
    assert .07 < given_up / reached < .13


def test_bad_folds_are_refused(store):
    for k, repeats, said in ((1, 1, '1 folds and 1 repeats'), (3, 0, '3 folds and 0 repeats'), (200, 1, '90 rows for 200 folds')):
        with pytest.raises(InputError, match=said): repeated_folds(np.arange(90), strata_of(store), k, repeats)
    every = np.arange(90)
    for rows, labels, groups, said in ((every < 60, every % 2, None, 'found 1 dimensions of bool; for a mask'), (every, every[:50] % 2, None, '50 labels, but the rows to split go up to 89'),
                                       (every, every % 2, every[:50], '50 groups, but'), (every, np.eye(90, 3), None, 'expected one class a row; strata_of'), (every, every, None, r'no label, or set of labels, has 3 rows \(the most is 1\)')):
        for split in (repeated_folds, stratified_folds):
            with pytest.raises(InputError, match=said): split(rows, labels, 3, groups=groups)
    assert len(repeated_folds(every.tolist(), (every % 2).tolist(), 3)) == 3
    for folds, repeats, said in (([], 1, '0 folds cannot be 1 repeats'), ([(every[:60], every[60:])], 0, '1 folds cannot be 0 repeats')):
        with pytest.raises(InputError, match=said): cross_validate(engine_of(), store, folds, CONFIG, repeats=repeats)
    with pytest.raises(InputError, match='5 folds cannot be 2 repeats'): cross_validate(engine_of(), store, repeated_folds(np.arange(90), strata_of(store), 5), CONFIG, repeats=2)


def test_rows_that_leak_are_seen(store):
    config = TrainConfig(epochs=1, lr=1e-3, precision='fp32')
    engine = engine_of(config)
    with pytest.warns(UserWarning, match='5 of the 10 rows to evaluate on are also trained on'): Trainer(engine, store, config).fit(np.arange(20), np.arange(15, 25))
    with pytest.raises(InputError, match='row 3 is given more than once'): stratified_folds(np.array([0, 1, 2, 3, 3, 4]), np.array([0, 1] * 4), 2)
    with pytest.raises(InputError, match='a row has no group'): stratified_folds(np.arange(6), np.array([0, 1] * 3), 2, groups=np.array(['a', None, 'b', 'c', 'a', 'b'], dtype=object))
    assert len(stratified_folds(np.arange(6), np.array([0, 1] * 4), 2, groups=np.array([0, 1, 2, 3, 4, 5, math.nan, math.nan]))) == 2 # of rows that are not split
    with pytest.raises(InputError, match='go up to 300000000000'): stratified_folds(np.array([0, 1, 3 * 10**11]), np.array([0, 1] * 4), 2)


def test_a_stop_may_answer_yes_or_no(store):
    config = TrainConfig(epochs=1, lr=1e-3, precision='fp32')
    engine, folds = engine_of(config), repeated_folds(np.arange(len(store)), store.labels.numpy(), 3)
    found = cross_validate(engine, store, folds, config, stop=lambda scores: len(scores) > 1)
    assert len(found.folds) == 2 and found.stopped.value is True and found.stopped.reason == 'stop said so'
    assert len(cross_validate(engine, store, folds, config, stop=lambda scores: False).folds) == 3


def test_auroc_of_one_label_is_refused_before_training(store, tmp_path):
    config = TrainConfig(epochs=9, lr=1e-3, precision='fp32', metric='auroc')
    engine, one = engine_of(config), np.flatnonzero(store.labels.numpy() == 0)
    with pytest.raises(InputError, match='auroc is not defined on these 4 rows: 1 of the 3 labels'): Trainer(engine, store, config, folder=tmp_path / 'run').fit(np.arange(30), one[one > 29][:4])
    assert not (tmp_path / 'run').exists()
    (tmp_path / 'taken').write_text('x')
    many = with_labels(store, np.array([[1, 0, 1]] * 45 + [[0, 0, 1]] * 45), 'multilabel', ('a', 'b', 'c'))
    with pytest.raises(InputError, match='1 of the 3 labels are there in some of them and not in others'): Trainer(engine, many, config).fit(np.arange(0, 90, 2), np.arange(1, 90, 2))
    with pytest.raises(InputError, match='taken is a file; expected a folder'): Trainer(engine, store, config, folder=tmp_path / 'taken')
