"""Emulate float8, MXFP8 and half-precision matrix products, and measure what to keep out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
    "hybrid": (torch.float8_e4m3fn, torch.float8_e5m2, "tensor"),  # TransformerEngine's default
    "mxfp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, "block"),
    "mxfp8_up": (torch.float8_e4m3fn, torch.float8_e4m3fn, "block up"),
}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of the first operand


def cast(x: Tensor, element: torch.dtype, scaled: str = "none", dim: int = -1) -> list[Tensor]:
    """Return x rounded to an element type, and masks of its saturated and flushed values.

    Half precision overflows to infinity, float8 saturates. A "tensor" is scaled to the element's
    largest magnitude; a "block" of 32 values along `dim` by 2 ** (emax - floor(log2(amax))), as in
    the MX specification (6.3), or NaN if a value is not finite. "block up" leaves none saturated.
    """
    wide, largest, scale = x.float(), torch.finfo(element).max, torch.ones(())
    if scaled == "tensor":
        scale = largest / wide.abs().amax()
        scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    elif scaled.startswith("block"):
        moved = wide.movedim(dim, -1)
        blocks = nn.functional.pad(moved, (0, -moved.shape[-1] % 32)).unflatten(-1, (-1, 32))
        amax = blocks.abs().amax(-1, keepdim=True)
        mantissa, exponent = torch.frexp(amax)
        up = (mantissa > math.frexp(largest)[0]).int() if scaled == "block up" else 0
        power = (math.frexp(largest)[1] - exponent - up).clamp(-127, 127)
        scale = torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), power), math.nan)
        scale = scale.expand_as(blocks).flatten(-2)[..., : moved.shape[-1]].movedim(-1, dim)
    wide = wide * scale
    saturated = wide.abs() > largest * (1 + 2**-20)  # the product with the scale is rounded
    limited = wide if scaled == "none" else wide.clamp(-largest, largest)
    values = (limited.to(element).float() / scale).to(x.dtype)
    return [values, saturated, (values == 0) & (x != 0)]


class LowPrecision(TorchDispatchMode):
    """Emulate a model's matrix products (attention, too) in a `with` block; no convolutions."""

    def __init__(self, model: nn.Module, format: str, keep_high: Collection[str] = ()) -> None:
        if format not in FORMATS:
            raise ValueError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
        super().__init__()
        self.model, self.keep_high, (*self.formats, self.scaled) = model, keep_high, FORMATS[format]
        self._known = WeakKeyDictionary({p.untyped_storage(): "weight" for p in model.parameters()})
        self.shares = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))  # part and whole
        self.powers = Counter[float]()  # gradients by the power of two that they do not exceed

    def __enter__(self) -> LowPrecision:
        self._exits, self._module_of = ExitStack(), dict[int, str]()  # by number of autograd node
        running = self._running = ["no module"]
        for name, module in self.model.named_modules():
            begin = module.register_forward_pre_hook(lambda *_, n=name or "all": running.append(n))
            end = module.register_forward_hook(lambda *_: running.__delitem__(-1), always_call=True)
            self._exits.callback(begin.remove)
            self._exits.callback(end.remove)
        self._exits.enter_context(sdpa_kernel(SDPBackend.MATH))
        self._exits.enter_context(set_checkpoint_early_stop(False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exits.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exact = func(*args, **(kwargs or {}))
        if (first := _PRODUCTS.get(func.overloadpacket.__name__)) is None:
            return exact
        module = self._running[-1]
        node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        if node is None:
            number = torch.autograd._get_sequence_nr() - 1  # pyright: ignore
            self._module_of.setdefault(number, module)
        else:
            module = self._module_of.get(node._sequence_nr(), module)
        low = list(args)
        for i, dim in ((first, -1), (first + 1, -2)):  # the dimension that the product sums over
            storage = args[i].untyped_storage()
            new = "gradient" if node else self._known.setdefault(storage, "input")
            low[i] = self._round(args[i], module, self._known.get(storage, new), dim)
        out = func(*low, **(kwargs or {}))
        if self.scaled == "none":
            out = self._round(out, module, "output gradient" if node else "output")
        norms = torch.stack([(out - exact).float().norm(), exact.float().norm()])
        self.shares[module, "product error"] += norms.cpu()
        return out

    def _round(self, x: Tensor, module: str, kind: str, dim: int = -1) -> Tensor:
        if "gradient" in kind and self.formats[0] == torch.float32:
            finite = x[(x != 0) & x.isfinite()].float()
            powers = finite.abs().log2().ceil().unique(return_counts=True)
            self.powers.update(dict(zip(*(x.tolist() for x in powers), strict=True)))
        if module in self.keep_high or not x.numel():
            return x
        values, *masks = cast(x, self.formats[kind == "gradient"], self.scaled, dim)
        for event, mask in zip(("saturated", "flushed"), masks, strict=True):
            self.shares[module, f"{kind} {event}"] += torch.tensor([int(mask.sum()), x.numel()])
        return values


class PrecisionReport(NamedTuple):
    """What a low precision does to one step of a model; `str()` is a table, worst module first.

    Attributes:
        rows: per module, errors of loss and gradient if it alone is low, and shares of its values.
        keep_high: modules to keep in a higher precision.
        loss_scale: for fp16, the largest power of two with a factor of four to spare.
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
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}

    def run(keep_high: Collection[str], format: str, scale: float) -> tuple[Any, Tensor, Tensor]:
        low, gpus = LowPrecision(model, format, keep_high), {p.device for p in weights if p.is_cuda}
        with torch.random.fork_rng(gpus), torch.enable_grad(), low:
            losses = loss_fn()
            gradients = torch.autograd.grad(losses.mean() * scale, weights, allow_unused=True)
        for buffer, value in buffers.items():
            buffer.data.copy_(value)
        gradient = torch.cat([g.flatten().float() for g in gradients if g is not None])
        return low, losses.detach().float(), gradient / scale

    def errors(keep_high: Collection[str]) -> dict[str, float]:
        pairs = zip(run(keep_high, format, scale)[1:], exact, strict=True)
        loss, gradient = (float((value - true).norm() / true.norm()) for value, true in pairs)
        return {"loss": math.inf if math.isnan(loss) else loss, "gradient": gradient}

    start, *exact = run((), "fp32", 1.0)
    scale = 2.0 ** (14 - max(start.powers, default=14))
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
