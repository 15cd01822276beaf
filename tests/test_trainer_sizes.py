"Sizes that are measured for a layout: a budget of tokens for packs, rows by length for sorted rows, more rows in evaluation; and what is made of them"
import json, logging, math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from optkit import build as build_module
from optkit.batch_finder import BatchPlan, Probe
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import Layout, steps
from optkit.models import example_model
from optkit.engine import Engine
from optkit.hardware import detect, hardware_with
from optkit.config import TrainConfig
import optkit.sizes
from optkit.build import make_engine, plan_sizes
from optkit.trainer import fold_runner, Trainer, trial_config, with_rows

torch.set_num_threads(1)
HERE = hardware_with(None)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(96, median=10), word_tokenizer(), 48, progress=False)


def engine_of(**config): return make_engine(example_model(dropout=0.), TrainConfig(precision='fp32', **config), HERE)


class Card(Engine):
    "Runs out of memory where a micro-batch, or a batch in evaluation, has more tokens than it holds"
    room = 400; seen = ()

    def _backward(self, store, micro, weight):
        if max(m.tokens for m in micro) > self.room: raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')
        self.seen = (*self.seen, *((len(m.rows), m.pad_to) for m in micro))
        return super()._backward(store, micro, weight)

    def predict(self, store, rows, batch=64, on_device=True):
        for part in np.array_split(np.asarray(rows), math.ceil(len(rows) / batch)):
            if len(part) * int(store.lengths[part].max()) > 4 * self.room: raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')
        return super().predict(store, rows, batch, on_device)


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(build_module, 'Engine', Card)
    return engine_of()


# --- the cut by length

@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(1, 20), st.lists(st.tuples(st.integers(1, 64), st.integers(0, 30)), max_size=4))
def test_a_table_cuts_each_step_into_what_fits_at_its_length(lengths, physical, table):
    lengths, table = np.array(lengths), [(tokens, physical + more) for tokens, more in table]
    parts = Layout('sorted', physical, table=table or None).cut(np.arange(len(lengths)), lengths, 64)
    assert sorted(np.concatenate([m.rows for m in parts])) == list(range(len(lengths))), 'each row once'
    assert len(parts) <= math.ceil(len(lengths) / physical)
    for m in parts: assert len(m.rows) <= next((rows for tokens, rows in sorted(table) if m.pad_to <= tokens), physical) and m.pad_to >= lengths[m.rows].max()
    assert all(a.pad_to <= b.pad_to for a, b in zip(parts, parts[1:]))
    if not table: assert parts == Layout('sorted', physical).cut(np.arange(len(lengths)), lengths, 64)


def test_steps_have_the_same_samples_with_a_table(store):
    plain, cut = (list(steps(store, np.arange(96), 24, layout=Layout(rows=4, table=t))) for t in (None, ((16, 12),)))
    assert [set(a.rows) for a in plain] == [set(b.rows) for b in cut] and sum(map(len, cut)) < sum(map(len, plain))
    padded = list(steps(store, np.arange(96), 24, layout=Layout(rows=4, table=((16, 12),)).named('padded')))
    assert all(len(m.rows) <= 4 for step in padded for m in step), 'only rows in order of their length'


# --- what is measured

def test_sorted_rows_get_a_table_where_a_step_has_to_be_cut(card, store):
    before = {k: v.clone() for k, v in card.model.state_dict().items()}
    config, decisions, plan = plan_sizes(card, store, TrainConfig(effective_batch=24))
    said = dict(decisions)
    longest = plan.longest
    assert config.physical_batch == plan.physical <= 400 // longest and plan.accumulation > 1
    assert config.batch_table and all(rows * tokens <= 400 and (rows == 24 or (rows + 1) * tokens > 400) for tokens, rows in config.batch_table)
    assert config.eval_batch > config.physical_batch and 'forward only' in said['rows at once in evaluation'].reason
    assert list(said) == ['physical batch', 'rows by length', 'rows at once in evaluation'] and all(c.reason for c in said.values())
    assert all(torch.equal(v, before[k]) for k, v in card.model.state_dict().items())


def test_a_step_that_fits_needs_no_table(store):
    config, decisions, plan = plan_sizes(engine_of(), store, TrainConfig(effective_batch=16))
    assert (config.physical_batch, config.batch_table, plan.accumulation) == (16, None, 1) and 'whole step' in dict(decisions)['rows by length'].reason


def test_packs_get_a_budget_and_no_rows(card, store):
    config, decisions, _ = plan_sizes(card, store, TrainConfig(effective_batch=24, layout='packed'))
    assert config.physical_batch is None and config.batch_table is None
    assert 400 - 64 < config.max_tokens <= 400 and config.max_tokens % 64 == 0 and [w for w, _ in decisions] == ['tokens of a pack', 'rows at once in evaluation']


