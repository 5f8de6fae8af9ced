"""A run from prompts to card. Each stage leaves whole files and a record of the settings it depends on; a finished
stage is not run again, an interrupted one goes on where it can."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from breakeven.engine.config import ConfigError, EngineConfig, SpeculationConfig
from breakeven.engine.engine import Engine
from breakeven.engine.models.drafter import Drafter, DrafterCheckpoint
from breakeven.engine.models.drafter_load import load_drafter
from breakeven.engine.models.llama import LlamaModel
from breakeven.engine.models.load import LoadedModel, load_model
from breakeven.train.answers import (
    SELF_PROMPT_TOKENS,
    answer_jobs,
    answered_rows,
    article_jobs,
    self_prompt_jobs,
    self_prompt_row,
)
from breakeven.train.card import write_card
from breakeven.train.config import TrainConfig, fingerprint
from breakeven.train.conversations import Conversation, encode_row
from breakeven.train.evaluate import run_prompts, summarise, table_lines
from breakeven.train.export import export_drafter
from breakeven.train.fast_generate import FastGenerator
from breakeven.train.files import Manifest, ShardWriter, read_rows, shards, write_bytes, write_json
from breakeven.train.heldout import HeldOutPrompt, raw_texts, read_held_out
from breakeven.train.loops import loop_start
from breakeven.train.model import DrafterModule
from breakeven.train.progress import Reporter
from breakeven.train.prompts.build import build_prompts
from breakeven.train.prompts.decontaminate import HeldOut, measurement_prompts
from breakeven.train.prompts.reading import reading_prompts, worth_reading
from breakeven.train.prompts.types import PromptRow
from breakeven.train.replay import replay_accuracy
from breakeven.train.trainer import FrozenTarget, Trainer, load_drafter_state
from breakeven.train.vocab import choose_vocab, count_tokens, coverage, offsets

Stage = Literal["prompts", "self-prompts", "answers", "vocab", "train", "export", "evaluate"]
STAGES: tuple[Stage, ...] = ("prompts", "self-prompts", "answers", "vocab", "train", "export", "evaluate")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOOPS_SAMPLED = 2000  # conversations from which the share of loops is estimated
_REPLAYED = 24  # held-out conversations that the replay gate goes through


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What belongs to this machine or this call rather than to the drafter. Seconds, None: no limit.

    max_seconds: this call's wall clock; what is unfinished then is left to the next call. answer_seconds,
    train_seconds: time boxes of these stages over all calls.
    """

    out: Path
    stages: tuple[Stage, ...] = STAGES
    max_seconds: float | None = None
    answer_seconds: float | None = None
    train_seconds: float | None = None
    evaluate_reserve: float = 0.0  # seconds of this call kept back for export and evaluation
    bfcl: Path | None = None
    held_out: tuple[Path, ...] = ()
    data: tuple[Path, ...] = ()  # conversations from elsewhere, beside our own answers
    command: str = field(default_factory=lambda: shlex.join(["breakeven", *sys.argv[1:]]))


@dataclass(frozen=True, slots=True)
class Processes:
    """Our place among torchrun's processes."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in any process: they must take the same way, or they wait for each other for ever."""
        if self.world == 1:
            return flag
        total = torch.tensor([float(flag)], device=device)
        dist.all_reduce(total)
        return bool(total.item() > 0)


def run(config: TrainConfig, options: RunOptions, reporter: Reporter | None = None) -> bool:
    """Run the stages. False: time is up before the end; the same call again goes on. ConfigError for bad input."""
    processes = _join()
    try:
        return _Run(config, options, processes, reporter or Reporter(quiet=processes.rank > 0)).go()
    finally:
        if processes.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _join() -> Processes:
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(hours=2))
    return Processes(rank, world, local)


class _OutOfTimeError(Exception):
    """This call's time is up."""


