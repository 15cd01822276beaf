"What users of other tools reported: padding ids, saved configurations, class names, ids without an embedding. Each with the smallest input and the right value"
import re
from dataclasses import replace
from functools import partial, partialmethod

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments, pipeline
from transformers import Trainer as TheirTrainer

import optkit.job
from optkit.claims import bench_of, optimize
from optkit.cli import main
from optkit.data import InputError, MicroBatch, batch_of, table_from, tokenise, word_tokenizer
from optkit.engine import check_tokens, example_model, load_model, load_tokenizer, model_length, settle_config, with_labels
from optkit.folds import stratified_folds
from optkit.hardware import hardware_with
from optkit.hpo import tune
from optkit.job import Job, JobConfig
from optkit.ladder import default_rungs, measure_ladder
from optkit.status import model_shape
from optkit.timing import read_json
from optkit.trainer import TrainConfig, Trainer, fold_runner, from_hf, make_engine

torch.set_num_threads(1)
HERE = hardware_with(None)
CPU = TrainConfig(precision='fp32', epochs=1, lr=1e-3, effective_batch=16)
SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
CAUSAL = dict(SMALL, num_key_value_heads=1, head_dim=16, max_position_embeddings=64)
GPT2 = dict(vocab_size=204, n_embd=32, n_layer=1, n_head=2, n_positions=64)
FAMILIES = dict(Bert=dict(SMALL, max_position_embeddings=64), Roberta=dict(SMALL, max_position_embeddings=66, pad_token_id=1), DistilBert=dict(vocab_size=204, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=64),
                Electra=dict(SMALL, embedding_size=32, max_position_embeddings=64), DebertaV2=dict(SMALL, max_position_embeddings=64), GPT2=dict(GPT2, pad_token_id=0), Llama=dict(CAUSAL, pad_token_id=0), XLNet=dict(vocab_size=204, d_model=32, n_layer=1, n_head=2, d_inner=64))


def model_of(family, **changes):
    config = getattr(transformers, f'{family}Config')(**FAMILIES.get(family, {}) | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f'{family}ForSequenceClassification')(config)
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p) * .1)
    return model.eval()


def tokenizer_with(pad='[PAD]', **changes):
    tokenizer = word_tokenizer()
    tokenizer.pad_token, tokenizer.model_input_names = pad, ['input_ids', 'attention_mask']
    for name, value in changes.items(): setattr(tokenizer, name, value)
    return tokenizer


def saved(folder, model, tokenizer):
    model.save_pretrained(folder); tokenizer.save_pretrained(folder)
    return str(folder)


def texts_of(n=40, seed=0, longest=24):
    draw = np.random.default_rng(seed)
    return [' '.join(f'w{w}' for w in draw.integers(200, size=k)) for k in draw.integers(2, longest, size=n)]


