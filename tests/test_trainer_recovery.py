"What a run answers to: no memory, a loss that breaks, workers that are too few; each is logged, loses no sample, and can be turned off"
import math, os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from optkit import base as base_module
from optkit import steps as steps_module
from optkit import engine as engine_module, sizes as sizes_module, trainer as trainer_module
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.engine import Engine
from optkit.hardware import hardware_with
from optkit.progress import read_progress
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.recovery import faster_workers, SpikeWatch, steadier
from optkit.trainer import Trainer

torch.set_num_threads(1)
HERE = hardware_with(None)
TRAIN, VALID = np.arange(60), np.arange(60, 90)
BASE = TrainConfig(epochs=3, lr=3e-3, effective_batch=16, precision='fp32', read_every=3)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(90), word_tokenizer(), 48, progress=False)


def trainer_of(store, config=BASE, dropout=0., **kwargs): return Trainer(make_engine(example_model(dropout=dropout), config, HERE), store, config, **kwargs)
def weights(trainer): return [p.detach().clone() for p in trainer.engine.model.parameters()]


# --- out of memory

def limited(monkeypatch, most, at=None):
    "Micro-batches of more than `most` padded tokens fail in the forward pass, from step `at` on"
    real, seen = engine_module._loss, dict(failed=0, rows=[])
    def loss(engine, store, micro, weight):
        if seen.get('step', 0) >= (at or 0) and micro.tokens > most:
            seen['failed'] += 1
            torch.rand(5) # what failed has drawn numbers
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')
        return real(engine, store, micro, weight)
    monkeypatch.setattr(engine_module, '_loss', loss)
    return seen


@pytest.mark.parametrize('layout', ['full', 'padded', 'sorted', 'packed'])
def test_a_step_that_does_not_fit_is_made_again_in_smaller_pieces(store, monkeypatch, layout):
    "The same samples, the same number of updates, the same losses as without the limit; the learning rate ends as planned"
    config = replace(BASE, layout=layout)
    plain = trainer_of(store, config)
    want, end = [e.train_loss for e in plain.epochs(TRAIN, VALID)], weights(plain)
    seen, steps_seen, rates, trainer = limited(monkeypatch, 100 if layout == 'packed' else 200), [], [], trainer_of(store, config)
    trainer.on_step = lambda done, total: (steps_seen.append((done, total)), rates.append(trainer.engine.optimizer.param_groups[0]['lr']))
    rows, real = [], Engine.step
    def step(self, s, micro):
        loss = real(self, s, micro)
        rows.append(np.concatenate([m.rows for m in self.cut(s, micro)])); return loss
    monkeypatch.setattr(Engine, 'step', step)
    found = [e.train_loss for e in trainer.epochs(TRAIN, VALID)]
    assert seen['failed'] and found == pytest.approx(want, abs=1e-5)
    assert steps_seen == [(n + 1, 12) for n in range(12)] and rates[-1] == pytest.approx(3e-3 / 11)
    for epoch in range(3): assert sorted(np.concatenate(rows[4 * epoch:4 * epoch + 4]).tolist()) == TRAIN.tolist() # each sample once
    said = [d for d in trainer.position.decisions if d['what'] in ('physical batch', 'tokens of a pack')]
    assert said and 'CUDA out of memory' in said[0]['reason'] and seen['failed'] == len(said), 'later steps keep the smaller size'
    assert all((a - b).abs().quantile(.99) < 1e-4 for a, b in zip(end, weights(trainer)))


