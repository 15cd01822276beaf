"A switch for each claim about a step; 8-bit AdamW and models in 4 bits, with a stand-in where the library is missing"
import csv, json, subprocess, sys, textwrap, types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import optkit.trainer
from optkit import engine as engine_module
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import steps
from optkit.models import example_model
from optkit.engine import Engine
from optkit.updates import make_optimizer
from optkit.fast import FastEngine
from optkit.hardware import hardware_with
from optkit.precision import choose_precision
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer
from optkit.ladder import CLAIM_SWITCHES, NO_SWITCH

torch.set_num_threads(1)
HERE, ROOT = hardware_with(None), Path(__file__).resolve().parents[1]
CLAIMS = ROOT.parent / 'shared' / 'claims.csv'


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(60), word_tokenizer(), 48, progress=False)


@pytest.mark.skipif(not CLAIMS.is_file(), reason='needs the claims beside shared/data, which is not part of the project')
def test_every_claim_about_a_step_has_a_switch_or_a_reason():
    rows = list(csv.DictReader(CLAIMS.open()))
    about_steps = {r['id'] for r in rows if r['scope'] != 'whole study'}
    assert about_steps == set(CLAIM_SWITCHES) | set(NO_SWITCH) and not set(CLAIM_SWITCHES) & set(NO_SWITCH)


@pytest.mark.parametrize('name', sorted(CLAIM_SWITCHES))
def test_a_switch_makes_two_configurations(name):
    off, on = (TrainConfig(**side) for side in CLAIM_SWITCHES[name])
    assert off != on or name in ('fused_adamw', 'fused_adamw_step') and off.fused != on.fused


def engines_of(name, **changes): return [make_engine(example_model(dropout=0.), replace(TrainConfig(**side), **changes), HERE) for side in CLAIM_SWITCHES[name]]


def losses_of(engine, config, store, n=4):
    engine.reset(lr=1e-3)
    return [engine.step(store, step).item() for step, _ in zip(steps(store, np.arange(60), 16, layout=config.layout), range(n))]


def test_graphs_are_a_switch_of_the_fast_engine(monkeypatch, store):
    off, on = (TrainConfig(**side) for side in CLAIM_SWITCHES['cuda_graphs'])
    assert not make_engine(example_model(), off, HERE).graphs and not make_engine(example_model(), TrainConfig(fast=True), HERE).graphs
    with pytest.raises(InputError, match='CUDA graphs need a GPU'): make_engine(example_model(), on, HERE)
    with pytest.raises(ValueError, match='graphs are for the fast engine'): TrainConfig(graphs=True)
    assert losses_of(make_engine(example_model(dropout=0.), off, HERE), off, store) == pytest.approx(losses_of(make_engine(example_model(dropout=0.), TrainConfig(), HERE), off, store), rel=1e-5)


def test_a_run_says_why_the_fast_engine_is_not(store, monkeypatch, tmp_path):
    "In its result and its file: plain steps from the start, what could not be built, an evaluation that could not; and nothing where nothing was wrong"
    def run(name, before=lambda engine: None, **changes):
        config = TrainConfig(epochs=1, fast=True, precision='fp32', **changes)
        engine = make_engine(example_model(), config, HERE)
        before(engine)
        results = [Trainer(engine, store, config, folder=tmp_path / name / fold).fit(np.arange(40), np.arange(40, 60)) for fold in '01']
        assert all(list(r.decisions) == json.loads((tmp_path / name / fold / 'train.json').read_text())['decisions'] for fold, r in zip('01', results))
        first, second = ([(d['value'], d['reason']) for d in r.decisions if d['what'] == 'fast engine'] for r in results)
        assert first == second  # each fold of the same engine
        return first
    assert run('fast') == []
    assert run('plain', checkpointing='full') == [('plain steps', 'gradient checkpointing is full')]
    monkeypatch.setattr('optkit.fast.rows_problem', lambda *a: 'a planted problem')
    assert run('padded') == [('in part', 'rows are padded: a planted problem')]
    monkeypatch.undo()
    monkeypatch.setattr(FastEngine, '_evaluate', lambda *a: (_ for _ in ()).throw(RuntimeError('not in a capture')))
    assert run('evaluated', lambda engine: setattr(engine, 'captured_forward', True)) == [('in part', 'evaluation is plain: RuntimeError: not in a capture')]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs cuda')
