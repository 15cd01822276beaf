"Whether comparisons keep their promise, on a clock whose noise is known; and files that are whole or not there"
import gc, json, math, os

import numpy as np
import pandas as pd
import pytest

import optkit.timing
from optkit.cards import known_gpu
from optkit.hardware import hardware_with
from optkit.base import read_json, write_json
from optkit.timing import (
    compare, disturbance, interim_looks, kernel_use, measure_usage, median_ratio, order, Reading, settled, sign_rank,
    SimulatedClock, Usage, Variant, Watch)
from optkit.records import commit, load_records, mfu, provenance, ratio_between, Record, record, save_records


def simulated(seed, slower=1., noise=.02, **settings):
    clock = SimulatedClock(seed, noise=noise)
    return compare(clock.variant('a', .1), clock.variant('b', .1 * slower), clock=clock, progress=False, **settings)


def test_the_same_thing_against_itself_covers_one():
    assert np.mean([simulated(s).ratio('b').covers(1) for s in range(300)]) >= .97


def test_a_planted_slow_down_of_three_percent_is_found():
    ratios = [simulated(1000 + s, 1.03).ratio('b') for s in range(300)]
    assert np.mean([r.high < 1 for r in ratios]) >= .85 and np.mean([r.covers(1 / 1.03) for r in ratios]) >= .97


@pytest.mark.parametrize('settings', [dict(noise=.004), dict(noise=.05, width=.05), dict(noise=.02, min_rounds=12, max_rounds=40), dict(noise=.01, budget_s=2.5)],
                         ids=['quiet', 'noisy', 'early', 'budget'])
def test_coverage_includes_the_stopping_rule(settings):
    found = [simulated(5000 + s, 1.1, **settings) for s in range(200)]
    assert np.mean([c.ratio('b').covers(1 / 1.1) for c in found]) >= .97


@pytest.mark.slow
def test_a_thousand_comparisons():
    assert np.mean([simulated(s).ratio('b').covers(1) for s in range(1000)]) >= .97
    assert np.mean([simulated(s, 1.03).ratio('b').high < 1 for s in range(1000)]) >= .85


def test_why_it_stopped():
    assert 'interval' in simulated(0, noise=.002).stopped and simulated(0, noise=.002).rounds == 40
    assert 'interval' in simulated(0, noise=.002, min_rounds=5).stopped and simulated(0, noise=.002, min_rounds=5).rounds < 40
    assert simulated(0, noise=.2).stopped == '120 rounds done' and simulated(0, noise=.2).rounds == 120
    short = simulated(0, budget_s=1)
    assert 'budget' in short.stopped and 1 <= short.rounds <= 5 and short.confidence == 1 - 2. ** (1 - short.rounds)
    assert simulated(0, max_rounds=5).confidence == 1 - 2**-4 and simulated(0, min_rounds=50).rounds >= 50
    assert simulated(0, budget_s=0).rounds == 1


def test_two_columns_of_ratios():
    clock = SimulatedClock(0, noise=.001)
    c = compare(*(clock.variant(n, s) for n, s in zip('abc', (.4, .2, .1))), clock=clock, progress=False, max_rounds=12)
    assert c.ratio('c').p50 == pytest.approx(4, rel=.2) and c.before('c').p50 == pytest.approx(2, rel=.2)
    assert c.ratio('c', 'b') == c.before('c') and c.before('a').p50 == c.ratio('a').p50 == 1
    with pytest.raises(KeyError, match='no variant'): c.ratio('d')
    assert all(n in repr(c) and n in c._repr_html_() for n in 'abc')


def test_rounds_are_interleaved_and_share_their_number():
    calls = []
    def variant(name): return Variant(name, lambda number: calls.append((name, number)), lambda: calls.append((name, 'setup')))
    compare(variant('a'), variant('b'), variant('c'), burn_in=1, max_burn_in=1, max_rounds=4, min_rounds=4, progress=False, clock=iter(np.arange(1e3)).__next__, budget_s=1e9)
    assert calls[:3] == [(n, 'setup') for n in 'abc'] and calls[3:6] == [(n, 0) for n in 'abc']
    assert [n for _, n in calls[6:]] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert [''.join(n for n, _ in calls[i:i + 3]) for i in range(6, 18, 3)] == ['abc', 'cab', 'bca', 'cba']
    for count in (2, 3, 4):  # everyone is at each place equally often
        rounds = [order(range(count), n) for n in range(2 * count)]
        assert all(sorted(place) == sorted(list(range(count)) * 2) for place in zip(*rounds))


