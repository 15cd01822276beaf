"LoRA and DoRA in this project's computation against peft's own: outputs, gradients, curves, files, merged weights"
import copy
import pickle
import warnings

import pytest
import torch
import transformers

peft = pytest.importorskip('peft', reason='needs peft')
from safetensors.torch import load_file

from optkit import adapters
from optkit.adapters import adapter_path, add_adapter, hasten, keep_norms, refresh_norms, shared_copy
from optkit.base import InputError
from optkit.build import make_engine, with_adapter
from optkit.checkpoint import save_model
from optkit.config import TrainConfig
from optkit.hardware import detect, hardware_with
from optkit.models import example_model
from optkit.steps import batch_of as padded, steps
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.updates import set_checkpointing

torch.set_num_threads(1)
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, pad_token_id=0)
GROUPED = dict(num_key_value_heads=2, head_dim=8, vocab_size=61, bos_token_id=1, eos_token_id=2)


def llama(**kwargs): return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | kwargs, **GROUPED))
def qwen(): return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, **GROUPED))


def gemma():
    config = transformers.Gemma3TextConfig(**SMALL, **GROUPED, sliding_window=4, num_labels=2, layer_types=['sliding_attention', 'full_attention'])
    return transformers.Gemma3TextForSequenceClassification(config)


def gpt2():
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, num_labels=2, pad_token_id=0, attn_pdrop=0., embd_pdrop=0., resid_pdrop=0.))


def deberta():
    return transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(
        vocab_size=61, type_vocab_size=0, relative_attention=True, position_buckets=8, norm_rel_ebd='layer_norm', share_att_key=True, num_labels=2,
        pos_att_type=['p2c', 'c2p'], position_biased_input=False, max_position_embeddings=32, hidden_dropout_prob=0., attention_probs_dropout_prob=0., **SMALL))


MODELS = dict(llama=llama, gemma=gemma, qwen=qwen, gpt2=gpt2, deberta=deberta)
KINDS = dict(lora=dict(kind='lora'), dora=dict(kind='dora'), rslora=dict(kind='lora', rslora=True), rsdora=dict(kind='dora', rslora=True))
pytestmark = pytest.mark.filterwarnings('ignore:fan_in_fan_out')


def base_of(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return (llama(num_hidden_layers=5) if name == 'deep' else MODELS[name]()).to(dtype)


def settings_of(kind='lora', rank=4, alpha=12., dropout=0., rslora=False, targets='all-linear', bias='none', task=None):
    return peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, use_dora=kind == 'dora', use_rslora=rslora, bias=bias, target_modules=targets, task_type=task)


def task_of(name): return 'CAUSAL_LM' if name in ('llama', 'qwen', 'deep') else 'SEQ_CLS'


def pair_of(name, dtype=torch.float64, **settings):
    "The same model under peft's adapter and ours, with factors that are not zero"
    settings = dict(rank=4, alpha=12.) | settings
    plain = peft.get_peft_model(base_of(name, dtype), settings_of(task=task_of(name), **settings))
    ours = add_adapter(base_of(name, dtype), **settings)
    assert adapter_path(ours).value == 'optkit', adapter_path(ours)
    torch.manual_seed(1)
    with torch.no_grad():
        for (n, p), (m, q) in zip(plain.named_parameters(), ours.named_parameters()):
            assert n == m and p.shape == q.shape and p.requires_grad == q.requires_grad
            if p.requires_grad: p.add_(.05 * torch.randn_like(p))
            q.copy_(p)
    return plain.train(), ours.train()


def batch_of(name, number=0):
    torch.manual_seed(100 + number)
    ids = torch.randint(3, 61, (3, 9))
    ids[1, 6:] = 0
    inputs = dict(input_ids=ids, attention_mask=(ids != 0).long(), **({} if name == 'deberta' else dict(use_cache=False)))
    return inputs | dict(labels=ids.where(ids != 0, -100) if task_of(name) == 'CAUSAL_LM' else torch.tensor([0, 1, 1]))


