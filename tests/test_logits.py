"Logits of a causal model for tokens with a target alone, in chunks: loss and gradients are those of transformers, whichever head it is; the array of all logits is never there"
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode

from optkit import models
from optkit.adapters import add_adapter
from optkit.engine import Engine
from optkit.fast import FastEngine
from optkit.hardware import hardware_with
from optkit.models import CausalHead, head_problem, loss_in_chunks
from optkit.precision import choose_precision
from optkit.steps import Layout, MicroBatch, steps
from optkit.table import IGNORED
from test_engine import NoWait
from test_layouts import LENGTHS, store_of

FP32, BF16 = (choose_precision(hardware_with(None), prefer=p, tf32=False if p == 'fp32' else None) for p in ('fp32', 'bf16'))
SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, pad_token_id=0, bos_token_id=2, eos_token_id=3)
FEW, WINDOW = dict(SMALL, num_key_value_heads=1), ['sliding_attention', 'full_attention']
MODELS = {
    'llama': lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**FEW)),
    'llama, tied': lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**FEW, tie_word_embeddings=True)),
    'gpt2, tied': lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=204, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0., attn_pdrop=0., embd_pdrop=0.)),
    'gemma2, a cap': lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**FEW, head_dim=16, final_logit_softcapping=.5)),
    'gemma3, tied': lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**FEW, head_dim=16, sliding_window=12, layer_types=WINDOW)),
    'cohere, a scale': lambda: tf.CohereForCausalLM(tf.CohereConfig(**FEW, logit_scale=.3)),
    'phi, a bias': lambda: tf.PhiForCausalLM(tf.PhiConfig(**SMALL, resid_pdrop=0., embd_pdrop=0.)),
    'bert, a layer before': lambda: tf.BertLMHeadModel(tf.BertConfig(**SMALL, is_decoder=True, max_position_embeddings=64, hidden_dropout_prob=0., attention_probs_dropout_prob=0.))}


def model_of(name, seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters(): p.add_(.05 * torch.randn_like(p)) # no bias is 0
    return model


@pytest.fixture
def seven(monkeypatch):
    "Chunks of seven tokens"
    monkeypatch.setattr(models, 'CHUNK', 7 * 204)


def completions(store, share=.2):
    "A store of which only the ends of rows are learnt"
    labels = store.labels.clone()
    for a, n in zip(store.offsets.tolist(), store.lengths): labels[a:a + int(n * (1 - share))] = IGNORED
    targets = np.array([(labels[a:a + n] != IGNORED).sum().item() for a, n in zip(store.offsets.tolist(), store.lengths)])
    return replace(store, labels=labels, targets=targets)


def of_transformers(model, store):
    "Loss and gradients that transformers itself gives for all rows, padded"
    rows, width = len(store), int(store.lengths.max())
    ids, mask, labels = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long), torch.full((rows, width), IGNORED)
    for r, (a, n) in enumerate(zip(store.offsets.tolist(), store.lengths)):
        ids[r, :n], mask[r, :n] = store.tokens[a:a + n].long(), 1
        labels[r, 1:n] = store.labels[a:a + n - 1].long() # transformers shifts them itself
    model.train()
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def of_engine(model, store, kind=Engine, precision=FP32, layout=Layout(rows=5), **settings):
    "Loss and gradients of one step of an engine, whose micro-batches are several"
    engine, grads = kind(model, precision, max_grad_norm=0., **settings), {}
    update = engine._update
    engine._update = lambda: grads.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    loss = engine.step(store, next(steps(store, np.arange(len(store)), len(store), layout=layout))).item()
    assert engine.head.value is not None, engine.head.reason
    return loss, grads


def assert_same(ours, theirs, rtol=2e-5):
    assert ours[0] == pytest.approx(theirs[0], rel=rtol) and ours[1].keys() == theirs[1].keys()
    for n, g in theirs[1].items(): torch.testing.assert_close(ours[1][n], g, rtol=1e-3, atol=rtol * max(g.abs().max().item() for g in theirs[1].values()), msg=lambda m: f'{n}: {m}')


