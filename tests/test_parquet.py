"Parquet files and Hugging Face's datasets, by the libraries themselves: what they hold becomes the table that the same rows give in CSV"
import numpy as np
import pandas as pd
import pytest

from made_up import model_and_pairs
from optkit.cli import main
from optkit.base import InputError
from optkit.table import read_frame, read_table
from optkit.frames import table_from
from optkit.store import tokenise, word_tokenizer
from optkit.base import read_json

pa = pytest.importorskip('pyarrow')
pq = pytest.importorskip('pyarrow.parquet')
TEXTS, LABELS = ['w1 w2', 'w3', 'w4 w5', 'w6'], [1, 0, 1, 0]
WORDS, TAGS = [['w1', 'w2'], ['w3'], ['w4', 'w5'], ['w6']], [[0, 1], [1], [-100, 0], [1]]


def file_of(tmp_path, columns, **kwargs):
    path = tmp_path / 'x.parquet'
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **kwargs)
    return path


LABEL_COLUMNS = {
    'int8': (pa.array(LABELS, pa.int8()), ('0', '1')), 'uint64': (pa.array(LABELS, pa.uint64()), ('0', '1')), 'double': (pa.array([1., 0., 1., 0.]), ('0', '1')), 'bool': (pa.array([True, False, True, False]), ('False', 'True')),
    'string': (pa.array(['q', 'p', 'q', 'p']), ('p', 'q')), 'large_string': (pa.array(['q', 'p', 'q', 'p'], pa.large_string()), ('p', 'q')), 'string_view': (pa.array(['q', 'p', 'q', 'p'], pa.string_view()), ('p', 'q')),
    'dictionary of strings': (pa.array(['q', 'p', 'q', 'p']).dictionary_encode(), ('p', 'q')), 'dictionary of integers': (pa.array([10, 9, 10, 9]).dictionary_encode(), ('9', '10')),
    'beyond 2**53': (pa.array([2**60 + 1, 2**60, 2**60 + 1, 2**60]), (str(2**60), str(2**60 + 1)))}

@pytest.mark.parametrize('kind', LABEL_COLUMNS)
@pytest.mark.parametrize('text', [pa.string(), pa.large_string(), pa.string_view(), 'dictionary'], ids=str)
def test_kinds_of_columns(tmp_path, kind, text):
    labels, classes = LABEL_COLUMNS[kind]
    table = read_table(file_of(tmp_path, dict(text=pa.array(TEXTS).dictionary_encode() if text == 'dictionary' else pa.array(TEXTS, text), label=labels), compression='zstd'), 'text', 'label')
    assert table.texts == TEXTS and table.labels.tolist() == LABELS and table.classes == classes
    assert len(tokenise(table, word_tokenizer(), 8, progress=False)) == 4


@pytest.mark.parametrize('labels', [pa.array([1, None, 1, 0]), pa.array([1., None, 1., 0.]), pa.array([True, None, True, False]), pa.array(['a', None, 'a', 'b']), pa.array(['a', None, 'a', 'b']).dictionary_encode(), pa.nulls(4)], ids=lambda a: str(a.type)[:10])
def test_gaps_are_named(tmp_path, labels):
    gaps = r'3 rows \(rows 1, 2, 4\)' if labels.null_count == 4 else r'1 rows \(row 2\)'
    path = file_of(tmp_path, dict(text=['a', 'b', None, 'd'], label=labels, second=['p', 'q', 'r', None]))
    with pytest.raises(InputError, match=r"x.parquet: column 'text' is empty in 1 rows \(row 3\)"): read_table(path, 'text', 'label')
    with pytest.raises(InputError, match=rf"x.parquet: column 'label' has no label in {gaps}"): read_table(path, 'text', 'label', drop_empty=True)
    if labels.null_count == 1: assert read_table(file_of(tmp_path, pa.table(dict(text=['a', None, 'c', 'd'], label=labels, second=list('pqrs')))), 'text', 'label', 'second', drop_empty=True).numbers.tolist() == [1, 3, 4]


