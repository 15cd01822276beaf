"Checkpoints: resumed runs equal uninterrupted ones bit for bit, kills and full disks leave the last good one, other runs are refused; progress and runs beside the caller"
import gc, json, multiprocessing, os, pickle, random, resource, shutil, signal, time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from optkit import checkpoint as checkpoint_module
from optkit.checkpoint import (
    check_same, checkpoints, latest_checkpoint, model_digest, read_checkpoint, rows_digest, save_model)
from optkit.base import InputError
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.steps import Layout
from optkit.models import example_model
from optkit.hardware import hardware_with
from optkit.progress import BackgroundRun, live, Meter, Progress, read_progress
from optkit.config import TrainConfig
from optkit.build import make_engine
from optkit.trainer import RunState, Trainer

torch.set_num_threads(1)
HERE = hardware_with(None)
TRAIN, VALID = np.arange(60), np.arange(60, 90)
BASE = TrainConfig(epochs=3, lr=3e-3, effective_batch=16, precision='fp32', read_every=3, save_every=1, seed=5)


@pytest.fixture(scope='module')
def store(): return tokenise(example_table(90), word_tokenizer(), 48, progress=False)


def trainer_of(store, folder=None, config=BASE, model=None, **kwargs):
    return Trainer(make_engine(model or example_model(dropout=.1), config, HERE), store, config, folder=folder, **kwargs)

def final(trainer): return {k: v.detach().clone() for k, v in trainer.engine.state().items()}
def same(a, b): return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())
def numbers(result): return [(e.epoch, e.train_loss, e.valid_loss, e.score, e.metrics, e.lr) for e in result.history]


class Stop(Exception): pass

@pytest.mark.parametrize('config', [BASE, replace(BASE, ema=.9, layout='packed', class_weights='balanced', schedule='cosine', save_every=3), replace(BASE, layout='padded', physical_batch=5, label_smoothing=.1, save_every=2),
                                    replace(BASE, precision='bf16', patience=2)], ids=['plain', 'average, packed', 'micro-batches', 'bf16'])
@pytest.mark.parametrize('at', [1, 4, 7, 11])
def test_a_resumed_run_is_the_uninterrupted_one(store, tmp_path, config, at):
    "Broken off after step `at` of 12, by an exception; with dropout; also what the epochs reported"
    whole = trainer_of(store, config=config)
    want = whole.fit(TRAIN, VALID)
    def breaks(done, total):
        if done == at: raise Stop
    try: trainer_of(store, tmp_path, config, on_step=breaks).fit(TRAIN, VALID)
    except Stop: pass
    torch.manual_seed(99); torch.rand(5)
    again, steps = trainer_of(store, tmp_path, config), []
    again.on_step = lambda done, total: steps.append(done)
    found = again.fit(TRAIN, VALID, resume=True)
    assert same(final(whole), final(again)) and numbers(found) == numbers(want) and (found.best_epoch, found.score) == (want.best_epoch, want.score)
    assert steps[0] <= at + 1 and steps == [*range(steps[0], 13)]


def test_a_finished_run_gives_its_result_again(store, tmp_path):
    first = trainer_of(store, tmp_path)
    want = first.fit(TRAIN, VALID)
    again = trainer_of(store, tmp_path)
    again.engine.step = None # nothing is trained
    found = again.fit(TRAIN, VALID, resume=True)
    assert numbers(found) == numbers(want) and same(final(first), final(again))


def test_what_a_run_folder_holds(store, tmp_path):
    trainer = trainer_of(store, tmp_path, replace(BASE, save_every=None, keep=1), tokenizer=word_tokenizer())
    result = trainer.fit(TRAIN, VALID)
    assert {p.name for p in tmp_path.iterdir()} == {'checkpoints', 'model', 'progress.json', 'progress.jsonl', 'train.json', 'train_config.json'} and [p.name for p in checkpoints(tmp_path)] == ['step-00000012']
    assert TrainConfig.from_json((tmp_path / 'train_config.json').read_text()) == trainer.config
    assert json.loads((tmp_path / 'train.json').read_text())['best_epoch'] == result.best_epoch and read_progress(tmp_path).state == 'finished'
    for folder in (tmp_path / 'model', latest_checkpoint(tmp_path) / 'model'): # karpathy/nanoGPT#325
        plain, report = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not any(report[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'model')
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in trainer.engine.model.state_dict().items()), 'the best weights'
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')('w1')['input_ids'] and not [p for p in tmp_path.rglob('*') if p.suffix in ('.bin', '.pt', '.pkl')]


