"What users of this and of other tools met, each with the smallest input and the right value"
import copy
import csv
import errno
import gzip
import io
import json
import math
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
from optkit import models as models_module
import optkit.job
import optuna
import pandas as pd
import pytest
import torch
import transformers
from optuna.trial import TrialState
from scipy.stats import binom
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer as TheirTrainer,
    TrainingArguments, pipeline
)

from made_up import model_and_pairs
from optkit import attention, cli, engine as engine_module, report
from optkit.checkpoint import save_model
from optkit.workloads import bench_of
from optkit.optimize import optimize
from optkit.cli import main
from optkit.base import InputError
from optkit.table import GAPS, IGNORED, parse_labels, read_frame, read_table
from optkit.frames import table_from
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import batch_of, Layout, LAYOUTS, MicroBatch, steps
from optkit.store import with_labels
from optkit.models import check_tokens, example_model, load_model, load_tokenizer, model_length, settle_config
from optkit.engine import Engine
from optkit.sizes import plan_batch, training_flops
from optkit.fast import fast_problem, FastEngine
from optkit.folds import check_folds, check_parts, hold_out, stratified_folds
from optkit.base import Choice
from optkit.cards import known_gpu
from optkit.hardware import detect, hardware_with
from optkit.space import ended, value_kind
from optkit.hpo import tune
from optkit.confirm import study_summary
from optkit.job import bootstrap_score, Job
from optkit.job_plan import JobConfig, JobPlan
from optkit.ladder import default_rungs, measure_ladder
from optkit.precision import choose_precision, set_attention
from optkit.progress import Meter
from optkit.page import study_figure
from optkit.report import render
from optkit.simulator import SyntheticCurves
from optkit.presets import memory_estimate, model_shape, preset_of
from optkit.status import OPTIMIZATIONS, status
from optkit.storage import open_storage, open_study, read_mode, sqlite_storage
from optkit.base import read_json, write_json
from optkit.config import parse_settings, TrainConfig
from optkit.build import make_engine, new_layers
from optkit.trainer import fold_runner, Trainer
from optkit.hf import from_hf
from optkit.views import study_view, trial_rows


def engine_and_store(compile=None, prefer='fp32', **options):
    hardware = detect()
    engine = Engine(example_model(dropout=0.), choose_precision(hardware, prefer=prefer), compile=compile, **options)
    return engine, tokenise(example_table(64), word_tokenizer(), 48, progress=False).to(engine.device)


def losses_of(engine, store, epochs=2, drop=True):
    "Losses of steps of 16 rows, in micro-batches of 4, the last step shorter and in one piece"
    engine.reset(lr=3e-3)
    return [engine.step(store, step).item() for epoch in range(epochs)
            for step in steps(store, np.arange(34 if drop else 32), 16, epoch=epoch, layout=Layout(rows=4))]


class Overwriting(torch.autograd.Function):
    "What CUDA graphs of a compiler do: every backward pass returns its gradient in the same memory"
    memory = {}

    @staticmethod
    def forward(ctx, weight, name):
        ctx.name = name
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        memory = Overwriting.memory.setdefault(ctx.name, torch.empty_like(gradient))
        return memory.copy_(gradient).detach(), None


@pytest.mark.parametrize('zero_grad_none', [True, False])
def test_field_compiled_graphs_with_several_micro_batches_give_the_losses_of_eager(zero_grad_none, monkeypatch):
    plain, store = engine_and_store(zero_grad_none=zero_grad_none)
    right = losses_of(plain, store)
    engine, store = engine_and_store(zero_grad_none=zero_grad_none)
    head, inner = engine.model.classifier, torch.nn.functional.linear
    Overwriting.memory = {}
    monkeypatch.setattr(head, 'forward', lambda x: inner(x, Overwriting.apply(head.weight, 'weight'), head.bias))
    engine.replays = True
    assert losses_of(engine, store) == pytest.approx(right, rel=1e-6)
    assert losses_of(engine, store) == pytest.approx(right, rel=1e-6), 'after a reset'


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('prefer', ['fp32', None])
def test_field_reduce_overhead_with_several_micro_batches_gives_the_losses_of_eager(prefer):
    right = losses_of(*engine_and_store(prefer=prefer))
    engine, store = engine_and_store('reduce-overhead', prefer)
    losses = losses_of(engine, store)
    assert losses == pytest.approx(right, rel=2e-5 if prefer else 2e-2)
    again = losses_of(engine, store)
    assert again == pytest.approx(losses, rel=1e-6 if prefer else 1e-2)
    rows = np.arange(34)
    eager, _ = engine_and_store(prefer=prefer)
    engine.reset(), eager.reset()
    assert torch.allclose(engine.predict(store, rows, 8), eager.predict(store, rows, 8), atol=1e-5 if prefer else 3e-2)


# Adapters, attention, memory estimates

peft = pytest.importorskip('peft', reason='needs peft')
torch.set_num_threads(1)
HERE = hardware_with(None)
ADAPTER = TrainConfig(epochs=1, lr=1e-2, effective_batch=12, physical_batch=12, eval_batch=12, precision='fp32', adapter='lora', adapter_rank=2, seed=2)
BERT = dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128, pad_token_id=0)
GROUPED = dict(BERT, num_key_value_heads=1, head_dim=16)
V3 = dict(relative_attention=True, pos_att_type=['p2c', 'c2p'], position_buckets=16, share_att_key=True, norm_rel_ebd='layer_norm', position_biased_input=False, type_vocab_size=0)
FAMILIES_ADAPTERS = dict(  # what names the classes of transformers, settings, what a language model of the family is called
    bert=('Bert', BERT, 'ForMaskedLM'), roberta=('Roberta', BERT, 'ForMaskedLM'), xlmr=('XLMRoberta', BERT, 'ForMaskedLM'),
    electra=('Electra', dict(BERT, embedding_size=16), 'ForMaskedLM'), albert=('Albert', dict(BERT, embedding_size=16), 'ForMaskedLM'),
    distilbert=('DistilBert', dict(vocab_size=204, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=128, pad_token_id=0), 'ForMaskedLM'),
    mpnet=('MPNet', BERT, 'ForMaskedLM'), modernbert=('ModernBert', dict(BERT, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2), 'ForMaskedLM'),
    deberta_v2=('DebertaV2', BERT, 'ForMaskedLM'), deberta_v3=('DebertaV2', dict(BERT, **V3), 'ForMaskedLM'),
    gpt2=('GPT2', dict(vocab_size=204, n_embd=32, n_layer=2, n_head=2, n_positions=128, pad_token_id=0), 'LMHeadModel'),
    llama=('Llama', GROUPED, 'ForCausalLM'), qwen3=('Qwen3', GROUPED, 'ForCausalLM'), gemma3=('Gemma3', GROUPED, 'ForCausalLM'))


def save_base(family, folder, end=None):
    "A checkpoint of the family without the head of a classifier"
    name, settings, language_model = FAMILIES_ADAPTERS[family]
    config = getattr(transformers, name + ('TextConfig' if family == 'gemma3' else 'Config'))(**settings)
    torch.manual_seed(5)
    getattr(transformers, name + (end or language_model))(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(36), word_tokenizer(), 32, progress=False)


CLOSE = 5e-3 if torch.cuda.is_available() else 1e-5  # a job on a GPU may multiply in TF32; the folder is read in FP32


def predicted(engine, store, rows): return engine.predict(store, rows).cpu()


def logits_of(model, store, rows=8):
    inputs = {name: value.to(model.device) for name, value in batch_of(store, np.arange(rows), 32)[0].items()}
    with torch.no_grad(): return model.eval()(**inputs).logits.cpu()


def loaded_logits(base, folder, store, seed, classes=2):
    "What base and adapter give in another process, as peft loads them"
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes)
    return logits_of(peft.PeftModel.from_pretrained(model, folder), store)


@pytest.mark.parametrize('adapter', ['lora', 'dora'])
@pytest.mark.parametrize('family', FAMILIES_ADAPTERS)
def test_field_saved_adapter_answers_the_same_after_loading(family, adapter, store, tmp_path):  # huggingface/peft#2171
    base = save_base(family, tmp_path / 'base')
    c = replace(ADAPTER, adapter=adapter)
    trainer = Trainer(make_engine(load_model(base, store.classes, word_tokenizer(), seed=0), c, HERE), store, c, folder=tmp_path / 'run')
    trainer.fit(np.arange(24), np.arange(24, 36))
    want, before = logits_of(trainer.engine.model, store), logits_of(load_model(base, store.classes, word_tokenizer(), seed=0), store)
    for seed in (1, 2): assert torch.allclose(loaded_logits(base, tmp_path / 'run' / 'model', store, seed), want, atol=1e-5)
    folder = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'run' / 'model')  # as pipeline() loads it
    assert torch.allclose(logits_of(folder, store), want, atol=1e-5)
    assert (want - before).abs().max() > 1e-3, 'training changed the answers'
    settings = peft.PeftConfig.from_pretrained(tmp_path / 'run' / 'model')
    whole = new_layers(load_model(base, store.classes, word_tokenizer()))
    assert set(whole) <= set(settings.modules_to_save) and whole[-1] in ('classifier', 'score')
    tuned = {n.split('.lora_A')[0] for n, _ in trainer.engine.model.named_modules() if n.endswith('lora_A')}
    assert tuned and not [n for n in tuned if any(f'.{w}.' in f'{n}.' for w in whole)]


@pytest.mark.parametrize('end', ['Model', 'ForMaskedLM'])
@pytest.mark.parametrize('family', ['bert', 'deberta_v3', 'distilbert', 'modernbert'])
def test_field_model_loaded_by_the_user_brings_its_new_layers_too(family, end, store, tmp_path):
    "Loaded by transformers, with three labels, moved to other places of memory, from a checkpoint of the body alone"
    base = save_base(family, tmp_path / 'base', end)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    if end == 'Model': model = copy.deepcopy(model)  # which forgets what transformers knew of it
    engine = make_engine(model, ADAPTER, HERE)
    with torch.no_grad():
        for p in engine.model.parameters():
            if p.requires_grad: p.add_(.1)
    engine.model.save_pretrained(tmp_path / 'model')
    want = logits_of(engine.model, store)
    for seed in (1, 2): assert torch.allclose(loaded_logits(base, tmp_path / 'model', store, seed, 3), want, atol=1e-5)


def test_field_checkpoint_that_has_its_pooler_gets_an_adapter_on_it(store, tmp_path):
    example_model().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), ('a', 'b'), word_tokenizer())
    assert new_layers(model) == ['classifier'] and new_layers(load_model(str(tmp_path), ('a', 'b', 'c'))) == ['classifier']
    names = {n for n, _ in make_engine(model, ADAPTER, HERE).model.named_parameters()}
    assert 'base_model.model.bert.pooler.dense.lora_A.default.weight' in names


def test_field_token_classifier_and_causal_model_under_an_adapter(tmp_path):
    base = save_base('bert', tmp_path / 'base')
    assert new_layers(transformers.AutoModelForTokenClassification.from_pretrained(base)) == ['classifier']
    decoder = save_base('llama', tmp_path / 'decoder')
    assert new_layers(transformers.AutoModelForCausalLM.from_pretrained(decoder)) == []
    body = save_base('llama', tmp_path / 'body', 'Model')  # its head was drawn
    assert new_layers(transformers.AutoModelForCausalLM.from_pretrained(body)) == ['lm_head']


def test_field_adapter_of_the_user_that_leaves_out_a_new_layer_is_warned_of(tmp_path):
    base = save_base('bert', tmp_path / 'base')
    made = lambda **more: peft.get_peft_model(transformers.AutoModelForSequenceClassification.from_pretrained(base),
                                              peft.LoraConfig(r=2, target_modules=['query'], task_type='SEQ_CLS', **more))
    plain = replace(ADAPTER, adapter=None)
    with pytest.warns(UserWarning, match='bert.pooler.dense.bias is in neither the base checkpoint nor the adapter'): make_engine(made(), plain, HERE)
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        make_engine(made(modules_to_save=['pooler']), plain, HERE)
    with pytest.raises(InputError, match='PeftModelForSequenceClassification is under an adapter already'): make_engine(made(), ADAPTER, HERE)


# --- what was asked for and is not done

@pytest.mark.parametrize('family', ['deberta_v2', 'deberta_v3', 'mpnet'])
@pytest.mark.parametrize('asked', ['sdpa', 'flash_attention_2', 'flex_attention'])
def test_field_attention_that_a_model_lacks_is_refused_with_what_it_has(family, asked, tmp_path):
    model = load_model(save_base(family, tmp_path), ('a', 'b'))
    with pytest.raises(InputError, match=rf'attention {asked} was asked for, but \w+ has eager; take one of these or leave attention out'):
        make_engine(model, TrainConfig(attention=asked), HERE)
    assert model.config._attn_implementation == 'eager' and make_engine(model, TrainConfig(attention='eager'), HERE)


def test_field_attention_whose_package_is_missing_is_refused(monkeypatch):
    model = example_model()
    monkeypatch.setattr('optkit.precision.import_problem', lambda package: 'not installed')
    with pytest.raises(InputError, match='flash_attention_2 was asked for, but flash_attn cannot be imported .*BertForSequenceClassification has eager, sdpa, '):
        make_engine(model, TrainConfig(attention='flash_attention_2'), HERE)
    assert model.config._attn_implementation == 'sdpa'


def test_field_decisions_name_the_attention_that_ran_and_status_recommends_no_other(tmp_path, capsys):
    base, data = tmp_path / 'base', tmp_path / 'data.csv'
    save_base('deberta_v2', base); word_tokenizer().save_pretrained(base)
    table = example_table(40)
    data.write_text('text,label\n' + '\n'.join(f'{t},{table.classes[l]}' for t, l in zip(table.texts, table.labels)) + '\n')
    words = ['train', '--data', str(data), '--text', 'text', '--label', 'label', '--model', str(base), '--out', str(tmp_path / 'run')]
    assert main([*words, 'attention=sdpa']) == 2 and 'has eager; take one of these' in capsys.readouterr().err
    assert main([*words, 'epochs=1', 'precision=fp32']) == 0
    said = {d['what']: d for d in read_json(tmp_path / 'run' / 'decisions.json')}
    assert said['attention that the model has']['value'] == 'eager' and 'eager, which does not call' in said['attention']['reason']
    found = status(run=tmp_path / 'run', hardware=hardware_with(known_gpu('H100')))
    assert {r.name: r.state for r in found.rows}['fused attention (SDPA)'] == 'n/a'
    assert not [r.fix for r in found.recommendations if 'attention' in r.fix]