def store_of(tokenizer, labels=None, longest=48, texts=None, **kwargs):
    texts = texts or texts_of()
    return tokenise(table_from(dict(text=texts, label=labels or ['a', 'b'] * (len(texts) // 2)), **kwargs), tokenizer, longest, progress=False)


@torch.no_grad()
def alone_and_together(model, store):
    model.eval()
    alone = torch.cat([model(**batch_of(store, [n], int(store.lengths[n]))[0]).logits for n in range(len(store))])
    return alone, model(**batch_of(store, range(len(store)), int(store.lengths.max()))[0]).logits


def table_file(folder, labels=('neg', 'pos'), rows=60, end=''):
    texts = [f"{'w1 w2' if n % 2 else 'w7 w8'} {t}{end if n % 3 == 0 else ''}" for n, t in enumerate(texts_of(rows, longest=9))]
    pd.DataFrame(dict(text=texts, label=[labels[n % len(labels)] for n in range(rows)])).to_csv(folder / 'data.csv', index=False)
    return str(folder / 'data.csv')


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.05))
    monkeypatch.setattr(optkit.job, 'bootstrap_score', partial(optkit.job.bootstrap_score, repeats=20))


def job_of(folder, model, data, **changes):
    return Job(JobConfig(**dict(data=data, text='text', label='label', model=model, out=str(folder / 'run'), trials=1, folds=2, epochs=1, max_length=16, precision='fp32', ladder=False, confirm=0,
                                space=('lr=1e-3..1e-2:log',)) | changes), progress=False, say=lambda text: None, command='test')


# --- one padding id

@pytest.mark.parametrize('family, pad', [('Llama', -1), ('Llama', 1), ('Llama', None), ('GPT2', None), ('GPT2', 7), ('Bert', 0), ('DebertaV2', 0)])
def test_field_padding_id_is_that_of_the_tokenizer(family, pad, tmp_path):
    tokenizer = tokenizer_with('[SEP]')
    source = saved(tmp_path / 'base', model_of(family, pad_token_id=pad), tokenizer)
    store, loaded = store_of(tokenizer), load_model(source, ('a', 'b'), load_tokenizer(source))
    assert loaded.config.pad_token_id == tokenizer.pad_token_id == store.pad_id == 3
    alone, together = alone_and_together(loaded, store)
    assert (alone - together).abs().max() < 1e-5 and together.std(0).min() > 1e-3

    plain = AutoModelForSequenceClassification.from_pretrained(source)  # a Trainer of one's own, with a model of one's own
    Trainer(make_engine(plain, CPU, HERE), store, CPU, folder=tmp_path / 'run', tokenizer=tokenizer).fit(np.arange(32), np.arange(32, 40))
    again, their = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'run/model'), AutoTokenizer.from_pretrained(tmp_path / 'run/model')
    assert again.config.pad_token_id == their.pad_token_id == 3
    alone, together = alone_and_together(again, store)
    assert (alone - together).abs().max() < 1e-5
    torch.testing.assert_close(together, alone_and_together(plain, store)[1])


def test_field_embedding_of_a_real_token_trains_although_the_base_called_it_padding():
    model, store = model_of('Llama', pad_token_id=30), store_of(tokenizer_with('[SEP]'))
    assert (store.tokens == 30).any()
    settle_config(model, store)
    model(**batch_of(store, range(40), 40)[0]).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[30].abs().max() > 0


def test_field_positions_that_start_behind_the_padding_token_stay():
    model, store = model_of('Roberta'), store_of(tokenizer_with())  # the tokenizer pads with 0, the model counts from 1
    before = alone_and_together(model, store)[1]
    settle_config(model, store)
    alone, together = alone_and_together(model, store)
    assert model.config.pad_token_id == 1 and torch.equal(before, together) and (alone - together).abs().max() < 1e-5


def their_trainer(folder, model, rows, tokenizer=None, **kwargs):
    args = TrainingArguments(output_dir=str(folder), report_to='none', use_cpu=True, disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=8)
    return TheirTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer) if tokenizer else None, **kwargs)


def test_field_from_hf_pads_with_the_token_of_the_tokenizer(tmp_path):
    tokenizer = tokenizer_with('[SEP]')
    rows = [dict(tokenizer(t), labels=n % 2) for n, t in enumerate(texts_of())]
    found = from_hf(their_trainer(tmp_path, model := model_of('Llama', pad_token_id=None), rows, tokenizer), HERE, folder=tmp_path / 'run')
    assert found.trainer.store.pad_id == model.config.pad_token_id == 3
    found.fit()
    assert read_json(tmp_path / 'run/model/config.json')['pad_token_id'] == 3


def test_field_no_padding_token_anywhere_is_refused(tmp_path):
    rows = [dict(input_ids=[2, *range(10, 10 + n % 5), 3], labels=n % 2) for n in range(16)]
    with pytest.raises(InputError, match='no padding token.*set tokenizer.pad_token'): from_hf(their_trainer(tmp_path, model_of('Llama', pad_token_id=None), rows), HERE)
    with pytest.raises(InputError, match='no padding token.*set tokenizer.pad_token'): from_hf(their_trainer(tmp_path, model_of('GPT2', pad_token_id=-1), rows), HERE)
    with pytest.raises(InputError, match='no padding token'): store_of(tokenizer_with(None))


def test_field_padding_token_beyond_the_embeddings_is_refused(tmp_path):
    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens(dict(pad_token='<pad>'))  # without resize_token_embeddings
    assert tokenizer.pad_token_id == 204
    with pytest.raises(InputError, match='id 204, but .* knows 204 tokens'): load_model(saved(tmp_path, model_of('Llama'), tokenizer), ('a', 'b'), tokenizer)
    with pytest.raises(InputError, match='id 204, but .* knows 204 tokens'): Trainer(make_engine(example_model(), CPU, HERE), store_of(tokenizer), CPU)


def test_field_model_that_summarises_padding_is_refused():
    store, model = store_of(tokenizer_with()), model_of('XLNet')
    alone, together = alone_and_together(model, store)
    assert (alone - together).abs().max() > 1e-3
    with pytest.raises(InputError, match='summarises rows over their padding'): Trainer(make_engine(model, CPU, HERE), store, CPU)


# --- what is saved says what was trained

