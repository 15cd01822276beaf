"""Write what editors read of classes whose methods are added by `@patch`: a `.pyi` file beside each such module.

    python tools/stubs.py            write optkit/*.pyi, after `nbdev_export`
    python tools/stubs.py --check    fail where one is not up to date

A stub holds the public names of its module: signatures and docstrings, and classes with their patched methods, those of
later modules too, and with the attributes that methods set. `all.pyi` names every module. Other modules need none: the
marker `py.typed` makes editors read them.
"""
import argparse, ast, copy, re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = '# Made by tools/stubs.py from the modules: run that.\n'
BODY = ast.Expr(ast.Constant(...))
KINDS = {ast.Dict: 'dict', ast.Tuple: 'tuple', ast.List: 'list', ast.ListComp: 'list', ast.Set: 'set',
         ast.JoinedStr: 'str'}
OTHERS = ('import matplotlib.pyplot, numpy, pandas', 'import torch as torch', 'from pathlib import Path as Path',
          'np = numpy', 'pd = pandas', 'plt = matplotlib.pyplot',
          'SHADOWED: dict[str, list[str]]') # of `optkit.all`
UNTYPED = ('__repr__', '__post_init__', '__hash__', '__eq__') # say nothing about a type
METHOD_KINDS = {'as_prop=True': 'property', 'cls_method=True': 'classmethod', 'static_method=True': 'staticmethod'}


def is_public(name): return not name.startswith('_') or name.startswith('__') and name.endswith('__')
def is_function(node): return isinstance(node, ast.FunctionDef)
def patches(node): return [ast.unparse(d) for d in node.decorator_list if ast.unparse(d).partition('(')[0] == 'patch']


def patched_class(node):
    "The name of the class that a function is patched into; '' for another statement"
    return ast.unparse(node.args.args[0].annotation) if is_function(node) and patches(node) else ''


def pairs(node):
    "(target, value) of each assignment of a statement; the value is None where it cannot be told apart"
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if not isinstance(target, ast.Tuple): yield target, node.value
        else: yield from zip(target.elts, getattr(node.value, 'elts', [None] * len(target.elts)))


def type_of(value, annotations=(), classes=()):
    "The type of a value, as far as its form tells"
    if isinstance(value, ast.Name) and value.id in annotations: return annotations[value.id]
    if isinstance(value, ast.Call) and ast.unparse(value.func) in classes: return ast.unparse(value.func)
    if isinstance(value, ast.Constant) and value.value is not None: return type(value.value).__name__
    return KINDS.get(type(value), 'Any')


def declaration(name, kind, value=None): return ast.AnnAssign(ast.Name(name), ast.Name(kind), value, 1)


def signature(node):
    "A function without its body; what `patch` makes of a method becomes its decorator"
    node, doc = copy.deepcopy(node), ast.get_docstring(node)
    kinds = [name for mark, name in METHOD_KINDS.items() if any(mark in p for p in patches(node))]
    if patches(node): node.decorator_list, node.args.args[0].annotation = [ast.Name(k) for k in kinds], None
    node.body = [ast.Expr(ast.Constant(doc))] if doc else [BODY]
    short = lambda defaults: [d if d is None or isinstance(d, ast.Constant) else BODY.value for d in defaults]
    node.args.defaults, node.args.kw_defaults = short(node.args.defaults), short(node.args.kw_defaults)
    return node


def set_by(method, classes):
    "(name, type) of the public attributes that a method sets"
    parameters = *method.args.args, *method.args.kwonlyargs
    annotations = {a.arg: ast.unparse(a.annotation) for a in parameters if a.annotation}
    for statement in ast.walk(method):
        for target, value in pairs(statement):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == 'self' and is_public(target.attr):
                yield target.attr, type_of(value, annotations, classes)


def class_stub(node, added, classes):
    "A class with the methods that are `added` to it"
    fields = {n.target.id: declaration(n.target.id, ast.unparse(n.annotation), n.value and BODY.value)
              for n in node.body if isinstance(n, ast.AnnAssign)}
    form = 'ClassVar[{}]' if any('dataclass' in ast.unparse(d) for d in node.decorator_list) else '{}'
    fields |= {t.id: declaration(t.id, form.format(type_of(v))) for n in node.body for t, v in pairs(n)}
    methods = {n.name: n for n in (*filter(is_function, node.body), *added)}
    set_types = {}
    for method in methods.values():
        for name, kind in set_by(method, classes): set_types.setdefault(name, set()).add(kind)
    for name, kinds in set_types.items():
        kind = kinds.pop() if len(kinds) == 1 else 'Any'
        if name not in fields.keys() | methods: fields[name] = declaration(name, kind)
    body = [part for name, part in fields.items() if is_public(name)]
    body += [signature(m) for name, m in methods.items() if is_public(name) and name not in UNTYPED]
    if doc := ast.get_docstring(node): body.insert(0, ast.Expr(ast.Constant(doc)))
    return ast.ClassDef(node.name, node.bases, node.keywords, body or [BODY], node.decorator_list, type_params=[])


