"""A real fine-tune beside Hugging Face Trainer: MiniLM on pairs of documents, grouped folds, the same seeds.

    python bench/minilm_folds.py --pack FOLDER     # copies what a machine without packages and network needs: weights in 16 bits (45 MB), vocabulary, rows
    OPTKIT_BENCH=FOLDER python bench/minilm_folds.py --limit 230 --state STATE    # again, until it says that all is done
    python bench/minilm_folds.py --dry --out /some/folder   # tiny, on a CPU, with what is installed here

Three train on each fold: Hugging Face Trainer, optkit in eager mode and optkit on its fast engine (`--without-fast`: only the
first two; `--compile`: the trainer with torch_compile too). All start from the same weights and see the same folds, learning
rate, schedule, decay, clip and number of updates; each trains all epochs and is scored on its fold with its last weights. They
train one after the other, in an order that rotates, so a ratio is of runs half a minute apart on one machine. Seconds are those
of the training call: the trainer's compiler is in them, as its users pay for it in each run; what is loaded and built once for
all folds, the fast engine's shapes too, is in `first_run_s`, seconds of a run before them all. `begin_s`: seconds of a training
call until its first step is over, so what a fold costs before it.

The rows are pairs of a document and a hypothesis: all that are true and `--negatives` untrue ones for each of them. The
learning rate is given, equal for all, and was chosen on other seeds.

A call ends within `--limit` seconds, between two folds; STATE then holds each fold that all have done, and the same call
goes on with it. The record is written after each fold, of the folds that are done.

    OPTKIT_BENCH=FOLDER python bench/minilm_folds.py --scores --seeds 12 --processes 8 --limit 400 --state STATE

Scores alone, of more seeds: `--processes` of them train beside each other on one device, which says nothing about time, and
the record holds none (minilm-scores). What each process says is in STATE.
"""
import argparse, gzip, json, os, shutil, subprocess, sys, tempfile, time
from collections import Counter
from pathlib import Path

BEGUN = time.perf_counter() # imports take seconds of the limit too

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from optkit.frames import table_from
from optkit.store import tokenise
from optkit.models import load_model, load_tokenizer, quiet
from optkit.folds import repeated_folds
from optkit.hardware import detect
from optkit.metrics import score
from optkit.base import read_json, write_json
from optkit.timing import median_ratio
from optkit.records import quantiles, Record, save_records
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import Trainer

ROWS = 'hoc_pairs.jsonl.gz'
SHARED = Path(__file__).resolve().parents[2] / 'shared' / 'data' / 'hoc_pairs' / ROWS


def pack(folder):
    "What the run needs, in one folder"
    from optkit.models import demo_model_folder
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


