"""A real fine-tune beside Hugging Face Trainer: MiniLM on pairs of documents, grouped folds, the same seeds.

    python bench/minilm_folds.py --pack FOLDER     # copies what a machine without packages and network needs: weights in 16 bits (45 MB), vocabulary, rows
    OPTKIT_BENCH=FOLDER python bench/minilm_folds.py --limit 230 --state STATE    # again, until it says that all is done
    python bench/minilm_folds.py --dry --out /some/folder   # tiny, on a CPU, with what is installed here

Both start from the same weights and see the same folds, learning rate, schedule, decay, clip and number of updates; each
trains all epochs and is scored on its fold with its last weights. In each fold one trains after the other, in turns that
alternate, so a ratio is of two runs a minute apart on one machine. Seconds are those of the training call alone: building,
loading and scoring are not in them, for either.

A call ends within `--limit` seconds, between two folds; STATE then holds each fold that both have done, and the same call
goes on with it. The record is written after each fold, of the folds that are done.
"""
import argparse, gzip, json, os, shutil, sys, tempfile, time
from pathlib import Path

BEGUN = time.perf_counter() # imports take seconds of the limit too

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from optkit.data import table_from, tokenise
from optkit.engine import load_model, load_tokenizer, quiet
from optkit.folds import repeated_folds
from optkit.hardware import detect
from optkit.metrics import score
from optkit.timing import Record, median_ratio, quantiles, read_json, save_records, write_json
from optkit.trainer import TrainConfig, Trainer, make_engine

ROWS = 'hoc_pairs.jsonl.gz'
SHARED = Path(__file__).resolve().parents[2] / 'shared' / 'data' / 'hoc_pairs' / ROWS


def pack(folder):
    "What the run needs, in one folder"
    from optkit.engine import demo_model_folder
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        from transformers import AutoModel
        model = AutoModel.from_pretrained(demo_model_folder())
        model.half().save_pretrained(folder / 'model')
        load_tokenizer('demo').save_pretrained(folder / 'model')
    shutil.copyfile(SHARED, folder / ROWS)
    print(f'{folder}: {sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20:.0f} MiB')


def found():
    "Where weights and rows are: the folder of OPTKIT_BENCH, else what is installed here"
    if home := os.environ.get('OPTKIT_BENCH'): return str(Path(home) / 'model'), Path(home) / ROWS
    return 'demo', SHARED


def read_rows(path, documents, seed=0):
    "Rows of that many documents, drawn with a seed"
    rows = [json.loads(line) for line in gzip.open(path, 'rt')]
    groups = sorted({r['group'] for r in rows})
    kept = set(np.random.default_rng(seed).permutation(groups)[:documents].tolist())
    return [r for r in rows if r['group'] in kept]


class Tokens(torch.utils.data.Dataset):
    "Rows of a store as Hugging Face Trainer takes them"
    def __init__(self, store, rows):
        split = lambda flat: [flat[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:])]
        ids, types = split(store.tokens), split(store.type_ids)
        self.items = [dict(input_ids=ids[r], token_type_ids=types[r], attention_mask=[1] * len(ids[r]), labels=int(store.labels[r])) for r in rows]
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]


