"""Fixtures of every test."""

pytest_plugins = ["ptxsim.pytest_plugin"]
