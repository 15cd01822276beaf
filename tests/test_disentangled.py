"Disentangled attention on tokens end to end: against transformers in float64, dropout, what stays apart; interpreted where there is no GPU"
import itertools, math, os, subprocess, sys
from pathlib import Path

import pytest
import torch

from optkit import disentangled
from optkit.disentangled import (
    disentangled_attention, disentangled_problem, distances, INTERPRETED, kept_pairs, odds, plain_disentangled,
    whole_disentangled, whole_disentangled_back)

torch.set_num_threads(1)
GPU = torch.cuda.is_available()
DEVICE = 'cuda' if GPU else 'cpu'
needs_kernels = pytest.mark.skipif(not (GPU or INTERPRETED), reason='run by test_kernels_in_the_interpreter')
cuda = [pytest.mark.cuda, pytest.mark.skipif(not GPU, reason='needs a GPU')]


@pytest.mark.skipif(GPU or INTERPRETED or disentangled.triton is None, reason='needs Triton, and no GPU')
def test_kernels_in_the_interpreter():
    "The tests below, in a process of its own, since Triton decides at import"
    env = os.environ | dict(TRITON_INTERPRET='1')
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', __file__],
                          capture_output=True, text=True, env=env, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0 and 'passed' in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def module_of(heads, depth, **kind):
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention
    torch.manual_seed(0)
    kind = dict(position_buckets=8, pos_att_type=['p2c', 'c2p'], share_att_key=True, max_position_embeddings=48) | kind
    return DisentangledSelfAttention(DebertaV2Config(
        hidden_size=heads * depth, num_attention_heads=heads, hidden_dropout_prob=0., attention_probs_dropout_prob=0.,
        max_relative_positions=-1, relative_attention=True, **kind)).to(DEVICE)


def ends_of(lengths): return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def by_kernel(module, hidden, table, lengths):
    "The module's context by the kernels"
    heads, prefix = module.num_attention_heads, '' if module.share_att_key else 'pos_'
    split = lambda t: t.unflatten(-1, (heads, -1))
    qkv = torch.stack([split(p(hidden)) for p in (module.query_proj, module.key_proj, module.value_proj)], 1)
    pos = [split(getattr(module, f'{prefix}{name}_proj')(table)) if kind in module.pos_att_type else None
           for kind, name in (('c2p', 'key'), ('p2c', 'query'))]
    scale = 1 / math.sqrt(qkv.shape[-1] * (1 + len(module.pos_att_type)))
    far = distances(module, max(lengths), DEVICE)
    return disentangled_attention(qkv, *pos, far, ends_of(lengths), scale).flatten(1)


def by_module(module, hidden, table, lengths):
    "The module's own, row by row"
    rows = [module(row[None], torch.ones(1, 1, len(row), len(row), device=DEVICE), rel_embeddings=table)[0][0]
            for row in hidden.split(lengths)]
    return torch.cat(rows)


def outcome(run, module, hidden, table, lengths, sent, dtype):
    "Context and gradients of inputs, table and weights, in float64"
    module, hidden, table = module.to(dtype), *(t.to(dtype).requires_grad_() for t in (hidden, table))
    out = run(module, hidden, table, lengths)
    grads = torch.autograd.grad(out, [hidden, table, *module.parameters()], sent.to(dtype), allow_unused=True)
    return [t.double() for t in (out, *grads) if t is not None]


def compare(heads, depth, lengths, dtype, **kind):
    module = module_of(heads, depth, **kind)
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, heads * depth, generator=g, dtype=torch.float64).to(dtype).double().to(DEVICE)
    hidden, sent, table = draw(sum(lengths)), draw(sum(lengths)), draw(2 * module.pos_ebd_size)
    module = module.to(dtype).double() # weights that the format can hold
    args = module, hidden, table, lengths, sent
    want = outcome(by_module, *args, torch.float64)
    got, theirs = (outcome(run, *args, dtype) for run in (by_kernel, by_module))
    for n, (a, b, c) in enumerate(zip(got, theirs, want, strict=True)):
        error, allowed = (a - c).norm(), (b - c).norm()
        if c.norm() < 1e-9 * sent.norm(): allowed = 16 * torch.finfo(dtype).eps * sent.norm() # a row of one token: nothing to learn
        # in FP32 the softmax's sum is kept as one logarithm, as in flash attention
        assert error <= 1.5 * allowed + 5e-6 * c.norm(), f'tensor {n}: {error} beside {allowed} of {c.norm()}'


