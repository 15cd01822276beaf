"""Draw the README's pictures from the committed records: python tools/figures.py"""
from pathlib import Path

import matplotlib
matplotlib.use('Agg')

from optkit.page import ladder_figure
from optkit.base import read_json

ROOT = Path(__file__).resolve().parent.parent


def main():
    "One picture for each ladder in bench/results, in nbs/images"
    folder = ROOT / 'nbs' / 'images'
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / 'bench' / 'results').glob('*-ladder-*.json')):
        record = read_json(path)
        ladder = dict(record, confidence=record['provenance'].get('confidence'))
        ladder_figure(ladder).savefig(folder / f'{path.stem}.png', dpi=120, bbox_inches='tight', facecolor='white', metadata=dict(Software=None))


if __name__ == '__main__': main()