@pytest.mark.parametrize('words, tags', [(pa.array(WORDS), pa.array(TAGS)), (pa.array(WORDS, pa.large_list(pa.large_string())), pa.array(TAGS, pa.large_list(pa.int16())))], ids=['list', 'large_list'])
def test_a_label_for_each_word(tmp_path, words, tags):
    table = read_table(file_of(tmp_path, dict(text=words, label=tags)), 'text', 'label', task='tokens')
    assert table.texts == WORDS and [l.tolist() for l in table.labels] == TAGS and table.classes == ('0', '1')
    names = pa.ListArray.from_arrays([0, 2, 3, 5, 6], pa.array(list('OPPOOP')).dictionary_encode())
    assert read_table(file_of(tmp_path, dict(text=words, label=names)), 'text', 'label', task='tokens').classes == ('O', 'P')
    with pytest.raises(InputError, match=r'no label in 1 rows \(row 2\)'): read_table(file_of(tmp_path, dict(text=words, label=[[0, 1], [None], [1, 0], [1]])), 'text', 'label', task='tokens')
    with pytest.raises(InputError, match=r'0 labels for 1 words \(row 2\)'): read_table(file_of(tmp_path, dict(text=words, label=[[0, 1], None, [1, 0], [1]])), 'text', 'label', task='tokens')


def test_regression_and_groups(tmp_path):
    path = file_of(tmp_path, dict(text=TEXTS, label=pa.array([1.5, .25, -2, 0], pa.float32()), doc=pa.array([7, 7, 3, None]), gap=[1., None, 2., 3.]))
    assert read_table(path, 'text', 'label', task='regression').labels.tolist() == [1.5, .25, -2, 0]
    with pytest.raises(InputError, match=r"'gap' holds no number in 1 rows \(row 2: ''\)"): read_table(path, 'text', 'gap', task='regression')
    with pytest.raises(InputError, match=r"'doc' has no group in 1 rows \(row 4\)"): read_table(path, 'text', 'label', group='doc', task='regression')


def test_what_pandas_made_of_the_columns(tmp_path):
    "A named index is a column of the file, and a name that was a number reads as text; an index without a name is none"
    frame = pd.DataFrame(dict(text=TEXTS, label=list('baba')), index=[5, 5, 7, 9])
    for made, names in ((frame, ('text', 'label')), (frame.set_index('text'), ('text', 'label')), (frame.assign(label=frame.label.astype('category')), ('text', 'label')), (frame.set_axis([0, 1], axis=1), ('0', '1'))):
        made.to_parquet(tmp_path / 'x.parquet')
        table = read_table(tmp_path / 'x.parquet', *names)
        assert table.texts == TEXTS and table.classes == ('a', 'b') and table.labels.tolist() == LABELS


def test_what_is_no_parquet_file(tmp_path):
    whole = file_of(tmp_path, dict(text=TEXTS, label=LABELS)).read_bytes()
    path = tmp_path / 'x.parquet'
    for content, said in ((b'text,label\na,b\n', "no Parquet file: it begins with b'text'"), (b'', 'the file is empty'), (b'PAR1', 'cannot be read'), (whole[:-40], 'cannot be read'), (whole[:4] + b'\xff' * 60 + whole[64:], 'cannot be read')):
        path.write_bytes(content)
        with pytest.raises(InputError, match=said) as caught: read_frame(path)
        assert len(str(caught.value).splitlines()) == 1 and 'x.parquet' in str(caught.value)
    file_of(tmp_path, pa.Table.from_arrays([pa.array(TEXTS), pa.array(LABELS), pa.array(TEXTS)], names=['text', 'label', 'text']))
    with pytest.raises(InputError, match="x.parquet: column 'text' stands twice"): read_frame(path)
    file_of(tmp_path, dict(text=pa.array([], pa.string())))
    with pytest.raises(InputError, match='x.parquet: no rows'): read_frame(path)


