"What users of other tools reported of their tables, folds and labels, each with the smallest input and the right value"
import csv, gzip, io, json, shutil, subprocess, warnings
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch

from made_up import model_and_pairs
from optkit.cli import main
from optkit.data import GAPS, InputError, parse_labels, read_frame, read_table, table_from
from optkit.folds import check_folds, check_parts, hold_out, stratified_folds
from optkit.job import Job, JobConfig, JobPlan
from optkit.timing import read_json

torch.set_num_threads(1)
LINES = [f'row {n}' for n in range(10)]
PLAIN = dict(precision='fp32', ladder=False, save_model=False)


def file_of(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def reported(sep, opened='"He said it was fine', closed='so it was" they said'):
    "Ten rows; a mark opens in the third line and another one stands in the sixth"
    rows = [*LINES[:1], opened, *LINES[2:4], closed, *LINES[5:]]
    return ''.join(f'{text}{sep}{label}\n' for text, label in [('text', 'label'), *zip(rows, 'ab' * 5)])


def decided(folder): return {d['what']: d for d in read_json(folder / 'decisions.json')}


# --- a file has the rows that its lines say

@pytest.mark.parametrize('opened, closed', [('"He said it was fine', 'so it was" they said'),
    ('"He said it was fine', 'so it was"'), ('"He said', 'nothing')],
    ids=['within', 'at the end of a cell', 'never closed'])
@pytest.mark.parametrize('packed', ['', '.gz'])
def test_field_tsv_with_quotation_marks_keeps_every_row(tmp_path, opened, closed, packed):
    content = reported('\t', opened, closed).encode()
    with pytest.warns(UserWarning, match=r'quotation marks: part of the texts: line'):
        table = read_table(file_of(tmp_path / f'x.tsv{packed}', gzip.compress(content) if packed else content),
            'text', 'label')
    assert len(table) == 10 and table.texts[1] == opened and table.texts[4] == closed and table.classes == ('a', 'b')


def test_field_tsv_where_speech_is_marked_keeps_the_marks(tmp_path):
    "GLUE's files, which pandas reads with quoting=3"
    path = file_of(tmp_path / 'x.tsv', 'text\tlabel\n"Yes" he said\ta\nso "it" was\tb\n"No"\ta\n')
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); found = read_frame(path)
    assert found.text.tolist() == pd.read_csv(path, sep='\t',
        quoting=csv.QUOTE_NONE).text.tolist() == ['"Yes" he said', 'so "it" was', '"No"']


@pytest.mark.parametrize('content, lines', [(reported(','), 'line 3 .*line 6'), (reported(',', closed='no end'), 'line 3 .*line 11'), ('text,label\nx,a\n"last,b', 'line 3 .*line 3'),
                                            ('text,label\n"one\ntwo",a\n"three,b\nfour,a\n', 'line 4 .*line 5'), ('text,label\n"a ""b,a\nc,b\n', 'line 2 .*line 3')])
def test_field_csv_with_a_stray_mark_is_refused_with_its_line(tmp_path, content, lines):
    with pytest.raises(InputError,
        match=rf'x.csv: cannot be read \(the quotation mark that opens a cell in {lines}') as caught:
        read_frame(file_of(tmp_path / 'x.csv', content))
    assert '\n' not in str(caught.value)


def test_field_tsv_with_a_stray_mark_and_a_short_line_is_refused(tmp_path):
    with pytest.raises(InputError, match='line 3 .*line 6'):
        read_frame(file_of(tmp_path / 'x.tsv', reported('\t') + 'no label\n'))


