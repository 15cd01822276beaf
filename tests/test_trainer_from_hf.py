"Three Trainer scripts of transformers as people write them, trained by optkit: the settings, the same result as theirs where nothing is random, and what could not be carried over"
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification, DataCollatorWithPadding, EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as TheirTrainer

from optkit.base import InputError
from optkit.table import IGNORED
from optkit.store import example_table, word_tokenizer
from optkit.models import example_model
from optkit.cards import known_gpu
from optkit.hardware import hardware_with
from optkit.hf import store_of
from optkit.status import status
from optkit.trainer import FitResult
from optkit.hf import from_hf

torch.set_num_threads(1)
HERE = hardware_with(None)


class Rows(torch.utils.data.Dataset):
    "A list of dicts, as a data set"
    def __init__(self, items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]


def pairs(n=96, classes=2, padding=False):
    table, tokenizer = example_table(n, classes), word_tokenizer()
    out = [dict(tokenizer(t, p, truncation=True, max_length=40, padding='max_length' if padding else False)) for t, p in zip(table.texts, table.pairs)]
    return tokenizer, Rows([dict(o, labels=int(l)) for o, l in zip(out, table.labels)])


def arguments(folder, **kwargs): return TrainingArguments(output_dir=str(folder), report_to='none', use_cpu=True, disable_tqdm=True, logging_steps=1, **kwargs)


# --- 1: a sequence classifier with everything one adds to it

def script_of_a_classifier(folder, **changes):
    tokenizer, rows = pairs()
    def compute_metrics(pred): return dict(agreement=float((pred.predictions.argmax(1) == pred.label_ids).mean()))
    args = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, per_device_eval_batch_size=16, num_train_epochs=14, learning_rate=3e-3, warmup_steps=2, lr_scheduler_type='cosine',
                weight_decay=.1, adam_beta2=.99, max_grad_norm=.5, label_smoothing_factor=.1, seed=3, eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True, metric_for_best_model='agreement')
    return TheirTrainer(model=example_model(dropout=0.), args=arguments(folder, **args | changes), train_dataset=Rows(rows.items[:64]), eval_dataset=Rows(rows.items[64:]), data_collator=DataCollatorWithPadding(tokenizer),
                        processing_class=tokenizer, compute_metrics=compute_metrics, callbacks=[EarlyStoppingCallback(early_stopping_patience=9)])


def test_a_classifier_script(tmp_path):
    theirs = script_of_a_classifier(tmp_path)
    ours = from_hf(theirs, HERE)
    c = ours.config
    assert (c.effective_batch, c.physical_batch, c.eval_batch, c.epochs, c.lr, c.schedule, c.warmup_steps, c.weight_decay, c.betas, c.max_grad_norm, c.label_smoothing, c.seed, c.patience, c.metric, c.precision) == (
        16, 4, 16, 14, 3e-3, 'cosine', 2, .1, (.9, .99), .5, .1, 3, 9, 'custom', 'fp32')
    assert ours.left_out == [] and len(ours.train) == 64 and ours.valid.tolist() == [*range(64, 96)] and 'Not carried over: nothing' in repr(ours)
    result = ours.fit()
    assert isinstance(result, FitResult) and result.score > .8 and result.history[0].train_loss > result.history[-1].train_loss
    logits = theirs.predict(theirs.eval_dataset)  # the weights are in their model
    assert logits.metrics['test_agreement'] == pytest.approx(result.score)


@pytest.mark.parametrize('schedule', [dict(lr_scheduler_type='constant', warmup_steps=0), dict(lr_scheduler_type='linear', warmup_steps=3)], ids=['constant', 'warm-up'])
def test_the_same_steps_as_theirs(tmp_path, schedule):
    "Full batches, so that no order matters: their losses are ours"
    same = dict(per_device_train_batch_size=64, gradient_accumulation_steps=1, num_train_epochs=6, optim='adamw_torch', **schedule)
    theirs, ours = script_of_a_classifier(tmp_path / 'a', **same), from_hf(script_of_a_classifier(tmp_path / 'b', **same), HERE)
    theirs.callback_handler.callbacks = [c for c in theirs.callback_handler.callbacks if not isinstance(c, EarlyStoppingCallback)]
    theirs.train()
    want = [l['loss'] for l in theirs.state.log_history if 'loss' in l]
    found = [e.train_loss for e in ours.trainer.epochs(ours.train, ours.valid)]
    assert len(want) == 6 and found == pytest.approx(want[:len(found)], abs=2e-4) and len(found) >= 3
    agreement = [l['eval_agreement'] for l in theirs.state.log_history if 'eval_agreement' in l]
    assert [e.metrics['custom'] for e in ours.trainer.position.history] == pytest.approx(agreement[:len(found)], abs=.04)


