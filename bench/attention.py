"""DeBERTa's attention alone, forward and backward, on 16,384 tokens of 12 heads of 64: our kernels beside others'.

    python bench/attention.py            rows of lognormal lengths, and of 512 tokens; writes bench/results/
                                         attention-lognormal-<card>.json and attention-512-<card>.json
    python bench/attention.py --small    few tokens, to try the script out without a GPU; writes into a folder of its own

bf16, c2p and p2c with 256 buckets, dropout 0.1 where a variant has it. Peers of PyPI take part where they can be
imported: disentangled-flash on rows end to end, flashdeberta on rows end to end without dropout. `transformers` is the
eager module without its projections, on rows sorted by length in groups of 16, each padded to its longest row.
All outputs without dropout are compared with the eager module's in float32 before timing.
"""
import argparse, math, tempfile, time
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention

from optkit.disentangled import disentangled_attention, distances, plain_disentangled
from optkit.hardware import detect
from optkit.timing import compare, Variant
from optkit.records import record, save_records


def lengths_of(kind, tokens):
    "Lengths of rows that hold so many tokens, the longest first"
    if kind == '512': return [512] * (tokens // 512)
    rng, lengths = np.random.default_rng(0), []
    while sum(lengths) < tokens: lengths.append(int(np.clip(rng.lognormal(math.log(110), .7), 16, 512)))
    lengths[-1] -= sum(lengths) - tokens
    return sorted(lengths, reverse=True)


class Projected(DisentangledSelfAttention):
    "The eager module without its projections: it is given queries, keys and values side by side, and both tables"
    def __init__(self, config):
        super().__init__(config)
        self.query_proj, self.key_proj, self.value_proj = (Part(n, config.hidden_size) for n in range(3))

    def forward(self, qkv, mask, table, relative):
        return super().forward(qkv, mask, rel_embeddings=table, relative_pos=relative)[0]


class Part(torch.nn.Module):
    "The columns of one projection"
    def __init__(self, number, width):
        super().__init__()
        self.columns = slice(number * width, (number + 1) * width)

    def forward(self, x): return x[..., self.columns]


class Work:
    "Inputs of a workload, and the variants as functions of dropout that give the context [tokens, width]"
    def __init__(self, kind, tokens, heads, depth, device, dtype):
        torch.manual_seed(0)
        self.lengths, self.shape = lengths_of(kind, tokens), (heads, depth)
        self.config = DebertaV2Config(
            hidden_size=heads * depth, num_attention_heads=heads, hidden_dropout_prob=0.,
            attention_probs_dropout_prob=0., max_relative_positions=-1, max_position_embeddings=512,
            relative_attention=True, position_buckets=256, pos_att_type=['p2c', 'c2p'], share_att_key=True)
        self.module = DisentangledSelfAttention(self.config).to(device)
        draw = lambda *shape: torch.randn(*shape, heads, depth, device=device).to(dtype).requires_grad_()
        self.qkv, self.pos_key, self.pos_query = draw(tokens, 3), draw(512), draw(512)
        self.inputs, self.sent = [self.qkv, self.pos_key, self.pos_query], torch.randn_like(self.qkv[:, 0])
        self.scale = 1 / math.sqrt(3 * depth)
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)
        self.far = distances(self.module, max(self.lengths), device)

    def optkit(self, dropout):
        return disentangled_attention(*self.inputs, self.far, self.ends, self.scale, dropout)

    def transformers(self, dropout, rows=16):
        heads, depth = self.shape
        module = Projected(self.config).to(self.qkv.device)
        module.dropout = torch.nn.Dropout(dropout)
        positions, out = torch.cat([self.pos_query.flatten(1), self.pos_key.flatten(1)], -1), []
        parts = self.qkv.flatten(1).split(self.lengths)
        for start in range(0, len(parts), rows):
            padded = torch.nn.utils.rnn.pad_sequence(parts[start:start + rows], batch_first=True)
            held = self.held(start, rows, padded.shape[1])
            mask = held[:, None, :, None] & held[:, None, None]
            out.append(module(padded, mask, positions, self.relative(padded.shape[1]))[held])
        return torch.cat(out).unflatten(-1, self.shape)

    def held(self, start, rows, longest):
        lengths = (self.ends[1:] - self.ends[:-1])[start:start + rows]
        return torch.arange(longest, device=lengths.device) < lengths[:, None]

    def relative(self, length, known={}):
        "Buckets of distances, made once for each length as a model's encoder does"
        from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
        if length not in known:
            one = torch.empty(length, 1, device=self.qkv.device)
            known[length] = build_relative_position(one, one, 256, 512)
        return known[length]

    def disentangled_flash(self, dropout):
        "With the launch configurations that its module takes by default"
        from disentangled_flash import TritonTrainingDisentangledSelfAttention
        from disentangled_flash.position import pad_position_table
        from disentangled_flash.training._kernels import training_attention_packed
        if 'peer' not in self.__dict__:
            self.peer = TritonTrainingDisentangledSelfAttention(self.config).to(self.qkv.device)
            self.plan = self.peer.position_plan_cache.compact(max(self.lengths), self.qkv.device)
        options = dict(
            hidden_states=self.qkv, sequence_length=max(self.lengths), batch_heads=len(self.lengths) * self.shape[0],
            active_slots=len(self.plan.active_slots), has_c2p=True, has_p2c=True, layout='packed',
            uses_padding_mask=False, has_dropout=dropout > 0)
        phases = dict(forward_config='training_forward', dq_config='backward_dq', dkv_config='backward_dkv')
        configs = {n: self.peer._resolve_kernel_config(**options, phase=p) for n, p in phases.items()}
        tables = [pad_position_table(t[self.plan.active_slots].transpose(0, 1).contiguous())
                  for t in (self.pos_key, self.pos_query)]
        return training_attention_packed(
            *(t.transpose(0, 1) for t in self.qkv.unbind(1)), *tables, self.plan.delta_to_local, self.ends,
            max_seqlen=max(self.lengths), score_scale=self.scale, strict_fp32=False, dropout_p=dropout,
            gradient_band=self.plan.gradient_band, **configs).reshape(self.sent.shape)

    def flashdeberta(self, dropout):
        from flashdeberta.ops.flash_attention_varlen import flash_attention_with_disentangled_varlen
        tables = [t.transpose(0, 1)[None].contiguous() for t in (self.pos_key, self.pos_query)]
        longest = max(self.lengths)
        return flash_attention_with_disentangled_varlen(
            *(t.contiguous() for t in self.qkv.unbind(1)), *tables, self.ends, self.ends, longest, longest, False,
            self.scale, 256, 512)


