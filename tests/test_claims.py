"The ledger of claims: verdicts, planner, reasons, a run that is killed and goes on, files that are no ledger"
import base64, hashlib, json, os, re, subprocess, sys, time
from dataclasses import replace

import numpy as np
import pytest
import torch

from optkit import base as base_module
from optkit import bench as bench_module
from optkit import ladder as ladder_module
from optkit import experiments as experiments_module
from optkit import ledger as ledger_module
from optkit import optimize as optimize_module
from optkit import page as page_module
from optkit import records as records_module
from optkit import workloads as workloads_module
from optkit import claims as module
from optkit.claims import all_claims, claim_verdict, judge, loss_verdict, one_verdict, VERDICTS
from optkit.workloads import bench_of, made_up_store, same_sides, size_step, step_flops, timed_sides, workload_problem
from optkit.counted import epochs_to_reach, hours_with_compile, training_bytes
from optkit.experiments import break_even, EXPERIMENTS, judged_count, switch_sides, ON_TOP
from optkit.ledger import (
    add_pass, best_order, check_same_run, expected_cost, ledger_path, new_row, next_work, why_not_applicable, read_ledger,
    recorded, reserve_of, share_of, with_record, withdraw, Work)
from optkit.bench import (
    agreement, attempt, bench, deadline, figures, ledger_page, ledger_summary, LostDevice, run_plan, settle,
    TimeOver)
from optkit.optimize import choose_setting, optimize
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.sizes import training_flops
from optkit.cards import known_gpu
from optkit.hardware import detect, hardware_with
from optkit.ladder import default_rungs
from optkit.claims import claims as claim_table
from optkit.page import roofline_figure
from optkit.records import LABELS, load_records
from optkit.config import TrainConfig
from optkit.ladder import CLAIM_SWITCHES

torch.set_num_threads(1)
CPU, H100, T4 = hardware_with(None), hardware_with(known_gpu('H100 SXM')), hardware_with(known_gpu('T4'))
NO_BF16 = replace(CPU, cpu=replace(CPU.cpu, flags=frozenset()))
far = lambda low, p50, high: dict(p50=p50, low=low, high=high)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(96), word_tokenizer(), 32, progress=False)

@pytest.fixture
def tiny(store): return settle(bench_of(example_model(), store, detect(), 8, loss_steps=2))

def fresh(): return dict(rows=[new_row(c) for c in all_claims().values()], ladder=None, settings={}, provenance=dict(card='cpu'))

def saved(path, **changes):
    data = dict(kind=ledger_module.LEDGER_KIND, format=ledger_module.FORMAT, **fresh()) | changes
    path.write_text(json.dumps(data))
    return data


# --- the rows

def test_every_claim_of_the_table_has_an_experiment_and_a_label():
    table, known = claim_table(), all_claims()
    assert list(known) == list(table.index) and len(known) == 47
    for i, claim in known.items():
        assert claim.kind in EXPERIMENTS and claim.label in LABELS and claim.title
        assert claim.claimed == table.loc[i, 'claimed'] and claim.scope == table.loc[i, 'scope']
        assert (claim.low is None) == bool(np.isnan(table.loc[i, 'low'])) and (claim.high is None) == bool(np.isnan(table.loc[i, 'high']))
    assert {c.id for c in known.values() if c.kind in ('switch', 'compile')} <= set(CLAIM_SWITCHES) | {'all_3090', 'all_5090'}
    assert set(ON_TOP) <= set(known)


def test_a_text_that_contradicts_itself_is_split():
    claim = all_claims()['tf32']
    assert [s[0] for s in claim.statements] == ['20-30%', '2-3x']
    assert [v['verdict'] for v in judge(claim, far(1.8, 1.82, 1.84))] == ['holds', 'smaller'] and one_verdict(judge(claim, far(1.8, 1.82, 1.84))) == 'split'
    assert one_verdict(judge(claim, far(2.2, 2.3, 2.4))) == 'holds' and one_verdict(judge(claim, None)) == 'not applicable'
    for claim in all_claims().values():
        for _, low, high, _ in claim.statements: assert low is None or high is None or low <= high


def test_statements_about_sizes_are_judged_by_those_sizes():
    claim, pairs = all_claims()['batch_size'], {'12 to 16': far(1.06, 1.07, 1.08), '8 to 12': far(1.01, 1.02, 1.03)}
    found = {v['claimed']: v['verdict'] for v in judge(claim, far(1.6, 1.7, 1.8), ((8,), (12,), (16,)), pairs)}
    assert found == {'5-10% (12 to 16)': 'holds', '15-20% (8 to 12)': 'smaller', '50-100% (16 to 32)': 'not applicable', '9-13% (23 to 26)': 'not applicable'}


# --- verdicts

@pytest.mark.parametrize('interval, low, high, said', [
    ((1.2, 1.25, 1.3), 1.1, 1.4, 'holds'), ((1.02, 1.1, 1.12), 1.1, 1.4, 'holds'), ((1.5, 1.6, 1.7), 1.1, 1.4, 'holds'), ((1.02, 1.03, 1.05), 1.1, 1.4, 'smaller'), ((.99, 1., 1.01), 1.1, 1.4, 'none'),
    ((.9, .95, .99), 1.1, 1.4, 'harmful'), ((.9, 1.1, 1.3), 1.1, 1.4, 'undecided'), ((1.33, 1.36, 1.37), 1.4, 1.4, 'holds'), ((1.2, 1.25, 1.3), 1.4, 1.4, 'smaller'),
    ((.995, 1., 1.01), 1., 1.05, 'holds'), ((.946, .979, .993), 1., 1.05, 'harmful'), ((.997, .998, .9999), 1., 1.05, 'harmful'), ((.985, .99, 1.), 1., 1.05, 'holds'), ((.96, .97, .985), 1.02, 1.02, 'harmful'), ((.99, 1., 1.01), 1.02, 1.02, 'undecided'), ((.96, .97, .98), .95, 1.05, 'holds'), ((.8, .85, .9), 1., 1.05, 'harmful'), ((.8, 1., 1.2), 1., 1.05, 'undecided'), ((.99, 1., 1.01), 1., None, 'none'), ((1.1, 1.2, 1.3), 1., None, 'holds'),
    ((.75, .8, .85), .7, .9, 'holds'), ((.5, .55, .6), .7, .9, 'harmful'), ((.93, .95, .97), .7, .9, 'smaller'), ((.99, 1., 1.01), .7, .9, 'none'), ((.8, .95, 1.1), .7, .9, 'undecided'), ((1.1, 1.2, 1.3), .7, .9, 'none')])
def test_verdicts(interval, low, high, said):
    found = claim_verdict(far(*interval), low, high)
    assert found.value == said and found.value in VERDICTS and f'{interval[1]:.3g}' in found.reason


def test_no_factor_no_verdict():
    assert claim_verdict(far(1., 1.1, 1.2), None, None).value is None and claim_verdict(None, 1.1, 1.2).value == 'not applicable'
    row = add_pass(new_row(all_claims()['dora']), all_claims()['dora'], 'alone', dict(ratios=[.6] * 8), 1.)
    assert row['ratio'] and row['verdict'] is None


def test_few_rounds_are_no_verdict():
    claim = all_claims()['bf16']
    row = add_pass(new_row(claim), claim, 'alone', dict(ratios=[1.7, 1.7]), 1.)
    assert row['verdict'] == 'undecided' and 'too few' in row['verdicts'][0]['reason']
    assert add_pass(row, claim, 'alone', dict(ratios=[1.7, 1.71, 1.69, 1.7]), 1.)['verdict'] == 'holds'


def test_loss_verdicts():
    assert [loss_verdict(d, .01, 'rounding').value for d in (0., 1e-9, .009, -.009, .02, float('nan'))] == ['same', 'same', 'within the spread', 'within the spread', 'differs', 'differs']
    assert 'labelled exact' in loss_verdict(.005, .01, 'exact').reason and 'labelled exact' not in loss_verdict(.005, .01, 'rounding').reason


