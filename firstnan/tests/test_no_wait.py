"""Count how often a guarded step waits for the device, on a simulated one."""

import pytest
import torch
from torch import nn

from firstnan import Guard
from tests.fake_cuda import fake_cuda

READ = "_norms.py: flat = "


def _waits(of_step, **options):
    """Of the second step: the first takes a snapshot."""
    with fake_cuda() as device:
        with torch.device("cuda"):
            trunk, a, b = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)
            model = nn.ModuleList([trunk, nn.BatchNorm1d(5), a, b])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        parts = {"a": a, "b": b} if options.pop("parts", False) else None
        guard = Guard(model, optimizer, parts, clip_grad=1.0)
        x = torch.zeros(8, 4, device="cuda")
        for _ in range(2):
            device.clear()
            optimizer.zero_grad()
            z = model[1](trunk(x))
            losses = {"a": a(z).square().mean(), "b": b(z).abs().mean()}
            through = {"through": z} if options.get("through") else {}
            guard.backward(sum(losses.values()) if of_step == "sum" else losses, **through)
            assert guard.step()
        assert not device.pageable
        return device.waits


@pytest.mark.parametrize(
    ("of_step", "options", "most"),
    [
        ("sum", {}, 1),
        ("terms", {}, 2),
        ("terms", {"through": True}, 2),
        ("parts", {"parts": True}, 2),
    ],
    ids=["one loss", "loss terms", "loss terms at features", "parts beside shared weights"],
)
def test_a_step_waits_once_and_once_more_where_losses_may_be_cut_out(of_step, options, most):
    waits = _waits(of_step, **options)
    assert len(waits) == most and all(wait.startswith(READ) for wait in waits)


def test_a_snapshot_checks_all_parts_with_one_wait():
    with fake_cuda() as device:
        with torch.device("cuda"):
            model = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = Guard(model, optimizer, {str(i): part for i, part in enumerate(model)})
        x = torch.zeros(8, 4, device="cuda")
        for _ in range(2):
            optimizer.zero_grad()
            guard.backward({str(i): part(x).square().mean() for i, part in enumerate(model)})
            device.clear()
            guard.before_step()
            reads = [wait for wait in device.waits if wait.startswith(READ)]
            is_due = guard.steps == 0  # then there are also six copies of weights
            assert (len(reads), len(device.waits)) == ((2, 8) if is_due else (1, 1))
            optimizer.step()
            guard.after_step()


def _cost(guarded):
    """Launches and bytes of the second step of a loop that clips, with or without a guard."""
    with fake_cuda() as device:
        with torch.device("cuda"):
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = Guard(model, optimizer, clip_grad=1.0) if guarded else None
        x = torch.zeros(32, 64, device="cuda")
        for _ in range(2):
            device.clear()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if guard is not None:
                guard.backward(loss)
                guard.step()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return device.launches.total(), device.bytes.total()


def test_a_guard_adds_a_handful_of_launches_and_reads_no_tensor_again():
    launches, moved = (with_ - bare for with_, bare in zip(_cost(True), _cost(False), strict=True))
    assert 0 < launches <= 5 and 0 < moved <= 64