def test_damage_is_said_in_one_error(tmp_path):
    "Whatever byte of a file is another one, it reads or raises `InputError`"
    whole, rng = file_of(tmp_path, dict(text=TEXTS * 20, label=LABELS * 20, kind=pa.array(['a', 'b'] * 40).dictionary_encode())).read_bytes(), np.random.default_rng(0)
    refused = 0
    for at in rng.integers(4, len(whole) - 8, 150):
        damaged = bytearray(whole); damaged[at] ^= int(rng.integers(1, 256))
        (tmp_path / 'x.parquet').write_bytes(damaged)
        try: read_frame(tmp_path / 'x.parquet')
        except InputError: refused += 1
    assert refused > 50


def test_a_job_and_a_training_on_a_parquet_file(tmp_path, capsys):
    "They end as on the same rows in CSV"
    folder = model_and_pairs(tmp_path, 160)
    frame = pd.read_csv(folder / 'data.csv')
    file_of(folder, pa.table(dict(a=frame.a, b=pa.array(frame.b, pa.large_string()), y=pa.array(frame.y).dictionary_encode())))
    found = []
    for name in ('x.parquet', 'data.csv'):
        on = ['--data', str(folder / name), '--text', 'a', '--pair', 'b', '--label', 'y', '--model', str(folder / 'model'), '--quiet']
        assert main(['train', *on, '--out', str(tmp_path / f'train-{name}'), 'epochs=1', 'precision=fp32']) == 0
        found.append(read_json(tmp_path / f'train-{name}' / 'train.json')['history'][-1]['valid_loss'])
        assert main(['tune', *on, '--out', str(tmp_path / f'run-{name}'), '--trials', '2', '--epochs', '1', '--folds', '2', '--no-ladder', '--precision', 'fp32', '--space', 'lr=1e-4..1e-3:log']) == 0
        found.append([t['value'] for t in read_json(tmp_path / f'run-{name}' / 'study.json')['trials']])
    assert found[:2] == found[2:] and len(found[1]) == 2
    capsys.readouterr()
    (folder / 'bad.parquet').write_text('a,b,y\nx,y,z\n')
    for command in ('train', 'tune'):
        assert main([command, *on, '--data', str(folder / 'bad.parquet'), '--out', str(tmp_path / 'bad')]) == 2
        err = capsys.readouterr().err
        assert 'no Parquet file' in err and len(err.splitlines()) == 1 and not (tmp_path / 'bad').exists()


# --- datasets