# --- what cannot run here

def test_reasons_by_machine():
    reasons = lambda hw, **facts: {i: why_not_applicable(c, hw, **facts) for i, c in all_claims().items()}
    assert not any(reasons(H100).values())
    without = {i for i, said in reasons(CPU).items() if said}
    assert without == {'tf32', 'tf32_on_bf16', 'cudnn_benchmark', 'pin_memory', 'safety_margin', 'vram_5090', 'cuda_graphs', 'compile_max_autotune'}
    assert {i for i, said in reasons(T4).items() if said} == {'tf32', 'tf32_on_bf16', 'bf16'}
    missing = reasons(H100, packages=dict(torchao='not installed', bitsandbytes='not installed', peft='not installed'), attentions=('eager',), model='Deberta')
    assert {i for i, said in missing.items() if said} == {'adamw_8bit', 'dora', 'sdpa_step', 'flash_step'} and 'Deberta' in missing['sdpa_step']
    assert not reasons(H100, packages=dict(torchao='not installed'))['adamw_8bit'] and reasons(CPU, compiler=False)['compile']


def test_workloads_that_do_not_fit():
    assert 'needs a GPU' in workload_problem('w1', CPU) and 'GB' in workload_problem('w3', hardware_with(known_gpu('RTX 3090'))) and 'expected one of' in workload_problem('w9', H100)
    assert not any(workload_problem(w, H100) for w in ('w1', 'w2', 'w3', 'mine'))


# --- the planner

def test_planner_in_turns_cheap_first():
    works = [Work('a', 'alone', 5.), Work('b', 'alone', 2.), Work('ladder', 'ladder', 1.), Work('a', 'top', 1.), Work('d', 'alone', .1, needs=('a',)), Work('z', 'alone', 9., first=True)]
    order, left = [], 100.
    while (work := next_work(works, left).value) and work.passes == 0:
        order.append((work.id, work.view))
        works = [replace(w, passes=w.passes + 1) if w is work else w for w in works]
        left -= work.cost_s
    assert order == [('z', 'alone'), ('b', 'alone'), ('a', 'alone'), ('d', 'alone'), ('ladder', 'ladder'), ('a', 'top')]


def test_a_row_comes_first_only_where_it_leaves_time_for_others():
    works = [Work('a', 'alone', 10., first=True), Work('b', 'alone', 2.)]
    assert (next_work(works, 61.).value.id, next_work(works, 59.).value.id) == ('a', 'b')


def test_no_budget_only_where_nothing_fits():
    works = [Work('a', 'alone', 50.), Work('b', 'alone', 3.)]
    assert next_work(works, 10.).value.id == 'b'
    assert next_work(works, 2.).reason.startswith('no budget: 2 s are left') and next_work(works, 0.).reason == 'no budget: all of it is spent'
    assert next_work([replace(w, passes=1, final=True) for w in works], 10.).reason.startswith('everything')
    assert 'waits' in next_work([Work('d', 'alone', .1, needs=('c',))], 10.).reason


def test_later_passes_go_to_the_widest_interval_until_it_is_narrow():
    works = [Work('a', 'alone', 1., 1, .05), Work('b', 'alone', 1., 1, .2), Work('c', 'alone', 1., 1, .005)]
    assert next_work(works, 10.).value.id == 'b'
    assert next_work([replace(w, width=.005) for w in works], 10.).value is None


def test_rows_alone_leave_room_for_the_other_views():
    works = [Work('a', 'alone', 10.), Work('b', 'alone', 50.), Work('ladder', 'ladder', 20.), Work('a', 'top', 8.), Work('b', 'top', 30.)]
    order, left, start = [], 100., 100.
    assert reserve_of(works, 100., 100., rows=2) == 28. and reserve_of(works, 10., 10., rows=0) == 0. and reserve_of(works, 100., 85., rows=2) == 20. and reserve_of(works, 100., 70., rows=2) == 8. and reserve_of(works, 100., 65., rows=2) == 0.
    while (work := next_work(works, left, reserve_s=reserve_of(works, start, left, rows=2)).value) and work.passes == 0:
        order.append((work.id, work.view))
        works = [replace(w, passes=1) if w is work else w for w in works]
        left -= work.cost_s
    assert order == [('a', 'alone'), ('b', 'alone'), ('ladder', 'ladder'), ('a', 'top')]
    assert next_work([replace(w, passes=w.view != 'alone', final=w.view != 'alone') for w in works[1:2]], 50., reserve_s=0.).value.id == 'b', 'what the other views do not need goes back'


@pytest.mark.parametrize('budget', [5, 60, 480, 4000])
def test_a_simulated_run_spends_its_budget_and_no_more(budget):
    random, spent, works = np.random.default_rng(budget), 0., [Work(f'r{n}', 'alone', c) for n, c in enumerate((.1, 2., 2., 5., 5., 100.))]
    while (work := next_work(works, budget - spent).value) is not None:
        spent += (took := work.cost_s * random.uniform(.8, 1.))
        works = [replace(w, passes=w.passes + 1, width=.3 / (w.passes + 1), cost_s=max(took, .01)) if w is work else w for w in works]
    assert spent <= budget and (budget < 105 or all(w.passes for w in works))


def test_share_and_costs():
    assert share_of(180, 60) == 1.5 and share_of(1, 60) == 1. and share_of(1e6, 60) == 12.
    cost = lambda i, kind, **k: expected_cost(i, kind, 'alone', **dict(step_s=.3, share_s=2., cuda=True, loss_steps=8) | k)
    assert cost('profile', 'profile') < 1 < cost('bf16', 'switch') < cost('compile', 'compile') < cost('compile_max_autotune', 'compile')
    assert cost('single_item', 'item', step_s=2.) == pytest.approx(workloads_module.STEPS_A_ROUND * 2. * 3 * (1.4 * page_module.ENOUGH + 4)), 'a round of three sides holds a cycle of steps on a GPU'
    assert cost('bf16', 'switch', step_s=1.) > cost('bf16', 'switch') and cost('all_5090', 'switch', warm=True) < cost('all_5090', 'switch')
    assert ledger_module.ladder_cost(.3, 2., True, 8) < ledger_module.ladder_cost(.3, 2., True, 8, True, True) < ledger_module.ladder_cost(.3, 2., True, 8, True)


def test_ladder_in_the_best_order():
    rungs = default_rungs(H100, 32, 32)
    names = [r.claim or 'padded' for r in best_order(rungs, dict(bf16=2., padded=3., zero_grad_none=1.2, fused_adamw_step=1.1, tf32_on_bf16=1., compile=9.))]
    assert names == ['padded', 'bf16', 'zero_grad_none', 'fused_adamw_step', 'tf32_on_bf16', 'length_bucketing', 'compile']
    assert best_order((ledger_module.FAST_RUNG, *rungs), {})[-1] is ledger_module.FAST_RUNG


def test_a_ladder_says_what_it_left_out_and_is_measured_again(tiny):
    data = fresh()
    works = lambda: [w for w in ledger_module.works_of(data, tiny, 1., set()) if w.view == 'ladder']
    assert works()[0].passes == 0
    data['ladder'] = dict(rows=[], left_out='torch.compile: about 300 s were needed, 100 s were left')
    assert works()[0].passes == 0
    data['ladder']['left_out'] = None
    assert works()[0].passes == 1 and works()[0].final


def test_a_ladder_for_real_with_a_fast_engine(tiny, monkeypatch):
    before = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    monkeypatch.setattr(ledger_module, 'default_rungs', lambda *a: (*default_rungs(CPU, 8, 8), ledger_module.FAST_RUNG))
    found = ledger_module.climb(tiny, fresh(), .4)
    last = found['rows'][-1]
    assert last['variant'] == ledger_module.FAST_RUNG.name and last['ratio']['p50'] > 0 and last['padded_tokens_per_s'] is None and abs(last['loss']['difference']) < 1e-4
    assert all(torch.equal(v, tiny.model.state_dict()[k]) for k, v in before.items()), 'the fast engine worked on a copy'


