"Weights in bf16 whose small updates count: masters in FP32, or rounding at random; with both engines, resets and checkpoints"
import numpy as np
import pytest
import torch
import transformers as tf

from optkit.build import make_engine
from optkit.config import TrainConfig
from optkit.engine import Engine
from optkit.fast import FastEngine
from optkit.hardware import hardware_with
from optkit.precision import choose_precision
from optkit.models import example_model
from optkit.steps import steps
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.trainer import Trainer
from optkit.updates import MASTERS, MasterAdamW, round_stochastically

STORE = tokenise(example_table(64), word_tokenizer(), 64, progress=False)
HERE = hardware_with(None)
BF16 = choose_precision(HERE, prefer='bf16', weights='bf16')
KINDS = pytest.mark.parametrize('kind', [Engine, FastEngine])
EACH = pytest.mark.parametrize('masters', MASTERS[1:])


def run(engine, count=6, lr=1e-3, seed=0, reset=True, **values):
    if reset: engine.reset(lr=lr, seed=seed, **values)
    plan = [s for e in range(4) for s in steps(STORE, np.arange(64), 16, seed=1, epoch=e)]
    return [engine.step(STORE, s).item() for _, s in zip(range(count), plan)]


@KINDS
def test_at_a_tiny_rate_plain_bf16_stands_still_and_masters_move_as_fp32_does(kind):
    "16 steps of 2e-6: each update is far below half the distance to the next number of the weights that count here"
    def way(precision, masters=None):
        engine = kind(example_model(dropout=0.), precision, masters=masters, max_grad_norm=0.)
        run(engine, 16, 2e-6, weight_decay=0.)
        wide = {n: engine.optimizer.state[p].get('master', p).detach().float() for n, p in engine._trained()}
        return torch.cat([(w - engine.start[n].float())[engine.start[n].bfloat16().abs() > .01] for n, w in wide.items()])
    exact = way(choose_precision(HERE, prefer='bf16'))
    share = {masters: (way(BF16, masters) @ exact / (exact @ exact)).item() for masters in MASTERS}
    assert share[None] < .05 and share['fp32'] == pytest.approx(1, abs=.1) and share['stochastic'] == pytest.approx(1, abs=.3), share


def test_the_mean_of_many_roundings_is_the_value():
    torch.manual_seed(0)
    values = torch.randn(400) * 10.**torch.randint(-30, 30, (400,))
    rounded = torch.stack([round_stochastically(values.clone()).float() for _ in range(4000)])
    low, high = rounded.amin(0), rounded.amax(0)
    assert ((low <= values) & (values <= high) & (low < high)).float().mean() > .99
    share, want = (rounded == high[None]).float().mean(0), ((values - low) / (high - low)).nan_to_num(1.)
    assert (share - want).abs().max() < .05
    exact = torch.tensor([1., -2., 0., torch.inf, -torch.inf, 2.**-126])
    assert torch.equal(round_stochastically(exact.clone()).float(), exact) and round_stochastically(torch.tensor([torch.nan])).isnan().all()


@EACH
@pytest.mark.parametrize('fused', [True, False])
def test_the_update_is_that_of_adamw_in_fp32(masters, fused):
    "Of the same gradients, in pieces; rounding at random is compared where nothing is rounded: in FP32"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if masters == 'fp32' else torch.float32
    one, two = (torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.LayerNorm(20)) for _ in range(2))
    two.load_state_dict(one.state_dict())
    one, two = one.to(dtype), two.to(dtype).float()
    one[1].float() # stays in FP32 beside weights in bf16
    ours = MasterAdamW([dict(params=[*one.parameters()])], masters, piece=77, lr=.01, weight_decay=.1, **{'fused' if fused else 'foreach': True})
    plain = torch.optim.AdamW(two.parameters(), lr=.01, weight_decay=.1, foreach=True)
    for _ in range(5):
        for p, q in zip(one.parameters(), two.parameters()):
            p.grad = torch.randn(p.shape).to(p.dtype)
            q.grad = p.grad.float()
        ours.step()
        plain.step()
    for p, q in zip(one.parameters(), two.parameters()):
        wide = ours.state[p].get('master', p)
        torch.testing.assert_close(wide, q.detach() if wide is not p else q, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, wide.to(p.dtype)) and ours.state[p]['step'] == 5


@KINDS
@EACH
def test_a_reset_gives_the_run_of_a_fresh_engine(kind, masters):
    engine = kind(example_model(), BF16, masters=masters)
    first = run(engine)
    run(engine, lr=1e-2, seed=5)
    assert run(engine) == first == run(kind(example_model(), BF16, masters=masters)) and len({*first}) > 3


