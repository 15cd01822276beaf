"Each layout gives the losses and gradients of a plain padded loop: on encoders and decoders, for classes, numbers, tokens and next tokens, on one rank and several; what cannot be packed is refused"
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from optkit import packing as packing_module
from optkit import engine as engine_module
from optkit.base import InputError
from optkit.table import IGNORED
from optkit.frames import table_from
from optkit.store import tokenise, TokenStore, word_tokenizer
from optkit.steps import (
    Batch, gather, grouped_order, Layout, LAYOUT_LABELS, layout_of, LAYOUTS, micro_batches, MicroBatch, pack, pack_budget, packed_of,
    rank_share, sample_order, Step, steps)
from optkit.config import parse_settings, TrainConfig
from optkit.models import example_model
from optkit.packing import Packing, packing_problem
from optkit.engine import Engine, step_weight
from optkit.hardware import hardware_with
from optkit.precision import choose_precision

torch.set_num_threads(1)
FP32, BF16 = (choose_precision(hardware_with(None), prefer=p) for p in ('fp32', 'bf16'))
SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, pad_token_id=0, bos_token_id=2, eos_token_id=3)
HEADS = dict(SMALL, num_key_value_heads=1)
DISENTANGLED = dict(SMALL, type_vocab_size=0, relative_attention=True, position_buckets=8, norm_rel_ebd='layer_norm', share_att_key=True, pos_att_type=['p2c', 'c2p'], position_biased_input=False, max_relative_positions=-1,
                    hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
WINDOWS = dict(SMALL, cls_token_id=2, sep_token_id=3, local_attention=8, num_hidden_layers=3, global_attn_every_n_layers=3)
STILL = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
FAMILIES = {  # class, configuration, attention
    'bert': ('Bert', dict(SMALL, max_position_embeddings=64, **STILL), 'sdpa'), 'bert, eager': ('Bert', dict(SMALL, max_position_embeddings=64, **STILL), 'eager'),
    'roberta': ('Roberta', dict(SMALL, max_position_embeddings=66, **STILL) | dict(pad_token_id=1), 'sdpa'), 'deberta-v2': ('DebertaV2', DISENTANGLED, 'eager'),
    'deberta-v2 with positions': ('DebertaV2', dict(SMALL, type_vocab_size=2, max_position_embeddings=64, **STILL), 'eager'), 'electra': ('Electra', dict(SMALL, embedding_size=32, max_position_embeddings=64, **STILL), 'sdpa'),
    'distilbert': ('DistilBert', dict(vocab_size=204, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64, pad_token_id=0, dropout=0., attention_dropout=0., seq_classif_dropout=0.), 'sdpa'),
    'modernbert': ('ModernBert', WINDOWS, 'sdpa'), 'modernbert, mean': ('ModernBert', dict(WINDOWS, classifier_pooling='mean'), 'eager'),
    'llama': ('Llama', HEADS, 'sdpa'), 'qwen2, window': ('Qwen2', dict(HEADS, use_sliding_window=True, sliding_window=4, max_window_layers=1), 'sdpa'), 'qwen3': ('Qwen3', dict(HEADS, head_dim=16), 'eager'),
    'mistral, window': ('Mistral', dict(HEADS, sliding_window=6), 'sdpa')}


def packing(engine, store, tokens=0): return Layout('packed').call(engine, store, tokens)


def model_of(family, head='ForSequenceClassification', labels=3, **changes):
    name, settings, attention = FAMILIES[family]
    config = getattr(transformers, f'{name}Config')(**settings | changes, num_labels=labels)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, f'{name}{head}')(config)


