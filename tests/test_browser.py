"Views and pages in a real browser: JupyterLab in headless Chromium, spoken to through its DevTools protocol"
import base64
import collections
import importlib.util
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
websocket = pytest.importorskip('websocket', reason='needs websocket-client')
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason='needs chromium'), pytest.mark.skipif(importlib.util.find_spec('jupyterlab') is None, reason='needs jupyterlab')]
SHOTS = os.environ.get('OPTKIT_SCREENSHOTS')  # a folder that keeps what the tests saw


def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]


def until(look, seconds=60, every=.3, what=''):
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found: return found
        if time.monotonic() > end: raise AssertionError(f'not within {seconds} s: {what or look}')
        time.sleep(every)


class Page:
    "A page of Chromium"
    def __init__(self, port):
        tab = json.load(urllib.request.urlopen(urllib.request.Request(f'http://127.0.0.1:{port}/json/new?about:blank', method='PUT')))
        self.socket, self.numbers = websocket.create_connection(tab['webSocketDebuggerUrl'], timeout=120, suppress_origin=True), itertools.count(1)
        self.heard = collections.deque(maxlen=30)
        for domain in ('Page', 'Inspector'): self(f'{domain}.enable')

    def __call__(self, method, **params):
        number = next(self.numbers)
        self.socket.send(json.dumps(dict(id=number, method=method, params=params)))
        while True:
            try: answer = json.loads(self.socket.recv())
            except websocket.WebSocketTimeoutException: raise AssertionError(f'the page gave no answer to {method} {str(params)[:200]}; before it said {[*self.heard]}') from None
            if answer.get('id') == number:
                assert 'error' not in answer, answer['error']
                return answer['result']
            if 'method' in answer: self.hear(answer)

    def hear(self, event):
        self.heard.append((event['method'], str(event.get('params', ''))[:200]))
        assert event['method'] not in ('Inspector.targetCrashed', 'Inspector.detached'), self.heard[-1]
        if event['method'] == 'Page.javascriptDialogOpening': # it would hold the page until somebody answers
            self.socket.send(json.dumps(dict(id=next(self.numbers), method='Page.handleJavaScriptDialog', params=dict(accept=True))))

    def go(self, address): self('Page.navigate', url=address)
    def js(self, code):
        found = self('Runtime.evaluate', expression=code, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in found, found['exceptionDetails'].get('exception', {}).get('description')
        return found['result'].get('value')

    def size(self, width, height): self('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)
    def shot(self, name):
        if SHOTS: Path(SHOTS, f'{name}.png').write_bytes(base64.b64decode(self('Page.captureScreenshot')['data']))
    def key(self, name, code):
        for kind in ('rawKeyDown', 'keyUp'): self('Input.dispatchKeyEvent', type=kind, key=name, windowsVirtualKeyCode=code)


@pytest.fixture(scope='module')
def chromium(tmp_path_factory):
    "A port that Chromium listens on"
    port = free_port()
    words = [CHROMIUM, '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', f'--remote-debugging-port={port}', f'--user-data-dir={tmp_path_factory.mktemp("chromium")}', 'about:blank']
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    def up():
        try: return urllib.request.urlopen(f'http://127.0.0.1:{port}/json/version').read()
        except OSError: return None
    try:
        until(up, what='chromium')
        yield port
    finally: process.terminate(); process.wait(20)


@pytest.fixture
def page(chromium):
    "A tab of its own: leaving a notebook that is not saved would ask"
    page = Page(chromium)
    page.size(1280, 900)
    yield page
    page.socket.close()


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "JupyterLab over a folder of its own: (address, folder)"
    folder, port = tmp_path_factory.mktemp('lab'), free_port()
    env = dict(os.environ, PYTHONPATH=str(ROOT), JUPYTER_CONFIG_DIR=str(folder / '.config'), JUPYTER_RUNTIME_DIR=str(folder / '.runtime'), HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1')
    env.pop('OPTKIT_STATIC', None)
    words = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', f'--port={port}', f'--ServerApp.root_dir={folder}', '--IdentityProvider.token=', '--ServerApp.disable_check_xsrf=True', '--LabApp.expose_app_in_browser=True', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate', '--LabApp.news_url=None']
    process = subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=open(folder / 'lab.log', 'w'))
    def up():
        try: return urllib.request.urlopen(f'http://127.0.0.1:{port}/api').read()
        except OSError: return None
    try:
        until(up, what='JupyterLab')
        yield f'http://127.0.0.1:{port}', folder
    finally: process.terminate(); process.wait(20)


def notebook(path, *cells):
    import nbformat
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=dict(kernelspec=dict(name='python3', display_name='python3', language='python')))
    nbformat.write(made, path)


