"What several test files begin with"
import pandas as pd

from optkit.store import example_table, word_tokenizer
from optkit.models import example_model


def model_and_pairs(folder, rows, **columns):
    "A tiny model in `folder`/model and a table of pairs, with more columns where given, in `folder`/data.csv; `folder` again"
    example_model().save_pretrained(folder / 'model')
    word_tokenizer().save_pretrained(folder / 'model')
    table = example_table(rows)
    pd.DataFrame(dict(a=table.texts, b=table.pairs, y=[table.classes[n] for n in table.labels]) | columns).to_csv(folder / 'data.csv', index=False)
    return folder