def test_field_status_recommends_nothing_that_would_be_refused():
    records = pd.DataFrame([dict(claim=c, card='h100', file='w1-claims-h100.json', variant=c, baseline='b', kind='switch', label='exact', source='measured',
                                 ratio_p50=2., ratio_low=1.9, ratio_high=2.1) for o in OPTIMIZATIONS for c in o.ids])
    card, tried = hardware_with(known_gpu('H100')), 0
    base = dict(attention='eager', fused=False, zero_grad_none=False, read_every=1, eval_on_device=False, physical_batch=2, layout='full', precision='fp32', tf32=False)
    mpnet = load_model_of('mpnet')
    for more in ({}, dict(compile='default'), dict(optimizer='adamw_8bit'), dict(checkpointing='full'), dict(weights='bf16', precision=None), dict(adapter='lora'), dict(layout='packed', max_tokens=64)):
        config = TrainConfig(**base | more)
        for model in (None, mpnet, example_model()):
            for row in status(config, hardware=card, model=model, records=records).recommendations:
                changed = replace(config, **parse_settings([row.fix]))
                if row.fix.startswith('attention='): set_attention(copy.deepcopy(model), changed.attention)
                if row.fix == 'fast=true': assert not fast_problem(changed.optimizer, False, False, changed.checkpointing, False, {torch.bfloat16 if changed.weights else torch.float32})
                tried += 1
    assert tried > 50
    assert 'attention=sdpa' in [r.fix for r in status(TrainConfig(**base), hardware=card, model=example_model(), records=records).recommendations]


def load_model_of(family):
    name, settings, _ = FAMILIES_ADAPTERS[family]
    return getattr(transformers, name + 'ForSequenceClassification')(getattr(transformers, name + 'Config')(**settings))


# --- what fits

LLAMA = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, pad_token_id=0)
GEMMA = dict(vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1, head_dim=256, pad_token_id=0)


def shaped(name, settings, head):
    "A model of that shape in bf16, on no device"
    with torch.device('meta'): return getattr(transformers, name + head)(getattr(transformers, name + 'Config')(**settings)).to(torch.bfloat16)


@pytest.mark.parametrize('model, rows, length, changes, measured', [  # peaks of peft on an H100 and an H200, in GB
    (('Llama', LLAMA, 'ForCausalLM'), 4, 1024, dict(adapter='lora'), 57), (('Llama', LLAMA, 'ForCausalLM'), 8, 1024, dict(adapter='lora', checkpointing='full'), 29),
    (('Llama', LLAMA, 'ForCausalLM'), 4, 1024, dict(adapter='dora'), 89), (('Gemma3Text', GEMMA, 'ForSequenceClassification'), 12, 512, dict(adapter='lora'), 21),
    (('Gemma3Text', GEMMA, 'ForSequenceClassification'), 12, 512, dict(adapter='dora'), 33), (('Gemma3Text', GEMMA, 'ForSequenceClassification'), 12, 512, {}, 25)])
def test_field_memory_of_an_adapter_on_8_billion_weights_is_estimated_near_what_was_measured(model, rows, length, changes, measured):
    config = TrainConfig(**changes)
    found = memory_estimate(model_shape(shaped(*model), config), rows, length, checkpointing=config.checkpointing, config=config)
    assert sum(found.values()) / 1e9 == pytest.approx(measured, rel=.12)


def test_field_weights_that_train_and_that_do_not_are_counted_as_peft_has_them():
    for make in (example_model, lambda: load_model_of('deberta_v3'), lambda: load_model_of('distilbert'), lambda: load_model_of('gpt2'), lambda: load_model_of('llama')):
        for adapter in ('lora', 'dora'):
            config, model = replace(ADAPTER, adapter=adapter), make()
            told, real = model_shape(model, config), make_engine(model, config, HERE).model
            trains = [p for p in real.parameters() if p.requires_grad]
            assert told['trained'] == sum(p.numel() for p in trains) and told['trains'] == 4 * told['trained']
            assert {k: told[k] for k in ('inputs',)} == {k: model_shape(real)[k] for k in ('inputs',)} and told.get('outputs', 0) == model_shape(real)['outputs']
    model = load_model_of('llama')
    assert model_shape(model)['trained'] == model_shape(model.config)['weights'] == sum(p.numel() for p in model.parameters())
    assert model_shape(model, TrainConfig(weights='bf16'))['held'] == 2 * model_shape(model)['weights'] == model_shape(model)['held'] / 2


def test_field_preset_takes_an_adapter_on_8_billion_weights_where_it_fits_and_refuses_what_does_not():
    model, how = shaped('Llama', LLAMA, 'ForCausalLM'), dict(max_length=1024, effective_batch=4, adapter='lora')
    p = preset_of('h100', model=model, **how)
    assert (p.physical_batch, p.checkpointing) == (None, 'off') and 'an estimate: 4 rows of 1024 tokens take about 54' in p.reasons['physical_batch'].reason  # GiB
    config = transformers.LlamaConfig(**LLAMA)
    assert preset_of('h100', model=config, **how).checkpointing == 'off' and preset_of('rtx3090', model=config, **how).checkpointing == 'full'
    for card, changes in (('h100', dict(adapter=None)), ('h100', dict(adapter='lora', physical_batch=64, effective_batch=64, checkpointing='off')), ('rtx3090', dict(checkpointing='off', physical_batch=4))):
        with pytest.raises(InputError, match='this does not fit .an estimate: '): preset_of(card, model=config, **how | changes)


# Padding, saved configurations, class names, ids

torch.set_num_threads(1)
CPU = TrainConfig(precision='fp32', epochs=1, lr=1e-3, effective_batch=16)
SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
CAUSAL = dict(SMALL, num_key_value_heads=1, head_dim=16, max_position_embeddings=64)
GPT2 = dict(vocab_size=204, n_embd=32, n_layer=1, n_head=2, n_positions=64)
FAMILIES_CONFIGS = dict(Bert=dict(SMALL, max_position_embeddings=64), Roberta=dict(SMALL, max_position_embeddings=66, pad_token_id=1), DistilBert=dict(vocab_size=204, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=64),
                Electra=dict(SMALL, embedding_size=32, max_position_embeddings=64), DebertaV2=dict(SMALL, max_position_embeddings=64), GPT2=dict(GPT2, pad_token_id=0), Llama=dict(CAUSAL, pad_token_id=0), XLNet=dict(vocab_size=204, d_model=32, n_layer=1, n_head=2, d_inner=64))


def model_of(family, **changes):
    config = getattr(transformers, f'{family}Config')(**FAMILIES_CONFIGS.get(family, {}) | changes)
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


def job_of_of_configs(folder, model, data, **changes):
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


def their_trainer_of_configs(folder, model, rows, tokenizer=None, **kwargs):
    args = TrainingArguments(output_dir=str(folder), report_to='none', use_cpu=True, disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=8)
    return TheirTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer, data_collator=DataCollatorWithPadding(tokenizer) if tokenizer else None, **kwargs)


def test_field_from_hf_pads_with_the_token_of_the_tokenizer(tmp_path):
    tokenizer = tokenizer_with('[SEP]')
    rows = [dict(tokenizer(t), labels=n % 2) for n, t in enumerate(texts_of())]
    found = from_hf(their_trainer_of_configs(tmp_path, model := model_of('Llama', pad_token_id=None), rows, tokenizer), HERE, folder=tmp_path / 'run')
    assert found.trainer.store.pad_id == model.config.pad_token_id == 3
    found.fit()
    assert read_json(tmp_path / 'run/model/config.json')['pad_token_id'] == 3


def test_field_no_padding_token_anywhere_is_refused(tmp_path):
    rows = [dict(input_ids=[2, *range(10, 10 + n % 5), 3], labels=n % 2) for n in range(16)]
    with pytest.raises(InputError, match='no padding token.*set tokenizer.pad_token'): from_hf(their_trainer_of_configs(tmp_path, model_of('Llama', pad_token_id=None), rows), HERE)
    with pytest.raises(InputError, match='no padding token.*set tokenizer.pad_token'): from_hf(their_trainer_of_configs(tmp_path, model_of('GPT2', pad_token_id=-1), rows), HERE)
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
    found = from_hf(their_trainer_of_configs(tmp_path, model_of('Bert', num_labels=3), rows, tokenizer), HERE, folder=tmp_path / 'run')
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
    job = job_of_of_configs(tmp_path, base, table_file(tmp_path))
    job.run()
    model, tokenizer = (kind.from_pretrained(tmp_path / 'run/model') for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert model.config.problem_type == 'single_label_classification' and model.config.id2label == {0: 'neg', 1: 'pos'}
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (16, 'right')  # a Job's max_length
    long, ask = ' '.join(texts_of()[:20]), pipeline('text-classification', str(tmp_path / 'run/model'), top_k=None)
    for text in (job.table.texts[0], long):
        given = {p['label']: p['score'] for p in ask([text], truncation=True)[0]}
        want = torch.softmax(predicted(job.engine, store_of(job.tokenizer, texts=[text] * 2, longest=16), np.arange(1))[0], 0)
        assert sum(given.values()) == pytest.approx(1) and [given['neg'], given['pos']] == pytest.approx(want.tolist(), abs=CLOSE)
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
        assert from_hf(their_trainer_of_configs(tmp_path, model_of('GPT2'), rows, tokenizer), HERE).trainer.max_length == right


def test_field_class_names_of_the_rows_are_saved(tmp_path):
    store, tokenizer = store_of(tokenizer_with(), ['ham', 'spam'] * 20), tokenizer_with()
    Trainer(make_engine(model_of('Bert'), CPU, HERE), store, CPU, folder=tmp_path, tokenizer=tokenizer).fit(np.arange(32), np.arange(32, 40))
    assert read_json(tmp_path / 'model/config.json')['id2label'] == {'0': 'ham', '1': 'spam'}
    named = model_of('Bert', id2label={1: 'pos', 0: 'neg'}, label2id=dict(pos=1, neg=0))  # numbers name nothing: the model's names stay
    rows = [dict(tokenizer_with()(t), labels=n % 2) for n, t in enumerate(texts_of())]
    assert from_hf(their_trainer_of_configs(tmp_path, named, rows, tokenizer_with()), HERE).trainer.store.classes == ('neg', 'pos') and named.config.id2label == {0: 'neg', 1: 'pos'}
    settle_config(named, store_of(tokenizer_with(), [0, 1] * 20))
    assert named.config.id2label == {0: 'neg', 1: 'pos'}


# --- a model that knows the labels

NLI = dict(id2label={0: 'entailment', 1: 'neutral', 2: 'contradiction'}, label2id=dict(entailment=0, neutral=1, contradiction=2))


@pytest.mark.parametrize('family', FAMILIES_CONFIGS)
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
    job = job_of_of_configs(tmp_path, saved(tmp_path / 'base', base, tokenizer_with()), str(tmp_path / 'data.csv'), max_length=48)
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
    with refused(): job_of_of_configs(tmp_path, base, data, pair=pair)
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
    with refused(): from_hf(their_trainer_of_configs(tmp_path / 'theirs', model, theirs, tokenizer), HERE).fit()


def test_field_ids_below_zero_are_refused():
    store = store_of(tokenizer_with())
    with pytest.raises(InputError, match='the store holds the token -7, expected ids from 0 on'): check_tokens(example_model(), replace(store, tokens=store.tokens - 7 - int(store.tokens.min())))


# --- a model of texts and images

def gemma(**changes):
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    return model_of('Gemma3', text_config=dict(CAUSAL, sliding_window=8, **changes), vision_config=vision, mm_tokens_per_image=4)


def test_field_text_part_of_a_model_of_images_is_read(tmp_path):
    base = saved(tmp_path / 'base', gemma(pad_token_id=1), tokenizer_with('[SEP]', model_max_length=10**30))
    job = job_of_of_configs(tmp_path, base, table_file(tmp_path), max_length=None)
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


# Model folders, sentencepiece, language models, split words, skipped updates

torch.set_num_threads(1)


def in_a_line(call, said):
    with pytest.raises(InputError, match=said) as caught: call()
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


# --- model folders

@pytest.fixture
def model_folder(tmp_path):
    example_model().save_pretrained(tmp_path / 'model')
    word_tokenizer().save_pretrained(tmp_path / 'model')
    return tmp_path / 'model'


OWN_CODE = '''open('{0}', 'w').write('ran')
from transformers import *
class Own(PreTrainedConfig): model_type = 'own'
class OwnModel(PreTrainedModel): pass
class OwnTokenizer(PreTrainedTokenizerFast): pass
'''


@pytest.mark.parametrize('where, load', [('config', load_model), ('model', load_model), ('config', load_tokenizer),
                                         ('tokenizer', load_tokenizer)])
def test_field_code_in_a_model_folder_never_runs_and_nobody_is_asked(model_folder, tmp_path, monkeypatch, where, load):
    monkeypatch.setattr('builtins.input', lambda *a: pytest.fail('somebody was asked'))
    (model_folder / 'own.py').write_text(OWN_CODE.format(tmp_path / 'ran'))
    config = json.loads((model_folder / 'config.json').read_text())
    if where == 'config': config |= dict(model_type='own', auto_map=dict(AutoConfig='own.Own'))
    own_model = dict(model_type='vit', auto_map=dict(AutoModelForSequenceClassification='own.OwnModel'))
    if where == 'model': config |= own_model
    (model_folder / 'config.json').write_text(json.dumps(config))
    if where == 'tokenizer':
        (model_folder / 'config.json').write_text(json.dumps(dict(config, model_type='vit')))
        own = dict(tokenizer_class='OwnTokenizer', auto_map=dict(AutoTokenizer=[None, 'own.OwnTokenizer']))
        (model_folder / 'tokenizer_config.json').write_text(json.dumps(own))
    args = (str(model_folder), ('a', 'b')) if load is load_model else (str(model_folder),)
    if (load, where) == (load_tokenizer, 'config'): assert load(*args)('w1')['input_ids'] == [2, 5, 3] # needs no code
    else: in_a_line(lambda: load(*args), 'it needs Python code of its own, which is not run')
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('text', ['[]', '"bert"', 'null', '3', '[' * 100_000, '{"model_type": ', '\xff',
                                  '{"model_type": "bert", "hidden_size": "wide"}', '{"model_type": ["bert"]}'], ids=lambda t: t[:40])
def test_field_a_config_that_is_no_object_is_refused_in_a_line(model_folder, text):
    (model_folder / 'config.json').write_bytes(text.encode('latin-1'))
    said = in_a_line(lambda: load_model(str(model_folder), ('a', 'b')), 'config.json|no sequence classifier could be loaded')
    assert str(model_folder) in said
    if text == '[]': in_a_line(lambda: load_tokenizer(str(model_folder)), 'config.json holds a list, expected an object')


@pytest.mark.parametrize('name, text', [('tokenizer.json', '{}'), ('tokenizer.json', '[' * 100_000),
                                        ('tokenizer_config.json', '[]'), ('tokenizer_config.json', '{"model_max_length": ')],
                         ids=['empty', 'nested', 'list', 'cut'])
def test_field_a_spoilt_tokenizer_is_refused_in_a_line(model_folder, name, text):
    (model_folder / name).write_text(text)
    in_a_line(lambda: load_tokenizer(str(model_folder)), 'no tokenizer could be loaded')


class RunsCode:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize('index', [None, 'model.safetensors.index.json', 'pytorch_model.bin.index.json'])
def test_field_a_pickle_that_would_run_code_ends_in_a_line(model_folder, tmp_path, index):
    "An index of safetensors may name a pickle too"
    weights = example_model().state_dict()
    (model_folder / 'model.safetensors').unlink()
    where = dict(metadata=dict(total_size=1), weight_map={k: 'pytorch_model.bin' for k in weights})
    if index: (model_folder / index).write_text(json.dumps(where))
    def save(found): torch.save(found, model_folder / 'pytorch_model.bin')
    save(weights | dict(planted=RunsCode(tmp_path / 'ran')))
    in_a_line(lambda: load_model(str(model_folder), ('a', 'b')), 'a pickle that holds more than tensors')
    assert not (tmp_path / 'ran').exists()
    save(weights)
    assert all(torch.equal(v, weights[k]) for k, v in load_model(str(model_folder), ('a', 'b')).state_dict().items())
    (model_folder / 'pytorch_model.bin').write_bytes(b'no weights')
    in_a_line(lambda: load_model(str(model_folder), ('a', 'b')), 'no sequence classifier could be loaded')


@pytest.mark.parametrize('name', ['x' * 300, 'org/' + 'x' * 300, 'x' * 120, '~nobody-of-that-name/model', 'a/b/c', 'a b',
                                  'a\0b'], ids=range(7))
def test_field_a_name_that_cannot_be_one_is_refused_in_a_line(name):
    for load in (load_tokenizer, lambda n: load_model(n, ('a', 'b'))):
        in_a_line(lambda: load(name), 'no such model folder|could be loaded')


def test_field_a_model_by_name_without_a_network_ends_soon_and_in_a_line(tmp_path):
    "HF_HUB_OFFLINE is not set; the hub's address leads nowhere. No retries: a line from each door"
    import subprocess, time
    (tmp_path / 'data.csv').write_text('text,label\n' + ''.join(f'w{n} {c},{c}\n' for n in range(40) for c in 'ab'))
    words = ['--data', str(tmp_path / 'data.csv'), '--text', 'text', '--label', 'label', '--model', 'nobody/nothing',
             '--out', str(tmp_path / 'run')]
    code = f'''
import sys, time
from optkit.cli import main
from optkit.models import load_model, load_tokenizer
from optkit.base import InputError
import transformers, torch
start = time.monotonic()
for load in (load_tokenizer, lambda n: load_model(n, ('a', 'b'))):
    try: load('nobody/nothing')
    except InputError as exc: print(exc)
for door in ('tune', 'train'):
    print(main([door, *{words!r}]))
print(time.monotonic() - start)
'''
    env = {k: v for k, v in os.environ.items() if k not in ('HF_HUB_OFFLINE', 'TRANSFORMERS_OFFLINE')}
    env |= dict(HF_ENDPOINT='http://127.0.0.1:9', HF_HOME=str(tmp_path / 'home'), HF_HUB_DISABLE_TELEMETRY='1')
    found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, timeout=120)
    why = 'nobody/nothing: no {} could be loaded (http://127.0.0.1:9 does not answer, ' \
          'and the cache does not hold all of it)'
    *lines, seconds = found.stdout.splitlines()
    assert lines == [why.format('tokenizer'), why.format('sequence classifier'), '2', '2'], found.stdout + found.stderr
    assert found.stderr.splitlines() == [f'optkit {door}: {why.format("tokenizer")}' for door in ('tune', 'train')]
    assert float(seconds) < 10 * max(1, os.getloadavg()[0] / os.cpu_count()) # a loaded machine takes longer to import
    assert not (tmp_path / 'run').exists()


