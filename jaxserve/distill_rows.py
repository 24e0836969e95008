"""What a draft learns from: a text, or the target's own answers, in rows of ids."""

import asyncio
import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.calibration import open_tokenizer
from jaxserve.errors import UserError
from jaxserve.evaluate import read_text
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.questions import prompt_ids, read_questions, users_turn
from jaxserve.reporting import Reporter
from jaxserve.serving.engine import Engine
from jaxserve.serving.load import LowerLimits
from jaxserve.serving.request import MAX_STOP_LENGTH, GenerationRequest, InvalidRequest, SamplingParams
from jaxserve.serving.session import Session, check_same_tokens
from jaxserve.text import Tokenizer, encode_text

HELD_OUT = 8  # each 8th row of a kind is only looked at for the report
SAMPLED = 0.8  # the temperature of further answers: other than the greedy one, and not far from it
INVENTED = "invented"  # the kind of prompts that the target makes up
_PROMPT_TOKENS = 128  # of such a prompt, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A draft of which model, where to, from what: a text, or prompts that `artifact`, the compiled target, answers.

    Beside `prompts`, or without, it answers `invented` prompts that it makes up itself: sampled after what its chat
    template puts before a user's turn (Magpie, Xu et al. 2024). Those that are not held out it answers `samples` times
    more, at temperature SAMPLED.
    """

    model: str
    output: pathlib.Path
    text: pathlib.Path | None = None
    prompts: pathlib.Path | None = None
    invented: int = 0
    artifact: pathlib.Path | None = None
    answer_tokens: int = 64
    samples: int = 0
    length: int = 128


class Batch(NamedTuple):
    """Sequences packed one after the other: `tokens`, `positions` and `segments` [T]; the R positions whose
    distributions are compared, `rows`, each with a weight of 1 or 0."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    rows: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, wanted: np.ndarray, count: int) -> "Batch":
        """`ids` [S, T] with the positions `wanted` [S, T], at most `count` of each sequence."""
        seqs, length = ids.shape
        rows, weights = np.zeros((seqs, count), np.int32), np.zeros((seqs, count), np.float32)
        for number, flags in enumerate(wanted):
            found = np.flatnonzero(flags)[:count]
            rows[number, : len(found)], weights[number, : len(found)] = number * length + found, 1
        positions = np.tile(np.arange(length, dtype=np.int32), seqs)
        segments = np.repeat(np.arange(seqs, dtype=np.int32), length)
        return cls(ids.reshape(-1), positions, segments, rows.reshape(-1), weights.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences of T ids, padded at their ends; `wanted` [S, T] says after which positions the student is to say what
    the teacher says, and `kinds` what sort of text each is. The last `samples` rows hold further answers to prompts of
    rows before them which are not held out."""

    ids: np.ndarray
    wanted: np.ndarray
    kinds: tuple[str, ...]
    samples: int = 0

    def held_out(self) -> np.ndarray:
        """[S] bool: the rows that the report is about."""
        return np.append(held_out(self.kinds[: len(self.kinds) - self.samples]), np.zeros(self.samples, bool))

    def without_first(self) -> "Rows":
        """In each row the first position that was wanted no longer is."""
        later = np.logical_or.accumulate(self.wanted, axis=1)
        later[:, 1:], later[:, 0] = later[:, :-1].copy(), False
        return dataclasses.replace(self, wanted=self.wanted & later)

    def early(self) -> np.ndarray:
        """[S, T] bool: the positions before those that are wanted, mostly a prompt's, except the very first. Of each
        prompt once."""
        early = ~np.logical_or.accumulate(self.wanted, axis=1) & self.wanted.any(axis=1, keepdims=True)
        early[:, 0] = False
        early[len(early) - self.samples :] = False
        return early

    @property
    def most_wanted(self) -> int:
        return int(self.wanted.sum(axis=1).max())

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """These rows as one step sees them."""
        return Batch.of(self.ids[numbers], self.wanted[numbers], self.most_wanted)

    def save(self, path: pathlib.Path) -> None:
        np.savez(path, ids=self.ids, wanted=self.wanted, kinds=np.array(self.kinds), samples=self.samples)

    @classmethod
    def load(cls, path: pathlib.Path) -> "Rows":
        with np.load(path) as data:
            return cls(data["ids"], data["wanted"], tuple(data["kinds"].tolist()), int(data["samples"]))


def held_out(kinds: Sequence[str]) -> np.ndarray:
    """[S] bool: the first of each HELD_OUT rows of a kind."""
    seen = collections.Counter[str]()
    flags = list[bool]()
    for kind in kinds:
        seen[kind] += 1
        flags.append(seen[kind] % HELD_OUT == 1)
    return np.array(flags, bool)


def make_rows(options: Source, checkpoint: Checkpoint, report: Reporter) -> Rows:
    """UserError when there is no such text, or too little of it."""
    if not 2 <= options.length <= checkpoint.config.max_positions:
        raise UserError(f"--length {options.length} is not between 2 and {checkpoint.config.max_positions}")
    if options.invented < 0:
        raise UserError(f"--invented {options.invented} is less than 0")
    asked = options.prompts is not None or options.invented > 0
    if (options.text is None) != asked:
        raise UserError("say what to train on: either --text FILE, or --prompts FILE, --invented N or both")
    if options.text is not None and options.artifact is not None:
        raise UserError("--artifact answers prompts; with --text leave it out")
    if options.answer_tokens < 1:
        raise UserError(f"--answer-tokens {options.answer_tokens} is less than 1")
    if options.samples < 0 or (options.samples and not asked):
        raise UserError(f"--samples {options.samples}: give the number of further answers to each prompt")
    tokenizer = open_tokenizer(checkpoint)
    if options.text is not None:
        rows = text_rows(tokenizer, checkpoint.config.vocab, read_text(options.text), options.length)
    else:
        rows = _answer_rows(options, tokenizer, report)
    if not rows.kinds or rows.held_out().all():
        raise UserError(f"there is too little to train on: {len(rows.kinds)} sequences of {options.length} tokens")
    return rows


def text_rows(tokenizer: Tokenizer, vocab: int, text: str, length: int) -> Rows:
    """A text, tokenized whole, in rows of `length`; of all their positions the next token is wanted.
    UserError for tokens beyond the model's `vocab`."""
    ids = np.asarray(encode_text(tokenizer, text, vocab), np.int32)
    count = len(ids) // length
    return Rows(ids[: count * length].reshape(count, length), np.ones((count, length), bool), ("text",) * count)


def _answer_rows(options: Source, tokenizer: Tokenizer, report: Reporter) -> Rows:
    """The target's answers to the prompts, made by its engine."""
    if options.artifact is None:
        raise UserError("prompts need --artifact DIR, the compiled target, which answers them")
    questions = read_questions(options.prompts, 1, "--prompts") if options.prompts is not None else []
    session = Session(options.artifact, LowerLimits(), report.note)
    check_same_tokens(f"--artifact {options.artifact}", session.tokenizer, tokenizer)
    longest = session.limits.max_model_len - options.answer_tokens
    if longest < 1:
        most = session.limits.max_model_len - 1
        raise UserError(
            f"--answer-tokens {options.answer_tokens} is not between 1 and {most}, what {options.artifact} has room for"
        )
    with session.running() as engine:
        if options.invented:
            questions += _invented(options.invented, engine, session, report)
        once = _asked(questions, options.answer_tokens, session.tokenizer, longest)
        again = _again(once, options.samples)
        with report.stage("answers", str(options.artifact), len(once + again)) as stage:
            answers = asyncio.run(_answers(engine, once + again, stage.advance))
            stage.done(f"{sum(map(len, answers))} tokens in {len(answers)} answers to {len(once)} prompts")
    session.runner.close()
    prompts, kinds, _ = zip(*once, *again, strict=True) if once else ((), (), ())
    rows = answer_rows(prompts, answers, kinds, options.length, options.answer_tokens)
    return dataclasses.replace(rows, samples=len(again))


def _invented(count: int, engine: Engine, session: Session, report: Reporter) -> list[tuple[str, str]]:
    """What the target says a user says, each once, as questions; fewer than `count` where it repeats itself."""
    tokenizer, room = session.tokenizer, session.limits.max_model_len
    before, after = users_turn(tokenizer)
    after = after[:MAX_STOP_LENGTH]
    tokens = min(_PROMPT_TOKENS, room - len(before))
    if tokens < 1:
        raise UserError(f"--invented: the chat template fills the {room} tokens that the artifact has room for")
    # A turn need not end with an EOS: the model would go on, and say what it answers.
    ends = [token for token in tokenizer.encode(after, special=True)[:1] if token in tokenizer.special_ids]
    params = SamplingParams(tokens, stop_token_ids=tuple(ends), stop=(after,) if after and not ends else ())
    asked = [Asked(before, INVENTED, dataclasses.replace(params, seed=seed)) for seed in range(count)]
    with report.stage("prompts", "invented", count) as stage:
        texts = map(tokenizer.decode, asyncio.run(_answers(engine, asked, stage.advance)))
        turns = [(text.partition(after)[0] if after else text).strip() for text in texts]
        found = list(dict.fromkeys(turn for turn in turns if turn))
        stage.done(f"{len(found)} different ones")
    return [(INVENTED, turn) for turn in found]


def _asked(questions: Sequence[tuple[str, str]], tokens: int, tokenizer: Tokenizer, longest: int) -> list["Asked"]:
    """Each question once, greedily. Invented ones that come to a prompt of others are left out: the report is about
    prompts that were not learned from."""
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0)
    asked, known = list[Asked](), set[tuple[int, ...]]()
    for kind, turn in questions:
        prompt = prompt_ids(tokenizer, turn, longest)
        if kind != INVENTED or prompt not in known:
            asked.append(Asked(prompt, kind, greedy))
        known.add(prompt)
    return asked