def test_graphs_change_no_loss_on_a_gpu(store):
    from optkit.hardware import detect
    found = [losses_of(make_engine(example_model(dropout=0.), TrainConfig(**side, precision='fp32'), detect()), TrainConfig(), store) for side in CLAIM_SWITCHES['cuda_graphs']]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_channels_last_reaches_convolutions_and_changes_no_text_model(store):
    off, on = engines_of('channels_last')
    config = TrainConfig()
    assert losses_of(off, config, store) == losses_of(on, config, store)
    model = example_model()
    model.picture = torch.nn.Conv2d(3, 4, 3)
    for side, wanted in zip(CLAIM_SWITCHES['channels_last'], (False, True)):
        make_engine(model, TrainConfig(**side), HERE)
        assert model.picture.weight.is_contiguous(memory_format=torch.channels_last) == wanted


@pytest.mark.parametrize('name', ['all_3090', 'all_5090'])
def test_everything_at_once_is_each_of_its_switches(store, name):
    off, on = CLAIM_SWITCHES[name]
    for single in ('bf16', 'tf32_on_bf16', 'zero_grad_none', 'fused_adamw_step', 'cudnn_benchmark', 'single_item', 'gpu_eval_accumulation', 'pin_memory'):
        a, b = CLAIM_SWITCHES[single]
        for key in a.keys() & b.keys():
            if a[key] != b[key]: assert on[key] == b[key] and (off[key] == a[key] or key == 'precision'), (single, key)
    assert (on.get('compile') == 'default') == (name == 'all_5090') and on['layout'] == off['layout'] == 'full', 'the reports pad to the longest length there is'
    plain, everything = engines_of(name, compile=None, tf32=None) # a CPU has no TF32
    config = TrainConfig(layout='full')
    a, b = losses_of(plain, config, store), losses_of(everything, config, store)
    assert a == pytest.approx(b, abs=.02) and a != b and everything.precision.compute.value == 'bf16' and not plain.zero_grad_none


# --- with stand-ins

def test_8_bit_adamw_takes_bitsandbytes_on_a_gpu(monkeypatch):
    "The library by a module of that name: what it is given, and that it steps"
    made = []
    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, groups, lr): made.append((groups, lr)); super().__init__(groups, lr=lr)
    module = types.ModuleType('bitsandbytes'); module.optim = types.ModuleType('bitsandbytes.optim'); module.optim.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, 'bitsandbytes', module); monkeypatch.setitem(sys.modules, 'bitsandbytes.optim', module.optim)
    model = example_model()
    optimizer = make_optimizer(model, 'adamw_8bit', device='cuda')
    (groups, lr), = made
    assert type(optimizer) is AdamW8bit and lr == 1e-4 and [g['weight_decay'] for g in groups] == [.01, 0.]
    assert all(p.ndim > 1 for p in groups[0]['params']) and all(p.ndim < 2 for p in groups[1]['params']) and sum(len(g['params']) for g in groups) == len(list(model.parameters()))
    monkeypatch.setitem(sys.modules, 'bitsandbytes', None)
    monkeypatch.setitem(sys.modules, 'torchao', None)
    with pytest.raises(ValueError, match='neither package can be used'): make_optimizer(model, 'adamw_8bit', device='cuda')


def test_an_engine_on_8_bit_adamw_learns_resets_and_saves(monkeypatch, store):
    "State in 8 bits by a stand-in: moments as bytes with a scale, as the libraries have them"
    class AdamW8bit(torch.optim.Optimizer):
        def __init__(self, groups, lr): super().__init__(groups, dict(lr=lr, betas=(.9, .999), eps=1e-8, weight_decay=0.))
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group['params']:
                    if p.grad is None: continue
                    s = self.state[p]
                    if not s: s.update(step=torch.zeros(()), codes=torch.full_like(p, 127, dtype=torch.uint8), scale=torch.zeros(()), second=torch.zeros_like(p))
                    s['step'] += 1
                    first = (s['codes'].float() - 127) * s['scale'] * .9 + p.grad * .1
                    s['scale'].copy_(first.abs().max() / 127); s['codes'].copy_((first / s['scale'].clamp(min=1e-12)).round().clamp(-127, 128) + 127)
                    s['second'].mul_(.999).addcmul_(p.grad, p.grad, value=.001)
                    n = s['step'].item()
                    p.mul_(1 - group['lr'] * group['weight_decay']).addcdiv_(first / (1 - .9 ** n), (s['second'] / (1 - .999 ** n)).sqrt() + group['eps'], value=-float(group['lr']))
    module = types.ModuleType('torchao'); module.optim = types.ModuleType('torchao.optim'); module.optim.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, 'torchao', module); monkeypatch.setitem(sys.modules, 'torchao.optim', module.optim); monkeypatch.setitem(sys.modules, 'bitsandbytes', None)
    off, on = (replace(TrainConfig(**side), precision='fp32', lr=3e-3, epochs=4, effective_batch=16) for side in CLAIM_SWITCHES['adamw_8bit'])
    engine = make_engine(example_model(), on, HERE)
    assert type(engine.optimizer) is AdamW8bit and type(make_engine(example_model(), off, HERE).optimizer) is torch.optim.AdamW
    first = Trainer(engine, store, on).fit(np.arange(45), np.arange(45, 60))
    state = engine.state()
    assert any(t.dtype == torch.uint8 and 'codes' in k for k, t in state.items()), 'the bytes are in a checkpoint'
    again = Trainer(engine, store, on).fit(np.arange(45), np.arange(45, 60))
    losses = [e.train_loss for e in first.history]
    assert losses[-1] < losses[0] and [e.train_loss for e in again.history] == losses