def test_field_a_hub_that_never_answers_is_waited_for_a_few_seconds(monkeypatch):
    import socket, threading, time
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    with socket.create_server(('127.0.0.1', 0)) as server: # takes the connection and is silent
        monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{server.getsockname()[1]}')
        models_module._hub_answers.cache_clear()
        start = time.monotonic()
        assert models_module._hub_answers(0, seconds=.5) is False and time.monotonic() - start < 3
    models_module._hub_answers.cache_clear()


# --- DeBERTa-v3 as its publisher ships it

WORDS = 'the quick brown fox jumps over lazy dogs naïve café Straße 1 2 3 ABC fi ... running runner good bad film'.split()
LINES_FOLDERS = [' '.join(np.random.default_rng(n).choice(WORDS, 10)) for n in range(120)]


@pytest.fixture(scope='module')
def published(tmp_path_factory):
    "The files that microsoft/deberta-v3-base has, weights in half precision; and sentencepiece itself"
    import sentencepiece
    model_folder, made = tmp_path_factory.mktemp('deberta'), io.BytesIO()
    ids = {f'{name}_id': n for n, name in enumerate(('pad', 'bos', 'eos', 'unk'))}
    names = dict(pad_piece='[PAD]', bos_piece='[CLS]', eos_piece='[SEP]', unk_piece='[UNK]')
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES_FOLDERS), model_writer=made, vocab_size=90,
                                             hard_vocab_limit=False, minloglevel=2, **ids, **names)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    (model_folder / 'spm.model').write_bytes(made.getvalue())
    (model_folder / 'tokenizer_config.json').write_text(json.dumps(dict(do_lower_case=False, vocab_type='spm')))
    (model_folder / 'config.json').write_text(json.dumps(dict(
        model_type='deberta-v2', attention_probs_dropout_prob=.1, hidden_act='gelu', hidden_dropout_prob=.1,
        hidden_size=32, initializer_range=.02, intermediate_size=64, max_position_embeddings=512,
        relative_attention=True, position_buckets=256, norm_rel_ebd='layer_norm', share_att_key=True,
        pos_att_type='p2c|c2p', layer_norm_eps=1e-7, max_relative_positions=-1, position_biased_input=False,
        num_attention_heads=2, num_hidden_layers=1, type_vocab_size=0, vocab_size=pieces.get_piece_size() + 8)))
    torch.manual_seed(0)
    model = transformers.DebertaV2ForMaskedLM(transformers.AutoConfig.from_pretrained(model_folder))
    torch.save({k: v.half() for k, v in model.state_dict().items()}, model_folder / 'pytorch_model.bin')
    return model_folder, pieces


TEXTS = LINES_FOLDERS[:20] + ['the  quick', ' fox ', 'fox\tdogs\nfilm\r\nfox', 'ＡＢＣ fox', 'cafe\u0301', 'ﬁlm ① …', 'zzz 日本 fox',
                      'fox\u00a0dogs', 'fox\u200bdogs', 'a\u3000b', '½ ™ K', 'a\x01b', '“fox” – ’', '😀 fox', '\u2028fox',
                      '\u00a0 fox \u3000']


def test_field_deberta_from_its_sentencepiece_file_has_the_ids_of_sentencepiece(published, tmp_path):
    model_folder, pieces = published
    tokenizer = load_tokenizer(str(model_folder))
    want = [[1, *pieces.encode(t), 2] for t in TEXTS]
    assert tokenizer(TEXTS)['input_ids'] == want and tokenizer.is_fast
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 3)
    one, two = pieces.encode('the fox'), pieces.encode('good … film')
    pair = tokenizer('the fox', 'good … film')
    assert pair['input_ids'] == [1, *one, 2, *two, 2]
    assert pair['token_type_ids'] == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    shutil.copytree(model_folder, tmp_path / 'model') # saved and loaded again, by optkit and by transformers alone
    tokenizer.save_pretrained(tmp_path / 'model')
    for again in (load_tokenizer(str(tmp_path / 'model')), transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')):
        assert again(TEXTS)['input_ids'] == want
        assert (again.mask_token, again.mask_token_id, len(again)) == ('[MASK]', tokenizer.mask_token_id, len(tokenizer))
    old = tmp_path / 'old' # as older versions saved it: the class is named, the map is in tokenizer.json
    shutil.copytree(tmp_path / 'model', old)
    (old / 'spm.model').unlink()
    settings = json.loads((old / 'tokenizer_config.json').read_text()) | dict(tokenizer_class='DebertaV2Tokenizer')
    (old / 'tokenizer_config.json').write_text(json.dumps(settings))
    assert load_tokenizer(str(old))(TEXTS)['input_ids'] == want


@pytest.mark.parametrize('family, file', [
    ('MBartTokenizer', 'sentencepiece.bpe.model'), ('XLMRobertaTokenizer', 'sentencepiece.bpe.model'),
    ('AlbertTokenizer', 'spiece.model'), ('T5Tokenizer', 'spiece.model')])
def test_field_other_sentencepiece_families_have_its_pieces(published, tmp_path, family, file):
    model_folder, pieces = published
    settings = dict(tokenizer_class=family, do_lower_case=False, keep_accents=True)
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    shutil.copy(model_folder / 'spm.model', tmp_path / file)
    example_model().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ('the quick\u00a0fox', '… ① ﬁlm', 'ＡＢＣ fox'):
        ids = tokenizer(text, add_special_tokens=False)['input_ids']
        assert tokenizer.convert_ids_to_tokens(ids) == pieces.encode_as_pieces(text)


def test_field_deberta_as_published_trains_and_its_model_is_loaded_again(published, tmp_path):
    model_folder, _ = published
    tokenizer = load_tokenizer(str(model_folder))
    texts = [f'{line} {"good" if n % 2 else "bad"} film' for n, line in enumerate(LINES_FOLDERS[:64])]
    labels = ['yes' if n % 2 else 'no' for n in range(64)]
    store = tokenise(table_from(texts, labels=labels), tokenizer, 32, progress=False)
    model = load_model(str(model_folder), store.classes, tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weights = torch.load(model_folder / 'pytorch_model.bin', weights_only=True)
    name = 'deberta.embeddings.word_embeddings.weight'
    assert torch.equal(model.get_parameter(name), weights[name].float())
    config = TrainConfig(epochs=6, lr=5e-3, effective_batch=8, precision='fp32', patience=None)
    trainer = Trainer(make_engine(model, config, HERE), store, config, folder=tmp_path, tokenizer=tokenizer)
    found = trainer.fit(np.arange(48), np.arange(48, 64))
    assert found.score > .9, found
    again = load_model(str(tmp_path / 'model'), store.classes).eval()
    ids = load_tokenizer(str(tmp_path / 'model'))(texts[50], return_tensors='pt')
    with torch.no_grad(): logits = again(**ids).logits
    assert torch.allclose(logits, trainer.engine.predict(store, np.array([50])), atol=1e-5)


def test_field_a_job_tells_other_pickled_weights_apart(published, tmp_path):
    from optkit.job_plan import fingerprint, JobConfig
    (tmp_path / 'data.csv').write_text('text,label\na,x\nb,y\n')
    shutil.copytree(published[0], tmp_path / 'model')
    config = JobConfig(data=str(tmp_path / 'data.csv'), text='text', label='label', model=str(tmp_path / 'model'),
                       out=str(tmp_path / 'run'))
    one = fingerprint(config)
    weights = torch.load(tmp_path / 'model' / 'pytorch_model.bin')
    torch.save({k: v + 1 for k, v in weights.items()}, tmp_path / 'model' / 'pytorch_model.bin')
    assert one != fingerprint(config) and [*one['weights']] == ['pytorch_model.bin']


# --- language models by other names

def language_rows(n=24): return [dict(input_ids=[2, *[5 + (r + k) % 9 for k in range(8)], 3]) for r in range(n)]


def their_trainer_of_folders(model, model_folder):
    "All rows in each step, so that their order does not matter"
    tokenizer, rows = word_tokenizer(), language_rows()
    args = transformers.TrainingArguments(
        output_dir=str(model_folder), report_to='none', use_cpu=True, disable_tqdm=True, per_device_train_batch_size=len(rows),
        num_train_epochs=6, learning_rate=1e-2, warmup_steps=0)
    return transformers.Trainer(model=model, train_dataset=rows, eval_dataset=language_rows(6), processing_class=tokenizer,
                                data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), args=args)


def tiny_language_model(kind):
    torch.manual_seed(0)
    name, decoder = kind.split(',')[0], kind.endswith('decoder')
    short = dict(vocab_size=204, n_embd=32, n_layer=1, n_head=2, n_positions=32, pad_token_id=0, resid_pdrop=0., embd_pdrop=0.)
    long = dict(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                max_position_embeddings=40, pad_token_id=0)
    if name == 'CTRLLMHeadModel': settings = short | dict(dff=64)
    elif name.startswith(('GPT2', 'OpenAI')): settings = short | dict(attn_pdrop=0.)
    elif name.startswith('Llama'): settings = long
    else: settings = long | dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0., is_decoder=decoder)
    model = getattr(transformers, name)
    return model(model.config_class(**settings))


