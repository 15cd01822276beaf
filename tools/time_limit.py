"""What a benchmark in a notebook asks when its machine is lent by the minute.

`tools/run_notebooks.py` sets OPTKIT_UNTIL (--limit) and OPTKIT_RESUME (--resume). A flagged cell asks this module how
much time is left and what is measured already, and saves after each part.
"""
import os
import time
from pathlib import Path

from optkit.base import read_json
from optkit.records import provenance


def time_left():
    "Seconds until OPTKIT_UNTIL (seconds since 1970); endless without it"
    return float(os.environ.get('OPTKIT_UNTIL', 'inf')) - time.time()


def seconds_for(wanted, reserve=10.):
    "A budget of at most `wanted` and at least 1 second that leaves `reserve` seconds for what comes after"
    return max(1., min(wanted, time_left() - reserve))


def enough(seconds, what):
    "Whether so many seconds are left; prints that `what` is left out where they are not"
    if (left := time_left()) >= seconds: return True
    print(f'{what}: left out, it takes {seconds:g} s and {left:.0f} s are left')
    return False


def kept_record(path, hardware):
    "The record at `path` as a dict, where --resume asks for it and card, versions and commit are the same; else None"
    if not os.environ.get('OPTKIT_RESUME') or not Path(path).is_file(): return None
    stored, current = read_json(path), provenance(hardware)
    before = stored['provenance']
    other = [f'{k} {before.get(k)}, now {current[k]}'
             for k in ('gpu', 'driver', 'torch', 'cuda', 'transformers', 'commit') if before.get(k) != current[k]]
    print(f'{Path(path).name}: '
          + (f'measured anew ({"; ".join(other)})' if other else f'{len(stored["rows"])} rows are there'))
    return None if other else stored