# --- counting

def test_counts():
    assert break_even(60., .3, .25) == 1200 and break_even(60., .3, .3) is None
    assert training_bytes(8e9, 8e9) == dict(weights=16e9, gradients=16e9, moments=32e9) and training_bytes(8e9, 1e6, moment=4)['moments'] == 8e6
    assert hours_with_compile(800, 1.15, 60, 2000) == pytest.approx(800 / 1.15 + 33.33, abs=.01)
    assert size_step(.01, 1e-6, 600, 512).value == (32, 512) and size_step(.4, 1e-3, 180, 512).value == (8, 32)


def test_flops_of_frozen_weights_lack_their_own_gradient():
    model, lengths = example_model(), np.array([10, 20])
    assert step_flops(model, lengths) == pytest.approx(training_flops(model, lengths))
    for p in model.bert.parameters(): p.requires_grad_(False)
    assert .6 < step_flops(model, lengths) / training_flops(model, lengths) < .72


def test_epochs_to_reach():
    class S: regret, spent = np.array([.5, .2, .1]), np.array([10, 20, 30])
    assert epochs_to_reach(S, .2) == (20, True) and epochs_to_reach(S, .05) == (30, False)


def test_made_up_rows_can_be_learnt():
    rows = made_up_store(64, 1000, 60, longest=90)
    share = np.array([np.mean(rows.tokens[a:b].numpy() >= 500) for a, b in zip(rows.offsets, rows.offsets[1:])])
    assert ((share > .5) == rows.labels.numpy().astype(bool)).mean() > .95
    causal = made_up_store(8, 1000, 20, longest=40, causal=True)
    ends = causal.offsets[1:] - 1
    assert (causal.labels[ends] == -100).all() and (causal.labels[:5] == causal.tokens[1:6]).all() and (causal.targets == causal.lengths - 1).all()


def test_the_two_sides_of_a_switch_differ_in_it_alone(tiny):
    for i, claim in all_claims().items():
        if claim.kind != 'switch' or why_not_applicable(claim, tiny.hardware): continue
        for top in (False, i in ON_TOP):
            without, with_ = switch_sides(tiny, claim, top)
            differ = {k for k, v in vars(without).items() if vars(with_)[k] != v}
            assert differ if i not in ('sdpa_step',) else True, i
            if not i.startswith('all_'): assert len(differ) == 1, (i, differ)


def test_two_sides_that_are_the_same_on_a_workload_are_not_timed(tiny, monkeypatch):
    "One rule for all switches: the settings differ, what they come to here does not"
    known, base, tiny.hardware = all_claims(), tiny.plain, NO_BF16
    same = lambda **changes: same_sides(tiny, base, replace(base, **changes))
    for i in (i for i, c in known.items() if c.kind == 'switch' and not why_not_applicable(c, tiny.hardware)):
        assert bool(same_sides(tiny, *switch_sides(tiny, known[i]))) == (i == 'sdpa_step'), i
    assert same(attention='sdpa') == 'the model has SDPA already' and not same(attention='eager') and not same(attention='sdpa', fused=True)
    assert 'by itself' in same_sides(tiny, replace(base, precision=None), base) and not same(precision='bf16') and 'same settings' in same()
    assert 'same micro-batches' in same(physical_batch=8) and not same(physical_batch=4) and not same(layout='packed') and not same(layout='padded')
    monkeypatch.setattr(workloads_module, 'timed', lambda *a, **k: pytest.fail('it was timed'))
    data = fresh()
    assert attempt(tiny, Work('sdpa_step', 'alone', 1.), data, 1.) == 'not applicable: the model has SDPA already' and not any(r['passes'] for r in data['rows'])
    tiny.model.set_attn_implementation('eager')
    assert not same(attention='sdpa'), 'a model that was loaded with plain attention has something to gain'


def test_rows_of_one_length_have_nothing_to_sort():
    rows = made_up_store(32, 204, 16, sigma=0., shortest=16, longest=16)
    found = bench_of(example_model(), rows, NO_BF16, 8)
    same = lambda **changes: same_sides(found, found.plain, replace(found.plain, **changes))
    assert all('same micro-batches' in same(layout=l) for l in ('padded', 'sorted')) and not same(layout='packed')
    assert 'in bf16 already' in same_sides(bench_of(example_model().bfloat16(), rows, NO_BF16, 8), found.plain, replace(found.plain, precision=None, weights='bf16'))


def test_optimize_does_not_measure_what_the_model_has(store):
    found = optimize(example_model(), store, detect(), TrainConfig(effective_batch=8), budget=1., records={})
    assert found.attention is None and 'nothing to measure (the model has SDPA already)' in found.reasons['attention'].reason and found.reasons['attention'].source == 'default'
    found = optimize(example_model(), store, detect(), TrainConfig(effective_batch=8), budget=1., records=dict(sdpa_step=(far(1.8, 1.9, 2.), 'w9.json')))
    assert found.attention is None and 'w9.json' not in found.reasons['attention'].reason, 'what was gained elsewhere is not gained where the model has it'


def test_a_bench_packs_as_the_configuration_says(tiny):
    packed = lambda most: replace(tiny.plain, layout='packed', max_tokens=most)
    longest = int(tiny.store.lengths.max())
    assert not same_sides(tiny, packed(longest), packed(8 * longest))
    assert max(m.tokens for step in ladder_module.planned_steps(tiny.store, tiny.rows, packed(longest), 4) for m in step) <= longest


def test_flash_is_timed_only_where_it_runs(tiny, store):
    "Both attention rows start from everything on, whose products are in 16 bits on a GPU"
    claim = all_claims()['flash_step']
    for i in ('flash_step', 'sdpa_step', 'no_checkpointing'):
        assert replace(switch_sides(tiny, all_claims()[i])[0], attention=None, checkpointing='off') == tiny.all_on() and i not in ON_TOP
    tiny.hardware = hardware_with(known_gpu('H200'))
    assert [c.precision for c in switch_sides(tiny, claim)] == ['bf16', 'bf16']
    dropping = settle(bench_of(example_model(dropout=.1), store, detect(), 8, loss_steps=2))
    data = fresh()
    assert attempt(dropping, Work('flash_step', 'alone', 1.), data, .1) == 'not applicable: math attention of torch runs in a step here, not flash (which takes 16 bits and no mask on a GPU, no dropout on a CPU)'
    assert dropping.model.config._attn_implementation == 'sdpa'
    still = settle(bench_of(example_model(dropout=0.), store, detect(), 8, loss_steps=2))
    assert experiments_module._why_no_flash(still, switch_sides(still, claim)[1]) == '' and 'no attention of torch' in experiments_module._why_no_flash(still, switch_sides(still, claim)[0])


def test_loader_workers_are_judged_at_the_count_of_the_claim(tiny, monkeypatch):
    "Not at the best of several, which noise picks"
    assert [judged_count(c) for c in ([0, 1], [0, 1, 2, 4], [0, 1, 2, 4, 8], [0, 1, 2, 4, 8, 16])] == [1, 4, 8, 8]
    from optkit.timing import Ratio
    from types import SimpleNamespace
    counts = [0, 1, 2, 4, 8, 16]
    fast = {n: 1. if n == 8 else .5 for n in counts} # 8 is the slowest
    found = SimpleNamespace(ratio=lambda name, base=None: Ratio(1., .9, 1.1), seconds={f'{n} workers': np.full(6, fast[n]) for n in counts}, warm_up=1, disturbed=[], peak_bytes={})
    monkeypatch.setattr(experiments_module, '_time_epochs', lambda *a: found)
    tiny.hardware = replace(tiny.hardware, cpu=replace(tiny.hardware.cpu, usable=16))
    done = experiments_module.try_epoch(tiny, all_claims()['num_workers'], 1.)
    assert done['variant'] == '8 workers' and done['ratios'] == [.5] * 6 and len(done['extra']['curve']) == 6 and done['note'].startswith('8 workers, which the claim names')