def store_of(lengths, task='classification', max_length=64, types=False, seed=0):
    rng, lengths = np.random.default_rng(seed), np.asarray(lengths)
    total, offsets = int(lengths.sum()), np.concatenate([[0], np.cumsum(lengths)])
    tokens = torch.from_numpy(rng.integers(4, 204, total).astype(np.int32))
    labels, targets = torch.arange(len(lengths)) % 3, None
    if task == 'regression': labels = torch.from_numpy(rng.normal(size=len(lengths)).astype(np.float32))
    if task == 'tokens': labels = torch.from_numpy(np.where(rng.random(total) < .4, IGNORED, rng.integers(0, 3, total)).astype(np.int32))
    if task == 'causal':
        labels = torch.cat([tokens[1:], torch.tensor([IGNORED], dtype=torch.int32)])
        labels[torch.from_numpy(offsets[1:] - 1)] = IGNORED
    if task in ('tokens', 'causal'): targets = np.array([(labels[a:b] != IGNORED).sum().item() for a, b in zip(offsets, offsets[1:])])
    kinds = torch.from_numpy(rng.integers(0, 2, total).astype(np.uint8)) if types else None
    return TokenStore(tokens, torch.from_numpy(offsets), labels, kinds, lengths, ('a', 'b', 'c'), max_length, 0, lengths, task, targets)


LENGTHS = [3, 50, 7, 29, 1, 12, 40, 5, 18, 2, 33, 9]

def plain(model, store, rows):
    "Loss and gradients of one padded batch, written with torch alone"
    width = int(store.lengths[rows].max())
    ids, mask, kinds = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    ids += model.config.pad_token_id or 0
    aims = torch.full((len(rows), width), IGNORED)
    for n, r in enumerate(rows):
        a, b = int(store.offsets[r]), int(store.offsets[r + 1])
        ids[n, :b - a], mask[n, :b - a] = store.tokens[a:b].long(), 1
        if store.type_ids is not None: kinds[n, :b - a] = store.type_ids[a:b].long()
        if store.task in ('tokens', 'causal'): aims[n, :b - a] = store.labels[a:b].long()
    model.train(); model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, **(dict(token_type_ids=kinds) if store.type_ids is not None else {})).logits
    if store.task == 'classification': loss = F.cross_entropy(logits, store.labels[rows])
    elif store.task == 'regression': loss = ((logits[:, 0] - store.labels[rows]) ** 2).mean()
    else: loss = F.cross_entropy(logits.transpose(1, 2), aims)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def ours(model, store, micros, precision=FP32):
    "Loss and gradients of an engine's step, which then leaves the weights alone"
    engine = Engine(model, precision, max_grad_norm=0.)
    grads = {}
    engine.optimizer.step = lambda: grads.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return engine.step(store, micros).item(), grads


def difference(found, want):
    "Largest difference of loss or gradient, against the largest gradient"
    assert found[1].keys() == want[1].keys()
    size = max(g.abs().max().item() for g in want[1].values())
    assert size > 1e-4, 'nothing to compare'
    return max(abs(found[0] - want[0]), max((found[1][n] - g).abs().max().item() for n, g in want[1].items()) / size)


def step_of(store, layout, physical=5, max_tokens=70, rows=None, **kwargs):
    rows = np.arange(len(store)) if rows is None else rows
    return next(steps(store, rows, len(rows), layout=layout_of(layout, physical, max_tokens), **kwargs))


# --- models

@pytest.mark.parametrize('family', FAMILIES)
def test_packed_rows_train_as_padded_ones(family):
    "Packs of at most 70 tokens: more than one, with several rows in each, some longer than the model's positions"
    store = store_of(LENGTHS, types=family.startswith('bert'))
    micros = step_of(store, 'packed')
    assert len(micros) > 2 and max(len(m.rows) for m in micros) > 2 and max(m.pad_to for m in micros) > 64
    model = model_of(family)
    assert difference(ours(model, store, micros), plain(model, store, np.arange(12))) < 2e-5


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family, head, task', [('bert', 'ForTokenClassification', 'tokens'), ('deberta-v2', 'ForTokenClassification', 'tokens'), ('modernbert', 'ForTokenClassification', 'tokens'), ('llama', 'ForCausalLM', 'causal'),
                                                ('qwen2, window', 'ForCausalLM', 'causal'), ('roberta', 'ForSequenceClassification', 'regression'), ('qwen3', 'ForSequenceClassification', 'regression')])
