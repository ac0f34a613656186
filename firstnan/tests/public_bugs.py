"""Twenty-five bugs that people reported in public, each in the loop in which it happens.

Each function is a plain training, reduced from its thread, that knows nothing of the guard; `!`
marks a pull request. `benchmarks.public_bugs` runs the guard on each.
"""
# ruff: noqa: E731 (a loss in one line)

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstnan.diagnosis import Cause


class Bug(NamedTuple):
    """A public bug, and the operation, the cause and the sentence that must be named.

    `why` says what is true of this bug alone: what a divisor is computed from, which value is out
    of which range. A sentence of the same category about something else is wrong.
    """

    thread: str
    op: str
    cause: Cause
    why: str
    run: Callable[[], None]


BUGS: list[Bug] = []


def bug(
    thread: str, op: str, cause: Cause, why: str
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add the decorated function to `BUGS`."""

    def added(run: Callable[[], None]) -> Callable[[], None]:
        BUGS.append(Bug(thread, op, cause, why, run))
        return run

    return added


def train(model: nn.Module, loss_of: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> None:
    """Train as everybody does."""
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches:
        optimizer.zero_grad()
        loss_of(x).backward()
        optimizer.step()


@bug(
    "huggingface/trl#6702",
    "sub",
    Cause.POISONED_INPUT,
    "came in not finite (1 of 4 values NaN",
)
def nan_replaced_in_the_log():
    """GRPO: NaN from the engine; the step is taken, and the log shows a mean of earlier losses."""
    policy, shown = nn.Linear(4, 5), []
    sampled = iter(torch.tensor([[-1.5] * 4, [-1.5] * 4, [-1.5, torch.nan, -1.5, -1.5]]))

    def loss_of(x):
        logps = policy(x).log_softmax(-1)[:, 0]
        loss = -((logps - next(sampled)).exp() * x[:, 0]).mean()
        shown.append(float(loss.detach()) if loss.isfinite() else sum(shown) / len(shown))
        return loss

    train(policy, loss_of, torch.randn(3, 4, 4))


@bug("PrimeIntellect-ai/prime-rl#2972", "exp", Cause.EXPONENTIAL, "the exponential of 89")
def ratio_of_a_stale_rollout():
    """RL: a token's ratio is exp(89), and the mask that leaves the token out makes it 0 * inf."""
    policy, stale = nn.Linear(4, 5), torch.tensor([0.0, 89.0, 0.0])
    loss_of = lambda p: -((p - p.detach() + stale).exp() * (stale == 0)).sum()
    train(policy, lambda x: loss_of(policy(x).log_softmax(-1)[:, 0]), torch.randn(2, 3, 4))


@bug("karpathy/nanochat#590", "nll_loss_forward", Cause.MASKED, "every label is ignored")
def micro_batch_without_a_target():
    """SFT: one accumulated micro-batch is prompt alone; all weights are NaN after step 1."""
    model = nn.Linear(4, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    for targets in torch.tensor([[1, 2, -1], [-1, -1, -1]]):
        logits = model(torch.randn(3, 4))
        (F.cross_entropy(logits, targets, ignore_index=-1) / 2).backward()
    optimizer.step()


@bug(
    "microsoft/LMOps#38",
    "div",
    Cause.MASKED,
    "0 / 0: a mean over nothing: the mask or count is empty",
)
def distillation_of_prompts_alone():
    """Distillation: the tokenizer cuts off every answer of a batch, and the mask is all 0."""
    student, teacher = nn.Linear(4, 7), nn.Linear(4, 7)

    def loss_of(x):
        mask = (x[:, 0] > 0).float()
        agreement = (teacher(x).detach().softmax(-1) * student(x).log_softmax(-1)).sum(-1)
        return -(agreement * mask).sum() / mask.sum()

    train(student, loss_of, [torch.ones(3, 4), -torch.ones(3, 4)])


def train_with_scaler(loss_of, *models, steps=40):
    """Train under float16 autocast, with an optimizer per model and one GradScaler."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            losses = loss_of(step)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()


@bug("pytorch/pytorch#88474", "_to_copy", Cause.FP16_OVERFLOW, "float16 ends at")
def batch_norm_under_amp():
    """A GradScaler skips a step that overflows, but the statistics of BatchNorm stay NaN."""
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    sizes = (1.0, 1e5, 1.0)
    train_with_scaler(lambda i: [model(sizes[i] * torch.rand(4, 3)).mean()], model, steps=3)


@bug("NVIDIA/apex#179", "pow", Cause.FP16_OVERFLOW, "float16 ends at")
def one_scaler_for_two_optimizers():
    """GAN: only the discriminator overflows, but the loss scale falls to 0 for both networks."""
    generator, discriminator = nn.Linear(4, 64), nn.Linear(64, 8)

    def losses_of(step):
        fake, pixels = generator(torch.randn(4, 4)), 2550 * torch.rand(4, 64)
        return -discriminator(fake).mean(), discriminator(pixels).square().mean()

    train_with_scaler(losses_of, generator, discriminator)


@bug("NVIDIA/apex#192", "pow", Cause.FP16_OVERFLOW, "float16 ends at")
def loss_scale_without_a_floor():
    """BERT: from some step on, every step overflows; the loss scale falls to 1 and below."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    loss_of = lambda step: (model(torch.randn(8, 4)) * (1 + 100 * step)).square().mean()
    train_with_scaler(lambda step: [loss_of(step)], model)


@bug(
    "pytorch/pytorch#147437",
    "addmm",
    Cause.POISONED_WEIGHT,
    "the optimizer's eps=1e-08 is 0 in float16",
)
def adamw_on_float16_weights():
    """AdamW on float16 weights: finite loss and gradients, and NaN weights after one step."""
    model = nn.Linear(3, 1).half()
    train(model, lambda x: model(x).float().square().sum(), [torch.eye(3).half()[:1]] * 2)


@bug(
    "pytorch/pytorch#46849",
    "div",
    Cause.ROOT_OF_ZERO,
    "a root was taken of an exact 0, where its slope is infinite",
)
def clipping_by_an_infinite_norm():
    """One gradient is infinite: `clip_grad_norm_` makes it NaN and all others 0, silently."""
    healthy, sick = model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    nn.init.zeros_(sick.weight), nn.init.zeros_(sick.bias)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 2)
    (healthy(x) + sick(x).sqrt()).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class GradientInE5M2(torch.autograd.Function):
    """Cast the gradient to float8, scaled by the largest of the step before."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        scale = ctx.scale.clone()
        ctx.scale.copy_(57344 / grad.abs().max())
        return (grad * scale).to(torch.float8_e5m2).float() / scale, None


@bug(
    "meta-pytorch/float8_experimental!33",
    "_to_copy",
    Cause.FP8_OVERFLOW,
    "float8_e5m2 ends at 5.73e+04",
)
def gradient_in_float8():
    """Gradients in E5M2 with delayed scaling: when they grow, the cast overflows to infinity."""
    model, scale = nn.Linear(4, 1), torch.ones(())
    batches = [torch.ones(2, 4), torch.ones(2, 4), 50 * torch.ones(2, 4)]
    train(model, lambda x: GradientInE5M2.apply(model(x), scale).square().sum(), batches)


@bug(
    "pytorch/ao!4762",
    "div",
    Cause.ZERO_SCALE,
    "the scale is exactly 0, as all values of a block are",
)
def block_of_zeros_in_mxfp8():
    """MXFP8: each block of 32 weights has a power of two as its scale; a block of zeros is NaN."""
    model = nn.Linear(64, 4, bias=False)
    model.weight.data[0, :32] = 0

    def loss_of(x):
        blocks = model.weight.view(4, 2, 32)
        scale = (blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
        low = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        return (x @ low.view(4, 64).T).square().mean()

    train(model, loss_of, torch.randn(2, 3, 64))


@bug("sgl-project/sglang!31017", "div", Cause.UNDERFLOW, "sigmoids underflowed to 0")
def router_without_a_choice():
    """Mixture of experts: all sigmoids of a token's router logits are 0, and so is their sum."""
    router, experts = model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])
    nn.init.ones_(router.weight)

    def loss_of(x):
        weights, chosen = router(x).sigmoid().topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        return (experts(x).gather(-1, chosen) * weights).square().mean()

    train(model, loss_of, [torch.tensor([[1.0] * 4, [-30.0] * 4])])


