"Model folders as published or spoilt, split words, language models by other names, updates that fp16 leaves out"
import io, json, os, shutil, sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from optkit import engine as engine_module
from optkit.data import IGNORED, InputError, example_table, table_from, tokenise, word_tokenizer
from optkit.engine import Engine, example_model, load_model, load_tokenizer
from optkit.hardware import Choice, hardware_with
from optkit.precision import choose_precision
from optkit.trainer import TrainConfig, Trainer, from_hf, make_engine

torch.set_num_threads(1)
HERE = hardware_with(None)


def in_a_line(call, said):
    with pytest.raises(InputError, match=said) as caught: call()
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


# --- model folders

@pytest.fixture
def folder(tmp_path):
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
def test_field_code_in_a_model_folder_never_runs_and_nobody_is_asked(folder, tmp_path, monkeypatch, where, load):
    monkeypatch.setattr('builtins.input', lambda *a: pytest.fail('somebody was asked'))
    (folder / 'own.py').write_text(OWN_CODE.format(tmp_path / 'ran'))
    config = json.loads((folder / 'config.json').read_text())
    if where == 'config': config |= dict(model_type='own', auto_map=dict(AutoConfig='own.Own'))
    own_model = dict(model_type='vit', auto_map=dict(AutoModelForSequenceClassification='own.OwnModel'))
    if where == 'model': config |= own_model
    (folder / 'config.json').write_text(json.dumps(config))
    if where == 'tokenizer':
        (folder / 'config.json').write_text(json.dumps(dict(config, model_type='vit')))
        own = dict(tokenizer_class='OwnTokenizer', auto_map=dict(AutoTokenizer=[None, 'own.OwnTokenizer']))
        (folder / 'tokenizer_config.json').write_text(json.dumps(own))
    args = (str(folder), ('a', 'b')) if load is load_model else (str(folder),)
    if (load, where) == (load_tokenizer, 'config'): assert load(*args)('w1')['input_ids'] == [2, 5, 3] # needs no code
    else: in_a_line(lambda: load(*args), 'it needs Python code of its own, which is not run')
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('text', ['[]', '"bert"', 'null', '3', '[' * 100_000, '{"model_type": ', '\xff',
                                  '{"model_type": "bert", "hidden_size": "wide"}', '{"model_type": ["bert"]}'], ids=lambda t: t[:40])
def test_field_a_config_that_is_no_object_is_refused_in_a_line(folder, text):
    (folder / 'config.json').write_bytes(text.encode('latin-1'))
    said = in_a_line(lambda: load_model(str(folder), ('a', 'b')), 'config.json|no sequence classifier could be loaded')
    assert str(folder) in said
    if text == '[]': in_a_line(lambda: load_tokenizer(str(folder)), 'config.json holds a list, expected an object')


@pytest.mark.parametrize('name, text', [('tokenizer.json', '{}'), ('tokenizer.json', '[' * 100_000),
                                        ('tokenizer_config.json', '[]'), ('tokenizer_config.json', '{"model_max_length": ')],
                         ids=['empty', 'nested', 'list', 'cut'])
def test_field_a_spoilt_tokenizer_is_refused_in_a_line(folder, name, text):
    (folder / name).write_text(text)
    in_a_line(lambda: load_tokenizer(str(folder)), 'no tokenizer could be loaded')


class RunsCode:
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize('index', [None, 'model.safetensors.index.json', 'pytorch_model.bin.index.json'])
def test_field_a_pickle_that_would_run_code_ends_in_a_line(folder, tmp_path, index):
    "An index of safetensors may name a pickle too"
    weights = example_model().state_dict()
    (folder / 'model.safetensors').unlink()
    where = dict(metadata=dict(total_size=1), weight_map={k: 'pytorch_model.bin' for k in weights})
    if index: (folder / index).write_text(json.dumps(where))
    def save(found): torch.save(found, folder / 'pytorch_model.bin')
    save(weights | dict(planted=RunsCode(tmp_path / 'ran')))
    in_a_line(lambda: load_model(str(folder), ('a', 'b')), 'a pickle that holds more than tensors')
    assert not (tmp_path / 'ran').exists()
    save(weights)
    assert all(torch.equal(v, weights[k]) for k, v in load_model(str(folder), ('a', 'b')).state_dict().items())
    (folder / 'pytorch_model.bin').write_bytes(b'no weights')
    in_a_line(lambda: load_model(str(folder), ('a', 'b')), 'no sequence classifier could be loaded')


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
from optkit.engine import load_model, load_tokenizer
from optkit.data import InputError
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
    assert float(seconds) < 10
    assert not (tmp_path / 'run').exists()


def test_field_a_hub_that_never_answers_is_waited_for_a_few_seconds(monkeypatch):
    import socket, threading, time
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    with socket.create_server(('127.0.0.1', 0)) as server: # takes the connection and is silent
        monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{server.getsockname()[1]}')
        engine_module._hub_answers.cache_clear()
        start = time.monotonic()
        assert engine_module._hub_answers(0, seconds=.5) is False and time.monotonic() - start < 3
    engine_module._hub_answers.cache_clear()


# --- DeBERTa-v3 as its publisher ships it

WORDS = 'the quick brown fox jumps over lazy dogs naïve café Straße 1 2 3 ABC fi ... running runner good bad film'.split()
LINES = [' '.join(np.random.default_rng(n).choice(WORDS, 10)) for n in range(120)]


