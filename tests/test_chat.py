"""Chat templates: where they are found, and that they render as transformers renders them."""

import json
from datetime import datetime

import pytest
from vocabularies import CHAT_TEMPLATE, write_byte_level, write_config

from moebatch.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from moebatch.errors import ModelError, UsageError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {%- endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
MIXTRAL = """{{ bos_token }}{% for m in messages %}
  {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate') }}
  {% endif %}
  {%- if m['role'] == 'user' %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}
  {%- else %}{{ ' ' + m['content'] + eos_token }}{% endif %}
{% endfor %}"""
FEATURES = """{% set ns = namespace(n=0) %}
{% macro show(x) %}<{{ x | tojson }}|{{ x | tojson(indent=2) }}>{% endmacro %}
{% for m in messages %}
  {% if loop.index0 == 3 %}{% break %}{% endif %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
  {% set ns.n = ns.n + 1 %}
  {% generation %}{{ show(m) }}{% endgeneration %}

{% endfor %}
{{ ns.n }} {{ tools is none }} {{ documents is none }} {{ unknown is defined }}
{{ {'b': 1, 'a': '<&>é'} | tojson(sort_keys=true) }} {{ enable_thinking | default('unsaid') }}
    {{ strftime_now('%Y') }} {{ dict(a=1) }}
"""
CHATS = [
    [{"role": "user", "content": "Hi <there> & 'you' é 😀"}],
    [
        {"role": "user", "content": "  a\n\nb  "},
        {"role": "assistant", "content": "{{ not a template }}"},
        {"role": "user", "content": "c", "name": "d"},
    ],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_byte_level(tmp_path_factory.mktemp("model")))


def outcome(render):
    """What comes of rendering: the text, or that the template refused."""
    try:
        return render()
    except Exception as error:
        return f"refused: {error}"


@pytest.mark.parametrize("source", [CHATML, MIXTRAL, FEATURES, CHAT_TEMPLATE])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_templates_render_as_in_transformers(theirs, source, chat, kwargs):
    template = ChatTemplate(source, special_tokens=TOKENS, name="t")
    expected = outcome(
        lambda: theirs.apply_chat_template(
            chat, chat_template=source, tokenize=False, add_generation_prompt=True, **kwargs
        )
    )
    assert outcome(lambda: template.render(chat, kwargs=kwargs)) == expected


def test_a_refusal_is_one_line():
    template = ChatTemplate(
        "{{ raise_exception('no\nsystem message') }}", special_tokens=TOKENS, name="t"
    )
    with pytest.raises(ChatTemplateError, match=r"\Ano system message\Z"):
        template.render([])


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}"]
)
def test_templates_run_in_a_sandbox_and_may_fail(source):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, special_tokens=TOKENS, name="t").render(messages)
    assert len(messages) == 1


def test_templates_know_the_date():
    template = ChatTemplate("{{ strftime_now('%Y') }}", special_tokens={}, name="t")
    assert int(template.render([])) in (datetime.now().year, datetime.now().year - 1)


def test_where_templates_are_found(tmp_path):
    assert load_chat_template(tmp_path) is None
    write_config(tmp_path, chat_template="plain {{ bos_token }}")
    assert load_chat_template(tmp_path).render([]) == "plain <s>"
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    write_config(tmp_path, chat_template=named, bos_token={"content": "<B>"})
    assert load_chat_template(tmp_path).render([]) == "d"
    assert load_chat_template(tmp_path, override="rag").render([]) == "r"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert load_chat_template(tmp_path).render([]) == "file <B>"
    (tmp_path / "mine.txt").write_text("mine")
    assert load_chat_template(tmp_path, override=str(tmp_path / "mine.txt")).render([]) == "mine"
    with pytest.raises(UsageError) as caught:
        load_chat_template(tmp_path, override="none")
    assert "default, rag" in caught.value.hint


def test_only_named_templates_without_a_default_is_no_template(tmp_path):
    write_config(tmp_path, chat_template=[{"name": "rag", "template": "r"}])
    assert load_chat_template(tmp_path) is None


@pytest.mark.parametrize("source", ["{% if %}", "{% for m in messages %}", "{{ x | nofilter }}"])
def test_a_broken_template_is_a_model_error(tmp_path, source):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ModelError, match="not a valid template") as caught:
        load_chat_template(tmp_path)
    assert caught.value.exit_code == 7
    assert "\n" not in str(caught.value)


def test_the_fingerprint_is_the_sources():
    one, same = (ChatTemplate("a", special_tokens={}, name=name) for name in "xy")
    other = ChatTemplate("b", special_tokens={}, name="x")
    assert one.fingerprint == same.fingerprint != other.fingerprint
