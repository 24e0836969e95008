"""Texts whose tokens a model may not know."""

import pytest

from jaxserve.errors import UserError
from jaxserve.evaluate import text_windows
from jaxserve.reporting import Reporter
from jaxserve.text import Tokenizer, encode_text


def test_ids_beyond_the_vocabulary(stories: Tokenizer):
    text = "Once upon a time"
    ids = stories.encode(text)
    assert encode_text(stories, text, max(ids) + 1) == ids
    assert encode_text(stories, "", 1) == []
    with pytest.raises(UserError, match=f"token id {max(ids)} "):
        encode_text(stories, text, max(ids))
    wrong = next(token for token in ids if token >= 300)
    message = (
        rf"token id {wrong} \('{stories.token_text(wrong)}'\) of the text, and the model's vocabulary has 300: take"
    )
    with pytest.raises(UserError, match=message):
        encode_text(stories, text, 300)
    with pytest.raises(UserError, match=message):
        text_windows(stories, 300, text, 4, 1, Reporter(quiet=True))