def test_out_of_memory_in_the_middle_of_a_run(store, monkeypatch):  # huggingface/sentence-transformers#3145
    "At step 6, with dropout: everything before is untouched, the step's random state is put back"
    config, losses = replace(BASE, layout='padded'), {}
    for fail in (False, True):
        with monkeypatch.context() as patch:
            trainer = trainer_of(store, config, dropout=.1)
            found, real, tries = [], trainer.engine.step, []
            def step(s, micro):
                tries.append(torch.get_rng_state())
                if fail and len(tries) == 6: torch.rand(3); raise torch.OutOfMemoryError('CUDA out of memory.')
                loss = real(s, micro); found.append(loss.item()); return loss
            patch.setattr(trainer.engine, 'step', step, raising=False)
            epochs = list(trainer.epochs(TRAIN, VALID))
            losses[fail] = found
            if fail: assert torch.equal(tries[5], tries[6]) and [d['step'] for d in trainer.position.decisions] == [5]
    assert losses[True][:5] == losses[False][:5] and len(losses[True]) == len(losses[False]) == 12


def test_what_cannot_be_halved_and_other_errors_are_raised(store, monkeypatch):
    limited(monkeypatch, 1)
    with pytest.raises(MemoryError, match='one row at a time does not fit .*gradient checkpointing or adapters'): trainer_of(store).fit(TRAIN, VALID)
    with pytest.raises(MemoryError, match='a pack of .* tokens, one row alone'): trainer_of(store, replace(BASE, layout='packed')).fit(TRAIN, VALID)
    with pytest.raises(torch.OutOfMemoryError): trainer_of(store, replace(BASE, shrink=False)).fit(TRAIN, VALID)
    monkeypatch.setattr(engine_module, '_loss', lambda *a: (_ for _ in ()).throw(RuntimeError('shapes do not match')))
    with pytest.raises(RuntimeError, match='shapes do not match'): trainer_of(store).fit(TRAIN, VALID)


def test_an_evaluation_that_does_not_fit_takes_fewer_rows(store, monkeypatch):
    trainer, real, sizes = trainer_of(store), engine_module._outputs, []
    def outputs(engine, s, part, pad_to):
        sizes.append(len(part))
        if len(part) > 9: raise torch.OutOfMemoryError('CUDA out of memory.')
        return real(engine, s, part, pad_to)
    want = [e.score for e in trainer_of(store).epochs(TRAIN, VALID)]
    monkeypatch.setattr(engine_module, '_outputs', outputs)
    assert [e.score for e in trainer.epochs(TRAIN, VALID)] == want and max(sizes[2:]) <= 15 and trainer.engine.layout.eval_rows == 8
    assert [d['what'] for d in trainer.position.decisions] == ['rows at once in evaluation'] * 3


def test_the_next_run_on_the_engine_begins_with_what_fitted(store, monkeypatch):
    seen, trainer = limited(monkeypatch, 200), trainer_of(store)
    first = trainer.fit(TRAIN, VALID)
    failed = seen['failed']
    again = Trainer(trainer.engine, trainer.store, BASE).fit(TRAIN, VALID)
    assert failed and seen['failed'] == failed and not again.decisions and [e.train_loss for e in again.history] == pytest.approx([e.train_loss for e in first.history], abs=1e-5)


def test_gradient_checkpointing_is_planned_from_the_cheapest_mode_on(store, monkeypatch):
    from optkit.sizes import plan_checkpointing
    room = dict(off=2, selective=5, full=40)
    real, mode = engine_module._loss, {}
    switch = sizes_module.set_checkpointing
    monkeypatch.setattr(sizes_module, 'set_checkpointing', lambda model, m: (mode.update(now=m), switch(model, m))[1])
    def loss(engine, s, micro, weight):
        if len(micro.rows) > room[mode['now']]: raise torch.OutOfMemoryError('CUDA out of memory.')
        return real(engine, s, micro, weight)
    engine = make_engine(example_model(), BASE, HERE)
    monkeypatch.setattr(engine_module, '_loss', loss)
    choice, plan = plan_checkpointing(engine, store, 16)
    assert choice.value == 'full' and plan.physical == 16 and 'without it 2' in choice.reason and any(getattr(m, 'gradient_checkpointing', False) for m in engine.model.modules())
    choice, plan = plan_checkpointing(engine, store, 16, enough=4)
    assert choice.value == 'selective' and plan.physical <= 5
    times = dict(off=1.5, selective=1.2, full=1.6)
    monkeypatch.setattr(sizes_module, '_step_seconds', lambda *_: times[mode['now']])
    choice, plan = plan_checkpointing(engine, store, 16, timed=True)
    assert choice.value == 'selective' == mode['now'] and plan.physical <= 5 and 'off 1.5 s with 2 rows at once' in choice.reason
    room.update(off=0, selective=0, full=0)
    with pytest.raises(MemoryError, match='not even one row fits'): plan_checkpointing(engine, store, 16)


