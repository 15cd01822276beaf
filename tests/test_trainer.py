"Schedules, metrics and runs against transformers, scikit-learn and plain loops"
import json, math
from dataclasses import asdict, fields, replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, strategies as st

from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import LAYOUTS, sample_order, steps
from optkit.models import example_model
from optkit.hardware import hardware_with
from optkit.metrics import METRICS, score, signed
from optkit.config import lr_factor, SCHEDULES, TrainConfig
from optkit.build import make_engine
from optkit.trainer import FitResult, fold_runner, Trainer

torch.set_num_threads(1)
HERE = hardware_with(None)
ROWS, TRAIN, VALID = 90, np.arange(60), np.arange(60, 90)
BASE = TrainConfig(epochs=3, lr=3e-3, effective_batch=16, precision='fp32')


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(ROWS), word_tokenizer(), 48, progress=False)


@pytest.fixture(scope='module')
def engine(): return make_engine(example_model(), BASE, HERE)


# --- schedules

def theirs(schedule, total, warmup_steps):
    "The learning rate of each step under transformers"
    from transformers import get_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.)
    name = 'constant_with_warmup' if schedule == 'constant' else schedule
    scheduler, out = get_scheduler(name, optimizer, warmup_steps, total), []
    for _ in range(total + 1):
        out.append(optimizer.param_groups[0]['lr'])
        optimizer.step(); scheduler.step()
    return out


@pytest.mark.parametrize('total', [1, 2, 7, 100, 333])
@pytest.mark.parametrize('warmup', [0., .06, .1, .5, .9])
@pytest.mark.parametrize('schedule', SCHEDULES)
def test_schedules_are_those_of_transformers(schedule, warmup, total):
    "The same after the warm-up; in it one step ahead, since transformers spends the first step at a learning rate of 0"
    first = math.ceil(warmup * total)
    plain, found = theirs(schedule, total, first), [lr_factor(n, total, warmup, schedule) for n in range(total + 1)]
    if first < total: assert found[first:] == pytest.approx(plain[first:], abs=1e-9)  # else the warm-up never ends
    for n in range(first): assert found[n] == pytest.approx(plain[n + 1] if n + 1 < first else 1.) and found[n] > 0 and found[n] == pytest.approx((n + 1) / first)
    zero = [lr_factor(n, total, warmup, schedule, from_zero=True) for n in range(total + 1)]
    assert zero[:first] == pytest.approx(plain[:first], abs=1e-9) and zero[first:] == found[first:]
    if schedule != 'constant' and first < total: assert found[total] == pytest.approx(0, abs=1e-12)


@given(st.integers(1, 2000), st.floats(0, .99), st.sampled_from(SCHEDULES))
def test_any_schedule_is_positive_and_has_one_peak(total, warmup, schedule):
    found = [lr_factor(n, total, warmup, schedule) for n in range(total)]
    top = found.index(max(found))
    assert all(0 < f <= 1 for f in found) and found[:top + 1] == sorted(found[:top + 1]) and found[top:] == sorted(found[top:], reverse=True) and max(found) == 1


@pytest.mark.parametrize('effective, physical', [(16, None), (16, 3), (7, 4), (60, 60), (100, None)])
def test_the_run_follows_the_schedule_to_its_last_update(store, engine, monkeypatch, effective, physical):  # huggingface/transformers#21521
    config = replace(BASE, effective_batch=effective, physical_batch=physical, warmup=.2, schedule='linear')
    rates, real = [], engine.step
    monkeypatch.setattr(engine, 'step', lambda *a: (rates.append({g['lr'] for g in engine.optimizer.param_groups}), real(*a))[1], raising=False)
    seen = []
    Trainer(engine, store, config, on_step=lambda done, total: seen.append((done, total))).fit(TRAIN, VALID)
    total = 3 * math.ceil(60 / effective)
    first = math.ceil(.2 * total)
    by_hand = [3e-3 * ((n + 1) / first if n < first else (total - n) / (total - first)) for n in range(total)]
    assert all(len(r) == 1 for r in rates) and [r.pop() for r in rates] == pytest.approx(by_hand) and seen == [(n + 1, total) for n in range(total)]


