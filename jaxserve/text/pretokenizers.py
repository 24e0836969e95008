"""Pre-tokenizers of byte-level BPE models, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

A pre-tokenizer cuts a text into words before merging. It is a list of patterns, each applied to what the ones before
left whole; matches and the gaps between them become pieces. The patterns are those of the models' own tokenizer.json.
"""

import dataclasses
import typing

from jaxserve.errors import UserError

if typing.TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _llama3_like(digits: str) -> str:
    """The pattern of Llama 3 and its relatives; they differ in how digits group."""
    return _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES


def _cased(digits: str, contraction: str) -> str:
    """The pattern of GPT-4o and Tekken: words also break where lower case turns into upper case."""
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{word}{_UPPER}*{_LOWER}+{contraction}|{word}{_UPPER}+{_LOWER}*{contraction}|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        + _SPACES
    )


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How a family of byte-level BPE models prepares text.

    patterns: regular expressions, applied one after the other. whole_words: a word that is a token is taken as it is,
    before any merging. nfc: text is normalized to composed form first. adds_bos: BOS when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact", "codeshell"): PreTokenizer((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3"): PreTokenizer((_llama3_like(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): PreTokenizer((_llama3_like(r"\p{N}{1,3}"),)),
    ("qwen2", "deepseek-r1-qwen"): PreTokenizer((_llama3_like(r"\p{N}"),), nfc=True),
    ("gpt-4o", "llama4"): PreTokenizer((_cased(r"\p{N}{1,3}", _CONTRACTION + "?"),)),
    ("tekken",): PreTokenizer((_cased(r"\p{N}", ""),), whole_words=True, adds_bos=True),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3",): PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        )
    ),
    ("default",): PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _BY_NAMES.items() for name in names}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name; UserError that lists the names there are."""
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UserError(f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); supported: {supported}")
    return PRE_TOKENIZERS[name]


def byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    pre: PreTokenizer,
    *,
    prefix_space: bool = False,
) -> "tokenizers.Tokenizer":
    """A byte-level BPE tokenizer of the `tokenizers` library; UserError when the merges do not fit the vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    for first, second in merges:
        if not (first in vocab and second in vocab and first + second in vocab):
            raise UserError(f"merge {first!r} + {second!r} uses or makes a token that is not in the vocabulary")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    # The library has GPT-2's pattern built in, which is faster than the same one through its regex engine.
    plain_last = pre.patterns[-1] == _GPT2
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in (pre.patterns[:-1] if plain_last else pre.patterns)
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=plain_last))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend
