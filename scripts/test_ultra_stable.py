"""Check the installation and a whole tiny run: `python scripts/test_ultra_stable.py`.

Distills a small random mixture of experts by the preset `ultra_stable`, with a router that learns
from the student. Downloads nothing and leaves no files behind.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

TEXT = "A cat sat on the mat. A dog saw the cat, and the cat saw the dog. It was day {}.\n\n"


def installation() -> bool:
    """Run the doctor, and print its table if it found a fault."""
    from ssl_kd.doctor import installation

    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        code = installation()
    summary = table.getvalue().strip().rpartition("\n")[2]
    print(table.getvalue() if code else f"installation: sound ({summary})")
    return code == 0


def tiny_run(folder: Path) -> bool:
    """Distill a mixture of experts for a few steps, and check the result."""
    import torch
    from safetensors.torch import load_file
    from transformers import MixtralConfig, MixtralForCausalLM

    from ssl_kd.language.models.causal import load_causal_lm
    from ssl_kd.language.models.student import save_student
    from ssl_kd.language.run import run
    from ssl_kd.language.settings import LanguageSettings
    from ssl_kd.language.settings.presets import PRESETS
    from ssl_kd.language.text.dataset import open_text
    from ssl_kd.language.text.new_tokenizer import train_tokenizer

    text = folder / "text.txt"
    text.write_text("".join(TEXT.format(i) * 60 for i in range(20)), encoding="utf-8")
    tokenizer = train_tokenizer(open_text(text, "all"), 300)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    teacher = MixtralForCausalLM(config)
    save_student(teacher, tokenizer, folder / "teacher", "made for a test")
    tiny = {
        "teacher_model": str(folder / "teacher"),
        "student_model": "llama:1x32",
        "data_path": str(text),
        "runs_dir": str(folder / "runs"),
        "block_size": 32,
        "max_steps": 8,
        "eval_every": 4,
        "eval_rows": 4,
        "generations": 1,
        "max_new_tokens": 4,
        "router_lr": 1e-3,
    }
    path = run(LanguageSettings(**{**PRESETS["ultra_stable"], **tiny}))
    metrics = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    before, routers = teacher.state_dict(), load_file(path / "router.safetensors")
    learned = sum(not torch.equal(router, before[name]) for name, router in routers.items())
    load_causal_lm(path / "student")
    rows = {row["name"]: row["perplexity"] for row in metrics["table"]}
    fine = metrics["success_rate"] == 1 and learned == len(routers)
    print(
        f"tiny run: {metrics['steps']} steps, {metrics['success_rate']:.0%} of them healthy; "
        f"{learned} of {len(routers)} router tensors learned; held-out perplexity "
        f"{rows['student before']:.4g} before, {rows['student']:.4g} after"
    )
    return fine


def main() -> int:
    """Run both checks; return 0 if they pass."""
    try:
        from ssl_kd.core.runs.ranks import refuse_ranks

        refuse_ranks()
        with tempfile.TemporaryDirectory() as folder:
            sound = installation() and tiny_run(Path(folder))
    except Exception as error:  # any error is a failed check
        print(f"{type(error).__name__}: {error}")
        sound = False
    print("ultra_stable works here" if sound else "FAULT: see above")
    return 0 if sound else 1


def test_ultra_stable():
    assert main() == 0


if __name__ == "__main__":
    sys.exit(main())
