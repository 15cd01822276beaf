"Whole runs of each task in each layout against a plain loop written out here: loss, clipping, decay groups, schedule, uneven micro-batches, last windows, weights of classes"
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from sklearn.metrics import f1_score, r2_score, roc_auc_score

from optkit import engine as engine_module
from optkit.base import InputError
from optkit.table import IGNORED
from optkit.store import TokenStore
from optkit.steps import LAYOUTS, MicroBatch, Step
from optkit.store import with_labels
from optkit.engine import Engine, step_weight
from optkit.hardware import hardware_with
from optkit.metrics import score, TASK_METRICS
from optkit.config import lr_factor, TrainConfig
from optkit.build import balanced_weights, make_engine
from optkit.trainer import Trainer

torch.set_num_threads(1)
HERE = hardware_with(None)
SMALL = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64, pad_token_id=0)
STILL = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
TASKS = ('binary', 'classification', 'multilabel', 'regression', 'numbers', 'tokens', 'causal')
ROWS = 46 # 8 a step: the sixth holds 6


def model_of(task):
    torch.manual_seed(1)
    if task == 'causal': return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1, bos_token_id=1, eos_token_id=2))
    head = transformers.BertForTokenClassification if task == 'tokens' else transformers.BertForSequenceClassification
    outputs = dict(binary=2, classification=3, multilabel=4, regression=1, numbers=2, tokens=3)[task]
    return head(transformers.BertConfig(**SMALL, **STILL, num_labels=outputs))


def store_of(task, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.3, .7, rows), 2, 40).astype(int)
    ends, total = np.concatenate([[0], np.cumsum(lengths)]), int(lengths.sum())
    kinds = rng.integers(0, 3, rows)
    tokens = np.where(rng.random(total) < .5, 4 + 15 * np.repeat(kinds, lengths) + rng.integers(0, 15, total), rng.integers(4, 60, total)).astype(np.int32)
    labels, targets, classes = kinds.astype(np.int64), None, ('a', 'b', 'c')
    if task == 'binary': labels, classes = (kinds == 0).astype(np.int64), ('no', 'yes')
    if task == 'tokens': labels = np.where(rng.random(total) < .4, IGNORED, tokens % 3).astype(np.int32)
    if task == 'causal':
        labels = np.append(tokens[1:], IGNORED).astype(np.int32)
        labels[ends[1:] - 1] = IGNORED
    if task in ('tokens', 'causal'): targets = np.array([(labels[a:b] != IGNORED).sum() for a, b in zip(ends, ends[1:])])
    store = TokenStore(torch.from_numpy(tokens), torch.from_numpy(ends), torch.from_numpy(labels), None, lengths, classes, 48, 0, lengths, task if task in ('tokens', 'causal') else 'classification', targets)
    if task == 'multilabel': return with_labels(store, np.stack([kinds == k for k in range(3)] + [lengths > 10], 1).astype(int), 'multilabel')
    if task == 'regression': return with_labels(store, kinds - 1. + .1 * rng.normal(size=rows), 'regression')
    if task == 'numbers': return with_labels(store, np.stack([kinds - 1., np.log(lengths) - 2], 1), 'regression')
    return store


def loss_of(task, logits, labels, smoothing=0., weights=None):
    "The mean over a whole step, as torch has it"
    if task in ('regression', 'numbers'): return F.mse_loss(logits.squeeze(-1) if task == 'regression' else logits, labels)
    if task == 'multilabel': return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    if task in ('tokens', 'causal'): logits, labels = logits.flatten(0, 1), labels.flatten().long()
    return F.cross_entropy(logits, labels, weight=weights, label_smoothing=smoothing)


def padded(store, rows):
    width = int(store.lengths[rows].max())
    ids, mask, aims = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), IGNORED)
    for n, r in enumerate(rows):
        a, b = int(store.offsets[r]), int(store.offsets[r + 1])
        ids[n, :b - a], mask[n, :b - a] = store.tokens[a:b].long(), 1
        if store.targets is not None: aims[n, :b - a] = store.labels[a:b].long()
    return dict(input_ids=ids, attention_mask=mask), aims if store.targets is not None else store.labels[torch.as_tensor(rows)]


