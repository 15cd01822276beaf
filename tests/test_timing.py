"Whether comparisons keep their promise, on a clock whose noise is known; and files that are whole or not there"
import gc, json, math, os

import numpy as np
import pytest

from optkit.hardware import hardware_with, known_gpu
from optkit.timing import (Record, SimulatedClock, Variant, commit, compare, load_records, looks, median_ratio, mfu, order, provenance, read_json, record, save_records,
                           sign_rank, write_json)


def simulated(seed, slower=1., noise=.02, **settings):
    clock = SimulatedClock(seed, noise=noise)
    return compare(clock.variant('a', .1), clock.variant('b', .1 * slower), clock=clock, progress=False, **settings)


def test_the_same_thing_against_itself_covers_one():
    assert np.mean([simulated(s).ratio('b').covers(1) for s in range(300)]) >= .97


def test_a_planted_slow_down_of_three_percent_is_found():
    ratios = [simulated(1000 + s, 1.03).ratio('b') for s in range(300)]
    assert np.mean([r.high < 1 for r in ratios]) >= .85 and np.mean([r.covers(1 / 1.03) for r in ratios]) >= .97


@pytest.mark.parametrize('settings', [dict(noise=.004), dict(noise=.05, width=.05), dict(noise=.02, min_rounds=20), dict(noise=.01, budget_s=2.5)],
                         ids=['quiet', 'noisy', 'late', 'budget'])
def test_coverage_includes_the_stopping_rule(settings):
    found = [simulated(5000 + s, 1.1, **settings) for s in range(200)]
    assert np.mean([c.ratio('b').covers(1 / 1.1) for c in found]) >= .97


@pytest.mark.slow
def test_a_thousand_comparisons():
    assert np.mean([simulated(s).ratio('b').covers(1) for s in range(1000)]) >= .97
    assert np.mean([simulated(s, 1.03).ratio('b').high < 1 for s in range(1000)]) >= .85


def test_why_it_stopped():
    assert 'interval' in simulated(0, noise=.002).stopped and simulated(0, noise=.002).rounds < 40
    assert simulated(0, noise=.2).stopped == '40 rounds done'
    short = simulated(0, budget_s=1)
    assert 'budget' in short.stopped and 1 <= short.rounds <= 5 and short.confidence == 1 - 2. ** (1 - short.rounds)
    assert simulated(0, max_rounds=5).confidence == 1 - 2**-4 and simulated(0, min_rounds=40).rounds == 40
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
    compare(variant('a'), variant('b'), variant('c'), burn_in=1, max_rounds=4, min_rounds=4, progress=False, clock=iter(np.arange(1e3)).__next__, budget_s=1e9)
    assert calls[:3] == [(n, 'setup') for n in 'abc'] and calls[3:6] == [(n, 0) for n in 'abc']
    assert [n for _, n in calls[6:]] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert [''.join(n for n, _ in calls[i:i + 3]) for i in range(6, 18, 3)] == ['abc', 'cab', 'bca', 'cba']
    for count in (2, 3, 4):  # everyone is at each place equally often
        rounds = [order(range(count), n) for n in range(2 * count)]
        assert all(sorted(place) == sorted(list(range(count)) * 2) for place in zip(*rounds))


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


def test_order_statistics():
    assert [sign_rank(n, .01) for n in (7, 8, 40)] == [0, 1, 12]
    assert median_ratio([1.]).covers(1) and median_ratio([3.]).low == 3
    for bad in ([], [0.], [1, math.nan], [-1.]):
        with pytest.raises(ValueError): median_ratio(bad)
    for low, high, confidence in ((5, 40, .99), (1, 400, .999), (30, 40, .9), (5, 6, .99)):
        rounds, early, end = looks(low, high, confidence)
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
    with pytest.raises(ValueError, match='label'): Record('a', 'b', label='nearly')
    (tmp_path / 'other.json').write_text(json.dumps([1]))
    with pytest.raises(ValueError, match='other.json'): load_records(tmp_path / 'other.json')
    assert not (tmp_path / 'empty.json').exists()


def test_provenance_never_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = provenance(hardware_with(None))
    assert found['commit'] is None and found['gpu'] is None and found['card'] == 'cpu' and json.dumps(found)
    monkeypatch.setenv('PATH', '')
    assert commit() is None


def test_mfu_is_at_most_one_and_never_a_guess():
    assert mfu(1e12, 1., 2e12) == .5 and mfu(1e12, 1., None) is None and mfu(None, 1., 1e12) is None and mfu(1e12, 0, 1e12) is None
    with pytest.warns(UserWarning, match='cannot be'): assert mfu(2e12, 1., 1e12) is None
    assert known_gpu('H100 SXM').peak['bf16'] != known_gpu('H100 PCIe').peak['bf16']