def gradients(model, inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differ(a, b): return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-12)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', MODELS)
def test_outputs_and_gradients_are_those_of_peft(name, kind):
    plain, ours = pair_of(name, **KINDS[kind])
    (want, wanted), (got, found) = gradients(plain, batch_of(name)), gradients(ours, batch_of(name))
    assert differ(got, want) < 1e-10 and wanted.keys() == found.keys() and len(found) > 10
    # of 1e-3 the largest: a bias of attention's keys has a gradient of 0
    largest = max(g.abs().max().item() for g in wanted.values())
    assert all((found[n] - g).abs().max().item() < 1e-9 * max(g.abs().max().item(), 1e-3 * largest) for n, g in wanted.items()), kind
    assert any(g.abs().max() > 1e-3 for n, g in found.items() if 'lora_A' in n)


@pytest.mark.parametrize('kind', ['lora', 'dora'])
@pytest.mark.parametrize('name', MODELS)
def test_five_steps_are_those_of_peft_in_fp32(name, kind):
    losses = []
    for model in pair_of(name, torch.float32, kind=kind):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        curve = []
        for n in range(5):
            loss = sum(model(**batch_of(name, 2 * n + k)).loss for k in range(2)) / 2  # two micro-batches
            optimizer.zero_grad(); loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[1] == pytest.approx(losses[0], rel=2e-5) and len({*losses[0]}) == 5


@pytest.mark.parametrize('kind', ['lora', 'dora'])
@pytest.mark.parametrize('bias', ['all', 'lora_only'])
def test_biases_that_train_get_their_gradients(kind, bias):
    plain, ours = pair_of('gpt2', kind=kind, bias=bias)
    (_, wanted), (_, found) = gradients(plain, batch_of('gpt2')), gradients(ours, batch_of('gpt2'))
    assert wanted.keys() == found.keys() and any(n.endswith('c_attn.base_layer.bias') for n in found)
    assert all(torch.allclose(found[n], g, atol=1e-12) for n, g in wanted.items())


def layer_pair(kind, dropout):
    "One linear layer under peft and ours, with a bias"
    class One(torch.nn.Module):
        def __init__(self): super().__init__(); self.lin = torch.nn.Linear(24, 16).double()
        def forward(self, x): return self.lin(x)
    models = []
    for fast in (False, True):
        torch.manual_seed(3)
        model = peft.get_peft_model(One(), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, use_dora=kind == 'dora', target_modules=['lin']))
        with torch.no_grad():
            for p in model.parameters(): p.add_(.2 * torch.randn_like(p)) if p.requires_grad else None
        model.config = transformers.PretrainedConfig()
        models.append((hasten(model) if fast else model).train())
    return models


@pytest.mark.parametrize('kind', ['lora', 'dora'])
def test_dropout_is_that_of_peft_in_distribution(kind):
    torch.manual_seed(0)
    x, means, stds = torch.randn(1, 24).double(), [], []
    plain, ours = layer_pair(kind, .3)
    assert adapter_path(ours).value == 'optkit'
    n = 40_000
    for model in (plain, ours):
        torch.manual_seed(5)
        with torch.no_grad(): y = model(x.expand(n, -1))
        means.append(y.mean(0)); stds.append(y.std(0))
    model.eval()
    with torch.no_grad(): without = model(x)[0]
    error = stds[0] / n ** .5
    assert all(((m - without).abs() < 5 * error + 1e-9).all() for m in means), 'the mean is the output without dropout'
    assert (stds[1] > .05).all()
    if kind == 'lora': assert torch.allclose(*stds, rtol=.04)


