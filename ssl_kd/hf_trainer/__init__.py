"""For a Hugging Face Trainer: the guard around any, and one that distils.

`Trainer(..., callbacks=[GuardCallback()])`, and `DistillationTrainer(student, teacher, ...)` in
place of `Trainer(student, ...)`.

In a Trainer with a loss of your own, the chunked losses alone, which hold no logits of a batch, are
a `compute_loss` (there is one loss then, so the guard is that of the whole step):

    class Distilling(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            rows, targets = next_token_targets(inputs["input_ids"], labels != -100)
            last = {"output_hidden_states": True, "logits_to_keep": 1, "use_cache": False}
            outputs = model(**inputs, **last)
            with torch.no_grad():
                seen = teacher(**inputs, **last)
            hidden, wisdom = (x.hidden_states[-1].flatten(0, 1)[rows] for x in (outputs, seen))
            head, of_teacher = self.model.lm_head, teacher.lm_head
            ce, kd = linear_distillation(
                hidden, head.weight, head.bias, targets,
                [LinearTeacher(wisdom, of_teacher.weight, of_teacher.bias)],
                temperature=2.0, divergence="forward_kl", weights=(0.5, 0.5),
            )
            n = len(rows) if num_items_in_batch is None else num_items_in_batch
            loss = (0.5 * ce + 0.5 * kd) / n * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

It is for models whose logits are `lm_head` of the last hidden state and no more (no soft cap);
`DistillationTrainer` finds that out by itself.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ssl_kd.hf_trainer needs transformers and accelerate: pip install 'ssl_kd[llm]'"
    ) from error

from ssl_kd.hf_trainer.distillation import DistillationTrainer
from ssl_kd.hf_trainer.guarding import GuardCallback

__all__ = ["DistillationTrainer", "GuardCallback"]
