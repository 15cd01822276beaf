"The rows of the ladder for cards that are not here, and a ladder on this machine that sees planted faults"
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import transformers

from optkit import build as build_module
from optkit import ladder as ladder_module
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.cards import GPU, gpu_table, known_gpu
from optkit.hardware import hardware_with
from optkit.ladder import AGAIN, BASELINE, default_rungs, ladder_configs, loss_of, measure_ladder, Rung, without_dropout
from optkit.precision import choose_precision
from optkit.config import TrainConfig
from optkit.build import make_engine

torch.set_num_threads(1)
HERE = hardware_with(None)
BASE = TrainConfig(effective_batch=16, lr=5e-3, precision='fp32')
NAMES = dict(bf16='+ BF16 autocast', fp16='+ FP16 autocast, scaled', tf32='+ TF32 on top', zero='+ zero_grad to None', fused='+ fused AdamW', pad='+ pad to the longest',
             sort='+ sorted micro-batches', compile='+ torch.compile')
MODERN, OLD = ['bf16', 'tf32', 'zero', 'fused', 'pad', 'sort', 'compile'], ['fp16', 'zero', 'fused', 'pad', 'sort', 'compile']


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(96), word_tokenizer(), 48, progress=False)


def cpu_with(*flags): return replace(HERE, cpu=replace(HERE.cpu, flags=frozenset(flags)))


# --- rows for each card

@pytest.mark.parametrize('card, rows', [('RTX 3090', MODERN), ('RTX 4090', MODERN), ('RTX 5090', MODERN), ('A100 PCIe 40GB', MODERN), ('H100 SXM', MODERN), ('H200', MODERN),
                                        ('B200', MODERN), ('L4', MODERN), ('T4', OLD), ('V100', OLD)])
def test_the_rows_of_a_card(card, rows):
    rungs = default_rungs(hardware_with(known_gpu(card)), 32, 24)
    assert [r.name for r in rungs] == [NAMES[r] for r in rows]
    assert [r.name for r in default_rungs(hardware_with(known_gpu(card)), 32, 24, compiled=False)] == [NAMES[r] for r in rows[:-1]]
    assert [r.name for r in default_rungs(hardware_with(known_gpu(card)), 1, 1)] == [NAMES[r] for r in rows if r != 'sort']


def test_the_rows_of_a_machine_without_a_card():
    plain = ['zero', 'fused', 'pad', 'sort']
    assert [r.name for r in default_rungs(cpu_with(), 32, 32)] == [NAMES[r] for r in plain]
    assert [r.name for r in default_rungs(cpu_with('amx_bf16'), 32, 32, compiled=True)] == [NAMES[r] for r in ['bf16', *plain, 'compile']]
    broken = replace(cpu_with(), gpu=replace(known_gpu('H100 SXM'), usable=False, problem='no kernel image'))
    assert [r.name for r in default_rungs(broken, 32, 32)] == [NAMES[r] for r in plain]


MACHINES = {**{name: hardware_with(gpu) for name, gpu in gpu_table().items()}, 'none': cpu_with(), 'none, with bf16': cpu_with('avx512_bf16'), 'an Apple GPU': replace(HERE, mps=True),
            'GTX 1080': hardware_with(GPU('NVIDIA GeForce GTX 1080', 'Pascal', (6, 1), 8 * 2**30)), 'unknown': hardware_with(GPU('Something'))}

@pytest.mark.parametrize('name', MACHINES)
def test_every_row_can_run_on_its_machine(name):
    for config in ladder_configs(TrainConfig(), default_rungs(MACHINES[name], 16, 16)).values():
        precision = choose_precision(MACHINES[name], prefer=config.precision, tf32=config.tf32)
        assert precision.compute.value == config.precision and precision.tf32.value == config.tf32


def test_a_job_on_the_fast_engine_has_a_ladder_on_a_gpu():
    "Its rows start from plain steps: what the fast engine compiles itself would contradict the last one"
    configs = ladder_configs(TrainConfig(fast=True, graphs=True), default_rungs(hardware_with(known_gpu('H200')), 16, 16))
    assert [*configs][-1] == NAMES['compile'] and not any(c.fast for c in configs.values())


