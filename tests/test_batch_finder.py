"The physical batch: searches on made-up memory curves and on real engines, as field reports say they go wrong"
import bisect, gc, math, random, weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from optkit.batch_finder import Probe, accumulation_for, find_batch_size, is_out_of_memory, next_probe, predict_limit, predict_peak
from optkit.batch_finder import MemoryProbe, Peak, find_batch_table, find_max_tokens, planned_updates, preserved, worst
from optkit.data import LAYOUTS, Table, steps, tokenise, word_tokenizer
from optkit.engine import Engine, StepProbe, example_model, plan_batch
from optkit.hardware import Choice, hardware_with
from optkit.precision import choose_precision

torch.set_num_threads(1)
G = 2**30
FP32 = choose_precision(hardware_with(None), prefer='fp32')
FP16 = replace(FP32, compute=Choice('fp16', 'asked for'), scaler=Choice(True, 'asked for'))


# --- what counts as out of memory

@pytest.mark.parametrize('exc', [
    torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB'), MemoryError(), RuntimeError('CUDA error: out of memory'),
    RuntimeError('CUDA driver error: out of memory'), RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'),
    RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'), RuntimeError('cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED'),
    RuntimeError("NCCL Error 1: Cuda failure 2 'out of memory'"), RuntimeError('HIP out of memory. Tried'), RuntimeError('MPS backend out of memory (MPS allocated'),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes")],
    ids=lambda e: str(e)[:40] or type(e).__name__)
def test_every_failed_allocation_is_known(exc): assert is_out_of_memory(exc)


@pytest.mark.parametrize('exc', [
    ValueError('out of memory'), RuntimeError('CUDA error: an illegal memory access was encountered'), RuntimeError('CUDA error: device-side assert triggered'),
    RuntimeError('mat1 and mat2 shapes cannot be multiplied'), KeyboardInterrupt('out of memory'), RuntimeError('memory format mismatch'), RuntimeError('')],
    ids=lambda e: type(e).__name__ + str(e)[:30])
def test_other_errors_are_not_out_of_memory(exc): assert not is_out_of_memory(exc)


def test_a_real_allocation_of_torch_that_fails():
    with pytest.raises(RuntimeError) as caught: torch.empty(2**58)
    assert is_out_of_memory(caught.value)


# --- accumulation

@pytest.mark.parametrize('effective, at_23, at_25, at_26', [(128, 6, 6, 5), (64, 3, 3, 3), (256, 12, 11, 10)])
def test_the_accumulation_table_of_the_reports(effective, at_23, at_25, at_26):
    # 5090-complete.md: "23 -> 25-26: 128: 6 -> 5, 64: 3 -> 2-3, 256: 12 -> 10"; at 25 nothing but 256 changes, and 64 never takes 2
    for physical, expected in ((23, at_23), (25, at_25), (26, at_26)):
        rows, count = accumulation_for(physical, effective)
        assert count == expected and next(k for k in range(1, 99) if k * physical >= effective) == expected
        assert rows <= physical and (count - 1) * rows < effective <= count * rows


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_accumulation_is_the_fewest_even_micro_batches(largest, effective):
    rows, count = accumulation_for(largest, effective)
    assert 1 <= rows <= largest and count * rows >= effective and (count - 1) * largest < effective
    assert {len(p) for p in np.array_split(np.arange(effective), count)} <= {rows, rows - 1}  # what `data.micro_batches` makes of it


@pytest.mark.parametrize('largest, effective', [(0, 8), (8, 0), (-1, 1)])
def test_accumulation_of_nothing(largest, effective):
    with pytest.raises(ValueError, match='at least 1'): accumulation_for(largest, effective)


# --- the search on made-up memory

class Memory:
    "A device whose peak follows a curve; out of memory above its capacity, as a real one"
    def __init__(self, curve, capacity, reports=True, activations=None):
        self.curve, self.capacity, self.reports, self.activations, self.asked = curve, capacity, reports, activations, []
    def __call__(self, batch):
        assert len(self.asked) < 40, f'endless: {self.asked}'
        self.asked.append(batch)
        peak = int(self.curve(batch))
        if peak > self.capacity: raise torch.OutOfMemoryError(f'CUDA out of memory. Tried to allocate {peak} bytes')
        if self.activations: return Peak(peak, peak, int(self.activations(batch)), int(self.activations(0)))
        return peak if self.reports else None
    def largest(self, budget, limit): return bisect.bisect_right(range(1, limit + 1), budget, key=self.curve)


CURVES = {'line': lambda n: G + n * 2**20 * 20, 'steep': lambda n: 2 * G + n * 700 * 2**20, 'flat start': lambda n: max(4 * G, G + n * 2**20 * 30),
          'flat then steep': lambda n: max(10 * G, 200 * 2**20 * n), 'bend': lambda n: G + 2**20 * (10 * n if n < 200 else 2000 + 25 * (n - 200)),
          'blocks of 2 MB': lambda n: G + math.ceil(n * 6.3) * 2**21, 'rounded up to 512 MB': lambda n: math.ceil((G + n * 2**20 * 17) / 2**29) * 2**29,
          'curved': lambda n: G + n * 2**20 * 10 + n * n * 2**13, 'saturating': lambda n: G + 2**20 * 900 * n ** .6, 'tiny': lambda n: G + n * 2**12}


@pytest.fixture
def quick(monkeypatch): monkeypatch.setattr('optkit.batch_finder._free', lambda: None)  # collecting garbage takes 50 ms


STRAIGHT = ('line', 'steep', 'flat start', 'flat then steep', 'blocks of 2 MB', 'tiny')

@pytest.mark.parametrize('start', [8, 16, 32, 64])
@pytest.mark.parametrize('name', CURVES)
def test_few_probes_are_enough_where_the_device_reports_bytes(name, start, quick):
    for card in (16, 24, 32, 80): search(name, card, start, 9 if name in STRAIGHT else 11)


# before the update, whose peak hides small batches
BEFORE = {'flat start': lambda n: G + n * 2**20 * 30, 'flat then steep': lambda n: 200 * 2**20 * n}

@pytest.mark.parametrize('start', [1, 8, 16, 32, 64])
@pytest.mark.parametrize('name', [n for n in CURVES if n not in ('curved', 'rounded up to 512 MB')])  # tensors are neither
def test_eight_probes_are_enough_where_activations_are_read_apart_from_the_update(name, start, quick):
    for card in (16, 24, 32, 80): search(name, card, start, 8 if name in STRAIGHT else 9, activations=BEFORE.get(name, CURVES[name]))


@pytest.mark.parametrize('start', [1, 1024])
@pytest.mark.parametrize('name', CURVES)
def test_a_bad_start_costs_few_probes_more(name, start, quick):
    for card in (16, 24, 32, 80): search(name, card, start, 12)


def search(name, card, start, most, **more):
    memory = Memory(CURVES[name], card * G, **more)
    plan = find_batch_size(memory, start=start, limit=4096, headroom=.02, capacity=card * G)
    best, truth = max(p.batch for p in plan.tried if p.fits), memory.largest(.98 * card * G, 4096)
    failed = [p.batch for p in plan.tried if not p.fits]
    assert best <= truth and truth - best <= max(1, .01 * best), (card, memory.asked, truth)
    assert min(failed, default=4097) - best <= max(1, .01 * best)  # N ran, N + 1 did not, or within 1%
    assert len(memory.asked) == len(set(memory.asked)), f'a size was tried twice: {memory.asked}'
    assert len(memory.asked) <= most, (card, memory.asked, truth)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4096), st.integers(1, 4096), st.sampled_from([64, 300, 4096]))
