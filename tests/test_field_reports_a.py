"Reports from the field: adapters that answer the same after loading, what was asked for, what fits into memory"
import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from optkit.cli import main
from optkit.data import InputError, batch_of, example_table, tokenise, word_tokenizer
from optkit.engine import example_model, load_model
from optkit.fast import fast_problem
from optkit.hardware import hardware_with, known_gpu
from optkit.precision import set_attention
from optkit.status import OPTIMIZATIONS, memory_estimate, model_shape, preset_of, status
from optkit.timing import read_json
from optkit.trainer import TrainConfig, Trainer, make_engine, new_layers, parse_settings

peft = pytest.importorskip('peft', reason='needs peft')
torch.set_num_threads(1)
HERE = hardware_with(None)
ADAPTER = TrainConfig(epochs=1, lr=1e-2, effective_batch=12, physical_batch=12, eval_batch=12, precision='fp32', adapter='lora', adapter_rank=2, seed=2)
BERT = dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128, pad_token_id=0)
GROUPED = dict(BERT, num_key_value_heads=1, head_dim=16)
V3 = dict(relative_attention=True, pos_att_type=['p2c', 'c2p'], position_buckets=16, share_att_key=True, norm_rel_ebd='layer_norm', position_biased_input=False, type_vocab_size=0)
FAMILIES = dict(  # what names the classes of transformers, settings, what a language model of the family is called
    bert=('Bert', BERT, 'ForMaskedLM'), roberta=('Roberta', BERT, 'ForMaskedLM'), xlmr=('XLMRoberta', BERT, 'ForMaskedLM'),
    electra=('Electra', dict(BERT, embedding_size=16), 'ForMaskedLM'), albert=('Albert', dict(BERT, embedding_size=16), 'ForMaskedLM'),
    distilbert=('DistilBert', dict(vocab_size=204, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=128, pad_token_id=0), 'ForMaskedLM'),
    mpnet=('MPNet', BERT, 'ForMaskedLM'), modernbert=('ModernBert', dict(BERT, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2), 'ForMaskedLM'),
    deberta_v2=('DebertaV2', BERT, 'ForMaskedLM'), deberta_v3=('DebertaV2', dict(BERT, **V3), 'ForMaskedLM'),
    gpt2=('GPT2', dict(vocab_size=204, n_embd=32, n_layer=2, n_head=2, n_positions=128, pad_token_id=0), 'LMHeadModel'),
    llama=('Llama', GROUPED, 'ForCausalLM'), qwen3=('Qwen3', GROUPED, 'ForCausalLM'), gemma3=('Gemma3', GROUPED, 'ForCausalLM'))


def save_base(family, folder, end=None):
    "A checkpoint of the family without the head of a classifier"
    name, settings, language_model = FAMILIES[family]
    config = getattr(transformers, name + ('TextConfig' if family == 'gemma3' else 'Config'))(**settings)
    torch.manual_seed(5)
    getattr(transformers, name + (end or language_model))(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(36), word_tokenizer(), 32, progress=False)


def logits_of(model, store):
    with torch.no_grad(): return model.eval()(**batch_of(store, np.arange(8), 32)[0]).logits


def loaded_logits(base, folder, store, seed, classes=2):
    "What base and adapter give in another process, as peft loads them"
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes)
    return logits_of(peft.PeftModel.from_pretrained(model, folder), store)


@pytest.mark.parametrize('adapter', ['lora', 'dora'])
@pytest.mark.parametrize('family', FAMILIES)
def test_field_saved_adapter_answers_the_same_after_loading(family, adapter, store, tmp_path):  # huggingface/peft#2171
    base = save_base(family, tmp_path / 'base')
    c = replace(ADAPTER, adapter=adapter)
    trainer = Trainer(make_engine(load_model(base, store.classes, word_tokenizer(), seed=0), c, HERE), store, c, folder=tmp_path / 'run')
    trainer.fit(np.arange(24), np.arange(24, 36))
    want, before = logits_of(trainer.engine.model, store), logits_of(load_model(base, store.classes, word_tokenizer(), seed=0), store)
    for seed in (1, 2): assert torch.allclose(loaded_logits(base, tmp_path / 'run' / 'model', store, seed), want, atol=1e-5)
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
    name, settings, _ = FAMILIES[family]
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