@pytest.mark.parametrize('kind', ['lora', 'dora'])
def test_gradients_under_dropout_are_of_the_mask_that_was_drawn(kind):
    ours = layer_pair(kind, .4)[1]
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    layer = ours.base_model.model.lin
    def loss():
        torch.manual_seed(7)
        return ours(x).sin().sum()
    trained = [x, *(p for p in ours.parameters() if p.requires_grad)]
    # the norm is a constant in the backward pass, so that numeric gradients need it fixed
    if kind == 'dora':
        ours(x)
        norm = layer.norm.clone()
        layer.scale = lambda name: layer.lora_magnitude_vector[name].weight / norm
    grads, eps = torch.autograd.grad(loss(), trained), 1e-6
    for p, g in zip(trained, grads):
        for k in (0, p.numel() // 2, p.numel() - 1):
            flat = p.data.view(-1)
            value = flat[k].item()
            ends = []
            for sign in (1, -1):
                flat[k] = value + sign * eps
                ends.append(loss().item())
            flat[k] = value
            assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(g.view(-1)[k].item(), abs=1e-6)


@pytest.mark.parametrize('kind', ['lora', 'dora'])
@pytest.mark.parametrize('mode', ['full', 'selective'])
def test_gradient_checkpointing_changes_nothing(kind, mode):
    plain, ours = pair_of('llama', kind=kind)
    want = gradients(plain, batch_of('llama'))[1]
    set_checkpointing(ours, mode)
    found = gradients(ours, batch_of('llama'))[1]
    assert want.keys() == found.keys() and all(differ(found[n], g) < 1e-9 for n, g in want.items())


def state(model): return {k: v.clone() for k, v in peft.get_peft_model_state_dict(model).items()}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', MODELS)
def test_what_is_saved_loads_in_peft_and_the_other_way(name, kind, tmp_path):
    plain, ours = pair_of(name, **KINDS[kind])
    ours.save_pretrained(tmp_path / 'ours')
    plain.save_pretrained(tmp_path / 'plain')
    files = [load_file(tmp_path / n / 'adapter_model.safetensors') for n in ('ours', 'plain')]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][k], v) for k, v in files[1].items())
    inputs = batch_of(name)
    want = plain.eval()(**inputs).logits
    loaded = peft.PeftModel.from_pretrained(base_of(name), tmp_path / 'ours').eval()
    assert differ(loaded(**inputs).logits, want) < 1e-6
    ours = hasten(peft.PeftModel.from_pretrained(base_of(name), tmp_path / 'plain')).eval()
    assert adapter_path(ours).value == 'optkit' or not any(p.requires_grad for p in ours.parameters())
    assert differ(ours(**inputs).logits, want) < 1e-6


@pytest.mark.parametrize('kind', ['lora', 'dora'])
@pytest.mark.parametrize('name', MODELS)
def test_merged_weights_are_those_of_peft(name, kind):
    plain, ours = pair_of(name, kind=kind)
    inputs = batch_of(name)
    before = ours.eval()(**inputs).logits
    merged = [m.eval().merge_and_unload() for m in (plain, ours)]
    assert all(torch.equal(v, merged[1].state_dict()[k]) for k, v in merged[0].state_dict().items())
    assert differ(merged[1](**inputs).logits, before) < 1e-9


def test_merging_switching_off_and_taking_back_are_those_of_peft():
    _, ours = pair_of('llama', kind='dora')
    inputs, ours = batch_of('llama'), ours.eval()
    want = ours(**inputs).logits
    with ours.disable_adapter(): assert differ(ours(**inputs).logits, base_of('llama')(**inputs).logits) < 1e-9
    ours.merge_adapter()
    assert differ(ours(**inputs).logits, want) < 1e-9
    ours.unmerge_adapter()
    assert differ(ours(**inputs).logits, want) < 1e-9