STAND_IN = '''
"A stand-in for bitsandbytes: weights as 4-bit codes in bytes, with one scale"
import torch

class Params4bit(torch.nn.Parameter):
    compress_statistics, quant_type = False, 'nf4'

class Linear4bit(torch.nn.Linear):
    compute_dtype, quant_state = torch.float32, None
    def __init__(self, like):
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        scale = like.weight.abs().max() / 7
        self.register_buffer('scale', scale.detach().clone())
        codes = ((like.weight / scale).round() + 8).to(torch.uint8).flatten()
        self.weight = Params4bit(codes[::2] * 16 + codes[1::2], requires_grad=False)
        if like.bias is not None: self.bias = torch.nn.Parameter(like.bias.detach().clone(), requires_grad=False)
    def dequantised(self): return ((torch.stack([self.weight // 16, self.weight % 16], 1).flatten().float() - 8) * self.scale).view(self.out_features, self.in_features)
    def forward(self, x): return torch.nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias)

class Linear8bitLt(torch.nn.Linear): pass
class Int8Params(torch.nn.Parameter): pass
'''

SCRIPT = '''
import sys
import numpy as np, torch, bitsandbytes as bnb
from dataclasses import replace
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.fast import FastEngine
from optkit.hardware import hardware_with
from optkit.config import TrainConfig
from optkit.trainer import Trainer
from optkit.build import make_engine
torch.set_num_threads(1)
here, store = hardware_with(None), tokenise(example_table(90), word_tokenizer(), 48, progress=False)
def loaded():
    model = example_model(dropout=0.)
    for name, module in list(model.bert.encoder.named_modules()):
        for child, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear: setattr(module, child, bnb.nn.Linear4bit(layer))
    model.is_quantized = model.is_loaded_in_4bit = True
    return model
config = TrainConfig(epochs=4, lr=1e-2, effective_batch=16, precision='fp32', adapter='lora', adapter_rank=4, adapter_alpha=8.)
try: make_engine(loaded(), replace(config, adapter=None), here); raise SystemExit('trained without an adapter')
except InputError as exc: print(exc)
engine = make_engine(loaded(), config, here)
codes = {n: p.detach().clone() for n, p in engine.model.named_parameters() if p.dtype == torch.uint8}
trained = [n for n, p in engine.model.named_parameters() if p.requires_grad]
assert len(codes) == 12 and trained and all('lora_' in n or 'classifier' in n or 'pooler' in n for n in trained), (len(codes), trained)
assert any('peft.tuners.lora.bnb' in type(m).__module__ for m in engine.model.modules()), 'peft took it for a layer in 4 bits'
first = Trainer(engine, store, config, folder=sys.argv[1]).fit(np.arange(60), np.arange(60, 90))
losses = [e.train_loss for e in first.history]
assert losses[-1] < losses[0], losses
assert all(torch.equal(codes[n], p) for n, p in engine.model.named_parameters() if n in codes), 'the codes stay'
again = Trainer(engine, store, config).fit(np.arange(60), np.arange(60, 90))
assert [e.train_loss for e in again.history] == losses
from safetensors.torch import load_file
saved = load_file(sys.argv[1] + '/model/adapter_model.safetensors')
assert saved and all('lora_' in k or 'classifier' in k for k in saved), [*saved]
print('learnt', losses)
'''


def test_a_model_in_4_bits_trains_under_an_adapter_by_a_stand_in(tmp_path):
    pytest.importorskip('peft', reason='needs peft')
    package = tmp_path / 'site' / 'bitsandbytes'
    package.mkdir(parents=True)
    (package / '__init__.py').write_text("from . import nn\n__version__ = '0.49.0'\n"); (package / 'nn.py').write_text(STAND_IN)
    import os
    done = subprocess.run([sys.executable, '-c', textwrap.dedent(SCRIPT), str(tmp_path / 'run')], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, PYTHONPATH=f'{package.parent}{os.pathsep}{ROOT}', HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr[-1500:]
    assert "trains under an adapter only: adapter='lora'" in done.stdout and 'learnt' in done.stdout
