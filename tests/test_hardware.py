"What optkit says about machines that are not here: cards by name, fake /proc and cgroup trees, broken wheels"
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from optkit import hardware
from optkit.hardware import Hardware, Memory, cgroup_limits, detect, gpu_from, gpu_table, hardware_with, known_gpu, look_at_cpu, machine_notes, slug

CARDS = {  # name as a driver or a person says it: bf16 (or fp16) TFLOP/s, GB/s, capability
    'NVIDIA GeForce RTX 3090': (71, 936, (8, 6)), 'NVIDIA GeForce RTX 3090 Ti': (80, 1008, (8, 6)), 'RTX 4090': (165.2, 1008, (8, 9)),
    'rtx4070ti': (80.2, 504, (8, 9)), 'NVIDIA GeForce RTX 5090': (209.5, 1792, (12, 0)), 'NVIDIA A10': (125, 600, (8, 6)),
    'NVIDIA A100-SXM4-40GB': (312, 1555, (8, 0)), 'NVIDIA A100 80GB PCIe': (312, 1935, (8, 0)), 'NVIDIA L4': (121, 300, (8, 9)),
    'NVIDIA L40S': (362, 864, (8, 9)), 'Tesla T4': (65, 320, (7, 5)), 'Tesla V100-SXM2-32GB': (125, 900, (7, 0)),
    'NVIDIA H100 PCIe': (756, 2039, (9, 0)), 'NVIDIA H100 80GB HBM3': (989.4, 3352, (9, 0)), 'NVIDIA H100 NVL': (835.5, 3938, (9, 0)),
    'NVIDIA H200': (989.4, 4800, (9, 0)), 'NVIDIA B200': (2250, 7750, (10, 0)), 'NVIDIA RTX 6000 Ada Generation': (364.2, 960, (8, 9)),
    'NVIDIA RTX PRO 6000 Blackwell Workstation Edition': (503.8, 1792, (12, 0))}


@pytest.mark.parametrize('name', CARDS)
def test_known_cards(name):
    flops, bandwidth, capability = CARDS[name]
    gpu = known_gpu(name)
    assert gpu.peak.get('bf16', gpu.peak['fp16']) == pytest.approx(flops * 1e12)
    assert (gpu.bandwidth, gpu.capability) == (pytest.approx(bandwidth * 1e9), capability) and gpu.source


@pytest.mark.parametrize('name', ['NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA GeForce RTX 5090 D', 'NVIDIA A10G', 'NVIDIA H20', 'NVIDIA H100', 'NVIDIA GH200 480GB',
                                  'NVIDIA A100-SXM4-80GB MIG 1g.10gb', 'GRID A100-40C', 'RTX 6000', 'NVIDIA RTX A6000', 'Quadro RTX 6000', 'RTX 3090 48GB',
                                  'AMD Instinct MI300X', 'RTX 9090', 'GTX 3090', 'NVIDIA RTX PRO 6000 Blackwell Server Edition', '', ' '])
def test_an_unknown_card_gives_none(name): assert known_gpu(name) is None


def test_every_name_of_the_table_finds_its_own_row():
    for name, gpu in gpu_table().items():
        assert known_gpu(name) is gpu and known_gpu(name.upper()) is gpu and known_gpu(name.replace(' ', '-').lower()) is gpu


def test_slugs_are_safe_and_tell_cards_apart():
    slugs = [slug(n) for n in gpu_table()]
    assert len(set(slugs)) == len(slugs)
    for s in slugs + [slug('NVIDIA A100-SXM4-80GB MIG 1g.10gb'), slug('Weird/Card: 7'), slug('')]: assert s and s == s.lower() and not set(s) & set('/: \\')
    assert [slug(n) for n in ('NVIDIA H100 80GB HBM3', 'NVIDIA H200', 'NVIDIA GeForce RTX 3090')] == ['h100', 'h200', 'rtx3090']


def plant(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + '\n')
    return root


V2 = '30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate'
G = 2**30


