"""LoRA and DoRA: peft's computation beside optkit's, on one frozen base, in one process, interleaved.

    python bench/adapters.py --shape w2            Gemma-3-1B shape, two labels, 12 rows of lognormal lengths a step
    python bench/adapters.py --shape w3            Llama-3-8B shape, causal on all tokens, 4 x 1024 a step
    python bench/adapters.py --shape tiny          a tiny Llama, without a GPU; the record goes into a folder of its own
    python bench/adapters.py --shape w2 --kind dora --only "optkit fast;peft" --limit 300
    python bench/adapters.py --memory w2,w3,w1     bytes that `forecast_memory` counts beside those that steps take

Sides of each kind of adapter (rank 16 on all linear layers, alpha 32, AdamW, clip 1.0, bf16):

    peft             its own loop, eager, padded to the longest row of a step
    peft grouped     the same with rows of like length in a step, which changes training
    peft compiled    each layer compiled for any length
    peft flash       flash attention, where that package is there
    optkit           the loop of `peft` on a model of `add_adapter`: what the computation alone gives
    optkit compiled  the loop of `peft compiled` on a model of `add_adapter`
    optkit fast      the fast engine, as a Trainer takes it
    peft no autocast        as `peft`, in the formats that the weights have, TF32 for the factors
    optkit compiled apart   as `optkit compiled`, but queries, keys and values (gate and up) each by itself

All sides of a run share the tensors of the base; each has an adapter of the same seed. A side that fails is printed with
its reason. Peaks are those of a side alone, the base included. The record is bench/results/<shape>-adapters-<card>.json.
"""
import argparse, gc, json, math, sys, tempfile, time, traceback, types
from dataclasses import asdict

import numpy as np
import torch
import transformers

from optkit.adapters import adapter_path, adapter_settings, add_adapter, keep_norms, shared_copy
from optkit.base import error_line
from optkit.build import make_engine
from optkit.config import TrainConfig
from optkit.hardware import detect
from optkit.precision import import_problem
from optkit.presets import forecast_memory
from optkit.records import Record, record, save_records
from optkit.steps import batch_of
from optkit.timing import compare, Variant
from optkit.workloads import made_up_store, WORKLOADS

SHAPES = dict(
    w2=dict(rows=12, steps=8, per_round=8, causal=False, lengths=dict(longest=512), words=WORKLOADS['w2'].words),
    w3=dict(rows=4, steps=4, per_round=2, causal=True, words='the shape of Llama-3-8B, causal, rows of 1024 tokens',
            lengths=dict(median=1024, sigma=0., shortest=1024, longest=1024)),
    w3mixed=dict(rows=4, steps=8, per_round=8, causal=True, words='the shape of Llama-3-8B, causal, lognormal lengths',
                 lengths=dict(median=512, sigma=.7, shortest=64, longest=2048)),
    tiny=dict(rows=4, steps=4, per_round=4, causal=True, words='a tiny Llama, causal',
              lengths=dict(median=20, sigma=.5, shortest=8, longest=48)),
    tinycls=dict(rows=4, steps=4, per_round=4, causal=False, words='a tiny Gemma-3, two labels',
                 lengths=dict(median=20, sigma=.5, shortest=8, longest=48)))
SIDES = ('optkit fast', 'peft', 'optkit compiled', 'peft compiled', 'optkit', 'peft grouped', 'peft flash',
         'optkit compiled apart', 'peft no autocast')
SEED = 0


def make_base(shape, device):
    "The model with random weights, in bf16 on a GPU"
    small = dict(vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, pad_token_id=0)
    makers = dict(
        w2=WORKLOADS['w2'].make, w3=WORKLOADS['w3'].make, w3mixed=WORKLOADS['w3'].make,
        tiny=lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
        tinycls=lambda: transformers.Gemma3TextForSequenceClassification(
            transformers.Gemma3TextConfig(**small, num_labels=2)))
    before = torch.get_default_dtype()
    torch.manual_seed(SEED)
    try:
        torch.set_default_dtype(torch.bfloat16 if device == 'cuda' else torch.float32)
        with torch.device(device): model = makers[shape]()
    finally: torch.set_default_dtype(before)
    return model.requires_grad_(False)


def make_store(spec, device):
    "Learnable rows, as many as the steps of a cycle take"
    store = made_up_store(spec['rows'] * spec['steps'], 4000, causal=spec['causal'], **spec['lengths'])
    return store.to(device)


