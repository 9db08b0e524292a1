"""Prometheus' text format, as its own reader understands it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def parse(text: str) -> dict[str, tuple[str, dict[tuple, float]]]:
    """Text format 0.0.4: metric -> (type, labels -> value). Each metric and sample comes once."""
    found: dict[str, tuple[str, dict[tuple, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _, values = found.setdefault(sample.name, (family.type, {}))
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values, f"twice: {sample}"
            values[labels] = sample.value
    return found