@pytest.mark.parametrize('kind', ['lora', 'dora'])
def test_a_base_in_16_bits_has_factors_and_head_in_fp32(kind, tmp_path):
    base = base_of('gemma', torch.bfloat16)
    ours = add_adapter(copy.deepcopy(base), kind, 4, 12., modules_to_save=('score',))
    assert {p.dtype for p in ours.parameters() if p.requires_grad} == {torch.float32} and ours.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    plain = peft.get_peft_model(copy.deepcopy(base), settings_of(kind, task='SEQ_CLS'))
    torch.manual_seed(1)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), ours.parameters()):
            if p.requires_grad: p.add_(.05 * torch.randn_like(p))
            q.copy_(p)
    exact = copy.deepcopy(plain).float()
    inputs = batch_of('gemma')
    want = gradients(exact, inputs)
    errors = {}
    for which, model in dict(plain=plain, ours=ours).items():
        with torch.autocast('cpu', torch.bfloat16): out = gradients(model, inputs)
        errors[which] = (out[0].float() - want[0]).norm() / want[0].norm(), torch.stack([(out[1][n].float() - g).norm() / g.norm() for n, g in want[1].items()]).mean()
    assert all(a < 2 * b + 5e-3 for a, b in zip(errors['ours'], errors['plain'])), errors
    bare = ours(**inputs).logits  # without autocast
    assert differ(bare.float(), want[0]) < .1
    ours.save_pretrained(tmp_path)
    assert differ(peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)(**inputs).logits.float(), want[0]) < .1


def test_fp32_weights_under_autocast_multiply_in_16_bits():
    plain, ours = pair_of('llama', torch.float32, kind='lora')
    exact, grads = gradients(ours, batch_of('llama'))
    with torch.autocast('cpu', torch.bfloat16): rounded, found = gradients(ours, batch_of('llama'))
    assert 1e-4 < differ(rounded.float(), exact) < .05
    assert all(found[n].dtype == torch.float32 and (found[n] - g).norm() < .1 * g.norm() for n, g in grads.items())


@pytest.mark.parametrize('targets', [('q_proj', 'v_proj'), ('gate_proj',), r'.*\.self_attn\.(k|o)_proj', 'all-linear'])
def test_targets_are_taken_as_peft_takes_them(targets):
    plain, ours = pair_of('qwen', kind='dora', targets=targets if isinstance(targets, str) else list(targets))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert differ(ours(**batch_of('qwen')).logits, plain(**batch_of('qwen')).logits) < 1e-10


def test_layers_that_share_an_input_are_computed_together_or_alone_alike():
    plain, ours = pair_of('llama', kind='dora')
    assert ours.base_model.model.model.layers[0].mlp.up_proj.together is ours.base_model.model.model.layers[0].mlp.gate_proj.together is not None
    together = gradients(ours, batch_of('llama'))
    alone = gradients(hasten(ours, together=False), batch_of('llama'))
    assert ours.base_model.model.model.layers[0].mlp.up_proj.together is None
    assert differ(together[0], alone[0]) < 1e-10 and all(differ(together[1][n], g) < 1e-9 for n, g in alone[1].items())
    hasten(ours)
    layer = ours.base_model.model.model.layers[0].self_attn
    x, other = torch.randn(2, 3, 32).double(), torch.randn(2, 3, 32).double()
    want = plain.base_model.model.model.layers[0].self_attn
    for q, k in ((x, x), (x, other), (other, other), (x, x)):  # the second is computed anew for another input
        assert torch.allclose(layer.q_proj(q), want.q_proj(q)) and torch.allclose(layer.k_proj(k), want.k_proj(k))
    assert torch.allclose(layer.k_proj(x), want.k_proj(x)), 'the same layer twice with one input'


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
@pytest.mark.parametrize('targets', [('q_proj', 'up_proj'), 'all-linear'])
@pytest.mark.parametrize('first, second', [('lora', 'dora'), ('dora', 'lora'), ('dora', 'dora')])
def test_another_adapter_on_the_same_base_is_as_a_fresh_one(first, second, targets, dtype):
    base, inputs = base_of('gemma', dtype), batch_of('gemma')
    weight = base.model.layers[0].mlp.up_proj.weight
    value = weight.clone()
    one = add_adapter(shared_copy(base), first, 8, 8., modules_to_save=('score',))
    gradients(one, inputs)
    with torch.no_grad():
        for p in one.parameters():
            if p.requires_grad: p.add_(.1)
    torch.manual_seed(9)
    again = add_adapter(shared_copy(base), second, 3, 6., .1, targets=targets, modules_to_save=('score',))
    alone = base_of('gemma', dtype)
    torch.manual_seed(9)
    fresh = add_adapter(alone, second, 3, 6., .1, targets=targets, modules_to_save=('score',))
    trained = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in (again, fresh)]
    assert trained[0].keys() == trained[1].keys() and all(torch.equal(trained[0][n], p) for n, p in trained[1].items())
    shared = [m.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight for m in (one, again)]
    assert all(w is weight for w in shared) and torch.equal(weight, value)
    results = []
    for model in (again, fresh):
        torch.manual_seed(3)  # of dropout
        results.append(gradients(model.train(), inputs))
    (a, ga), (b, gb) = results
    assert torch.allclose(a, b) and ga.keys() == gb.keys() and all(torch.allclose(ga[n], g) for n, g in gb.items())
    saved = [peft.get_peft_model_state_dict(m) for m in (again, fresh)]
    assert saved[0].keys() == saved[1].keys() and again.peft_config['default'].to_dict() == fresh.peft_config['default'].to_dict()


