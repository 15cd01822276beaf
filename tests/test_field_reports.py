"What users of this and of other tools met, each with the smallest input and the right value"
import numpy as np
import pytest
import torch

from optkit.data import example_table, steps, tokenise, word_tokenizer
from optkit.engine import Engine, example_model
from optkit.precision import choose_precision
from optkit.hardware import detect


def engine_and_store(compile=None, prefer='fp32', **options):
    hardware = detect()
    engine = Engine(example_model(dropout=0.), choose_precision(hardware, prefer=prefer), compile=compile, **options)
    return engine, tokenise(example_table(64), word_tokenizer(), 48, progress=False).to(engine.device)


def losses_of(engine, store, epochs=2, drop=True):
    "Losses of steps of 16 rows, in micro-batches of 4, the last step shorter and in one piece"
    engine.reset(lr=3e-3)
    return [engine.step(store, step).item() for epoch in range(epochs)
            for step in steps(store, np.arange(34 if drop else 32), 16, epoch=epoch, physical=4)]


class Overwriting(torch.autograd.Function):
    "What CUDA graphs of a compiler do: every backward pass returns its gradient in the same memory"
    memory = {}

    @staticmethod
    def forward(ctx, weight, name):
        ctx.name = name
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        memory = Overwriting.memory.setdefault(ctx.name, torch.empty_like(gradient))
        return memory.copy_(gradient).detach(), None


@pytest.mark.parametrize('zero_grad_none', [True, False])
def test_field_compiled_graphs_with_several_micro_batches_give_the_losses_of_eager(zero_grad_none, monkeypatch):
    plain, store = engine_and_store(zero_grad_none=zero_grad_none)
    right = losses_of(plain, store)
    engine, store = engine_and_store(zero_grad_none=zero_grad_none)
    head, inner = engine.model.classifier, torch.nn.functional.linear
    Overwriting.memory = {}
    monkeypatch.setattr(head, 'forward', lambda x: inner(x, Overwriting.apply(head.weight, 'weight'), head.bias))
    engine.replays = True
    assert losses_of(engine, store) == pytest.approx(right, rel=1e-6)
    assert losses_of(engine, store) == pytest.approx(right, rel=1e-6), 'after a reset'


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('prefer', ['fp32', None])
def test_field_reduce_overhead_with_several_micro_batches_gives_the_losses_of_eager(prefer):
    right = losses_of(*engine_and_store(prefer=prefer))
    engine, store = engine_and_store('reduce-overhead', prefer)
    losses = losses_of(engine, store)
    assert losses == pytest.approx(right, rel=2e-5 if prefer else 2e-2)
    again = losses_of(engine, store)
    assert again == pytest.approx(losses, rel=1e-6 if prefer else 1e-2)
    rows = np.arange(34)
    eager, _ = engine_and_store(prefer=prefer)
    engine.reset(), eager.reset()
    assert torch.allclose(engine.predict(store, rows, 8), eager.predict(store, rows, 8), atol=1e-5 if prefer else 3e-2)