# --- 2: a regression on rows that are padded already, with what has no place here

class Weighted(TheirTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs): return super().compute_loss(model, inputs, return_outputs, **kwargs)

class Own(TrainerCallback): pass


@pytest.mark.parametrize('implementation, value', [('sdpa', 'flash'), ('eager', "the model's own")])
def test_a_run_says_which_attention_ran(tmp_path, implementation, value):
    "Looked up in a step, which the training does not notice"
    runs = []
    for folder in (tmp_path / 'run', None):
        theirs = script_of_a_classifier(tmp_path / 'theirs', num_train_epochs=2)
        theirs.model.set_attn_implementation(implementation)
        ours = from_hf(theirs, HERE, folder=folder)
        result = ours.fit()
        runs.append(([e.train_loss for e in result.history], [p.detach().clone() for p in theirs.model.parameters()]))
        assert (ours.attention is None) == (folder is None)
    assert runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1], runs[1][1]))
    check = next(c for c in status(run=tmp_path / 'run').checks if c.what == 'which backends are really on')
    assert check.ok and f'attention: {value} (what really ran in a training step' in check.why
    row = next(r for r in status(run=tmp_path / 'run', hardware=hardware_with(known_gpu('H100'))).rows if r.name == 'fused attention (SDPA)')
    assert (row.state == 'on') == (value == 'flash')


def script_of_a_regression(folder):
    _, rows = pairs(80, padding=True)
    items = [dict(r, labels=float(r['labels']) - .5) for r in rows.items]
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64, num_labels=1, problem_type='regression'))
    args = arguments(folder, per_device_train_batch_size=8, num_train_epochs=8, learning_rate=3e-3, lr_scheduler_type='polynomial', optim='adafactor', neftune_noise_alpha=5., max_steps=-1,
                     dataloader_drop_last=True, train_sampling_strategy='group_by_length', eval_strategy='steps', eval_steps=5, save_strategy='no')
    return Weighted(model=model, args=args, train_dataset=Rows(items[:60]), eval_dataset=Rows(items[60:]), callbacks=[Own()])


def test_a_regression_script_and_what_it_loses(tmp_path, caplog):
    ours = from_hf(script_of_a_regression(tmp_path), HERE)
    said = '\n'.join(ours.left_out)
    for part in ('neftune_noise_alpha=5.0', "lr_scheduler_type='polynomial': linear instead", "optim='adafactor': AdamW instead", 'dataloader_drop_last=True', "train_sampling_strategy='group_by_length'",
                 "eval_strategy='steps': evaluated after each epoch", 'load_best_model_at_end=False', 'callback Own', 'Weighted.compute_loss: overridden'): assert part in said and part in caplog.text, part
    assert len(ours.left_out) == 9, said
    assert ours.trainer.store.task == 'regression' and ours.trainer.store.lengths.max() < 41 and ours.trainer.store.lengths.min() < 15, 'their padding is gone'
    result = ours.fit()
    assert result.history[-1].train_loss < .5 * result.history[0].train_loss


# --- 3: a causal LM

def script_of_a_language_model(folder, evaluate=True):
    rng, tokenizer = np.random.default_rng(0), word_tokenizer()
    tokenizer.eos_token = '[SEP]'
    rows = Rows([dict(input_ids=[int(4 + (a + k * s) % 40) for k in range(n)], attention_mask=[1] * n) for a, s, n in zip(rng.integers(0, 40, 60), rng.integers(1, 3, 60), rng.integers(4, 20, 60))])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, pad_token_id=0))
    args = arguments(folder, per_device_train_batch_size=5, gradient_accumulation_steps=2, max_steps=40, learning_rate=5e-3, warmup_steps=.1, gradient_checkpointing=True, save_strategy='no', eval_strategy='epoch' if evaluate else 'no')
    return TheirTrainer(model=model, args=args, train_dataset=Rows(rows.items[:50]), eval_dataset=Rows(rows.items[50:]) if evaluate else None, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))