@pytest.mark.parametrize('kind', ['GPT2LMHeadModel', 'OpenAIGPTLMHeadModel', 'CTRLLMHeadModel', 'LlamaForCausalLM',
                                  'BertLMHeadModel, decoder', 'RobertaForCausalLM, decoder'])
def test_field_a_language_model_of_any_name_trains_as_one_from_a_trainer(tmp_path, kind):
    theirs = their_trainer_of_folders(tiny_language_model(kind), tmp_path / 'theirs')
    theirs.train()
    ids = torch.tensor([r['input_ids'] for r in language_rows(6)])
    # the mean over the targets: their trainer divides by a target a row too many where a class is no ForCausalLM
    with torch.no_grad(): want = theirs.model.eval()(input_ids=ids, labels=ids).loss.item()
    ours = from_hf(their_trainer_of_folders(tiny_language_model(kind), tmp_path / 'ours'), HERE)
    assert ours.trainer.store.task == 'causal' and ours.trainer.store.targets.tolist() == [9] * 30
    found = ours.fit()
    first, *_, last = found.history
    assert last.train_loss < first.train_loss and last.valid_loss == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize('kind', ['BertLMHeadModel', 'RobertaForCausalLM'])
def test_field_a_language_model_that_sees_the_answer_is_refused(tmp_path, kind):
    ours = from_hf(their_trainer_of_folders(tiny_language_model(kind), tmp_path), HERE)
    in_a_line(ours.fit, 'sees the tokens after the one that it predicts')


def test_field_an_adapter_knows_that_gpt2_is_a_language_model():
    from optkit.build import with_adapter
    model = with_adapter(tiny_language_model('GPT2LMHeadModel'), TrainConfig(adapter='lora'))
    assert model.peft_config['default'].task_type == 'CAUSAL_LM'


# --- words

def trained_bpe():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, alphabet = ['<s>', '<pad>', '</s>', '<unk>', '<mask>'], pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([' '.join(f'w{n} électro' for n in range(200))] * 3, how)
    found = json.loads(inner.to_str())['model']
    return found['vocab'], [tuple(m) for m in found['merges']]


@pytest.mark.parametrize('kind', ['RobertaTokenizer', 'RobertaTokenizer, prefix', 'GPT2Tokenizer', 'words',
                                  'sentencepiece'])
def test_field_split_words_have_the_tokens_of_the_running_text(published, kind):
    if kind == 'words': tokenizer = word_tokenizer()
    elif kind == 'sentencepiece': tokenizer = load_tokenizer(str(published[0]))
    else:
        vocab, merges = trained_bpe()
        made = getattr(transformers, kind.split(',')[0])
        tokenizer = made(vocab=vocab, merges=merges, add_prefix_space='prefix' in kind, pad_token='<pad>')
    rows, labels = [['w16', 'w152', '-', 'électro', 'w1'], ['w3', 'w16']], [['A', 'B', 'O', 'B', 'A'], ['O', 'A']]
    store = tokenise(table_from(dict(text=rows, label=labels), task='tokens'), tokenizer, 64, progress=False)
    for n, words in enumerate(rows):
        part = slice(int(store.offsets[n]), int(store.offsets[n + 1]))
        ids, aims = store.tokens[part].tolist(), store.labels[part].tolist()
        assert ids == tokenizer(' '.join(words))['input_ids']
        assert [store.classes[a] for a in aims if a != IGNORED] == labels[n]
        plain = tokenizer(' '.join(words), return_offsets_mapping=True)['offset_mapping']
        first = [k for k, a in enumerate(aims) if a != IGNORED]
        begins = np.cumsum([0, *(len(w) + 1 for w in words[:-1])])
        assert all(plain[k][0] in (b, b - 1) for k, b in zip(first, begins))
    assert store.lost_labels == 0


def test_field_a_word_without_a_token_loses_its_label_and_only_its_own():
    table = table_from(dict(text=[['w1', '\u200b', 'w2']], label=[['a', 'b', 'c']]), task='tokens')
    store = tokenise(table, dropping_tokenizer(), 16, progress=False)
    assert [store.classes[a] for a in store.labels.tolist() if a != IGNORED] == ['a', 'c'] and store.lost_labels == 1


def dropping_tokenizer():
    from tokenizers import normalizers
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace('\u200b', '')
    return tokenizer


# --- fp16

FP32_FOLDERS = choose_precision(HERE, prefer='fp32')
FP16 = replace(FP32_FOLDERS, compute=Choice('fp16', 'asked for'), scaler=Choice(True, 'asked for'))


def fp16_run(skipped, fused=True, optimizer='adamw', **settings):
    "A run of 12 updates, of which these overflow; LR, EMA and weights after each"
    model = example_model(dropout=0.)
    engine = Engine(model, FP16, ema=.9, fused=fused, optimizer=optimizer)
    store = tokenise(example_table(48), word_tokenizer(), 32, progress=False)
    config = TrainConfig(epochs=2, lr=1e-2, effective_batch=8, precision='fp16', ema=.9, warmup=0., patience=None,
                         metric='loss', **settings)
    engine.scaler = torch.amp.GradScaler('cpu', init_scale=4.)
    seen, backward, calls = [], engine._backward, []
    def overflow(*args):
        total = backward(*args)
        calls.append(1)
        if len(calls) - 1 in skipped: next(p for p in model.parameters() if p.grad is not None).grad.fill_(float('inf'))
        return total
    engine._backward = overflow
    size = lambda tensors: sum(t.double().abs().sum().item() for t in tensors)
    def look(done, total):
        seen.append((engine.optimizer.param_groups[0]['lr'], size(engine.average.values()), size(model.parameters())))
    trainer = Trainer(engine, store, config, on_step=look)
    return trainer.fit(np.arange(48), np.arange(48)[:8]), seen


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.filterwarnings('ignore:8 of the 8 rows')
def test_field_updates_that_fp16_skips_move_neither_rate_nor_average_nor_count(fused):
    whole, plain = fp16_run((), fused)
    result, seen = fp16_run((3, 4), fused)
    lr, average, weights = map(list, zip(*seen))
    assert lr[:3] == [a for a, *_ in plain[:3]] and lr[3] == lr[4] == lr[5] == pytest.approx(1e-2 * (1 - 3 / 12))
    assert lr[6] == pytest.approx(1e-2 * (1 - 4 / 12))
    assert average[2] == average[3] == average[4] != average[5] and weights[2] == weights[3] == weights[4] != weights[5]
    assert (whole.steps, result.steps, len(seen)) == (12, 10, 12)
    said = lambda r: [d['value'] for d in r.decisions if d['what'] == 'updates']
    assert (said(whole), said(result)) == ([], ['10 of 12'])
    assert result.history[-1].lr == pytest.approx(1e-2 * (1 - 9 / 12))


@pytest.mark.filterwarnings('ignore:8 of the 8 rows')
def test_field_a_resumed_fp16_run_knows_its_skipped_updates(tmp_path):
    from optkit.trainer import RunState
    p = RunState(12, done=5, skipped=2)
    assert RunState.from_dict(json.loads(json.dumps(p.to_dict()))).skipped == 2
    old = p.to_dict(); del old['skipped'] # of a checkpoint before there was such a count
    assert RunState.from_dict(old).skipped == 0


# Tables, folds, labels

torch.set_num_threads(1)
LINES_TABLES = [f'row {n}' for n in range(10)]
PLAIN = dict(precision='fp32', ladder=False, save_model=False)


def file_of(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def reported(sep, opened='"He said it was fine', closed='so it was" they said'):
    "Ten rows; a mark opens in the third line and another one stands in the sixth"
    rows = [*LINES_TABLES[:1], opened, *LINES_TABLES[2:4], closed, *LINES_TABLES[5:]]
    return ''.join(f'{text}{sep}{label}\n' for text, label in [('text', 'label'), *zip(rows, 'ab' * 5)])


def decided(folder): return {d['what']: d for d in read_json(folder / 'decisions.json')}


# --- a file has the rows that its lines say

@pytest.mark.parametrize('opened, closed', [('"He said it was fine', 'so it was" they said'),
    ('"He said it was fine', 'so it was"'), ('"He said', 'nothing')],
    ids=['within', 'at the end of a cell', 'never closed'])
@pytest.mark.parametrize('packed', ['', '.gz'])
def test_field_tsv_with_quotation_marks_keeps_every_row(tmp_path, opened, closed, packed):
    content = reported('\t', opened, closed).encode()
    with pytest.warns(UserWarning, match=r'quotation marks: part of the texts: line'):
        table = read_table(file_of(tmp_path / f'x.tsv{packed}', gzip.compress(content) if packed else content),
            'text', 'label')
    assert len(table) == 10 and table.texts[1] == opened and table.texts[4] == closed and table.classes == ('a', 'b')


def test_field_tsv_where_speech_is_marked_keeps_the_marks(tmp_path):
    "GLUE's files, which pandas reads with quoting=3"
    path = file_of(tmp_path / 'x.tsv', 'text\tlabel\n"Yes" he said\ta\nso "it" was\tb\n"No"\ta\n')
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); found = read_frame(path)
    assert found.text.tolist() == pd.read_csv(path, sep='\t',
        quoting=csv.QUOTE_NONE).text.tolist() == ['"Yes" he said', 'so "it" was', '"No"']


@pytest.mark.parametrize('content, lines', [(reported(','), 'line 3 .*line 6'), (reported(',', closed='no end'), 'line 3 .*line 11'), ('text,label\nx,a\n"last,b', 'line 3 .*line 3'),
                                            ('text,label\n"one\ntwo",a\n"three,b\nfour,a\n', 'line 4 .*line 5'), ('text,label\n"a ""b,a\nc,b\n', 'line 2 .*line 3')])
def test_field_csv_with_a_stray_mark_is_refused_with_its_line(tmp_path, content, lines):
    with pytest.raises(InputError,
        match=rf'x.csv: cannot be read \(the quotation mark that opens a cell in {lines}') as caught:
        read_frame(file_of(tmp_path / 'x.csv', content))
    assert '\n' not in str(caught.value)


def test_field_tsv_with_a_stray_mark_and_a_short_line_is_refused(tmp_path):
    with pytest.raises(InputError, match='line 3 .*line 6'):
        read_frame(file_of(tmp_path / 'x.tsv', reported('\t') + 'no label\n'))


def test_field_csv_rows_that_marks_hold_together_are_counted(tmp_path):
    "The text of three rows reads as one cell, and CSV cannot tell: it is said"
    path = file_of(tmp_path / 'x.csv', reported(',', '"He said, it was fine', 'so it was"'))
    with pytest.warns(UserWarning,
        match=r'line breaks: 7 rows from 11 lines: 1 rows hold .*lines 3 to 6.*each line looks like a row'):
        table = read_table(path, 'text', 'label')
    assert len(table) == 7 and table.notes['line breaks'].value == '7 rows from 11 lines'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        letter = read_table(file_of(tmp_path / 'y.csv', 'text,label\n"Dear you,\n\nI am well, thanks,\nme",a\nb,b\n'),
            'text', 'label')
    assert letter.texts == ['Dear you,\n\nI am well, thanks,\nme', 'b']
    assert letter.notes['line breaks'].value == '2 rows from 6 lines'


CELLS = ['a', '', ' ', 'a b', 'a, b', 'a\tb', 'one\ntwo', 'one\r\ntwo', '"', '""', 'say "it"', '"said"', '"a", "b"',
    ' "x"', 'NA', 'nan', '1.0', '007', 'été', "it's", ';', 'a\x0bb', 'a\u2028b', '#', 'x' * 200_000]

