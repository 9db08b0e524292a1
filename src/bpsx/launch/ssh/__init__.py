"""Roles on other hosts, over ssh."""
