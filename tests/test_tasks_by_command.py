"Every task from the command line: causal models with completions and chats, several classes, numbers and words; formats of weights; adapters that are searched"
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import optkit.build
import optkit.job
import optkit.trainer
from optkit.base import InputError, read_json
from optkit.build import make_engine, variant_of
from optkit.cli import main
from optkit.config import TrainConfig
from optkit.hardware import hardware_with
from optkit.job import Job, JobConfig
from optkit.models import load_model, load_tokenizer
from optkit.store import tokenise
from optkit.table import DEMO_DATA, read_frame, read_table
from optkit.frames import table_from
from optkit.trainer import fold_runner, Trainer

torch.set_num_threads(1)
HERE = hardware_with(None)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Real mails as prompts and completions, as chats, and with labels of each task; a tiny Llama and a tiny BERT with random weights, and a tokenizer of the mails"
    home = tmp_path_factory.mktemp('tasks')
    mails = read_frame(DEMO_DATA).head(60).copy()
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.train_from_iterator([*mails.subject, *mails.body], trainers.BpeTrainer(vocab_size=500, special_tokens=['<pad>', '<end>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token='<pad>', eos_token='<end>')
    tokenizer.save_pretrained(home / 'bert')
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(home / 'llama')
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=1024, pad_token_id=0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, eos_token_id=1, bos_token_id=1, tie_word_embeddings=True)).save_pretrained(home / 'llama')
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(home / 'bert')
    mails['body'] = mails.body.str[:100]
    mails['prompt'], mails['answer'] = mails.body + '\nlabel:', ' ' + mails.label
    mails['size'], mails['odd'] = mails.body.str.len() / 100, 'x' + mails.index.astype(str)
    mails['tags'] = [f'{label}|reply' if subject.startswith('Re:') else label for label, subject in zip(mails.label, mails.subject)]
    mails['three'] = [('a', 'b', 'c')[n % 3] for n in range(len(mails))]
    mails.to_csv(home / 'mails.csv', index=False)
    words = [subject.split()[:12] or ['none'] for subject in mails.subject]
    rows = [dict(words=w, tags=['upper' if x[0].isupper() else 'lower' for x in w], chat=[dict(role='user', content=b), dict(role='assistant', content=l)]) for w, b, l in zip(words, mails.body, mails.label)]
    (home / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return home


def words(command, folder, out, *more, data='mails.csv', model='llama', text='prompt'):
    return [command, '--data', str(folder / data), '--text', text, '--model', str(folder / model), '--out', str(out), '--quiet', *more]


CAUSAL = '--task', 'causal', '--completion', 'answer'
SHORT = '--max-length', '128', 'epochs=1', 'precision=fp32', 'effective_batch=8'
STUDY = '--max-length', '128', '--epochs', '1', '--folds', '2', '--no-ladder', '--precision', 'fp32', '--effective-batch', '8', 'confirm=0'
IDS = torch.tensor([[5, 9, 40, 7, 300]])

@pytest.fixture
def saved_logits(monkeypatch):
    "Logits of each model at the moment when it is saved"
    found = []
    def watch(module):
        real = module.save_model
        def save(model, *args):
            model.eval()
            with torch.no_grad(): found.append(model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits)
            return real(model, *args)
        monkeypatch.setattr(module, 'save_model', save)
    watch(optkit.trainer)
    watch(optkit.job)
    return found


# --- causal models: what is trained, saved, and loaded elsewhere

LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import AutoPeftModelForCausalLM
whole, adapter, out = sys.argv[1:]
ids = torch.tensor([[5, 9, 40, 7, 300]])
found = []
for kind, path in ((AutoModelForCausalLM, whole), (AutoPeftModelForCausalLM, adapter), (AutoModelForCausalLM, adapter)):
    model = kind.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad(): found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
assert AutoTokenizer.from_pretrained(whole).eos_token == '<end>'
torch.save(found, out)
"""

def test_a_causal_model_loads_in_a_new_process_with_transformers_and_peft(folder, tmp_path, saved_logits, capsys):
    assert main(words('train', folder, tmp_path / 'whole', *CAUSAL, *SHORT, 'lr=3e-3', '--json')) == 0
    result = json.loads(capsys.readouterr().out)
    assert result['metric'] == 'loss' and 0 < result['score'] < 7
    epoch = read_json(tmp_path / 'whole' / 'train.json')['history'][-1]
    assert epoch['metrics']['perplexity'] == pytest.approx(np.exp(epoch['metrics']['loss'])) and 0 <= epoch['metrics']['accuracy'] <= 1
    assert main(words('train', folder, tmp_path / 'lora', *CAUSAL, *SHORT, 'lr=3e-3', 'adapter=lora', 'adapter_rank=4')) == 0
    code = [sys.executable, '-c', LOADS, str(tmp_path / 'whole' / 'model'), str(tmp_path / 'lora' / 'model'), str(tmp_path / 'logits.pt')]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, with_peft, with_transformers = torch.load(tmp_path / 'logits.pt')
    assert torch.allclose(whole, saved_logits[0], atol=1e-5) and torch.allclose(with_peft, saved_logits[1], atol=1e-5) and torch.allclose(with_transformers, with_peft, atol=1e-5)
    start = load_model(str(folder / 'llama'), task='causal').eval()
    assert (start(input_ids=IDS).logits - whole).abs().max() > 1e-3 # it has been trained


def gradients(folder, table, rows, max_length=256):
    "What a step of the engine gives its optimizer"
    tokenizer = load_tokenizer(str(folder / 'llama'))
    store = tokenise(table, tokenizer, max_length, progress=False)
    engine, seen = make_engine(load_model(str(folder / 'llama'), (), tokenizer, task='causal'), TrainConfig(precision='fp32', max_grad_norm=0., metric='loss'), HERE), {}
    real = engine.optimizer.step
    engine.optimizer.step = lambda *a: (seen.update({n: p.grad.clone() for n, p in engine.model.named_parameters()}), real(*a))[1]
    engine.reset(lr=1e-3, max_grad_norm=0.)
    return engine.step(store, np.array(rows)).item(), seen


def by_hand(folder, rows):
    "Mean loss over the learnt tokens of rows of (ids, learnt), and its gradients; each row alone"
    model = load_model(str(folder / 'llama'), task='causal').train()
    losses, count = 0., 0
    for ids, learnt in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction='none')
        mask = torch.tensor(learnt[1:])
        losses, count = losses + each[mask].sum(), count + int(mask.sum())
    (losses / count).backward()
    return (losses / count).item(), {n: p.grad for n, p in model.named_parameters()}


def same(a, b): return all(torch.allclose(a[n], b[n], atol=1e-6, rtol=1e-4) for n in b)


def test_prompt_tokens_carry_no_loss(folder):
    tokenizer, frame = load_tokenizer(str(folder / 'llama')), read_frame(folder / 'mails.csv')
    table = read_table(folder / 'mails.csv', 'prompt', None, task='causal', completion='answer')
    rows = [0, 3, 7]
    parts = [(tokenizer(frame.prompt[r]).input_ids, tokenizer(frame.answer[r]).input_ids + [tokenizer.eos_token_id]) for r in rows]
    loss, seen = gradients(folder, table, rows)
    expected, grads = by_hand(folder, [(p + c, [False] * len(p) + [True] * len(c)) for p, c in parts])
    assert loss == pytest.approx(expected, rel=1e-5) and same(seen, grads)
    _, of_all = by_hand(folder, [(p + c, [True] * len(p + c)) for p, c in parts])
    assert not same(seen, of_all)


def test_what_the_assistant_says_is_learnt_in_every_turn(folder):
    tokenizer = load_tokenizer(str(folder / 'llama'))
    say = lambda role, content: dict(role=role, content=content)
    chat = [say('system', 'be short'), say('user', 'two and two'), say('assistant', 'four'), say('user', 'more'), say('assistant', 'five')]
    pieces = [('<system>be short<end><user>two and two<end><assistant>', False), ('four<end>', True), ('<user>more<end><assistant>', False), ('five<end>', True)]
    ids, learnt = [], []
    for text, counts in pieces:
        part = tokenizer(text).input_ids
        ids, learnt = ids + part, learnt + [counts] * len(part)
    assert ids == tokenizer(''.join(t for t, _ in pieces)).input_ids # no token has characters of two pieces
    loss, seen = gradients(folder, table_from([dict(text=chat)], task='causal'), [0])
    expected, grads = by_hand(folder, [(ids, learnt)])
    assert loss == pytest.approx(expected, rel=1e-5) and same(seen, grads)
    store = tokenise(table_from(dict(text=[chat[:2]], say=['four']), 'text', task='causal', completion='say'), tokenizer, 64, progress=False)
    assert store.targets.tolist() == [len(tokenizer('four<end>').input_ids)] # a chat as the prompt of a completion
    tokenizer.chat_template = TEMPLATE.replace('{{ m.content }}', "{{ m.content if loop.last or m.role != 'assistant' else m.content[:2] }}") # drops thoughts of earlier turns
    store = tokenise(table_from([dict(text=chat)], task='causal'), tokenizer, 64, progress=False)
    assert store.targets.tolist() == [len(tokenizer('five<end>').input_ids)]


def test_chats_from_the_command_line(folder, tmp_path, capsys):
    assert main(words('train', folder, tmp_path / 'run', '--task', 'causal', *SHORT, 'adapter=dora', 'adapter_rank=2', data='rows.jsonl', text='chat')) == 0
    assert 'causal; 48 rows to train on' in capsys.readouterr().out
    assert read_json(tmp_path / 'run' / 'model' / 'adapter_config.json')['use_dora']


def test_a_completion_that_is_cut_is_counted(folder, tmp_path, capsys):
    frame = read_frame(folder / 'mails.csv').assign(prompt='label:')
    frame.assign(answer=frame.body).to_csv(tmp_path / 'long.csv', index=False)
    assert main(words('train', tmp_path, tmp_path / 'run', *CAUSAL, '--max-length', '24', 'epochs=1', 'precision=fp32', data='long.csv', model=folder / 'llama')) == 0
    note = next(d for d in read_json(tmp_path / 'run' / 'decisions.json') if d['what'] == 'rows that are cut')
    assert 'of 60' in note['value'] and 'more than 24 tokens' in note['reason'] and 'rows that are cut: ' + note['value'] in capsys.readouterr().out


# --- the other tasks

@pytest.mark.parametrize('task, data, text, label, kind, outputs', [
    ('multilabel', 'mails.csv', 'body', 'tags', AutoModelForSequenceClassification, 3), ('regression', 'mails.csv', 'body', 'size', AutoModelForSequenceClassification, 1),
    ('tokens', 'rows.jsonl', 'words', 'tags', AutoModelForTokenClassification, 2)])
def test_every_task_trains_by_command(folder, tmp_path, capsys, task, data, text, label, kind, outputs):
    assert main(words('train', folder, tmp_path / 'run', '--task', task, '--label', label, *SHORT, '--json', data=data, model='bert', text=text)) == 0
    result = json.loads(capsys.readouterr().out)
    assert np.isfinite(result['score']) and result['metric'] == ('loss' if task == 'regression' else 'macro_f1')
    model = kind.from_pretrained(tmp_path / 'run' / 'model')
    assert model.config.num_labels == outputs
    if task != 'tokens': assert model.config.problem_type == dict(multilabel='multi_label_classification', regression='regression')[task]
    if task == 'multilabel': assert [*model.config.id2label.values()] == ['ham', 'reply', 'spam'] or len(model.config.id2label) == 3
    assert (tmp_path / 'run' / 'report.html').is_file()


@pytest.mark.parametrize('task, label', [('multilabel', 'tags'), ('regression', 'size')])
def test_a_job_of_another_task(folder, tmp_path, capsys, task, label):
    assert main(words('tune', folder, tmp_path / 'run', '--task', task, '--label', label, *STUDY, '--trials', '1', '--json', model='bert', text='body')) == 0
    final = json.loads(capsys.readouterr().out)['final']
    low, high = final['interval']
    assert low <= final['score'] <= high and 'confusion' not in final and 13 <= final['rows'] <= 17
    assert not any(s.startswith('label_smoothing') for s in read_json(tmp_path / 'run' / 'run.json')['settings']['space'])


def test_f1_of_the_positive_class_and_average_precision_by_name(folder, tmp_path, capsys):
    from sklearn.metrics import average_precision_score, f1_score
    common = '--label', 'label', *SHORT, '--json'
    for metric in ('f1', 'average_precision'):
        assert main(words('train', folder, tmp_path / metric, *common, f'metric={metric}', model='bert', text='body')) == 0
        result = json.loads(capsys.readouterr().out)
        assert result['metric'] == metric and 0 <= result['score'] <= 1
    from optkit.metrics import score
    logits, labels = torch.randn(40, 2, generator=torch.manual_seed(0)), torch.arange(40) % 3 // 2
    scores = score(logits, labels)
    assert scores['f1'] == f1_score(labels, logits.argmax(1)) and scores['average_precision'] == pytest.approx(average_precision_score(labels, logits[:, 1] - logits[:, 0]))


# --- formats of weights

def test_weights_in_bf16_are_never_there_in_fp32(folder, tmp_path, monkeypatch):
    load_model(str(folder / 'llama'), task='causal').bfloat16().save_pretrained(tmp_path / 'half')
    found, real = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, 'to', lambda self, *a, **k: (found.append(real(self, *a, **k)), found[-1])[1]) # transformers reads weights in threads of its own
    largest = lambda: max((t.numel() for t in found if t.dtype == torch.float32 and t.device.type != 'meta'), default=0)
    load_model(str(tmp_path / 'half'), task='causal')
    assert largest() >= 500 * 32
    found.clear()
    model = load_model(str(tmp_path / 'half'), task='causal', dtype='bf16')
    assert largest() < 32 * 32 and {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_bf16_base_trains_under_an_adapter_in_fp32(folder, tmp_path):
    assert main(words('train', folder, tmp_path / 'run', *CAUSAL, '--max-length', '128', '--dtype', 'bf16', 'epochs=1', 'adapter=lora', 'adapter_rank=2')) == 0
    dtypes = []
    for name in ('model', 'adapter_model'):
        with safe_open(tmp_path / 'run' / 'model' / f'{name}.safetensors', 'pt') as file: dtypes.append({str(file.get_tensor(n).dtype) for n in file.keys()})
    assert dtypes == [{'torch.bfloat16'}, {'torch.float32'}]
    again = words('train', folder, tmp_path / 'run', *CAUSAL, '--max-length', '128', 'epochs=1', 'adapter=lora', 'adapter_rank=2')
    assert main(again) == 2 # without --dtype it is another run


@pytest.mark.slow
@pytest.mark.parametrize('bits', ['8bit', '4bit'])
def test_a_quantised_base_trains_by_command(folder, tmp_path, bits):
    pytest.importorskip('bitsandbytes', reason='bitsandbytes, which is optional, is not installed')
    config = LlamaConfig.from_pretrained(folder / 'llama')
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 64 # blocks of 4 bits have 64 weights
    LlamaForCausalLM(config).save_pretrained(tmp_path / 'wide')
    load_tokenizer(str(folder / 'llama')).save_pretrained(tmp_path / 'wide')
    assert main(words('train', folder, tmp_path / 'run', *CAUSAL, '--max-length', '128', '--load-in', bits, 'epochs=2', 'lr=3e-3', 'adapter=lora', model=tmp_path / 'wide')) == 0
    history = read_json(tmp_path / 'run' / 'train.json')['history']
    assert history[-1]['train_loss'] < history[0]['train_loss'] and (tmp_path / 'run' / 'model' / 'adapter_model.safetensors').is_file()


def test_rows_may_be_longer_than_512_tokens(folder, tmp_path):
    job = Job(JobConfig(str(folder / 'mails.csv'), 'prompt', task='causal', completion='answer', model=str(folder / 'llama'), out=str(tmp_path / 'run'), max_length=900), progress=False)
    assert job.longest == 900 and not (tmp_path / 'run').exists()


# --- adapters that are searched

def test_ranks_are_searched_with_one_engine_each(folder, tmp_path, capsys, saved_logits, monkeypatch):
    built, real = [], optkit.build.Variants._build
    monkeypatch.setattr(optkit.build.Variants, '_build', lambda self, config: (built.append(config.adapter_rank), real(self, config))[1])
    assert main(words('tune', folder, tmp_path / 'run', *CAUSAL, *STUDY, '--trials', '5', '--strategy', 'none', '--space', 'adapter_rank=2,4,16', '--space', 'lr=1e-3..1e-2:log', '--lr', '2e-3', '--json', 'adapter=lora')) == 0
    study, final = read_json(tmp_path / 'run' / 'study.json'), read_json(tmp_path / 'run' / 'final.json')
    ranks = [t['params']['adapter_rank'] for t in study['trials']]
    assert len({*ranks}) > 1 and sorted(built) == sorted({*ranks} - {16}) # each once, that of the start none
    assert read_json(tmp_path / 'run' / 'model' / 'adapter_config.json')['r'] == final['params']['adapter_rank']
    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'run' / 'model', dtype=torch.float32).eval()
    with torch.no_grad(): assert torch.allclose(model(input_ids=IDS).logits, saved_logits[-1], atol=1e-5)
    low, high = final['interval']
    assert final['metric'] == 'loss' and low <= final['score'] <= high and set(final['metrics']) == {'loss', 'accuracy', 'perplexity'}


BASE = TrainConfig(epochs=1, lr=3e-3, effective_batch=8, precision='fp32', metric='loss', adapter='lora', adapter_rank=4)

@pytest.fixture(scope='module')
def causal(folder):
    table = read_table(folder / 'mails.csv', 'prompt', None, task='causal', completion='answer')
    tokenizer = load_tokenizer(str(folder / 'llama'))
    return tokenise(table, tokenizer, 128, progress=False), lambda: load_model(str(folder / 'llama'), (), tokenizer, task='causal')


def scores(engine, store, config, params): return [*fold_runner(engine, store, [(np.arange(40), np.arange(40, 60))], config)(params, 0)]

@pytest.mark.parametrize('params', [dict(adapter_rank=8), dict(adapter_rank=8, fast=True), dict(adapter_dropout=.5), dict(adapter_targets='.*(q_proj|v_proj)'), dict(adapter='dora')], ids=str)
def test_an_engine_of_another_adapter_trains_as_one_that_was_built_for_it(causal, params):
    (store, model), fast = causal, params.get('fast', False)
    base, params = replace(BASE, fast=fast), {k: v for k, v in params.items() if k != 'fast'}
    engine = make_engine(model(), base, HERE)
    first = scores(engine, store, base, {})
    other = scores(engine, store, base, params)
    assert type(variant_of(engine, replace(base, **params))) is type(engine)
    assert other == scores(make_engine(model(), replace(base, **params), HERE), store, replace(base, **params), {})
    assert scores(engine, store, base, {}) == first != other # it does not touch the first one, nor the base


@pytest.mark.parametrize('task', ['classification'])
def test_a_head_is_trained_by_each_engine_for_itself(folder, task):
    table = read_table(folder / 'mails.csv', 'body', 'label')
    tokenizer = load_tokenizer(str(folder / 'bert'))
    store, model = tokenise(table, tokenizer, 64, progress=False), lambda: load_model(str(folder / 'bert'), table.classes, tokenizer)
    config = replace(BASE, metric='f1')
    engine = make_engine(model(), config, HERE)
    first = scores(engine, store, config, {})
    assert scores(engine, store, config, dict(adapter_rank=8)) == scores(make_engine(model(), replace(config, adapter_rank=8), HERE), store, replace(config, adapter_rank=8), {})
    assert scores(engine, store, config, {}) == first


def test_the_engine_that_was_not_used_for_longest_goes_when_memory_is_short(causal, monkeypatch):
    store, model = causal
    engine = make_engine(model(), BASE, HERE)
    of = lambda rank: variant_of(engine, replace(BASE, adapter_rank=rank))
    assert of(2) is of(2) and of(8) is of(8) and len(engine.variants.made) == 2
    of(2)
    monkeypatch.setattr(optkit.build, '_memory', lambda device: (10, 100) if len(engine.variants.made) > 1 else (90, 100))
    before = of(2)
    of(16)
    assert [key[1] for key in engine.variants.made] == [2, 16] and of(2) is before and of(4) is engine
    full, real = [], engine.variants.make
    def make(config): # the device has no more memory while others are there
        if len(engine.variants.made) > 0: full.append(1); raise torch.OutOfMemoryError('no memory')
        return real(config)
    monkeypatch.setattr(engine.variants, 'make', make)
    monkeypatch.setattr(optkit.build, '_memory', lambda device: (90, 100))
    of(12)
    assert full == [1] and [key[1] for key in engine.variants.made] == [12]


# --- bad input

ASK = dict(
    causal=dict(more=CAUSAL), plain=dict(text='body', model='bert'), rows=dict(data='rows.jsonl', model='bert'))
BAD = {
    'a completion that is not there': ('train', 'causal', ['--task', 'causal', '--completion', 'reply'], "no column 'reply'"),
    'a completion of a classifier': ('train', 'plain', ['--label', 'label', '--completion', 'answer'], 'is for --task causal, the task is classification'),
    'labels of a causal model': ('train', 'causal', [*CAUSAL, '--label', 'label'], 'the task causal has no labels'),
    'a pair of a causal model': ('train', 'causal', [*CAUSAL, '--pair', 'body'], 'the task causal has one text'),
    'no label': ('train', 'plain', [], 'the task classification needs --label'),
    'a prompt beyond the limit': ('train', 'causal', [*CAUSAL, '--max-length', '16'], 'leaves nothing to be learnt within 16 tokens'),
    'rows beyond the model': ('tune', 'causal', [*CAUSAL, '--max-length', '4096'], 'the model takes at most 1024 tokens'),
    'no such task': ('train', 'plain', ['--task', 'ranking', '--label', 'label'], "task is 'ranking', expected one of"),
    'no such format': ('train', 'causal', [*CAUSAL, '--dtype', 'fp8'], "dtype is 'fp8', expected one of"),
    'no such bits': ('train', 'causal', [*CAUSAL, '--load-in', '3bit', 'adapter=lora'], "load_in is '3bit', expected one of"),
    'bits without an adapter': ('train', 'causal', [*CAUSAL, '--load-in', '4bit'], 'trains under an adapter; add adapter=lora'),
    'bits without their library': ('train', 'causal', [*CAUSAL, '--load-in', '4bit', 'adapter=lora'], 'needs bitsandbytes (not installed)'),
    'words as numbers': ('train', 'plain', ['--task', 'regression', '--label', 'label'], 'holds no number in 60 rows'),
    'numbers as classes': ('train', 'plain', ['--label', 'size'], 'holds decimals'),
    'texts as classes': ('tune', 'plain', ['--task', 'multilabel', '--label', 'odd'], 'is it a text column'),
    'texts as words': ('train', 'plain', ['--task', 'tokens', '--label', 'label'], 'expected a list, one entry a word'),
    'chats without a template': ('train', 'rows', ['--text', 'chat', '--task', 'causal'], 'has no chat template'),
    'a metric of another task': ('train', 'causal', [*CAUSAL, 'metric=macro_f1'], "metric 'macro_f1' is none of the task causal"),
    'a metric of another task in a job': ('tune', 'causal', [*CAUSAL, '--metric', 'f1'], "metric is 'f1', expected one of ('loss', 'accuracy', 'perplexity')"),
    'f1 of three classes': ('train', 'plain', ['--label', 'three', 'metric=f1'], 'f1 is of the positive class of two, but the head has 3'),
    'ranks without an adapter': ('tune', 'causal', [*CAUSAL, '--space', 'adapter_rank=4,8'], "'adapter_rank' is of an adapter, and there is none"),
    'rank 0': ('tune', 'causal', [*CAUSAL, '--space', 'adapter_rank=0,8', 'adapter=lora'], 'adapter_rank is 0'),
    'a range of dropouts': ('tune', 'causal', [*CAUSAL, '--space', 'adapter_dropout=0.0..0.1', 'adapter=lora'], 'so name some: adapter_dropout=a,b,c'),
    'targets that match nothing': ('tune', 'causal', [*CAUSAL, '--space', 'adapter_targets=all-linear,nothing', 'adapter=lora'], 'no lora adapter for LlamaForCausalLM'),
    'a rank above the layers, searched': ('tune', 'causal', [*CAUSAL, '--space', 'adapter_rank=4,9999', 'adapter=lora'], 'rank is 9999, but'),
    'folds that wilcoxon cannot judge': ('tune', 'plain', ['--label', 'label', '--strategy', 'wilcoxon', '--folds', '3'], "strategy 'wilcoxon' cannot stop a trial with 3 folds"),
    'epochs that reports cannot judge': ('tune', 'plain', ['--label', 'label', '--strategy', 'reports', '--epochs', '2'], "strategy 'reports' cannot stop a trial of 2 values a fold"),
    'a causal task for an encoder': ('tune', 'plain', ['--task', 'causal'], 'sees the tokens after the one that it predicts'),
    'f1 of three classes in a job': ('tune', 'plain', ['--label', 'three', '--metric', 'f1'], 'f1 is of the positive class of two, but the head has 3'),
    'smoothing of numbers': ('tune', 'plain', ['--task', 'regression', '--label', 'size', '--space', 'label_smoothing=0.0..0.1'], "'label_smoothing' is for classes"),
}

@pytest.mark.parametrize('name', BAD)
def test_bad_input_is_one_line_and_writes_nothing(folder, tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr('optkit.job_plan.import_problem', lambda package: 'not installed')
    command, ask, more, said = BAD[name]
    given = {k: v for k, v in ASK[ask].items() if k != 'more'} | (dict(text=more[1]) if more[:1] == ['--text'] else {})
    more = more[2:] if more[:1] == ['--text'] else more
    assert main(words(command, folder, tmp_path / 'run', *more, **given)) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1 and not [*tmp_path.iterdir()], err


def test_chats_that_are_none_are_refused():
    for chats, said in (([[dict(role='user', content='a')], 'b'], r'holds chats in 1 rows \(row 1\) and texts'), ([[dict(role='user')]], r"\{'role': 'user'\} in row 1; expected a text, or messages")):
        with pytest.raises(InputError, match=said): table_from(dict(text=chats), task='causal')