# --- metrics

def plain_metrics(logits, truth):
    "By hand, without scikit-learn"
    classes, found = logits.shape[1], logits.argmax(1)
    f1 = []
    for c in sorted(set(truth) | set(found)):
        tp, fp, fn = sum((found == c) & (truth == c)), sum((found == c) & (truth != c)), sum((found != c) & (truth == c))
        f1.append(2 * tp / (2 * tp + fp + fn))
    shifted = logits - logits.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    def area(values, positive):
        pairs = [(a > b) + .5 * (a == b) for a in values[positive] for b in values[~positive]]
        return np.mean(pairs)
    auroc = math.nan if len(set(truth)) < classes else area(p[:, 1], truth == 1) if classes == 2 else np.mean([area(p[:, c], truth == c) for c in range(classes)])
    c = np.array([[sum((truth == i) & (found == j)) for j in range(classes)] for i in range(classes)], dtype=float)
    t, q, n = c.sum(1), c.sum(0), c.sum()
    below = math.sqrt((n * n - (q ** 2).sum()) * (n * n - (t ** 2).sum()))
    return dict(macro_f1=np.mean(f1), accuracy=np.mean(found == truth), auroc=auroc, loss=-np.log(p[np.arange(len(truth)), truth]).mean(),
                matthews=(np.trace(c) * n - (t * q).sum()) / below if below else 0.)


@pytest.mark.parametrize('classes', [2, 3, 5])
@pytest.mark.parametrize('rows', [6, 40, 200])
def test_metrics_against_a_hand_computation(classes, rows):
    rng = np.random.default_rng(classes * rows)
    truth = np.r_[np.arange(classes), rng.integers(0, classes, rows - classes)]
    logits = rng.normal(size=(rows, classes)).astype(np.float32) + 1.5 * np.eye(classes, dtype=np.float32)[truth]
    found, plain = score(torch.from_numpy(logits), torch.from_numpy(truth)), plain_metrics(logits.astype(float), truth)
    assert plain.keys() <= found.keys() <= set(METRICS) and {k: found[k] for k in plain} == pytest.approx(plain, abs=1e-5)
    assert score(torch.from_numpy(logits).bfloat16(), torch.from_numpy(truth))['loss'] == pytest.approx(plain['loss'], rel=.02)


def test_metrics_of_odd_rows():
    logits = torch.tensor([[2., 0.], [3., 1.], [0., 1.]])
    one = score(logits, torch.tensor([0, 0, 0]))
    assert math.isnan(one['auroc']) and one['matthews'] == 0 and one['accuracy'] == pytest.approx(2 / 3)
    broken = score(torch.tensor([[math.nan, 0.], [0., 1.]]), torch.tensor([0, 1]))
    assert math.isnan(broken['loss']) and math.isnan(broken['auroc'])
    assert score(logits, torch.tensor([0, 1, 1]), ('accuracy',)) == dict(accuracy=pytest.approx(2 / 3))
    huge = score(torch.tensor([[1e30, -1e30, 0.], [-1e30, 0., 1e30], [0., 1e30, 0.]]), torch.tensor([0, 2, 1]))
    assert huge['auroc'] == 1 and huge['loss'] == 0
    assert signed('loss', .5) == -.5 and all(signed(m, .5) == .5 for m in METRICS if m != 'loss')


# --- configuration

