"Budgets of benchmark runs: how long a run may take, and which records it need not measure again"
import os, time
from pathlib import Path

from optkit.base import read_json
from optkit.records import provenance


def time_left():
    "Seconds until OPTKIT_UNTIL (seconds since 1970), which `tools/run_notebooks.py --limit` sets; endless without it"
    return float(os.environ.get('OPTKIT_UNTIL', 'inf')) - time.time()


def seconds_for(wanted, reserve=10.):
    "`wanted` seconds, or what is left but for `reserve` seconds; at least 1"
    return max(1., min(wanted, time_left() - reserve))


def enough(seconds, what):
    "Whether so many seconds are left for `what`; prints a line where they are not"
    if (left := time_left()) >= seconds: return True
    print(f'{what}: left out, it takes {seconds:g} s and {left:.0f} s are left')
    return False


def kept_record(path, hardware):
    "The stored record, where `tools/run_notebooks.py --resume` asks for it and card, versions and commit are the same"
    if not os.environ.get('OPTKIT_RESUME') or not Path(path).is_file(): return None
    stored, current = read_json(path), provenance(hardware)
    before, names = stored['provenance'], ('gpu', 'driver', 'torch', 'cuda', 'transformers', 'commit')
    other = [f'{k} {before.get(k)}, now {current[k]}' for k in names if before.get(k) != current[k]]
    print(f'{Path(path).name}: '
          + (f'measured anew ({"; ".join(other)})' if other else f'{len(stored["rows"])} rows are there'))
    return None if other else stored
