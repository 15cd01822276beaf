# Made by tools/stubs.py from the modules: run that.

from .workloads import *
from .views import *
from .updates import *
from .training_views import *
from .trainer import *
from .timing import *
from .table import *
from .study import *
from .strategies import *
from .store import *
from .storage import *
from .steps import *
from .status import *
from .space import *
from .sizes import *
from .simulator import *
from .shapes import *
from .run_folder import *
from .roofline import *
from .report import *
from .recovery import *
from .records import *
from .progress import *
from .presets import *
from .precision import *
from .page import *
from .packing import *
from .optimize import *
from .models import *
from .metrics import *
from .loader import *
from .limits import *
from .ledger import *
from .ladder import *
from .job_plan import *
from .job import *
from .hpo import *
from .hf import *
from .hardware import *
from .frames import *
from .forecast import *
from .folds import *
from .fast import *
from .experiments import *
from .engine import *
from .disentangled import *
from .data import *
from .counted import *
from .confirm import *
from .config import *
from .claims import *
from .checkpoint import *
from .cards import *
from .build import *
from .bench import *
from .batch_finder import *
from .base import *
from .augment import *
from .attention import *
from .adapters import *
import matplotlib.pyplot, numpy, pandas
import torch as torch
from pathlib import Path as Path
np = numpy
pd = pandas
plt = matplotlib.pyplot
SHADOWED: dict[str, list[str]]