def test_burn_in_goes_on_until_steps_no_longer_get_faster():
    assert [settled(s) for s in ([], [1.], [1., 1.], [1., .5], [30., 1., 1.02], [30., 1.1, 1.])] == [False, False, True, False, True, True]
    def run(costs, **settings):
        clock = SimulatedClock(0, noise=0, drift=0, spikes=0)
        def step(number): clock.now += costs[min(number, len(costs) - 1)]
        return compare(clock.variant('a', 1.), Variant('b', step), clock=clock, progress=False, max_rounds=12, **settings)
    assert run([1.]).warm_up == 2 and run([30, 1]).warm_up == 3 and run([30, 20, 10, 1]).warm_up == 5
    assert run([30, 1], burn_in=0).warm_up == 0 and run([30, 1], burn_in=7).warm_up == 7
    assert run([2. ** -n for n in range(20)], max_burn_in=6).warm_up == 6
    c = run([30, 1])
    assert c.warm_up_seconds['b'] == pytest.approx(32) and c.ratio('b').p50 == pytest.approx(1)


class Neighbour:
    "A watch that finds the rounds of `bad` disturbed; each step of the variants below tells it the round"
    def __init__(self, bad, patience=1): self.bad, self.patience, self.now, self.looked = bad, patience, [], 0
    def judge(self, due):
        self.looked += 1
        if not due and self.looked % self.patience: return None
        rounds, self.now = self.now, []
        return 'a neighbour' if self.bad & {*rounds} else ''
    def summary(self): return dict(temperature_c=(40, 60))


def watched(bad, patience=1, **settings):
    clock, watch, steps = SimulatedClock(0, noise=.001, drift=0, spikes=0), Neighbour({*bad}, patience), []
    def step(number):
        steps.append(number)
        watch.now.append(number)
        clock.now += 5. if number in watch.bad else .1
    settings = dict(burn_in=0, min_rounds=12, max_rounds=12) | settings
    return compare(Variant('a', step), clock.variant('b', .1), clock=clock, progress=False, watch=watch, **settings), steps


def test_disturbed_rounds_are_marked_and_repeated():
    c, steps = watched({3, 4, 9})
    assert c.rounds == 12 and c.numbers == (0, 1, 2, 5, 6, 7, 8, 10, 11, 12, 13, 14) and steps == [*range(15)]
    assert c.disturbed == ((3, 'a neighbour', False), (4, 'a neighbour', False), (9, 'a neighbour', False))
    assert max(c.seconds['a']) < 1 and len(c.seconds['a']) == len(c.seconds['b']) == 12
    assert '3 disturbed rounds repeated' in repr(c) and 'temperature_c 40 to 60' in repr(c) and record(c, 'b').disturbed == 0
    blocks, _ = watched({3}, patience=4)  # too short to tell apart: the whole block is run again
    assert blocks.numbers == (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) and [n for n, *_ in blocks.disturbed] == [0, 1, 2, 3]


def test_a_machine_that_is_never_quiet_is_timed_and_said_to_be():
    c, _ = watched(range(1000), budget_s=1e9)
    assert c.rounds == 12 and sum(not counts for *_, counts in c.disturbed) == 6 and record(c, 'b').disturbed == 12
    assert '12 disturbed rounds counted' in repr(c) and 'a neighbour' in repr(c)
    over, _ = watched(range(1000), budget_s=20, min_rounds=12)
    assert 1 <= over.rounds <= 4 and 'budget' in over.stopped  # the last rounds count, or there would be none


@pytest.mark.parametrize('patience', [1, 3, 50])
def test_looking_at_the_machine_changes_no_figure_of_a_quiet_one(patience):
    def run(watch):
        clock = SimulatedClock(1, noise=.01)
        return compare(clock.variant('a', .1), clock.variant('b', .103), clock=clock, progress=False, watch=watch)
    plain, looked = run(None), run(Neighbour(set(), patience))
    assert plain.seconds == looked.seconds and plain.stopped == looked.stopped and plain.numbers == looked.numbers


def test_coverage_with_repeated_rounds():
    "Rounds that are dropped for what a watch says, be it right or wrong, leave the interval as good as it was"
    class Coin:
        def __init__(self, seed): self.random = np.random.default_rng(seed)
        def judge(self, due): return 'a neighbour' if self.random.random() < .2 else ''
        def summary(self): return {}
    found = [simulated(9000 + s, 1.05, watch=Coin(s), min_rounds=12, max_rounds=40).ratio('b') for s in range(200)]
    assert np.mean([r.covers(1 / 1.05) for r in found]) >= .97