def plain_run(task, store, c, train, weights=None):
    "Losses of the steps, and the weights after them, with the least size of each one's gradient"
    model, done, losses, total = model_of(task), 0, [], c.epochs * math.ceil(len(train) / c.effective_batch)
    optimizer = torch.optim.AdamW([dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=c.weight_decay), dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.)],
                                  lr=1., betas=c.betas, eps=c.eps, fused=True)
    weights = None if weights is None else torch.tensor(weights)
    for epoch in range(1, c.epochs + 1):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(c.seed * 1_000_003 + epoch)).numpy()]
        for n in range(0, len(order), c.effective_batch):
            model.train()
            inputs, labels = padded(store, order[n:n + c.effective_batch])
            for g in optimizer.param_groups: g['lr'] = c.lr * lr_factor(done, total, c.warmup, c.schedule, c.warmup_steps)
            loss = loss_of(task, model(**inputs).logits, labels, c.label_smoothing, weights)
            optimizer.zero_grad(); loss.backward()
            for p in model.parameters(): p.least = torch.minimum(getattr(p, 'least', p.grad.abs()), p.grad.abs())
            if c.max_grad_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), c.max_grad_norm)
            optimizer.step()
            losses.append(loss.item()); done += 1
    return losses, model


def our_run(task, store, c, train, valid=None, **kwargs):
    engine, losses = make_engine(model_of(task), c, HERE), []
    real = engine.step
    engine.step = lambda *a: (losses.append(real(*a)), losses[-1])[1]
    trainer = Trainer(engine, store, c, **kwargs)
    epochs = list(trainer.epochs(train, valid))
    return [l.item() for l in losses], engine, epochs


def far(engine, model):
    "Most that a weight of any tensor differs, but for those whose gradient may be mere rounding: AdamW moves them too"
    own, sure = dict(engine.model.named_parameters()), {n: p.least > 1e-6 for n, p in model.named_parameters()}
    left_out = [n for n, s in sure.items() if not s.any()]
    assert all(any(part in n for part in ('.query.', '.key.', 'embed')) for n in left_out), left_out
    return max((own[n] - p).abs()[sure[n]].max().item() for n, p in model.named_parameters() if sure[n].any())


METRIC = dict(binary='macro_f1', classification='macro_f1', multilabel='micro_f1', regression='r2', numbers='loss', tokens='accuracy', causal='loss')
BASE = TrainConfig(epochs=2, lr=3e-3, effective_batch=8, precision='fp32', seed=4, eval_batch=7)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('task', TASKS)
def test_a_run_of_each_task_in_each_layout_is_a_plain_loop(task, layout):
    "The last step of an epoch holds 6 rows; micro-batches of 3 and 2 rows, or packs of at most 50 tokens"
    store, train = store_of(task), np.arange(ROWS)
    c = replace(BASE, layout=layout, physical_batch=3, max_tokens=50 if layout == 'packed' else None, metric=METRIC[task])
    losses, engine, epochs = our_run(task, store, c, train, np.arange(0, ROWS, 2))
    plain, model = plain_run(task, store, c, train)
    assert losses == pytest.approx(plain, abs=3e-5) and len(plain) == 12 and far(engine, model) < 1e-5
    counts = [store.weight(train)] if store.targets is not None else [ROWS]
    assert np.isfinite([e.score for e in epochs]).all() and epochs[0].train_loss != epochs[1].train_loss and counts[0]


@pytest.mark.parametrize('settings', [dict(schedule='cosine', warmup=.25), dict(schedule='constant', warmup=0.), dict(warmup_steps=5), dict(warmup_steps=0), dict(max_grad_norm=.05), dict(max_grad_norm=0.),
                                      dict(weight_decay=.5), dict(betas=(.5, .9)), dict(eps=1e-3), dict(effective_batch=5), dict(fused=False), dict(zero_grad_none=False), dict(epochs=3), dict(read_every=1)], ids=str)
@pytest.mark.parametrize('task', ['classification', 'causal'])
def test_every_setting_is_that_of_the_plain_loop(task, settings):
    store, c = store_of(task), replace(BASE, physical_batch=3, metric='loss', **settings)
    losses, engine, _ = our_run(task, store, c, np.arange(ROWS))
    plain, model = plain_run(task, store, c, np.arange(ROWS))
    assert losses == pytest.approx(plain, abs=5e-5) and far(engine, model) < 1e-5


