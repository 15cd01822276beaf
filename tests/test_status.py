"Presets with their reasons, what differs between configurations, and the status with its checks"
import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.cards import known_gpu
from optkit.hardware import detect, hardware_with
from optkit.progress import Progress, write_progress
from optkit.records import read_committed
from optkit.presets import gain_of, preset_of, rows_that_fit
from optkit.run_folder import read_run
from optkit.status import OPTIMIZATIONS, status
from optkit.base import read_json, write_json
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer


def records(*rows): return pd.DataFrame([dict(dict(file='r.json', card='h100', variant='+ x', ratio_p50=2., ratio_low=1.9, ratio_high=2.1, ratio_before_p50=np.nan, ratio_before_low=np.nan, ratio_before_high=np.nan), **r) for r in rows])


# --- records

def test_the_row_before_counts_where_there_is_one_and_a_part_alone_does_not():
    table = records(dict(claim='compile', ratio_before_p50=1.2, ratio_before_low=1.1, ratio_before_high=1.3), dict(claim='compile', file='s.json', ratio_p50=1.4, ratio_low=1.3, ratio_high=1.5), dict(claim='compile', variant='x, alone, 128', ratio_p50=9.))
    gain = gain_of(table, 'compile', 'h100')
    assert (gain.p50, gain.low, gain.high, gain.files) == (pytest.approx(1.3), 1.1, 1.5, ('r.json', 's.json')) and gain.sure
    assert gain_of(table, 'compile', 'rtx3090') is None and gain_of(table, 'bf16', 'h100') is None


# --- presets

def test_a_preset_follows_the_records_of_its_card_only():
    faster, slower = (records(dict(claim='compile', ratio_before_p50=r, ratio_before_low=r - .05, ratio_before_high=r + .05)) for r in (1.3, .9))
    assert preset_of('h100', records=faster).compile == 'default' and preset_of('h100', records=faster).reasons['compile'].source == 'record'
    assert preset_of('h100', records=slower).compile is None and 'no sure gain' in preset_of('h100', records=slower).reasons['compile'].reason
    other = preset_of('rtx3090', records=faster)
    assert other.compile is None and other.reasons['compile'].source == 'default'


@pytest.mark.parametrize('card, precision, tf32', [('rtx3090', 'bf16', True), ('rtx5090', 'bf16', True), ('h100', 'bf16', True), ('T4', 'fp16', False)])
def test_presets_of_cards(card, precision, tf32):
    p = TrainConfig.preset(card)
    assert isinstance(p, TrainConfig) and (p.precision, p.tf32) == (precision, tf32)
    assert all(r.reason and r.source in ('record', 'arithmetic', 'rule', 'default') for r in p.reasons.values()) and {'precision', 'compile', 'layout', 'physical_batch', 'fused'} <= set(p.reasons)
    peak = known_gpu(card).peak
    if p.reasons['precision'].source == 'arithmetic': assert f"{peak[precision] / peak['fp32']:.1f} times" in p.reasons['precision'].reason


def test_a_preset_of_another_card_says_what_to_set_for_this_machine():
    here, p = hardware_with(None), TrainConfig.preset('h100')
    assert 'tf32=None' in p.reasons['tf32'].reason and 'tf32=None' in TrainConfig.preset('T4').reasons['tf32'].reason and 'tf32=None' not in TrainConfig.preset('auto').reasons['tf32'].reason
    with pytest.raises(ValueError, match='none on device cpu.*set tf32=None, which leaves it to the machine, or tf32=False'): make_engine(example_model(), p, here)
    for value in (None, False): assert not make_engine(example_model(), p.replace(tf32=value, compile=None), here).precision.tf32.value


def test_auto_is_this_machine(): assert TrainConfig.preset('auto').card == detect().card


def test_memory_by_count():
    shape = dict(weights=100_000_000, layers=12, hidden=768, heads=12)
    one = rows_that_fit(2**34, shape, 512)
    assert one == int((.9 * 2**34 - 22 * 10**8) / (1.2 * 512 * 12 * (34 * 768 + 5 * 12 * 512)))
    assert rows_that_fit(2**35, shape, 512) > 2 * one > 2 * rows_that_fit(2**34, shape, 1024) and rows_that_fit(2**30, shape) == 0
    from transformers import BertConfig
    huge = BertConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336)
    with pytest.raises(InputError, match='RTX 3090: this does not fit .an estimate: 1 rows of 512 tokens .* about 0 rows fit'): preset_of('rtx3090', model=huge)
    p = preset_of('rtx3090', model=huge, adapter='lora')
    assert (p.physical_batch, p.checkpointing) == (3, 'off') and 'an estimate' in p.reasons['physical_batch'].reason
    assert preset_of('rtx3090', model=BertConfig(), effective_batch=8).physical_batch is None


