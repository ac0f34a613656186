"""Seed these tests and skip those that this machine cannot run, as in `tests/`."""

from tests.conftest import _seeded, pytest_collection_modifyitems

__all__ = ["_seeded", "pytest_collection_modifyitems"]
