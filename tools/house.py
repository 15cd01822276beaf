"""Measure how the chapters hang together and how their pages read, and exit with status 1 where a limit is missed.

    python tools/house.py                 all chapters, and the limits
    python tools/house.py 46 x.ipynb      figures of the chapters whose names begin so, and of any notebook
    python tools/house.py --list          with every place that misses a limit

The floor of a chapter is the first digit of its number. An exported line is a line of an exported cell that is neither
blank nor a directive. A running cell is a code cell that a reader sees, that exports nothing, and that stores an
output or asserts something. An example of a function or class is a running cell of its own chapter that calls it,
hands it to a call or catches it: to mention it is not enough. Medians leave out the cells that only import.
A public parameter (also of a method, and a field of a public dataclass or named tuple) has a type, and a comment on
the line where it ends. A chapter ends with a section whose heading says Benchmark, and a stored picture in it or
after it; `NO_BENCHMARK` holds those without, and why.
"""
import argparse, ast, io, json, re, statistics, tokenize
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r'^\s*#\|\s*(.+)$')
WIDEST, RUN, LINES, CHARACTERS, EXAMPLES, NAMES = 120, 60, 12, 600, .85, 350
BEFORE = 1_018_655  # characters of optkit/ at f6d4071, before the chapters were redrawn; a fifth has to go
VAGUE = {'found', 'said', 'kept', 'told', 'own', 'here', 'there'}  # names that say nothing about a value
NO_BENCHMARK = { # numbers of chapters without a plot of a measurement, and why
    '37': 'its shapes are measured in 38, in the engine that runs them'}
ASSERTS = re.compile(r'\bassert\b|\btest_\w+\(|\bExceptionExpected\b')


@dataclass(repr=False)
class Chapter:
    "What is measured of one notebook"
    name: str
    module: str = ''
    cells: list = field(default_factory=list) # exported cells, as text
    public: dict = field(default_factory=dict) # public name: whether it is a function or a class
    internal: set = field(default_factory=set) # names that other chapters may import, though they are not in `__all__`
    shown: set = field(default_factory=set) # names that an example calls
    wide: list = field(default_factory=list) # (cell id, characters) of exported lines that are too wide
    shared: list = field(default_factory=list) # (cell id, line) of exported lines with several statements
    vague: list = field(default_factory=list) # (cell id, name) of values and functions that bear one of `VAGUE`
    runs: list = field(default_factory=list) # exported lines one after the other before a running cell
    attributes: set = field(default_factory=set) # private attributes of what is not `self` or `cls`, as text
    examples: int = 0 # running cells
    words: int = 0 # of prose, without code blocks
    comments: int = 0 # in exported cells
    parameters: list = field(default_factory=list) # (cell id, name, what is missing) of public ones without type or comment
    benchmark: bool = False # a heading says so
    plots: int = 0 # stored pictures behind that heading
    bound: set = field(default_factory=set) # names and attributes that the chapter itself defines
    imports: dict = field(default_factory=dict) # module of optkit: names taken from it

    @property
    def floor(self): return int(self.name[0])
    @property
    def lines(self): return [len(written(c)) for c in self.cells]
    @property
    def longer(self): return [r for r in self.runs if r > RUN]
    @property
    def callables(self): return [n for n, called in self.public.items() if called]
    @property
    def unseen(self): return sorted(n for n in self.callables if n not in self.shown)

    def __repr__(self):
        lines, cells = sum(self.lines) or 1, [c for c in self.cells if not only_imports(c)] or ['']
        return (f'{self.name}: {sum(self.lines)} exported lines in {len(self.cells)} cells, median '
                f'{statistics.median(len(written(c)) for c in cells):g} lines and '
                f'{statistics.median(map(len, cells)):.0f} characters; {len(self.wide)} lines too wide; most before a running cell {max(self.runs or [0])}; '
                f'{self.examples / len(cells):.2f} running cells for one; {self.words / lines:.1f} words of prose and '
                f'{self.comments / lines:.2f} comments a line; {len(self.public)} public names; without an example: '
                f'{", ".join(self.unseen) or "none"}')


def directives(source): return {m[1].split()[0] for line in source.splitlines() if (m := DIRECTIVE.match(line))}
def written(source): return [l for l in source.splitlines() if l.strip() and not DIRECTIVE.match(l)]


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
            names = [n for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            yield from ((n.id, False) for n in names if isinstance(n.ctx, ast.Store))
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


def called(tree):
    "The names that a cell calls, hands to a call, decorates with or catches"
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    parts = [part for n in calls for part in (n.func, *n.args, *(k.value for k in n.keywords))]
    parts += [n.type for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type]
    parts += [d for n in ast.walk(tree) for d in getattr(n, 'decorator_list', ())]
    return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}


