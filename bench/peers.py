"""The fast engine beside Hugging Face Trainer, in one process, interleaved, at several numbers of rows a step.

    python bench/peers.py                  DeBERTa-v3-base shape at 16, 32 and 128 rows: results/w1-rows-<card>.json
    python bench/peers.py --rows 32        at 32 rows alone: bench/results/w1-rows-32-<card>.json
    python bench/peers.py --predict        prediction beside Trainer.predict: w1-predict-<card>.json
    python bench/peers.py --shape bert     BERT-base shape (others: see `SHAPES`): bert-rows-<card>.json
    python bench/peers.py --peers all      each setting of the Trainer in `PEERS`, not only the strongest known ones
    python bench/peers.py --families       ours alone, a few steps of each shape: whether rows go end to end, ms a step,
                                           the longest kernels and those of attention: families-<card>.json;
                                           --families bert,llama takes these
    python bench/peers.py --start          seconds to the first update, each in a process of its own, first with
                                           nothing kept, then with compiled code kept in a folder: w1-start-<card>.json
    python bench/peers.py --small          a tiny model, without a GPU; the record goes into a folder of its own

Each peer trains in a thread of its own that stops after every few steps; the comparison lets one at a time go on.
Peers keep their batches grouped by length; ours are exact: each step holds the rows of a plain seeded sampler.
Rows a step, lengths, optimizer, clipping and dropout are the same for all. The losses of all stand in the record.
"""
import argparse, contextlib, gc, json, os, subprocess, sys, tempfile, threading, time
from dataclasses import asdict

import numpy as np
import torch
import transformers

from optkit.store import TokenStore
from optkit.steps import steps
from optkit.sizes import training_flops
from optkit.shapes import EndToEnd
from optkit.fast import FastEngine, keep_compiled
from optkit.hardware import detect
from optkit.precision import choose_precision
from optkit.timing import compare, Variant
from optkit.records import record, save_records

# Settings of a Trainer. All take bf16, the fused AdamW, batches grouped by length, two workers and pinned memory.
PEERS = {
    'hf, pad 8': dict(),
    'hf, pad 8, no filter': dict(nan_filter=False, non_blocking=True),
    'hf compiled, pad 64': dict(compile='default', multiple=64),
    'hf compiled, pad 8, no filter': dict(compile='default', nan_filter=False, non_blocking=True),
    'hf compiled, pad 64, no filter': dict(compile='default', multiple=64, nan_filter=False, non_blocking=True),
    'hf compiled, pad 64, static, no filter': dict(compile='default', multiple=64, dynamic=False, nan_filter=False,
                                                   non_blocking=True),
    'hf reduce-overhead, pad 64, static, no filter': dict(compile='reduce-overhead', multiple=64, dynamic=False,
                                                          nan_filter=False, non_blocking=True),
}
STRONG = ('hf, pad 8, no filter', 'hf compiled, pad 8, no filter', 'hf compiled, pad 64, no filter')
COMPILED = 'warm, compiler imported'  # a start in a process that has compiled before, as every later engine of a study
BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
DEBERTA = dict(type_vocab_size=0, relative_attention=True, position_buckets=256, norm_rel_ebd='layer_norm',
               share_att_key=True, pos_att_type=['p2c', 'c2p'], position_biased_input=False, max_relative_positions=-1,
               max_position_embeddings=512)
