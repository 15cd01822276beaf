"The number format for each card, and global switches that are put back"
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from optkit.cards import GPU, gpu_table, known_gpu
from optkit.hardware import hardware_with
from optkit.precision import (
    attention_ran, BACKENDS, choose_attention, choose_fp8, choose_precision, choose_sdpa, held_format,
    import_problem, model_facts, sdpa_obstacles, tf32_set)

EXPECTED = {'RTX 3090': 'bf16', 'RTX 3090 Ti': 'bf16', 'RTX 4070': 'bf16', 'RTX 4090': 'bf16', 'RTX 5070': 'bf16', 'RTX 5090': 'bf16', 'A10': 'bf16', 'A100 PCIe 40GB': 'bf16',
            'L4': 'bf16', 'L40S': 'bf16', 'H100 PCIe': 'bf16', 'H100 SXM': 'bf16', 'H200': 'bf16', 'B200': 'bf16', 'RTX 6000 Ada': 'bf16', 'RTX PRO 6000': 'bf16', 'T4': 'fp16', 'V100': 'fp16'}


@pytest.mark.parametrize('card', EXPECTED)
def test_each_card(card):
    gpu = known_gpu(card)
    p, new = choose_precision(hardware_with(gpu)), gpu.capability >= (8, 0)
    assert p.compute.value == EXPECTED[card] and p.dtype == {'bf16': torch.bfloat16, 'fp16': torch.float16}[EXPECTED[card]]
    assert (p.tf32.value, p.scaler.value, p.device) == (new, not new, 'cuda')
    assert ('flash' in p.sdpa.value) == new and p.sdpa.value[-1] == 'math' and set(p.sdpa.value) <= set(BACKENDS)
    assert all(c.reason for c in (p.compute, p.tf32, p.scaler, p.sdpa)) and p.compute.value in repr(p) and 'Precision' in p._repr_html_()


def test_a_t4_does_not_do_bf16_whatever_torch_says(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *a, **k: True)
    t4 = hardware_with(known_gpu('T4'))
    assert 'emulated' in choose_precision(t4).compute.reason
    with pytest.raises(ValueError, match='bf16.*T4.*8.0.*fp16'): choose_precision(t4, prefer='bf16')
    with pytest.raises(ValueError, match='TF32.*T4.*set tf32=None.*or tf32=False'): choose_precision(t4, tf32=True)
    assert not choose_precision(t4, tf32=None).tf32.value and not choose_precision(t4, tf32=False).tf32.value
    with pytest.raises(ValueError, match="'no', expected True"): choose_precision(t4, tf32='no')


def test_old_unknown_and_broken_cards_are_safe():
    pascal = GPU('NVIDIA GeForce GTX 1080', 'Pascal', (6, 1), 8 * 2**30)
    assert choose_precision(hardware_with(pascal)).compute.value == 'fp32'
    assert choose_precision(hardware_with(GPU('Something'))).compute.value == 'fp32'
    broken = hardware_with(replace(known_gpu('H100 SXM'), usable=False, problem='no kernel image'))
    assert choose_precision(broken).device == 'cpu'


def machine(*flags):
    host = hardware_with(None)
    return replace(host, cpu=replace(host.cpu, flags=frozenset(flags)))


@pytest.mark.parametrize('flags, value', [((), 'fp32'), (('avx2', 'avx512f'), 'fp32'), (('avx512_bf16',), 'bf16'), (('amx_bf16', 'avx2'), 'bf16')])
def test_cpus(flags, value):
    p = choose_precision(machine(*flags))
    assert (p.compute.value, p.tf32.value, p.scaler.value, p.device) == (value, False, False, 'cpu')


def test_overrides():
    h100 = hardware_with(known_gpu('H100 SXM'))
    assert choose_precision(h100, 'fp16').scaler.value and choose_precision(h100, 'fp32').sdpa.value == ('efficient', 'math')
    assert choose_precision(h100, tf32=False).tf32.value is False and 'asked for' in choose_precision(h100, 'bf16').compute.reason
    assert choose_precision(h100, fixed_shapes=True).sdpa.value[0] == 'cudnn' and 'cudnn' not in choose_precision(h100).sdpa.value
    assert choose_precision(machine(), 'bf16').compute.value == 'bf16'  # emulated, but asked for
    with pytest.raises(ValueError, match='expected one of bf16'): choose_precision(h100, 'int8')
    with pytest.raises(ValueError, match='CPU'): choose_precision(machine(), 'fp16')
    with pytest.raises(ValueError, match='cpu'): choose_precision(machine(), tf32=True)
    assert choose_precision(replace(machine(), mps=True)).device == 'mps'


