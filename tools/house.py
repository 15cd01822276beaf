"""Measure how the chapters hang together, and how their pages read: a line each, and exit status 1 where one misses its limit.

    python tools/house.py                 all chapters, and the limits
    python tools/house.py 46 55           figures of the chapters whose names begin so, one line each
    python tools/house.py --list          with every place that misses a limit

The floor of a chapter is the first digit of its number. An exported line is a line of an exported cell that is neither
blank nor a directive. A running cell is a code cell that a reader sees and that exports nothing. An example of a name is
a running cell of its own chapter that uses the name, and that stores an output or asserts something.
"""
import argparse, ast, json, re, statistics, sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r'^\s*#\|\s*(.+)$')
WIDEST, RUN, LINES, CHARACTERS, EXAMPLES, NAMES = 120, 60, 12, 600, .85, 350
ASSERTS = re.compile(r'\bassert\b|\btest_\w+\(|\bExceptionExpected\b')


@dataclass
class Chapter:
    "What is measured of one notebook"
    name: str
    module: str = ''
    cells: list = field(default_factory=list) # exported cells, as text without directives
    public: dict = field(default_factory=dict) # public name: whether it is a function or a class
    shown: set = field(default_factory=set) # names that an example uses
    wide: list = field(default_factory=list) # (cell id, characters) of exported lines that are too wide
    runs: list = field(default_factory=list) # exported lines one after the other before a running cell
    imports: dict = field(default_factory=dict) # module of optkit: names taken from it

    @property
    def floor(self): return int(self.name[0])
    @property
    def lines(self): return [len(written(c)) for c in self.cells]
    @property
    def callables(self): return [n for n, called in self.public.items() if called]
    @property
    def unseen(self): return sorted(n for n in self.callables if n not in self.shown)


def directives(source): return {m[1].split()[0] for line in source.splitlines() if (m := DIRECTIVE.match(line))}
def written(source): return [l for l in source.splitlines() if l.strip() and not DIRECTIVE.match(l)]
def names_of(tree): return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
    n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def parsed(source):
    "The syntax tree of a cell, or None for one that holds magics"
    try: return ast.parse(source)
    except SyntaxError: return None


def is_patch(node): return any('patch' in ast.unparse(d) for d in getattr(node, 'decorator_list', []))


def defined(tree):
    "The top-level names that a cell binds: name, and whether it can be called"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not is_patch(node): yield node.name, True
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((n.id, False) for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name): yield node.target.id, False


def imported(tree):
    "(module of optkit, name) pairs of all import statements, those inside functions too"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or '').split('.')[0] == 'optkit'):
            module = (node.module or '').removeprefix('optkit').strip('.')
            for alias in node.names: yield (module, alias.name) if module else (alias.name, '')
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith('optkit.'): yield alias.name.split('.')[1], ''


def read(path):
    "The `Chapter` of a notebook"
    chapter, run = Chapter(path.stem), 0
    for cell in json.loads(path.read_text('utf-8'))['cells']:
        if cell['cell_type'] != 'code': continue
        source = ''.join(cell['source'])
        marks, tree = directives(source), parsed(source)
        if m := re.search(r'^#\|\s*default_exp\s+(\w+)', source, re.M): chapter.module = m[1]
        if marks & {'export', 'exporti', 'exports'}:
            chapter.cells.append(source)
            chapter.wide += [(cell['id'], len(l)) for l in source.splitlines() if len(l) > WIDEST]
            run += len(written(source))
            if tree is None: continue
            names = dict(defined(tree))
            if 'exporti' not in marks: chapter.public |= {n: c for n, c in names.items() if not n.startswith('_')}
            for module, name in imported(tree): chapter.imports.setdefault(module, set()).add(name)
        elif 'hide' not in marks and 'default_exp' not in marks:
            if run: chapter.runs.append(run)
            run = 0
            if tree is not None and (cell['outputs'] or ASSERTS.search(source)): chapter.shown |= names_of(tree)
    if run: chapter.runs.append(run)
    return chapter


def circles(arrows):
    "Groups of modules that import each other in a loop (strongly connected, Tarjan 1972)"
    index, low, stack, groups = {}, {}, [], []
    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in arrows.get(v, ()):
            if w not in index: visit(w); low[v] = min(low[v], low[w])
            elif w in stack: low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            group = stack[stack.index(v):]
            del stack[stack.index(v):]
            if len(group) > 1: groups.append(sorted(group))
    for v in sorted(arrows):
        if v not in index: visit(v)
    return groups


