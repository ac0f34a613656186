"""A CUDA device that is not there: its code path runs, and every wait for it is seen.

Tensors are fake: shapes, dtypes and devices without numbers, so this runs on any machine. A number
that is read, from the CPU or from the device, is 0; what has as many entries as numbers say, such
as `nonzero`, raises DynamicOutputShapeException.
"""

import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LIBRARY = str(Path(__file__).parents[1] / "ssl_kd")
READ = torch.ops.aten._local_scalar_dense.default  # .item(), bool(), float(), .tolist()
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func is READ:
            if tensors[0].device.type == "cuda":
                self._note(func)
            return 0.0 if tensors[0].is_floating_point() else 0
        out = func(*args, **kwargs)
        if func in COPIES:
            way = tensors[-1].device.type, out.device.type
            asynchronous = kwargs.get("non_blocking") or args[2:] == (True,)
            if way == ("cuda", "cpu") or (way == ("cpu", "cuda") and not asynchronous):
                self._note(func)
        return out

    def _note(self, func):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(LIBRARY)]
        where = f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "the test"
        self.waits.append(f"{where} ({func})")


@contextmanager
def pretended_cuda():
    """Inside, tensors on `cuda` can be made and computed with, and their gradients asked for.

    Yields the list of what waited for the device so far: the line of the library, and how.
    """
    watch = _Watch()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), watch:
        patch.setattr(torch.autograd, "grad", _gradients)
        yield watch.waits


def _gradients(output, inputs, *, materialize_grads):
    """`torch.autograd.grad` of one number; torch's own engine looks for a driver."""
    assert materialize_grads  # of no difference where every input is used
    on_their_way = Counter()  # node -> gradients that have not arrived yet
    reached, unread = {output.grad_fn}, [output.grad_fn]
    while unread:
        for node, _ in unread.pop().next_functions:
            on_their_way[node] += 1
            if node is not None and node not in reached:
                reached.add(node)
                unread.append(node)
    arrived, ready, leaves = {output.grad_fn: {0: torch.ones_like(output)}}, [output.grad_fn], {}
    while ready:
        node = ready.pop()
        given = arrived.pop(node)
        if hasattr(node, "variable"):
            leaves[node.variable] = given[0]
            continue
        # A node of a torch.autograd.Function has its backward pass in `apply`, which returns a
        # gradient for each argument: None for those that are no tensors, here the last ones.
        backward = node if callable(node) else node.apply
        with torch.no_grad():
            gradients = backward(*(given.get(slot) for slot in range(len(node._input_metadata))))
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        for (after, slot), gradient in zip(node.next_functions, gradients, strict=False):
            if after is None:
                continue
            assert gradient is not None
            wanted = after._input_metadata[slot]  # of what was broadcast or cast, as it was before
            gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)
            slots = arrived.setdefault(after, {})
            slots[slot] = slots[slot] + gradient if slot in slots else gradient
            on_their_way[after] -= 1
            if not on_their_way[after]:
                ready.append(after)
    return tuple(leaves[x] for x in inputs)