def same(now, before):
    "Whether all switches are back; where the old getter raised before, the caller's mix of interfaces, it may answer now"
    return now[1:] == before[1:] and (now[0] == before[0] or before[0] == 'raises')


def state():
    "Every switch that `applied` may touch, in the old and in the new interface"
    try: old = (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError: old = 'raises'
    new = [torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision]
    cuda = torch.backends.cuda
    return old, new, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(), torch._C._get_sdp_priority_order()


@pytest.fixture(params=['default', 'high', 'medium', 'new tf32', 'new ieee'])
def start(request):
    "A state that a caller may have left behind"
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision(request.param if request.param in ('high', 'medium') else 'highest')
    if request.param.startswith('new'): torch.backends.cuda.matmul.fp32_precision = request.param.split()[1]
    yield request.param
    torch.set_float32_matmul_precision('highest')
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize('card', ['H100 SXM', 'T4', None])
def test_everything_is_put_back(start, card):
    p = choose_precision(hardware_with(known_gpu(card) if card else None))
    other = choose_precision(hardware_with(known_gpu('RTX 3090')), tf32=False)
    before = state()
    for _ in range(2):
        with p.applied() as entered:
            assert entered is p and torch.get_float32_matmul_precision() == ('high' if p.tf32.value else 'highest')
            inside = state()
            with other.applied(): assert torch.backends.cuda.matmul.allow_tf32 is False
            assert state() == inside
            with p.applied(), p.applied(): pass
            assert state() == inside
        assert same(state(), before)
    with pytest.raises(ZeroDivisionError):
        with p.applied(), other.applied(): 1 / 0
    assert same(state(), before)


def test_a_generator_that_is_closed_early_puts_back():
    p, before = choose_precision(hardware_with(known_gpu('H100 SXM'))), state()
    def epochs():
        with p.applied(): yield 1
    run = epochs()
    next(run)
    run.close()
    assert state() == before


def test_the_graph_compiler_reads_the_old_getter_inside_and_after():
    p = choose_precision(hardware_with(known_gpu('H100 SXM')))
    f, x = torch.compile(lambda x: (x @ x).relu(), backend='aot_eager'), torch.randn(4, 4)
    with p.applied(): inside = f(x)
    assert torch.equal(inside, f(x)) and torch.get_float32_matmul_precision() == 'highest'


def test_autocast_and_scaler():
    a = torch.randn(4, 4)
    for prefer, dtype in (('bf16', torch.bfloat16), ('fp32', torch.float32)):
        p = choose_precision(machine('avx512_bf16'), prefer)
        for _ in range(2):
            with p.autocast(): assert (a @ a).dtype == dtype
        assert p.make_scaler() is None
    assert (a @ a).dtype == torch.float32
    p = replace(choose_precision(hardware_with(known_gpu('T4'))), device='cpu')
    assert p.make_scaler().is_enabled() and p.make_scaler() is not p.make_scaler()


def test_tf32_does_not_touch_bf16():
    torch.manual_seed(0)
    a = torch.randn(64, 64).bfloat16()
    with tf32_set(True): on = a @ a
    with tf32_set(False): off = a @ a
    assert torch.equal(on, off)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('backend', ['flash', 'math'])
def test_a_row_of_padding_stays_finite(backend, dtype):
    q = torch.randn(2, 2, 8, 16, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[1] = False
    with sdpa_kernel(BACKENDS[backend]): out = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    out.float().square().sum().backward()
    assert out.isfinite().all() and q.grad.isfinite().all()


def test_the_backend_that_is_taken():
    q = torch.randn(1, 2, 8, 16)
    def ran(dropout=0.): return attention_ran(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout))
    with sdpa_kernel(SDPBackend.MATH): assert ran() == {'math': 1}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]): assert ran() == {'flash': 1} and ran(.5) == {'math': 1}


def test_every_card_of_the_table_has_a_precision():
    for gpu in gpu_table().values(): assert choose_precision(hardware_with(gpu)).compute.value in ('bf16', 'fp16')


# ---- what each choice depends on

def test_bf16_weights_have_to_be_asked_for_and_say_that_they_change_training():
    h100 = hardware_with(known_gpu('H100'))
    assert choose_precision(h100).weights.value == 'fp32' and 'survive' in choose_precision(h100).weights.reason
    asked = choose_precision(h100, weights='bf16').weights
    assert asked.value == 'bf16' and 'changes training' in asked.reason
    with pytest.raises(ValueError, match='products are in fp16'): choose_precision(hardware_with(known_gpu('T4')), weights='bf16')
    with pytest.raises(ValueError, match='expected fp32, bf16'): choose_precision(h100, weights='int8')