def test_field_saved_multilabel_model_answers_with_sigmoids(tmp_path):
    tokenizer = tokenizer_with()
    rows = [dict(tokenizer(t), labels=[float(n % 2), 0., float(n % 3 == 0)]) for n, t in enumerate(texts_of())]
    found = from_hf(their_trainer(tmp_path, model_of('Bert', num_labels=3), rows, tokenizer), HERE, folder=tmp_path / 'run')
    found.fit()
    assert read_json(tmp_path / 'run/model/config.json')['problem_type'] == 'multi_label_classification'
    want = torch.sigmoid(found.trainer.engine.predict(found.trainer.store, np.arange(3)))
    for text, row in zip(texts_of(), want):
        given = {p['label']: p['score'] for p in pipeline('text-classification', str(tmp_path / 'run/model'), top_k=None)([text])[0]}
        assert [given[f'LABEL_{n}'] for n in range(3)] == pytest.approx(row.tolist(), abs=1e-5)


def test_field_saved_regression_answers_with_numbers(tmp_path):
    tokenizer = tokenizer_with()
    for outputs, base in ((1, None), (2, 'multi_label_classification')):
        store = with_labels(store_of(tokenizer), np.linspace(-3, 7, 40) if outputs == 1 else np.random.default_rng(0).normal(size=(40, 2)), 'regression')
        engine = make_engine(model_of('Bert', num_labels=outputs, problem_type=base), CPU, HERE)
        Trainer(engine, store, replace(CPU, metric='loss'), folder=tmp_path / f'{outputs}', tokenizer=tokenizer).fit(np.arange(32), np.arange(32, 40))
        given = pipeline('text-classification', str(tmp_path / f'{outputs}/model'), top_k=None)(texts_of()[:1])[0]
        assert sorted(p['score'] for p in given) == pytest.approx(sorted(engine.predict(store, np.arange(1))[0].tolist()), abs=1e-5)


@pytest.mark.parametrize('problem, outputs', [('multi_label_classification', 2), ('multi_label_classification', 6), ('regression', 1)])
def test_field_job_from_a_base_of_another_problem_saves_a_classifier(problem, outputs, tmp_path):
    base = saved(tmp_path / 'base', model_of('GPT2', num_labels=outputs, problem_type=problem, pad_token_id=None), tokenizer_with('[SEP]', model_max_length=10**30, padding_side='left'))
    job = job_of(tmp_path, base, table_file(tmp_path))
    job.run()
    model, tokenizer = (kind.from_pretrained(tmp_path / 'run/model') for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert model.config.problem_type == 'single_label_classification' and model.config.id2label == {0: 'neg', 1: 'pos'}
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (16, 'right')  # a Job's max_length
    long, ask = ' '.join(texts_of()[:20]), pipeline('text-classification', str(tmp_path / 'run/model'), top_k=None)
    for text in (job.table.texts[0], long):
        given = {p['label']: p['score'] for p in ask([text], truncation=True)[0]}
        want = torch.softmax(job.engine.predict(store_of(job.tokenizer, texts=[text] * 2, longest=16), np.arange(1))[0], 0)
        assert sum(given.values()) == pytest.approx(1) and [given['neg'], given['pos']] == pytest.approx(want.tolist(), abs=1e-5)
    out = model(**tokenizer(long, return_tensors='pt', truncation=True), labels=torch.tensor([1]))
    assert out.loss.item() == pytest.approx(-torch.log_softmax(out.logits, 1)[0, 1].item(), abs=1e-6)


def test_field_saved_tokenizer_cuts_where_the_training_did(tmp_path):
    tokenizer = tokenizer_with('[SEP]', model_max_length=10**30, padding_side='left')
    store = store_of(tokenizer, longest=20)
    trainer = Trainer(make_engine(model_of('GPT2'), CPU, HERE), store, CPU, folder=tmp_path / 'run', tokenizer=tokenizer)
    trainer.fit(np.arange(32), np.arange(32, 40))
    found = AutoTokenizer.from_pretrained(tmp_path / 'run/model')
    assert (found.model_max_length, found.padding_side) == (20, 'right') and len(found(' '.join(texts_of()), truncation=True)['input_ids']) == 20
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (10**30, 'left')  # the one that was given is as it was
    rows = [dict(tokenizer(t), labels=n % 2) for n, t in enumerate(texts_of())]
    for limit, right in ((10**30, 64), (50, 50)):  # from_hf does not know where its rows were cut, but where the model ends
        tokenizer.model_max_length = limit
        assert from_hf(their_trainer(tmp_path, model_of('GPT2'), rows, tokenizer), HERE).trainer.max_length == right


def test_field_class_names_of_the_rows_are_saved(tmp_path):
    store, tokenizer = store_of(tokenizer_with(), ['ham', 'spam'] * 20), tokenizer_with()
    Trainer(make_engine(model_of('Bert'), CPU, HERE), store, CPU, folder=tmp_path, tokenizer=tokenizer).fit(np.arange(32), np.arange(32, 40))
    assert read_json(tmp_path / 'model/config.json')['id2label'] == {'0': 'ham', '1': 'spam'}
    named = model_of('Bert', id2label={1: 'pos', 0: 'neg'}, label2id=dict(pos=1, neg=0))  # numbers name nothing: the model's names stay
    rows = [dict(tokenizer_with()(t), labels=n % 2) for n, t in enumerate(texts_of())]
    assert from_hf(their_trainer(tmp_path, named, rows, tokenizer_with()), HERE).trainer.store.classes == ('neg', 'pos') and named.config.id2label == {0: 'neg', 1: 'pos'}
    settle_config(named, store_of(tokenizer_with(), [0, 1] * 20))
    assert named.config.id2label == {0: 'neg', 1: 'pos'}


# --- a model that knows the labels

NLI = dict(id2label={0: 'entailment', 1: 'neutral', 2: 'contradiction'}, label2id=dict(entailment=0, neutral=1, contradiction=2))


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('classes', [('contradiction', 'entailment', 'neutral'), ('Contradiction', 'Neutral')])
def test_field_head_moves_with_the_names(family, classes, tmp_path):
    base, store = model_of(family, **NLI), store_of(tokenizer_with())
    base.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), classes).eval()
    batch = batch_of(store, range(8), 40)[0]
    with torch.no_grad(): was, now = base(**batch).logits, loaded(**batch).logits
    assert torch.equal(now, was[:, [NLI['label2id'][c.lower()] for c in classes]]) and tuple(loaded.config.id2label.values()) == classes
    loaded.save_pretrained(tmp_path / 'again')
    with torch.no_grad(): assert torch.equal(AutoModelForSequenceClassification.from_pretrained(tmp_path / 'again')(**batch).logits, now)


