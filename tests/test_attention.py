"Attention of rows end to end: gradients, dropout, windows and shared keys, what the compiler sees; flash attention on a GPU"
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings, strategies as st

from optkit import attention
from optkit.base import InputError
from optkit.attention import (
    Attention, attend_interface, attend_tokens, attention_kind, by_rows, flash_backward, flash_forward, parts,
    plain_backward, plain_forward, row_ends)

torch.set_num_threads(1)
cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason='flash attention needs a GPU')]


def module_of(width=12, heads=2, **kind):
    torch.manual_seed(0)
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention
    kind = dict(relative_attention=True, position_buckets=16, pos_att_type=['p2c', 'c2p'], share_att_key=True) | kind
    return DisentangledSelfAttention(DebertaV2Config(
        hidden_size=width, num_attention_heads=heads, hidden_dropout_prob=0., attention_probs_dropout_prob=0.,
        max_position_embeddings=96, max_relative_positions=-1, **kind)).double()


def bert_module(dropout=0., width=12):
    torch.manual_seed(0)
    config = tf.BertConfig(hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
                           vocab_size=9, attention_probs_dropout_prob=dropout)
    return tf.BertModel(config).encoder.layer[0].attention.self


def far_of(module, longest):
    "Entries of the position table, as `EndToEnd` sets them"
    from optkit.disentangled import distances
    return distances(module, longest, 'cpu') if module.relative_attention else None