@pytest.mark.parametrize('layout', ['sorted', 'packed'])
@pytest.mark.parametrize('task, smoothing, weights', [('binary', .1, None), ('classification', .2, (.5, 1., 3.)), ('tokens', .1, (.2, 1., 2.)), ('tokens', 0., (1., 0., 2.)), ('multilabel', 0., (.5, 1., 2., 4.)), ('causal', .1, None)])
def test_smoothing_and_class_weights_over_micro_batches(task, smoothing, weights, layout):
    "torch divides by the sum of the weights of a batch's targets: here that of the whole step"
    store, c = store_of(task), replace(BASE, layout=layout, physical_batch=3, label_smoothing=smoothing, class_weights=weights, metric=METRIC[task])
    losses, engine, _ = our_run(task, store, c, np.arange(ROWS))
    plain, model = plain_run(task, store, c, np.arange(ROWS), weights)
    assert losses == pytest.approx(plain, abs=5e-5) and far(engine, model) < 1e-5
    assert losses != pytest.approx(plain_run(task, store, replace(c, label_smoothing=0.), np.arange(ROWS))[0], abs=1e-3)


def test_smoothing_is_that_of_transformers():
    from transformers.trainer_pt_utils import LabelSmoother
    logits, labels = torch.randn(5, 7, 3), torch.randint(0, 3, (5, 7))
    labels[0, :4] = IGNORED
    want = LabelSmoother(epsilon=.2)(dict(logits=logits), labels)
    found = engine_module._summed('tokens', logits, labels, .2) / (labels != IGNORED).sum()
    assert found.item() == pytest.approx(want.item(), abs=1e-6)


@pytest.mark.parametrize('fault', ['lost', 'divisor', 'means'])
@pytest.mark.parametrize('task', ['multilabel', 'regression', 'tokens', 'causal'])
def test_planted_faults_are_seen_in_each_task(task, fault, monkeypatch):
    store, c = store_of(task), replace(BASE, physical_batch=3, epochs=1, metric=METRIC[task])
    plain, _ = plain_run(task, store, c, np.arange(ROWS))
    real = engine_module._loss
    if fault == 'lost':
        step = Engine.step
        monkeypatch.setattr(Engine, 'step', lambda self, store, rows: step(self, store, Step(self.cut(store, rows)[:-1], rows)))
    if fault == 'divisor': monkeypatch.setattr(engine_module, '_loss', lambda e, s, m, weight: real(e, s, m, weight + 1))
    if fault == 'means': # of micro-batches, the fault of huggingface/transformers#34242
        monkeypatch.setattr(engine_module, '_loss', lambda e, s, m, weight: real(e, s, m, 3 * step_weight(s, [m])))
    losses, *_ = our_run(task, store, c, np.arange(ROWS))
    assert losses != pytest.approx(plain, abs=2e-3)


def test_balanced_weights_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight
    store, rows = store_of('classification'), np.arange(5, 40)
    assert balanced_weights(store, rows) == pytest.approx(compute_class_weight('balanced', classes=np.arange(3), y=store.labels.numpy()[rows]))
    tokens = store_of('tokens')
    flat = np.concatenate([tokens.labels[tokens.offsets[r]:tokens.offsets[r + 1]].numpy() for r in rows])
    assert balanced_weights(tokens, rows) == pytest.approx(compute_class_weight('balanced', classes=np.arange(3), y=flat[flat >= 0]))
    many = store_of('multilabel')
    y = many.labels.numpy()[rows]
    assert balanced_weights(many, rows) == pytest.approx((len(y) - y.sum(0)) / y.sum(0))
    c = replace(BASE, class_weights='balanced', epochs=1)
    plain, _ = plain_run('classification', store, c, rows, balanced_weights(store, rows))
    assert our_run('classification', store, c, rows)[0] == pytest.approx(plain, abs=5e-5)


# --- metrics: the rows of a pass in their order, against scikit-learn on a model called row by row