@pytest.mark.parametrize('part', ['all tokens', 'completions'])
@pytest.mark.parametrize('name', MODELS)
def test_loss_and_gradients_are_those_of_transformers(name, part, seven):
    "Of all weights, embeddings that are the head too among them"
    store = store_of(LENGTHS, 'causal')
    if part == 'completions': store = completions(store)
    want = of_transformers(model := model_of(name), store)
    assert_same(of_engine(model, store), want)


@pytest.mark.parametrize('layout', [Layout('packed', tokens=70), Layout('full', rows=4), Layout(rows=12)], ids=str)
def test_every_layout(layout, seven):
    store = completions(store_of(LENGTHS, 'causal'), .5)
    want = of_transformers(model := model_of('gemma3, tied'), store)
    assert_same(of_engine(model, store, layout=layout), want)


@pytest.mark.parametrize('name', ['llama', 'gpt2, tied', 'gemma2, a cap', 'gemma3, tied', 'phi, a bias'])
@pytest.mark.parametrize('share', [1., .3, .05])
def test_the_fast_engine(name, share, seven):
    "Which gathers an eighth, a quarter, a half, or all of a shape's tokens"
    store = store_of(LENGTHS, 'causal') if share == 1 else completions(store_of(LENGTHS, 'causal'), share)
    want = of_transformers(model := model_of(name), store)
    assert_same(of_engine(model, store, FastEngine, at_once=6), want)


def test_room_for_targets_in_the_shapes_of_the_fast_engine(seven):
    few, many = (completions(store_of(LENGTHS, 'causal'), share) for share in (.1, .45))
    fast = FastEngine(model_of('llama'), FP32, at_once=12)
    for store in (few, many, store_of(LENGTHS, 'causal')): fast.step(store, np.arange(12))
    shares = [key[0].aims / key[0].tokens for key in fast.built]
    assert len(shares) == 3 and shares[0] < .15 and .4 < shares[1] < .6 and shares[2] == 0, shares


ADAPTERS = dict(lora=dict(kind='lora'), dora=dict(kind='dora'), head_too=dict(kind='lora', targets=('q_proj', 'lm_head')), head_under_dora=dict(kind='dora', targets=('q_proj', 'lm_head')),
                whole_head=dict(kind='lora', targets=('q_proj', 'up_proj'), modules_to_save=('lm_head',)))

@pytest.mark.parametrize('kind', [Engine, FastEngine])
@pytest.mark.parametrize('which', ADAPTERS)
def test_adapters_also_of_the_head(which, kind, seven):
    store = completions(store_of(LENGTHS, 'causal'), .5)
    model = add_adapter(model_of('llama'), rank=4, **ADAPTERS[which])
    with torch.no_grad():
        for n, p in model.named_parameters():
            if 'lora_B' in n: p.normal_(std=.1)
    want = of_transformers(model, store)
    assert any('lm_head' in n for n in want[1]) == (which not in ('lora', 'dora'))
    assert_same(of_engine(model, store, kind), want)


