"""Text in and out: tokenizers, chat templates, streaming detokenization and stop strings.

Importing this package is cheap: the tokenizer libraries and Jinja are imported when the first tokenizer is loaded and
the first chat is rendered, not before.
"""

from jaxserve.text.chat import ChatTemplate, ChatTemplateError
from jaxserve.text.files import copy_tokenizer_files, has_tokenizer, load_tokenizer, save_tokenizer
from jaxserve.text.gguf import gguf_tokenizer
from jaxserve.text.stream import StopScanner, StreamDecoder
from jaxserve.text.tokenizer import Tokenizer, encode_text

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "StopScanner",
    "StreamDecoder",
    "Tokenizer",
    "copy_tokenizer_files",
    "encode_text",
    "gguf_tokenizer",
    "has_tokenizer",
    "load_tokenizer",
    "save_tokenizer",
]
