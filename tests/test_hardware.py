"What optkit says about machines that are not here: cards by name, fake /proc and cgroup trees, broken wheels"
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from optkit import cards as cards_module
from optkit import limits as limits_module
from optkit import roofline as roofline_module
from optkit import hardware
from optkit.cards import gpu_table, GPUProcess, Hardware, known_gpu, Link, Memory, slug
from optkit.limits import cgroup_limits, look_at_cpu
from optkit.hardware import detect, gpu_from, hardware_with, machine_notes
from optkit.roofline import Measured, model_shapes, Roofline, roofline

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
    ({'proc/self/cgroup': 'broken', 'proc/self/mountinfo': 'x'}, None, None),
    ({'proc/self/cgroup': '0::/a', 'proc/self/mountinfo': V2.replace('/sys/fs/cgroup', '/sys/my\\040groups'), 'sys/my groups/a/cpu.max': '150000 100000'}, 1.5, None)], ids='nested parent root outside docker v1 unlimited hybrid broken blank'.split())
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
    memory = limits_module.look_at_memory(tmp_path / 'not' / 'there', tmp_path)
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
    monkeypatch.setattr(hardware, 'management_facts', lambda: ('570.1', []))
    fake_cuda(monkeypatch, ones, properties(name='NVIDIA GeForce RTX 5090', major=12, total_memory=34_000_000_000, multi_processor_count=170))
    found = detect()
    assert found.device == found.card == 'cpu' and not found.gpu.usable and found.gpu.problem.endswith('on the device')
    assert any('sm_80, sm_90' in n and 'capability 12.0' in n and '--index-url https://download.pytorch.org/whl/cu128' in n for n in found.notes)


def test_no_alarm_where_the_list_lacks_the_card_but_a_kernel_runs(monkeypatch):
    a10 = properties(name='NVIDIA A10', major=8, minor=6, total_memory=23_500_000_000, multi_processor_count=72)  # runs code for sm_80
    fake_cuda(monkeypatch, lambda device: torch.full((8,), 1.), a10, free=a10.total_memory)
    found = detect()
    assert found.device == 'cuda' and found.gpu.usable and not any('A10' in n for n in found.notes)


def test_a_fault_that_no_other_wheel_repairs(monkeypatch):
    def ones(device): raise RuntimeError('CUDA error: uncorrectable ECC error encountered')
    fake_cuda(monkeypatch, ones, properties())
    note, = [n for n in detect().notes if 'ECC' in n]
    assert 'pip install' not in note and 'Xid' in note
    gone = replace(known_gpu('V100'), usable=False, problem='CUDA error: no kernel image is available')
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: ['sm_75', 'sm_120'])
    assert 'whl/cu126' in hardware_with(gone).notes[0]
    kepler = hardware.unusable_note(replace(gone, capability=(3, 7)), '580.1', ['sm_75'], '2.13')
    assert 'no current build' in kepler and 'pip install' not in kepler
    assert 'update the driver' in hardware.unusable_note(gone, '470.57', ['sm_75'], '2.13')
    assert 'pytorch.org' in hardware.unusable_note(replace(gone, capability=None, problem='x'), None, [], '2.13')


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
    monkeypatch.setattr(hardware, 'management_facts', lambda: ('580.1', [dict(name='NVIDIA L4', bus=None, capability=[8, 9])]))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.version, 'cuda', None)
    found = detect()
    assert found.software.driver == '580.1' and any('NVIDIA L4 is there' in n and 'without CUDA' in n and 'whl/cu130' in n for n in found.notes)


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
    def nvmlDeviceGetNvLinkState(h, i): raise NVML.NVMLError('invalid argument')


def test_the_management_library(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'pynvml', NVML)
    driver, (facts,) = hardware.management_facts()
    assert driver == '580.1' and facts['mig'] and facts['ecc'] is None and facts['display'] is None
    fake_cuda(monkeypatch, lambda device: torch.full((8,), 1.), properties(pci_domain_id=0, pci_bus_id=7, pci_device_id=0, multi_processor_count=16))
    gpu = detect().gpu
    assert (gpu.mig, gpu.peak, gpu.power_limit_w, gpu.clock_mhz) == (True, None, 700, 1980) and 'heat' in gpu.slowed
    assert any('slowed down' in n for n in detect().notes)
    assert (gpu.clock_now_mhz, gpu.temperature_c, gpu.default_power_limit_w, gpu.busy_percent, gpu.processes) == (None, None, None, None, ())