MARKS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
# What each shape is of, its class in transformers, and its configuration.
SHAPES = {
    'w1': ('DeBERTa-v3-base', 'DebertaV2', BASE | DEBERTA | dict(vocab_size=128100)),
    'bert': ('BERT-base', 'Bert', BASE | dict(vocab_size=30522)),
    'roberta': ('RoBERTa-base', 'Roberta', BASE | dict(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)),
    'modernbert': ('ModernBERT-base', 'ModernBert', BASE | MARKS | dict(
        vocab_size=50368, num_hidden_layers=22, intermediate_size=1152, cls_token_id=1, sep_token_id=2)),
    'distilbert': ('DistilBERT-base', 'DistilBert', dict(vocab_size=30522)),
    'albert': ('ALBERT-base', 'Albert', BASE | dict(vocab_size=30000, embedding_size=128)),
    'mpnet': ('MPNet-base', 'MPNet', BASE | dict(vocab_size=30527, max_position_embeddings=514)),
    'xlm-roberta': ('XLM-R-base', 'XLMRoberta', BASE | dict(vocab_size=250002, max_position_embeddings=514,
                                                            type_vocab_size=1)),
    'electra': ('ELECTRA-base', 'Electra', BASE | dict(vocab_size=30522, embedding_size=768)),
    'gpt2': ('GPT-2', 'GPT2', MARKS | dict(vocab_size=50257)),
    'llama': ('Llama-3.2-1B', 'Llama', MARKS | dict(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, head_dim=64)),
    'qwen3': ('Qwen3-0.6B', 'Qwen3', MARKS | dict(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=3072, head_dim=128)),
    'gemma3': ('Gemma-3-1B', 'Gemma3Text', MARKS | dict(
        vocab_size=262144, hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=6912, head_dim=256, sliding_window=512)),
}
SMALL = dict(vocab_size=500, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
             num_key_value_heads=1, embedding_size=32, head_dim=16, sliding_window=16)


def model_of(shape, small):
    "A sequence classifier with random weights in the shape of a known one"
    torch.manual_seed(0)
    _, kind, values = SHAPES[shape]
    if small: values = {n: SMALL.get(n, v) for n, v in values.items()}
    if small and kind in ('DistilBert', 'GPT2'): values |= {n: SMALL[n] for n in list(SMALL)[1:4]}
    values = values | dict(num_labels=2, problem_type='single_label_classification')
    config = getattr(transformers, f'{kind}Config')(**values)
    return getattr(transformers, f'{kind}ForSequenceClassification')(config)


def rows_of(vocabulary, count, longest, seed=0):
    "Random tokens of two kinds, lengths lognormal: median 110, sigma 0.7, 16 to 512"
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(110), .7, count), 16, 512).astype(int)
    if longest < 512: lengths = np.maximum(4, lengths * longest // 512)
    labels = rng.integers(2, size=count)
    half = (vocabulary - 10) // 2
    drawn = [10 + k * half + rng.integers(half, size=n) for k, n in zip(labels, lengths)]
    tokens, offsets = np.concatenate(drawn).astype(np.int32), np.concatenate([[0], np.cumsum(lengths)])
    arrays = (torch.from_numpy(a) for a in (tokens, offsets, labels.astype(np.int64)))
    return TokenStore(*arrays, None, lengths, ('a', 'b'), int(lengths.max()), 0, lengths)


def wait():
    "Until the GPU has done what it was given, where there is one"
    if torch.cuda.is_available(): torch.cuda.synchronize()


class Dataset(torch.utils.data.Dataset):
    "The rows as a Trainer takes them"
    def __init__(self, store):
        self.tokens, self.ends, self.labels = (t.tolist() for t in (store.tokens, store.offsets, store.labels))
        self.lengths = store.lengths

    def __len__(self): return len(self.labels)

    def __getitem__(self, n):
        ids = self.tokens[self.ends[n]:self.ends[n + 1]]
        return dict(input_ids=ids, attention_mask=[1] * len(ids), labels=self.labels[n])


def collate(rows, multiple):
    "Padded to the longest, up to a multiple"
    longest = max(len(r['input_ids']) for r in rows)
    longest = min(-(-longest // multiple) * multiple, 512)
    def pad(name): return torch.tensor([r[name] + [0] * (longest - len(r[name])) for r in rows])
    return dict(input_ids=pad('input_ids'), attention_mask=pad('attention_mask'),
                labels=torch.tensor([r['labels'] for r in rows]))


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
        with self.turn:
            self.failed = exc
            self.turn.notify_all()


class WithLosses(transformers.Trainer):
    "A Trainer that keeps the loss of each step where it is, without waiting for it"
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach().clone())  # a graph of reduce-overhead writes the next one over it
        return loss


class Peer:
    "A Hugging Face Trainer that runs a few steps at a time"
    def __init__(self, model, store, rows, bf16, compile=None, multiple=8, dynamic=None, nan_filter=True,
                 non_blocking=False):
        self.gate = Gate()
        if dynamic is not None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            mode = None if compile == 'default' else compile
            model.forward, compile = torch.compile(model.forward, dynamic=dynamic, mode=mode), None
        args = transformers.TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=rows, bf16=bf16, optim='adamw_torch_fused', max_steps=10**6,
            torch_compile=compile is not None, torch_compile_mode=compile, learning_rate=1e-5, max_grad_norm=1.,
            lr_scheduler_type='constant', weight_decay=.01, logging_nan_inf_filter=nan_filter,
            accelerator_config=dict(non_blocking=non_blocking), logging_strategy='no', save_strategy='no', report_to=[],
            disable_tqdm=True, dataloader_num_workers=2, dataloader_pin_memory=torch.cuda.is_available(),
            dataloader_persistent_workers=True, dataloader_drop_last=True, use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False, train_sampling_strategy='group_by_length')
        self.trainer = WithLosses(model, args, train_dataset=Dataset(store), callbacks=[self.gate],
                                  data_collator=lambda rows: collate(rows, multiple))
        self.losses = self.trainer.losses = []
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self):
        try: self.trainer.train()
        except BaseException as exc: self.gate.fail(exc)

    def __call__(self, count): self.gate.let(count)