@pytest.mark.parametrize('files, cores, memory', [
    ({'proc/self/cgroup': '0::/a/b', 'proc/self/mountinfo': V2, 'sys/fs/cgroup/a/b/cpu.max': '150000 100000', 'sys/fs/cgroup/a/cpu.max': '100000 100000'}, 1., None),
    ({'proc/self/cgroup': '0::/a/b', 'proc/self/mountinfo': V2, 'sys/fs/cgroup/a/b/cpu.max': 'max 100000', 'sys/fs/cgroup/a/b/memory.max': 'max',
      'sys/fs/cgroup/a/memory.max': str(4 * G)}, None, 4 * G),
    ({'proc/self/cgroup': '0::/', 'sys/fs/cgroup/cpu.max': '400000 100000', 'sys/fs/cgroup/memory.max': str(G)}, 4., G),           # own namespace, no mountinfo
    ({'proc/self/cgroup': '0::/../other', 'proc/self/mountinfo': V2, 'sys/fs/cgroup/cpu.max': '300000 100000'}, 3., None),          # outside the namespace
    ({'proc/self/cgroup': '0::/docker/x/inner', 'proc/self/mountinfo': V2.replace(' / /', ' /docker/x /'), 'sys/fs/cgroup/inner/cpu.max': '50000 100000'}, .5, None),
    ({'proc/self/cgroup': '5:memory:/kube/p\n4:cpuacct,cpu:/kube/p', 'sys/fs/cgroup/cpu/kube/p/cpu.cfs_quota_us': '250000', 'sys/fs/cgroup/cpu/kube/p/cpu.cfs_period_us': '100000',
      'sys/fs/cgroup/memory/kube/p/memory.limit_in_bytes': str(2 * G)}, 2.5, 2 * G),
    ({'proc/self/cgroup': '4:cpu:/', 'sys/fs/cgroup/cpu/cpu.cfs_quota_us': '-1', 'sys/fs/cgroup/cpu/cpu.cfs_period_us': '100000'}, None, None),
    ({'proc/self/cgroup': '9:name=systemd:/\n0::/user/s', 'proc/self/mountinfo': '31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n' + V2.replace('/sys/fs/cgroup ', '/sys/fs/cgroup/unified '),
      'sys/fs/cgroup/unified/user/cpu.max': '200000 100000'}, 2., None),                                                            # hybrid
    ({'proc/self/cgroup': 'broken', 'proc/self/mountinfo': 'x'}, None, None)], ids='nested parent root outside docker v1 unlimited hybrid broken'.split())
def test_control_groups(tmp_path, files, cores, memory):
    limits = cgroup_limits(plant(tmp_path, files))
    assert (limits.cores, limits.memory) == (cores, memory)


def test_the_quota_cuts_usable_cores(tmp_path):
    plant(tmp_path, {'proc/self/cgroup': '0::/job', 'proc/self/mountinfo': V2, 'sys/fs/cgroup/job/cpu.max': '250000 100000',
                     'proc/cpuinfo': 'model name : Some CPU\nflags : fpu amx_bf16 avx512_bf16'})
    cpu = look_at_cpu(tmp_path, affinity=64)
    assert (cpu.model, cpu.usable, cpu.logical) == ('Some CPU', 2, 64) and {'amx_bf16', 'avx512_bf16'} <= cpu.flags


def test_memory_uses_the_limit_and_gives_back_file_cache(tmp_path):
    plant(tmp_path, {'proc/self/cgroup': '0::/job', 'proc/self/mountinfo': V2, 'sys/fs/cgroup/job/memory.max': str(G // 2), 'sys/fs/cgroup/job/memory.current': str(G // 4),
                     'sys/fs/cgroup/job/memory.stat': f'inactive_file {G // 8}'})
    memory = hardware.look_at_memory(tmp_path / 'not' / 'there', tmp_path)
    assert memory.limit_bytes == G // 2 and memory.available_bytes == G // 2 - G // 8 and memory.shm_bytes is None


def properties(**changes):
    return SimpleNamespace(**dict(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=85_000_000_000, multi_processor_count=132, L2_cache_size=50 * 2**20) | changes)


def test_the_peak_needs_the_whole_card():
    assert gpu_from(properties()).peak['bf16'] == pytest.approx(989.4e12)
    for changes in (dict(multi_processor_count=16), dict(total_memory=20 * G), dict(major=8), dict(name='NVIDIA H100 80GB HBM3 MIG 1g.10gb')):
        assert gpu_from(properties(**changes)).peak is None
    mig = gpu_from(properties(name='NVIDIA A100-SXM4-40GB MIG 1g.5gb', total_memory=5 * G, multi_processor_count=14, major=8))
    assert mig.mig and (mig.total_bytes, mig.multiprocessors) == (5 * G, 14)  # the slice's own


def fake_cuda(monkeypatch, ones, *cards, free=70 * G):
    "torch that has these CUDA devices, whose kernels do what `ones` does"
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: len(cards))
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: cards[i])
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda i: (free, cards[i].total_memory))
    monkeypatch.setattr(torch.cuda, 'memory_reserved', lambda i: 0)
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: ['sm_80', 'sm_90'])
    real = torch.ones
    monkeypatch.setattr(torch, 'ones', lambda n, device='cpu', **k: ones(device) if str(device).startswith('cuda') else real(n, device=device, **k))


def test_a_wheel_without_the_cards_architecture(monkeypatch):
    def ones(device): raise RuntimeError('CUDA error: no kernel image is available for execution on the device\nmore')
    fake_cuda(monkeypatch, ones, properties(name='NVIDIA GeForce RTX 5090', major=12, total_memory=34_000_000_000, multi_processor_count=170))
    found = detect()
    assert found.device == found.card == 'cpu' and not found.gpu.usable and found.gpu.problem.endswith('on the device')
    assert any('sm_80, sm_90' in n and 'capability 12.0' in n and 'pytorch.org' in n for n in found.notes)


