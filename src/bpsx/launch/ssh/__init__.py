"""Runs roles on other hosts over ssh."""