def test_margins_that_come_to_the_same_rows_are_not_compared(tiny, monkeypatch):
    tiny.cache['largest'] = 10
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (1, 1))
    with pytest.raises(InputError, match='not applicable: 10 rows of .* both margins are 9'): experiments_module.try_margin(tiny, all_claims()['safety_margin'], 1.)


def test_rows_with_sizes_of_their_own_say_so(tiny):
    for i in ('sdpa', 'flash_attention', 'bf16_native'): assert EXPERIMENTS[all_claims()[i].kind](tiny, all_claims()[i], .05)['note'].endswith(experiments_module.SIZES_NOTE)


def test_a_row_that_was_withdrawn_counts_nowhere_and_is_measured_again(tiny, faked, tmp_path):
    claim = all_claims()['sdpa_step']
    row = withdraw(add_pass(new_row(claim), claim, 'alone', dict(ratios=[.98] * 6, variant='with', baseline='without'), 1.), claim, 'both sides were the same')
    assert (row['ratio'], row['verdict'], row['source'], row['passes'], row['rounds'], row['reason']) == (None, None, None, {}, {}, 'withdrawn: both sides were the same') and row['withdrawn']['ratio']['p50'] == .98
    path = ledger_of(tmp_path, 'w2', [row], set(all_claims()) - {claim.id})
    data = read_ledger(path)
    assert (figures(data)['figure'], figures(data)['reason']) == ([], [claim.id]) and 'a factor: none' in ledger_summary(data)[1] and claim.id not in optimize_module.recorded_factors('h100', tmp_path)
    assert 'both sides were the same' in ledger_page(path).read_text('utf-8')
    from optkit.presets import gain_of
    from optkit.views import claims_view
    assert gain_of(load_records(path), claim.id, 'h100') is None and claim.id not in {*claims_view(tmp_path).state.claim}
    kept = run_plan(tiny, dict(data), 50., lambda now: None, only={'bf16'}, **faked)
    assert next(r for r in kept['rows'] if r['claim'] == claim.id)['reason'] == row['reason'], 'a start that asks for other rows leaves it'
    again = next(r for r in run_plan(tiny, dict(data), 50., lambda now: None, only={claim.id}, **faked)['rows'] if r['claim'] == claim.id)
    assert again['ratio'] and again['reason'] is None and again['passes'] == dict(alone=1) and len(again['rounds']['alone']) == 6


def test_a_start_that_asks_for_a_row_alone_takes_what_an_earlier_one_measured(tiny, faked):
    first = run_plan(tiny, fresh(), 200., lambda now: None, only={'compile', 'zero_grad_none'}, **faked)
    for row in first['rows']:
        if row['claim'] == 'compile_max_autotune': row.update(passes=dict(alone=1), rounds=dict(alone=[1.1] * 6), ratio=dict(p50=1.1, low=1.1, high=1.1))
        if row['claim'] == 'sdpa_step': row['reason'] = 'not applicable: the model has SDPA already'
    then = {r['claim']: r for r in run_plan(tiny, first, 50., lambda now: None, only={'hpo_ladder'}, **faked)['rows']}
    assert then['hpo_ladder']['passes'] == dict(alone=1) and then['hpo_ladder']['reason'] is None
    assert then['sdpa_step']['reason'] == 'not applicable: the model has SDPA already' and then['bf16']['reason'] == 'not asked for'  # the first start found out, the second did not ask


def test_a_stall_before_the_plan_leaves_no_rows_out(tiny, monkeypatch):
    from types import SimpleNamespace
    told = iter([[7.7], [.3, .2], [.4, .1, 5.]])
    monkeypatch.setattr(bench_module, 'timed', lambda *a, **k: SimpleNamespace(seconds=dict(step=next(told))))
    assert bench_module.quickest(tiny, SimpleNamespace(step=None), 2., 5) == .2 and bench_module.quickest(tiny, SimpleNamespace(step=None), 2., 5) == .1
    told = iter([[70.]])  # that slow: not timed again
    assert bench_module.quickest(tiny, SimpleNamespace(step=None), 2., 5) == 70.


def test_a_derived_row_that_waited_says_what_it_waits_for_after_each_start(tiny, faked):
    start = lambda data, *only: {r['claim']: r for r in run_plan(tiny, data, 100., lambda now: None, only={*only}, **faked)['rows']}['hpo_ladder']['reason']
    data = fresh()
    assert start(data, 'hpo_ladder').startswith('follows from compile, zero_grad_none, compile_max_autotune, which')
    assert start(data, 'zero_grad_none').startswith('follows from compile, compile_max_autotune, which')
    for row in data['rows']:
        if row['claim'].startswith('compile'): row.update(passes=dict(alone=1), rounds=dict(alone=[1.1] * 6), ratio=dict(p50=1.1, low=1.1, high=1.1), reason=None)
    assert start(data, 'zero_grad_none') == 'not asked for' and start(data, 'hpo_ladder') is None


def test_a_row_with_too_few_rounds_comes_before_one_with_a_wide_interval():
    few, wide, first = Work('single_item', 'alone', 5., 1), Work('tf32', 'alone', 5., 1, width=.3), Work('bf16', 'top', 5., 0)
    assert next_work([wide, few], 60.).value is few and next_work([wide, few, first], 60.).value is first


def test_a_start_compiles_everything_anew_and_leaves_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path)); monkeypatch.delenv('TRITON_CACHE_DIR', raising=False)
    with pytest.raises(KeyError), bench_module.nothing_compiled():
        assert os.environ['TORCHINDUCTOR_CACHE_DIR'] != str(tmp_path) and 'TRITON_CACHE_DIR' in os.environ
        raise KeyError
    assert os.environ['TORCHINDUCTOR_CACHE_DIR'] == str(tmp_path) and 'TRITON_CACHE_DIR' not in os.environ


def test_the_committed_ledgers_hold_no_row_that_measured_something_else():
    folder = records_module.results_folder()
    rows = lambda name: {r['claim']: r for r in read_ledger(folder / f'{name}-claims-h200.json')['rows']}
    for row in (rows('w2')['sdpa_step'], rows('w3')['flash_step']): assert row['passes'] or row['ratio'] is None is row['verdict'] and row['reason'].startswith(('withdrawn', 'not applicable'))
    for name in ('w1-claims-h200', 'w1-claims-h200-again'):
        row = next(r for r in read_ledger(folder / f'{name}.json')['rows'] if r['claim'] == 'num_workers')
        assert row['against'] == '8 workers' and row['ratio'] == next(p[2] for p in row['extra']['curve'] if p[0] == 8) and row['verdict'] == one_verdict(judge(all_claims()['num_workers'], row['ratio']))
    for name, i in (('w2', 'sdpa'), ('w3', 'flash_attention'), ('w3', 'bf16_native')): assert rows(name)[i]['note'].endswith(experiments_module.SIZES_NOTE)


def test_a_round_holds_the_same_steps_as_every_other_where_steps_are_short(tiny, monkeypatch):
    monkeypatch.setattr(workloads_module.Bench, 'cycle', 4)  # as on a GPU
    taken = []
    def slow(side, number):
        taken.append(number)
        time.sleep(.001 * (1 + number) * (2 if side.config.fused is False else 1))  # steps of other lengths
        return torch.zeros(())
    plain = replace(tiny.plain, fused=False)
    found, sides, _ = timed_sides(tiny, dict(a=plain, b=replace(plain, fused=True)), .4, check_loss=False, steps=dict(a=slow, b=slow))
    assert {tuple(taken[n:n + 4]) for n in range(0, len(taken), 4)} == {(0, 1, 2, 3)}
    ratio = found.ratio('b')
    assert 1.3 < ratio.p50 < 2.5
    assert .0025 <= np.median(found.seconds['b']) < .01, 'seconds are of a step: four together sleep for .01'
    rows = workloads_module.side_rates(tiny, found, sides['b'], 'b')
    held = np.mean([sum(tiny.store.lengths[m.rows].sum() for m in s) for s in sides['b'].plan])
    assert rows['tokens_per_s']['p50'] == pytest.approx(held / np.median(found.seconds['b']), rel=.05) and len(sides['b'].plan) == 4


