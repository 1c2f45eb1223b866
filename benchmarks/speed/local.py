"""How fast is one machine alone, beside llama.cpp and transformers?

One node with all layers and one client on loopback, without a draft, with look-up, and on a file also without the
promise of texts (`--no-promise`); transformers on a folder; and llama.cpp on a GGUF file, where the package `xllamacpp`
is installed. Each program has processes of its own, one after the other, and takes its turn in every round.

    python -m benchmarks local MODEL.gguf FOLDER --record
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import gguf
import numpy
import torch
import tyro
from rich.console import Console

from benchmarks.emulation.swarm import covered
from benchmarks.sheet import Recording, Sheet
from client.base.target import load_target
from client.library.aio import AsyncSwarm
from client.tools.demo.programs import start_program
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries

IDS: Final = 4_096
"""Prompts are random tokens below this one, which every vocabulary has."""
SYNTHETIC: Final = {"block_count": 16, "embedding_length": 2_048, "feed_forward_length": 8_192}
"""A model of 1.1 billion weights."""
HEADS: Final = (32, 8, 64)
"""Query heads, key heads, and the width of one."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure one machine alone."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """GGUF files, and folders in Hugging Face's format."""
    threads: tuple[int, ...] = (1, 2)
    """CPU threads of each program."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Compute types for folders; files take the program's own choice."""
    new_tokens: int = 48
    """New tokens of each text."""
    prompt_tokens: int = 512
    """Tokens of a long prompt."""
    rounds: int = 3
    """Rounds of each."""
    synthetic: bool = False
    """Also make a file of 1.1 billion random weights in Q4_K, with the first file's tokenizer."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one text.

    Attributes:
        decoded: tokens per second after the first.
        read: tokens of the prompt per second.
    """

    decoded: float
    read: float


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured."""

    model: Path
    threads: int
    dtype: str
    new_tokens: int
    prompt: tuple[int, ...]


def by_transformers(job: Job) -> Speed:
    """Greedy text of transformers' own loop; runs in a process of its own."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    ids = torch.tensor([job.prompt])

    def seconds(prompt: torch.Tensor, new: int) -> float:
        started = time.perf_counter()
        model.generate(prompt, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started

    with torch.inference_mode():
        seconds(ids[:, :8], 2)
        first = seconds(ids[:, :8], 1)
        decoded = (job.new_tokens - 1) / max(seconds(ids[:, :8], job.new_tokens) - first, 1e-9)
        return Speed(decoded, len(job.prompt) / seconds(ids, 1))


def by_llama(job: Job) -> Speed:
    """Greedy text of llama.cpp, by its own clock; runs in a process of its own."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(job.model)
    params.n_ctx = 2_048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    server = xllamacpp.Server(params)

    def timings(prompt: Sequence[int], new: int) -> dict[str, float]:
        asked = {"prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        found: dict[str, float] = server.handle_completions(asked)["timings"]
        return found

    timings(job.prompt[:8], 2)
    decoded = timings(job.prompt[:8], job.new_tokens)["predicted_per_second"]
    return Speed(decoded, timings(job.prompt, 1)["prompt_per_second"])


def alone(call: Callable[[Job], Speed], job: Job) -> Speed:
    """Run it in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, job).result()