def bus(i): return SimpleNamespace(domain=0, bus=i, device=0)


class Full(NVML):
    "A library that answers everything: two of the four cards are those that torch sees, in the other order"
    links = [[1] * 4, [0] * 4, [], [None] * 2]  # the other ends of each card's NVLinks
    p2p, level = 0, 50
    def nvmlDeviceGetCount(): return 4
    def nvmlDeviceGetPciInfo(h): return bus(h)
    def nvmlDeviceGetMigMode(h): return [0, 0]
    def nvmlDeviceGetCurrentClocksEventReasons(h): return 0
    def nvmlDeviceGetPowerManagementDefaultLimit(h): return 750_000
    def nvmlDeviceGetClockInfo(h, kind): return 345
    def nvmlDeviceGetApplicationsClock(h, kind): return 1200
    def nvmlDeviceGetDefaultApplicationsClock(h, kind): return 1830
    def nvmlDeviceGetTemperature(h, sensor): return 34
    def nvmlDeviceGetUtilizationRates(h): return SimpleNamespace(gpu=97, memory=12)
    def nvmlDeviceGetEccMode(h): return [1, 1]
    def nvmlDeviceGetComputeRunningProcesses(h): return [SimpleNamespace(pid=__import__('os').getpid(), usedGpuMemory=G), SimpleNamespace(pid=2**22 + 1, usedGpuMemory=12 * G)]
    def nvmlDeviceGetGraphicsRunningProcesses(h): return [SimpleNamespace(pid=2**22 + 2, usedGpuMemory=None)]
    def nvmlDeviceGetNvLinkState(h, i):
        if i >= len(Full.links[h]): raise NVML.NVMLError('invalid argument')
        return 1
    def nvmlDeviceGetNvLinkRemotePciInfo(h, i):
        if Full.links[h][i] is None: raise NVML.NVMLError('not supported')
        return bus(Full.links[h][i])
    def nvmlDeviceGetTopologyCommonAncestor(a, b): return Full.level
    def nvmlDeviceGetP2PStatus(a, b, index): return Full.p2p if index == 2 else 1


def two_cards(monkeypatch, first, second, links=Full.links, p2p=0, level=50, peer=lambda a, b: True):
    "What `detect` finds where torch sees cards `first` and `second` of the library's four"
    for name, value in dict(links=links, p2p=p2p, level=level).items(): monkeypatch.setattr(Full, name, value)
    monkeypatch.setitem(__import__('sys').modules, 'pynvml', Full)
    fake_cuda(monkeypatch, lambda device: torch.full((8,), 1.), *(properties(pci_domain_id=0, pci_bus_id=i, pci_device_id=0) for i in (first, second)))
    monkeypatch.setattr(torch.cuda, 'can_device_access_peer', peer)
    return detect()


@pytest.mark.parametrize('changes, kind', [
    (dict(first=1, second=0), 'NVLink x4'), (dict(first=0, second=2), 'across CPUs'), (dict(first=0, second=2, level=10), 'PCIe switch'),
    (dict(first=0, second=2, level=40), 'same CPU'), (dict(first=0, second=2, level=7), None),
    (dict(first=0, second=3, links=[[77] * 18] * 3 + [[None] * 16]), 'NVLink x16 (switched)'),        # a switch, and ends that cannot be read
    (dict(first=0, second=3, links=[[77] * 18] * 4, p2p=1), 'across CPUs'),                          # up, but not joined
    (dict(first=0, second=9), None)], ids='bridge none pcie cpu unknown switch apart unlisted'.split())
def test_links(monkeypatch, changes, kind):
    found = two_cards(monkeypatch, **changes)
    assert found.links == (Link(0, 1, kind, True),)
    assert Hardware.from_json(found.to_json()) == found
    assert f'Links:    GPU 0-1: {kind or "way not known"}, peer access' in repr(found) and '0-1' in found._repr_html_()


def test_links_without_peer_access_and_where_it_cannot_be_asked(monkeypatch):
    def broken(a, b): raise RuntimeError('CUDA error')
    assert two_cards(monkeypatch, 0, 1, peer=lambda a, b: False).links[0].peer is False
    assert two_cards(monkeypatch, 0, 1, peer=broken).links[0].peer is None