def test_two_fast_engines_do_not_share_weights(tiny):
    before = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    config = tiny.all_on(fast=True)
    found, sides, _ = timed_sides(tiny, dict(a=config, b=config), .2, check_loss=False, frozen_dropout=True, built=dict(a=dict(graphs=False), b=dict(graphs=False)))
    assert sides['a'].engine.model is not sides['b'].engine.model and found.rounds and all(torch.equal(v, tiny.model.state_dict()[k]) for k, v in before.items())


def test_records_answer_a_row_that_was_not_measured(tmp_path):
    rows = [dict(variant='tf32', baseline='fp32', claim='tf32', ratio=far(1.1, 1.2, 1.3)), dict(variant='bf16', baseline='fp32', claim='bf16', ratio=far(1.8, 1.9, 2.), ratio_before=far(1.4, 1.5, 1.6)),
            dict(variant='bf16 + tf32', baseline='fp32', claim='tf32_on_bf16', ratio=far(1.8, 1.9, 2.), ratio_before=far(.99, 1., 1.01))]
    other = [dict(variant='+ fused AdamW', baseline='baseline', claim='fused_adamw_step', ratio=far(1.8, 1.9, 2.), ratio_before=far(1.05, 1.1, 1.2)), dict(variant='+ BF16', baseline='baseline', claim='bf16', ratio=far(1., 1.1, 1.2))]
    lengths = [dict(variant=f'efficient, {how}, {n}', baseline='math', claim=claim, ratio=far(p, p, p)) for how, claim, n, p in (('alone', 'sdpa', 128, 1.2), ('alone', 'sdpa', 512, 1.5), ('alone', 'sdpa', 2048, 2.), ('whole step', 'sdpa_step', 512, 1.1))]
    for name, some in (('demo-ladder', other), ('attention-backends', lengths)): (tmp_path / f'{name}-h100.json').write_text(json.dumps(dict(provenance=dict(workload=name), rows=some)))
    (tmp_path / 'w1-precision-h100.json').write_text(json.dumps(dict(provenance=dict(workload='W1'), rows=rows)))
    known = all_claims()
    row = with_record(dict(new_row(known['tf32_on_bf16']), reason='no budget: all of it is spent'), known['tf32_on_bf16'], 'h100', tmp_path)
    assert (row['ratio']['p50'], row['source'], row['verdict']) == (1., 'recorded', 'none') and 'no budget' in row['note']
    again = with_record(row, known['tf32_on_bf16'], 'h100', tmp_path / 'none')
    assert again['ratio'] is None and again['verdict'] is None and recorded('bf16', 'rtx3090', tmp_path) is None
    assert recorded('tf32', 'h100', tmp_path) is None and recorded('fused_adamw_step', 'h100', tmp_path)['text'].startswith('+ fused AdamW, over the row before'), 'a whole step says nothing about products alone'
    assert (recorded('sdpa', 'h100', tmp_path)['ratio']['p50'], recorded('sdpa_step', 'h100', tmp_path)['ratio']['p50']) == (1.5, 1.1), 'the middle one of several'
    measured = add_pass(new_row(known['bf16']), known['bf16'], 'alone', dict(ratios=[1.1] * 6), 1.)
    assert with_record(measured, known['bf16'], 'h100', tmp_path)['ratio']['p50'] == 1.1
    assert recorded('bf16', 'h100', tmp_path)['ratio'] == far(1.8, 1.9, 2.) and recorded('bf16', 'h100', tmp_path)['file'] == 'w1-precision-h100.json'
    (tmp_path / 'w1-precision-h100.json').write_text('{')
    assert recorded('bf16', 'h100', tmp_path)['file'] == 'demo-ladder-h100.json', 'a broken file is passed by'


def test_no_record_of_another_workload_answers_a_row(tmp_path):
    "What was measured at the shape of w1 is no figure of w3, neither in a new ledger nor in one of an earlier version"
    claim = all_claims()['zero_grad_none']
    (tmp_path / 'w1-trainer-h100.json').write_text(json.dumps(dict(provenance=dict(workload='W1'), rows=[dict(variant='x', baseline='y', claim=claim.id, ratio=far(1.1, 1.2, 1.3))])))
    row = dict(new_row(claim), reason='no budget')
    assert with_record(row, claim, 'h100', tmp_path, 'w3')['ratio'] is None
    taken = with_record(row, claim, 'h100', tmp_path, 'w1')
    assert taken['source'] == 'recorded' and with_record(row, claim, 'h100', tmp_path, 'mine')['ratio'] == taken['ratio']
    kept = lambda workload: next(r for r in read_ledger(ledger_of(tmp_path, workload, [taken]))['rows'] if r['claim'] == claim.id)
    assert kept('w1')['source'] == 'recorded' and (kept('w3')['source'], kept('w3')['ratio'], kept('w3')['reason']) == (None, None, 'no budget')
    measured = add_pass(taken, claim, 'alone', dict(ratios=[1.1] * 6), 1.)
    assert measured['note'] == '', 'a row that was measured after all is no copy'


def ledger_of(folder, workload, rows, left_out=()):
    rows = {r['claim']: r for r in rows}
    data = dict(kind=ledger_module.LEDGER_KIND, format=ledger_module.FORMAT, settings=dict(workload=workload, card='h100'), provenance=dict(card='h100'), ladder=None,
                rows=[rows.get(i) or dict(new_row(c), reason='not asked for' if i in left_out else None) for i, c in all_claims().items()])
    (folder / f'{workload}-claims-h100.json').write_text(json.dumps(data))
    return folder / f'{workload}-claims-h100.json'


def test_rows_that_were_not_asked_for_are_no_missing_results(tmp_path):
    claim, rest = all_claims()['sdpa'], set(all_claims()) - {'sdpa', 'dora'}
    path = ledger_of(tmp_path, 'w3', [add_pass(new_row(claim), claim, 'alone', dict(ratios=[1.4] * 6), 1.), dict(new_row(all_claims()['dora']), reason='out of memory')], rest)
    data = read_ledger(path)
    done, summary = figures(data), ledger_summary(data)
    assert (done['figure'], done['reason'], set(done['left_out'])) == (['sdpa'], ['dora'], rest)
    assert summary[1].startswith('Of 47 claims, 45 were not asked for; of the other 2, 1 have a figure here and 1 a reason why not') and len(summary) == 5
    assert 'was not asked for' in summary[0] and len(bench_module.ledger_table(data)) == 2
    page = ledger_page(path).read_text('utf-8')
    assert '45 of 47 claims were not asked for' in page and 'Hyperband' not in page and 'cannot be shown' not in page


def test_agreement_of_two_ledgers():
    def ledger(*factors):
        data = fresh()
        for row, ratios in zip(data['rows'], factors): row.update(ratio=far(min(ratios), sorted(ratios)[1], max(ratios)), source='measured', repeats=9)
        return data
    found = agreement(ledger((1., 1.1, 1.2), (1., 1.01, 1.02)), ledger((1.1, 1.2, 1.3), (1.03, 1.04, 1.05)))
    assert found['rows'] == 2 and found['overlap'] == .5 and found['apart'] == ['bf16_native'] and found['width'] < .1


# --- files

@pytest.mark.parametrize('text', ['{"rows": [', '[]', '{"provenance": {}, "rows": []}', '{"kind": "claims ledger", "format": 99}', '{"kind": "claims ledger", "format": 1, "rows": [{"claim": "bf16"}]}', ''])
def test_what_is_no_ledger_is_left_alone(tmp_path, text):
    path = tmp_path / 'mine-claims-cpu.json'
    path.write_text(text)
    with pytest.raises(InputError) as said: bench('mine', '10s', path, hardware=CPU)
    assert len(str(said.value).splitlines()) == 1 and str(path) in str(said.value) and path.read_text() == text and [*tmp_path.iterdir()] == [path]


