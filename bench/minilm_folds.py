"""A real fine-tune beside Hugging Face Trainer: MiniLM on pairs of documents, grouped folds, the same seeds.

    python bench/minilm_folds.py --pack FOLDER     # copies what a machine without packages and network needs: weights in 16 bits (45 MB), vocabulary, rows
    OPTKIT_BENCH=FOLDER python bench/minilm_folds.py --limit 230 --state STATE    # again, until it says that all is done
    python bench/minilm_folds.py --dry --out /some/folder   # tiny, on a CPU, with what is installed here

Three train on each fold: Hugging Face Trainer, optkit in eager mode and optkit on its fast engine (`--without-fast`: only the
first two). All start from the same weights and see the same folds, learning rate, schedule, decay, clip and number of updates;
each trains all epochs and is scored on its fold with its last weights. They train one after the other, in an order that
rotates, so a ratio is of runs half a minute apart on one machine. Seconds are those of the training call alone: building,
loading and scoring are not in them, for any.

The rows are pairs of a document and a hypothesis: all that are true and `--negatives` untrue ones for each of them. The
learning rate is the best of `--lrs` on the first two folds, each tried with a seed that the comparison does not use.

A call ends within `--limit` seconds, between two folds; STATE then holds each fold that all have done, and the same call
goes on with it. The record is written after each fold, of the folds that are done.

    OPTKIT_BENCH=FOLDER python bench/minilm_folds.py --scores --first-seed 3 --seeds 12 --lrs 2e-4 --processes 8 --limit 400 --state STATE

Scores alone, of more seeds: `--processes` of them train beside each other on one device, which says nothing about time, and
the record holds none (minilm-scores).
"""
import argparse, gzip, json, os, shutil, subprocess, sys, tempfile, time
from collections import Counter
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


def thinned(rows, negatives, hypotheses=0, seed=0):
    "Pairs of the hypotheses that are true most often (0: of all): all positive ones of a document, and so many negative ones for each of them, at least one (0: all)"
    if hypotheses:
        often = [h for h, _ in Counter(r['hypothesis'] for r in rows if r['label']).most_common(hypotheses)]
        rows = [r for r in rows if r['hypothesis'] in often]
    if not negatives: return rows
    rng, out, by = np.random.default_rng(seed), [], {}
    for r in rows: by.setdefault(r['group'], ([], []))[int(r['label'])].append(r)
    for no, yes in by.values(): out += yes + [no[n] for n in sorted(rng.permutation(len(no))[:max(1, negatives * len(yes))])]
    return out


class Tokens(torch.utils.data.Dataset):
    "Rows of a store as Hugging Face Trainer takes them"
    def __init__(self, store, rows):
        split = lambda flat: [flat[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:])]
        ids, types = split(store.tokens), split(store.type_ids)
        self.items = [dict(input_ids=ids[r], token_type_ids=types[r], attention_mask=[1] * len(ids[r]), labels=int(store.labels[r])) for r in rows]
    def __len__(self): return len(self.items)
    def __getitem__(self, n): return self.items[n]


