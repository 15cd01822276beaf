"""Make README.md from nbs/index.ipynb, without quarto.

    python tools/readme.py            write README.md
    python tools/readme.py --check    fail, and show the difference, when it is not up to date

Markdown cells are taken as they are, code as fenced blocks, text outputs below it. Links relative to
nbs/ become relative to the root. Pictures are links to files: a picture output is an error.
"""
import argparse, difflib, json, posixpath, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = '<!-- Made by tools/readme.py from nbs/index.ipynb: edit that. -->\n'
CODE = re.compile(r'(^```.*?^```[^\n]*$|^~~~.*?^~~~[^\n]*$|`[^`\n]+`)', re.S | re.M)
LINK = re.compile(r'(\]\(\s*<?|^ {0,3}\[[^\]\n]+\]:[ \t]*<?|\b(?:src|href)=["\'])([^)\s>"\']+)', re.M)
DIRECTIVE = re.compile(r'^\s*#\s*\|\s*([\w-]+)\s*(:?)\s*(.*?)\s*$')


def rewrite(text):
    "Markdown of nbs/ with its relative links made relative to the root; code is left alone"
    def link(match):
        before, target = match.groups()
        if re.match(r'[a-z][a-z0-9+.-]*:|[/#]', target, re.I): return match[0]
        target, mark, anchor = target.partition('#')
        moved = posixpath.normpath(posixpath.join('nbs', target))
        if moved.startswith('../'): raise SystemExit(f"index.ipynb: the link {target} leads out of the repository")
        return before + moved + ('/' if target.endswith('/') else '') + mark + anchor
    return ''.join(part if n % 2 else LINK.sub(link, part) for n, part in enumerate(CODE.split(text)))


def directives(source):
    "The `#|` lines at the top of a cell as a dict, and the source without them"
    lines, marks = source.splitlines(), {}
    while lines and (not lines[0].strip() or DIRECTIVE.match(lines[0])):
        if match := DIRECTIVE.match(lines.pop(0)): marks[match[1]] = match[3].lower() if match[2] else True
    return marks, '\n'.join(lines).rstrip()


def fence(text, language=''):
    ticks = max([3, *(len(run) + 1 for run in re.findall('`{3,}', text))]) * '`'
    return f'{ticks}{language}\n{text.rstrip()}\n{ticks}\n'


def shown(output, id):
    "The markdown of one output"
    kind, data = output['output_type'], output.get('data', {})
    if kind == 'error': raise SystemExit(f"index.ipynb, cell {id}: its output is an error")
    if kind == 'stream': return fence(''.join(output['text'])) if output['name'] == 'stdout' else ''
    if any(mime.startswith('image/') for mime in data):
        raise SystemExit(f"index.ipynb, cell {id}: a picture output; save the picture and link it in a markdown cell")
    if 'text/markdown' in data: return rewrite(''.join(data['text/markdown'])).rstrip() + '\n'
    if 'text/plain' in data: return fence(''.join(data['text/plain']))
    return ''


def readme(nb):
    "The text of README.md"
    parts = [HEAD]
    for cell in nb['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown': parts.append(rewrite(source).strip() + '\n')
        if cell['cell_type'] != 'code': continue
        marks, source = directives(source)
        if 'hide' in marks or marks.get('include') == 'false': continue
        if source and marks.get('echo') != 'false': parts.append(fence(source, 'python'))
        if marks.get('output') != 'false': parts += [shown(output, cell['id']) for output in cell['outputs']]
    return '\n'.join(part for part in parts if part.strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true')
    parser.add_argument('--root', type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args()
    new = readme(json.loads((args.root/'nbs/index.ipynb').read_text('utf-8')))
    path = args.root/'README.md'
    if not args.check: path.write_text(new, 'utf-8')
    elif new != (old := path.read_text('utf-8') if path.exists() else ''):
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), 'README.md', 'nbs/index.ipynb'))
        raise SystemExit('README.md is not up to date: run `make readme`')


if __name__ == '__main__': main()