class _Run:
    def __init__(self, config: TrainConfig, options: RunOptions, processes: Processes, reporter: Reporter) -> None:
        self.config, self.options, self.processes, self.reporter = config, options, processes, reporter
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.manifest = Manifest(self.out)
        self.started = time.monotonic()
        self.device = _device(config.device)
        if self.device == torch.device("cuda") and processes.world > 1:
            self.device = torch.device("cuda", processes.local_rank)
        self.dtype = _DTYPES[config.dtype]
        self.loaded: LoadedModel = load_model(config.target)
        self._model: LlamaModel | None = None
        self._conversations: list[Conversation] | None = None
        held = [(path, path.stat().st_size if path.is_file() else -1) for path in options.held_out]
        self._held_key = [[path.name, size] for path, size in held]

    @property
    def model(self) -> LlamaModel:
        if self._model is None:
            self._model = LlamaModel(self.loaded.config, self.loaded.weights(self.dtype), self.device)
        return self._model

    def go(self) -> bool:
        work: dict[Stage, Callable[[], dict[str, Any]]] = {
            "prompts": self._prompts,
            "self-prompts": self._self_prompts,
            "answers": self._answers,
            "vocab": self._vocab,
            "train": self._train,
            "export": self._export,
            "evaluate": self._evaluate,
        }
        hashes = self._hashes()
        everywhere = ("answers", "train")  # the others are the first process's
        for stage in STAGES:
            if stage not in self.options.stages:
                continue
            if self.manifest.finished(stage, hashes[stage]):
                self.reporter.log(f"{stage}: done before, under the same settings")
                continue
            if self.processes.any(self._left() <= 0, self.device):
                return self._unfinished(stage)
            started = time.monotonic()
            try:
                summary = work[stage]() if stage in everywhere or self.processes.rank == 0 else {}
            except _OutOfTimeError:
                return self._unfinished(stage)
            self.processes.wait()
            if self.processes.rank == 0:
                spent = time.monotonic() - started + self._seconds_before(stage)
                self.manifest.stages.pop(f"{stage} so far", None)
                self.manifest.finish(stage, hashes[stage], spent, summary)
            self.reporter.log(f"{stage}: done in {time.monotonic() - started:.1f} s")
            self.processes.wait()
            if self.processes.rank > 0:
                self.manifest = Manifest(self.out)
        return True

    def _hashes(self) -> dict[Stage, str]:
        config, found = self.config, {}
        above = fingerprint(config.target, config.seed)
        parts: dict[Stage, tuple[object, ...]] = {
            "prompts": (config.prompts, list(config.domains), self._held_key, self.options.bfcl is not None),
            "self-prompts": (SELF_PROMPT_TOKENS,),
            "answers": (config.answers,),
            "vocab": (config.vocab, [path.name for path in self.options.data], config.train.loop_weight),
            "train": (config.drafter, config.train, config.dtype),
            "export": (config.export,),
            "evaluate": (config.evaluate, self._held_key),
        }
        for stage in STAGES:
            above = found[stage] = fingerprint(above, *parts[stage])
        return found

    def _left(self) -> float:
        if self.options.max_seconds is None:
            return float("inf")
        return self.options.max_seconds - (time.monotonic() - self.started)

    def _seconds_before(self, stage: Stage) -> float:
        """What earlier calls spent on the stage without finishing it."""
        record = self.manifest.stages.get(f"{stage} so far")
        return 0.0 if record is None else record.seconds

    def _unfinished(self, stage: str) -> bool:
        self.reporter.log(f"{stage}: this call's time is up; run the same command again to go on")
        return False

    # Stages

    def _prompts(self) -> dict[str, Any]:
        texts = [text for path in self.options.held_out for text in raw_texts(path)]
        rows, report = build_prompts(
            self.config.prompts, self.config.domains, self.config.seed, texts, self.options.bfcl, self.reporter.log
        )
        self._replace("prompts", self._with_ids(rows))
        return asdict(report)

    def _self_prompts(self) -> dict[str, Any]:
        texts = [text for path in self.options.held_out for text in raw_texts(path)]
        held_out = HeldOut([*measurement_prompts(), *texts])
        written = self._written_prompts(held_out)
        reading, articles = self._reading_prompts(held_out)
        unique = {row.id: row for row in [*written, *reading]}
        self._replace("self-prompts", self._with_ids(list(unique.values())))
        self._free()
        return {"prompts": len(written), "articles": articles, "reading_tasks": len(reading)}

    def _written_prompts(self, held_out: HeldOut) -> list[PromptRow]:
        """Prompts that the target writes as the user."""
        count, tokenizer = self.config.prompts.self_prompts, self.loaded.tokenizer
        if not count:
            return []
        jobs = self_prompt_jobs(tokenizer, self.config.domains, count, self.config.seed)
        longest = max(len(job.prompt) for job, _, _ in jobs)
        generator = self._generator(longest + SELF_PROMPT_TOKENS, SELF_PROMPT_TOKENS)
        seen, rows = set(), []
        with self.reporter.stage("self-prompts", count):
            for done, answer in enumerate(generator.run([job for job, _, _ in jobs]), 1):
                _, domain, start = jobs[answer.job.key]
                row = self_prompt_row(tokenizer, answer, domain, start)
                if row is not None and row.id not in seen and not held_out.contains(row.text):
                    seen.add(row.id)
                    rows.append((answer.job.key, row))
                self.reporter.advance(done, f"self-prompts: {done:,} of {count:,}")
        rows.sort(key=lambda item: item[0])
        return [row for _, row in rows]

    def _reading_prompts(self, held_out: HeldOut) -> tuple[list[PromptRow], int]:
        """Reading tasks over articles that the target writes first, and the number of articles."""
        settings, tokenizer = self.config.prompts, self.loaded.tokenizer
        count = settings.articles
        if not count or "chat" not in self.config.domains:
            return [], 0
        jobs = article_jobs(tokenizer, count, settings.article_tokens, self.config.seed)
        longest = max(len(job.prompt) for job in jobs)
        generator = self._generator(longest + settings.article_tokens, settings.article_tokens)
        found: dict[int, str] = {}
        with self.reporter.stage("articles", count):
            for done, answer in enumerate(generator.run(jobs), 1):
                article = tokenizer.decode(answer.tokens).strip()
                if worth_reading(article):
                    found[answer.job.key] = article
                self.reporter.advance(done, f"articles: {done:,} of {count:,}")
        articles = [found[key] for key in sorted(found)]
        rows = [row for row in reading_prompts(articles, self.config.seed) if not held_out.contains(row.text)]
        return rows, len(articles)

    def _answers(self) -> dict[str, Any]:
        config, tokenizer = self.config.answers, self.loaded.tokenizer
        rows = [
            row for stem in ("prompts", "self-prompts") for path in shards(self.out, stem) for row in read_rows(path)
        ]
        if not rows:
            raise ConfigError(f"{self.out} holds no prompts; run the prompts stage first")
        random.Random(self.config.seed).shuffle(rows)
        stem = f"answers-{self.processes.rank}"
        done = {row["id"] for path in shards(self.out, stem) for row in read_rows(path)}
        mine = [row for row in rows[self.processes.rank :: self.processes.world] if row["id"] not in done]
        jobs, left_out = answer_jobs(tokenizer, mine, config, self.config.seed)
        generator = self._generator(config.max_prompt_tokens + config.max_tokens, config.max_tokens)
        writer = ShardWriter(self.out, stem, config.shard_megabytes, first=len(shards(self.out, stem)))
        started = time.monotonic()
        spent_before = self._seconds_before("answers")
        box = self.options.answer_seconds
        box_left = float("inf") if box is None else box - spent_before
        call_left = self._left() - self.options.evaluate_reserve

        def keep_on() -> bool:
            return time.monotonic() - started < min(box_left, call_left)

        tokens = 0
        with self.reporter.stage("answers", len(jobs)):
            for number, row in enumerate(answered_rows(generator, tokenizer, mine, jobs, keep_on), 1):
                writer.add(row)
                tokens += len(row["answer_ids"])
                rate = tokens / max(time.monotonic() - started, 1e-9)
                self.reporter.advance(
                    number, f"answers: {number:,} of {len(jobs):,}, {tokens:,} tokens, {rate:,.0f} tokens/s"
                )
        writer.close()
        seconds = time.monotonic() - started
        self.reporter.log(f"answers: {tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
        self._free()
        cut = call_left < box_left and seconds >= call_left  # by this call's end, not by the stage's own box
        if self.processes.any(cut, self.device):
            if self.processes.rank == 0:
                self.manifest.finish("answers so far", "", spent_before + seconds, {})
            raise _OutOfTimeError
        return {
            "prompts": len(rows), "answered_now": tokens, "tokens_per_second": round(tokens / max(seconds, 1e-9)),
            "too_long": left_out,
        }  # fmt: skip

    def _vocab(self) -> dict[str, Any]:
        conversations = self._data()
        size = self.loaded.config.vocab_size
        counts = count_tokens(conversations, size)
        ids = choose_vocab(counts, min(self.config.vocab.size, size))
        buffer = io.BytesIO()
        np.savez(buffer, target_ids=ids, counts=counts)
        write_bytes(self.out / "vocab.npz", buffer.getvalue())
        learnt = int(counts.sum())
        sample = [_answer(item) for item in conversations[:: max(1, len(conversations) // _LOOPS_SAMPLED)]]
        starts = [loop_start(answer) for answer in sample]
        tail = sum(len(answer) - start for answer, start in zip(sample, starts, strict=True) if start is not None)
        sampled_tokens = max(sum(len(answer) for answer in sample), 1)
        domains = dict(Counter(item.domain for item in conversations))
        decoded = [
            self.loaded.tokenizer.decode(item.tokens[start:end], skip_special_tokens=False)[:400]
            for item in conversations[:4]
            for start, end in item.spans()
        ]
        return {
            "conversations": len(conversations), "learnt_tokens": learnt, "size": len(ids), "domains": domains,
            "coverage": round(coverage(counts, ids), 5), "greedy_answers": sum(item.greedy for item in conversations),
            "looping_share_of_answers": round(sum(start is not None for start in starts) / max(len(sample), 1), 4),
            "loop_tail_share_of_tokens": round(tail / sampled_tokens, 4), "decoded": decoded,
        }  # fmt: skip

    def _train(self) -> dict[str, Any]:
        config, seed = self.config, self.config.seed
        training, held_out = self._split()
        target_ids, _ = self._vocab_arrays()
        shape = config.drafter.drafter(self.loaded.config, len(target_ids))
        torch.manual_seed(seed)
        drafter = DrafterModule(shape)
        ids = torch.from_numpy(target_ids)
        drafter.start_from_target(self.model.head.weight.cpu(), self.model.final_norm.cpu(), ids)
        target = FrozenTarget(self.model, shape, ids, config.train)
        folder = self.out / "train"
        trainer = Trainer(
            drafter, target, training, held_out, config.train, seed, folder, self.reporter.log,
            self.processes.rank, self.processes.world,
        )  # fmt: skip
        digest = self._hashes()["train"]
        if self._settings(folder) == digest and trainer.resume():
            self.reporter.log(f"train: going on from step {trainer.step}, {trainer.seconds:.0f} s of training done")
        else:
            trainer.prepare()
            self.processes.wait()
            if self.processes.rank == 0:
                trainer.save()
                write_json(folder / "settings.json", {"hash": digest})
            self.processes.wait()
        parameters = sum(parameter.numel() for parameter in drafter.parameters())
        self.reporter.log(
            f"train: {len(training):,} conversations, {len(held_out)} held out, {parameters / 1e6:.1f}M parameters, "
            f"{trainer.total_steps:,} steps on {self.device}"
        )
        left = self._left() - self.options.evaluate_reserve
        result = trainer.train(self.options.train_seconds, None if left == float("inf") else max(left, 0.0))
        if not result.finished:
            raise _OutOfTimeError
        return {
            "steps": result.steps, "tokens": result.tokens, "seconds": round(result.seconds, 1),
            "tokens_per_second": round(result.tokens_per_second), "parameters": parameters,
            "conversations": len(training), "history": trainer.history,
        }  # fmt: skip

    def _export(self) -> dict[str, Any]:
        target_ids, counts = self._vocab_arrays()
        shape = self.config.drafter.drafter(self.loaded.config, len(target_ids))
        drafter = load_drafter_state(self.out / "train", shape)
        written = {}
        for size in self.config.export.vocab_sizes:
            path = export_drafter(
                drafter, self.loaded.config, target_ids, counts, size, self._export_path(size),
                self.config.export.format, self.config.target,
            )  # fmt: skip
            written[path.name] = sum(file.stat().st_size for file in path.iterdir())
            self.reporter.log(f"export: {path} ({written[path.name] / 1e6:.1f} MB)")
        return {"bytes": written}

    def _evaluate(self) -> dict[str, Any]:
        prompts = [prompt for path in self.options.held_out for prompt in read_held_out(path)]
        limit = self.config.evaluate.max_prompts
        if limit is not None and len(prompts) > limit:
            prompts = sorted(
                random.Random(self.config.seed).sample(prompts, limit), key=lambda item: (item.suite, item.id)
            )
        self._free()
        replay = self._replay()
        evaluation: dict[str, Any] = {}
        for size in self.config.export.vocab_sizes:
            path = self._export_path(size)
            if prompts:
                evaluation[path.name] = evaluate_drafter(
                    self.config, self.loaded, path, prompts, self.device, self.reporter
                )
                write_json(self.out / f"evaluation-{path.name}.json", evaluation[path.name])
        sources = self._sources()
        cards = {size: self._card(size, sources, evaluation, replay) for size in self.config.export.vocab_sizes}
        for size, card in cards.items():
            write_card(self._export_path(size), card)
        write_card(self.out, cards[self.config.export.vocab_sizes[0]], "report.md")
        return {"prompts": len(prompts), "replay": replay}

    # Parts

    def _replay(self) -> list[float]:
        """The gate: trainer and engine must agree within a point on the same conversations."""
        _, held_out = self._split()
        chosen = held_out[:_REPLAYED]
        if not chosen:
            return []
        target_ids, _ = self._vocab_arrays()
        shape = self.config.drafter.drafter(self.loaded.config, len(target_ids))
        module = load_drafter_state(self.out / "train", shape)
        weights = module.export_weights(self.dtype)
        ids = torch.from_numpy(target_ids)
        weights["d2t"] = torch.from_numpy(offsets(target_ids))
        optim = self.config.train
        engine_side = Drafter(
            shape, self.loaded.config, weights, self.model.embedding, self.device, self.model.head.weight
        )
        replay = replay_accuracy(engine_side, self.model, chosen, optim.unrolled_steps, optim.max_length)
        target = FrozenTarget(self.model, shape, ids, optim)
        trainer = Trainer(module, target, chosen, chosen, optim, 0, self.out / "train", lambda line: None)
        trained = trainer.evaluate().accuracy
        worst = max(abs(a - b) for a, b in zip(replay, trained, strict=True))
        self.reporter.log(
            f"replay: engine {' '.join(f'{x:.3f}' for x in replay)}, trainer {' '.join(f'{x:.3f}' for x in trained)}"
        )
        if worst > 0.01:
            self.reporter.log(
                f"warning: the engine's drafter and the trainer differ by {worst:.1%} in accuracy at some depth: the "
                "checkpoint is served differently from how it was trained; do not publish it before that is understood"
            )
        return replay

    def _summary(self, stage: Stage) -> dict[str, Any]:
        record = self.manifest.stages.get(stage)
        return {} if record is None else record.summary

    def _sources(self) -> list[dict[str, Any]]:
        """Where the prompts come from, for the cards."""
        prompts, own = self._summary("prompts"), self._summary("self-prompts")
        licences = prompts.get("licences", {})
        data = [
            {"source": source, "licence": _licence(source, licences), "prompts": count}
            for source, count in sorted(prompts.get("per_source", {}).items(), key=lambda item: -item[1])
        ]
        data += [
            {"source": source, "licence": "the target's", "prompts": own[key]}
            for key, source in (
                ("prompts", "prompts written by the target itself"),
                ("reading_tasks", "reading tasks over articles written by the target itself"),
            )
            if own.get(key)
        ]
        data += [
            {"source": path.name, "licence": "as given by its owner", "prompts": sum(1 for _ in read_rows(path))}
            for path in self.options.data
        ]
        return data

    def _card(
        self, size: int, sources: list[dict[str, Any]], evaluation: dict[str, Any], replay: list[float]
    ) -> dict[str, Any]:
        vocab, training = self._summary("vocab"), self._summary("train")
        seconds = {name: record.seconds for name, record in self.manifest.stages.items()}
        if "seconds" in training:
            seconds["train"] = training["seconds"]  # of all calls; the stage's own time is the last call's
        facts = {
            "parameters, with the trained vocabulary": training.get("parameters"),
            "draft vocabulary": f"{size} of {vocab.get('size')} trained, {vocab.get('coverage')} of learnt tokens",
            "domains": ", ".join(f"{name} {count}" for name, count in vocab.get("domains", {}).items()),
            "conversations": vocab.get("conversations"),
            "learnt tokens (answers)": vocab.get("learnt_tokens"),
            "tokens processed in training": training.get("tokens"),
            "seconds per stage": ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
            "training tokens/s": training.get("tokens_per_second"),
            "generation tokens/s": self._summary("answers").get("tokens_per_second"),
            "loop tails, share of learnt tokens": vocab.get("loop_tail_share_of_tokens"),
        }
        name = self._export_path(size).name
        return {
            "target": self.config.target,
            "command": self.options.command,
            "hardware": _hardware(self.device, self.processes.world),
            "seed": self.config.seed,
            "config": self.config.model_dump(mode="json"),
            "facts": {name: value for name, value in facts.items() if value not in (None, "")},
            "data": sources,
            "training": training.get("history", []),
            "replay": replay,
            "evaluation": dict(sorted(evaluation.items(), key=lambda item: item[0] != name)),  # its own first
            "decoded": vocab.get("decoded", []),
        }

    def _generator(self, max_length: int, max_new_tokens: int) -> FastGenerator:
        config = self.config.answers
        return FastGenerator(
            self.model,
            self.loaded.tokenizer.eos_token_ids,
            slots=config.slots,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            steps_per_sync=config.steps_per_sync,
            seed=self.config.seed + self.processes.rank,
        )

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _replace(self, stem: str, rows: Sequence[dict[str, Any]]) -> None:
        for path in shards(self.out, stem):
            path.unlink()
        writer = ShardWriter(self.out, stem, self.config.answers.shard_megabytes)
        for row in rows:
            writer.add(row)
        writer.close()

    def _with_ids(self, rows: Sequence[PromptRow]) -> list[dict[str, Any]]:
        """Rows with the ids that the server computes for them, so that the answers stage need not."""
        made, rendered = [row.row() for row in rows], {}
        for number, row in enumerate(made):
            # the template may refuse the messages; the answers stage leaves these out
            with contextlib.suppress(ValueError):
                rendered[number] = self.loaded.tokenizer.render_chat(row["messages"], add_generation_prompt=True)
        encoded = self.loaded.tokenizer.encode_many(list(rendered.values()), add_special_tokens=False)
        for number, ids in zip(rendered, encoded, strict=True):
            made[number]["prompt_ids"] = ids
        return made

    def _data(self) -> list[Conversation]:
        """All conversations, ours and given ones, in an order that depends on their ids alone."""
        if self._conversations is None:
            found: dict[str, Conversation] = {}
            paths = [*shards(self.out, "answers"), *self.options.data]
            for path in paths:
                for number, row in enumerate(read_rows(path), 1):
                    item = encode_row(
                        self.loaded.tokenizer, row, f"{path.name}, row {number}", self.config.train.loop_weight
                    )
                    if item.domain in self.config.domains or item.domain == "unknown":
                        found[f"{item.domain}/{item.id}"] = item
            if not found:
                raise ConfigError(
                    f"{self.out} holds no answers for the domains {', '.join(self.config.domains)}; run the answers "
                    "stage, or give conversations with --data"
                )
            self._conversations = [found[key] for key in sorted(found)]
        return self._conversations

    def _split(self) -> tuple[list[Conversation], list[Conversation]]:
        """(training, held out): greedy answers are held out first, as acceptance is measured at temperature 0."""
        conversations = self._data()
        count = min(self.config.train.held_out_conversations, len(conversations) // 10)
        order = sorted(range(len(conversations)), key=lambda index: (not conversations[index].greedy, index))
        # spread over the domains: every n-th of the greedy ones
        greedy = [index for index in order if conversations[index].greedy]
        pool = greedy if len(greedy) >= count else order
        step = max(1, len(pool) // count) if count else 1
        chosen = set(pool[::step][:count])
        training = [item for index, item in enumerate(conversations) if index not in chosen]
        return training, [conversations[index] for index in sorted(chosen)]

    def _vocab_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        path = self.out / "vocab.npz"
        if not path.is_file():
            raise ConfigError(f"{path} is missing; run the vocab stage first")
        with np.load(path) as arrays:
            return arrays["target_ids"], arrays["counts"]

    def _export_path(self, size: int) -> Path:
        first = size == self.config.export.vocab_sizes[0]
        name = self.config.export.name
        return self.out / (name if first else f"{name}-{size}")

    def _settings(self, folder: Path) -> str | None:
        path = folder / "settings.json"
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["hash"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # missing or damaged: training starts anew


def _answer(item: Conversation) -> Sequence[int]:
    """The last learnt run."""
    spans = item.spans()
    if not spans:
        return ()
    return item.tokens[spans[-1][0] : spans[-1][1]]


def _licence(source: str, licences: dict[str, str]) -> str:
    if source.startswith("Python "):
        return "PSF"
    if source == "bfcl-eval":
        return "Apache-2.0"
    if source.startswith("own"):
        return "Apache-2.0 (this project)"
    return licences.get(source, "permissive, see the package")


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {wanted!r}, but PyTorch sees no CUDA device here; use device: cpu")
    return torch.device(wanted)


def _hardware(device: torch.device, world: int) -> str:
    if device.type == "cuda":
        return f"{world} × {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores), torch {torch.__version__}"


def evaluate_drafter(
    config: TrainConfig,
    loaded: LoadedModel,
    directory: Path | None,
    prompts: Sequence[HeldOutPrompt],
    device: torch.device,
    reporter: Reporter,
    algorithm: Literal["eagle3", "ngram"] = "eagle3",
) -> dict[str, Any]:
    """Shape → table of acceptance. `directory`: the drafter; None with n-gram."""
    settings, dtype = config.evaluate, _DTYPES[config.dtype]
    drafter = None
    if algorithm == "eagle3":
        if directory is None:
            raise ConfigError("an EAGLE-3 evaluation needs the drafter's directory")
        checkpoint = load_drafter(directory, loaded.config)
        drafter = DrafterCheckpoint(checkpoint.config, checkpoint.weights(dtype))
    weights = loaded.weights(dtype)
    tables: dict[str, Any] = {}
    for name, steps, topk, nodes in settings.shapes:
        engine = Engine(
            loaded.config,
            loaded.tokenizer,
            weights,
            EngineConfig(
                dtype=config.dtype,
                device=str(device),
                kv_cache_tokens=settings.kv_cache_tokens,
                max_running_requests=settings.max_running,
                prefill_chunk=4096,
                speculation=SpeculationConfig(algorithm, num_steps=steps, eagle_topk=topk, num_draft_tokens=nodes),
            ),
            drafter=drafter,
        )
        with reporter.stage(f"evaluate {name}", len(prompts)):

            def advance(done: int, total: int, name: str = name) -> None:
                reporter.advance(done, f"evaluate: {name}, {done} of {total} prompts")

            started = time.monotonic()
            results = run_prompts(engine, prompts, settings.max_tokens, advance)
        tables[name] = summarise(results, steps, settings.bootstrap)
        for group, row in sorted(tables[name]["groups"].items()):
            if "/" not in group:
                figures = row["all"]
                reporter.log(
                    f"evaluate: {name}, {group}: {figures['acceptance_length']} [{figures['low']}, {figures['high']}] "
                    f"({figures['prompts']} prompts, {time.monotonic() - started:.0f} s)"
                )
        for label, value in tables[name]["means"].items():
            reporter.log(f"evaluate: {name}, {label}: {value}")
        del engine
    return tables


def evaluate_files(
    config: TrainConfig,
    target: str,
    directory: Path | None,
    held_out: Sequence[Path],
    out: Path,
    algorithm: Literal["eagle3", "ngram"],
) -> dict[str, Any]:
    """`breakeven train eval`: a drafter on held-out files; writes `evaluation.json` and `.md` into `out`."""
    device = _device(config.device)
    loaded = load_model(target)
    prompts = [prompt for path in held_out for prompt in read_held_out(path)]
    if config.evaluate.max_prompts is not None:
        prompts = random.Random(config.seed).sample(prompts, min(config.evaluate.max_prompts, len(prompts)))
    tables = evaluate_drafter(config, loaded, directory, prompts, device, Reporter(), algorithm)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "evaluation.json", tables)
    write_bytes(out / "evaluation.md", ("\n".join(table_lines(tables)) + "\n").encode())
    return tables