def theirs(model, tokenizer, store, train, valid, a, seed, half, compile=False):
    "Hugging Face Trainer with bf16, fused AdamW and loader workers that stay; (logits, seconds, seconds to the end of the first step)"
    from transformers import DataCollatorWithPadding, Trainer as HFTrainer, TrainerCallback, TrainingArguments
    class First(TrainerCallback):
        at = None
        def on_step_end(self, *args, **kwargs): self.at = self.at or waited()
    workers = 0 if a.dry or a.scores else 4
    args = TrainingArguments(output_dir=tempfile.gettempdir(), per_device_train_batch_size=a.batch, per_device_eval_batch_size=128, num_train_epochs=a.epochs, learning_rate=a.lr, weight_decay=.01, lr_scheduler_type='linear',
                             warmup_steps=int(np.ceil(.06 * a.epochs * -(-len(train) // a.batch))), max_grad_norm=1., bf16=half, optim='adamw_torch_fused', seed=seed, save_strategy='no', eval_strategy='no', report_to='none', torch_compile=compile,
                             logging_strategy='no', disable_tqdm=True, dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0, dataloader_pin_memory=not a.dry, use_cpu=not torch.cuda.is_available())
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64 if compile else 8)
    first = First()
    trainer = HFTrainer(model=model, args=args, train_dataset=Tokens(store, train), data_collator=collator, processing_class=tokenizer, callbacks=[first])
    start = waited()
    trainer.train()
    seconds = waited() - start
    return torch.from_numpy(trainer.predict(Tokens(store, valid)).predictions).float(), seconds, first.at - start


def ours(engine, store, train, valid, config):
    "optkit; (logits, seconds, seconds to the end of the first step)"
    first = []
    trainer = Trainer(engine, store, config, on_step=lambda *_: first or first.append(waited()))
    start = waited()
    trainer.refit(train)
    seconds = waited() - start
    return engine.predict(trainer.store, valid, 128).cpu(), seconds, first[0] - start


def waited():
    "Now, after the device has done its work"
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter()


HF, COMPILED, PLAIN, FAST = 'hf', 'hf, torch_compile', 'optkit', 'optkit fast'


def names(a): return [HF, *([COMPILED] * a.compile), PLAIN, *([FAST] * (not a.without_fast))]


def is_ours(name): return name.startswith('optkit')


def prepared(a):
    "The machine, where the weights are, tokenizer, table, its tokens, folds"
    source, path = found()
    tokenizer = load_tokenizer(source)
    table = table_from(thinned(read_rows(path, a.documents), a.negatives, a.hypotheses), 'premise', 'label', 'hypothesis', group='group')
    store = tokenise(table, tokenizer, a.length, progress=False)
    return detect(), source, tokenizer, table, store, repeated_folds(np.arange(len(store)), table.labels, a.folds, groups=table.groups)


class Setting:
    "Rows, folds, weights and an engine for each of ours"
    def __init__(self, a):
        self.a, self.hardware, self.source, self.tokenizer, self.table, self.store, self.folds = a, *prepared(a)
        self.half = self.hardware.device == 'cuda' and self.hardware.gpu.capability >= (8, 0)
        self.config = dict(epochs=a.epochs, lr=a.lr, effective_batch=a.batch, layout='padded', precision='bf16' if self.half else 'fp32', warmup=.06, eval_batch=128)
        self.fresh = None
        self.fresh = {k: v.clone() for k, v in self.model().state_dict().items()}
        self.engines = {name: make_engine(self.model(), TrainConfig(**self.config, fast=name == FAST), self.hardware) for name in names(a) if is_ours(name)}

    def model(self):
        "A model of its own, with the weights and the head that all start from"
        model = load_model(self.source, self.table.classes, self.tokenizer)
        if self.fresh: model.load_state_dict(self.fresh)
        return model

    def train(self, name, n, seed, rows=None):
        "Logits of the validation rows of a fold after training on the others, seconds, and those to the end of the first step"
        train, valid = self.folds[n]
        if is_ours(name): return ours(self.engines[name], self.store, train[:rows], valid, TrainConfig(**self.config, seed=seed, fast=name == FAST))
        return theirs(self.model(), self.tokenizer, self.store, train[:rows], valid, self.a, seed, self.half, name == COMPILED)

    def scores(self, logits, n): return metrics(logits, self.store.labels[self.folds[n][1]])


def run(a):
    begun, s = BEGUN, Setting(a)
    state = State(a, s.hardware, s.store, s.folds)
    missing = [k for k in part_of(a) if k not in state.done]
    print(f'{s.hardware.card}: {len(s.store)} rows, {len(s.folds)} folds; {len(part_of(a)) - len(missing)} of {len(part_of(a))} are done; prepared in {time.perf_counter() - begun:.1f} s', flush=True)
    for name in names(a) if missing else ():
        start = time.perf_counter()
        s.train(name, 0, 0, rows=None if name == FAST else 4 * a.batch) # kernels are chosen and loaded once; the fast engine builds its shapes
        state.first_run_s.setdefault(name, time.perf_counter() - start) # of the first call, where nothing is kept
        print(f'{name}: first run {time.perf_counter() - start:.1f} s {s.engines.get(name, "")}', flush=True)
    for seed, n in missing:
        left = a.limit - (time.perf_counter() - begun)
        if left < 1.2 * state.turn_s: print(f'{left:.0f} s left: not done yet, the same call goes on with --state', flush=True); break
        start, fold, order = time.perf_counter(), {}, names(a)
        first = (seed + n) % len(order)
        for name in order[first:] + order[:first]:
            logits, took, begin = s.train(name, n, seed)
            fold[name] = dict(seconds=took, begin=begin, logits=logits.float().tolist())
            values = s.scores(logits, n)
            print(f'seed {seed} fold {n} {name:18} {took:6.1f} s, {a.epochs * len(s.folds[n][0]) / took:6.0f} rows/s, F1 {values["pair_f1"]:.4f}, AUROC {values["auroc"]:.4f}, loss {values["loss"]:.4f}', flush=True)
        state.turn_s = max(state.turn_s, time.perf_counter() - start)
        state.add(seed, n, fold)
        if not a.part: save(a, s.hardware, s.store, s.folds, state)
    if all(k in state.done for k in part_of(a)): print('all done')


def part_of(a):
    "Seeds and folds of this call: all, or those of its part"
    every = [(seed, n) for seed in range(a.first_seed, a.first_seed + a.seeds) for n in range(a.folds)]
    if not a.part: return every
    number, count = map(int, a.part.split('/'))
    return every[number::count]


def scores(a):
    "Parts beside each other, each a process with a state of its own, then one record of what they have done; whether that is everything"
    if not a.state: raise SystemExit('--scores needs --state, a folder for what each process has done')
    Path(a.state).mkdir(parents=True, exist_ok=True)
    own = [sys.executable, __file__, *command_of(a).split()[2:], '--out', a.out, '--limit', str(a.limit - (time.perf_counter() - BEGUN)), '--state', a.state]
    logs = [open(Path(a.state) / f'part{n}.log', 'a') for n in range(a.processes)]
    parts = [subprocess.Popen([*own, '--part', f'{n}/{a.processes}'], stdout=log, stderr=log) for n, log in enumerate(logs)]
    try: codes = [p.wait() for p in parts]
    finally:
        for p, log in zip(parts, logs): p.kill(); log.close()
    failed = [n for n, code in enumerate(codes) if code]
    for n in failed: print(f'part {n} ended with {codes[n]}:', *Path(logs[n].name).read_text().strip().splitlines()[-3:], sep='\n    ')
    whole = gather(a)
    if failed: raise SystemExit(1)
    return whole


def gather(a):
    "The record of what all parts have done; whether that is everything"
    hardware, *_, store, folds = prepared(a)
    state, every = State(a, hardware, store, folds), part_of(a)
    done = [k for k in every if k in state.done]
    if done: save(a, hardware, store, folds, state)
    print(f'{len(done)} of {len(every)} folds;', 'all done' if len(done) == len(every) else 'not done yet, the same call goes on')
    return len(done) == len(every)


class State:
    "The folds that all have done, by seed and fold; kept in a folder, for the settings, card and versions of this call. Parts see each other's"
    def __init__(self, a, hardware, store, folds):
        own = {k: v for k, v in vars(a).items() if k not in ('out', 'pack', 'limit', 'state', 'part', 'processes', 'seeds', 'first_seed')}
        self.made_of = dict(own, card=hardware.card, torch=hardware.software.torch, transformers=hardware.software.transformers, rows=len(store), rows_of_fold_0=len(folds[0][0]))
        self.name = 'minilm-scores' if a.scores else 'minilm-folds'
        self.path = Path(a.state) / f'{self.name}{"-" + a.part.replace("/", "of") if a.part else ""}.json' if a.state else None
        self.done, self.mine, self.first_run_s, self.turn_s = {}, {}, {}, 0.
        for path in sorted(Path(a.state).glob(f'{self.name}*.json')) if a.state else ():
            old = read_json(path)
            if odd := [k for k in self.made_of if old['made_of'].get(k) != self.made_of[k]]: raise SystemExit(f'{path} is of another {", ".join(odd)}: take another folder')
            folds_ = {tuple(map(int, k.split('-'))): fold for k, fold in old['folds'].items()}
            self.done |= folds_
            if path == self.path: self.mine, self.first_run_s, self.turn_s = folds_, old['first_run_s'], old['turn_s']

    def add(self, seed, n, fold):
        self.done[seed, n] = self.mine[seed, n] = fold
        if self.path: write_json(self.path, dict(made_of=self.made_of, first_run_s=self.first_run_s, turn_s=self.turn_s, folds={f'{s}-{n}': f for (s, n), f in self.mine.items()}))


def metrics(logits, labels):
    from sklearn.metrics import f1_score
    return score(logits, labels, custom=lambda values, truth: f1_score(truth, values.argmax(1))) | dict(pair_f1=float(f1_score(labels, logits.argmax(1))))


def save(a, hardware, store, folds, state):
    "A record for each, with its scores by fold, and pooled for each seed whose folds are all done"
    keys = sorted(k for k in state.done if k in part_of(a))
    whole = [seed for seed in range(a.first_seed, a.first_seed + a.seeds) if all((seed, n) in state.done for n in range(a.folds))]
    rows_of = np.array([a.epochs * len(folds[n][0]) for _, n in keys])
    tokens_of = np.array([a.epochs * int(store.lengths[folds[n][0]].sum()) for _, n in keys])
    labels = lambda n: store.labels[folds[n][1]]
    records, tables = [], {}
    for name in names(a):
        took = np.array([state.done[k][name]['seconds'] for k in keys])
        ratio = vars(median_ratio(np.array([state.done[k][HF]['seconds'] for k in keys]) / took)) if name != HF else dict(p50=1., low=1., high=1.)
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
        timed = {} if a.scores else dict(ratio=ratio, samples_per_s=quantiles(rows_of / took), tokens_per_s=quantiles(tokens_of / took), seconds=quantiles(took))
        records.append(Record(name, HF, **timed, loss=loss, repeats=len(keys), confidence=None if a.scores else min(.99, 1 - 2. ** (1 - len(keys))), label='rounding' if is_ours(name) else 'exact', stopped=f'{len(keys)} of {a.seeds * a.folds} folds, {len(whole)} seeds of {a.seeds} whole'))
    card = f'{hardware.card}-dry' if a.dry else hardware.card
    path = Path(a.out) / f'minilm-{"scores" if a.scores else "folds"}-{card}.json'
    save_records(path, records, hardware, command_of(a), workload='MiniLM (22.7M) on hoc_pairs, grouped folds', rows_total=len(store), positives=float(np.mean(store.labels.numpy())), folds_done=[list(k) for k in keys], scores=tables, **({} if a.scores else dict(first_run_s=state.first_run_s, begin_s={n: quantiles([state.done[k][n]['begin'] for k in keys]) for n in names(a)})))
    for r in records[1:]: print(f'{path}, {r.stopped}: {r.variant}' + ('' if a.scores else f' {r.ratio["p50"]:.2f} times [{r.ratio["low"]:.2f}, {r.ratio["high"]:.2f}]') + f'; pooled F1 {r.loss["pair_f1"]:.4f} against {records[0].loss["pair_f1"]:.4f}, differences {[round(d, 4) for d in r.loss["pair_f1_differences"]]}')


def command_of(a):
    sizes = ''.join(f' --{k.replace("_", "-")} {getattr(a, k)}' for k in SIZES) + f' --lr {a.lr}'
    return 'python bench/minilm_folds.py' + sizes + (' --without-fast' if a.without_fast else '') + (' --compile' if a.compile else '') + (f' --scores --processes {a.processes}' if a.scores else '') + (' --dry' if a.dry else '')


SIZES = dict(documents=1852, negatives=1, hypotheses=2, length=256, epochs=5, batch=32, folds=5, first_seed=0, seeds=3)


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items(): p.add_argument(f'--{name.replace("_", "-")}', type=int, default=value)
    p.add_argument('--lr', type=float, default=1e-4, help='learning rate'); p.add_argument('--compile', action='store_true', help='the trainer with torch_compile too')
    p.add_argument('--limit', type=float, default=230., help='seconds of the call, with what comes before the first fold'); p.add_argument('--without-fast', action='store_true', help='only Hugging Face Trainer and eager mode')
    p.add_argument('--out', default='bench/results'); p.add_argument('--pack'); p.add_argument('--state', help='folder that keeps the folds that are done'); p.add_argument('--dry', action='store_true', help='tiny, whatever the sizes')
    p.add_argument('--scores', action='store_true', help='scores alone, several processes at once'); p.add_argument('--processes', type=int, default=8); p.add_argument('--part', help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.dry: a.documents, a.length, a.epochs, a.folds, a.seeds, a.batch = 24, 48, 1, 3, 2, 16
    return a


if __name__ == '__main__':
    a = parse()
    pack(a.pack) if a.pack else scores(a) if a.scores and not a.part else run(a)
