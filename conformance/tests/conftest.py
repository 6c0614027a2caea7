"""Fixtures for the suite's own tests."""

from hpcompat_conformance.pytest_plugin import pool as pool
