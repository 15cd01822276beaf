"""Run notebooks from top to bottom and store their outputs.

    python tools/run_notebooks.py [--flags "slow cuda"] [NAME ...]
    python tools/run_notebooks.py --plain [--limit SECONDS] [--resume] [--needed] [--cells "ID ID"] ...

Cells flagged slow, cuda or bench (`tst_flags` in settings.ini) keep the outputs they have, unless
--flags names their flag. What goes to stderr (progress bars, warnings) is not stored. NAME is a
notebook or the beginning of its name: `30`, `30_batch_finder`, `nbs/30_batch_finder.ipynb`.

--plain is for a GPU machine that has neither Jupyter nor nbdev: the cells run one after the other in
plain Python, print what they print, and nothing is stored but what they write themselves. A cell that
fails does not end the run: its error is shown, the cells after it are tried, and the exit status is 1.
--cells "ID ID" takes only these of the cells with a flag. --limit SECONDS ends all within that time: the
cells ask `tools/time_limit.py`, a flagged cell for which nothing is left is not begun, and what hangs is
ended with a traceback. --resume leaves out what a record of before already holds. --needed leaves out
the cells that bind no name which a flagged cell needs: tests, plots and small runs of what is exported.
"""
import argparse, dis, faulthandler, json, linecache, os, re, sys, time, traceback, types
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDGET = 'application/vnd.jupyter.widget-view+json'
WARN_BYTES = 1_000_000
LEAST, GRACE = 5, 20 # seconds: that a flagged cell is begun for, and that it may overrun


def find(names=()):
    "The notebooks that nbdev takes, or those of them whose name begins with one of `names`"
    every = sorted(p for p in (ROOT/'nbs').glob('*.ipynb') if p.name[0] not in '_.')
    if not names: return every
    chosen = {name: [p for p in every if p.stem.startswith(Path(name).stem)] for name in names}
    if missing := [name for name, paths in chosen.items() if not paths]:
        raise SystemExit(f"no notebook for {', '.join(missing)}; there are {', '.join(p.stem for p in every)}")
    return sorted({p for paths in chosen.values() for p in paths})


def tst_flags():
    config = ConfigParser(delimiters=['='])
    config.read(ROOT/'settings.ini', encoding='utf-8')
    return set(config['DEFAULT']['tst_flags'].split())


def runs(cell, skip):
    "Does nbdev run `cell` when the flags `skip` are not asked for?"
    from fastcore.basics import AttrDict
    from nbdev.process import extract_directives
    if cell['cell_type'] != 'code': return False
    marks = extract_directives(AttrDict(source=''.join(cell['source'])), remove=False)
    return not (skip & marks.keys()) and marks.get('eval:', [''])[0].lower() != 'false'


def tidy(cell):
    "Drop progress bars and whatever went to stderr; return what of it was no progress bar"
    outputs, messages = [], []
    for output in cell['outputs']:
        if output['output_type'] == 'stream' and output['name'] == 'stderr':
            if not any(mark in output['text'] for mark in ('\r', '%|', 'it/s')): messages.append(output['text'].strip())
        elif WIDGET not in output.get('data', {}): outputs.append(output)
    cell['outputs'] = outputs
    return messages


def clean(nb):
    "`nb` as `nbdev_clean` would leave it, without widget state"
    from nbdev.clean import clean_nb
    from nbdev.config import get_config
    nb['metadata'].pop('widgets', None)
    clean_nb(nb, clean_ids=get_config(path=ROOT).clean_ids)
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n'


def run(path, skip):
    "Run the notebook at `path`, and write it when every cell passed"
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    start, count = time.time(), 0
    nb = nbformat.read(path, as_version=4)
    client = NotebookClient(nb, timeout=None, kernel_name='python3', coalesce_streams=True,
                            extra_arguments=['--IPKernelApp.log_level=ERROR'],
                            resources={'metadata': {'path': str(path.parent)}})
    with client.setup_kernel():
        for index, cell in enumerate(nb.cells):
            if not runs(cell, skip) or not cell.source.strip(): continue
            try: client.execute_cell(cell, index)
            except CellExecutionError as error: raise SystemExit(f"{path.name}, cell {cell.id}:\n{error}") from None
            for text in tidy(cell): print(f'  {path.name}, cell {cell.id}, not stored: {text}', file=sys.stderr)
            count += 1
    text = clean(json.loads(nbformat.writes(nb)))
    if str(ROOT) in text: print(f'  {path.name}: the outputs name the folder {ROOT}', file=sys.stderr)
    if len(text) > WARN_BYTES: print(f'  {path.name}: {len(text)/1e6:.1f} MB', file=sys.stderr)
    path.write_text(text, 'utf-8')
    print(f'{path.name}: {count} cells, {time.time() - start:.0f} s', flush=True)


class Names:
    "What a cell binds; what it needs from before; what its functions look up when they are called"
    def __init__(self, source):
        self.bound, self.needs, self.later = set(), set(), set()
        for step in dis.get_instructions(compile(source, 'cell', 'exec')):
            if step.opname == 'STORE_NAME': self.bound.add(step.argval)
            elif step.opname == 'LOAD_NAME': self.needs |= {step.argval} - self.bound
            elif isinstance(step.argval, types.CodeType): # it may run at once
                self.needs |= looked_up(step.argval) - self.bound
                if not step.argval.co_name.endswith(('comp>', 'genexpr>')): self.later |= looked_up(step.argval)


