import itertools
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ssl_kd.core.errors import InputError
from ssl_kd.language.losses.routing import load_balance
from ssl_kd.language.losses.token_distillation import token_kd
from ssl_kd.language.models.mixture import ROUTERS, Mixture, Routing
from ssl_kd.language.models.router import RouterStep

transformers = pytest.importorskip("transformers")
stats = pytest.importorskip("scipy.stats")

from transformers.models.granitemoe import modeling_granitemoe as granitemoe  # noqa: E402

from tests.bits import changed  # noqa: E402
from tests.language.models.small_models import SMALL, VOCAB  # noqa: E402

KINDS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe")
SIZES = {**SMALL, "intermediate_size": 32, "num_hidden_layers": 2, "num_experts_per_tok": 2}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
OWN = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen2Moe": {
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
    "Olmoe": {"num_experts": 8},
    "GraniteMoe": {"num_local_experts": 8},
}
RENORMALIZES = {kind: {} if kind == "Mixtral" else {"norm_topk_prob": True} for kind in KINDS}


def _model(kind="Mixtral", seed=0, **more):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **OWN.get(kind, {}), **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # gates and experts that make a difference
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model


def _ids():
    return torch.randint(0, VOCAB, (3, 10), generator=torch.Generator().manual_seed(1))


def _logits(model):
    return model(_ids(), use_cache=False).logits


def _ka(lam, seed=0):
    return Routing("ka", lam, torch.Generator().manual_seed(seed))


