"Attention in places: tables of distances against lookups, gradients, dropout, the kernels (interpreted where there is no GPU), what the compiler sees"
import math, os, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings, strategies as st

from optkit import attention
from optkit.attention import (
    _attend, _attend_back, _places_of, attend_in_places, attention_kind, FARTHEST, move, pair_bias, pair_bias_back,
    placed_backward, placed_forward, Places, position_rows, skew)

torch.set_num_threads(1)


def module_of(width=12, heads=2, **kind):
    torch.manual_seed(0)
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention
    return DisentangledSelfAttention(DebertaV2Config(hidden_size=width, num_attention_heads=heads, hidden_dropout_prob=0., attention_probs_dropout_prob=0., max_position_embeddings=96, max_relative_positions=-1,
                                                     **dict(relative_attention=True, position_buckets=16, pos_att_type=['p2c', 'c2p'], share_att_key=True) | kind)).double()


@given(l=st.integers(1, 40), heads=st.integers(1, 3), rows=st.integers(1, 3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_tables_of_distances_are_lookups(l, heads, rows, seed):
    "Against gather with an index of distances, forwards and backwards"
    g = torch.Generator().manual_seed(seed)
    c2p, p2c = (torch.randn(heads, rows, l, 2 * l, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    i, j = torch.arange(l)[:, None], torch.arange(l)
    looked = c2p.gather(-1, (j - i + l - 1).expand(heads, rows, l, l)) + p2c.gather(-1, (j - i + l).expand(heads, rows, l, l)).transpose(-1, -2)
    held = torch.arange(l) < torch.randint(1, l + 1, (rows, 1), generator=g)
    torch.testing.assert_close(pair_bias(c2p, p2c, held), looked.masked_fill(~held[:, None], FARTHEST))
    sent = torch.randn(heads, rows, l, l, generator=g, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad((looked * sent).sum(), [c2p, p2c]), pair_bias_back(sent, True, True)): torch.testing.assert_close(a, b)


@pytest.mark.parametrize('buckets', [-1, 4, 16, 64])
def test_entries_of_the_position_table_are_those_of_transformers(buckets):
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
    module = module_of(position_buckets=buckets)
    for l in (1, 5, 64, 90):
        one = torch.zeros(l, 1)
        theirs = (build_relative_position(one, one, module.position_buckets, module.max_relative_positions)[0] + module.pos_ebd_size).clamp(0, 2 * module.pos_ebd_size - 1)
        far, onehot = position_rows(module, [l], 'cpu')
        i, j = torch.arange(l)[:, None], torch.arange(l)
        assert torch.equal(far[i - j + l], theirs) and torch.equal(onehot.argmax(1), far) and onehot.sum() == 2 * l


@pytest.mark.parametrize('dropout', [0., .3])
def test_the_way_back_of_attention_with_a_bias(dropout):
    "Against autograd, with what dropout kept given"
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    out, kept = _attend(q.detach(), k.detach(), v.detach(), bias.detach(), dropout, .5)
    assert (kept[1] == 0).any() == bool(dropout)
    again = ((q @ k.transpose(-1, -2) * .5 + bias).softmax(-1) * kept[1]) @ v
    torch.testing.assert_close(out, again)
    sent = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad((again * sent).sum(), [q, k, v, bias]), _attend_back(sent, q.detach(), k.detach(), v.detach(), bias.detach(), out, kept, dropout, .5, True)): torch.testing.assert_close(a, b)


def test_rows_do_not_see_each_other():
    "Other tokens in one row change nothing in the others, nor their gradients"
    module = module_of()
    places, tokens = _places_of(module, [20, 11, 7, 3], ((1, 32), (4, 16)), 'cpu')
    places.onehot = places.onehot.double()
    places.use()
    run = lambda qkv: placed_forward(places, qkv, *[torch.ones(2 * module.pos_ebd_size, 12, dtype=torch.float64)] * 2, 2, .3, 0.)
    torch.manual_seed(1)
    qkv = torch.randn(tokens, 36, dtype=torch.float64)
    changed = qkv.clone()
    changed[:20] = torch.randn(20, 36, dtype=torch.float64)
    (a, x), (b, y) = run(qkv), run(changed)
    assert torch.equal(a[20:], b[20:]) and not torch.allclose(a[:20], b[:20])
    sent = torch.randn_like(a)
    assert torch.equal(placed_backward(x, sent)[0][20:], placed_backward(y, sent)[0][20:])


def test_a_layer_is_one_graph_to_the_compiler():
    "No break, and no new compilation for other shapes; state of a way back that never came is dropped"
    import torch._dynamo
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = module_of().float()
    module.__class__ = attention.in_places(type(module), 'deberta')
    module.places = None
    compiled = torch.compile(lambda h, t: module(h, rel_embeddings=t)[0], fullgraph=True, backend='aot_eager')
    table = torch.randn(2 * module.pos_ebd_size, 12)
    for lengths, slots in (([20, 11, 7], ((1, 32), (2, 16))), ([9, 8], ((2, 16),)), ([30, 30, 2], ((3, 32),))):
        places, tokens = _places_of(module, lengths, slots, 'cpu')
        module.places = places
        places.use()
        hidden = torch.randn(1, tokens, 12, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(hidden, 1)
        found, want = compiled(hidden, table), module(hidden, rel_embeddings=table)[0]
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(*[torch.autograd.grad(o.sum(), hidden)[0] for o in (found, want)])
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1
    assert not attention._KEPT
    module(hidden, rel_embeddings=table)
    assert attention._KEPT
    places.use()
    assert not attention._KEPT
    with torch.no_grad(): module(hidden, rel_embeddings=table)
    assert not attention._KEPT


@pytest.mark.parametrize('kinds', [['c2p', 'p2c'], ['c2p'], ['p2c'], []], ids=' '.join)
@pytest.mark.parametrize('share', [True, False])
@pytest.mark.parametrize('near', [None, True])
def test_a_stand_in_on_projections_is_its_module(kinds, share, near):
    "Slot by slot, against the module on padded rows: outputs and gradients of inputs, positions and weights; with and without products of positions"
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
    module = module_of(pos_att_type=kinds, share_att_key=share)
    places, tokens = _places_of(module, [20, 11, 7], ((1, 32), (3, 16)), 'cpu', spare=2)
    distances = [build_relative_position(torch.zeros(l, 1), torch.zeros(l, 1), 16, 96) for _, l in places.slots]
    places.native = [(m[:, None, None] & m[:, None, :, None], d, near and int(d.max()) + 1) for m, d in zip(places.masks, distances)]
    table, hidden = (torch.randn(n, 12, dtype=torch.float64, requires_grad=True) for n in (2 * module.pos_ebd_size, tokens))
    inputs = [hidden, table, *module.parameters()]
    def gradients(out):
        return torch.autograd.grad((out * sent).sum(), inputs, allow_unused=True, materialize_grads=True)
    sent, want = torch.randn(tokens, 12, dtype=torch.float64), torch.zeros(tokens, 12, dtype=torch.float64)
    for at, n in ((0, 20), (20, 11), (31, 7)): # a row alone
        want = want.index_put((torch.arange(at, at + n),), module(hidden[None, at:at + n], torch.ones(1, 1, n, n), rel_embeddings=table)[0][0])
    module.places, module.__dict__['stand'] = places, attention.stand_in(module)
    assert [n for n, _ in module.named_modules() if 'stand' in n] == [] and not [*module.stand.parameters()]
    module.__class__ = attention.in_places(type(module), 'deberta', True)
    places.use()
    found = module(hidden[None], None, rel_embeddings=table)[0][0]
    torch.testing.assert_close(found, want)
    for a, b in zip(gradients(found), gradients(want)): torch.testing.assert_close(a, b)


def test_a_module_with_weights_beside_its_projections_has_no_stand_in():
    module = module_of()
    module.gate = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match='gate.weight, gate.bias'): attention.stand_in(module)


def shares(q, k, ends, factor):
    "(start, end, softmax [heads, l, l]) of each row that has tokens"
    for a, b in zip(ends.tolist(), ends.tolist()[1:]):
        if b > a: yield a, b, (q[a:b].transpose(0, 1) @ k[a:b].permute(1, 2, 0) * factor).softmax(-1)

def plain_flash(q, k, v, ends, longest, dropout, factor):
    "What torch's kernel does, row by row; where no row is nothing is written"
    out = torch.full_like(q, float('nan'))
    for a, b, share in shares(q, k, ends, factor):
        assert b - a <= longest
        out[a:b] = (share @ v[a:b].transpose(0, 1)).transpose(0, 1)
    return out, ()

def plain_flash_back(grad, q, k, v, out, kept, ends, longest, dropout, factor):
    dq, dk, dv = (torch.full_like(q, float('nan')) for _ in range(3))
    for a, b, share in shares(q, k, ends, factor):
        g, keys, queries = (t[a:b].transpose(0, 1) for t in (grad, k, q))
        along = g @ v[a:b].permute(1, 2, 0)
        pairs = share * (along - (along * share).sum(-1, keepdim=True)) * factor
        for to, value in ((dq, pairs @ keys), (dk, pairs.transpose(1, 2) @ queries), (dv, share.transpose(1, 2) @ g)): to[a:b] = value.transpose(0, 1)
    return dq, dk, dv

def without_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, '_flash', plain_flash)
    monkeypatch.setattr(attention, '_flash_back', plain_flash_back)
    monkeypatch.setattr(attention, 'HALF', (torch.float32, torch.float64))


@pytest.mark.parametrize('lengths', [[20, 11, 7, 3], [9], [16, 16]])
def test_rows_end_to_end_are_those_in_places(monkeypatch, lengths):
    "Outputs and gradients; tokens that belong to no row get 0, whatever the kernel leaves there"
    module = module_of(relative_attention=False)
    found = []
    for whole in (False, True):
        places, tokens = _places_of(module, lengths, ((1, 32), (4, 16)), 'cpu', spare=3, whole=whole)
        if whole: without_a_gpu(monkeypatch)
        places.use()
        torch.manual_seed(0)
        hidden, sent = torch.randn(tokens, 12, dtype=torch.float64, requires_grad=True), torch.randn(tokens, 12, dtype=torch.float64)
        qkv = torch.cat([module.query_proj(hidden), module.key_proj(hidden), module.value_proj(hidden)], -1)
        out = attend_in_places(qkv, 2, .3)
        found.append([out * places.real[:, None], *torch.autograd.grad((out * sent * places.real[:, None]).sum(), [hidden, *module.parameters()], allow_unused=True)])
        if whole: assert not out[~places.real].any() and not found[-1][1][~places.real].any() and not attention._KEPT
    for a, b in zip(*found): assert (a is b is None) or torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('training', [True, False])
def test_both_ways_end_to_end_drop_at_the_rate_of_the_module(monkeypatch, training):
    "The kernel itself needs a GPU: what it is asked for is looked at"
    seen = []
    without_a_gpu(monkeypatch)
    for name, kernel, place in (('_flash', plain_flash, 5), ('_flash_back', plain_flash_back, 8)):
        def looked_at(*args, kernel=kernel, place=place, name=name):
            seen.append((name, args[place]))
            return kernel(*args)
        monkeypatch.setattr(attention, name, looked_at)
    config = tf.BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
                           vocab_size=9, attention_probs_dropout_prob=.3)
    module = tf.BertModel(config).train(training).encoder.layer[0].attention.self
    places, tokens = _places_of(module, [20, 11], ((2, 32),), 'cpu', whole=True)
    module.places, module.__class__ = places, attention.in_places(type(module), 'bert')
    places.use()
    module(torch.randn(1, tokens, 12, requires_grad=True))[0].sum().backward()
    assert seen == [('_flash', .3 * training), ('_flash_back', .3 * training)]


def tensors_in(value):
    if isinstance(value, torch.Tensor): yield value
    elif isinstance(value, Places): yield from tensors_in(list(vars(value).values()))
    elif isinstance(value, (list, tuple)):
        for v in value: yield from tensors_in(v)


@pytest.mark.parametrize('whole', [False, True], ids=['in places', 'end to end'])
def test_nothing_remembered_lies_in_memory_that_the_compiler_may_give_to_others(monkeypatch, whole):
    "A compiled layer uses the memory of an input again once the call is over"
    module = module_of(relative_attention=False)
    places, tokens = _places_of(module, [20, 11, 7], ((1, 32), (4, 16)), 'cpu', spare=3, whole=whole)
    if whole: without_a_gpu(monkeypatch)
    places.use()
    qkv = torch.randn(tokens, 36, dtype=torch.float64, requires_grad=True)
    out = attend_in_places(qkv, 2, .3)
    taken = {t.untyped_storage().data_ptr() for t in (qkv, out)}
    assert attention._KEPT and not any(t.untyped_storage().data_ptr() in taken for t in tensors_in(list(attention._KEPT.values())))


def test_kinds():
    bert = tf.BertModel(tf.BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=9))
    found = {attention_kind(m) for m in bert.modules()}
    assert found == {'bert', None} and attention_kind(module_of()) == 'deberta'
    llama = tf.LlamaModel(tf.LlamaConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=9))
    assert {attention_kind(m) for m in llama.modules()} == {None}


