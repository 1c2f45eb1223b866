"""The bundled demo pair and its held-out passages, as paths; see README.md beside this file. Loads nothing."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parent / "demo-target"
"""Folder of the 12-layer target model."""

DRAFT = Path(__file__).parent / "demo-draft"
"""Folder of the 2-layer draft model, with the target's tokenizer."""

PASSAGES = Path(__file__).parent / "passages.jsonl"
"""Text that neither model was trained on: one JSON object a line with `id`, `source` and `text`."""

REDRAFTER = Path(__file__).parent / "demo-redrafter"
"""Folder of a recurrent head for the target; README.md says how it was trained."""

DGF = Path(__file__).parent / "demo-dgf"
"""Folder of a gated-fusion head for the target."""
