"""`client train-draft`: samples text from the target, then trains a draft on it. Prints loss and acceptance.

The target lies here, or a swarm has it (`--join`): then text, hidden rows and distributions come from there, and its
weights are not needed. Never reads anybody's prompts. An interrupted command goes on where it was when it is given
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from client.base.options import ConnectOptions
from client.base.target import Target, load_target
from client.draft.heads.files import EMBEDDING, OUTPUT, HeadConfig, HeadKind, load_tensors, make_head, save_head
from client.draft.heads.layer_head import TargetNames, target_names
from client.draft.loading import find_device
from client.tools.train.draft_model import BoostTraining, DraftTraining
from client.tools.train.head import HELD_OUT_LINES, HeadTraining
from client.tools.train.labels import LabelFolder, LabelSource, ModelLabels, label_bytes
from client.tools.train.options import TrainDraft
from client.tools.train.samples import LocalSampler, SampleAmount, load_for_training, open_sampler, sampled_lines
from client.tools.train.steps import Schedule
from swarm.base.errors import ConfigError, HubError, UnknownModel, UnsupportedModel
from swarm.base.process_limits import check_threads

REPORT_STEPS = 20
"""Steps between printed lines, where there is no terminal to show a bar on."""

ReportProgress = Callable[[int, float], None]
"""Takes the steps done and the loss of the last one."""


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What every kind of training starts from.

    Attributes:
        target: the model as its client knows it.
        source: what it says of lines that it made.
        schedule: how long and how fast.
        checkpoint: file of an interrupted training.
    """

    target: Target
    source: LabelSource
    schedule: Schedule
    checkpoint: Path


def train_draft(command: TrainDraft, console: Console) -> None:
    """Run the command.

    Raises:
        ConfigError: an option is not valid.
        SwarmError: the target cannot be loaded, or the swarm cannot make its text.
    """
    check(command)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    target = load_target(command.model)
    device = find_device(None if command.device == "auto" else command.device)
    source = (
        _swarm_labels(command, target, device, console)
        if command.join
        else _own_labels(command, target, device, console)
    )
    schedule = Schedule(command.steps, command.batch, command.rate, command.seed)
    context = TrainingContext(target, source, schedule, command.out / "training.pt")
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


def _own_labels(command: TrainDraft, target: Target, device: torch.device, console: Console) -> LabelSource:
    """Text and labels of the target's weights, which are loaded here."""
    model = load_for_training(command.model, str(device))
    samples = command.samples or command.out / "samples.safetensors"
    with _bar(console) as bar:
        task = bar.add_task("sampling the target", total=command.lines)
        sampler, amount = LocalSampler(model, target.tokenizer), _amount(command)
        lines = sampled_lines(sampler, amount, samples, lambda done: bar.update(task, completed=done))
    return ModelLabels(model, lines, with_rows=_is_head(command))


def _swarm_labels(command: TrainDraft, target: Target, device: torch.device, console: Console) -> LabelSource:
    """Text and labels as the swarm sends them; the target's weights are not opened. Without it where all are here."""
    amount, with_rows = _amount(command), _is_head(command)
    width = target.hidden_size if with_rows else 0
    labels = LabelFolder(command.samples or command.out / "labels", amount, target, width)
    found = labels.read()
    if len(found.lines) < amount.lines:
        options: ConnectOptions = {
            "peers": command.join,
            "insecure": command.insecure,
            "membership": command.membership,
        }
        with _bar(console) as bar, open_sampler(command.model, with_rows=with_rows, **options) as sampler:
            size = label_bytes(sampler.top, width, amount, amount.lines) / 1e6
            console.print(f"text and labels come from the swarm: {size:,.0f} MB in {labels.folder}", highlight=False)
            task = bar.add_task("sampling the swarm", total=amount.lines)
            found = labels.collect(sampler, lambda done: bar.update(task, completed=done))
    return labels.source(found, device)


def _amount(command: TrainDraft) -> SampleAmount:
    return SampleAmount(command.lines, command.tokens, command.seed)


def _is_head(command: TrainDraft) -> bool:
    return command.kind not in ("draft", "boost")


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
    if command.own_matrices and not _is_head(command):
        raise ConfigError("--own-matrices: of a head; a model has its own anyway")
    if (command.kind == "boost") != bool(command.earlier):
        raise ConfigError("--earlier: name the drafts that the new one is to complete with --kind boost, and no other")


def _train_head(
    kind: HeadKind, command: TrainDraft, context: TrainingContext, console: Console, report: ReportProgress
) -> None:
    target = context.target
    names, tensors = _borrowed(command, console)
    borrowed = {} if names is None else {EMBEDDING: names.embedding, OUTPUT: names.output}
    config = HeadConfig(kind, target.hidden_size, target.vocab_size, command.depth, target.tokenizer_digest, borrowed)
    torch.manual_seed(command.seed)
    head = make_head(config)
    for name, tensor in borrowed.items():
        setattr(head, name, tensors[tensor])
    if names is None:
        head.learn_matrix()
    elif names.norm in tensors:
        head.out_norm.load_state_dict({"weight": tensors[names.norm]})
    head.to(context.source.device)
    training = HeadTraining(head, context.source, context.schedule, context.checkpoint, learns_output=names is None)
    training.run(report)
    size = save_head(head, command.out)
    console.print(f"{training.score()}", highlight=False)
    own = f"borrows {', '.join(sorted(set(borrowed.values())))}" if borrowed else "with matrices of its own"
    console.print(f"{command.out}: {size:,} bytes, {own}", highlight=False)


def _borrowed(command: TrainDraft, console: Console) -> tuple[TargetNames | None, dict[str, torch.Tensor]]:
    """The target's tensors that a head begins with, by name; no names where it is to learn matrices of its own.

    Raises:
        SwarmError: without a swarm the weights have to be here, so what is wrong with them is an error.
    """
    if command.own_matrices:
        return None, {}
    try:
        names = target_names(command.model)
        wanted = {names.embedding, names.output, *([names.norm] if names.norm else [])}
        return names, load_tensors(command.model, wanted)
    except (UnsupportedModel, UnknownModel, HubError) as reason:
        if not command.join:
            raise
        console.print(f"the head learns matrices of its own: {reason}", highlight=False)
        return None, {}


def _train_model(command: TrainDraft, context: TrainingContext, console: Console, report: ReportProgress) -> None:
    assert command.start is not None, "checked"
    device = str(context.source.device)
    draft, *earlier = (load_for_training(name, device) for name in (command.start, *command.earlier))
    common = draft, context.source, context.schedule, context.checkpoint
    training = BoostTraining(*common, earlier) if earlier else DraftTraining(*common)
    training.run(report)
    cast("Any", draft).to(torch.bfloat16).save_pretrained(command.out)
    context.target.tokenizer.save_pretrained(command.out)
    console.print(f"{'together: ' if earlier else ''}{training.score()}", highlight=False)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