@pytest.mark.parametrize('sep, ext', [(',', 'csv'), ('\t', 'tsv')])
@pytest.mark.parametrize('quoting', [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_field_what_pandas_wrote_reads_as_pandas_reads_it(tmp_path, sep, ext, quoting):
    rng, limit = np.random.default_rng(0), csv.field_size_limit()
    for n in range(25):
        frame = pd.DataFrame(rng.choice(CELLS, (rng.integers(1, 9),
            rng.integers(1, 5)))).rename(columns=lambda c: f'column {c}')
        frame.to_csv(tmp_path / f'x.{ext}', sep=sep, index=bool(n % 2), quoting=quoting,
            lineterminator=['\n', '\r\n'][n % 3 == 0])
        want = pd.read_csv(tmp_path / f'x.{ext}', sep=sep, dtype=str, keep_default_na=False)
        with warnings.catch_warnings(): warnings.simplefilter('ignore'); found = read_frame(tmp_path / f'x.{ext}')
        assert found.to_numpy().tolist() == want.to_numpy().tolist()
        assert (len(found) == len(frame) or frame.shape[1] == 1)
    assert csv.field_size_limit() == limit


def test_field_hand_made_csv_reads_as_pandas_reads_it(tmp_path):
    for content in ('text,label\n"Hello" he said,a\nx,b\n', 'text,label\n"a, b" ,a\nx,"b" \n',
        'text,label,more\nx,a\ny,b,c\n', '\n\ntext,label\n\nx,a\n   \ny,b\n\n', 'text,label\nx, "a, b"\n'):
        path = file_of(tmp_path / 'x.csv', content)
        want = pd.read_csv(path, dtype=str, keep_default_na=False)
        if isinstance(want.index, pd.RangeIndex):
            assert read_frame(path).fillna('').to_numpy().tolist() == want.fillna('').to_numpy().tolist(), content
        else: # the first cells would become an index
            with pytest.raises(InputError, match='line 2 has 3 cells'): read_frame(path)


@pytest.mark.parametrize('content, said', [('text;label\nx;a\ny;b\n', "no column 'text'; it has 'text;label'"),
    ('text;label\nhello, world;a\ny;b\n', 'line 2 has 2 cells, the header 1'),
    ('text\tlabel\nx\ta\ny\tb\n', "no column 'text'")])
def test_field_another_separator_is_named(tmp_path, content, said):
    path, sep = file_of(tmp_path / 'x.csv', content), content[4]
    with pytest.raises(InputError, match=said) as caught: read_table(path, 'text', 'label')
    assert f'does {sep!r} separate its cells?' in str(caught.value)
    assert f'pandas.read_csv(..., sep={sep!r})' in str(caught.value)
    assert table_from(pd.read_csv(path, sep=sep)).classes == ('a', 'b'), 'and what is advised works'


@pytest.mark.parametrize('name, rows', [('x.csv', 'text,label\nx,a,\ny,b\n'), ('x.csv', 'text,label\nx,a\ny, z,b\n'),
    ('x.tsv', 'text\tlabel\nx\ta\t\ny\tb\n')])
def test_field_a_stray_separator_is_refused_with_its_line(tmp_path, name, rows):
    line = next(n for n, text in enumerate(rows.splitlines(), 1) if len(text.replace('\t', ',').split(',')) > 2)
    with pytest.raises(InputError, match=rf'cannot be read \(line {line} has 3 cells, the header 2\)'):
        read_frame(file_of(tmp_path / name, rows))


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16le', 'utf-16be', 'cp1252'])
@pytest.mark.parametrize('name', ['my x.csv', 'x.jsonl', 'x.csv.gz'])
def test_field_a_text_of_excel_is_read_after_what_the_message_says(tmp_path, encoding, name):
    content = ('text,label\ncafé “so”,a\ny,b\n' if 'csv' in name else '{"text": "café “so”", "label": "a"}\n{"text": "y", "label": "b"}\n').encode(encoding)
    path = file_of(tmp_path / name, gzip.compress(content) if name.endswith('.gz') else content)
    with pytest.raises(InputError, match='is no utf-8; save it so .in Excel as CSV UTF-8., or run: ') as caught:
        read_frame(path)
    if not shutil.which('iconv'): pytest.skip('needs iconv')
    subprocess.run(str(caught.value).split('or run: ')[1], shell=True, check=True)
    assert read_table(tmp_path / f'utf8-{name.removesuffix(".gz")}', 'text', 'label').texts == ['café “so”', 'y']


def test_field_a_file_of_no_known_encoding_is_refused_in_a_line(tmp_path):
    with pytest.raises(InputError, match=r'is no utf-8; save it so \(in Excel as CSV UTF-8\)$'):
        read_frame(file_of(tmp_path / 'x.csv', b'text,label\n\x81\x8d\xff,a\n'))


@pytest.mark.parametrize('line', ['[' * 100_000, '{"text":' * 100_000, '{"text": ' + '9' * 5000 + '}'],
    ids=['lists', 'objects', 'digits'])
def test_field_a_nested_line_of_json_ends_in_a_line(tmp_path, capsys, line):
    path = file_of(tmp_path / 'x.jsonl', '{"text": "x", "label": "a"}\n' + line + '\n')
    assert main(['train', '--data', str(path), '--text', 'text', '--label', 'label', '--model', 'none', '--out',
        str(tmp_path / 'run')]) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    assert 'x.jsonl, line 2' in said
    assert 'one object a line' in said
    assert len(said) < 400
    assert not (tmp_path / 'run').exists()


# --- labels, groups and texts

@pytest.mark.parametrize('gap', sorted(GAPS))
def test_field_what_pandas_takes_for_a_gap_is_no_class(tmp_path, gap):
    path = file_of(tmp_path / 'x.csv', f'text,label,doc\nx,a,1\ny,{gap},2\nz,b,{gap}\nw,a,3\n')
    with pytest.raises(InputError,
        match=r"'label' has no label in 1 rows \(row 2\), which read .*remove these rows, or rename the label"):
        read_table(path, 'text', 'label')
    with pytest.raises(InputError, match=r"'doc' has no group in 1 rows \(row 3\)"):
        read_table(file_of(path, path.read_text().replace(f'y,{gap}', 'y,b')), 'text', 'label', group='doc')
    if gap not in ('Nan', 'NAN'): assert pd.read_csv(io.StringIO(f'a,b\nx,{gap}\n')).b.isna().all()


@pytest.mark.parametrize('labels, gone', [(['0', '1', '-100', '0'], '-100'), (['pos', 'neg', '-100', 'pos'], '-100'),
    (['0', '1.0', '-100.0', '0'], '-100.0'), (['2', '1', '-1', '0'], '-1'),
    (['1', '0', '-1', '2', '-100'], '-1, -100')])
def test_field_numbers_that_say_none_are_no_class(labels, gone):
    with pytest.raises(InputError, match=rf"no label in {gone.count('-')} rows \(rows? 3.*which read {gone};"):
        table_from(['x'] * len(labels), labels=labels)


@pytest.mark.parametrize('labels', [['-1', '1'], ['-2', '-1', '0', '1', '2'], ['-100', '-50', '0'],
    ['-1', '2', '3', '5']])
def test_field_scales_below_zero_are_classes(labels): assert parse_labels(labels * 3)[1] == tuple(labels)


@pytest.mark.parametrize('labels, named', [(['-1', '0', '1'], "'-1'"), (['FAVOR', 'AGAINST', 'NONE'], "'NONE'"),
    (['a', 'none', 'b'], "'none'")])
def test_field_classes_that_may_mean_none_are_named(labels, named):
    with pytest.warns(UserWarning, match=f'labels that may mean none: {named}: taken as a class'):
        table = table_from(['x'] * 3, labels=labels)
    assert len(table.classes) == 3 and table.notes['labels that may mean none'].value == named


def test_field_named_classes_of_a_data_set_have_none_below_zero():
    class Feature: names = ['neg', 'pos']
    class Split(dict): column_names, features = ['text', 'label'], dict(label=Feature)
    for none in (-1, -1., -100):
        with pytest.raises(InputError, match=r'no label in 1 rows \(row 3\)'):
            table_from(Split(text=['x'] * 3, label=[0, 1, none]))


@pytest.mark.parametrize('text', ['nan', 'NaN', 'NA', 'null', 'None', 'N/A'])
def test_field_texts_that_read_as_a_gap_are_texts(tmp_path, text):
    path = file_of(tmp_path / 'x.csv', f'text,label\n{text},a\ny,b\n')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        table = read_table(path, 'text', 'label', drop_empty=True)
    assert table.texts == [text, 'y']
    assert table.dropped == 0
    assert bool(caught) == (text.lower() == 'nan') == ('texts' in table.notes)
    with pytest.raises(InputError, match=r"'text' is empty in 1 rows \(row 1\)"):
        table_from(pd.DataFrame(dict(text=[np.nan, 'y'], label=['a', 'b'])))


@pytest.mark.parametrize('names, groups', [(['doc1', 'doc1 ', ' doc1', 'doc2'], [0, 0, 0, 1]),
    (['1', '1.0', ' 1', '01'], [0] * 4), (['é', 'e\u0301', 'é ', 'x'], [1, 1, 1, 0]), ([1, 1., '1 ', 2], [0, 0, 0, 1]),
    (['10', '9', '+9', '-9'], [1, 2, 2, 0])])
def test_field_a_document_is_one_group_however_its_name_is_written(names, groups):
    assert table_from(dict(text=['x'] * 4, label=[0, 1, 0, 1], doc=names), group='doc').groups.tolist() == groups


@pytest.mark.parametrize('names, alike', [(['Yes', 'yes', 'No', 'no'], "'No', 'no'; 'Yes', 'yes'"),
    (['é', 'e\u0301', 'x'], None), (['1', '1.0', 'a'], "'1', '1.0'"), (['a b', 'a  b', 'x'], None),
    (['ham', 'spam'], '')])
def test_field_names_that_look_alike_are_named_when_classes_are_made(names, alike):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        table = table_from(['x'] * len(names), labels=names)
    assert len(table.classes) == len(names), 'they stay what they are'
    note = table.notes.get('names of labels that look alike')
    assert bool(note) == (alike != '') == bool(caught)
    assert (not alike or note.value == alike)
    assert (not caught or 'the data: names of labels that look alike' in str(caught[0].message))
    if not alike: return
    with pytest.warns(UserWarning, match='names of groups that look alike'):
        groups = table_from(dict(text=['x'] * len(names), label=[n % 2 for n in range(len(names))], doc=names),
            group='doc')
    assert groups.notes['names of groups that look alike'].value == alike


@pytest.mark.parametrize('value', ['1e400', '9' * 5000, '-' + '9' * 5000, 'inf'])
def test_field_an_endless_number_as_label_prints_short(value):
    with pytest.raises(InputError,
        match=r"'label' holds numbers beyond 1e308 \(row 2: .{1,40}\); expected words or whole numbers") as caught:
        table_from(['x'] * 3, labels=['0', value, '1'])
    assert len(str(caught.value)) < 200
    assert parse_labels(['0' * 5000 + '1', '2'])[1] == ('1', '2')
    with pytest.raises(InputError) as caught: table_from(['x'] * 2, labels=['l' * 5000] * 2)
    assert len(str(caught.value)) < 200 and len(repr(table_from(['x'] * 2, labels=['l' * 5000, 'm']))) < 200


# --- folds and parts

def documents(tmp_path, c_documents=2):
    "120 rows in documents of six; label c in a few of them, three rows each"
    base = ['a', 'b'] * 60
    for d in range(c_documents): base[12 + 6 * d:15 + 6 * d] = 'ccc'
    folder = model_and_pairs(tmp_path, 120, doc=[f'd{n // 6}' for n in range(120)])
    frame = pd.read_csv(folder / 'data.csv').assign(y=base)
    frame.to_csv(folder / 'data.csv', index=False)
    return folder


def job_of_of_tables(folder, out, **changes):
    changes = dict(pair='b', group='doc', model=str(folder / 'model'), **PLAIN) | changes
    return Job(JobConfig(str(folder / 'data.csv'), 'a', 'y', out=str(out), **changes), progress=False,
        say=lambda text: None, command='test')


def data_stage(job, rows=90, held_out=30):
    "The stage in which the rows are split; its decisions"
    job.folder.mkdir()
    job._plan = asdict(JobPlan(16, rows, held_out, 1, 1, 1., 1., ''))
    job._do_data()
    return decided(job.folder)


def test_field_group_folds_count_labels_in_groups(tmp_path):
    folder = documents(tmp_path)
    said = "label 'c' is in 2 groups; 3 folds and the held-out rows need at least 4 groups of each label"
    with pytest.raises(InputError, match=said): job_of_of_tables(folder, tmp_path / 'run')
    words = ['train', '--data', str(folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y', '--group',
        'doc', '--model', str(folder / 'model'), '--out', str(tmp_path / 'run')]
    assert main([*words, '--folds', '3']) == 2 and not (tmp_path / 'run').exists()
    assert len(read_table(folder / 'data.csv', 'a', 'y', group='doc')) == 120
    assert job_of_of_tables(folder, tmp_path / 'run', group=None).table.groups is None
    labels, groups = np.repeat([0, 1], [12, 6]), np.repeat(np.arange(6), 3)
    check_folds(labels, ('a', 'b'), 2, held_out=False, groups=groups)
    with pytest.raises(InputError, match="label 'b' is in 2 groups; 3 folds need at least 3 groups"):
        check_folds(labels, ('a', 'b'), 3, held_out=False, groups=groups)


def test_field_held_out_documents_have_each_label_and_leave_it_to_the_folds():
    "Random documents, each label in four of them or more: what three folds and a held-out part need"
    rng, checked = np.random.default_rng(0), 0
    for _ in range(150):
        groups = np.repeat(np.arange(30), rng.integers(2, 7, 30))
        labels = np.array([rng.choice(3, p=[.5, .45, .05]) if g % 2 else 0 for g in groups])
        in_groups = [len(np.unique(groups[labels == c])) for c in range(3)]
        if min(in_groups) < 4: continue
        rows, held = hold_out(labels, len(labels) // 4, len(labels) // 2, 3, groups=groups)
        left = [len(np.unique(groups[rows][labels[rows] == c])) for c in range(3)]
        assert not {*groups[rows]} & {*groups[held]} and min(left) >= 3
        checked += set(labels[held]) == {0, 1, 2}
    assert checked > 20


def test_field_a_training_part_without_a_label_is_said(tmp_path):
    with pytest.warns(UserWarning,
        match=r'the training part of fold \d of 2 has no row of label \(or stratum\) 1; take fewer folds'):
        folds = stratified_folds(np.arange(12), np.array([0] * 8 + [1] * 4), 2,
            groups=np.array([0, 1, 2, 3] * 2 + [4] * 4))
    table = table_from(dict(text=[f't{n}' for n in range(12)], label=['a'] * 8 + ['b'] * 4))
    said = check_parts(table, folds)
    assert [*said] == ['labels']
    assert "no row of label 'b' in the training part of fold" in said['labels'].value
    assert said['labels'].value.count(';') == 1


def test_field_a_jobs_parts_that_lack_a_label_are_decisions(tmp_path, monkeypatch):
    job = job_of_of_tables(documents(tmp_path, 6), tmp_path / 'run')
    monkeypatch.setattr(Job, '_split', lambda self, rows, held_out: (np.arange(90), np.arange(90, 120)))
    found = data_stage(job)
    assert found['held-out rows, labels']['value'] == "no row of label 'c' in the held-out rows"
    assert found['held-out rows, labels']['reason']


def test_field_equal_texts_on_both_sides_are_counted(tmp_path):
    "Ten rows stand twice, in both columns; twenty more share the first one"
    folder = model_and_pairs(tmp_path, 120)
    frame = pd.read_csv(folder / 'data.csv').assign(a=[f'w{n} w1' for n in range(120)],
        b=[f'w{n} w2' for n in range(120)])
    frame.loc[60:69, ['a', 'b']] = frame.loc[0:9, ['a', 'b']].to_numpy()
    frame.loc[70:79, 'a'] = frame.loc[10:19, 'a'].to_numpy()
    frame.to_csv(folder / 'data.csv', index=False)
    twins = {**{n: n + 60 for n in range(20)}, **{n + 60: n for n in range(20)}}
    job = job_of_of_tables(folder, tmp_path / 'run', group=None)
    found = data_stage(job)
    data, whole = job._split(90, 30), lambda n: n % 60 < 10
    between = lambda a, b: [int(n) for n in b if twins.get(int(n)) in set(a.tolist())]
    held = between(*data)
    assert found['held-out rows']['value'].startswith(f'{len(held)} of {len(data[1])} share their a, ')
    assert f'{sum(map(whole, held))} of {len(data[1])} share their a and b with a row of the search' in found['held-out rows']['value']
    inside = [n for a, b in stratified_folds(data[0], job.table.labels, 3) for n in between(a, b)]
    assert f'{len(inside)} of {len(data[0])} share their a, ' in found['folds']['value']
    assert f'{sum(map(whole, inside))} of {len(data[0])} share their a and b with a row of the training part' in found['folds']['value']
    words = ['--text', 'a', '--pair', 'b', '--label', 'y', '--model', str(folder / 'model'), '--quiet', 'epochs=1',
        'precision=fp32']
    for n, more in enumerate(([], ['--folds', '2'])):
        assert main(['train', '--data', str(folder / 'data.csv'), *words, '--out', str(tmp_path / f'train{n}'),
            *more]) == 0
        value = decided(tmp_path / f'train{n}')['validation rows']['value']
        assert f"of {120 if more else 24} share their a, " in value
        assert 'share their a and b with a row of the training part' in value
        assert 'share their a and b' in (tmp_path / f'train{n}' / 'report.html').read_text()


def test_field_what_was_noticed_in_a_file_is_a_decision(tmp_path):
    folder = model_and_pairs(tmp_path, 60)
    frame = pd.read_csv(folder / 'data.csv')
    frame.loc[::6, 'y'] = frame.loc[::6, 'y'].str.upper()
    frame.loc[0, 'a'] = 'w1\nw2'
    frame.to_csv(folder / 'data.csv', index=False)
    with pytest.warns(UserWarning, match='names of labels that look alike'):
        job = job_of_of_tables(folder, tmp_path / 'run', group=None)
    found = data_stage(job, 40, 15)
    assert found['line breaks']['value'] == '60 rows from 62 lines'
    assert found['names of labels that look alike']['value'] == "'A', 'a'; 'B', 'b'"
    assert found['names of labels that look alike']['reason']


# Studies, paths, disks, damaged files

ROOT = Path(__file__).resolve().parent.parent
NAMES = ['a b', 'a#b', 'a?b', 'a%20c', 'a:b', 'file:x', 'a{b}']
ROOTLESS = pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')


@pytest.fixture(scope='module')
def study_folder(tmp_path_factory):
    return model_and_pairs(tmp_path_factory.mktemp('field'), 60)


def job(study_folder, out, *more):
    data = ['--data', str(study_folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y']
    size = ['--trials', '2', '--epochs', '1', '--precision', 'fp32', '--space', 'lr=3e-4..1e-2:log', 'confirm=0']
    return ['tune', *data, '--model', str(study_folder / 'model'), '--out', str(out), *size, '--no-ladder', '--quiet', *more]


@pytest.fixture(scope='module')
def finished(study_folder, tmp_path_factory):
    "A finished run, to be read or copied"
    out = tmp_path_factory.mktemp('finished') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.05))
        assert main(job(study_folder, out)) == 0
    return out


def fails(words, capsys, code=2):
    "One line, and the exit status"
    capsys.readouterr()
    assert main([str(w) for w in words]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip() and 'it/s' not in line]
    assert len(lines) == 1 and lines[0].startswith(f'optkit {words[0]}: '), lines
    return lines[0]


# --- 8: trials of the queue, and values that nobody measured

BATCHES = ['lr=1e-4..1e-2:log', 'effective_batch=8,16']


def score(params, fold): return iter([-abs(params['lr'] - 1e-3)])


def from_function(trial): return dict(lr=trial.suggest_float('lr', 1e-4, 1e-2, log=True), effective_batch=trial.suggest_categorical('effective_batch', (8, 16)))


@pytest.mark.parametrize('space', [BATCHES, from_function], ids=['texts', 'function'])
@pytest.mark.parametrize('queued, said', [(dict(lr=1e-3, effective_batch=32), 'effective_batch=32 is not in the space'), (dict(lr=.5, effective_batch=8), 'lr=0.5 is not in the space'),
                                          (dict(lr='high', effective_batch=8), "lr='high' is not in the space")], ids=['choice', 'range', 'kind'])
def test_field_a_queued_trial_outside_of_the_space_fails_once_and_the_study_goes_on(tmp_path, space, queued, said):
    go = lambda n: tune(score, space, n, folds=2, strategy='none', storage=tmp_path / 'study.db', progress=False, say=words.append)
    words = []
    go(2)
    optuna.load_study(study_name='study', storage=sqlite_storage(tmp_path / 'study.db')).enqueue_trial(queued)
    study = go(4)
    assert [ended(t) for t in study.trials] == ['complete', 'complete', 'failed', 'complete']
    assert study.trials[2].state == TrialState.FAIL and said in study.trials[2].user_attrs['reason'] and any(said in w for w in words)
    assert [ended(t) for t in go(5).trials][4:] == ['complete'], 'nothing waits any more'


def test_field_a_queue_that_an_earlier_version_could_not_get_past_is_gone_on_with(tmp_path):
    tune(score, BATCHES, 1, folds=2, storage=tmp_path / 'study.db', progress=False)
    study = optuna.load_study(study_name='study', storage=sqlite_storage(tmp_path / 'study.db'))
    study.enqueue_trial(dict(lr=1e-3, effective_batch=32), user_attrs=dict(resumed_from=0))  # as it queued the trial anew
    assert [ended(t) for t in tune(score, BATCHES, 3, folds=2, storage=tmp_path / 'study.db', progress=False, say=lambda text: None).trials] == ['complete', 'failed', 'complete']


def test_field_a_name_that_is_no_parameter_is_no_reason_to_stop_either(tmp_path):
    study = optuna.create_study(study_name='study', direction='maximize', storage=sqlite_storage(tmp_path / 'study.db'))
    study.enqueue_trial(dict(learning_rate=1e-3))
    found = tune(score, BATCHES, 2, folds=2, storage=tmp_path / 'study.db', progress=False, say=lambda text: None)
    assert [ended(t) for t in found.trials] == ['failed', 'complete'] and "'learning_rate' is no parameter" in found.trials[0].user_attrs['reason']


def test_field_an_error_of_the_space_itself_still_ends_the_study():
    def broken(trial):
        if trial.number and trial.study.study_name == 'study': raise ValueError('a fault of mine')
        return dict(lr=trial.suggest_float('lr', 1e-4, 1e-2))
    with pytest.raises(ValueError, match='a fault of mine'): tune(score, broken, 3, folds=2, storage='memory', name='study', progress=False)


@pytest.fixture(scope='module')
def raced(tmp_path_factory):
    "A study by racing as the version before stored it, with predicted means, and one by a strategy that predicts nothing"
    curve, place = SyntheticCurves(folds=3, epochs=10), tmp_path_factory.mktemp('raced')
    made = {s: (place / s, tune(curve.runner(5), curve.space, 24, folds=3, epochs=10, strategy=s, storage=place / s / 'study.db', seed=5, progress=False)) for s in ('racing', 'asha')}
    old = optuna.create_study(study_name='old', direction='maximize', storage=f"sqlite:///{place / 'racing' / 'old.db'}")
    for name, value in made['racing'][1].user_attrs.items(): old.set_user_attr(name, value)
    for t in made['racing'][1].trials:
        if ended(t) == 'stopped': t.state, t.values, t.user_attrs = TrialState.COMPLETE, [t.value - .01], t.user_attrs | dict(predicted=t.value - .01)
        old.add_trial(t)
    return made | dict(racing=(place / 'racing' / 'old.db', old))


def test_field_a_value_that_was_predicted_says_so_on_its_trial(raced):
    stopped = [t for t in raced['racing'][1].trials if ended(t) == 'stopped']
    assert len(stopped) > 3 and all(t.user_attrs['predicted'] == t.value and value_kind(t) == 'predicted' for t in stopped)
    assert {value_kind(t) for t in raced['asha'][1].trials if ended(t) == 'stopped'} == {'last value'}


def test_field_a_report_says_of_each_value_whether_it_was_predicted(raced, tmp_path):
    for strategy, words in (('racing', 'predicted mean'), ('asha', 'last value')):
        summary = study_summary(raced[strategy][1], 'macro_f1', 30, 30)
        assert {t['value_kind'] for t in summary['trials'] if t['state'] == 'complete'} == {'measured'}
        labels = study_figure(summary).axes[0].get_legend_handles_labels()[1]
        assert [label for label in labels if label.startswith('stopped')] == [f'stopped early ({words})'], labels
        write_json(tmp_path / strategy / 'run.json', dict(version=1)); write_json(tmp_path / strategy / 'study.json', summary)
        page = render(tmp_path / strategy).read_text('utf-8')
        count = sum(t['state'] == 'stopped' for t in summary['trials'])
        assert page.count(f'>{words}<') >= count and ('nobody measured' in page) == (strategy == 'racing')


def test_field_a_view_says_of_each_value_whether_it_was_predicted(raced):
    rows, view = trial_rows(open_study(raced['racing'][0])), study_view(raced['racing'][0])
    assert {(r['state'], r['value_kind']) for r in rows} == {('complete', 'measured'), ('stopped', 'predicted')}
    assert 'is a predicted mean, not measured' in view.words() and 'by predicted values too' in view.words()
    assert 'stopped (predicted mean)' in view.draw().axes[0].get_legend_handles_labels()[1]
    assert 'stopped (last value)' in study_view(raced['asha'][0]).draw().axes[0].get_legend_handles_labels()[1]


# --- 10: paths

@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('relative', [False, True])
def test_field_a_study_in_a_folder_of_any_name_opens_again(tmp_path, monkeypatch, name, relative):
    monkeypatch.chdir(tmp_path)
    file = (Path(name) if relative else tmp_path / name) / 'study.db'
    tune(score, BATCHES, 1, folds=2, storage=file, name='s', progress=False)
    assert len(open_study(file).trials) == len(open_study(file.parent, 's').trials) == 1 and len(study_view(file.parent).rows()) == 1
    assert os.listdir(tmp_path) == [name], 'nothing is written beside the folder'


@pytest.mark.parametrize('name', [*NAMES, 's3:x', '~x'])
@pytest.mark.parametrize('end', ['csv', 'tsv', 'jsonl', 'csv.gz', 'parquet'])
def test_field_a_table_under_any_path_is_read(tmp_path, monkeypatch, name, end):
    if end == 'parquet': pytest.importorskip('pyarrow', reason='pyarrow, which is optional, is not installed')
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    table, file = pd.DataFrame(dict(t=['x y', 'z'], y=['a', 'b'])), tmp_path / name / f'd:a#t.{end}'
    if end == 'parquet': file.write_bytes(table.to_parquet())
    elif end == 'jsonl': file.write_text(table.to_json(orient='records', lines=True))
    else: table.to_csv(file, index=False, sep='\t' if end == 'tsv' else ',')
    for path in (file, Path(name) / file.name): assert len(read_table(path, 't', 'y')) == 2


def test_field_every_file_of_a_job_may_lie_under_an_odd_path(study_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Job, '_rows_per_s', partialmethod(Job._rows_per_s, at_least_s=.05))
    monkeypatch.chdir(tmp_path)
    odd = Path('a#b?c%20d: e')
    shutil.copytree(study_folder, odd)
    assert main(job(odd, odd / 'r#u?n%20:', '--log-file', str(odd / 'l#o?g%20.log'))) == 0
    for words in ('forecast', 'status', 'report', 'worker'): assert main([words, str(odd / 'r#u?n%20:')]) == 0, capsys.readouterr().err
    assert main(['train', *job(odd, odd / 't#r?%20:')[1:13], 'epochs=1', 'precision=fp32', '--quiet']) == 0
    assert os.listdir(tmp_path) == [str(odd)] and {'l#o?g%20.log', 'r#u?n%20:', 't#r?%20:'} <= set(os.listdir(odd))
    assert read_json(odd / 'r#u?n%20:' / 'forecast.json')['done'] == 2


def test_field_compilers_get_no_folder_that_their_command_line_takes_apart(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from optkit.fast import keep_compiled
    for name in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'): monkeypatch.setenv(name, default_cache_dir())
    assert all(p.startswith(default_cache_dir()) for p in keep_compiled(tmp_path / 'a b').values()) and not (tmp_path / 'a b').exists()
    assert all(p.startswith(str(tmp_path / 'a-b')) for p in keep_compiled(tmp_path / 'a-b').values())
    assert all(p.startswith(default_cache_dir()) for p in keep_compiled(tmp_path / "a'b").values()), 'also after another run folder'


# --- 11: full disks, read-only media, damaged and newer files

def full_disk(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'No space left on device'), Exception('No space left on device (os error 28)')], ids=['system', 'tokenizers'])
def test_field_a_model_is_replaced_only_after_the_new_one_is_whole(tmp_path, error):
    model, tokenizer = example_model(), word_tokenizer()
    save_model(model, tmp_path / 'model', tokenizer)
    before = {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()}
    def refuse(study_folder): raise error
    tokenizer.save_pretrained = refuse
    with pytest.raises(InputError, match='the model could not be saved .*No space left on device.*; the one that is there stays'): save_model(model, tmp_path / 'model', tokenizer)
    assert {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()} == before and os.listdir(tmp_path) == ['model']


def test_field_a_model_that_cannot_be_moved_into_place_leaves_the_one_before(tmp_path, monkeypatch):
    save_model(example_model(), tmp_path / 'model')
    before, real = (tmp_path / 'model' / 'model.safetensors').read_bytes(), os.replace
    monkeypatch.setattr(os, 'replace', lambda old, new: full_disk() if Path(old).name == '.part-model' else real(old, new))
    with pytest.raises(InputError, match='could not be saved'): save_model(example_model(seed=3), tmp_path / 'model')
    assert (tmp_path / 'model' / 'model.safetensors').read_bytes() == before


def test_field_a_disk_that_fills_up_at_the_last_moment_leaves_a_line_and_the_model_before(study_folder, finished, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    before = (out / 'model' / 'model.safetensors').read_bytes()
    (out / 'final.json').unlink()
    with monkeypatch.context() as patch:
        patch.setattr('transformers.PreTrainedModel.save_pretrained', full_disk)
        assert 'model: the model could not be saved (' in fails(job(study_folder, out), capsys)
    assert (out / 'model' / 'model.safetensors').read_bytes() == before and not list(out.glob('.*part*'))
    assert main(job(study_folder, out)) == 0 and (out / 'final.json').is_file(), 'the same command with room goes on'


def limited(words, kilobytes):
    "The command in a process whose files cannot grow beyond that"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))
    return subprocess.run([sys.executable, '-c', 'import sys; from optkit.cli import main; sys.exit(main())', *words], preexec_fn=limit, capture_output=True, text=True, cwd=ROOT,
                          env=dict(os.environ, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))))


