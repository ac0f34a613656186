"""Run these tests as those of `tests/`: seeded, and without those that this machine cannot run."""

from tests.conftest import _seeded, pytest_collection_modifyitems

__all__ = ["_seeded", "pytest_collection_modifyitems"]
