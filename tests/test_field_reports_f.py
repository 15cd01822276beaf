"What users of other tools reported, item 19: faults that a test must be able to see, each against a value made by hand"
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom

from optkit import attention
from optkit.data import LAYOUTS, example_table, steps, tokenise, word_tokenizer
from optkit.engine import Engine, example_model, training_flops
from optkit.fast import FastEngine
from optkit.hardware import detect, hardware_with
from optkit.job import Job, JobConfig, bootstrap_score
from optkit.precision import choose_precision
from optkit.progress import Meter
from optkit.report import render
from optkit.timing import read_json
from optkit.trainer import TrainConfig, Trainer, make_engine

torch.set_num_threads(1)
HERE = detect() if torch.cuda.is_available() else hardware_with(None)
FP32 = choose_precision(HERE, prefer='fp32', **(dict(tf32=False) if torch.cuda.is_available() else {}))
DEVICE = FP32.device


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


def in_places(module, own, lengths=(30, 28, 14, 9)):
    "The module on rows in places, with its own forward or that of optkit, as a function of hidden states"
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
    module, kind = module.to(DEVICE), attention.attention_kind(module)
    places, tokens = attention._places_of(module, lengths, ((2, 32), (2, 16)), DEVICE)
    if own:
        masks = [m[:, None, None].expand(-1, 1, m.shape[1], -1) for m in places.masks]
        empty = [torch.zeros(l, 1, device=DEVICE) for _, l in places.slots]
        distances = [build_relative_position(t, t, 16, 96) if kind == 'deberta' else None for t in empty]
        places.own = [(m, d, None) for m, d in zip(masks, distances)]
    table = dict(rel_embeddings=torch.randn(2 * module.pos_ebd_size, 32, device=DEVICE)) if kind == 'deberta' else {}
    module.__dict__.update(places=places, stand=attention.stand_in(module) if own else None)
    module.__class__ = attention.in_places(type(module), kind, own)
    places.use()
    return lambda hidden: module(hidden, **table)[0][0], torch.randn(1, tokens, 32, device=DEVICE)


@pytest.mark.parametrize('dropout', [.1, .4])
@pytest.mark.parametrize('own', [False, True], ids=['optkit', 'transformers'])
@pytest.mark.parametrize('kind', [bert_attention, deberta_attention])
def test_field_attention_dropout_keeps_the_mean(kind, own, dropout):
    "Where all values are 1, so is each output: exact in evaluation, on average in training, with the rate's spread"
    torch.manual_seed(0)
    module = kind(dropout)
    value = getattr(module, 'value', None) or module.value_proj
    with torch.no_grad(): value.weight.zero_(); value.bias.fill_(1.)
    run, hidden = in_places(module, own)
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
    run, hidden = in_places(module, False)
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
    engine, grads, rates = make(model(), FP32), [], (.1, .05, .2)
    engine.reset(**dict(lr=.1) | settings)
    before, update = {n: p.detach().clone() for n, p in engine.model.named_parameters()}, engine._update
    def seen():
        grads.append({n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None})
        update()
    engine._update = seen
    for rate, micro in zip(rates, steps(store, np.arange(24), 8, physical=3)):
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
    engine, train = make_engine(example_model(dropout=0.), config, HERE), np.arange(30)
    found = Trainer(engine, store, config).fit(train, np.arange(30, 40))
    rows, _, tokens, flops = np.sum(counted, 0)
    real = store.lengths[train]
    assert (rows, tokens) == (60, 2 * real.sum()) and len({*real}) > 3
    assert flops == pytest.approx(2 * training_flops(engine.model, real))
    for e in found.history: assert e.tokens_per_s / e.samples_per_s == pytest.approx(real.mean())


def test_field_a_ladder_counts_padding_apart():
    "Two steps of a second each, of which every row is padded to 64"
    from optkit.ladder import _rates
    store, model = tokenise(example_table(16), word_tokenizer(), 64, progress=False), example_model()
    plan = list(steps(store, np.arange(16), 8, layout='full'))
    found, real = _rates([1., 1.], [0, 1], plan, store, model, 1e9), store.lengths.sum()
    assert found['mfu'] == pytest.approx(training_flops(model, store.lengths) / 2e9)
    assert found['padded_tokens_per_s']['p50'] == 8 * 64 and found['samples_per_s']['p50'] == 8
    assert found['tokens_per_s']['p20'] + found['tokens_per_s']['p80'] == pytest.approx(real)