@pytest.mark.parametrize('changes, said', [
    (dict(schedule='step'), "schedule is 'step', expected one of"), (dict(metric='bleu'), "metric is 'bleu'"), (dict(epochs=0), 'epochs is 0, expected at least 1'),
    (dict(effective_batch=0), 'effective_batch'), (dict(physical_batch=0), 'physical_batch'), (dict(eval_batch=0), 'eval_batch'), (dict(patience=0), 'patience'),
    (dict(weight_decay=-1), 'weight_decay'), (dict(weight_decay=math.nan), 'weight_decay'), (dict(max_grad_norm=-1), 'max_grad_norm'), (dict(warmup=1.), 'warmup'),
    (dict(warmup=-.1), 'warmup'), (dict(label_smoothing=1.), 'label_smoothing'), (dict(lr=0), 'lr is 0'), (dict(lr=math.nan), 'lr is nan'), (dict(lr=math.inf), 'lr is inf'),
    (dict(layout='grouped'), "layout is 'grouped'"), (dict(epochs=2.5), 'epochs is 2.5'),
    (dict(effective_batch=8.5), 'effective_batch is 8.5'), (dict(lr='1e-4'), "lr is '1e-4', expected a number"), (dict(fused='no'), "fused is 'no', expected true or false"),
    (dict(compile=True), 'compile is True, expected a text or none'), (dict(epochs=None), 'epochs is None, expected a whole number'), (dict(epochs=True), 'epochs is True'),
    (dict(betas=.9), 'betas is 0.9, expected a tuple'), (dict(betas=('a', 'b')), 'two shares'), (dict(class_weights=('a', 'b')), 'a number a class')], ids=str)
def test_a_configuration_that_cannot_be_is_refused(changes, said):
    with pytest.raises(InputError, match=said): replace(BASE, **changes)


def test_a_configuration_survives_json():
    config = TrainConfig(lr=1e-4, patience=2, physical_batch=8, precision='bf16', compile='default', layout='full')
    assert TrainConfig.from_json(config.to_json()) == config and json.loads(config.to_json()) == json.loads(json.dumps(config.values())) and TrainConfig(**asdict(config)) == config
    numpy = TrainConfig(lr=np.float32(.5), seed=np.int64(3), betas=[np.float32(.5), .9], class_weights=np.array([1., 2.]))
    assert numpy == TrainConfig(lr=.5, seed=3, betas=(.5, .9), class_weights=(1., 2.)) and TrainConfig.from_json(numpy.to_json()) == numpy
    with pytest.raises(ValueError): TrainConfig.from_json(config.to_json().replace('"linear"', '"step"'))


def test_the_engine_is_what_the_configuration_asks_for():
    made = make_engine(example_model(), TrainConfig(precision='bf16', fused=False, zero_grad_none=False, max_grad_norm=.3, label_smoothing=.2), HERE)
    group = made.optimizer.param_groups[0]
    assert made.precision.compute.value == 'bf16' and (made.zero_grad_none, made.max_grad_norm, made.label_smoothing) == (False, .3, .2) and not group['fused'] and group['foreach']
    assert make_engine(example_model(), TrainConfig(), HERE).optimizer.param_groups[0]['fused']
    for wrong in (dict(precision='fp16'), dict(tf32=True), dict(attention='flash_attention_3')):
        with pytest.raises(InputError, match='was asked for'): make_engine(example_model(), TrainConfig(**wrong), HERE)


def test_an_engine_takes_attention_and_peak_by_the_format_of_the_weights(monkeypatch):
    from optkit.cards import known_gpu
    from optkit.hardware import hardware_with
    made = []
    def engine(model, precision, **_): made.append(precision); return type('Engine', (), dict(model=model))()
    monkeypatch.setattr('optkit.build.Engine', engine)
    card = hardware_with(known_gpu('H200'))
    peaks = [make_engine(model, TrainConfig(precision='fp32'), card).peak for model in (example_model(), example_model().bfloat16())]
    assert [p.sdpa.value[0] for p in made] == ['efficient', 'flash'] and peaks == [card.gpu.peak['fp32'], card.gpu.peak['bf16']]


# --- runs

def test_fit_learns_and_leaves_the_best_weights(store, engine):
    result = Trainer(engine, store, replace(BASE, epochs=6)).fit(TRAIN, VALID)
    scores = [e.score for e in result.history]
    assert isinstance(result, FitResult) and result.score == max(scores) > .8 and result.best_epoch == scores.index(max(scores)) + 1 and len(scores) == 6
    again = score(engine.predict(store, VALID), store.labels[torch.as_tensor(VALID)])
    assert again == pytest.approx(result.history[result.best_epoch - 1].metrics) and result.steps == 6 * 4 and not result.stopped_early
    assert result.history[0].train_loss > result.history[-1].train_loss and f'macro_f1 {result.score:.4f} at epoch {result.best_epoch} of 6' in repr(result)
    assert result._repr_html_().count('<tr>') == 7


