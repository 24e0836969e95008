"""Chat templates: the features checkpoints use, the sandbox, and errors that can be shown to a client."""

import datetime
import typing

import pytest

from jaxserve.errors import UserError
from jaxserve.text import ChatTemplate, ChatTemplateError

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: typing.Any = USER, **variables: typing.Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages, **variables)


class TestFeatures:
    def test_names(self):
        source = "{{ bos_token }}{{ messages[0].content }}{{ messages[0]['role'] }}{{ eos_token }}{{ pad_token }}"
        assert render(source) == "<s>hiuser</s>"

    def test_generation_prompt(self):
        source = "{% if add_generation_prompt %}go{% endif %}"
        assert render(source) == "go"
        assert render(source, add_generation_prompt=False) == ""

    def test_extra_variables(self):
        assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
        assert render("{{ documents is none }}") == "True"

    def test_blocks_are_trimmed(self):
        assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"

    def test_loop_controls(self):
        assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i == 3 %}{% break %}"
                      "{% endif %}{% endfor %}") == "023"  # fmt: skip

    def test_tojson_is_plain_json(self):
        tools = [{"z": "<é'&>", "a": None}]
        assert render("{{ tools | tojson }}", tools=tools) == '[{"z": "<é\'&>", "a": null}]'
        assert render("{{ tools | tojson(indent=1, sort_keys=true) }}", tools=[{"b": 1, "a": 2}]) == (
            '[\n {\n  "a": 2,\n  "b": 1\n }\n]'
        )

    def test_strftime_now(self):
        assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + late) for late in (-1, 0)}

    def test_generation_block(self):
        source = "{% generation %}{% set x = 1 %}[{{ messages[0].content }}]{% endgeneration %}{{ x }}"
        assert render(source) == "[hi]"

    def test_namespace_may_change(self):
        source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
        assert render(source) == "1"

    def test_tool_template(self):
        template = ChatTemplate("plain", tool_source="with {{ tools | length }}")
        assert template.render(USER) == "plain"
        assert template.render(USER, tools=[{}, {}]) == "with 2"

    def test_messages_are_not_escaped(self):
        assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>{{ 1 }}</b>"}]) == "<b>{{ 1 }}</b>"


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.__class__ }}{{ messages.__class__.__base__ }}",
            "{{ raise_exception.__globals__['sys'] }}",
            "{{ strftime_now['__globals__'].x }}",
            "{{ messages.append({}) }}",
            "{{ messages.clear() }}",
            "{{ messages[0].update({'role': 'system'}) }}",
            "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
            "{% set x = ({}|attr('__class__')) %}{{ x.__mro__ }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}",
        ],
    )
    def test_escapes_are_refused(self, source: str):
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(ChatTemplateError):
            render(source, messages)
        assert messages == [{"role": "user", "content": "hi"}]

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'a' * 1000000000 }}",
            "{{ 1000000000 * 'a' }}",
            "{{ [0] * 1000000000 }}",
            "{{ 10 ** 100000000 }}",
            "{% for i in range(1000000000) %}x{% endfor %}",
            "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ lipsum(1000000) }}",
        ],
    )
    def test_pathological_templates_end(self, source: str):
        with pytest.raises(ChatTemplateError):
            render(source, [{"role": "user", "content": "x" * 1000}])


class TestErrors:
    def test_raise_exception_gives_its_message(self):
        with pytest.raises(ChatTemplateError) as error:
            render("{{ raise_exception('roles must alternate') }}")
        assert error.value.message == "roles must alternate" == str(error.value)
        assert isinstance(error.value, UserError)

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("{{ messages[0].nothing.deeper }}", "nothing"),
            ("{{ unknown_function() }}", "unknown_function"),
            ("{% for %}", "line 1 does not compile"),
            ("a\n{{ messages | nofilter }}", "line 2 does not compile"),
            ("{{ messages[0].content + 1 }}", "TypeError"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages[0].content.index('z') }}", "ValueError"),
            ("{{ raise_exception('') }}", "TemplateError"),
        ],
    )
    def test_failures_say_what_went_wrong(self, source: str, words: str):
        with pytest.raises(ChatTemplateError, match=words):
            render(source)

    def test_content_of_the_wrong_type(self):
        with pytest.raises(ChatTemplateError, match="TypeError"):
            render("{{ 'user: ' + messages[0]['content'] }}", [{"role": "user", "content": [{"type": "text"}]}])