def _student(seed=5, dtype=torch.float32):
    return torch.randn(3, 10, VOCAB, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _kl(p_logits, q_logits):
    """KL(p || q), mean over tokens."""
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _objective(model, q):
    return lambda: _kl(_logits(model).float(), q)


def _bits(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# --- which experts are active ---------------------------------------------------------------------


def test_a_mixture_of_one_expert_is_refused(tiny):
    with pytest.raises(InputError, match=r"\(1, 32, 1\).*expected one, of 2 or more experts"):
        Mixture(tiny.model("Mixtral", num_local_experts=1, num_experts_per_tok=1))


@pytest.mark.parametrize("kind", KINDS)
def test_native_is_the_model_to_the_bit(kind):
    model = _model(kind)
    plain = _logits(model)
    mixture = Mixture(model)
    assert (mixture.layers, mixture.n_experts, mixture.k) == (2, 8, 2)
    with mixture.watch():
        assert torch.equal(_logits(model), plain)
    with mixture.using(Routing("all")):
        assert not torch.allclose(_logits(model), plain)
    assert torch.equal(_logits(model), plain)


def test_weights_sum_to_what_they_do_in_a_model_that_does_not_renormalize():
    model = _model("Olmoe", norm_topk_prob=False)
    router = model.model.layers[0].mlp.gate
    hidden = torch.randn(5, 32)
    native = router(hidden)[1].sum(-1)  # what the two largest sum to
    assert (native < 0.99).all()
    mixture = Mixture(model)
    for routing in (Routing("all"), _ka(1.0)):
        with mixture.using(routing):
            torch.testing.assert_close(router(hidden)[1].sum(-1), native)


@pytest.mark.parametrize("kind", KINDS)
def test_all_uses_every_expert_and_ka_without_sampling_all_but_the_smallest(kind):
    model = _model(kind, **RENORMALIZES[kind])
    mixture = Mixture(model)
    router, hidden = model.model.layers[1].mlp.gate, torch.randn(2, 10, 32)
    gate = (hidden.reshape(20, 32) @ router.weight.T).softmax(-1)
    with mixture.using(Routing("all")):
        _, weights, index = router(hidden)
    assert torch.equal(index, torch.arange(8).expand(20, 8))
    torch.testing.assert_close(weights, gate)
    with mixture.using(_ka(0.0)):
        _, weights, index = router(hidden)
    largest = gate.topk(7)
    assert torch.equal(index, largest.indices)
    torch.testing.assert_close(weights, largest.values / largest.values.sum(-1, keepdim=True))


def test_shared_experts_are_unchanged():
    model = _model("Qwen2Moe")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.zero_()
    plain = _logits(model)
    mixture = Mixture(model)
    for routing in (Routing("all"), _ka(1.0)):
        with mixture.using(routing):
            assert torch.equal(_logits(model), plain)


def _plackett_luce(p, size):
    """Probability of each set of `size` drawn from p one after the other without replacement."""
    sets = {}
    for order in itertools.permutations(range(len(p)), size):
        chance, left = 1.0, 1.0
        for i in order:
            chance, left = chance * p[i] / left, left - p[i]
        key = frozenset(order)
        sets[key] = sets.get(key, 0.0) + chance
    return sets


@pytest.mark.parametrize("lam", [0.3, 1.0])
def test_sampled_experts_have_the_frequencies_of_the_multinomial(lam):
    model = _model(num_local_experts=5)
    mixture = Mixture(model)
    router, tokens = model.model.layers[0].mlp.gate, 20000
    hidden = 0.3 * torch.randn(1, 32)
    gate = (hidden @ router.weight.T).softmax(-1)[0]
    with mixture.using(_ka(lam, seed=3)):
        _, weights, index = router(hidden.expand(tokens, 32))
    chances = _plackett_luce((gate.double() / gate.double().sum()).tolist(), 4)
    counts = dict.fromkeys(chances, 0)
    for row in index.tolist():
        counts[frozenset(row)] += 1
    top = frozenset(gate.topk(4).indices.tolist())
    expected = [tokens * (lam * chance + (1 - lam) * (s == top)) for s, chance in chances.items()]
    assert min(expected) > 5
    assert stats.chisquare(list(counts.values()), expected).pvalue > 0.01
    own = gate[index]
    torch.testing.assert_close(weights, own / own.sum(-1, keepdim=True))


def test_sampling_works_with_gates_that_underflow():
    mixture = Mixture(model := _model())
    router = model.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.zero_()[0, 0] = 500.0  # probabilities 1, 0, 0, ...
    with mixture.using(_ka(1.0)):
        _, weights, index = router(torch.ones(50, 32))
    assert (index == 0).any(1).all() and torch.isfinite(weights).all()
    assert all(len(set(row)) == 7 for row in index.tolist())


# --- unsupported models ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DeepseekV3", "Glm4Moe"])
def test_gates_by_a_sigmoid_are_refused(kind):
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, n_routed_experts=8, first_k_dense_replace=0, moe_intermediate_size=16, n_group=1
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"{kind}.*sigmoid.*'native'"):
        Mixture(model)


def test_another_architecture_is_added_by_a_line(monkeypatch):
    model = _model("GraniteMoe", num_experts_per_tok=7)
    plain = _logits(model)
    with pytest.raises(ValueError, match="GraniteMoeTopK(Router|Gating).*mixture.ROUTERS"):
        Mixture(model)
    if not hasattr(granitemoe, "GraniteMoeTopKRouter"):
        pytest.skip("this release of transformers has another router")
    monkeypatch.setitem(ROUTERS, "GraniteMoeTopKRouter", True)
    mixture = Mixture(model)
    with mixture.using(_ka(0.0)):
        torch.testing.assert_close(_logits(model), plain, rtol=1e-4, atol=1e-4)


# --- recorded gates -------------------------------------------------------------------------------


@pytest.mark.parametrize(("routing", "each"), [(Routing(), 2), (Routing("all"), 8), (_ka(1.0), 7)])
def test_gates_count_real_tokens_only(routing, each):
    mixture = Mixture(model := _model())
    mask = torch.rand(3, 10) < 0.6
    real = int(mask.sum())
    with mixture.using(routing), mixture.watch(mask) as gates:
        _logits(model)
    torch.testing.assert_close(gates.mass().sum(1), torch.full((2,), float(real)))
    assert gates.counts().sum(1).tolist() == [real * each] * 2
    p = gates.logits[0][mask.flatten()].softmax(-1)
    torch.testing.assert_close(gates.mass()[0], p.sum(0))
    torch.testing.assert_close(gates.entropy()[0], -(p * p.log()).sum(-1).mean())


def test_padding_affects_neither_value_nor_gradient():
    mixture = Mixture(model := _model())
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[:, 7:] = False
    router = model.model.layers[0].mlp.gate
    hidden = torch.randn(30, 32)
    results = []
    for value in (0.0, math.nan):
        hidden[~mask.flatten()] = value
        with mixture.watch(mask) as gates, mixture.using(Routing("sar")):
            router(hidden)
        gates.logits[1], gates.chosen[1] = gates.logits[0], gates.chosen[0]
        loss = load_balance(gates.mass(), gates.counts()).sum()
        gates.logits[0].retain_grad()
        loss.backward()
        results.append((loss.detach(), gates.logits[0].grad))
    assert torch.isfinite(results[0][1]).all()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_drift_is_the_divergence_from_the_original_gate():
    mixture = Mixture(model := _model())
    router, hidden = model.model.layers[0].mlp.gate, torch.randn(30, 32)
    before = (hidden @ router.weight.T).log_softmax(-1)
    with torch.no_grad():
        router.weight.add_(0.2 * torch.randn_like(router.weight))
    now = (hidden @ router.weight.T).log_softmax(-1)
    with mixture.watch(original=True) as gates:
        router(hidden)
    forward = (before.exp() * (before - now)).sum(-1).mean()
    reverse = (now.exp() * (now - before)).sum(-1).mean()
    assert abs(forward - reverse) > 1e-2
    torch.testing.assert_close(gates.drift()[0], forward)


# --- the student-aware router ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_step_changes_router_tensors_only(kind):
    model = _model(kind)
    mixture = Mixture(model)
    step = RouterStep(mixture, learning_rate=1e-3)
    before = _bits(model.state_dict())
    record = step.step(_objective(model, _student()))
    assert record.applied and record.event is None
    assert record.drift == 0 and record.grad_norm > 0 and 0 < record.entropy < math.log(8)
    assert changed(before, model.state_dict()) == set(mixture.router_parameters())
    assert mixture.routing.mode == "native" and not model.training
    assert all(p.grad is None for p in model.parameters())


def test_steps_reduce_the_divergence_in_the_stated_direction():
    model = _model()
    step = RouterStep(Mixture(model), learning_rate=0.02, balance=0.0, drift_limit=100.0)
    q, gradients = _student(), []
    parameters = list(step.mixture.router_parameters().values())
    forward, reverse = _objective(model, q), lambda: _kl(q, _logits(model))
    library = lambda: token_kd(_logits(model), q, temperature=1.0, divergence="reverse_kl")  # noqa: E731
    for objective in (forward, reverse, library):
        with step.routed():
            gradients.append(torch.autograd.grad(objective(), parameters))
    assert not torch.allclose(gradients[0][0], gradients[1][0], rtol=0.1)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-3, atol=1e-5)
    records = [step.step(forward) for _ in range(20)]
    assert records[-1].loss < 0.8 * records[0].loss
    assert records[-1].drift > records[1].drift > records[0].drift == 0


