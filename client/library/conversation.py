"""A conversation as messages and as tokens, by the model's chat template or a plain stand-in. Owns no network."""

from __future__ import annotations

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from client.dialogue.messages import Message, Role
from client.options import check_text
from swarm.errors import ConfigError

TRANSCRIPT = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For a model without a template: the conversation written down as a play."""
TRANSCRIPT_STOP = ("\nUser:", "\nSystem:")
"""Where a model that goes on writing the play begins the next line of its user."""


class Conversation:
    """Messages in order, the system's first if there is one.

    Attributes:
        messages: so far.
        has_template: whether the model brings a chat template; without one turns are joined as a plain transcript.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._opening = [] if system is None else [Message("system", system)]
        self.messages = list(self._opening)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer, beside the model's own end of text."""
        return () if self.has_template else TRANSCRIPT_STOP

    def add(self, role: Role, content: str) -> None:
        """Add the next message."""
        self.messages.append(Message(role, content))

    def take_back(self) -> None:
        """Remove the last message."""
        self.messages.pop()

    def clear(self) -> None:
        """Remove all messages but the system's."""
        self.messages = list(self._opening)

    def prompt(self) -> tuple[int, ...]:
        """The tokens after which the assistant speaks next.

        A template writes its own beginning of text, so the tokenizer adds none to it.

        Raises:
            ConfigError: the template does not take these messages, such as a system message where it knows none, or
                they are not valid text.
        """
        messages = [{"role": m.role, "content": m.content} for m in self.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=None if self.has_template else TRANSCRIPT,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (TemplateError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"this model's chat template does not take this conversation: {reason}") from error
        text = check_text(str(text), "prompt")
        return tuple(self._tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])
