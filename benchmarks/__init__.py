"""Measurements: ``python -m benchmarks.NAME``. Not installed; every row carries its provenance."""
