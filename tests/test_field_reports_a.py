"Reports from the field: adapters that answer the same after loading, what was asked for, what fits into memory"
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from optkit.data import InputError, batch_of, example_table, tokenise, word_tokenizer
from optkit.engine import example_model, load_model
from optkit.hardware import hardware_with
from optkit.trainer import TrainConfig, Trainer, make_engine, new_layers

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
