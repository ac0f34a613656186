"""Change a bundle of a training step, as a damaged or hostile file might be changed."""

import json
from pathlib import Path

from firstnan.bundle_file import pack, unpack


def rewrite(path, change, target=None):
    """Let `change` alter the content of a bundle, and write it with a right hash.

    The content is a dictionary: `event`, `settings`, `left_out`, `indices` and `tensors`.
    """
    texts, tensors = unpack(Path(path))
    content = json.loads(texts["step"])
    content["indices"] = tensors.pop("indices")
    content["tensors"] = {n.removeprefix("tensor "): x for n, x in tensors.items()}
    change(content)
    tensors = {f"tensor {name}": x for name, x in content.pop("tensors").items()}
    if "indices" in content:
        tensors["indices"] = content.pop("indices")
    Path(target or path).write_bytes(pack(texts | {"step": json.dumps(content)}, tensors))