async def by_canopy(job: Job, *, lookup: bool = False, promise: bool = True) -> Speed:
    """A node and a client, started anew."""
    with tempfile.TemporaryDirectory(prefix="canopy-local-") as temporary:
        folder = Path(temporary)
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        async with start_program("bootstrap", boot, folder) as bootstrap:
            peer = await bootstrap.wait_for(r"/ip4/\S+")
            layers = f"0-{load_target(job.model).num_layers}"
            serve = ["node.cli", "serve", str(job.model), "--layers", layers, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--device", "cpu", "--threads", str(job.threads), "--identity", str(folder / "node.key")]
            serve += ["--dtype", job.dtype, *([] if promise else ["--no-promise"])]
            async with start_program("node", serve, folder) as node:
                await node.wait_for("serving at")
                connected = AsyncSwarm.connect(job.model, peers=[peer], lookup=lookup, threads=1, calibration=None)
                async with connected as swarm:
                    await covered(swarm)
                    return await _texts(swarm, job)


async def _texts(swarm: AsyncSwarm, job: Job) -> Speed:
    async def times(prompt: Sequence[int], new: int) -> list[tuple[float, int]]:
        """When pieces came, and how many tokens there were then."""
        started, seen, count = time.perf_counter(), [], 0
        async for piece in swarm.stream(prompt, max_new_tokens=new, end_tokens=()):
            count += len(piece.tokens)
            seen.append((time.perf_counter() - started, count))
        return [one for one in seen if one[1]]

    await times(job.prompt[:8], 4)
    short = await times(job.prompt[:8], job.new_tokens)
    (first_s, first), (last_s, last) = short[0], short[-1]
    decoded = (last - first) / max(last_s - first_s, 1e-9)
    return Speed(decoded, len(job.prompt) / (await times(job.prompt, 1))[0][0])


def synthetic_file(like: Path, out: Path) -> Path:
    """Write a file of random weights in Q4_K, of the shape `SYNTHETIC`, with another file's tokenizer."""
    reader = gguf.GGUFReader(like)
    writer = gguf.GGUFWriter(out, "llama")
    heads, key_heads, width = HEADS
    for name, value in SYNTHETIC.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_context_length(8_192)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") and field.types:
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    hidden, inside = SYNTHETIC["embedding_length"], SYNTHETIC["feed_forward_length"]
    shapes = {"attn_q": (heads * width, hidden), "attn_k": (key_heads * width, hidden)}
    shapes |= {"attn_v": (key_heads * width, hidden), "attn_output": (hidden, heads * width)}
    shapes |= {"ffn_gate": (inside, hidden), "ffn_up": (inside, hidden), "ffn_down": (hidden, inside)}
    random = numpy.random.default_rng(0)
    _add_packed(writer, "token_embd.weight", (vocabulary, hidden), random)
    writer.add_tensor("output_norm.weight", numpy.ones(hidden, numpy.float32))
    for layer in range(SYNTHETIC["block_count"]):
        for name, shape in shapes.items():
            _add_packed(writer, f"blk.{layer}.{name}.weight", shape, random)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(hidden, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_packed(writer: gguf.GGUFWriter, name: str, shape: tuple[int, int], random: numpy.random.Generator) -> None:
    rows, columns = shape
    blocks = random.integers(0, 256, (rows * columns // 256, 144), numpy.uint8)
    steps = numpy.array([2e-5, 6e-4], numpy.float16).view(numpy.uint8)  # of values around 0
    blocks[:, :4] = steps
    kind = gguf.GGMLQuantizationType.Q4_K
    writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)


def jobs_of(options: Options, models: Sequence[Path]) -> list[Job]:
    prompt = tuple(numpy.random.default_rng(1).integers(100, IDS, options.prompt_tokens).tolist())
    return [
        Job(model, threads, dtype, options.new_tokens, prompt)
        for model in models
        for dtype in (options.dtypes if model.is_dir() else ("auto",))
        for threads in options.threads
    ]


def programs_of(job: Job) -> dict[str, Callable[[Job], Speed]]:
    programs: dict[str, Callable[[Job], Speed]] = {
        "Canopy": lambda job: asyncio.run(by_canopy(job)),
        "Canopy, look-up": lambda job: asyncio.run(by_canopy(job, lookup=True)),
    }
    if job.model.is_dir():
        programs["transformers"] = lambda job: alone(by_transformers, job)
        return programs
    programs["Canopy, no promise"] = lambda job: asyncio.run(by_canopy(job, promise=False))
    if importlib.util.find_spec("xllamacpp") is not None:
        programs["llama.cpp"] = lambda job: alone(by_llama, job)
    return programs


def measure(options: Options, models: Sequence[Path], console: Console) -> dict[tuple[str, str, int, str], list[Speed]]:
    """Speeds by model, type, threads and program."""
    found: dict[tuple[str, str, int, str], list[Speed]] = {}
    for number in range(options.rounds):
        for job in jobs_of(options, models):
            for name, program in programs_of(job).items():
                speed = program(job)
                found.setdefault((job.model.name, job.dtype, job.threads, name), []).append(speed)
                said = f"{job.model.name} {job.dtype} {job.threads} threads, {name}"
                console.print(f"{number + 1}: {said}: {speed.decoded:.1f} and {speed.read:.0f} tokens/s", markup=False)
    return found


def sheet(found: dict[tuple[str, str, int, str], list[Speed]], options: Options) -> Sheet:
    title = (
        f"One machine alone, without a draft: medians of {options.rounds} rounds, {options.new_tokens} tokens of text, "
        f"prompts of {options.prompt_tokens}"
    )
    columns = ("model", "type", "threads", "program", "text, tokens/s", "of the other's", "prompt, tokens/s", "of it")
    made = Sheet("local", title, columns, notes=["The other is llama.cpp for a file, and transformers for a folder."])
    for (model, dtype, threads, name), speeds in found.items():
        others = found.get((model, dtype, threads, "llama.cpp")) or found.get((model, dtype, threads, "transformers"))
        decoded, read = (median(getattr(one, part) for one in speeds) for part in ("decoded", "read"))
        shares = ["—", "—"]
        if others and others is not speeds:
            shares = [f"{decoded / median(one.decoded for one in others):.2f}"]
            shares.append(f"{read / median(one.read for one in others):.2f}")
        made.rows.append((model, dtype, str(threads), name, f"{decoded:.1f}", shares[0], f"{read:.0f}", shares[1]))
    made.measured = {
        " ".join(map(str, key)): {"decoded": [one.decoded for one in some], "read": [one.read for one in some]}
        for key, some in found.items()
    }
    return made


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    console = make_console()
    with contextlib.ExitStack() as stack:
        models = list(options.models)
        if options.synthetic:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-local-")))
            like = next(model for model in models if not model.is_dir())
            models.append(synthetic_file(like, folder / "1B.Q4_K.gguf"))
        sheet(measure(options, models, console), options).finish(console, options)