def test_reasons_stay_with_what_stays_and_go_through_json():
    p = TrainConfig.preset('h100').replace(compile=None)
    assert p.compile is None and p.reasons['compile'].source == 'asked for' and p.reasons['precision'].source != 'asked for'
    assert TrainConfig.from_json(p.to_json()) == TrainConfig(**asdict(p)) and json.loads(json.dumps(p.to_dict()))['values']['compile'] is None
    assert replace(p, lr=1e-3).lr == 1e-3


@pytest.mark.parametrize('call', [lambda: TrainConfig.preset('gtx9999'), lambda: TrainConfig.preset('h100', model=object())], ids=['card', 'model'])
def test_presets_that_cannot_be(call):
    with pytest.raises(InputError): call()


def test_a_preset_is_saved_beside_its_run(tmp_path):
    store = tokenise(example_table(40), word_tokenizer(), 32, progress=False)
    for name, config in (('preset', TrainConfig.preset('auto', epochs=1, precision='fp32')), ('plain', TrainConfig(epochs=1, precision='fp32'))):
        Trainer(make_engine(example_model(), config, detect()), store, config, folder=tmp_path / name).fit(np.arange(30), np.arange(30, 40))
    saved = read_json(tmp_path / 'preset' / 'preset.json')
    assert saved['values']['precision'] == 'fp32' and saved['reasons']['precision']['source'] == 'asked for' and not (tmp_path / 'plain' / 'preset.json').exists()


def test_diff_tells_what_changes_training():
    a, b = TrainConfig(), TrainConfig(lr=1e-3, compile='default', betas=[.9, .999])
    assert {k: c for k, *_, c in a.diff(b).rows} == {'lr': True, 'compile': False} and not a.diff(TrainConfig()) and repr(a.diff(a)) == 'the same'
    assert a.diff(TrainConfig(precision='bf16', weights='bf16')).rows == (('precision', None, 'bf16', False), ('weights', None, 'bf16', True)), 'products in 16 bits are rounding in the status and in the claims too'
    assert a.diff(b).to_dict()['lr'] == dict(first=5e-5, second=1e-3, changes_training=True)


# --- status

def states(config=None, card='H100', **kwargs): return {r.name: r.state for r in status(config, hardware=hardware_with(card and known_gpu(card)), **kwargs).rows}


@pytest.mark.parametrize('changes, name, before, after', [
    (dict(precision='fp32'), 'BF16 or FP16 products', 'on', 'off'), (dict(tf32=False), 'TF32', 'on', 'off'), (dict(compile='default'), 'torch.compile', 'off', 'on'), (dict(fused=False), 'fused AdamW', 'on', 'off'),
    (dict(fast=True), 'CUDA graphs', 'off', 'on'), (dict(fast=True), 'torch.compile', 'off', 'on'), (dict(zero_grad_none=False), 'gradients dropped, not zeroed', 'on', 'off'), (dict(read_every=1), 'loss read rarely', 'on', 'off'),
    (dict(physical_batch=4), 'whole step at once', 'on', 'off'), (dict(checkpointing='full'), 'no gradient checkpointing', 'on', 'off'), (dict(layout='full'), 'rows sorted or packed by length', 'on', 'off'),
    (dict(layout='packed'), 'sequence packing', 'off', 'on'), (dict(adapter='lora'), 'adapter (LoRA, DoRA)', 'off', 'on'), (dict(optimizer='adamw_8bit'), '8-bit AdamW', 'off', 'on'), (dict(fp8=True), 'FP8 products', 'off', 'on'),
    (dict(attention='sdpa'), 'fused attention (SDPA)', 'unknown', 'on'), (dict(attention='eager'), 'fused attention (SDPA)', 'unknown', 'off'), (dict(workers=2), 'pinned host memory', 'n/a', 'on'), (dict(eval_on_device=False), 'evaluation stays on the GPU', 'on', 'off')])
def test_each_switch_is_seen(changes, name, before, after):
    assert (states()[name], states(TrainConfig(**changes))[name]) == (before, after)


def test_sorted_rows_say_whether_the_figure_is_of_a_step_like_this_one():
    said = lambda **changes: next(r.why for r in status(TrainConfig(effective_batch=16, **changes), hardware=hardware_with(known_gpu('H100'))).rows if r.name == 'rows sorted or packed by length')
    assert 'one micro-batch a step, as here' in said() and 'one micro-batch' not in said(physical_batch=8)