def shared_lines(tree):
    "Numbers of the lines on which a statement begins where the one before it ends"
    blocks = [getattr(n, part, None) for n in ast.walk(tree) for part in ('body', 'orelse', 'finalbody')]
    return sorted({second.lineno for block in blocks if isinstance(block, list)
                   for first, second in zip(block, block[1:]) if first.end_lineno == second.lineno})


def bound(tree):
    "Every name, parameter and attribute that a cell defines, methods and fields too"
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)): yield n.name
        elif isinstance(n, ast.arg): yield n.arg
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): yield n.id
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store): yield n.attr


def private_attributes(tree):
    "Private attributes of objects other than `self` and `cls`: pairs of the attribute and its text"
    for n in ast.walk(tree):
        if not isinstance(n, ast.Attribute) or not n.attr.startswith('_') or n.attr.startswith('__'): continue
        if not (isinstance(n.value, ast.Name) and n.value.id in ('self', 'cls')): yield n.attr, ast.unparse(n)


def is_record(node): return any('NamedTuple' in ast.unparse(part) or 'dataclass' in ast.unparse(part)
                                for part in (*node.bases, *node.decorator_list))


def public_parameters(tree):
    "Parameters of public functions and methods, and fields of public records: pairs of a qualified name and the node"
    def of(function, owner=''):
        a = function.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        return [(f'{owner}{function.name}.{p.arg}', p) for p in every if p.arg not in ('self', 'cls')]
    def hidden(function): # a method of a private class
        owner = is_patch(function) and function.args.args[0].annotation
        return owner and ast.unparse(owner).startswith('_')
    for node in tree.body:
        if getattr(node, 'name', '_').startswith('_'): continue
        if isinstance(node, ast.FunctionDef) and not hidden(node): yield from of(node)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            name = getattr(part, 'name', '_')
            if isinstance(part, ast.FunctionDef) and (name[0] != '_' or name == '__init__'):
                yield from of(part, f'{node.name}.')
            elif isinstance(part, ast.AnnAssign) and is_record(node) and not part.target.id.startswith('_'):
                yield f'{node.name}.{part.target.id}', part


def bare_parameters(tree, commented):
    "(name, what is missing) of public parameters; `commented`: numbers of lines that hold a comment"
    several = [a for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (n.vararg, n.kwarg)] # need no type
    for name, node in public_parameters(tree):
        missing = ['type'] * (node.annotation is None and node not in several) + ['comment'] * (node.end_lineno not in commented)
        if missing: yield name, ' and '.join(missing)


def add_exported(chapter, cell, source, marks, tree):
    "Count an exported cell"
    chapter.cells.append(source)
    chapter.wide += [(cell['id'], len(l)) for l in source.splitlines() if len(l) > WIDEST]
    if tree is None: return
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = [t.start[0] for t in tokens if t.type == tokenize.COMMENT and not DIRECTIVE.match(t.string)]
    chapter.comments += len(commented)
    names = {n: c for n, c in defined(tree) if not n.startswith('_')}
    if 'exporti' in marks: chapter.internal |= names.keys()
    else:
        chapter.public |= names
        chapter.parameters += [(cell['id'], *bare) for bare in bare_parameters(tree, {*commented})]
    for module, name in imported(tree): chapter.imports.setdefault(module, set()).add(name)
    chapter.shared += [(cell['id'], n) for n in shared_lines(tree)]
    chapter.attributes |= {*private_attributes(tree)}
    chapter.vague += [(cell['id'], n) for n in bound(tree) if n in VAGUE]
    chapter.bound |= {*bound(tree)}


def read_cells(name, cells):
    "The `Chapter` of a notebook's cells"
    chapter, run = Chapter(name), 0
    for number, cell in enumerate(cells):
        source, cell = ''.join(cell['source']), dict(id=number, outputs=()) | cell
        if cell['cell_type'] == 'markdown': chapter.words += len(re.sub(r'```.*?```', '', source, flags=re.S).split())
        if cell['cell_type'] == 'markdown': chapter.benchmark |= bool(re.search(r'^#+ .*Benchmark', source, re.M))
        if cell['cell_type'] != 'code': continue
        chapter.plots += chapter.benchmark and any('image/png' in o.get('data', {}) for o in cell['outputs'])
        marks, tree = directives(source), parsed(source)
        if m := re.search(r'^#\|\s*default_exp\s+(\w+)', source, re.M): chapter.module = m[1]
        if marks & {'export', 'exporti', 'exports'}:
            add_exported(chapter, cell, source, marks, tree)
            run += len(written(source))
        elif not marks & {'hide', 'default_exp'} and (cell['outputs'] or ASSERTS.search(source)):
            if run: chapter.runs.append(run)
            run, chapter.examples = 0, chapter.examples + 1
            if tree is not None: chapter.shown |= called(tree)
    if run: chapter.runs.append(run)
    return chapter


def read(path):
    "The `Chapter` of a notebook"
    return read_cells(path.stem, json.loads(path.read_text('utf-8'))['cells'])


