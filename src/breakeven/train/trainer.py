"""The training loop: online features of the frozen target, unrolled drafter, AdamW on fp32 masters, time-boxed.

Several processes (torchrun) each take their share of every step's micro-batches; gradients are summed over all. Every
number that decides something (progress, stop) is the first process's.
"""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from breakeven.engine.config import ConfigError, ModelConfig
from breakeven.engine.models.drafter_config import DrafterConfig
from breakeven.engine.models.llama import LlamaModel, rope_tables
from breakeven.train.batches import LENGTH_MULTIPLE, Batch, collate, step_batches, steps_per_epoch
from breakeven.train.config import OptimConfig
from breakeven.train.conversations import Conversation
from breakeven.train.files import write_bytes
from breakeven.train.model import DrafterModule
from breakeven.train.target import target_states
from breakeven.train.ttt import SoftLoss, StepLosses, soft_cross_entropy, step_losses, target_labels, unroll

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out figures. Lists run over the unrolled steps; `acceptance_length`: 1 + leading right drafts at chains of
    1..steps, over greedy answers (None without any), each place a root."""

    loss: list[float]
    accuracy: list[float]
    acceptance_length: list[float] | None
    places: int


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a call of `train` ended. `finished` False: the call's time was up; run again to go on."""

    finished: bool
    steps: int
    tokens: int
    seconds: float
    held_out: Accuracy | None
    tokens_per_second: float


