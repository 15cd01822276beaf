"""What looking costs a training: the packaged model is trained with and without live views of its run.

    python bench/view_cost.py --out bench/results                      # minutes; on a GPU too, with --rows 32 --tokens 256; without packages and network also with --model PACK/model of minilm_folds.py --pack
    python bench/view_cost.py --seconds 20 --rounds 5 --out FOLDER     # a short look

The training runs in a Jupyter kernel, as a cell of a notebook does. It appends a reading to its run folder at each step, so
that each look of a view finds something new to show. Three ways in turns, and the first one twice as a control:
no view; `training_view` and `watch` live in threads of the same kernel; the same two live in a kernel of another process. The
views are there all the time and are held still while it is not their turn; a quarter into each turn they look at once,
so that a turn holds more looks than the same time of a view that has been open for long, and each look has steps
without one before and after it.

Two clocks: the wall, and the processor seconds of the training's process, all threads, so those of views in it too. The
second one is not misled by what else a machine does, and does not see a wait for a core, a lock or the disk.

Where the control shows that turns differ more than views can cost, a third comparison tells more: within the turns of the
views in the same kernel, each step during which one of them looked, over the mean of the nearest steps before and after it
during which none did. That ratio, less 1, times the share of such steps is what views cost the training.
"""
import argparse, dataclasses, json, os, shlex, signal, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NAMES = 'no view', 'no view, again', 'views in the same kernel', 'views in another process'


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, value, said in (('rows', int, 16, 'of an optimizer step'), ('tokens', int, 32, 'of a row'), ('rounds', int, 60, 'at most'), ('seconds', float, 420., 'of all rounds, at most'), ('turn', float, 4., 'seconds of a turn, about'),
                                    ('model', str, 'demo', 'folder of the model; the packaged one'), ('out', str, 'bench/results', 'folder of the record')):
        parser.add_argument(f'--{name}', type=kind, default=value, help=said)
    return parser.parse_args(argv)


BEGAN = time.time()


def said(text): print(f'{time.time() - BEGAN:5.0f} s  {text}', flush=True)


def started():
    "A Jupyter kernel that answers: (manager, client)"
    from jupyter_client.manager import KernelManager
    manager = KernelManager(kernel_name='python3')
    manager.start_kernel(cwd=str(ROOT), extra_arguments=['--IPKernelApp.log_level=ERROR'])
    client = manager.client()
    client.start_channels(); client.wait_for_ready(120)
    return manager, client


def live(folder):
    "The two views, live: an event, they look while it is set, the processor seconds of each of their looks, and when each began and ended"
    import threading
    from optkit.training_views import _show, training_view, watch
    gate, spent, at = threading.Event(), [], []
    for view in (training_view(folder), watch(folder)):
        _show(view)
        def look(view=view, look=view.look): gate.wait(); view.since = time.thread_time(), time.perf_counter(); return look()
        def refresh(view=view, refresh=view.refresh): refresh(); spent.append(time.thread_time() - view.since[0]); at.append((view.since[1], time.perf_counter()))
        view.look, view.refresh = look, refresh
    return gate, spent, at


def looker(folder):
    "In a kernel of its own: views, until it is killed. SIGSTOP and SIGCONT hold it still"
    live(folder)[0].set()
    while True: time.sleep(60)


def training(args, folder):
    "An engine and a function that makes one step and writes a reading"
    import numpy as np
    from optkit.table import read_table
    from optkit.store import tokenise
    from optkit.steps import MicroBatch
    from optkit.models import load_model, load_tokenizer
    from optkit.hardware import detect
    from optkit.table import DEMO_DATA
    from optkit.progress import Meter
    from optkit.config import TrainConfig
    from optkit.build import make_engine
    hardware, tokenizer, table = detect(), load_tokenizer(args.model), read_table(DEMO_DATA, 'subject', 'label', 'body')
    said('packages imported, data read')
    engine = make_engine(load_model(args.model, table.classes, tokenizer), TrainConfig(lr=1e-5, effective_batch=args.rows), hardware)
    store = tokenise(table, tokenizer, args.tokens, progress=False).to(engine.device)
    meter, count = Meter(10**6, 1, 'macro_f1', engine.device, path=folder / 'progress.json'), iter(range(1, 10**6))
    def step():
        n = next(count)
        rows = np.arange(n * args.rows, (n + 1) * args.rows) % len(store)
        loss = engine.step(store, [MicroBatch(rows, args.tokens)])
        meter.count(args.rows, 1, args.rows * args.tokens)
        meter.read(n, 1, float(loss))
    return hardware, engine, step


def beside_steps(turns, at):
    "Of `turns`, lists of (begin, end) of steps: each step that overlaps one of `at` over the mean of its neighbours that do not, and the share of steps that do"
    import numpy as np
    at, ratios, looked, steps = np.array(sorted(at)).reshape(-1, 2), [], 0, 0
    for turn in turns:
        begin, end = np.array(turn).T
        hit, took = ((at[:, :1] < end) & (at[:, 1:] > begin)).any(0), end - begin
        looked, steps, free = looked + hit.sum(), steps + len(hit), np.flatnonzero(~hit)
        for n in np.flatnonzero(hit):
            if (before := free[free < n]).size and (after := free[free > n]).size: ratios.append(took[n] / took[[before[-1], after[0]]].mean())
    return ratios, float(looked / steps)