def test_one_broken_card_of_two_is_passed_over(monkeypatch):
    def ones(device):
        if device == 'cuda:0': raise RuntimeError('CUDA error: uncorrectable ECC error encountered')
        return torch.full((8,), 1.)
    fake_cuda(monkeypatch, ones, properties(), properties(name='NVIDIA H100 PCIe', multi_processor_count=114))
    found = detect()
    assert (found.device, found.card, len(found.gpus)) == ('cuda', 'h100pcie', 2) and found.gpu == found.gpus[1]
    assert any('ECC' in n for n in found.notes) and any('outside this process' in n for n in found.notes)
    assert Hardware.from_json(found.to_json()) == found


def test_a_kernel_that_computes_wrong_is_a_problem(monkeypatch):
    fake_cuda(monkeypatch, lambda device: torch.zeros(8), properties())
    assert 'wrong' in detect().gpu.problem


def test_a_card_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(hardware, 'management_facts', lambda: ('580.1', [dict(name='NVIDIA L4', bus=None)]))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.version, 'cuda', None)
    found = detect()
    assert found.software.driver == '580.1' and any('NVIDIA L4 is there' in n and 'without CUDA' in n for n in found.notes)


class NVML:
    "A management library of one card that answers some questions and refuses the others"
    class NVMLError(Exception): pass
    def nvmlInit(): pass
    def nvmlShutdown(): pass
    def nvmlSystemGetDriverVersion(): return b'580.1'
    def nvmlDeviceGetCount(): return 1
    def nvmlDeviceGetHandleByIndex(i): return i
    def nvmlDeviceGetName(h): return 'NVIDIA H100 80GB HBM3'
    def nvmlDeviceGetPciInfo(h): return SimpleNamespace(domain=0, bus=7, device=0)
    def nvmlDeviceGetMigMode(h): return [1, 1]
    def nvmlDeviceGetEccMode(h): raise NVML.NVMLError('not supported')
    def nvmlDeviceGetCurrentClocksEventReasons(h): return 0x40 | 0x4
    def nvmlDeviceGetEnforcedPowerLimit(h): return 700_000
    def nvmlDeviceGetMaxClockInfo(h, kind): return 1980


def test_the_management_library(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'pynvml', NVML)
    driver, (facts,) = hardware.management_facts()
    assert driver == '580.1' and facts['mig'] and facts['ecc'] is None and facts['display'] is None
    fake_cuda(monkeypatch, lambda device: torch.full((8,), 1.), properties(pci_domain_id=0, pci_bus_id=7, pci_device_id=0, multi_processor_count=16))
    gpu = detect().gpu
    assert (gpu.mig, gpu.peak, gpu.power_limit_w, gpu.clock_mhz) == (True, None, 700, 1980) and 'heat' in gpu.slowed
    assert any('slowed down' in n for n in detect().notes)


@pytest.mark.parametrize('fault', ['import', 'init'])
def test_without_the_management_library(monkeypatch, fault):
    def fail(): raise NVML.NVMLError('no driver')
    broken = type('Broken', (NVML,), dict(nvmlInit=fail)) if fault == 'init' else None  # None makes the import fail
    monkeypatch.setitem(__import__('sys').modules, 'pynvml', broken)
    assert hardware.management_facts() == (None, [])
    assert detect().cpu.usable >= 1


def test_apple_and_cpu_machines_get_a_full_answer(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    found = detect()
    assert (found.device, found.card) == ('mps', 'mps') and not any('No GPU' in n for n in found.notes)
    assert (hardware_with(None).device, hardware_with(None).card) == ('cpu', 'cpu') and 'No GPU' in hardware_with(None).notes[0]


def test_notes_say_what_to_do():
    base = hardware_with(known_gpu('RTX 3090'))
    def said(gpu=base.gpu, **changes): return ' '.join(machine_notes(replace(base, gpu=gpu, gpus=(gpu,), **changes)))
    assert 'nvidia-smi' in said(replace(base.gpu, taken_bytes=3 * G)) and 'A screen' in said(replace(base.gpu, display=True))
    assert 'WSL' in said(software=replace(base.software, platform='Linux-5.15-microsoft-standard-WSL2'))
    assert 'MFU is n/a' in said(replace(base.gpu, peak=None)) and '--shm-size' in said(memory=replace(base.memory, shm_bytes=64 * 2**20))
    assert said(memory=Memory(64 * G, 32 * G, None, None, None), cpu=replace(base.cpu, logical=8, usable=8)) == ''


@pytest.mark.parametrize('name', [*gpu_table()])
def test_json_and_html_for_each_card(name):
    there = hardware_with(known_gpu(name))
    assert Hardware.from_json(there.to_json()) == there and there.device == 'cuda'
    assert name in repr(there) and name in there._repr_html_()
    assert '<script>' not in hardware_with(replace(there.gpu, name='<script>'))._repr_html_()


def test_json_of_a_later_version_is_read():
    import json
    d = json.loads(hardware_with(known_gpu('T4')).to_json())
    d['gpu']['colour'] = d['cpu']['colour'] = 'green'
    assert Hardware.from_json(json.dumps(d)).gpu.name == 'T4'
