"""Everything that `make test` checks: a line each, and exit status 1 when one of them fails.

    python tools/test.py                 all of it
    python tools/test.py --all           with notebook cells and tests that are flagged slow
    python tools/test.py --check         only whether notebooks, package and README are in step
    python tools/test.py 30 46           these notebooks, and no pytest

The notebooks, one after the other, and pytest run side by side, so their lines come mixed. Each has one
thread for computation, unless OMP_NUM_THREADS says otherwise.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, time, traceback
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from run_notebooks import ROOT, clean, find, runs, tst_flags

TOOLS = ROOT/'tools'
PYTEST_NO_TESTS = 5


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
    "Run `nbdev_test` on one notebook, in a process of its own; return its problem"
    status, message = command(script('nbdev_test'), '--path', path, '--n_workers', 0, '--do_print', '--flags', flags)
    if status: return message
    return '' if 'Success.' in message and f'Completed {path}' in message else 'nbdev_test did not run it:\n' + message


def tests(everything):
    "Run pytest and print its lines as they come; return the counts of passed, failed and skipped tests, and the exit status"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)/'report.xml'
        args = ['-p', 'pytest_ci', '--timeout=600', '-q', '-rs', f'--junitxml={report}', *([] if everything else ['-m', 'not slow'])]
        path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get('PYTHONPATH')]))
        env = os.environ | {'HF_HUB_OFFLINE': '1', 'PYTHONPATH': path}
        with subprocess.Popen([sys.executable, '-m', 'pytest', *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace') as process:
            for line in process.stdout: print(line, end='', flush=True)
        status = process.returncode
        if not report.exists(): return 0, 1, 0, status
        suites = list(ElementTree.parse(report).iter('testsuite'))
        total, bad, skipped = (sum(int(s.get(k, 0)) for s in suites for k in keys) for keys in
                               [('tests',), ('failures', 'errors'), ('skipped',)])
    return total - bad - skipped, bad, skipped, status


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
    books = cells = passed = bad = skipped = 0
    if not args.check:
        with ThreadPoolExecutor(1) as pool:
            suite = None if args.names else pool.submit(tests, args.all)
            for path in find(args.names):
                count = sum(runs(c, tst_flags() - {*flags.split()}) for c in json.loads(path.read_text('utf-8'))['cells'])
                start, problem = time.time(), notebook(path, flags)
                checks.add(f'{path.name}: {count} cells, {time.time() - start:.0f} s', problem)
                books, cells = books + 1, cells + count
        if not books: checks.add('nbdev_test', 'no notebook was tested')
        if suite:
            passed, bad, skipped, status = suite.result()
            problem = 'no test ran' if status == PYTEST_NO_TESTS or not passed + bad else f'exit status {status}, see above'
            checks.add(f'pytest: {passed} passed, {bad} failed, {skipped} skipped', problem if status or not passed else '')
    if not args.check: print(f'{books} notebooks with {cells} cells, {passed + bad} tests')
    failed = checks.failed + max(bad - 1, 0)
    print(f'{checks.passed + passed} passed, {failed} failed' + (f', {skipped} skipped' if skipped else ''))
    raise SystemExit(failed > 0)


if __name__ == '__main__': main()
