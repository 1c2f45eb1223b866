"""Metrics for Prometheus: metric families, histograms and the page that serves them. Owns no metric of its own."""
