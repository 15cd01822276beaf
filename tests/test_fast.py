"The fast engine against the plain one: shapes, rows end to end, families of models, tasks, values, resets"
import copy, gc, itertools, math, pickle, subprocess
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import numpy as np
import pytest
import torch
import torch.utils._python_dispatch, torch.utils._pytree
import transformers as tf
from hypothesis import given, settings, strategies as st
from optkit import attention
from optkit.base import InputError
from optkit.table import Table
from optkit.store import tokenise, word_tokenizer
from optkit.steps import Layout, LAYOUTS, steps
from optkit.store import with_labels
from optkit.models import example_model
from optkit.engine import Engine
from optkit.shapes import choose_shapes, cut, EndToEnd, padded_shapes, PaddedCall, Shape, ShapeLayout, StaticBatch
from optkit.disentangled import triton
from optkit.fast import _same_layers, end_to_end_problem, fast_problem, FastEngine, rows_problem
from optkit.hardware import detect, hardware_with
from optkit.precision import choose_precision
torch.set_num_threads(1)
pytestmark = pytest.mark.engine
MACHINE = detect() if torch.cuda.is_available() else hardware_with(None)  # on a GPU everything below is captured
FP32 = choose_precision(MACHINE, prefer='fp32', **(dict(tf32=False) if torch.cuda.is_available() else {}))
BF16 = choose_precision(MACHINE, prefer='bf16')
def Fast(model, precision, **settings):
    "Without the compiler, unless a test is about it"
    return FastEngine(model, precision, **dict(layers=False) | settings)


def made_up(rows=37, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    kind = rng.integers(2, size=rows)
    texts = [' '.join(f'w{rng.integers(75) + 75 * k}' for _ in range(n)) for k, n in zip(kind, np.clip(rng.lognormal(2.3, .7, rows), 1, longest).astype(int))]
    return tokenise(Table(texts, None, kind, ('a', 'b'), 'made up'), word_tokenizer(), 64, progress=False)


STORE = made_up()
def losses(engine, store=STORE, effective=8, epochs=1, lr=3e-3, layout='sorted', physical=4, **values):
    engine.reset(lr=lr, **values)
    return [engine.step(store, micro).item() for e in range(epochs) for micro in steps(store, np.arange(len(store)), effective, seed=1, epoch=e, layout=Layout(layout, physical))]


def same_weights(a, b, rtol=2e-3, atol=2e-4):
    "Adam divides by the size of a gradient, so weights whose gradient is about 0 may go either way: one in a thousand may be off by more, as seen on a GPU"
    for (n, p), (_, q) in zip(a.named_parameters(), b.named_parameters()):
        off = (p - q).abs() > atol + rtol * q.abs()
        assert off.float().mean() <= (1e-3 if p.is_cuda else 0) and (p - q).abs().max() < .02, f'{n}: {int(off.sum())} of {off.numel()} weights differ, by up to {(p - q).abs().max():.2g}'


# shapes


@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=80), rows=st.integers(1, 40), tokens=st.integers(512, 4000), width=st.sampled_from([0, 128, 512]))
def test_cut_puts_each_row_into_one_shape_that_holds_it(lengths, rows, tokens, width):
    shapes = (Shape(rows, tokens, width), Shape(2, 1024), Shape(1, 512, 512))
    lengths, seen = np.array(lengths), []
    for shape, inside in cut(shapes, lengths):
        assert 0 < len(inside) <= shape.rows and (shape.width * len(inside) or lengths[inside].sum()) <= shape.tokens
        assert not shape.width or lengths[inside].max() <= shape.width
        seen += inside
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize('choose', [choose_shapes, padded_shapes])
@given(seed=st.integers(0, 1000), rows=st.sampled_from([1, 2, 8, 32, 64]), sigma=st.sampled_from([0., .3, .9]), most=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_chosen_shapes_hold_every_step(choose, seed, rows, sigma, most):
    lengths = np.clip(np.random.default_rng(seed).lognormal(4, sigma, 300), 3, 512).astype(int)
    shapes = choose(lengths, rows, **dict(most=most) if choose is choose_shapes else {}).value
    assert len(shapes) <= (most if choose is choose_shapes else 10) and all(s.rows <= rows for s in shapes)
    for draw in range(5):
        drawn = np.random.default_rng(draw).choice(lengths, rows)
        assert sorted(r for _, inside in cut(shapes, drawn) for r in inside) == list(range(rows))
    assert cut(shapes, np.full(rows, lengths.max()))  # even where all are the longest


@pytest.mark.parametrize('rows, waste', [(16, 1.2), (32, 1.15), (128, 1.1)])
def test_shapes_waste_little_on_the_benchmark_lengths(rows, waste):
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(110), .7, 4096), 16, 512).astype(int)
    shapes = choose_shapes(lengths, rows).value
    drawn = [np.random.default_rng(s).choice(lengths, rows) for s in range(1000, 1100)]  # steps that were not drawn for the choice
    used = [shape for d in drawn for shape, _ in cut(shapes, d)]
    assert sum(s.tokens for s in used) / sum(d.sum() for d in drawn) < waste and len(used) < 125


@pytest.mark.parametrize('width', [0, 32])
def test_a_batch_holds_what_was_put_in(width):
    "Tokens, positions, lengths and labels of rows and of tokens; nothing of the micro-batch before is left"
    for store in (STORE, token_store()):
        static = StaticBatch(Shape(4, 128, width), store, 'cpu')
        for rows in ([4, 0, 5, 3], [1, 5]):
            static.put(store, rows, 2.)
            inputs, at = static.inputs(), 0
            for n, row in enumerate(rows):
                a, b = store.offsets[row:row + 2].tolist()
                ids, labels = inputs['input_ids'], inputs['labels']
                inside = slice(n * width, n * width + b - a) if width else slice(at, at + b - a)
                assert torch.equal(ids.flatten()[inside], store.tokens[a:b].long())
                if not width: assert inputs['position_ids'][0, inside].tolist() == list(range(b - a))
                assert torch.equal(labels[inside], store.labels[a:b].long()) if static.per_token else labels[n] == store.labels[row]
                at += b - a
            assert inputs['lengths'].tolist() == [*store.lengths[rows], *[0] * (4 - len(rows))] and inputs['weight'] == 2 and inputs['real'].sum() == at
            assert (inputs['input_ids'] != store.pad_id).sum() == at and (labels >= 0).sum() == (store.targets[rows].sum() if static.per_token else len(rows))


def test_more_shapes_must_earn_their_building():
    assert len(choose_shapes(np.full(100, 64), 8).value) == 1


# families: rows end to end where the attention is known, padded rows elsewhere


def small(**extra): return dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=160, num_labels=2, pad_token_id=0) | extra
CALM = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
MARKS = dict(bos_token_id=1, eos_token_id=2, classifier_dropout=0.)
DEBERTA = CALM | dict(type_vocab_size=0, relative_attention=True, position_buckets=16, norm_rel_ebd='layer_norm', share_att_key=True, pos_att_type=['p2c', 'c2p'], position_biased_input=False, max_relative_positions=-1)
MODERN = MARKS | dict(cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2, local_attention=16, attention_dropout=0., reference_compile=False)
SHARED = MARKS | dict(num_key_value_heads=1)
END_TO_END = dict(
    bert=('Bert', CALM), roberta=('Roberta', CALM), electra=('Electra', CALM | dict(embedding_size=32)), camembert=('Camembert', CALM),
    albert=('Albert', CALM | dict(embedding_size=16, classifier_dropout_prob=0.)), mpnet=('MPNet', CALM),
    distilbert=('DistilBert', dict(dim=32, n_layers=2, n_heads=2, hidden_dim=64, dropout=0., attention_dropout=0., seq_classif_dropout=0.)),
    modernbert=('ModernBert', MODERN), deberta=('DebertaV2', DEBERTA),
    gpt2=('GPT2', MARKS | dict(n_embd=32, n_layer=2, n_head=2, n_positions=160, resid_pdrop=0., attn_pdrop=0., embd_pdrop=0.)),
    llama=('Llama', SHARED), qwen2=('Qwen2', SHARED), qwen3=('Qwen3', SHARED | dict(head_dim=16)), mistral=('Mistral', SHARED | dict(sliding_window=12)),
    gemma3=('Gemma3Text', SHARED | dict(head_dim=16, sliding_window=12, layer_types=['sliding_attention', 'full_attention']))) | {
    'bert eager': ('Bert', CALM | dict(attn_implementation='eager')), 'xlm-roberta': ('XLMRoberta', CALM),
    'modernbert mean': ('ModernBert', MODERN | dict(classifier_pooling='mean')),
    'deberta, own keys': ('DebertaV2', DEBERTA | dict(share_att_key=False, position_biased_input=True, type_vocab_size=2)),
    'deberta, wide table': ('DebertaV2', DEBERTA | dict(position_buckets=64)), 'deberta, c2p alone': ('DebertaV2', DEBERTA | dict(pos_att_type=['c2p']))}
PADDED = {'deberta with a convolution': ('DebertaV2', DEBERTA | dict(conv_kernel_size=3)), 'gemma2': ('Gemma2', SHARED | dict(head_dim=16)),
          'deberta v1': ('Deberta', CALM | dict(relative_attention=True, pos_att_type=['p2c', 'c2p']))}


def model_of(name, seed=0, head='ForSequenceClassification', **more):
    kind, extra = (END_TO_END | PADDED)[name]
    extra = dict(extra)
    how = extra.pop('attn_implementation', None)
    torch.manual_seed(seed)
    made = getattr(tf, f'{kind}Config')(**small(**extra | more))
    if how: made._attn_implementation = how
    names = dict(GPT2ForCausalLM='GPT2LMHeadModel', Gemma3TextForCausalLM='Gemma3ForCausalLM')
    model = getattr(tf, names.get(kind + head, kind + head))(made)
    with torch.no_grad():
        for p in model.parameters(): p.add_(.05 * torch.randn_like(p))  # no bias is 0, no norm is 1
    return model