def test_bf16_weights_lose_updates_that_fp32_weights_keep():
    moved = {}
    for weights in ('fp32', 'bf16'):
        torch.manual_seed(0)
        layer = choose_precision(machine('avx512_bf16'), 'bf16', weights=weights).prepare(torch.nn.Linear(64, 64))
        assert layer.weight.dtype == dict(fp32=torch.float32, bf16=torch.bfloat16)[weights]
        before, optimizer = layer.weight.detach().clone(), torch.optim.AdamW(layer.parameters(), lr=1e-5)
        layer(torch.randn(8, 64, dtype=layer.weight.dtype)).square().sum().backward()
        optimizer.step()
        moved[weights] = (layer.weight != before).float().mean().item()
    assert moved['fp32'] > .95 and moved['bf16'] < .5


@pytest.mark.parametrize('card, able', [('H100', True), ('L4', True), ('RTX 4090', True), ('RTX 5090', True), ('B200', True), ('A100', False), ('RTX 3090', False), ('T4', False), (None, False)])
def test_fp8_needs_the_card_the_package_and_wide_layers(card, able):
    hw = hardware_with(known_gpu(card) if card else None)
    assert choose_fp8(hw, [(4096, 4096)]).value is False
    if not able:
        with pytest.raises(ValueError, match='fp8.*8.9.*leave fp8 out'): choose_fp8(hw, [(4096, 4096)], fp8=True)
        return
    wide = choose_fp8(hw, [(4096, 4096), (4096, 14336), (4096, 10)], fp8=True, compiled=True)
    eager = choose_fp8(hw, [(4096, 4096)], fp8=True)
    assert eager.value is False and 'without torch.compile' in eager.reason
    assert wide.value is True and '2 of 3' in wide.reason and 'changes training' in wide.reason
    narrow = choose_fp8(hw, [(768, 3072)], fp8=True)
    assert narrow.value is False and 'slow this model down' in narrow.reason
    with pytest.raises(ValueError, match='torchao.*not installed.*pip install'): choose_fp8(hw, [(4096, 4096)], fp8=True, problem='not installed')


def test_fp8_converts_the_wide_layers_and_only_those(monkeypatch):
    import sys, types
    import optkit.precision as precision
    calls = []
    def convert(model, *, module_filter_fn): calls.extend(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and module_filter_fn(m, n)); return model
    monkeypatch.setitem(sys.modules, 'torchao', types.ModuleType('torchao'))
    monkeypatch.setitem(sys.modules, 'torchao.float8', types.SimpleNamespace(convert_to_float8_training=convert))
    monkeypatch.setattr(precision, 'FP8_WIDTH', 64)
    with torch.device('meta'): model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 768), torch.nn.Linear(4096, 4095))
    p = choose_precision(hardware_with(known_gpu('H100')), fp8=True, compiled=True, model=model)
    assert p.fp8.value and p.prepare(model) is model and calls == ['0']


MASKED, PLAIN = dict(mask=True), {}
@pytest.mark.parametrize('card, compute, calls, first', [
    ('H100', 'bf16', PLAIN, 'flash'), ('H100', 'bf16', MASKED, 'efficient'), ('H100', 'fp32', PLAIN, 'efficient'), ('T4', 'fp16', PLAIN, 'efficient'), ('V100', 'fp16', MASKED, 'efficient'),
    ('RTX 3090', 'bf16', dict(head_size=256), 'flash'), ('RTX 4090', 'bf16', dict(head_size=256, dropout=.1), 'efficient'), ('RTX 3090', 'bf16', dict(head_size=208), 'efficient'), ('RTX 5090', 'bf16', dict(head_size=192), 'flash'),
    ('A100', 'bf16', dict(head_size=256), 'flash'), ('H100', 'bf16', dict(head_size=320), 'efficient'), ('H100', 'fp32', dict(head_size=30), 'math'),
    ('H100', 'bf16', dict(head_size=30, mask=True), 'math'), (None, 'fp32', PLAIN, 'flash'), (None, 'fp32', dict(dropout=.1), 'math')])
def test_attention_by_shape_mask_dropout_and_card(card, compute, calls, first):
    hw = hardware_with(known_gpu(card) if card else None)
    chosen, obstacles = choose_sdpa(hw, compute, **calls), sdpa_obstacles(hw, compute, **calls)
    assert chosen.value[0] == first and chosen.value[-1] == 'math' and obstacles['math'] == ''
    assert all(not obstacles[b] for b in chosen.value)
    assert all(obstacles[b] in chosen.reason for b in ('flash', 'efficient') if b not in chosen.value)