def test_the_attention_of_a_model_that_is_given():
    model = example_model()
    for name, state in (('eager', 'off'), ('sdpa', 'on')):
        model.set_attn_implementation(name)
        assert states(model=model)['fused attention (SDPA)'] == state
    assert states(TrainConfig(attention='eager'), model=model)['fused attention (SDPA)'] == 'off'


def test_what_a_machine_cannot_have_does_not_count_against_it():
    assert states(card='T4')['TF32'] == states(card='RTX 3090')['FP8 products'] == states(card=None)['CUDA graphs'] == states()['channels last'] == states()['hopeless trials stopped'] == 'n/a'
    found = status(hardware=hardware_with(None))
    on, apply, _ = found.scorecard['GPU compute']
    assert apply < sum(r.category == 'GPU compute' for r in found.rows) and on <= apply


def test_recommendations_come_by_measured_gain_and_never_change_training():
    rows = [dict(claim=c, ratio_before_p50=r, ratio_before_low=r - .01, ratio_before_high=r + .01) for c, r in (('fused_adamw_step', 1.1), ('compile', 1.3), ('zero_grad_none', 1.005), ('adamw_8bit', 3.))]
    plain = TrainConfig(fused=False, zero_grad_none=False)
    found = status(plain, hardware=hardware_with(known_gpu('H100')), records=records(*rows))
    assert [r.name for r in found.recommendations] == ['torch.compile', 'fused AdamW']
    assert 'CUDA graphs' in [r.name for r in found.unmeasured] and 'fused=true' in found.text()
    for r in found.recommendations: assert r.fix.partition('=')[0] in asdict(plain)
    elsewhere = status(plain, hardware=hardware_with(known_gpu('L4')), records=records(*rows))
    assert 'another card, so measure it here' in elsewhere.text()


def test_no_figure_without_a_record():
    found = status(hardware=hardware_with(known_gpu('H100')), records=records().reindex(columns=['claim', 'card', 'variant']))
    assert all(r.gain is None for r in found.rows) and not found.recommendations and 'measured' not in found.text().split('Checklist')[0].replace('Nothing that is off was measured', '').replace('never measured', '')


def run_folder(path, **files):
    for name, content in files.items(): write_progress(path / 'progress.json', content) if name == 'progress' else write_json(path / f'{name}.json', content)
    return path

def test_folds_are_judged_by_their_own_configuration(tmp_path):
    run_folder(tmp_path, run=dict(kind='train', settings=dict(folds=2, config=asdict(TrainConfig(layout='packed', fused=False)))))
    found = {r.name: r.state for r in status(run=tmp_path).rows}
    assert found['sequence packing'] == 'on' and found['fused AdamW'] == 'off'

def test_a_run_brings_its_own_gain_and_backends(tmp_path):
    row = lambda claim, p50: dict(variant='+ x', baseline='baseline', claim=claim, ratio=None, ratio_before=dict(p50=p50, low=p50 - .1, high=p50 + .1))
    run_folder(tmp_path, run=dict(title='x'), train_config=asdict(TrainConfig(layout='padded')), ladder=dict(rows=[row('compile', 1.7)]), decisions=[dict(what='attention', value='flash', reason='what really ran')],
               study=dict(epochs_spent=10, epochs_full=30, controller=dict(strategy='racing'), trials=[]))
    found = {r.name: r for r in status(run=tmp_path, hardware=hardware_with(known_gpu('H100'))).rows}
    assert found['torch.compile'].gain.where == 'this run' and found['torch.compile'].gain.p50 == 1.7 and found['fused attention (SDPA)'].state == 'on'
    assert found['hopeless trials stopped'].state == 'on' and found['hopeless trials stopped'].gain.p50 == 3 and found['rows sorted or packed by length'].state == 'off'

    run_folder(tmp_path, decisions=[dict(what='attention', value='math', reason='what really ran')])
    math = next(r for r in status(run=tmp_path, hardware=hardware_with(known_gpu('H100'))).rows if r.name == 'fused attention (SDPA)')
    assert math.state == 'n/a' and 'no fused kernel' in math.why, 'asking for SDPA again would change nothing'
    own = [dict(what='attention', value="the model's own", reason='what really ran')]
    run_folder(tmp_path, decisions=own)
    assert 'fused attention (SDPA)' not in [r.name for r in status(run=tmp_path, hardware=hardware_with(known_gpu('H100'))).recommendations], 'nobody knows whether the model has it'
    run_folder(tmp_path, decisions=[*own, dict(what='attention that the model has', value='eager, sdpa', reason='what transformers says')])
    assert 'fused attention (SDPA)' in [r.name for r in status(run=tmp_path, hardware=hardware_with(known_gpu('H100'))).recommendations]