def test_a_language_model_script(tmp_path):
    theirs = script_of_a_language_model(tmp_path)
    ours = from_hf(theirs, HERE)
    c, store = ours.config, ours.trainer.store
    assert (c.epochs, c.effective_batch, c.physical_batch, c.warmup, c.metric, c.checkpointing) == (8, 10, 5, .1, 'loss', 'full') and store.task == 'causal'
    first = theirs.data_collator([theirs.train_dataset[0]])['labels'][0]
    assert store.labels[:store.lengths[0]].tolist() == [*first[1:].tolist(), IGNORED]
    before = theirs.evaluate()['eval_loss']
    result = ours.fit()
    after = theirs.evaluate()['eval_loss']
    assert result.history[-1].valid_loss < .8 * before and len(ours.left_out) == 1
    n = [len(theirs.eval_dataset[k]['input_ids']) - 1 for k in range(10)]
    each = []
    for k in range(10):
        with torch.no_grad(): each.append(theirs.model.eval()(**{k2: v for k2, v in theirs.data_collator([theirs.eval_dataset[k]]).items()}).loss.item())
    assert -result.score == pytest.approx(np.average(each, weights=n), abs=1e-4) and after == pytest.approx(-result.score, rel=.2)


def test_without_rows_to_evaluate_on(tmp_path):
    ours = from_hf(script_of_a_language_model(tmp_path, evaluate=False), HERE, epochs=3)
    losses = ours.fit()
    assert len(losses) == 3 and losses[-1] < losses[0] and ours.left_out == []


# --- what cannot be taken

def test_what_cannot_be_trained_is_refused(tmp_path):
    theirs = script_of_a_language_model(tmp_path)
    theirs.data_collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
    theirs.data_collator.mlm = True
    with pytest.raises(InputError, match='masked language modelling'): from_hf(theirs, HERE)
    theirs = script_of_a_classifier(tmp_path)
    theirs.train_dataset = Rows([dict(text='a b', label=0)])
    with pytest.raises(InputError, match="row 1 has no input_ids, only 'text', 'label'; tokenise the data set first"): from_hf(theirs, HERE)
    theirs.train_dataset = None
    with pytest.raises(InputError, match='no train_dataset'): from_hf(theirs, HERE)
    theirs = script_of_a_classifier(tmp_path)
    theirs.eval_dataset = dict(a=theirs.eval_dataset, b=theirs.eval_dataset)
    with pytest.raises(InputError, match=r'several eval_datasets \(a, b\)'): from_hf(theirs, HERE)


@pytest.mark.parametrize('kind', ['tokens', 'multilabel'])
def test_other_kinds_of_labels(tmp_path, kind):
    _, rows = pairs(40)
    config = transformers.BertConfig(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64, num_labels=3)
    if kind == 'tokens':
        model = transformers.BertForTokenClassification(config)
        items = [dict(r, labels=[IGNORED if t < 4 else t % 3 for t in r['input_ids']]) for r in rows.items]
    else:
        config.problem_type = 'multi_label_classification'
        model = transformers.BertForSequenceClassification(config)
        items = [dict(r, labels=[float(r['labels']), 1. - r['labels'], 1.]) for r in rows.items]
    theirs = TheirTrainer(model=model, args=arguments(tmp_path, num_train_epochs=2), train_dataset=Rows(items), eval_dataset=Rows(items[:10]))
    ours = from_hf(theirs, HERE)
    assert ours.trainer.store.task == kind and len(ours.fit().history) == 2


# --- what decides which epoch is best

BEST = dict(per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3, eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True)


def tagged(n=40):
    tokenizer, rows = pairs(n)
    return tokenizer, [dict(r, labels=[IGNORED if t < 4 else t % 3 for t in r['input_ids']]) for r in rows.items]


def script_of_a_tagger(folder, seen):
    "With a metric of whole rows, as those of names and other spans are"
    tokenizer, items = tagged()
    def compute_metrics(pred):
        seen.append([[(int(p), int(l)) for p, l in zip(ps, ls) if l != IGNORED] for ps, ls in zip(np.argmax(pred.predictions, axis=2), pred.label_ids)])
        return dict(first=float(np.mean([row[0][0] == row[0][1] for row in seen[-1]])))
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=64, num_labels=3))
    return TheirTrainer(model=model, args=arguments(folder, metric_for_best_model='first', **BEST), train_dataset=Rows(items[:30]), eval_dataset=Rows(items[30:]), data_collator=DataCollatorForTokenClassification(tokenizer), compute_metrics=compute_metrics)