def test_attention_goes_by_the_format_that_it_sees():
    "Without autocast that is the format of the weights: a model in 16 bits under precision='fp32' has flash"
    card = lambda name: hardware_with(known_gpu(name))
    first = lambda name, prefer, held: choose_precision(card(name), prefer, held=held).sdpa.value[0]
    assert [first('H200', p, h) for p, h in (('fp32', 'fp32'), ('fp32', None), ('fp32', 'bf16'), ('bf16', 'fp32'), (None, 'bf16'))] == ['efficient', 'efficient', 'flash', 'flash', 'flash']
    assert choose_precision(card('T4'), 'fp32', held='bf16').sdpa.value == ('math',) and choose_precision(card('T4'), 'fp32', held='fp16').sdpa.value[0] == 'efficient'
    assert [choose_precision(card('H200'), p, held='bf16').seen for p in ('fp32', 'bf16', 'fp16')] == ['bf16', 'bf16', 'fp16'] and choose_precision(card('H200'), 'fp32').seen == 'fp32'
    model = small_bert()
    assert (held_format(model), held_format(model.bfloat16())) == ('fp32', 'bf16') and choose_precision(card('H200'), 'fp32', model=model).sdpa.value[0] == 'flash'
    for name, p in model.named_parameters():
        if 'bias' in name or 'LayerNorm' in name: p.data = p.data.float()
    assert held_format(model) == 'bf16' and held_format(torch.nn.Dropout()) == 'fp32', 'most weights count; no weights are no 16 bits'


def test_cudnn_attention_only_for_few_shapes_and_cards_that_have_it():
    for card, cudnn in (('H100', True), ('B200', True), ('A100', False), ('RTX 5090', False), ('T4', False)):
        assert (choose_sdpa(hardware_with(known_gpu(card)), choose_precision(hardware_with(known_gpu(card))).compute.value, fixed_shapes=True).value[0] == 'cudnn') == cudnn
    assert choose_sdpa(hardware_with(known_gpu('H100')), 'bf16', fixed_shapes=True, head_size=256).value[0] == 'flash'


def small_bert(**settings):
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **settings))


def test_what_really_ran_is_reported():
    ids = torch.randint(50, (2, 8))
    padded = torch.ones_like(ids).index_fill(1, torch.tensor([7]), 0)
    model = small_bert(attn_implementation='sdpa', attention_probs_dropout_prob=0.)
    with sdpa_kernel(SDPBackend.MATH): assert attention_ran(lambda: model(ids, padded)) == {'math': 2}
    assert attention_ran(lambda: model(ids)) == {'flash': 2}
    assert attention_ran(lambda: small_bert(attn_implementation='eager')(ids)) == {}


def test_facts_of_a_model():
    facts = model_facts(small_bert())
    assert facts['head_size'] == 8 and facts['convolutions'] == 0 and facts['dropout'] == .1 and facts['widths'].count((32, 64)) == 2
    assert model_facts(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.Linear(4, 2))) == dict(widths=[(4, 2)], convolutions=1, head_size=64, dropout=0.)
    p = choose_precision(hardware_with(known_gpu('H100')), model=small_bert())
    assert p.cudnn_benchmark.value is False and 'no convolution' in p.cudnn_benchmark.reason and p.channels_last.value is False
    assert choose_precision(hardware_with(known_gpu('H100')), model=torch.nn.Conv2d(1, 1, 1)).cudnn_benchmark.value is True


@pytest.mark.parametrize('before', [(False, False, False, False), (True, True, True, True), (False, False, True, False)])
@pytest.mark.parametrize('workspace', [None, ':16:8'])
def test_determinism_and_cudnn_are_put_back(before, workspace, monkeypatch):
    import os
    cudnn = torch.backends.cudnn
    now = lambda: (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
                   os.environ.get('CUBLAS_WORKSPACE_CONFIG'))
    monkeypatch.setattr(cudnn, 'benchmark', before[0]); monkeypatch.setattr(cudnn, 'deterministic', before[1])
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', workspace) if workspace else monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    torch.use_deterministic_algorithms(before[2], warn_only=before[3])
    try:
        start = now()
        on, off = (choose_precision(hardware_with(known_gpu('H100')), deterministic=d) for d in (True, False))
        with on.applied():
            assert now()[1:4] == (True, True, True) and now()[4] == (workspace or ':4096:8')
            with off.applied(), on.applied(): pass
            assert now()[1:4] == (True, True, True)
        assert now() == start
        with pytest.raises(KeyError):
            with on.applied(): raise KeyError
        assert now() == start
    finally: torch.use_deterministic_algorithms(False)