@needs_kernels
@pytest.mark.parametrize('lengths', [[1], [33, 1, 7], [64, 32]], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16], ids=str)
def test_errors_are_those_of_the_module(dtype, lengths): compare(2, 32, lengths, dtype)


@needs_kernels
@pytest.mark.parametrize('kind', [
    dict(pos_att_type=['c2p']), dict(pos_att_type=['p2c']), dict(share_att_key=False), dict(position_buckets=-1),
    dict(position_buckets=-1, max_position_embeddings=20)], ids=str)
def test_terms_alone_keys_of_their_own_and_no_buckets(kind): compare(1, 32, [40, 5], torch.float32, **kind)


@pytest.mark.parametrize('depth', [32, 64, 128])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize('lengths', [[1], [2, 63, 64, 65, 1], [511, 512, 17], [1024, 129, 3, 300]], ids=str)
@pytest.mark.parametrize('marked', [pytest.param(1, marks=cuda)], ids=[''])
def test_lengths_up_to_1024(lengths, dtype, depth, marked):
    compare(2, depth, lengths, dtype, position_buckets=64, max_position_embeddings=512)


@pytest.mark.parametrize('kind', [dict(pos_att_type=['c2p']), dict(pos_att_type=['p2c']), dict(position_buckets=-1)], ids=str)
@pytest.mark.parametrize('marked', [pytest.param(1, marks=cuda)], ids=[''])
def test_terms_alone_in_16_bits(kind, marked): compare(3, 64, [200, 70, 5], torch.bfloat16, **kind)


def inputs(lengths, spare=0, heads=2, depth=32, dtype=torch.float32):
    torch.manual_seed(1)
    from types import SimpleNamespace
    module = SimpleNamespace(position_buckets=8, max_relative_positions=48, pos_ebd_size=8)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, device=DEVICE)
    return dict(qkv=draw(sum(lengths) + spare, 3, heads, depth), pos_key=draw(16, heads, depth), pos_query=draw(16, heads, depth),
                far=distances(module, max(lengths), DEVICE), ends=ends_of(lengths), scale=.1)


@needs_kernels
def test_dropout_is_the_same_in_both_passes():
    "Against autograd through the mask that the hash gives"
    given, seed = inputs([70, 5, 33]), torch.tensor([2**61 + 12345], device=DEVICE)
    tensors = [given[n].requires_grad_() for n in ('qkv', 'pos_key', 'pos_query')]
    got = disentangled_attention(**given, dropout=.3, seed=seed)
    qkv, *others, ends, scale = given.values()
    want = plain_disentangled(*qkv.unbind(1), *others, ends, scale, .3, seed)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    sent = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(o, tensors, sent) for o in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(got, disentangled_attention(**given, dropout=.3, seed=seed))
    assert not torch.allclose(got, disentangled_attention(**given, dropout=.3, seed=seed + 1))


@pytest.mark.parametrize('dropout', [.1, .5, .9])
def test_dropout_drops_at_its_rate_and_without_a_pattern(dropout):
    "Over rows, columns, neighbours, heads and seeds: within five standard deviations of a fair draw"
    kept = torch.stack([kept_pairs(torch.tensor([s]), 11, 256, 4, dropout) for s in (1, 2, 2**40 + 1)]).double()
    deviation = math.sqrt(dropout * (1 - dropout))
    def fair(values, n): assert (values / (deviation / math.sqrt(n))).abs().max() < 5
    share = kept - (1 - odds(dropout)[0] / 65536)
    fair(share.mean(), share.numel())
    fair(share.mean(-1), 256)
    fair(share.mean(-2), 256)
    for other in (share.roll(1, -1), share.roll(32, -1), share.roll(1, -2), share.roll(1, -3), share.roll(1, 0), share.mT):
        fair((share * other).mean() / deviation, share.numel() / (2 if other is not share.mT else 1))