def plan_of(spec, store, grouped=False):
    "Row numbers of each step of a cycle"
    rows = np.arange(len(store))
    if grouped: rows = np.argsort(store.lengths, kind='stable')
    parts = rows.reshape(-1, spec['rows'])
    return [*parts[np.random.default_rng(SEED).permutation(len(parts))]] if grouped else [*parts]


def batches_of(spec, store, plan, multiple):
    "Padded batches with labels, as transformers takes them"
    found = []
    for rows in plan:
        width = min(math.ceil(int(store.lengths[rows].max()) / multiple) * multiple, store.max_length)
        inputs, labels = batch_of(store, rows, width)
        inputs = {k: v for k, v in inputs.items() if k != 'token_type_ids'}
        if spec['causal']: labels = inputs['input_ids'].long().masked_fill(inputs['attention_mask'] == 0, -100)
        found.append(dict(**inputs, labels=labels, use_cache=False))
    return found


def wait():
    if torch.cuda.is_available(): torch.cuda.synchronize()


class Loop:
    "A plain training loop over a cycle of batches"
    def __init__(self, model, batches, autocast, lr):
        self.model, self.batches, self.autocast, self.number, self.losses = model.train(), batches, autocast, 0, []
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=lr, weight_decay=.01, fused=True)

    def __call__(self, count):
        for _ in range(count):
            inputs = self.batches[self.number % len(self.batches)]
            with torch.autocast('cuda', torch.bfloat16, enabled=self.autocast): loss = self.model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self.number += 1


class Fast:
    "The fast engine over the same rows"
    def __init__(self, engine, store, plan, lr):
        self.engine, self.store, self.plan, self.number, self.losses = engine, store, plan, 0, []
        engine.reset(lr=lr, rows=len(plan[0]))
        self.model = engine.model

    def __call__(self, count):
        for _ in range(count):
            rows = self.plan[self.number % len(self.plan)]
            self.losses.append(self.engine.step(self.store, rows).detach().clone())
            self.number += 1


def compile_layers(model, dynamic):
    "Each decoder layer compiled, all with the same code"
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    layers = max(lists, key=len)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    forward = torch.compile(type(layers[0]).forward, dynamic=dynamic)
    for layer in layers: layer.forward = types.MethodType(forward, layer)


def peft_model(base, kind, rank):
    import peft
    settings = adapter_settings(base, kind, rank)
    torch.manual_seed(SEED)
    return peft.get_peft_model(base, settings)


def make_side(side, kind, base, spec, store, args):
    "What trains: a call takes a number of steps"
    device, lr = args.device, args.lr
    whole = len({int(n) for n in store.lengths}) == 1
    if side == 'optkit fast':
        c = TrainConfig(adapter=kind, adapter_rank=args.rank, fast=True, seed=SEED, lr=lr, max_grad_norm=1.,
                        effective_batch=spec['rows'], physical_batch=spec['rows'],
                        graphs=None if args.graphs or 'w3' not in args.shape else False)
        return Fast(make_engine(shared_copy(base), c, args.hw), store, plan_of(spec, store), lr)
    if side == 'peft flash':
        if problem := import_problem('flash_attn'): raise RuntimeError(f'flash_attn: {problem}')
    model = shared_copy(base)
    if side == 'peft flash': model.set_attn_implementation('flash_attention_2')
    compiled = 'compiled' in side
    if side.startswith('peft'): model = peft_model(model, kind, args.rank)
    else:
        torch.manual_seed(SEED)
        model = add_adapter(model, kind, args.rank, together='apart' not in side)
        keep_norms(model)
    if compiled: compile_layers(model, dynamic=not whole)
    batches = batches_of(spec, store, plan_of(spec, store, side == 'peft grouped'), 64 if compiled and not whole else 8)
    return Loop(model, batches, device == 'cuda' and side != 'peft no autocast', lr)


def seconds_of(work, count):
    wait()
    begin = time.perf_counter()
    work(count)
    wait()
    return time.perf_counter() - begin