def test_a_metric_of_tokens_sees_rows(tmp_path):
    seen = []
    theirs = script_of_a_tagger(tmp_path, seen)
    ours = from_hf(theirs, HERE)
    result = ours.fit()
    assert ours.left_out == [] and len(seen) == 2
    assert theirs.evaluate()['eval_first'] == pytest.approx(result.score)
    assert seen[-1] == seen[result.best_epoch - 1], 'the same outputs and labels, row by row'
    with pytest.raises(InputError, match='for its own 10 rows'): ours.trainer.fit(ours.train, ours.valid[:5])


@pytest.mark.parametrize('change', [None, lambda logits, labels: logits.argmax(-1)], ids=['logits', 'changed first'])
def test_a_metric_gets_what_theirs_gives_it(tmp_path, change):
    seen = []
    def compute_metrics(pred):
        seen.append((pred.predictions.shape, pred.label_ids.dtype))
        found = pred.predictions if change else pred.predictions.argmax(-1)
        return dict(least=float(np.bincount(pred.label_ids[found == pred.label_ids], minlength=2).min()))
    theirs = script_of_a_classifier(tmp_path, metric_for_best_model='least')
    theirs.compute_metrics, theirs.preprocess_logits_for_metrics = compute_metrics, change
    result = from_hf(theirs, HERE, epochs=2).fit()
    assert theirs.evaluate()['eval_least'] == result.score and set(seen) == {seen[-1]} and seen[-1][1] == np.int64
    theirs = script_of_a_classifier(tmp_path, metric_for_best_model='another')
    with pytest.raises(InputError, match="metric_for_best_model is 'another', but compute_metrics gives 'agreement'"): from_hf(theirs, HERE).fit()


def test_each_thing_that_decides_otherwise_is_said(tmp_path):
    class Mixed:
        def compute_loss(self, *args, **kwargs): return 2 * super().compute_loss(*args, **kwargs)
    class Below(Mixed, TheirTrainer): pass
    class Lowest(Below): pass
    tokenizer, rows = pairs(40)
    def said(kind=TheirTrainer, args={}, **kwargs):
        return from_hf(kind(model=example_model(), args=arguments(tmp_path, **BEST, **args), train_dataset=Rows(rows.items[:30]), eval_dataset=Rows(rows.items[30:]), data_collator=DataCollatorWithPadding(tokenizer), **kwargs), HERE).left_out
    model, metrics = example_model(), lambda pred: dict(f1=1.)
    sgd = torch.optim.SGD(model.parameters(), lr=.1)
    assert said() == []
    assert said(Lowest) == ['Lowest.compute_loss: overridden, not called']
    assert said(callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=.1)]) == ['early_stopping_threshold=0.1: any better score counts']
    assert said(optimizer_cls_and_kwargs=(torch.optim.SGD, dict(lr=.1))) == ['optimizer_cls_and_kwargs=SGD: AdamW is made from the arguments']
    assert said(optimizers=(None, torch.optim.lr_scheduler.ConstantLR(sgd))) == ['lr_scheduler=ConstantLR: one is made from the arguments']
    assert said(compute_metrics=metrics) == ['compute_metrics: not called, since metric_for_best_model names none of its figures; the loss decides']
    assert said(args=dict(label_smoothing_factor=.1)) == ['label_smoothing_factor=0.1: not in the loss of the evaluation']
    assert said(args=dict(include_for_metrics=['inputs'], metric_for_best_model='f1'), compute_metrics=metrics) == ["include_for_metrics=['inputs']"]


def test_a_language_model_learns_what_its_collator_gives(tmp_path):
    theirs = script_of_a_language_model(tmp_path)
    theirs.train_dataset = Rows([dict(r, labels=[IGNORED] * 2 + r['input_ids'][2:]) for r in theirs.train_dataset.items])
    theirs.compute_metrics = lambda pred: dict(f1=1.)
    ours = from_hf(theirs, HERE)
    want, store = theirs.data_collator([theirs.train_dataset[0]])['labels'][0], ours.trainer.store
    assert store.labels[:store.lengths[0]].tolist() == [*want[1:].tolist(), IGNORED], 'this collator makes labels of its own'
    assert ours.config.metric == 'loss' and 'compute_metrics: the logits of a language model are not kept; the loss decides' in ours.left_out


def test_a_stream_of_rows_is_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self): return iter(pairs(20)[1].items)
    with pytest.raises(InputError, match='train_dataset has no length'): from_hf(TheirTrainer(model=example_model(), args=arguments(tmp_path, max_steps=3), train_dataset=Stream()), HERE)


