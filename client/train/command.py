"""`client train-draft`: samples text from the target, then trains a draft on it. Prints loss and acceptance.

Never reads anybody's prompts. An interrupted command goes on where it was when it is given again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from client.drafting.heads.files import load_tensors, save_head
from client.drafting.heads.modules import EMBEDDING, OUTPUT, HeadConfig, HeadKind, make_head
from client.drafting.loading import find_device
from client.target import Target, load_target
from client.train.boost import BoostTraining
from client.train.draft_model import DraftTraining
from client.train.head import HELD_OUT_LINES, HeadTraining, Schedule
from client.train.options import TrainDraft
from client.train.samples import LocalSampler, SampleAmount, Sampler, load_for_training, sampled_lines
from client.train.swarm_samples import open_sampler
from swarm.errors import ConfigError
from swarm.inference.layers.pass_through import find_layers
from swarm.runtime.cpu_threads import check_threads

REPORT_STEPS = 20
"""Steps between printed lines, where there is no terminal to show a bar on."""

ReportProgress = Callable[[int, float], None]
"""Takes the steps done and the loss of the last one."""


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What every kind of training starts from.

    Attributes:
        target: the model as its client knows it.
        model: the same with its weights.
        lines: [lines, tokens], sampled from it.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
    """

    target: Target
    model: PreTrainedModel
    lines: torch.Tensor
    schedule: Schedule
    checkpoint: Path


def train_draft(command: TrainDraft, console: Console) -> None:
    """Run the command.

    Raises:
        ConfigError: an option is not valid.
        SwarmError: the target cannot be loaded.
    """
    check(command)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    target = load_target(command.model)
    model = load_for_training(command.model, str(find_device(None if command.device == "auto" else command.device)))
    samples = command.samples or command.out / "samples.safetensors"
    amount = SampleAmount(command.lines, command.tokens, command.seed)
    with _bar(console) as bar:
        task = bar.add_task("sampling the target", total=amount.lines)
        with _sampler(command, target, model) as sampler:
            lines = sampled_lines(sampler, amount, samples, lambda done: bar.update(task, completed=done))
    schedule = Schedule(command.steps, command.batch, command.rate, command.seed)
    context = TrainingContext(target, model, lines, schedule, command.out / "training.pt")
    with _bar(console) as bar:
        task = bar.add_task("training", total=command.steps)

        def report(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"training, loss {loss:.3f}")
            if not console.is_terminal and (done % REPORT_STEPS == 0 or done == command.steps):
                console.print(f"{done} of {command.steps} steps, loss {loss:.3f}")

        if command.kind == "draft" or command.kind == "boost":
            _train_model(command, context, console, report)
        else:
            _train_head(command.kind, command, context, console, report)


@contextmanager
def _sampler(command: TrainDraft, target: Target, model: PreTrainedModel) -> Iterator[Sampler]:
    """The local copy, or the swarm that was named."""
    if not command.join:
        yield LocalSampler(model, target.tokenizer)
        return
    with open_sampler(
        command.model, peers=command.join, insecure=command.insecure, membership=command.membership
    ) as sampler:
        yield sampler


def check(command: TrainDraft) -> None:
    """Check the options before anything is loaded.

    Raises:
        ConfigError: names the option.
    """
    counts = ("lines", "tokens", "steps", "batch", "depth")
    minimum = {"lines": 2 * HELD_OUT_LINES, "tokens": 16}
    for name in counts:
        value = getattr(command, name)
        if value < minimum.get(name, 1):
            raise ConfigError(f"--{name} {value}: give at least {minimum.get(name, 1)}")
    check_threads(command.threads, "--threads")
    if not 0 < command.rate < 1:
        raise ConfigError(f"--rate {command.rate:g}: give a learning rate between 0 and 1")
    if not 0 <= command.seed < 2**31:
        raise ConfigError(f"--seed {command.seed}: give 0 … {2**31 - 1}")
    if command.lines < command.batch + HELD_OUT_LINES:
        raise ConfigError(f"--lines {command.lines}: {HELD_OUT_LINES} are held out, and a batch takes {command.batch}")
    if (command.kind in ("draft", "boost")) != (command.start is not None):
        raise ConfigError("--start: name the small model to go on from with --kind draft or boost, and with no other")
    if (command.kind == "boost") != bool(command.earlier):
        raise ConfigError("--earlier: name the drafts that the new one is to complete with --kind boost, and no other")


def _train_head(
    kind: HeadKind, command: TrainDraft, context: TrainingContext, console: Console, report: ReportProgress
) -> None:
    model, target = context.model, context.target
    embedding = _name_of(model, model.get_input_embeddings())
    is_tied = model.config.tie_word_embeddings
    output = embedding if is_tied else _name_of(model, cast("Any", model).get_output_embeddings())
    borrowed = {EMBEDDING: embedding, OUTPUT: output}
    config = HeadConfig(kind, target.hidden_size, target.vocab_size, command.depth, target.tokenizer_digest, borrowed)
    torch.manual_seed(command.seed)
    head = make_head(config)
    tensors = load_tensors(command.model, set(borrowed.values()))
    for name, tensor in borrowed.items():
        setattr(head, name, tensors[tensor])
    head.out_norm.load_state_dict({"weight": _last_norm(model, target.hidden_size)})
    head.to(torch.device(model.device))
    training = HeadTraining(head, model, context.lines, context.schedule, context.checkpoint)
    training.run(report)
    size = save_head(head, command.out)
    console.print(f"{training.score()}", highlight=False)
    console.print(f"{command.out}: {size:,} bytes, borrows {', '.join(sorted(tensors))}", highlight=False)


def _train_model(command: TrainDraft, context: TrainingContext, console: Console, report: ReportProgress) -> None:
    assert command.start is not None, "checked"
    draft, *earlier = (load_for_training(name, str(context.model.device)) for name in (command.start, *command.earlier))
    common = draft, context.model, context.lines, context.schedule, context.checkpoint
    training = BoostTraining(*common, earlier) if earlier else DraftTraining(*common)
    training.run(report)
    cast("Any", draft).to(torch.bfloat16).save_pretrained(command.out)
    context.target.tokenizer.save_pretrained(command.out)
    console.print(f"{'together: ' if earlier else ''}{training.score()}", highlight=False)


def _name_of(model: PreTrainedModel, module: torch.nn.Module | None) -> str:
    """The name of a module's matrix in the checkpoint."""
    found = next((name for name, part in model.named_modules() if part is module), None)
    if found is None:
        raise ConfigError(f"{model.config.model_type}: has no matrix that a head could borrow; train a model instead")
    return f"{found}.weight"


def _last_norm(model: PreTrainedModel, width: int) -> torch.Tensor:
    """The weights of the model's final norm, for the head's to begin with; ones where it has none of its own."""
    layers = find_layers(model)
    norms = [weight for name, weight in model.named_parameters() if weight.shape == (width,) and layers not in name]
    return norms[-1].detach().cpu().float() if norms else torch.ones(width)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