def test_the_best_epoch_is_not_the_last(store, engine):
    "A learning rate that ruins the model later: the weights in the engine are still those of the best epoch"
    result = Trainer(engine, store, replace(BASE, epochs=8, lr=2e-2, schedule='constant', metric='loss')).fit(TRAIN, VALID)
    assert result.best_epoch < 8 and result.score == max(e.score for e in result.history) == -min(e.valid_loss for e in result.history)
    assert score(engine.predict(store, VALID), store.labels[torch.as_tensor(VALID)])['loss'] == pytest.approx(-result.score)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_epochs_fit_and_refit_are_the_same_training(store, engine, layout):
    engine.model.eval()
    config = replace(BASE, layout=layout, physical_batch=5)
    fit = Trainer(engine, store, config).fit(TRAIN, VALID)
    weights = {k: v.clone() for k, v in engine.model.state_dict().items()}
    epochs = list(Trainer(engine, store, config).epochs(TRAIN, VALID))
    last = {k: v.clone() for k, v in engine.model.state_dict().items()}
    losses = Trainer(engine, store, config).refit(TRAIN)
    assert [e.train_loss for e in epochs] == [e.train_loss for e in fit.history] == losses and [e.score for e in epochs] == [e.score for e in fit.history]
    assert all(torch.equal(v, last[k]) for k, v in engine.model.state_dict().items())
    assert (fit.best_epoch == 3) == all(torch.equal(v, last[k]) for k, v in weights.items())


def test_a_refit_ends_with_the_moving_average(store, tmp_path):
    "What it is scored with is what is saved"
    config = replace(BASE, ema=.9)
    engine = make_engine(example_model(dropout=0.), config, HERE)
    trainer = Trainer(engine, store, config, folder=tmp_path / 'run')
    trainer.refit(TRAIN)
    kept = type(engine.model).from_pretrained(tmp_path / 'run' / 'model')
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), engine.model.parameters()))
    assert all(torch.equal(p, engine.average[n]) for n, p in engine.model.named_parameters() if n in engine.average) and engine.average
    plain = make_engine(example_model(dropout=0.), BASE, HERE)
    Trainer(plain, store, BASE).refit(TRAIN)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept.parameters(), plain.model.parameters())), 'the average is not the last weights'


@pytest.mark.parametrize('made', [list, torch.as_tensor, pd.Index, pd.Series, range], ids=lambda m: m.__name__)
def test_rows_may_be_any_sequence(store, engine, made, recwarn):
    of = lambda rows: range(rows[0], rows[-1] + 1) if made is range else made(rows)
    found, plain = Trainer(engine, store, BASE).fit(of(TRAIN), of(VALID)), Trainer(engine, store, BASE).fit(TRAIN, VALID)
    assert [e.score for e in found.history] == [e.score for e in plain.history] and not [w for w in recwarn if 'writable' in str(w.message)]


def test_what_cannot_train_is_refused_before_anything_is_written(store, tmp_path):
    with pytest.raises(InputError, match='Linear is no model of transformers'): make_engine(torch.nn.Linear(2, 2), BASE, HERE)
    frozen = make_engine(example_model().requires_grad_(False), BASE, HERE)
    with pytest.raises(InputError, match='no weight of BertForSequenceClassification trains'): Trainer(frozen, store, BASE, folder=tmp_path / 'run').fit(TRAIN, VALID)
    assert not (tmp_path / 'run').exists()


def test_a_run_is_a_plain_loop(store):
    "The loop written out with torch alone, dropout included"
    config = replace(BASE, epochs=2, warmup=.25, layout='full', seed=3, weight_decay=.1)
    found = Trainer(make_engine(example_model(), config, HERE), store, config).fit(TRAIN, VALID)
    model, losses, done = example_model(), [], 0
    optimizer = torch.optim.AdamW([dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=.1), dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.)],
                                  lr=1., fused=True)
    table, tokenizer = example_table(ROWS), word_tokenizer()
    torch.manual_seed(3)
    for epoch in (1, 2):
        model.train()
        total, order = 0., sample_order(TRAIN, 3, epoch)
        for n in range(0, 60, 16):
            rows = order[n:n + 16]
            batch = tokenizer([table.texts[r] for r in rows], [table.pairs[r] for r in rows], truncation=True, max_length=48, padding='max_length', return_tensors='pt')
            for group in optimizer.param_groups: group['lr'] = 3e-3 * ((done + 1) / 2 if done < 2 else (8 - done) / 6)
            loss = torch.nn.functional.cross_entropy(model(**batch).logits, torch.as_tensor(table.labels[rows]))
            optimizer.zero_grad(); loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step()
            total, done = total + loss.item() * len(rows), done + 1
        losses.append(total / 60)
    assert [e.train_loss for e in found.history] == pytest.approx(losses, abs=1e-4)