@pytest.mark.parametrize('layout, length', [('full', 48), ('padded', None)])
def test_padded_rows_are_measured_as_they_are_padded(card, store, layout, length):
    config, decisions, plan = plan_sizes(card, store, TrainConfig(effective_batch=24, layout=layout))
    assert plan.longest == (length or plan.longest) and config.physical_batch * plan.longest <= 400 and [w for w, _ in decisions] == ['physical batch', 'rows at once in evaluation']


def test_what_is_given_is_not_measured(store, monkeypatch):
    for name in ('plan_batch', 'plan_table', 'plan_tokens'): monkeypatch.setattr(optkit.sizes, name, lambda *a, **k: pytest.fail('measured'))
    for config in (TrainConfig(physical_batch=4), TrainConfig(layout='packed', max_tokens=128)):
        found, decisions, plan = plan_sizes(engine_of(), store, config, limit=16)
        assert replace(found, eval_batch=64) == config and plan is None and found.eval_batch == 16


def test_the_fast_engine_sizes_itself(store, monkeypatch):
    for module, name in ((optkit.sizes, 'plan_batch'), (optkit.sizes, 'plan_evaluation')): monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail('measured'))
    config = TrainConfig(fast=True)
    found, decisions, _ = plan_sizes(engine_of(fast=True), store, config)
    assert found == config and 'shapes of its own' in decisions[0][1].reason


# --- what the trainer makes of it

def test_a_planned_run_keeps_the_decisions_and_learns_the_same(card, store, caplog):
    rows, config = np.arange(96), TrainConfig(effective_batch=24, epochs=2, lr=1e-3, precision='fp32', metric='loss')
    trainer = Trainer(card, store, config)
    trainer.plan()
    card.seen = ()
    with caplog.at_level(logging.WARNING, 'optkit'): result = trainer.fit(rows[:72], rows[72:])
    assert [d['what'] for d in result.decisions] == ['physical batch', 'rows by length', 'rows at once in evaluation'] and 'rows by length' in caplog.text
    assert any(n > trainer.config.physical_batch for n, _ in card.seen), 'short rows were more at once'
    assert all(n * length <= 400 for n, length in card.seen)
    plain = Trainer(engine_of(), store, replace(config, physical_batch=4)).fit(rows[:72], rows[72:])
    assert [e.train_loss for e in result.history] == pytest.approx([e.train_loss for e in plain.history], rel=1e-4)


def test_a_table_that_does_not_fit_is_given_up_first(card, store):
    config = TrainConfig(effective_batch=24, epochs=2, physical_batch=8, batch_table=((16, 24), (48, 24)), metric='loss', precision='fp32')
    trainer = Trainer(card, store, config)
    result = trainer.fit(np.arange(72), np.arange(72, 96))
    assert [(d['what'], d['value']) for d in result.decisions][0] == ('physical batch', '8') and 'whatever their length' in result.decisions[0]['reason']
    assert trainer.engine.layout.table is None and result.steps == 6
    again = Trainer(card, store, config).fit(np.arange(72), np.arange(72, 96))
    assert not again.decisions, 'the next run begins without it'


def test_a_trial_with_a_smaller_physical_batch_drops_the_table():
    config = TrainConfig(physical_batch=8, batch_table=((16, 24),))
    for change in (replace, lambda c, **changes: trial_config(c, changes)):
        assert change(config, physical_batch=4).layout == Layout(rows=4)
        for changes in ({}, dict(physical_batch=8), dict(lr=1e-3)): assert change(config, **changes).batch_table == ((16, 24),)
    with pytest.warns(DeprecationWarning, match='dataclasses.replace'): assert with_rows(config, dict(physical_batch=4)).batch_table is None


def test_a_table_is_kept_as_json_and_checked():
    config = TrainConfig(batch_table=((16, 24), (32, 8)))
    assert TrainConfig.from_json(config.to_json()) == config and hash(config)
    for bad, said in ((dict(batch_table=((16, 0),)), 'pairs of tokens and rows'), (dict(batch_table=(16, 24)), 'pairs'), (dict(batch_table=((16, 24),), layout='padded'), "batch_table .Layout.table. is for the layout 'sorted' or 'grouped', not for 'padded'"), (dict(batch_table=()), 'pairs')):
        with pytest.raises(ValueError, match=said): TrainConfig(**bad)


def test_a_resumed_run_keeps_the_table(card, store, tmp_path):
    config = TrainConfig(effective_batch=24, epochs=2, physical_batch=4, batch_table=((16, 24),), metric='loss', precision='fp32', save_every=1)
    trainer = Trainer(card, store, config, folder=tmp_path, on_step=lambda n, _: n == 2 and trainer.stop())
    trainer.fit(np.arange(72), np.arange(72, 96))
    card.seen = ()
    resumed = Trainer(card, store, config, folder=tmp_path)
    resumed.fit(np.arange(72), np.arange(72, 96), resume=True)
    assert any(n > 4 for n, _ in card.seen) and resumed.position.done == 6