class Ours:
    "Our engine over the steps of a plain sampler"
    def __init__(self, engine, store, rows):
        self.engine, self.store, self.rows, self.losses = engine, store, rows, []
        engine.reset(lr=1e-5)
        self.epoch, self.plan = 0, iter(())

    def __call__(self, count):
        while count:
            micro = next(self.plan, None)
            if micro is None or sum(len(m.rows) for m in micro) < self.rows:
                self.plan = iter(list(steps(self.store, np.arange(len(self.store)), self.rows, seed=0, epoch=self.epoch,
                                            layout='sorted')))
                self.epoch += 1
                continue
            self.losses.append(self.engine.step(self.store, micro).clone())  # static memory of a graph
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


def our_engine(model, precision, **values): return FastEngine(model, precision, max_grad_norm=1., **values)


def kernels(work, count, top=25):
    "Print the time of each kind of kernel in `count` steps, and give milliseconds a step: name to (ms, calls)"
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        start = time.perf_counter()
        work(count)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    rows = sorted(((e.device_time_total, e.count, e.key) for e in prof.key_averages()), reverse=True)
    print(f'{count} steps in {1e3 * seconds:.1f} ms, kernels {sum(r[0] for r in rows) / 1e3:.1f} ms')
    for us, calls, key in rows[:top]: print(f'{us / 1e3:9.2f} ms {calls:6} x {key[:110]}', flush=True)
    return {key[:160]: (round(us / 1e3 / count, 4), calls / count) for us, calls, key in rows[:top]}


def chosen(only, names):
    "Names that are to run, in their order"
    wanted = [n.strip() for n in only.split(';') if n.strip()]
    unknown = [n for n in wanted if n not in names]
    if unknown:
        sys.exit(f'--only: no variant is named {", ".join(map(repr, unknown))}; expected some of {"; ".join(names)}')
    return [n for n in names if not wanted or n in wanted]


def seconds_of_steps(work, count):
    begin = time.perf_counter()
    work(count)
    wait()
    return time.perf_counter() - begin