def house(chapters):
    "The figures of all chapters: name, value, limit, whether it holds, and the places that miss it"
    place = {c.module: n for n, c in enumerate(chapters)}
    arrows = {c.module: {m for m in c.imports if m in place} for c in chapters if c.module}
    upward = [f'{c.module} -> {m}' for c in chapters for m in sorted(arrows.get(c.module, ())) if place[m] > place[c.module]]
    private = [f'{c.module} takes {m}.{n}' for c in chapters for m, names in c.imports.items() for n in sorted(names)
               if n.startswith('_') and not n.startswith('__')]
    cells, runs = [c for ch in chapters for c in ch.cells], [(r, ch.name) for ch in chapters for r in ch.runs]
    calls = [(n, ch) for ch in chapters for n in ch.callables]
    shown = sum(n in ch.shown for n, ch in calls) / max(1, len(calls))
    names, seen = [(n, ch.module) for ch in chapters for n in ch.public], {}
    for n, m in names: seen.setdefault(n, []).append(m)
    collide = [f"{n} in {', '.join(m)}" for n, m in seen.items() if len(m) > 1]
    lines, characters = statistics.median(len(written(c)) for c in cells), statistics.median(map(len, cells))
    wide, loops = [f'{ch.name} {i}: {n}' for ch in chapters for i, n in ch.wide], circles(arrows)
    unseen = [f"{ch.name}: {', '.join(ch.unseen)}" for ch in chapters if ch.unseen]
    return [('imports of a later chapter', len(upward), 'at most 0', not upward, upward),
            ('circles', len(loops), 'at most 0', not loops, [' '.join(g) for g in loops]),
            ('private names of another chapter', len(private), 'at most 0', not private, private),
            (f'exported lines over {WIDEST} characters', len(wide), 'at most 0', not wide, wide),
            ('most exported lines before a running cell', max(runs)[0], f'at most {RUN}', max(runs)[0] <= RUN,
             [f'{n}: {r}' for r, n in sorted(runs, reverse=True) if r > RUN]),
            ('lines of an exported cell, median', lines, f'at most {LINES}', lines <= LINES, []),
            ('characters of an exported cell, median', characters, f'at most {CHARACTERS}', characters <= CHARACTERS, []),
            ('public functions and classes with an example', f'{shown:.0%} of {len(calls)}', f'at least {EXAMPLES:.0%}',
             shown >= EXAMPLES, unseen),
            ('public names', len(names), f'at most {NAMES}', len(names) <= NAMES, []),
            ('public names that two chapters have', len(collide), 'at most 0', not collide, collide)]


def size_of(folder):
    "(lines, characters) of the modules, without the index that nbdev writes"
    texts = [p.read_text('utf-8') for p in sorted(folder.glob('*.py')) if p.name != '_modidx.py']
    return sum(t.count('\n') for t in texts), sum(map(len, texts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', metavar='CHAPTER')
    parser.add_argument('--list', action='store_true')
    args = parser.parse_args()
    chapters = [read(p) for p in sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))]
    chosen = [c for c in chapters if any(c.name.startswith(n) for n in args.names)]
    if args.names and not chosen: raise SystemExit(f"no chapter begins with {', '.join(args.names)}")
    for c in chosen:
        print(f'{c.name}: {sum(c.lines)} exported lines in {len(c.cells)} cells, median {statistics.median(c.lines or [0])} lines '
              f'and {statistics.median(map(len, c.cells or [""])):.0f} characters; {len(c.wide)} lines too wide; most before a '
              f'running cell {max(c.runs or [0])}; {len(c.public)} public names; without an example: {", ".join(c.unseen) or "none"}')
    if chosen: return
    rows, floors = house(chapters), {}
    for c in chapters: floors.setdefault(c.floor, []).append(c.name)
    for floor, names in sorted(floors.items(), reverse=True): print(f"floor {floor}: {', '.join(names)}")
    for what, value, limit, holds, places in rows:
        print(f"{'ok' if holds else 'MISS':4} {what}: {value} ({limit})")
        if args.list: print(''.join(f'       {p}\n' for p in places), end='')
    lines, characters = size_of(ROOT/'optkit')
    print(f'     optkit/: {lines:,} lines, {characters:,} characters in {len(chapters)} chapters')
    raise SystemExit(not all(r[3] for r in rows))


if __name__ == '__main__': main()
