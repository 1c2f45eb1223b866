"""Metrics for Prometheus: metric families, histograms and the page that serves them."""