def loss_of(losses, device='cpu'):
    "Mean training loss of the first and of the last 50 steps, and how many there were"
    values = torch.stack([x.float().to(device) for x in losses]).tolist()
    return dict(first=float(np.mean(values[:50])), last=float(np.mean(values[-50:])), steps=len(values))


def start_once(args):
    "Seconds to the first update in this process, printed as JSON"
    keep_compiled(args.once)
    begin = time.perf_counter()
    if args.imported: import torch._dynamo, torch._inductor.compile_fx
    imported, hw = time.perf_counter(), detect()
    model, store = data_of(args)
    ready = time.perf_counter()
    precision = choose_precision(hw, prefer='bf16' if hw.device == 'cuda' else 'fp32')
    work = Ours(our_engine(model, precision, layers=True), store, 32)
    made = time.perf_counter()
    first = made + seconds_of_steps(work, 1)
    many = first + seconds_of_steps(work, 40)
    begin_reset = time.perf_counter()
    work.engine.reset(lr=1e-5)
    wait()
    print(json.dumps(dict(
        imports_s=imported - begin, data_and_model_s=ready - imported, engine_s=made - ready, first_step_s=first - made,
        first_update_s=first - ready, all_shapes_s=many - ready, reset_s=time.perf_counter() - begin_reset)))


def data_of(args):
    "The model and its rows"
    model = model_of(args.shape, args.small)
    longest = 64 if args.small else 512
    return model, rows_of(500 if args.small else 30000, 512 if args.small else 8192, longest)


def options_of(args):
    "What a record is of, as options of the command line"
    return f'--shape {args.shape}' if args.shape != 'w1' else ''


def record_path(args, topic, hw): return f'{args.out}/{args.shape}-{topic}-{hw.card}.json'


def alone_row(variant, seconds):
    "A row of a record without a baseline"
    quantiles = {q: float(np.quantile(seconds, p)) for q, p in (('p20', .2), ('p50', .5), ('p80', .8))}
    return dict(variant=variant, baseline='none', repeats=len(seconds), label='rounding', seconds=quantiles)


def start_record(args, found, hw):
    "The record of the starts so far"
    by_kind = {k: [f['first_update_s'] for f in found if f['start'] == k] for k in ('cold', 'warm', COMPILED)}
    rows = [alone_row(f'optkit, {k}', of) for k, of in by_kind.items() if of]
    save_records(record_path(args, 'start', hw), rows, hw, f'python bench/peers.py --start {options_of(args)}'.strip(),
                 starts=json.dumps(found),
                 note='seconds from a model and its data in host memory to the end of the first optimizer step; '
                      'imports of torch and optkit are not counted, that of the compiler of torch at its first use is, '
                      'except in the last row')


def start(args):
    "First updates in processes of their own: cold, then with what was compiled before"
    hw = detect()
    if args.cache and os.path.exists(args.cache) and os.listdir(args.cache):
        sys.exit(f'{args.cache} is not empty, so the first start would not be cold; take another folder')
    dropped = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR', 'PYTHONDONTWRITEBYTECODE')
    with contextlib.nullcontext(args.cache) if args.cache else tempfile.TemporaryDirectory() as folder:
        env, found = {k: v for k, v in os.environ.items() if k not in dropped}, []
        # Some images keep no bytecode, others that of all packages: neither would be cold first and then warm.
        env['PYTHONPYCACHEPREFIX'] = os.path.join(os.path.abspath(folder), 'python')
        small = ['--small'] if args.small else []
        command = [sys.executable, __file__, *options_of(args).split(), *small, '--once', folder]
        for kind in ('cold', 'warm', 'warm', COMPILED, COMPILED):
            imported = ['--imported'] if kind == COMPILED else []
            done = subprocess.run(command + imported, env=env, stdout=subprocess.PIPE, text=True)
            if done.returncode: sys.exit(f'the {kind} start ended with {done.returncode}')
            found.append(dict(start=kind, **json.loads(done.stdout.splitlines()[-1])))
            print(found[-1], flush=True)
            start_record(args, found, hw)  # after each: a run that is cut off leaves what it has
    print(f'record in {args.out}')