def test_seeds_matter_and_repeat(store, engine):
    a, b, c = (Trainer(engine, store, replace(BASE, seed=s)).fit(TRAIN, VALID) for s in (0, 1, 0))
    assert [e.train_loss for e in a.history] == [e.train_loss for e in c.history] != [e.train_loss for e in b.history]


def scripted(monkeypatch, scores, losses=None):
    "Epochs whose scores are given"
    real, given_scores = Trainer._evaluate, iter(scores)
    def evaluate(self, valid, epoch, loss, *rest): return replace(real(self, valid, epoch, loss, *rest), score=next(given_scores))
    monkeypatch.setattr(Trainer, '_evaluate', evaluate)


@pytest.mark.parametrize('patience, scores, epochs, best', [
    (1, [.5, .4, .9], 2, 1), (2, [.5, .4, .6, .5, .5, .9], 5, 3), (2, [.5, .5, .5, .9], 3, 1), (3, [.1, .2, .3, .4], 4, 4), (None, [.5, .4, .3, .2], 4, 1), (2, [math.nan, .3, .2, .1, .9], 4, 2)])
def test_early_stopping(store, engine, monkeypatch, patience, scores, epochs, best):
    scripted(monkeypatch, scores)
    result = Trainer(engine, store, replace(BASE, epochs=len(scores), patience=patience)).fit(TRAIN[:16], VALID)
    assert (len(result.history), result.best_epoch) == (epochs, best) and result.stopped_early == (epochs < len(scores)) and result.steps == epochs


def test_a_loss_that_is_not_a_number_ends_the_run(store, engine):
    with pytest.raises(FloatingPointError, match=r'not a number in epoch 1 \(lr 1e\+30, fp32\); lower the learning rate') as caught:
        Trainer(engine, store, replace(BASE, lr=1e30, warmup=0)).fit(TRAIN, VALID)
    assert '\n' not in str(caught.value)
    with pytest.raises(FloatingPointError, match='not a number in epoch 1 of the refit'): Trainer(engine, store, replace(BASE, lr=1e30, warmup=0)).refit(TRAIN)
    assert math.isfinite(Trainer(engine, store, BASE).fit(TRAIN, VALID).score), 'the engine recovers'


def test_a_run_that_breaks_later_keeps_its_best_epoch(store, engine, monkeypatch):
    real, count = engine.step, []
    def step(*args):
        count.append(1)
        if len(count) == 9:  # the first step of the third epoch
            for p in engine.model.parameters(): p.data.fill_(math.nan)
        return real(*args)
    monkeypatch.setattr(engine, 'step', step, raising=False)
    result = Trainer(engine, store, replace(BASE, epochs=5, recover=False)).fit(TRAIN, VALID)
    assert len(result.history) == 3 and math.isnan(result.history[2].score) and result.best_epoch in (1, 2) and result.score == max(e.score for e in result.history[:2])
    assert all(torch.isfinite(p).all() for p in engine.model.parameters())


def test_a_metric_that_these_rows_cannot_have_is_not_blamed_on_the_loss(store, engine):
    one = np.array([r for r in VALID if store.labels[r] == 0])
    with pytest.raises((InputError, FloatingPointError), match='auroc'): Trainer(engine, store, replace(BASE, epochs=1, metric='auroc')).fit(TRAIN, one)
    with pytest.raises(InputError, match='the custom metric gave no finite number on these 30 rows'): Trainer(engine, store, replace(BASE, epochs=1, metric='custom'), custom=lambda logits, labels: math.nan).fit(TRAIN, VALID)