def only_imports(source):
    "Whether a cell does nothing but import"
    tree = parsed(source)
    return tree is not None and all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body)


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
    upward = [f'{c.module} -> {m}' for c in chapters for m in sorted(arrows.get(c.module, ()))
              if place[m] > place[c.module]]
    private = [f'{c.module} takes {m}.{n}' for c in chapters for m, names in c.imports.items() for n in sorted(names)
               if n.startswith('_') and not n.startswith('__')]
    theirs = {n for c in chapters for n in c.bound}
    private += [f'{c.module} reads {text}' for c in chapters for name, text in sorted(c.attributes)
                if name in theirs and name not in c.bound]
    cells = [c for ch in chapters for c in ch.cells if not only_imports(c)]
    runs = [r for ch in chapters for r in ch.runs]
    calls = [(n, ch) for ch in chapters for n in ch.callables]
    shown = sum(n in ch.shown for n, ch in calls) / max(1, len(calls))
    names, modules = [(n, ch.module) for ch in chapters for n in ch.public], {}
    for n, m in names: modules.setdefault(n, []).append(m)
    collide = [f"{n} in {', '.join(m)}" for n, m in modules.items() if len(m) > 1]
    lines, characters = statistics.median(len(written(c)) for c in cells), statistics.median(map(len, cells))
    wide, loops = [f'{ch.name} {i}: {n}' for ch in chapters for i, n in ch.wide], circles(arrows)
    shared = [f'{ch.name} {i}: line {n}' for ch in chapters for i, n in ch.shared]
    vague = [f'{ch.name} {i}: {n}' for ch in chapters for i, n in ch.vague]
    unseen = [f"{ch.name}: {', '.join(ch.unseen)}" for ch in chapters if ch.unseen]
    bare = [f'{ch.name} {i}: {n} has no {missing}' for ch in chapters for i, n, missing in ch.parameters]
    plain = [f"{ch.name}: no {'plot' if ch.benchmark else 'benchmark section'}" for ch in chapters
             if ch.name[:2] not in NO_BENCHMARK and not (ch.benchmark and ch.plots)]
    return [('imports of a later chapter', len(upward), 'at most 0', not upward, upward),
            ('circles', len(loops), 'at most 0', not loops, [' '.join(g) for g in loops]),
            ('private names of another chapter', len(private), 'at most 0', not private, private),
            (f'exported lines over {WIDEST} characters', len(wide), 'at most 0', not wide, wide),
            ('exported lines with several statements', len(shared), 'at most 0', not shared, shared),
            (f"names such as {', '.join(sorted(VAGUE)[:2])}", len(vague), 'at most 0', not vague, vague),
            ('most exported lines before a running cell', max(runs), f'at most {RUN}', max(runs) <= RUN,
             [f"{ch.name}: {', '.join(map(str, ch.longer))}" for ch in chapters if ch.longer]),
            ('lines of an exported cell, median', lines, f'at most {LINES}', lines <= LINES, []),
            ('characters of an exported cell, median', characters, f'at most {CHARACTERS}',
             characters <= CHARACTERS, []),
            ('public functions and classes with an example', f'{shown:.0%} of {len(calls)}', f'at least {EXAMPLES:.0%}',
             shown >= EXAMPLES, unseen),
            ('public parameters without a type or a comment', len(bare), 'at most 0', not bare, bare),
            ('chapters without a benchmark or plot', len(plain), 'at most 0', not plain, plain),
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
    chosen += [read(Path(n)) for n in args.names if n.endswith('.ipynb')]
    if args.names and not chosen: raise SystemExit(f"no chapter begins with {', '.join(args.names)}")
    for c in chosen: print(c)
    if chosen: return
    rows, floors = house(chapters), {}
    for c in chapters: floors.setdefault(c.floor, []).append(c.name)
    for floor, names in sorted(floors.items(), reverse=True): print(f"floor {floor}: {', '.join(names)}")
    for what, value, limit, holds, places in rows:
        print(f"{'ok' if holds else 'MISS':4} {what}: {value} ({limit})")
        if args.list: print(''.join(f'       {p}\n' for p in places), end='')
    (lines, characters), largest = size_of(ROOT/'optkit'), BEFORE * 4 // 5
    small = characters <= largest
    print(f"{'ok' if small else 'MISS':4} optkit/: {characters:,} characters (at most {largest:,}) in {lines:,} lines")
    other = [f'{c.name} {sum(c.lines)}' for c in chapters if c.cells and not 60 <= sum(c.lines) <= 600]
    print(f'     chapters with fewer than 60 or more than 600 exported lines: {", ".join(other) or "none"}')
    for number, why in NO_BENCHMARK.items(): print(f'     no plot of a measurement in {number}: {why}')
    print('     names that other chapters may import, though not in `__all__`:',
          sum(len(c.internal) for c in chapters))
    raise SystemExit(not (small and all(r[3] for r in rows)))


if __name__ == '__main__': main()