ATTENTION = 'flash', '_forward', '_backward', 'attention'  # in names of kernels of attention


def family(shape, args, precision, rounds=5):
    "Steps of 32 rows of one shape by our engine alone: seconds of a step, by round; what the record says of it"
    options = argparse.Namespace(**vars(args) | dict(shape=shape))
    model, store = data_of(options)
    work = Ours(our_engine(model, precision), store, 32)
    count = 2 if args.small else 10
    warm(shape, work, count)
    seconds = [seconds_of_steps(work, count) / count for _ in range(rounds)]
    engine, by_kernel = work.engine, {}
    call = engine.call_for(store)
    if args.bf16: by_kernel = kernels(work, 4, top=40)
    of_attention = {n: t for n, t in by_kernel.items() if any(word in n for word in ATTENTION)}
    about = dict(call='EndToEnd' if isinstance(call, EndToEnd) else 'padded', notes=engine.notes, reason=engine.reason,
                 attention=call.attention or None,
                 longest=dict(list(by_kernel.items())[:3]), attention_kernels=of_attention,
                 loss=loss_of(work.losses), shapes=[str(s) for s in engine.shapes_for(store, 32)])
    return seconds, about


def families(args):
    "A line for each shape, and a record of all; a shape that fails is named"
    hw = detect()
    args.bf16 = hw.device == 'cuda'
    precision = choose_precision(hw, prefer='bf16' if args.bf16 else 'fp32')
    names, rows, abouts = chosen(args.families.replace(',', ';'), SHAPES), [], {}
    for shape in names:
        try: seconds, abouts[shape] = family(shape, args, precision)
        except Exception as exc:
            abouts[shape] = dict(failed=f'{type(exc).__name__}: {exc}'[:300])
            print(f'{shape}: {abouts[shape]["failed"]}', flush=True)
        else:
            rows.append(alone_row(f'optkit, {SHAPES[shape][0]}', seconds))
            about = abouts[shape]
            longest = '; '.join(f'{n[:60]} {ms:.2f}' for n, (ms, _) in about['longest'].items())
            print(f"{shape:12} {about['call']:8} {about['attention'] or 'of transformers':16} "
                  f"{1e3 * np.median(seconds):8.2f} ms a step  notes {about['notes']}  kernels, ms: {longest}", flush=True)
        gc.collect()  # graphs hold their memory until then
        if args.bf16: torch.cuda.empty_cache()
        if rows:  # after each: a run that is cut off leaves what it has
            save_records(f'{args.out}/families-{hw.card}.json', rows, hw, 'python bench/peers.py --families',
                         families=json.dumps(abouts),
                         workload='classifiers of known shapes, random start, bf16, 32 rows a step, lognormal lengths '
                                  '16..512, AdamW, clip 1; ours alone',
                         note='call: whether rows go end to end; longest, attention_kernels: name to ms and calls a step')
    print(f'record in {args.out}')
    if not rows: sys.exit('no shape ran')


# Settings of `Trainer.predict`: rows of a batch, whether rows come sorted by length, further arguments
PREDICTS = {
    'hf predict, 64 rows': (64, False, {}),
    'hf predict, 256 rows': (256, False, {}),
    'hf predict, 256 rows sorted': (256, True, {}),
    'hf predict, 256 rows sorted, bf16 weights': (256, True, dict(bf16_full_eval=True)),
}