def test_without_bytes_it_doubles_and_bisects(quick, truth, start, limit):
    memory = Memory(lambda n: n, truth, reports=False)
    plan = find_batch_size(memory, start=start, limit=limit)
    best, expected = max(p.batch for p in plan.tried if p.fits), min(truth, limit)
    assert best <= expected and expected - best <= max(1, .01 * best) and max(memory.asked) <= limit
    assert len(memory.asked) <= 24 and len(set(memory.asked)) == len(memory.asked)


def test_a_search_that_starts_above_the_limit_does_not_collapse(quick):  # Lightning-AI/pytorch-lightning#11299
    for reports, capacity in ((True, 300), (False, None)):
        plan = find_batch_size(Memory(lambda n: n, 300, reports), start=1024, headroom=0, capacity=capacity)
        assert 297 <= plan.physical <= 300 and len(plan.tried) <= 12


def test_each_probe_gets_its_own_candidate(quick):  # NVIDIA/Model-Optimizer#1385
    memory = Memory(CURVES['line'], 8 * G)
    plan = find_batch_size(memory, capacity=8 * G)
    assert memory.asked == [p.batch for p in plan.tried] and len(set(memory.asked)) == len(memory.asked) > 2


def test_a_driver_that_spills_is_refused_by_the_budget():  # MakazhanAlpamys/Soup#649: nothing is raised, only slow
    spilling = Memory(lambda n: n * G, 10**18)
    plan = find_batch_size(spilling, start=9, capacity=8 * G, headroom=0)
    nine = next(p for p in plan.tried if p.batch == 9)
    assert not nine.fits and 'over the budget' in nine.note and plan.physical == 8


