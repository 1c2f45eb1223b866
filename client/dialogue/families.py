"""The forms in which models write tool calls and thoughts, told by the markers in their chat templates."""

from __future__ import annotations

from typing import Literal

ToolFamily = Literal[
    "", "hermes", "qwen_xml", "llama3", "mistral_json", "mistral", "phi", "harmony", "deepseek", "deepseek_v31", "glm"
]
"""Empty where a template knows no tools; such a model is told of them in the form of Hermes."""

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""What stands around thoughts: the first pair whose end the template names is its own."""

MARKERS: dict[ToolFamily, tuple[str, ...]] = {
    "": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral_json": ("[TOOL_CALLS]",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "phi": ("<|tool_call|>", "<|/tool_call|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "deepseek": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
"""Per family, the tokens that its parser must see, also where decoding drops special ones."""


def family_of(template: str) -> ToolFamily:
    """The family whose markers a chat template writes."""
    if "<|channel|>" in template:
        return "harmony"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral" if "[ARGS]" in template else "mistral_json"
    if "<|tool_call|>" in template:
        return "phi"
    if "<arg_key>" in template:
        return "glm"
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3"
    return ""


def thinking_of(template: str) -> tuple[str, str] | None:
    """What stands around thoughts under a chat template; None where it marks none, or marks them by channels."""
    if "<|channel|>" in template:
        return None
    return next((pair for pair in THINKING if pair[1] in template), None)