def predicted(args):
    "Prediction of the same rows, ours beside Trainer.predict; a record with the largest difference of logits"
    hw = detect()
    args.bf16 = hw.device == 'cuda'
    precision = choose_precision(hw, prefer='bf16' if args.bf16 else 'fp32')
    model, store = data_of(args)
    rows = np.arange(64 if args.small else 4096)
    engine = our_engine(model, precision)
    works, logits = {}, {}
    def ours(_): logits['optkit'] = engine.predict(store, rows)
    works['optkit'] = ours
    for name in chosen(args.only, PREDICTS):
        batch, in_order, kw = PREDICTS[name]
        data = Dataset(store)
        order = np.argsort(-store.lengths[rows], kind='stable') if in_order else rows
        subset = torch.utils.data.Subset(data, order.tolist())
        arguments = transformers.TrainingArguments(
            tempfile.mkdtemp(), per_device_eval_batch_size=batch, report_to=[], disable_tqdm=True, use_cpu=not args.bf16,
            dataloader_num_workers=2, dataloader_pin_memory=args.bf16, remove_unused_columns=False,
            **(dict(bf16=args.bf16) | ({k: v and args.bf16 for k, v in kw.items()})))
        trainer = transformers.Trainer(data_of(args)[0], arguments, data_collator=lambda rows: collate(rows, 8))
        def theirs(_, name=name, trainer=trainer, subset=subset, order=order):
            given = torch.as_tensor(trainer.predict(subset).predictions)
            logits[name] = given[torch.as_tensor(np.argsort(order, kind='stable'))]
        works[name] = theirs
    for name, work in works.items():
        begin = time.perf_counter()
        for _ in range(2): work(0)
        wait()
        print(f'{name}: two passes after {time.perf_counter() - begin:.1f} s', flush=True)
    result = compare(*[Variant(n, w) for n, w in works.items()], burn_in=0, width=.01, device=hw.device, progress=False,
                     budget_s=args.budget)
    print(result, flush=True)
    off = {n: float((logits['optkit'].float().cpu() - v.float()).abs().max()) for n, v in logits.items() if n != 'optkit'}
    best = best_of(result, PREDICTS)
    found = [asdict(record(result, n, samples=len(rows), tokens=int(store.lengths[rows].sum()), label='rounding'))
             | dict(baseline=best, ratio_before=None, ratio=asdict(result.ratio(n, best))) for n in result.names]
    for n in result.names: print(f'{n:48}{len(rows) / np.median(result.seconds[n]):8.0f} seq/s', flush=True)
    save_records(record_path(args, 'predict', hw), found, hw,
                 f'python bench/peers.py --predict {options_of(args)} --budget {args.budget:g}'.replace('  ', ' '),
                 differences=json.dumps(off),
                 workload=f'{SHAPES[args.shape][0]} shape, random start, bf16, {len(rows)} rows of lognormal lengths 16..512',
                 note='differences: largest difference of a logit from ours')
    print(f'logits differ by at most {off}; record in {args.out}')


def build(makers, limit, per_round, args, rows):
    "Variants that could be built in time: name to its work, and what building took"
    works, builds, rounds = {}, {}, []
    for name, make in makers.items():
        if works and limit() < 20 + 4 * sum(rounds):
            print(f'{name}: left out, {limit():.0f} s are left', flush=True)
            continue
        try:
            begin = time.perf_counter()
            work = make()
            builds[name] = dict(made_s=time.perf_counter() - begin, **warm(name, work, 4 if args.small else 40))
            rounds.append(seconds_of_steps(work, per_round))
            works[name], builds[name]['all_s'] = work, time.perf_counter() - begin
            print(f'{name}: {1e3 * rounds[-1] / per_round:.2f} ms a step of {rows} rows', flush=True)
            if isinstance(work, Ours):
                print(' ', work.engine, *work.engine.shapes_for(work.store, rows), sep='\n    ', flush=True)
            if args.kernels and args.bf16 and isinstance(work, Ours): builds[name]['kernels'] = kernels(work, 8)
        except Exception as exc: print(f'{name}: {type(exc).__name__}: {str(exc)[:600]}', flush=True)
        finally: work = None
    return works, builds, sum(rounds)


