"""Score a saved student on held-out text: `judge`, under the path that users import."""

from ssl_kd.language.evaluate.judge_finished import judge

__all__ = ["judge"]