def imports(tree):
    "By name: the start of the statement that imports it, and what follows the start"
    statements = {}
    for node in tree.body:
        start = f"from {'.' * node.level}{node.module or ''} import " if isinstance(node, ast.ImportFrom) else 'import '
        for a in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            statements[(a.asname or a.name).split('.')[0]] = start, ast.unparse(a)
    return statements


def module_stub(name, trees, added):
    "The stub of a module; `added`: (module, method) that are patched into its classes"
    later = {m for m, _ in added} - {name}
    bring = {name: ('from typing import ', name) for name in ('Any', 'ClassVar')}
    for m in sorted(later):
        made = [n.name for n in trees[m].body if isinstance(n, ast.ClassDef)]
        bring |= imports(trees[m]) | {n: (f'from .{m} import ', n) for n in made}
    bring = {n: where for n, where in bring.items() if where[0] != f'from .{name} import '} | imports(trees[name])
    classes, body, listed = {n for n in bring if n[:1].isupper()}, [], set()
    for node in trees[name].body:
        if isinstance(node, ast.ClassDef):
            body.append(class_stub(node, [f for _, f in added if patched_class(f) == node.name], classes))
            bring.pop(node.name, None)
            classes.add(node.name)
        elif is_function(node) and not patches(node) and not node.name.startswith('_'): body.append(signature(node))
        for target, value in pairs(node):
            if ast.unparse(target) == '__all__':
                body.insert(0, node)
                listed = {*ast.literal_eval(value)} # some may be another module's
            elif isinstance(target, ast.Name) and not target.id.startswith('_'):
                body.append(declaration(target.id, type_of(value)))
    text = '\n'.join(ast.unparse(ast.fix_missing_locations(node)) for node in body)
    text = re.sub(r':\n +\.\.\.$', ': ...', text, flags=re.M)
    used, statements = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} | listed, {}
    for start, what in sorted(where for n, where in bring.items() if n in used):
        statements.setdefault(start, []).append(what)
    return '\n'.join([HEAD, *(start + ', '.join(what) for start, what in statements.items()), '', text, ''])


def stubs(folder):
    "The text of each stub by file name"
    trees = {p.stem: ast.parse(p.read_text('utf-8')) for p in sorted(folder.glob('*.py')) if not p.stem.startswith('_')}
    home = {n.name: m for m, tree in trees.items() for n in tree.body if isinstance(n, ast.ClassDef)}
    added = [(m, n) for m, tree in trees.items() for n in tree.body if patched_class(n)]
    texts = {f'{name}.pyi': module_stub(name, trees, [(m, n) for m, n in added if home[patched_class(n)] == name])
             for name in sorted({home[patched_class(n)] for _, n in added})}
    has_names = lambda tree: any(ast.unparse(t) == '__all__' for node in tree.body for t, _ in pairs(node))
    names = [n for n, tree in trees.items() if n not in ('all', 'cli') and has_names(tree)]
    lines = [f'from .{n} import *' for n in reversed(names)] # the first of two modules with a name has it
    return texts | {'all.pyi': '\n'.join([HEAD, *lines, *OTHERS, ''])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true')
    parser.add_argument('--folder', type=Path, default=ROOT/'optkit', help=argparse.SUPPRESS)
    args = parser.parse_args()
    made = stubs(args.folder)
    written = {p.name: p.read_text('utf-8') for p in args.folder.glob('*.pyi')}
    if args.check:
        if wrong := sorted(n for n in made.keys() | written.keys() if made.get(n) != written.get(n)):
            raise SystemExit(f"{', '.join(wrong)}: not up to date: run tools/stubs.py")
        return
    for name in written.keys() - made.keys(): (args.folder/name).unlink()
    for name, text in made.items(): (args.folder/name).write_text(text, 'utf-8')
    (args.folder/'py.typed').touch()


if __name__ == '__main__': main()
