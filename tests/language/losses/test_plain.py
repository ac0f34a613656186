"""The published reference stands on torch alone; other tests compare the fast losses with it."""

import ast
import doctest
from pathlib import Path

import pytest
import torch

from ssl_kd.language.losses import plain
from ssl_kd.losses import DIVERGENCES, token_kd


def test_the_reference_imports_nothing_that_it_checks():
    tree = ast.parse(Path(plain.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert names == {"__future__", "torch"}


def test_its_example_prints_the_documented_output():
    result = doctest.testmod(plain)
    assert result.attempted == 2 and result.failed == 0


@pytest.mark.parametrize("name", [*DIVERGENCES, "js:0.3", "reverse_kl:3"])
def test_token_kd_equals_the_reference(name):
    student, teacher = torch.randn(2, 2, 3, 11, dtype=torch.float64)
    options = {"mask": torch.tensor([[1, 1, 0], [1, 0, 1]]), "divergence": name}
    student.requires_grad_()
    loss = token_kd(student, teacher, **options)
    expected, gradient = plain.token_kd(student, teacher, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], gradient)


def test_an_unknown_name_is_refused():
    p = torch.tensor([0.5, 0.5]).log()
    with pytest.raises(ValueError, match="divergence is 'kl', expected a name in ssl_kd.losses"):
        plain.divergence_of("kl", p, p)