@needs_kernels
def test_rows_and_tokens_of_none_do_not_touch_each_other():
    "Nothing of a row or of a token behind the last one reaches another row, not even what is no number"
    given = inputs([20, 40, 3], spare=9)
    given['qkv'][20:60] = float('nan')
    given['qkv'][63:] = float('inf')
    given['qkv'].requires_grad_()
    out = disentangled_attention(**given)
    alone = inputs([20, 40, 3], spare=9)
    torch.testing.assert_close(out[:20], disentangled_attention(**alone)[:20])
    assert out[20:60].isnan().all() and not out[63:].any() and out[60:63].isfinite().all()
    grad, = torch.autograd.grad(out[:20].sum() + out[60:].sum(), [given['qkv']])
    assert grad[:20].isfinite().all() and grad[60:63].isfinite().all() and not grad[63:].any()


@needs_kernels
def test_empty_rows_and_one_grid_for_all_lengths():
    given = inputs([30, 0, 0, 40, 0])
    want = inputs([30, 40])
    torch.testing.assert_close(disentangled_attention(**given), disentangled_attention(**want))


@needs_kernels
def test_a_layer_stays_one_graph():
    import torch._dynamo
    torch._dynamo.reset()
    run = torch.compile(lambda qkv, pos_key, pos_query, far, ends, seed: disentangled_attention(
        qkv * 1., pos_key, pos_query, far, ends, .1, .1, seed).sum(), fullgraph=True, backend='aot_eager', dynamic=True)
    for lengths in ([20, 9], [15, 3, 1]):
        given = inputs(lengths)
        given.pop('scale')
        given['qkv'].requires_grad_()
        seed = torch.tensor([3], device=DEVICE)
        grad, = torch.autograd.grad(run(**given, seed=seed), [given['qkv']])
        want, = torch.autograd.grad(disentangled_attention(**given, scale=.1, dropout=.1, seed=seed).sum(), [given['qkv']])
        torch.testing.assert_close(grad, want)


@pytest.mark.cuda
@pytest.mark.skipif(not GPU, reason='needs a GPU')
def test_a_captured_call_follows_its_ends_and_draws_anew():
    given = inputs([200, 100, 40], dtype=torch.bfloat16)
    disentangled_attention(**given, dropout=.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped, whole = disentangled_attention(**given, dropout=.1), disentangled_attention(**given)
    graph.replay()
    before = dropped.clone()
    graph.replay()
    assert not torch.equal(before, dropped)
    given['ends'].copy_(ends_of([40, 250, 50]))
    graph.replay()
    torch.testing.assert_close(whole, disentangled_attention(**given))


def test_without_kernels_the_plain_form_runs():
    given = inputs([9, 5], spare=2)
    given['qkv'].requires_grad_()
    out = disentangled_attention(**given)
    grad, = torch.autograd.grad(out.sum(), [given['qkv']])
    assert out.shape == (16, 2, 32) and grad.shape == given['qkv'].shape and not grad[14:].any()


def test_why_the_kernels_cannot_run():
    good = dict(device='cuda', capability=(8, 0), depth=64)
    if disentangled.triton is not None: assert disentangled_problem(**good) == ''
    for change, reason in ((dict(device='cpu'), 'GPU'), (dict(capability=(7, 5)), '8.0'), (dict(depth=48), '48')):
        assert disentangled.triton is None or reason in disentangled_problem(**good | change)


# in the fast engine

def engines(monkeypatch, **kind):
    "A plain and a fast engine of the same small model, whose rows go end to end, and 13 rows"
    from test_fast import DEBERTA, Fast, FP32, made_up, small
    from optkit.engine import Engine
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification
    monkeypatch.setattr('optkit.fast.end_to_end_problem', lambda *a: '')
    for way, kernel in (('forward', whole_disentangled), ('backward', whole_disentangled_back)):  # also on a CPU
        monkeypatch.setattr(f'optkit.shapes.plain_{way}', kernel)
    def model():
        torch.manual_seed(0)
        made = DebertaV2ForSequenceClassification(DebertaV2Config(**small(num_attention_heads=1) | DEBERTA | kind))
        with torch.no_grad():
            for p in made.parameters(): p.add_(.05 * torch.randn_like(p))  # no bias is 0
        return made
    return Engine(model(), FP32), Fast(model(), FP32, at_once=5), made_up(13)


@needs_kernels
@pytest.mark.parametrize('kind', [
    dict(), dict(share_att_key=False, position_biased_input=True, type_vocab_size=2, num_hidden_layers=1),
    dict(pos_att_type=['p2c'], position_buckets=-1, max_relative_positions=10, num_hidden_layers=1)], ids=str)
def test_steps_end_to_end_equal_the_plain_engine(kind, monkeypatch):
    "Several micro-batches with tokens of no row; losses, norm of the gradients, the gradients themselves, evaluation"
    from optkit.shapes import EndToEnd
    from test_fast import losses, same_weights
    plain, fast, store = engines(monkeypatch, **kind)
    found = losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3)
    assert isinstance(fast.call_for(store), EndToEnd) and not fast.notes and fast.micro_batches > 1
    torch.testing.assert_close(*map(torch.tensor, found), rtol=2e-5, atol=0)
    torch.testing.assert_close(fast.grad_norm, plain.grad_norm, rtol=1e-3, atol=0)
    same_weights(plain.model, fast.model)
    for engine in (plain, fast): engine.set(lr=0., max_grad_norm=0.)
    plain._clear_gradients = lambda *a: None  # its gradients stay to be seen
    for engine in (plain, fast): engine.step(store, list(range(8)))
    weights = [p for g in plain.optimizer.param_groups for p in g['params']]
    for p, (_, grad) in zip(weights, fast.gradients, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(p) if p.grad is None else p.grad, rtol=2e-2, atol=2e-5)
    fast.captured_forward = True
    torch.testing.assert_close(plain.predict(store, range(9)), fast.predict(store, range(9)), rtol=1e-3, atol=2e-4)
    assert any('forward' in k for k in fast.built)


