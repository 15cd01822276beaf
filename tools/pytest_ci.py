"""A pytest plugin: where CI=true, a test that is skipped for want of an installed thing fails.

Such a skip gives a reason that starts with "needs " ("needs chromium"); a reason that names
shared/data, which is not part of the project, stays a skip everywhere, and so does one that names a GPU.
"""
import os
import re

import pytest

ALLOWED = re.compile(r'shared/data|\b(cuda|gpus?)\b', re.I)


def missing(report):
    "The reason of a skip that CI does not accept, or None"
    if os.environ.get('CI') != 'true' or not report.skipped or not isinstance(report.longrepr, tuple): return None
    reason = report.longrepr[2].removeprefix('Skipped: ')
    return reason if reason.startswith('needs ') and not ALLOWED.search(reason) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    if reason := missing(report): report.outcome, report.longrepr = 'failed', f'skipped in CI: {reason}'
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    if reason := missing(report): report.outcome, report.longrepr = 'failed', f'skipped in CI: {reason}'
    return report
