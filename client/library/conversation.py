"""A conversation of a user and a model, turn by turn. Owns no network and no template."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from client.dialogue.messages import Message, Role
from client.dialogue.plan import AnswerPlan, AnswerRequest, plan_answer
from client.dialogue.template import ChatTemplate


class Conversation:
    """Messages in order, the system's first if there is one.

    Attributes:
        messages: so far.
        template: makes prompts of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, system: str | None = None) -> None:
        self.template = ChatTemplate(tokenizer)
        self._opening = [] if system is None else [Message("system", system)]
        self.messages = list(self._opening)

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; without one turns are joined as a plain transcript."""
        return self.template.has_template

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer, beside the model's own end of text."""
        return self.template.stop

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
        """The tokens after which the assistant speaks next; errors as of `plan`."""
        return self.plan().tokens

    def plan(self) -> AnswerPlan:
        """What the assistant's next answer needs.

        Raises:
            ConfigError: the template does not take these messages, such as a system message where it knows none, or
                they are not valid text.
        """
        return plan_answer(self.template, AnswerRequest(self.messages))
