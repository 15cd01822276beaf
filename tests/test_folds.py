"Held-out rows and folds: disjoint, complete, stratified, repeatable"
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from optkit.data import InputError
from optkit.folds import check_folds, split_rows, spread, stratified_folds


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


def test_mean_and_its_error():
    mean, error = spread([.8, .9, .85])
    assert mean == pytest.approx(.85) and error == pytest.approx(math.sqrt((.05**2 + .05**2) / 2) / math.sqrt(3)) and spread([.7]) == (.7, 0)