def test_json_from_before_links_is_read(monkeypatch):
    d = json.loads(two_cards(monkeypatch, 0, 1).to_json())
    for key in ('clock_now_mhz', 'processes'): del d['gpus'][0][key], d['gpu'][key]
    assert Hardware.from_json(json.dumps({k: v for k, v in d.items() if k != 'links'})).links == ()


def test_the_state_of_a_card_and_who_else_is_on_it(monkeypatch):
    found = two_cards(monkeypatch, 0, 1)
    gpu = found.gpus[1]
    assert gpu.processes == (GPUProcess(2**22 + 1, None, 12 * G), GPUProcess(2**22 + 2, None, None, False))  # this process is left out
    assert gpu.state == '70.0 GiB free, clock 345 of 1980 MHz, 34 °C, power limit 700 of 750 W, ECC on' and gpu.state in repr(found)
    notes = ' '.join(hardware.gpu_notes(gpu))
    for sign in (f'held by pid {2**22 + 1}, 12.0 GiB', 'Another process uses', 'busy 97%', 'limited to 700 of 750 W', 'set to 1200 MHz'): assert sign in notes, sign
    assert not any('Another process' in n for n in hardware.gpu_notes(replace(gpu, processes=gpu.processes[1:])))  # graphics only
    assert 'and 2 more' in ' '.join(hardware.gpu_notes(replace(gpu, processes=(gpu.processes[0],) * 5)))


def test_processes_of_a_card_in_slices_are_not_told(monkeypatch):
    monkeypatch.setattr(Full, 'nvmlDeviceGetMigMode', lambda h: [1, 1])
    assert two_cards(monkeypatch, 0, 1).gpus[0].processes == ()


def test_a_process_keeps_what_either_list_says():
    def entry(pid, held): return SimpleNamespace(pid=pid, usedGpuMemory=held)
    found = hardware.other_processes([entry(5, None)], [entry(5, 3), entry(6, 9)], own_pid=1, started=False, name={5: 'a', 6: 'b'}.get)
    assert found == (GPUProcess(6, 'b', 9, False), GPUProcess(5, 'a', 3, True))
    assert hardware.other_processes(None, None, own_pid=1, started=True) == ()
    assert hardware.process_name(2**22 + 1) is None and hardware.process_name(__import__('os').getpid())


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
    d = json.loads(hardware_with(known_gpu('T4')).to_json())
    d['gpu']['colour'] = d['cpu']['colour'] = 'green'
    assert Hardware.from_json(json.dumps(d)).gpu.name == 'T4'


def test_the_ceiling_is_the_best_of_all_products():
    rows = (Measured('bf16', '8192 x 8192 x 8192', (2., 1., 4.), 8e12, 'FLOP/s', 1e13), Measured('bf16', '64 x 64 x 64', (1.,), 3e12, 'FLOP/s', 1e13),
            Measured('launch', 'one kernel', (4e-6, 6e-6), 1, 's'))
    found = Roofline('Some card', rows, ('fp8: refused',))
    assert (rows[0].p50, rows[0].share, found.ceiling('bf16')) == (4e12, .4, 4e12)
    assert found.ceiling('fp8') is None and found.ceiling('launch') is None
    assert rows[2].p50 == pytest.approx(5e-6) and rows[2].share is None
    for text in ('8192 x 8192 x 8192', '4 TFLOP/s', '40% of the table', '5 µs', 'fp8: refused'): assert text in repr(found) and text in found._repr_html_(), text
    assert '<script>' not in Roofline('<script>', rows)._repr_html_()


@pytest.mark.parametrize('bad', [dict(repeats=0), dict(side=0), dict(copied=-1)])
def test_a_roofline_of_nothing_is_refused(bad):
    with pytest.raises(ValueError, match='at least 1'): roofline(**bad)

def test_records_of_a_roofline(tmp_path):
    from optkit.records import load_records, save_records
    found = roofline(side=32, copied=2**16, repeats=3, shapes=[(16, 48, 32)])
    path = save_records(tmp_path / 'r.json', found.records(), hardware_with(known_gpu('H100')), 'make it')
    table = load_records(path).set_index('variant')
    assert {'bf16 32 x 32 x 32', 'fp32 16 x 48 x 32', 'copy 64.0 KiB', 'launch one kernel'} <= {*table.index} and table.mfu.isna().all()
    assert (table.seconds_p50 > 0).all() and (table.repeats == 3).all()
    row = next(r for r in found.rows if r.name == 'bf16')
    assert table.samples_per_s_p50['bf16 32 x 32 x 32'] == pytest.approx(2 * 32**3 / table.seconds_p50['bf16 32 x 32 x 32']) == pytest.approx(row.p50)
    assert replace(row, peak=row.p50 * 2).record['mfu'] == pytest.approx(.5)


