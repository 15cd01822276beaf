"Where CI=true a test that is skipped for want of something installable fails, and one that wants a GPU or the data folder stays a skip"
import os, re, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REASONS = {'needs chromium': 'failed', 'needs the model package x': 'failed', 'needs cuda': 'skipped', 'needs a GPU to wait for': 'skipped', 'captures need a GPU': 'skipped',
           'needs two GPUs': 'skipped', 'needs the data folder shared/data': 'skipped', 'a package, which is optional, is not installed': 'skipped', 'needs gpustat': 'failed'}


@pytest.mark.parametrize('ci', ['true', ''], ids=['CI', 'elsewhere'])
def test_what_a_skip_counts_as(tmp_path, ci):
    (tmp_path/'test_one.py').write_text('import pytest\n' + ''.join(f'\n@pytest.mark.skip(reason={r!r})\ndef test_{i}(): pass\n' for i, r in enumerate(REASONS)))
    out = subprocess.run([sys.executable, '-m', 'pytest', '-p', 'pytest_ci', '-p', 'no:cacheprovider', '-q', '-rsE', '--noconftest', 'test_one.py'], cwd=tmp_path, capture_output=True, text=True,
                         env={**os.environ, 'CI': ci, 'PYTHONPATH': str(ROOT/'tools')}).stdout
    failed = set(re.findall(r'^skipped in CI: (.+)$', out, re.M))
    assert failed == ({r for r, outcome in REASONS.items() if outcome == 'failed'} if ci else set()), out
    assert f'{len(REASONS) - len(failed)} skipped' in out, out
