"LoRA and DoRA through peft against a plain peft loop; gradients with checkpointing; what is saved loads with peft alone"
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from optkit.checkpoint import latest_checkpoint
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import batch_of, sample_order, steps
from optkit.models import example_model
from optkit.hardware import hardware_with
from optkit.config import lr_factor, TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer

peft = pytest.importorskip('peft', reason='needs peft')
torch.set_num_threads(1)
HERE = hardware_with(None)
TRAIN, VALID = np.arange(60), np.arange(60, 90)
BASE = TrainConfig(epochs=2, lr=1e-2, effective_batch=16, precision='fp32', adapter='lora', adapter_rank=4, adapter_alpha=8., seed=2)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(90), word_tokenizer(), 48, progress=False)


@pytest.mark.parametrize('layout', ['sorted', 'packed'])
@pytest.mark.parametrize('adapter', ['lora', 'dora'])
def test_a_run_is_that_of_a_plain_peft_loop(store, adapter, layout):
    c = replace(BASE, adapter=adapter, layout=layout, physical_batch=5)
    engine = make_engine(example_model(dropout=0.), c, HERE)
    losses, real = [], engine.step
    engine.step = lambda *a: (losses.append(real(*a)), losses[-1])[1]
    Trainer(engine, store, c).refit(TRAIN)
    torch.manual_seed(2)
    model = peft.get_peft_model(example_model(dropout=0.), peft.LoraConfig(r=4, lora_alpha=8, target_modules='all-linear', use_dora=adapter == 'dora', task_type='SEQ_CLS'))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, plain, done = torch.optim.AdamW([dict(params=[p for p in trained if p.ndim > 1], weight_decay=.01), dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.)], lr=1., fused=True), [], 0
    for epoch in (1, 2):
        order = sample_order(TRAIN, 2, epoch)
        for n in range(0, 60, 16):
            model.train()
            inputs, labels = batch_of(store, order[n:n + 16], 48)
            for g in optimizer.param_groups: g['lr'] = 1e-2 * lr_factor(done, 8, .06)
            loss = F.cross_entropy(model(**inputs).logits, labels)
            optimizer.zero_grad(); loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.)
            optimizer.step()
            plain.append(loss.item()); done += 1
    assert [l.item() for l in losses] == pytest.approx(plain, abs=3e-5) and np.ptp(plain) > 1e-3
    assert sum(p.numel() for g in engine.optimizer.param_groups for p in g['params']) == sum(p.numel() for p in trained) < .5 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize('mode', ['full', 'selective'])
def test_gradients_with_checkpointing_are_those_without(store, mode):  # huggingface/transformers#26221
    grads = {}
    for checkpointing in ('off', mode):
        engine = make_engine(example_model(), replace(BASE, checkpointing=checkpointing), HERE)
        real = engine.optimizer.step
        engine.optimizer.step = lambda *a, **k: (grads.setdefault(checkpointing, [p.grad.clone() for p in engine.model.parameters() if p.requires_grad]), real(*a, **k))
        engine.reset(seed=1)
        engine.step(store, next(steps(store, TRAIN, 16)))
    assert len(grads['off']) == len(grads[mode]) > 10 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads.values())) and any(g.abs().max() > 1e-4 for g in grads[mode])


def test_what_is_saved_loads_with_peft_alone_and_resumes(store, tmp_path):
    c = replace(BASE, save_every=1)
    whole = Trainer(make_engine(example_model(), c, HERE), store, c)
    want = whole.fit(TRAIN, VALID)
    class Stop(Exception): pass
    def breaks(done, total):
        if done == 6: raise Stop
    with pytest.raises(Stop): Trainer(make_engine(example_model(), c, HERE), store, c, folder=tmp_path, on_step=breaks).fit(TRAIN, VALID)
    again = Trainer(make_engine(example_model(), c, HERE), store, c, folder=tmp_path)
    found = again.fit(TRAIN, VALID, resume=True)
    assert [e.train_loss for e in found.history] == [e.train_loss for e in want.history] and all(torch.equal(v, again.engine.state()[k]) for k, v in whole.engine.state().items())
    there = {p.name for p in (tmp_path / 'model').iterdir()}  # with the base: pipeline() reads labels and padding there
    assert there >= {'adapter_config.json', 'adapter_model.safetensors', 'config.json', 'model.safetensors'}
    plain = peft.PeftModel.from_pretrained(example_model(), tmp_path / 'model').eval()
    inputs, _ = batch_of(store, VALID, 48)
    with torch.no_grad(): assert torch.allclose(plain(**inputs).logits, again.engine.predict(store, VALID), atol=1e-5)
    assert sum(p.stat().st_size for p in latest_checkpoint(tmp_path).rglob('*') if p.is_file()) < 400_000, 'the frozen weights are not in it'


def test_a_reset_gives_back_the_adapter_of_the_start(store):
    engine = make_engine(example_model(), BASE, HERE)
    runs = [Trainer(engine, store, BASE).refit(TRAIN) for _ in range(2)]
    assert runs[0] == runs[1] == Trainer(make_engine(example_model(), BASE, HERE), store, BASE).refit(TRAIN)


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(InputError, match='no lora adapter for BertForSequenceClassification'): make_engine(example_model(), replace(BASE, adapter_targets=('nothing_of_that_name',)), HERE)
    model = example_model()
    for p in model.parameters(): p.requires_grad_(False)
    model.is_quantized = True
    with pytest.raises(InputError, match="trains under an adapter only: adapter='lora'"): make_engine(model, replace(BASE, adapter=None), HERE)


@pytest.mark.slow
@pytest.mark.parametrize('package, settings', [('torchao', 'Int8WeightOnlyConfig'), ('bitsandbytes', None)])
def test_a_model_loaded_in_8_bits_trains_under_an_adapter(store, tmp_path, package, settings):
    pytest.importorskip(package, reason=f'{package}, which is optional, is not installed')
    if package == 'bitsandbytes' and not torch.cuda.is_available(): pytest.skip('bitsandbytes is for a GPU')
    example_model().save_pretrained(tmp_path / 'plain')
    if package == 'torchao':
        from torchao import quantization
        how = transformers.TorchAoConfig(getattr(quantization, settings)(), modules_to_not_convert=['classifier', 'pooler'])
        with pytest.raises(InputError, match='is quantised and cannot train; load the model with that layer left out'):
            make_engine(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'plain', quantization_config=transformers.TorchAoConfig(getattr(quantization, settings)())), BASE, HERE)
    else: how = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=['classifier', 'pooler'])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'plain', quantization_config=how)
    result = Trainer(make_engine(model, replace(BASE, epochs=4), HERE), store, replace(BASE, epochs=4)).fit(TRAIN, VALID)
    assert result.history[-1].train_loss < result.history[0].train_loss
