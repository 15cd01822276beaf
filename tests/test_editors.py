"Editors see methods that `@patch` adds, by the stubs that `tools/stubs.py` writes"
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
from stubs import stubs

IMPORTS = '''from optkit.build import make_engine
from optkit.config import TrainConfig
from optkit.engine import Engine
from optkit.job import Job, JobConfig
from optkit.store import TokenStore, tokenise
from optkit.trainer import Trainer
'''


def script(line, imports=IMPORTS):
    "An editor with `line` below the imports, and the number of that line"
    return jedi.Script(imports + line, project=jedi.Project(ROOT)), len(imports.splitlines()) + 1


@pytest.mark.parametrize('code, methods', [
    ('Trainer(engine, store, config).', {'fit', 'refit', 'start', 'stop', 'plan'}),
    ('make_engine(model, config).', {'step', 'reset', 'predict', 'halve'}),
    ('tokenise(table, tokenizer, 64).', {'to', 'lengths', 'truncated'}),
    ('Job(JobConfig("a.csv", "text", "label")).', {'run', 'work', 'decide'}),
    ('TrainConfig.', {'preset', 'diff'})])
def test_completion_finds_patched_methods(code, methods):
    editor, line = script(code)
    assert methods <= {c.name for c in editor.complete(line)}


@pytest.mark.parametrize('code, kind', [
    ('Trainer(engine, store, config).fit(train, valid)', 'FitResult'), ('TokenStore().to("cpu")', 'TokenStore'),
    ('Trainer(engine, store, config).engine', 'Engine'), ('TrainConfig.preset("h100")', 'Preset')])
def test_the_types_of_results_are_inferred(code, kind):
    editor, line = script(f'x = {code}')
    assert [d.name for d in editor.infer(line, 0)] == [kind]


def test_a_name_that_a_module_lists_for_another_is_inferred():
    editor, line = script('x = watch()', 'from optkit.views import watch\n')
    assert [d.full_name for d in editor.infer(line, 0)] == ['optkit.training_views.MachineView']


def test_help_of_a_patched_method_has_its_parameters_and_docstring():
    editor, line = script('Engine.step')
    text = editor.help(line, len('Engine.st'))[0].docstring()
    assert text.startswith('step(') and 'store: TokenStore' in text and len(text.splitlines()) > 1


def test_the_names_of_all_are_found():
    editor, line = script('Trainer', 'from optkit.all import *\n')
    assert [d.full_name for d in editor.infer(line, 2)] == ['optkit.trainer.Trainer']


def test_a_method_from_a_later_module_brings_the_names_of_its_annotations(tmp_path):
    (tmp_path / 'all.py').write_text('')
    (tmp_path / 'low.py').write_text("""from pathlib import Path
__all__ = ['Tower']
class Tower:
    floors = 3
    def __init__(self, at: Path, _hidden=None): self.at, self._hidden = at, _hidden
def _cellar(): pass
""")
    (tmp_path / 'high.py').write_text("""from fastcore.basics import patch
from .low import Tower
class Roof: pass
@patch(as_prop=True)
def roof(self: Tower) -> Roof: "On top"
""")
    text = stubs(tmp_path)['low.pyi']
    assert 'from .high import Roof' in text and 'from pathlib import Path' in text
    assert '    floors: int\n    at: Path\n' in text and 'hidden' not in text.split('__init__')[0] and 'cellar' not in text
    assert '    @property\n    def roof(self) -> Roof:\n        """On top"""' in text
    written = subprocess.run([sys.executable, ROOT / 'tools' / 'stubs.py', '--folder', tmp_path], capture_output=True)
    check = [sys.executable, ROOT / 'tools' / 'stubs.py', '--check', '--folder', tmp_path]
    assert written.returncode == 0 and subprocess.run(check).returncode == 0
    (tmp_path / 'low.py').write_text('class Tower: pass\n')
    late = subprocess.run(check, capture_output=True, text=True)
    assert late.returncode == 1 and late.stderr.endswith('low.pyi: not up to date: run tools/stubs.py\n')