def test_compiled_weights_keep_their_names(store, tmp_path):
    trainer = trainer_of(store, tmp_path, replace(BASE, compile='default'))
    trainer.engine.forward = trainer.engine.model # compiling is not what is tried here
    trainer.fit(TRAIN, VALID)
    assert not any('_orig_mod' in k for k in read_checkpoint(latest_checkpoint(tmp_path))[0])


# --- kills

def train_in(folder):
    store = tokenise(example_table(90), word_tokenizer(), 48, progress=False)
    Trainer(make_engine(example_model(dropout=.1), KILLED, HERE), store, KILLED, folder=folder).fit(TRAIN, VALID, resume=True)
    (Path(folder) / 'done').touch()

KILLED = replace(BASE, epochs=16, ema=.9)


def test_kill_9_at_ten_random_moments(store, tmp_path):
    "Checkpoints after each step, so that many kills hit one that is being written"
    whole = trainer_of(store, config=KILLED)
    whole.fit(TRAIN, VALID)
    context, rng, kills, reached = multiprocessing.get_context('fork'), random.Random(0), 0, []
    while not (tmp_path / 'done').exists():
        process = context.Process(target=train_in, args=(tmp_path,))
        process.start()
        kill = kills < 10
        if kill:
            started = latest_checkpoint(tmp_path)
            while process.is_alive() and latest_checkpoint(tmp_path) == started: time.sleep(.002) # at least one step a life
            time.sleep(rng.uniform(0, .12))
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if latest_checkpoint(tmp_path): read_checkpoint(latest_checkpoint(tmp_path)); reached.append(int(latest_checkpoint(tmp_path).name[5:]))
        assert kill or process.exitcode == 0
    assert kills == 10 and len(set(reached)) > 5, reached
    tensors, about = read_checkpoint(latest_checkpoint(tmp_path))
    assert about['position']['finished'] and about['step'] == 64
    again = trainer_of(store, tmp_path, KILLED)
    again.fit(TRAIN, VALID, resume=True)
    assert same(final(whole), final(again))
    assert not [p for p in (tmp_path / 'checkpoints').iterdir() if p.name.startswith('.')], 'nothing half-made is left'