@pytest.fixture(scope='module')
def published(tmp_path_factory):
    "The files that microsoft/deberta-v3-base has, weights in half precision; and sentencepiece itself"
    import sentencepiece
    folder, made = tmp_path_factory.mktemp('deberta'), io.BytesIO()
    ids = {f'{name}_id': n for n, name in enumerate(('pad', 'bos', 'eos', 'unk'))}
    names = dict(pad_piece='[PAD]', bos_piece='[CLS]', eos_piece='[SEP]', unk_piece='[UNK]')
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=made, vocab_size=90,
                                             hard_vocab_limit=False, minloglevel=2, **ids, **names)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    (folder / 'spm.model').write_bytes(made.getvalue())
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(do_lower_case=False, vocab_type='spm')))
    (folder / 'config.json').write_text(json.dumps(dict(
        model_type='deberta-v2', attention_probs_dropout_prob=.1, hidden_act='gelu', hidden_dropout_prob=.1,
        hidden_size=32, initializer_range=.02, intermediate_size=64, max_position_embeddings=512,
        relative_attention=True, position_buckets=256, norm_rel_ebd='layer_norm', share_att_key=True,
        pos_att_type='p2c|c2p', layer_norm_eps=1e-7, max_relative_positions=-1, position_biased_input=False,
        num_attention_heads=2, num_hidden_layers=1, type_vocab_size=0, vocab_size=pieces.get_piece_size() + 8)))
    torch.manual_seed(0)
    model = transformers.DebertaV2ForMaskedLM(transformers.AutoConfig.from_pretrained(folder))
    torch.save({k: v.half() for k, v in model.state_dict().items()}, folder / 'pytorch_model.bin')
    return folder, pieces


TEXTS = LINES[:20] + ['the  quick', ' fox ', 'fox\tdogs\nfilm\r\nfox', 'ＡＢＣ fox', 'cafe\u0301', 'ﬁlm ① …', 'zzz 日本 fox',
                      'fox\u00a0dogs', 'fox\u200bdogs', 'a\u3000b', '½ ™ K', 'a\x01b', '“fox” – ’', '😀 fox', '\u2028fox',
                      '\u00a0 fox \u3000']


def test_field_deberta_from_its_sentencepiece_file_has_the_ids_of_sentencepiece(published, tmp_path):
    folder, pieces = published
    tokenizer = load_tokenizer(str(folder))
    want = [[1, *pieces.encode(t), 2] for t in TEXTS]
    assert tokenizer(TEXTS)['input_ids'] == want and tokenizer.is_fast
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 3)
    one, two = pieces.encode('the fox'), pieces.encode('good … film')
    pair = tokenizer('the fox', 'good … film')
    assert pair['input_ids'] == [1, *one, 2, *two, 2]
    assert pair['token_type_ids'] == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    shutil.copytree(folder, tmp_path / 'model') # saved and loaded again, by optkit and by transformers alone
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
    folder, pieces = published
    settings = dict(tokenizer_class=family, do_lower_case=False, keep_accents=True)
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    shutil.copy(folder / 'spm.model', tmp_path / file)
    example_model().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ('the quick\u00a0fox', '… ① ﬁlm', 'ＡＢＣ fox'):
        ids = tokenizer(text, add_special_tokens=False)['input_ids']
        assert tokenizer.convert_ids_to_tokens(ids) == pieces.encode_as_pieces(text)


def test_field_deberta_as_published_trains_and_its_model_is_loaded_again(published, tmp_path):
    folder, _ = published
    tokenizer = load_tokenizer(str(folder))
    texts = [f'{line} {"good" if n % 2 else "bad"} film' for n, line in enumerate(LINES[:64])]
    labels = ['yes' if n % 2 else 'no' for n in range(64)]
    store = tokenise(table_from(texts, labels=labels), tokenizer, 32, progress=False)
    model = load_model(str(folder), store.classes, tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weights = torch.load(folder / 'pytorch_model.bin', weights_only=True)
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
    from optkit.job import JobConfig, fingerprint
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


def their_trainer(model, folder):
    "All rows in each step, so that their order does not matter"
    tokenizer, rows = word_tokenizer(), language_rows()
    args = transformers.TrainingArguments(
        output_dir=str(folder), report_to='none', use_cpu=True, disable_tqdm=True, per_device_train_batch_size=len(rows),
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
    theirs = their_trainer(tiny_language_model(kind), tmp_path / 'theirs')
    theirs.train()
    ids = torch.tensor([r['input_ids'] for r in language_rows(6)])
    # the mean over the targets: their trainer divides by a target a row too many where a class is no ForCausalLM
    with torch.no_grad(): want = theirs.model.eval()(input_ids=ids, labels=ids).loss.item()
    ours = from_hf(their_trainer(tiny_language_model(kind), tmp_path / 'ours'), HERE)
    assert ours.trainer.store.task == 'causal' and ours.trainer.store.targets.tolist() == [9] * 30
    found = ours.fit()
    first, *_, last = found.history
    assert last.train_loss < first.train_loss and last.valid_loss == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize('kind', ['BertLMHeadModel', 'RobertaForCausalLM'])
def test_field_a_language_model_that_sees_the_answer_is_refused(tmp_path, kind):
    ours = from_hf(their_trainer(tiny_language_model(kind), tmp_path), HERE)
    in_a_line(ours.fit, 'sees the tokens after the one that it predicts')


def test_field_an_adapter_knows_that_gpt2_is_a_language_model():
    from optkit.trainer import with_adapter
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

FP32 = choose_precision(HERE, prefer='fp32')
FP16 = replace(FP32, compute=Choice('fp16', 'asked for'), scaler=Choice(True, 'asked for'))


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
    from optkit.trainer import Position
    p = Position(12, done=5, skipped=2)
    assert Position.from_dict(json.loads(json.dumps(p.to_dict()))).skipped == 2
    old = p.to_dict(); del old['skipped'] # of a checkpoint before there was such a count
    assert Position.from_dict(old).skipped == 0