@bug("kohya-ss/musubi-tuner#897", "addmm", Cause.FP16_OVERFLOW, "float16 ends at")
def bfloat16_model_in_float16():
    """A model that was trained in bfloat16 is tuned in float16, and its loss is NaN."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).bfloat16()
    nn.init.constant_(model.get_parameter("2.weight").data[3], 200.0)
    x = 50 * torch.randn(4, 16)
    assert model(x.bfloat16()).isfinite().all()
    model = model.half()
    train(model, lambda x: model(x).float().square().mean(), [x.half()])


@bug("unslothai/unsloth-zoo!866", "mm", Cause.FP16_OVERFLOW, "float16 ends at")
def residual_stream_in_float16():
    """Float16: activations stay below 350, but the gradient overflows on its way back."""
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(12)])
    for weight in model.parameters():
        nn.init.orthogonal_(weight, gain=3.0)
    model = model.half()
    train(model, lambda x: 1024 * model(x).float().mean(), [1e-3 * torch.randn(2, 8).half()])


@bug("huggingface/trl!5594", "mul", Cause.ZERO_TIMES_INFINITY, "an infinity met a 0")
def reverse_kl_to_padding():
    """Distillation: the teacher is padded with -inf and masked later; finite loss, NaN gradient."""
    student, allowed = nn.Linear(4, 5), torch.tensor([True] * 4 + [False])
    teacher = torch.randn(2, 5).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    loss_of = lambda q: torch.where(allowed, q.exp() * (q - teacher), 0.0).sum(-1).mean()
    train(student, lambda x: loss_of(student(x).log_softmax(-1)), torch.randn(2, 2, 4))


@bug(
    "MakazhanAlpamys/Soup#719",
    "div",
    Cause.UNDERFLOW,
    "exponentials underflowed to 0",
)
def reverse_kl_by_kl_div():
    """Distillation by `F.kl_div` at a temperature of 0.05: finite loss, NaN gradient."""
    student, teacher = nn.Linear(4, 5), nn.Linear(4, 5)
    cold = lambda model, x: (model(x) / 0.05).log_softmax(-1)
    loss_of = lambda x: F.kl_div(cold(teacher, x).detach(), cold(student, x).exp(), reduction="sum")
    train(student, loss_of, [10 * torch.randn(3, 4)])


class Discriminator(nn.Linear):
    """A linear discriminator that also sees the spread of its batch."""

    def forward(self, x):
        return super().forward(torch.cat([x, x.std(dim=0).mean().expand(len(x), 1)], dim=1))


@bug("ziwei-jiang/PGGAN-PyTorch#1", "std", Cause.DOMAIN, "the std or var of one value")
def last_batch_of_one():
    """GAN: 65 images in batches of 8; the last batch, one image, is NaN in the discriminator."""
    model = Discriminator(17, 1)
    train(model, lambda x: F.softplus(model(x)).mean(), torch.randn(65, 16).split(8))


@bug("pytorch/pytorch#41508", "_softmax", Cause.MASKED, "every entry of a row is -inf")
def attention_of_padding():
    """A sample is all padding and not in the loss, yet all weights of the attention become NaN."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    mask = torch.tensor([[False] * 4, [True] * 4])
    first = lambda x: attention(x, x, x, key_padding_mask=mask)[0][0]
    train(attention, lambda x: first(x).square().mean(), torch.randn(2, 2, 4, 8))