def token_store(store=STORE):
    "A label for most tokens"
    labels = torch.where(store.tokens % 5 == 0, -100, store.tokens % 2)
    return replace(store, labels=labels, task='tokens', targets=np.add.reduceat((labels >= 0).long().numpy(), store.offsets[:-1]))


def next_token_store(store=STORE):
    flat, ends = store.tokens.numpy(), store.offsets.numpy()
    labels = np.full(len(flat), -100)
    for i, j in zip(ends, ends[1:]): labels[i:j - 1] = flat[i + 1:j]
    targets = np.add.reduceat((labels != -100).astype(np.int64), ends[:-1])
    return replace(store, labels=torch.from_numpy(labels.astype(np.int32)), task='causal', targets=targets, classes=())


def with_rows(change, store=STORE):
    "The store with each row's tokens as `change(number, tokens)` gives them"
    rows = [np.asarray(change(n, store.tokens[a:b].numpy())) for n, (a, b) in enumerate(zip(store.offsets, store.offsets[1:]))]
    lengths = np.array([len(r) for r in rows])
    return replace(store, tokens=torch.from_numpy(np.concatenate(rows)), offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])), lengths=lengths, full_lengths=lengths)


def end_to_end(fast, store=STORE):
    "That rows go end to end, without a note; on a GPU flash attention takes 16 bits only, and the kernels other heads"
    call = fast.call_for(store)
    assert not fast.reason
    assert torch.cuda.is_available() or isinstance(call, EndToEnd) and not fast.notes, fast.notes
    return call


@pytest.mark.parametrize('name', END_TO_END)
def test_rows_end_to_end_equal_the_plain_engine(name):
    "Losses, weights and predictions; rows of several micro-batches"
    plain, fast = Engine(model_of(name), FP32), Fast(model_of(name), FP32, at_once=5)
    fast.captured_forward = True
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    call = end_to_end(fast)
    if isinstance(call, EndToEnd): assert fast.micro_batches > 1 and call.whole_rows == (name == 'modernbert mean') and all(not s.width for s, *_ in fast.built)
    same_weights(plain.model, fast.model)
    torch.testing.assert_close(plain.predict(STORE, np.arange(20)), fast.predict(STORE, np.arange(20)), rtol=1e-3, atol=1e-3)
    assert isinstance(call, PaddedCall) or any(len(k) == 3 and k[2] == 'forward' for k in fast.built)


@pytest.mark.parametrize('name, said', [*zip(PADDED, ('DebertaV2ForSequenceClassification has a convolution, which would mix the ends of rows', 'Gemma2Attention attends with softcap, which rows end to end lack', 'attention that takes no rows end to end (DebertaAttention, DisentangledSelfAttention)'))])
def test_what_cannot_go_end_to_end_is_padded(name, said):
    "With a reason in a line, and the plain engine's steps"
    plain, fast = Engine(model_of(name), FP32), Fast(model_of(name), FP32, at_once=8)
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    assert not fast.reason and isinstance(fast.call_for(STORE), PaddedCall) and all(s.width for s, *_ in fast.built)
    if not torch.cuda.is_available(): assert len(fast.notes) == 1 and fast.notes[0].startswith('rows are padded: ') and fast.notes[0].endswith(said), fast.notes
    same_weights(plain.model, fast.model)


def test_gemma2_without_its_cap_goes_end_to_end():
    plain, fast = (kind(model_of('gemma2', attn_logit_softcapping=None, sliding_window=12), FP32) for kind in (Engine, Fast))
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    end_to_end(fast)


@pytest.mark.parametrize('head, name', [*(('ForTokenClassification', n) for n in ('bert', 'roberta', 'electra', 'xlm-roberta', 'distilbert', 'albert', 'mpnet', 'modernbert', 'deberta', 'gpt2', 'llama', 'qwen3')),
                                        *(('ForCausalLM', n) for n in ('gpt2', 'llama', 'qwen2', 'qwen3', 'gemma3', 'mistral'))])
def test_tokens_end_to_end_equal_the_plain_engine(head, name):
    "Where each token has logits: classes of tokens, and next tokens"
    store = next_token_store() if head == 'ForCausalLM' else token_store()
    plain, fast = Engine(model_of(name, head=head), FP32), Fast(model_of(name, head=head), FP32, at_once=5)
    np.testing.assert_allclose(losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3), rtol=2e-5)
    assert end_to_end(fast, store).per_token and fast.micro_batches > 1
    same_weights(plain.model, fast.model)


