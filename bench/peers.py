"""The fast engine beside Hugging Face Trainer, in one process, interleaved.

    python bench/peers.py                          W1: DeBERTa-v3-base shape; writes bench/results/w1-peers-<card>.json
    python bench/peers.py --shape bert             BERT-base shape; bert-peers-<card>.json
    python bench/peers.py --attention transformers the model's own attention in places instead of ours; w1-transformers-<card>.json
    python bench/peers.py --start                  seconds to the first update, each in a process of its own, first with nothing kept, then
                                                   with compiled code kept in a folder; w1-start-<card>.json
    python bench/peers.py --start --attention transformers
                                                   the same with the model's own attention in places; w1-start-transformers-<card>.json
    python bench/peers.py --explore                only our own settings against each other, nothing is written
    python bench/peers.py --explore --attention transformers
                                                   the same for ways to run the model's own attention in places
    python bench/peers.py --small                  a tiny model, to try the script out without a GPU; writes into a folder of its own

Each peer trains in a thread of its own that stops after every few steps; the comparison lets one of them go
on at a time. Peers keep their batches grouped by length; ours are exact: each step holds the rows of a plain
seeded sampler. Rows a step, lengths, optimizer, clipping and dropout are the same for all.
"""
import argparse, contextlib, json, os, subprocess, sys, tempfile, threading, time
from dataclasses import asdict

import numpy as np
import torch
import transformers

from optkit.store import TokenStore
from optkit.steps import steps
from optkit.sizes import training_flops
from optkit.fast import FastEngine, keep_compiled, WHOSE_ATTENTION
from optkit.hardware import detect
from optkit.precision import choose_precision
from optkit.timing import compare, Variant
from optkit.records import record, save_records

ROWS = 32  # of an optimizer step
LONG = {'hf-best-compile': 240., 'optkit': 60., 'optkit, attention of transformers': 80., 'optkit, attention of transformers, tuned': 80., 'of any length': 60., 'tuned': 80., 'tiled': 60., 'tuned, tiled': 80., 'realized': 60., 'tuned, realized': 80., 'fused by four': 60., 'unfused': 60., 'octave=4': 40., 'six shapes': 40., 'all positions': 40., 'in turn': 40., 'by slot': 90.}  # W1: seconds that building may take on a GPU: with less before --limit they are left out; others take about as long as the longest so far
WITHOUT = 'warm, compiler imported'  # in a process that has compiled something before, as every later engine of a study


def model_of(shape, small):
    "A sequence classifier with random weights in the shape of a known one"
    torch.manual_seed(0)
    base = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    if small: base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    if shape == 'bert':
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=500 if small else 30522, num_labels=2, problem_type='single_label_classification', **base))
    config = transformers.DebertaV2Config(vocab_size=500 if small else 128100, type_vocab_size=0, relative_attention=True, position_buckets=256, norm_rel_ebd='layer_norm', share_att_key=True,
                                          pos_att_type=['p2c', 'c2p'], position_biased_input=False, max_relative_positions=-1, max_position_embeddings=512, num_labels=2,
                                          problem_type='single_label_classification', **base)
    return transformers.DebertaV2ForSequenceClassification(config)