def norm_of(layer):
    W, A, B = layer.base_layer.weight, layer.lora_A['default'].weight, layer.lora_B['default'].weight
    return (W + layer.scaling['default'] * B @ A).norm(dim=1)


def test_norms_follow_every_change_of_the_weights():
    plain, ours = pair_of('llama', kind='dora')
    layer, inputs = ours.base_model.model.model.layers[1].mlp.down_proj, batch_of('llama')
    def right(): return torch.allclose(layer.norm, norm_of(layer))
    ours(**inputs)
    assert right()
    with torch.no_grad(): layer.lora_B['default'].weight.mul_(3)
    assert not right()
    ours(**inputs)
    assert right()
    ours.load_state_dict(plain.state_dict())
    ours(**inputs)
    assert right() and differ(ours(**inputs).logits, plain(**inputs).logits) < 1e-10
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for n, p in twin.named_parameters(): p.mul_(2) if 'lora_B' in n else None
    assert differ(ours(**inputs).logits, plain(**inputs).logits) < 1e-10 and differ(twin(**inputs).logits, plain(**inputs).logits) > 1e-4
    with torch.no_grad(): layer.lora_A['default'].weight.add_(.1)
    with torch.inference_mode(): ours(**inputs)
    gradients(ours, inputs)
    assert right()


def test_an_optimizer_that_writes_past_autograd():
    "`p.data.add_` leaves no trace in a weight's version; the norm follows all the same"
    class Old(torch.optim.Optimizer):
        def step(self):
            for p in (p for g in self.param_groups for p in g['params'] if p.grad is not None): p.data.add_(p.grad, alpha=-1.)
    ours = add_adapter(base_of('llama'), 'dora', rank=4)
    layer, inputs = ours.base_model.model.model.layers[1].mlp.down_proj, batch_of('llama')
    optimizer = Old([p for p in ours.parameters() if p.requires_grad], {})
    for step in range(3):
        before = None if step == 0 else layer.norm.clone()
        gradients(ours, inputs)
        optimizer.step()
        ours(**inputs)
        assert torch.allclose(layer.norm, norm_of(layer)), step
    assert not torch.equal(before, layer.norm) and not layer.fresh


def test_kept_norms_are_new_after_each_optimizer_step():
    _, ours = pair_of('llama', kind='dora')
    layer = ours.base_model.model.model.layers[1].mlp.down_proj
    keep_norms(ours); keep_norms(ours)
    trained = [p for p in ours.parameters() if p.requires_grad]
    for optimizer in (torch.optim.AdamW(trained, lr=.02), torch.optim.SGD(trained, lr=.02)):
        before = layer.norm.clone()
        gradients(ours, batch_of('llama'))
        optimizer.step()
        assert torch.allclose(layer.norm, norm_of(layer)) and not torch.allclose(layer.norm, before)
    other = torch.nn.Linear(2, 2)
    calls, real = [], adapters.refresh_norms
    try:
        adapters.refresh_norms = lambda model: calls.append(model)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=.1).step()
    finally: adapters.refresh_norms = real
    assert not calls, 'an optimizer of other weights'


