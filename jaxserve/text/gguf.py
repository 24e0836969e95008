"""Tokenizers rebuilt from the metadata of a GGUF file.

The file carries the vocabulary, the merges or scores, and the name of a pre-tokenizer; the rest is convention, written
down in pretokenizers.py and below. This module takes the metadata as a plain dict and knows nothing of the file.
"""

import typing

from jaxserve.errors import UserError
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.pretokenizers import byte_level_bpe, find_pre_tokenizer
from jaxserve.text.tokenizer import SpecialTokens, Tokenizer

# Token types of the format; sentencepiece numbers its pieces the same way.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

Metadata = typing.Mapping[str, typing.Any]


def gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """Tokenizer from a GGUF file's metadata: key -> str, number, bool or sequence of these.

    Supports `tokenizer.ggml.model` "gpt2" (byte-level BPE) and "llama" (sentencepiece BPE with scores). UserError names
    the key when something needed is missing, inconsistent or not supported.
    """
    model = _required(metadata, "model")
    builders = {"gpt2": _build_bpe, "llama": _build_sentencepiece}
    if model not in builders:
        raise UserError(f"tokenizer.ggml.model is {model!r}; supported: {', '.join(builders)}")
    return builders[model](metadata)


def _build_bpe(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE: control tokens become special tokens, user defined ones plain added tokens."""
    import tokenizers

    from jaxserve.text.fast import FastBackend

    tokens, kinds = _tokens(metadata)
    pre = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre") or "default")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise UserError(f"tokenizer.ggml.tokens has {twice!r} twice")
    merges = [_split_merge(merge) for merge in _required(metadata, "merges")]
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    backend = byte_level_bpe(vocab, merges, pre, prefix_space=prefix_space)
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, kind_of in zip(tokens, kinds, strict=True) if kind_of == kind]
        entries = [tokenizers.AddedToken(token, normalized=False, special=special) for token in added]
        if special:
            backend.add_special_tokens(entries)
        else:
            backend.add_tokens(entries)
    return _finish(FastBackend(backend), metadata, tokens, adds_bos=pre.adds_bos)


def _build_sentencepiece(metadata: Metadata) -> Tokenizer:
    """A sentencepiece model written from the pieces and scores: the library itself then does the encoding."""
    from jaxserve.text.spm import SentencePieceBackend, build_model

    tokens, kinds = _tokens(metadata)
    scores = list(metadata.get("tokenizer.ggml.scores", ()))
    if len(scores) != len(tokens):
        raise UserError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unk = _token_id(metadata, "unknown", tokens, default=0)
    if unk is not None and _UNKNOWN not in kinds:
        kinds[unk] = _UNKNOWN
    # User defined pieces are stored with plain spaces, while the model matches them after escaping spaces.
    pieces = [
        token.replace(" ", "▁") if kind == _USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    model = build_model(
        pieces,
        scores,
        kinds,
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", b"")),
        bos_id=_token_id(metadata, "bos", tokens, default=1),
        eos_id=_token_id(metadata, "eos", tokens, default=2),
        unk_id=unk,
        pad_id=_token_id(metadata, "padding", tokens),
    )
    backend = SentencePieceBackend(model, origin="tokenizer.ggml.tokens")
    return _finish(backend, metadata, pieces, adds_bos=True, bos=1, eos=2, unk=0)


def _finish(
    backend: typing.Any,
    metadata: Metadata,
    tokens: list[str],
    *,
    adds_bos: bool,
    bos: int | None = None,
    eos: int | None = None,
    unk: int | None = None,
) -> Tokenizer:
    """The tokenizer with the roles, the BOS rule and the chat template that the metadata give; bos.. are defaults."""
    ids = {
        "bos": _token_id(metadata, "bos", tokens, bos),
        "eos": _token_id(metadata, "eos", tokens, eos),
        "unk": _token_id(metadata, "unknown", tokens, unk),
        "pad": _token_id(metadata, "padding", tokens),
    }
    roles = SpecialTokens(**{role: None if token is None else tokens[token] for role, token in ids.items()})
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    source = metadata.get("tokenizer.chat_template")
    template = None
    if source is not None:
        tool_source = metadata.get("tokenizer.chat_template.tool_use")
        template = ChatTemplate(source, tool_source=tool_source, special_tokens=roles.names())
    return Tokenizer(
        backend,
        roles,
        prefix_ids=[ids["bos"]] if add_bos and ids["bos"] is not None else [],
        suffix_ids=[ids["eos"]] if add_eos and ids["eos"] is not None else [],
        chat_template=template,
    )


def _required(metadata: Metadata, name: str) -> typing.Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise UserError(f"the metadata has no {key}, which a tokenizer needs")
    return metadata[key]


def _tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Tokens and their types (all normal if the file gives none)."""
    tokens = list(_required(metadata, "tokens"))
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(kinds) != len(tokens):
        raise UserError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    return tokens, kinds


def _split_merge(merge: str) -> tuple[str, str]:
    """The two sides of a merge."""
    sides = merge.split(" ")
    if len(sides) != 2 or not all(sides):
        raise UserError(f"tokenizer.ggml.merges has {merge!r}, which is not two tokens")
    return sides[0], sides[1]


def _token_id(metadata: Metadata, role: str, tokens: list[str], default: int | None = None) -> int | None:
    """Id of the token with that role, if the file names one (or the default is a token)."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return default if default is not None and default < len(tokens) else None
    token = int(metadata[key])
    if not 0 <= token < len(tokens):
        raise UserError(f"{key} is {token}, outside the vocabulary of {len(tokens)} tokens")
    return token