def test_a_half_made_checkpoint_is_no_checkpoint(store, tmp_path):
    trainer_of(store, tmp_path).fit(TRAIN, VALID)
    last = latest_checkpoint(tmp_path)
    half = last.with_name('step-00000099')
    shutil.copytree(last, half)
    (half / 'run.json').unlink()
    assert latest_checkpoint(tmp_path) == last
    shutil.copytree(last, half, dirs_exist_ok=True)
    data = (half / 'state.safetensors').read_bytes()
    (half / 'state.safetensors').write_bytes(data[:len(data) // 2])
    with pytest.raises(InputError, match='step-00000099: this checkpoint cannot be read .*remove the folder') as caught: trainer_of(store, tmp_path).fit(TRAIN, VALID, resume=True)
    assert '\n' not in str(caught.value)


def test_a_run_that_went_back_resumes_on_its_new_path(store, tmp_path):
    "Not from a later checkpoint of the path that was given up"
    def poison(trainer):
        real, count = trainer.engine._backward, []
        def backward(*args):
            count.append(1)
            total = real(*args)
            return total * float('nan') if len(count) == 7 else total # the loss of the third step of epoch 2
        trainer.engine._backward = backward
        return trainer
    config = replace(BASE, read_every=1)
    whole = poison(trainer_of(store, config=config))
    want = whole.fit(TRAIN, VALID)
    broken = poison(trainer_of(store, tmp_path, config))
    def breaks(done, total):
        if broken.position.recovered and done == 5: raise Stop
    broken.on_step = breaks
    with pytest.raises(Stop): broken.fit(TRAIN, VALID)
    assert latest_checkpoint(tmp_path).name == 'step-00000004'
    again = trainer_of(store, tmp_path, config)
    found = again.fit(TRAIN, VALID, resume=True)
    assert [d['value'] for d in found.decisions] == ['back to step 4'] and numbers(found) == numbers(want) and same(final(whole), final(again))


# --- full disks

def with_little_disk(folder, queue):
    "Files beyond some size cannot be written: as a full disk, seen by this process alone"
    store = tokenise(example_table(90), word_tokenizer(), 48, progress=False)
    trainer = Trainer(make_engine(example_model(dropout=.1), BASE, HERE), store, BASE, folder=folder)
    def fill(done, total):
        if done == 5: signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        if done == 9: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trainer.on_step = fill
    seen = []
    trainer.on_epoch = lambda epoch: seen.append([p.name for p in checkpoints(folder)])
    result = trainer.fit(TRAIN, VALID)
    queue.put((seen, list(result.decisions), [p.name for p in (Path(folder) / 'checkpoints').iterdir()], numbers(result)))


def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_goes_on(store, tmp_path):
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    process = context.Process(target=with_little_disk, args=(tmp_path, queue))
    process.start()
    seen, decisions, left, found = queue.get(timeout=60)
    process.join(20)
    assert seen[1] == ['step-00000003', 'step-00000004'] and sorted(left) == ['step-00000011', 'step-00000012'] and len(decisions) == 4
    assert all(d['what'] == 'checkpoint' and 'could not be saved' in d['reason'] and 'step-00000004 is still there' in d['reason'] and '\n' not in d['reason'] for d in decisions)
    assert found == numbers(trainer_of(store).fit(TRAIN, VALID))


def test_a_model_that_cannot_be_saved_leaves_the_one_that_is_there(store, tmp_path, monkeypatch):
    model = example_model()
    save_model(model, tmp_path / 'model')
    before = (tmp_path / 'model' / 'model.safetensors').read_bytes()
    monkeypatch.setattr(model, 'save_pretrained', lambda *a: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(InputError, match='could not be saved .*No space left on device'): save_model(model, tmp_path / 'model')
    assert (tmp_path / 'model' / 'model.safetensors').read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ['model']


# --- what is refused

def listing(folder): return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob('*'))}


@pytest.mark.parametrize('change, said', [
    (dict(config=replace(BASE, effective_batch=8)), 'effective_batch differs: it has 16, now it is 8'), (dict(config=replace(BASE, lr=1e-3)), 'lr differs'), (dict(config=replace(BASE, epochs=5)), 'epochs differs'),
    (dict(config=replace(BASE, seed=1)), 'seed differs'), (dict(model=example_model(3)), 'model differs'), (dict(train=np.arange(1, 60)), 'data differs'), (dict(valid=np.arange(61, 90)), 'data differs')], ids=str)
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(store, tmp_path, change, said):
    trainer_of(store, tmp_path).fit(TRAIN, VALID)
    before = listing(tmp_path)
    other = trainer_of(store, tmp_path, change.get('config', BASE), change.get('model'))
    with pytest.raises(InputError, match=said) as caught: other.fit(change.get('train', TRAIN), change.get('valid', VALID), resume=True)
    assert str(caught.value).count('\n') <= 1 and listing(tmp_path) == before


def test_other_data_of_the_same_shape_is_seen(store, tmp_path):
    trainer_of(store, tmp_path).fit(TRAIN, VALID)
    other = replace(store, labels=1 - store.labels)
    with pytest.raises(InputError, match='data differs'): trainer_of(other, tmp_path).fit(TRAIN, VALID, resume=True)
    tokens = store.tokens.clone(); tokens[7] = 9
    assert rows_digest(replace(store, tokens=tokens)) != rows_digest(store) == rows_digest(store)
    assert model_digest(example_model(3)) != model_digest(example_model()) == model_digest(example_model(seed=4))
    assert model_digest(example_model(dropout=.2)) != model_digest(example_model(dropout=.1)) == model_digest(example_model(dropout=.1)) # a run with other dropout is another one
    quiet, loud = example_model(), example_model()
    loud.config.attention_dropout = .5 # as models have it that drop without a module
    assert model_digest(loud) != model_digest(quiet)


def test_a_run_over_another_one_is_refused(store, tmp_path):
    trainer_of(store, tmp_path).fit(TRAIN, VALID)
    before = listing(tmp_path)
    with pytest.raises(InputError, match='holds checkpoints of a run; pass resume=True'): trainer_of(store, tmp_path).fit(TRAIN, VALID)
    assert listing(tmp_path) == before


def test_what_only_changes_rounding_may_differ(store, tmp_path):
    def breaks(done, total):
        if done == 6: raise Stop
    with pytest.raises(Stop): trainer_of(store, tmp_path, on_step=breaks).fit(TRAIN, VALID)
    assert len(trainer_of(store, tmp_path, replace(BASE, physical_batch=4, layout='padded', read_every=7)).fit(TRAIN, VALID, resume=True).history) == 3
    sizes, rows = [], []
    again = trainer_of(store, tmp_path / 'other', replace(BASE, physical_batch=8), on_step=breaks)
    with pytest.raises(Stop): again.fit(TRAIN, VALID)
    again = trainer_of(store, tmp_path / 'other', replace(BASE, physical_batch=2, eval_batch=5, spike=7.))
    step, predict = again.engine.step, again.engine.predict
    again.engine.step = lambda store, micro: (sizes.append(max(len(m.rows) for m in again.engine.cut(store, micro))), step(store, micro))[1]
    again.engine.predict = lambda store, part, batch, *args: (rows.append(batch), predict(store, part, batch, *args))[1]
    again.fit(TRAIN, VALID, resume=True)
    assert set(sizes) == {2} and set(rows) == {5} and again.position.watch.factor == 7, 'a resume may take fewer rows at once'
    with pytest.raises(InputError, match='the run: belongs|belongs to another run'): check_same(dict(a=1), dict(a=2), 'the run:')


@pytest.mark.parametrize('change, rows, said', [
    (dict(), (np.arange(0), VALID), 'rows to train on'), (dict(), (np.arange(100), VALID), 'rows to train: expected numbers from 0 to 89, found 0 to 99'), (dict(metric='r2'), (TRAIN, VALID), "metric 'r2' is none of the task classification"),
    (dict(metric='custom'), (TRAIN, VALID), "metric 'custom' needs a function"), (dict(layout='packed', max_tokens=20), (TRAIN, VALID), 'max_tokens is 20, but a row has 48 tokens'),
    (dict(class_weights=(1., 2., 3.)), (TRAIN, VALID), '3 class_weights for a head of 2 classes')], ids=str)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(store, tmp_path, change, rows, said):
    with pytest.raises(InputError, match=said) as caught: trainer_of(store, tmp_path / 'run', replace(BASE, **change)).fit(*rows)
    assert '\n' not in str(caught.value) and not (tmp_path / 'run').exists()


def test_labels_and_tokens_outside_the_model_are_refused(store, tmp_path):
    with pytest.raises(InputError, match='the labels need 3 outputs, but the head of BertForSequenceClassification has 2; load the model with num_labels=3'):
        trainer_of(replace(store, labels=store.labels + 1), tmp_path / 'run').fit(TRAIN, VALID)
    with pytest.raises(InputError, match='the labels hold -1, expected class numbers from 0 on'):
        trainer_of(replace(store, labels=store.labels - 1), tmp_path / 'run').fit(TRAIN, VALID)
    with pytest.raises(InputError, match='holds the token 500, but BertForSequenceClassification knows 204'):
        tokens = store.tokens.clone(); tokens[3] = 500
        trainer_of(replace(store, tokens=tokens), tmp_path / 'run').fit(TRAIN, VALID)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('changes, said', [(dict(max_tokens=100), "max_tokens .Layout.tokens. is for the layout 'packed'"), (dict(weights='bf16', precision='fp32'), 'contradict each other'), (dict(weights='bf16', precision=None, adapter='lora'), 'adapters train in fp32'),
    (dict(fp8=True, adapter='dora'), 'fp8 and adapters'), (dict(optimizer='sgd'), "optimizer is 'sgd'"), (dict(checkpointing='some'), 'checkpointing'), (dict(ema=1.), 'ema is 1'), (dict(betas=(.9, 1.)), 'betas'), (dict(eps=0.), 'eps'),
    (dict(class_weights='even'), "class_weights are 'even'"), (dict(class_weights=(0., 0.)), 'not all 0'), (dict(warmup_steps=-1), 'warmup_steps'), (dict(read_every=0), 'read_every'), (dict(save_every=0), 'save_every'), (dict(adapter='ia3'), 'adapter'),
    (dict(attention='fast'), 'attention'), (dict(spike=1.), 'spike'), (dict(prefetch=0), 'prefetch'), (dict(workers=-1), 'workers'), (dict(keep=0), 'keep'), (dict(precision='int8'), 'precision')], ids=str)
def test_a_configuration_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(ValueError, match=said): replace(BASE, **changes)


# --- progress, and runs beside the caller

def test_progress_is_written_and_read_by_anyone(store, tmp_path):
    seen = []
    trainer = trainer_of(store, tmp_path, peak=1e12)
    trainer.on_epoch = lambda e: seen.append(read_progress(tmp_path))
    trainer.fit(TRAIN, VALID)
    assert [(p.state, p.step, p.total, p.epoch, p.epochs) for p in seen] == [('running', 4, 12, 1, 3), ('running', 8, 12, 2, 3), ('running', 12, 12, 3, 3)]
    for p in seen: assert p.loss > 0 and p.sequences_per_s > p.updates_per_s > 0 and p.tokens_per_s > p.sequences_per_s and 0 < p.mfu < 1 and p.micro_batches_per_s == pytest.approx(p.updates_per_s) and p.seconds_left >= 0
    assert read_progress(tmp_path).state == 'finished' and 'macro_f1' in repr(read_progress(tmp_path)) and seen[1].score is not None
    with pytest.raises(InputError, match='no such run folder'): read_progress(tmp_path / 'none')


def test_a_run_beside_the_caller_stops_and_goes_on(store, tmp_path):
    config = replace(BASE, epochs=25, save_every=None, read_every=1)
    whole = trainer_of(store, config=config)
    want = whole.fit(TRAIN, VALID)
    trainer = trainer_of(store, tmp_path, config)
    run = trainer.start(TRAIN, VALID)
    while not (tmp_path / 'progress.json').exists() or run.progress().step < 5: time.sleep(.005); assert run.running
    assert run.progress().state == 'running' and 'running' in repr(run)
    result = run.stop(30)
    assert result.stopped and not run.running and read_progress(tmp_path).state == 'stopped' and result.steps < 100
    again = trainer_of(store, tmp_path, config)
    found = again.fit(TRAIN, VALID, resume=True)
    assert same(final(whole), final(again)) and numbers(found) == numbers(want)


def test_a_view_reads_files_only(store, tmp_path, monkeypatch):
    (tmp_path / 'progress.json').write_text(json.dumps(dict(state='finished', step=3, total=3, epoch=1, epochs=1, other=1)))
    for name in ('init', 'mem_get_info', 'max_memory_allocated', 'is_available', 'synchronize'): monkeypatch.setattr(torch.cuda, name, lambda *a, **k: pytest.fail('CUDA was touched'))
    view = live(tmp_path, .01)
    for _ in range(200):
        if 'finished' in view.value: break
        time.sleep(.01)
    assert 'step 3 of 3' in view.value


def test_functions_are_called_and_see_what_they_should(store):
    seen = []
    result = trainer_of(store, on_step=lambda n, of: seen.append((n, of)), on_epoch=seen.append, on_end=seen.append).fit(TRAIN, VALID)
    assert seen == [(1, 12), (2, 12), (3, 12), (4, 12), result.history[0], *[(n, 12) for n in range(5, 9)], result.history[1], *[(n, 12) for n in range(9, 13)], result.history[2], result]


@pytest.fixture
def only_new_objects():
    "Garbage collection, and what `gc.get_objects` gives, leave out what was there before"
    gc.freeze()
    yield
    gc.unfreeze()

def test_memory_is_flat_over_epochs(store, only_new_objects):
    "Tensors that are alive at the end of each epoch"
    trainer, sizes = trainer_of(store, config=replace(BASE, epochs=8, save_every=None)), []
    def count(epoch): gc.collect(); sizes.append(sum(o.nbytes for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)))
    trainer.on_epoch = count
    trainer.fit(TRAIN, VALID)
    assert len(set(sizes[2:])) == 1 and sizes[2], sizes
    trainer.fit(TRAIN, VALID)
    assert sizes[-1] == sizes[7]


