"""Define a custom objective with balanced targets, as in SwAV."""

from ssl_kd.vision.train.objectives import Sharpened


class Sinkhorn(Sharpened):
    """`Sharpened` with balanced instead of centered targets."""

    def targets(self, logits, marginal):
        log_q = (logits.float() / self._temperature).flatten(1, -2)
        for _ in range(3):
            log_q = log_q - log_q.logsumexp(1, keepdim=True)  # equal mass per cluster
            log_q = log_q.log_softmax(2)  # unit mass per sample
        return log_q.exp().view(logits.shape), logits.float().mean((1, 2))


SINKHORN = f"{__name__}.Sinkhorn"
