"What runs a notebook's cells on a GPU machine, whether each flagged cell can run without the other flagged ones, and whether each name is bound"
import builtins, json, re, sys, time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tools'))
import run_notebooks as runner
import optkit.all as optkit_all

CUDA = [(path, cell['id']) for path in runner.find() for cell in json.loads(path.read_text('utf-8'))['cells']
        if cell['cell_type'] == 'code' and ''.join(cell['source']).startswith('#| cuda')]


def unbound(sources):
    "Names that cells need and none before them binds, or for functions none of all"
    star, known, missing = {'__name__', '__file__', 'display', 'get_ipython', *dir(builtins)}, set(), set()
    for line in re.findall(r'^from optkit\S* import \*', '\n'.join(sources), re.M): exec(line, space := {}); star |= space.keys()
    cells = [runner.Names(s) for s in sources]
    for cell in cells:
        missing |= cell.needs - cell.later - known - star
        known |= cell.bound
    return {n for n in missing | {n for c in cells for n in c.later - known - star} if not n.startswith('test_')} # those of fastcore.test


@pytest.mark.parametrize('path,cell', CUDA, ids=[f'{p.stem}-{c}' for p, c in CUDA])
def test_a_flagged_cell_runs_alone(path, cell):
    skip = runner.tst_flags() - {'cuda'}
    for only_needed in (False, True):
        cells = runner.plan(path, skip, [cell], only_needed)
        assert [c for c, _, flagged in cells if flagged] == [cell]
        assert not unbound([source for _, source, _ in cells]), only_needed


@pytest.mark.parametrize('path', runner.find(), ids=lambda path: path.stem)
def test_every_name_of_a_notebook_is_bound(path):
    missing = unbound([source for _, source, _ in runner.plan(path, set(), [], False)])
    assert not missing - {*(optkit_all.__all__ if path.stem == '85_all' else ())} # which binds by globals()


@pytest.mark.parametrize('path', runner.find(), ids=lambda path: path.stem)
def test_every_cell_has_an_id_of_its_own(path):
    ids = [cell['id'] for cell in json.loads(path.read_text('utf-8'))['cells']]
    assert len(ids) == len({*ids})


@pytest.mark.parametrize('path', runner.find(), ids=lambda path: path.stem)
def test_exported_cells_are_short(path):
    sources = {cell['id']: ''.join(cell['source']) for cell in json.loads(path.read_text('utf-8'))['cells'] if cell['cell_type'] == 'code'}
    assert not {i: n for i, s in sources.items() if s.startswith('#| export') and (n := sum(bool(l.strip()) for l in s.splitlines())) > 60}


def test_what_is_unbound_is_seen():
    assert unbound(['import os as o\nfor i in range(3): a = i', 'def f(x): return x + a + o.sep + i', 'b = [n for n in f(1)]\nlater = lambda: f(b)']) == set()
    assert unbound(['a = lost', 'def f(): return [gone for n in f()]', 'c += 1']) == {'lost', 'gone', 'c'}


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, '__main__', sys.modules['__main__']) # the runner puts another one there
    def make(*sources):
        cells = [dict(cell_type='code', id=f'c{n}', source=s) for n, s in enumerate(sources)]
        (tmp_path/'x.ipynb').write_text(json.dumps(dict(cells=cells)))
        return tmp_path/'x.ipynb'
    return make


def run(path, capsys, chosen=(), **kwargs):
    missed = runner.plain(path, set(), list(chosen), **kwargs)
    return [m[-2:] for m in missed], capsys.readouterr().out


def test_a_cell_that_fails_does_not_end_the_run(notebook, capsys):
    missed, said = run(notebook('a = 1', 'raise ValueError("planted")', '#| cuda\nprint("a is", a)', '#| cuda\nbad()'), capsys)
    assert missed == ['c1', 'c3'] and 'a is 1' in said and 'planted' in said and 'not done: x.ipynb, cell c3' in said


def test_chosen_and_needed_cells(notebook, capsys):
    path = notebook('#| export\nshown = print', 'shown("of no use")', 'b = 2', 'def f(): shown("b is", b)', 'b = 3', '#| cuda\nf()', '#| cuda\nshown("other")')
    assert 'of no use' in run(path, capsys)[1]
    missed, said = run(path, capsys, ['c5'], only_needed=True)
    assert not missed and 'b is 3' in said and 'of no use' not in said and 'other' not in said


def test_what_only_jupyter_knows_is_left_out(notebook, capsys):
    missed, said = run(notebook('%matplotlib inline\na = 1', '#| cuda\nprint("a is", a)'), capsys, only_needed=True)
    assert not missed and 'a is 1' in said


def test_a_cell_that_is_not_there_is_said(monkeypatch):
    "before the others run, for minutes, without it"
    monkeypatch.setattr(sys, 'argv', ['run_notebooks.py', '--plain', '--flags', 'cuda', '--cells', 'a7100029 00000000', '35'])
    monkeypatch.setattr(runner, 'plain', lambda *a: pytest.fail('it ran'))
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setenv('PYTHONPATH', 'x')
    monkeypatch.setattr(sys, 'stdout', type('', (), dict(reconfigure=lambda self, **k: None, write=lambda self, t: None, flush=lambda self: None))())
    with pytest.raises(SystemExit, match='no cell 00000000'): runner.main()


def test_a_cell_is_not_begun_when_the_time_is_over(notebook, capsys, monkeypatch):
    monkeypatch.setenv('OPTKIT_UNTIL', str(time.time() + runner.LEAST - 1))
    missed, said = run(notebook('print("no flag")', '#| cuda\nprint("flag")'), capsys)
    assert missed == ['c1'] and 'no flag' in said and 'not begun' in said


def test_a_benchmark_asks_how_much_time_is_left(tmp_path, capsys, monkeypatch):
    import time_limit
    from optkit.hardware import hardware_with
    from optkit.records import Record, save_records
    for name in ('OPTKIT_RESUME', 'OPTKIT_UNTIL', 'OPTKIT_COMMIT'): monkeypatch.delenv(name, raising=False)
    hardware = hardware_with(None)
    path = save_records(tmp_path/'try-cpu.json', [Record('a', 'a')], hardware, 'this test')
    assert (time_limit.kept_record(path, hardware), time_limit.time_left(), time_limit.seconds_for(30.)) == (None, float('inf'), 30.)
    monkeypatch.setenv('OPTKIT_RESUME', '1')
    monkeypatch.setenv('OPTKIT_UNTIL', str(time.time() + 25))
    assert [r['variant'] for r in time_limit.kept_record(path, hardware)['rows']] == ['a']
    assert 10 < time_limit.seconds_for(30.) < 15.1 and time_limit.seconds_for(30., 40.) == 1
    assert time_limit.enough(20, 'x') and not time_limit.enough(40, 'x') and 'x: left out' in capsys.readouterr().out
    monkeypatch.setenv('OPTKIT_COMMIT', 'another')
    assert time_limit.kept_record(path, hardware) is None