def test_a_format_that_the_build_refuses_is_left_out(monkeypatch):
    real = torch.mm
    def mm(a, b, **k):
        if a.dtype == torch.bfloat16 and a.shape[0] == 16: raise RuntimeError('not implemented for BFloat16\nmore')
        return real(a, b, **k)
    monkeypatch.setattr(torch, 'mm', mm)
    found = roofline(side=32, copied=2**16, repeats=1, shapes=[(16, 48, 32)])
    assert found.left_out == ('bf16 16 x 48 x 32: not implemented for BFloat16',) and found.ceiling('bf16') and 'not implemented' in repr(found)


def test_each_format_computes_the_product():
    torch.manual_seed(0)
    for name, dtype in dict(bf16=torch.bfloat16, fp16=torch.float16, tf32=torch.float32, fp8=torch.bfloat16).items():
        work, a, b = roofline_module.matrix_product(name, 'cpu', 32, 48, 64)
        out = work()
        assert out.dtype == dtype and out.shape == (32, 48) and a.float().std() > .5 and b.float().std() > .5  # random, not zeros
        torch.testing.assert_close(out.float(), a.float() @ b.float().T, atol=.25, rtol=.02)


@pytest.mark.parametrize('card, formats', [('H100', 'bf16 fp16 tf32 fp32 fp8'), ('A100', 'bf16 fp16 tf32 fp32'), ('RTX 4090', 'bf16 fp16 tf32 fp32 fp8'), ('T4', 'fp16 fp32')])
def test_formats_of_a_card(card, formats): assert ' '.join(roofline_module.product_formats('cuda', known_gpu(card).capability)) == formats


def test_shapes_of_a_model():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), block(), block(), torch.nn.Linear(8, 2))
    assert model_shapes(model, 100) == {(100, 32, 8): 2, (100, 8, 32): 2, (100, 8, 8): 2, (100, 2, 8): 1}
    assert {r.what for r in roofline(side=16, copied=2**10, repeats=1, shapes=model_shapes(model, 4)).rows if r.name == 'fp32'} == \
        {'16 x 16 x 16', '4 x 32 x 8', '4 x 8 x 32', '4 x 8 x 8', '4 x 2 x 8'}


def test_the_roofline_leaves_the_number_format_as_it_was():
    before = torch.get_float32_matmul_precision()
    roofline(side=16, copied=2**10, repeats=1)
    assert torch.get_float32_matmul_precision() == before


class FakeEvent:
    "Events and graphs that count launches: a launch takes 2 ms here"
    clock = 0.
    def __init__(self, **k): pass
    def record(self): self.at = FakeEvent.clock
    def synchronize(self): pass
    def elapsed_time(self, other): return other.at - self.at


class FakeGraph:
    def replay(self): FakeEvent.clock += self.taken


def test_gpu_work_is_timed_in_graphs_of_many_launches(monkeypatch):
    import contextlib
    @contextlib.contextmanager
    def capture(graph):
        start = FakeEvent.clock
        yield
        graph.taken, FakeEvent.clock = FakeEvent.clock - start, start  # capturing runs nothing
    calls = []
    def work():
        calls.append(1)
        FakeEvent.clock += 2.
    for name, value in dict(Event=FakeEvent, CUDAGraph=FakeGraph, graph=capture, synchronize=lambda: None, Stream=lambda: SimpleNamespace(wait_stream=lambda s: None),
                            current_stream=lambda: SimpleNamespace(wait_stream=lambda s: None), stream=lambda s: contextlib.nullcontext()).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert roofline_module._graph_seconds(work, 3) == (.002, .002, .002) and len(calls) >= 25
    assert [roofline_module.launches_for(s) for s in (1., .01, 1e-9)] == [1, 5, 2000]


def test_the_warm_up_is_no_sample_and_a_sample_is_shared_by_its_launches(monkeypatch):
    clock, takes = [0.], iter([50., 4., 6.])  # the first is slow
    monkeypatch.setattr(hardware.time, 'perf_counter', lambda: clock[0])
    def work(): clock[0] += next(takes)
    assert roofline_module._host_seconds(work, lambda: None, 2, count=2) == (2., 3.)


