"""`client api --for PROGRAM`: what to write where, so that a program asks this server.

What is printed is whole: paste it. A key is never printed; programs read it from CANOPY_API_KEY.
"""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from swarm.base.errors import ConfigError

ProgramName = Literal["claude", "cline", "codex", "continue", "opencode", "zed"]
"""Programs whose configuration is known."""
ASK_S: Final = 5.0
"""Seconds in which a server has to say which model it has."""
MAX_ANSWER_BYTES: Final = 1 << 20
KEY_VARIABLE: Final = "CANOPY_API_KEY"
NO_KEY: Final = "none"
"""What stands for a key where the server asks for none."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What a program needs to know of a server.

    Attributes:
        url: of the server, without `/v1`.
        context_length: tokens of prompt and answer together.
        has_key: whether it asks for a key.
    """

    url: str
    name: str
    context_length: int
    has_key: bool = False

    @property
    def answer_length(self) -> int:
        """Tokens that a program may keep for an answer."""
        return max(self.context_length // 4, 1)

    @property
    def shell_key(self) -> str:
        """The key in a shell."""
        return f'"${KEY_VARIABLE}"' if self.has_key else NO_KEY


def ask_server(url: str, key: str | None) -> ServerModel:
    """The model of a server that runs.

    Raises:
        ConfigError: none answers there, or it has no model yet.
    """
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key or NO_KEY}"})
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine or beside it
        with opener.open(request, timeout=ASK_S) as answer:
            models = json.loads(answer.read(MAX_ANSWER_BYTES))["data"]
            found = [one for one in models if one["context_length"]]  # of others nobody has read the config yet
            if not found:
                raise ConfigError(f"the server at {url} has found no model yet; ask one something, then ask this again")
            return ServerModel(url, str(found[0]["id"]), int(found[0]["context_length"]), key is not None)
    except urllib.error.HTTPError as error:
        error.close()
        why = f"the server at {url} answers {error.code}"
        raise ConfigError(
            f"{why}; give its key with --api-key or {KEY_VARIABLE}" if error.code == 401 else why
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"no `client api` answers at {url}; start it first, or name its --host and --port") from error


def setup(program: ProgramName, model: ServerModel) -> str:
    """The lines for a program, with a comment that says where they belong."""
    return _SETUPS[program](model)


def _codex(model: ServerModel) -> str:
    command = (
        f'command = "printenv"\nargs = ["{KEY_VARIABLE}"]'
        if model.has_key
        else f'command = "echo"\nargs = ["{NO_KEY}"]'
    )
    return (
        "# ~/.codex/config.toml: Codex\n"
        f"model = {_quoted(model.name)}\n"
        'model_provider = "canopy"\n'
        f"model_context_window = {model.context_length}\n"
        'web_search = "disabled"\n'
        "\n"
        "[model_providers.canopy]\n"
        'name = "Canopy"\n'
        f'base_url = "{model.url}/v1"\n'
        'wire_api = "responses"\n'
        "\n"
        "[model_providers.canopy.auth]  # with it, Codex asks the server what its model can do\n"
        f"{command}\n"
    )


def _claude(model: ServerModel) -> str:
    names = "".join(
        f"export ANTHROPIC_DEFAULT_{size}_MODEL={shlex.quote(model.name)}\n" for size in ("OPUS", "SONNET", "HAIKU")
    )
    return (
        "# in a shell, before `claude`: Claude Code\n"
        f"export ANTHROPIC_BASE_URL={model.url}\n"
        f"export ANTHROPIC_AUTH_TOKEN={model.shell_key}\n"
        f"export ANTHROPIC_MODEL={shlex.quote(model.name)}\n"
        f"{names}"
        "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1\n"
    )


def _zed(model: ServerModel) -> str:
    described = {
        "name": model.name,
        "display_name": model.name,
        "max_tokens": model.context_length,
        "max_output_tokens": model.answer_length,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"Canopy": {"api_url": f"{model.url}/v1", "available_models": [described]}}
    where = (
        f"// ~/.config/zed/settings.json: Zed. Its key is the variable {KEY_VARIABLE}; any word where none is needed\n"
    )
    return where + _json({"language_models": {"openai_compatible": provider}})


def _opencode(model: ServerModel) -> str:
    limit = {"context": model.context_length, "output": model.answer_length}
    key = f"{{env:{KEY_VARIABLE}}}" if model.has_key else NO_KEY
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Canopy",
        "options": {"baseURL": f"{model.url}/v1", "apiKey": key},
        "models": {model.name: {"name": model.name, "limit": limit}},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"canopy/{model.name}",
        "provider": {"canopy": provider},
    }
    return "// ~/.config/opencode/opencode.json: opencode\n" + _json(settings)


def _cline(model: ServerModel) -> str:
    words = ["-k", NO_KEY, "-m", model.name, "-b", f"{model.url}/v1"]
    typed = shlex.join(words).replace(f"-k {NO_KEY}", f"-k {model.shell_key}")
    return (
        "# Cline's settings, under API Configuration\n"
        "API Provider:    OpenAI Compatible\n"
        f"Base URL:        {model.url}/v1\n"
        f"API Key:         {f'what {KEY_VARIABLE} holds' if model.has_key else NO_KEY}\n"
        f"Model ID:        {model.name}\n"
        f"Context Window:  {model.context_length}\n"
        f"Max Output:      {model.answer_length}\n"
        "Supports Images: off\n"
        f"# or, for its command line: cline auth -p openai {typed}\n"
    )


def _continue(model: ServerModel) -> str:
    key = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if model.has_key else NO_KEY
    return (
        "# ~/.continue/config.yaml: Continue\n"
        "name: canopy\n"
        "version: 0.0.1\n"
        "schema: v1\n"
        "models:\n"
        f"  - name: {_quoted(model.name)}\n"
        "    provider: openai\n"
        f"    model: {_quoted(model.name)}\n"
        f"    apiBase: {model.url}/v1\n"
        f"    apiKey: {key}\n"
        "    roles: [chat, edit, apply]\n"
        "    defaultCompletionOptions:\n"
        f"      contextLength: {model.context_length}\n"
        f"      maxTokens: {model.answer_length}\n"
    )


def _quoted(text: str) -> str:
    """A text as TOML and YAML have it."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


_SETUPS: Final[Mapping[ProgramName, Callable[[ServerModel], str]]] = {
    "claude": _claude,
    "cline": _cline,
    "codex": _codex,
    "continue": _continue,
    "opencode": _opencode,
    "zed": _zed,
}
