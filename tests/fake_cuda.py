"""Run the code path of a CUDA device on any machine, and count kernels, bytes and waits.

Tensors on `cuda` are fake: they have a shape, dtype and strides, and no values. Tensors on the CPU
are real. Values read or copied from the device are 0, two tensors there compare equal, and
`nonzero` returns no index, as in a healthy step. Other operations whose output shape depends on
values, such as `x[mask]`, raise DynamicOutputShapeException.
"""

import traceback
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from firstnan import loop

ROOT = Path(__file__).parents[1]
LIBRARY = (f"{ROOT}/ssl_kd/", *map(str, ROOT.glob("firstnan/*.py")))
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default: 0,  # .item(), bool(), float(), .tolist()
    aten.equal.default: True,
    aten.allclose.default: True,
}
"""Operation that reads a value from the device -> the value that it returns here."""
# These allocate from the cache, or return a view.
NO_KERNEL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
    aten.is_pinned,
}


@dataclass
class Device:
    """Counts of what happened on the device.

    Attributes:
        waits: line of the library and operation of each wait for the device.
        pageable: the same for each copy to the device from memory that is not pinned.
        launches: operation -> number of kernel launches, a lower bound.
        bytes: operation -> bytes read and written, each tensor counted once.
    """

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    launches: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)

    def clear(self):
        for seen in vars(self).values():
            seen.clear()


class _Watch(TorchDispatchMode):
    def __init__(self, fake):
        super().__init__()
        self.device, self.pinned, self._fake = Device(), WeakTensorKeyDictionary(), fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(x.device.type == "cuda" for x in tensors)
        device = kwargs.get("device")
        if not there and (device is None or torch.device(device).type == "cpu"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in READS:
            self._note(self.device.waits, func)
            return READS[func]
        if func is aten.nonzero.default:
            self._note(self.device.waits, func)
            return torch.empty((0, args[0].ndim), dtype=torch.int64, device="cuda")
        asynchronous = kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) == 3)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not asynchronous:
                self._note(self.device.waits, func)
            return args[0].zero_()
        if func is aten._to_copy.default and there and torch.device(device or "cuda").type == "cpu":
            if not asynchronous:
                self._note(self.device.waits, func)
            with unset_fake_temporarily():
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        for sent in tensors:
            # A CPU scalar is passed with the launch.
            if not isinstance(sent, FakeTensor) and (sent.ndim or func is aten._to_copy.default):
                if sent not in self.pinned:
                    self._note(self.device.pageable, func)
                if not asynchronous:
                    self._note(self.device.waits, func)
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out)
        return out

    def stream(self, device):
        """Return a stream whose events count as a wait unless another wait came in between."""

        def record_event():
            seen = len(self.device.waits)

            def synchronize():
                if len(self.device.waits) == seen:
                    self._note(self.device.waits, "synchronize")

            return SimpleNamespace(synchronize=synchronize)

        return SimpleNamespace(record_event=record_event)

    def _faked(self, x):
        return x if isinstance(x, FakeTensor) else self._fake.from_tensor(x)

    def _count(self, func, args, kwargs, out):
        schema = func._schema
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if views or func.namespace == "prim" or func.overloadpacket in NO_KERNEL:
            return
        self.device.launches[str(func)] += 1
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        changed = {a.name for a in schema.arguments if a.alias_info is not None}
        write_only = func.overloadpacket in (aten.copy_, aten.fill_, aten.zero_)
        moved = 0
        for name, value in given.items():
            moved += _bytes(value) * (name not in changed or not (write_only or name == "out"))
            moved += _bytes(value) * (name in changed)
        if not changed:
            moved += _bytes(out)
        self.device.bytes[str(func)] += moved

    def _note(self, seen, func):
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(LIBRARY)]
        where = f"{Path(frames[-1].filename).name}: {frames[-1].line}" if frames else "the test"
        seen.append(f"{where} ({func})")


def _bytes(value):
    """Sum the bytes of all tensors in `value`, without those that a stride of 0 repeats."""
    total = 0
    for x in tree_leaves(value):
        if isinstance(x, torch.Tensor) and x.device.type == "cuda":
            sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
            total += torch.Size(sizes).numel() * x.element_size()
    return total