def memory():
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def build(kind, base, spec, store, args, left):
    "Sides that could be made in time: name to (work, what is known of it)"
    made, rounds = {}, 0.
    base_bytes = sum(t.numel() * t.element_size() for t in [*base.parameters(), *base.buffers()])
    for side in args.sides:
        name = f'{side}-{kind}'
        if made and left() < 30 + 4 * rounds:
            print(f'{name}: left out, {left():.0f} s are left', flush=True)
            continue
        before, work, begin = memory(), None, time.perf_counter()
        if torch.cuda.is_available(): torch.cuda.reset_peak_memory_stats()
        try:
            work = make_side(side, kind, base, spec, store, args)
            first = seconds_of(work, 1)
            seconds_of(work, 2 * spec['steps'] - 1)
            once = seconds_of(work, args.per_round)
            peak = torch.cuda.max_memory_allocated() - before + base_bytes if torch.cuda.is_available() else None
            made[name] = work, dict(first_step_s=first, built_s=time.perf_counter() - begin, peak_bytes=peak)
            rounds += once
            print(f'{name}: built in {time.perf_counter() - begin:.1f} s, {1e3 * once / args.per_round:.1f} ms a step, '
                  f'peak {(peak or 0) / 1e9:.1f} GB', flush=True)
            if isinstance(work, Fast): print('  ', work.engine, '|', *getattr(work.engine, 'notes', ()), flush=True)
            if side.startswith('optkit'): print('  ', adapter_path(work.model), flush=True)
        except Exception as exc:
            print(f'{name}: failed, {error_line(exc)}', flush=True)
            if args.trace: traceback.print_exc()
            traceback.clear_frames(exc.__traceback__)
        work = None
        gc.collect()
        if torch.cuda.is_available(): torch.cuda.empty_cache()
    return made, rounds


def loss_of(work, spec):
    "Mean loss of the first and of the last cycle"
    values = torch.stack([x.float().cpu() for x in work.losses]).tolist()
    n = spec['steps']
    return dict(first=float(np.mean(values[:n])), last=float(np.mean(values[-n:])), steps=len(values),
                curve=[round(v, 5) for v in values[:4 * n]])


def run_kind(kind, base, spec, store, args, left):
    "Records of one kind of adapter, and rows of the table"
    made, once = build(kind, base, spec, store, args, left)
    if len(made) < 2: return print(f'{kind}: nothing to compare with', flush=True) or ([], [])
    peft_name = f'peft-{kind}'
    names = sorted(made, key=lambda n: n != peft_name)
    budget = max(3 * once, min(args.budget, left() - 15))
    variants = [Variant(n, lambda _, w=made[n][0]: w(args.per_round)) for n in names]
    few = dict(budget_s=float('inf'), max_rounds=max(3, int(budget / once)), watch=False)
    limit = dict(budget_s=budget) if budget >= 8 * once else few
    usage = 2. if args.device == 'cuda' and left() - budget > 20 else 0.
    result = compare(*variants, burn_in=0, width=.01, device=args.device, progress=False, usage_s=usage, **limit)
    print(result, flush=True)
    tokens = float(store.lengths.mean()) * spec['rows'] * args.per_round
    peers = [n for n in names if n.startswith('peft') and 'grouped' not in n]
    best = min(peers or names, key=lambda n: np.median(result.seconds[n]))
    rows, table = [], []
    for n in names:
        work, known = made[n]
        loss = loss_of(work, spec)
        changes = n.startswith('peft grouped')
        for against in dict.fromkeys((names[0], best)):
            row = asdict(record(result, n, samples=spec['rows'] * args.per_round, tokens=tokens, loss=loss,
                                label='changes training' if changes else 'rounding', peak_bytes=known['peak_bytes']))
            rows.append(row | dict(baseline=against, ratio_before=None, ratio=asdict(result.ratio(n, against))))
        use = result.usage.get(n)
        table.append(dict(
            side=n, ms=1e3 * float(np.median(result.seconds[n])) / args.per_round, tokens_s=tokens /
            float(np.median(result.seconds[n])), ratio=result.ratio(n, names[0]), best=result.ratio(n, best), best_name=best,
            GB=(known['peak_bytes'] or 0) / 1e9, loss=loss, built_s=known['built_s'],
            kernels=use and getattr(use, 'kernels', None)))
    return rows, table