@KINDS
@EACH
def test_a_state_that_is_loaded_goes_on_bit_by_bit(kind, masters):
    engine = kind(example_model(dropout=0.), BF16, masters=masters)
    run(engine, 3)
    state, random = {k: v.clone() for k, v in engine.state().items()}, torch.get_rng_state()
    want = run(engine, 4, reset=False), {k: v.clone() for k, v in engine.state().items()}
    other = kind(example_model(dropout=0., seed=3), BF16, masters=masters)
    other.set(lr=1e-3)
    other.load_state(state)
    torch.set_rng_state(random)
    assert run(other, 4, reset=False) == want[0]
    assert all(torch.equal(v, want[1][k]) for k, v in other.state().items())
    assert any('master' in k for k in state) == (masters == 'fp32')


@KINDS
def test_masters_follow_weights_that_are_loaded_without_them(kind):
    "Of a run without masters, and the best weights of another epoch"
    engine = kind(example_model(dropout=0.), BF16, masters='fp32')
    run(engine, 3)
    engine.load_state({k: v for k, v in Engine(example_model(seed=3), BF16).state().items()})
    same = lambda: all(torch.equal(s['master'], p.float()) for p, s in engine.optimizer.state.items())
    assert same()
    engine.keep_best()
    run(engine, 2, reset=False)
    assert not same()
    engine.restore_best()
    assert same()


@KINDS
def test_a_trial_of_something_else_leaves_masters_as_they_were(kind):
    engine = kind(example_model(), BF16, masters='fp32')
    run(engine, 3)
    before = {k: v.clone() for k, v in engine.state().items()}
    with engine.preserved(): engine.step(STORE, np.arange(8))
    assert all(torch.equal(v, before[k]) for k, v in engine.state().items())


@EACH
@pytest.mark.parametrize('fast', [False, True])
def test_a_run_that_is_killed_and_resumed(masters, fast, tmp_path):
    "Through the configuration; the record of the run says what it is"
    config = TrainConfig(epochs=3, effective_batch=16, lr=1e-3, weights='bf16', precision='bf16', masters=masters, fast=fast, metric='loss', save_every=2)
    make = lambda folder: Trainer(make_engine(example_model(), config, HERE), STORE, config, folder=folder, progress=False)
    whole = make(tmp_path / 'whole')
    want = whole.fit(np.arange(48), np.arange(48, 64))
    part = make(tmp_path / 'part')
    step, count = part.engine.step, []
    def stops(*args):
        count.append(1)
        if len(count) > 5: raise KeyboardInterrupt
        return step(*args)
    part.engine.step = stops
    with pytest.raises(KeyboardInterrupt): part.fit(np.arange(48), np.arange(48, 64))
    resumed = make(tmp_path / 'part')
    found = resumed.fit(np.arange(48), np.arange(48, 64), resume=True)
    assert [h.train_loss for h in found.history] == [h.train_loss for h in want.history]
    for (n, p), q in zip(resumed.engine.model.named_parameters(), whole.engine.model.parameters()): assert torch.equal(p, q), n
    assert 'changes training' in resumed.engine.precision.weights.reason


@pytest.mark.parametrize('values, message', [
    (dict(masters='fp32', adapter='lora'), 'masters are for'), (dict(masters='fp32', weights='fp32'), 'masters are for'),
    (dict(masters='stochastic', weights='bf16', optimizer='adamw_8bit'), 'masters are for'), (dict(masters='fp16'), "masters is 'fp16', expected one of")])
def test_settings_that_contradict(values, message):
    with pytest.raises(ValueError, match=message): TrainConfig(**values)


def test_masters_of_weights_in_fp32_are_refused():
    with pytest.raises(ValueError, match='leave masters out'): make_engine(example_model(), TrainConfig(masters='fp32'), HERE)
    engine = make_engine(example_model().bfloat16(), TrainConfig(masters='fp32', precision='bf16'), HERE) # loaded in bf16
    assert isinstance(engine.optimizer, MasterAdamW)


def test_the_moving_average_of_weights_in_16_bits_is_kept_in_32():
    "A thousandth of a small difference is below what bf16 can add"
    model = example_model().to(torch.bfloat16)
    engine = Engine(model, choose_precision(hardware_with(None), prefer='fp32'), ema=.999)
    before = {n: a.clone() for n, a in engine.average.items()}
    with torch.no_grad():
        for _, p in engine._trained(): p.mul_(1.01)
    for _ in range(100): engine._follow(.999)
    for n, p in engine._trained():
        assert engine.average[n].dtype == torch.float32
        moved, whole = (engine.average[n] - before[n]).abs().sum(), (p.float() - before[n]).abs().sum()
        assert whole == 0 or .09 < moved / whole < .1, n