@pytest.mark.parametrize('name', ['bert', 'distilbert', 'modernbert mean', 'mpnet', 'deberta', 'gpt2', 'llama', 'gemma3'])
def test_rows_of_one_token(name):
    store = with_rows(lambda n, tokens: tokens[:1] if n % 3 else tokens)
    assert (store.lengths == 1).sum() > 20
    plain, fast = (kind(model_of(name), FP32) for kind in (Engine, Fast))
    fast.captured_forward = True
    np.testing.assert_allclose(losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3), rtol=2e-5)
    end_to_end(fast, store)
    torch.testing.assert_close(plain.predict(store, np.arange(20)), fast.predict(store, np.arange(20)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('name', ['gpt2', 'llama', 'qwen3', 'gemma3'])
def test_a_causal_classifier_passes_over_padding_at_the_end_of_rows(name):
    "As transformers does: it reads the last token that is none of padding, so it gets whole rows"
    store = with_rows(lambda n, tokens: [*tokens[:-2], STORE.pad_id, STORE.pad_id] if n % 2 else tokens)
    plain, fast = (kind(model_of(name), FP32) for kind in (Engine, Fast))
    fast.captured_forward = True
    np.testing.assert_allclose(losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3), rtol=2e-5)
    call = end_to_end(fast, store)
    assert isinstance(call, PaddedCall) or call.whole_rows
    torch.testing.assert_close(plain.predict(store, np.arange(20)), fast.predict(store, np.arange(20)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('name', ['gpt2', 'llama'])
def test_a_second_store_whose_rows_end_in_padding(name):
    "What was decided for the first one does not hold for it"
    ends = with_rows(lambda n, tokens: [*tokens[:-2], STORE.pad_id, STORE.pad_id] if n % 2 else tokens)
    plain, fast = (kind(model_of(name), FP32) for kind in (Engine, Fast))
    fast.captured_forward = True
    for store in (STORE, ends, STORE): np.testing.assert_allclose(losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3), rtol=2e-5)
    call = end_to_end(fast, ends)
    assert isinstance(call, PaddedCall) or call.whole_rows
    torch.testing.assert_close(plain.predict(ends, np.arange(20)), fast.predict(ends, np.arange(20)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('name', ['bert', 'deberta', 'deberta v1'])
def test_a_second_store_of_longer_rows(name):
    "It does not fit into the shapes of the first, nor into its table of distances; a third one of short rows does"
    short, longer = (replace(with_rows(change), type_ids=None, max_length=150) for change in (lambda n, tokens: tokens[:8], lambda n, tokens: np.resize(tokens, 150) if n % 5 == 0 else tokens))
    plain, fast = (kind(model_of(name), FP32) for kind in (Engine, Fast))
    fast.captured_forward = True
    for store in (short, longer): np.testing.assert_allclose(losses(plain, store, lr=1e-3), losses(fast, store, lr=1e-3), rtol=2e-5)
    built = dict(fast.built)
    losses(fast, short)
    assert built.items() <= fast.built.items() and len(fast.notes) == len({*fast.notes})
    losses(fast, longer, lr=1e-3)
    torch.testing.assert_close(plain.predict(longer, np.arange(20)), fast.predict(longer, np.arange(20)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('trained', ['all but queries and words', 'only the classifier', 'only adapters'])
@pytest.mark.parametrize('name', ['deberta', 'deberta, own keys', 'bert', 'llama', 'mpnet'])
def test_weights_that_are_frozen_and_adapters(name, trained):
    "Gradients added up over micro-batches, of what trains and of nothing else"
    queries, values, heads = dict(bert=('query', 'value', 'classifier'), llama=('q_proj', 'v_proj', 'score'), mpnet=('.q', '.v', 'classifier')).get(name, ('query_proj', 'value_proj', 'classifier'))
    def of(model):
        if trained == 'only adapters':
            peft = pytest.importorskip('peft')
            return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[queries.strip('.'), values.strip('.')], modules_to_save=[heads], init_lora_weights=False))
        for n, p in model.named_parameters(): p.requires_grad_(f'{queries}.' not in n and '.word' not in n and 'embed_tokens' not in n if trained.startswith('all') else heads in n)
        return model
    torch.manual_seed(0)
    model = of(model_of(name))
    plain, fast = Engine(copy.deepcopy(model), FP32), Fast(model, FP32, at_once=3)
    assert 0 < sum(p.requires_grad for p in model.parameters()) < len([*model.parameters()])
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    end_to_end(fast)
    same_weights(plain.model, fast.model)


@pytest.mark.parametrize('name', ['bert', 'deberta', 'llama'])
@pytest.mark.parametrize('frozen', [False, True])
def test_attention_keeps_nothing_after_a_step(name, frozen):
    "Neither where no backward pass reaches it"
    model = model_of(name)
    for n, p in model.named_parameters(): p.requires_grad_(not frozen or 'classifier' in n or 'score' in n)
    fast = Fast(model, FP32)
    losses(fast)
    end_to_end(fast)
    assert not attention._KEPT


@pytest.mark.parametrize('buckets', [-1, 4, 16, 64])
def test_positions_of_any_buckets(buckets):
    plain, fast = (kind(model_of('deberta', position_buckets=buckets), FP32) for kind in (Engine, Fast))
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    end_to_end(fast)
    same_weights(plain.model, fast.model)


@pytest.mark.parametrize('name', END_TO_END)
def test_rows_end_to_end_in_16_bits(name):
    "On a GPU by flash attention or the kernels, captured, with heads of a size that they take"
    plain, fast = Engine(model_of(name, num_attention_heads=1), BF16), Fast(model_of(name, num_attention_heads=1), BF16)
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), atol=.05)
    assert isinstance(fast.call_for(STORE), EndToEnd) and not fast.notes and fast.graphs == torch.cuda.is_available(), fast.notes
    torch.testing.assert_close(plain.predict(STORE, np.arange(20)).float(), fast.predict(STORE, np.arange(20)).float(), rtol=.1, atol=.15)


@pytest.mark.parametrize('name', ['bert', 'llama'])
def test_a_kernel_that_fails_or_is_wrong_leaves_rows_padded(name, monkeypatch):
    if torch.cuda.is_available(): pytest.skip('made for a machine without the kernel')
    def missing(*args): raise RuntimeError('not built for this card')
    monkeypatch.setattr('optkit.shapes.plain_forward', missing)
    engine = Fast(model_of(name), FP32)
    assert isinstance(engine.call_for(STORE), PaddedCall) and engine.notes == ['rows are padded: RuntimeError: not built for this card']
    monkeypatch.setattr('optkit.shapes.plain_forward', lambda rows, qkv, pos_key, pos_query, how, number: (torch.zeros(len(qkv), qkv.shape[1] // (how.heads + 2 * how.key_heads) * how.heads), None))
    wrong = Fast(model_of(name), FP32)
    assert isinstance(wrong.call_for(STORE), PaddedCall) and 'differ from those of a padded batch' in wrong.notes[0]
    np.testing.assert_allclose(losses(Engine(model_of(name), FP32)), losses(wrong), rtol=2e-5)


@pytest.mark.parametrize('module', ['triton.compiler.errors', 'triton.runtime.errors', 'elsewhere'])
def test_a_kernel_that_this_triton_cannot_build_leaves_rows_padded(module, monkeypatch):
    "Triton's errors are none of Python's own; an error of something else is raised"
    if torch.cuda.is_available(): pytest.skip('made for a machine without the kernel')
    def kernel(*args): raise type('CompilationError', (Exception,), dict(__module__=module))('has no attribute gather')
    monkeypatch.setattr('optkit.shapes.plain_forward', kernel)
    fast = Fast(model_of('deberta'), FP32)
    if module == 'elsewhere':
        with pytest.raises(Exception, match='gather'): fast.call_for(STORE)
        return
    assert isinstance(fast.call_for(STORE), PaddedCall) and 'rows are padded: ' in fast.notes[0] and 'gather' in fast.notes[0]
    np.testing.assert_allclose(losses(Engine(model_of('deberta'), FP32)), losses(fast), rtol=2e-5)


@pytest.mark.parametrize('seed', range(3))
def test_a_model_that_16_bits_cost_much_is_no_wrong_kernel(monkeypatch, seed):
    "What is allowed is what rounding does to the padded batch; a row that sees its neighbour is still found"
    if torch.cuda.is_available(): pytest.skip('made for a machine without the kernel')
    model = model_of('bert', seed)
    with torch.no_grad(): [p.mul_(6) for n, p in model.named_parameters() if 'LayerNorm' not in n]
    engine = Fast(model, BF16)
    call = EndToEnd(engine.model)
    assert rows_problem(engine, call, STORE, exact=False) == ''
    joined(monkeypatch)
    assert 'differ' in rows_problem(engine, call, STORE, exact=False)


def joined(monkeypatch):
    "All rows are one to attention"
    right = EndToEnd.set_rows
    monkeypatch.setattr(EndToEnd, 'set_rows', lambda self, *a: (right(self, *a), setattr(self.rows, 'ends', self.rows.ends[[0, -1]])))


@pytest.mark.parametrize('name', ['bert', 'llama', 'mpnet', 'distilbert'])
def test_rows_that_are_wrong_are_seen(name, monkeypatch):
    "The trial that decides notices attention that looks at its neighbours"
    if torch.cuda.is_available(): pytest.skip('16 bits on a GPU: see the tests of kernels')
    joined(monkeypatch)
    engine = Fast(model_of(name), FP32)
    assert isinstance(engine.call_for(STORE), PaddedCall) and 'differ' in engine.notes[0]


@pytest.mark.parametrize('name', ['deberta', 'bert', 'mpnet', 'llama', 'modernbert'])
def test_two_calls_of_a_model_one_inside_the_other(name):
    "The outer one goes on as if the inner had not been; nothing is left behind, nor where switching fails midway"
    model = model_of(name).eval()
    outer, inner = EndToEnd(model), EndToEnd(model)
    static = StaticBatch(Shape(4, 192), STORE, 'cpu')
    static.put(STORE, np.argsort(STORE.lengths)[[-1, -2, 0, 1]], 1.)
    def state(): return [(type(m), sorted(m.__dict__)) for m in model.modules()], model.config._attn_implementation
    before = state()
    def run(call):
        inputs = static.inputs()
        call.set_rows(static.shape, inputs, 64)
        with torch.no_grad(): return call(inputs)
    with outer.switched(): want = run(outer)
    with outer.switched():
        inside = state()
        with inner.switched(): assert torch.equal(run(inner), want)
        assert state() == inside and torch.equal(run(outer), want)
    assert state() == before
    if 'interface' in outer.kinds: return
    outer.modules.append(None)
    with pytest.raises(AttributeError), outer.switched(): pass
    outer.modules.pop()
    assert state() == before


@pytest.mark.parametrize('name', [n for n in END_TO_END if n != 'deberta, wide table'])
def test_rows_end_to_end_copy_nothing_from_host_memory(name, monkeypatch):
    "After the first time, which makes the entries of positions; on tensors without memory"
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda *a: False)  # which does not know this device
    with torch.device('meta'): model = model_of(name).train()
    call, static, seen = EndToEnd(model), StaticBatch(Shape(5, 192), STORE, 'meta'), []
    for call.whole_rows in (False, False, True):
        with call.switched(), Copies() as copies:
            inputs = static.inputs()
            call.set_rows(static.shape, inputs, 64)
            call(inputs).sum().backward()
        seen.append(copies.seen)
    assert not seen[1] and not seen[2], seen


@pytest.mark.slow # compiles, a minute or two for each
@pytest.mark.parametrize('name', [n for n in END_TO_END if n not in ('bert eager', 'camembert', 'deberta, wide table')])
def test_a_family_is_compiled_once_for_any_tokens(name):
    "At most two graphs for all layers and shapes, without a break, and none for other shapes or after an evaluation"
    torch._dynamo.reset()
    plain, fast = Engine(model_of(name), FP32), FastEngine(model_of(name), FP32, at_once=8, layers=True)
    torch._dynamo.utils.counters.clear()
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=1e-4)
    counters, graphs = torch._dynamo.utils.counters, torch._dynamo.utils.counters['stats']['unique_graphs']
    end_to_end(fast)
    assert fast.layers and 1 <= graphs <= 2 and not counters['graph_break'], (graphs, counters['graph_break'])
    shapes = len(fast.built)
    losses(fast, effective=5, physical=5)
    fast.predict(STORE, np.arange(9))
    assert len(fast.built) > shapes and counters['stats']['unique_graphs'] == graphs


def test_why_rows_stay_padded():
    good = dict(positions=False, device='cuda', capability=(8, 6), compute='bf16', depth=64)
    assert end_to_end_problem(**good) == '' == end_to_end_problem(**good | dict(device='cpu', capability=None, compute='fp32', depth=7))
    for change, said in ((dict(positions=True, depth=48), '48' if triton else 'Triton'), (dict(device='xpu', capability=None), 'the device is xpu'), (dict(compute='fp32'), 'not in fp32'), (dict(capability=(7, 5)), 'this GPU has 7.5'), (dict(depth=12), 'these have 12')):
        assert said in end_to_end_problem(**good | change)


@pytest.mark.parametrize('name', ['albert', 'bert'])
def test_dropout_of_a_layer_that_runs_twice_draws_twice(name):
    "Hashed dropout has one mask a module and step, so ALBERT's layer keeps torch's"
    model = model_of(name, hidden_dropout_prob=.2).train()
    call, static, masks = EndToEnd(model), StaticBatch(Shape(4, 192), STORE, 'cpu'), {}
    layers = _same_layers(model)
    for n, m in enumerate(m for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Dropout) and m.p):
        m.register_forward_hook(lambda m, args, out, n=n: masks.setdefault(n, []).append((out == 0) & (args[0] != 0)))
    static.put(STORE, [0, 1, 2, 3], 1.)
    with call.switched(layers):
        for step in range(2):
            inputs = static.inputs()
            call.set_rows(static.shape, inputs, 64)
            call(inputs)
    drawn = [mask for of in masks.values() for mask in of]
    assert len(drawn) >= 4 and all(mask.any() and not mask.all() for mask in drawn)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert {type(m) for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Dropout)} == {torch.nn.Dropout}


def test_the_model_is_as_it_was_between_steps():
    engine = Fast(model_of('deberta'), FP32, layers=False)
    classes = [type(m) for m in engine.model.modules()]
    losses(engine)
    assert [type(m) for m in engine.model.modules()] == classes and not any('forward' in m.__dict__ for m in engine.model.modules())
    assert torch.is_autocast_cache_enabled()


# tasks


def test_tasks():
    rng = np.random.default_rng(0)
    for task, labels, kind in (('regression', rng.normal(size=len(STORE)).astype(np.float32), dict(num_labels=1, problem_type='regression')),
                               ('multilabel', rng.integers(2, size=(len(STORE), 3)), dict(num_labels=3, problem_type='multi_label_classification'))):
        store = with_labels(STORE, labels, task)
        make = lambda: (torch.manual_seed(0), tf.BertForSequenceClassification(tf.BertConfig(**small(**CALM) | kind)))[1]
        plain, fast = Engine(make(), FP32), Fast(make(), FP32, at_once=8)
        np.testing.assert_allclose(losses(plain, store), losses(fast, store), rtol=2e-5)
        same_weights(plain.model, fast.model)


def test_causal_targets():
    store = next_token_store()
    make = lambda: (torch.manual_seed(0), tf.LlamaForCausalLM(tf.LlamaConfig(**small(num_key_value_heads=1))))[1]
    plain, fast = Engine(make(), FP32), Fast(make(), FP32, at_once=8)
    np.testing.assert_allclose(losses(plain, store), losses(fast, store), rtol=2e-5)
    same_weights(plain.model, fast.model)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family, head, task', [('bert', 'ForSequenceClassification', 'classification'), ('deberta-v2', 'ForSequenceClassification', 'regression'), ('roberta', 'ForTokenClassification', 'tokens'), ('llama', 'ForCausalLM', 'causal')])
def test_every_task_in_every_layout_of_the_plain_path(family, head, task, layout):
    from test_layouts import LENGTHS, model_of, store_of
    store = store_of(LENGTHS * 2, task)
    plain, fast = (kind(model_of(family, head, labels=1 if task == 'regression' else 3), FP32) for kind in (Engine, Fast))
    cut_up = lambda engine: (engine.reset(lr=1e-3), [engine.step(store, m).item() for m in steps(store, np.arange(24), 10, seed=1, epoch=0, layout=Layout(layout, 4, 70 if layout == 'packed' else None))])[1]
    a, b = cut_up(plain), cut_up(fast)
    assert len(a) == 3 and a[0] != a[-1] and not fast.reason
    np.testing.assert_allclose(a, b, rtol=5e-5)


# waiting


@pytest.mark.parametrize('name, values', [*((name, dict()) for name in ('bert', 'deberta', 'llama', 'modernbert mean', 'deberta with a convolution')),
                                          ('bert', dict(max_grad_norm=0.)), ('deberta', dict(class_weights=(.3, 2.), label_smoothing=.1))], ids=str)
def test_a_step_waits_for_nothing(name, values, monkeypatch):
    "Neither on a step of several micro-batches nor on one that is short, whether rows are end to end (but for the plain version of attention) or padded; a wait that is planted is seen"
    from test_engine import NoWait
    if torch.cuda.is_available(): pytest.skip('replays are not dispatched: see the next test')
    fast = Fast(model_of(name), FP32, at_once=4)
    losses(fast, **values)
    plan, built = list(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4))), len(fast.built)
    for change in ('_ignore_bidirectional_mask_sdpa', '_ignore_causal_mask_sdpa'): monkeypatch.setattr(f'transformers.masking_utils.{change}', lambda *a, **k: False)  # transformers asks whether all of a mask is 1, unless it is captured
    with NoWait(): found = [fast.step(STORE, micro) for micro in plan]
    assert len(fast.built) == built and all(f.ndim == 0 and not f.requires_grad for f in found)
    update = FastEngine._update
    monkeypatch.setattr(FastEngine, '_update', lambda self: (update(self), float(self.total)))
    with pytest.raises(AssertionError, match='waits'), NoWait(): fast.step(STORE, plan[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs cuda')
def test_a_captured_step_waits_for_nothing():
    fast = Fast(model_of('deberta'), FP32, at_once=4)
    losses(fast)
    plan = list(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4)))
    torch.cuda.set_sync_debug_mode('error')
    try: [fast.step(STORE, micro) for micro in plan]
    finally: torch.cuda.set_sync_debug_mode('default')
    assert fast.graphs and not fast.notes


