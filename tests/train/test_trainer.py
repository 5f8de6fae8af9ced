"""The loop: it learns, it goes on where it stopped, and several processes compute what one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from train_tools import TINY, conversations, tiny_model

from breakeven.engine.config import ConfigError
from breakeven.train.batches import collate, plan_epoch, step_batches
from breakeven.train.config import OptimConfig, ShapeConfig
from breakeven.train.conversations import Conversation
from breakeven.train.model import DrafterModule
from breakeven.train.target import target_states
from breakeven.train.trainer import FrozenTarget, Trainer, lr_share

OPTIM = OptimConfig(
    unrolled_steps=3, max_length=48, batch_tokens=256, micro_batch_tokens=128, epochs=4, lr=5e-3, head_lr=5e-3,
    log_every_seconds=1e6, evaluate_every_seconds=1e6, checkpoint_every_seconds=1e6, compile=False,
)  # fmt: skip
SHAPE = ShapeConfig(tap_boundaries=(1, 3, 5)).drafter(TINY, 50)


def trainer(
    folder: Path, data: list[Conversation], optim: OptimConfig, held_out: list[Conversation] | None = None,
    rank: int = 0, world: int = 1,
) -> Trainer:  # fmt: skip
    model = tiny_model()
    ids = torch.arange(3, 53)
    torch.manual_seed(0)
    module = DrafterModule(SHAPE)
    module.start_from_target(model.head.weight, model.final_norm, ids)
    target = FrozenTarget(model, SHAPE, ids, optim)
    return Trainer(module, target, data, held_out or [], optim, 7, folder, lambda line: None, rank, world)


def weights_of(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.drafter.state_dict().items()}


def greedy_conversations(count: int) -> list[Conversation]:
    """Answers that the tiny target itself gives, so that a drafter can learn them."""
    model = tiny_model()
    made = []
    for item in conversations(count, seed=5):
        tokens = list(item.tokens[:8])
        while len(tokens) < 28:
            states = target_states(model, torch.tensor([tokens]), ())
            logits = states.hidden[-1] @ model.head.weight.T
            tokens.append(int(logits[3:53].argmax()) + 3)
        made.append(replace(item, tokens=tuple(tokens), mask=(0.0,) * 8 + (1.0,) * 20, greedy=True))
    return made


def test_a_drafter_learns_eight_conversations_by_heart(tmp_path: Path) -> None:
    data = greedy_conversations(8)
    optim = OPTIM.model_copy(update={"epochs": 150, "batch_tokens": 256, "micro_batch_tokens": 256, "lr": 1e-2})
    made = trainer(tmp_path, data, optim, held_out=data)
    made.prepare()
    before = made.evaluate()
    result = made.train(None, None)
    assert result.finished
    assert result.held_out is not None
    assert result.held_out.loss[0] < before.loss[0]
    assert min(result.held_out.accuracy) > 0.9
    lengths = result.held_out.acceptance_length
    assert lengths is not None
    assert lengths[2] > 3.5
    assert lengths == sorted(lengths)


def test_a_run_that_was_cut_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    data = conversations(24, seed=2)
    whole = trainer(tmp_path / "whole", data, OPTIM)
    whole.prepare()
    whole.train(None, None)
    first = trainer(tmp_path / "cut", data, OPTIM)
    first.prepare()
    first.save()
    assert not first.train(None, 0.0).finished
    stopped_at = []
    while True:
        again = trainer(tmp_path / "cut", data, OPTIM)
        assert again.resume()
        stopped_at.append(again.step)
        if again.train(None, 0.03).finished:
            break
    assert again.step == whole.step
    for name, value in weights_of(whole).items():
        assert torch.equal(value, weights_of(again)[name]), name


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, conversations(4), OPTIM)
    torch.save({"drafter": {}, "optimizer": {}}, made.checkpoint)
    with pytest.raises(ConfigError, match="delete it"):
        made.resume()


def _worker(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    optim = OPTIM.model_copy(update={"epochs": 2, "batch_tokens": 128})
    made = trainer(Path(folder), conversations(24, seed=2), optim, rank=rank, world=2)
    made.prepare()
    made.train(None, None)
    torch.distributed.barrier()  # as the pipeline does: a rank that leaves while the other still uses the group aborts
    torch.distributed.destroy_process_group()


def test_two_processes_train_what_one_with_twice_the_batch_does(tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = trainer(tmp_path / "one", conversations(24, seed=2), OPTIM.model_copy(update={"epochs": 2}))
    one.prepare()
    one.train(None, None)
    (tmp_path / "two").mkdir()
    multiprocessing.spawn(_worker, args=(str(tmp_path / "two"), port), nprocs=2)
    two = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert two["step"] == one.step
    for name, value in weights_of(one).items():
        torch.testing.assert_close(two["drafter"][name], value, rtol=1e-3, atol=2e-4)


def test_micro_batches_hold_every_conversation_once_within_their_size() -> None:
    lengths = np.random.default_rng(0).integers(5, 90, 300)
    plan = plan_epoch(lengths, 512, 64, seed=1, epoch=0)
    assert sorted(np.concatenate(plan).tolist()) == list(range(300))
    assert all(len(part) * (-(-min(int(lengths[part].max()), 64) // 32) * 32) <= 512 for part in plan)
    other = plan_epoch(lengths, 512, 64, seed=1, epoch=1)
    assert [part.tolist() for part in plan] != [part.tolist() for part in other]


def test_steps_continue_where_they_stopped() -> None:
    lengths = np.full(40, 30, np.int64)
    all_steps = step_batches(lengths, 128, 48, 3, 2, 0)
    expected = [[part.tolist() for part in next(all_steps)] for _ in range(12)]
    rest = step_batches(lengths, 128, 48, 3, 2, 7)
    assert [[part.tolist() for part in next(rest)] for _ in range(5)] == expected[7:]


def test_places_are_those_whose_next_token_is_learnt_and_that_a_row_can_predict() -> None:
    item = Conversation("a", "chat", (5, 6, 7, 8, 9), (0.0, 1.0, 0.0, 1.0, 0.5))
    batch = collate([item], 16)
    assert batch.tokens.shape == (1, 32)
    assert batch.places.tolist() == [2, 3]  # token 1 is learnt too, but no row stands before position 0
    assert batch.weight.tolist() == [1.0, 0.5]


def test_the_learning_rate_warms_up_and_falls() -> None:
    shares = [lr_share(x, OPTIM) for x in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert shares[0] < shares[1] < shares[2] == 1.0
    assert shares[2] > shares[3] > shares[4] == pytest.approx(OPTIM.final_lr_share)