def test_what_counts_as_a_disturbance():
    start = Reading(10., busy=100., process=50.)
    after = lambda **rest: start._replace(at=11., **rest)
    assert disturbance(start, after(busy=104., process=54.), 4) == '' == disturbance(start, start, 4)
    assert 'other processes' in disturbance(start, after(busy=104., process=52.), 4) and disturbance(start, after(busy=103., process=52.), 4) == ''
    assert 'hypervisor' in disturbance(start, after(stolen=.2), 4) and 'quota' in disturbance(start, after(held_back=.2), 4)
    assert 'heat' in disturbance(start, after(slowed='heat (software)'), 4)
    assert '77' in disturbance(start._replace(tenants=frozenset({5})), after(tenants=frozenset({77})), 4)
    assert disturbance(start._replace(tenants=frozenset({5})), after(tenants=frozenset()), 4) == ''  # one that leaves


def test_the_watch_sees_another_process(tmp_path):
    import subprocess, sys, time
    watch = Watch()
    def burn(seconds):
        end = time.process_time() + seconds  # of the processor, so that a busy machine only takes longer
        while time.process_time() < end: sum(range(10**4))
    burn(.3)
    before = watch.read()
    other = subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)
    try: burn(.6)
    finally:
        own = watch.read()
        other.kill()
        other.wait()
    gone = watch.read()
    assert own.process - before.process > .3  # its own and its children's: a child is no neighbour
    assert gone.process >= own.process - .05  # and stays counted when it is gone
    assert watch.judge() is not None and watch.judge() is None  # long ago, then too soon
    assert watch.summary() == {} and watch.readings[0].tenants == frozenset()


def test_throttled_time_is_read_from_both_versions_of_control_groups(tmp_path, monkeypatch):
    from optkit.timing import _throttled_seconds
    def plant(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert _throttled_seconds(tmp_path) == 0
    plant({'proc/self/cgroup': '0::/pod/main', 'proc/self/mountinfo': '30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw',
           'sys/fs/cgroup/pod/cpu.stat': 'usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n', 'sys/fs/cgroup/pod/main/cpu.stat': 'usage_usec 9\n'})
    assert _throttled_seconds(tmp_path) == 2.5
    plant({'proc/self/cgroup': '4:cpu,cpuacct:/pod', 'proc/self/mountinfo': '31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct',
           'sys/fs/cgroup/cpu/pod/cpu.stat': 'nr_periods 5\nthrottled_time 1500000000\n'})
    assert _throttled_seconds(tmp_path) == 1.5


def test_what_a_step_uses():
    kernel = lambda ts, dur, cat='kernel': dict(cat=cat, ts=ts, dur=dur)
    assert kernel_use([kernel(30, 10), kernel(0, 10), kernel(2, 3), kernel(8, 4, 'gpu_memcpy'), kernel(0, 1000, 'cpu_op')]) == (3, pytest.approx(22e-6))
    assert kernel_use([]) == (0, 0)
    numbers = []
    used = measure_usage(numbers.append, 'cpu', seconds=0., number=7)
    assert numbers == [7] and used.kernels is None and used.joules is None and used.cpu_cores >= 0
    shown = repr(Usage(12, .5, .9, 1.25, 3.))
    assert all(s in shown for s in ('12 kernels', 'busy 50%', '90%', '1.2', '3 J')) and repr(Usage()) == ''
    clock = SimulatedClock(0)
    c = compare(clock.variant('a', .1), clock=clock, progress=False, usage_s=1e-9, max_rounds=2)
    row = record(c, 'a')
    assert row.usage['cpu_cores'] >= 0 and row.usage['kernels'] is None and 'processors busy' in repr(c) and 'processors busy' in c._repr_html_()
    assert simulated(0).usage == {} and record(simulated(0), 'a').usage is None


def test_garbage_collection_is_off_while_timing_and_back_after_it():
    seen = []
    def step(number): seen.append(gc.isenabled())
    compare(Variant('a', step), max_rounds=2, min_rounds=1, burn_in=0, progress=False, clock=iter(np.arange(1e3)).__next__)
    assert not any(seen) and gc.isenabled()
    def fail(number): raise MemoryError('out of memory')
    with pytest.raises(MemoryError): compare(Variant('a', step), Variant('b', fail), burn_in=0, progress=False)
    assert gc.isenabled()
    gc.disable()
    try:
        compare(Variant('a', step), max_rounds=1, min_rounds=1, progress=False, clock=iter(np.arange(1e3)).__next__)
        assert not gc.isenabled()
    finally: gc.enable()


@pytest.mark.parametrize('settings, said', [(dict(min_rounds=0), 'min_rounds'), (dict(min_rounds=9, max_rounds=8), 'max_rounds'), (dict(confidence=1), 'confidence'), (dict(width=0), 'width')])
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said): simulated(0, **settings)
    with pytest.raises(ValueError, match='twice'): compare(Variant('a', print), Variant('a', print))


