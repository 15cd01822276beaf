"Budgets of benchmark runs, and records that need not be measured again"
import math, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.budget import enough, kept_record, seconds_for, time_left
from optkit.hardware import hardware_with
from optkit.records import Record, save_records


def test_time_and_records_of_a_limited_run(tmp_path, monkeypatch, capsys):
    hw = hardware_with(None)
    for name in ('OPTKIT_RESUME', 'OPTKIT_UNTIL', 'OPTKIT_COMMIT'): monkeypatch.delenv(name, raising=False)
    path = save_records(tmp_path/'try-cpu.json', [Record('a', 'a')], hw, 'this test')
    assert (kept_record(path, hw), time_left(), seconds_for(30.)) == (None, math.inf, 30.)
    monkeypatch.setenv('OPTKIT_RESUME', '1')
    monkeypatch.setenv('OPTKIT_UNTIL', str(time.time() + 25))
    assert [r['variant'] for r in kept_record(path, hw)['rows']] == ['a'] and '1 rows are there' in capsys.readouterr().out
    assert 10 < seconds_for(30.) < 15.1 and seconds_for(30., 40.) == 1 and enough(20, 'x') and not enough(40, 'x')
    monkeypatch.setenv('OPTKIT_COMMIT', 'another')
    assert kept_record(path, hw) is None and 'measured anew (commit ' in capsys.readouterr().out
