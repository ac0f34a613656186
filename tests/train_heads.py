"""Train heads without a run folder."""

from ssl_kd.core.runs.loop import run_loop
from ssl_kd.vision.train.learner import HeadsLearner, Plan


def train(trainer, sampler, gather, steps, *, convergence=None, **options):
    """Train on pairs; `options` go to `HeadsLearner` or `run_loop`."""
    names = {"clusters", "on_events", "on_fault"} & options.keys()
    of_learner = {name: options.pop(name) for name in names}
    plan = Plan(sampler, steps, convergence)
    return run_loop(HeadsLearner(trainer, plan, gather, **of_learner), **options)