@pytest.mark.parametrize('name', MACHINES)
def test_each_row_changes_only_what_it_says(name):
    rungs = default_rungs(MACHINES[name], 32, 24)
    configs = ladder_configs(replace(BASE, seed=7, lr=3e-4), rungs)
    assert [*configs] == ['baseline', *(r.name for r in rungs)]
    baseline = configs['baseline'].values()
    assert {k: baseline[k] for k in BASELINE} == BASELINE and {k: v for k, v in baseline.items() if k not in BASELINE} == {k: v for k, v in replace(BASE, seed=7, lr=3e-4).values().items() if k not in BASELINE}
    expected = dict(baseline)
    for rung in rungs:
        before, here = dict(expected), expected | rung.changes
        assert configs[rung.name].values() == here != before, f'{rung.name} changes nothing'
        if not rung.aside: expected = here  # the rows after a row aside do without it
    assert all(r.label in ('exact', 'rounding') for r in rungs)


def test_sorted_micro_batches_are_at_least_two_and_fit():
    for effective, physical in ((32, 24), (32, 64), (8, 3), (2, 9), (17, 17)):
        rung = next(r for r in default_rungs(cpu_with(), effective, physical) if 'sorted' in r.name)
        chosen = rung.changes['physical_batch']
        assert 1 <= chosen <= physical and -(-effective // chosen) >= 2


def test_the_claims_are_those_of_the_reports():
    import csv
    from pathlib import Path
    claims = Path(__file__).parents[1] / 'shared' / 'claims.csv'
    known = {r['id'] for r in csv.DictReader(claims.open())} if claims.is_file() else None
    used = {r.claim for name in MACHINES for r in default_rungs(MACHINES[name], 32, 24) if r.claim}
    assert used == {'bf16', 'tf32_on_bf16', 'zero_grad_none', 'fused_adamw_step', 'length_bucketing', 'compile'} and (known is None or used <= known)


# --- dropout

@pytest.mark.parametrize('fail', [False, True])
def test_dropout_comes_back(fail):
    model = example_model(dropout=.3)
    model.dropout.p = .5
    before = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    try:
        with without_dropout(model):
            assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.}
            if fail: raise KeyboardInterrupt
    except KeyboardInterrupt: pass
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == before and len(set(before)) == 2