@pytest.mark.slow
@pytest.mark.parametrize('kilobytes', [1, 60, 130])
def test_field_files_that_cannot_grow_end_in_a_line(study_folder, tmp_path, kilobytes):
    done = limited(job(study_folder, tmp_path / 'run'), kilobytes)
    lines = [line for line in done.stderr.splitlines() if line.startswith('optkit ')]
    assert done.returncode in (1, 2) and len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
    assert 'another version of Optuna' not in lines[0]


def test_field_a_study_without_room_is_not_called_damaged(tmp_path, monkeypatch):
    from sqlalchemy.exc import OperationalError
    def full(*_, **__): raise OperationalError('', {}, Exception('database or disk is full'))
    monkeypatch.setattr('optkit.storage.RDBStorage', full)
    with pytest.raises(InputError, match='study.db: no room is left on the disk .*make room') as caught: open_storage(tmp_path / 'study.db')
    assert 'damaged' not in str(caught.value)


class Full(io.StringIO):
    def flush(self): full_disk()


def test_field_a_log_file_on_a_full_disk_is_reported_once(tmp_path, capsys):
    with cli.Terminal(log_file=str(tmp_path / 'x.log')) as terminal:
        terminal.handlers[0].setStream(Full())
        for n in range(3): terminal.log(f'line {n}')
    assert capsys.readouterr().err.splitlines() == [f'--log-file {tmp_path / "x.log"}: takes no more words (No space left on device)']