def compile_before(args, rows, names):
    """Compile the static shapes of peers, one process a length at a time, so that the comparison reads them from torch's
    cache on the disk: one after the other they take minutes a length. Seconds that it took"""
    begin, running = time.perf_counter(), []
    for name in names:
        step = PEERS[name].get('multiple', 8)
        options = [f'--shape={args.shape}', f'--rows={rows}', *['--small'] * args.small, f'--before={name}']
        for length in range(step, (64 if args.small else 512) + 1, step):
            running.append(subprocess.Popen([sys.executable, __file__, *options, f'--length={length}'],
                                            stdout=subprocess.DEVNULL))
    failed = sum(p.wait() != 0 for p in running)
    print(f'{len(running) - failed} of {len(running)} shapes compiled before, in {time.perf_counter() - begin:.0f} s',
          flush=True)
    return time.perf_counter() - begin


def compile_one(args):
    "Two steps of a peer whose rows all have one length"
    model, store = data_of(args)
    rows = int(args.rows)
    flat = torch.randint(10, 500 if args.small else 30000, (4 * rows * args.length,), dtype=torch.int32)
    lengths = np.full(4 * rows, args.length)
    store = TokenStore(flat, torch.arange(0, len(flat) + 1, args.length), torch.arange(4 * rows) % 2, None, lengths,
                       ('a', 'b'), args.length, 0, lengths)
    Peer(model, store, rows, torch.cuda.is_available(), **PEERS[args.before])(3)
    wait()


def best_of(result, names):
    "The quickest of `names` in a comparison, or None"
    of = [n for n in names if n in result.names]
    return min(of, key=lambda n: np.median(result.seconds[n])) if of else None