# ---- a flash-attn that is there and broken

def plant_flash_attn(folder, code):
    (folder / 'flash_attn').mkdir(parents=True)
    (folder / 'flash_attn' / '__init__.py').write_text(code)
    info = folder / 'flash_attn-2.8.3.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n')
    (info / 'RECORD').write_text('flash_attn/__init__.py,,\n')
    (info / 'top_level.txt').write_text('flash_attn\n')


BROKEN = {'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10")': 'ImportError: flash_attn_2_cuda.so: undefined symbol',
          'raise OSError("libcudart.so.11.0: cannot open shared object file")': 'OSError: libcudart', 'import no_such_part': 'no_such_part'}

def test_a_broken_flash_attn_falls_back_and_says_why(tmp_path):
    import json, os, subprocess, sys
    plant_flash_attn(tmp_path, 'import os; exec(os.environ["FLASH_ATTN"])')
    script = '''
import json, os, sys, torch
torch.cuda.is_available = lambda: True   # transformers then believes the version that the package claims
from optkit.precision import choose_attention
from transformers import AutoModelForSequenceClassification, BertConfig
config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
for code in sys.argv[1:]:
    os.environ['FLASH_ATTN'] = code
    chosen = choose_attention('flash_attention_2')
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=chosen.value)
    print(json.dumps([chosen.value, chosen.reason, list(model(torch.ones(1, 4, dtype=torch.long)).logits.shape)]))'''
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get('PYTHONPATH')])])
    done = subprocess.run([sys.executable, '-c', script, *BROKEN], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path, FLASH_ATTN=[*BROKEN][0]))
    assert done.returncode == 0, done.stderr
    for line, said in zip(done.stdout.strip().splitlines(), BROKEN.values(), strict=True):
        value, reason, shape = json.loads(line)
        assert value == 'sdpa' and said in reason and 'flash_attention_2 was asked for' in reason and shape == [1, 2]


def test_attention_packages():
    assert choose_attention().value == 'sdpa' and choose_attention('eager').value == 'eager'
    assert choose_attention('flash_attention_2', problem='').value == 'flash_attention_2'
    assert choose_attention('flash_attention_3', problem='not installed').value == 'sdpa'
    assert import_problem('json') == '' and import_problem('no_such_package_at_all') == 'not installed'


@pytest.mark.slow
def test_inductor_inside_and_after():
    p = choose_precision(hardware_with(known_gpu('H100 SXM')))
    f, x = torch.compile(lambda x: torch.nn.functional.gelu(x @ x) + 1), torch.randn(32, 32)
    plain = torch.nn.functional.gelu(x @ x) + 1
    with p.applied():
        torch.testing.assert_close(f(x), plain)
        with choose_precision(hardware_with(known_gpu('H100 SXM')), tf32=False).applied(): torch.testing.assert_close(f(x), plain)
    torch.testing.assert_close(f(x), plain)
    torch.testing.assert_close(torch.compile(lambda x: (x @ x).relu())(x), (x @ x).relu())


def test_deterministic_never_tries_algorithms():
    p = choose_precision(hardware_with(known_gpu('H100')), model=torch.nn.Conv1d(1, 1, 1), deterministic=True)
    assert p.cudnn_benchmark.value is False and 'same bits' in p.cudnn_benchmark.reason


def test_a_mix_of_both_tf32_interfaces_is_put_back():
    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = matmul.fp32_precision, mkldnn.fp32_precision
    try:
        torch.set_float32_matmul_precision('high')
        mkldnn.fp32_precision = 'bf16'
        start = matmul.allow_tf32, matmul.fp32_precision, mkldnn.fp32_precision
        for on in (True, False):
            with tf32_set(on): assert torch.get_float32_matmul_precision() == ('high' if on else 'highest')
            assert (matmul.allow_tf32, matmul.fp32_precision, mkldnn.fp32_precision) == start
    finally:
        torch.set_float32_matmul_precision('highest')
        matmul.fp32_precision, mkldnn.fp32_precision = before


def test_the_engine_trains_the_weights_that_the_precision_says():
    from optkit.models import example_model
    from optkit.engine import Engine
    engine = Engine(example_model(), choose_precision(machine('avx512_bf16'), 'bf16', weights='bf16'))
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in Engine(example_model(), choose_precision(machine('avx512_bf16'), 'bf16')).model.parameters()} == {torch.float32}