def test_class_weights_of_another_head_change_nothing():
    engine = Engine(model_of('bert'), FP32)
    before = losses(engine, lr=1e-3)
    for call in (engine.set, engine.reset):
        with pytest.raises(InputError, match='3 class_weights for a head of 2'): call(lr=.7, class_weights=(1., 2., 3.))
    assert engine.optimizer.param_groups[0]['lr'] == 1e-3 and engine.class_weights is None and losses(engine, lr=1e-3) == before


# values


@pytest.mark.parametrize('weights', [(1.,), (1., 2., 3.)], ids=str)
def test_class_weights_of_another_head_cost_no_graph(weights):
    "They are refused before a step fails on them, which would look as if it could not be compiled"
    fast = Fast(example_model(dropout=0.), FP32)
    first = losses(fast)
    fast.layers = True  # as on a GPU
    with pytest.raises(InputError, match=f'{len(weights)} class_weights for a head of 2'): losses(fast, class_weights=weights)
    assert fast.layers and not fast.notes
    fast.layers = False
    assert losses(fast) == first


@pytest.mark.parametrize('bad', [dict(at_once=0), dict(most=0)], ids=str)
def test_sizes_that_cannot_be(bad):
    with pytest.raises(InputError, match='expected'): Fast(example_model(), FP32, **bad)


@pytest.mark.parametrize('values', [dict(label_smoothing=.2), dict(class_weights=(.3, 2.)), dict(label_smoothing=.1, class_weights=(1., 4.)), dict(max_grad_norm=.05), dict(max_grad_norm=0.),
                                    dict(weight_decay=.3), dict(betas=(.7, .9), eps=1e-3)], ids=str)
def test_values(values):
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    losses(fast)  # built with other values
    built = dict(fast.built)
    np.testing.assert_allclose(losses(plain, **values), losses(fast, **values), rtol=3e-5)
    same_weights(plain.model, fast.model)
    assert fast.built.keys() == built.keys() and all(fast.built[k][0] is built[k][0] for k in built)  # nothing was built again
    before = losses(plain, label_smoothing=0., class_weights=(), max_grad_norm=.05 if values.get('max_grad_norm') == 0 else 1.)
    assert not np.allclose(before, losses(plain, **values), rtol=1e-5)  # the value matters here
    if plain.max_grad_norm: assert float(fast.grad_norm) == pytest.approx(float(plain.grad_norm), rel=1e-3)


def test_dropout_differs_between_steps_and_rows_of_replays():
    "The same micro-batch three times at a rate of 0: with dropout three losses, without it one"
    for dropout, different in ((.3, True), (0., False)):
        engine = Fast(example_model(dropout=dropout), FP32)
        engine.reset(lr=0.)
        micro = next(iter(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=8))))
        found = {engine.step(STORE, micro).item() for _ in range(3)}
        assert (len(found) == 3) == different, found


@pytest.mark.skipif(not torch.cuda.is_available(), reason='captures need a GPU')
def test_steps_are_captured():
    engine = Fast(model_of('deberta'), FP32)
    losses(engine)
    assert engine.graphs and not engine.notes and all(type(r).__name__ == 'builtin_function_or_method' or 'replay' in repr(r) for _, r in engine.built.values())


def test_a_planted_fault_shows():
    "A divisor that is wrong by one row, a micro-batch that is lost"
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32, at_once=4)
    right = losses(plain)
    np.testing.assert_allclose(right, losses(fast), rtol=2e-5)
    work = FastEngine._work
    try:
        calls = itertools.count()
        FastEngine._work = lambda self, *a: next(calls) % 2 or work(self, *a)
        lost = losses(Fast(example_model(dropout=0.), FP32, at_once=4, graphs=False))
    finally: FastEngine._work = work
    assert not np.allclose(right, lost, rtol=1e-2)


def test_the_cut_of_the_caller_does_not_matter():
    fast = Fast(example_model(dropout=0.), FP32)
    a = losses(fast)
    for layout, physical in (('padded', None), ('padded', 2), ('full', 8)): np.testing.assert_allclose(a, losses(fast, layout=layout, physical=physical), rtol=1e-6)


