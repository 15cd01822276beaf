"The report as a user meets it: written from full, partial, broken and hostile run folders, and opened in a browser"
import html, json, math, re, shutil, subprocess
from html.parser import HTMLParser

import pandas as pd
import pytest
from PIL import Image

from optkit import page as page_module
from optkit import report
from optkit.records import read_committed
from optkit.claims import claims, verdict
from optkit.page import (
    claims_figure, CONTROL, ladder_figure, lengths_figure, load_run, roofline_figure, row_verdict, study_figure,
    training_figure)
from optkit.report import render, SECTIONS
from optkit.timing import Ratio

HOSTILE = '"><script src="https://example.org/x.js"></script><img src=//example.org/a>&amp;$\\frac{'


def interval(middle, half=.02): return {'p50': middle, 'low': middle*(1 - half), 'high': middle*(1 + half)}


def row(variant, ratio, before=None, claim=None, label='exact', **more):
    rates = {'p20': 39., 'p50': 40., 'p80': 41.}
    return {'variant': variant, 'baseline': 'plain', 'claim': claim, 'ratio': ratio and interval(ratio), 'ratio_before': before and interval(before), 'samples_per_s': rates,
            'tokens_per_s': rates, 'padded_tokens_per_s': rates, 'mfu': .21, 'peak_bytes': 3 << 30, 'loss': {'value': .68, 'difference': -.01}, 'seconds': rates,
            'repeats': 9, 'warm_up': 2, 'label': label, 'verdict': None} | more


def trial(number, state, scores, **more):
    return {'number': number, 'state': state, 'value': sum(scores)/len(scores) if scores else None, 'params': {'learning_rate': 1e-4*(number + 1)}, 'fold_scores': scores,
            'stopped_after': None, 'seconds': 3., 'epochs': 2*len(scores), 'reason': None, 'resumed_from': None} | more


def total(n, words, mid=None, bounds=(90., 300.), **more):
    return dict(total=n, words=words, left=n - 4, bounds=list(bounds), mid=mid, low=mid and mid*.8, high=mid and mid*1.25, confidence=.8, coverage=mid and .75, backtests=8 if mid else 0,
                epochs=40., workers=1, reason='an interval from this study itself' if mid else 'too few trials to try it', useful=bool(mid)) | more