@bug(
    "pytorch/pytorch#187297",
    "div",
    Cause.ROOT_OF_ZERO,
    "a root was taken of an exact 0, where its slope is infinite",
)
def branch_not_taken():
    """`where` over a square root: the branch that is not taken makes the gradient NaN."""
    line = nn.Linear(1, 1, bias=False)
    root = lambda y: torch.where(y > 0, y.sqrt(), y)
    train(line, lambda x: root(line(x).abs()).mean(), [torch.tensor([[0.0], [1.0]])])


@bug("pytorch/pytorch#31829", "sub", Cause.MASKED, "every entry of a row is -inf")
def path_that_does_not_exist():
    """CTC by hand: a log-sum-exp of -inf that the loss does not use; its gradient is NaN."""
    model, paths = nn.Linear(4, 3), torch.tensor([[0.0] * 3, [-torch.inf] * 3])
    alpha = lambda x: (model(x).log_softmax(-1) + paths).logsumexp(-1)
    train(model, lambda x: -alpha(x)[0], torch.randn(1, 2, 4))


@bug(
    "facebookresearch/dinov2#492",
    "log",
    Cause.LOG_OF_ZERO,
    "the logarithm was taken of an exact 0",
)
def koleo_of_duplicates():
    """KoLeo: two equal images are at distance 0; the loss is infinite in float16."""
    embed, nearest = nn.Linear(4, 8), [1, 0, 0]
    unit = lambda x: F.normalize(embed(x).half(), dim=-1, eps=1e-8)
    loss_of = lambda z: -torch.log(F.pairwise_distance(z, z[nearest], eps=1e-8) + 1e-8).mean()
    train(embed, lambda x: loss_of(unit(x)), [torch.randn(2, 4)[[0, 0, 1]]])


