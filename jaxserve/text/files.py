"""Tokenizers on disk: the files of a Hugging Face directory, read, written and copied."""

import json
import pathlib
import shutil
import typing

from jaxserve.errors import UserError
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.pretokenizers import PRE_TOKENIZERS, byte_level_bpe
from jaxserve.text.tokenizer import Backend, SpecialTokens, Tokenizer

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMPANIONS = (
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)

PathLike = str | pathlib.Path


def has_tokenizer(directory: PathLike) -> bool:
    """Whether the directory holds a vocabulary that `load_tokenizer` would read."""
    return any((pathlib.Path(directory) / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(directory: PathLike) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Vocabulary: tokenizer.json, else tokenizer.model (sentencepiece), else vocab.json with merges.txt (GPT-2's form).
    tokenizer_config.json, special_tokens_map.json and chat_template.jinja are read where present. UserError names the
    file that is missing or broken.
    """
    folder = pathlib.Path(directory)
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    backend, defaults = _load_backend(folder, config)
    names = {role: _token_text(config.get(f"{role}_token", default)) for role, default in defaults.items()}
    tokens = SpecialTokens(**names)
    prefix, suffix = backend.added_around()
    return Tokenizer(
        backend,
        tokens,
        prefix_ids=_override(prefix, config.get("add_bos_token"), tokens.bos, backend),
        suffix_ids=_override(suffix, config.get("add_eos_token"), tokens.eos, backend),
        chat_template=_load_template(folder, config, tokens),
    )


def save_tokenizer(tokenizer: Tokenizer, directory: PathLike) -> None:
    """Writes the tokenizer so that `load_tokenizer` gives one that behaves the same."""
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config = tokenizer.backend.save(folder)
    for role in ("bos", "eos", "unk", "pad"):
        config[f"{role}_token"] = getattr(tokenizer.tokens, role)
    for name, ids, own in (
        ("add_bos_token", tokenizer.prefix_ids, tokenizer.bos_id),
        ("add_eos_token", tokenizer.suffix_ids, tokenizer.eos_id),
    ):
        if ids in ((), (own,)):  # anything else is the post-processor's doing, which tokenizer.json holds
            config[name] = bool(ids)
    template = tokenizer.chat_template
    if template is not None:
        (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8", newline="")
        if template.tool_source is not None:
            config["chat_template"] = [
                {"name": "default", "template": template.source},
                {"name": "tool_use", "template": template.tool_source},
            ]
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def copy_tokenizer_files(source: PathLike, target: PathLike) -> list[str]:
    """Copies the tokenizer's own files unchanged and returns their names; UserError if there is no vocabulary."""
    origin, folder = pathlib.Path(source), pathlib.Path(target)
    if not has_tokenizer(origin):
        raise UserError(_missing(origin))
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*_VOCABULARIES, *_COMPANIONS) if (origin / name).is_file()]
    for name in names:
        shutil.copyfile(origin / name, folder / name)
    return names


def _missing(folder: pathlib.Path) -> str:
    return f"{folder}: no tokenizer here; expected one of {', '.join(_VOCABULARIES)}"


def _load_backend(folder: pathlib.Path, config: dict[str, typing.Any]) -> tuple[Backend, dict[str, str | None]]:
    """The backend for the vocabulary found, and the special tokens it implies where the configuration names none."""
    from jaxserve.text.fast import FastBackend

    none: dict[str, str | None] = dict.fromkeys(("bos", "eos", "unk", "pad"))
    if (folder / "tokenizer.json").is_file():
        return FastBackend.from_file(folder / "tokenizer.json"), none
    if (folder / "tokenizer.model").is_file():
        from jaxserve.text.spm import SentencePieceBackend

        path = folder / "tokenizer.model"
        sentencepiece = SentencePieceBackend(path.read_bytes(), _added_tokens(folder, config), str(path))
        return sentencepiece, sentencepiece.roles()
    if (folder / "vocab.json").is_file():
        return _load_gpt2_files(folder, config), none
    raise UserError(_missing(folder))


def _load_gpt2_files(folder: pathlib.Path, config: dict[str, typing.Any]) -> Backend:
    """Byte-level BPE from vocab.json and merges.txt, as older checkpoints (GPT-2, OPT) have it."""
    import tokenizers

    from jaxserve.text.fast import FastBackend

    if not (folder / "merges.txt").is_file():
        raise UserError(f"{folder}: vocab.json without merges.txt")
    named_class = config.get("tokenizer_class", "GPT2Tokenizer")
    if named_class not in ("GPT2Tokenizer", "GPT2TokenizerFast"):  # others share the form but cut text differently
        raise UserError(
            f"{folder}: a {named_class} needs a tokenizer.json; vocab.json with merges.txt will do for GPT2Tokenizer"
        )
    vocab = _read_json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not all(len(pair) == 2 for pair in pairs):
        raise UserError(f"{folder / 'merges.txt'}: each line must be two tokens")
    backend = byte_level_bpe(vocab, [(first, second) for first, second in pairs], PRE_TOKENIZERS["gpt-2"])
    named = {_token_text(config.get(f"{role}_token")) for role in ("bos", "eos", "unk", "pad")}
    special = sorted({token for token in named if token in vocab}, key=lambda token: vocab[token])
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    return FastBackend(backend)


def _added_tokens(folder: pathlib.Path, config: dict[str, typing.Any]) -> dict[int, tuple[str, bool]]:
    """Tokens added to a sentencepiece model: id -> (text, special)."""
    added = {int(token): (text, True) for text, token in _read_json(folder / "added_tokens.json").items()}
    for token, entry in config.get("added_tokens_decoder", {}).items():
        added[int(token)] = (entry["content"], bool(entry.get("special", False)))
    return added


def _override(found: list[int], add: typing.Any, token: str | None, backend: Backend) -> list[int]:
    """Ids around a prompt: what the configuration says about BOS or EOS, else what the tokenizer does by itself."""
    token_id = None if token is None else backend.token_id(token)
    if not isinstance(add, bool) or (add and token_id is None):
        return found
    return [token_id] if add and token_id is not None else []


def _load_template(folder: pathlib.Path, config: dict[str, typing.Any], tokens: SpecialTokens) -> ChatTemplate | None:
    """The chat template: chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json."""
    listed = config.get("chat_template")
    named = {"default": listed} if isinstance(listed, str) else {}
    if isinstance(listed, list):
        named = {entry["name"]: entry["template"] for entry in listed}
    source = named.get("default", _read_json(folder / "chat_template.json").get("chat_template"))
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        source = jinja.read_bytes().decode()
    if source is None:
        return None
    return ChatTemplate(source, tool_source=named.get("tool_use"), special_tokens=tokens.names())


def _token_text(entry: typing.Any) -> str | None:
    """Text of a special token as configurations spell it: a string, or an object with its content."""
    return entry.get("content") if isinstance(entry, dict) else entry


def _read_json(path: pathlib.Path) -> dict[str, typing.Any]:
    """Content of a JSON object file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