def looked_up(code):
    "Global names of a function or class, and of those inside it"
    names = lambda *kinds: {s.argval for s in dis.get_instructions(code) if s.opname in kinds}
    read = names('LOAD_NAME', 'LOAD_GLOBAL', 'LOAD_FROM_DICT_OR_GLOBALS')
    read -= names('STORE_NAME', 'STORE_GLOBAL') | {'__annotations__'}
    return read.union(*(looked_up(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def needed(sources, always, wanted):
    """Places of the cells that have to run so that those in `wanted` can: `always`, and those that last bind a name
    that is needed"""
    cells, chosen, todo = [Names(s) for s in sources], set(), [*always, *wanted]
    last = lambda name, before: next((n for n in range(before - 1, -1, -1) if name in cells[n].bound), None)
    while todo:
        if (n := todo.pop()) in chosen: continue
        chosen.add(n)
        todo += [m for name in cells[n].needs if (m := last(name, n)) is not None]
        if wanted and n <= max(wanted):
            todo += [m for name in cells[n].later if (m := last(name, max(wanted) + 1)) is not None]
    return chosen


def plan(path, skip, chosen, only_needed):
    "The cells of the notebook at `path` that are to run: id, source, whether they have a flag"
    cells, flags_of = [], lambda source: set(re.findall(r'^#\|\s*(\w+)', source, re.M))
    for cell in json.loads(path.read_text('utf-8'))['cells']:
        flags = flags_of(''.join(cell['source']))
        source = re.sub(r'^%.*', '', ''.join(cell['source']), flags=re.M) # without what only Jupyter knows
        flagged = bool(flags & tst_flags())
        if cell['cell_type'] != 'code' or flags & skip or 'eval' in flags: continue
        if chosen and flagged and cell['id'] not in chosen: continue
        cells.append((cell['id'], source, flagged))
    if not only_needed: return cells
    sources = [source for _, source, _ in cells]
    always = [n for n, s in enumerate(sources)
              if flags_of(s) & {'export', 'exporti', 'exports'} or re.search(r'^from \S+ import \*', s, re.M)]
    required = needed(sources, always, [n for n, (*_, flagged) in enumerate(cells) if flagged])
    return [cell for n, cell in enumerate(cells) if n in required]


def plain(path, skip, chosen, only_needed=False):
    """Run the cells of the notebook at `path` in this process, in a fresh namespace, and store nothing; the cells that
    failed or were not begun"""
    import matplotlib
    matplotlib.use('Agg')
    start, missed = time.time(), []
    sys.modules['__main__'] = types.ModuleType('__main__') # where pickle and the compiler look for the cells' names
    names = sys.modules['__main__'].__dict__
    names['display'] = print
    os.chdir(path.parent)
    for cell, source, flagged in plan(path, skip, chosen, only_needed):
        name, begun = f'{path.name}, cell {cell}', time.time()
        linecache.cache[name] = len(source), None, source.splitlines(True), name # Triton reads a kernel's source there
        if flagged and begun > float(os.environ.get('OPTKIT_UNTIL', 'inf')) - LEAST:
            print(f'{name}: not begun, the time is over')
            missed.append(name)
            continue
        try: exec(compile(source, name, 'exec'), names)
        except Exception as error: # what comes after it is worth more than nothing
            missed.append(name)
            print(f'{name}: FAILED', *traceback.format_exception(error, limit=-6), sep='\n')
            traceback.clear_frames(error.__traceback__) # they hold tensors
        if 'matplotlib.pyplot' in sys.modules: sys.modules['matplotlib.pyplot'].close('all')
        if flagged or time.time() - begun > 2:
            print(f'{name}: {time.time() - begun:.0f} s, {time.time() - start:.0f} s in all')
    print(f'{path.name}: {time.time() - start:.0f} s' + ''.join(f'\nnot done: {name}' for name in missed))
    return missed


def end_by(seconds):
    "From now on cells know how much time is left; what goes on beyond it ends with a traceback"
    os.environ['OPTKIT_UNTIL'] = str(time.time() + seconds)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='NAME')
    parser.add_argument('--flags', default='', help='space separated flags whose cells are run as well')
    parser.add_argument('--plain', action='store_true', help='in plain Python, storing nothing')
    parser.add_argument('--cells', default='', help='with --plain: ids of the flagged cells to run')
    parser.add_argument('--limit', type=float, help='with --plain: seconds within which all ends')
    parser.add_argument('--needed', action='store_true',
                        help='with --plain: of the cells without a flag only those that a flagged one needs')
    parser.add_argument('--resume', action='store_true', help='with --plain: leave out what a record already holds')
    args = parser.parse_args()
    if not args.plain and (args.limit or args.resume or args.needed or args.cells):
        raise SystemExit('--limit, --resume, --needed and --cells are for --plain')
    sys.stdout.reconfigure(line_buffering=True) # a run that is cut off has said what it knew
    if args.limit: end_by(args.limit)
    if args.resume: os.environ['OPTKIT_RESUME'] = '1'
    sys.path.insert(0, str(ROOT))
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    missed, chosen = [], args.cells.split()
    present = {cell['id'] for path in find(args.names) for cell in json.loads(path.read_text('utf-8'))['cells']}
    if lost := set(chosen) - present: raise SystemExit(f"no cell {', '.join(sorted(lost))} in these notebooks")
    for path in find(args.names):
        skip = tst_flags() - set(args.flags.split())
        missed += plain(path, skip, chosen, args.needed) if args.plain else run(path, skip) or []
    if args.limit: faulthandler.dump_traceback_later(GRACE, exit=True) # for what hangs at the exit
    if missed: raise SystemExit(1)


if __name__ == '__main__': main()