def test_each_product_runs_in_its_own_format(monkeypatch):
    seen = []
    def seconds_of(work):
        seen.append(torch.get_float32_matmul_precision())
        return (1., 2., 4.)
    rows, refused = roofline_module._products('cpu', ('fp32', 'tf32', 'bf16'), [(2, 3, 5)], {'tf32': 120.}, seconds_of)
    assert seen == ['highest', 'high', 'highest'] and refused == []
    assert [(r.name, r.values, r.share) for r in rows] == [('fp32', (60., 30., 15.), None), ('tf32', (60., 30., 15.), .25), ('bf16', (60., 30., 15.), None)]


def test_a_copy_reads_and_writes_and_a_launch_is_one_of_many(monkeypatch):
    monkeypatch.setattr(roofline_module, '_host_seconds', lambda work, wait, repeats, count=1: (1 / count,))
    rows = {r.name: r for r in roofline(side=16, copied=2**12, repeats=1).rows}
    assert rows['copy'].p50 == 2 * 2**12 and rows['copy'].unit == 'B/s'
    assert rows['launch'].p50 == 1 / 1000 and rows['launch'].unit == 's'


# --- a library that is there and broken

class Broken:
    "A management library whose questions fail in ways that its documents do not name"
    NVMLError = RuntimeError
    def __init__(self, failing, error): self.failing, self.error = failing, error
    def __getattr__(self, name):
        def ask(*args):
            if name in self.failing or name == 'nvmlDeviceGetHandleByIndex' and args == (1,): raise self.error
            return dict(nvmlSystemGetDriverVersion='580.1', nvmlDeviceGetCount=3, nvmlDeviceGetName='NVIDIA L4', nvmlDeviceGetHandleByIndex=object()).get(name)
        return ask