def test_a_clock_that_is_too_coarse_is_refused():
    with pytest.raises(ValueError, match='more work'): compare(Variant('a', lambda n: None), clock=lambda: 0., progress=False)


@pytest.mark.parametrize('n', [5, 8, 12, 25, 40])
def test_the_interval_holds_for_skewed_noise(n):
    random = np.random.default_rng(n)
    wanted = min(.95, 1 - 2. ** (1 - n))
    hits = np.mean([median_ratio(np.exp(random.exponential(size=n)), .95, resamples=500).covers(2) for _ in range(400)])  # median of exp(Exp(1)) is 2
    assert hits >= wanted - .03


def test_the_bootstrap_is_of_the_level_that_it_says(monkeypatch):
    "Without its floor, against the distribution of the median of a resample; the floor hides a wrong one"
    from scipy.stats import binom
    monkeypatch.setattr(optkit.timing, 'sign_rank', lambda n, alpha: (n + 1) // 2)
    ranks = np.arange(1, 102)
    reached = binom.sf(50, 101, ranks / 101) # chance that the median of a resample is at most the value of that rank
    for confidence in (.99, .9):
        found, alpha = median_ratio(ranks, confidence, resamples=20000), 1 - confidence
        ends = [np.searchsorted(reached, q) + 1 for q in (alpha / 2, 1 - alpha / 2)]
        assert (found.low, found.high) == pytest.approx(ends, abs=1)


def test_order_statistics():
    assert [sign_rank(n, .01) for n in (7, 8, 40)] == [0, 1, 12]
    assert median_ratio([1.]).covers(1) and median_ratio([3.]).low == 3
    for bad in ([], [0.], [1, math.nan], [-1.]):
        with pytest.raises(ValueError): median_ratio(bad)
    for low, high, confidence in ((5, 40, .99), (1, 400, .999), (30, 40, .9), (5, 6, .99)):
        rounds, early, end = interim_looks(low, high, confidence)
        assert rounds == sorted(set(rounds)) and rounds[-1] == high and low <= rounds[0]
        assert (len(rounds) - 1) * (1 - early) + (1 - end) <= 1 - confidence + 1e-9 or len(rounds) == 1


def test_a_json_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = write_json(tmp_path / 'a' / 'b.json', {'x': [math.nan, math.inf, np.float32(.5), np.arange(2)], 3: {'y', 'x'}})
    assert read_json(path) == {'x': [None, None, .5, [0, 1]], '3': ['x', 'y']}
    def killed(*args): raise OSError('no space left')
    monkeypatch.setattr(os, 'replace', killed)
    with pytest.raises(OSError): write_json(path, {'x': 2})
    with pytest.raises(TypeError): write_json(path, {'x': lambda: 0})
    assert read_json(path)['3'] == ['x', 'y'] and [p.name for p in path.parent.iterdir()] == ['b.json']
    path.write_text('{"x": ')
    with pytest.raises(ValueError, match='b.json'): read_json(path)


def test_records_keep_where_they_come_from(tmp_path):
    c, hw = simulated(0, 1 / 1.5), hardware_with(known_gpu('H100 SXM'))
    rows = [record(c, n, samples=32, tokens=4000, padded_tokens=5000, flops=1e12, peak=hw.gpu.peak['bf16'], claim='compile', label='rounding', peak_bytes=2**30) for n in c.names]
    path = save_records(tmp_path / 'w1-try-h100.json', rows, hw, 'make it', workload='w1')
    table = load_records(path, path)
    assert len(table) == 4 and set(table.card) == {'h100'} and set(table.command) == {'make it'} and set(table.file) == {'w1-try-h100.json'}
    row = table.iloc[1]
    assert row.ratio_low <= row.ratio_p50 <= row.ratio_high and row.ratio_p50 == pytest.approx(1.5, rel=.05) and row.label == 'rounding'
    assert row.samples_per_s_p20 <= row.samples_per_s_p50 <= row.samples_per_s_p80 and row.tokens_per_s_p50 < row.padded_tokens_per_s_p50
    assert row.mfu == pytest.approx(1e12 / row.seconds_p50 / 989.4e12) and row.peak_bytes == 2**30 and row.repeats == c.rounds
    with pytest.raises(ValueError, match='no records'): save_records(tmp_path / 'empty.json', [], hw, 'x')
    assert ratio_between(table.iloc[:2], 'b', 'a') == pytest.approx(1.5, rel=.1)
    other = save_records(tmp_path / 'w1-try-a100.json', rows, hardware_with(known_gpu('A100')), 'make it')
    for mixed in (load_records(path, other), load_records(path, save_records(tmp_path / 'copy' / path.name, rows, hw, 'make it')), load_records(path)[lambda t: t.variant == 'a'].pipe(lambda t: pd.concat([t, load_records(other)[lambda t: t.variant == 'b']]))):
        with pytest.raises(ValueError, match='not of one run'): ratio_between(mixed, 'b', 'a')
    with pytest.raises(ValueError, match='no record of z'): ratio_between(table, 'z', 'a')
    with pytest.raises(ValueError, match='more than once'): ratio_between(table, 'b', 'a')
    with pytest.raises(ValueError, match='not the same work'): ratio_between(table.iloc[:2].assign(baseline=['a', 'c']), 'b', 'a')
    with pytest.raises(ValueError, match='no record'): ratio_between(pd.DataFrame(), 'b', 'a')
    with pytest.raises(ValueError, match='no seconds'): ratio_between(table.iloc[:2].assign(seconds_p50=None), 'b', 'a')
    with pytest.raises(ValueError, match='card, date'): save_records(tmp_path / 'forged.json', rows, hw, 'make it', card='h100', date='today')
    assert not (tmp_path / 'forged.json').exists() and set(table.confidence) == {.99} and 'interval' in table.stopped[0]
    with pytest.raises(ValueError, match='label'): Record('a', 'b', label='nearly')
    (tmp_path / 'other.json').write_text(json.dumps([1]))
    with pytest.raises(ValueError, match='other.json'): load_records(tmp_path / 'other.json')
    assert not (tmp_path / 'empty.json').exists()


def test_provenance_never_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('OPTKIT_COMMIT', raising=False)
    found = provenance(hardware_with(None))
    assert found['commit'] is None and found['gpu'] is None and found['card'] == 'cpu' and json.dumps(found)
    monkeypatch.setenv('PATH', '')
    assert commit() is None


def test_mfu_is_at_most_one_and_never_a_guess():
    assert mfu(1e12, 1., 2e12) == .5 and mfu(1e12, 1., None) is None and mfu(None, 1., 1e12) is None and mfu(1e12, 0, 1e12) is None
    with pytest.warns(UserWarning, match='cannot be'): assert mfu(2e12, 1., 1e12) is None
    assert known_gpu('H100 SXM').peak['bf16'] != known_gpu('H100 PCIe').peak['bf16']


def test_steps_that_are_too_short_for_the_clock_are_named():
    with pytest.warns(UserWarning, match='a step of a takes less'): compare(Variant('a', lambda n: None), Variant('b', lambda n: sum(range(10**4))), max_rounds=9, progress=False, watch=None)


def test_usage_leaves_the_profiler_out(monkeypatch):
    import time
    import optkit.timing as timing
    monkeypatch.setattr(timing, 'synchroniser', lambda device: lambda: None)
    monkeypatch.setattr(timing, 'ask_card', lambda device: None)
    def trace(step, number, wait):
        end = time.process_time() + .3
        while time.process_time() < end: pass
        return []
    monkeypatch.setattr(timing, '_trace', trace)
    assert measure_usage(lambda n: time.sleep(.05), 'cuda', .2).cpu_cores < .5


def test_garbage_collection_comes_back_whatever_is_interrupted(monkeypatch):
    import optkit.timing as timing
    def stop(*args): raise KeyboardInterrupt
    for name in ('Watch', '_Rounds'):
        with monkeypatch.context() as patch:
            patch.setattr(timing, name, stop)
            with pytest.raises(KeyboardInterrupt): compare(Variant('a', lambda n: sum(range(10**4))), progress=False)
        assert gc.isenabled()


def test_a_tenant_that_was_there_from_the_start_is_told():
    watch = Watch()
    watch.readings.append(watch.readings[0]._replace(tenants=frozenset({7})))
    assert watch.summary() == {'other processes on the GPU': (0, 1)}


def test_a_single_round_has_no_interval():
    "Neither in the table nor in the picture, and nothing is '0%' or '1 rounds'"
    once, twice = (simulated(0, min_rounds=n, max_rounds=n) for n in (1, 2))
    said = repr(once) + once._repr_html_() + once.plot('A step').get_xlabel()
    assert 'measured once' in said and 'no interval' in said and not any(w in said for w in ('[', '1 rounds', ' 0%', '0.00%')), said
    said = repr(twice) + twice.plot('A step').get_xlabel()
    assert '2 rounds after' in said and 'intervals 50.00%' in said and '50% interval' in said and '[' in said