SMALL = dict(vocab_size=204, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
FAMILIES = {'Bert': SMALL, 'Roberta': dict(SMALL, max_position_embeddings=40), 'Electra': dict(SMALL, embedding_size=32), 'DebertaV2': dict(SMALL, attention_probs_dropout_prob=.1),
            'DistilBert': dict(vocab_size=204, dim=32, n_layers=1, n_heads=2, hidden_dim=64), 'Albert': dict(SMALL, embedding_size=32, hidden_dropout_prob=.1, attention_probs_dropout_prob=.1),
            'MPNet': SMALL, 'ModernBert': dict(SMALL, attention_dropout=.1, mlp_dropout=.1, embedding_dropout=.1, pad_token_id=0),
            'Bart': dict(vocab_size=204, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64),
            'Llama': dict(SMALL, attention_dropout=.2, pad_token_id=0), 'GPT2': dict(vocab_size=204, n_embd=32, n_layer=1, n_head=2, pad_token_id=0)}

@pytest.mark.parametrize('family', [f if f in ('ModernBert', 'Bart', 'Llama') else f for f in FAMILIES])
def test_no_family_keeps_dropout(family):
    "Two passes in training mode give the same; a dropout that is no module would make the loss comparison noise"
    torch.manual_seed(0)
    model = getattr(transformers, f'{family}ForSequenceClassification')(getattr(transformers, f'{family}Config')(**FAMILIES[family])).train()
    batch = dict(input_ids=torch.randint(5, 200, (4, 12)), attention_mask=torch.ones(4, 12, dtype=torch.long))
    batch['input_ids'][:, -1] = 2
    run = lambda: model(**batch).logits.detach()
    assert not torch.equal(run(), run()), 'dropout is on'
    with without_dropout(model): assert torch.equal(run(), run())
    assert not torch.equal(run(), run())


# --- a measured ladder

QUICK = dict(budget_s=0., min_rounds=6, burn_in=1)

def rungs_here(): return default_rungs(cpu_with(), 16, 8)

def measured(store, rungs, model=None, **kwargs):
    return measure_ladder(model or example_model(), store, np.arange(96), rungs, BASE, HERE, loss_steps=24, cycle=4, progress=False, **QUICK, **kwargs)


def state(model): return {k: v.clone() for k, v in model.state_dict().items()}, [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]


def test_a_ladder_puts_the_model_back_and_its_rows_train_alike(store):
    model = example_model(dropout=.2)
    before = state(model)
    ladder = measured(store, rungs_here(), model)
    after = state(model)
    assert all(torch.equal(v, after[0][k]) for k, v in before[0].items()) and before[1] == after[1] and set(before[1]) == {.2} and all(p.grad is None for p in model.parameters())
    names = [r.variant for r in ladder.records]
    assert names == ['baseline', AGAIN, *(r.name for r in rungs_here())]
    for r in ladder.records:
        assert abs(r.loss['difference']) < 1e-4 and r.loss['value'] > .1 and r.baseline == 'baseline' and r.ratio['low'] <= r.ratio['p50'] <= r.ratio['high'] and r.peak_bytes is None
        assert r.padded_tokens_per_s['p50'] >= r.tokens_per_s['p50'] > 0 and r.samples_per_s['p50'] == pytest.approx(16 / r.seconds['p50'], rel=.5)
    first = ladder.records[0]
    assert first.ratio == dict(p50=1., low=1., high=1.) and first.ratio_before is None and ladder.records[1].ratio_before is None
    padded = {r.variant: r.padded_tokens_per_s['p50'] / r.samples_per_s['p50'] for r in ladder.records}
    assert padded['baseline'] == pytest.approx(48, rel=.01) and padded['+ sorted micro-batches'] < padded['+ pad to the longest'] <= 48.01
    assert '16 rows an optimizer step, at most 48 tokens' in repr(ladder) and all(n in repr(ladder) for n in names)


def test_the_ratio_to_the_row_before_is_against_that_row(store):
    ladder = measured(store, rungs_here())
    seconds, names = ladder.comparison.seconds, [r.variant for r in ladder.records]
    for n, r in enumerate(ladder.records[2:], 2):
        before = 'baseline' if n == 2 else names[n - 1]
        assert r.ratio_before == asdict(ladder.comparison.ratio(r.variant, before)) and r.ratio == asdict(ladder.comparison.ratio(r.variant, 'baseline'))
        assert np.median(np.asarray(seconds[before]) / np.asarray(seconds[r.variant])) == pytest.approx(r.ratio_before['p50'], rel=.3)


def drop(micro): return micro[:-1] if len(micro) > 1 else micro
def repeat(micro): return micro + micro[:1]


@pytest.mark.parametrize('fault', [drop, repeat])
def test_the_loss_comparison_sees_a_planted_fault(store, monkeypatch, fault):
    real = build_module.make_engine
    def make(model, config, hardware):
        made = real(model, config, hardware)
        if config.layout.name == 'sorted':
            step = made.step
            made.step = lambda store, micro: step(store, fault(micro))
        return made
    monkeypatch.setattr(ladder_module, 'make_engine', make)
    found = {r.variant: abs(r.loss['difference']) for r in measured(store, rungs_here()).records}
    assert found['+ sorted micro-batches'] > 1e-3 and all(d < 1e-4 for n, d in found.items() if n != '+ sorted micro-batches')


@pytest.mark.parametrize('changes', [dict(lr=2e-3), dict(label_smoothing=.2), dict(effective_batch=8)], ids=str)
def test_the_loss_comparison_sees_a_row_that_changes_training(store, changes):
    ladder = measured(store, (Rung('+ something', changes, None, 'changes training'),))
    assert abs(ladder.records[-1].loss['difference']) > 1e-3 and ladder.records[-1].label == 'changes training'


@pytest.mark.parametrize('exc', [ValueError, KeyboardInterrupt])
def test_the_model_is_put_back_after_a_failure_too(store, monkeypatch, exc):
    model = example_model(dropout=.2)
    before = state(model)
    def fail(*args, **kwargs): raise exc('planted')
    monkeypatch.setattr(ladder_module, 'compare', fail)
    with pytest.raises(exc): measured(store, rungs_here(), model)
    after = state(model)
    assert before[1] == after[1] and all(torch.equal(v, after[0][k]) for k, v in before[0].items())


def test_the_loss_is_that_of_a_plain_loop(store):
    config = replace(BASE, layout='full')
    found, peak = loss_of(make_engine(example_model(dropout=.3), config, HERE), store, np.arange(96), config, 8)
    model = example_model(dropout=0.).train()
    optimizer = torch.optim.AdamW([dict(params=[p for p in model.parameters() if p.ndim > 1], weight_decay=.01), dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.)], lr=5e-3)
    table, tokenizer, losses = example_table(96), word_tokenizer(), []
    for epoch in (1, 2):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch)).tolist()
        for n in range(0, 96, 16):
            rows = order[n:n + 16]
            batch = tokenizer([table.texts[r] for r in rows], [table.pairs[r] for r in rows], truncation=True, max_length=48, padding='max_length', return_tensors='pt')
            loss = torch.nn.functional.cross_entropy(model(**batch).logits, torch.as_tensor(table.labels[rows]))
            optimizer.zero_grad(); loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            optimizer.step()
            losses.append(loss.item())
    assert found == pytest.approx(np.mean(losses[4:8]), abs=1e-4) and peak is None