@pytest.mark.parametrize('on_device', [True, False])
@pytest.mark.parametrize('task', TASKS)
def test_predictions_and_metrics_of_each_task(task, on_device):
    store, engine = store_of(task), make_engine(model_of(task), BASE, HERE)
    rows = np.random.default_rng(3).permutation(ROWS)[:31]
    found, truth = engine.predict(store, rows, 4, on_device), engine.answers(store, rows)
    engine.model.eval()
    single, answers = [], []
    for r in rows:
        inputs, labels = padded(store, [r])
        with torch.no_grad(): logits = engine.model(**inputs).logits[0]
        if store.targets is not None:
            keep = labels[0] != IGNORED
            logits, labels = logits[keep], labels[0][keep]
            if task == 'causal': logits = torch.stack([F.cross_entropy(logits, labels, reduction='none'), (logits.argmax(1) == labels).float()], 1)
            single.append(logits)
            answers.append(labels)
        else: single.append(logits[None]); answers.append(labels)
    single, answers = torch.cat(single), torch.cat(answers)
    assert torch.allclose(found, single, atol=1e-5) and torch.equal(truth.float(), answers.float())
    metrics = score(found, truth, task=store.task)
    assert tuple(metrics) == tuple(n for n in TASK_METRICS[store.task] if n != 'f1' or task == 'binary') and all(map(math.isfinite, metrics.values()))
    values, y = single.numpy(), answers.numpy()
    if task == 'causal':
        assert metrics['loss'] == pytest.approx(values[:, 0].mean(), abs=1e-5) and metrics['accuracy'] == pytest.approx(values[:, 1].mean()) and metrics['perplexity'] == pytest.approx(math.exp(values[:, 0].mean()), rel=1e-4)
    else: assert metrics['loss'] == pytest.approx(loss_of(task if task != 'tokens' else 'classification', single, answers.long() if task in ('tokens', 'binary', 'classification') else answers).item(), abs=1e-5)
    if task in ('binary', 'classification', 'tokens'): assert metrics['macro_f1'] == pytest.approx(f1_score(y, values.argmax(1), average='macro'))
    if task == 'multilabel': assert metrics['auroc'] == pytest.approx(roc_auc_score(y, values)) and metrics['micro_f1'] == pytest.approx(f1_score(y, values > 0, average='micro'))
    if task == 'regression': assert metrics['r2'] == pytest.approx(r2_score(y, values[:, 0]), abs=1e-4) and metrics['pearson'] == pytest.approx(np.corrcoef(y, values[:, 0])[0, 1], abs=1e-4)


@pytest.mark.parametrize('task', TASKS)
def test_a_pass_crosses_to_the_host_once(task, monkeypatch):
    store, engine = store_of(task), make_engine(model_of(task), BASE, HERE)
    engine.predict(store, np.arange(2))  # the first pass over a store looks at its ids
    crossed, real = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, 'cpu', lambda self, *a, **k: (crossed.append(self.shape), real(self, *a, **k))[1])
    for name in ('item', 'tolist', 'nonzero'): monkeypatch.setattr(torch.Tensor, name, lambda self, *a, name=name: pytest.fail(f'{name} waits for the device'))
    found, truth = engine.predict(store, np.arange(ROWS), 8), engine.answers(store, np.arange(ROWS))
    assert not crossed
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, 'cpu', lambda self, *a, **k: (crossed.append(self.shape), real(self, *a, **k))[1])
    score(found, truth, task=store.task)
    assert len(crossed) == 1


def test_a_metric_of_ones_own_decides_which_epoch_is_best():
    store, seen = store_of('classification'), []
    def custom(logits, labels):
        seen.append((logits.shape, labels.shape))
        assert np.bincount(labels).sum() == 16, 'classes are whole numbers'
        return 5. - len(seen)
    c = replace(BASE, metric='custom', epochs=3)
    result = Trainer(make_engine(model_of('classification'), c, HERE), store, c, custom=custom).fit(np.arange(30), np.arange(30, ROWS))
    assert result.best_epoch == 1 and result.score == 4 and seen == [((16, 3), (16,))] * 3 and result.history[1].metrics['custom'] == 3