def test_the_load_balance_evens_the_gates_out():
    model = _model()
    step = RouterStep(Mixture(model), learning_rate=0.02, balance=1.0, drift_limit=100.0)
    records = [step.step(lambda: 0 * _logits(model).sum()) for _ in range(20)]
    assert records[-1].loss < 0.5 * records[0].loss
    assert records[-1].entropy > records[0].entropy


def _in_float64(kind):
    model = _model(kind, seed=2)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):  # theirs rounds to float32
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, 1e-6))
    model.config._experts_implementation = "eager"  # grouped products stop at float32
    return model.double()


@pytest.mark.parametrize("kind", ["Mixtral", "Olmoe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_finite_differences(kind, checkpointing):
    model = _in_float64(kind)
    step = RouterStep(Mixture(model), gradient_checkpointing=checkpointing)
    q, mask = _student(dtype=torch.float64), torch.ones(3, 10)
    mask[1, 4:] = 0
    parameters = list(step.mixture.router_parameters().values())
    with torch.no_grad():
        for parameter in parameters:  # away from the original
            parameter.add_(0.05 * torch.randn_like(parameter))

    def loss(backward=False):
        with step.routed(mask) as gates:
            loss = _kl(_logits(model), q) + 0.1 * load_balance(gates.mass(), gates.counts()).sum()
            if backward:
                loss.backward()
        return loss.detach()

    loss(backward=True)
    for parameter in parameters:
        direction = torch.randn_like(parameter)
        slope = torch.vdot(parameter.grad.flatten(), direction.flatten())
        values = []
        for h in (1e-5, -1e-5):
            parameter.data.add_(direction, alpha=h)
            values.append(loss())
            parameter.data.sub_(direction, alpha=h)
        torch.testing.assert_close((values[0] - values[1]) / 2e-5, slope, rtol=1e-6, atol=1e-8)


def test_checkpointed_layers_run_twice_and_give_the_same_gradient():
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = _model()
        model.config.attention_dropout = 0.5
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5  # must stay off
        mixture = Mixture(model)
        step = RouterStep(mixture, gradient_checkpointing=checkpointing)
        calls = []
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_, c=calls: c.append(1))
        with step.routed(torch.ones(3, 10)) as gates:
            divergence = _objective(model, _student())()
            (divergence + load_balance(gates.mass(), gates.counts()).sum()).backward()
        gradients.append([p.grad.clone() for p in mixture.router_parameters().values()])
        runs.append(len(calls))
        assert not any(module.training for module in model.modules())
    assert runs == [1, 2]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_routers_of_a_half_precision_teacher_are_float32(dtype, kind):
    model = _model(kind).to(dtype)
    mixture = Mixture(model)
    plain = _logits(model).float()
    step = RouterStep(mixture, learning_rate=1e-5, scale_loss=dtype == torch.float16)
    assert {p.dtype for p in mixture.router_parameters().values()} == {torch.float32}
    close = torch.isclose(_logits(model).float(), plain, rtol=0.1, atol=0.3).all(-1)
    assert (~close).sum() <= 3  # of 30 tokens, whose rounded router chose another expert
    before = _bits(mixture.router_parameters())
    for _ in range(3):
        record = step.step(_objective(model, _student()))
        assert record.applied and math.isfinite(record.grad_norm)
    assert changed(before, mixture.router_parameters()) == set(before)


def test_a_loss_scale_that_overflows_is_halved():
    model = _model().half()
    step = RouterStep(Mixture(model), learning_rate=1e-4, scale_loss=True)
    step.guard.scale.fill_(2.0**16)
    records = [step.step(lambda: 1000 * _kl(_logits(model).float(), _student())) for _ in range(16)]
    assert not records[0].applied and "loss scale 65536" in records[0].event.reason
    assert records[-1].applied and step.guard.scale < 2.0**16


# --- the router file ------------------------------------------------------------------------------


def test_a_router_is_saved_and_loaded(tmp_path):
    model = _model()
    expected, mixture = _logits(model), Mixture(model)
    RouterStep(mixture, learning_rate=1e-2).step(_objective(model, _student()))
    mixture.save_router(tmp_path / "router.safetensors")
    assert (tmp_path / "router.safetensors").stat().st_size < 4000
    again = _model()
    loaded = Mixture(again)
    loaded.load_router(tmp_path / "router.safetensors")
    assert not changed(_bits(model.state_dict()), again.state_dict())
    with loaded.watch(original=True) as gates:
        moved = _logits(again)
    assert (gates.drift() > 0).all()  # measured from the original router
    with pytest.raises(KeyError), loaded.original_router():
        assert torch.equal(_logits(again), expected)
        raise KeyError
    assert torch.equal(_logits(again), moved) and not torch.equal(moved, expected)
    # A trained router is float32, also in a teacher in half precision.
    half = Mixture(_model().bfloat16())
    half.load_router(tmp_path / "router.safetensors")
    assert torch.isfinite(_logits(half.model)).all()
    assert not changed(_bits(mixture.router_parameters()), half.router_parameters())


def test_a_router_fits_its_teacher_in_any_dtype(tmp_path):
    def make():
        model = _model()
        # Rounds up to bfloat16, but down by way of float16.
        next(iter(Mixture(model).router_parameters().values())).data[0, 0] = 1 + 2**-8 + 2**-13
        return model

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for saved in dtypes:
        mixture = Mixture(make().to(saved))
        mixture.save_router(tmp_path / "router.safetensors")
        for loaded in dtypes:
            Mixture(make().to(loaded)).load_router(tmp_path / "router.safetensors")
    other = make()
    next(iter(Mixture(other).router_parameters().values())).data[3, 5] += 0.1
    for model in (other, _model(num_hidden_layers=1)):
        before = _bits(model.state_dict())
        with pytest.raises(ValueError, match="not a router of this teacher: original_rows"):
            Mixture(model).load_router(tmp_path / "router.safetensors")
        assert not changed(before, model.state_dict())


def test_other_files_are_refused(tmp_path):
    mixture = Mixture(model := _model())
    with pytest.raises(FileNotFoundError, match="no router file"):
        mixture.load_router(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a safetensors file"):
        mixture.load_router(tmp_path / "junk")
    mixture.save_router(tmp_path / "good")
    for rows in ("{", "[[1], [2, 3]]", '["a"]', "[1e999]"):
        metadata = {"original_rows": rows}
        save_file(load_file(tmp_path / "good"), tmp_path / "odd", metadata=metadata)
        with pytest.raises(ValueError, match="is not a router of this teacher: original_rows"):
            mixture.load_router(tmp_path / "odd")
    model.model.layers[0].mlp.gate.weight.data[2, 5] = math.nan
    mixture.save_router(tmp_path / "nan")
    with pytest.raises(ValueError, match="layers.0.mlp.gate.weight.*not finite"):
        Mixture(_model()).load_router(tmp_path / "nan")