def test_a_moving_average_follows():
    plain, fast = Engine(example_model(dropout=0.), FP32, ema=.9), Fast(example_model(dropout=0.), FP32, ema=.9)
    losses(plain), losses(fast)
    for n in plain.average: torch.testing.assert_close(plain.average[n], fast.average[n], rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(plain.predict(STORE, np.arange(5)), fast.predict(STORE, np.arange(5)), rtol=2e-3, atol=2e-4)


def test_bf16_stays_close():
    plain, fast = Engine(example_model(dropout=0.), BF16), Fast(example_model(dropout=0.), BF16)
    np.testing.assert_allclose(losses(plain, epochs=2), losses(fast, epochs=2), rtol=.05)


# resets


def test_a_reset_engine_repeats_a_fresh_one():
    fresh = losses(Fast(example_model(), FP32), epochs=2)
    engine = Fast(example_model(), FP32)
    losses(engine, lr=1e-2, weight_decay=.5, label_smoothing=.3, class_weights=(5., 1.), max_grad_norm=.01)
    engine.predict(STORE, np.arange(10))
    assert losses(engine, epochs=2, label_smoothing=0., max_grad_norm=1.) == fresh
    assert losses(engine, epochs=2, seed=1) != fresh  # dropout of another seed


def test_a_reset_engine_repeats_a_fresh_process():
    "Both engines, with dropout, after other values, an evaluation and the best weights put back"
    import json, subprocess, sys
    code = f"""
import sys; sys.path.insert(0, {str(__import__('pathlib').Path(__file__).parent)!r})
import json
from test_fast import *
print(json.dumps([losses(kind(example_model(), FP32), epochs=2, seed=3) for kind in (Engine, Fast)]))
"""
    run = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = []
    for kind in (Engine, Fast):
        engine = kind(example_model(), FP32)
        other = losses(engine, lr=1e-2, weight_decay=.5, label_smoothing=.3, class_weights=(5., 1.), max_grad_norm=.01, betas=(.5, .6))
        engine.keep_best(); engine.predict(STORE, np.arange(10)); engine.restore_best()
        found.append(losses(engine, epochs=2, seed=3, label_smoothing=0., max_grad_norm=1.))
        assert other != found[-1][:len(other)]
    said, errors = run.communicate()
    assert run.returncode == 0, errors[-500:]
    assert json.loads(said.splitlines()[-1]) == found


def test_train_and_evaluate_alternate():
    engine, other = Fast(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    engine.reset(lr=1e-3), other.reset(lr=1e-3)
    plan = list(steps(STORE, np.arange(len(STORE)), 8, seed=0, epoch=0, layout=Layout(rows=4)))
    for micro in plan:
        a = engine.step(STORE, micro)
        engine.predict(STORE, np.arange(9))
        assert torch.equal(a, other.step(STORE, micro))
    engine.keep_best(); kept = {n: p.clone() for n, p in engine.model.named_parameters()}
    engine.step(STORE, plan[0]); engine.restore_best()
    assert all(torch.equal(kept[n], p) for n, p in engine.model.named_parameters())


def test_memory_is_flat_over_resets():
    engine = Fast(example_model(dropout=0.), FP32)
    def tensors():
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor)) + (torch.cuda.memory_allocated() // 2**20 if torch.cuda.is_available() else 0)
    losses(engine)
    before = tensors()
    for _ in range(10): losses(engine, lr=1e-4, weight_decay=.1)
    assert tensors() <= before + 2


def test_a_second_number_of_rows_keeps_the_first():
    engine = Fast(example_model(dropout=0.), FP32)
    losses(engine, effective=16)
    built = set(engine.built)
    losses(engine, effective=4)
    assert set(engine.built) >= built
    count = len(engine.built)
    losses(engine, effective=16), losses(engine, effective=4)
    assert len(engine.built) <= count + 1  # at most a shape that no step had needed before


def test_shapes_are_those_of_full_steps():
    "Neither an evaluation nor a larger batch before it widens a small step, and the end of an epoch has no shapes of its own"
    engine = Fast(example_model(dropout=0.), FP32)
    rows = lambda n: {s.rows for s in engine.shapes_for(STORE, n)}
    losses(engine, effective=24)
    engine.captured_forward = True
    engine.predict(STORE, np.arange(30))
    losses(engine, effective=8)
    assert rows(24) == {24} and rows(8) == {8} and rows(90) == {len(STORE)}
    assert engine.full == 8 and sorted(n for _, n in engine.shapes.known) == [8, 24, 32, 37]
    engine.reset(rows=16)
    engine.step(STORE, next(iter(steps(STORE, np.arange(5), 8, seed=1, epoch=0, layout=Layout(rows=4)))))
    assert engine.full == 16 and {k[0].rows for k in engine.built if k[0] in engine.shapes_for(STORE, 16)} == {16}


# compiled layers


@pytest.mark.parametrize('name, how', [('deberta', dict()), ('bert', dict(dynamic=False, most=1))], ids=str)
def test_compiled_layers_change_nothing_and_compile_once(name, how):
    "Losses of the plain engine; then neither an evaluation, nor a reset, nor (compiled for all shapes at once) a new shape compiles again"
    import torch._dynamo
    torch._dynamo.reset()
    plain, fast = Engine(model_of(name), FP32), Fast(model_of(name), FP32, layers=True, **how)
    torch._dynamo.utils.counters.clear()
    np.testing.assert_allclose(losses(plain), losses(fast), rtol=1e-4)
    assert not torch._dynamo.utils.counters['graph_break'], 'a layer is compiled in one piece, attention too'
    torch._dynamo.utils.counters.clear()
    again = losses(fast)
    fast.predict(STORE, np.arange(6))
    assert losses(fast) == again and not torch._dynamo.utils.counters['stats'].get('unique_graphs', 0)
    if not how:
        shapes = len(fast.built)
        np.testing.assert_allclose(losses(plain, effective=19), losses(fast, effective=19), rtol=1e-4)
        assert len(fast.built) > shapes and not torch._dynamo.utils.counters['stats'].get('unique_graphs', 0)


@pytest.mark.slow
def test_compiled_layers_with_a_tensor_as_large_as_queries_keys_and_values(monkeypatch):
    "With flash attention written out: the compiler gives the memory of one to the other"
    if torch.cuda.is_available(): pytest.skip('made for a machine without the kernel')
    from optkit import attention
    from test_attention import written_out
    for name, made in zip(('_flash', '_flash_back'), written_out()): monkeypatch.setattr(attention, name, made)
    for way in ('forward', 'backward'): monkeypatch.setattr(f'optkit.shapes.plain_{way}', getattr(attention, f'flash_{way}'))
    plain, fast = Engine(model_of('bert', intermediate_size=96), FP32), Fast(model_of('bert', intermediate_size=96), FP32, layers=True)
    np.testing.assert_allclose(losses(plain, lr=1e-3), losses(fast, lr=1e-3), rtol=2e-5)
    end_to_end(fast)
    same_weights(plain.model, fast.model)


# what stays plain

def test_reasons():
    ok = dict(kind='adamw', scaler=False, ranks=False, checkpointing='off', quantised=False, formats={torch.float32})
    assert fast_problem(**ok) == ''
    for bad in (dict(kind='adamw_8bit'), dict(scaler=True), dict(ranks=True), dict(checkpointing='full'), dict(quantised=True), dict(formats={torch.float16})): assert fast_problem(**ok | bad)
    engine = Fast(example_model(dropout=0.), FP32, checkpointing='full')
    assert 'checkpointing' in engine.reason and 'plain' in repr(engine)
    np.testing.assert_allclose(losses(engine), losses(Engine(example_model(dropout=0.), FP32)), rtol=1e-5)


def test_graphs_without_a_gpu_are_refused():
    if torch.cuda.is_available(): pytest.skip('this machine has a GPU')
    with pytest.raises(InputError, match='GPU'): Fast(example_model(), FP32, graphs=True)


def test_weights_are_saved_as_before(tmp_path):
    engine = Fast(example_model(dropout=0.), FP32)
    losses(engine)
    engine.model.save_pretrained(tmp_path)
    back = tf.BertForSequenceClassification.from_pretrained(tmp_path)
    for (n, p), (_, q) in zip(engine.model.named_parameters(), back.named_parameters()): assert torch.equal(p.cpu(), q), n


def addresses(engine):
    "Of what graphs read and write"
    state = engine.optimizer.state
    return [t.data_ptr() for p, _ in engine.gradients for t in (p, p.grad, *state[p].values())] + [g['lr'].data_ptr() for g in engine.optimizer.param_groups]


def test_what_graphs_hold_stays_where_it_is(tmp_path):
    "Over steps, resets, values, plain steps, a failed step, a state that is loaded and one that is put back"
    engine = Fast(example_model(dropout=0.), FP32, ema=.9)
    before, micro = addresses(engine), next(iter(steps(STORE, np.arange(len(STORE)), 8, seed=1, layout=Layout(rows=4))))
    def same(): return addresses(engine) == before # their values are those of the last step, which the next writes over
    assert same() and all(len(engine.optimizer.state[p]) == 3 for p, _ in engine.gradients)
    losses(engine, lr=1e-2, weight_decay=.5, max_grad_norm=.01, betas=(.5, .6)), engine.set_lr(1e-4)
    assert same() and all(float(g['lr']) == pytest.approx(1e-4) for g in engine.optimizer.param_groups)
    saved = {k: v.clone() for k, v in engine.state().items()}
    with engine.eager_steps(), engine.preserved(): engine.step(STORE, micro)
    assert same() and all(torch.equal(v, saved[k]) for k, v in engine.state().items())
    for p, _ in engine.gradients: p.grad = torch.ones_like(p)
    engine.undo()
    assert same()
    engine.step(STORE, micro)
    engine.load_state(saved)
    assert same() and all(torch.equal(v, saved[k]) for k, v in engine.state().items())
    Engine(engine.model, FP32).reset()
    engine.reset()
    assert same()


class Replayed:
    "Stands for a captured graph on a machine without a GPU: its replay does the work, which capturing it does not"
    def __init__(self, engine, monkeypatch):
        self.engine, self.captures = engine, 0
        monkeypatch.setattr(engine, '_capture', self.capture, raising=False)
        engine.graphs = True
    def capture(self, work, before=2):
        for _ in range(before): work()
        self.captures, self.replay, self.engine.grad_norm = self.captures + 1, work, None  # set by the work itself
        return self


def test_the_update_is_captured_again_when_a_number_in_it_changes(monkeypatch):
    "Not for a rate, which is a tensor; also for a state that was loaded, whose tensors are others"
    if torch.cuda.is_available(): pytest.skip('captures are made up here')
    fast, plain, micro = Fast(example_model(dropout=0.), FP32), Engine(example_model(dropout=0.), FP32), next(iter(steps(STORE, np.arange(len(STORE)), 8, seed=1, layout=Layout(rows=4))))
    losses(fast)  # shapes run through Python
    card = Replayed(fast, monkeypatch)
    fast._update_graph = card
    def step():
        before = card.captures
        np.testing.assert_allclose(plain.step(STORE, micro).item(), fast.step(STORE, micro).item(), rtol=3e-5)
        return card.captures - before
    for engine in (plain, fast): engine.reset(lr=1e-3)
    assert step() == 1 and step() == 0
    for values, captures in (dict(lr=1e-4), 0), (dict(betas=(.7, .9)), 1), (dict(eps=1e-3), 1), (dict(weight_decay=.3), 1), (dict(max_grad_norm=.05), 1), (dict(label_smoothing=.1, class_weights=(1., 2.)), 0):
        for engine in (plain, fast): engine.set(**values)
        assert (step(), step()) == (captures, 0), values
    for engine in (plain, fast): engine.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    assert (step(), step()) == (1, 0) and all(isinstance(g['lr'], torch.Tensor) for g in fast.optimizer.param_groups)


def test_clipping_is_that_of_torch():
    "Also where it is switched on and off; the norm is that of all gradients, before they are clipped"
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    for most in (.05, 0., 1.):
        np.testing.assert_allclose(losses(plain, max_grad_norm=most), losses(fast, max_grad_norm=most), rtol=3e-5)
        assert fast.grad_norm is None if not most else float(fast.grad_norm) == pytest.approx(float(plain.grad_norm), rel=1e-3)


@pytest.mark.parametrize('bad', [math.inf, math.nan])
@pytest.mark.parametrize('most', [1., math.inf, 0.])
def test_gradients_that_are_not_finite_do_what_they_do_in_the_plain_engine(bad, most):
    "The same weights are no numbers afterwards, whatever is clipped; and the step after a reset is a step"
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32, graphs=False)
    for engine in (plain, fast):
        engine.reset(lr=1e-3, max_grad_norm=most)
        bias = engine.model.classifier.out_proj.bias if hasattr(engine.model.classifier, 'out_proj') else engine.model.classifier.bias
        hook = bias.register_hook(lambda grad: grad * torch.tensor([bad, 1.], device=grad.device))
        engine.step(STORE, list(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4)))[0])
        hook.remove()
    for p, q in zip(plain.model.parameters(), fast.model.parameters()): torch.testing.assert_close(p, q, equal_nan=True, rtol=2e-3, atol=2e-4)
    assert any(p.isnan().any() for p in fast.model.parameters())
    np.testing.assert_allclose(losses(plain, max_grad_norm=most), losses(fast, max_grad_norm=most), rtol=3e-5)