def swap_seconds(base, args):
    "Seconds of an adapter of another rank on a base that is there, three times"
    times = []
    for rank in (args.rank // 2, args.rank, args.rank // 4):
        wait()
        begin = time.perf_counter()
        add_adapter(shared_copy(base), 'dora', rank)
        wait()
        times.append(time.perf_counter() - begin)
    return times


MEMORY = dict( # by shape: rows, tokens, settings of each training
    w1=[(128, 512, {})],
    w2=[(12, 512, dict(adapter='lora')), (12, 512, dict(adapter='dora')), (12, 512, {})],
    w3=[(4, 1024, dict(adapter='lora')), (4, 1024, dict(adapter='dora')),
        (4, 1024, dict(adapter='lora', checkpointing='full'))],
    tiny=[(4, 32, dict(adapter='lora')), (4, 32, dict(adapter='dora', checkpointing='selective')), (4, 32, {})])


def shaped_model(shape, device):
    "The model of a shape, all of whose weights train"
    if shape == 'w1':
        torch.manual_seed(SEED)
        with torch.device(device): return WORKLOADS['w1'].make()
    return make_base(shape, device).requires_grad_(True)


def taken_bytes(shape, config, rows, tokens, causal, args):
    "Most bytes of tensors in three steps, and most that the allocator held; None without a GPU"
    gc.collect()
    cuda, before = args.device == 'cuda', memory()
    engine = make_engine(shaped_model(shape, args.device), config, args.hw)
    store = made_up_store(rows * 3, 4000, tokens, 0., tokens, tokens, causal=causal).to(args.device)
    engine.reset(lr=args.lr, rows=rows)
    if cuda: torch.cuda.reset_peak_memory_stats() # a replay allocates nothing: the first step of a graph counts
    for n in range(3): engine.step(store, np.arange(n * rows, (n + 1) * rows))
    print('  ', engine if config.fast else 'plain engine', *engine.notes, flush=True)
    return (torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()) if cuda else (None, None)


def compare_memory(args):
    "Forecast and measurement of each training, for both engines; one record a shape"
    for shape in args.memory.split(','):
        rows_of_record, causal = [], shape in ('w3', 'tiny')
        for rows, tokens, settings in MEMORY[shape]:
            for fast in (False, True):
                graphs = False if fast and shape == 'w3' and not args.graphs else None
                config = TrainConfig(effective_batch=rows, physical_batch=rows, fast=fast, graphs=graphs,
                                     precision='bf16' if args.device == 'cuda' else 'fp32', **settings)
                model = shaped_model(shape, 'meta')
                if args.device == 'cuda' and shape != 'w1': model = model.bfloat16()
                forecast = forecast_memory(model, config, rows, tokens, task='causal' if causal else 'classification', best=False)
                words = ', '.join([shape, 'fast' if fast else 'plain', *map(str, settings.values()), f'{rows} x {tokens}'])
                print(f'{words}: forecast {forecast.tensors / 1e9:.2f} GB of tensors, {forecast.peak / 1e9:.2f} with gaps',
                      {k: f'{v / 1e9:.2f}' for k, v in forecast.parts.items()}, flush=True)
                try: tensors, held = taken_bytes(shape, config, rows, tokens, causal, args)
                except Exception as exc:
                    print(f'{words}: failed, {error_line(exc)}', flush=True)
                    traceback.clear_frames(exc.__traceback__)
                    tensors = held = None
                if tensors:
                    print(f'{words}: measured {tensors / 1e9:.2f} GB of tensors ({forecast.tensors / tensors:.3f} of it '
                          f'forecast), the allocator held {held / 1e9:.2f}', flush=True)
                    rows_of_record.append(Record(words, '', label='exact', peak_bytes=tensors, loss=dict(
                        forecast=forecast.tensors, forecast_card=forecast.peak, held=held, parts=forecast.parts)))
                gc.collect()
                if args.device == 'cuda': torch.cuda.empty_cache()
        if rows_of_record: save_records(
            f'{args.out}/{shape}-forecast-{args.hw.card}.json', rows_of_record, args.hw,
            f'python bench/adapters.py --memory {shape}', workload=f'peaks of the shape {shape}, counted and measured')


def show(table, spec, args):
    "The table that is printed last"
    print(f"\n{spec['words']}, {spec['rows']} rows a step, rank {args.rank}, {args.hw.card}")
    print(f"{'side':24}{'ms/step':>9}{'rows/s':>9}{'tokens/s':>10}  {'x peft eager':24}{'x best peft':24}"
          f"{'peak GB':>8}{'kernels':>9}{'built s':>8}  loss")
    for t in table:
        rows_s = spec['rows'] / t['ms'] * 1e3
        kernels = '' if t['kernels'] is None else f"{t['kernels'] / args.per_round:.0f}"
        print(f"{t['side']:24}{t['ms']:9.1f}{rows_s:9.1f}{t['tokens_s']:10.0f}  {str(t['ratio']):24}{str(t['best']):24}"
              f"{t['GB']:8.1f}{kernels:>9}{t['built_s']:8.0f}  {t['loss']['first']:.4f} to {t['loss']['last']:.4f} "
              f"in {t['loss']['steps']}")


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--shape', choices=SHAPES, default='w2')
    parser.add_argument('--kind', default='lora,dora', help='kinds of adapter, with a comma between them')
    parser.add_argument('--only', default='', help=f'sides, with ; between them: {"; ".join(SIDES)}')
    parser.add_argument('--rank', type=int, default=16)
    parser.add_argument('--lr', type=float, default=1e-4)
    parser.add_argument('--budget', type=float, default=60., help='seconds of the comparison of each kind')
    parser.add_argument('--limit', type=float, default=float('inf'), help='seconds of all')
    parser.add_argument('--per-round', type=int, help='steps of a round; default: those of a cycle of batches')
    parser.add_argument('--graphs', action='store_true', help='capture graphs at 8B too: they hold memory beside the peers')
    parser.add_argument('--memory', nargs='?', const='w2,w3,w1', help=f'compare forecasts of memory: {", ".join(MEMORY)}')
    parser.add_argument('--trace', action='store_true', help='print the traceback of a side that fails')
    parser.add_argument('--out', default='bench/results', help='folder of the record')
    args = parser.parse_args()
    if bad := [s for s in (args.memory or '').split(',') if s and s not in MEMORY]:
        sys.exit(f"--memory: {', '.join(bad)} is unknown, expected some of {', '.join(MEMORY)}")
    unknown = [k for k in args.kind.split(',') if k not in ('lora', 'dora')]
    wanted = [s.strip() for s in args.only.split(';') if s.strip()]
    if unknown: sys.exit(f"--kind: {', '.join(unknown)} is unknown, expected lora or dora")
    if bad := [s for s in wanted if s not in SIDES]:
        sys.exit(f"--only: no side is named {', '.join(map(repr, bad))}; expected some of {'; '.join(SIDES)}")
    args.sides = [s for s in SIDES if not wanted or s in wanted]
    args.per_round = args.per_round or SHAPES[args.shape]['per_round']
    return args


def main():
    args, began = options(), time.perf_counter()
    args.hw = detect()
    args.device = args.hw.device
    if args.memory:
        if args.device != 'cuda' and args.memory != 'tiny': sys.exit('--memory needs a GPU; take --memory tiny')
        torch.set_float32_matmul_precision('high')
        return compare_memory(args)
    if args.shape.startswith('w') and args.device != 'cuda': sys.exit(f'{args.shape} needs a GPU; take --shape tiny')
    if args.shape.startswith('tiny') and args.out == 'bench/results': args.out = tempfile.mkdtemp()
    torch.set_float32_matmul_precision('high')
    spec, rows, table, kinds = SHAPES[args.shape], [], [], args.kind.split(',')
    base, store = make_base(args.shape, args.device), make_store(spec, args.device)
    print(f'{args.shape}: base and rows after {time.perf_counter() - began:.1f} s', flush=True)
    try: swaps = swap_seconds(base, args)
    except Exception as exc: swaps = print(f'change of rank: failed, {error_line(exc)}')
    if swaps: print('another rank on the same base:', ', '.join(f'{s:.2f} s' for s in swaps), flush=True)
    for n, kind in enumerate(kinds):
        def left(): return args.limit * (n + 1) / len(kinds) - (time.perf_counter() - began)
        try: more = run_kind(kind, base, spec, store, args, left)
        except Exception as exc:
            print(f'{kind}: failed, {error_line(exc)}', flush=True)
            if args.trace: traceback.print_exc()
            continue
        rows, table = rows + more[0], table + more[1]
        torch._dynamo.reset()
        gc.collect()
        if args.device == 'cuda': torch.cuda.empty_cache()
        if rows: save_records(
            f'{args.out}/{args.shape}-adapters-{args.hw.card}.json', rows, args.hw,
            f'python bench/adapters.py --shape {args.shape} --kind {args.kind} --budget {args.budget:g}',
            swap_s=json.dumps(swaps), builds=json.dumps({t['side']: t['built_s'] for t in table}),
            workload=f"{spec['words']}, {spec['rows']} rows a step, random start, rank {args.rank} on all linear layers, "
                     f'AdamW, clip 1; seconds are of {args.per_round} steps')
    if not rows: sys.exit('nothing was compared')
    show(table, spec, args)
    print(f'record in {args.out}')


if __name__ == '__main__': main()
