"Augmentation: only rows to train on, only where it is asked for, the same for the same seed"
import numpy as np
import pytest
import torch

from optkit.augment import augmented, AUGMENTS, framing, noised
from optkit.base import InputError
from optkit.store import example_table, tokenise, TokenStore, word_tokenizer
from optkit.models import example_model
from optkit.folds import stratified_folds
from optkit.hardware import detect
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import ROUNDING_ONLY_FIELDS, fold_runner, Trainer


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(90), word_tokenizer(), 40, progress=False)


def row(store, r): return store.tokens[store.offsets[r]:store.offsets[r + 1]].tolist()


@pytest.mark.parametrize('by', AUGMENTS)
def test_only_tokens_within_training_rows_change(store, by):
    train = np.arange(0, 90, 2)
    found = augmented(store, train, .4, by, seed=3)
    frame = {row(store, 0)[0], row(store, 0)[-1]}
    for r in range(90):
        a, b = row(store, r), row(found, r)
        assert len(a) == len(b) and (r % 2 == 0 or a == b)
        assert all(x == y for x, y in zip(a, b) if x in frame) and not any(y in frame for x, y in zip(a, b) if x not in frame)
        if by == 'swap': assert sorted(a) == sorted(b)
    assert any(row(store, r) != row(found, r) for r in train) and found.labels is store.labels


def test_the_share_and_the_seed(store):
    changed = lambda **k: (augmented(store, np.arange(90), **k).tokens != store.tokens).float().mean().item()
    assert changed(share=.05) < changed(share=.2) < changed(share=.6)
    same = [augmented(store, np.arange(90), .2, seed=1, epoch=e).tokens.tolist() for e in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_folds_noise_their_own_training_rows_and_never_those_they_validate_on(store):
    config, folds, seen = TrainConfig(epochs=1, precision='fp32', augment=.5), stratified_folds(np.arange(90), store.labels.numpy(), 3), []
    engine = make_engine(example_model(), config, detect())
    step, predict = engine.step, engine.predict
    engine.step = lambda s, micro: seen.append(('train', s)) or step(s, micro)
    engine.predict = lambda s, rows, *a: seen.append(('valid', s)) or predict(s, rows, *a)
    runner = fold_runner(engine, store, folds, config)
    for fold, (train, valid) in enumerate(folds):
        seen.clear()
        list(runner({}, fold))
        kinds = {'train': [s for k, s in seen if k == 'train'], 'valid': [s for k, s in seen if k == 'valid']}
        assert kinds['train'] and kinds['valid']
        assert all((s.tokens == store.tokens).all() for s in kinds['valid'])
        assert all(row(s, r) == row(store, r) for s in kinds['train'] for r in valid) and any(row(kinds['train'][0], r) != row(store, r) for r in train)
        seen.clear()
        list(runner(dict(augment=0.), fold))
        assert all((s.tokens == store.tokens).all() for _, s in seen)


def test_a_run_that_goes_on_sees_the_same_noise(store, tmp_path):
    config = TrainConfig(epochs=3, precision='fp32', lr=1e-3, augment=.3, save_every=2)
    make = lambda folder, **k: Trainer(make_engine(example_model(), config, detect()), store, config, folder=folder, **k)
    whole = make(tmp_path / 'whole').fit(np.arange(60), np.arange(60, 90))
    first = make(tmp_path / 'parts')
    first.on_step = lambda step, total: step == 6 and first.stop()
    assert first.fit(np.arange(60), np.arange(60, 90)).stopped
    rest = make(tmp_path / 'parts').fit(np.arange(60), np.arange(60, 90), resume=True)
    assert [e.train_loss for e in rest.history] == pytest.approx([e.train_loss for e in whole.history], abs=1e-6)


def test_what_cannot_be_noised_is_refused_before_anything_runs(tmp_path):
    for bad in (dict(augment=1.), dict(augment=-.1), dict(augment=.1, augment_by='synonyms')):
        with pytest.raises(ValueError): TrainConfig(**bad)
    from optkit.augment import check_augment
    from types import SimpleNamespace
    import torch
    for store, device in ((SimpleNamespace(task='causal', tokens=torch.zeros(1)), 'cpu'), (SimpleNamespace(task='classification', tokens=torch.zeros(1)), 'cuda')):
        with pytest.raises(InputError, match='augment'): check_augment(.1, store, device)
        check_augment(0., store, device)
    assert TrainConfig().augment == 0 and 'augment' not in ROUNDING_ONLY_FIELDS


def test_rows_without_frames_swap_no_token_with_their_neighbours():
    tokens, offsets = np.arange(40, dtype=np.int32), np.arange(0, 41, 4)
    out = noised(tokens, np.zeros(40, dtype=bool), .9, 'swap', np.random.default_rng(0), offsets)
    assert (out != tokens).any() and all(sorted(out[a:b]) == [*range(a, b)] for a, b in zip(offsets, offsets[1:]))
    lengths = np.full(10, 4)
    store = TokenStore(torch.from_numpy(tokens), torch.from_numpy(offsets), labels=torch.zeros(10, dtype=torch.long), type_ids=None, lengths=lengths, classes=('a', 'b'), max_length=4, pad_id=0, full_lengths=lengths)
    for epoch in range(1, 6):
        made = augmented(store, np.arange(10), .9, 'swap', 0, epoch).tokens.numpy()
        assert all(sorted(made[a:b]) == [*range(a, b)] for a, b in zip(offsets, offsets[1:]))


@pytest.mark.parametrize('by', AUGMENTS)
@pytest.mark.parametrize('share', [.05, .1])
def test_as_many_tokens_change_as_the_share_says(by, share):
    "Of 20,000 different tokens in a row; a swap moves two, and a few overlap"
    tokens = np.arange(20_000, dtype=np.int32)
    found = noised(tokens, np.zeros(20_000, dtype=bool), share, by, np.random.default_rng(0))
    assert .85 * share < (found != tokens).mean() < 1.1 * share