@pytest.mark.parametrize('labels, task, said', [
    (np.linspace(0, 1.9, ROWS), 'classification', 'float64 of the shape .*expected .rows. of whole numbers'), (np.full(ROWS, np.nan), 'classification', 'whole numbers'), (np.full(ROWS, 'a'), 'classification', 'whole numbers'),
    (np.full(ROWS, 'a'), 'regression', 'expected finite numbers'), (np.full(ROWS, np.inf), 'regression', 'expected finite numbers'), (np.zeros((ROWS, 2, 2)), 'regression', 'expected finite numbers')], ids=str)
def test_labels_of_another_kind_are_refused(labels, task, said):
    with pytest.raises(InputError, match=said): with_labels(store_of('classification'), labels, task)
    assert with_labels(store_of('classification'), np.arange(ROWS) % 3 * 1., 'classification').labels.tolist() == [n % 3 for n in range(ROWS)]


@pytest.mark.parametrize('task', ['regression', 'causal', 'multilabel', 'tokens'])
def test_each_task_learns(task):
    store = store_of(task, 120, seed=5)
    c = replace(BASE, epochs=12, lr=5e-3, metric='loss', effective_batch=8)
    result = Trainer(make_engine(model_of(task), c, HERE), store, c).fit(np.arange(80), np.arange(80, 120))
    assert result.history[-1].train_loss < .8 * result.history[0].train_loss and result.score == max(e.score for e in result.history) == -min(e.valid_loss for e in result.history)


def test_train_and_evaluate_alternate_without_a_trace():
    "With dropout: looking changes neither random numbers nor weights"
    store, c = store_of('classification'), replace(BASE, epochs=1)
    torch.manual_seed(1)
    model = lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3))
    runs = []
    for look in (False, True):
        torch.manual_seed(1)
        engine = make_engine(model(), c, HERE)
        trainer = Trainer(engine, store, c, on_step=lambda *_: engine.predict(store, np.arange(20)) if look else None)
        runs.append((trainer.refit(np.arange(ROWS)), [p.detach().clone() for p in engine.model.parameters()]))
    assert runs[0][0] == runs[1][0] and all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1]))


@pytest.mark.parametrize('task', [t for t in TASKS if t != 'binary'])
def test_a_study_splits_the_rows_of_each_task(task):
    "A number of folds is enough: what they are stratified by follows from the task"
    from optkit.study import _as_runner
    from optkit.hpo import tune
    store, c = store_of(task), replace(BASE, epochs=1, metric=METRIC[task], patience=None)
    trainer = Trainer(make_engine(model_of(task), c, HERE), store, c)
    study = tune(trainer, lambda trial: dict(lr=trial.suggest_float('lr', 1e-4, 1e-2, log=True)), n_trials=2, folds=3, storage='memory', strategy='none', progress=False, say=lambda text: None)
    assert len(study.trials) == 2 and all(math.isfinite(t.value) for t in study.trials)
    assert len(_as_runner(trainer, 3, 0).renewed(7).folds) == 3


@pytest.mark.parametrize('kind', ['bert', 'roberta', 'gpt2', 'deberta', 'llama'])
def test_rows_beyond_the_positions_of_a_model_are_refused_before_the_first_step(kind):
    "On a GPU the lookup would end every later call of the process"
    small = SMALL | dict(max_position_embeddings=16)
    model = dict(bert=lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**small, num_labels=3)),
                 roberta=lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**small | dict(max_position_embeddings=17), num_labels=3)),  # they begin behind the padding token
                 gpt2=lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=16, pad_token_id=0, num_labels=3)),
                 deberta=lambda: transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**small, num_labels=3, relative_attention=True, position_biased_input=False, pos_att_type=['c2p', 'p2c'])),
                 llama=lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**small, num_key_value_heads=1, num_labels=3)))[kind]()
    store, c = store_of('classification'), replace(BASE, epochs=1)
    trainer = Trainer(make_engine(model, c, HERE), store, c)
    assert store.lengths.max() > 16
    fit = lambda: trainer.fit(np.arange(30), np.arange(30, ROWS))
    if kind in ('deberta', 'llama'): assert math.isfinite(fit().history[-1].valid_loss)
    else:
        with pytest.raises(InputError, match='has 16 positions; tokenise with max_length=16'): fit()