@pytest.mark.parametrize('kind, kept', [('lora', False), ('dora', False), ('dora', True)]) # LoRA has no norms
def test_a_layer_compiles_as_one_graph_for_all_layers(kind, kept):
    plain, ours = pair_of('deep', torch.float32, kind=kind)
    want = gradients(plain, batch_of('llama'))
    if kept: keep_norms(ours)
    torch._dynamo.reset()
    layers = ours.base_model.model.model.layers
    forward = torch.compile(type(layers[0]).forward, fullgraph=True, backend='aot_eager')
    from torch._dynamo.utils import counters
    counters.clear()
    for layer in layers: layer.forward = forward.__get__(layer)
    for n in range(2):
        found = gradients(ours, batch_of('llama'))
        assert differ(found[0], want[0]) < 1e-4 and all(differ(found[1][n], g) < 1e-3 for n, g in want[1].items())
        with torch.no_grad():
            for model in (plain, ours):
                for n, p in model.named_parameters(): p.add_(.01) if p.requires_grad else None
        if kept: refresh_norms(ours)
        want = gradients(plain, batch_of('llama'))
    assert counters['stats']['unique_graphs'] == 2, 'of the first layer, whose input needs no gradient, and of the four others'


@pytest.mark.parametrize('kind', ['lora', 'dora'])
def test_a_layer_with_dropout_in_16_bits_compiles_as_one_graph(kind):
    ours = add_adapter(base_of('gemma', torch.bfloat16), kind, 4, 12., dropout=.3, modules_to_save=('score',))
    keep_norms(ours)
    torch._dynamo.reset()
    layers = ours.base_model.model.model.layers
    plain = type(layers[0]).forward
    forward = torch.compile(plain, fullgraph=True, backend='aot_eager')
    results = []
    for call in (plain, forward):
        for layer in layers: layer.forward = call.__get__(layer)
        torch.manual_seed(4)
        with torch.autocast('cpu', torch.bfloat16): results.append(gradients(ours, batch_of('gemma')))
    (want, wanted), (got, found) = results
    assert differ(got, want) < .03 and wanted.keys() == found.keys() and all(torch.isfinite(g).all() for g in found.values())


@pytest.mark.engine
@pytest.mark.parametrize('kind', ['lora', 'dora'])
@pytest.mark.parametrize('fast', [False, True])
def test_an_engine_takes_the_steps_of_a_plain_peft_loop(kind, fast, ema=.5):
    store, device = store_of(), 'cuda' if torch.cuda.is_available() else 'cpu'
    c = TrainConfig(adapter=kind, adapter_rank=4, adapter_alpha=8., precision='fp32', tf32=False, seed=2, fast=fast, ema=ema, max_grad_norm=0.)
    engine = make_engine(example_model(dropout=0.), c, detect())
    torch.manual_seed(2)
    plain = peft.get_peft_model(example_model(dropout=0.), settings_of(kind, alpha=8., task='SEQ_CLS')).to(device)
    layer = next(m for m in engine.model.modules() if hasattr(m, 'lora_A'))
    for lr in (.02, .01):  # the second run begins anew
        engine.reset(lr=lr, weight_decay=0.)
        model = copy.deepcopy(plain)
        optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.), []
        for n in range(4):
            rows = torch.arange(16).numpy() + 16 * (n % 3)
            inputs, labels = padded(store, rows, 48)
            loss = torch.nn.functional.cross_entropy(model(**{k: v.to(device) for k, v in inputs.items()}).logits, labels.to(device))
            optimizer.zero_grad(); loss.backward()
            optimizer.step()
            losses.append((loss.item(), engine.step(store.to(device) if not fast else store, rows).item()))
        assert [b for _, b in losses] == pytest.approx([a for a, _ in losses], rel=1e-4) and len({a for a, _ in losses}) == 4
        if kind == 'dora':
            assert torch.allclose(layer.norm, norm_of(layer), rtol=1e-4)
            with engine.averaged(): assert torch.allclose(layer.norm, norm_of(layer), rtol=1e-4), 'of the average'
            assert torch.allclose(layer.norm, norm_of(layer), rtol=1e-4)


