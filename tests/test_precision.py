"The number format for each card, and global switches that are put back"
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from optkit.hardware import GPU, gpu_table, hardware_with, known_gpu
from optkit.precision import BACKENDS, choose_precision, sdpa_taken, tf32_set

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
    with pytest.raises(ValueError, match='TF32.*T4'): choose_precision(t4, tf32=True)


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
    with sdpa_kernel(SDPBackend.MATH): assert sdpa_taken(q, q, q) == 'math'
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]): assert sdpa_taken(q, q, q) == 'flash' and sdpa_taken(q, q, q, dropout=.5) == 'math'


def test_every_card_of_the_table_has_a_precision():
    for gpu in gpu_table().values(): assert choose_precision(hardware_with(gpu)).compute.value in ('bf16', 'fp16')
