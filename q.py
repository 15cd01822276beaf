from optkit.all import *
import inspect
from IPython.core.oinspect import Inspector
for f in (TrainConfig, tune, cross_validate, tokenise):
    print(f.__name__, str(inspect.signature(f))[:600]); print(inspect.getdoc(f)[:500] if inspect.getdoc(f) else None); print('--')