def test_a_state_with_one_count_of_steps_for_a_group_goes_on():
    "As earlier versions kept it, whose arrays held all weights of a group: the same names and shapes"
    saved, loaded = (Fast(example_model(dropout=0.), FP32) for _ in range(2))
    plan = list(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4)))
    saved.reset(lr=3e-3), loaded.reset(lr=3e-3)
    for micro in plan[:3]: saved.step(STORE, micro)
    state = {k: v.clone() for k, v in saved.state().items()}
    count = torch.tensor(3.)
    flat = {k: count if k.endswith('.step') else v for k, v in state.items()}
    assert {(k.split('.')[2], k.endswith('.step') and v.shape == ()) for k, v in state.items() if k.startswith('optimizer.')} == {('step', True), ('exp_avg', False), ('exp_avg_sq', False)}
    loaded.load_state(flat)
    assert [saved.step(STORE, m).item() for m in plan[3:]] == [loaded.step(STORE, m).item() for m in plan[3:]]


@pytest.mark.parametrize('kind', [Engine, FastEngine])
def test_a_loaded_optimizer_goes_on_as_the_one_that_was_saved(kind):
    "torch's own door, with moments, count of updates and rate, also from the plain engine; what was there before is gone"
    saved, loaded = kind(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    plan = list(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4)))
    losses(loaded, lr=1e-2)
    saved.reset(lr=3e-3)
    for micro in plan[:3]: saved.step(STORE, micro)
    loaded.model.load_state_dict(saved.model.state_dict())
    loaded.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
    for engine in (saved, loaded): engine.set_lr(1e-3)
    np.testing.assert_allclose([saved.step(STORE, m).item() for m in plan[3:]], [loaded.step(STORE, m).item() for m in plan[3:]], rtol=0 if kind is FastEngine else 1e-5)
    if kind is FastEngine: assert all(torch.equal(p, q) for p, q in zip(saved.model.parameters(), loaded.model.parameters()))


@pytest.mark.parametrize('name', ['bert', 'deberta', 'llama', 'modernbert mean'])
def test_evaluation_end_to_end(name):
    plain, fast = Engine(model_of(name), FP32), Fast(model_of(name), FP32, at_once=8)
    fast.captured_forward = True  # elsewhere only on a GPU
    for rows in (np.arange(len(STORE)), np.array([5, 3, 30, 3]), np.array([7]), np.random.default_rng(0).permutation(len(STORE))):
        a, b = plain.predict(STORE, rows), fast.predict(STORE, rows)
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(b, fast.predict(STORE, rows)) and fast.predict(STORE, rows, on_device=False).device.type == 'cpu'
    count = len(fast.built)
    losses(fast), losses(plain)
    torch.testing.assert_close(plain.predict(STORE, rows), fast.predict(STORE, rows), rtol=1e-3, atol=1e-3)
    assert sum(len(k) == 3 and k[2] == 'forward' for k in fast.built) == count


# what fails falls back, with a note

def test_out_of_memory_takes_fewer_rows_at_once(monkeypatch):
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    build, tried = FastEngine._build, []
    def small_card(self, shape, *args, **kwargs):
        tried.append(shape.rows)
        if shape.rows > 4: raise torch.OutOfMemoryError('CUDA out of memory')
        return build(self, shape, *args, **kwargs)
    monkeypatch.setattr(FastEngine, '_build', small_card)
    np.testing.assert_allclose(losses(plain), losses(fast), rtol=2e-5)
    assert fast.shapes.rows == 4 and any('at most 4 rows' in n for n in fast.notes) and max(tried) >= 8
    monkeypatch.setattr(FastEngine, '_build', lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory')))
    with pytest.raises(torch.OutOfMemoryError): losses(Fast(example_model(dropout=0.), FP32))


def test_half_a_layout_keeps_the_shapes_that_fit():
    layout = ShapeLayout(16, automatic=True)
    for rows in (4, 32): layout.chosen(STORE, rows)
    half = layout.halved('no memory').value
    assert (half.rows, half.automatic) == (8, False) and [rows for _, rows in half.known] == [4] and len(layout.known) == 2
    assert half.halved('no memory').value.rows == 2 # what was used counts, not what was allowed
    with pytest.raises(MemoryError, match='no memory'): ShapeLayout(1).halved('no memory')


def test_a_trainer_gives_rows_only_and_halves_the_rows_at_once(monkeypatch):
    "No micro-batches; out of memory while a built shape runs: fewer rows at once, the same losses"
    from optkit.config import TrainConfig
    from optkit.trainer import Trainer
    config, given = TrainConfig(effective_batch=8, epochs=2, lr=1e-3, precision='fp32', metric='loss', layout='packed'), []
    def run(fast):
        found, real = [], fast.step
        monkeypatch.setattr(fast, 'step', lambda store, step: (given.append(step), found.append(real(store, step)), found[-1])[2], raising=False)
        trainer = Trainer(fast, STORE, config)
        trainer.refit(np.arange(len(STORE)))
        return torch.stack(found).tolist(), trainer
    want, _ = run(Fast(example_model(dropout=0.), FP32))
    assert given and all(isinstance(step, np.ndarray) for step in given)
    fast, put = Fast(example_model(dropout=0.), FP32), StaticBatch.put
    def full(self, store, rows, weight):
        if fast.built and self.shape.rows > 4: raise torch.OutOfMemoryError('CUDA out of memory')
        return put(self, store, rows, weight)
    monkeypatch.setattr('optkit.fast.StaticBatch.put', full)
    found, trainer = run(fast)
    np.testing.assert_allclose(found, want, rtol=1e-4)
    assert fast.shapes.rows == 4 and [d['what'] for d in trainer.position.decisions][:1] == ['physical batch'] and 'at most 4 rows' in trainer.position.decisions[0]['reason']
    assert fast.micro_batches > 1
    with fast.eager_steps(): assert fast.shapes is None is Engine.shapes
    assert fast.shapes.rows == 4


def test_a_compiler_that_fails_is_left_out(monkeypatch):
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    build = FastEngine._build
    def broken(self, *args, **kwargs):
        if self.layers: raise RuntimeError('the compiler found no compiler')
        return build(self, *args, **kwargs)
    monkeypatch.setattr(FastEngine, '_build', broken)
    fast.layers = True
    np.testing.assert_allclose(losses(plain), losses(fast), rtol=2e-5)
    assert not fast.layers and 'not compiled' in repr(fast)


def test_an_evaluation_that_cannot_be_captured_is_plain(monkeypatch):
    plain, fast = Engine(example_model(dropout=0.), FP32), Fast(example_model(dropout=0.), FP32)
    fast.captured_forward = True
    monkeypatch.setattr(FastEngine, '_evaluate', lambda *a: (_ for _ in ()).throw(RuntimeError('not in a capture')))
    torch.testing.assert_close(plain.predict(STORE, np.arange(9)), fast.predict(STORE, np.arange(9)), rtol=1e-5, atol=1e-6)
    assert 'evaluation is plain: RuntimeError: not in a capture' in repr(fast) and not fast.captured_forward
    np.testing.assert_allclose(losses(plain), losses(fast), rtol=2e-5)  # training is what it was


class Card:
    "What torch (2.11) keeps while it captures, and does not end where a capture fails: the generator's mark, the pool that is filled, the current stream"
    def __init__(self, monkeypatch):
        stream = type('', (str,), dict(wait_stream=lambda self, other: None))
        self.capturing, self.pools, self.stream, self.pool = False, set(), stream('main'), itertools.count(1)
        def within(stream): return self.Stream(self, stream)
        fakes = dict(get_rng_state=lambda d: torch.get_rng_state(), set_rng_state=lambda s, d: torch.set_rng_state(s), current_stream=lambda d=None: self.stream, current_device=lambda: 0, memory_reserved=lambda d: 0,
                     get_device_properties=lambda d: type('', (), dict(total_memory=1)), graph_pool_handle=lambda: (0, next(self.pool)), stream=within, graph=lambda *a, **k: self.Graph(self, **k),
                     Stream=lambda d: stream('side'), CUDAGraph=lambda: type('', (), dict(replay=lambda self: None))())
        for name, fake in fakes.items(): monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, '_cuda_endAllocateToPool', lambda device, pool: self.pools.discard(pool), raising=False)

    class Stream:
        def __init__(self, card, stream): self.card, self.stream = card, stream
        def __enter__(self): self.before, self.card.stream = self.card.stream, self.stream
        def __exit__(self, *exc): self.card.stream = self.before

    class Graph:
        def __init__(self, card, pool=None, capture_error_mode='global'): self.card, self.pool = card, pool or (1, 0)
        def __enter__(self):
            if self.pool in self.card.pools: raise RuntimeError('already recording to mempool_id')
            self.before, self.card.stream, self.card.capturing = self.card.stream, 'capture', True
            self.card.pools.add(self.pool)
        def __exit__(self, kind, exc, trace):
            if exc: raise RuntimeError('operation failed due to a previous error during capture')
            self.card.stream, self.card.capturing = self.before, False
            self.card.pools.discard(self.pool)


