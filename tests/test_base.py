"Tests of what every chapter stands on"
import pytest

from optkit.base import error_line, first_line, seconds_of


@pytest.mark.parametrize('text, seconds', [('8h', 28800), ('90m', 5400), ('1h30m', 5400), ('1 d', 86400), (5, 5), ('7', 7), ('0.5h', 1800)])
def test_durations(text, seconds): assert seconds_of(text) == seconds


@pytest.mark.parametrize('message, expected', [('', 'OSError'), ('  \n', 'OSError'), ('\none\ntwo', 'one'), ('x' * 300, 'x' * 160)])
def test_a_first_line_is_never_empty_and_never_long(message, expected):
    assert first_line(OSError(message)) == expected
    assert error_line(OSError(message)).startswith('OSError: ')