def test_field_csv_rows_that_marks_hold_together_are_counted(tmp_path):
    "The text of three rows reads as one cell, and CSV cannot tell: it is said"
    path = file_of(tmp_path / 'x.csv', reported(',', '"He said, it was fine', 'so it was"'))
    with pytest.warns(UserWarning,
        match=r'line breaks: 7 rows from 11 lines: 1 rows hold .*lines 3 to 6.*each line looks like a row'):
        table = read_table(path, 'text', 'label')
    assert len(table) == 7 and table.notes['line breaks'].value == '7 rows from 11 lines'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        letter = read_table(file_of(tmp_path / 'y.csv', 'text,label\n"Dear you,\n\nI am well, thanks,\nme",a\nb,b\n'),
            'text', 'label')
    assert letter.texts == ['Dear you,\n\nI am well, thanks,\nme', 'b']
    assert letter.notes['line breaks'].value == '2 rows from 6 lines'


CELLS = ['a', '', ' ', 'a b', 'a, b', 'a\tb', 'one\ntwo', 'one\r\ntwo', '"', '""', 'say "it"', '"said"', '"a", "b"',
    ' "x"', 'NA', 'nan', '1.0', '007', 'été', "it's", ';', 'a\x0bb', 'a\u2028b', '#', 'x' * 200_000]

