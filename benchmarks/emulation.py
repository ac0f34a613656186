"""Emulate float8, MXFP8 and half-precision matrix products, and measure what to keep out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

FORMATS: dict[str, tuple[torch.dtype, torch.dtype, str]] = {  # arXiv:2209.05433, OCP MX v1.0
    "fp32": (torch.float32, torch.float32, "none"),
    "fp16": (torch.float16, torch.float16, "none"),
    "bf16": (torch.bfloat16, torch.bfloat16, "none"),
    "e4m3": (torch.float8_e4m3fn, torch.float8_e4m3fn, "tensor"),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2, "tensor"),
    "hybrid": (torch.float8_e4m3fn, torch.float8_e5m2, "tensor"),
    "delayed": (torch.float8_e4m3fn, torch.float8_e5m2, "delayed"),  # TransformerEngine on an H100
    "mxfp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, "block"),
    "mxfp8_up": (torch.float8_e4m3fn, torch.float8_e4m3fn, "block up"),
}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of the first operand


def cast(x: Tensor, element: torch.dtype, scaled: str = "none", amax: float = 0.0) -> list[Tensor]:
    """Return x rounded to an element type, and masks of its saturated and flushed values.

    Half precision overflows to infinity, float8 saturates. A "tensor" is scaled so that its largest
    magnitude becomes the element's ("delayed": so that `amax` does, by 1 if it is 0); each "block"
    of 32 values of a row by 2 ** (emax - floor(log2(peak))), as in the MX specification (6.3), or
    NaN if a value is not finite. "block up" leaves none saturated.
    """
    wide = x.float()
    largest = torch.finfo(element).max
    scale = torch.ones(())
    if scaled in ("tensor", "delayed"):
        scale = largest / (wide.abs().amax() if scaled == "tensor" else torch.tensor(amax))
        scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    elif scaled.startswith("block"):
        blocks = nn.functional.pad(wide, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
        peak = blocks.abs().amax(-1, keepdim=True)
        mantissa, exponent = torch.frexp(peak)
        up = (mantissa > math.frexp(largest)[0]).int() if scaled == "block up" else 0
        power = (math.frexp(largest)[1] - exponent - up).clamp(-127, 127)
        scale = torch.where(peak.isfinite(), torch.ldexp(torch.ones_like(peak), power), math.nan)
        scale = scale.expand_as(blocks).flatten(-2)[..., : x.shape[-1]]
    wide = wide * scale
    saturated = wide.abs() > largest * (1 + 2**-20)  # the product with the scale is rounded
    limited = wide if scaled == "none" else wide.clamp(-largest, largest)
    values = (limited.to(element).float() / scale).to(x.dtype)
    return [values, saturated, (values == 0) & (x != 0)]


class LowPrecision(TorchDispatchMode):
    """Emulate a model's matrix products (attention, too), in one `with` block per step."""

    def __init__(self, model: nn.Module, format: str, keep_high: Collection[str] = ()) -> None:
        if format not in FORMATS:
            raise ValueError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
        super().__init__()
        self.model = model
        self.keep_high = keep_high
        *self.formats, self.scaled = FORMATS[format]
        self._known = WeakKeyDictionary({p.untyped_storage(): "weight" for p in model.parameters()})
        # By module and event, such as "input flushed": how many values, and of how many.
        self.shares = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
        self.powers = Counter[float]()  # gradients by the power of two that they do not exceed
        self._amaxes = defaultdict[Any, deque[float]](lambda: deque(maxlen=1024))  # of each tensor

    def __enter__(self) -> LowPrecision:
        self._exits, self._module_of = ExitStack(), dict[int, str]()  # by number of autograd node
        self._uses = Counter[tuple[str, str]]()  # of a module's tensors in this step
        running = self._running = ["no module"]
        enter = self._exits.enter_context
        for name, module in self.model.named_modules():
            enter(module.register_forward_pre_hook(lambda *_, n=name or "all": running.append(n)))
            enter(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
        enter(sdpa_kernel(SDPBackend.MATH))
        enter(set_checkpoint_early_stop(False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exits.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _PRODUCTS.get(func.overloadpacket.__name__)
        if first is None or not args[first].is_floating_point():
            return func(*args, **(kwargs or {}))
        module = self._running[-1]
        node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        if node:
            module = self._module_of.get(node._sequence_nr(), module)
        else:
            self._module_of.setdefault(torch.autograd._get_sequence_nr() - 1, module)  # pyright: ignore
        low = list(args)
        new = "gradient" if node else "input"
        for i in (first, first + 1):
            kind = self._known.setdefault(args[i].untyped_storage(), new)
            rows = args[i] if i == first else args[i].mT  # the product sums over a row
            low[i] = self._round(rows, module, kind, kind == "gradient")
        low[first + 1] = low[first + 1].mT
        out = func(*low, **(kwargs or {}))
        if self.scaled != "none":
            return out
        return self._round(out, module, "output gradient" if node else "output", bool(node))

    def _round(self, x: Tensor, module: str, kind: str, gradient: bool) -> Tensor:
        if gradient and self.formats[0] == torch.float32:
            finite = x[(x != 0) & x.isfinite()].float()
            powers = finite.abs().log2().ceil().unique(return_counts=True)
            self.powers.update(dict(zip(*(x.tolist() for x in powers), strict=True)))
        if module in self.keep_high or not x.numel():
            return x
        self._uses[module, kind] += 1
        history = self._amaxes[module, kind, self._uses[module, kind]]
        values, *masks = cast(x, self.formats[gradient], self.scaled, max(history, default=0.0))
        history.append(x.abs().amax().nan_to_num(0.0, 0.0).item())
        for event, mask in zip(("saturated", "flushed"), masks, strict=True):
            self.shares[module, f"{kind} {event}"] += torch.tensor([int(mask.sum()), x.numel()])
        return values


class PrecisionReport(NamedTuple):
    """What a low precision does to one step of a model; `str()` is a table, worst module first.

    Attributes:
        rows: per module, errors of loss and gradient if it alone is low, and shares of its values.
            Errors are relative, or absolute if the exact loss or gradient is 0.
        keep_high: modules to keep in a higher precision.
        loss_scale: for fp16, the largest power of two with a factor of 4 to spare, up to 2**24.
    """

    rows: dict[str, dict[str, float]]
    keep_high: list[str]
    loss_scale: float

    def __str__(self) -> str:
        kept = ", ".join(self.keep_high) or "nothing"
        lines = [f"keep in high precision: {kept}; loss scale for fp16: {self.loss_scale:g}"]
        for name, row in self.rows.items():
            cells = [f"{value:9.3%} {column}" for column, value in row.items() if value]
            lines.append(f"{name[-32:]:32} {','.join(cells)}")
        return "\n".join(lines)


def precision_report(
    model: nn.Module, loss_fn: Callable[[], Tensor], format: str = "mxfp8", tolerance: float = 1e-3
) -> PrecisionReport:
    """Measure what a low precision does to a model's loss and gradient, and what to keep out of it.

    Args:
        model: any module; its weights, buffers, gradients and random state stay as they are.
        loss_fn: returns the losses of one batch (or their mean, in which errors cancel).
        format: a key of `FORMATS`.
        tolerance: relative error of the loss up to which modules leave the higher precision.

    Raises:
        ValueError: unknown or delayed format, no trainable weight, or a loss that is not finite.
    """
    if format == "delayed":
        raise ValueError("delayed scaling needs earlier steps; expected 'hybrid' for a single step")
    weights = [p for p in model.parameters() if p.requires_grad]
    buffers = [(m, *pair) for m in model.modules() for pair in m.named_buffers(recurse=False)]
    copies = {buffer: buffer.clone() for buffer in model.buffers()}

    def run(keep_high: Collection[str], format: str, scale: float) -> tuple[Any, Tensor, Tensor]:
        low, gpus = LowPrecision(model, format, keep_high), {p.device for p in weights if p.is_cuda}
        try:
            with torch.random.fork_rng(gpus), torch.enable_grad(), low:
                losses = loss_fn()
                if not weights or not getattr(losses, "requires_grad", False):
                    raise ValueError("expected losses that depend on trainable weights, got none")
                loss = losses.mean() * scale
                gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        finally:
            for module, name, buffer in buffers:
                setattr(module, name, buffer)
            for buffer, copy in copies.items():
                buffer.data.copy_(copy)
        gradient = torch.cat([g.to_dense().flatten().float() for g in gradients])
        return low, losses.detach().float(), gradient / scale

    def errors(keep_high: Collection[str]) -> dict[str, float]:
        pairs = zip(run(keep_high, format, scale)[1:], exact, strict=True)
        values = [float((value - true).norm() / (true.norm() or 1)) for value, true in pairs]
        loss, gradient = (math.inf if math.isnan(value) else value for value in values)
        return {"loss": loss, "gradient": gradient}

    start, *exact = run((), "fp32", 1.0)
    if not all(x.isfinite().all() for x in exact):
        raise ValueError("loss or gradient is not finite in fp32; expected a healthy step")
    scale = 2.0 ** min(24, 14 - max(start.powers, default=14))
    low, *_ = run((), format, scale)
    modules = list(dict.fromkeys(module for module, _ in low.shares))
    rows = {m: errors([other for other in modules if other != m]) for m in modules}
    rows = dict(sorted(rows.items(), key=lambda row: row[1]["loss"], reverse=True))
    keep = list(rows)
    for module in reversed(list(rows)):
        fewer = [m for m in keep if m != module]
        keep = fewer if errors(fewer)["loss"] <= tolerance else keep
    for (module, name), (part, whole) in low.shares.items():
        rows[module][name] = float(part / whole)
    rows |= {"everything": errors(()), "all but what is kept": errors(keep)}
    for at in (1, scale):
        flushed = sum(n for power, n in start.powers.items() if 2.0**power * at <= 2**-25)
        rows[f"fp16 at scale {at:g}"] = {"gradient flushed": flushed / (start.powers.total() or 1)}
    return PrecisionReport(rows, keep, scale)