def at_rows(rows, args, hw, budget, limit):
    "Records of one number of rows a step, each against the best eager and the best compiled peer; and what was built"
    precision = choose_precision(hw, prefer='bf16' if hw.device == 'cuda' else 'fp32')
    model, store = data_of(args)
    per_round = max(4, args.per_round * 32 // rows)
    peers = {n: kw for n, kw in PEERS.items() if args.peers == 'all' or n in STRONG}
    if args.only: peers = PEERS
    elif args.small: peers = {n: kw for n, kw in peers.items() if 'compile' not in kw}
    makers = {'optkit': lambda: Ours(our_engine(data_of(args)[0], precision), store, rows)}
    makers |= {n: lambda kw=kw: Peer(data_of(args)[0], store, rows, args.bf16, **kw) for n, kw in peers.items()}
    makers = {n: makers[n] for n in chosen(args.only, makers)}
    before = [n for n in makers if PEERS.get(n, {}).get('dynamic') is False]
    before_s = compile_before(args, rows, before) if before else None
    works, builds, once = build(makers, limit, per_round, args, rows)
    if len(works) < 2: sys.exit(f'{rows} rows: nothing to compare with')
    print(f'a round takes {once:.1f} s, {min(budget, limit() - 10):.0f} s of rounds', flush=True)
    budget = min(budget, limit() - 10)
    # With few rounds all count.
    time_limit = (dict(budget_s=budget) if budget >= 8 * once else
                  dict(budget_s=float('inf'), max_rounds=max(3, int(budget / once)), watch=False))
    variants = [Variant(n, lambda _, w=w: w(per_round)) for n, w in works.items()]
    result = compare(*variants, burn_in=0, width=.01, device=hw.device, progress=False, **time_limit)
    print(result, flush=True)
    for n in result.names:
        seconds = float(np.median(result.seconds[n])) / per_round
        print(f'{n:48}{rows / seconds:8.0f} seq/s {1e3 * seconds:8.2f} ms a step of {rows} rows', flush=True)
    counted = dict(samples=rows * per_round, tokens=float(store.lengths.mean()) * rows * per_round,
                   flops=training_flops(model, store.lengths) / len(store) * rows * per_round,
                   peak=(hw.gpu and hw.gpu.peak or {}).get('bf16'))
    compiled = [n for n in peers if 'compile' in PEERS[n]]
    best = dict.fromkeys(b for b in (best_of(result, peers.keys() - set(compiled)), best_of(result, compiled)) if b)
    found = []
    for base in best:
        for n in result.names:
            kept = asdict(record(result, n, **counted, loss=loss_of(works[n].losses),
                                 label='rounding' if n.startswith('optkit') else 'changes training'))
            found.append(kept | dict(variant=f'{n}, {rows} rows', baseline=f'{base}, {rows} rows', ratio_before=None,
                                     ratio=asdict(result.ratio(n, base))))
    return found, builds | (dict(compiled_before_s=before_s) if before else {})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--shape', choices=SHAPES, default='w1')
    parser.add_argument('--rows', default='16,32,128', help='rows of an optimizer step, several with commas')
    parser.add_argument('--peers', choices=('strong', 'all'), default='strong', help='settings of the Trainer to try')
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--kernels', action='store_true', help='also record the kernels of a step of ours')
    parser.add_argument('--only', default='', help='names of variants, with ; between them (names hold commas)')
    parser.add_argument('--budget', type=float, default=40., help='seconds of the comparison at each number of rows')
    parser.add_argument('--limit', type=float, default=float('inf'),
                        help='seconds of all; what cannot be built in time is left out and named')
    parser.add_argument('--per-round', type=int, default=50,
                        help='steps of a round at 32 rows; peers that group by length repeat their lengths every 50')
    parser.add_argument('--start', action='store_true', help='seconds to the first update instead')
    parser.add_argument('--predict', action='store_true', help='prediction of the same rows instead of training')
    parser.add_argument('--families', nargs='?', const=','.join(SHAPES), help='ours alone, of these shapes or of all')
    parser.add_argument('--cache', help='an empty folder in which --start leaves what was compiled')
    parser.add_argument('--once', help=argparse.SUPPRESS)
    parser.add_argument('--before', help=argparse.SUPPRESS)
    parser.add_argument('--length', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--imported', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--out', default='bench/results', help='folder of the record')
    args = parser.parse_args()
    if args.small and args.out == 'bench/results': args.out = tempfile.mkdtemp()
    if args.once: return start_once(args)
    if args.before: return compile_one(args)
    if args.start: return start(args)
    if args.families: return families(args)
    if args.predict: return predicted(args)
    hw, began = detect(), time.perf_counter()
    args.bf16 = hw.device == 'cuda'
    numbers, rows, builds = [int(n) for n in args.rows.split(',')], [], {}
    for k, number in enumerate(numbers):
        def left(): return args.limit * (k + 1) / len(numbers) - (time.perf_counter() - began)
        try: found, builds[number] = at_rows(number, args, hw, args.budget, left)
        except (RuntimeError, ValueError, SystemExit) as exc:
            print(f'{number} rows: {type(exc).__name__}: {exc}', flush=True)
            continue
        rows += found
        topic = f'rows-{number}' if len(numbers) == 1 else 'rows'
        save_records(
            record_path(args, topic, hw), rows, hw,
            f'python bench/peers.py {options_of(args)} --rows {args.rows} --budget {args.budget:g}'.replace('  ', ' '),
            builds=json.dumps(builds), settings=json.dumps(PEERS),
            workload=f'{SHAPES[args.shape][0]} shape, random start, bf16, {args.rows} rows a step, lognormal lengths '
                     f'16..512, AdamW, clip 1; seconds are of {args.per_round} steps of 32 rows, or as many rows',
            note='peers group batches by length (changes training), ours are exact steps of a plain sampler; builds: '
                 'seconds to make each, from there to its first step and to 41 steps; loss: mean of 50 steps')
        if args.bf16: torch.cuda.empty_cache()
    print(f'record in {args.out}')
    if not rows: sys.exit('nothing was compared')


if __name__ == '__main__':
    main()
    sys.stdout.flush()
    os._exit(0)  # the peers' threads wait for ever
