"""Carries bytes to machines that nobody can dial: a relay knows them by their peer ids and reads nothing."""
