"""An optimizer step in one piece and in four, eager and under the modes of torch.compile.

    python bench/micro_batches.py            BERT-base shape, 32 rows of 128 tokens; writes bench/results/bert-micro-batches-<card>.json
    python bench/micro_batches.py --small    a tiny model, to try the script out without a GPU; writes into a folder of its own

All engines take the same steps from the same weights, without dropout. The losses of their first steps stand in the record.
"""
import argparse, copy, tempfile, time
from dataclasses import asdict

import numpy as np
import torch

from optkit.steps import Layout, steps
from optkit.engine import Engine
from optkit.hardware import detect
from optkit.precision import choose_precision
from optkit.timing import compare, Variant
from optkit.records import record, save_records
from peers import model_of, rows_of

MODES = (None, 'default', 'reduce-overhead')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--budget', type=float, default=20., help='seconds of rounds')
    args = parser.parse_args()
    hw = detect()
    model = model_of('bert', args.small)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout): module.p = 0.
    store = rows_of(model.config.vocab_size, 64, 32 if args.small else 128)
    store = store.to('cuda' if hw.gpu else 'cpu')
    engines, losses, builds = {}, {}, {}
    for mode in MODES[:2 if args.small else 3]:
        for pieces in (1, 4):
            name = f'{mode or "eager"}, {pieces} micro-batch{"es" if pieces > 1 else ""}'
            engine = Engine(copy.deepcopy(model), choose_precision(hw), compile=mode)
            engine.reset(lr=1e-4)
            plan = [*steps(store, np.arange(64), 32, layout=Layout('full', 32 // pieces))]
            start = time.perf_counter()
            losses[name] = [engine.step(store, plan[n % 2]).item() for n in range(8)]
            builds[name], engines[name] = time.perf_counter() - start, (engine, plan)
            print(f'{name}: first eight steps in {builds[name]:.1f} s, losses {losses[name][0]:.5f} to {losses[name][-1]:.5f}', flush=True)
    first = losses['eager, 1 micro-batch']
    assert all(np.allclose(first, other, rtol=.03) for other in losses.values()), losses
    def step_of(engine, plan): return lambda round: [engine.step(store, plan[n % 2]) for n in range(4)]
    variants = [Variant(n, step_of(*e)) for n, e in engines.items()]
    result = compare(*variants, budget_s=args.budget, width=.005, device=store.tokens.device.type)
    print(result)
    rows = [asdict(record(result, n, samples=128, label='rounding')) | dict(loss=dict(first=losses[n][0], eighth=losses[n][-1])) for n in result.names]
    save_records(f'{tempfile.mkdtemp() if args.small else "bench/results"}/bert-micro-batches-{hw.card}.json', rows, hw,
                 'python bench/micro_batches.py', builds=builds,
                 workload='BERT-base shape, 32 rows of 128 tokens a step, bf16 autocast, no dropout')


if __name__ == '__main__': main()
