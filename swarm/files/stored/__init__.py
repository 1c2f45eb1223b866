"""Weights as published checkpoints hold them: in fewer bits than they compute in."""