def test_a_ledger_of_another_version_is_left_alone(tmp_path):
    path = tmp_path / 'mine-claims-cpu.json'
    saved(path, format=ledger_module.FORMAT + 1, settings=dict(workload='mine', card='cpu'))
    before = path.read_text()
    with pytest.raises(InputError, match=f'format {ledger_module.FORMAT + 1}, this version reads {ledger_module.FORMAT}'): bench('mine', '10s', tmp_path, hardware=CPU)
    assert path.read_text() == before


def test_a_ledger_of_another_run_is_left_alone(tmp_path):
    path = tmp_path / 'mine-claims-cpu.json'
    data = saved(path, settings=dict(workload='mine', card='cpu', model='other', data=None, rows=1600))
    before = path.read_text()
    with pytest.raises(InputError, match="model 'other', asked for is 'demo'"): bench('mine', '10s', tmp_path, hardware=CPU)
    assert path.read_text() == before
    check_same_run(path, data, dict(workload='mine', max_length=None, data=None))
    with pytest.raises(InputError, match='another run'): check_same_run(path, dict(settings=dict(data=['my.csv', 'text', 'label', None])), dict(data=None))


@pytest.mark.parametrize('settings', [dict(budget='0'), dict(budget='-3m'), dict(budget=''), dict(workload='w1'), dict(workload='w7'), dict(only={'nothing'}), dict(rows=0), dict(model='no/such/folder/here')])
def test_bad_input_writes_nothing(tmp_path, settings):
    out = tmp_path / 'run'
    with pytest.raises(InputError) as said: bench(**dict(workload='mine', budget='10s', out=out, hardware=CPU) | settings)
    assert len(str(said.value).splitlines()) <= 2 and not out.exists()


def test_only_a_run_without_data_says_that_the_demo_mails_stand_in(tmp_path, monkeypatch):
    class Enough(Exception): pass
    def built(*_): raise Enough
    monkeypatch.setattr(bench_module, 'ready_bench', built)
    for data, expected in ((None, 1), (('my.csv', 'text', 'label', None), 0)):
        lines = []
        with pytest.raises(Enough): bench('mine', '10s', tmp_path, data=data, hardware=CPU, say=lines.append)
        assert sum('demo mails' in l for l in lines) == expected == len(lines)
        saved(tmp_path / 'mine-claims-cpu.json', settings=dict(workload='mine', card='cpu', data=data and list(data)))
        assert ('no --data was given' in ledger_page(tmp_path).read_text('utf-8')) == bool(expected)
        (tmp_path / 'mine-claims-cpu.json').unlink()
    assert not bench_module.demo_data_notice(dict(workload='w1', card='h100')) and not bench_module.demo_data_notice(dict(workload='mine', card='cpu')), 'no such setting: not known'


@pytest.mark.parametrize('out', ['file/run', 'file/run/a.json', 'file/a.json'])
def test_a_ledger_that_could_not_be_written_is_said_before_anything_is_measured(tmp_path, out, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr('optkit.bench.ready_bench', lambda *_: pytest.fail('it was built'))
    with pytest.raises(InputError, match='is a file, expected a folder'): bench('mine', '10s', tmp_path / out, hardware=CPU)


def test_where_the_ledger_lies(tmp_path):
    assert ledger_path(None, 'w1', 'h100').name == 'w1-claims-h100.json' and ledger_path('a/b.json', 'w1', 'h100').name == 'b.json'
    (tmp_path / 'file').write_text('')
    with pytest.raises(InputError, match='is a file'): ledger_path(tmp_path / 'file', 'w1', 'h100')


def test_the_command_says_it_in_a_line(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'optkit.cli', 'bench', '--workload', 'mine', '--budget', '0s', '--out', str(tmp_path / 'x')], capture_output=True, text=True)
    assert done.returncode == 2 and 'budget' in done.stderr and 'Traceback' not in done.stderr and not (tmp_path / 'x').exists()


# --- a run

def fake(bench, claim, share_s, view, earlier):
    if claim.id == 'dora': raise RuntimeError('CUDA out of memory. Tried to allocate 3 GiB')
    if claim.id == 'flash_attention': raise ValueError('no kernel\nfor this')
    return dict(ratios=[1.2, 1.201, 1.199, 1.2, 1.2, 1.202], variant='with', baseline='without')

@pytest.fixture
def faked(monkeypatch):
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, fake)
    monkeypatch.setattr(bench_module, '_release_memory', lambda device: None)
    monkeypatch.setattr(bench_module, 'climb', lambda *a: dict(rows=[], note=''))
    clock = iter(np.arange(0, 1e5, .5))
    return dict(clock=lambda: float(next(clock)), say=lambda line: None)


def test_a_row_that_fails_is_written_down_and_the_run_goes_on(tiny, faked):
    data = run_plan(tiny, fresh(), 400., lambda now: None, **faked)
    rows = {r['claim']: r for r in data['rows']}
    assert rows['dora']['reason'].startswith('out of memory') and rows['flash_attention']['reason'] == 'failed: ValueError: no kernel'
    assert rows['bf16']['verdict'] == 'smaller' and rows['bf16']['on_top']['ratio'] and data['ladder'] is not None
    done = figures(data)
    assert len(done['figure']) + len(done['reason']) == 47 and len(done['figure']) > 30
    assert data['stopped'].startswith('what is left waits') and 'compile_max_autotune' in rows['hpo_ladder']['reason'] # which needs a GPU


def test_what_fails_is_tried_once_a_start(tiny, faked, monkeypatch):
    tried = []
    def failing(bench, claim, share_s, view, earlier):
        tried.append((claim.id, view))
        if view == 'top': raise ValueError('no')
        return fake(bench, claim, share_s, view, earlier)
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, failing)
    data = run_plan(tiny, fresh(), 400., lambda now: None, **faked)
    assert tried.count(('bf16', 'top')) == tried.count(('dora', 'alone')) == 1
    assert next(r for r in data['rows'] if r['claim'] == 'bf16')['on_top'] == dict(reason='failed: ValueError: no')


def test_what_there_was_no_time_for_says_so(tiny, faked):
    data = run_plan(tiny, fresh(), 5., lambda now: None, **faked)
    done = figures(data)
    assert len(done['figure']) + len(done['reason']) == 47 and any(r['reason'].startswith('no budget') for r in data['rows'] if r['reason'])


def test_a_run_that_is_killed_goes_on(tiny, faked, tmp_path):
    path, kept = tmp_path / 'x-claims-cpu.json', []
    def save(now):
        saved(path, **{k: v for k, v in now.items() if k in ('rows', 'ladder', 'settings', 'provenance')})
        kept.append(sum(bool(r['passes']) for r in now['rows']))
        if len(kept) == 6: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): run_plan(tiny, fresh(), 400., save, **faked)
    found = read_ledger(path)
    before = {r['claim']: r['rounds'] for r in found['rows'] if r['passes']}
    assert len(before) == kept[-1] > 3
    after = {r['claim']: r['rounds'] for r in run_plan(tiny, found, 400., lambda now: None, **faked)['rows']}
    assert all(after[i]['alone'][:len(r['alone'])] == r['alone'] for i, r in before.items()) and len([r for r in after.values() if r]) > 30