@pytest.mark.slow
def test_gradient_checkpointing_is_planned_by_steps_that_are_really_made(store):
    from optkit.sizes import plan_checkpointing
    engine = make_engine(example_model(), BASE, HERE)
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    choice, plan = plan_checkpointing(engine, store, 16, timed=True)
    assert choice.value in (modes := ('off', 'selective', 'full')) and all(f'{m} ' in choice.reason for m in modes)
    assert all(torch.equal(p, before[n]) for n, p in engine.model.named_parameters())


# --- several ranks

FAILURES = (None, 'memory', 'error')

def rank_run(rank, ranks, address, queue):
    "The three runs of one rank"
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(address))
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', rank=rank, world_size=ranks)
    store, real = tokenise(example_table(90), word_tokenizer(), 48, progress=False), engine_module._loss
    for fail in FAILURES:
        engine, seen = make_engine(example_model(dropout=0.), BASE, HERE, ranks=torch.distributed.group.WORLD), []
        trainer = Trainer(engine, store, BASE)
        def loss(e, s, micro, weight):
            seen.append(len(micro.rows))
            if fail == 'memory' and rank == 1 and len(micro.rows) > 3: raise torch.OutOfMemoryError('CUDA out of memory.')
            if fail == 'error' and rank == 1 and len(seen) > 3: raise RuntimeError('a broken kernel')
            return real(e, s, micro, weight)
        engine_module._loss = loss
        try: losses = [e.train_loss for e in trainer.epochs(TRAIN, VALID)]
        except Exception as exc: losses = f'{type(exc).__name__}: {exc}'
        queue.put((fail, rank, losses, trainer.engine.layout.rows, trainer.position.done, [p.detach().sum().item() for p in engine.model.parameters()]))
    torch.distributed.destroy_process_group()


def free_port():
    import socket
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]


def test_two_ranks_train_as_one_shrink_together_and_do_not_wait_for_one_that_failed(store):  # mosaicml/composer#2117
    context, port = multiprocessing.get_context('spawn'), free_port()
    queue = context.Queue()
    ranks = [context.Process(target=rank_run, args=(r, 2, port, queue)) for r in range(2)]
    for p in ranks: p.start()
    found = {f[:2]: f[2:] for f in (queue.get(timeout=120) for _ in range(6))}
    for p in ranks: p.join(30); assert p.exitcode == 0
    assert 'a broken kernel' in found['error', 1][0] and 'another rank failed' in found['error', 0][0]
    plain = trainer_of(store)
    want = [e.train_loss for e in plain.epochs(TRAIN, VALID)]
    for fail in FAILURES[:2]:
        for rank in range(2):
            losses, physical, done, sums = found[fail, rank]
            assert losses == pytest.approx(want, abs=2e-5) and done == 12 and physical == (None if fail is None else 2)
            assert sums == pytest.approx([p.detach().sum().item() for p in plain.engine.model.parameters()], abs=2e-3)
        assert found[fail, 0][3] == found[fail, 1][3]


# --- a loss that breaks