def test_headroom_stays_free(quick):
    for headroom in (0, .02, .1, .5):
        plan = find_batch_size(Memory(lambda n: n * 2**20, 1000 * 2**20), limit=4096, headroom=headroom, capacity=1000 * 2**20)
        assert 1000 * (1 - headroom) * .99 - 1 <= plan.physical <= 1000 * (1 - headroom) and plan.peak_bytes == plan.physical * 2**20
    for wrong in (-.1, 1, 1.5):
        with pytest.raises(ValueError, match='headroom'): find_batch_size(lambda n: n, headroom=wrong)


@pytest.mark.parametrize('exc', [ValueError('shape'), RuntimeError('CUDA error: device-side assert triggered'), KeyError('exp_avg'), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_what_is_no_out_of_memory_is_raised_again(exc):
    asked = []
    def probe(batch):
        asked.append(batch)
        raise exc
    with pytest.raises(type(exc)) as caught: find_batch_size(probe, start=64)
    assert caught.value is exc and asked == [64]


def test_one_row_that_does_not_fit(quick):
    memory = Memory(lambda n: 99 * n, 10)
    with pytest.raises(MemoryError, match='one row of 512 tokens does not fit: out of memory.*[Ss]horten') as caught: find_batch_size(memory, start=64, longest=512)
    assert memory.asked[-1] == 1 and '\n' not in str(caught.value)


def test_tensors_of_a_failed_probe_are_gone_before_the_next():
    alive, seen = [], []
    def probe(batch):
        gc.collect()
        seen.append(sum(r() is not None for r in alive))
        big = torch.zeros(batch)
        alive.append(weakref.ref(big))
        inner = lambda: (_ for _ in ()).throw(RuntimeError('CUDA driver error: out of memory'))
        if batch > 3: inner()
        return None
    find_batch_size(probe, start=64, limit=64)
    assert len(seen) > 4 and not any(seen)


def test_the_plan_says_what_happened(quick):
    plan = find_batch_size(Memory(CURVES['line'], 8 * G), effective=128, capacity=8 * G, longest=256)
    ran, failed = max(p.batch for p in plan.tried if p.fits), min(p.batch for p in plan.tried if not p.fits)
    assert f'{ran} rows ran' in plan.reason and f'{failed} did not fit' in plan.reason and 'GiB' in plan.reason
    assert '128 rows a step' in repr(plan) and '256 tokens' in repr(plan) and plan._repr_html_().count('<tr>') == len(plan.tried) + 1
    assert 'more than 64 was not asked for' in find_batch_size(Memory(CURVES['tiny'], 80 * G), limit=64, capacity=80 * G).reason
    assert plan.physical * plan.accumulation >= 128 > plan.physical * (plan.accumulation - 1)


def test_the_line_through_the_two_largest():
    probes = [Probe(8, 900, True), Probe(16, 1600, True), Probe(32, 3200, False, 'over')]
    assert predict_limit(probes, 2000) == 20 and predict_limit(probes[:1], 2000) is None
    assert predict_limit([Probe(8, 1000, True), Probe(16, 1001, True)], 2000) is None  # flat: the optimizer's peak
    assert predict_limit([Probe(8, None, True), Probe(16, None, False)], 2000) is None
    assert next_probe(probes, 8, 4096, 2000) == 20 and next_probe([], 8, 4, None) == 4


# --- the search on a real engine

def store_of(lengths, max_length=128):
    rows = [' '.join(['w1'] * (n - 2)) for n in lengths]
    return tokenise(Table(rows, None, np.arange(len(lengths)) % 2, ('a', 'b'), 'made up'), word_tokenizer(), max_length, progress=False)


def watch(engine, monkeypatch, above=10**9, exc=None, after=0):
    "Record the shape of each forward pass; raise above a size"
    seen, real = [], engine.model.forward
    def forward(input_ids, **kwargs):
        seen.append(tuple(input_ids.shape))
        if len(input_ids) > above and len(seen) > after: raise exc or torch.OutOfMemoryError('CUDA out of memory.')
        return real(input_ids=input_ids, **kwargs)
    monkeypatch.setattr(engine.model, 'forward', forward)
    return seen


def snapshot(engine):
    optimizer = engine.optimizer.state_dict()
    return dict(weights={k: v.clone() for k, v in engine.model.state_dict().items()}, training=engine.model.training,
                state={k: {n: v.clone() for n, v in s.items()} for k, s in optimizer['state'].items()}, groups=[{k: v for k, v in g.items()} for g in optimizer['param_groups']],
                scaler=engine.scaler and engine.scaler.state_dict(), rng=torch.get_rng_state(), numpy=np.random.get_state()[1].tolist(), python=random.getstate(),
                grads=[p.grad is None for p in engine.model.parameters()])


def same(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize('precision', [FP32, FP16], ids=['fp32', 'fp16'])
@pytest.mark.parametrize('warm', [False, True], ids=['fresh', 'trained'])
@pytest.mark.parametrize('outcome', ['found', 'out of memory', 'ValueError', 'KeyboardInterrupt'])
def test_the_search_leaves_the_engine_and_the_random_state_as_they_were(monkeypatch, quick, outcome, warm, precision):
    store, engine = store_of([9] * 30), Engine(example_model(), precision)
    if warm:
        for micro in steps(store, np.arange(30), 10): engine.step(store, micro)
    else: engine.model.eval()
    exc = dict(ValueError=ValueError('planted'), KeyboardInterrupt=KeyboardInterrupt()).get(outcome)
    seen = watch(engine, monkeypatch, 10**9 if outcome == 'found' else 5, exc, after=1 if exc else 0)
    before = snapshot(engine)
    if exc:
        with pytest.raises(type(exc)): plan_batch(engine, store, 16)
    else: assert plan_batch(engine, store, 16).accumulation == (1 if outcome == 'found' else 4)  # 5 rows fit
    after = snapshot(engine)
    assert seen and all(same(before[k], after[k]) for k in before), [k for k in before if not same(before[k], after[k])]
    monkeypatch.undo()  # and it trains on
    assert all(math.isfinite(engine.step(store, m).item()) for m in steps(store, np.arange(30), 10))


def test_the_watch_above_sees_a_step():
    store, engine = store_of([9] * 30), Engine(example_model(), FP32)
    before = snapshot(engine)
    engine.step(store, next(steps(store, np.arange(30), 10)))
    after = snapshot(engine)
    assert {k for k in before if not same(before[k], after[k])} >= {'weights', 'state', 'rng'}


def test_training_after_the_search_is_the_training_without_it():
    store, results = store_of([9, 17, 5] * 10), []
    for search in (False, True):
        engine = Engine(example_model(), FP32)
        if search: plan_batch(engine, store, 8)
        engine.reset(seed=3)
        results.append([engine.step(store, m).item() for m in steps(store, np.arange(30), 8)])
    assert results[0] == results[1]


def test_the_longest_row_is_probed():  # EleutherAI/lm-evaluation-harness#1678: one sample 8x the median, last
    store, engine = store_of([12] * 63 + [96]), Engine(example_model(), FP32)
    assert StepProbe(engine, store).longest == 96 == 8 * np.median(store.lengths)
    seen = []
    real, engine.model.forward = engine.model.forward, lambda input_ids, **k: (seen.append(input_ids.clone()), real(input_ids=input_ids, **k))[1]
    plan = plan_batch(engine, store, 32)
    assert plan.longest == 96 and {s.shape[1] for s in seen} == {store.max_length} and (seen[0][0] != store.pad_id).sum() == 96
    assert [s.shape[0] for s in seen] == [p.batch for p in plan.tried for _ in range(2)]  # two steps: the optimizer's state comes with the first


@pytest.mark.parametrize('limit', [1, 7, 100])
def test_the_candidate_is_the_batch_that_runs(monkeypatch, quick, limit):
    store, engine = store_of([9] * 30), Engine(example_model(), FP32)
    seen = watch(engine, monkeypatch, above=20)
    plan = plan_batch(engine, store, 64, limit=limit)
    assert max(s[0] for s in seen) <= limit and {s[0] for s in seen} == {p.batch for p in plan.tried} and plan.effective == 64
    assert max(p.batch for p in plan.tried if p.fits) == min(limit, 20)


@pytest.mark.parametrize('layout, longest', [(l, n) for l in LAYOUTS for n in (57, 96, 128)])
def test_no_step_of_training_is_larger_than_what_was_probed(layout, longest):  # Lightning-AI/pytorch-lightning#20231: out of memory after the search succeeded
    store, engine = store_of([12] * 40 + [longest]), Engine(example_model(), FP32)
    seen = []
    real, engine.model.forward = engine.model.forward, lambda input_ids, **k: (seen.append(input_ids.shape[1]), real(input_ids=input_ids, **k))[1]
    plan = plan_batch(engine, store, 8)
    trained = [m for s in steps(store, np.arange(41), 8, layout=layout, physical=plan.physical) for m in s]
    assert max(len(m.rows) for m in trained) <= plan.physical
    if layout != 'packed': assert max(m.pad_to for m in trained) <= max(seen)
    else: # no more tokens, and no larger table of attention scores
        assert max(m.tokens for m in trained) <= plan.physical * max(seen) and max(m.tokens ** 2 for m in trained) <= plan.physical * max(seen) ** 2


@pytest.mark.parametrize('precision', [FP32, FP16], ids=['fp32', 'fp16'])
def test_out_of_memory_in_the_optimizers_first_step(monkeypatch, precision):
    "The state appears at the first step: it may be what does not fit, and half of it may be there"
    store, engine = store_of([9] * 30), Engine(example_model(), precision)
    real, calls = torch.zeros_like, []
    def zeros_like(tensor, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4: raise torch.OutOfMemoryError('CUDA out of memory.')
        return real(tensor, *args, **kwargs)
    monkeypatch.setattr(torch, 'zeros_like', zeros_like)
    plan = plan_batch(engine, store, 16)
    assert [p.fits for p in plan.tried][0] is False and plan.tried[0].batch == 16 and max(p.batch for p in plan.tried if p.fits) == 15


def test_a_model_that_is_too_large_says_so(monkeypatch):
    store, engine = store_of([9] * 30), Engine(example_model(), FP32)
    def zeros_like(tensor, *args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory.')
    monkeypatch.setattr(torch, 'zeros_like', zeros_like)
    with pytest.raises(MemoryError, match='one row of 9 tokens does not fit'): plan_batch(engine, store, 16)


# --- tokens, lengths, ranks, and whatever step a user has

def per_length(length, per_token=2**17, capacity=10 * G):
    def probe(rows):
        used = G + rows * length * per_token
        if used > capacity: raise RuntimeError('CUDA out of memory')
        return Peak(used, used, used, G)
    return probe


def test_tokens_instead_of_rows(quick):
    plan = find_max_tokens(lambda n: per_length(n)(1), longest=500, capacity=10 * G, headroom=.02)
    most = (10 * G * .98 - G) // 2**17
    assert plan.max_tokens % 64 == 0 and .985 * most <= plan.max_tokens <= most and 'packed' in repr(plan) and len(plan.tried) <= 8
    with pytest.raises(MemoryError, match='500 tokens'): find_max_tokens(lambda n: per_length(n, capacity=G + 2**25)(1), longest=500, capacity=10 * G)


def test_a_table_by_length(quick):
    plans = find_batch_table(per_length, (512, 64, 128), effective=4096, capacity=10 * G, headroom=0.)
    assert list(plans) == [64, 128, 512]
    for length, plan in plans.items():
        best, right = max(p.batch for p in plan.tried if p.fits), 9 * G // (length * 2**17)
        assert .99 * right - 1 <= best <= right and plan.longest == length and len(plan.tried) <= 8


def test_exact_to_the_row_when_asked(quick):
    for rows in (1, 57, 999, 3001):
        memory = Memory(lambda n: G + n * 2**20, G + rows * 2**20)
        plan = find_batch_size(memory, capacity=memory.capacity, headroom=0., tolerance=0.)
        assert plan.physical == rows and any(p.batch == rows + 1 and not p.fits for p in plan.tried)


@pytest.mark.parametrize('rows, effective, epochs, updates', [(1000, 128, 3, 24), (128, 128, 1, 1), (129, 128, 1, 2), (7, 128, 5, 5)])
def test_updates_do_not_depend_on_the_physical_batch(rows, effective, epochs, updates):
    from optkit.data import example_table, steps, tokenise, word_tokenizer
    store = tokenise(example_table(rows), word_tokenizer(), 32, progress=False)
    assert planned_updates(rows, effective, epochs) == updates
    for physical in (3, effective): assert sum(1 for e in range(epochs) for _ in steps(store, np.arange(rows), effective, epoch=e, physical=physical)) == updates


def test_the_worst_rank_decides():
    a, b = Probe(8, 5, True, '', 4, 3, 1), Probe(8, 7, True, '', 6, None, 2)
    assert worst([a, b]) == Probe(8, 7, True, '', 6, 3, 2)
    assert worst([a, Probe(8, None, False, 'out of memory')]).note == 'rank 1: out of memory' and not worst([a, Probe(8, None, False, 'x')]).fits


RANK = '''
import sys, torch
from torch import distributed
from optkit.batch_finder import find_batch_size
rank, port, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
def probe(batch):
    if rank == 1 and batch > 37:
        raise RuntimeError('CUDA out of memory') if kind == 'memory' else ValueError('a bad row')
try: print(find_batch_size(probe, effective=128, start=8, limit=256, tolerance=0., ranks=distributed.group.WORLD).physical, flush=True)
except Exception as error: print(type(error).__name__, error, flush=True)
distributed.destroy_process_group()
'''

@pytest.mark.parametrize('kind', ['memory', 'error'])
def test_two_ranks_end_with_one_plan_and_none_hangs(kind):
    import socket, subprocess, sys
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = str(s.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, '-c', RANK, str(n), port, kind], stdout=subprocess.PIPE, text=True) for n in range(2)]
    try: said = [p.communicate(timeout=90)[0].strip() for p in ranks]
    finally:
        for p in ranks: p.kill()
    if kind == 'memory': assert said == ['32', '32']  # 37 fit: 128 rows in 4 x 32
    else: assert said[1] == 'ValueError a bad row' and said[0].startswith('RuntimeError a probe of') and 'rank 1: ValueError: a bad row' in said[0]


@pytest.mark.parametrize('ends', ['well', KeyboardInterrupt, ValueError, torch.OutOfMemoryError])
def test_a_users_own_step_is_probed_and_everything_put_back(ends):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(.5))
    model[2].eval()  # a module with a mode of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(3, 4)).sum().backward()
    model[0].bias.grad = None
    weights = [p for p in model.parameters()]
    snapshot = lambda: [[p.detach().clone() for p in model.parameters()], [b.clone() for b in model.buffers()], [None if p.grad is None else p.grad.clone() for p in model.parameters()],
                        str(optimizer.state_dict()), schedule.state_dict(), torch.get_rng_state(), [m.training for m in model.modules()]]
    def step(batch):
        model.train()
        model(torch.randn(batch, 4)).square().mean().backward()
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        if ends != 'well' and batch > 4: raise ends('stop')
    before = snapshot()
    try:
        with preserved(model, optimizer, schedule, None): plan = find_batch_size(MemoryProbe(step, 'cpu', optimizer), start=4, limit=16)
    except (KeyboardInterrupt, ValueError): assert ends in (KeyboardInterrupt, ValueError)
    else: assert plan.physical == (16 if ends == 'well' else 4)
    assert all(a is b for a, b in zip(weights, model.parameters()))
    def same(a, b): return torch.equal(a, b) if isinstance(a, torch.Tensor) else all(map(same, a, b)) and len(a) == len(b) if isinstance(a, list) else a == b
    assert [same(a, b) for a, b in zip(before, snapshot())] == [True] * 7


def test_nothing_is_kept_alive_by_a_traceback():
    import gc, weakref
    class Big(list): pass
    alive = []
    def probe(batch):
        big = Big(range(batch))
        alive.append(weakref.ref(big))
        raise ValueError('something else')
    try: find_batch_size(probe)
    except ValueError as error: kept = error  # as IPython keeps it
    gc.collect()
    assert alive[0]() is None and kept.__traceback__ is not None


def test_evaluation_and_table_of_an_engine_leave_it_as_it_was():
    from optkit.engine import plan_evaluation, plan_table
    store, engine = store_of([9] * 20 + [100]), Engine(example_model(), FP32)
    before = snapshot(engine)
    assert plan_evaluation(engine, store, limit=24).physical == 24
    table = plan_table(engine, store, (24, store.max_length), effective=8, limit=8)
    assert [p.physical for p in table.values()] == [8, 8] and list(table) == [24, store.max_length]
    after = snapshot(engine)
    assert all(same(before[k], after[k]) for k in before)
    with pytest.raises(ValueError, match='no row has at most 1'): plan_table(engine, store, (1,), effective=8)


def test_tokens_of_a_pack_are_found_with_real_packs():
    from optkit.engine import plan_tokens
    store, engine = store_of([9] * 20 + [100]), Engine(example_model(), FP32)
    before, seen, step = snapshot(engine), [], engine.step
    engine.step = lambda store, micro: (seen.append(micro[0]), step(store, micro))[1]
    plan = plan_tokens(engine, store, limit=700)
    assert plan.max_tokens == 640 and all(m.offsets is not None and m.offsets[-1] <= m.pad_to and m.offsets[1] == 100 for m in seen)
    assert max(m.pad_to for m in seen) == 640 and same({k: v for k, v in before.items()}, snapshot(engine))
    for micro in steps(store, np.arange(21), 8, layout='packed', max_tokens=plan.max_tokens): step(store, micro)


@given(base=st.integers(1, 10 * 2**30), row=st.integers(2**20, 2**30), update=st.integers(0, 5 * 2**30), sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True), batch=st.integers(1, 2000))
def test_a_predicted_peak_is_that_of_a_linear_card(base, row, update, sizes, batch):
    "On a card whose tensors are a line over rows, with an update that may hide them, the prediction is the truth"
    probes = [Probe(n, base + max(row * n, update), True, '', base + max(row * n, update), base + row * n, base) for n in sizes]
    real, told = base + max(row * batch, update), predict_peak(probes, batch)
    if row * batch >= update: assert abs(told - real) <= 1e-6 * real
    elif batch >= min(sizes) and row * min(sizes) <= update: assert told == real
    assert told <= real * (1 + 1e-6)