def test_a_job_that_takes_longer_than_what_is_left_is_ended_and_waits_for_more(tiny, faked, monkeypatch):
    def slow(bench, claim, share_s, view, earlier):
        if claim.id != 'bf16': return fake(bench, claim, share_s, view, earlier)
        while True:
            try: time.sleep(.01)
            except Exception: pass # as a compiler would
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, slow)
    monkeypatch.setattr(bench_module, 'OVERRUN_S', -59.)
    data = run_plan(tiny, fresh(), 60., lambda now: None, **faked)
    rows = {r['claim']: r for r in data['rows']}
    assert rows['bf16']['reason'].startswith('no budget: it took more than') and 55 < data['too_long']['bf16 alone'] <= 60 and rows['zero_grad_none']['ratio']
    bf16 = lambda: next(w for w in ledger_module.works_of(data, tiny, 1., set()) if (w.id, w.view) == ('bf16', 'alone'))
    data['rows'] = [dict(r, reason=None) for r in data['rows']]
    assert 65 < bf16().cost_s <= 75, 'only a start with more time tries it again'


def test_a_job_in_which_a_start_was_killed_is_not_tried_with_the_same_time(tiny, faked, monkeypatch):
    kept = []
    def dying(bench, claim, share_s, view, earlier): raise KeyboardInterrupt
    monkeypatch.setattr(bench_module, 'ANNOUNCE_AFTER_S', 0.)
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, dying)
    with pytest.raises(KeyboardInterrupt): run_plan(tiny, fresh(), 60., lambda now: kept.append(json.loads(json.dumps(now))), **faked)
    assert kept[-1]['trying']['job'].endswith(' alone')
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, fake)
    data = run_plan(tiny, kept[-1], 60., lambda now: None, **faked)
    name = kept[-1]['too_long'] if 'too_long' in kept[-1] else data['too_long']
    row = next(r for r in data['rows'] if r['claim'] == [*name][0].split()[0])
    assert 'alone' not in row['passes'] and row['reason'].startswith('no budget') and 'trying' not in data


def test_a_deadline_leaves_the_timer_as_it_was():
    import signal
    handler, own = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 50.) # pytest's time limit uses it too
    try:
        with pytest.raises(TimeOver):
            with deadline(.05): time.sleep(5)
        with deadline(60.): pass
        with deadline(float('inf')): pass
        assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50 and signal.getsignal(signal.SIGALRM) is handler
    finally: signal.setitimer(signal.ITIMER_REAL, *own)


REAL = {'zero_grad_none', 'batch_size', 'fused_adamw', 'trial_profile', 'memory_8b', 'sdpa_step', 'no_checkpointing', 'checkpointing_memory', 'single_item'}

@pytest.mark.slow
def test_two_starts_for_real(tiny, tmp_path, monkeypatch):
    before = {k: v.clone() for k, v in tiny.model.state_dict().items()}
    monkeypatch.setattr(bench_module, 'ready_bench', lambda *a, **k: tiny)
    lines = []
    path = bench('mine', '8s', tmp_path, only=REAL, hardware=detect(), say=lines.append)
    whole = read_ledger(path)['stopped'].startswith('everything is measured') # a quiet machine needs one start
    first = {r['claim']: r for r in read_ledger(path)['rows']}
    assert sum(bool(first[i]['ratio'] or first[i]['figure']) for i in REAL) >= 4 and first['bf16']['reason'] == 'not asked for'
    bench('mine', '12s', tmp_path, only=REAL, hardware=detect(), say=lines.append)
    assert sum('no --data was given' in l for l in lines) == 2 and 'no --data was given' in lines[0] and 'no --data was given, so this is measured on the demo mails' in path.with_suffix('.html').read_text('utf-8')
    data = read_ledger(path)
    second = {r['claim']: r for r in data['rows']}
    assert len(data['starts']) == 2 and any('going on' in l for l in lines)
    count = lambda rows: sum(map(len, (v for r in rows.values() for v in r['rounds'].values())))
    assert count(second) >= count(first) and (whole or count(second) > count(first))
    assert all(second[i]['rounds'].get('alone', [])[:len(r['rounds'].get('alone', []))] == r['rounds'].get('alone', []) for i, r in first.items())
    assert all(torch.equal(v, tiny.model.state_dict()[k]) for k, v in before.items())
    assert second['zero_grad_none']['loss']['verdict'] == 'same' and second['no_checkpointing']['extra']['kept_bytes']['with'] > second['no_checkpointing']['extra']['kept_bytes']['without']
    kept = second['checkpointing_memory']['extra'].get('kept_bytes')
    assert kept is None or kept['with'] < kept['without'] # none: no time for it
    assert len(second['batch_size']['extra']['curve']) >= 3
    table = load_records(path)
    assert len(table) == 47 and 'ratio_p50' in table


def test_the_page(tmp_path):
    data, claim = saved(tmp_path / 'mine-claims-cpu.json', settings=dict(workload='mine', card='cpu')), all_claims()['bf16']
    rows = [add_pass(r, claim, 'alone', dict(ratios=[1.6, 1.62, 1.58, 1.6, 1.6, 1.7], note='<script>alert(1)</script>'), 1.) if r['claim'] == 'bf16' else r for r in data['rows']]
    saved(tmp_path / 'mine-claims-cpu.json', settings=dict(workload='mine', card='cpu'), rows=rows)
    page = ledger_page(tmp_path).read_text()
    assert len(ledger_summary(read_ledger(tmp_path / 'mine-claims-cpu.json'))) == 5 and 'cannot be shown' not in page and page.count('<tr') > 47
    scripts = re.findall(r'<script>(.*?)</script>', page, re.S)
    assert len(scripts) == 1 and f"script-src 'sha256-{base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()}'" in page
    assert 'data-sort="1.6' in page and 'alert(1)' in page and not re.findall(r'(?:src|href)\s*=\s*"(?!#|data:)', page)


# --- optimize

def test_a_setting_is_taken_where_its_whole_interval_is_a_gain():
    gain, loss, same = far(1.1, 1.2, 1.3), far(.8, .9, .95), far(.98, 1.01, 1.04)
    cases = [(gain, None, False, True), (gain, loss, False, True), (loss, gain, True, False), (same, gain, True, True), (same, gain, False, False), (None, gain, False, True), (None, loss, True, False), (None, None, True, True)]
    for measured, recorded, default, taken in cases:
        found = choose_setting(measured, recorded, default)
        assert found.value is taken and found.reason.startswith('measured here') == (measured is not None) and found.reason.startswith('default') == (measured is recorded is None)


def test_optimize_from_records_and_defaults(store):
    base = TrainConfig(lr=3e-4, epochs=7, effective_batch=16)
    records = dict(bf16=(far(1.5, 1.6, 1.7), 'a.json'), fused_adamw_step=(far(.8, .9, .95), 'a.json'), sequence_packing=(far(1.2, 1.3, 1.4), 'a.json'), compile=(far(.5, .6, .7), 'a.json'), cuda_graphs=(far(.5, .6, .7), 'a.json'))
    found = optimize(example_model(), store, H100, base, budget=0, records=records)
    assert (found.precision, found.fused, found.layout, found.compile, found.fast) == ('bf16', False, 'packed', None, False) and (found.lr, found.epochs, found.effective_batch) == (3e-4, 7, 16)
    assert 'a.json' in found.reasons['precision'].reason and found.reasons['precision'].source == 'record' and 'a.json' in repr(found) and found.card == 'h100'
    plain = optimize(example_model(), store, CPU, base, budget=0, records={})
    packs = optimize(example_model(), store, CPU, TrainConfig(effective_batch=8, layout='packed', max_tokens=64), budget=0, records={})
    assert packs.layout.name == 'packed' and packs.max_tokens == 64 or packs.max_tokens is None  # the plain step that it begins with has no packs
    assert (plain.fused, plain.zero_grad_none, plain.layout, plain.compile) == (True, True, 'sorted', None) and {r.source for r in plain.reasons.values()} == {'default'}


def test_optimize_measures_and_keeps_training_the_same(store):
    model = example_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = optimize(model, store, detect(), TrainConfig(effective_batch=8), budget=4., records={})
    assert any(r.source == 'measured' and 'measured here' in r.reason for r in found.reasons.values()) and found.replace(lr=1e-3).reasons['layout'] == found.reasons['layout'] and (found.weights, found.fp8, found.adapter, found.optimizer) == (None, False, None, 'adamw') and found.layout != 'grouped'
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items()) and vars(TrainConfig.from_json(found.to_json())) == {k: v for k, v in vars(found).items() if not k.startswith('_')}


