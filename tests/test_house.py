"How the chapters hang together: `tools/house.py` measures it, and the structure stays as it is"
import importlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
from house import circles, house, NO_BENCHMARK, read, read_cells

CHAPTERS = [read(path) for path in sorted((ROOT / 'nbs').glob('[0-9]*.ipynb'))]
STRUCTURE = ('imports of a later chapter', 'circles', 'private names of another chapter')
NOTHING = dict.fromkeys(('exported lines that are too wide', 'lines with several statements',
                         'longer runs of exported lines without a running cell', 'names that say nothing',
                         'public parameters without a type or a comment'), [])


@pytest.fixture(scope='module')
def figures(): return {what: (value, holds, places) for what, value, _, holds, places in house(CHAPTERS)}


@pytest.mark.parametrize('chapter', CHAPTERS, ids=lambda chapter: chapter.name)
def test_a_chapter_can_be_read(chapter):
    assert dict(zip(NOTHING, (chapter.wide, chapter.shared, chapter.longer, chapter.vague,
                              chapter.parameters))) == NOTHING


@pytest.mark.parametrize('what', STRUCTURE)
def test_how_chapters_hang_together(figures, what):
    assert figures[what] == (0, True, [])


def test_what_is_measured_over_all_chapters_is_within_its_limit(figures):
    assert {what: (value, places) for what, (value, holds, places) in figures.items() if not holds and what not in STRUCTURE
            and not what.startswith(('exported lines', 'most exported lines', 'names such as'))} == {}


@pytest.mark.parametrize('chapter', CHAPTERS, ids=lambda chapter: chapter.name)
def test_a_chapter_ends_with_a_benchmark_and_a_stored_plot(chapter):
    assert chapter.name[:2] in NO_BENCHMARK or (chapter.benchmark and chapter.plots > 0)


def test_a_chapter_without_a_benchmark_exists_and_has_a_reason():
    assert {*NO_BENCHMARK} <= {chapter.name[:2] for chapter in CHAPTERS} and all(NO_BENCHMARK.values())


def chapter(name, *cells):
    "A `Chapter` of cells, pairs of a source and outputs"
    return read_cells(name, [dict(cell_type='code', id=f'{name}{n}', source=source, outputs=outputs)
                             for n, (source, outputs) in enumerate(cells)])


def test_what_misses_a_limit_is_seen():
    low = chapter('10_low', ('#| default_exp low', []), ('#| export\nfrom optkit.high import tower', []))
    high = chapter('20_high', ('#| default_exp high', []),
                   ('#| export\nfrom optkit.low import _cellar\ndef lamp(room): return room._dark, room._seen', []),
                   ('#| exporti\nclass Tower:\n    def __init__(self): self._seen = self._dark_ = 1; self.on = 2', []))
    low.bound.add('_dark')
    figures = {what: places for what, *_, places in house([low, high])}
    assert [figures[what] for what in STRUCTURE] == [
        ['low -> high'], ['high low'], ['high takes low._cellar', 'high reads room._dark']]
    assert figures['exported lines with several statements'] == ['20_high 20_high2: line 3']
    assert figures['chapters without a benchmark or plot'] == ['10_low: no benchmark section', '20_high: no benchmark section']
    assert figures['public parameters without a type or a comment'] == ['20_high 20_high1: lamp.room has no type and comment']
    assert chapter('10_a', ('#| export\ndef f(found): kept = found', [])).vague == [('10_a0', 'found'), ('10_a0', 'kept')]
    assert (high.public, high.internal) == ({'lamp': True}, {'Tower'})
    assert circles({'a': {'b'}, 'b': {'c'}, 'c': set()}) == []


def test_only_a_cell_that_shows_or_asserts_breaks_a_run_of_exported_lines():
    quiet, loud, export = ('x = 1', []), ('x', [dict(output_type='execute_result')]), ('#| export\na = 1\nb = 2', [])
    assert chapter('10_a', export, quiet, export).runs == [4]
    assert chapter('10_a', export, ('#| hide\ntest_eq(a, 1)', []), export).runs == [4]
    assert chapter('10_a', export, loud, export, ('assert a', []), export).runs == [2, 2, 2]


@pytest.mark.parametrize('source, shown', [('f(1)', True), ('list(map(f, [1]))', True), ('[r for r in rows if r.f]', False),
    ('f', False), ('from optkit.a import f', False), ('x.f()', False), ('try: g()\nexcept f: pass', True)])
def test_an_example_calls_the_name(source, shown):
    example = chapter('10_a', ('#| export\ndef f(x): return x', []), (source, [dict(output_type='stream')]))
    assert (example.unseen == []) == shown


@pytest.mark.parametrize('old, name, new', [('data', 'TokenStore', 'store'), ('table', 'table_from', 'frames'),
    ('data', 'table_from', 'frames'), ('job', 'table_from', 'frames'), ('data', 'steps', 'steps'),
    ('engine', 'load_model', 'models'), ('engine', 'choose_checkpointing', 'updates'), ('engine', 'MASTERS', 'updates'),
    ('engine', 'round_stochastically', 'updates'), ('hardware', 'known_gpu', 'cards'), ('trainer', 'TrainConfig', 'config'),
    ('hpo', 'parse_space', 'space'), ('claims', 'optimize', 'optimize'), ('job', 'JobConfig', 'job_plan'),
    ('job', 'sha256_of', 'job_plan'), ('all', 'EXPERIMENTS', 'experiments'), ('views', 'watch', 'training_views'), ('views', 'limit_of', 'training_views')])