@pytest.fixture
def ds(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    datasets.disable_progress_bars()
    return datasets


def named(ds, labels=LABELS, texts=TEXTS):
    return ds.Dataset.from_dict(dict(text=texts, second=list('pqrs'), label=labels), features=ds.Features(dict(text=ds.Value('string'), second=ds.Value('string'), label=ds.ClassLabel(names=['neg', 'pos']))))


def tagged(ds):
    tags = getattr(ds, 'List', ds.Sequence)
    return ds.Dataset.from_dict(dict(text=WORDS, label=TAGS), features=ds.Features(dict(text=tags(ds.Value('string')), label=tags(ds.ClassLabel(names=['O', 'P', 'Q'])))))


def test_class_names_come_along(ds, tmp_path):
    "From a split, a stream, and the Parquet file that either writes; -1 is no label"
    split = named(ds)
    split.to_parquet(tmp_path / 'x.parquet')
    for table in (table_from(split, pair='second'), table_from(split.to_iterable_dataset(), pair='second'), read_table(tmp_path / 'x.parquet', 'text', 'label', 'second'), table_from(read_frame(tmp_path / 'x.parquet'), pair='second')):
        assert table.classes == ('neg', 'pos') and table.labels.tolist() == LABELS and table.texts == TEXTS and table.pairs == list('pqrs')
    tagged(ds).to_parquet(tmp_path / 'y.parquet')
    for table in (table_from(tagged(ds), task='tokens'), table_from(tagged(ds).to_iterable_dataset(), task='tokens'), read_table(tmp_path / 'y.parquet', 'text', 'label', task='tokens')):
        assert table.classes == ('O', 'P') and [l.tolist() for l in table.labels] == TAGS and table.texts == WORDS
    for labels in ([1, -1, 1, 0], [1, None, 1, 0]):
        named(ds, labels).to_parquet(tmp_path / 'x.parquet')
        for read in (lambda: table_from(named(ds, labels)), lambda: table_from(named(ds, labels).to_iterable_dataset()), lambda: read_table(tmp_path / 'x.parquet', 'text', 'label')):
            with pytest.raises(InputError, match=r"'label' has no label in 1 rows \(row 2\)"): read()


def test_views_of_a_split(ds):
    "Rows that were chosen, in their order"
    split = named(ds)
    for view, rows in ((split.select([3, 0, 2]), [3, 0, 2]), (split.filter(lambda r: r['text'] != 'w3'), [0, 2, 3]), (split.shard(2, 1), [2, 3]), (split.sort('label'), [1, 3, 0, 2]), (ds.concatenate_datasets([split, split.select([1])]), [0, 1, 2, 3, 1]),
                       (split.to_iterable_dataset().filter(lambda r: r['text'] != 'w3'), [0, 2, 3]), (split.to_iterable_dataset().take(2), [0, 1]), (split.cast_column('text', ds.Value('large_string')), [0, 1, 2, 3])):
        table = table_from(view)
        assert table.texts == [TEXTS[n] for n in rows] and table.labels.tolist() == [LABELS[n] for n in rows] and table.classes == ('neg', 'pos')
    for empty in (split.filter(lambda r: False), split.to_iterable_dataset().filter(lambda r: False)):
        with pytest.raises(InputError, match='no rows'): table_from(empty)


def test_formats_do_not_matter_and_transforms_do(ds):
    split, gap = named(ds), ds.Dataset.from_dict(dict(text=TEXTS, label=[2**60, None, 2**60 + 1, 2**60]))
    for form in (dict(type='torch'), dict(type='numpy'), dict(type='pandas'), dict(type='arrow'), dict(type='torch', columns=['label']), dict(type=None, columns=['second'])):
        assert table_from(split.with_format(**form)).labels.tolist() == LABELS and table_from(tagged(ds).with_format(form['type']), task='tokens').texts == WORDS
        with pytest.raises(InputError, match=r"no label in 1 rows \(row 2\)"): table_from(gap.with_format(form['type']))
        assert len(table_from(gap.select([0, 2, 3]).with_format(form['type'])).classes) == 2
        assert table_from(split.to_iterable_dataset().with_format(form['type'])).classes == ('neg', 'pos')
    louder = split.with_transform(lambda rows: dict(rows, text=[t.upper() for t in rows['text']]))
    assert table_from(louder).texts == [t.upper() for t in TEXTS]
    with pytest.raises(InputError, match="leaves out column 'text'"): table_from(split.with_transform(lambda rows: dict(label=rows['label'])))


def test_several_splits_need_a_choice(ds):
    split = named(ds)
    for several in (ds.DatasetDict(train=split, test=split), ds.IterableDatasetDict(train=split.to_iterable_dataset(), test=split.to_iterable_dataset())):
        with pytest.raises(InputError, match="splits 'train', 'test'; choose one"): table_from(several)
        assert len(table_from(several['train'])) == 4
    for one in (split, split.to_iterable_dataset()):
        with pytest.raises(InputError, match="no column 'txt'; it has 'text', 'second', 'label'"): table_from(one, 'txt')


def test_a_store_from_a_dataset_is_that_of_its_rows(ds):
    split, tokenizer = named(ds), word_tokenizer()
    stores = [tokenise(table_from(data, pair='second'), tokenizer, 8, progress=False) for data in (split, split.to_iterable_dataset(), dict(text=TEXTS, second=list('pqrs'), label=['pos' if n else 'neg' for n in LABELS]))]
    for store in stores[:2]: assert store.tokens.equal(stores[2].tokens) and store.labels.equal(stores[2].labels) and store.classes == stores[2].classes
    rows = table_from(split['text'], labels=split['label'])
    assert rows.texts == TEXTS and rows.labels.tolist() == LABELS