def measure(args, folder, looker_pid):
    "Turns of the four ways, by two clocks"
    from optkit.timing import compare, median_ratio, Variant
    hardware, engine, step = training(args, folder)
    for _ in range(3): start = time.perf_counter(); step(); one = time.perf_counter() - start
    said(f'a step takes {one:.3g} s')
    gate, spent, at = live(folder)
    steps, cpu, turns = max(1, round(args.turn / one)), {name: {} for name in NAMES}, []
    def turn(name):
        def run(number):
            before, ticks = time.process_time(), [time.perf_counter()]
            for n in range(steps):
                if n == steps // 4 and name == NAMES[2]: gate.set()
                if n == steps // 4 and name == NAMES[3]: os.kill(looker_pid, signal.SIGCONT)
                step(); ticks.append(time.perf_counter())
            cpu[name][number] = time.process_time() - before
            if name == NAMES[2]: turns.append([*zip(ticks, ticks[1:])])
            gate.clear()
            os.kill(looker_pid, signal.SIGSTOP)
        return Variant(name, run)
    time.sleep(3) # until both views wait for their turn
    spent.clear()
    said(f'views are there; turns of {steps} steps for {args.seconds:.0f} s, and those that warm up')
    found = compare(*map(turn, NAMES), budget_s=args.seconds, max_burn_in=4, max_rounds=args.rounds, width=.002, device=engine.device, watch=False, progress=False)
    ratios, share = beside_steps(turns, at)
    slowed = median_ratio(ratios)
    looks = dict(looks=len(spent), look_ms=round(1e3 * sum(spent) / max(1, len(spent)), 2), looks_share_of_time=round(sum(spent) / sum(t[-1][1] - t[0][0] for t in turns), 5), # of the views in the same kernel, warm-up included
                 step_with_look=dict(p50=slowed.p50, low=slowed.low, high=slowed.high, steps=len(ratios), share=round(share, 4)), training_slowed={k: round((getattr(slowed, k) - 1) * share, 5) for k in ('p50', 'low', 'high')})
    return hardware, dict(steps=steps, **looks), found, dataclasses.replace(found, seconds={n: [cpu[n][k] for k in found.numbers] for n in NAMES})


def in_kernel(argv, folder, looker_pid):
    "What the kernel runs: measures, and writes the record"
    from optkit.records import record, save_records
    args, folder = parse(argv), Path(folder)
    hardware, more, wall, cpu = measure(args, folder, looker_pid)
    print(wall, cpu, more, sep='\n')
    rows = [dataclasses.replace(record(c, n, samples=more['steps'] * args.rows), variant=f'{n}, {clock}', baseline=f'{NAMES[0]}, {clock}', peak_bytes=None) for clock, c in (('wall', wall), ('processor', cpu)) for n in NAMES]
    import torch
    path = Path(args.out) / f'view-cost-{hardware.card}.json'
    save_records(path, rows, hardware, shlex.join(['python', 'bench/view_cost.py', *argv]), workload=f'{"packaged model (BERT 6 x 384)" if args.model == "demo" else "model of a folder"}, {args.rows} rows of {args.tokens} tokens a step, a reading each step',
                 **more, threads=torch.get_num_threads(), note=f'load {os.getloadavg()[1]:.1f} over the last 5 minutes on {os.cpu_count()} cores, this measurement included')
    print(f'record: {path}')


def main(argv):
    args = parse(argv)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    from optkit.progress import Progress, write_progress
    with tempfile.TemporaryDirectory() as folder:
        write_progress(Path(folder) / 'progress.json', Progress('running', 0, 10**6, 1, 1))
        beside, client = started()
        other, watcher = started()
        said('two kernels answer')
        begin = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import view_cost; "
        try:
            pid = watcher.execute(begin + f'import os; print(os.getpid()); view_cost.looker({folder!r})') and other.provisioner.pid
            time.sleep(15) # until its views are there
            os.kill(pid, signal.SIGSTOP)
            reply = client.execute_interactive(begin + f'view_cost.in_kernel({argv!r}, {folder!r}, {pid})', timeout=None, allow_stdin=False, output_hook=shown)
        finally:
            for manager, c in ((beside, client), (other, watcher)):
                c.stop_channels()
                if manager.has_kernel and manager.provisioner.pid: os.kill(manager.provisioner.pid, signal.SIGCONT)
                manager.shutdown_kernel(now=True)
    return reply['content']['status'] != 'ok'


def shown(message):
    content = message['content']
    if message['msg_type'] == 'stream': print(content['text'], end='', flush=True)
    if message['msg_type'] == 'error': print('\n'.join(content['traceback']), file=sys.stderr)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