def test_every_task_in_every_layout(family, head, task, layout):
    store, model = store_of(LENGTHS, task), model_of(family, head, labels=1 if task == 'regression' else 3)
    assert difference(ours(model, store, step_of(store, layout)), plain(model, store, np.arange(12))) < 2e-5


@pytest.mark.parametrize('family', ['bert', 'deberta-v2', 'llama'])
def test_packed_bf16_differs_by_its_rounding_only(family):
    store = store_of(LENGTHS)
    exact = plain(model_of(family), store, np.arange(12))
    padded, packed = (difference(ours(model_of(family), store, step_of(store, layout), BF16), exact) for layout in ('padded', 'packed'))
    assert packed < max(2 * padded, .02) and padded > 1e-5


def without_blocks(segments, causal=False, window=None): return REAL_MASK(torch.zeros_like(segments), causal, window)
def one_too_many(segments, causal=False, window=None): return REAL_MASK(segments, causal, window and window + 1)
def own_tokens_ahead(segments, causal=False, window=None): return REAL_MASK(segments, False, window)
REAL_MASK = packing_module._block_mask

@pytest.mark.parametrize('family, fault', [('bert', without_blocks), ('deberta-v2', without_blocks), ('llama', without_blocks), ('llama', own_tokens_ahead), ('modernbert', one_too_many), ('mistral, window', one_too_many), ('qwen2, window', one_too_many)])
def test_a_wrong_mask_is_refused_before_it_trains(monkeypatch, family, fault):
    monkeypatch.setattr(packing_module, '_block_mask', fault)
    store = store_of(LENGTHS)
    engine = Engine(model_of(family), FP32)
    before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
    with pytest.raises(InputError, match="cannot be packed: .*choose the layout 'sorted'"): engine.step(store, step_of(store, 'packed'))
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())


@pytest.mark.parametrize('family', ['bert', 'roberta', 'deberta-v2 with positions', 'modernbert', 'llama'])
def test_positions_that_run_on_are_refused(monkeypatch, family):
    "Only the positions are wrong here. Rotary ones turn with the distance alone, so a shift must change nothing"
    real = Packing._packed_inputs
    def run_on(self, inputs): return real(self, inputs | dict(position_ids=torch.arange(inputs['input_ids'].shape[1])[None]))
    monkeypatch.setattr(Packing, '_packed_inputs', run_on)
    store, engine = store_of(LENGTHS), Engine(model_of(family), FP32)
    if family in ('modernbert', 'llama'): packing(engine, store)
    else:
        with pytest.raises(InputError, match='differ from those of a padded batch'): packing(engine, store)


def test_wrong_pooling_is_refused(monkeypatch):
    real = packing_module._padded_places
    def late(offsets, tokens, longest):
        mask, index = real(offsets, tokens, longest)
        return mask, (index + 1).clamp(max=tokens - 1)
    monkeypatch.setattr(packing_module, '_padded_places', late)
    for family in ('bert', 'deberta-v2', 'llama'):
        with pytest.raises(InputError, match='differ from those of a padded batch'): packing(Engine(model_of(family), FP32), store_of(LENGTHS))


def test_a_neighbour_that_shows_only_a_little_is_refused():
    "A leak below the rounding of the comparison, which an exchange of the neighbour brings out"
    model = model_of('bert')
    real = model.bert.encoder.forward
    def leaks(hidden_states, *args, **kwargs):
        out = real(hidden_states, *args, **kwargs)
        out['last_hidden_state'] = out['last_hidden_state'] + 4e-5 * hidden_states.mean(1, keepdim=True) if hidden_states.shape[0] == 1 else out['last_hidden_state']
        return out
    model.bert.encoder.forward = leaks
    with pytest.raises(InputError, match='sees its neighbour'): packing(Engine(model, FP32), store_of(LENGTHS))


OTHERS = {'mixes tokens': ('FNet', dict(vocab_size=204, hidden_size=32, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=64)),
          'convolves': ('ConvBert', dict(SMALL, max_position_embeddings=64, embedding_size=32)), 'segments of its own': ('XLNet', dict(vocab_size=204, d_model=32, n_layer=2, n_head=2, d_inner=64)),
          'a convolution beside attention': ('DebertaV2', dict(DISENTANGLED, conv_kernel_size=3, conv_act='gelu')), 'blocks of places': ('BigBird', dict(SMALL, max_position_embeddings=64))}

