"""Exempt all present objects from garbage collection; to be imported last."""

import atexit
import gc

gc.freeze()
atexit.register(gc.unfreeze)  # some modules look for leaks