@bug(
    "pytorch/pytorch#32137",
    "div",
    Cause.ZERO_NORM,
    "a vector's length is exactly 0: a division by it",
)
def embedding_of_padding():
    """`F.normalize` in float16: its eps of 1e-12 is 0, and the embedding of padding is NaN."""
    embed = nn.Embedding(10, 8, padding_idx=0)
    unit = lambda x: F.normalize(embed(x).half(), dim=-1)
    train(embed, lambda x: (unit(x) @ unit(x).T).float().mean(), [torch.tensor([3, 0, 5])])


@bug("meijieru/crnn.pytorch#235", "_ctc_loss", Cause.DOMAIN, "too short")
def label_longer_than_the_line():
    """CTC: a label has more characters than the image has columns, and the loss is infinite."""
    model = nn.Linear(4, 3)
    label = torch.tensor([[1, 1, 2]]), torch.tensor([2]), torch.tensor([3])
    loss_of = lambda x: F.ctc_loss(model(x).log_softmax(-1), *label)
    train(model, loss_of, torch.randn(1, 2, 1, 4))


@bug(
    "harvardnlp/annotated-transformer#109",
    "log",
    Cause.LOG_OF_ZERO,
    "the logarithm was taken of an exact 0",
)
def log_of_a_probability():
    """Label smoothing: KLDivLoss of `predict.log()` is infinite for a probability of 0."""
    model, criterion = nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1)), nn.KLDivLoss(reduction="sum")
    smooth = torch.full((3, 5), 0.1).scatter(1, torch.tensor([[2], [1], [0]]), 0.6)
    train(model, lambda x: criterion(model(x).log(), smooth), [300 * torch.randn(3, 4)])


@bug("meta-pytorch/torchrec!3891", "none", Cause.UNKNOWN, "an empty shard")
def norm_of_an_empty_shard():
    """Sharded training: clipping by the largest gradient raises, as a shard has no element."""
    model, shard = nn.Linear(4, 2), nn.Parameter(torch.zeros(0, 4))
    (model(torch.randn(3, 4)).square().mean() + shard.sum()).backward()
    nn.utils.clip_grad_norm_([*model.parameters(), shard], 1.0, norm_type=torch.inf)