def test_a_capture_that_fails_leaves_torch_as_it_was(monkeypatch):
    "Its cause is raised; dropout, replays, and a later capture can go on"
    card, fast = Card(monkeypatch), Fast(example_model(dropout=0.), FP32)
    fast.pool = torch.cuda.graph_pool_handle()
    def bad():
        if card.capturing: raise RuntimeError('operation not permitted when stream is capturing')
    for _ in range(2):
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match='not permitted'): fast._capture(bad)
        assert (card.capturing, card.pools, card.stream) == (False, set(), 'main') and gc.isenabled() and torch.equal(before, torch.get_rng_state())
    assert fast._capture(lambda: None) and not card.capturing


@pytest.mark.skipif(not torch.cuda.is_available(), reason='captures need a GPU')
@pytest.mark.parametrize('part', ['training', 'evaluation'])
def test_fallback_after_a_failed_capture_on_a_gpu(part, monkeypatch):
    "Steps with dropout go on, those of another engine are replayed as before, and the note says the cause"
    other = Fast(example_model(dropout=.3), FP32)
    first = losses(other)
    work, call = FastEngine._work, EndToEnd.__call__
    if part == 'training': monkeypatch.setattr(FastEngine, '_work', lambda self, *a: (work(self, *a), self.total.item()))
    else: monkeypatch.setattr(EndToEnd, '__call__', lambda self, inputs: (found := call(self, inputs), None if self.model.training else found.sum().item())[0])
    fast = Fast(example_model(dropout=.3), FP32)
    losses(fast)
    fast.predict(STORE, np.arange(9))
    assert np.isfinite(losses(fast)).all() and 'capturing' in repr(fast), repr(fast)
    assert fast.notes[0].startswith('no CUDA graphs: ' if part == 'training' else 'evaluation is plain: ') and fast.graphs == (part == 'evaluation')
    monkeypatch.undo()
    np.testing.assert_allclose(losses(other), first, rtol=1e-3)
    assert other.graphs and not other.notes and Fast(example_model(dropout=.3), FP32).graphs


def test_no_rows_are_no_failure_of_an_evaluation():
    fast = Fast(example_model(dropout=0.), FP32)
    fast.captured_forward = True
    with pytest.raises(ValueError): fast.predict(STORE, np.array([], dtype=int))
    assert fast.captured_forward and not fast.notes


@pytest.mark.parametrize('text, said', [('one\ntwo', 'one'), ('', ''), ('Trace of a capture\nRuntimeError: two', 'Trace of a capture'),
    ('The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript (most recent call last):\n  File "a.py", line 1, in f\n    return a @ b\n           ~ <--- HERE\nRuntimeError: shapes differ\n', 'shapes differ'),
    ('The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript (most recent call last):\n    return a @ b\nRuntimeError: CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n', 'CUDA error: operation not permitted when stream is capturing')], ids=range(5))
def test_an_error_is_said_in_a_line(text, said):
    from optkit.fast import _error_line
    assert _error_line(RuntimeError(text)) == f'RuntimeError: {said}'


def raised_in(module, exc, cause=None):
    "An error as it comes out of a function of that module"
    space = dict(__name__=module, exc=exc, cause=cause)
    exec('def run():\n    try:\n        if cause: raise cause\n    except Exception as inner: raise exc from inner\n    raise exc', space)
    with pytest.raises(type(exc)) as found: space['run']()
    return found.value


def made_in(module): return type('Made', (Exception,), dict(__module__=module))('made up')


@pytest.mark.parametrize('exc, compiler', [
    (lambda: raised_in('a', made_in('torch._inductor.exc')), True), (lambda: raised_in('a', made_in('torch._dynamo.exc')), True), (lambda: raised_in('a', made_in('triton.compiler.errors')), True),
    (lambda: raised_in('a', RuntimeError('outer'), made_in('triton')), True), (lambda: raised_in('triton.runtime.build', subprocess.CalledProcessError(1, ['cc'])), True), (lambda: raised_in('triton.runtime.build', FileNotFoundError('cc')), True),
    (lambda: raised_in('a', subprocess.CalledProcessError(1, ['cc'])), False), (lambda: raised_in('a', made_in('tritonic')), False),
    (lambda: raised_in('torch._inductor.runtime.made', RuntimeError('operation not permitted when stream is capturing')), False)], ids=range(9))
def test_an_error_of_the_compiler_leaves_the_graphs(exc, compiler):
    "Layers go first where the compiler failed, graphs first where it did not; then the others"
    fast = Fast(example_model(dropout=0.), FP32)
    fast.graphs = fast.layers = True
    assert fast._fall_back(exc()) and (fast.graphs, fast.layers) == (compiler, not compiler)
    assert fast.notes[0].startswith('not compiled: ' if compiler else 'no CUDA graphs: ')
    assert fast._fall_back(exc()) and not fast.graphs and not fast.layers and len(fast.notes) == 2 and not fast._fall_back(exc())


def test_an_error_of_the_step_itself_is_raised(monkeypatch):
    monkeypatch.setattr(FastEngine, '_build', lambda *a, **k: (_ for _ in ()).throw(KeyError('odd')))
    with pytest.raises(KeyError, match='odd'): losses(Fast(example_model(dropout=0.), FP32))


def compiling(folder, count):
    "What so many processes at once say that compile a function and keep it in a folder: its value, and how often compiled code was found there"
    import subprocess, sys
    code = f"""
import sys; sys.path.insert(0, {str(__import__('pathlib').Path(__file__).parent)!r})
from optkit.fast import keep_compiled
keep_compiled({str(folder)!r})
import torch
from torch._dynamo.utils import counters
print(round(torch.compile(lambda x: x.sin() + 1)(torch.ones(4)).sum().item(), 4), counters['inductor'].get('fxgraph_cache_hit', 0))
"""
    runs = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(count)]
    said = [run.communicate() for run in runs]
    assert not any(run.returncode for run in runs), [s[1][-500:] for s in said]
    return [s[0].split() for s in said]


@pytest.mark.slow # compiles in a process of its own, 20 s
def test_compiled_code_is_kept_in_the_run_folder(tmp_path):
    assert compiling(tmp_path / 'cache', 1) == [['7.3659', '0']]
    assert any((tmp_path / 'cache' / 'inductor').rglob('*.*')) and not list((tmp_path / 'cache').rglob('*.tmp'))


@pytest.mark.slow
def test_workers_that_compile_at_once_share_what_they_keep(tmp_path):
    assert [value for value, _ in compiling(tmp_path, 2)] == ['7.3659'] * 2  # both find nothing, or one of them what the other has kept
    assert compiling(tmp_path, 1) == [['7.3659', '1']]


def test_folders_of_compilers_that_the_user_has_chosen_stay(tmp_path, monkeypatch):
    from optkit.fast import keep_compiled
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'own'))
    monkeypatch.setenv('TRITON_CACHE_DIR', '-')  # so that it is put back
    monkeypatch.delenv('TRITON_CACHE_DIR')
    found = keep_compiled(tmp_path / 'run')
    assert found == dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'own'), TRITON_CACHE_DIR=str(tmp_path / 'run' / 'triton')) and not (tmp_path / 'run' / 'inductor').exists()


def test_a_further_folder_of_compilers_takes_the_place_of_the_first(tmp_path, monkeypatch):
    "Its own setting is none of the user's; one that the user makes in between is"
    from optkit.fast import keep_compiled
    for name in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR'):
        monkeypatch.setenv(name, '-')
        monkeypatch.delenv(name)
    of = lambda run: dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / run / 'inductor'), TRITON_CACHE_DIR=str(tmp_path / run / 'triton'))
    for run in 'ab':
        assert keep_compiled(tmp_path / run) == of(run) and (tmp_path / run / 'inductor').is_dir()
        from torch._inductor.runtime.cache_dir_utils import cache_dir
        assert cache_dir() == of(run)['TORCHINDUCTOR_CACHE_DIR'], 'what torch goes by'
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path / 'own'))
    assert keep_compiled(tmp_path / 'c') == of('c') | dict(TRITON_CACHE_DIR=str(tmp_path / 'own'))


# in the trainer


@pytest.mark.parametrize('layout', ['sorted', 'packed'])
def test_a_trainer_on_the_fast_engine(layout, tmp_path):
    "The same epochs, scores and weights as on the plain engine; resumed from a checkpoint the same bits as in one go"
    from optkit.config import TrainConfig
    from optkit.build import make_engine
    from optkit.trainer import Trainer
    rows = np.arange(len(STORE))
    train, valid = rows[:28], rows[28:]
    config = TrainConfig(epochs=3, lr=3e-3, effective_batch=8, layout=layout, metric='loss', precision='fp32', tf32=False if torch.cuda.is_available() else None, save_every=3)
    def run(config, folder=None, **extra):
        engine = make_engine(example_model(dropout=.1 if folder else 0.), config, MACHINE)
        if isinstance(engine, FastEngine): engine.layers = False
        return engine, Trainer(engine, STORE, config, folder=folder, **extra)
    plain, fast = run(config), run(replace(config, fast=True))
    a, b = plain[1].fit(train, valid), fast[1].fit(train, valid)
    assert isinstance(fast[0], FastEngine) and not fast[0].reason
    np.testing.assert_allclose([e.train_loss for e in a.history], [e.train_loss for e in b.history], rtol=1e-4)
    np.testing.assert_allclose([e.valid_loss for e in a.history], [e.valid_loss for e in b.history], rtol=1e-4)
    same_weights(plain[0].model, fast[0].model)
    whole = run(replace(config, fast=True), tmp_path / 'whole')
    whole[1].fit(train, valid)
    class Stop(Exception): pass
    def stop(event):
        if stop.count == 7: raise Stop
        stop.count += 1
    stop.count = 0
    cut_short = run(replace(config, fast=True), tmp_path / 'parts', on_step=lambda *a: stop(a))
    with pytest.raises(Stop): cut_short[1].fit(train, valid)
    again = run(replace(config, fast=True), tmp_path / 'parts')
    again[1].fit(train, valid, resume=True)
    for (n, p), (_, q) in zip(whole[0].model.named_parameters(), again[0].model.named_parameters()): assert torch.equal(p, q), n


def test_fast_and_compile_contradict():
    from optkit.config import TrainConfig
    with pytest.raises(ValueError, match='fast compiles'): TrainConfig(fast=True, compile='default')