def test_each_gpu_that_a_process_sees_has_a_batch(tmp_path):
    theirs = script_of_a_classifier(tmp_path, max_steps=4)
    theirs.args._n_gpu = 2
    ours = from_hf(theirs, HERE)
    assert (ours.config.effective_batch, ours.config.physical_batch, ours.config.epochs, ours.left_out) == (32, 4, 2, [])


def test_no_clipping_is_carried_over(tmp_path): assert from_hf(script_of_a_classifier(tmp_path, max_grad_norm=None), HERE).config.max_grad_norm == 0


# --- what people's rows and arguments are like

ROW = dict(input_ids=[2, 5, 6, 3], attention_mask=[1] * 4, labels=1)

@pytest.mark.parametrize('row, said', [(dict(labels='yes'), "label 'yes', expected a whole number"), (dict(labels=.5), 'label 0.5, expected a whole number'), (dict(labels=float('nan')), 'label nan'), (dict(labels=None), 'has no label'),
                                       (dict(input_ids=[[2, 5, 6, 3]], attention_mask=[[1] * 4]), r'input_ids are \[\[2, 5, 6, 3\]\], expected one list of whole numbers a row'), (dict(input_ids=['w1', 'w2', 'w3', 'w4']), 'input_ids are'),
                                       (dict(input_ids=torch.tensor([[2, 5, 6, 3]])), 'return_tensors gives a batch'), (dict(attention_mask=[1] * 3), 'attention_mask are'), (dict(token_type_ids=[0] * 5), 'token_type_ids are'), (dict(input_ids=3), 'input_ids are 3'), (dict(input_ids=None), 'input_ids are None')], ids=range(11))
def test_a_row_that_is_none_is_named(row, said):
    with pytest.raises(InputError, match='row 2.*' + said): store_of([[ROW, {**ROW, **row}]], example_model(), 0)
    assert store_of([[ROW, {**ROW, 'labels': np.int64(0)}, {**ROW, 'labels': torch.tensor(1.)}]], example_model(), 0).labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize('outputs, labels, said', [(1, float('nan'), 'label nan, expected finite numbers'), (3, [1., 0.], r'label \[1.0, 0.0\], expected finite numbers, as many in each row'), (3, 'a', "label 'a'")], ids=range(3))
def test_labels_of_other_tasks_are_numbers_too(outputs, labels, said):
    with pytest.raises(InputError, match='row 2 has the ' + said): store_of([[dict(ROW, labels=[1., 0., 1.] if outputs > 1 else 2.5), dict(ROW, labels=labels)]], example_model(outputs), 0)


def test_tags_are_numbers():
    model = transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=3))
    with pytest.raises(InputError, match=r"row 1 has the labels \['O', 'O', 'O', 'O'\], expected one whole number a token"): store_of([[dict(ROW, labels=['O'] * 4)]], model, 0)


def test_a_checkpoint_at_each_share_of_the_steps(tmp_path):
    share = lambda **k: from_hf(script_of_a_classifier(tmp_path, save_strategy='steps', load_best_model_at_end=False, **k), HERE).config.save_every
    assert share(save_steps=.5) == 28 and share(save_steps=.3, max_steps=10) == 3 and share(save_steps=14) == 14  # of 14 epochs of 4 steps


def test_a_metric_that_is_made_batch_by_batch(tmp_path):
    def compute_metrics(pred, compute_result=False):
        assert isinstance(pred.predictions, torch.Tensor) and isinstance(pred.label_ids, torch.Tensor)
        return dict(agreement=float((pred.predictions.argmax(1) == pred.label_ids).float().mean())) if compute_result else {}
    theirs = script_of_a_classifier(tmp_path, per_device_eval_batch_size=64)
    theirs.compute_metrics, theirs.args.batch_eval_metrics = compute_metrics, True
    ours = from_hf(theirs, HERE, epochs=2)
    assert ours.left_out == [] and ours.fit().score == pytest.approx(theirs.evaluate()['eval_agreement'])


def test_a_metric_that_lacks_what_it_asked_for_says_so(tmp_path):
    theirs = script_of_a_classifier(tmp_path, include_for_metrics=['inputs'])
    theirs.compute_metrics = lambda pred: dict(agreement=float(len(pred.inputs)))
    with pytest.raises(InputError, match='compute_metrics failed .TypeError.*but not inputs .include_for_metrics.'): from_hf(theirs, HERE).fit()