def test_optimize_takes_nothing_from_a_few_rounds(store, monkeypatch):
    from types import SimpleNamespace
    from optkit.timing import Ratio
    for rounds, found in ((2, 'default'), (5, 'measured')):
        monkeypatch.setattr('optkit.optimize.timed_sides', lambda *_, **__: (SimpleNamespace(rounds=rounds, ratio=lambda name: Ratio(2., 1.9, 2.1)),))
        made = optimize(example_model(), store, CPU, TrainConfig(effective_batch=8, fused=False), budget=1., records={})
        assert made.fused == (rounds == 5) and made.reasons['fused'].source == found and ('2 rounds here are too few to tell' in made.reasons['fused'].reason) == (rounds == 2)


# --- a GPU's ledger, without one

def rate(p): return dict(p20=p * .9, p50=p, p80=p * 1.1)

def of_a_gpu(claim, view):
    "What an experiment gives on a GPU, by kind"
    ratios, speed = [1.2, 1.21, 1.19, 1.2, 1.2, 1.22], dict(seconds=rate(.1), samples_per_s=rate(300.), tokens_per_s=rate(4e4), padded_tokens_per_s=rate(6e4), mfu=.2, peak_bytes=3 << 30, base_peak_bytes=5 << 30)
    timed = dict(ratios=ratios, variant='with', baseline='without', warm_up=8, disturbed=0, **speed)
    pairs = {'8 to 12': far(1.1, 1.15, 1.2), '12 to 16': far(1.1, 1.15, 1.2), '16 to 32': far(1.1, 1.15, 1.2)}
    loss = dict(value=.6, baseline=.61, difference=-.01, spread=.02, steps=12, verdict='within the spread', reason='-0.01 beside 0.02 between seeds')
    curve = dict(curve=[(8, 100., far(1., 1., 1.)), (16, 130., far(1.2, 1.3, 1.4))], pairs=pairs, axis='rows of a micro-batch', effective=96)
    factor = dict(p50=1.2, low=1.1, high=1.3)
    return {'switch': timed | dict(loss=loss, extra=dict(kept_bytes={'with': 5, 'without': 9}, saved=.4) if 'checkpointing' in claim.id else {}), 'compile': timed | dict(loss=loss, final=True, extra=dict(compile_s=110.2, break_even_steps=900, default_compile_s=110.)),
            'graphs': timed | dict(padded_tokens_per_s=None, extra=dict(build_s=dict(launched=20., captured=24.), shapes=4)), 'curve': timed | dict(final=True, extra=curve), 'epoch': timed | dict(extra=curve if claim.id == 'num_workers' else dict(epoch_seconds=1., steps=8)),
            'margin': timed | dict(final=True, extra=dict(largest=128, share_of_memory={'115': .8, '125': .87}, left_bytes=9 << 30)) if claim.id == 'safety_margin' else dict(figure='80% of the memory', final=True, extra=dict(largest=128)),
            'dora': timed | dict(figure='92.0% fewer', extra=dict(dora=dict(state_bytes=1, trainable=3))), 'state': timed | dict(figure='1 GiB less of 2 GiB', extra=dict(state_bytes=dict(adamw=2, adamw_8bit=1)), loss=loss),
            'sizes': dict(figure='8B: 64 GB', source='counted', final=True, extra=dict(full=dict(weights=16e9))), 'rate': dict(figure='5.70 steps/s', final=True, repeats=40, **speed), 'usage': dict(figure='GPU busy 80%; MFU 20.0%', usage=dict(busy=.8), final=True, repeats=40, **speed),
            'profile': dict(figure='200 to 300 days', source='counted', final=True, extra=dict(hours=[1, 2])), 'derived': dict(factor=factor, source='derived', final=True, extra=dict(compile_s=110., pairs={'800 to 678': factor, '800 to 644': factor, '800 to 580': factor})),
            'study': timed | dict(source='simulated', final=True, extra=dict(studies=5, reached=4, share_of_epochs=.4, seconds=9.))}.get(claim.kind, timed)


@pytest.fixture
def of_h100(tiny, monkeypatch, tmp_path):
    "The ledger of W1 as an H100 leaves it, with a ladder, and its file"
    monkeypatch.setattr(workloads_module.Bench, 'cuda', property(lambda self: True))
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, lambda bench, claim, share_s, view, earlier: of_a_gpu(claim, view))
    monkeypatch.setattr(bench_module, '_release_memory', lambda device: None)
    monkeypatch.setattr(bench_module, '_device_responds', lambda device: True)
    ladder = ledger_module.climb(tiny, fresh(), .3, 0.)
    ladder['rows'][-1] |= dict(mfu=.3, peak_bytes=4 << 30)
    monkeypatch.setattr(bench_module, 'climb', lambda *a: ladder)
    tiny.hardware, clock = H100, iter(np.arange(0, 1e6, .5))
    data = fresh() | dict(hardware=json.loads(H100.to_json()), provenance=dict(card='h100', gpu='NVIDIA H100 80GB HBM3', date='2026-11-28', command='optkit bench --workload w1', workload='w1'), settings=dict(workload='w1', card='h100'))
    data = run_plan(tiny, data, 4000., lambda now: None, lambda line: None, clock=lambda: float(next(clock)))
    return data, base_module.write_json(tmp_path / 'w1-claims-h100.json', dict(kind=ledger_module.LEDGER_KIND, format=ledger_module.FORMAT, **data))


def test_the_page_of_a_gpu(of_h100):
    data, path = of_h100
    page = ledger_page(path).read_text()
    assert 'cannot be shown' not in page, re.findall(r'[^>]*cannot be shown[^<]*', page)
    assert len(figures(data)['figure']) > 40 and roofline_figure(data) is not None and data['ladder']['left_out'] and 'left out: torch.compile' in page
    assert all(r['on_top'] for r in data['rows'] if r['claim'] in ON_TOP) and len(load_records(path)) == 47
    again = read_ledger(path)
    assert agreement(again, data)['overlap'] == 1. and optimize_module.recorded_factors('h100', path.parent)['bf16'][1] == path.name


@pytest.mark.parametrize('budget, step_s, on_s, least', [(150., .3, .15, 4), (165., .1, .08, 6), (160., .45, .25, 2)])
def test_three_minutes_on_a_processor_show_all_views(tiny, monkeypatch, budget, step_s, on_s, least):
    "With a clock that goes by what jobs are expected to take, and a fifth more"
    now, share = [0.], share_of(budget, 47)
    tiny.step_s, tiny.on_s, tiny.loss_steps = step_s, on_s, 4
    def experiment(bench, claim, share_s, view, earlier):
        now[0] += 1.2 * expected_cost(claim.id, claim.kind, view, on_s if view == 'top' else step_s, share, False, 4)
        return dict(figure='n/a', final=True) if claim.kind in ('sizes', 'profile', 'rate', 'usage') else dict(ratios=[1.2] * 6, variant='with', baseline='without')
    def climb(*a): now[0] += 1.2 * ledger_module.ladder_cost(step_s, share, False, 4); return dict(rows=[], note='')
    for kind in EXPERIMENTS: monkeypatch.setitem(EXPERIMENTS, kind, experiment)
    monkeypatch.setattr(bench_module, 'climb', climb); monkeypatch.setattr(bench_module, '_release_memory', lambda device: None)
    data = run_plan(tiny, fresh(), budget, lambda now: None, lambda line: None, clock=lambda: now[0])
    tops = [r['claim'] for r in data['rows'] if (r['on_top'] or {}).get('ratio')]
    assert data['ladder'] is not None and len(tops) >= least and len(figures(data)['figure']) >= 15 and now[0] < budget + 20, (tops, figures(data), now)