def test_a_checkpoint_from_before_layouts_is_read():
    "Its record held the parts of the layout one by one, without the name"
    old = json.loads(json.dumps(RunState(12, done=5).to_dict()))
    del old['layout']
    read = lambda name, *parts: RunState.from_dict(old | dict(zip(('physical', 'max_tokens', 'table'), parts)), name).layout
    assert read('sorted', 4, None, [[16, 8]]) == Layout('sorted', 4, None, ((16, 8),))
    assert read('packed', 0, 640, None) == Layout('packed', tokens=640) and read('padded', 0, None, None) == Layout('padded')
    now = RunState(12, layout=Layout('packed', tokens=96))
    assert RunState.from_dict(json.loads(json.dumps(now.to_dict()))) == now


# what versions before layouts wrote: the sizes one by one, beside the name of the layout
OLD_CONFIG = '''{"epochs": 3, "lr": 0.003, "effective_batch": 12, "metric": "loss", "seed": 4, "physical_batch": 6, "eval_batch": 7,
    "layout": "sorted", "precision": "fp32", "max_tokens": null, "batch_table": [[16, 12], [32, 8]], "save_every": 4}'''


def test_a_configuration_of_an_earlier_version_opens():
    old = TrainConfig.from_json(OLD_CONFIG)
    assert old.layout == Layout(rows=6, table=((16, 12), (32, 8)), eval_rows=7)
    assert (old.physical_batch, old.max_tokens, old.batch_table, old.eval_batch) == (6, None, ((16, 12), (32, 8)), 7)
    assert json.loads(OLD_CONFIG).items() <= json.loads(old.to_json()).items(), 'and is written as it was'
    assert TrainConfig(**asdict(old)) == TrainConfig(**old.values()) == replace(old) == pickle.loads(pickle.dumps(old)) == old
    packed = replace(old, layout='packed', max_tokens=640)
    assert packed.layout == Layout('packed', 6, 640, eval_rows=7), 'a name keeps the sizes that it reads'
    assert replace(packed, layout=Layout('full')).layout == Layout('full') and replace(packed, lr=1.).layout == packed.layout
    assert replace(packed, layout='padded', eval_batch=3).layout == Layout('padded', 6, eval_rows=3)
    with pytest.warns(DeprecationWarning, match='compare its name'): assert old.layout == 'sorted'
    for wrong in ('grouped', 'random', 3, Layout('grouped')):
        with pytest.raises(ValueError, match='layout is .*, expected one of'): TrainConfig(layout=wrong)
    with pytest.raises(TypeError, match='rowz'): TrainConfig(rowz=3)


def test_a_run_of_an_earlier_version_goes_on(store, tmp_path):
    "Its checkpoint held the rows of evaluation beside the layout, and its configuration the sizes one by one"
    config = replace(BASE, physical_batch=5, eval_batch=9)
    trainer = trainer_of(store, tmp_path, config, on_step=lambda done, total: done == 6 and trainer.stop())
    trainer.fit(TRAIN, VALID)
    about = next(p for p in latest_checkpoint(tmp_path).rglob('*.json') if 'position' in p.read_text())
    record = json.loads(about.read_text())
    assert (record['config']['layout'], record['config']['physical_batch']) == ('sorted', 5), 'files hold what they held'
    layout = record['position']['layout']
    record['position'] |= dict(layout={k: layout[k] for k in ('name', 'tokens', 'table')} | dict(rows=3), eval_batch=4)
    about.write_text(json.dumps(record))
    again = trainer_of(store, tmp_path, config)
    again.fit(TRAIN, VALID, resume=True)
    assert again.engine.layout == Layout(rows=3, eval_rows=4), 'what fitted there'
