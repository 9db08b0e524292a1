"""Helpers that tests of more than one folder use. tests/README.md says which does what."""