@needs_kernels
def test_neither_trial_nor_evaluation_changes_what_dropout_draws(monkeypatch):
    "A reset engine repeats a fresh one, which first tried its kernels; an evaluation between two steps changes nothing"
    _, fast, store = engines(monkeypatch, num_hidden_layers=1, attention_probs_dropout_prob=.3)
    fast.captured_forward, found = True, []
    for evaluate in (False, False, True):
        fast.reset(lr=0.)
        found.append([fast.step(store, list(range(4))).item()])
        if evaluate: fast.predict(store, range(5))
        found[-1].append(fast.step(store, list(range(4))).item())
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]
    assert any('forward' in k for k in fast.built)


@needs_kernels
def test_layers_draw_dropout_of_their_own():
    "No query of a layer, whatever its head, keeps the keys that one of another layer keeps; both passes know the layer"
    from optkit.attention import Attention, RowEnds
    given, masks = inputs([32, 32], heads=4), []
    rows, how = RowEnds(), Attention(4, 4, .1, .3)
    rows.ends, rows.far, rows.seed = given['ends'], given['far'], torch.tensor([2**61 + 12346], device=DEVICE)
    shown = torch.zeros_like(given['qkv'])
    shown[:, 2] = torch.eye(32, device=DEVICE).repeat(2, 1)[:, None]  # the context is the shares
    for number in range(4):
        out, _ = whole_disentangled(rows, shown.flatten(1), None, None, how, number)
        masks.append({tuple(row.tolist()) for row in out.unflatten(1, (4, 32)).flatten(0, 1) > 0})
    assert all(len(m) == 256 for m in masks) and all(not a & b for a, b in itertools.combinations(masks, 2))

    tensors = [given[n].flatten(1).requires_grad_() for n in ('qkv', 'pos_key', 'pos_query')]
    split = [tensors[0].unflatten(1, (3, 4, 32)), *(t.unflatten(1, (4, 32)) for t in tensors[1:])]
    want = plain_disentangled(*split[0].unbind(1), *split[1:], given['far'], given['ends'], .1, .3, rows.seed + 3)
    with torch.no_grad():
        out, state = whole_disentangled(rows, *tensors, how, 3)
        torch.testing.assert_close(out, want.flatten(1), rtol=1e-4, atol=1e-5)
        sent = torch.randn_like(out)
        got = whole_disentangled_back(state, sent, tensors[0], out, *tensors[1:])
    for a, b in zip(got, torch.autograd.grad(want.flatten(1), tensors, sent)): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_seeds_side_by_side_share_no_query():
    rows = lambda seed: {tuple(r.tolist()) for r in kept_pairs(torch.tensor([seed]), 0, 64, 12, .3).flatten(0, 1)}
    first = rows(2**61 + 123456)
    assert all(len(rows(2**61 + 123456 + n)) == len(first) == 768 and not first & rows(2**61 + 123456 + n) for n in (1, 2, 5, 23))