def contents():
    "What each file of a complete run holds"
    return dict(
        run={'version': 1, 'title': 'A test run', 'command': 'optkit demo --minutes 6', 'settings': {'minutes': 6}, 'fingerprint': {'rows': 'abc'}, 'started': '2026-02-03T04:05:06'},
        hardware={'gpu': {'name': 'NVIDIA H100 80GB HBM3', 'architecture': 'Hopper', 'capability': [9, 0], 'total_bytes': 80 << 30, 'free_bytes': 79 << 30, 'multiprocessors': 132,
                          'l2_bytes': 50 << 20, 'mig': False, 'peak': {'bf16': 989e12}, 'bandwidth': 3.35e12, 'usable': True, 'problem': ''}, 'gpus': [], 'mps': False,
                  'cpu': {'model': 'Some CPU', 'logical': 16, 'physical': 8, 'usable': 16, 'flags': []}, 'memory': {'total_bytes': 1 << 36, 'available_bytes': 1 << 35},
                  'software': {'python': '3.12', 'torch': '2.11.0'}, 'notes': ['clocks are not locked']},
        decisions=[{'what': 'precision', 'value': 'bf16', 'reason': 'capability 9.0 has it'}],
        data={'rows': 40, 'labels': {'yes': 21, 'no': 19}, 'search_rows': 30, 'heldout_rows': 10, 'unused_rows': 0, 'max_length': 32, 'truncated': 1, 'longest': 44,
              'lengths': [5 + i % 20 for i in range(39)] + [44], 'source': 'my.csv', 'text': 'premise', 'pair': None, 'label': 'label'},
        speed={'speeds': {'16': 90.5, '32': 50.}, 'rows_per_s': 50., 'real_tokens_per_s': 900., 'max_length': 32, 'batch': 8, 'seconds': 2.},
        batch={'physical': 8, 'accumulation': 2, 'effective': 16, 'longest': 32, 'tried': [[4, 3 << 28, True], [8, 1 << 30, True], [16, 99 << 30, False]], 'predicted': [None, None, 98 << 30],
               'peak_bytes': 20 << 30, 'reason': 'fits', 'max_tokens': None, 'allocated_bytes': 1 << 29, 'table': [[16, 16]], 'eval_batch': 64},
        train={'config': {}, 'history': [{'epoch': 1, 'train_loss': .7, 'valid_loss': .69, 'score': .5}, {'epoch': 2, 'train_loss': .6, 'valid_loss': .65, 'score': .6}],
               'best_epoch': 2, 'stopped_early': False, 'seconds': 9., 'metric': 'accuracy'},
        study={'name': 's', 'metric': 'accuracy', 'best': 2, 'planned': 4, 'folds': 3, 'epochs_spent': 16, 'epochs_full': 24, 'controller': {},
               'trials': [trial(0, 'COMPLETE', [.6, .6, .6]), trial(1, 'PRUNED', [.5], reason='too low'), trial(2, 'COMPLETE', [.7, .6, .8]), trial(3, 'FAIL', [], reason='out of memory')]},
        forecast={'done': 4, 'spent_s': 70., 'reason': '', 'profile': [{'folds': '1 of 3', 'trials': 1, 'hours': .005, 'share': .25}, {'folds': '3 of 3', 'trials': 2, 'hours': .015, 'share': .75}],
                  'totals': [total(8, 'twice as many', 100.), total(40, 'ten times as many'), total(2000, 'as many as in the reports', bounds=(7200., 7200.))]},
        ladder={'provenance': {'gpu': 'NVIDIA H100', 'cpu': 'Some CPU', 'torch': '2.11.0', 'commit': 'abc1234', 'date': '2026-02-03T04:05:06'}, 'stopped': 'narrow enough', 'confidence': .99, 'note': 'a note',
                'rows': [row('plain', 1.), row(CONTROL, 1.), row('bf16', 1.8, 1.8, 'bf16', 'rounding'), row('tf32 as well', 1.8, 1., 'tf32_on_bf16'), row('no dropout', 2.2, 1.2, None, 'changes training')]},
        final={'params': {'learning_rate': 3e-4}, 'metric': 'accuracy', 'score': .8, 'interval': [.49, .94], 'accuracy': .8, 'majority_accuracy': .5, 'rows': 10,
               'confusion': [[4, 1], [1, 4]], 'labels': ['yes', 'no'], 'cv_score': .7, 'examples': None},
        timings={'stages': {'data': 1., 'study': 60.}, 'budget_s': 100., 'total': 61.})


def write(folder, files):
    for name, content in files.items(): (folder/f'{name}.json').write_text(json.dumps(content), 'utf-8')
    return folder


def page(folder): return render(folder).read_text('utf-8')