def close(file):
    "As when the process that wrote it has ended"
    connection = sqlite3.connect(file)
    connection.execute('pragma wal_checkpoint(truncate)')
    connection.close()
    for side in file.parent.glob(f'{file.name}-*'): side.unlink()


def test_field_how_a_study_is_opened_to_look_at():
    assert [read_mode(writable, log).value for writable, log in ((True, 0), (True, 9), (False, 0), (False, 9))] == ['ro', 'ro', 'immutable', 'ro']


def test_field_a_finished_run_on_read_only_media_opens(finished, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    (out / '.lock').unlink(missing_ok=True)
    close(out / 'study.db')
    real, before = os.access, sorted(os.listdir(out))
    monkeypatch.setattr(os, 'access', lambda path, mode, **kw: False if mode & os.W_OK and Path(path).is_relative_to(out) else real(path, mode, **kw))
    monkeypatch.setattr(report, 'write_whole', lambda target, page: (_ for _ in ()).throw(OSError(errno.EROFS, 'Read-only file system', str(target))))
    for words in ('forecast', 'status', 'report'): assert main([words, str(out)]) == 0, capsys.readouterr().err
    assert 'it is the page of before' in capsys.readouterr().out
    assert sorted(os.listdir(out)) == before, 'no log was made beside the study'
    (out / 'report.html').unlink()
    fails(['report', out], capsys, 1)


@ROOTLESS
def test_field_a_folder_without_the_right_to_write_opens(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / 'run')
    close(out / 'study.db')
    out.chmod(0o555)
    try:
        for words in ('forecast', 'status', 'report'): assert main([words, str(out)]) == 0
    finally: out.chmod(0o755)


def test_field_a_plan_with_further_keys_is_used_and_one_that_lacks_some_is_named(study_folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    plan = read_json(out / 'plan.json')
    write_json(out / 'plan.json', plan | dict(new_field=1))
    assert main(job(study_folder, out)) == 0
    write_json(out / 'plan.json', {k: v for k, v in plan.items() if k != 'epochs'})
    assert 'plan.json: holds no epochs that can be used' in fails(job(study_folder, out), capsys)
    write_json(out / 'plan.json', plan | dict(epochs='three'))
    assert 'plan.json: holds no epochs that can be used' in fails(job(study_folder, out), capsys)


BOMB = '[' * 100_000


@pytest.mark.parametrize('name, text', [(n, t) for n in ('run', 'plan', 'data', 'batch', 'study', 'timings', 'decisions') for t in (BOMB, '{}')] + [('plan', 'null'), ('study', '{"trials": [3]}'), ('decisions', '[3]')],
                         ids=lambda v: 'bomb' if v == BOMB else v)
def test_field_a_damaged_file_of_a_run_ends_in_a_line(study_folder, finished, tmp_path, monkeypatch, capsys, name, text):
    out = shutil.copytree(finished, tmp_path / 'run', ignore=shutil.ignore_patterns('final.json'))
    (out / f'{name}.json').write_text(text)
    monkeypatch.setattr(Job, '_do_final', lambda self: self._read(self.path('timings')) and dict(score=None))
    assert f'{name}.json' in fails(job(study_folder, out), capsys)


@pytest.mark.parametrize('text', [BOMB, '[]', '[3]', '{}', 'null', '"a"', '{"a": '], ids=['bomb', 'list', 'number', 'object', 'null', 'text', 'torn'])
def test_field_what_is_damaged_of_a_run_is_left_out_by_those_who_look_at_it(finished, tmp_path, capsys, text):
    out = shutil.copytree(finished, tmp_path / 'run')
    for name in ('run', 'plan', 'data', 'batch', 'study', 'timings', 'decisions', 'train', 'forecast', 'confirm', 'final', 'progress'):
        (out / f'{name}.json').write_text(text)
    for words in ('status', 'report'): assert main([words, str(out)]) == 0
    if text == '{}': assert 'has no study' in fails(['worker', out], capsys)
    else: assert 'run.json' in fails(['worker', out], capsys)


def test_field_a_run_folder_of_a_newer_version_is_named(study_folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run')
    write_json(out / 'run.json', read_json(out / 'run.json') | dict(version=2))
    assert 'made by another version of optkit (its version is 2, expected 1); use --out' in fails(job(study_folder, out), capsys)


def test_field_a_study_of_another_format_advises_what_the_command_line_has(study_folder, finished, tmp_path, capsys):
    out = shutil.copytree(finished, tmp_path / 'run', ignore=shutil.ignore_patterns('study.json'))
    study = optuna.load_study(study_name='optkit', storage=sqlite_storage(out / 'study.db'))
    study.set_user_attr('optkit', study.user_attrs['optkit'] | dict(format=99))
    said = fails(job(study_folder, out), capsys)
    assert 'its format is 99' in said and 'use --out with another folder' in said and 'fresh' not in said
    with pytest.raises(InputError, match='fresh=True'): tune(score, BATCHES, 1, folds=2, storage=out / 'study.db', name='optkit', progress=False)


def test_field_readings_of_a_training_that_are_damaged_are_passed_over(tmp_path):
    from optkit.progress import add_readings
    assert add_readings([], [BOMB, '3', '[]', 'null', '{"step": "a"}', '{"step": 1}']) == [dict(step=1)]


def test_field_a_checkpoint_of_another_version_ends_in_a_line(study_folder, tmp_path, capsys):
    words = ['train', *job(study_folder, tmp_path / 'run')[1:13], 'epochs=2', 'precision=fp32', '--quiet']
    assert main(words) == 0
    record = next((tmp_path / 'run' / 'checkpoints').glob('step-*')) / 'run.json'
    saved = read_json(record)
    for damaged in (saved | dict(position=saved['position'] | dict(new_field=1)), {k: v for k, v in saved.items() if k != 'made_of'}, saved | dict(in_model=3), [saved]):
        for path in (tmp_path / 'run' / 'checkpoints').glob('step-*/run.json'): write_json(path, damaged)
        assert 'step-' in fails(words, capsys)


# Faults that were planted

torch.set_num_threads(1)
MACHINE = detect() if torch.cuda.is_available() else hardware_with(None)
FP32_FAULTS = choose_precision(MACHINE, prefer='fp32', **(dict(tf32=False) if torch.cuda.is_available() else {}))
DEVICE = FP32_FAULTS.device


# --- dropout in attention: what is kept is made larger, so that the mean stays

def bert_attention(dropout):
    from transformers.models.bert.modeling_bert import BertConfig, BertSelfAttention
    config = BertConfig(hidden_size=32, num_attention_heads=2, attention_probs_dropout_prob=dropout)
    config._attn_implementation = 'sdpa'
    return BertSelfAttention(config)


def deberta_attention(dropout, positions=0.):
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention
    return DisentangledSelfAttention(DebertaV2Config(
        hidden_size=32, num_attention_heads=2, hidden_dropout_prob=positions, attention_probs_dropout_prob=dropout,
        max_position_embeddings=96, max_relative_positions=-1, relative_attention=True, position_buckets=16,
        pos_att_type=['p2c', 'c2p'], share_att_key=True))


def by_rows(module, lengths=(30, 28, 14, 9)):
    "The module on rows end to end, as a function of hidden states"
    from optkit.disentangled import distances
    module, kind = module.to(DEVICE), attention.attention_kind(module)
    far = distances(module, max(lengths), DEVICE) if kind == 'deberta' else None
    rows = module.__dict__['rows'] = attention.row_ends(lengths, device=DEVICE, far=far, kernels=(attention.plain_forward, attention.plain_backward))
    table = dict(rel_embeddings=torch.randn(2 * module.pos_ebd_size, 32, device=DEVICE)) if kind == 'deberta' else {}
    module.__class__ = attention.by_rows(type(module), kind)
    def run(hidden):
        rows.use()
        rows.seed = torch.randint(2**62, (1,))
        return module(hidden, **table)[0][0]
    return run, torch.randn(1, sum(lengths), 32, device=DEVICE)


@pytest.mark.parametrize('dropout', [.1, .4])
@pytest.mark.parametrize('kind', [bert_attention, deberta_attention])
def test_field_attention_dropout_keeps_the_mean(kind, dropout):
    "Where all values are 1, so is each output: exact in evaluation, on average in training, with the rate's spread"
    torch.manual_seed(0)
    module = kind(dropout)
    value = getattr(module, 'value', None) or module.value_proj
    with torch.no_grad(): value.weight.zero_(); value.bias.fill_(1.)
    run, hidden = by_rows(module)
    with torch.no_grad():
        module.eval()
        torch.testing.assert_close(run(hidden), torch.ones(hidden.shape[1], 32, device=DEVICE))
        module.train()
        found = torch.stack([run(hidden) for _ in range(60)])[..., ::16] # one of each head: the others are the same
    assert found.mean().item() == pytest.approx(1, abs=.01) and found.mean(0).std() < .2
    few = found[:, -9:] # of a row of 9 tokens, whose shares are large
    assert .7 < few.std().item() / math.sqrt(dropout / (1 - dropout) / 9) < 2


@pytest.mark.parametrize('rate', [0., .3])
def test_field_dropout_of_positions_is_there_in_training(rate):
    "DeBERTa drops parts of its table of positions, whatever attention drops"
    torch.manual_seed(0)
    module = deberta_attention(0., rate)
    run, hidden = by_rows(module)
    with torch.no_grad():
        assert torch.equal(run(hidden), run(hidden)) == (not rate)
        module.eval()
        assert torch.equal(run(hidden), run(hidden))


# --- updates: AdamW by hand

def by_hand(weights, grads, rates, decay, betas, eps, most):
    "Weights after updates with these gradients: matrices decay, biases and norms do not; the norm is of all gradients"
    weights, first, second = {n: w.double() for n, w in weights.items()}, {}, {}
    for t, (found, lr) in enumerate(zip(grads, rates), 1):
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in found.values()))
        for n, g in found.items():
            g = g.double() * min(1., most / norm.item() if most else 1.)
            first[n] = betas[0] * first.get(n, 0.) + (1 - betas[0]) * g
            second[n] = betas[1] * second.get(n, 0.) + (1 - betas[1]) * g ** 2
            step = first[n] / (1 - betas[0] ** t) / ((second[n] / (1 - betas[1] ** t)).sqrt() + eps)
            weights[n] = weights[n] * (1 - lr * (decay if weights[n].ndim > 1 else 0.)) - lr * step
    return weights


def llama():
    from transformers import LlamaConfig, LlamaForSequenceClassification
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(
        vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, pad_token_id=0, num_labels=2))


ENGINES = dict(fused=Engine, foreach=lambda m, p: Engine(m, p, fused=False),
               fast=lambda m, p: FastEngine(m, p, layers=False))

@pytest.mark.parametrize('settings', [dict(), dict(weight_decay=.9), dict(weight_decay=0.), dict(max_grad_norm=0.),
                                      dict(max_grad_norm=.05, betas=(.6, .95), eps=1e-2, weight_decay=.3)], ids=str)