def poisoned(trainer, at, value=math.nan, once=True):
    "The loss of the step number `at` is no number, and so are its gradients"
    real, count = trainer.engine._backward, []
    def backward(store, micro, weight):
        total = real(store, micro, weight)
        count.append(1)
        if len(count) - 1 == at or not once and len(count) > at:
            for p in trainer.engine.model.parameters(): p.grad.fill_(value)
            total = total * value
        return total
    trainer.engine._backward = backward
    return trainer


@pytest.mark.parametrize('read_every', [1, 3, 50])
@pytest.mark.parametrize('at, back', [(1, 0), (6, 4), (11, 8)])
def test_a_broken_loss_is_answered_by_going_back_once(store, at, back, read_every, caplog):
    "12 steps in 3 epochs of 4: back to the start of the epoch, half the rate, a warm-up; the step and its rows are named"
    config = replace(BASE, read_every=read_every)
    rates, trainer = [], poisoned(trainer_of(store, config), at)
    trainer.on_step = lambda done, total: rates.append((done, trainer.engine.optimizer.param_groups[0]['lr']))
    result = trainer.fit(TRAIN, VALID)
    assert len(result.history) == 3 and all(math.isfinite(e.train_loss + e.valid_loss) for e in result.history) and all(torch.isfinite(p).all() for p in trainer.engine.model.parameters())
    said, = result.decisions
    assert said['what'] == 'loss' and said['value'] == f'back to step {back}' and f'the loss is nan at step {at + 1} (rows ' in said['reason'] and 'instead of 0.003' in said['reason']
    left, warm = 12 - back, max(1, (12 - back) // 2)
    tail = [lr for _, lr in rates[-left:]]
    first = math.ceil(.06 * 12)
    planned = [3e-3 * ((n + 1) / first if n < first else (12 - n) / (12 - first)) for n in range(back, 12)]
    assert tail == pytest.approx([.5 * p * min(1, (k + 1) / warm) for k, p in enumerate(planned)]) and 'back to step' in caplog.text


def test_the_state_it_goes_back_to_is_the_one_of_then(store):
    config = replace(BASE, read_every=1)
    trainer, seen = poisoned(trainer_of(store, config, dropout=.1), 5), {}
    def look(done, total): seen.setdefault(done, []).append([p.detach().clone() for p in trainer.engine.model.parameters()])
    trainer.on_step = look
    real = trainer.engine.load_state
    trainer.engine.load_state = lambda state: (real(state), seen.update(back=[p.detach().clone() for p in trainer.engine.model.parameters()]))
    trainer.fit(TRAIN, VALID)
    assert all(torch.equal(a, b) for a, b in zip(seen[4][0], seen['back'])) and (len(seen[5]), len(seen[6])) == (2, 1)


def test_a_second_break_ends_the_run_and_recovery_can_be_turned_off(store):
    trainer = poisoned(trainer_of(store), 6, once=False)
    result = trainer.fit(TRAIN, VALID)
    assert len(result.history) == 2 and math.isnan(result.history[1].score) and [d['value'] for d in result.decisions] == ['back to step 4', 'given up'] and result.best_epoch == 1
    off = poisoned(trainer_of(store, replace(BASE, recover=False)), 6)
    assert len(off.fit(TRAIN, VALID).history) == 2 and off.position.decisions[0]['value'] == 'given up'


def test_a_loss_that_jumps_is_seen_and_one_odd_batch_is_not():
    rng = np.random.default_rng(0)
    for _ in range(20):
        watch, healthy = SpikeWatch(), np.clip(.7 * .985 ** np.arange(400) + .1 * rng.exponential(size=400), .01, None)
        healthy[rng.integers(50, 400, 6)] = 8. # odd batches
        assert not any(watch.add(l) for l in healthy)
        assert any(watch.add(l) for l in 1.1 + .1 * rng.normal(size=8))
    noise = SpikeWatch()
    assert not any(noise.add(l) for l in .69 + .05 * rng.normal(size=500)), 'a loss that never fell has not broken'


def test_a_spike_sends_a_run_back(store):
    config = replace(BASE, epochs=20, lr=1e-2, schedule='constant', patience=None)
    trainer = trainer_of(store, config)
    def ruin(done, total): # weights that are ruined in epoch 17, where the loss is low
        if done == 66 and not trainer.position.recovered:
            with torch.no_grad():
                for p in trainer.engine.model.classifier.parameters(): p.mul_(-3)
            trainer.engine.set(lr=0)
    trainer.on_step = ruin
    real = Trainer._lr
    trainer._lr = lambda step: 1e-9 if step >= 66 and not trainer.position.recovered else real(trainer, step) # and nothing that repairs them
    result = trainer.fit(TRAIN, VALID)
    assert [d['value'] for d in result.decisions] in (['back to step 64'], ['back to step 68']) and 'the loss has broken' in result.decisions[0]['reason']
    calm = trainer_of(store, config).fit(TRAIN, VALID)
    assert not calm.decisions


def test_rows_that_break_by_themselves_are_named(store):
    trainer = trainer_of(store, replace(BASE, read_every=1))
    real = steps_module.batch_of
    engine = trainer.engine
    engine.model.bert.embeddings.word_embeddings.weight.data[199] = math.inf # a token that only some rows have
    engine.start = engine._copy()
    store_rows = [r for r in TRAIN if (store.tokens[store.offsets[r]:store.offsets[r + 1]] == 199).any()]
    assert 0 < len(store_rows) < 60
    with pytest.raises(FloatingPointError): trainer.fit(TRAIN, VALID)
    reason = trainer.position.decisions[0]['reason']
    named = eval(reason.split('rows ')[2].split(']')[0] + ']')
    assert named and set(named) <= set(store_rows)


def test_a_search_sees_a_rate_that_breaks(store):
    from optkit.trainer import fold_runner
    runner = fold_runner(make_engine(example_model(), BASE, HERE), store, [(TRAIN, VALID)], BASE)
    assert [math.isnan(s) for s in runner(dict(lr=1e30, warmup=0.), 0)] == [True]


# --- workers, and decisions

def test_a_store_in_host_memory_is_gathered_ahead_and_workers_are_measured(store, monkeypatch):
    "The device is said to be another one, so that batches go through the loader"
    trainer = trainer_of(store, replace(BASE, epochs=4))
    want = [e.train_loss for e in trainer_of(store, replace(BASE, epochs=4)).epochs(TRAIN, VALID)]
    used = []
    monkeypatch.setattr(trainer_module, 'choose_workers', lambda *a: base_module.Choice(2, 'measured'))
    real = Trainer._begin
    monkeypatch.setattr(Trainer, '_begin', lambda self, *a: (real(self, *a), self._gather_ahead(0))[0])
    trainer.on_epoch = lambda e: used.append(trainer.loader.workers)
    assert [e.train_loss for e in trainer.epochs(TRAIN, VALID)] == want
    assert [d['what'] for d in trainer.position.decisions] == ['workers', 'workers'] and used[:2] == [2, used[1]] and 'sequences/s' in trainer.position.decisions[1]['reason']


def test_decisions_are_pure_and_say_why():
    assert steadier(1e-3, 5000, 'x').value == (.5, 200) and steadier(1e-3, 1, 'x').value == (.5, 1)
    assert faster_workers({4: 100., 0: 99.}).value == 0 and '4 workers 100 sequences/s' in faster_workers({4: 100., 0: 99.}).reason


def test_a_failure_is_written_to_the_progress(store, tmp_path, monkeypatch):
    trainer = trainer_of(store, folder=tmp_path)
    monkeypatch.setattr(trainer.engine, 'step', lambda *a: (_ for _ in ()).throw(RuntimeError('a broken kernel')), raising=False)
    with pytest.raises(RuntimeError): trainer.fit(TRAIN, VALID)
    assert (read_progress(tmp_path).state, read_progress(tmp_path).note) == ('failed', 'RuntimeError: a broken kernel')