def difference(work, run, want):
    "Of the context and of all gradients, the largest: the norm over that of the plain form in float32"
    out = run(0.)
    got = [out, *torch.autograd.grad(out, work.inputs, work.sent)]
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want))


def plain(work):
    "Context and gradients in float32, row by row"
    inputs = [t.detach().float().requires_grad_() for t in work.inputs]
    out = plain_disentangled(*inputs[0].unbind(1), *inputs[1:], work.far, work.ends, work.scale)
    return [out, *torch.autograd.grad(out, inputs, work.sent.float())]


def peak_of(run):
    if not torch.cuda.is_available(): return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--kinds', default='lognormal,512', help='workloads, with commas')
    parser.add_argument('--budget', type=float, default=12., help='seconds of rounds for each workload')
    args = parser.parse_args()
    hw = detect()
    sizes = (600, 2, 32, 'cpu', torch.float32) if args.small else (16384, 12, 64, 'cuda', torch.bfloat16)
    for kind in args.kinds.split(','):
        work = Work(kind, 512 if args.small and kind == '512' else sizes[0], *sizes[1:])
        want, variants, notes = plain(work), [], {}
        runs = {'transformers': (work.transformers, .1), 'optkit': (work.optkit, .1),
                'optkit, dropout 0': (work.optkit, 0.), 'disentangled-flash': (work.disentangled_flash, .1),
                'flashdeberta, dropout 0': (work.flashdeberta, 0.)}
        for name, (run, dropout) in runs.items():
            start = time.perf_counter()
            try: notes[name] = dict(difference=difference(work, run, want))
            except Exception as exc: # not installed, or not for this machine
                notes[name] = dict(missing=f'{type(exc).__name__}: {exc}'[:200])
                print(f'{kind}, {name}: {notes[name]["missing"]}', flush=True)
                continue
            def both(round, run=run, dropout=dropout):
                for _ in range(3): torch.autograd.grad(run(dropout), work.inputs, work.sent)
            both(0)
            notes[name] |= dict(first_s=time.perf_counter() - start, peak_bytes=peak_of(partial(both, 0)))
            print(f'{kind}, {name}: {notes[name]}', flush=True)
            variants.append(Variant(name, both))
        result = compare(*variants, budget_s=args.budget, width=.01, device=sizes[3])
        print(result, flush=True)
        rows = [asdict(record(result, n, samples=3 * len(work.lengths), label='rounding'))
                | dict(peak_bytes=notes[n]['peak_bytes']) for n in result.names]
        pairs = sum(n * n for n in work.lengths)
        save_records(f'{tempfile.mkdtemp() if args.small else "bench/results"}/attention-{kind}-{hw.card}.json', rows, hw,
                     'python bench/attention.py', notes=notes,
                     workload=f'{sum(work.lengths):,} tokens in {len(work.lengths)} rows ({kind}), {pairs:,} pairs, '
                              f'{work.shape[0]} heads of {work.shape[1]}, forward and backward')


if __name__ == '__main__': main()