@pytest.mark.parametrize('kind', OTHERS)
def test_a_model_that_looks_beyond_a_sequence_is_refused(kind):
    name, settings = OTHERS[kind]
    engine = Engine(getattr(transformers, f'{name}ForSequenceClassification')(getattr(transformers, f'{name}Config')(**settings)), FP32)
    for training in (True, False):
        engine.model.train(training)
        with pytest.raises(InputError, match="choose the layout 'sorted' or 'padded'") as caught: packing(engine, store_of(LENGTHS))
        assert str(caught.value).count('\n') == 0 and engine.model.training is training


def test_a_pack_is_tried_again_only_when_it_is_longer(monkeypatch):
    tried = []
    real = packing_module.packing_problem
    monkeypatch.setattr(engine_module, 'packing_problem', lambda call, store, tokens: (tried.append(tokens), real(call, store, tokens))[1])
    engine, store = Engine(example_model(3), FP32), store_of(LENGTHS)
    for tokens in (60, 20, 60, 128, 90): packing(engine, store, tokens)
    assert tried == [60, 128]
    packing(engine, replace(store, max_length=30))
    assert len(tried) == 3


def test_the_trial_leaves_random_state_and_dropout_alone():
    store, runs = store_of(LENGTHS), []
    for first in (False, True):
        engine = Engine(model_of('bert', hidden_dropout_prob=.3), FP32)
        if first: packing(engine, store, 128)
        engine.reset(seed=4)
        runs.append(engine.step(store, step_of(store, 'packed')).item())
    assert runs[0] == runs[1] and not engine.model.bert.encoder._forward_hooks and not engine.model.bert._forward_pre_hooks


# --- the divisor of a step

def test_lengths_3_50_7_120_weigh_by_their_tokens():  # huggingface/transformers#34242
    "One batch, micro-batches of one row, sorted and packed: the same gradients; a mean of means is another"
    for head, task, family in (('ForTokenClassification', 'tokens', 'bert'), ('ForCausalLM', 'causal', 'llama'), ('ForSequenceClassification', 'classification', 'bert')):
        changes = dict(max_position_embeddings=128)
        store, model = store_of([3, 50, 7, 120], task, 128), model_of(family, head, **changes)
        want = plain(model, store, np.arange(4))
        for layout, physical in (('full', 4), ('full', 1), ('sorted', 1), ('padded', 3), ('packed', 4)):
            assert difference(ours(model, store, step_of(store, layout, physical, 128)), want) < 2e-5, (task, layout)
        single = [MicroBatch(np.array([r]), 128) for r in range(4)]
        means = [ours(model, store, [m]) for m in single]
        mean = np.mean([m[0] for m in means]), {n: sum(m[1][n] for m in means) / 4 for n in want[1]}
        assert (difference(mean, want) > 1e-2) == (task != 'classification'), 'a planted mean of means must be seen where tokens count'


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('head, task, family', [('ForTokenClassification', 'tokens', 'bert'), ('ForCausalLM', 'causal', 'llama'), ('ForSequenceClassification', 'classification', 'bert')])
def test_gradients_summed_over_ranks_are_those_of_the_step(layout, head, task, family):
    store, model = store_of([3, 50, 7, 120, 9], task, 128), model_of(family, head, max_position_embeddings=128)
    want = plain(model, store, np.arange(5))
    for ranks in (2, 3, 7):
        parts = [ours(model, store, step_of(store, layout, 2, 128, rank=r, ranks=ranks)) for r in range(ranks)]
        full = [p for p in parts if p[1]]
        assert len(full) == min(ranks, 5)
        found = sum(p[0] for p in parts), {n: sum(p[1][n] for p in full) for n in want[1]}
        assert difference(found, want) < 2e-5