PANEL = "[...window.jupyterapp.shell.widgets('main')].find(w => w.sessionContext)"


def open_notebook(page, address, name):
    page.go(f'{address}/lab/tree/{name}?reset')
    until(lambda: page.js(f"(() => {{const k = window.jupyterapp && {PANEL}?.sessionContext?.session?.kernel; return k ? k.status === 'idle' : false}})()"), 90, what='an idle kernel')
    page.js(f'window.jupyterapp.shell.activateById({PANEL}.id); 0')


def run_all(page, seconds=240):
    "Run all cells; raises what a cell raised"
    page.js("window.jupyterapp.commands.execute('notebook:run-all-cells'); 0")
    state = f"(() => {{const c = {PANEL}.content.widgets.filter(w => w.model.type === 'code' && w.model.sharedModel.getSource().trim()); return [c.length, c.filter(w => w.model.executionCount && w.model.executionState !== 'running').length, c.filter(w => w.promptNode && w.promptNode.textContent.includes('*')).length]}})()"
    def done():
        cells, ran, running = page.js(state)
        return cells == ran and not running
    time.sleep(1)
    until(done, seconds, what='all cells')
    errors = page.js(f"{PANEL}.content.widgets.flatMap(w => w.model.type === 'code' ? w.model.outputs.toJSON().filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue) : [])")
    assert not errors, errors


def restart(page):
    page.js(f'{PANEL}.sessionContext.session.kernel.restart()')
    until(lambda: page.js(f"{PANEL}.sessionContext.session.kernel.status === 'idle'"), 60, what='a new kernel')


def scroll_to(page, cell): page.js(f"{PANEL}.content.scrollToItem({cell}, 'start'); 0"); time.sleep(1.5)
def cell_text(page, cell): return page.js(f"{PANEL}.content.widgets[{cell}].node.innerText")


TRAINING = '''
import sys
import numpy as np
from optkit.store import example_table, tokenise, word_tokenizer
from optkit.models import example_model
from optkit.hardware import detect
from optkit.config import TrainConfig
from optkit.trainer import Trainer
from optkit.build import make_engine
store, config = tokenise(example_table(200), word_tokenizer(), 48, progress=False), TrainConfig(epochs=5000, lr=1e-3, precision='fp32', read_every=2)
Trainer(make_engine(example_model(), config, detect()), store, config, folder=sys.argv[1]).fit(np.arange(160), np.arange(160, 200))
'''
STUDY = '''
import sys, time
from optkit.simulator import simulated_runner
from optkit.hpo import tune
plain = simulated_runner()
def slow(params, fold):
    for value in plain(params, fold): time.sleep(.005); yield value
tune(slow, ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 4000, folds=3, epochs=plain.epochs if hasattr(plain, 'epochs') else None, storage=sys.argv[1], progress=False)
'''


@pytest.fixture
def at_work(lab):
    "A training and a study in processes of their own: (process, process)"
    _, folder = lab
    for name in ('run', 'study'): shutil.rmtree(folder / name, ignore_errors=True)
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
    processes = [subprocess.Popen([sys.executable, '-c', code, str(folder / name)], env=env, stderr=subprocess.DEVNULL) for code, name in ((TRAINING, 'run'), (STUDY, 'study'))]
    until(lambda: (folder / 'run' / 'progress.json').exists() and (folder / 'study' / 'study.db').exists(), 90, what='a training and a study')
    time.sleep(2)
    yield processes
    for p in processes: p.kill(); p.wait()