class Widest(TorchDispatchMode):
    "Most tokens that had logits at once"
    most = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.shape[-1:] == (204,) and t.shape[-2:] != (32, 204): self.most = max(self.most, t.numel() // 204)
        return out


@pytest.mark.parametrize('kind', [Engine, FastEngine])
def test_no_more_logits_than_those_of_a_chunk(kind, seven):
    "Neither in a step nor in an evaluation; whole logits are seen"
    store, engine = store_of(LENGTHS, 'causal'), kind(add_adapter(model_of('llama'), rank=2), FP32)
    engine.step(store, np.arange(12)) # makes the trials
    with Widest() as widest:
        engine.step(store, np.arange(12))
        engine.predict(store, np.arange(12))
    assert 0 < widest.most <= 8, widest.most # those of the trial are 8
    engine.head = replace(engine.head, value=None)
    with Widest() as widest: engine.predict(store, np.arange(12))
    assert widest.most > 100


def test_evaluation_in_chunks_equals_that_of_whole_logits(seven):
    "Loss of each target, and whether it was the likeliest; also of rows without a target"
    store, rows = store_of(LENGTHS, 'causal'), np.array([3, 4, 1, 0, 9])
    engine = Engine(model_of('gemma2, a cap'), FP32)
    found = engine.predict(store, rows, 2)
    want = []
    for r in rows:
        a, n = int(store.offsets[r]), int(store.lengths[r])
        with torch.no_grad(): logits = engine.model(store.tokens[a:a + n].long()[None]).logits[0, :n - 1]
        aims = store.labels[a:a + n - 1].long()
        want.append(torch.stack([F.cross_entropy(logits, aims, reduction='none'), (logits.argmax(1) == aims).float()], 1))
    torch.testing.assert_close(found, torch.cat(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kind', [Engine, FastEngine])
def test_chunks_train_as_one_does(kind, monkeypatch):
    "Several steps with label smoothing and clipping, under autocast"
    store, curves = store_of(LENGTHS * 2, 'causal'), []
    for chunk in (10**9, 5 * 204):
        monkeypatch.setattr(models, 'CHUNK', chunk)
        engine = kind(model_of('gemma3, tied'), FP32, label_smoothing=.1)
        engine.reset(lr=3e-3)
        curves.append([engine.step(store, s).item() for _, s in zip(range(8), (s for e in range(4) for s in steps(store, np.arange(24), 8, epoch=e, layout=Layout(rows=4))))])
    np.testing.assert_allclose(*curves, rtol=2e-5)
    assert curves[0][-1] < curves[0][0] - .05


def test_bf16_differs_by_its_rounding_only(seven):
    store = store_of(LENGTHS, 'causal')
    exact = of_transformers(model := model_of('llama'), store)
    size = max(g.abs().max() for g in exact[1].values())
    off = lambda found: max((found[1][n].float() - g).abs().max().item() for n, g in exact[1].items()) / size
    with torch.autocast('cpu', torch.bfloat16): whole = of_transformers(model, store)
    assert off(of_engine(model, store, precision=BF16)) < max(2 * off(whole), .02)
    half = of_engine(model.bfloat16(), store, precision=BF16)
    assert all(g.dtype == torch.bfloat16 for g in half[1].values()) and off(half) < .05


def test_gradients_are_those_of_a_scaled_loss():
    "As a scaler of fp16 scales it, inside and not afterwards"
    model, seed = model_of('phi, a bias'), torch.tensor(1024.)
    head, labels = CausalHead(model), torch.arange(11)
    assert head_problem(head, 'cpu') == ''
    hidden, scales = torch.randn(11, 32, requires_grad=True), []
    def loss_of(logits, labels):
        logits.register_hook(lambda g: scales.append(g.abs().max().item()))
        return F.cross_entropy(logits, labels, reduction='sum') / 11
    found = []
    for head.chunk in (11, 4):
        scales.clear()
        loss = loss_in_chunks(head, hidden, labels, loss_of, seed) * seed
        found.append(torch.autograd.grad(loss, [hidden, *head.weights()]))
        assert max(scales) > 10 # 1024 / 11, about
    for a, b in zip(*found): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_head_that_cannot_be_called_apart_keeps_whole_logits(seven):
    "OPT calls the decoder inside of its base; the loss is right all the same"
    torch.manual_seed(0)
    model = tf.OPTForCausalLM(tf.OPTConfig(vocab_size=204, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0., pad_token_id=0))
    store = store_of(LENGTHS, 'causal')
    want = of_transformers(model, store)
    engine = Engine(model, FP32, max_grad_norm=0.)
    assert engine.step(store, np.arange(12)).item() == pytest.approx(want[0], rel=2e-5)
    assert engine.head.value is None and 'OPTForCausalLM' in engine.head.reason


def test_a_step_waits_for_nothing(seven, monkeypatch):
    store = completions(store_of(LENGTHS, 'causal'), .5)
    for change in ('_ignore_bidirectional_mask_sdpa', '_ignore_causal_mask_sdpa'): monkeypatch.setattr(f'transformers.masking_utils.{change}', lambda *a, **k: False) # they ask whether all of a mask is 1
    for kind in (Engine, FastEngine):
        engine = kind(model_of('llama'), FP32)
        engine.step(store, np.arange(12))
        with NoWait(): engine.step(store, np.arange(12))