@pytest.mark.skipif(attention.triton is None, reason='Triton is not installed')
def test_kernels_in_the_interpreter():
    "The same bits as torch's windows, for tiles that do not divide a length; in a process of its own, since Triton decides at import"
    code = '''
import torch
from optkit.attention import _launch_back, _launch_bias, _launch_move, pair_bias, pair_bias_back
for l in (16, 48, 64):
    for dtype in (torch.float32, torch.bfloat16):
        tables, mask = [torch.randn(3, 2, l, 2 * l).to(dtype) for _ in range(2)], torch.arange(l) < torch.tensor([[l], [max(1, l // 3)]])
        for one, two in ((1, 1), (1, 0), (0, 1)):
            c2p, p2c = tables[0] if one else None, tables[1] if two else None
            torch.testing.assert_close(_launch_bias(c2p, p2c, mask), pair_bias(c2p, p2c, mask))
            grad = torch.randn(2, 3, l, l).to(dtype).transpose(0, 1)
            for a, b in zip(_launch_back(grad, bool(one), bool(two)), pair_bias_back(grad, bool(one), bool(two))): assert (a is b is None) or torch.equal(a, b)
        tokens, there, keep = torch.randn(70, 3 * l).to(dtype), torch.randint(70, (90,)), torch.rand(90) < .5
        assert torch.equal(_launch_move(tokens, there), tokens[there]) and torch.equal(_launch_move(tokens, there, keep), tokens[there] * keep[:, None])
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=os.environ | dict(TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES=''), cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-1500:]