def test_the_trial_of_rows_does_not_hang_on_tf32(monkeypatch):
    "Other code in the process may have switched TF32 on, whose rounding is larger than what the trial allows"
    if torch.cuda.is_available(): pytest.skip('on a GPU there is none in FP32')
    seen, before = [], torch.get_float32_matmul_precision()
    call = EndToEnd.__call__
    monkeypatch.setattr(EndToEnd, '__call__', lambda *a: (seen.append(torch.get_float32_matmul_precision()), call(*a))[1])
    torch.set_float32_matmul_precision('high')
    try:
        fast = Fast(example_model(dropout=0.), FP32)
        fast.call_for(STORE)
        assert seen == ['highest'] * 2 and torch.get_float32_matmul_precision() == 'high' and not fast.notes
    finally: torch.set_float32_matmul_precision(before)


def test_distances_of_padded_rows_are_made_once_for_each_length(monkeypatch):
    from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta
    plain, fast, made, build = Engine(model_of('deberta with a convolution'), FP32), Fast(model_of('deberta with a convolution'), FP32), [], deberta.build_relative_position
    a = losses(plain, epochs=2)
    monkeypatch.setattr(deberta, 'build_relative_position', lambda q, *args, **kw: (made.append(q.shape[-2]), build(q, *args, **kw))[1])
    fast.call_for(STORE)
    made.clear()
    np.testing.assert_allclose(a, losses(fast, epochs=2), rtol=2e-5)
    assert sorted({*made}) == sorted(made) and made, made
    assert not any('get_rel_pos' in m.__dict__ for m in fast.model.modules())


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    "Operations that take tensors of one device and give those of another, numbers in a tensor without dimensions excepted: a capture refuses them"
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given, made = ([t.device.type for t in torch.utils._pytree.tree_leaves(v) if isinstance(t, torch.Tensor)] for v in ((args, kwargs), found))
        if made and set(given) - set(made) and len(set(given)) == 1: self.seen.append(str(func))
        return found


@pytest.mark.parametrize('name', ['deberta', 'deberta, own keys', 'deberta, wide table', 'deberta with a convolution', 'gpt2', 'llama', 'qwen3'])
def test_padded_rows_copy_nothing_from_host_memory(name, monkeypatch):
    "On tensors without memory, whose device is another than that of the numbers a model makes; the copy that transformers does for DeBERTa's distances is seen at their first use"
    from optkit.shapes import _cached_positions
    for change in ('_ignore_bidirectional_mask_sdpa', '_ignore_causal_mask_sdpa'): monkeypatch.setattr(f'transformers.masking_utils.{change}', lambda *a, **k: False)  # they ask whether all of a mask is 1, unless it is captured
    with torch.device('meta'): model, inputs = model_of(name).train(), dict(input_ids=torch.ones(3, 32, dtype=torch.int64), attention_mask=torch.ones(3, 32, dtype=torch.int64))
    model.config.use_cache, kept = False, {}
    for encoder in [m for m in model.modules() if hasattr(m, 'get_rel_pos')]: encoder.get_rel_pos = partial(_cached_positions, encoder, kept)
    found = []
    for _ in range(2):
        with Copies() as copies: model(**inputs).logits.sum().backward()
        found.append(copies.seen)
    assert bool(found[0]) == name.startswith('deberta') and not found[1], found


@pytest.mark.skipif(not torch.cuda.is_available(), reason='captures need a GPU')
def test_padded_rows_are_captured_too(monkeypatch):
    "DeBERTa's functions of TorchScript are optimised in their third run, which must not be the capture; its distances copy a number from host memory, which a capture refuses"
    monkeypatch.setattr('optkit.fast.rows_problem', lambda *a: 'a planted problem')
    fast, plain = (kind(model_of('deberta'), FP32) for kind in (Fast, Engine))
    np.testing.assert_allclose(losses(plain), losses(fast), rtol=2e-5)
    assert fast.graphs and fast.notes == ['rows are padded: a planted problem']


def test_adapters():
    from peft import LoraConfig, get_peft_model
    def adapted():
        torch.manual_seed(0)
        model = get_peft_model(example_model(dropout=0.), LoraConfig(r=4, target_modules='all-linear', task_type='SEQ_CLS'))
        with torch.no_grad():
            for n, p in model.named_parameters():
                if 'lora_B' in n: p.normal_(0, .02)
        return model
    plain, fast = Engine(adapted(), FP32), Fast(adapted(), FP32)
    np.testing.assert_allclose(losses(plain, lr=1e-2), losses(fast, lr=1e-2), rtol=2e-5)
    assert not fast.reason and isinstance(fast.call_for(STORE), EndToEnd), fast.notes
    same_weights(plain.model, fast.model)


@pytest.mark.parametrize('other', ['engine', 'store'])
@pytest.mark.parametrize('name', ['bert', 'llama'])
def test_another_call_of_the_same_model_has_rows_of_its_own(name, other):
    "Rows would see each other where attention looked at the rows of somebody else, or at none"
    model = model_of(name)
    fast, short = Fast(model, FP32), replace(STORE, max_length=61)
    fast.reset(lr=0.)
    micro = next(iter(steps(STORE, np.arange(len(STORE)), 8, seed=1, epoch=0, layout=Layout(rows=4))))
    expected = fast.step(STORE, micro).item()
    second = Fast(model, FP32) if other == 'engine' else fast
    second.reset(lr=0.)
    assert second.call_for(short) is not fast.call_for(STORE)
    second.step(short, micro)
    fast.built.clear() # the next step sends rows through Python again, as a new shape does
    assert fast.step(STORE, micro).item() == pytest.approx(expected, rel=1e-5)
    if name == 'llama' or torch.cuda.is_available(): return
    for m in fast.call_for(STORE).modules:
        with pytest.raises(RuntimeError, match='without any being set'), fast.call_for(STORE).switched(): m(torch.zeros(1, 4, 32))


def test_gradients_that_others_have_replaced():
    fast, plain = Fast(example_model(dropout=0.), FP32), Engine(example_model(dropout=0.), FP32)
    first = losses(plain)
    for _ in range(2): # before anything is built, and after it
        for p in fast.model.parameters(): p.grad = None
        np.testing.assert_allclose(first, losses(fast), rtol=2e-5)
    Engine(fast.model, FP32).reset()  # as the ladder of a job does
    np.testing.assert_allclose(first, losses(fast), rtol=2e-5)


def test_gradients_of_the_step_before_are_gone():
    "Of a weight that this step does not use too: it stays, and is no part of the norm"
    models = [example_model(dropout=0.) for _ in range(2)]
    for model in models: model.unused = torch.nn.Parameter(torch.ones(3))
    plain, fast = Engine(models[0], FP32), Fast(models[1], FP32, at_once=4)
    losses(fast)
    for engine in (plain, fast): engine.reset(lr=3e-3)
    for _, grad in fast.gradients: grad.fill_(7.)
    a, b = (engine.step(STORE, np.arange(8)) for engine in (plain, fast))
    torch.testing.assert_close(a, b, rtol=2e-5, atol=0)
    torch.testing.assert_close(fast.grad_norm, plain.grad_norm, rtol=1e-3, atol=0)
    same_weights(plain.model, fast.model)
    assert torch.equal(fast.model.unused, torch.ones_like(fast.model.unused))



@pytest.mark.parametrize('tied', (False, True))
def test_rows_of_the_word_embedding_get_the_gradients_of_the_plain_engine(tied):
    "In place for a table that is read once; padding gets none; one that the model reads elsewhere too gets both parts"
    def model():
        made = example_model(dropout=0.)
        if tied:
            table, plain = made.get_input_embeddings().weight, made.forward
            def forward(*args, **kwargs):
                out = plain(*args, **kwargs)
                out.logits = out.logits + table[7, :2]
                return out
            made.forward = forward
        return made
    rows, engines = np.arange(16), [Fast(model(), FP32, at_once=4, max_grad_norm=None), Engine(model(), FP32, max_grad_norm=None)]
    assert engines[0].embedding[0] is engines[0].model.get_input_embeddings()
    tables = []
    for engine in engines:
        engine.reset(lr=0.)
        update = engine._update
        def looked_at(engine=engine, update=update):
            tables.append(engine.model.get_input_embeddings().weight.grad.clone())
            update()
        engine._update = looked_at
        for _ in range(2): engine.step(STORE, rows) # the second writes over what the first left
    assert tables[0].abs().sum() > 0 and (tables[0][7] != 0).any() >= tied
    for got, want in zip(tables[:2], tables[2:]): torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('kind', [Engine, Fast], ids=['plain', 'fast'])
@pytest.mark.parametrize('family', ['bert', 'deberta'])
def test_a_model_that_answers_with_tuples_trains_as_one_with_names(kind, family):
    def model():
        torch.manual_seed(0)
        return example_model(dropout=0.) if family == 'bert' else tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**small() | DEBERTA))
    named, tuples = model(), model()
    tuples.config.return_dict = False
    engines = [kind(m, FP32) for m in (named, tuples)]
    for layout in ('sorted', 'packed') if kind is Engine and family == 'bert' else ('sorted',):
        assert losses(engines[0], layout=layout) == losses(engines[1], layout=layout)
    assert torch.equal(*(e.predict(STORE, range(9)) for e in engines)) and not getattr(engines[1], 'notes', ())


def test_checkpointing_that_is_switched_on_behind_the_engine_is_refused_before_anything_changes():
    engine = Fast(example_model(), FP32)
    before = losses(engine)
    with torch.random.fork_rng():
        engine.model.gradient_checkpointing_enable()
        weights = {n: p.clone() for n, p in engine.model.named_parameters()}
        with pytest.raises(InputError, match="switched on after the fast engine was built.*checkpointing='full'"): engine.step(STORE, [0, 1])
        assert all(torch.equal(p, weights[n]) for n, p in engine.model.named_parameters())
        engine.model.gradient_checkpointing_disable()
    assert losses(engine) == before