@pytest.mark.parametrize('changes, said', [(dict(memory_bytes=50 * 2**30), 'memory within the plan'), (dict(sequences_per_s=10.), 'samples/s above the recorded floor')])
def test_checks_see_what_is_wrong(tmp_path, changes, said):
    good = Progress('finished', 5, 10, 1, 2, loss=.4, sequences_per_s=500., memory_bytes=2**30)
    ladder = dict(rows=[dict(variant='baseline', baseline='baseline', claim=None, ratio=None, samples_per_s=dict(p20=100.))])
    check = lambda progress: {c.what: c.ok for c in status(run=run_folder(tmp_path, run={}, batch=dict(peak_bytes=20 * 2**30), ladder=ladder, progress=progress), hardware=hardware_with(known_gpu('H100'))).checks}
    assert check(good)[said] is True and check(replace(good, **changes))[said] is False


def test_a_loss_that_is_no_number_is_seen(tmp_path):
    check = lambda *losses: {c.what: c.ok for c in status(run=run_folder(tmp_path, run={}, train=dict(history=[dict(train_loss=l, samples_per_s=9.) for l in losses])), hardware=hardware_with(None)).checks}['losses are numbers']
    assert check(.5, .4) is True and check(.5, float('nan')) is False


def test_a_busy_card_is_asked_only_while_a_training_runs(tmp_path, monkeypatch):
    import optkit.status as module
    run = run_folder(tmp_path, run={}, progress=Progress('running', 5, 10, 1, 2, loss=.4, card='GPU-2')) # not the first of the machine
    for share, ok in ((.95, True), (.5, False), (None, None)):
        monkeypatch.setattr(module, 'gpu_busy', lambda seconds, card: share if card == 'GPU-2' else None)
        assert status(run=run, hardware=hardware_with(known_gpu('H100'))).checks[0].ok is ok
    write_progress(run / 'progress.json', Progress('finished', 5, 10, 1, 2, loss=.4))
    monkeypatch.setattr(module, 'gpu_busy', lambda seconds, card: 1 / 0)
    assert status(run=run, hardware=hardware_with(known_gpu('H100'))).checks[0].ok is None


def test_run_folders_that_are_none(tmp_path):
    for path in (tmp_path / 'none', tmp_path):
        with pytest.raises(InputError): read_run(path)
    (tmp_path / 'run.json').write_text('{"half": ')
    with pytest.raises(InputError): read_run(tmp_path)


def test_a_folder_in_place_of_a_configuration_is_said():
    with pytest.raises(InputError, match="'runs/one' is no TrainConfig; a run folder is given as run="): status('runs/one')


def test_every_claim_of_the_status_is_a_claim_and_every_fix_a_setting():
    from optkit.claims import claims
    from optkit.config import parse_settings
    known = set(claims().index)
    assert not {c for o in OPTIMIZATIONS for c in o.claims} - known
    for o in OPTIMIZATIONS:
        if o.fix and o.category != 'Search': TrainConfig(**parse_settings([o.fix]))
    assert len({o.name for o in OPTIMIZATIONS}) == len(OPTIMIZATIONS) and not read_committed().empty


def test_a_part_of_a_step_a_copy_of_a_record_and_a_row_beside_are_no_gain_of_a_step():
    part = dict(claim='pin_memory', kind='copy', variant='Pinned host memory', baseline='pageable', ratio_p50=4.)
    assert gain_of(records(part), 'pin_memory', 'h100') is None
    told = gain_of(records(dict(part, extra_whole_epoch_p50=1., extra_whole_epoch_low=.99, extra_whole_epoch_high=1.02)), 'pin_memory', 'h100')
    assert (told.p50, told.low, told.high) == (1., .99, 1.02)
    row = dict(claim='batch_size', variant='16', baseline='8', ratio_before_p50=9., ratio_before_low=8., ratio_before_high=10.) # of a list that is no ladder
    rows = records(row, dict(row, variant='8', ratio_p50=1., ratio_low=1., ratio_high=1.), dict(row, file='copy.json', source='recorded', ratio_p50=7.), dict(row, variant='x', label='changes training', ratio_p50=5.))
    found = gain_of(rows, 'batch_size', 'h100')
    assert (found.p50, found.files) == (2., ('r.json',))