def test_their_sum_over_micro_batches_is_said(tmp_path):
    "Of a model whose class takes keywords for its loss and does not divide by their number, a step of theirs is the sum over micro-batches: the same steps of AdamW, other gradients to clip"
    same = dict(per_device_train_batch_size=16, gradient_accumulation_steps=4, num_train_epochs=4, optim='adamw_torch', label_smoothing_factor=0., max_grad_norm=0., eval_strategy='no', save_strategy='no', load_best_model_at_end=False, lr_scheduler_type='linear', adam_epsilon=1e-12)
    theirs, ours = script_of_a_classifier(tmp_path / 'a', **same), from_hf(script_of_a_classifier(tmp_path / 'b', **same), HERE)
    said = [line for line in ours.left_out if line.startswith('gradient_accumulation_steps=4: ')]
    theirs.callback_handler.callbacks = [c for c in theirs.callback_handler.callbacks if not isinstance(c, EarlyStoppingCallback)]
    theirs.train()
    want, found = [l['loss'] for l in theirs.state.log_history if 'loss' in l], [e.train_loss for e in ours.trainer.epochs(ours.train, ours.valid)]
    assert [w / f for w, f in zip(want, found)] == pytest.approx([4. if said else 1.] * 4, rel=2e-3)
    for change in (dict(gradient_accumulation_steps=1), dict(label_smoothing_factor=.1)):
        assert not any('gradient_accumulation' in line for line in from_hf(script_of_a_classifier(tmp_path, **same | change), HERE).left_out)
    assert not any('gradient_accumulation' in line for line in from_hf(script_of_a_language_model(tmp_path), HERE).left_out)


def test_a_run_folder_without_rows_to_evaluate_on_holds_the_model(tmp_path):
    theirs = script_of_a_language_model(tmp_path, evaluate=False)
    from_hf(theirs, HERE, folder=tmp_path / 'run', epochs=2).fit()
    kept = type(theirs.model).from_pretrained(tmp_path / 'run' / 'model')
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), theirs.model.parameters()))


# --- what would have gone unnoticed

def test_a_collator_of_their_own_is_said(tmp_path):
    "A function too: it may do anything to a batch"
    trainer = script_of_a_classifier(tmp_path)
    base = trainer.data_collator
    def swapped(rows): return (batch := base(rows)) | dict(labels=1 - batch['labels'])
    trainer.data_collator = swapped
    assert from_hf(trainer, HERE).left_out == ['data_collator swapped: not called, rows are padded as they are']
    trainer.data_collator = transformers.default_data_collator
    assert from_hf(trainer, HERE).left_out == []


def test_a_metric_that_nobody_gives_is_said(tmp_path):
    trainer = script_of_a_classifier(tmp_path, metric_for_best_model='f1')
    trainer.compute_metrics = None
    ours = from_hf(trainer, HERE)
    assert ours.config.metric == 'loss' and ours.left_out == ["metric_for_best_model='f1': there is no compute_metrics that gives it; the loss decides", 'label_smoothing_factor=0.1: not in the loss of the evaluation']


def test_a_column_that_only_their_model_would_see_is_said(tmp_path):
    trainer = script_of_a_classifier(tmp_path)
    trainer.train_dataset = Rows([dict(r, position_ids=[*range(len(r['input_ids']))][::-1], note='x') for r in trainer.train_dataset.items])
    assert from_hf(trainer, HERE).left_out == ['column position_ids: not read']
    peft = pytest.importorskip('peft')
    trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(task_type='SEQ_CLS', target_modules=['query'])) # whose forward takes any keyword
    assert 'column position_ids: not read' in from_hf(trainer, HERE).left_out


def test_a_mask_with_holes_and_rows_that_are_no_dicts_are_refused():
    model = example_model()
    row = lambda mask: dict(input_ids=[2, 5, 6, 3], attention_mask=mask, labels=0)
    for mask in ([1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 0]): assert store_of([[row(mask)] * 2], model, 0).lengths.tolist() == [sum(mask)] * 2
    with pytest.raises(InputError, match='row 2: attention_mask hides tokens between others'): store_of([[row([1] * 4), row([1, 0, 1, 1])]], model, 0)
    with pytest.raises(InputError, match=r"row 1 is \(\[2, 3\], 0\), expected names with values"): store_of([[([2, 3], 0)]], model, 0)
    with pytest.raises(InputError, match='str is no Trainer of transformers'): from_hf('x', HERE)