@pytest.mark.parametrize('make', ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize('model', [lambda: example_model(dropout=0.), llama], ids=['bert', 'llama'])
def test_field_biases_and_norms_do_not_decay(model, make, settings):
    "Three updates at large rates, every weight against AdamW written out; what the engine was built with counts too"
    store = tokenise(example_table(24), word_tokenizer(), 64, progress=False)
    engine, grads, rates = make(model(), FP32_FAULTS), [], (.1, .05, .2)
    engine.reset(**dict(lr=.1) | settings)
    before, update = {n: p.detach().clone() for n, p in engine.model.named_parameters()}, engine._update
    def seen():
        grads.append({n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None})
        update()
    engine._update = seen
    for rate, micro in zip(rates, steps(store, np.arange(24), 8, layout=Layout(rows=3))):
        engine.set_lr(rate)
        engine.step(store, micro)
    c = dict(weight_decay=.01, betas=(.9, .999), eps=1e-8, max_grad_norm=1.) | settings
    want = by_hand(before, grads, rates, c['weight_decay'], c['betas'], c['eps'], c['max_grad_norm'])
    assert {p.ndim for p in before.values()} == {1, 2} and len(grads) == 3
    for n, p in engine.model.named_parameters():
        sure = torch.stack([g[n].abs() for g in grads]).amin(0) > 1e-6 # of the others rounding decides
        assert ((p.double() - want[n]).abs() < 1e-4 + 1e-3 * want[n].abs())[sure].all(), n


# --- intervals

def answers(right):
    right = np.asarray(right)
    return torch.tensor(np.stack([right, ~right], 1), dtype=torch.float), torch.zeros(len(right), dtype=torch.long)


@pytest.mark.parametrize('confidence', [.95, .8])
def test_field_the_interval_is_of_the_level_that_it_says(confidence):
    "160 of 200 right: the ends are quantiles of a binomial distribution"
    found = bootstrap_score(*answers(np.arange(200) < 160), 'accuracy', 2000, confidence)
    assert found == pytest.approx(binom.ppf([.5 - confidence / 2, .5 + confidence / 2], 200, .8) / 200, abs=.0055)


def test_field_the_interval_draws_whole_documents():
    "Five rows a document, right or wrong together: 40 answers, not 200; one row a document as without groups"
    right, rows = np.repeat(np.arange(40) < 32, 5), np.random.default_rng(0).permutation(200)
    logits, labels = answers(right[rows])
    found = bootstrap_score(logits, labels, 'accuracy', 2000, groups=np.repeat(np.arange(40), 5)[rows])
    assert found == pytest.approx(binom.ppf([.025, .975], 40, .8) / 40, abs=.026)
    by_row = bootstrap_score(logits, labels, 'accuracy', 300)
    assert found[1] - found[0] > 1.9 * (by_row[1] - by_row[0])
    assert bootstrap_score(logits, labels, 'accuracy', 300, groups=np.arange(200)) == by_row


def test_field_the_final_interval_of_a_grouped_table_is_over_documents(tmp_path, monkeypatch):
    "The job hands its held-out groups on, and says how many there are"
    import optkit.job
    from made_up import model_and_pairs
    folder, seen = model_and_pairs(tmp_path, 100, g=[f'document {n // 4}' for n in range(100)]), []
    looked_at = lambda *a, **k: (seen.append(k), bootstrap_score(*a, 20, **k))[1]
    monkeypatch.setattr(optkit.job, 'bootstrap_score', looked_at)
    config = JobConfig(data=str(folder / 'data.csv'), text='a', pair='b', label='y', group='g',
                       model=str(folder / 'model'), out=str(tmp_path / 'run'), trials=2, epochs=1, space=('lr=1e-4..1e-3:log',), precision='fp32',
                       ladder=False, confirm=0, save_model=False)
    said = []
    Job(config, progress=False, say=said.append, command='test').run()
    held, final = read_json(tmp_path / 'run' / 'data.json')['heldout'], read_json(tmp_path / 'run' / 'final.json')
    of = pd.read_csv(folder / 'data.csv').g[held]
    assert len(seen) == 1 and len(seen[0]['groups']) == len(held) and final['groups'] == of.nunique() < len(held)
    assert all(len({*of[seen[0]['groups'] == g]}) == 1 for g in seen[0]['groups'])
    assert any(f'{len(held)} rows of {of.nunique()} groups' in line for line in said)
    page = render(tmp_path / 'run').read_text('utf-8')
    assert f'held-out rows of {of.nunique()} groups, drawn whole for the interval' in page


# --- rates: tokens that are no padding

@pytest.mark.parametrize('layout', LAYOUTS)
def test_field_rates_and_mfu_count_no_padding(layout, monkeypatch):
    "Of a whole run: rows, tokens and FLOPs of the rows by themselves, whatever the layout computes beside them"
    store, counted = tokenise(example_table(40), word_tokenizer(), 64, progress=False), []
    monkeypatch.setattr(Meter, 'count', lambda self, *numbers: counted.append(numbers))
    config = TrainConfig(epochs=2, effective_batch=8, physical_batch=3, layout=layout, precision='fp32')
    engine, train = make_engine(example_model(dropout=0.), config, MACHINE), np.arange(30)
    found = Trainer(engine, store, config).fit(train, np.arange(30, 40))
    rows, _, tokens, flops = np.sum(counted, 0)
    real = store.lengths[train]
    assert (rows, tokens) == (60, 2 * real.sum()) and len({*real}) > 3
    assert flops == pytest.approx(2 * training_flops(engine.model, real))
    for e in found.history: assert e.tokens_per_s / e.samples_per_s == pytest.approx(real.mean())


def test_field_a_ladder_counts_padding_apart():
    "Two steps of a second each, of which every row is padded to 64"
    from optkit.ladder import step_rates
    store, model = tokenise(example_table(16), word_tokenizer(), 64, progress=False), example_model()
    plan = list(steps(store, np.arange(16), 8, layout='full'))
    flops_of, real = lambda lengths: training_flops(model, lengths), store.lengths.sum()
    found = step_rates([1., 1.], [[step] for step in plan], store, flops_of, 1e9)
    assert found['mfu'] == pytest.approx(training_flops(model, store.lengths) / 2e9)
    assert found['padded_tokens_per_s']['p50'] == 8 * 64 and found['samples_per_s']['p50'] == 8
    assert found['tokens_per_s']['p20'] + found['tokens_per_s']['p80'] == pytest.approx(real)


# Review after the merge

@pytest.mark.parametrize('family, labels, classes, adapter', [
    ('Bert', 'named', ('neg', 'pos'), 'lora'), ('Bert', 'named', ('neg', 'neu', 'pos'), 'dora'),
    ('Llama', 'numbers', ('a', 'b', 'c'), 'lora'), ('DebertaV2', 'numbers', ('a', 'b'), 'dora')])
def test_field_folder_of_an_adapter_answers_with_its_own_labels_and_padding(family, labels, classes, adapter, tmp_path):
    "A base with other labels, in another order, padding with another token and on the other side"
    known = dict(id2label={0: 'pos', 1: 'neu', 2: 'neg'}, label2id=dict(pos=0, neu=1, neg=2)) if labels == 'named' else {}
    tokenizer = tokenizer_with('[SEP]', model_max_length=10**30, padding_side='left')
    base = saved(tmp_path / 'base', model_of(family, **known), tokenizer)
    job = job_of_of_configs(tmp_path, base, table_file(tmp_path, classes), train=(f'adapter={adapter}', 'adapter_rank=2'))
    job.run()
    folder, texts = str(tmp_path / 'run' / 'model'), job.table.texts[:4]
    store = store_of(job.tokenizer, ['a', 'b'] * 2, texts=texts, longest=16)
    want = torch.softmax(predicted(job.engine, store, np.arange(4)), 1)
    answers = pipeline('text-classification', folder, top_k=None)(texts, batch_size=4)
    given = [[{p['label']: p['score'] for p in row}[c] for c in job.table.classes] for row in answers]
    assert torch.allclose(torch.tensor(given), want, atol=CLOSE)
    model, cut = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert (model.config.pad_token_id, cut.model_max_length, cut.padding_side) == (3, 16, 'right')
    assert model.config.problem_type == 'single_label_classification'
    with torch.no_grad(): logits = model.eval()(**cut(texts, return_tensors='pt', padding=True)).logits
    assert torch.allclose(torch.softmax(logits, 1), want, atol=CLOSE)
    below = AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(classes),
                                                               ignore_mismatched_sizes=True)
    below.config.pad_token_id = 3
    logits = logits_of(peft.PeftModel.from_pretrained(below, folder), store, 4)
    assert torch.allclose(torch.softmax(logits, 1), want, atol=CLOSE)
    with pytest.raises(InputError, match='holds an adapter; load its base, or a model that peft has merged'):
        load_model(folder, classes)


@pytest.mark.parametrize('labels, problem', [
    (([1., -100.], [0., 1.]), None), (([1., 2.], [0., 1.]), None), ((0, 1), 'multi_label_classification'),
    ((1e39, 1.), 'regression'), ((1., float('-inf')), 'regression')])
def test_field_labels_that_no_loss_can_learn_are_refused(labels, problem, tmp_path):
    "-100 in a row of several labels gave a loss below 0, which training then followed"
    rows = [dict(tokenizer_with()(t), labels=labels[n % 2]) for n, t in enumerate(texts_of())]
    model = model_of('Bert', num_labels=1 if problem == 'regression' else 2, problem_type=problem)
    wanted = 'finite numbers, as many in each row' + (', from 0 to 1' if problem != 'regression' else '')
    with pytest.raises(InputError, match=rf'row [12] has the label .*, expected {wanted}'):
        from_hf(their_trainer_of_configs(tmp_path, model, rows, tokenizer_with()), MACHINE)
    if problem == 'regression':
        with pytest.raises(InputError, match='labels of regression are'):
            with_labels(store_of(tokenizer_with()), np.resize(labels, 40), 'regression')


@pytest.mark.parametrize('fast', [False, True])
def test_field_engine_without_a_trainer_checks_ids_and_pads_with_the_token_of_the_rows(fast, tmp_path):
    "As in `predict`, `plan_batch` and `step`, which a user may call alone"
    _, tokenizer, data = unknown_token(tmp_path)
    store = tokenise(table_from(data), tokenizer, 16, progress=False)
    engine = make_engine(example_model(), replace(CPU, fast=fast), MACHINE)
    with pytest.raises(InputError, match='token 204, but .* knows 204 tokens'): engine.predict(store, np.arange(8))
    rows = store_of(tokenizer_with('[SEP]'))
    for family, pad in (('Llama', None), ('Llama', 1), ('GPT2', None)):
        found = [make_engine(model_of(family, pad_token_id=p), replace(CPU, fast=fast), MACHINE) for p in (pad, 3)]
        losses = [(engine.reset(), engine.step(rows, [MicroBatch(np.arange(8), 48)]).item())[1] for engine in found]
        assert losses[0] == losses[1] and found[0].model.config.pad_token_id == 3
        other = make_engine(model_of(family, pad_token_id=pad), replace(CPU, fast=fast), MACHINE)
        alone, _ = alone_and_together(model_of(family, pad_token_id=3), rows)
        assert torch.allclose(predicted(other, rows, np.arange(8)), alone[:8], atol=CLOSE)
        assert plan_batch(make_engine(model_of(family, pad_token_id=pad), CPU, MACHINE), rows, 8).physical == 8


def test_field_token_classifier_of_another_order_is_refused_with_what_helps():
    names = ('O', 'B', 'I')
    model = transformers.BertForTokenClassification(transformers.BertConfig(**BERT, id2label=dict(enumerate(names))))
    texts = [t.split() for t in texts_of()]
    labels = [[names[(n + k) % 3] for k in range(len(t))] for n, t in enumerate(texts)]
    made = lambda labels: tokenise(table_from(dict(text=texts, label=labels), task='tokens'), tokenizer_with(), 48,
                                   progress=False)
    with pytest.raises(InputError, match='B, I, O, but .* has O, B, I in this order; give the labels as the numbers'):
        Trainer(make_engine(model, CPU, MACHINE), made(labels), CPU)
    numbered = made([[str(names.index(l)) for l in row] for row in labels])
    Trainer(make_engine(model, CPU, MACHINE), numbered, CPU).fit(np.arange(32), np.arange(32, 40))
    assert tuple(model.config.id2label.values()) == names


def test_field_adapter_on_a_model_of_experts_is_loaded_from_its_folder(store, tmp_path):
    "Several weights of a module under adapters, one around the other"
    torch.manual_seed(5)
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / 'base')
    model = load_model(str(tmp_path / 'base'), store.classes, word_tokenizer())
    trainer = Trainer(make_engine(model, ADAPTER, MACHINE), store, ADAPTER, folder=tmp_path / 'run')
    trainer.fit(np.arange(24), np.arange(24, 36))
    want = logits_of(trainer.engine.model, store)
    folder = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'run' / 'model')
    assert torch.allclose(logits_of(folder, store), want, atol=CLOSE)
    assert torch.allclose(loaded_logits(str(tmp_path / 'base'), tmp_path / 'run' / 'model', store, 1), want, atol=CLOSE)


@pytest.mark.parametrize('family, more', [
    ('FNet', {}), ('ConvBert', dict(embedding_size=32)), ('Nystromformer', {}), ('MPNet', {})])
def test_field_model_whose_answers_depend_on_the_padding_is_warned_of(family, more):
    config = getattr(transformers, f'{family}Config')(**BERT | more)
    torch.manual_seed(0)
    model = getattr(transformers, f'{family}ForSequenceClassification')(config)
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p) * .1)
    store = store_of(tokenizer_with())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        settle_config(model, store)
    alone, together = alone_and_together(model, store)
    differ = bool((alone - together).abs().max() > 1e-4)
    assert differ == (family != 'MPNet') == any('reads the padding of a row' in str(w.message) for w in said)


@pytest.mark.parametrize('adapter', ['lora', 'dora'])
def test_field_preset_of_which_no_row_fits_is_refused(adapter):
    "The reason said that about 0 rows fit, and the preset took one"
    config = transformers.LlamaConfig(**LLAMA)
    with pytest.raises(InputError, match='T4: this does not fit .*about 0 rows fit'):
        preset_of('t4', model=config, max_length=1024, adapter=adapter)
    assert preset_of('l4', model=config, max_length=1024, adapter=adapter).physical_batch > 1


@pytest.mark.parametrize('kind', ['embeddings', 'tokens', 'named', 'two', 'ia3'])
def test_field_adapters_of_the_user_of_any_kind_are_saved_for_peft(kind, store, tmp_path):
    "The base is written beside those that transformers loads with it; the others are as peft saves them"
    base, name = save_base('bert', tmp_path / 'base', 'ForSequenceClassification'), 'mine' if kind == 'named' else 'default'
    settings = dict(task_type='SEQ_CLS', target_modules=['query', 'word_embeddings'] if kind == 'embeddings' else ['query'])
    if kind == 'tokens': settings['trainable_token_indices'] = dict(word_embeddings=[5, 6])
    if kind == 'ia3': config = peft.IA3Config(feedforward_modules=[], **settings)
    else: config = peft.LoraConfig(r=2, **settings)
    model = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config, adapter_name=name)
    if kind == 'two': model.add_adapter('second', peft.LoraConfig(r=2, **settings))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad: p.add_(.1)
    save_model(model, tmp_path / 'model')
    where = tmp_path / 'model' / (name if kind == 'named' else '')
    assert torch.allclose(loaded_logits(base, where, store, 1), logits_of(model, store), atol=1e-5)
    assert (tmp_path / 'model' / 'config.json').exists() == (kind == 'embeddings')
    if kind == 'embeddings':
        folder = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'model')
        assert torch.allclose(logits_of(folder, store), logits_of(model, store), atol=1e-5)