def test_field_accuracy_before_training_is_unchanged(tmp_path):
    base, store = model_of('Llama', **NLI), store_of(tokenizer_with(), texts=texts_of(300))
    found = alone_and_together(base, store)[1].argmax(1).tolist()
    answers = [NLI['id2label'][n] for n in found]
    assert min(map(answers.count, NLI['label2id'])) > 4
    pd.DataFrame(dict(text=texts_of(300), label=answers)).to_csv(tmp_path / 'data.csv', index=False)
    job = job_of(tmp_path, saved(tmp_path / 'base', base, tokenizer_with()), str(tmp_path / 'data.csv'), max_length=48)
    assert job.table.classes == ('contradiction', 'entailment', 'neutral')
    assert (alone_and_together(job.model, store)[1].argmax(1).numpy() == job.table.labels).all()


def test_field_other_names_keep_the_head_of_the_file(tmp_path):
    base = model_of('Bert', **NLI)
    base.save_pretrained(tmp_path)
    assert torch.equal(load_model(str(tmp_path), ('x', 'y', 'z')).classifier.weight, base.classifier.weight)
    both = model_of('Bert', id2label={0: 'Yes', 1: 'yes'}, label2id=dict(Yes=0, yes=1))  # apart by case only
    both.save_pretrained(tmp_path / 'both')
    assert torch.equal(load_model(str(tmp_path / 'both'), ('yes', 'Yes')).classifier.weight, both.classifier.weight[[1, 0]])


def test_field_rows_numbered_otherwise_than_the_model_are_refused():
    store = store_of(tokenizer_with(), ['contradiction', 'entailment', 'neutral', 'neutral'] * 10)
    with pytest.raises(InputError, match='classes of the store are contradiction, entailment, neutral, but .* has entailment, neutral, contradiction in this order; load it with load_model'):
        Trainer(make_engine(model_of('Bert', **NLI), CPU, HERE), store, CPU)


# --- ids without an embedding

def unknown_token(folder):
    "A model of 204 tokens, and a tokenizer with one more, which every third text ends with"
    tokenizer = word_tokenizer()
    tokenizer.add_tokens('special')
    base = saved(folder / 'base', example_model(), tokenizer)
    return base, tokenizer, table_file(folder, end=' special')


def one_segment(folder):
    "A model of one segment, and pairs"
    model = model_of('Bert', type_vocab_size=1)
    return saved(folder / 'base', model, word_tokenizer()), word_tokenizer(), table_file(folder)