def theirs(model, tokenizer, store, train, valid, a, lr, seed, half):
    "Hugging Face Trainer with its best flags that keep the samples of a step; (logits, seconds)"
    from transformers import DataCollatorWithPadding, Trainer as HFTrainer, TrainingArguments
    args = TrainingArguments(output_dir=tempfile.gettempdir(), per_device_train_batch_size=a.batch, per_device_eval_batch_size=128, num_train_epochs=a.epochs, learning_rate=lr, weight_decay=.01, lr_scheduler_type='linear',
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


HF, PLAIN, FAST = 'hf', 'optkit', 'optkit fast'


def names(a): return [HF, PLAIN] if a.without_fast else [HF, PLAIN, FAST]


class Setting:
    "Rows, folds, weights and an engine for each of ours"
    def __init__(self, a):
        self.a, self.hardware, (self.source, path) = a, detect(), found()
        self.tokenizer = load_tokenizer(self.source)
        self.table = table_from(thinned(read_rows(path, a.documents), a.negatives, a.hypotheses), 'premise', 'label', 'hypothesis', group='group')
        self.store = tokenise(self.table, self.tokenizer, a.length, progress=False)
        self.half = self.hardware.device == 'cuda' and self.hardware.gpu.capability >= (8, 0)
        self.config = dict(epochs=a.epochs, effective_batch=a.batch, layout='padded', precision='bf16' if self.half else 'fp32', warmup=.06, eval_batch=128)
        self.folds = repeated_folds(np.arange(len(self.store)), self.table.labels, a.folds, groups=self.table.groups)
        self.fresh = None
        self.fresh = {k: v.clone() for k, v in self.model().state_dict().items()}
        self.engines = {name: make_engine(self.model(), TrainConfig(**self.config, fast=name == FAST), self.hardware) for name in names(a)[1:]}

    def model(self):
        "A model of its own, with the weights and the head that all start from"
        model = load_model(self.source, self.table.classes, self.tokenizer)
        if self.fresh: model.load_state_dict(self.fresh)
        return model

    def train(self, name, n, lr, seed, rows=None):
        "Logits of the validation rows of a fold after training on the others, and seconds"
        (train, valid), a = self.folds[n], self.a
        if name != HF: return ours(self.engines[name], self.store, train[:rows], valid, TrainConfig(**self.config, lr=lr, seed=seed, fast=name == FAST))
        return theirs(self.model(), self.tokenizer, self.store, train, valid, a, lr, seed, self.half)

    def scores(self, logits, n): return metrics(logits, self.store.labels[self.folds[n][1]])

    def best_lr(self, state):
        "The learning rate of `--lrs` with the best mean F1 on the first two folds, each under a seed of its own; what is known is kept"
        if len(self.a.lrs) == 1: return self.a.lrs[0]
        name = names(self.a)[-1]
        for lr in self.a.lrs:
            if str(lr) in state.tried: continue
            both = [self.scores(self.train(name, n, lr, 1000 + n)[0], n) for n in range(2)]
            state.try_(lr, {k: float(np.mean([s[k] for s in both])) for k in ('pair_f1', 'auroc', 'loss')})
            print(f'learning rate {lr:g}: F1 {state.tried[str(lr)]["pair_f1"]:.4f}, AUROC {state.tried[str(lr)]["auroc"]:.4f}', flush=True)
        return max(self.a.lrs, key=lambda lr: state.tried[str(lr)]['pair_f1'])


def run(a):
    begun, s = BEGUN, Setting(a)
    state = State(a, s.hardware, s.store, s.folds)
    missing = [k for k in part_of(a) if k not in state.done]
    print(f'{s.hardware.card}: {len(s.store)} rows, {len(s.folds)} folds; {len(state.done)} of {len(part_of(a))} are done; prepared in {time.perf_counter() - begun:.1f} s', flush=True)
    for name, engine in s.engines.items() if missing else ():
        _, took = s.train(name, 0, 1e-5, 0, rows=None if name == FAST else 4 * a.batch) # kernels are chosen and loaded once; the fast engine builds its shapes
        print(f'{name}: first run {took:.1f} s, {engine}', flush=True)
    lr, turns = s.best_lr(state) if missing else None, []
    for seed, n in missing:
        left = a.limit - (time.perf_counter() - begun)
        if left < (1.2 * max(turns) if turns else 5.): print(f'{left:.0f} s left: not done yet, the same call goes on with --state', flush=True); break
        start, fold, order = time.perf_counter(), {}, names(a)
        first = (seed + n) % len(order)
        for name in order[first:] + order[:first]:
            logits, took = s.train(name, n, lr, seed)
            fold[name] = dict(seconds=took, logits=logits.float().tolist())
            values = s.scores(logits, n)
            print(f'seed {seed} fold {n} {name:11} {took:6.1f} s, {a.epochs * len(s.folds[n][0]) / took:6.0f} rows/s, F1 {values["pair_f1"]:.4f}, AUROC {values["auroc"]:.4f}, loss {values["loss"]:.4f}', flush=True)
        turns.append(time.perf_counter() - start)
        state.add(seed, n, fold)
        if not a.part: save(a, s.hardware, s.store, s.folds, state, lr)
    if len(state.done) == len(part_of(a)): print('all done')


def part_of(a):
    "Seeds and folds of this call: all, or those of its part"
    every = [(seed, n) for seed in range(a.first_seed, a.first_seed + a.seeds) for n in range(a.folds)]
    if not a.part: return every
    number, count = map(int, a.part.split('/'))
    return every[number::count]


def scores(a):
    "Parts beside each other, each a process with a state of its own, then one record of what they have done"
    if not a.state: raise SystemExit('--scores needs --state, a folder for what each process has done')
    if len(a.lrs) > 1: raise SystemExit(f'--scores needs one learning rate, not {len(a.lrs)}: --lrs 2e-4')
    left = a.limit - (time.perf_counter() - BEGUN)
    own = [sys.executable, __file__, *command_of(a).split()[2:], '--limit', str(left), '--state', a.state]
    parts = [subprocess.Popen([*own, '--part', f'{n}/{a.processes}'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for n in range(a.processes)]
    try: said = [p.communicate()[0] for p in parts]
    finally:
        for p in parts: p.kill()
    for n, (p, text) in enumerate(zip(parts, said)): print(f'part {n}:', (text.strip().splitlines() or ['nothing'])[-1], '' if p.returncode == 0 else f'(exit {p.returncode})')
    return gather(a)


def gather(a):
    "The record of what all parts have done; whether that is everything"
    hardware, (source, path) = detect(), found()
    tokenizer = load_tokenizer(source)
    table = table_from(thinned(read_rows(path, a.documents), a.negatives, a.hypotheses), 'premise', 'label', 'hypothesis', group='group')
    store = tokenise(table, tokenizer, a.length, progress=False)
    folds = repeated_folds(np.arange(len(store)), table.labels, a.folds, groups=table.groups)
    state, part = State(a, hardware, store, folds), a.part
    for n in range(a.processes):
        a.part = f'{n}/{a.processes}'
        state.done |= State(a, hardware, store, folds).done
    a.part = part
    if state.done: save(a, hardware, store, folds, state, a.lrs[0])
    print(f'{len(state.done)} of {a.seeds * a.folds} folds;', 'all done' if len(state.done) == a.seeds * a.folds else 'not done yet, the same call goes on')


class State:
    "The folds that all have done, by seed and fold, and the learning rates tried; kept in a folder, for the settings, card and versions of this call"
    def __init__(self, a, hardware, store, folds):
        self.path = Path(a.state) / f'minilm-folds{"-part" + a.part.replace("/", "of") if a.part else ""}.json' if a.state else None
        own = {k: v for k, v in vars(a).items() if k not in ('out', 'pack', 'limit', 'state', 'part', 'processes', 'scores')}
        self.made_of = dict(own, card=hardware.card, torch=hardware.software.torch, transformers=hardware.software.transformers, rows=len(store), rows_of_fold_0=len(folds[0][0]))
        old = read_json(self.path) if self.path and self.path.is_file() else None
        if old and (odd := [k for k in self.made_of if old['made_of'].get(k) != self.made_of[k]]): raise SystemExit(f'{self.path} is of another {", ".join(odd)}: take another folder')
        self.done, self.tried = {tuple(map(int, k.split('-'))): fold for k, fold in (old['folds'] if old else {}).items()}, old['tried'] if old else {}

    def add(self, seed, n, fold):
        self.done[seed, n] = fold
        self._write()

    def try_(self, lr, scores):
        self.tried[str(lr)] = scores
        self._write()

    def _write(self):
        if self.path: write_json(self.path, dict(made_of=self.made_of, tried=self.tried, folds={f'{s}-{n}': f for (s, n), f in self.done.items()}))


def metrics(logits, labels):
    from sklearn.metrics import f1_score
    return score(logits, labels, custom=lambda values, truth: f1_score(truth, values.argmax(1))) | dict(pair_f1=float(f1_score(labels, logits.argmax(1))))


def save(a, hardware, store, folds, state, lr):
    "A record for each, with its scores by fold, and pooled for each seed whose folds are all done"
    keys = sorted(state.done)
    whole = [seed for seed in range(a.first_seed, a.first_seed + a.seeds) if all((seed, n) in state.done for n in range(a.folds))]
    rows_of = np.array([a.epochs * len(folds[n][0]) for _, n in keys])
    tokens_of = np.array([a.epochs * int(store.lengths[folds[n][0]].sum()) for _, n in keys])
    labels = lambda n: store.labels[folds[n][1]]
    records, tables = [], {}
    for name in names(a):
        took = np.array([state.done[k][name]['seconds'] for k in keys])
        ratio = median_ratio(np.array([state.done[k][HF]['seconds'] for k in keys]) / took)
        logits = {k: torch.tensor(state.done[k][name]['logits']) for k in keys}
        scores = [metrics(logits[k], labels(k[1])) for k in keys]
        pooled = [metrics(torch.cat([logits[seed, n] for n in range(a.folds)]), torch.cat([labels(n) for n in range(a.folds)])) for seed in whole]
        tables[name] = dict(folds=scores, pooled=pooled)
        f1 = np.array([p['pair_f1'] for p in pooled or scores])
        lost = np.array([p['pair_f1'] - h['pair_f1'] for p, h in zip(pooled, tables[HF]['pooled'])])
        loss = dict(value=float(np.mean([s['loss'] for s in scores])), pair_f1=float(f1.mean()), pair_f1_spread=float(f1.std(ddof=1)) if len(f1) > 1 else None)
        if name != HF:
            of_folds = np.array([s['pair_f1'] - h['pair_f1'] for s, h in zip(scores, tables[HF]['folds'])])
            loss |= dict(pair_f1_differences=lost.tolist(), pair_f1_difference=float(lost.mean()) if len(lost) else None, se_of_folds=float(of_folds.std(ddof=1) / np.sqrt(len(of_folds))) if len(of_folds) > 1 else None)
        timed = {} if a.scores else dict(ratio=vars(ratio) if name != HF else dict(p50=1., low=1., high=1.), samples_per_s=quantiles(rows_of / took), tokens_per_s=quantiles(tokens_of / took), seconds=quantiles(took))
        records.append(Record(name, HF, **timed, loss=loss, repeats=len(keys), confidence=None if a.scores else min(.99, 1 - 2. ** (1 - len(keys))), label='exact' if name == HF else 'rounding', stopped=f'{len(keys)} of {a.seeds * a.folds} folds, {len(whole)} seeds of {a.seeds} whole'))
    card = f'{hardware.card}-dry' if a.dry else hardware.card
    path = Path(a.out) / f'minilm-{"scores" if a.scores else "folds"}-{card}.json'
    save_records(path, records, hardware, command_of(a), workload='MiniLM (22.7M) on hoc_pairs, grouped folds', rows_total=len(store), positives=float(np.mean(store.labels.numpy())), lr=lr, lr_tried=state.tried, folds_done=[list(k) for k in keys], scores=tables)
    for r in records[1:]: print(f'{path}, {r.stopped}: {r.variant}' + ('' if a.scores else f' {r.ratio["p50"]:.2f} times [{r.ratio["low"]:.2f}, {r.ratio["high"]:.2f}]') + f'; pooled F1 {r.loss["pair_f1"]:.4f} against {records[0].loss["pair_f1"]:.4f}, differences {[round(d, 4) for d in r.loss["pair_f1_differences"]]}')


def command_of(a):
    sizes = ''.join(f' --{k.replace("_", "-")} {getattr(a, k)}' for k in SIZES) + ' --lrs ' + ' '.join(map(str, a.lrs))
    return 'python bench/minilm_folds.py' + sizes + (' --without-fast' if a.without_fast else '') + (f' --scores --processes {a.processes}' if a.scores else '') + (' --dry' if a.dry else '')


SIZES = dict(documents=1852, negatives=1, hypotheses=2, length=256, epochs=5, batch=32, folds=5, first_seed=0, seeds=3)


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items(): p.add_argument(f'--{name.replace("_", "-")}', type=int, default=value)
    p.add_argument('--lrs', type=float, nargs='+', default=[5e-5, 1e-4, 2e-4], help='learning rates to choose from')
    p.add_argument('--limit', type=float, default=230., help='seconds after which no further fold begins'); p.add_argument('--without-fast', action='store_true', help='only Hugging Face Trainer and eager mode')
    p.add_argument('--out', default='bench/results'); p.add_argument('--pack'); p.add_argument('--state', help='folder that keeps the folds that are done'); p.add_argument('--dry', action='store_true', help='tiny, whatever the sizes')
    p.add_argument('--scores', action='store_true', help='scores alone, several processes at once'); p.add_argument('--processes', type=int, default=8); p.add_argument('--part', help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.dry: a.documents, a.length, a.epochs, a.folds, a.seeds, a.batch, a.lrs = 24, 48, 1, 3, 2, 16, a.lrs[:2]
    return a


if __name__ == '__main__':
    a = parse()
    pack(a.pack) if a.pack else scores(a) if a.scores and not a.part else run(a)
