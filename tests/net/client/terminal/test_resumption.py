"""A generation that nobody could go on with is gone on with later, from memory or from a file: the same text."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from client.base.options import GenerateOptions
from client.terminal import resumption
from swarm.base.errors import ConfigError, GenerationInterrupted, Unfinished
from swarm.demo import TARGET
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import SPANS, prompt


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Server]:
    """Every gRPC server that a node makes from now on."""
    made: list[grpc.aio.Server] = []
    make = grpc.aio.server

    def noted(*args: object, **kwargs: object) -> grpc.aio.Server:
        made.append(make(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(grpc.aio, "server", noted)
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_an_interrupted_text_goes_on_as_if_nothing_had_happened(
    temperature: float, servers: list[grpc.aio.Server], tmp_path: Path
) -> None:
    options: GenerateOptions = {"max_new_tokens": 60, "temperature": temperature, "stop": ["\n\n\n"]}
    async with in_process_swarm(TARGET, SPANS) as here, here.client(wait=0.0) as swarm:
        stream = swarm.stream(prompt(3), **options)
        text = (await anext(stream)).text

        async def read_on() -> None:
            nonlocal text
            async for piece in stream:
                text += piece.text

        await servers[1].stop(None)
        with pytest.raises(GenerationInterrupted) as caught:
            await read_on()
    path = resumption.save(caught.value, tmp_path / "kept")
    assert path is not None
    begun = resumption.load(path)
    assert begun.unfinished is not None
    assert 0 < len(begun.tokens) < 60
    async with in_process_swarm(TARGET, SPANS) as here, here.client() as swarm:
        seed = begun.unfinished.options["seed"]
        plain = await swarm.generate(prompt(3), **{**options, "seed": seed})
        rest = [piece async for piece in swarm.resume(begun)]
        result = rest[-1].result
        assert result is not None
        assert result.tokens == plain.tokens
        assert begun.text + "".join(piece.text for piece in rest) == plain.text
        assert result.stats.tokens == len(plain.tokens) - len(begun.tokens)


def test_every_interruption_has_a_file_of_its_own_that_nobody_else_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, paths = tmp_path / "cache" / "kept", []
    for number in range(resumption.MAX_FILES + 2):
        error = GenerationInterrupted("node Qm vanished", f"text {number}", (1, 2))
        error.unfinished = Unfinished((3, 4), {"seed": number}, (1, 2))
        monkeypatch.setattr("os.getpid", lambda number=number: 1_000 + number)
        monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
        path = resumption.save(error, folder)
        assert path is not None
        assert path.stat().st_mode & 0o777 == 0o600
        paths.append(path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(folder.iterdir()) == paths[2:], "the newest are kept, and nothing half-written"
    assert [resumption.load(path).text for path in paths[2:4]] == ["text 2", "text 3"]


def test_what_is_no_interrupted_generation_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resumption.load(tmp_path / "nothing.json")
    for content in ("no json", "{}", '{"format": 7}', '{"format": 1, "text": "", "tokens": 5}'):
        file = tmp_path / "file.json"
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"interrupted generation|another version"):
            resumption.load(file)
