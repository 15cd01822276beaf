"How the chapters hang together: `tools/house.py` measures it, and the structure stays as it is"
import importlib
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
from house import Chapter, circles, house, read

CHAPTERS = [read(path) for path in sorted((ROOT / 'nbs').glob('[0-9]*.ipynb'))]
STRUCTURE = ('imports of a later chapter', 'circles', 'private names of another chapter')


def test_no_chapter_imports_a_later_one_or_a_private_name_and_none_form_a_circle():
    figures = {what: (value, places) for what, value, _, _, places in house(CHAPTERS)}
    assert {what: figures[what] for what in STRUCTURE} == {what: (0, []) for what in STRUCTURE}


def test_what_misses_a_limit_is_seen():
    low, high = Chapter('10_low', 'low'), Chapter('20_high', 'high')
    for chapter in (low, high): chapter.cells, chapter.runs = ['a = 1'], [1]
    low.imports, high.imports = {'high': {'tower'}}, {'low': {'_cellar'}}
    figures = {what: places for what, *_, places in house([low, high])}
    assert [figures[what] for what in STRUCTURE] == [['low -> high'], ['high low'], ['high takes low._cellar']]
    assert circles({'a': {'b'}, 'b': {'c'}, 'c': set()}) == []


@pytest.mark.parametrize('old, name, new', [('data', 'TokenStore', 'store'), ('data', 'steps', 'steps'),
    ('engine', 'load_model', 'models'), ('hardware', 'known_gpu', 'cards'), ('trainer', 'TrainConfig', 'config'),
    ('hpo', 'parse_space', 'space'), ('claims', 'optimize', 'optimize')])
def test_names_that_moved_can_be_read_from_their_old_module_with_a_warning(old, name, new):
    module = importlib.import_module(f'optkit.{old}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert getattr(module, name) is getattr(importlib.import_module(f'optkit.{new}'), name)
    assert name in vars(module) or any(str(w.message) == f'optkit.{old}.{name} moved to optkit.{new}' for w in caught)


@pytest.mark.parametrize('module, old, new', [('trainer', 'Position', 'RunState'), ('trainer', 'CHANGES_NOTHING', 'ROUNDING_ONLY_FIELDS'),
    ('trainer', 'BUILT_IN', 'ENGINE_FIELDS'), ('progress', 'Beside', 'BackgroundRun'), ('store', 'place', 'to_device'), ('data', 'place', 'to_device')])
def test_names_of_before_can_be_read_with_a_warning(module, old, new):
    module = importlib.import_module(f'optkit.{module}')
    with pytest.warns(DeprecationWarning, match=f'{old} is now {new}'): value = getattr(module, old)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert value is getattr(module, new)


def test_a_name_that_no_module_had_is_none():
    for old in ('data', 'engine', 'claims'):
        with pytest.raises(AttributeError, match='has no attribute'): getattr(importlib.import_module(f'optkit.{old}'), 'nothing_at_all')