def alone(qkv, how, begin, end):
    "Context of one row by torch's attention"
    q, k, v = (t[begin:end].transpose(0, 1) for t in parts(qkv, how))
    i = torch.arange(end - begin, device=qkv.device)
    ahead = i[:, None] - i
    seen = (ahead >= 0) if how.causal else torch.ones_like(ahead, dtype=torch.bool)
    if how.window: seen = seen & (ahead.abs() < how.window)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=how.scale, enable_gqa=True).transpose(0, 1).flatten(1)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), shared=st.sampled_from([1, 2, 4]),
       causal=st.booleans(), window=st.sampled_from([0, 1, 3, 30]), spare=st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_the_plain_version_is_torchs_attention_of_each_row(lengths, shared, causal, window, spare):
    "Context and gradients; tokens of no row get 0, whatever is sent back to them"
    torch.manual_seed(0)
    how, tokens = Attention(4, 4 // shared, .4, causal=causal, window=window), sum(lengths) + spare
    qkv = torch.randn(tokens, (4 + 2 * how.key_heads) * 8, dtype=torch.float64, requires_grad=True)
    sent = torch.randn(tokens, 32, dtype=torch.float64)
    row_ends(lengths, spare).use()
    out, begin, want = attend_tokens(qkv, how), 0, []
    for n in lengths:
        want.append(alone(qkv, how, begin, begin + n))
        begin += n
    want = torch.cat([*want, out.new_zeros(spare, 32)])
    torch.testing.assert_close(out, want)
    for a, b in zip(*(torch.autograd.grad((o * sent).sum(), qkv) for o in (out, want))): torch.testing.assert_close(a, b)


@pytest.mark.parametrize('dropout', [.1, .4])
@pytest.mark.parametrize('how', [dict(), dict(causal=True), dict(window=4), dict(key_heads=1)], ids=str)
def test_both_passes_of_dropout_drop_the_same(how, dropout):
    "Gradients against differences of the outputs, whose dropout is the same for one seed; and it is at the rate"
    how, rows = Attention(2, 2, .5, dropout)._replace(**how), row_ends([7, 5], 1, seed=torch.tensor([3]))
    torch.manual_seed(0)
    qkv, sent = torch.randn(13, (2 + 2 * how.key_heads) * 4, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    run = lambda qkv, number=0: plain_forward(rows, qkv, None, None, how, number)
    out, state = run(qkv)
    grad, *_ = plain_backward(state, sent, qkv, out, None, None)
    assert torch.equal(out, run(qkv)[0]) and not torch.equal(out, run(qkv, 1)[0]), 'another layer drops others'
    for way in torch.randn(4, *qkv.shape, dtype=torch.float64):
        slope = ((run(qkv + 1e-6 * way)[0] - run(qkv - 1e-6 * way)[0]) * sent).sum() / 2e-6
        assert slope.item() == pytest.approx((grad * way).sum().item(), rel=1e-5)


def test_rows_do_not_see_each_other():
    "Other tokens in one row change nothing in the others, nor their gradients"
    module, lengths = module_of(), [20, 11, 7, 3]
    rows, how = row_ends(lengths, far=far_of(module, 20)), Attention(2, 2, .3)
    table = torch.randn(2 * module.pos_ebd_size, 12, dtype=torch.float64)
    torch.manual_seed(1)
    qkv = torch.randn(41, 36, dtype=torch.float64)
    changed = qkv.clone()
    changed[:20] = torch.randn(20, 36, dtype=torch.float64)
    (a, x), (b, y) = (plain_forward(rows, t, table, table, how, 0) for t in (qkv, changed))
    assert torch.equal(a[20:], b[20:]) and not torch.allclose(a[:20], b[:20])
    sent = torch.randn_like(a)
    back = [plain_backward(s, sent, t, out, table, table)[0] for s, t, out in ((x, qkv, a), (y, changed, b))]
    assert torch.equal(back[0][20:], back[1][20:]) and not torch.equal(back[0][:20], back[1][:20])


@pytest.mark.parametrize('kinds', [['c2p', 'p2c'], ['c2p'], ['p2c'], []], ids=' '.join)
@pytest.mark.parametrize('share', [True, False])
@pytest.mark.parametrize('buckets', [-1, 4, 16])
def test_a_module_by_rows_is_the_module_row_by_row(kinds, share, buckets):
    "Outputs and gradients of inputs, positions and weights"
    module = module_of(pos_att_type=kinds, share_att_key=share, position_buckets=buckets)
    lengths, entries = [40, 11, 1, 7], 2 * module.pos_ebd_size
    table, hidden = (torch.randn(n, 12, dtype=torch.float64, requires_grad=True) for n in (entries, 61))
    inputs, sent = [hidden, table, *module.parameters()], torch.randn(61, 12, dtype=torch.float64)
    of = lambda out: torch.autograd.grad((out * sent).sum(), inputs, allow_unused=True, materialize_grads=True)
    each = [module(row[None], torch.ones(1, 1, len(row), len(row)), rel_embeddings=table)[0][0]
            for row in hidden[:59].split(lengths)]
    want = torch.cat([*each, hidden.new_zeros(2, 12)])
    module.rows = row_ends(lengths, 2, far=far_of(module, 40))
    module.__class__ = by_rows(type(module), 'deberta')
    module.rows.use()
    got = module(hidden[None], None, rel_embeddings=table)[0][0]
    torch.testing.assert_close(got, want)
    for a, b in zip(of(got), of(want)): torch.testing.assert_close(a, b)


def test_a_module_without_rows_says_so():
    module = bert_module()
    module.__class__, module.rows = by_rows(type(module), 'bert'), row_ends([3])
    with pytest.raises(RuntimeError, match='without any being set'): module(torch.zeros(1, 3, 12))
    module.rows.use()
    assert module(torch.zeros(1, 3, 12))[0].shape == (1, 3, 12)


@pytest.mark.parametrize('training', [True, False])
def test_dropout_is_that_of_the_module(training, monkeypatch):
    "The kernel itself needs a GPU: what it is asked for is looked at, forward and back"
    seen, module = [], bert_module(.3).train(training)
    for name, plain in (('flash_forward', plain_forward), ('flash_backward', plain_backward)):
        monkeypatch.setattr(attention, name, lambda *a, plain=plain: (seen.append(next((x for x in a if isinstance(x, Attention)), None)), plain(*a))[1])
    module.rows = row_ends([20, 11], kernels=(attention.flash_forward, attention.flash_backward))
    module.__class__ = by_rows(type(module), 'bert')
    module.rows.use()
    module(torch.randn(1, 31, 12, requires_grad=True))[0].sum().backward()
    assert [how and how.dropout for how in seen] == [.3 * training, None]


def test_what_transformers_asks_for():
    "Its arguments that change scores are taken or refused by name; the direction is that of the call, or of the module"
    q, k, v = (torch.randn(1, heads, 9, 4) for heads in (4, 2, 2))
    module, rows = torch.nn.Linear(1, 1), row_ends([5, 4])
    qkv = torch.cat([t[0].transpose(0, 1) for t in (q, k, v)], 1).flatten(1)
    def asked(module, **given):
        rows.use()
        return attend_interface(module, q, k, v, None, **given)[0][0].flatten(1)
    def want(**how): return torch.cat([alone(qkv, Attention(4, 2, .5)._replace(**how), a, b) for a, b in ((0, 5), (5, 9))])
    torch.testing.assert_close(asked(module), want())
    torch.testing.assert_close(asked(module, scaling=.3, sliding_window=2, is_causal=True), want(scale=.3, window=2, causal=True))
    module.is_causal = True
    torch.testing.assert_close(asked(module, position_ids=torch.arange(9), use_cache=False, cu_seq_lens_q=None), want(causal=True))
    torch.testing.assert_close(asked(module, is_causal=False), want())
    with pytest.raises(InputError, match='^Linear attends with a mask of its own'): attend_interface(module, q, k, v, torch.zeros(1, 4, 9, 9)) # of a bias
    for odd in (dict(softcap=30.), dict(s_aux=torch.zeros(4)), dict(something=0)):
        with pytest.raises(InputError, match=f'^Linear attends with {next(iter(odd))}, which rows end to end lack$'): asked(module, **odd)


def test_a_layer_is_one_graph_to_the_compiler():
    "No break, and no new compilation for other rows; state of a way back that never came is dropped"
    import torch._dynamo
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = module_of().float()
    module.__class__ = by_rows(type(module), 'deberta')
    compiled = torch.compile(lambda h, t: module(h, rel_embeddings=t)[0], fullgraph=True, backend='aot_eager')
    table, module.rows = torch.randn(2 * module.pos_ebd_size, 12), row_ends([1], far=far_of(module, 30))
    for lengths in ([20, 11, 7], [9, 8], [30, 30, 2]):
        module.rows.ends = row_ends(lengths).ends
        module.rows.use()
        hidden = torch.randn(1, sum(lengths) + 3, 12, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(hidden, 1)
        got, want = compiled(hidden, table), module(hidden, rel_embeddings=table)[0]
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*[torch.autograd.grad(o.sum(), hidden)[0] for o in (got, want)])
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1
    assert not attention._KEPT
    module(hidden, rel_embeddings=table)
    assert attention._KEPT
    module.rows.use()
    assert not attention._KEPT
    with torch.no_grad(): module(hidden, rel_embeddings=table)
    assert not attention._KEPT


def tensors_in(value):
    if isinstance(value, torch.Tensor): yield value
    elif isinstance(value, attention.RowEnds): yield from tensors_in(list(vars(value).values()))
    elif isinstance(value, (list, tuple)):
        for v in value: yield from tensors_in(v)


def written_out():
    "Flash attention with torch's operators replaced by the plain version: what remains is what optkit remembers"
    def flash(q, k, v, ends, longest, how):
        out = plain_forward(row_ends([1], ends=ends), torch.cat([q, k, v], 1).flatten(1), None, None, how, 0)[0]
        return out.unflatten(1, (how.heads, -1)), [torch.zeros(1)] * 3
    def back(grad, q, k, v, out, saved, ends, longest, how):
        rows = row_ends([1], ends=ends)
        made = plain_backward((rows, how, (0, 0)), grad.flatten(1), torch.cat([q, k, v], 1).flatten(1), out, None, None)[0]
        return parts(made, how)
    return flash, back


@pytest.mark.parametrize('kernels', ['plain', 'flash'])
def test_nothing_remembered_lies_in_memory_that_the_compiler_may_give_to_others(monkeypatch, kernels):
    "A compiled layer uses the memory of an input again once the call is over; the flash version, written out, is the plain one"
    rows, how, results = row_ends([20, 11, 7], 3), Attention(2, 2, .3), []
    if kernels == 'flash':
        flash, back = written_out()
        monkeypatch.setattr(attention, '_flash', flash)
        monkeypatch.setattr(attention, '_flash_back', back)
        rows.kernels = flash_forward, flash_backward
    rows.use()
    torch.manual_seed(0)
    qkv = torch.randn(41, 36, dtype=torch.float64, requires_grad=True)
    out = attend_tokens(qkv, how)
    taken = {t.untyped_storage().data_ptr() for t in (qkv, out)}
    assert attention._KEPT and not any(t.untyped_storage().data_ptr() in taken for t in tensors_in(list(attention._KEPT.values())))
    grad, = torch.autograd.grad((out ** 2).sum(), qkv)
    want = torch.cat([*(alone(qkv, how, a, b) for a, b in ((0, 20), (20, 31), (31, 38))), out.new_zeros(3, 12)])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(grad, torch.autograd.grad((want ** 2).sum(), qkv)[0])


def test_kinds():
    small = dict(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=9)
    kinds = lambda model: {attention_kind(m) for m in model.modules()} - {None}
    assert attention_kind(module_of()) == 'deberta' and kinds(tf.BertModel(tf.BertConfig(**small))) == {'bert'}
    for model in (tf.RobertaModel(tf.RobertaConfig(**small)), tf.ElectraModel(tf.ElectraConfig(**small)), tf.XLMRobertaModel(tf.XLMRobertaConfig(**small))): assert kinds(model) == {'bert'}
    assert kinds(tf.MPNetModel(tf.MPNetConfig(**small))) == {'mpnet'}
    others = (tf.LlamaModel(tf.LlamaConfig(**small)), tf.GPT2Model(tf.GPT2Config(n_embd=12, n_layer=1, n_head=2, vocab_size=9)),
              tf.AlbertModel(tf.AlbertConfig(embedding_size=8, **small)), tf.ModernBertModel(tf.ModernBertConfig(**small, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)))
    for model in others: assert kinds(model) == {'interface'}
    assert kinds(tf.DebertaModel(tf.DebertaConfig(**small))) == set()


# --- on a GPU: flash attention

HOW = [dict(), dict(causal=True), dict(window=9), dict(causal=True, window=9), dict(key_heads=1), dict(key_heads=2, causal=True), dict(dropout=0., scale=.3)]
LENGTHS = [70, 1, 5, 133, 33]


def on_a_gpu(depth, how, dtype=torch.bfloat16, lengths=LENGTHS, spare=6):
    "Rows, inputs and what is sent back"
    torch.manual_seed(0)
    rows, tokens = row_ends(lengths, spare, device='cuda'), sum(lengths) + spare
    qkv = torch.randn(tokens, (how.heads + 2 * how.key_heads) * depth, device='cuda').to(dtype)
    return rows, qkv, torch.randn(tokens, how.heads * depth, device='cuda').to(dtype)


@pytest.mark.parametrize('depth', [32, 64, 128, pytest.param(256, id='256')])
@pytest.mark.parametrize('values', HOW, ids=str)
class TestFlash:
    pytestmark = cuda
    def test_flash_is_the_plain_version(self, depth, values):
        "Context and gradients: no further from the plain version in float64 than twice that in the same format; 0 for tokens of no row"
        how = Attention(4, 4, depth**-.5)._replace(**values)
        rows, qkv, sent = on_a_gpu(depth, how)
        results = []
        for (forward, backward), dtype in (((flash_forward, flash_backward), qkv.dtype), ((plain_forward, plain_backward), qkv.dtype), ((plain_forward, plain_backward), torch.float64)):
            out, state = forward(rows, qkv.to(dtype), None, None, how, 0)
            results.append((out, backward(state, sent.to(dtype), qkv.to(dtype), out, None, None)[0]))
        for flash, plain, exact in zip(*results):
            off = lambda t: ((t.double() - exact).norm() / exact.norm()).item()
            assert off(flash) < max(2 * off(plain), 1e-2) and flash.dtype == torch.bfloat16
            assert torch.isfinite(flash).all() and not flash[-6:].any()


@pytest.mark.parametrize('depth', [64, 128])
@pytest.mark.parametrize('values', [dict(), dict(causal=True), dict(key_heads=1)], ids=str)
class TestFlashDropout:
    pytestmark = cuda
    def shares(self, depth, values, rate, seed):
        "Shares that each query of a row of `depth` tokens gives its keys, after dropout: values are the rows of the unit matrix"
        how = Attention(4, 4, depth**-.5, rate)._replace(**values)
        rows, qkv, _ = on_a_gpu(depth, how, torch.float16, [depth, depth], 0)
        torch.cuda.manual_seed(seed)
        for value in parts(qkv, how)[2].unbind(1): value.copy_(torch.eye(depth, device='cuda').repeat(2, 1))
        out, state = flash_forward(rows, qkv, None, None, how, 0)
        return how, rows, qkv, out, state

    def test_what_is_dropped(self, depth, values):
        "As many as the rate says; others for each head and row, others from call to call, the same for one seed; and the sum stays on average"
        how, _, _, out, _ = self.shares(depth, values, .3, 1)
        _, _, _, whole, _ = self.shares(depth, values, 0., 1)
        out, whole = out.unflatten(1, (4, depth)), whole.unflatten(1, (4, depth))
        seen = whole > 1e-4
        kept = out > 0
        rate = 1 - (kept & seen).sum().item() / seen.sum().item()
        assert abs(rate - .3) < 5 * math.sqrt(.21 / seen.sum().item())
        torch.testing.assert_close(out[kept & seen], whole[kept & seen] / .7, rtol=2e-2, atol=1e-3)
        both = seen[:depth] & seen[depth:]
        assert (kept[:depth] != kept[depth:])[both].float().mean() > .3, 'rows drop alike'
        assert (kept[:, 0] != kept[:, 1])[seen[:, 0] & seen[:, 1]].float().mean() > .3, 'heads drop alike'
        assert torch.equal(out, self.shares(depth, values, .3, 1)[3].unflatten(1, (4, depth)))
        assert not torch.equal(out, self.shares(depth, values, .3, 2)[3].unflatten(1, (4, depth)))

    def test_the_backward_pass_drops_what_the_forward_pass_dropped(self, depth, values):
        "The mask is read from the forward pass; the plain formulas with it give the gradients"
        how, rows, qkv, out, state = self.shares(depth, values, .3, 1)
        sent = torch.randn(len(out), 4 * depth, device='cuda').half()
        grad, *_ = flash_backward(state, sent, qkv, out, None, None)
        leaf, contexts = qkv.double().requires_grad_(), []
        for begin in (0, depth):
            q, k, v = (t[begin:begin + depth].transpose(0, 1) for t in parts(leaf, how))
            k, v = (t.repeat_interleave(4 // how.key_heads, 0) for t in (k, v))
            scores = q @ k.mT * how.scale
            if how.causal: scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
            kept = out.unflatten(1, (4, depth))[begin:begin + depth].transpose(0, 1) > 0
            contexts.append(((scores.softmax(-1) * kept / .7) @ v).transpose(0, 1).flatten(1))
        want = torch.cat(contexts)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-3)
        exact, = torch.autograd.grad((want * sent.double()).sum(), leaf)
        assert ((grad.double() - exact).norm() / exact.norm()).item() < 2e-2