def test_names_that_moved_can_be_read_from_their_old_module_with_a_warning(old, name, new):
    module = importlib.import_module(f'optkit.{old}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert getattr(module, name) is getattr(importlib.import_module(f'optkit.{new}'), name)
    assert name in vars(module) or any(str(w.message) == f'optkit.{old}.{name} moved to optkit.{new}' for w in caught)


@pytest.mark.parametrize('module, old, new', [('trainer', 'Position', 'RunState'), ('trainer', 'CHANGES_NOTHING', 'ROUNDING_ONLY_FIELDS'),
    ('trainer', 'BUILT_IN', 'ENGINE_FIELDS'), ('progress', 'Beside', 'BackgroundRun'), ('store', 'place', 'to_device'), ('data', 'place', 'to_device'),
    ('all', 'Beside', 'BackgroundRun'), ('all', 'Place', 'StudyLocation'), ('all', 'Position', 'RunState'),
    ('ledger', 'problem', 'why_not_applicable'), ('claims', 'problem', 'why_not_applicable'), ('all', 'problem', 'why_not_applicable'),
    ('bench', 'GRACE', 'OVERRUN_S'), ('claims', 'LONG', 'ANNOUNCE_AFTER_S'), ('all', 'LONG', 'ANNOUNCE_AFTER_S'), ('timing', 'looks', 'interim_looks')])
def test_names_of_before_can_be_read_with_a_warning(module, old, new):
    module = importlib.import_module(f'optkit.{module}')
    with pytest.warns(DeprecationWarning, match=f'{old} is now {new}'): value = getattr(module, old)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert value is getattr(module, new)


@pytest.mark.parametrize('source, bare', [
    ('def f(a: int, # rows\n      b: str # name\n): return a', []),
    ('def f(a, # rows\n      b: str, *c: int, **d): return a',
     [('f.b', 'comment'), ('f.c', 'comment'), ('f.d', 'comment'), ('f.a', 'type')]),
    ('def _f(a): return a', []), ('class A:\n    def __init__(self, a): self.a = a', [('A.__init__.a', 'type and comment')]),
    ('@patch\ndef g(self: A, a: int): return a', [('g.a', 'comment')]), ('@patch\ndef g(self: _A, a): return a', []),
    ('class A:\n    def _f(self, a): return a\n    def __call__(self, a): return a', []),
    ('@dataclass(frozen=True)\nclass A:\n    a: int # rows\n    b: int = 0', [('A.b', 'comment')]),
    ('class A(NamedTuple):\n    a: int', [('A.a', 'comment')]), ('class A:\n    a: int', [])])
def test_a_public_parameter_needs_a_type_and_a_comment(source, bare):
    exported = chapter('10_a', (f'#| export\n{source}', []), ('#| exporti\ndef f(a): return a', []))
    assert sorted(exported.parameters) == sorted(('10_a0', *pair) for pair in bare)


def test_a_plot_counts_behind_the_heading_of_the_benchmark():
    plot = dict(cell_type='code', source='ax', outputs=[dict(output_type='display_data', data={'image/png': ''})])
    heading, other = (dict(cell_type='markdown', source=f'## {text}') for text in ('Benchmark', 'Figures'))
    for cells, benchmark, plots in ([other, plot], False, 0), ([plot, heading], True, 0), ([other, heading, plot], True, 1):
        assert ((c := read_cells('10_a', cells)).benchmark, c.plots) == (benchmark, plots)


def test_a_name_that_no_module_had_is_none():
    for old in ('data', 'engine', 'claims'):
        with pytest.raises(AttributeError, match='has no attribute'): getattr(importlib.import_module(f'optkit.{old}'), 'nothing_at_all')


def test_readme_fits_one_screen_before_the_first_command():
    before, commands, after = (ROOT / 'README.md').read_text('utf-8').split('```')[:3]
    assert len(before.split('-->')[1].split()) < 120 and before.count('<img ') == 1 and len(commands.strip().splitlines()) == 3
    assert 'does not win' in after and after.count('\n|---') == 1 # one table, and what it leaves out


PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'bench').glob('*.md'), *(ROOT / 'nbs').glob('*.ipynb')]

def prose(page):
    text = page.read_text('utf-8')
    if page.suffix == '.md': return text
    return '\n'.join(''.join(c['source']) for c in json.loads(text)['cells'] if c['cell_type'] == 'markdown')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_say_their_numbers(page):
    for said, target in re.findall(r'\[([^\]\n]*)\]\(([^)\s]+)\)', prose(page)):
        if target.startswith(('http', '#')): continue
        path = page.parent / target.split('#')[0]
        assert path.exists(), (said, target)
        number = re.search(r'\b\d\d\b', said)
        assert not number or path.suffix != '.ipynb' or path.name.startswith(number[0]), (said, target)