def theirs(model, tokenizer, store, train, valid, a, seed, half):
    "Hugging Face Trainer with its best flags that keep the samples of a step; (logits, seconds)"
    from transformers import DataCollatorWithPadding, Trainer as HFTrainer, TrainingArguments
    args = TrainingArguments(output_dir=tempfile.gettempdir(), per_device_train_batch_size=a.batch, per_device_eval_batch_size=128, num_train_epochs=a.epochs, learning_rate=a.lr, weight_decay=.01, lr_scheduler_type='linear',
                             warmup_steps=int(np.ceil(.06 * a.epochs * -(-len(train) // a.batch))), max_grad_norm=1., bf16=half, optim='adamw_torch_fused', seed=seed, save_strategy='no', eval_strategy='no', report_to='none',
                             logging_strategy='no', disable_tqdm=True, dataloader_num_workers=0 if a.dry else 4, dataloader_pin_memory=not a.dry, use_cpu=not torch.cuda.is_available())
    trainer = HFTrainer(model=model, args=args, train_dataset=Tokens(store, train), data_collator=DataCollatorWithPadding(tokenizer), processing_class=tokenizer)
    wait()
    start = time.perf_counter()
    trainer.train()
    wait()
    seconds = time.perf_counter() - start
    return torch.from_numpy(trainer.predict(Tokens(store, valid)).predictions).float(), seconds


def ours(engine, store, train, valid, config):
    "optkit; (logits, seconds)"
    trainer = Trainer(engine, store, config)
    wait()
    start = time.perf_counter()
    trainer.refit(train)
    wait()
    seconds = time.perf_counter() - start
    return engine.predict(trainer.store, valid, 128).cpu(), seconds


def wait():
    if torch.cuda.is_available(): torch.cuda.synchronize()


def run(a):
    begun, hardware, (source, path) = BEGUN, detect(), found()
    tokenizer = load_tokenizer(source)
    rows = read_rows(path, a.documents)
    table = table_from(rows, 'premise', 'label', 'hypothesis', group='group')
    store = tokenise(table, tokenizer, a.length, progress=False)
    half = hardware.device == 'cuda' and hardware.gpu.capability >= (8, 0)
    config = TrainConfig(epochs=a.epochs, lr=a.lr, effective_batch=a.batch, layout='padded', precision='bf16' if half else 'fp32', warmup=.06, eval_batch=128, fast=a.fast)
    folds = repeated_folds(np.arange(len(store)), table.labels, a.folds, groups=table.groups)
    engine = make_engine(load_model(source, table.classes, tokenizer), config, hardware)
    fresh = {k: v.detach().cpu().clone() for k, v in engine.model.state_dict().items()}
    state = State(a, hardware, store, folds)
    missing = [(seed, n) for seed in range(a.seeds) for n in range(a.folds) if (seed, n) not in state.done]
    print(f'{hardware.card}: {len(store)} rows, {len(folds)} folds; {len(state.done)} of {a.seeds * a.folds} are done; prepared in {time.perf_counter() - begun:.1f} s', flush=True)
    if missing:
        _, took = ours(engine, store, folds[0][0][:4 * a.batch] if not a.fast else folds[0][0], folds[0][1][:8], config) # kernels are chosen and loaded once; the fast engine builds its shapes
        print(f'first run {took:.1f} s' + (f', {engine}' if a.fast else ''), flush=True)
    pairs = []
    for seed, n in missing:
        left = a.limit - (time.perf_counter() - begun)
        if left < (1.2 * max(pairs) if pairs else 5.): print(f'{left:.0f} s left: not done yet, the same call goes on with --state', flush=True); break
        (train, valid), start, fold = folds[n], time.perf_counter(), {}
        for name in (('hf', 'optkit'), ('optkit', 'hf'))[(seed + n) % 2]:
            if name == 'hf':
                model = load_model(source, table.classes, tokenizer)
                model.load_state_dict(fresh)
                logits, took = theirs(model, tokenizer, store, train, valid, a, seed, half)
            else: logits, took = ours(engine, store, train, valid, TrainConfig(**json.loads(config.to_json()) | dict(seed=seed)))
            fold[name] = dict(seconds=took, logits=logits.float().tolist())
            values = metrics(logits, store.labels[valid])
            print(f'seed {seed} fold {n} {name:6} {took:6.1f} s, {a.epochs * len(train) / took:6.0f} rows/s, F1 {values["pair_f1"]:.4f}, AUROC {values["auroc"]:.4f}, loss {values["loss"]:.4f}', flush=True)
        pairs.append(time.perf_counter() - start)
        state.add(seed, n, fold)
        save(a, hardware, store, folds, state)
    if len(state.done) == a.seeds * a.folds: save(a, hardware, store, folds, state); print('all done')


class State:
    "The folds that both have done, by seed and fold; kept in a folder, for the settings, card and versions of this call"
    def __init__(self, a, hardware, store, folds):
        self.path = Path(a.state) / f'minilm-folds{"-fast" if a.fast else ""}.json' if a.state else None
        own = {k: v for k, v in vars(a).items() if k not in ('out', 'pack', 'limit', 'state')}
        self.made_of = dict(own, card=hardware.card, torch=hardware.software.torch, transformers=hardware.software.transformers, rows=len(store), rows_of_fold_0=len(folds[0][0]))
        old = read_json(self.path) if self.path and self.path.is_file() else None
        if old and (odd := [k for k in self.made_of if old['made_of'].get(k) != self.made_of[k]]): raise SystemExit(f'{self.path} is of another {", ".join(odd)}: take another folder')
        self.done = {tuple(map(int, k.split('-'))): fold for k, fold in (old['folds'] if old else {}).items()}

    def add(self, seed, n, fold):
        self.done[seed, n] = fold
        if self.path: write_json(self.path, dict(made_of=self.made_of, folds={f'{s}-{n}': f for (s, n), f in self.done.items()}))


def metrics(logits, labels):
    from sklearn.metrics import f1_score
    return score(logits, labels, custom=lambda values, truth: f1_score(truth, values.argmax(1))) | dict(pair_f1=float(f1_score(labels, logits.argmax(1))))


def save(a, hardware, store, folds, state):
    "A record for each, with its scores by fold, and pooled for each seed whose folds are all done"
    keys = sorted(state.done)
    whole = [seed for seed in range(a.seeds) if all((seed, n) in state.done for n in range(a.folds))]
    rows_of = np.array([a.epochs * len(folds[n][0]) for _, n in keys])
    tokens_of = np.array([a.epochs * int(store.lengths[folds[n][0]].sum()) for _, n in keys])
    labels = lambda n: store.labels[folds[n][1]]
    records, tables = [], {}
    for name in ('hf', 'optkit'):
        took = np.array([state.done[k][name]['seconds'] for k in keys])
        ratio = median_ratio(np.array([state.done[k]['hf']['seconds'] for k in keys]) / took)
        logits = {k: torch.tensor(state.done[k][name]['logits']) for k in keys}
        scores = [metrics(logits[k], labels(k[1])) for k in keys]
        pooled = [metrics(torch.cat([logits[seed, n] for n in range(a.folds)]), torch.cat([labels(n) for n in range(a.folds)])) for seed in whole]
        tables[name] = dict(folds=scores, pooled=pooled)
        f1 = np.array([p['pair_f1'] for p in pooled or scores])
        records.append(Record(name, 'hf', ratio=vars(ratio) if name != 'hf' else dict(p50=1., low=1., high=1.), samples_per_s=quantiles(rows_of / took), tokens_per_s=quantiles(tokens_of / took), seconds=quantiles(took),
                              loss=dict(value=float(np.mean([s['loss'] for s in scores])), pair_f1=float(f1.mean()), pair_f1_spread=float(f1.std(ddof=1)) if len(f1) > 1 else None), repeats=len(keys), confidence=min(.99, 1 - 2. ** (1 - len(keys))),
                              label='exact' if name == 'hf' else 'rounding', stopped=f'{len(keys)} of {a.seeds * a.folds} folds, {len(whole)} seeds of {a.seeds} whole'))
    card = f'{hardware.card}-dry' if a.dry else hardware.card
    path = Path(a.out) / f'minilm-folds{"-fast" if a.fast else ""}-{card}.json'
    command = 'python bench/minilm_folds.py' + ''.join(f' --{k} {getattr(a, k)}' for k in ('documents', 'length', 'epochs', 'batch', 'lr', 'folds', 'seeds')) + (' --fast' if a.fast else '') + (' --dry' if a.dry else '')
    save_records(path, records, hardware, command, workload='MiniLM (22.7M) on hoc_pairs, grouped folds', rows_total=len(store), folds_done=[list(k) for k in keys], scores=tables)
    difference = [o['pair_f1'] - h['pair_f1'] for o, h in zip(tables['optkit']['pooled'], tables['hf']['pooled'])]
    print(f'{path}, {records[1].stopped}: {records[1].ratio["p50"]:.2f} times [{records[1].ratio["low"]:.2f}, {records[1].ratio["high"]:.2f}]; pooled F1 {records[1].loss["pair_f1"]:.4f} against {records[0].loss["pair_f1"]:.4f}, differences {[round(d, 4) for d in difference]}')


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in dict(documents=400, length=256, epochs=3, batch=32, lr=1e-4, folds=5, seeds=3, limit=230.).items(): p.add_argument(f'--{name}', type=type(value), default=value)
    p.add_argument('--out', default='bench/results'); p.add_argument('--pack'); p.add_argument('--state', help='folder that keeps the folds that are done'); p.add_argument('--dry', action='store_true')
    p.add_argument('--fast', action='store_true', help='on the fast engine; written as minilm-folds-fast')
    a = p.parse_args(argv)
    if a.dry: a.documents, a.length, a.epochs, a.folds, a.seeds, a.batch = 12, 48, 1, 3, 2, 16
    return a


if __name__ == '__main__':
    a = parse()
    pack(a.pack) if a.pack else run(a)
