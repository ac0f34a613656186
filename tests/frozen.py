"""Imported last: until the process ends, nothing that is there by then is looked at as garbage."""

import atexit
import gc

gc.freeze()
atexit.register(gc.unfreeze)  # some modules look for what leaked