def _again(asked: Sequence["Asked"], samples: int) -> list["Asked"]:
    """Those that are not held out `samples` times more, sampled."""
    learned = [each for each, held in zip(asked, held_out([each.kind for each in asked]), strict=True) if not held]
    return [
        each._replace(params=dataclasses.replace(each.params, temperature=SAMPLED, seed=seed))
        for seed in range(samples)
        for each in learned
    ]


class Asked(NamedTuple):
    """A prompt, what sort it is of, and how it is to be answered."""

    prompt: tuple[int, ...]
    kind: str
    params: SamplingParams


async def _answers(engine: Engine, asked: Sequence[Asked], advance: Any) -> list[list[int]]:
    async def one(number: int, each: Asked) -> list[int]:
        ids: list[int] = []
        try:
            async for output in engine.submit(GenerationRequest(f"distill-{number}", each.prompt, each.params)):
                if output.error:
                    raise UserError(f"prompt {number}: {output.error}")
                ids += output.token_ids
        except InvalidRequest as error:
            raise UserError(f"prompt {number}: {error}") from None
        advance()
        return ids

    return await asyncio.gather(*(one(number, each) for number, each in enumerate(asked)))


def answer_rows(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], kinds: tuple[str, ...], length: int, most: int
) -> Rows:
    """Prompts with their answers, each the last `length` ids; every token of an answer is wanted, at most `most`."""
    ids, wanted = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = [*prompt, *answer][-length:]
        answered = min(len(answer), most, len(whole) - 1)
        ids[number, : len(whole)] = whole
        wanted[number, len(whole) - answered - 1 : len(whole) - 1] = True
    return Rows(ids, wanted, kinds)
