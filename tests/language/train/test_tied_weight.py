"""The gradient of a tied embedding and head: equal to autograd's, and in one tensor."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from ssl_kd.language.losses.token_distillation import distillation_terms  # noqa: E402
from ssl_kd.language.models.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.language.train import objective  # noqa: E402
from ssl_kd.language.train.tied_weight import TiedGradient, tied_lookups  # noqa: E402

IDS = torch.tensor([[3, 1, 3, 0], [7, 3, 2, 0]])


def gradient_of(embedding, tied=None, *, detached=False):
    """Return the gradient of a loss through an embedding whose weight is also the output head."""
    embedding.weight.grad = None
    give = None
    if tied is None:
        hidden = embedding(IDS)
    else:
        with tied_lookups(embedding, embedding.weight, tied):
            hidden = embedding(IDS)
        give = tied.add
    hidden = (hidden.detach() if detached else hidden).flatten(0, 1).tanh()
    targets = IDS.flatten().roll(1)
    ce, _ = distillation_terms(
        hidden, embedding.weight, None, targets, temperature=1.0, give_weight_gradient=give
    )
    (0.3 * ce).backward()
    return embedding.weight.grad


@pytest.mark.parametrize("padding", [None, 0])
def test_the_gradient_is_that_of_autograd(padding):
    torch.manual_seed(0)
    embedding, tied = nn.Embedding(9, 4, padding_idx=padding), TiedGradient()
    expected = gradient_of(embedding)
    assert expected is not None and expected.abs().max() > 0.1
    torch.testing.assert_close(gradient_of(embedding, tied), expected)
    assert tied.is_looked_up and tied.total is None
    tied.check()


def test_the_total_becomes_the_gradient_without_a_copy():
    given = []

    class Noted(TiedGradient):
        def add(self, gradient):
            given.append(gradient.data_ptr())
            super().add(gradient)

    gradient = gradient_of(nn.Embedding(9, 4), Noted())
    assert gradient is not None and given == [gradient.data_ptr()]


def test_other_weights_and_no_grad_are_left_to_autograd():
    embedding, other, tied = nn.Embedding(9, 4), nn.Embedding(9, 4), TiedGradient()
    renormed = nn.Embedding(9, 4, max_norm=1.0)
    with tied_lookups(embedding, embedding.weight, tied), torch.no_grad():
        embedding(IDS)
    with tied_lookups(other, embedding.weight, tied):
        other(IDS).sum().backward()
    with tied_lookups(renormed, renormed.weight, tied):
        renormed(IDS)
    assert not tied.is_looked_up
    assert other.weight.grad is not None and other.weight.grad[3].eq(3).all()


def test_an_error_in_the_embedding_leaves_no_mode_behind():
    embedding, tied = nn.Embedding(9, 4), TiedGradient()
    with tied_lookups(embedding, embedding.weight, tied), pytest.raises(IndexError):
        embedding(IDS + 9)
    assert torch.overrides._get_current_function_mode() is None
    assert not embedding._forward_hooks and not embedding._forward_pre_hooks


def test_a_gradient_that_was_not_passed_on_is_an_error():
    embedding, tied = nn.Embedding(9, 4), TiedGradient()
    assert gradient_of(embedding, tied, detached=True) is None
    with pytest.raises(RuntimeError, match="tie_word_embeddings=False"):
        tied.check()


def test_a_tied_student_has_the_gradients_of_autograd(tiny, monkeypatch):
    def gradients():
        student = tiny.model(tie_word_embeddings=True)
        distiller = tiny.distiller(FrozenTeacher(tiny.model(spread=0.3)), student=student)
        distiller._count([batch := tiny.blocks().batch(range(3))])
        distiller._learn_from(batch, is_first=True, again=False)
        return distiller, [p.grad for p in distiller.student.parameters()]

    distiller, ours = gradients()
    assert distiller.tied.is_looked_up
    monkeypatch.setattr(objective, "tied_lookups", lambda *_: nullcontext())
    distiller, expected = gradients()
    assert not distiller.tied.is_looked_up
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