@pytest.mark.parametrize('error', [OSError('no library'), ValueError('strange'), UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad'), RuntimeError('lost')])
@pytest.mark.parametrize('failing', [('nvmlInit',), ('nvmlShutdown',), ('nvmlDeviceGetName', 'nvmlDeviceGetPciInfo'), ('nvmlDeviceGetCount',), ('nvmlSystemGetDriverVersion',)])
def test_a_broken_management_library_never_breaks_detect(monkeypatch, failing, error):
    import sys
    monkeypatch.setitem(sys.modules, 'pynvml', Broken(failing, error))
    assert hardware.management_facts()[0] in (None, '580.1') and detect().cpu.usable >= 1


def test_one_lost_card_leaves_the_facts_of_the_others(monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, 'pynvml', Broken((), RuntimeError('GPU is lost')))
    driver, cards = hardware.management_facts()
    assert driver == '580.1' and [c['name'] for c in cards] == ['NVIDIA L4', 'NVIDIA L4', 'GPU 1'] and cards[-1]['lost']
    assert any('does not answer for GPU 1' in n for n in detect().notes)


def test_odd_names_give_no_card_and_share_no_file():
    for name in ('RTX T4', 'RTX A10', '3090 3090', 'GTX 1080', '', 'RTX 4090 Laptop GPU', 'NVIDIA A100', 'NVIDIA H100'): assert known_gpu(name) is None, name
    assert cards_module.slug('NVIDIA H100') == 'h100-other' and cards_module.slug('H100 SXM') == 'h100' == cards_module.slug('NVIDIA H100 80GB HBM3')


def test_the_roofline_runs_after_the_new_tf32_interface_was_used():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = 'tf32'
    try:
        assert roofline_module.roofline(side=16, copied=2**10, repeats=1, shapes=()).rows
        assert torch.backends.cuda.matmul.fp32_precision == 'tf32'
    finally:
        torch.set_float32_matmul_precision('highest')
        torch.backends.cuda.matmul.fp32_precision = before


# boost clock in GHz, dense bf16 (fp16 where there is no bf16) FLOP of a multiprocessor in a clock with FP32 accumulation, bus width in bits, Gbit/s of a pin
PARTS = {'RTX 3090': (1.695, 512, 384, 19.5), 'RTX 3090 Ti': (1.86, 512, 384, 21), 'RTX 4070': (2.475, 512, 192, 21), 'RTX 4070 SUPER': (2.475, 512, 192, 21),
         'RTX 4070 Ti': (2.61, 512, 192, 21), 'RTX 4070 Ti SUPER': (2.61, 512, 256, 21), 'RTX 4080': (2.505, 512, 256, 22.4), 'RTX 4080 SUPER': (2.55, 512, 256, 23),
         'RTX 4090': (2.52, 512, 384, 21), 'RTX 5070': (2.512, 512, 192, 28), 'RTX 5070 Ti': (2.452, 512, 256, 28), 'RTX 5080': (2.617, 512, 256, 30),
         'RTX 5090': (2.407, 512, 512, 28), 'RTX 6000 Ada': (2.505, 1024, 384, 20), 'RTX PRO 6000': (2.617, 1024, 512, 28), 'A10': (1.695, 1024, 384, 12.5),
         'L4': (2.04, 1024, 192, 12.5), 'L40S': (2.52, 1024, 384, 18), 'T4': (1.59, 1024, 256, 10), 'V100 SXM 16GB': (1.53, 1024, 4096, 1.752),
         'V100 SXM 32GB': (1.53, 1024, 4096, 1.752), 'V100 PCIe 16GB': (1.38, 1024, 4096, 1.752), 'V100 PCIe 32GB': (1.38, 1024, 4096, 1.752),
         'A100 SXM 40GB': (1.41, 2048, 5120, 2.43), 'A100 PCIe 40GB': (1.41, 2048, 5120, 2.43), 'A100 SXM 80GB': (1.41, 2048, 5120, 3.186),
         'A100 PCIe 80GB': (1.41, 2048, 5120, 3.024), 'H100 SXM': (1.83, 4096, 5120, 5.23), 'H100 PCIe': (1.62, 4096, 5120, 3.186),
         'H100 NVL': (1.545, 4096, 6144, 5.127), 'H200': (1.83, 4096, 6144, 6.25), 'B200': (1.85, 8192, 8192, 7.57)}

def test_peaks_follow_from_the_parts():
    "Each row of the table against multiprocessors x clock x FLOP a clock, and bus x rate; 2% for what a document rounds"
    assert set(PARTS) == set(cards_module.gpu_table())
    for name, (clock, flop, bus, rate) in PARTS.items():
        gpu = known_gpu(name)
        assert gpu.peak.get('bf16', gpu.peak['fp16']) == pytest.approx(gpu.multiprocessors * clock * 1e9 * flop, rel=.02), name
        assert gpu.bandwidth == pytest.approx(bus / 8 * rate * 1e9, rel=.02), name
        assert gpu.peak['fp16'] == gpu.peak.get('bf16', gpu.peak['fp16']) and gpu.peak.get('tf32', gpu.peak['fp16'] / 2) == pytest.approx(gpu.peak['fp16'] / 2, rel=.02)
        if 'fp8' in gpu.peak: assert gpu.peak['fp8'] == pytest.approx(2 * gpu.peak['bf16'], rel=.02)


@pytest.mark.parametrize('card, visible, found', [('cuda', None, 0), ('cuda:1', None, 1), ('cuda', '1', 1), ('cuda:1', '3, 2', 2), ('cuda', 'GPU-a', 'GPU-a'), ('GPU-b', '1', 'GPU-b'), ('MIG-c', None, 'MIG-c')])
def test_the_card_that_a_process_counts(monkeypatch, card, visible, found):
    from optkit.hardware import card_handle
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    library = SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda name: name, nvmlDeviceGetHandleByIndex=lambda n: n)
    assert card_handle(library, card) == found


@pytest.mark.parametrize('card, visible', [('cuda:1', '0'), ('cuda', '')])
def test_a_card_that_is_hidden(card, visible):
    from optkit.hardware import card_handle
    with pytest.raises((ValueError, IndexError)): card_handle(SimpleNamespace(nvmlDeviceGetHandleByIndex=lambda n: n), card, visible)


def test_the_name_of_a_card(monkeypatch):
    from optkit.hardware import card_uuid
    assert card_uuid('cpu') is None
    for told, name in (('ab-1', 'GPU-ab-1'), ('MIG-x', 'MIG-x')):
        monkeypatch.setattr('torch.cuda.get_device_properties', lambda device, told=told: SimpleNamespace(uuid=told))
        assert card_uuid('cuda:1') == name
    def none(device): raise RuntimeError('no driver')
    monkeypatch.setattr('torch.cuda.get_device_properties', none)
    assert card_uuid('cuda') is None