@pytest.mark.parametrize('sep, ext', [(',', 'csv'), ('\t', 'tsv')])
@pytest.mark.parametrize('quoting', [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_field_what_pandas_wrote_reads_as_pandas_reads_it(tmp_path, sep, ext, quoting):
    rng, limit = np.random.default_rng(0), csv.field_size_limit()
    for n in range(25):
        frame = pd.DataFrame(rng.choice(CELLS, (rng.integers(1, 9),
            rng.integers(1, 5)))).rename(columns=lambda c: f'column {c}')
        frame.to_csv(tmp_path / f'x.{ext}', sep=sep, index=bool(n % 2), quoting=quoting,
            lineterminator=['\n', '\r\n'][n % 3 == 0])
        want = pd.read_csv(tmp_path / f'x.{ext}', sep=sep, dtype=str, keep_default_na=False)
        with warnings.catch_warnings(): warnings.simplefilter('ignore'); found = read_frame(tmp_path / f'x.{ext}')
        assert found.to_numpy().tolist() == want.to_numpy().tolist()
        assert (len(found) == len(frame) or frame.shape[1] == 1)
    assert csv.field_size_limit() == limit


def test_field_hand_made_csv_reads_as_pandas_reads_it(tmp_path):
    for content in ('text,label\n"Hello" he said,a\nx,b\n', 'text,label\n"a, b" ,a\nx,"b" \n',
        'text,label,more\nx,a\ny,b,c\n', '\n\ntext,label\n\nx,a\n   \ny,b\n\n', 'text,label\nx, "a, b"\n'):
        path = file_of(tmp_path / 'x.csv', content)
        want = pd.read_csv(path, dtype=str, keep_default_na=False)
        if isinstance(want.index, pd.RangeIndex):
            assert read_frame(path).fillna('').to_numpy().tolist() == want.fillna('').to_numpy().tolist(), content
        else: # the first cells would become an index
            with pytest.raises(InputError, match='line 2 has 3 cells'): read_frame(path)


@pytest.mark.parametrize('content, said', [('text;label\nx;a\ny;b\n', "no column 'text'; it has 'text;label'"),
    ('text;label\nhello, world;a\ny;b\n', 'line 2 has 2 cells, the header 1'),
    ('text\tlabel\nx\ta\ny\tb\n', "no column 'text'")])
def test_field_another_separator_is_named(tmp_path, content, said):
    path, sep = file_of(tmp_path / 'x.csv', content), content[4]
    with pytest.raises(InputError, match=said) as caught: read_table(path, 'text', 'label')
    assert f'does {sep!r} separate its cells?' in str(caught.value)
    assert f'pandas.read_csv(..., sep={sep!r})' in str(caught.value)
    assert table_from(pd.read_csv(path, sep=sep)).classes == ('a', 'b'), 'and what is advised works'


@pytest.mark.parametrize('name, rows', [('x.csv', 'text,label\nx,a,\ny,b\n'), ('x.csv', 'text,label\nx,a\ny, z,b\n'),
    ('x.tsv', 'text\tlabel\nx\ta\t\ny\tb\n')])
def test_field_a_stray_separator_is_refused_with_its_line(tmp_path, name, rows):
    line = next(n for n, text in enumerate(rows.splitlines(), 1) if len(text.replace('\t', ',').split(',')) > 2)
    with pytest.raises(InputError, match=rf'cannot be read \(line {line} has 3 cells, the header 2\)'):
        read_frame(file_of(tmp_path / name, rows))


@pytest.mark.parametrize('encoding', ['utf-16', 'utf-16le', 'utf-16be', 'cp1252'])
@pytest.mark.parametrize('name', ['my x.csv', 'x.jsonl', 'x.csv.gz'])
def test_field_a_text_of_excel_is_read_after_what_the_message_says(tmp_path, encoding, name):
    content = ('text,label\ncafé “so”,a\ny,b\n' if 'csv' in name else '{"text": "café “so”", "label": "a"}\n{"text": "y", "label": "b"}\n').encode(encoding)
    path = file_of(tmp_path / name, gzip.compress(content) if name.endswith('.gz') else content)
    with pytest.raises(InputError, match='is no utf-8; save it so .in Excel as CSV UTF-8., or run: ') as caught:
        read_frame(path)
    if not shutil.which('iconv'): pytest.skip('needs iconv')
    subprocess.run(str(caught.value).split('or run: ')[1], shell=True, check=True)
    assert read_table(tmp_path / f'utf8-{name.removesuffix(".gz")}', 'text', 'label').texts == ['café “so”', 'y']


def test_field_a_file_of_no_known_encoding_is_refused_in_a_line(tmp_path):
    with pytest.raises(InputError, match=r'is no utf-8; save it so \(in Excel as CSV UTF-8\)$'):
        read_frame(file_of(tmp_path / 'x.csv', b'text,label\n\x81\x8d\xff,a\n'))


@pytest.mark.parametrize('line', ['[' * 100_000, '{"text":' * 100_000, '{"text": ' + '9' * 5000 + '}'],
    ids=['lists', 'objects', 'digits'])
def test_field_a_nested_line_of_json_ends_in_a_line(tmp_path, capsys, line):
    path = file_of(tmp_path / 'x.jsonl', '{"text": "x", "label": "a"}\n' + line + '\n')
    assert main(['train', '--data', str(path), '--text', 'text', '--label', 'label', '--model', 'none', '--out',
        str(tmp_path / 'run')]) == 2
    said = capsys.readouterr().err
    assert said.count('\n') == 1
    assert 'x.jsonl, line 2' in said
    assert 'one object a line' in said
    assert len(said) < 400
    assert not (tmp_path / 'run').exists()


# --- labels, groups and texts

@pytest.mark.parametrize('gap', sorted(GAPS))
def test_field_what_pandas_takes_for_a_gap_is_no_class(tmp_path, gap):
    path = file_of(tmp_path / 'x.csv', f'text,label,doc\nx,a,1\ny,{gap},2\nz,b,{gap}\nw,a,3\n')
    with pytest.raises(InputError,
        match=r"'label' has no label in 1 rows \(row 2\), which read .*remove these rows, or rename the label"):
        read_table(path, 'text', 'label')
    with pytest.raises(InputError, match=r"'doc' has no group in 1 rows \(row 3\)"):
        read_table(file_of(path, path.read_text().replace(f'y,{gap}', 'y,b')), 'text', 'label', group='doc')
    if gap not in ('Nan', 'NAN'): assert pd.read_csv(io.StringIO(f'a,b\nx,{gap}\n')).b.isna().all()


@pytest.mark.parametrize('labels, gone', [(['0', '1', '-100', '0'], '-100'), (['pos', 'neg', '-100', 'pos'], '-100'),
    (['0', '1.0', '-100.0', '0'], '-100.0'), (['2', '1', '-1', '0'], '-1'),
    (['1', '0', '-1', '2', '-100'], '-1, -100')])
def test_field_numbers_that_say_none_are_no_class(labels, gone):
    with pytest.raises(InputError, match=rf"no label in {gone.count('-')} rows \(rows? 3.*which read {gone};"):
        table_from(['x'] * len(labels), labels=labels)


@pytest.mark.parametrize('labels', [['-1', '1'], ['-2', '-1', '0', '1', '2'], ['-100', '-50', '0'],
    ['-1', '2', '3', '5']])
def test_field_scales_below_zero_are_classes(labels): assert parse_labels(labels * 3)[1] == tuple(labels)


@pytest.mark.parametrize('labels, named', [(['-1', '0', '1'], "'-1'"), (['FAVOR', 'AGAINST', 'NONE'], "'NONE'"),
    (['a', 'none', 'b'], "'none'")])
def test_field_classes_that_may_mean_none_are_named(labels, named):
    with pytest.warns(UserWarning, match=f'labels that may mean none: {named}: taken as a class'):
        table = table_from(['x'] * 3, labels=labels)
    assert len(table.classes) == 3 and table.notes['labels that may mean none'].value == named


def test_field_named_classes_of_a_data_set_have_none_below_zero():
    class Feature: names = ['neg', 'pos']
    class Split(dict): column_names, features = ['text', 'label'], dict(label=Feature)
    for none in (-1, -1., -100):
        with pytest.raises(InputError, match=r'no label in 1 rows \(row 3\)'):
            table_from(Split(text=['x'] * 3, label=[0, 1, none]))


@pytest.mark.parametrize('text', ['nan', 'NaN', 'NA', 'null', 'None', 'N/A'])
def test_field_texts_that_read_as_a_gap_are_texts(tmp_path, text):
    path = file_of(tmp_path / 'x.csv', f'text,label\n{text},a\ny,b\n')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        table = read_table(path, 'text', 'label', drop_empty=True)
    assert table.texts == [text, 'y']
    assert table.dropped == 0
    assert bool(caught) == (text.lower() == 'nan') == ('texts' in table.notes)
    with pytest.raises(InputError, match=r"'text' is empty in 1 rows \(row 1\)"):
        table_from(pd.DataFrame(dict(text=[np.nan, 'y'], label=['a', 'b'])))


@pytest.mark.parametrize('names, groups', [(['doc1', 'doc1 ', ' doc1', 'doc2'], [0, 0, 0, 1]),
    (['1', '1.0', ' 1', '01'], [0] * 4), (['é', 'e\u0301', 'é ', 'x'], [1, 1, 1, 0]), ([1, 1., '1 ', 2], [0, 0, 0, 1]),
    (['10', '9', '+9', '-9'], [1, 2, 2, 0])])
def test_field_a_document_is_one_group_however_its_name_is_written(names, groups):
    assert table_from(dict(text=['x'] * 4, label=[0, 1, 0, 1], doc=names), group='doc').groups.tolist() == groups


@pytest.mark.parametrize('names, alike', [(['Yes', 'yes', 'No', 'no'], "'No', 'no'; 'Yes', 'yes'"),
    (['é', 'e\u0301', 'x'], None), (['1', '1.0', 'a'], "'1', '1.0'"), (['a b', 'a  b', 'x'], None),
    (['ham', 'spam'], '')])
def test_field_names_that_look_alike_are_named_when_classes_are_made(names, alike):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        table = table_from(['x'] * len(names), labels=names)
    assert len(table.classes) == len(names), 'they stay what they are'
    note = table.notes.get('names of labels that look alike')
    assert bool(note) == (alike != '') == bool(caught)
    assert (not alike or note.value == alike)
    assert (not caught or 'the data: names of labels that look alike' in str(caught[0].message))
    if not alike: return
    with pytest.warns(UserWarning, match='names of groups that look alike'):
        groups = table_from(dict(text=['x'] * len(names), label=[n % 2 for n in range(len(names))], doc=names),
            group='doc')
    assert groups.notes['names of groups that look alike'].value == alike


@pytest.mark.parametrize('value', ['1e400', '9' * 5000, '-' + '9' * 5000, 'inf'])
def test_field_an_endless_number_as_label_prints_short(value):
    with pytest.raises(InputError,
        match=r"'label' holds numbers beyond 1e308 \(row 2: .{1,40}\); expected words or whole numbers") as caught:
        table_from(['x'] * 3, labels=['0', value, '1'])
    assert len(str(caught.value)) < 200
    assert parse_labels(['0' * 5000 + '1', '2'])[1] == ('1', '2')
    with pytest.raises(InputError) as caught: table_from(['x'] * 2, labels=['l' * 5000] * 2)
    assert len(str(caught.value)) < 200 and len(repr(table_from(['x'] * 2, labels=['l' * 5000, 'm']))) < 200


# --- folds and parts

def documents(tmp_path, c_documents=2):
    "120 rows in documents of six; label c in a few of them, three rows each"
    base = ['a', 'b'] * 60
    for d in range(c_documents): base[12 + 6 * d:15 + 6 * d] = 'ccc'
    folder = model_and_pairs(tmp_path, 120, doc=[f'd{n // 6}' for n in range(120)])
    frame = pd.read_csv(folder / 'data.csv').assign(y=base)
    frame.to_csv(folder / 'data.csv', index=False)
    return folder


def job_of(folder, out, **changes):
    changes = dict(pair='b', group='doc', model=str(folder / 'model'), **PLAIN) | changes
    return Job(JobConfig(str(folder / 'data.csv'), 'a', 'y', out=str(out), **changes), progress=False,
        say=lambda text: None, command='test')


def data_stage(job, rows=90, held_out=30):
    "The stage in which the rows are split; its decisions"
    job.folder.mkdir()
    job._plan = asdict(JobPlan(16, rows, held_out, 1, 1, 1., 1., ''))
    job._do_data()
    return decided(job.folder)


def test_field_group_folds_count_labels_in_groups(tmp_path):
    folder = documents(tmp_path)
    said = "label 'c' is in 2 groups; 3 folds and the held-out rows need at least 4 groups of each label"
    with pytest.raises(InputError, match=said): job_of(folder, tmp_path / 'run')
    words = ['train', '--data', str(folder / 'data.csv'), '--text', 'a', '--pair', 'b', '--label', 'y', '--group',
        'doc', '--model', str(folder / 'model'), '--out', str(tmp_path / 'run')]
    assert main([*words, '--folds', '3']) == 2 and not (tmp_path / 'run').exists()
    assert len(read_table(folder / 'data.csv', 'a', 'y', group='doc')) == 120
    assert job_of(folder, tmp_path / 'run', group=None).table.groups is None
    labels, groups = np.repeat([0, 1], [12, 6]), np.repeat(np.arange(6), 3)
    check_folds(labels, ('a', 'b'), 2, held_out=False, groups=groups)
    with pytest.raises(InputError, match="label 'b' is in 2 groups; 3 folds need at least 3 groups"):
        check_folds(labels, ('a', 'b'), 3, held_out=False, groups=groups)


def test_field_held_out_documents_have_each_label_and_leave_it_to_the_folds():
    "Random documents, each label in four of them or more: what three folds and a held-out part need"
    rng, checked = np.random.default_rng(0), 0
    for _ in range(150):
        groups = np.repeat(np.arange(30), rng.integers(2, 7, 30))
        labels = np.array([rng.choice(3, p=[.5, .45, .05]) if g % 2 else 0 for g in groups])
        in_groups = [len(np.unique(groups[labels == c])) for c in range(3)]
        if min(in_groups) < 4: continue
        rows, held = hold_out(labels, len(labels) // 4, len(labels) // 2, 3, groups=groups)
        left = [len(np.unique(groups[rows][labels[rows] == c])) for c in range(3)]
        assert not {*groups[rows]} & {*groups[held]} and min(left) >= 3
        checked += set(labels[held]) == {0, 1, 2}
    assert checked > 20


def test_field_a_training_part_without_a_label_is_said(tmp_path):
    with pytest.warns(UserWarning,
        match=r'the training part of fold \d of 2 has no row of label \(or stratum\) 1; take fewer folds'):
        folds = stratified_folds(np.arange(12), np.array([0] * 8 + [1] * 4), 2,
            groups=np.array([0, 1, 2, 3] * 2 + [4] * 4))
    table = table_from(dict(text=[f't{n}' for n in range(12)], label=['a'] * 8 + ['b'] * 4))
    said = check_parts(table, folds)
    assert [*said] == ['labels']
    assert "no row of label 'b' in the training part of fold" in said['labels'].value
    assert said['labels'].value.count(';') == 1


def test_field_a_jobs_parts_that_lack_a_label_are_decisions(tmp_path, monkeypatch):
    job = job_of(documents(tmp_path, 6), tmp_path / 'run')
    monkeypatch.setattr(Job, '_split', lambda self, rows, held_out: (np.arange(90), np.arange(90, 120)))
    found = data_stage(job)
    assert found['held-out rows, labels']['value'] == "no row of label 'c' in the held-out rows"
    assert found['held-out rows, labels']['reason']


def test_field_equal_texts_on_both_sides_are_counted(tmp_path):
    "Ten rows stand twice, in both columns; twenty more share the first one"
    folder = model_and_pairs(tmp_path, 120)
    frame = pd.read_csv(folder / 'data.csv').assign(a=[f'w{n} w1' for n in range(120)],
        b=[f'w{n} w2' for n in range(120)])
    frame.loc[60:69, ['a', 'b']] = frame.loc[0:9, ['a', 'b']].to_numpy()
    frame.loc[70:79, 'a'] = frame.loc[10:19, 'a'].to_numpy()
    frame.to_csv(folder / 'data.csv', index=False)
    twins = {**{n: n + 60 for n in range(20)}, **{n + 60: n for n in range(20)}}
    job = job_of(folder, tmp_path / 'run', group=None)
    found = data_stage(job)
    data, whole = job._split(90, 30), lambda n: n % 60 < 10
    between = lambda a, b: [int(n) for n in b if twins.get(int(n)) in set(a.tolist())]
    held = between(*data)
    assert found['held-out rows']['value'].startswith(f'{len(held)} of {len(data[1])} share their a, ')
    assert f'{sum(map(whole, held))} of {len(data[1])} share their a and b with a row of the search' in found['held-out rows']['value']
    inside = [n for a, b in stratified_folds(data[0], job.table.labels, 3) for n in between(a, b)]
    assert f'{len(inside)} of {len(data[0])} share their a, ' in found['folds']['value']
    assert f'{sum(map(whole, inside))} of {len(data[0])} share their a and b with a row of the training part' in found['folds']['value']
    words = ['--text', 'a', '--pair', 'b', '--label', 'y', '--model', str(folder / 'model'), '--quiet', 'epochs=1',
        'precision=fp32']
    for n, more in enumerate(([], ['--folds', '2'])):
        assert main(['train', '--data', str(folder / 'data.csv'), *words, '--out', str(tmp_path / f'train{n}'),
            *more]) == 0
        value = decided(tmp_path / f'train{n}')['validation rows']['value']
        assert f"of {120 if more else 24} share their a, " in value
        assert 'share their a and b with a row of the training part' in value
        assert 'share their a and b' in (tmp_path / f'train{n}' / 'report.html').read_text()


def test_field_what_was_noticed_in_a_file_is_a_decision(tmp_path):
    folder = model_and_pairs(tmp_path, 60)
    frame = pd.read_csv(folder / 'data.csv')
    frame.loc[::6, 'y'] = frame.loc[::6, 'y'].str.upper()
    frame.loc[0, 'a'] = 'w1\nw2'
    frame.to_csv(folder / 'data.csv', index=False)
    with pytest.warns(UserWarning, match='names of labels that look alike'):
        job = job_of(folder, tmp_path / 'run', group=None)
    found = data_stage(job, 40, 15)
    assert found['line breaks']['value'] == '60 rows from 62 lines'
    assert found['names of labels that look alike']['value'] == "'A', 'a'; 'B', 'b'"
    assert found['names of labels that look alike']['reason']