@pytest.mark.parametrize('case, pair, said', [(unknown_token, None, 'token 204, but .* knows 204 tokens'), (one_segment, 'text', r'segment 1, but .* knows 1 \(type_vocab_size\)')])
def test_field_ids_beyond_the_embeddings_end_in_a_line_in_every_door(case, pair, said, tmp_path, capsys):
    base, tokenizer, data = case(tmp_path)
    if pair: pd.read_csv(data).assign(pair='w1 w2').to_csv(data, index=False); pair = 'pair'
    refused = partial(pytest.raises, InputError, match=said)
    with refused(): job_of(tmp_path, base, data, pair=pair)
    words = ['--data', data, '--text', 'text', '--label', 'label', '--model', base, '--quiet', *(['--pair', pair] if pair else [])]
    for command, out in (('tune', 'tuned'), ('train', 'trained')):
        assert main([command, *words, '--out', str(tmp_path / out)]) == 2 and not (tmp_path / out).exists()
        assert re.search(said, capsys.readouterr().err)
    ledger = ['bench', '--workload', 'mine', '--budget', '5s', '--rows', '60', '--out', str(tmp_path / 'ledger.json'), *words]
    assert main(ledger) == 2 and re.search(said, capsys.readouterr().err)
    store = tokenise(table_from(data, 'text', 'label', pair), tokenizer, 16, progress=False)
    rows, model = np.arange(40), load_model(base, ('neg', 'pos'))
    engine = make_engine(model, CPU, HERE)
    with refused(): Trainer(engine, store, CPU).fit(rows, np.arange(40, 60))
    with refused(): engine.step(store, [MicroBatch(rows[:4], 16)])
    with refused(): make_engine(load_model(base, ('neg', 'pos')), replace(CPU, fast=True), HERE).step(store, [MicroBatch(rows[:4], 16)])
    with refused(): bench_of(model, store, HERE)
    with refused(): optimize(model, store, HERE, budget=5)
    with refused(): measure_ladder(model, store, rows, default_rungs(HERE, 8, 8), CPU, HERE, 1., progress=False)
    with refused(): tune(fold_runner(engine, store, stratified_folds(np.arange(60), store.labels.numpy(), 2, 0), CPU), ['lr=1e-4..1e-3:log'], 2, folds=2, epochs=1, progress=False, say=lambda text: None)
    theirs = [dict(tokenizer(t, p) if pair else tokenizer(t), labels=n % 2) for n, (t, p) in enumerate(zip(pd.read_csv(data).text, ['w1 w2'] * 60))]
    with refused(): from_hf(their_trainer(tmp_path / 'theirs', model, theirs, tokenizer), HERE).fit()


def test_field_ids_below_zero_are_refused():
    store = store_of(tokenizer_with())
    with pytest.raises(InputError, match='the store holds the token -7, expected ids from 0 on'): check_tokens(example_model(), replace(store, tokens=store.tokens - 7 - int(store.tokens.min())))


# --- a model of texts and images

def gemma(**changes):
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    return model_of('Gemma3', text_config=dict(CAUSAL, sliding_window=8, **changes), vision_config=vision, mm_tokens_per_image=4)


def test_field_text_part_of_a_model_of_images_is_read(tmp_path):
    base = saved(tmp_path / 'base', gemma(pad_token_id=1), tokenizer_with('[SEP]', model_max_length=10**30))
    job = job_of(tmp_path, base, table_file(tmp_path), max_length=None)
    assert model_length(job.model) == 64 and (job.model.config.pad_token_id, job.model.config.text_config.pad_token_id) == (3, 3)
    shape = model_shape(job.model)
    assert (shape['layers'], shape['hidden'], shape['heads']) == (1, 32, 2)
    job.run()
    saved_config = read_json(tmp_path / 'run/model/config.json')
    assert saved_config['text_config']['pad_token_id'] == 3 and saved_config['problem_type'] == 'single_label_classification'
    store = store_of(job.tokenizer)
    alone, together = alone_and_together(again := AutoModelForSequenceClassification.from_pretrained(tmp_path / 'run/model'), store)
    assert (alone - together).abs().max() < 1e-5
    packed = Trainer(make_engine(again, CPU, HERE), store, replace(CPU, layout='packed')).fit(np.arange(32), np.arange(32, 40))
    padded = Trainer(make_engine(AutoModelForSequenceClassification.from_pretrained(tmp_path / 'run/model'), CPU, HERE), store, CPU).fit(np.arange(32), np.arange(32, 40))
    assert packed.history[0].train_loss == pytest.approx(padded.history[0].train_loss, rel=1e-4)
