"Build optkit from settings.ini, the one place that holds its name, version and requirements."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
parser = ConfigParser(delimiters=['='])
parser.read(root/'settings.ini', encoding='utf-8')
config = parser['DEFAULT']
extras = {key.removesuffix('_requirements'): value.split() for key, value in config.items() if key.endswith('_requirements')}
minor = int(config['min_python'].split('.')[1])
readme = root/'README.md'

setup(
    name=config['lib_name'],
    version=config['version'],
    description=config['description'],
    long_description=readme.read_text('utf-8') if readme.exists() else '',
    long_description_content_type='text/markdown',
    author=config['author'],
    url=config['git_url'],
    license={'apache2': 'Apache-2.0'}[config['license']],
    keywords=config['keywords'].split(),
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: ' + config['audience'],
                 'Natural Language :: ' + config['language'], 'Framework :: Jupyter',
                 'Topic :: Scientific/Engineering :: Artificial Intelligence',
                 *(f'Programming Language :: Python :: 3.{v}' for v in range(minor, 14))],
    python_requires='>=' + config['min_python'],
    install_requires=config['requirements'].split(),
    extras_require=extras,
    packages=find_packages(include=['optkit', 'optkit.*']),
    package_data={'optkit': ['data/*', 'data/**/*', '*.pyi', 'py.typed']},
    include_package_data=False,
    entry_points={'console_scripts': config['console_scripts'].split(), 'nbdev': ['optkit=optkit._modidx:d']},
    zip_safe=False,
)
