"""Everything that `make test` checks: a line each, and exit status 1 when one of them fails.

    python tools/test.py                 all of it
    python tools/test.py --all           with notebook cells and tests that are flagged slow
    python tools/test.py --check         only whether notebooks, package and README are in step
    python tools/test.py 30 46           these notebooks, and no pytest

Two lanes take from one queue, so that neither waits for the other: half of the test files for each, then
the notebooks one by one. So their lines come mixed. Each process has one thread for computation, unless
OMP_NUM_THREADS says otherwise.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, time, traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from run_notebooks import ROOT, clean, find, runs, tst_flags

TOOLS = ROOT/'tools'
PYTEST_NO_TESTS = 5
LANES = 2 # processes at a time: CI has two processors


class Checks:
    "What was checked so far"
    def __init__(self): self.passed = self.failed = 0

    def run(self, name, check, *args):
        "Make one check, a function that returns its problem or ''; an error in it is a problem too"
        try: self.add(name, check(*args))
        except Exception: self.add(name, traceback.format_exc())

    def add(self, name, problem=''):
        "Print the line of one check, and why it failed when there is a `problem`"
        if problem: self.failed += 1
        else: self.passed += 1
        print(f"{'FAIL' if problem else 'ok':4} {name}", flush=True)
        if problem: print('     ' + problem.strip().replace('\n', '\n     '), flush=True)


def command(*args, cwd=ROOT, **environment):
    "Run `args`; return the exit status and all that was printed"
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'} | {'HF_HUB_OFFLINE': '1'} | environment
    done = subprocess.run([str(a) for a in args], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
    return done.returncode, done.stdout


def script(name):
    "The path of the command `name` of this environment"
    return Path(sys.executable).with_name(name)


def unclean():
    "What is to be cleaned in which notebook"
    problems = []
    for path in find():
        text = path.read_text('utf-8')
        nb = json.loads(text)
        if 'widgets' in nb['metadata']: problems.append(f'{path.name} holds widget state (metadata.widgets)')
        elif clean(nb) != text: problems.append(f'{path.name} is not clean: run nbdev_clean')
    return '\n'.join(problems)


def out_of_step():
    "Which files of optkit/ differ from a fresh export of the notebooks"
    with tempfile.TemporaryDirectory() as folder:
        fresh, package = Path(folder), ROOT/'optkit'
        (fresh/'nbs').mkdir()
        shutil.copy(ROOT/'settings.ini', fresh)
        for path in find(): shutil.copy(path, fresh/'nbs')
        status, message = command(script('nbdev_export'), cwd=fresh)
        if status: return 'nbdev_export failed:\n' + message
        made = {p.relative_to(fresh/'optkit'): p.read_bytes() for p in (fresh/'optkit').rglob('*.py')}
    present = {p.relative_to(package): p.read_bytes() for p in package.rglob('*.py')}
    if not made: return 'no notebook exports a module'
    why = {True: 'differs', False: 'is missing'}
    problems = [f'optkit/{name} {why[name in present]}' for name in sorted(made) if present.get(name) != made[name]]
    problems += [f'optkit/{name} comes from no notebook' for name in sorted(present.keys() - made.keys())]
    return '\n'.join([*problems, 'run nbdev_export']) if problems else ''


def up_to_date(tool):
    status, message = command(sys.executable, TOOLS/tool, '--check')
    return message if status else ''


def notebook(path, flags):
    "Run `nbdev_test` on one notebook, in a process of its own; return the line about it, its problem, and how many cells ran"
    skip = tst_flags() - {*flags.split()}
    count = sum(runs(c, skip) for c in json.loads(path.read_text('utf-8'))['cells'])
    start = time.time()
    status, message = command(script('nbdev_test'), '--path', path, '--n_workers', 0, '--do_print', '--flags', flags)
    if not status: message = '' if 'Success.' in message and f'Completed {path}' in message else 'nbdev_test did not run it:\n' + message
    return f'{path.name}: {count} cells, {time.time() - start:.0f} s', message, Counter(cells=count)


def show(lines):
    "Print progress as it comes; the rest, from the first heading on, in one piece"
    for line in lines:
        if line.startswith('='): return print(line + ''.join(lines), end='', flush=True)
        print(line, end='', flush=True)


def tests(files, everything):
    "Run pytest on `files` and print its lines; return a line about it, its problem, and the counts of tests"
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)/'report.xml'
        args = ['-p', 'pytest_ci', '--timeout=600', '-q', '-rs', '--durations=12', f'--junitxml={report}', *([] if everything else ['-m', 'not slow'])]
        path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get('PYTHONPATH')]))
        env = os.environ | {'HF_HUB_OFFLINE': '1', 'PYTHONPATH': path}
        with subprocess.Popen([sys.executable, '-m', 'pytest', *args, *map(str, files)], cwd=ROOT, env=env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors='replace') as process: show(process.stdout)
        status = process.returncode
        suites = list(ElementTree.parse(report).iter('testsuite')) if report.exists() else [{'tests': 1, 'errors': 1}]
        total, bad, skipped = (sum(int(s.get(k, 0)) for s in suites for k in keys) for keys in
                               [('tests',), ('failures', 'errors'), ('skipped',)])
    count = Counter(passed=total - bad - skipped, failed=bad, skipped=skipped)
    problem = 'no test ran' if status == PYTEST_NO_TESTS or total == skipped else f'exit status {status}, see above' if status else ''
    return f'pytest: {total - bad - skipped} passed, {bad} failed, {skipped} skipped, {time.time() - start:.0f} s', problem, count


def halves():
    "The test files, dealt in turn to the lanes"
    every = sorted((ROOT/'tests').glob('test_*.py'))
    return [part for lane in range(LANES) if (part := every[lane::LANES])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='NOTEBOOK')
    parser.add_argument('--all', action='store_true')
    parser.add_argument('--check', action='store_true')
    args = parser.parse_args()
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    checks, flags = Checks(), 'slow' if args.all else ''
    if not args.names:
        checks.run('notebooks are clean', unclean)
        checks.run('optkit/ is what the notebooks export', out_of_step)
        checks.run('optkit/*.pyi are what the modules say', up_to_date, 'stubs.py')
        checks.run('README.md is what nbs/index.ipynb says', up_to_date, 'readme.py')
    counts, books = Counter(), [] if args.check else find(args.names)
    with ThreadPoolExecutor(LANES) as pool:
        suites = [] if args.check or args.names else [pool.submit(tests, part, args.all) for part in halves()]
        for job in as_completed([*suites, *(pool.submit(notebook, path, flags) for path in books)]):
            line, problem, count = job.result()
            checks.add(line, problem)
            counts += count
            checks.failed += max(count['failed'] - 1, 0) # a line of pytest is one failure so far
    if not args.check: print(f"{len(books)} notebooks with {counts['cells']} cells, {counts['passed'] + counts['failed']} tests")
    print(f"{checks.passed + counts['passed']} passed, {checks.failed} failed" + f", {counts['skipped']} skipped"*(counts['skipped'] > 0))
    raise SystemExit(checks.failed > 0)


if __name__ == '__main__': main()