def rows_of(vocabulary, count, longest, seed=0):
    "Random tokens of two kinds, lengths lognormal: median 110, sigma 0.7, 16 to 512"
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(110), .7, count), 16, 512).astype(int)
    if longest < 512: lengths = np.maximum(4, lengths * longest // 512)
    labels = rng.integers(2, size=count)
    half = (vocabulary - 10) // 2
    tokens = np.concatenate([10 + k * half + rng.integers(half, size=n) for k, n in zip(labels, lengths)]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenStore(torch.from_numpy(tokens), torch.from_numpy(offsets), torch.from_numpy(labels.astype(np.int64)), None, lengths, ('a', 'b'), int(lengths.max()), 0, lengths)


def wait():
    "Until the GPU has done what it was given, where there is one"
    if torch.cuda.is_available(): torch.cuda.synchronize()


class Dataset(torch.utils.data.Dataset):
    "The rows as a Trainer takes them"
    def __init__(self, store): self.tokens, self.ends, self.labels, self.lengths = store.tokens.tolist(), store.offsets.tolist(), store.labels.tolist(), store.lengths
    def __len__(self): return len(self.labels)
    def __getitem__(self, n):
        ids = self.tokens[self.ends[n]:self.ends[n + 1]]
        return dict(input_ids=ids, attention_mask=[1] * len(ids), labels=self.labels[n])


def collate(rows, multiple):
    "Padded to the longest, up to a multiple"
    longest = max(len(r['input_ids']) for r in rows)
    longest = min(-(-longest // multiple) * multiple, 512)
    pad = lambda name: torch.tensor([r[name] + [0] * (longest - len(r[name])) for r in rows])
    return dict(input_ids=pad('input_ids'), attention_mask=pad('attention_mask'), labels=torch.tensor([r['labels'] for r in rows]))


class Gate(transformers.TrainerCallback):
    "Lets a Trainer take as many steps as are allowed, and no more"
    def __init__(self): self.allowed, self.steps, self.turn, self.failed = 0, 0, threading.Condition(), None
    def on_step_begin(self, args, state, control, **kwargs):
        with self.turn: self.turn.wait_for(lambda: self.allowed)
    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available() and self.allowed == 1: torch.cuda.synchronize()
        with self.turn:
            self.allowed, self.steps = self.allowed - 1, self.steps + 1
            self.turn.notify_all()
    def let(self, count):
        with self.turn:
            self.allowed, before = count, self.steps
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.failed or not self.allowed)
        if self.failed: raise self.failed
        assert self.steps == before + count
    def fail(self, exc):
        with self.turn: self.failed = exc; self.turn.notify_all()


class Peer:
    "A Hugging Face Trainer that runs a few steps at a time"
    def __init__(self, model, store, bf16, compile, grouped=True, multiple=8):
        self.gate, folder = Gate(), tempfile.mkdtemp()
        group = dict(train_sampling_strategy='group_by_length') if hasattr(transformers.TrainingArguments, 'train_sampling_strategy') else dict(group_by_length=True)
        args = transformers.TrainingArguments(folder, per_device_train_batch_size=ROWS, bf16=bf16, optim='adamw_torch_fused', torch_compile=compile, max_steps=10**6, learning_rate=1e-5, max_grad_norm=1.,
                                              logging_strategy='no', save_strategy='no', report_to=[], disable_tqdm=True, dataloader_num_workers=2, dataloader_pin_memory=torch.cuda.is_available(),
                                              dataloader_persistent_workers=True, use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, **(group if grouped else {}))
        data = Dataset(store)
        self.trainer = transformers.Trainer(model, args, train_dataset=data, data_collator=lambda rows: collate(rows, multiple), callbacks=[self.gate])
        threading.Thread(target=self._train, daemon=True).start()
    def _train(self):
        try: self.trainer.train()
        except BaseException as exc: self.gate.fail(exc)
    def __call__(self, count): self.gate.let(count)


class Ours:
    "Our engine over the steps of a plain sampler"
    def __init__(self, engine, store, layout='sorted', physical=None):
        self.engine, self.store, self.layout, self.physical, self.plan = engine, store, layout, physical, iter(())
        engine.reset(lr=1e-5)
        self.epoch = 0
    def __call__(self, count):
        while count:
            micro = next(self.plan, None)
            if micro is None or sum(len(m.rows) for m in micro) < ROWS:
                self.plan = iter(list(steps(self.store, np.arange(len(self.store)), ROWS, seed=0, epoch=self.epoch, layout=self.layout, physical=self.physical)))
                self.epoch += 1
                continue
            self.engine.step(self.store, micro)
            count -= 1


def warm(name, work, count):
    "Let `work` build what it builds; seconds to the first step and in all"
    start = time.perf_counter()
    work(1)
    wait()
    first = time.perf_counter() - start
    work(count)
    wait()
    total = time.perf_counter() - start
    print(f'{name}: first step after {first:.1f} s, {count + 1} steps after {total:.1f} s', flush=True)
    return dict(first_s=first, total_s=total)


def settings(explore, shape, attention='optkit'):
    "Our own settings; `options`: of the compiler, for attention of transformers"
    tuned, tiled = {'coordinate_descent_tuning': True}, {'triton.tile_reductions': True, 'triton.prefer_nd_tiling': True}
    realized = {'realize_reads_threshold': 1, 'realize_opcount_threshold': 5} # scores with their lookups are written once, before softmax reads them twice
    if not explore and attention == 'transformers': return {f'optkit, attention of transformers{n}': dict(attention=attention) | kw for n, kw in (('', {}), (', tuned', dict(options=tuned)))}
    if not explore: return {'optkit': dict(), **({'optkit, rows in places': dict(end_to_end=False)} if shape == 'bert' else {})}
    if attention == 'transformers':
        ways = {'of any length': {}, 'tuned': dict(options=tuned), 'tiled': dict(options=tiled), 'tuned, tiled': dict(options=tuned | tiled), 'realized': dict(options=realized), 'tuned, realized': dict(options=tuned | realized),
                'fused by four': dict(options={'max_fusion_size': 4}), 'unfused': dict(options={'max_fusion_size': 1}), 'octave=4': dict(octave=4), 'six shapes': dict(most=6),
                'in turn': dict(beside=False)}
        return {n: dict(attention=attention) | kw for n, kw in ways.items()}
    return {'as it is': dict(), 'graphs only': dict(layers=False), 'static': dict(dynamic=False), 'two shapes': dict(most=2), 'one length an octave': dict(octave=1), 'in turn': dict(beside=False), 'in places': dict(end_to_end=False), 'one an octave in turn': dict(octave=1, beside=False)}


def ours(model, precision, store, options=None, **values):
    "Our engine with settings"
    engine = FastEngine(model, precision, max_grad_norm=1., **values)
    engine._attention_options = options
    return Ours(engine, store)


def kernels(work, count, top=25):
    "Time of each kind of kernel in `count` steps: where a step's time goes"
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        start = time.perf_counter()
        work(count)
        torch.cuda.synchronize()
        took = time.perf_counter() - start
    rows = sorted(((e.device_time_total, e.count, e.key) for e in prof.key_averages()), reverse=True)
    print(f'{count} steps in {1e3 * took:.1f} ms, kernels {sum(r[0] for r in rows) / 1e3:.1f} ms')
    for us, calls, key in rows[:top]: print(f'{us / 1e3:9.2f} ms {calls:6} x {key[:110]}', flush=True)


def chosen(only, names, explore):
    "Names that are to run, in their order; without hf-best a comparison with peers is none"
    wanted = [n.strip() for n in only.split(';') if n.strip()]
    unknown = [n for n in wanted if n not in names]
    if unknown: sys.exit(f'--only: no variant is named {", ".join(map(repr, unknown))}; expected some of {"; ".join(names)}')
    return [n for n in names if not wanted or n in wanted or not explore and n == 'hf-best']


def took(work, count):
    "Seconds of so many steps"
    begin = time.perf_counter()
    work(count)
    wait()
    return time.perf_counter() - begin


def start_once(args):
    "Seconds to the first update in this process, printed as JSON"
    keep_compiled(args.once)
    begin = time.perf_counter()
    if args.imported: import torch._dynamo, torch._inductor.compile_fx
    imported = time.perf_counter()
    hw = detect()
    model, store = model_of(args.shape, args.small), rows_of(500 if args.small else 30000, 512 if args.small else 8192, 64 if args.small else 512)
    ready = time.perf_counter()
    work = ours(model, choose_precision(hw, prefer='bf16' if hw.device == 'cuda' else 'fp32'), store, layers=True, attention=args.attention)
    made = time.perf_counter()
    work(1)
    wait()
    first = time.perf_counter()
    work(40)
    wait()
    many = time.perf_counter()
    work.engine.reset(lr=1e-5)
    wait()
    print(json.dumps(dict(imports_s=imported - begin, data_and_model_s=ready - imported, engine_s=made - ready, first_step_s=first - made, first_update_s=first - ready, all_shapes_s=many - ready, reset_s=time.perf_counter() - many, note=repr(work.engine))))


def of_start(args):
    "What a start is of, as options of the command line"
    return [*(['--shape', args.shape] if args.shape != 'w1' else []), *(['--attention', args.attention] if args.attention != 'optkit' else [])]


def start_record(args, found, hw):
    "The record of the starts so far"
    rows = [dict(variant=f'optkit{"" if args.attention == "optkit" else ", attention of " + args.attention}, {k}', baseline='none', repeats=len(of), seconds={q: float(np.quantile([f['first_update_s'] for f in of], v)) for q, v in (('p20', .2), ('p50', .5), ('p80', .8))})
            for k in ('cold', 'warm', WITHOUT) for of in [[f for f in found if f['start'] == k]] if of]
    save_records(f'{args.out}/{args.shape}-start-{"" if args.attention == "optkit" else args.attention + "-"}{hw.card}.json', rows, hw, ' '.join(['python bench/peers.py --start', *of_start(args)]), starts=json.dumps(found),
                 note='seconds from a model and its data in host memory to the end of the first optimizer step; imports of torch and optkit are not counted, that of the compiler of torch at its first use is, except in the last row')


def start(args):
    "First updates in processes of their own: cold, then with what was compiled before"
    hw = detect()
    if args.cache and os.path.exists(args.cache) and os.listdir(args.cache): sys.exit(f'{args.cache} is not empty, so the first start would not be cold; take another folder')
    with contextlib.nullcontext(args.cache) if args.cache else tempfile.TemporaryDirectory() as folder:
        env, found = {k: v for k, v in os.environ.items() if k not in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR', 'PYTHONDONTWRITEBYTECODE')}, []
        env['PYTHONPYCACHEPREFIX'] = os.path.join(os.path.abspath(folder), 'python') # some images keep no bytecode, others have that of all packages: neither would be cold first and then warm
        for kind in ('cold', 'warm', 'warm', *((WITHOUT, WITHOUT) if args.attention == 'optkit' else ())):
            done = subprocess.run([sys.executable, __file__, *of_start(args), *(['--small'] if args.small else []), *(['--imported'] if kind == WITHOUT else []), '--once', folder], env=env, stdout=subprocess.PIPE, text=True)
            if done.returncode: sys.exit(f'the {kind} start ended with {done.returncode}')
            found.append(dict(start=kind, **json.loads(done.stdout.splitlines()[-1])))
            print(found[-1], flush=True)
            start_record(args, found, hw) # after each: a run that is cut off leaves what it has
    print(f'record in {args.out}')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--shape', choices=('w1', 'bert'), default='w1')
    parser.add_argument('--explore', action='store_true')
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--kernels', action='store_true', help='also list the kernels of 8 steps of each of our variants')
    parser.add_argument('--only', default='', help='names of variants, with ; between them (names hold commas); hf-best is never left out, but by --explore')
    parser.add_argument('--budget', type=float, default=150., help='seconds of the comparison')
    parser.add_argument('--limit', type=float, default=float('inf'), help='seconds of all: what building takes longer, the comparison gets less; a variant that would not be built in time for 3 rounds is left out')
    parser.add_argument('--per-round', type=int, default=50, help='steps of each variant in a round; peers that group by length repeat their lengths every 50')
    parser.add_argument('--start', action='store_true', help='seconds to the first update instead')
    parser.add_argument('--attention', choices=WHOSE_ATTENTION, default='optkit', help="our own, or the model's own in the same places")
    parser.add_argument('--cache', help='an empty folder in which --start leaves what was compiled; a temporary one without')
    parser.add_argument('--once', help=argparse.SUPPRESS)
    parser.add_argument('--imported', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--out', default='bench/results', help='folder of the record')
    args = parser.parse_args()
    if args.small and args.out == 'bench/results': args.out = tempfile.mkdtemp()
    if args.once: return start_once(args)
    if args.start: return start(args)
    hw, began = detect(), time.perf_counter()
    precision = choose_precision(hw, prefer='bf16' if hw.device == 'cuda' else 'fp32')
    model = lambda: model_of(args.shape, args.small)
    store = rows_of(500 if args.small else 30000, 512 if args.small else 8192, 64 if args.small else 512)
    bf16 = hw.device == 'cuda'
    left = lambda: args.limit - (time.perf_counter() - began)
    makers = {n: (lambda kw=kw: ours(model(), precision, store, **kw)) for n, kw in settings(args.explore, args.shape, args.attention).items()}
    if not args.explore:
        makers = {'hf-best': lambda: Peer(model(), store, bf16, False), 'hf-best-compile': lambda: Peer(model(), store, bf16, True, multiple=64), **makers}
    wanted = chosen(args.only, makers, args.explore)
    works, builds, rounds, expected = {}, {}, [], LONG if bf16 and args.shape == 'w1' else {}
    for name in wanted:
        needs = expected.get(name, max((b['all_s'] for b in builds.values()), default=0.)) + 3.5 * sum(rounds) + 3.5 * max(rounds, default=0.) + 20  # to build it, rounds, the record
        if works and left() < needs: print(f'{name}: left out, it would need {needs:.0f} s of the {left():.0f} that are left', flush=True); continue
        try:
            begin = time.perf_counter()
            work = makers[name]()
            made = time.perf_counter() - begin
            print(f'{name}: made in {made:.1f} s', flush=True)
            builds[name] = dict(made_s=made, **warm(name, work, 4 if args.small else 40))
            rounds.append(took(work, args.per_round))
            works[name], builds[name]['all_s'] = work, time.perf_counter() - begin
            print(f'{name}: {1e3 * rounds[-1] / args.per_round:.2f} ms a step', flush=True)
            if isinstance(work, Ours) and isinstance(work.engine, FastEngine): print(' ', work.engine, *work.engine.shapes_for(store, ROWS), sep='\n    ', flush=True)
            if args.kernels and bf16 and isinstance(work, Ours): kernels(work, 8)
        except Exception as exc: print(f'{name}: {type(exc).__name__}: {str(exc)[:600]}', flush=True)
        finally: work = None
    if not works or 'hf-best' not in works and not args.explore: sys.exit('hf-best could not be made, so there is nothing to compare with' if not args.explore else 'nothing could be made')
    once, budget = sum(rounds), min(args.budget, left() - 15)
    print(f'a round takes {once:.1f} s, {budget:.0f} s of rounds', flush=True)
    if args.explore and (len(works) < 2 or budget < 3.5 * once): return print('no time for rounds' if len(works) > 1 else 'nothing to compare with', flush=True)
    result = compare(*(Variant(n, lambda _, w=w: w(args.per_round)) for n, w in works.items()), burn_in=0, width=.01, device=hw.device, progress=False, **(dict(budget_s=budget) if budget >= 8 * once else dict(budget_s=float('inf'), max_rounds=max(3, int(budget / once)), watch=False)))  # few rounds all count
    print(result, flush=True)
    for n in result.names: print(f'{n:40}{ROWS * args.per_round / float(np.median(result.seconds[n])):8.0f} seq/s {1e3 * float(np.median(result.seconds[n])) / args.per_round:8.2f} ms a step', flush=True)
    if args.explore: return
    tokens = float(store.lengths.mean()) * ROWS * args.per_round
    flops = training_flops(model(), store.lengths) / len(store) * ROWS * args.per_round
    kept = lambda n: asdict(record(result, n, samples=ROWS * args.per_round, tokens=tokens, flops=flops, peak=(hw.gpu and hw.gpu.peak or {}).get('bf16'), label='rounding' if n.startswith('optkit') else 'changes training'))
    rows = [kept(n) | dict(baseline=b, ratio=asdict(result.ratio(n, b)), ratio_before=None) for b in ('hf-best', 'hf-best-compile') if b in works for n in result.names]
    for name, work in works.items():
        if not isinstance(work, Ours): continue
        begin = time.perf_counter()
        work.engine.reset(lr=1e-5)
        wait()
        builds[name]['reset_s'] = time.perf_counter() - begin
    save_records(f'{args.out}/{args.shape}-{"peers" if args.attention == "optkit" else args.attention}-{hw.card}.json', rows, hw, 'python bench/peers.py' + (f' --shape {args.shape}' if args.shape != 'w1' else '') + (f' --attention {args.attention}' if args.attention != 'optkit' else '') + f' --budget {args.budget:g}', builds=json.dumps(builds),
                 workload=f'{"DeBERTa-v3-base" if args.shape == "w1" else "BERT-base"} shape, random start, bf16, {ROWS} rows a step, lognormal lengths 16..512, AdamW, clip 1; seconds are of {args.per_round} steps',
                 note='peers group batches by length (changes training), ours are exact steps of a plain sampler; builds: seconds to make each, from there to its first step, to 41 steps, and of a reset')
    print(f'record in {args.out}', builds)


if __name__ == '__main__':
    main()
    sys.stdout.flush()
    os._exit(0)  # the peers' threads wait for ever