@contextmanager
def fake_cuda():
    """Allow tensors on `cuda`, their operations and gradients; yields the `Device`."""
    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda").copy_(torch.empty(1, device="cuda"))
        except RuntimeError as error:  # 2.9 and before, built for CUDA, where there is none
            pytest.skip(f"this torch asks the driver for a stream: {str(error).splitlines()[0]}")
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as fake, _Watch(fake) as watch:

        def pin_memory(tensor, device=None):
            watch.pinned[pinned := tensor.clone()] = True
            return pinned

        patch.setattr(loop, "_GUARDS", weakref.WeakSet())  # later tests check all guards in it
        # Modules are created on their device: fake weights cannot replace real ones.
        patch.setattr(torch.nn.Module, "to", lambda module, *args, **kwargs: module)
        # Seed and offset of the device's generator live on the host.
        patch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
        patch.setattr(torch.cuda, "manual_seed", lambda seed: None)
        patch.setattr(torch.cuda, "device", nullcontext)
        # Autocast checks for a device and its capabilities.
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
        patch.setattr(torch.cuda, "current_stream", watch.stream)
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: tensor in watch.pinned)
        patch.setattr(torch.Tensor, "backward", lambda loss: _backward([loss]))
        patch.setattr(torch.autograd, "backward", _backward)
        patch.setattr(torch.autograd, "grad", _grad)
        # A real device is waited for once for all values.
        patch.setattr(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist())
        yield watch.device


# -- autograd without torch's engine, which needs a driver --------------------------------------


def _backward(outputs):
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    for leaf, gradient in _gradients(outputs)[0].items():
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _grad(output, inputs, *, materialize_grads=False, retain_graph=False, allow_unused=False):
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    wanted = [(x.grad_fn, x.output_nr) for x in inputs if not x.is_leaf]
    leaves, inner = _gradients([output], wanted)
    found = [leaves.get(x) if x.is_leaf else inner.get((x.grad_fn, x.output_nr)) for x in inputs]
    if materialize_grads:
        found = [
            torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)
        ]
    assert allow_unused or None not in found
    return tuple(found)


def _gradients(outputs, wanted=()):
    """Differentiate a sum: leaf -> gradient, and (node, slot) -> gradient of those wanted."""
    on_their_way = Counter()  # node -> number of gradients still to come
    arrived, leaves, inner = {}, {}, {}
    for output in outputs:
        slots = arrived.setdefault(output.grad_fn, {})
        one = torch.ones_like(output)
        slots[output.output_nr] = slots.get(output.output_nr, 0) + one
    reached, unread = set(arrived), list(arrived)
    while unread:
        for node, _ in unread.pop().next_functions:
            on_their_way[node] += 1
            if node is not None and node not in reached:
                reached.add(node)
                unread.append(node)
    ready = [node for node in arrived if not on_their_way[node]]
    while ready:
        node = ready.pop()
        given = arrived.pop(node, {})
        inner |= {(node, slot): g for slot, g in given.items() if (node, slot) in wanted}
        if hasattr(node, "variable"):
            if given:
                leaves[node.variable] = given[0]
            continue
        for (after, slot), gradient in _through(node, given):
            if gradient is not None:
                meta = after._input_metadata[slot]  # shape and dtype before broadcasting or casting
                gradient = gradient.sum_to_size(meta.shape).to(meta.dtype)
                slots = arrived.setdefault(after, {})
                slots[slot] = slots[slot] + gradient if slot in slots else gradient
            on_their_way[after] -= 1
            if not on_their_way[after]:
                ready.append(after)
    return leaves, inner


@torch.no_grad()
def _through(node, given):
    """Return (next node and slot, gradient or None) for each input of a node."""
    gradients = [None] * len(node.next_functions)
    if given:
        # The node of a torch.autograd.Function has its backward pass in `apply`, which returns a
        # gradient for each argument: None for those that are not tensors, here the last ones.
        backward = node if callable(node) else node.apply
        found = backward(*(given.get(slot) for slot in range(len(node._input_metadata))))
        gradients = [found] if isinstance(found, torch.Tensor) else found
    pairs = zip(node.next_functions, gradients, strict=False)
    return [(place, gradient) for place, gradient in pairs if place[0] is not None]