def test_a_row_that_is_set_against_something_else_is_no_gain_of_a_step():
    "DoRA against LoRA, torch.compile in each trial, and torch's own flash kernel, which is not the package"
    for claim, kind in (('dora', 'dora'), ('compile_in_hpo', 'derived'), ('flash_step', 'switch')):
        assert gain_of(records(dict(claim=claim, kind=kind, variant='x', baseline='y', ratio_p50=.8)), claim, 'h100') is None
    assert gain_of(records(dict(claim='flash_step', variant='flash, whole step, 512', baseline='math', ratio_p50=1.1)), 'flash_step', 'h100').p50 == 1.1


def test_a_list_against_a_step_in_16_bits_is_no_gain_over_one_in_fp32():
    "Two records of one claim whose plain steps are not the same: FP32, and weights in bf16 from the start"
    whole, of = dict(claim='all_3090', kind='switch', variant='all', baseline='without', reason=None), dict(file='w2-claims-h100.json', reason='the weights of Gemma are in bf16 from the start')
    rows = records(dict(whole, file='w1-claims-h100.json', ratio_p50=3.), dict(whole, file='w2-claims-h100.json', ratio_p50=1.1), dict(of, claim='bf16', variant='bf16', ratio_p50=np.nan),
                   dict(whole, claim='no_checkpointing', file='w1-claims-h100.json', ratio_p50=1.5), dict(whole, claim='no_checkpointing', file='w2-claims-h100.json', ratio_p50=1.3))
    assert (gain_of(rows, 'all_3090', 'h100').p50, gain_of(rows, 'all_3090', 'h100').files) == (3., ('w1-claims-h100.json',))
    both = gain_of(rows, 'no_checkpointing', 'h100')
    assert both.workloads == ('w1', 'w2') and '2 records of w1, w2' in repr(both) and 'of w' not in repr(gain_of(rows, 'all_3090', 'h100'))
    assert gain_of(records(dict(claim='bf16_native', kind='native', variant='two layers', baseline='8 bits')), 'bf16_native', 'h100') is None, 'two layers are no step'


def test_the_fast_engine_is_told_by_its_row_of_a_ladder():
    rows = records(dict(claim='cuda_graphs', variant='CUDA graphs', ratio_p50=6.9), dict(claim=None, variant='+ fast engine: layers, graphs', ratio_before_p50=3.3, ratio_before_low=2.6, ratio_before_high=3.9))
    found = status(hardware=hardware_with(known_gpu('H100')), records=rows)
    assert [(r.fix, r.gain.p50) for r in found.recommendations] == [('fast=true', 3.3)]


# --- where a search stands

def test_a_search_that_nobody_works_on_is_over(tmp_path):
    from filelock import FileLock
    from optkit.run_folder import at_work, standing
    trials = [dict(number=n, state='complete', value=.5) for n in range(3)]
    write_json(tmp_path / 'run.json', dict(title='Study'))
    assert at_work(tmp_path) is None and standing(tmp_path) == ('Study: nothing done', False), 'no lock, as of a training'
    with FileLock(tmp_path / '.lock'):
        assert at_work(tmp_path) is True and not standing(tmp_path)[1]
        write_json(tmp_path / 'study_so_far.json', dict(trials=trials, planned=9, best=0, metric='accuracy'))
        assert standing(tmp_path) == ('study: 3 of 9 trials, 0 stopped early, best accuracy 0.5000 (trial 0)', False)
    assert at_work(tmp_path) is False and standing(tmp_path) == ('study: 3 of 9 trials, 0 stopped early, best accuracy 0.5000 (trial 0); its process has ended, the same command goes on', True)
    (tmp_path / 'study_so_far.json').rename(tmp_path / 'study.json')
    write_json(tmp_path / 'final.json', {})
    assert standing(tmp_path) == ('study: 3 of 9 trials, 0 stopped early, best accuracy 0.5000 (trial 0)', True)


def test_a_look_at_a_search_does_not_turn_away_the_process_that_begins_it(tmp_path):
    import threading
    from filelock import FileLock
    from optkit.run_folder import folder_lock
    held = FileLock(tmp_path / '.lock', thread_local=False)
    held.acquire()
    threading.Timer(.2, held.release).start()
    with folder_lock(tmp_path): pass
    with FileLock(tmp_path / '.lock'), pytest.raises(InputError, match='another process'):
        with folder_lock(tmp_path): pass