def test_views_update_stop_and_outlive_their_kernel(page, lab, at_work):
    address, folder = lab
    notebook(folder / 'views.ipynb', 'from optkit.views import *', "training_view('run')", "study_view('study', n_trials=4000)", "watch('run')", 'claims_view()')
    open_notebook(page, address, 'views.ipynb')
    run_all(page)
    plots = f"[1, 2, 3, 4].map(n => {PANEL}.content.widgets[n].node.querySelectorAll('.js-plotly-plot .main-svg').length)"
    for n in range(1, 5): scroll_to(page, n); page.shot(f'views-{n}')
    until(lambda: all(page.js(plots)), 30, what='a plot in each view')
    steps = lambda: int(cell_text(page, 1).split('running: step ')[1].split(' of')[0])
    trials = lambda: int(cell_text(page, 2).split(' of 4000 trials')[0].split()[-1])
    before = steps(), trials()
    until(lambda: steps() > before[0] and trials() > before[1], 60, what='views that move')
    assert 'limited by:' in cell_text(page, 3) and 'left' in cell_text(page, 1) and 'forecast' in cell_text(page, 2)

    press = lambda cell, label: page.js(f"[...{PANEL}.content.widgets[{cell}].node.querySelectorAll('button')].find(b => b.innerText.includes('{label}')).click()")
    press(2, 'Pause')
    until(lambda: (folder / 'study' / 'study.db.pause').exists() and 'paused' in cell_text(page, 2), 30, what='a paused study')
    press(2, 'Go on')
    until(lambda: not (folder / 'study' / 'study.db.pause').exists(), 30, what='a study that goes on')
    press(2, 'Stop')
    press(1, 'Stop after this step')
    assert [p.wait(60) for p in at_work] == [0, 0]
    now = json.loads((folder / 'run' / 'progress.json').read_text())
    assert now['state'] == 'stopped' and now['step'] < now['total']
    until(lambda: f"stopped: step {now['step']} of" in cell_text(page, 1), 30, what='a view that says so')
    scroll_to(page, 1); page.shot('views-stopped')

    restart(page)
    run_all(page)
    until(lambda: all(page.js(plots)), 30, what='plots after a restart')
    assert f"stopped: step {now['step']} of" in cell_text(page, 1) and ' of 4000 trials' in cell_text(page, 2)
    points = page.js(f"{PANEL}.content.widgets[1].node.querySelector('.js-plotly-plot').data[0].x.length")
    assert points > 5, 'the readings from before are there'


def watched(page):
    "Milliseconds for which the page was held since, in tasks of 50 ms and more"
    page.js("window.held = 0; new PerformanceObserver(l => l.getEntries().forEach(e => window.held += e.duration)).observe({entryTypes: ['longtask']}); 0")
    return lambda: page.js('window.held')


def test_a_page_answers_while_the_study_that_it_shows_grows(page, lab, at_work):
    address, folder = lab
    notebook(folder / 'grows.ipynb', 'from optkit.views import *', "study_view('study', n_trials=4000)")
    open_notebook(page, address, 'grows.ipynb')
    run_all(page)
    held = watched(page)
    before = int(cell_text(page, 1).split(' of 4000 trials')[0].split()[-1])
    time.sleep(10)
    print(f'the page was held for {held():.0f} ms of 10 s')
    assert held() < 8000, 'margins that followed the labels held the page for minutes'
    until(lambda: int(cell_text(page, 1).split(' of 4000 trials')[0].split()[-1]) > before, 30, what='a view that moves')
    page.shot('study-grows')


def test_long_curves_without_markers_hold_a_page_less(page, lab):
    from optkit.simulator import simulated_runner
    from optkit.hpo import tune
    address, folder = lab
    shutil.rmtree(folder / 'long', ignore_errors=True)
    tune(simulated_runner(epochs=30), ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 101, folds=3, strategy='none', storage=folder / 'long', progress=False)
    notebook(folder / 'long.ipynb', 'import optkit.views as views\nplain = views._mode', "v = views.study_view('long', n_trials=5000)\nv")
    open_notebook(page, address, 'long.ipynb')
    run_all(page)
    time.sleep(4)
    held, found = watched(page), dict(lines=[], markers=[])
    def run(code): page.js(f"{PANEL}.sessionContext.session.kernel.requestExecute({{code: {json.dumps(code)}}}).done.then(() => 0)"); time.sleep(2)
    for _ in range(4):
        for name, mode in (('lines', 'plain'), ('markers', "lambda epochs: 'lines+markers'")):
            run(f'views._mode = {mode}; v.refresh()')
            before = held()
            for n in range(3): run(f'v.plot.data[0].x = v.plot.data[0].x[:-{n + 1}]; v.refresh()')
            found[name].append((held() - before) / 3)
    print('the page was held for so many ms an update:', {k: [round(v) for v in vs] for k, vs in found.items()})
    assert sorted(found['lines'])[2] < sorted(found['markers'])[1]


