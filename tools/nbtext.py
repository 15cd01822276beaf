"""Show a notebook as plain text, and make a notebook from that text.

    python tools/nbtext.py show nbs/x.ipynb > x.txt
    python tools/nbtext.py apply x.txt nbs/x.ipynb

A cell begins with a marker line, `# %% [id] markdown` or `# %% [id] code`; its source follows as it
is. A marker may leave out the id: `apply` then gives the cell one and writes it into the text file.
Outputs stay with a cell whose id and source are unchanged; a changed cell loses them.
"""
import hashlib, json, re, sys
from pathlib import Path

MARKER = re.compile(r'^# %%(?: \[([\w-]*)\])? (markdown|code|raw)[ \t]*$')
KERNEL = {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}


def source(cell): return ''.join(cell['source'])


def show(nb):
    "The text form of the notebook `nb`"
    parts = []
    for cell in nb['cells']:
        if any(MARKER.match(line) for line in source(cell).splitlines()):
            raise SystemExit(f"cell {cell['id']} holds a line that looks like a marker")
        parts.append(f"# %% [{cell['id']}] {cell['cell_type']}\n{source(cell)}".rstrip('\n') + '\n')
    return '\n'.join(parts)


def parse(text):
    "The cells `[id or None, type, source]` of a text form"
    cells = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := MARKER.match(line): cells.append([match[1] or None, match[2], []])
        elif line.startswith('# %%'): raise SystemExit(f"line {number}: bad marker {line!r}")
        elif cells: cells[-1][2].append(line)
        elif line.strip(): raise SystemExit(f"line {number}: text before the first marker")
    return [[id, kind, '\n'.join(lines).strip('\n')] for id, kind, lines in cells]


def apply(cells, old):
    "The notebook of the parsed `cells`, with ids and outputs of the notebook `old` where they still fit"
    used = [id for id, *_ in cells if id]
    if twice := {id for id in used if used.count(id) > 1}: raise SystemExit(f"ids used twice: {sorted(twice)}")
    old_cells, used, result = {cell['id']: cell for cell in old['cells']}, set(used), []
    for id, kind, text in cells:
        if id is None:
            same = [c['id'] for c in old['cells'] if (c['cell_type'], source(c)) == (kind, text)]
            made = (hashlib.sha256(f'{n}{kind}{text}'.encode()).hexdigest()[:8] for n in range(10**6))
            id = next((i for i in same if i not in used), None) or next(i for i in made if i not in used | {*old_cells})
            used.add(id)
        before = old_cells.get(id, {})
        unchanged = before and (before['cell_type'], source(before)) == (kind, text)
        cell = dict(cell_type=kind, id=id, metadata=before.get('metadata', {}), source=text.splitlines(keepends=True))
        if kind == 'code':
            cell |= dict(execution_count=None, outputs=[])
            if unchanged: cell |= dict(execution_count=before['execution_count'], outputs=before['outputs'])
        result.append(cell)
    metadata = {k: v for k, v in old['metadata'].items() if k != 'widgets'}
    return dict(cells=result, metadata=metadata, nbformat=4, nbformat_minor=5)


def load(path):
    path = Path(path)
    return json.loads(path.read_text('utf-8')) if path.exists() else dict(cells=[], metadata=KERNEL)


def save(nb, path):
    "Write `nb` as nbdev does, so that cleaning changes nothing"
    Path(path).write_text(json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + '\n', 'utf-8')


def main(args):
    if len(args) == 2 and args[0] == 'show': print(show(load(args[1])), end='')
    elif len(args) == 3 and args[0] == 'apply':
        text = Path(args[1])
        nb = apply(parse(text.read_text('utf-8')), load(args[2]))
        save(nb, args[2])
        if text.is_file() and (new := show(nb)) != text.read_text('utf-8'): text.write_text(new, 'utf-8')
    else: raise SystemExit(__doc__)


if __name__ == '__main__': main(sys.argv[1:])
