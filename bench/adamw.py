"""One optimizer update, captured: the flat arrays of the fast engine beside torch's own fused AdamW.

    python bench/adamw.py            DeBERTa-v3-base and BERT-base shapes; writes bench/results/w1-adamw-<card>.json
    python bench/adamw.py --small    a tiny model, to try the script out without a GPU; writes into a folder of its own

Each update clips the gradients to a norm of 1, applies AdamW and clears the gradients, replayed from a CUDA graph.
`torch` clips with `clip_grad_norm_`; `torch, grad_scale` gives the clipping factor to the fused kernel, which
divides while it reads; `flat` is `FlatAdamW`. Before timing, three updates from equal gradients must leave equal
weights; timed updates read gradients that the one before cleared, which moves the same bytes.
"""
import argparse, copy, tempfile
from dataclasses import asdict

import torch

from optkit.fast import FlatAdamW
from optkit.hardware import detect
from optkit.timing import compare, Variant
from optkit.records import record, save_records
from peers import model_of


def groups_of(model):
    "Weights with weight decay, and those without"
    trained = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in trained if p.ndim > 1], weight_decay=.01),
            dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.)]


def torch_update(optimizer, params, scaled):
    "Clip, update and clear with torch's own optimizer"
    def update():
        gradients = [p.grad for p in params]
        if scaled:
            norm = torch.nn.utils.get_total_norm(gradients)
            optimizer.grad_scale.copy_((norm + 1e-6).clamp(min=1.))
        else: torch.nn.utils.clip_grad_norm_(params, 1.)
        optimizer.step()
        torch._foreach_zero_(gradients)
    return update


def captured(update, device):
    "The update as a replay of a CUDA graph; the update itself on a CPU"
    if device != 'cuda': return update
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3): update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): update()
    def replay(holds=update): graph.replay() # the graph reads memory of what `update` holds
    return replay


def update_of(name, model, device):
    "A function that updates the weights of a copy of the model once, and its gradients"
    model = copy.deepcopy(model).to(device)
    params, groups = [p for p in model.parameters() if p.requires_grad], groups_of(model)
    if name == 'flat':
        optimizer = FlatAdamW(groups)
        optimizer.max_norm.fill_(1.)
        for group in optimizer.param_groups: group['lr'].fill_(1e-5)
        return captured(optimizer.step, device), params
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-5, device=device), fused=True, capturable=device == 'cuda')
    for p in params: p.grad = torch.zeros_like(p)
    scaled = name.endswith('grad_scale')
    if scaled: optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    return captured(torch_update(optimizer, params, scaled), device), params


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--budget', type=float, default=15., help='seconds of rounds for each shape')
    args = parser.parse_args()
    hw, rows = detect(), []
    device = 'cuda' if hw.gpu else 'cpu'
    out = tempfile.mkdtemp() if args.small else 'bench/results'
    for shape in ('w1', 'bert'):
        model = model_of(shape, args.small)
        torch.manual_seed(0)
        gradients = [1e-3 * torch.randn_like(p).to(device) for p in model.parameters()]
        updates, weights, norms = {}, {}, {}
        for name in ('torch', 'torch, grad_scale', 'flat'):
            update, params = update_of(name, model, device)
            updates[name], weights[name] = update, params
            for _ in range(3):
                torch._foreach_copy_([p.grad for p in params], gradients)
                update()
            norms[name] = sum(p.detach().double().abs().sum().item() for p in params)
        base = norms['torch']
        assert all(abs(n / base - 1) < 1e-6 for n in norms.values()), norms
        times = 20 if device == 'cuda' else 1
        def step_of(update):
            def step(round):
                for _ in range(times): update()
            return step
        result = compare(*(Variant(n, step_of(u)) for n, u in updates.items()), budget_s=args.budget, width=.005, device=device)
        print(shape, result, sep='\n')
        for name in result.names:
            rows.append(asdict(record(result, name, samples=times, label='rounding')) | dict(variant=f'{shape}, {name}', baseline=f'{shape}, torch'))
    save_records(f'{out}/w1-adamw-{hw.card}.json', rows, hw, 'python bench/adamw.py',
                 workload='one AdamW update with clipping of all weights of DeBERTa-v3-base (w1) and BERT-base (bert), FP32')


if __name__ == '__main__': main()