def test_the_claims_are_filtered_and_a_study_looked_back_at(page, lab):
    from optkit.simulator import simulated_runner
    from optkit.hpo import tune
    address, folder = lab
    shutil.rmtree(folder / 'old', ignore_errors=True)
    tune(simulated_runner(), ['lr=1e-5..1e-1:log', 'weight_decay=1e-3..1.0:log'], 30, folds=3, storage=folder / 'old', progress=False)
    notebook(folder / 'look.ipynb', 'from optkit.views import *', 'claims_view()', "v = study_view('old', n_trials=30)\nv")
    open_notebook(page, address, 'look.ipynb')
    run_all(page)
    points = f"{PANEL}.content.widgets[1].node.querySelector('.js-plotly-plot').data[0].x.length"
    every = until(lambda: page.js(f"{PANEL}.content.widgets[1].node.querySelector('.js-plotly-plot') && {points}"), 30, what='claims')
    page.js(f"(() => {{const s = {PANEL}.content.widgets[1].node.querySelectorAll('select')[0]; s.value = [...s.options].find(o => o.text === 'exact').value; s.dispatchEvent(new Event('change', {{bubbles: true}}))}})()")
    until(lambda: 0 < page.js(points) < every, 20, what='fewer claims')
    page.shot('claims-exact')
    scroll_to(page, 2)
    shown = f"{PANEL}.content.widgets[2].node.querySelector('.js-plotly-plot').data.slice(0, 3).map(d => d.x.length).reduce((a, b) => a + b)"
    assert page.js(shown) == 30
    page.js(f"{PANEL}.content.widgets[2].node.querySelector('.noUi-handle').focus()")
    for _ in range(12): page.key('ArrowLeft', 37)
    until(lambda: page.js(shown) < 30, 20, what='fewer trials')
    page.shot('study-back')


@pytest.mark.parametrize('name', ['01_example_pairs', '02_example_maxed_out'])
def test_the_examples_run_with_their_views_live(page, lab, name):
    address, folder = lab
    text = (ROOT / 'nbs' / f'{name}.ipynb').read_text()
    live = text.replace("os.environ['OPTKIT_STATIC'] = '1'", "os.environ.pop('OPTKIT_STATIC', None)")
    assert live != text
    (folder / f'{name}.ipynb').write_text(live)
    open_notebook(page, address, f'{name}.ipynb')
    page.js(f"window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs'); 0")
    run_all(page, 400)
    at = page.js(f"{PANEL}.content.widgets.findIndex(w => /^(study|training)_view\\(folder/m.test(w.model.sharedModel.getSource()))")
    scroll_to(page, at)
    until(lambda: page.js(f"{PANEL}.content.widgets[{at}].node.querySelectorAll('.js-plotly-plot .main-svg').length"), 30, what='a live view')
    page.shot(name)


@pytest.mark.parametrize('width, zoom', [(1280, 1), (390, 1), (1280, 2)])
def test_the_report_fits_its_window_and_is_reached_by_keyboard(page, tmp_path_factory, width, zoom):
    from optkit.report import render
    run = tmp_path_factory.mktemp('report')
    records = json.loads((ROOT / 'bench' / 'results' / 'demo-ladder-h100.json').read_text())
    (run / 'run.json').write_text(json.dumps(dict(title='A run', command='optkit demo', settings={}, fingerprint={})))
    (run / 'ladder.json').write_text(json.dumps(records))
    page.size(width, 900)
    page.go(f'file://{render(run)}')
    until(lambda: page.js("document.readyState === 'complete' && document.title.length > 0"), what='the report')
    if zoom != 1: page.js(f"document.documentElement.style.fontSize = '{zoom * 100}%'")  # the page is in rem, so all its text grows
    page.shot(f'report-{width}-{zoom}')
    assert page.js('document.documentElement.scrollWidth <= window.innerWidth + 1'), 'the page is wider than its window'
    page.key('Tab', 9)
    reached = page.js('document.activeElement.tagName')
    assert reached in ('A', 'DIV', 'SUMMARY', 'BUTTON'), reached