def test_no_rows(store, engine):
    for train, valid in ((TRAIN[:0], VALID), (TRAIN, VALID[:0])):
        with pytest.raises(InputError, match='rows to train on'): Trainer(engine, store, BASE).fit(train, valid)


@pytest.mark.parametrize('change, said', [(lambda r: np.isin(np.arange(90), r), 'found 1 dimensions of bool; for a mask pass np.flatnonzero'), (lambda r: r.astype(float), 'float64'), (lambda r: r[None], '2 dimensions'), (lambda r: {*r.tolist()}, '0 dimensions')])
def test_rows_that_are_no_row_numbers_are_refused_before_anything_is_written(store, engine, tmp_path, change, said):
    for which, given in (('train', (change(TRAIN), VALID)), ('evaluate', (TRAIN, change(VALID)))):
        with pytest.raises(InputError, match=f'rows to {which}: .*{said}'): Trainer(engine, store, BASE, folder=tmp_path / 'run').fit(*given)
    with pytest.raises(InputError, match='fit needs rows to evaluate on.*refit'): Trainer(engine, store, BASE, folder=tmp_path / 'run').fit(TRAIN, None)
    assert not (tmp_path / 'run').exists()


def test_callbacks_see_each_epoch_and_may_end_the_run(store, engine):
    seen = []
    Trainer(engine, store, BASE).fit(TRAIN, VALID, on_epoch=seen.append)
    assert [e.epoch for e in seen] == [1, 2, 3]
    def stop(epoch): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): Trainer(engine, store, BASE).fit(TRAIN, VALID, on_epoch=stop)
    assert Trainer(engine, store, BASE).fit(TRAIN, VALID).history[0].train_loss == seen[0].train_loss


# --- the runner of a search

FOLDS = [(np.arange(30, 90), np.arange(30)), (np.r_[np.arange(30), np.arange(60, 90)], np.arange(30, 60))]


def test_a_fold_of_the_runner_is_a_fit(store, engine):
    runner = fold_runner(engine, store, FOLDS, BASE)
    params = dict(lr=1e-3, weight_decay=.1, epochs=2, effective_batch=8, label_smoothing=.1, warmup=.2, schedule='cosine')
    for fold in (0, 1, 0):
        fit = Trainer(engine, store, replace(BASE, **params)).fit(*FOLDS[fold])
        assert list(runner(params, fold)) == [e.score for e in fit.history]


def test_an_unknown_parameter_is_refused(store, engine):
    with pytest.raises(InputError, match=r"TrainConfig has no \['dropout', 'momentum'\].*'lr'"): next(iter(fold_runner(engine, store, FOLDS, BASE)(dict(lr=1e-3, momentum=.9, dropout=.1), 0)))
    with pytest.raises(ValueError, match='lr is -1'): next(iter(fold_runner(engine, store, FOLDS, BASE)(dict(lr=-1), 0)))


@pytest.mark.parametrize('change', [dict(max_grad_norm=1e-9), dict(precision='bf16'), dict(fused=False), dict(zero_grad_none=False)], ids=str)
def test_what_the_engine_was_built_with_cannot_be_searched_in_silence(store, change):
    "Either it takes effect or it is refused; a study over a switch that does nothing finds noise"
    config = replace(BASE, metric='loss', epochs=1)
    engine = make_engine(example_model(), config, HERE)
    try: found = list(fold_runner(engine, store, FOLDS, config)(change, 0))
    except InputError: return
    built = engine.max_grad_norm, engine.precision.compute.value # the next run resets it
    expected = [e.score for e in Trainer(make_engine(example_model(), replace(config, **change), HERE), store, replace(config, **change)).epochs(*FOLDS[0])]
    plain = list(fold_runner(engine, store, FOLDS, config)({}, 0))
    assert found == expected and built == (change.get('max_grad_norm', 1.), change.get('precision', 'fp32')), (found, expected, plain)
    assert engine.zero_grad_none == change.get('zero_grad_none', True) and engine.optimizer.param_groups[0].get('fused') == change.get('fused', True)