def test_the_weight_of_a_step():
    store = store_of([3, 50, 7], 'causal')
    whole = step_of(store, 'sorted', 1)
    assert step_weight(store, whole) == 2 + 49 + 6 == step_weight(store, list(whole)) and step_weight(store, list(whole)[:1]) == 2
    assert step_weight(store, Step(list(whole)[:1], whole.rows)) == 57, 'a rank divides by what all ranks hold'
    assert step_weight(store_of([3, 50, 7]), whole) == 3
    unlabelled = replace(store, targets=np.zeros(3, dtype=np.int64), labels=torch.full_like(store.labels, IGNORED))
    loss, grads = ours(model_of('llama', 'ForCausalLM'), unlabelled, whole)
    assert loss == 0 and all(g.isfinite().all() for g in grads.values()), 'a step without a target moves nothing'


# --- gathered batches

@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_gathered_batch_trains_like_its_micro_batch(layout):
    store = store_of(LENGTHS, types=True)
    micros = step_of(store, layout)
    a, b = ours(model_of('bert'), store, micros), ours(model_of('bert'), store, Step([gather(store, m) for m in micros], micros.rows))
    assert a[0] == b[0] and all(torch.equal(a[1][n], b[1][n]) for n in a[1])
    batches = [gather(store, m) for m in micros]
    assert all(isinstance(b, Batch) and b.tokens == m.tokens for b, m in zip(batches, micros))


def test_predict_gives_the_loss_and_the_hit_of_each_next_token():
    engine, store = Engine(model_of('llama', 'ForCausalLM'), FP32), store_of(LENGTHS, 'causal')
    found = engine.predict(store, np.arange(3))
    assert found.shape == (store.targets[:3].sum(), 2) and set(found[:, 1].tolist()) <= {0., 1.}


# --- Layout