def test_what_cannot_be_is_refused_and_changes_nothing():
    base = base_of('llama')
    before = [n for n, _ in base.named_parameters()]
    def refused(message, *args, **kwargs):
        with pytest.raises(InputError, match=message): add_adapter(base, *args, **kwargs)
        assert [n for n, _ in base.named_parameters()] == before and all(p.requires_grad for p in base.parameters())
    refused('no lora adapter for LlamaForCausalLM: the targets .*query.* match none of its layers; the linear ones are named q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head', targets=('query',))
    refused("rank is 0, expected a whole number from 1 on", rank=0)
    refused("rank is 2.5, expected", rank=2.5)
    refused("rank is 17, but model.layers.0.self_attn.k_proj has 32 inputs and 16 outputs; take at most 16", rank=17)
    refused("expected one of \\('lora', 'dora'\\)", 'loha')
    refused('dropout is 1.0, expected', dropout=1.)
    refused("bias is 'some'", bias='some')
    base.config.quantization_config = dict(quant_method='hqq')
    refused('quantised by hqq, which cannot be used \\(not installed\\)')
    del base.config.quantization_config
    ours = add_adapter(base, 'dora', 4)
    with pytest.raises(InputError, match='under an adapter already'): add_adapter(ours)


def test_a_layer_without_a_fast_path_is_computed_by_peft_with_the_reason():
    base = base_of('gpt2')
    with pytest.warns(UserWarning, match='computed as peft does it: 1 of 3 layers: it is peft.tuners.lora.layer.Embedding'):
        ours = add_adapter(base, 'dora', 4, 12., targets=('wte', 'c_attn'))
    plain = peft.get_peft_model(base_of('gpt2'), settings_of('dora', targets=['wte', 'c_attn'], task='SEQ_CLS'))
    with torch.no_grad():
        for p, q in zip(ours.parameters(), plain.parameters()): p.copy_(q.add_(.05 * torch.randn_like(q)) if q.requires_grad else q)
    assert adapter_path(ours).value == 'both' and differ(ours(**batch_of('gpt2')).logits, plain(**batch_of('gpt2')).logits) < 1e-10
    hooked = base_of('llama')
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: o * 2)
    with pytest.warns(UserWarning, match='1 of 14 layers: the layer below has hooks'): add_adapter(hooked)


def test_a_model_can_be_pickled():
    _, ours = pair_of('llama', kind='dora')
    again = pickle.loads(pickle.dumps(ours))
    assert adapter_path(again).value == 'optkit' and torch.equal(again(**batch_of('llama')).logits, ours(**batch_of('llama')).logits)


def store_of(rows=60): return tokenise(example_table(rows), word_tokenizer(), 48, progress=False)


@pytest.mark.parametrize('kind', ['lora', 'dora'])
def test_the_trainer_takes_this_computation(kind, tmp_path):
    c = TrainConfig(adapter=kind, adapter_rank=4, precision='fp32', seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter('error') # computed as peft does it; `is_gradient_checkpointing` is deprecated
        model = with_adapter(example_model(), c)
    assert adapter_path(model).value == 'optkit'
    engine, store = make_engine(example_model(), c, hardware_with(None)), store_of()
    layer = next(m for m in engine.model.modules() if hasattr(m, 'lora_A'))
    assert layer.fresh == (kind == 'dora')
    plan = next(steps(store, torch.arange(60).numpy(), 16))
    engine.reset(lr=.05)
    for _ in range(3): engine.step(store, plan)
    if kind == 'dora':
        assert torch.allclose(layer.norm, norm_of(layer), rtol=1e-4)
        trained = layer.norm.clone()
        engine.reset()
        assert torch.allclose(layer.norm, norm_of(layer), rtol=1e-4) and not torch.allclose(layer.norm, trained, rtol=1e-4)
    save_model(engine.model, tmp_path / 'model')
    peft.PeftModel.from_pretrained(example_model(), tmp_path / 'model')