class FrozenTarget:
    """Target weights, the head split by the draft vocabulary, and rotary tables for training."""

    def __init__(self, model: LlamaModel, config: DrafterConfig, target_ids: Tensor, optim: OptimConfig) -> None:
        padded = -(-optim.max_length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        if padded > model.config.max_position:
            raise ConfigError(
                f"train.max_length {optim.max_length} is padded to {padded}, but the target's positions end at "
                f"{model.config.max_position}; lower it"
            )
        self.model, self.config = model, config
        device = model.embedding.device
        inside = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        inside[target_ids.to(device)] = True
        self.head_in = model.head.weight[inside].contiguous()
        self.head_out = None if bool(inside.all()) else model.head.weight[~inside].contiguous()
        self.cos, self.sin = draft_rope(
            model.config, config, padded + optim.unrolled_steps, model.embedding.dtype, device
        )


def draft_rope(
    target: ModelConfig, config: DrafterConfig, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The target's rotary tables at the drafter's head_dim; angles in fp32, cos and sin [positions, dim] in `dtype`."""
    return rope_tables(dataclasses.replace(target, head_dim=config.head_dim, max_position=positions), dtype, device)


def forward_batch(
    drafter: DrafterModule, target: FrozenTarget, batch: Batch, optim: OptimConfig, normaliser: float, loss: SoftLoss
) -> StepLosses:
    """Losses of one micro-batch; `total` carries the gradient."""
    states = target_states(target.model, batch.tokens, target.config.tap_boundaries)
    assert states.taps is not None
    labels = target_labels(states.hidden[batch.places], target.head_in, target.head_out)
    size, length = batch.tokens.shape
    embedding = target.model.embedding
    taps = states.taps.view(size, length, *states.taps.shape[1:])
    weights = drafter.compute_weights(embedding.dtype)
    outputs = unroll(
        drafter,
        weights,
        taps,
        torch.nn.functional.embedding(batch.tokens, embedding),
        target.cos,
        target.sin,
        optim.unrolled_steps,
    )
    return step_losses(
        outputs,
        weights["lm_head.weight"],
        labels,
        batch.places,
        batch.offsets,
        batch.weight,
        optim.step_decay,
        normaliser,
        loss,
    )


def measure_tap_scale(target: FrozenTarget, batches: Sequence[Batch]) -> Tensor:
    """1 / rms of each tapped channel [3·H_target] over the batches' learnt places (position 0, an outlier, is none)."""
    total: Tensor | None = None
    count = 0
    for batch in batches:
        states = target_states(target.model, batch.tokens, target.config.tap_boundaries)
        assert states.taps is not None
        chosen = states.taps[batch.places].flatten(1).float()
        square = chosen.square().sum(0)
        total = square if total is None else total + square
        count += chosen.shape[0]
    if total is None or count == 0:
        raise ConfigError("there are no learnt tokens in the training data; check its assistant turns")
    return (total / count).clamp_min(1e-6).rsqrt()


class Trainer:
    """One drafter in training. `world`, `rank`: processes of torchrun, 1 and 0 without."""

    def __init__(
        self,
        drafter: DrafterModule,
        target: FrozenTarget,
        conversations: Sequence[Conversation],
        held_out: Sequence[Conversation],
        optim: OptimConfig,
        seed: int,
        folder: Path,
        log: Log,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not conversations:
            raise ConfigError("there are no conversations to train on; run the answers stage, or give --data")
        self.device = target.model.embedding.device
        self.drafter = drafter.to(self.device)
        self.target, self.conversations, self.held_out = target, conversations, held_out
        self.optim, self.seed, self.log, self.rank, self.world = optim, seed, log, rank, world
        self.checkpoint = folder / "checkpoint.pt"
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        head: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in drafter.named_parameters():
            (head if name == "lm_head.weight" else others).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": others, "peak": optim.lr}, {"params": head, "peak": optim.head_lr}],
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            fused=self.device.type == "cuda",
        )
        self._lengths = np.array([len(item.tokens) for item in conversations], np.int64)
        micro_per_process = max(1, optim.batch_tokens // optim.micro_batch_tokens)
        self._per_step = micro_per_process * world
        per_epoch = steps_per_epoch(self._lengths, optim.micro_batch_tokens, optim.max_length, seed, self._per_step)
        self.total_steps = max(1, math.ceil(optim.epochs * per_epoch))
        self._loss = _fused_loss(optim.compile and self.device.type == "cuda", log)
        self.history: list[dict[str, Any]] = []

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False if there is none."""
        if not self.checkpoint.is_file():
            return False
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.drafter.load_state_dict(state["drafter"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, ValueError, EOFError, OSError) as error:
            raise ConfigError(f"{self.checkpoint} does not fit this run ({error}); delete it to start anew") from None
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.history = state["history"]
        return True

    def save(self) -> None:
        """Write the checkpoint, on the first process only."""
        if self.rank == 0:
            buffer = io.BytesIO()
            state = {
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "history": self.history,
            }
            torch.save(state, buffer)
            write_bytes(self.checkpoint, buffer.getvalue())

    def prepare(self) -> None:
        """Measure the taps' scale on the first micro-batches (the same in all processes). Not after `resume`."""
        if self.drafter.config.fc_norm or self.drafter.config.norm_before_fc:
            return
        batches = step_batches(
            self._lengths, self.optim.micro_batch_tokens, self.optim.max_length, self.seed, min(4, self._per_step), 0
        )
        sample = [self._batch(indices) for indices in next(batches)]
        self.drafter.tap_scale.copy_(measure_tap_scale(self.target, sample))

    def train(self, time_box: float | None, call_seconds: float | None) -> TrainResult:
        """Until all steps are done or `time_box` seconds of training (over all calls) are spent: the learning rate
        falls to its end by whichever comes first. `call_seconds`: this call ends, unfinished, after that long."""
        started, before = time.monotonic(), self.seconds
        last_log = last_save = last_evaluation = started
        tokens_at_start, window_tokens = self.tokens, 0
        pending: list[StepLosses] = []
        previous: torch.cuda.Event | None = None
        plan = step_batches(
            self._lengths,
            self.optim.micro_batch_tokens,
            self.optim.max_length,
            self.seed,
            self._per_step,
            self.step,
        )
        finished = False
        while True:
            now = time.monotonic()
            self.seconds = before + now - started
            progress = self.step / self.total_steps
            if time_box is not None:
                progress = max(progress, self.seconds / time_box)
            stop = call_seconds is not None and now - started >= call_seconds
            progress, stop = self._agreed(progress, stop)
            finished = progress >= 1
            if finished or stop:
                break
            tokens, losses = self._optimise(next(plan), progress)
            pending.append(losses)
            self.step += 1
            self.tokens += tokens
            window_tokens += tokens
            if self.device.type == "cuda":  # one step in flight at most, so that the clock means something
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                if previous is not None:
                    previous.synchronize()
                previous = event
            now = time.monotonic()
            if now - last_log >= self.optim.log_every_seconds:
                self._report(pending, window_tokens, now - last_log, progress)
                pending, window_tokens, last_log = [], 0, now
            if now - last_evaluation >= self.optim.evaluate_every_seconds and self.held_out:
                self._record(self.evaluate())
                last_evaluation = time.monotonic()
            if now - last_save >= self.optim.checkpoint_every_seconds:
                self.seconds = before + time.monotonic() - started
                self.save()
                last_save = time.monotonic()
        held_out = self.evaluate() if self.held_out else None
        if held_out is not None:
            self._record(held_out)
        spent = time.monotonic() - started
        self.save()
        return TrainResult(
            finished, self.step, self.tokens, self.seconds, held_out, (self.tokens - tokens_at_start) / max(spent, 1e-9)
        )

    @torch.no_grad()
    def evaluate(self) -> Accuracy:
        """Loss and accuracy per unrolled step on the held-out conversations. Every process computes the same."""
        steps = self.optim.unrolled_steps
        loss, correct, count = (torch.zeros(steps, dtype=torch.float64) for _ in range(3))
        accepted, roots = torch.zeros(steps, dtype=torch.float64), 0
        order = np.argsort([len(item.tokens) for item in self.held_out], kind="stable")
        size = max(1, self.optim.micro_batch_tokens // self.optim.max_length)
        for start in range(0, len(order), size):
            items = [self.held_out[index] for index in order[start : start + size]]
            batch = collate(items, self.optim.max_length).to(self.device)
            if not batch.mass:
                continue
            result = forward_batch(self.drafter, self.target, batch, self.optim, 1.0, self._loss)
            loss += result.loss.double().cpu()
            correct += result.correct.double().cpu()
            count += result.count.double().cpu()
            leading, chains = chain_lengths(result.right, batch)
            accepted += leading.double().cpu()
            roots += chains
        count = count.clamp_min(1)
        return Accuracy(
            [round(value, 4) for value in (loss / count).tolist()],
            [round(value, 4) for value in (correct / count).tolist()],
            [round(1 + value, 4) for value in (accepted.cumsum(0) / roots).tolist()] if roots else None,
            int(count[0].item()),
        )

    def _batch(self, indices: np.ndarray) -> Batch:
        return collate([self.conversations[index] for index in indices], self.optim.max_length).to(self.device)

    def _optimise(self, micro_batches: Sequence[np.ndarray], progress: float) -> tuple[int, StepLosses]:
        """One step; tokens of all processes in it, and this process's losses."""
        every = [collate([self.conversations[i] for i in part], self.optim.max_length) for part in micro_batches]
        normaliser = max(sum(batch.mass for batch in every), 1e-6)
        mine = every[self.rank :: self.world]
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * lr_share(progress, self.optim)
        self.optimizer.zero_grad(set_to_none=True)
        losses = None
        for batch in mine:
            losses = forward_batch(self.drafter, self.target, batch.to(self.device), self.optim, normaliser, self._loss)
            losses.total.backward()  # type: ignore[no-untyped-call]
        assert losses is not None
        self._sum_gradients()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.optim.clip)
        self.optimizer.step()
        return sum(batch.num_tokens for batch in every), losses

    def _sum_gradients(self) -> None:
        if self.world == 1:
            return
        parameters = list(self.drafter.parameters())
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def _agreed(self, progress: float, stop: bool) -> tuple[float, bool]:
        if self.world == 1:
            return progress, stop
        values = torch.tensor([progress, float(stop)], dtype=torch.float64, device=self.device)
        dist.broadcast(values, 0)
        return float(values[0]), bool(values[1])

    def _report(self, pending: Sequence[StepLosses], tokens: int, seconds: float, progress: float) -> None:
        loss = torch.stack([item.loss for item in pending]).sum(0)
        correct = torch.stack([item.correct for item in pending]).sum(0)
        count = torch.stack([item.count for item in pending]).sum(0).clamp_min(1)
        shown = " ".join(f"{value:.3f}" for value in (correct / count).tolist())
        if self.rank == 0:
            self.log(
                f"train: {progress:5.1%}, step {self.step}, {tokens / max(seconds, 1e-9):,.0f} tokens/s, loss "
                f"{(loss / count)[0].item():.3f}, accuracy by depth {shown}"
            )

    def _record(self, accuracy: Accuracy) -> None:
        self.history.append({"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
                            | asdict(accuracy))  # fmt: skip
        if self.rank == 0:
            lengths = accuracy.acceptance_length
            chain = "" if lengths is None else f", acceptance length of chains {' '.join(f'{x:.2f}' for x in lengths)}"
            shown = " ".join(f"{value:.3f}" for value in accuracy.accuracy)
            self.log(f"held out: step {self.step}, accuracy by depth {shown}{chain}")


def lr_share(progress: float, optim: OptimConfig) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: linear warm-up, then a cosine to its last share."""
    if progress < optim.warmup_share:
        return max(progress / optim.warmup_share, 0.01)
    done = min(1.0, (progress - optim.warmup_share) / (1 - optim.warmup_share))
    return optim.final_lr_share + (1 - optim.final_lr_share) * 0.5 * (1 + math.cos(math.pi * done))


def chain_lengths(right: Tensor, batch: Batch) -> tuple[Tensor, int]:
    """(Σ over roots of [the first k drafts are all right], k = 1..steps; number of roots), over greedy answers.

    A root row i is the one that predicts place i + 1; step k predicts place i + 1 + k. Roots whose chain would leave
    the answer are left out, as are roots in prompts.
    """
    steps = right.shape[0]
    size = batch.tokens.numel()
    grid = torch.zeros(steps, size, dtype=torch.bool, device=right.device)
    learnt = torch.zeros(size + steps, dtype=torch.bool, device=right.device)
    learnt[batch.places[batch.greedy]] = True
    grid[:, batch.places] = right
    roots = torch.ones(size, dtype=torch.bool, device=right.device)
    chain = torch.ones(size, dtype=torch.bool, device=right.device)
    index = torch.arange(size, device=right.device)
    for step in range(steps):
        roots &= learnt[index + step]
    # neighbours in flat order that belong to different conversations never qualify: padding or a prompt lies between
    counts = []
    for step in range(steps):
        chain &= grid[step][(index + step).clamp_max(size - 1)]
        counts.append((chain & roots).sum())
    return torch.stack(counts), int(roots.sum())


def _fused_loss(wanted: bool, log: Log) -> SoftLoss:
    """The loss's elementwise part compiled into one kernel where asked for; eager where that fails, which is said."""
    if not wanted:
        return soft_cross_entropy
    compiled = torch.compile(soft_cross_entropy, dynamic=True)
    state: dict[str, bool] = {}

    def call(logits: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if "failed" not in state and logits.shape[0] > 1:
            try:
                return compiled(logits, target, weight)
            except Exception as error:  # the compiler raises what it likes, and the eager form is always right
                state["failed"] = True
                log(f"the loss could not be compiled ({type(error).__name__}: {str(error)[:200]}); going on without")
        return soft_cross_entropy(logits, target, weight)

    return call


def load_drafter_state(folder: Path, config: DrafterConfig) -> DrafterModule:
    """The trained drafter of a run's checkpoint. ConfigError if there is none."""
    path = folder / "checkpoint.pt"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; run the train stage first")
    drafter = DrafterModule(config)
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    drafter.load_state_dict(state["drafter"])
    return drafter