def cut_before(rows, lengths, physical, layout, max_length, max_tokens=None, table=None):
    "The cut as it was before layouts, written again: (row numbers, width) of each micro-batch"
    pad = lambda part: int(min(-(-lengths[part].max() // 8) * 8, max_length))
    if not len(rows): return []
    if layout == 'packed':
        budget = max_tokens or max_length * int(physical ** .5)
        packs = [rows[places] for places in pack(lengths[rows], budget)]
        return [(p.tolist(), int(min(-(-lengths[p].sum() // 64) * 64, budget))) for p in packs]
    if layout in ('sorted', 'grouped'): rows = rows[np.argsort(lengths[rows], kind='stable')]
    parts = np.array_split(rows, -(-len(rows) // physical))
    if table and layout in ('sorted', 'grouped'):
        parts, end = [], len(rows)
        while end:
            size = next((n for tokens, n in sorted(table) if pad(rows[end - 1:end]) <= tokens), physical)
            parts.insert(0, rows[max(0, end - size):end])
            end = max(0, end - size)
    return [(p.tolist(), max_length if layout == 'full' else pad(p)) for p in parts]


@pytest.mark.parametrize('layout', LAYOUT_LABELS)
def test_a_layout_cuts_as_before(layout):
    "Random lengths, sizes and tables; whole epochs on one rank and on three"
    rng = np.random.default_rng(1)
    for trial in range(60):
        lengths, effective = rng.integers(1, 65, rng.integers(1, 60)), int(rng.integers(1, 20))
        rows, physical = np.arange(len(lengths)), [None, int(rng.integers(1, 20))][trial % 2]
        tokens = [None, int(rng.integers(64, 400))][trial // 2 % 2] if layout == 'packed' else None
        table = ((16, 25), (40, 21)) if layout in ('sorted', 'grouped') and trial % 3 == 0 else None
        store = store_of(lengths)
        order = grouped_order(rows, lengths, effective, 3, 1) if layout == 'grouped' else sample_order(rows, 3, 1)
        size = physical or min(effective, len(rows))
        for rank, ranks in ((0, 1), (1, 3)):
            plan = steps(store, rows, effective, layout=Layout(layout, physical, tokens, table), seed=3, epoch=1, rank=rank, ranks=ranks)
            shares = [rank_share(order[k:k + effective], lengths, layout, rank, ranks) for k in range(0, len(order), effective)]
            want = [cut_before(share, lengths, size, layout, 64, tokens, table) for share in shares]
            assert [[(m.rows.tolist(), m.width) for m in step] for step in plan] == want
        if physical: # the same by separate values
            with pytest.warns(DeprecationWarning, match='is now Layout.cut'): cut = micro_batches(rows, lengths, physical, layout, 64, tokens, table)
            assert cut == Layout(layout, physical, tokens, table).cut(rows, lengths, 64)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_layout_is_halved_down_to_one_row(layout):
    "Each time smaller, the same rows; a table goes first; in the end an error that says what to do"
    lengths = np.random.default_rng(2).integers(1, 65, 30)
    now, longest = Layout(layout, table=((16, 30),) if layout == 'sorted' else None).sized(30, 64), int(lengths.max())
    most = lambda l: max(m.tokens if layout == 'packed' else len(m.rows) for m in l.cut(np.arange(30), lengths, 64))
    sizes = []
    with pytest.raises(MemoryError, match='one row.* does not fit .no room.; shorten the rows'):
        while True:
            assert sorted(r for m in now.cut(np.arange(30), lengths, 64) for r in m.rows) == list(range(30))
            sizes.append(most(now))
            choice = now.halved('no room', longest, 30)
            assert choice.reason.startswith('no room: ')
            now = choice.value
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 3 and now.table is None
    assert sizes[-1] <= (64 if layout == 'packed' else 1)
    assert Layout(layout).within(now).within(None) == now, 'the next run begins with what fitted'


def test_a_layout_as_text_and_as_fields():
    "A configuration takes its sizes as text, by names of their own; contradictions are refused at once"
    config = TrainConfig(**parse_settings(['layout=packed', 'max_tokens=640']))
    assert config.layout == Layout('packed', tokens=640) and TrainConfig().layout == Layout()
    assert Layout(table=[[16, 24], [32, 8]]) == TrainConfig(batch_table=((16, 24), (32, 8))).layout
    store = store_of(LENGTHS)
    with pytest.warns(DeprecationWarning, match='layout=Layout'): plan = steps(store, np.arange(12), 5, layout='padded', physical=2)
    assert list(plan) == list(steps(store, np.arange(12), 5, layout=Layout('padded', 2)))
    for wrong, said in ((dict(name='random'), 'expected one of'), (dict(rows=0), 'physical_batch .Layout.rows. is 0, expected at least 1'), (dict(tokens=64), "tokens. is for the layout 'packed'"), (dict(name='packed', tokens=1.5), 'tokens. is 1.5, expected a whole number'),
                        (dict(name='padded', table=((16, 4),)), 'table. is for the layout'), (dict(table=((16, 0),)), 'pairs of tokens and rows'), (dict(table=()), 'pairs of tokens and rows'), (dict(table=((16, 4, 2),)), 'pairs')):
        with pytest.raises(ValueError, match=said): Layout(**wrong)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_an_engine_is_given_rows(layout):
    "Rows cut by the engine's layout give the step that is given as micro-batches, to the bit"
    store, rows, cut = store_of(LENGTHS), np.array([4, 0, 11, 2, 7, 9, 1]), Layout(layout, 3, 70 if layout == 'packed' else None)
    losses = []
    for step in (rows, rows.tolist(), torch.from_numpy(rows), Step(cut.cut(rows, store.lengths, 64), rows)):
        engine = Engine(model_of('bert'), FP32)
        engine.layout = cut
        losses.append([engine.step(store, step).item() for _ in range(3)])
        assert engine.micro_batches == len(cut.cut(rows, store.lengths, 64)) > 1
    assert losses[0] == losses[1] == losses[2] == losses[3] and losses[0][0] != losses[0][1]
    with pytest.raises(ValueError, match='expected numbers from 0 to 11, found -1'): engine.step(store, [3, -1])
    with pytest.raises(ValueError, match='for a mask pass'): engine.step(store, np.ones(12, dtype=bool))