class Tree(HTMLParser):
    "Collects open elements, to see that each is closed, and every attribute"
    void = {'meta', 'link', 'br', 'img'}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.bad = [], set(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in self.void: self.open.append(tag)

    def handle_startendtag(self, tag, attributes): self.attributes += attributes

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag: self.bad.append(tag)


def test_full(tmp_path):
    text = page(write(tmp_path, contents()))
    assert re.findall(r'<section id="(\w+)"', text) == [o[0] for o in SECTIONS]
    assert 'cannot be shown' not in text and 'unfinished' not in text and text.count('<svg') == 6
    for words in ('A test run', 'NVIDIA H100 80GB HBM3', '0.490 to 0.940', 'does not show that the model is better', '2.20 (2.16 to 2.24)', 'changes training: no dropout',
                  'as claimed', 'stopped after 1 of 3 folds', 'out of memory', 'never saw', '33% saved', 'optkit demo --minutes 6', 'abc1234', 'clocks are not locked', '3 GiB', '21.0%', '-0.01', '0.6800 and 0.6900'):
        assert words in html.unescape(text), words
    tree = Tree(text)
    assert not tree.open and not tree.bad
    ids = [value for name, value in tree.attributes if name == 'id']
    assert len(ids) == len(set(ids))
    assert [o.name for o in tmp_path.iterdir() if not o.name.endswith('.json')] == ['report.html']


def test_needs_nothing_from_outside(tmp_path):
    text = page(write(tmp_path, contents()))
    tree = Tree(text)
    links = [value for name, value in tree.attributes if name.split(':')[-1] in ('src', 'href', 'srcset', 'action', 'data', 'poster')]
    assert links and all(o.startswith(('#', 'data:')) for o in links)
    assert 'script' not in tree.tags and 'import' not in text.split('</style>')[0]
    assert not re.search(r'url\((?!["\']?#)', text) and not any(name.startswith('on') for name, _ in tree.attributes)


def test_empty_folder(tmp_path):
    text = page(tmp_path)
    assert [o[0] for o in SECTIONS] == re.findall(r'<section id="(\w+)"', text) and 'This run is not complete' in text
    assert 'There is no held-out score yet' in text and 'no speedup was measured' in text and 'cannot be shown' not in text
    with pytest.raises(FileNotFoundError, match='no run folder'): render(tmp_path/'absent')
    assert not (tmp_path/'absent').exists()


@pytest.mark.parametrize('name', contents())
def test_one_file_missing(tmp_path, name):
    files = contents()
    del files[name]
    text = page(write(tmp_path, files))
    assert f'{name}.json' in text and 'cannot be shown' not in text


@pytest.mark.parametrize('content', ['', '{"rows": [', '[]', '3', 'null', '\x00'])
def test_broken_ladder(tmp_path, content):
    write(tmp_path, contents())
    (tmp_path/'ladder.json').write_text(content)
    text = page(tmp_path)
    assert 'ladder.json cannot be read' in text and 'Trials of the study' in text


def without_each(content):
    "`content` with each of its fields left out, and null, one at a time"
    for key in content:
        yield {k: v for k, v in content.items() if k != key}
        yield content | {key: None}


def test_fields_missing_or_null(monkeypatch):
    "Without any single field of any file, trial or record, its section and the headline still appear"
    monkeypatch.setattr(page_module, 'svg', lambda figure, name: '')
    for figure in ('ladder_figure', 'claims_figure', 'roofline_figure', 'study_figure'): monkeypatch.setattr(report, figure, lambda *_: None)
    whole = contents()
    study, ladder, forecast = whole['study'], whole['ladder'], whole['forecast']
    changed = [(name, o) for name, content in whole.items() if isinstance(content, dict) for o in without_each(content)]
    changed += [('decisions', [o]) for o in without_each(whole['decisions'][0])]
    changed += [('study', study | {'trials': [*study['trials'][:2], o]}) for o in without_each(study['trials'][2])]
    changed += [('ladder', ladder | {'rows': [ladder['rows'][0], o]}) for o in without_each(ladder['rows'][2])]
    changed += [('forecast', forecast | {part: [o]}) for part in ('totals', 'profile') for o in without_each(forecast[part][0])]
    for name, content in changed:
        run = {**whole, name: content}
        report._summary_blocks(run)
        for _, _, needs, build in SECTIONS:
            if name in needs or not needs: build(run)


def test_charts_without_a_field():
    study, ladder = contents()['study'], contents()['ladder']
    for o in without_each(study['trials'][2]): study_figure(study | {'trials': [*study['trials'][:2], o]})
    for o in without_each(ladder['rows'][2]): roofline_figure({'rows': [ladder['rows'][0], o], 'hardware': contents()['hardware']}), ladder_figure(ladder | {'rows': [ladder['rows'][0], o]}), claims_figure(ladder | {'rows': [ladder['rows'][0], o]})


@pytest.mark.parametrize('value', ['text', 7, [1, 2], {'a': 1}, math.nan, -math.inf])
def test_fields_of_a_wrong_kind(tmp_path, monkeypatch, value):
    "A field that holds something else costs its section at most, never the page"
    monkeypatch.setattr(page_module, 'svg', lambda figure, name: '')
    whole = contents()
    for name, content in whole.items():
        changed = {key: value for key in content} if isinstance(content, dict) else [value]
        text = page(write(tmp_path, {**whole, name: changed}))
        assert re.findall(r'<section id="(\w+)"', text) == [o[0] for o in SECTIONS]


def test_interrupted_study_and_ladder(tmp_path):
    files = contents()
    files['study'] |= {'best': None, 'trials': [trial(0, 'PRUNED', [.5]), trial(1, 'RUNNING', [.6, .6], value=None), trial(2, 'FAIL', [], reason='killed')]}
    nan = {'p50': math.nan, 'low': math.nan, 'high': math.nan}
    files['ladder']['rows'] = [row('plain', 1.), row('bf16', None, None, 'bf16', loss={'value': math.nan, 'difference': math.nan}, peak_bytes=None, mfu=math.nan)]
    files['ladder']['rows'][1] |= {'ratio': nan, 'ratio_before': nan}
    text = html.unescape(page(write(tmp_path, files)))
    assert 'cannot be shown' not in text and 'there is no best trial' in text and 'Some rows have no factor' in text
    assert 'undecided' in text and 'killed' in text and not re.search(r'\bnan\b', re.sub(r'<svg.*?</svg>', '', text, flags=re.DOTALL), re.IGNORECASE)


def test_hostile_text_stays_text(tmp_path):
    files = contents()
    files['run'] |= {'title': HOSTILE, 'command': HOSTILE}
    files['data'] |= {'labels': {HOSTILE: 3, 'x': 4}, 'source': HOSTILE, 'text': HOSTILE}
    files['final'] |= {'labels': [HOSTILE, 'x'], 'metric': HOSTILE, 'params': {HOSTILE: HOSTILE}}
    files['study'] |= {'metric': HOSTILE, 'trials': [trial(2, 'COMPLETE', [.5], params={HOSTILE: HOSTILE}, reason=HOSTILE)]}
    files['ladder']['rows'][2] |= {'variant': HOSTILE, 'claim': HOSTILE}
    files['ladder']['provenance'] |= {'gpu': HOSTILE}
    files['decisions'][0] |= {'what': HOSTILE, 'value': HOSTILE, 'reason': HOSTILE}
    files['timings']['stages'] = {HOSTILE: 1.}
    text = page(write(tmp_path, files))
    tree = Tree(text)
    assert 'cannot be shown' not in text and not tree.open and not tree.bad and not {'script', 'img'} & tree.tags
    assert text.count(html.escape('<script src=')) > 10


def test_a_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    write(tmp_path, contents())
    before = page(tmp_path)
    monkeypatch.setattr('os.replace', lambda *_: (_ for _ in ()).throw(OSError('disk full')))
    with pytest.raises(OSError, match='disk full'): render(tmp_path)
    assert (tmp_path/'report.html').read_text('utf-8') == before and not list(tmp_path.glob('.report*'))


def test_claims_are_complete():
    table = claims()
    assert len(table) >= 40 and table.index.is_unique and not table[['optimization', 'claimed', 'scope', 'hardware']].eq('').any().any()
    known = table.dropna(subset=['low', 'high'])
    assert (known.low <= known.high).all()
    table.loc['bf16', 'low'] = 99
    assert claims().loc['bf16', 'low'] == 1.5


@pytest.mark.parametrize('ratio, claim, expected', [
    ((1.7, 1.6, 1.8), 'bf16', 'as claimed'), ((1.2, 1.1, 1.3), 'bf16', 'less than claimed'), ((2.5, 2.4, 2.6), 'bf16', 'more than claimed'), ((1., .99, 1.01), 'bf16', 'no effect'),
    ((.8, .7, .9), 'bf16', 'slower'), ((1.5, 1.4, 1.6), 'bf16', 'undecided'), ((1.3, .9, 2.2), 'bf16', 'undecided'), ((1.2, .9, 1.4), 'bf16', 'less than claimed'),
    ((.8, .75, .85), 'checkpointing_memory', 'as claimed'), ((1.2, 1.1, 1.3), 'cuda_graphs', 'as claimed'), ((1., .98, 1.02), 'cuda_graphs', 'no effect'), ((1.4, 1.36, 1.44), 'flash_step', 'as claimed'),
    ((1.7, 1.6, 1.8), 'dora', 'no claim'), ((1.7, 1.6, 1.8), None, 'no claim'), ((math.nan,)*3, 'bf16', 'undecided'), (None, 'bf16', 'undecided')])
def test_verdict(ratio, claim, expected):
    found = verdict(ratio and Ratio(*ratio), claim)
    assert found.value == expected and found.reason


def test_verdict_says_when_the_scope_differs():
    assert 'matrix products only' in verdict(Ratio(1.05, 1.04, 1.06), 'tf32').reason and 'neither shown nor refuted' in verdict(Ratio(1.05, 1.04, 1.06), 'tf32').reason
    assert 'not the same quantity' not in verdict(Ratio(1.05, 1.04, 1.06), 'tf32', measured='matrix products').reason
    with pytest.raises(KeyError, match='claims'): verdict(Ratio(1, 1, 1), 'unheard of')
    assert row_verdict(row('x', 1.5, 1.2, 'unheard of')).value == 'no claim'


def test_few_rounds_give_no_verdict():
    "With two rounds the interval is the two values, which holds the median half of the time"
    found = [row_verdict(row('x', 1.5, 1.2, 'bf16', repeats=n)) for n in (1, 4, 5)]
    assert [f.value == 'undecided' for f in found] == [True, True, False] and '4 rounds are too few' in found[1].reason and '1 round is too few' in found[0].reason
    assert row_verdict(row('x', 1.5, 1.2, None, repeats=1)).value == 'no claim'


def test_figures_have_axes_with_units():
    files = contents()
    for figure in (ladder_figure(files['ladder']), claims_figure(files['ladder']), study_figure(files['study']), lengths_figure(files['data']), training_figure(files['train'])):
        axes = figure.axes[0]
        assert axes.get_title(loc='left') and axes.get_xlabel()
    assert [o.get_text() for o in ladder_figure(files['ladder']).axes[0].get_yticklabels()][0] == 'plain'
    for figure in (ladder_figure({'rows': []}), study_figure({}), lengths_figure({}), training_figure({})): page_module.svg(figure, 'empty')


def test_committed_records(tmp_path):
    assert len(read_committed(tmp_path)) == 0
    ladder = contents()['ladder']
    (tmp_path/'w1-x-h100.json').write_text(json.dumps({'provenance': ladder['provenance'], 'rows': ladder['rows']}))
    table = read_committed(tmp_path)
    assert isinstance(table, pd.DataFrame) and list(table.variant)[:2] == ['plain', CONTROL] and set(table.file) == {'w1-x-h100.json'}
    figure = ladder_figure(table)
    assert 'NVIDIA H100, 2026-02-03' in figure.axes[0].get_title(loc='left')
    (tmp_path/'broken.json').write_text('{}')
    with pytest.raises(ValueError, match='broken.json'): read_committed(tmp_path)


# Speed and memory, forecast

def section(text, name):
    "The words of a section, tags left out"
    found = re.search(f'<section id="{name}">(.*?)</section>', text, re.DOTALL)
    return found and re.sub(r'\s+', ' ', html.unescape(re.sub(r'<[^>]*>', ' ', re.sub(r'<svg.*?</svg>', '[chart]', found[1], flags=re.DOTALL))))


def test_speed_and_memory_of_a_card(tmp_path):
    found = section(page(write(tmp_path, contents())), 'speed')
    for words in ('[chart]', '21.0%', '3 GiB', '16 rows in 2 micro-batches', '16 of up to 16 tokens', '20 GiB 25% of the card', '0.5 GiB', '4 n/a 0.75 GiB fits', '16 98 GiB 99 GiB does not fit', '16 90.5', '32 50'):
        assert words in found, (words, found)
    assert found.index('bf16') < found.index('no dropout') and 'n/a:' not in found


@pytest.mark.parametrize('hardware, reason', [({'gpu': None, 'cpu': {'model': 'Some CPU', 'usable': 2}}, 'the peak of Some CPU (2 usable cores, no GPU in use) is not known'),
                                              ({'gpu': {'name': 'A card', 'peak': None, 'usable': True}}, 'the peak of A card is not known'), ({'gpu': {'name': 'A card', 'peak': {'fp16': 1e14}, 'usable': True}}, 'no row has an MFU')])
def test_no_mfu_without_a_peak(tmp_path, hardware, reason):
    files = contents()
    files['hardware'] = hardware
    for o in files['ladder']['rows']: o |= {'mfu': None, 'peak_bytes': None}
    files['batch'] |= {'peak_bytes': None, 'allocated_bytes': None, 'tried': [[8, None, True]], 'predicted': [None]}
    found = section(page(write(tmp_path, files)), 'speed')
    assert f'n/a: {reason}' in found and '[chart]' not in found and 'GiB' not in found and '%' not in found and 'Peak memory was not measured' in found
    assert '40 39 to 41' in found, 'throughput was measured all the same'


def test_speed_without_a_ladder(tmp_path):
    files = contents()
    del files['ladder']
    found = section(page(write(tmp_path, files)), 'speed')
    assert 'No row of a ladder was measured, so' in found and '20 GiB' in found and '16 90.5' in found
    files['run']['settings'] = {'ladder': False}
    assert 'as was asked for' in section(page(write(tmp_path, files)), 'speed')


def test_roofline_keeps_the_order_of_a_ladder_and_ranks_a_ledger():
    rows = [row('$x{', 1., mfu=.1), row('b', 2., mfu=.3, padded_tokens_per_s=None), row('c', 2., mfu=.2, padded_tokens_per_s={'p50': 80.}), row('d', 1., mfu=None), row('e', 1., mfu=math.nan)]
    data = {'rows': rows, 'hardware': contents()['hardware'], 'provenance': {'gpu': 'X', 'date': '2026-02-03'}}
    names = lambda figure: [o.get_text() for o in figure.axes[0].get_yticklabels()]
    assert names(roofline_figure(data)) == ['$x{', 'c', 'b'] and names(roofline_figure(data, ranked=False)) == ['c', 'b', '$x{'] # from the bottom
    axes = roofline_figure(data, ranked=False).axes[0]
    assert [round(o.get_width(), 3) for o in axes.patches] == [.2, .3, .1, .2] and [o.get_text() for o in axes.texts] == ['20.0%', '30.0%', '10.0%']
    page_module.svg(roofline_figure(data), 'roofline')
    assert roofline_figure({'rows': rows[3:], 'hardware': data['hardware']}) is None and roofline_figure({'rows': rows}) is None


def test_forecast_of_each_kind(tmp_path):
    text = page(write(tmp_path, contents()))
    found = section(text, 'forecast')
    for words in ('4 trials took 70 s; 4 more on this machine take about 1 min 40 s (80 s to 2 min 05 s), one after the other', '80 s to 2 min 05 s 80% interval', '75% of 8 earlier intervals', '2,000 as many as in the reports 1,996 n/a 2 h 00 min if no trial is stopped; none was so far',
                  '90 s to 5 min 00 s bounds', 'too few trials to try it', '1 of 3 1 18 s 25%', '3 of 3 2 54 s 75%'):
        assert words in found, (words, found)
    assert text.index('<section id="study"') < text.index('<section id="forecast"') < text.index('<section id="final"')
    wide = contents()
    wide['forecast']['totals'][0] |= {'useful': False}
    assert 'too wide to plan with' in section(page(write(tmp_path, wide)), 'forecast')


def test_a_forecast_that_could_not_be_made_says_why(tmp_path):
    found = section(page(write(tmp_path, contents() | {'forecast': {'done': None, 'spent_s': None, 'profile': [], 'totals': [], 'reason': "study 's' has no finished trial"}})), 'forecast')
    assert "No forecast could be made: study 's' has no finished trial." in found


def test_runs_of_earlier_versions_are_complete_without_a_forecast(tmp_path):
    files = contents()
    del files['forecast']
    text = page(write(tmp_path, files))
    assert 'unfinished' not in text and 'or an earlier version made it' in section(text, 'forecast') and load_run(tmp_path)[1] == {}
    (tmp_path/'forecast.json').write_text('{"totals": [')
    text = page(tmp_path)
    assert 'forecast.json cannot be read' in section(text, 'forecast') and 'not complete: forecast.json' in text
    for name in ('forecast', 'study', 'final'): (tmp_path/f'{name}.json').unlink()
    text = page(tmp_path)
    assert 'not complete: study.json, final.json are missing' in text and 'made after the study' in section(text, 'forecast')


@pytest.mark.parametrize('folds', [None, 3])
def test_a_training_has_neither_section(tmp_path, folds):
    files = contents()
    kept = {o: files[o] for o in ('hardware', 'decisions', 'train')} | {'run': files['run'] | {'kind': 'train', 'settings': {'folds': folds}}}
    if folds: kept['folds'] = {'metric': 'accuracy', 'planned': 3, 'folds': [{'fold': 0, 'metrics': {'accuracy': .5}, 'rows': 9, 'best_epoch': 1, 'epochs': 2, 'seconds': 3.}]}
    text = page(write(tmp_path, kept))
    assert 'unfinished' not in text and section(text, 'forecast') is section(text, 'speed') is None and section(text, 'folds' if folds else 'training')


# In a browser

def browse(tmp_path, *arguments):
    browser = shutil.which('chromium') or shutil.which('chromium-browser')
    if not browser: pytest.skip('needs chromium')
    flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars').split()
    return subprocess.run([browser, *flags, f'--user-data-dir={tmp_path/"profile"}', *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize('width, dark', [(1200, False), (500, True)])
def test_in_a_browser(tmp_path, width, dark):
    address, picture = render(write(tmp_path, contents())).as_uri(), tmp_path/'page.png'
    scheme = f'--blink-settings=preferredColorScheme={0 if dark else 1}'
    shown = browse(tmp_path, '--dump-dom', address).stdout
    assert all(f'<section id="{o[0]}"' in shown for o in SECTIONS) and shown.count('<svg') == 6
    browse(tmp_path, scheme, f'--window-size={width},1600', f'--screenshot={picture}', address)
    image = Image.open(picture).convert('RGB')
    assert image.size == (width, 1600)
    most, page = max(image.getcolors(1 << 24))
    assert sum(page) < 100 if dark else sum(page) > 700, 'the page follows the scheme'
    assert .3 < most/(width*1600) < .99 and len(image.getcolors(1 << 24)) > 50, 'the screenshot is blank'


def measured(tmp_path, text, width):
    "Of the page in a frame of that width: its own width, then section, width and room of each table, and whether it scrolls alone"
    frame, script = html.escape(text), ("const d = document.querySelector('iframe').contentDocument; document.body.dataset.seen = JSON.stringify([d.defaultView.innerWidth, d.documentElement.scrollWidth,"
        "[...d.querySelectorAll('table')].map(t => [t.closest('section').id, t.offsetWidth, t.parentNode.clientWidth, getComputedStyle(t.parentNode).overflowX])])")
    (tmp_path/'frame.html').write_text(f'<body><iframe style="border:0;width:{width}px;height:900px" srcdoc="{frame}"></iframe><script>onload = () => {{ {script} }}</script></body>', 'utf-8')
    shown = browse(tmp_path, '--dump-dom', (tmp_path/'frame.html').as_uri()).stdout
    return json.loads(html.unescape(re.search('data-seen="([^"]*)"', shown)[1]))


def test_tables_do_not_overflow(tmp_path):
    "On a phone a table that is too wide scrolls in itself; on paper those of speed and forecast fit"
    text = page(write(tmp_path, contents()))
    inner, wide, tables = measured(tmp_path, text, 390)
    assert inner == 390 and wide <= 390 and {'speed', 'forecast', 'ladder', 'study'} <= {o[0] for o in tables}
    assert all(table <= room or scrolls == 'auto' for _, table, room, scrolls in tables) and all(room < 390 for *_, room, _ in tables)
    _, _, tables = measured(tmp_path, text.replace('@media print', '@media all'), 680)
    assert [o for o in tables if o[0] in ('speed', 'forecast') and o[1] > o[2]] == []


@pytest.mark.parametrize('metric', ['macro_f1', 'loss'])
def test_a_study_as_the_search_leaves_it(tmp_path, metric):
    "Stopped and interrupted trials are counted as such and drawn; a loss is shown as it is, lower is better"
    from optkit.simulator import simulated_runner
    from optkit.space import parse_space
    from optkit.hpo import tune
    from optkit.confirm import study_summary
    sign, plain = -1 if metric == 'loss' else 1, simulated_runner()
    study = tune(lambda p, f: (v - (2 if sign < 0 else 0) for v in plain(p, f)), dict(map(parse_space, ('lr=1e-5..1e-1:log', 'weight_decay=1e-3..1:log'))), 20, folds=3, epochs=3, storage='memory', progress=False)
    summary = study_summary(study, metric, 20, 9)
    summary['trials'].append(dict(summary['trials'][0], number=20, state='interrupted', value=None, fold_scores=[]))
    stopped, best = sum(t['state'] == 'stopped' for t in summary['trials']), summary['trials'][summary['best']]
    assert stopped and best['value'] == (min if sign < 0 else max)(t['value'] for t in summary['trials'] if t['value'] is not None)
    page = render(write(tmp_path, contents() | dict(study=summary))).read_text('utf-8')
    assert f'20 trials ({20 - stopped} over all folds, {stopped} stopped early, 0 failed)' in page and '1 more trial was cut short by an interruption' in page
    assert len(study_figure(summary).axes[0].collections) + len(study_figure(summary).axes[0].lines) >= 3 and 'stopped early' in page and page.count('stopped after') >= stopped


@pytest.mark.parametrize('low, high, said, steady', [(.98, 1.02, '1.00 (0.98 to 1.02).', True), (1., 1.04, '1.01 (1.00 to 1.04).', True), (1.0021, 1.04, '1.010 (1.002 to 1.040): its interval misses 1', False),
                                                     (.97, .99996, '0.98500 (0.97000 to 0.99996): its interval misses 1', False), (1.05, 1.2, '1.10 (1.05 to 1.20): its interval misses 1', False)])
def test_a_control_that_misses_1_by_less_than_two_digits_show_is_shown_with_more(low, high, said, steady):
    from optkit.page import CONTROL
    from optkit.report import _control_words
    middle = 1.1 if low > 1.04 else .985 if low == .97 else 1. if low == .98 else 1.01
    words = _control_words(dict(rows=[dict(variant=CONTROL, ratio=dict(p50=middle, low=low, high=high))]))
    assert said in words and ('not steady' not in words) == steady


def test_a_study_without_a_stopped_trial_speaks_of_no_predicted_value(tmp_path):
    files, words = contents(), 'A stopped trial is shown at the predicted mean'
    stopped = [t for t in files['study']['trials'] if t['state'] == 'PRUNED']
    for t in stopped: t['value_kind'] = 'predicted'
    assert stopped and words in page(write(tmp_path, files))
    files['study']['trials'] = [t for t in files['study']['trials'] if t['state'] == 'COMPLETE']
    assert words not in page(write(tmp_path, files))
